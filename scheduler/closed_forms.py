"""Step times known on paper, for checking the simulator.

All assume: every rank's whole forward of a micro-batch takes ``forward`` and its whole backward (inputs and weights)
``backward``, divided evenly over its virtual stages, and communication takes no time. Times in any unit.
"""

from __future__ import annotations


def gpipe_time(pp: int, microbatches: int, forward: float, backward: float) -> float:
    """GPipe: (m + pp - 1) (F + B) (Huang et al. 2019)."""
    return (microbatches + pp - 1) * (forward + backward)


def one_f_one_b_time(pp: int, microbatches: int, forward: float, backward: float) -> float:
    """1F1B: the same as GPipe, for any number of micro-batches; it only holds fewer of them in flight."""
    return gpipe_time(pp, microbatches, forward, backward)


def interleaved_time(pp: int, vpp: int, microbatches: int, forward: float, backward: float) -> float:
    """Interleaved 1F1B with ``vpp`` stages a rank, m >= pp: (m + (pp - 1) / vpp) (F + B) (Narayanan et al. 2021)."""
    return (microbatches + (pp - 1) / vpp) * (forward + backward)


def zb_h1_time(pp: int, vpp: int, microbatches: int, forward: float, inputs: float, weights: float) -> float:
    """ZB-H1 (``vpp`` 1) and interleaved zero bubble, m >= pp: m (F+I+W) + (pp-1)/vpp max(F, I, F+I-W).

    ``inputs``, ``weights``: the two parts of the backward. Qi et al. 2023 give the last term for W up to F and I.
    """
    return microbatches * (forward + inputs + weights) + (pp - 1) / vpp * max(
        forward, inputs, forward + inputs - weights
    )


def interleaved_bubble(pp: int, vpp: int, microbatches: int) -> float:
    """Idle share of the step: (pp - 1) / (pp - 1 + vpp m); 1F1B with vpp = 1."""
    return (pp - 1) / (pp - 1 + vpp * microbatches)
