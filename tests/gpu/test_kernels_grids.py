"""The SM budget on a CUDA device, read back from what programs write; interpreted: tests/cpu/test_kernels_budget.py."""

from __future__ import annotations

import pytest
import torch

from tessera_rt.kernels.budget import SmBudget
from tessera_rt.testing.kernel_grids import check_grids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(512, 384), (131, 77)], ids=["aligned", "any"])
def test_grids_and_bits(size: tuple[int, int], dtype: torch.dtype) -> None:
    hidden, intermediate = size
    check_grids(torch.device("cuda"), hidden=hidden, intermediate=intermediate, tokens=3000, dtype=dtype)


def test_products_of_the_library_have_the_same_values_beside_communication() -> None:
    x, weight = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = x @ weight
    with SmBudget(torch.cuda.get_device_properties(0).multi_processor_count, 20).library_gemms():
        torch.testing.assert_close(x @ weight, want)
