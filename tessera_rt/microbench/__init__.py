"""Microbenchmarks: how communication and compute share a device, and what grouped products and transports reach.

``overlap(comm_fn, comp_fn)`` measures any two functions; ``tessera bench`` runs the built-in ones at released sizes.
"""

from tessera_rt.microbench.overlap import BudgetedLaunch, OverlapResult, OverlapRow, overlap

__all__ = ["BudgetedLaunch", "OverlapResult", "OverlapRow", "overlap"]
