"""Grouped products (rows GEMM, gate backward, weight and bias gradient) against the reference in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_rt.errors import SpecError
from tessera_rt.kernels import reference
from tessera_rt.kernels.config_table import Config
from tessera_rt.kernels.descriptors import is_aligned
from tessera_rt.kernels.gate_backward import gate_backward
from tessera_rt.kernels.gate_backward_kernels import gate_backward_aligned
from tessera_rt.kernels.operands import Run, readable
from tessera_rt.kernels.options import NO_GATE, Activation, Gate
from tessera_rt.kernels.routing import ExpertRows, expert_rows
from tessera_rt.kernels.rows_gemm import rows_gemm
from tessera_rt.kernels.rows_gemm_kernels import rows_gemm_aligned
from tessera_rt.kernels.wgrad import bias_gradient, wgrad
from tessera_rt.kernels.wgrad_kernels import wgrad_aligned
from tessera_rt.testing.interpreter import handled_launches, launches
from tessera_rt.testing.kernel_checks import assert_near, offsets_of, poisoned_memory

pytestmark = pytest.mark.usefixtures("interpreted")

COUNTS = [5, 0, 40, 3]  # 48 rows in a buffer of 60: an empty expert, tails, rows of nobody
ROWS = 60
HEIGHTS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GATES = [
    NO_GATE,
    Gate(),
    Gate(interleaved=True),
    Gate(activation=Activation.SWIGLU_CLAMPED, limit=0.4),
    Gate(activation=Activation.SWIGLU_OSS, interleaved=True, limit=0.4),
    Gate(activation=Activation.SWIGLU_OSS, limit=0.4),
    Gate(activation=Activation.GEGLU),
    Gate(activation=Activation.GEGLU_TANH),
    Gate(activation=Activation.RELU2),
]
SIZES = {"aligned": (48, 80), "any": (45, 39)}  # more than one block of columns and of K


def _gate_id(gate: Gate) -> str:
    return f"{gate.activation.name}{'-interleaved' if gate.interleaved else ''}"


def _sweep(gates: list[Gate]) -> list[object]:
    """(gate, dtype, sizes): all of them, those that repeat what others show marked slow."""
    cases = []
    for gate, dtype, size in itertools.product(gates, DTYPES, SIZES):
        quick = (dtype is torch.bfloat16 and size == "aligned") or gate in (NO_GATE, Gate())
        name = f"{_gate_id(gate)}-{str(dtype)[6:]}-{size}"
        cases.append(pytest.param(gate, dtype, *SIZES[size], id=name, marks=() if quick else pytest.mark.slow))
    return cases


def _rows(counts: list[int] | None = None, rows: int = ROWS) -> ExpertRows:
    return expert_rows(offsets_of(COUNTS if counts is None else counts), rows, HEIGHTS)


def _draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _poison_tail(x: Tensor, counts: list[int] | None = None) -> Tensor:
    """Rows that belong to nobody hold NaN: they must not reach any result."""
    x = x.clone()
    x[sum(COUNTS if counts is None else counts) :] = torch.nan
    return x


def _strided(kind: str) -> Callable[[Tensor], Tensor]:
    """The same values in another memory layout."""

    def wide(x: Tensor) -> Tensor:
        out = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        out[..., 1:-2] = x
        return out[..., 1:-2]

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda x: x,
        "transposed": lambda x: x.mT.contiguous().mT,
        "slice": wide,
        "every-second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    }
    return changes[kind]


@pytest.mark.parametrize(("gate", "dtype", "n", "k"), _sweep(GATES))
def test_forward(gate: Gate, dtype: torch.dtype, n: int, k: int) -> None:
    columns = 2 * n if gate.gated else n
    x, weight = _poison_tail(_draw(ROWS, k, dtype=dtype)), _draw(4, columns, k, dtype=dtype, seed=1, scale=k**-0.5)
    bias = _draw(4, columns, dtype=dtype, seed=2)
    for biased in (False, True):
        b = bias if biased else None
        with poisoned_memory(), launches() as log:
            out, pre = rows_gemm(x, weight, _rows(), bias=b, gate=gate, save_pre=True)
        name = "rows_gemm_aligned" if n == 48 else "rows_gemm_any"
        assert [launch.kernel for launch in log] == [*["tile_table_kernel"] * 4, name, *["zero_tail_kernel"] * 2]
        assert pre is not None
        double = None if b is None else b.double()
        _, want_pre = reference.rows_gemm(x.double(), weight.double(), offsets_of(COUNTS), ROWS, bias=double, gate=gate)
        assert_near("pre", pre, want_pre)
        # The activation is that of the rounded product.
        total = sum(COUNTS)
        assert_near("out", out[:total], reference.activate(pre[:total].double(), gate))
        assert not out[total:].any() and not pre[total:].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gate", [NO_GATE, Gate(), Gate(activation=Activation.SWIGLU_OSS, interleaved=True)])
@pytest.mark.parametrize("n", [48, 14])
def test_gathered_rows_and_both_weight_layouts(gate: Gate, transposed: bool, n: int) -> None:
    k, dtype = 80, torch.float32
    columns = 2 * n if gate.gated else n
    x, weight = _draw(9, k, dtype=dtype), _draw(4, columns, k, dtype=dtype, seed=1, scale=k**-0.5)
    if transposed:
        weight = weight.mT.contiguous().mT
    index = torch.randint(0, 18, (ROWS,), generator=torch.Generator().manual_seed(3)).int()
    index[sum(COUNTS) :] = -1
    out, _ = rows_gemm(x, weight, _rows(), index=index, divisor=2, gate=gate)
    want, _ = reference.rows_gemm(
        x.double(), weight.double(), offsets_of(COUNTS), ROWS, index=index, divisor=2, gate=gate
    )
    assert_near("out", out, want)


@pytest.mark.parametrize("gate", GATES[1:], ids=_gate_id)
def test_only_the_product_is_written_when_asked_and_recomputing_gives_the_same_bits(gate: Gate) -> None:
    columns = 64 if gate.gated else 32
    x, weight = _draw(ROWS, 48, dtype=torch.bfloat16), _draw(4, columns, 48, dtype=torch.bfloat16, seed=1, scale=0.3)
    out, pre = rows_gemm(x, weight, _rows(), gate=gate, save_pre=True)
    nothing, again = rows_gemm(x, weight, _rows(), gate=gate, save_pre=True, write_out=False)
    alone, none = rows_gemm(x, weight, _rows(), gate=gate)
    assert pre is not None and again is not None and none is None and nothing.shape == (0, 32)
    assert torch.equal(pre, again) and torch.equal(out, alone)
    d_pre, act, _ = gate_backward(out, _draw(4, 32, 32, dtype=torch.bfloat16), pre, _rows(), gate=gate)
    assert torch.equal(act, out), "the backward's activation has the bits of the forward's"
    assert d_pre.shape == pre.shape


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice", "every-second"])
@pytest.mark.parametrize(("n", "k"), [(48, 80), (14, 7)], ids=["aligned", "any"])
def test_any_strides_give_the_same_bits(layout: str, n: int, k: int) -> None:
    change = _strided(layout)
    x, weight = _draw(ROWS, k, dtype=torch.bfloat16), _draw(4, n, k, dtype=torch.bfloat16, seed=1)
    grad = _draw(ROWS, n, dtype=torch.bfloat16, seed=2)
    out, _ = rows_gemm(x, weight, _rows())
    d_weight = torch.empty(4, n, k)
    wgrad(grad, x, _rows(), d_weight, accumulate=False)
    d_bias = torch.empty(4, n)
    bias_gradient(grad, _rows(), d_bias, accumulate=False)
    got, _ = rows_gemm(change(x), change(weight), _rows())
    assert torch.equal(got, out)
    assert torch.equal(wgrad(change(grad), change(x), _rows(), torch.empty(4, n, k), accumulate=False), d_weight)
    assert torch.equal(bias_gradient(change(grad), _rows(), torch.empty(4, n), accumulate=False), d_bias)


@pytest.mark.parametrize(("n", "k"), [(48, 80), (14, 7)], ids=["aligned", "any"])
def test_stride_0_gradients(n: int, k: int) -> None:
    """Case 50: ``sum()`` gives an expanded gradient."""
    weight, x = _draw(4, n, k, dtype=torch.float32), _draw(ROWS, k, dtype=torch.float32)
    for grad in (torch.ones(1, 1).expand(ROWS, n), torch.arange(float(n)).expand(ROWS, n)):
        got, _ = rows_gemm(grad, weight.mT, _rows(), kind="dgrad")
        want, _ = reference.rows_gemm(grad.double(), weight.mT.double(), offsets_of(COUNTS), ROWS)
        assert_near("d x", got, want)
        d_weight = wgrad(grad, x, _rows(), torch.empty(4, n, k), accumulate=False)
        assert_near("d weight", d_weight, reference.wgrad(grad.double(), x.double(), offsets_of(COUNTS)))


@pytest.mark.parametrize(("gate", "dtype", "n", "k"), _sweep(GATES[1:]))
@pytest.mark.parametrize("gathered", [False, True])
def test_gate_backward(gate: Gate, dtype: torch.dtype, n: int, k: int, gathered: bool) -> None:
    columns = 2 * n if gate.gated else n
    pre, weight = _poison_tail(_draw(ROWS, columns, dtype=dtype)), _draw(4, n, k, dtype=dtype, seed=1, scale=k**-0.5)
    index = scale = None
    grad = _poison_tail(_draw(ROWS, k, dtype=dtype, seed=2))
    if gathered:
        index = torch.randint(0, 18, (ROWS,), generator=torch.Generator().manual_seed(3)).int()
        grad, scale = grad[:9], torch.rand(18, generator=torch.Generator().manual_seed(4))
    with poisoned_memory(), launches() as log:
        d_pre, act, partials = gate_backward(
            grad, weight, pre, _rows(), gate=gate, index=index, divisor=2, scale=scale, partials=True
        )
    assert ("gate_backward_aligned" if n == 48 else "gate_backward_any") in [launch.kernel for launch in log]
    want = reference.gate_backward(
        grad.double(), weight.double(), pre.double(), offsets_of(COUNTS), gate=gate, index=index, divisor=2,
        scale=None if scale is None else scale.double(),
    )  # fmt: skip
    assert_near("d pre", d_pre, want[0])
    assert_near("activation", act, want[1])
    assert partials is not None
    total = sum(COUNTS)
    assert_near("partials", partials[:total].double().sum(-1), want[2][:total], ratio=1e-5)


@pytest.mark.parametrize(("n", "k"), [(48, 80), (14, 7)], ids=["aligned", "any"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gather", ["", "grad", "x"])
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weight_gradient(n: int, k: int, dtype: torch.dtype, gather: str, transposed: bool) -> None:
    """Exact zeros for the empty expert, NaN rows of nobody unseen, and the two contracts."""
    index = torch.randint(0, 18, (ROWS,), generator=torch.Generator().manual_seed(3)).int()
    index[sum(COUNTS) :] = -1
    grad = _draw(9 if gather == "grad" else ROWS, n, dtype=dtype)
    x = _draw(9 if gather == "x" else ROWS, k, dtype=dtype, seed=1)
    grad, x = (grad if gather == "grad" else _poison_tail(grad)), (x if gather == "x" else _poison_tail(x))
    options = {"index": index, "divisor": 2, f"gather_{gather}": True} if gather else {}
    want = reference.wgrad(grad.double(), x.double(), offsets_of(COUNTS), **options)  # type: ignore[arg-type]

    def destination(dtype: torch.dtype, value: float) -> Tensor:
        made = torch.full((4, k, n) if transposed else (4, n, k), value, dtype=dtype)
        return made.mT if transposed else made

    for out_dtype in {dtype, torch.float32}:
        written = destination(out_dtype, torch.nan)
        with launches() as log:
            wgrad(grad, x, _rows(), written, accumulate=False, **options)  # type: ignore[arg-type]
        assert log[-1].kernel == ("wgrad_aligned" if n == 48 else "wgrad_any")
        assert_near("written", written, want)
        assert not written[1].any(), "exact zeros for an expert without rows"
    start = _draw(4, n, k, dtype=torch.float32, seed=5)
    main = destination(torch.float32, 0.0)
    main.copy_(start)
    wgrad(grad, x, _rows(), main, accumulate=True, **options)  # type: ignore[arg-type]
    assert_near("accumulated", main, start.double() + want, ratio=3e-6)
    assert torch.equal(main[1], start[1])


def test_bias_gradient() -> None:
    grad = _poison_tail(_draw(ROWS, 37, dtype=torch.bfloat16))
    want = reference.bias_gradient(grad.double(), offsets_of(COUNTS))
    out = bias_gradient(grad, _rows(), torch.full((4, 37), torch.nan, dtype=torch.bfloat16), accumulate=False)
    assert_near("written", out, want)
    main = bias_gradient(grad, _rows(), torch.ones(4, 37), accumulate=True)
    assert_near("accumulated", main, want + 1, ratio=1e-6)
    assert torch.equal(main[1], torch.ones(37))


@pytest.mark.parametrize("counts", [[0, 0, 0], [0], [1], [0, 7, 1, 13, 0, 11], [129], [0, 0, 200]])
def test_counts(counts: list[int]) -> None:
    """Zero rows, one row, all rows to one expert, tails of every length."""
    rows, experts = sum(counts), len(counts)
    x, weight = _draw(rows, 48, dtype=torch.float32), _draw(experts, 32, 48, dtype=torch.float32, seed=1)
    out, _ = rows_gemm(x, weight, _rows(counts, rows))
    want, _ = reference.rows_gemm(x.double(), weight.double(), offsets_of(counts), rows)
    assert_near("out", out, want)
    d_weight = wgrad(out, x, _rows(counts, rows), torch.full((experts, 32, 48), torch.nan), accumulate=False)
    assert_near("d weight", d_weight, reference.wgrad(out.double(), x.double(), offsets_of(counts)))


SHIPPED_BLOCKS = [
    Config(block_m=128, block_n=256, block_k=64, warps=8, stages=3),
    Config(block_m=128, block_n=128, block_k=64, warps=8, stages=4, slices=8),
    Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4),
]


@pytest.mark.parametrize("config", SHIPPED_BLOCKS, ids=lambda config: f"{config.block_m}x{config.block_n}")
def test_shipped_block_sizes(config: Config) -> None:
    """The blocks that run on a GPU, at sizes that are no multiples of them; I = 144 is no multiple of 64."""
    run = Run(config=config)
    counts, n, k = [70, 0, 3, 130], 144, 176
    rows, total = _rows(counts, 210), sum(counts)
    for gate, transposed in [(Gate(), False), (Gate(activation=Activation.SWIGLU_OSS, interleaved=True), True)]:
        x, weight = _draw(210, k, dtype=torch.bfloat16), _draw(4, 2 * n, k, dtype=torch.bfloat16, seed=1, scale=0.1)
        weight = weight.mT.contiguous().mT if transposed else weight
        out, pre = rows_gemm(x, weight, rows, gate=gate, save_pre=True, run=run)
        assert pre is not None
        want, want_pre = reference.rows_gemm(x.double(), weight.double(), offsets_of(counts), 210, gate=gate)
        assert_near("pre", pre, want_pre)
        assert_near("out", out, want)
        grad, down = (
            _draw(210, k, dtype=torch.bfloat16, seed=2),
            _draw(4, n, k, dtype=torch.bfloat16, seed=3, scale=0.1),
        )
        d_pre, act, _ = gate_backward(grad, down, pre, rows, gate=gate, run=run)
        want_d_pre, want_act, _ = reference.gate_backward(
            grad.double(), down.double(), pre.double(), offsets_of(counts), gate=gate
        )
        assert_near("d pre", d_pre, want_d_pre)
        assert_near("activation", act, want_act)
        d_weight = wgrad(d_pre, x, rows, torch.zeros(4, 2 * n, k), accumulate=True, run=run)
        want_d = reference.wgrad(d_pre[:total].double(), x[:total].double(), offsets_of(counts))
        assert_near("d weight", d_weight, want_d)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": torch.zeros(59, 40)}, "x.shape"),
        ({"x": torch.zeros(60, 39)}, "weight.shape"),
        ({"weight": torch.zeros(3, 48, 40)}, "weight.shape"),
        ({"weight": torch.zeros(4, 48, 40, dtype=torch.bfloat16)}, "weight.dtype = 'torch.bfloat16'.*like x"),
        ({"bias": torch.zeros(4, 48, dtype=torch.float16)}, "bias.dtype = 'torch.float16'.*like x"),
        ({"x": torch.zeros(60, 40, dtype=torch.float64)}, "x.dtype.*bfloat16, float16, float32"),
        ({"bias": torch.zeros(4, 47)}, "bias.shape"),
        ({"index": torch.zeros(5, dtype=torch.int32)}, "index.shape"),
        ({"index": torch.zeros(60)}, "index.dtype.*int32, int64"),
        ({"index": torch.zeros(60, dtype=torch.int32), "divisor": 0}, "divisor = 0: must be at least 1"),
        ({"write_out": False}, "save_pre = False"),
        ({"kind": "dgrd"}, "kind = 'dgrd'.*forward, forward_gate, dgrad"),
        ({"weight": torch.zeros(4, 47, 40), "gate": Gate()}, "even with a gated activation"),
    ],
)
def test_wrong_operands_are_named(change: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {"x": torch.zeros(60, 40), "weight": torch.zeros(4, 48, 40), "rows": _rows()}
    with pytest.raises(SpecError, match=field):
        rows_gemm(**(arguments | change))  # type: ignore[arg-type]


def test_wrong_destinations_are_named() -> None:
    grad, x = torch.zeros(ROWS, 8, dtype=torch.bfloat16), torch.zeros(ROWS, 16, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="float32 to accumulate into"):
        wgrad(grad, x, _rows(), torch.zeros(4, 8, 16, dtype=torch.bfloat16), accumulate=True)
    with pytest.raises(SpecError, match=r"out\.dtype = 'torch\.float16': must be float32 or torch\.bfloat16"):
        wgrad(grad, x, _rows(), torch.zeros(4, 8, 16, dtype=torch.float16), accumulate=False)
    with pytest.raises(SpecError, match="out.shape"):
        wgrad(grad, x, _rows(), torch.zeros(4, 16, 8), accumulate=True)
    with pytest.raises(SpecError, match="contiguous"):
        wgrad(grad, x, _rows(), torch.zeros(4, 8, 32)[:, :, ::2], accumulate=True)
    with pytest.raises(SpecError, match="to gather by"):
        wgrad(grad, x, _rows(), torch.zeros(4, 8, 16), accumulate=True, gather_x=True)
    with pytest.raises(SpecError, match=r"index = \(60,\): must be None without gather_grad or gather_x"):
        wgrad(grad, x, _rows(), torch.zeros(4, 8, 16), accumulate=True, index=torch.zeros(60, dtype=torch.int32))
    with pytest.raises(SpecError, match=r"x\.shape = \(59, 16\): must be \[60, any\]"):
        wgrad(grad, x[1:], _rows(), torch.zeros(4, 16, 8).mT, accumulate=True)
    with pytest.raises(SpecError, match=r"x\.dtype.*like grad"):
        wgrad(grad, x.float(), _rows(), torch.zeros(4, 16, 8).mT, accumulate=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scale": torch.ones(17)}, r"scale.shape = \(17,\): must be \[18\]"),
        ({"scale": torch.ones(18, dtype=torch.int32)}, "scale.dtype"),
        ({"index": None}, "index = None: must be given with scale"),
        ({"index": torch.zeros(60, dtype=torch.int16)}, "index.dtype"),
        ({"pre": torch.zeros(60, 95)}, "pre.shape"),
        ({"pre": torch.zeros(60, 96, dtype=torch.float16)}, "pre.dtype = 'torch.float16'.*like grad"),
    ],
)
def test_wrong_operands_of_the_gate_backward_are_named(change: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {
        "grad": torch.zeros(9, 80), "weight": torch.zeros(4, 48, 80), "pre": torch.zeros(60, 96), "rows": _rows(),
        "gate": Gate(), "index": torch.zeros(60, dtype=torch.int32), "divisor": 2, "scale": torch.ones(18),
    }  # fmt: skip
    with pytest.raises(SpecError, match=field):
        gate_backward(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "k"), [(48, 80), (14, 7)], ids=["aligned", "any"])
def test_strided_and_wide_indices_give_the_same_bits(n: int, k: int) -> None:
    """Every second of 120 indices, and 64-bit ones."""
    wide = torch.randint(0, 18, (2 * ROWS,), generator=torch.Generator().manual_seed(3)).int()
    index = wide[::2].contiguous()
    x, weight, grad = (
        _draw(9, k, dtype=torch.float32),
        _draw(4, n, k, dtype=torch.float32),
        _draw(ROWS, n, dtype=torch.float32),
    )
    pre, down = _draw(ROWS, 2 * n, dtype=torch.float32), _draw(4, n, k, dtype=torch.float32, seed=1)

    def results(index: Tensor) -> list[Tensor]:
        out, _ = rows_gemm(x, weight, _rows(), index=index, divisor=2)
        d_pre, act, _ = gate_backward(
            x, down, pre, _rows(), gate=Gate(), index=index, divisor=2, scale=torch.arange(36.0)[::2]
        )
        d_weight = torch.empty(4, n, k)
        wgrad(grad, x, _rows(), d_weight, accumulate=False, index=index, divisor=2, gather_x=True)
        return [out, d_pre, act, d_weight]

    want = results(index)
    for other in (wide[::2], index.long()):
        assert all(torch.equal(a, b) for a, b in zip(results(other), want, strict=True))


@pytest.mark.parametrize("layout", ["slice", "every-second"])
@pytest.mark.parametrize(("n", "k"), [(48, 80), (14, 7)], ids=["aligned", "any"])
def test_strided_operands_of_epilogues_give_the_same_bits(n: int, k: int, layout: str) -> None:
    x, weight, bias, pre = (_draw(*shape, dtype=torch.float32) for shape in ((9, k), (4, n, k), (4, n), (ROWS, 2 * n)))
    index, scale = torch.arange(ROWS, dtype=torch.int32) % 18, torch.arange(18.0)
    options: dict[str, Any] = {"index": index, "divisor": 2}
    change = _strided(layout)
    results = []
    for bias_, pre_, scale_ in ((bias, pre, scale), (change(bias), change(pre), change(scale))):
        out, _ = rows_gemm(x, weight, _rows(), bias=bias_, **options)
        d_pre, act, _ = gate_backward(x, weight, pre_, _rows(), gate=Gate(), scale=scale_, **options)
        results.append([out, d_pre, act])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_tma_can_read() -> None:
    x = torch.ones(8, 64, dtype=torch.bfloat16)
    assert is_aligned(x) and is_aligned(x[:, 8:]) and is_aligned(x[::2])
    for other in (x[:, 1:49], x.mT, x[:, ::2], x[:1].expand(8, 64), torch.ones(8, 60, dtype=torch.bfloat16)[:, :48]):
        assert not is_aligned(other) and is_aligned(readable(other)) and torch.equal(readable(other), other)


GATHERED = {
    "rows_gemm_aligned": (rows_gemm_aligned, "a", "a_stride"),
    "gate_backward_aligned": (gate_backward_aligned, "a", "a_stride"),
    "wgrad_aligned": (wgrad_aligned, "right", "right_stride"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_gathered_by_16_byte_loads(dtype: torch.dtype) -> None:
    """Rows that start at multiples of 16 bytes but not of 16 elements are copied first: for such strides Triton
    compiles loads of single elements, with hundreds of spills. Rows at unaligned addresses are copied too."""
    n, k, step = 48, 80, 16 // dtype.itemsize
    x, weight = _draw(18, k, dtype=dtype), _draw(4, n, k, dtype=dtype, seed=1)
    grad, pre = _draw(ROWS, n, dtype=dtype, seed=2), _draw(ROWS, 2 * n, dtype=dtype, seed=3)
    index, seen = torch.arange(18, dtype=torch.int32).repeat(4)[:ROWS], []

    def check(kernel: str, launch: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if kernel in GATHERED:
            function, source, stride = GATHERED[kernel]
            given = dict(zip(function.arg_names, args, strict=False))
            assert given[source].data_ptr() % 16 == 0 and given[stride] % 16 == 0
            seen.append(kernel)
        launch(*args, **options)

    def results(x: Tensor) -> list[Tensor]:
        out, _ = rows_gemm(x, weight, _rows(), index=index)
        d_pre, act, _ = gate_backward(x, weight, pre, _rows(), gate=Gate(), index=index)
        d_weight = wgrad(grad, x, _rows(), torch.empty(4, n, k), accumulate=False, index=index, gather_x=True)
        return [out, d_pre, act, d_weight]

    want = results(x)
    for width, first in ((k + step, 0), (k + 16, 0), (k + 16, 1)):
        wide = torch.full((18, width), torch.nan, dtype=dtype)
        wide[:, first : first + k] = x
        with handled_launches(check):
            got = results(wide[:, first : first + k])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert seen == [*GATHERED] * 3
