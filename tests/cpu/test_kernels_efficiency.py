"""The analytic bounds against hand-computed numbers."""

from __future__ import annotations

import dataclasses

import pytest

from tessera_rt.kernels.config_table import KERNELS, Config
from tessera_rt.kernels.efficiency import PEAKS, Peak, bound_of, data_work, layer_load
from tessera_rt.kernels.shapes import SHAPES, ExpertShape
from tessera_rt.kernels.work import Work

SHAPE = ExpertShape(name="x", hidden=256, intermediate=128, experts=64, top_k=1)  # 8 experts of 1024 rows on a rank
CONFIG = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3)
PEAK = Peak("p", 1000.0, 1e9, 10)


def test_forward_by_hand() -> None:
    """8 x 8 row tiles, 2 column tiles, 10 SMs: 128 tiles in 13 rounds; nothing is computed in vain."""
    bound = bound_of("forward", SHAPE, CONFIG, PEAK, sms=10)
    assert bound.rows_per_expert == 1024 and bound.tile_efficiency == 1.0
    assert bound.wave_efficiency == pytest.approx(128 / 130)
    assert bound.compute_bound == pytest.approx(1000 * 128 / 130)
    assert bound.work.flops == 2 * 8192 * 256 * 128
    assert bound.work.bytes == 2 * (8192 * (128 + 256) + 8 * 256 * 128)
    assert bound.limited_by == "compute" and bound.flops == bound.compute_bound


def test_tiles_that_do_not_fit() -> None:
    wide = Config(block_m=256, block_n=192, block_k=64, warps=8, stages=3)
    bound = bound_of("forward", SHAPE, wide, PEAK, sms=7)
    assert bound.tile_efficiency == pytest.approx(256 / 384)
    assert bound.wave_efficiency == pytest.approx(64 / 70)
    assert bound.compute_bound == pytest.approx(700 * 256 / 384 * 64 / 70)


def test_a_gated_tile_has_twice_the_columns_and_wgrad_tiles_the_weight() -> None:
    gated = bound_of("forward_gate", SHAPE, CONFIG, PEAK, sms=10)
    assert gated.sizes == "N 256 K 256" and gated.wave_efficiency == pytest.approx(64 / 70)
    weights = bound_of("wgrad_accumulate", SHAPE, CONFIG, PEAK, sms=10, weight="down")
    assert weights.sizes == "N 256 K 128" and weights.wave_efficiency == pytest.approx(16 / 20)
    assert weights.work.bytes == 8192 * (256 + 128) * 2 + 8 * 256 * 128 * 8


def test_the_gradient_of_a_transposed_weight_is_tiled_as_it_is_stored() -> None:
    """[E, K, N] = [8, 256, 384]: 2 x 2 tiles of 128 x 256 of which 384 of 512 columns are wanted; else 3 x 1, all."""
    shape = dataclasses.replace(SHAPE, intermediate=192)
    config = dataclasses.replace(CONFIG, block_n=256)
    assert bound_of("wgrad_write", shape, config, PEAK, sms=10).tile_efficiency == 1.0
    stored = bound_of("wgrad_write", dataclasses.replace(shape, transposed=True), config, PEAK, sms=10)
    assert stored.tile_efficiency == pytest.approx(384 / 512) and stored.wave_efficiency == pytest.approx(32 / 40)


def test_loads_are_those_of_a_layer() -> None:
    biased = dataclasses.replace(SHAPE, bias=True)
    for shape, want in ((SHAPE, "gather"), (biased, "tma")):
        assert layer_load("gate_backward", shape) == layer_load("wgrad_write", shape, "down") == want
        assert layer_load("forward_gate", shape) == layer_load("wgrad_accumulate", shape) == "gather"
        assert layer_load("forward", shape) == layer_load("dgrad", shape) == "tma"


def test_slow_memory_is_the_limit() -> None:
    bound = bound_of("forward", SHAPE, CONFIG, Peak("p", 1e15, 1.0, 10), sms=10)
    assert bound.limited_by == "memory" and bound.flops == pytest.approx(bound.work.intensity)


def test_kernels_that_move_data_by_hand() -> None:
    """8192 tokens, one choice each: 8192 rows of 256 elements in bf16, 64 experts of which 8 are local."""
    work = data_work(SHAPE)
    assert work["gather_sum"] == Work(2 * 8192 * 256, 2 * 8192 * 256 * 2 + 8192 * 8)
    assert work["gather_sum_backward"].bytes == 3 * 8192 * 256 * 2 + 8192 * 12
    assert work["topk_forward"] == Work(8192 * 64 * 6, 8192 * 64 * 4 + 8192 * 8)
    assert work["topk_backward"].bytes - work["topk_forward"].bytes == 8192 * 64 * 4
    assert work["histogram"] == Work(0, 8192 * 4 + 128 * 64 * 4) and work["place"].bytes == 8192 * 12 + 128 * 64 * 4
    assert work["tile_scan"].bytes == (2 * 128 + 1) * 64 * 4 and work["offsets"].bytes == (64 + 64 + 1) * 4
    assert work["tile_table"].bytes == (8 + 64 + 8 + 1) * 4 and work["zero_tail"].bytes == 8 * 256 * 2
    assert work["bias_gradient"] == Work(8192 * 256, 8192 * 256 * 2 + 8 * 256 * 4)
    assert work["router_weight_gradient"] == Work(8192, 8192 * 12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_of_all_shapes_are_between_nothing_and_the_peak(kernel: str) -> None:
    for shape in SHAPES:
        for peak in PEAKS.values():
            bound = bound_of(kernel, shape, CONFIG, peak, sms=peak.sms)
            assert 0 < bound.flops <= peak.flops
            assert 0 < bound.tile_efficiency <= 1 and 0 < bound.wave_efficiency <= 1
            assert bound_of(kernel, shape, CONFIG, peak, sms=peak.sms - 16).flops < peak.flops
