"""What capture refuses, at capture and at calls: every error names what is wrong. Case 82."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.cuda_graphs.fallback import CaptureWarning
from tessera_rt.cuda_graphs.inputs import Inputs
from tessera_rt.cuda_graphs.rules import DryRun
from tessera_rt.cuda_graphs.state import State
from tessera_rt.errors import CaptureError
from tessera_rt.kernels.options import RouterRule
from tessera_rt.moe.block import MoEBlock
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE
from tessera_rt.testing.graphs import StandInDevice
from tessera_rt.testing.graphs_models import Target, Training, differing

HOST_READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "bool": (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
    "int": (lambda x: x * int(x.sum()), "_local_scalar_dense"),
    "tolist": (lambda x: x * x.sum(0).tolist()[0], "tolist"),
    "cpu": (lambda x: x * x.cpu(), "cpu"),
    "to": (lambda x: x * x.to("cpu"), "to"),
    "numpy": (lambda x: torch.ones_like(x) * x.numpy().sum(), "numpy"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "index"),
    "unique": (lambda x: x.unique(), "unique"),
    "bincount": (lambda x: x.flatten().long().bincount(), "bincount"),
    "lengths": (lambda x: x.repeat_interleave(torch.ones_like(x[:, 0]).long(), 0), "repeat_interleave"),
    "host data": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "tensor"),
    "generator": (lambda x: x + torch.rand(x.shape, generator=torch.Generator()), "rand.generator"),
}


@pytest.fixture
def device() -> StandInDevice:
    return StandInDevice()


class _HostReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused_by_name(device: StandInDevice, name: str) -> None:
    function, operation = HOST_READS[name]
    with pytest.raises(CaptureError, match=operation) as raised:
        capture(function, (torch.randn(3, 3),), device=device)
    assert "test_capture_refusals.py" in str(raised.value), "the line of the call is named"


def test_host_reads_in_a_backward_are_refused() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _HostReadInBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        capture(Layer(), (torch.randn(3, requires_grad=True),), device=StandInDevice())


def test_writes_by_mask_and_constants_pass(device: StandInDevice) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y[y < 0] = 0.0
        y[0] = 3.0
        return y

    captured = capture(function, (torch.randn(4, 4),), device=device)
    for _ in range(3):
        x = torch.randn(4, 4)
        assert torch.equal(captured(x), function(x))


@torch.library.custom_op("tessera_tests::scaled_by_sum", mutates_args=())
def scaled_by_sum(x: Tensor, on_host: bool) -> Tensor:
    return x * (x.sum().item() if on_host else x.sum())


def test_operations_of_libraries_are_looked_into(device: StandInDevice) -> None:
    with pytest.raises(CaptureError, match=r"aten\.item\.default reads a value.*test_capture_refusals\.py"):
        capture(lambda x: scaled_by_sum(x, True), (torch.randn(3),), device=device)
    captured = capture(lambda x: scaled_by_sum(x, False), (torch.randn(3),), device=device)
    x = torch.randn(3)
    assert torch.equal(captured(x), scaled_by_sum(x, False))
    assert "aten.sum.default" in device.graphs[-1].names()


def test_a_block_that_counts_on_the_host_is_refused(device: StandInDevice) -> None:
    config = MoEConfig(hidden=8, intermediate=8, experts=4, router=RouterRule(top_k=2))
    block = Target(device, torch.device("cpu"), torch.float32).place(MoEBlock(config))
    with pytest.raises(CaptureError, match=r"MoEBlock.*bincount"):
        capture(block, (torch.randn(6, 8),), device=device)
    layer = MoE(config, backend="torch")
    with pytest.raises(CaptureError, match=r"MoE.*bincount.*\.py:\d+"):
        capture(layer, (torch.randn(6, 8),), device=device)


def test_the_fallback_is_announced(device: StandInDevice) -> None:
    with pytest.warns(CaptureWarning, match=r"nonzero[\s\S]*runs eagerly"):
        captured = capture(torch.nonzero, (torch.randn(3),), device=device, fallback="eager")
    assert captured is torch.nonzero
    layer = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert capture(layer, (torch.randn(2, 3),), device=device, fallback="eager").original is layer
    with pytest.warns(CaptureWarning, match="one CUDA device"):
        assert capture(layer, (torch.randn(2, 3),), fallback="eager") is layer


def test_calls_that_do_not_fit_fall_back_too(device: StandInDevice) -> None:
    """A last batch of another size, or a further forward than there are slots: eager, and announced."""
    training = Training.of(nn.Linear(4, 4))
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    training.step(*batch)
    step = capture(training.step, batch, state=(training.model, training.optimizer), device=device, fallback="eager")
    other = training.twin()
    for size in (3, 1, 3):
        batch = torch.randn(2, size, 4), torch.randn(2, size, 4)
        if size == 3:
            one = step(*batch)
        else:
            with pytest.warns(CaptureWarning, match=r"argument 0\.shape[\s\S]*runs eagerly") as raised:
                one = step(*batch)
            assert raised[0].filename == __file__
        assert torch.equal(one, other.step(*batch))
        assert not differing(training.values(), other.values())
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4),), device=device, fallback="eager")
    x = torch.randn(2, 4)
    first = layer(x)
    with pytest.warns(CaptureWarning, match="at most 1 slots"):
        second = layer(x)
    assert torch.equal(first, second)
    (first.sum() + second.sum()).backward()


def test_a_failed_capture_leaves_no_trace(device: StandInDevice) -> None:
    training = Training.of(nn.Linear(3, 3))
    training.step(torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    before, random = training.twin().values(), torch.get_rng_state()

    def step(x: Tensor, y: Tensor) -> float:
        torch.rand(3)
        return training.step(x, y).item()

    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        capture(step, (torch.randn(1, 2, 3),) * 2, state=(training.model, training.optimizer), device=device)
    after = training.values()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    torch.set_rng_state(random)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda f, x: f(x[:2]), r"argument 0\.shape = \(2, 4\): must be \(3, 4\)"),
        (lambda f, x: f(x.double()), r"argument 0\.dtype = 'torch.float64': must be torch.float32"),
        (lambda f, x: f(x.to("meta")), r"argument 0\.device = 'meta': must be cpu"),
        (lambda f, x: f(3.0), r"argument 0 = 3\.0: must be a tensor \(3, 4\)"),
        (lambda f, x: f(x, 2.0), "argument 1 = 2.0: must be 1.0, as captured"),
        (lambda f, x: f(x, extra=x), "arguments = 'argument 0, argument extra'"),
        (lambda f, x: f(x.clone().requires_grad_()), "argument 0.requires_grad = True"),
    ],
)
def test_arguments_must_fit(device: StandInDevice, call: Callable[..., Any], problem: str) -> None:
    def function(x: Tensor, factor: float = 1.0, extra: Tensor | None = None) -> Tensor:
        return x * factor

    inputs = (torch.randn(3, 4), 1.0) if "argument 1 " in problem else (torch.randn(3, 4),)
    captured = capture(function, inputs, device=device)
    with pytest.raises(CaptureError, match=problem):
        call(captured, torch.randn(3, 4))


def test_nested_arguments_and_results(device: StandInDevice) -> None:
    def function(x: dict[str, Tensor], *, scales: list[Tensor]) -> dict[str, Any]:
        return {"sum": [x["a"] * scales[0], x["b"] * scales[1]], "name": "fixed"}

    def values() -> tuple[dict[str, Tensor], list[Tensor]]:
        return {"a": torch.randn(3), "b": torch.randn(2)}, [torch.randn(3), torch.randn(2)]

    x, scales = values()
    captured = capture(function, (x,), {"scales": scales}, device=device)
    first = captured(x, scales=scales)
    x, scales = values()
    second, expected = captured(x, scales=scales), function(x, scales=scales)
    assert second["name"] == "fixed"
    assert all(torch.equal(a, b) for a, b in zip(second["sum"], expected["sum"], strict=True))
    assert not torch.equal(first["sum"][0], second["sum"][0]), "results are copies"
    with pytest.raises(CaptureError, match=r"argument 0\.a\.shape"):
        captured({"a": torch.randn(4), "b": torch.randn(2)}, scales=scales)


def test_buffers_that_moved_are_named() -> None:
    inputs = Inputs("capture", "cpu", (torch.zeros(3), {"mask": torch.zeros(2)}), {})
    inputs.tensors[1].data = torch.zeros(2)
    with pytest.raises(CaptureError, match=r"the buffer of argument 1\.mask = 'another tensor'"):
        inputs.load((torch.ones(3), {"mask": torch.ones(2)}), {})
    assert not inputs.tensors[0].any(), "nothing is copied before everything is checked"


# -- what moved, or was set otherwise ----------------------------------------------------------------------------------


def test_moved_parameters_are_named(device: StandInDevice) -> None:
    layer = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),), device=device)
    layer.original[1].weight.data = layer.original[1].weight.detach().clone()
    with pytest.raises(CaptureError, match=r"state\[0\]\.1\.weight = .*at its address; change it in place"):
        layer(torch.randn(2, 4))


def test_changed_settings_are_named(device: StandInDevice) -> None:
    layer = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), (torch.randn(2, 4),), device=device)
    layer.eval()
    with pytest.raises(CaptureError, match=r"1\.training = False: must be True"):
        layer(torch.randn(2, 4))
    layer.train()
    layer.original[0].bias.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"0\.bias\.requires_grad = False"):
        layer(torch.randn(2, 4))
    layer.original[0].bias.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CaptureError, match=r"autocast = 'torch.bfloat16'"):
        layer(torch.randn(2, 4))
    layer(torch.randn(2, 4))


def replace_a_layer(model: Any, optimizer: Any) -> None:
    model[0] = nn.Linear(3, 3)


def add_a_buffer(model: Any, optimizer: Any) -> None:
    model.register_buffer("more", torch.zeros(1))


def move_a_buffer(model: Any, optimizer: Any) -> None:
    model[1].running_mean = model[1].running_mean.clone()


def drop_a_parameter(model: Any, optimizer: Any) -> None:
    del model[0].bias


def add_a_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def change_a_setting(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def move_a_moment(model: Any, optimizer: Any) -> None:
    values = optimizer.state[model[0].weight]
    values["exp_avg"] = values["exp_avg"].clone()


def set_a_layer_to_eval(model: Any, optimizer: Any) -> None:
    model[1].eval()


def change_values_and_equal_objects(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)
        optimizer.param_groups[0]["lr"].mul_(0.5)
    optimizer.param_groups[0]["betas"] = tuple(list(optimizer.param_groups[0]["betas"]))
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replace_a_layer, r"state\[0\]\.0\.weight = 'another tensor'"),
        (add_a_buffer, r"state\[0\]\.more = 'new'"),
        (move_a_buffer, r"state\[0\]\.1\.running_mean = 'another tensor'"),
        (drop_a_parameter, r"state\[0\]\.0\.bias = 'gone'"),
        (add_a_group, r"state\[1\]\.groups\[1\]\.params\[0\] = 'new'"),
        (change_a_setting, r"groups\[0\]\.weight_decay = 0\.5: must be 0\.01, as captured"),
        (move_a_moment, r"groups\[0\]\.params\[0\]\.exp_avg = 'another tensor'"),
        (set_a_layer_to_eval, r"state\[0\]\.1\.training = False"),
        (change_values_and_equal_objects, ""),
    ],
)
def test_every_change_of_the_state_is_noticed(change: Callable[[Any, Any], None], problem: str) -> None:
    training = Training.of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    training.model(torch.randn(4, 3)).sum().backward()
    training.optimizer.step()
    state = State("check", (training.model, training.optimizer), ())
    state.check()
    change(training.model, training.optimizer)
    if not problem:
        state.check()
        return
    for _ in range(2):
        with pytest.raises(CaptureError, match=problem):
            state.check()


def training_step(device: StandInDevice, **settings: Any) -> tuple[Training, Any, tuple[Tensor, Tensor]]:
    training = Training.of(nn.Linear(4, 4))
    training.optimizer.param_groups[0].update(settings)
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    training.step(*batch)
    step = capture(training.step, batch, state=(training.model, training.optimizer), device=device)
    return training, step, batch


def test_a_learning_rate_that_is_a_number_or_another_tensor(device: StandInDevice) -> None:
    training, step, batch = training_step(device, lr=0.01)
    training.optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(CaptureError, match=r"groups\[0\]\.lr = 0\.02: must be 0\.01, as captured.*make it a tensor"):
        step(*batch)
    training, step, batch = training_step(device)
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    with pytest.raises(CaptureError, match=r"state\[1\]\.groups\[0\]\.lr = .*change it in place"):
        step(*batch)


def test_schedulers_change_a_learning_rate_in_place(device: StandInDevice) -> None:
    training = Training.of(nn.Linear(4, 4))
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    training.step(*batch)
    other = training.twin()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.5) for t in (training, other)]
    step = capture(training.step, batch, state=(training.model, training.optimizer), device=device)
    for _ in range(3):
        assert torch.equal(step(*batch), other.step(*batch))
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(training.values()[name], value) for name, value in other.values().items())


def test_optimizer_state_must_exist_and_stay(device: StandInDevice) -> None:
    training = Training.of(nn.Linear(4, 4))
    batch = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    with pytest.raises(CaptureError, match=r"exp_avg = 'new'.*run the step once eagerly before"):
        capture(training.step, batch, state=(training.model, training.optimizer), device=device)
    assert not any(training.optimizer.state.values()), "the warm-up's state is gone again"
    training, step, batch = training_step(device)
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    with pytest.raises(CaptureError, match=r"params\[0\]\.exp_avg = 'another tensor'"):
        step(*batch)


def test_host_counters_of_optimizers_are_refused(device: StandInDevice) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"_local_scalar_dense.*test_capture_refusals"):
        capture(step, (torch.randn(2, 4),), state=(model, optimizer), device=device)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"slots": 0}, "slots = 0: must be at least 1"),
        ({"slots": 2}, "slots = 2: must be 1 for a function"),
        ({"fallback": "silent"}, 'fallback = .silent.: must be "error" or "eager"'),
        ({"eager": abs}, "overflow = None: must be a tensor where agree or eager is given"),
        ({"slots": "2"}, "slots = '2': must be at least 1"),
        ({"state": [3]}, "state = 'int': must be modules, optimizers and tensors"),
        ({"state": nn.Linear(1, 1)}, r"state = 'Linear': must be a tuple; one alone is \(it,\)"),
        ({"generators": 3}, "generators = 'int': must be a tuple"),
        ({"example_inputs": torch.zeros(3)}, "example_inputs = 'Tensor': must be a tuple"),
        ({"example_kwargs": [1]}, "example_kwargs = 'list': must be a dict"),
        ({"overflow": 3}, "overflow = 'int': must be a tensor"),
        ({"target": 3}, "target = 3: must be a module or a function"),
        ({"target": nn.Linear(3, 3), "parameters": iter([nn.Parameter(torch.zeros(1))])}, "parameters = '1 tensors'"),
        ({"device": None}, "device = 'cpu': must be one CUDA device"),
    ],
)
def test_arguments_of_capture(device: StandInDevice, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(CaptureError, match=problem):
        capture(**{"target": torch.neg, "example_inputs": (torch.randn(3),), "device": device, **arguments})


# -- the rules for a device that is not the host, on tensors of torch's meta device ------------------------------------


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (lambda x, host: x.cpu(), "_to_copy"),
        (lambda x, host: x.to("cpu", non_blocking=True), "_to_copy"),
        (lambda x, host: host.copy_(x), "copy_"),
        (lambda x, host: x.copy_(host), "copy_"),
        (lambda x, host: host.to("meta"), "_to_copy"),
        (lambda x, host: x * host[0, 0], "mul"),
        (lambda x, host: x[host[0].long()], "index"),
        (lambda x, host: torch._foreach_mul([x], host[0, 0]), "_foreach_mul"),
        (lambda x, host: host.add_(1), "add_"),
        (lambda x, host: torch.nonzero(x), "nonzero"),
        (lambda x, host: x[x > 0], "index"),
        (lambda x, host: x * 2.0 + 1, ""),
        (lambda x, host: torch.where(x > 0, x, 0.0).softmax(-1).masked_fill(x > 0, 1.0), ""),
        (lambda x, host: torch.arange(3, device="meta") + torch.zeros(3, device="meta"), ""),
        (lambda x, host: (x.clone().index_put_((x > 0,), x.new_zeros(())), host * 2), ""),
        (lambda x, host: x * host.sum().item() + len(host.nonzero()), ""),
    ],
)
def test_rules_of_another_device(function: Callable[[Tensor, Tensor], Any], refused: str) -> None:
    x, host = torch.randn(3, 3, device="meta"), torch.randn(3, 3)
    with DryRun("check", "meta", ()):
        if not refused:
            function(x, host)
            return
        with pytest.raises(CaptureError, match=rf"check: aten\.{refused}"):
            function(x, host)
