"""The whole layer as a module, for every kind of router and expert, against loops over tokens and experts."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tessera_rt.errors import SpecError
from tessera_rt.moe import Activation, Gate, MoE, MoEConfig, MoERouting, RouterRule
from tessera_rt.moe.checkpointing import save_routing
from tessera_rt.testing.moe_loops import moe_by_loop

HIDDEN, EXPERTS = 6, 8
PLAIN = MoEConfig(hidden=HIDDEN, intermediate=5, experts=EXPERTS, router=RouterRule(top_k=2, renormalize=True))
LOSSES = replace(PLAIN, aux_coefficient=0.1, z_coefficient=0.01)

ROUTERS = {
    "R1 all": RouterRule(top_k=2),
    "R1 renormalised": RouterRule(top_k=3, renormalize=True),
    "R1 every expert": RouterRule(top_k=EXPERTS, renormalize=True),
    "R1 one expert": RouterRule(top_k=1),
    "R2": RouterRule(top_k=2, softmax_after_topk=True),
    "R3": RouterRule(
        top_k=3, score="sigmoid", renormalize=True, eps=1e-20, scale=2.5, groups=4, keep_groups=2, group_score="top2"
    ),
    "R3 one group": RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-20, groups=2, keep_groups=1),
    "R4": RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-6),
    "R4 not renormalised": RouterRule(top_k=2, score="sigmoid", scale=1.5),
    "R5": RouterRule(top_k=2, groups=4, keep_groups=2, group_score="max", scale=16.0),
    "R6": RouterRule(top_k=2, renormalize=True),
}
WITH_CHOICE_BIAS = ("R3", "R4", "R6")
EXPERT_KINDS: dict[str, dict[str, Any]] = {
    "E1 SiLU": {},
    "E1 GeLU": {"gate": Gate(activation=Activation.GEGLU)},
    "E1 GeLU tanh": {"gate": Gate(activation=Activation.GEGLU_TANH)},
    "E1 clamped": {"gate": Gate(activation=Activation.SWIGLU_CLAMPED, limit=0.5)},
    "E1 oss": {"gate": Gate(activation=Activation.SWIGLU_OSS, limit=0.7)},
    "E2": {"gate": Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.7), "expert_bias": True},
    "E2 router bias": {"gate": Gate(interleaved=True), "expert_bias": True, "router_bias": True},
    "E4": {"gate": Gate(activation=Activation.RELU2)},
    "E4 latent": {"gate": Gate(activation=Activation.RELU2), "latent": 4},
    "E4 biased": {"gate": Gate(activation=Activation.RELU2), "expert_bias": True},
}
SHARED: dict[str, dict[str, Any]] = {
    "none": {},
    "summed": {"shared_intermediate": 4},
    "gated": {"shared_intermediate": 7, "shared_gated": True},
}


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(config: MoEConfig, dtype: torch.dtype = torch.float64, **options: Any) -> MoE:
    """A layer in which no two parameters are alike, and every part matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # top_k 1 with renormalisation
        layer = MoE(config, dtype=dtype, **options)
    for i, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
        tensor.data.copy_(double(*tensor.shape, seed=100 + i) * 0.6)
    return layer


def close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-10) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_against_loop(config: MoEConfig, tokens: int = 9, mask: Tensor | None = None) -> None:
    layer, x = made(config), double(tokens, HIDDEN)
    leaf, loop_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, routing = layer(leaf, mask, return_routing=True)
    expected = moe_by_loop(layer, loop_leaf, mask)
    close(y, expected.y)
    close(routing.aux_loss, expected.aux_loss)
    close(routing.z_loss, expected.z_loss)
    assert routing.counts.tolist() == expected.counts
    assert routing.ids.tolist() == [[-1] * config.top_k if ids is None else ids for ids in expected.ids]
    inputs = [leaf, *layer.parameters()]
    upstream = double(*y.shape, seed=7)
    terms = (y * upstream).sum() + routing.aux_loss + routing.z_loss
    wanted = (expected.y * upstream).sum() + expected.aux_loss + expected.z_loss
    gradients = torch.autograd.grad(terms, inputs)
    of_loop = torch.autograd.grad(wanted, [loop_leaf, *layer.parameters()], allow_unused=True)
    for gradient, expected_gradient in zip(gradients, of_loop, strict=True):
        close(gradient, torch.zeros_like(gradient) if expected_gradient is None else expected_gradient)


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_kind_equals_the_loop(kind: str) -> None:
    check_against_loop(replace(LOSSES, router=ROUTERS[kind], choice_bias=kind in WITH_CHOICE_BIAS))


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_every_expert_kind_equals_the_loop(kind: str, shared: str) -> None:
    check_against_loop(replace(PLAIN, **EXPERT_KINDS[kind], **SHARED[shared]))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("choice_bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_options_of_the_router_do_not_depend_on_each_other(
    renormalize: bool, scale: float, score: str, choice_bias: bool, groups: int
) -> None:
    rule = RouterRule(top_k=2, score=score, renormalize=renormalize, scale=scale, groups=groups)
    check_against_loop(replace(PLAIN, router=rule, choice_bias=choice_bias), tokens=5)


def test_a_choice_bias_moves_the_choice_and_not_the_weights() -> None:
    rule = RouterRule(top_k=2, score="sigmoid")
    layer, x = made(replace(PLAIN, router=rule, choice_bias=True)), double(20, HIDDEN)
    assert layer.router.choice_bias is not None
    layer.router.choice_bias.zero_()[5] = 10.0
    _, routing = layer(x, return_routing=True)
    assert (routing.ids[:, 0] == 5).all() and int(routing.counts[5]) == 20
    close(routing.weights[:, 0], routing.logits[:, 5].sigmoid())


# -- shapes, strides, padding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(tokens: int) -> None:
    check_against_loop(replace(LOSSES, **SHARED["gated"]), tokens=tokens)
    layer = made(LOSSES)
    y, routing = layer(double(tokens, 3, HIDDEN).transpose(0, 1), return_routing=True)
    assert y.shape == (3, tokens, HIDDEN) and int(routing.counts.sum()) == 3 * tokens * 2


def test_padding_counts_nowhere() -> None:
    """Five of sixteen tokens are padding: what is left equals the eleven tokens alone."""
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 5:] = mask[1, 6:] = False
    layer, x = made(LOSSES), double(2, 8, HIDDEN)
    x[~mask] = float("nan")  # whatever stands there
    leaf = x.clone().requires_grad_()
    y, routing = layer(leaf, mask, return_routing=True)
    alone_leaf = x[mask].clone().requires_grad_()
    alone, alone_routing = layer(alone_leaf, return_routing=True)
    close(y[mask], alone)
    assert int(routing.counts.sum()) == 11 * 2 and torch.equal(routing.counts, alone_routing.counts)
    close(routing.aux_loss, alone_routing.aux_loss)
    close(routing.z_loss, alone_routing.z_loss)
    assert (routing.ids.view(2, 8, 2)[~mask] == -1).all() and (y[~mask] == 0).all()
    gradients = torch.autograd.grad(y[mask].sum() + routing.aux_loss + routing.z_loss, [leaf, *layer.parameters()])
    wanted = torch.autograd.grad(
        alone.sum() + alone_routing.aux_loss + alone_routing.z_loss, [alone_leaf, *layer.parameters()]
    )
    close(gradients[0][mask], wanted[0])
    for gradient, expected in zip(gradients[1:], wanted[1:], strict=True):
        close(gradient, expected)
    check_against_loop(replace(LOSSES, **SHARED["gated"]), tokens=16, mask=mask.flatten())


def test_a_padded_batch_without_any_token() -> None:
    layer, x = made(LOSSES), double(4, HIDDEN).requires_grad_()
    y, routing = layer(x, torch.zeros(4, dtype=torch.bool), return_routing=True)
    gradients = torch.autograd.grad(y.sum() + routing.aux_loss + routing.z_loss, [x, *layer.parameters()])
    assert all((value == 0).all() for value in (y, routing.aux_loss, routing.z_loss, *gradients))


def test_shapes_that_do_not_fit_are_named() -> None:
    layer = made(PLAIN)
    with pytest.raises(SpecError, match=r"x.shape"):
        layer(double(3, HIDDEN + 1))
    for mask in (torch.ones(3), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(SpecError, match="mask"):
            layer(double(3, HIDDEN), mask)


# -- one expert a token, odd logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [RouterRule(top_k=1, renormalize=True), RouterRule(top_k=1, softmax_after_topk=True)])
def test_one_expert_with_renormalisation_warns_and_gives_the_router_no_gradient(rule: RouterRule) -> None:
    with pytest.warns(UserWarning, match="learns nothing"):
        layer = MoE(replace(PLAIN, router=rule), dtype=torch.float64)
    y, routing = layer(double(5, HIDDEN), return_routing=True)
    assert routing.weights.shape == routing.ids.shape == (5, 1) and torch.equal(
        routing.weights, torch.ones_like(routing.weights)
    )
    (gradient,) = torch.autograd.grad(y.sum(), layer.router.weight)
    close(gradient, torch.zeros_like(gradient), 1e-12)


def test_one_expert_without_renormalisation_learns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = MoE(replace(PLAIN, router=RouterRule(top_k=1)), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(layer(double(5, HIDDEN)).sum(), layer.router.weight)
    assert (gradient != 0).any()


def test_a_broken_token_stays_visible_and_touches_no_other() -> None:
    layer, x = made(PLAIN), double(4, HIDDEN)
    expected = layer(x)
    x[1] = float("nan")
    y = layer(x)
    assert y[1].isnan().all()
    close(y[[0, 2, 3]], expected[[0, 2, 3]])


# -- training ---------------------------------------------------------------------------------------------------------


def test_frozen_parts_get_no_gradient_call_by_call() -> None:
    layer, x = made(replace(LOSSES, **SHARED["summed"])), double(7, HIDDEN)

    def gradients() -> dict[str, Tensor | None]:
        layer.zero_grad(set_to_none=True)
        y, routing = layer(x, return_routing=True)
        (y.square().sum() + routing.aux_loss).backward()
        return {name: p.grad for name, p in layer.named_parameters()}

    whole = gradients()
    for part in (layer.experts, layer.router, layer.experts.down):
        part.requires_grad_(False)
        frozen = {id(p) for p in part.parameters()}
        found = gradients()
        for name, parameter in layer.named_parameters():
            assert (found[name] is None) == (id(parameter) in frozen)
            if found[name] is not None:
                close(found[name], whole[name])
        part.requires_grad_(True)
    again = gradients()
    for name, gradient in whole.items():
        close(again[name], gradient)


def test_a_wholly_frozen_layer_hands_the_input_gradient_on_and_no_grad_keeps_nothing() -> None:
    layer, x = made(PLAIN), double(7, HIDDEN)
    (expected,) = torch.autograd.grad(layer(leaf := x.clone().requires_grad_()).sum(), leaf)
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    close(leaf.grad, expected)
    assert not layer(x).requires_grad
    with torch.no_grad():
        close(layer(leaf), layer.requires_grad_(True)(leaf).detach())
    assert not layer.eval()(x).isnan().any()


def test_gradients_accumulate_over_micro_batches() -> None:
    layer, x = made(PLAIN), double(12, HIDDEN)
    layer(x).square().sum().backward()
    whole = [p.grad for p in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    for part in x.split(4):
        layer(part).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), whole, strict=True):
        close(parameter.grad, gradient)


def test_scores_and_weights_are_fp32_in_low_precision_and_under_autocast() -> None:
    layer, x = made(LOSSES, torch.bfloat16), double(9, HIDDEN).bfloat16()
    y, routing = layer(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    for value in (routing.logits, routing.weights, routing.aux_loss, routing.z_loss):
        assert value.dtype == torch.float32
    exact = made(LOSSES, torch.float32)
    exact.load_state_dict(layer.state_dict())
    _, expected = exact(x.float(), return_routing=True)
    assert torch.equal(routing.logits, expected.logits) and torch.equal(routing.weights, expected.weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, routing = exact(leaf := x.float().requires_grad_(), return_routing=True)
    assert inside.dtype == torch.float32 and torch.equal(routing.weights, expected.weights)
    inside.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32
    assert exact.experts.down.weight.grad is not None and exact.experts.down.weight.grad.dtype == torch.float32
    close(inside, exact(x.float()), 0.05)


def test_the_choice_bias_moves_towards_even_loads() -> None:
    rule = RouterRule(top_k=2, score="sigmoid", renormalize=True, eps=1e-20)
    layer = made(replace(PLAIN, router=rule, choice_bias=True, bias_update_rate=0.02))
    bias, x = layer.router.choice_bias, double(256, HIDDEN)
    assert bias is not None
    bias.zero_()
    before = layer(x, return_routing=True)[1].counts
    layer.update_choice_bias(before)
    close(bias, 0.02 * torch.sign(before.double().mean() - before.double()))
    for _ in range(100):
        layer.update_choice_bias(layer(x, return_routing=True)[1].counts)
    after = layer(x, return_routing=True)[1].counts
    assert after.double().std() < 0.3 * before.double().std()
    assert "router.choice_bias" in layer.state_dict() and not bias.requires_grad


# -- activation checkpointing -----------------------------------------------------------------------------------------


class Wobbling(torch.nn.Module):
    """Adds noise to its input from the second forward on, as another kernel or another reduction order would."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer, self.runs = layer, 0

    def forward(self, x: Tensor) -> tuple[Tensor, MoERouting]:
        self.runs += 1
        y, routing = self.layer(x + (self.runs > 1) * 1e-7 * double(*x.shape, seed=self.runs), return_routing=True)
        return y, routing.ids


@pytest.mark.parametrize("tokens", [34, 35, 69])
def test_checkpointing_saves_the_routing_decision(tokens: int) -> None:
    layer = made(replace(PLAIN, experts=2, router=RouterRule(top_k=1)))
    layer.router.weight.data.zero_()[[0, 1], [0, 1]] = 1.0
    x = double(tokens, HIDDEN)
    x[:, 1] = x[:, 0]  # equal logits: any noise turns the choice
    x.requires_grad_()
    wobbling = Wobbling(layer)
    y, ids = checkpoint(wobbling, x, use_reentrant=False, context_fn=save_routing)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert wobbling.runs == 2
    noisy = Wobbling(layer)
    noisy.runs = 1
    assert not torch.equal(noisy(x)[1], ids)  # without the saved decision it would have gone another way
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for gradient, wanted in zip(gradients, expected, strict=True):
        close(gradient, wanted, 1e-5)


# -- as a module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_are_independent_and_equal(copied: Callable[[MoE], MoE]) -> None:
    layer, x = made(replace(PLAIN, choice_bias=True, **SHARED["gated"])), double(5, HIDDEN)
    other = copied(layer)
    assert torch.equal(layer(x), other(x))
    other.router.weight.data.zero_()
    assert not torch.equal(layer(x), other(x))


def test_the_state_dict_goes_through_a_file() -> None:
    config = replace(PLAIN, **EXPERT_KINDS["E2 router bias"], **SHARED["gated"], choice_bias=True)
    layer, x, file = made(config), double(5, HIDDEN), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = MoE(config, dtype=torch.float64)
    other.load_state_dict(torch.load(file))
    assert torch.equal(layer(x), other(x))


def test_nothing_hides_on_the_module() -> None:
    layer = made(LOSSES)
    before = {name: set(vars(module)) for name, module in layer.named_modules()}
    layer(double(5, HIDDEN), return_routing=True)[0].sum().backward()
    assert {name: set(vars(module)) for name, module in layer.named_modules()} == before


def test_the_backend_is_visible_and_checked() -> None:
    assert "backend=by device" in repr(made(PLAIN)) and "backend=torch" in repr(made(PLAIN, backend="torch"))
    with pytest.raises(SpecError, match="torch or triton"):
        MoE(PLAIN, backend="cublas")


def test_a_fresh_layer_is_initialised_whole() -> None:
    config = replace(PLAIN, **EXPERT_KINDS["E4 latent"], **SHARED["gated"], router_bias=True, expert_bias=True)
    layer = MoE(config)
    assert all(p.isfinite().all() and p.abs().max() <= 1 for p in layer.parameters())
    y = layer(torch.randn(5, HIDDEN))
    assert y.isfinite().all()


def test_twenty_runs_have_the_same_bits_on_one_and_eight_threads() -> None:
    layer, x = made(replace(PLAIN, router=RouterRule(top_k=4)), torch.float32), double(64, HIDDEN).float()
    results = []
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            for _ in range(20):
                y = layer(x)
                results.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
