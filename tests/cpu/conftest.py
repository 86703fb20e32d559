"""Settings of the tests that use torch on the CPU."""

from __future__ import annotations

import os

# Kernels run in Triton's interpreter here; Triton reads this when it is imported. Compiled checks start processes
# without it.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One intra-op thread, as in the workers: results are compared bit for bit."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Kernels of the test run in the corrected interpreter."""
    from tessera_rt.testing.interpreter import install

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1")
    install()
