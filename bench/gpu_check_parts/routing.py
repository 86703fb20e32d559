"""The routing kernels alone: small enough to run under a sanitizer."""

from __future__ import annotations

from gpu_check_parts.check import Check
from gpu_check_parts.kernels import RULES, check_routing


def run(check: Check) -> None:
    for name, rule in RULES.items():
        with check.case(f"routing, {name}"):
            check_routing(check, rule)
