"""What captured modules refuse and count: slots, backwards, hooks, copies, settings other than at the capture."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tessera_rt.cuda_graphs.capture import capture
from tessera_rt.errors import CaptureError
from tessera_rt.testing.graphs import StandInDevice
from tessera_rt.testing.graphs_models import CapacityMoE, Target


@pytest.fixture
def device() -> StandInDevice:
    return StandInDevice()


def test_slots_are_counted(device: StandInDevice) -> None:
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4),), slots=2, device=device)
    first, second = layer(torch.randn(2, 4)), layer(torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"forwards under way = 3: must be at most 2 slots"):
        layer(torch.randn(2, 4))
    second.sum().backward()
    third = layer(torch.randn(2, 4))
    del first  # nobody can ask for its backward any more
    layer(torch.randn(2, 4)).sum().backward()
    third.sum().backward()
    with torch.no_grad():
        results = [layer(torch.randn(2, 4)) for _ in range(5)]  # without a backward no slot stays occupied
    assert len({tuple(result.flatten().tolist()) for result in results}) == 5


def test_a_second_backward_is_refused(device: StandInDevice) -> None:
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4),), device=device)
    y = layer(torch.randn(2, 4)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(CaptureError, match="backward = 'again': must be once after a forward"):
        y.backward()


def test_parameters_that_change_before_the_backward_are_refused(device: StandInDevice) -> None:
    layer = capture(nn.Linear(4, 4), (torch.randn(2, 4),), device=device)
    y = layer(torch.randn(2, 4)).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(CaptureError, match="changed between forward and backward"):
        y.backward()


def test_hooks_inside_are_refused_and_outside_run(device: StandInDevice) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    handle = module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"0\.forward_hooks = '1 hooks': must be empty"):
        capture(module, (torch.randn(2, 4),), device=device)
    handle.remove()
    layer, seen = capture(module, (torch.randn(2, 4),), device=device), []
    layer.register_forward_hook(lambda *_: seen.append("module"))
    layer.original[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("parameter"))
    layer(torch.randn(2, 4)).sum().backward()
    assert seen == ["module", "parameter"]
    module[0].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"0\.forward_pre_hooks"):
        layer(torch.randn(2, 4))


def test_a_captured_module_stands_where_the_module_stood(device: StandInDevice) -> None:
    module = CapacityMoE(8, 8, experts=4, held=4, top_k=2, capacity=None)
    Target(device, torch.device("cpu"), torch.float32).place(module)
    model = nn.Sequential(nn.Linear(8, 8), module)
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    model[1] = capture(module, (torch.randn(3, 8),), device=device)
    assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
    assert model[1].top_k == 2 and model[1].original is module
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not model[1](torch.randn(3, 8)).any()
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(CaptureError, match=r"copy or pickle `\.original`"):
            duplicate(model)


def test_what_a_capture_cannot_keep_apart_is_refused(device: StandInDevice) -> None:
    x = torch.randn(3, 3)
    layer = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match=r"argument 0 = 'changed in place'"):
        capture(lambda x: x.add_(1), (x,), device=device)
    with pytest.raises(CaptureError, match=r"output\.requires_grad = True.*Module"):
        capture(layer.forward, (x,), device=device)
    with pytest.raises(CaptureError, match=r"argument 0\.requires_grad = True: must be False"):
        capture(torch.neg, (torch.randn(3, requires_grad=True),), device=device)
    with torch.no_grad():
        frozen = capture(layer, (x,), device=device)
        frozen(x)
    with pytest.raises(CaptureError, match="gradients = 'enabled': must be disabled"):
        frozen(x)
