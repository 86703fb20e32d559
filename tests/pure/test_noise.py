"""Routing noise: as uneven as asked for, no row lost; recorded counts are read for what they are."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_rt.costs import Workload
from tessera_rt.errors import ScheduleError
from tessera_rt.model_spec import ModelSpec
from tessera_rt.scheduler.noise import RoutingNoise, draw_rows, load_counts, moe_items
from tessera_rt.testing.costs import dense_model, moe_model

WORK = Workload(tokens=4096, context=4096, ep=8)


def model_with(experts: int, layers: int = 2) -> ModelSpec:
    model = moe_model(layers)
    return replace(
        model,
        layers=tuple(
            replace(layer, feed_forward=replace(layer.feed_forward, experts=experts, top_k=2)) for layer in model.layers
        ),
    )


@pytest.mark.parametrize("cv", [0.05, 0.1, 0.2, 0.5])
def test_lanes_vary_as_much_as_asked(cv: float) -> None:
    rows = draw_rows(model_with(64), WORK, RoutingNoise(lane_cv=cv), microbatches=300, replicas=8, seed=1)
    assert rows.compute.shape == (8, 2, 300, 8)
    assert rows.lane_cv == pytest.approx(cv, rel=0.03)
    assert rows.compute.sum(axis=3) == pytest.approx(8.0)  # every row arrives somewhere
    assert (rows.traffic == np.maximum(rows.compute, 1.0)).all()
    flat = draw_rows(model_with(64), WORK, RoutingNoise(lane_cv=cv, traffic=False), microbatches=3, replicas=1, seed=1)
    assert (flat.traffic == 1.0).all()


def test_ranks_are_drawn_as_their_experts_would_be() -> None:
    """Rows drawn per expert, the long way, have the same distribution over ranks."""
    experts, ep, concentration, n = 32, 8, 1.5, 4000
    rows = draw_rows(
        model_with(experts, 1), WORK, RoutingNoise(concentration=concentration), microbatches=n, replicas=1, seed=3
    ).compute[0, 0]
    rng = np.random.default_rng(4)
    total = WORK.tokens * 2 * ep
    popularity = rng.dirichlet(np.full(experts, concentration), n)
    slow = rng.multinomial(total, popularity).reshape(n, ep, experts // ep).sum(axis=2) * ep / total
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert np.quantile(rows, quantile) == pytest.approx(np.quantile(slow, quantile), rel=0.05, abs=0.01)
    assert rows.max(axis=1).mean() == pytest.approx(slow.max(axis=1).mean(), rel=0.02)


def test_popularity_may_hold_for_several_micro_batches() -> None:
    held = draw_rows(
        model_with(64), WORK, RoutingNoise(lane_cv=0.3, hold=4), microbatches=10, replicas=2, seed=1
    ).compute
    for start in (0, 4, 8):
        group = held[:, :, start : start + 4]
        assert np.ptp(group, axis=2).max() < 0.1  # random rows only
    assert np.ptp(held, axis=2).min() > 0.1


def test_the_seed_decides() -> None:
    def draw(seed: int) -> object:
        noise = RoutingNoise(lane_cv=0.2)
        return draw_rows(model_with(8), WORK, noise, microbatches=2, replicas=1, seed=seed).compute.tolist()

    assert draw(1) == draw(1) != draw(2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from(["json", "npz"]), st.booleans())
def test_recorded_counts_are_read(layers: int, microbatches: int, seed: int, suffix: str, groups: bool) -> None:
    model = model_with(16, layers)
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 99, ((2,) if groups else ()) + (layers, microbatches, 8, 16))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"counts.{suffix}")
        if suffix == "npz":
            np.savez(path, counts=counts)
        else:
            path.write_text(json.dumps({"counts": counts.tolist()}), encoding="utf-8")
        rows = load_counts(path, model, WORK, microbatches=microbatches)
    counts = counts if groups else counts[None]
    assert rows.layers == {item.label: i for i, item in enumerate(moe_items(model))}
    replica, layer, microbatch, rank = (int(rng.integers(n)) for n in rows.compute.shape)
    received = sum(
        int(counts[replica, layer, microbatch, source, e]) for source in range(8) for e in (2 * rank, 2 * rank + 1)
    )
    sent = int(counts[replica, layer, microbatch, rank].sum())
    assert rows.compute[replica, layer, microbatch, rank] == pytest.approx(received / (4096 * 2))
    assert rows.traffic[replica, layer, microbatch, rank] == pytest.approx(max(received, sent) / (4096 * 2))


def test_bad_counts_are_refused(tmp_path: Path) -> None:
    model = model_with(16)

    def read(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ScheduleError) as caught:
            load_counts(path, model, WORK, microbatches=2)
        return str(caught.value)

    assert "a .json or .npz file" in read("counts.txt", "{}")
    assert "entry counts" in read("counts.json", "{}")
    assert "entry counts" in read("cut.json", '{"counts": [')
    assert "MoE layers x micro-batches x ep x experts = 2 x 2 x 8 x 16" in read("flat.json", '{"counts": [1, 2]}')
    negative = np.zeros((2, 2, 8, 16), dtype=int)
    negative[0, 1, 2, 3] = -1
    assert "least -1" in read("negative.json", json.dumps({"counts": negative.tolist()}))
    assert "float64" in read("half.json", json.dumps({"counts": (negative + 0.5).tolist()}))
    rows = np.full((2, 2, 8, 16), 1)
    rows[1, 0] = 0
    rows[0, 1, 3] = WORK.tokens
    said = read("other.json", json.dumps({"counts": rows.tolist()}))
    most = WORK.tokens * 2
    assert (
        f"layer 0, micro-batch 1, rank 3 = '{16 * WORK.tokens} rows': must be at most" in said and f"= {most};" in said
    )
    assert "layer 1, micro-batch 0 = 'no rows': must be at least one" in said
    with pytest.raises(ScheduleError, match="entry counts"):
        load_counts(tmp_path / "nowhere.json", model, WORK, microbatches=2)


def test_impossible_noise_is_refused() -> None:
    def draw(model: ModelSpec, workload: Workload, noise: RoutingNoise) -> None:
        draw_rows(model, workload, noise, microbatches=1, replicas=1, seed=0)

    with pytest.raises(ScheduleError, match="exactly one of lane_cv and concentration"):
        RoutingNoise()
    with pytest.raises(ScheduleError, match=r"noise\.lane_cv = -0\.1"):
        RoutingNoise(lane_cv=-0.1)
    with pytest.raises(ScheduleError, match=r"noise\.hold"):
        RoutingNoise(lane_cv=0.1, hold=0)
    with pytest.raises(ScheduleError, match="random rows alone"):
        draw(model_with(64), WORK, RoutingNoise(lane_cv=0.001))
    with pytest.raises(ScheduleError, match="all rows on one rank"):
        draw(model_with(64), WORK, RoutingNoise(lane_cv=2.7))
    with pytest.raises(ScheduleError, match="MoE layers"):
        draw(dense_model(2), WORK, RoutingNoise(lane_cv=0.1))
    with pytest.raises(ScheduleError, match=r"ep = 1.*at least 2"):
        draw(model_with(64), replace(WORK, ep=1), RoutingNoise(lane_cv=0.1))
