"""Settings of the tests that use torch on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One intra-op thread, as in the workers: results are compared bit for bit."""
    torch.set_num_threads(1)
