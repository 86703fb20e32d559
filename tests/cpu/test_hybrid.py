"""The hybrid model: weights that do not depend on the layout, its mixers against naive ones, and true gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tessera_rt.cost_sources.layer_shapes import task_linears
from tessera_rt.cost_sources.sizes import item_parameters
from tessera_rt.errors import PlanError, SpecError
from tessera_rt.model_spec import (
    Activation,
    Attention,
    AttentionKind,
    FeedForward,
    FeedForwardKind,
    LayerSpec,
    ModelSpec,
    Router,
)
from tessera_rt.models.attention import GatedDeltaNet, SoftmaxAttention, causal_conv, rotate
from tessera_rt.models.delta_rule import delta_rule_recurrent
from tessera_rt.models.hybrid import HybridModel
from tessera_rt.moe.steps import Chunk, ComputeStep, Placement, check_program, expert_name
from tessera_rt.split import GroupedLinear, SplitLinear
from tessera_rt.tasks import Pass, chunk_tasks
from tessera_rt.testing.reference import Part, ReferenceResult, reference_step

DELTA = Attention(kind=AttentionKind.GATED_DELTA_NET, heads=4, kv_heads=2, head_dim=4, v_dim=3, conv=4)
SOFTMAX = Attention(
    kind=AttentionKind.SOFTMAX, heads=4, kv_heads=2, head_dim=6, rope_dim=4, qk_norm=True, output_gate=True, bias=True
)
SLIDING = Attention(kind=AttentionKind.SLIDING, heads=2, kv_heads=1, head_dim=4, rope_dim=4, window=3)
NO_MIXER = Attention(kind=AttentionKind.NONE)
MOE = FeedForward(
    kind=FeedForwardKind.MOE,
    intermediate=5,
    experts=4,
    top_k=2,
    shared_intermediate=3,
    shared_gated=True,
    router=Router(aux_coefficient=0.1),
)
PLAIN_MOE = replace(MOE, shared_intermediate=0, shared_gated=False, router=Router(renormalize=False, scale=2.0))
DENSE = FeedForward(kind=FeedForwardKind.DENSE, intermediate=7, bias=True, activation=Activation.GEGLU)
NOTHING = FeedForward(kind=FeedForwardKind.NONE)
SPEC = ModelSpec(
    name="small",
    hidden=12,
    vocab=31,
    layers=(
        LayerSpec(attention=DELTA, feed_forward=MOE),
        LayerSpec(attention=SOFTMAX, feed_forward=DENSE),
        LayerSpec(attention=SLIDING, feed_forward=NOTHING),
        LayerSpec(attention=NO_MIXER, feed_forward=PLAIN_MOE),
    ),
)
F64 = Placement(dtype=torch.float64)


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(b: int, s: int, seed: int = 0, vocab: int = SPEC.vocab) -> Part:
    tokens = torch.randint(vocab, (b, s + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def cut(model: HybridModel, *cuts: int, placement: Placement = F64) -> list[Chunk]:
    """Chunks of the model, cut before the given items."""
    bounds = (0, *cuts, len(model.spec.items))
    return [model.build_chunk(model.spec.items[a:b], placement) for a, b in pairwise(bounds)]


def named_values(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    values = {}
    for info in (info for chunk in chunks for info in chunk.parameter_infos()):
        if info.experts is None:
            values[info.name] = info.parameter.detach()
        else:
            values |= {expert_name(info.name, e): info.parameter.detach()[i] for i, e in enumerate(info.experts)}
    return values


def assert_same(actual: ReferenceResult, expected: ReferenceResult, tolerance: float = 1e-11) -> None:
    for metric in ("loss", "aux_loss"):
        assert actual.total(metric) == pytest.approx(expected.total(metric), rel=tolerance, abs=1e-15)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        error = (actual.gradients[name] - gradient).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


# -- initial weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_do_not_depend_on_the_layout(tied: bool) -> None:
    model = HybridModel(replace(SPEC, tied=tied), seed=3)
    whole = named_values(cut(model))
    for cuts in ((1,), (2, 4), (1, 2, 3, 4, 5), (3, 3)):
        for ep in (1, 2, 4):
            parts: dict[str, Tensor] = {}
            for rank in range(ep):
                parts |= named_values(cut(model, *cuts, placement=replace(F64, ep_rank=rank, ep_size=ep)))
            assert parts.keys() == whole.keys()
            assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert torch.equal(whole["embed.weight"], whole["head.weight"]) == tied


def test_initial_weights_depend_on_seed_and_name_and_on_nothing_else() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = named_values(cut(HybridModel(SPEC, seed=3)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    again = named_values(cut(HybridModel(SPEC, seed=3), placement=Placement()))  # fp32 holds the same numbers
    assert all(torch.equal(first[name], again[name].double()) for name in first)
    other = named_values(cut(HybridModel(SPEC, seed=4)))
    drawn = [name for name in first if not torch.equal(first[name], other[name])]
    assert all("norm" in name or name.endswith(".bias") for name in first.keys() - set(drawn))
    values = [first[name].flatten()[:4].tolist() for name in drawn]
    assert len({tuple(v) for v in values}) == len(values)  # no two tensors start alike


@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_close_to_that_of_guessing(tied: bool) -> None:
    spec = replace(SPEC, tied=tied, hidden=64, vocab=257)
    chunks = cut(HybridModel(spec, seed=1), placement=Placement())
    loss = reference_step(chunks, [[batch(4, 32, vocab=257)]]).total("loss")
    assert abs(loss - math.log(257)) < 0.1


def test_parameter_infos_say_what_the_engine_needs() -> None:
    (chunk,) = cut(HybridModel(SPEC), placement=replace(F64, ep_rank=1, ep_size=2))
    infos = {info.name: info for info in chunk.parameter_infos()}
    assert len(infos) == len(list(chunk.parameters()))
    stacked = {name for name, info in infos.items() if info.experts is not None}
    assert stacked == {f"layers.{i}.feed_forward.experts.{w}" for i in (0, 3) for w in ("gate_up", "down")}
    assert all(infos[name].experts == range(2, 4) for name in stacked)
    assert {"embed.weight", "layers.1.attention.query.weight", "head.weight", "head.norm.weight"} <= infos.keys()
    undecayed = {name.rsplit(".", 1)[-1] for name, info in infos.items() if not info.decay}
    assert undecayed == {"weight", "bias", "decay_bias", "decay_log_rate"}
    assert all("norm" in n for n, info in infos.items() if not info.decay and n.endswith(".weight"))
    assert all(info.tied == "" for info in infos.values())


def test_parameters_and_split_weights_are_those_the_planner_counts() -> None:
    for item in SPEC.items:
        chunk = HybridModel(SPEC).build_chunk([item], F64)
        assert sum(p.numel() for p in chunk.parameters()) == item_parameters(SPEC, item)
        weights = [m.weight for m in chunk.modules() if isinstance(m, SplitLinear | GroupedLinear)]
        linears = [linear for linears in task_linears(SPEC, item).values() for linear in linears if linear.split]
        planned = sum(max(linear.experts, 1) * linear.n_in * linear.n_out for linear in linears)
        assert sum(weight.numel() for weight in weights) == planned


# -- mixers -----------------------------------------------------------------------------------------------------------


def filled(module: torch.nn.Module) -> torch.nn.Module:
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(double(*parameter.shape, seed=20 + i) * 0.5)
    return module


def naive_attention(mixer: SoftmaxAttention, x: Tensor, window: int) -> Tensor:
    """One query at a time, one head at a time."""
    spec, outputs = mixer.spec, []
    for sequence in mixer.norm(x):
        heads = []
        for h in range(spec.heads):
            own, shared = slice(h * spec.head_dim, (h + 1) * spec.head_dim), h // (spec.heads // spec.kv_heads)
            of_kv = slice(shared * spec.head_dim, (shared + 1) * spec.head_dim)
            q, k, v = mixer.query(sequence)[:, own], mixer.key(sequence)[:, of_kv], mixer.value(sequence)[:, of_kv]
            if mixer.query_norm is not None and mixer.key_norm is not None:
                q, k = mixer.query_norm(q), mixer.key_norm(k)
            q, k = naive_rotation(q, spec.rope_dim), naive_rotation(k, spec.rope_dim)
            rows = []
            for t in range(len(sequence)):
                seen = slice(max(0, t - window + 1), t + 1)
                rows.append(((k[seen] @ q[t]) / spec.head_dim**0.5).softmax(0) @ v[seen])
            heads.append(torch.stack(rows))
        mixed = torch.cat(heads, -1)
        if mixer.gate is not None:
            mixed = mixed * torch.sigmoid(mixer.gate(sequence))
        outputs.append(mixer.output(mixed))
    return torch.stack(outputs)


def naive_rotation(x: Tensor, dims: int) -> Tensor:
    """Pairs (i, i + dims / 2) of [s, head_dim] as complex numbers, turned by position * 10000^(-2 i / dims)."""
    pairs = torch.complex(x[:, : dims // 2], x[:, dims // 2 : dims])
    frequency = torch.tensor([10000.0 ** (-2 * i / dims) for i in range(dims // 2)], dtype=torch.float64)
    turned = pairs * torch.exp(1j * torch.arange(len(x)).unsqueeze(1) * frequency)
    return torch.cat([turned.real, turned.imag, x[:, dims:]], -1)


@pytest.mark.parametrize(
    "spec",
    [SOFTMAX, SLIDING, replace(SLIDING, window=1), replace(SOFTMAX, rope_dim=6, kv_heads=4, output_gate=False)],
    ids=["grouped, half rotary, norm, gate", "window 3", "window 1", "full rotary, no groups"],
)
def test_softmax_attention_equals_a_naive_one(spec: Attention) -> None:
    mixer = filled(SoftmaxAttention(12, spec, norm_eps=1e-6, rope_theta=10000.0, dtype=torch.float64))
    x = double(2, 7, 12).requires_grad_()
    window = spec.window if spec.kind is AttentionKind.SLIDING else 7
    actual, expected = mixer(x), naive_attention(mixer, x, window)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    tensors = [x, *mixer.parameters()]
    upstream = double(2, 7, 12, seed=1)
    for a, b in zip(
        torch.autograd.grad(actual, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_rotation_depends_on_distance_only() -> None:
    q, k = double(1, 1, 1, 8), double(1, 1, 1, 8, seed=1)
    turned_q, turned_k = (rotate(x.expand(1, 1, 9, 8), 8, 100.0)[0, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(9):
        torch.testing.assert_close(products.diagonal(distance), products[0, distance].expand(9 - distance))
    assert rotate(q, 0, 100.0) is q


def test_causal_convolution_equals_conv1d() -> None:
    x, weight = double(2, 9, 5), double(5, 4, seed=1)
    padded = functional.pad(x.transpose(1, 2), (3, 0))
    expected = functional.conv1d(padded, weight.unsqueeze(1), groups=5).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight), expected, rtol=1e-12, atol=1e-13)
    assert causal_conv(double(2, 0, 5), weight).shape == (2, 0, 5)


def test_gated_delta_net_equals_its_parts_by_the_recurrence() -> None:
    mixer, x = filled(GatedDeltaNet(12, DELTA, norm_eps=1e-6, dtype=torch.float64)), double(2, 70, 12)
    n = mixer.norm(x)
    taps = mixer.conv_weight.split([8, 8, 12])
    q, k, v = (
        functional.silu(causal_conv(projection(n), weight))
        for projection, weight in zip((mixer.query, mixer.key, mixer.value), taps, strict=True)
    )
    q, k = (z.view(2, 70, 2, 4) / (z.view(2, 70, 2, 4).square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    q, k = q[:, :, [0, 0, 1, 1]] / 2, k[:, :, [0, 0, 1, 1]]  # value heads 0, 1 share key head 0
    decay = -mixer.decay_log_rate.exp() * functional.softplus(mixer.decay(n) + mixer.decay_bias)
    mixed, _ = delta_rule_recurrent(q, k, v.view(2, 70, 4, 3), decay, torch.sigmoid(mixer.beta(n)))
    gated = mixer.value_norm(mixed) * functional.silu(mixer.gate(n).view(2, 70, 4, 3))
    torch.testing.assert_close(mixer(x), mixer.output(gated.flatten(2)), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("spec", [DELTA, SOFTMAX, SLIDING], ids=["delta", "softmax", "sliding"])
def test_mixers_are_causal_and_keep_sequences_apart(spec: Attention) -> None:
    mixer = filled(
        GatedDeltaNet(12, spec, norm_eps=1e-6, dtype=torch.float64)
        if spec is DELTA
        else SoftmaxAttention(12, spec, norm_eps=1e-6, rope_theta=1e4, dtype=torch.float64)
    )
    x = double(2, 9, 12)
    before = mixer(x)
    changed = x.clone()
    changed[0, 5:] += 1.0
    after = mixer(changed)
    torch.testing.assert_close(after[0, :5], before[0, :5], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(after[1], before[1], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(after[0, 5:], before[0, 5:])
    torch.testing.assert_close(mixer(x[1:]), before[1:], rtol=1e-12, atol=1e-13)


# -- the model as a whole ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_finite_gradient_that_is_not_zero(tied: bool) -> None:
    (chunk,) = cut(HybridModel(replace(SPEC, tied=tied), seed=1))
    result = reference_step([chunk], [[batch(3, 9)], [batch(2, 5, seed=1)]])
    assert result.gradients.keys() == named_values([chunk]).keys()
    for name, gradient in result.gradients.items():
        assert gradient.isfinite().all() and (gradient != 0).any(), name
    assert all(metric > 0 for terms in result.metrics for metric in terms.values())
    assert [terms.keys() for terms in result.metrics] == [{"loss", "aux_loss"}] * 2


def test_gradients_are_the_slopes_of_the_loss() -> None:
    chunks = cut(HybridModel(SPEC, seed=1), 3)
    data = [[batch(2, 6)], [batch(1, 4, seed=1)]]
    result = reference_step(chunks, data)
    for i, (name, value) in enumerate(named_values(chunks).items()):
        direction = functional.normalize(double(*value.shape, seed=i), dim=None)
        totals = []
        for step in (1e-5, -2e-5):
            value += step * direction
            moved = reference_step(chunks, data)
            totals.append(moved.total("loss") + moved.total("aux_loss"))
        value += 1e-5 * direction
        slope = (totals[0] - totals[1]) / 2e-5
        assert slope == pytest.approx((result.gradients[name] * direction).sum().item(), rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (5,), (2, 2, 4), (1, 2, 3, 4, 5)])
def test_chunks_give_the_gradients_of_the_whole(tied: bool, cuts: tuple[int, ...]) -> None:
    model = HybridModel(replace(SPEC, tied=tied), seed=1)
    data = [[batch(2, 6)], [batch(3, 4, seed=1)]]
    whole, parts = reference_step(cut(model), data), reference_step(cut(model, *cuts), data)
    assert_same(parts, whole)
    if tied:
        assert torch.equal(parts.gradients["embed.weight"], parts.gradients["head.weight"])


def test_tied_weight_is_one_parameter_in_one_chunk_and_a_copy_elsewhere() -> None:
    model = HybridModel(replace(SPEC, tied=True))
    (whole,) = cut(model)
    uses = [info for info in whole.parameter_infos() if info.tied]
    assert [info.name for info in uses] == ["embed.weight", "head.weight"]
    assert uses[0].parameter is uses[1].parameter and {info.tied for info in uses} == {"embed.weight"}
    first, last = cut(model, 3)
    (embed,), (head,) = ([info for info in chunk.parameter_infos() if info.tied] for chunk in (first, last))
    assert (embed.name, head.name, embed.tied, head.tied) == ("embed.weight", "head.weight", *["embed.weight"] * 2)
    assert embed.parameter is not head.parameter and torch.equal(embed.parameter, head.parameter)


def test_parts_of_a_micro_batch_equal_the_micro_batch() -> None:
    (chunk,) = cut(HybridModel(SPEC, seed=1))
    tokens, labels = batch(5, 7)
    whole = reference_step([chunk], [[(tokens, labels)]])
    parts = reference_step([chunk], [[(tokens[:2], labels[:2]), (tokens[2:], labels[2:])]])
    assert_same(parts, whole)
    # Micro-batches are not parts: their balance losses are their own.
    micro = reference_step([chunk], [[(tokens[:2], labels[:2])], [(tokens[2:], labels[2:])]])
    assert micro.total("loss") == pytest.approx(whole.total("loss"), rel=1e-12)
    assert micro.total("aux_loss") != pytest.approx(whole.total("aux_loss"), rel=1e-6)


def test_pad_tokens_change_nothing() -> None:
    (chunk,) = cut(HybridModel(SPEC, seed=1, pad_token=0))
    tokens, labels = batch(2, 8)
    tokens = tokens.clamp(min=1)
    real = [(tokens[:1, :5], labels[:1, :5]), (tokens[1:, :6], labels[1:, :6])]
    tokens, labels = tokens.clone(), labels.clone()
    tokens[0, 5:] = tokens[1, 6:] = 0
    labels[0, 5:] = labels[1, 6:] = -100
    assert_same(reference_step([chunk], [[(tokens, labels)]]), reference_step([chunk], [real]))


def test_ignored_labels_and_empty_micro_batches() -> None:
    (chunk,) = cut(HybridModel(SPEC, seed=1))
    tokens, labels = batch(2, 6)
    nothing = reference_step([chunk], [[(tokens, torch.full_like(labels, -100))]])
    assert nothing.total("loss") == 0.0
    assert (nothing.gradients["head.weight"] == 0).all()
    expected = reference_step([chunk], [[(tokens, labels)]])
    for b, s in ((0, 6), (2, 0)):
        empty = torch.zeros(b, s, dtype=torch.int64)
        assert_same(reference_step([chunk], [[(tokens, labels), (empty, empty)]]), expected)
    half = labels.clone()
    half[:, 3:] = -100
    shorter = reference_step([chunk], [[(tokens[:, :3], labels[:, :3])]])
    assert reference_step([chunk], [[(tokens, half)]]).total("loss") == pytest.approx(shorter.total("loss"), rel=1e-12)


def test_programs_are_those_of_the_task_graph_for_every_range_of_items() -> None:
    model, items = HybridModel(SPEC), SPEC.items
    for a in range(len(items) + 1):
        for b in range(a, len(items) + 1):
            program = model.build_chunk(items[a:b], F64).program
            check_program(program)
            graph = chunk_tasks(items[a:b], Pass.F)
            assert [(step.kind, step.label) for step in program.steps] == [(t.kind, t.label) for t in graph.tasks]
            assert (program.input == "") == (a == 0 and b > a) and (program.output == "") == (b == len(items) and b > a)
            if a == b:
                assert program.input == program.output
    assert model.boundary_shape((3, 5)) == (3, 5, SPEC.hidden)


def test_bf16_and_fp32_run() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (chunk,) = cut(HybridModel(SPEC, seed=1), placement=Placement(dtype=dtype))
        result = reference_step([chunk], [[batch(2, 6)]])
        assert result.total("loss") == pytest.approx(math.log(SPEC.vocab), abs=0.5)
        assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in result.gradients.values())


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_key_and_place_but_not_on_the_layout() -> None:
    model, data = HybridModel(SPEC, seed=1, dropout=0.3), [[batch(2, 6)], [batch(3, 4, seed=1)]]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    whole = reference_step(cut(model), data, random_key=lambda i, p: 10 * i + p)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    for cuts in ((3,), (1, 2, 3, 4, 5)):
        assert_same(reference_step(cut(model, *cuts), data, random_key=lambda i, p: 10 * i + p), whole)
    other = reference_step(cut(model), data, random_key=lambda i, p: 10 * i + p + 1)
    assert other.total("loss") != pytest.approx(whole.total("loss"), rel=1e-6)
    plain = reference_step(cut(HybridModel(SPEC, seed=1)), data)
    assert whole.total("loss") != pytest.approx(plain.total("loss"), rel=1e-6)
    evaluated = reference_step([chunk.eval() for chunk in cut(model, 3)], data)
    assert evaluated.metrics == reference_step(cut(HybridModel(SPEC, seed=1), 3), data).metrics


def test_dropout_masks_differ_between_places_and_repeat_when_recomputed() -> None:
    model = HybridModel(SPEC, dropout=0.5)
    (chunk,) = cut(model)
    embed = chunk.program.steps[0]
    assert isinstance(embed, ComputeStep)
    tokens = torch.zeros(50, 40, dtype=torch.int64)
    (first,), (again,), (other,) = embed.fn(tokens, 1), embed.fn(tokens, 1), embed.fn(tokens, 2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    kept = (first != 0).double()
    assert kept.mean().item() == pytest.approx(0.5, abs=0.02)
    weight = chunk.get_parameter("embed.weight")[0]
    torch.testing.assert_close(first, 2 * kept * weight)
    places = ("L0/attention", "L0/feed_forward", "L1/attention")
    ones = torch.ones(50, 40, dtype=torch.float64)
    masks = [chunk._drop(place, ones, 1) for place in places]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert ((a != 0) == (b != 0)).double().mean().item() == pytest.approx(0.5, abs=0.05)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_everything_unsupported_is_named_at_once_before_anything_is_built() -> None:
    huge = 10**12  # building a weight of this size would fail
    layers = (
        LayerSpec(attention=Attention(kind=AttentionKind.MLA), feed_forward=DENSE),
        LayerSpec(attention=Attention(kind=AttentionKind.MAMBA1), feed_forward=MOE),
        LayerSpec(attention=Attention(kind=AttentionKind.MAMBA2), feed_forward=replace(DENSE, intermediate=0)),
        LayerSpec(attention=replace(SOFTMAX, heads=3, rope_dim=5), feed_forward=replace(MOE, latent=-1)),
        LayerSpec(attention=replace(SLIDING, window=0), feed_forward=replace(MOE, router=Router(choice_bias=True))),
        LayerSpec(
            attention=replace(DELTA, conv=0, bias=True),
            feed_forward=replace(DENSE, activation=Activation.SWIGLU_CLAMPED),
        ),
        LayerSpec(attention=NO_MIXER, feed_forward=NOTHING),
    )
    spec = replace(SPEC, hidden=huge, layers=layers, mtp=(SPEC.layers[0],))
    with pytest.raises(SpecError) as caught:
        HybridModel(spec, dropout=1.0)
    assert {problem.field for problem in caught.value.problems} == {
        "mtp",
        "layers[0].attention.kind",
        "layers[1].attention.kind",
        "layers[2].attention.kind",
        "layers[2].feed_forward.intermediate",
        "layers[3].attention.heads",
        "layers[3].attention.rope_dim",
        "layers[3].feed_forward.latent",
        "layers[4].attention.window",
        "layers[4].feed_forward.router.choice_bias",
        "layers[5].attention.conv",
        "layers[5].attention.bias",
        "layers[5].feed_forward.activation",
        "layers[6].feed_forward.kind",
        "dropout",
    }
    for name in ("mla", "mamba1", "mamba2", "multi-token"):
        assert name in str(caught.value)


def test_chunks_must_be_ranges_of_items_and_experts_must_divide() -> None:
    model = HybridModel(SPEC)
    for items in (SPEC.items[1:2] + SPEC.items[3:4], SPEC.items[2:0:-1], replace(SPEC, layers=SPEC.layers[1:]).items):
        with pytest.raises(PlanError, match="contiguous"):
            model.build_chunk(items, F64)
    with pytest.raises(PlanError, match="ep_size"):
        model.build_chunk(SPEC.items, replace(F64, ep_size=3))
