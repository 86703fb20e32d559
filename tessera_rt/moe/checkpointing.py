"""Activation checkpointing that keeps the routing decision.

A recomputed forward that decides again may decide differently (a tie, another rounding), and then differentiates
another function than the one whose output was used. Pass ``save_routing`` to torch's checkpointing:

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=save_routing)

Saved are expert ids and weights, [T, K] each; everything else is made again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tessera_rt.moe.router import ROUTING_DECISION


def save_routing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of forward and recomputation, as ``torch.utils.checkpoint``'s ``context_fn`` returns them."""
    forward, recomputation = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return forward, recomputation


def _policy(context: object, operator: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    save = operator is ROUTING_DECISION
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
