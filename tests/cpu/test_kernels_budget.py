"""SM budget, configuration table, launch metadata, and which kernels can share an SM."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from tessera_rt.errors import SpecError
from tessera_rt.kernels import budget, config_table, configs, shipped, shipped_data
from tessera_rt.kernels.architecture import architecture
from tessera_rt.kernels.budget import SmBudget, device_budget
from tessera_rt.kernels.config_table import HALF, KERNELS, MINORS, TABLE
from tessera_rt.kernels.gather_sum import gather_sum
from tessera_rt.kernels.offline import TARGETS, target_named
from tessera_rt.kernels.operands import Run
from tessera_rt.kernels.options import RouterRule
from tessera_rt.kernels.peer_memory import virtual_ranks
from tessera_rt.kernels.routing import place
from tessera_rt.kernels.shapes import SHAPES, ExpertShape
from tessera_rt.kernels.sharing import Footprint, blocks_per_sm, can_share
from tessera_rt.kernels.trace import Trace
from tessera_rt.kernels.transport import PeerTransport
from tessera_rt.kernels.work import Work, gate_backward_work, rows_gemm_work, wgrad_work
from tessera_rt.moe import router
from tessera_rt.moe.config import MoEConfig
from tessera_rt.moe.layer import MoE
from tessera_rt.moe.triton_backend import TritonBackend
from tessera_rt.testing import kernel_grids
from tessera_rt.testing.interpreter import launches
from tessera_rt.testing.interpreter_builder import CorrectedBuilder
from tessera_rt.testing.peer_calls import traffic_of

CPU = torch.device("cpu")


def test_budget_splits_the_sms() -> None:
    split = SmBudget(132, 16)
    assert split.compute == 116
    assert [split.programs(tasks) for tasks in (0, 1, 115, 116, 5000)] == [1, 1, 115, 116, 116]
    assert device_budget(CPU, 1).compute == device_budget(CPU).compute - 1


@pytest.mark.parametrize(
    ("total", "communication", "message"),
    [
        (0, 0, "total = 0: must be an integer, at least 1"),
        (132.0, 0, r"total = 132\.0: must be an integer"),
        (True, 0, "total = True: must be an integer"),
        (4, 4, "communication = 4: must be an integer from 0 to 3"),
        (4, -1, "communication = -1: must be an integer from 0 to 3"),
        (4, 2.5, r"communication = 2\.5: must be an integer"),
    ],
)
def test_impossible_budgets_are_refused(total: int, communication: int, message: str) -> None:
    with pytest.raises(SpecError, match=f"SM budget.*\n.*{message}"):
        SmBudget(total, communication)


def test_library_gemms_obey_the_budget_and_the_former_setting_returns() -> None:
    def carveout() -> int | None:
        return torch._C._get_sm_carveout_experimental()  # type: ignore[no-any-return]

    before = carveout()
    with SmBudget(132, 20).library_gemms():
        assert carveout() == 20
        with SmBudget(132).library_gemms():
            assert carveout() is None
        assert carveout() == 20
        with pytest.raises(KeyError), SmBudget(132, 4).library_gemms():
            assert carveout() == 4
            raise KeyError
        assert carveout() == 20
    assert carveout() == before


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("peers", [False, True])
def test_a_module_keeps_to_the_budget_of_its_backend(peers: bool) -> None:
    """Forward and backward: products within the compute SMs, the transport within those for communication."""
    split, trace = SmBudget(8, communication=5), Trace()
    run = Run(split, trace=trace)
    traffic = traffic_of("tokens-rows", 1, 70, experts=6, top_k=2, hidden=48)
    transport = PeerTransport(traffic, virtual_ranks(1)[0], run=run) if peers else None
    config = MoEConfig(hidden=48, intermediate=80, experts=6, router=RouterRule(top_k=2))
    layer = MoE(config, backend=TritonBackend(run), transport=transport)
    with launches() as log:
        layer(torch.randn(70, 48)).sum().backward()
    within = {"transport": split.communication, "others": split.compute}
    for launch in log:
        assert (
            launch.grid[0] <= within["transport" if "_put_" in launch.kernel or "_take_" in launch.kernel else "others"]
        )
    widest = {launch.grid[0] for launch in log if launch.kernel.startswith(("rows_gemm", "gate_backward", "wgrad"))}
    assert widest == {split.compute}
    assert [entry.kernel for entry in trace.launches] == [launch.kernel for launch in log]


@pytest.mark.usefixtures("interpreted")
def test_architecture_of_a_cpu_needs_the_corrected_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert architecture(CPU) == "interpreter"
    calls = {
        "place": lambda: place(torch.zeros(3, 1, dtype=torch.int32), 2),
        "gather_sum": lambda: gather_sum(torch.ones(2, 4), torch.zeros(3, 1, dtype=torch.int32)),
    }
    with monkeypatch.context() as stock:
        stock.setattr(CorrectedBuilder, "corrected", False)
        for call in (lambda: architecture(CPU), *calls.values()):
            with pytest.raises(SpecError, match=r"Triton's own.*testing\.interpreter\.install"):
                call()
    monkeypatch.delenv("TRITON_INTERPRET")
    for call in (lambda: architecture(CPU), *calls.values()):
        with pytest.raises(SpecError, match="a CUDA device"):
            call()


@pytest.mark.usefixtures("interpreted")
def test_the_choice_of_a_module_keeps_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_on_gpu", lambda logits: True)
    config = MoEConfig(hidden=48, intermediate=80, experts=6, router=RouterRule(top_k=2))
    layer = MoE(config, backend=TritonBackend(Run(SmBudget(8, communication=5))))
    with launches() as log:
        layer(torch.randn(70, 48)).square().sum().backward()
    choices = [launch.grid[0] for launch in log if launch.kernel.startswith("topk")]
    assert choices == [3, 3] and all(launch.grid[0] <= 3 for launch in log)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "interpreter"])
@pytest.mark.parametrize("minor", MINORS)
def test_every_choice_has_a_configuration(arch: str, minor: str) -> None:
    choices = configs.all_choices(arch, minor, (*HALF, "float32"))
    assert {choice.kernel for choice in choices} == set(KERNELS)
    for choice in choices:
        config = configs.config_for(choice)
        for block in (config.block_m, config.block_n, config.block_k, config.warps):
            assert block & (block - 1) == 0, choice
        assert (config.slices in (4, 8) and config.block_m in configs.tile_heights(arch)) or "wgrad" in choice.kernel


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_number_of_rows_does_not_change_the_order_of_sums(arch: str) -> None:
    """A row's bits must not depend on how many others there are: large and small have the same steps along K, and the
    same pieces of columns whose sums are the router's gradient."""
    chosen = {
        choice: configs.config_for(choice) for choice in configs.all_choices(arch, "3.9", (*HALF, "float32"))
        if choice.size != "any"
    }  # fmt: skip
    for choice, config in chosen.items():
        assert config.block_k == chosen[dataclasses.replace(choice, size="large", load="tma")].block_k, choice
        if choice.kernel == "gate_backward":  # the row partials, which add up to the router's gradient
            other = chosen[dataclasses.replace(choice, size="large")]
            assert (config.block_n, config.slices) == (other.block_n, other.slices), choice


def test_precision_of_products() -> None:
    """As torch's own products on CUDA."""
    assert [configs.precision(dtype) for dtype in (torch.bfloat16, torch.float16)] == ["ieee", "ieee"]
    assert configs.precision(torch.float32) == "tf32x3"
    of_torch = torch.backends.cuda.matmul
    before = of_torch.fp32_precision
    try:
        for allowed, want in [("tf32", "tf32"), ("ieee", "tf32x3")]:
            of_torch.fp32_precision = allowed
            assert configs.precision(torch.float32) == want
    finally:
        of_torch.fp32_precision = before


def test_other_architectures_take_the_any_size_class() -> None:
    assert configs.tile_heights("sm80") == (64,)


def test_unknown_choice_is_named() -> None:
    choice = configs.Choice(kernel="conv", dtype="bfloat16", size="large", architecture="sm90", minor="3.9")
    with pytest.raises(SpecError, match="conv"):
        configs.config_for(choice)


def test_fingerprint_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = configs.fingerprint("sm90", "3.9")
    assert before == configs.fingerprint("sm90", "3.9") and len(before) == 64
    assert before != configs.fingerprint("sm100", "3.9") != configs.fingerprint("sm100", "3.6")
    changed = dataclasses.replace(TABLE[-1], config=dataclasses.replace(TABLE[-1].config, stages=2))
    monkeypatch.setattr(configs, "TABLE", (*TABLE[:-1], changed))
    assert configs.fingerprint("sm90", "3.9") != before


@pytest.mark.parametrize(("version", "minor"), [("3.6.0", "3.6"), ("3.9.1", "3.9")])
def test_known_triton_versions(monkeypatch: pytest.MonkeyPatch, version: str, minor: str) -> None:
    monkeypatch.setattr(configs.triton, "__version__", version)
    assert configs.triton_minor() == minor


def test_newer_triton_warns_and_older_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs.triton, "__version__", "3.11.0")
    with pytest.warns(UserWarning, match=r"3\.11 is newer"):
        assert configs.triton_minor() == MINORS[-1]
    monkeypatch.setattr(configs.triton, "__version__", "3.5.1")
    with pytest.raises(SpecError, match=r"at least 3\.6"):
        configs.triton_minor()


def test_rows_of_the_table_are_reachable() -> None:
    """A row that a former one always hides is a mistake."""
    used = set()
    for arch in ("sm90", "sm100", "interpreter"):
        for minor in MINORS:
            for choice in configs.all_choices(arch, minor, (*HALF, "float32")):
                config = configs.config_for(choice)
                used.add(next(i for i, row in enumerate(TABLE) if row.config is config))
    assert used == set(range(len(TABLE)))


def test_blocks_share_an_sm_when_everything_fits() -> None:
    """A put kernel of 46 registers x 256 threads fits beside a product of 170 x 256; one with more does not."""
    sm90 = TARGETS["sm90"]
    product = Footprint(registers=176 * 256, shared_bytes=181_272, threads=256)
    put = Footprint(registers=48 * 256, shared_bytes=1024, threads=256)
    assert can_share(product, put, sm90) and blocks_per_sm(product, sm90) == 1
    for greedy in (
        dataclasses.replace(put, registers=96 * 256),
        dataclasses.replace(put, shared_bytes=64_000),
        dataclasses.replace(put, threads=1920),
    ):
        assert not can_share(product, greedy, sm90)
    assert blocks_per_sm(put, sm90) == 5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("size", [(32, 48), (13, 11)], ids=["aligned", "any"])
def test_grids_are_read_back_from_the_programs(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that tests/gpu makes on a device; here one of eight SMs."""
    monkeypatch.setattr(budget, "INTERPRETED_SMS", 8)
    hidden, intermediate = size
    kernel_grids.check_grids(CPU, hidden=hidden, intermediate=intermediate, tokens=20, dtype=torch.bfloat16)


@pytest.mark.usefixtures("interpreted")
def test_a_grid_beyond_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "INTERPRETED_SMS", 8)
    monkeypatch.setattr(SmBudget, "programs", lambda self, tasks: max(1, min(self.total, tasks)))
    with pytest.raises(AssertionError, match="SMs, budget 1"):
        kernel_grids.check_grids(CPU, hidden=13, intermediate=11, tokens=20, dtype=torch.bfloat16)


def test_registers_are_given_out_by_warp() -> None:
    """170 registers take 22 units of 256 for each of eight warps; each block has a kilobyte of the system's."""
    assert Footprint.of(170, 180_248, 256) == Footprint(registers=176 * 256, shared_bytes=181_272, threads=256)


def test_unknown_target_is_named() -> None:
    with pytest.raises(SpecError, match="sm90, sm100"):
        target_named("sm70")


def test_work_of_the_products() -> None:
    plain = rows_gemm_work(rows=10, experts=2, n=6, k=4, element=2, out_columns=6)
    assert plain == Work(2 * 10 * 6 * 4, 2 * (10 * 4 + 10 * 6 + 2 * 6 * 4))
    gated = rows_gemm_work(rows=10, experts=2, n=6, k=4, element=2, out_columns=3, saved=6, biased=True)
    assert gated == Work(480, 2 * (10 * (4 + 3 + 6) + 2 * 6 * 5))
    assert gate_backward_work(rows=10, experts=2, n=3, k=4, element=2, pre=6, partials=1) == Work(
        240, 2 * (10 * (4 + 3 + 12) + 2 * 3 * 4) + 40
    )
    write = wgrad_work(rows=10, experts=2, n=3, k=4, element=2, out_element=4, accumulate=False)
    assert write == Work(240, 2 * 10 * 7 + 4 * 24)
    assert wgrad_work(rows=10, experts=2, n=3, k=4, element=2, out_element=4, accumulate=True).bytes == 140 + 192


def test_every_shipped_kernel_states_its_work() -> None:
    """Launch metadata of each kernel, evaluated on the arguments of a launch."""
    products = shipped.product_launches("sm90", "3.9", dtypes=("bfloat16",), sizes=("large", "any"), shapes=SHAPES[:1])
    for launch in (*products, *shipped_data.data_launches("sm90", "3.9", shapes=SHAPES[:1])):
        describe = launch.function.kwargs["launch_metadata"]
        names = launch.function.arg_names
        arguments = dict(zip(names, launch.args, strict=False)) | launch.options
        kernel = dataclasses.make_dataclass("Kernel", ["name"])(launch.kernel)
        stated = describe((1,), kernel, arguments)
        assert stated["name"] == launch.kernel and stated["bytes"] > 0 and stated["flops"] >= 0
        if launch.kernel in KERNELS:
            assert stated["flops"] > 0


def test_shapes_are_those_of_the_presets() -> None:
    presets = Path(__file__).parents[2] / "tessera_rt" / "presets"
    for shape in SHAPES:
        spec = yaml.safe_load((presets / f"{shape.name}.yaml").read_text(encoding="utf-8"))
        layer = _first_moe(spec["layers"])
        want = (layer.get("latent") or spec["hidden"], layer["intermediate"], layer["experts"], layer["top_k"])
        assert (shape.hidden, shape.intermediate, shape.experts, shape.top_k) == want, shape.name
        router = layer["router"]
        assert (shape.score, shape.groups) == (router["score"], router.get("groups", 1)), shape.name
        assert shape.rule.keep_groups == router.get("keep_groups", 1)
        assert shape.choice_bias == router.get("choice_bias", False)
        assert shape.rule.softmax_after_topk == router.get("softmax_after_topk", False)
        assert shape.rule.renormalize == router.get("renormalize", False)
        activation = layer.get("activation", "swiglu")
        assert shape.gate.activation.name.lower() == activation and shape.bias == layer.get("bias", False)


def _first_moe(layers: list[dict[str, object]]) -> dict[str, object]:
    for entry in layers:
        nested = entry.get("layers")
        found = _first_moe(nested) if isinstance(nested, list) else entry.get("feed_forward")
        if isinstance(found, dict) and found.get("kind") == "moe":
            return found
    return {}


def test_shape_sizes() -> None:
    shape = ExpertShape(name="x", hidden=8, intermediate=4, experts=16, top_k=2)
    assert (shape.product, shape.local_experts, shape.rows) == (8, 2, 16384)
    assert (shape.odd.hidden, shape.odd.intermediate, shape.odd.product) == (7, 3, 6)
    assert config_table.Config(block_m=1, block_n=1, block_k=1, warps=1, stages=1).group_m == 8
