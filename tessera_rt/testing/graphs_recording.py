"""Recording of captured work for the stand-in: operations of torch and launches of interpreted Triton kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tessera_rt.cuda_graphs.rules import is_opaque, opened, place_of_call, refusal
from tessera_rt.testing.graphs_memory import Memory, TensorRef
from tessera_rt.testing.streams import CaptureRuleError, CpuStream, Streams

# Methods and functions that read the host, or from it, without a dispatched operation where all tensors are the host's.
_READING = ("cpu", "numpy", "tolist", "pin_memory")
_MAKING = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer")
_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces
_RESIZING = ("aten::resize_", "aten::resize_as_", "aten::set_")


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded piece of work."""

    name: str
    run: Callable[[], None]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what is dispatched and writes it down as nodes. Raises CaptureRuleError for what a graph cannot hold."""

    def __init__(
        self, streams: Streams, memories: MutableMapping[int, Memory], generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.used: dict[Memory, None] = {}
        self.own: set[Memory] = set()
        self._streams, self._memories, self._generators = streams, memories, generators
        self._before: dict[Memory, torch.UntypedStorage] = {}
        self._written: dict[Memory, tuple[tuple[int, int], str]] = {}
        self._read: dict[Memory, dict[int, tuple[int, str]]] = {}
        self._last: dict[int, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_host_refused())
            if find_spec("triton") is not None:  # an optional package
                from tessera_rt.testing.interpreter import handled_launches

                stack.enter_context(handled_launches(self._launch))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        name, schema = str(func), func._schema
        reason = refusal(func, args, kwargs, "cpu", self._generators)
        if schema.name in _RESIZING:
            reason = "changes the size or place of memory, which a replay cannot"
        if func.namespace in _COLLECTIVES:
            reason = "is a collective, which the stand-in does not model"
        if reason is not None:
            raise CaptureRuleError(f"{name} {reason}{place_of_call(__file__)}")
        if is_opaque(func, "cpu"):
            return opened(self, func, args, kwargs, "cpu")
        stream = self._streams.work()
        if schema.name == "aten::lift_fresh":
            # A number from the host (x[mask] = 0): a fill on a device, so a constant of the graph.
            result = func(*args, **kwargs)
            memory, _ = self._adopt(result, name)
            self._add(name, stream, [], {memory}, _constant(self._ref(result), result.clone()))
            return result
        inputs = [self._memory(tensor, name) for tensor in _tensors((args, kwargs))]
        refs = self._refs((args, kwargs))
        result = func(*args, **kwargs)
        made = [(self._adopt(tensor, name), tensor) for tensor in _tensors(result)]
        fresh = {memory for memory, is_new in (m for m, _ in made) if is_new}
        written = _written_memories(schema, args, kwargs, self._memory)
        if not fresh and not schema.is_mutable:
            return result  # a view
        writes = {*fresh, *written}
        if torch.Tag.pt2_compliant_tag in func.tags and _is_empty(schema.name):
            run: Callable[[], None] = _nothing  # allocates; whatever is there stays
        else:
            outputs = [
                self._ref(tensor) if self._memories[_key(tensor)] in fresh else None for tensor in _tensors(result)
            ]
            run = _operation(func, refs, outputs)
        self._add(name, stream, inputs, writes, run)
        return result

    def add_child(self, run: Callable[[], None], used: Iterable[Memory]) -> None:
        """Another graph, launched by this one. It may write all that it uses."""
        memories = list(used)
        for memory in memories:
            self._first_sight(memory)
        self._add("graph", self._streams.work(), [], set(memories), run)

    def last_on(self, stream: CpuStream) -> str:
        """The name of the last work on a stream."""
        return self._last[stream.number]

    def refuse_memory_from_outside(self, pool: Iterable[Memory]) -> None:
        """A replay would use memory outside the ``pool`` that nobody holds when the capture ends."""
        for memory in self._before.keys() - set(pool):
            if memory.free:
                raise CaptureRuleError(
                    f"{memory.first_use} uses memory outside the pool that is gone at the end of the capture"
                )

    def undo(self) -> None:
        """Puts back what was written: a capture does no work."""
        for memory, values in self._before.items():
            memory.storage.copy_(values)
        for memory in self.own:
            memory.at_capture = memory.copy()
            memory.poison()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _memory(self, tensor: Tensor, name: str) -> Memory:
        """The memory of a tensor that an operation reads: of this graph, or from outside of it."""
        memory = self._memories.get(_key(tensor))
        if memory is None:
            memory = Memory(tensor.untyped_storage(), tensor.dtype, name)
            self._memories[_key(tensor)] = memory
        self._first_sight(memory)
        return memory

    def _first_sight(self, memory: Memory) -> None:
        self.used.setdefault(memory)
        if memory not in self.own and memory not in self._before:
            self._before[memory] = memory.copy()
            if memory.at_capture is not None:
                memory.storage.copy_(memory.at_capture)

    def _adopt(self, tensor: Tensor, name: str) -> tuple[Memory, bool]:
        """The memory of an operation's result, and whether the operation allocated it."""
        memory = self._memories.get(_key(tensor))
        if memory is not None and memory in self.used:
            return memory, False
        memory = Memory(tensor.untyped_storage(), tensor.dtype, name)
        self._memories[_key(tensor)] = memory
        self.own.add(memory)
        self.used.setdefault(memory)
        return memory, True

    def _ref(self, tensor: Tensor) -> TensorRef:
        return TensorRef.of(tensor, self._memories[_key(tensor)])

    def _refs(self, tree: Any) -> Any:
        return tree_map(lambda leaf: self._ref(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    # -- order --------------------------------------------------------------------------------------------------------

    def _add(
        self, name: str, stream: CpuStream, reads: Iterable[Memory], writes: set[Memory], run: Callable[[], None]
    ) -> None:
        for memory in {*reads, *writes}:
            self._refuse_race(name, stream, memory, write=memory in writes)
        number, count = stream.advance()
        for memory in {*reads} - writes:
            self._read.setdefault(memory, {})[number] = (count, name)
        for memory in writes:
            self._written[memory] = ((number, count), name)
            self._read.pop(memory, None)
        self._last[number] = name
        self.nodes.append(Node(name, run))

    def _refuse_race(self, name: str, stream: CpuStream, memory: Memory, *, write: bool) -> None:
        if memory in self._written:
            work, writer = self._written[memory]
            if not stream.has_seen(work):
                verb = "overwrites" if write else "reads"
                raise CaptureRuleError(
                    f"{name} on {stream} {verb} what {writer} writes on stream {work[0]}, and no event orders them"
                )
        if write:
            for number, (count, reader) in self._read.get(memory, {}).items():
                if not stream.has_seen((number, count)):
                    raise CaptureRuleError(
                        f"{name} on {stream} overwrites what {reader} reads on stream {number}, "
                        "and no event orders them"
                    )

    def _launch(self, kernel: str, launch: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A Triton kernel: what it writes is found by comparing its arguments before and after."""
        with _disable_current_modes():
            stream, name = self._streams.work(), f"triton.{kernel}"
            arguments: dict[Memory, None] = {}
            for tensor in _argument_tensors((args, kwargs)):
                arguments[self._memory(tensor, name)] = None
            before = {memory: memory.copy() for memory in arguments}
            launch(*args, **kwargs)
            writes = {memory for memory in arguments if not _same_bytes(memory.storage, before[memory])}
            pack = [_packed(value, self._ref) for value in args]
            named = {key: _packed(value, self._ref) for key, value in kwargs.items()}

        def run() -> None:
            launch(*map(_unpacked, pack), **{key: _unpacked(value) for key, value in named.items()})

        self._add(name, stream, arguments, writes, run)


def _operation(func: Any, refs: Any, outputs: Sequence[TensorRef | None]) -> Callable[[], None]:
    """The call on the same memory; results in new memory are brought to where the recorded results were."""

    def run() -> None:
        args, kwargs = tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, TensorRef) else leaf, refs)
        results = _tensors(func(*args, **kwargs))
        for output, result in zip(outputs, results, strict=True):
            if output is None:
                continue
            if tuple(result.shape) != output.size:
                raise CaptureRuleError(f"{func} gave {tuple(result.shape)} in a replay and {output.size} at capture")
            output.tensor().copy_(result)

    return run


def _constant(ref: TensorRef, values: Tensor) -> Callable[[], None]:
    def run() -> None:
        ref.tensor().copy_(values)

    return run


def _nothing() -> None:
    pass


def _is_empty(name: str) -> bool:
    return name.removeprefix("aten::").removeprefix("new_").startswith("empty")


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written_memories(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Callable[[Tensor, str], Memory]
) -> set[Memory]:
    written = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written |= {memory(tensor, schema.name) for tensor in _tensors(value)}
    return written


# -- arguments of Triton kernels: tensors, and descriptors, which hold one --------------------------------------------


def _argument_tensors(tree: Any) -> list[Tensor]:
    return [
        leaf if isinstance(leaf, Tensor) else leaf.base
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) or _is_descriptor(leaf)
    ]


def _is_descriptor(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and isinstance(getattr(value, "base", None), Tensor)


@dataclass(frozen=True, slots=True)
class _Descriptor:
    kind: Callable[..., Any]
    base: TensorRef
    rest: dict[str, Any]


def _packed(value: Any, ref: Callable[[Tensor], TensorRef]) -> Any:
    if isinstance(value, Tensor):
        return ref(value)
    if _is_descriptor(value):
        rest = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "base"}
        return _Descriptor(type(value), ref(value.base), rest)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, TensorRef):
        return value.tensor()
    if isinstance(value, _Descriptor):
        return value.kind(base=value.base.tensor(), **value.rest)
    return value


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    def viewed(storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))

    return torch.equal(viewed(one), viewed(other))


# -- the host ---------------------------------------------------------------------------------------------------------


@contextmanager
def _host_refused() -> Iterator[None]:
    """Refuses what moves values between device and host but is no operation where both are the CPU."""

    def refuse(name: str, what: str) -> Callable[..., Any]:
        def refused(*_args: Any, **_kwargs: Any) -> Any:
            raise CaptureRuleError(f"{name} {what}{place_of_call(__file__)}")

        return refused

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A torch.device may be the tensor's own; the literal can only mean the host.
        if "cpu" in args or kwargs.get("device") == "cpu":
            raise CaptureRuleError(f'Tensor.to("cpu") reads values on the host{place_of_call(__file__)}')
        return torch._C.TensorBase.to(tensor, *args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, name, refuse(f"Tensor.{name}", "reads values on the host")) for name in _READING
    ]
    replaced.append((torch.Tensor, "to", to))
    replaced += [(torch, name, refuse(f"torch.{name}", "copies from the host")) for name in _MAKING]
    own = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in own:
            if function is None:
                delattr(owner, name)
            else:
                setattr(owner, name, function)
