"""CudaDevice against a replaced torch.cuda: what it passes on, and which error survives a capture that broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tessera_rt.cuda_graphs.cuda import CudaDevice
from tessera_rt.cuda_graphs.recording import record
from tessera_rt.errors import CaptureError


class Graph:
    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The captures that were begun. Ending one whose body failed fails too, as with CUDA."""
    begun: list[dict[str, Any]] = []

    @contextmanager
    def graph(graph: Graph, **options: Any) -> Iterator[None]:
        begun.append({"graph": graph, **options})
        try:
            yield
        except BaseException:
            raise RuntimeError("capture was invalidated") from None
        if options["stream"] == "unjoined":
            raise RuntimeError("unjoined work")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return begun


def test_the_device_is_the_current_one_or_that_of_the_tensors(captures: list[dict[str, Any]]) -> None:
    assert CudaDevice().device == torch.device("cuda", 3)
    assert CudaDevice(torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_a_capture(captures: list[dict[str, Any]]) -> None:
    generator = torch.Generator()
    graph, result = record("test", CudaDevice(), "pool", "stream", [generator], lambda: 5)  # type: ignore[arg-type]
    (begun,) = captures
    assert result == 5 and begun == {
        "graph": graph, "pool": "pool", "stream": "stream", "capture_error_mode": "thread_local",
    }  # fmt: skip
    assert begun["graph"].generators == [generator]


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (
            RuntimeError("aten::item: operation not permitted"),
            CaptureError,
            "test: aten::item: operation not permitted",
        ),
        (CaptureError("named"), CaptureError, "^named$"),
        (KeyError("a fault of the user"), KeyError, "a fault of the user"),
    ],
)
def test_what_broke_the_capture_is_what_is_raised(
    captures: list[dict[str, Any]], error: Exception, raised: type[Exception], text: str
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(raised, match=text):
        record("test", CudaDevice(), None, "stream", [], work)  # type: ignore[arg-type]


def test_an_end_that_fails_by_itself(captures: list[dict[str, Any]]) -> None:
    with pytest.raises(CaptureError, match="test: unjoined work"):
        record("test", CudaDevice(), None, "unjoined", [], lambda: None)  # type: ignore[arg-type]
