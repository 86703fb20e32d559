"""Device files: the ones that come with the package, and everything that can be wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tessera_rt.cost_sources.device import DeviceSpec, device_from_yaml, device_ids, load_device
from tessera_rt.cost_sources.work import DTYPE_BYTES, WorkKind
from tessera_rt.errors import CostError


def file_of(name: str) -> str:
    return (Path(load_device.__code__.co_filename).parents[1] / "devices" / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["h800", "h200"])
def test_devices_of_the_package_state_a_source_for_every_figure(name: str) -> None:
    device = load_device(name)
    assert name in device_ids() and device.name == name
    assert set(device.peak_flops) == set(DTYPE_BYTES) and set(device.fractions) == set(WorkKind)

    def figures(data: object, prefix: str = "") -> set[str]:
        if not isinstance(data, dict):
            return set()
        if "value" in data:
            return {prefix.removesuffix(".")}
        return set().union(*(figures(value, f"{prefix}{key}.") for key, value in data.items()))

    assert figures(yaml.safe_load(file_of(name))) == set(device.sources)
    assert all(source.strip() for source in device.sources.values())


def test_known_figures() -> None:
    h800, h200 = load_device("h800"), load_device("h200")
    assert (h800.hbm_bytes, h800.hbm_bytes_per_s, h800.sm_count) == (80 * 10**9, 3.35e12, 132)
    assert (h200.hbm_bytes, h200.hbm_bytes_per_s, h200.sm_count) == (141 * 10**9, 4.8e12, 132)
    assert h800.rate(WorkKind.GEMM, "bf16") == pytest.approx(593.4e12)
    assert h800.memory_rate == pytest.approx(0.8 * 3.35e12)
    assert h200.intra_node.bytes_per_s > h800.intra_node.bytes_per_s


def test_contention_grows_with_the_communication_sms_and_is_as_stated_at_the_default() -> None:
    device = load_device("h800")
    assert device.contention_at(device.comm_sms) == device.contention
    values = [device.contention_at(sms) for sms in range(1, device.sm_count)]
    assert values == sorted(values) and 0 < values[0] < device.contention < values[-1]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(file_of("h800").replace("name: h800", "name: mine"), encoding="utf-8")
    device = load_device(path)
    assert isinstance(device, DeviceSpec) and device.name == "mine"


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    data = yaml.safe_load(file_of("h800"))
    data["sm_count"]["value"] = 0
    data["hbm_bytes"]["value"] = "80 GB"
    data["hbm_bytes_per_s"]["value"] = float("nan")
    data["peak_flops"]["bf16"]["value"] = -1
    data["fractions"]["gemm"]["value"] = 1.5
    data["fractions"]["memory"]["source"] = ""
    data["contention"] = 0.15
    del data["intra_node"]["latency_ns"]
    data["colour"] = "green"
    with pytest.raises(CostError) as error:
        device_from_yaml(yaml.safe_dump(data))
    assert {problem.field for problem in error.value.problems} == {
        "sm_count.value",
        "hbm_bytes.value",
        "hbm_bytes_per_s.value",
        "peak_flops.bf16.value",
        "fractions.gemm.value",
        "fractions.memory.source",
        "contention",
        "intra_node.latency_ns",
        "colour",
    }


def test_figures_that_do_not_go_together() -> None:
    data = yaml.safe_load(file_of("h800"))
    data["comm_sms"]["value"] = 132
    data["peak_flops"] = {"int4": {"value": 1.0, "source": "x"}}
    with pytest.raises(CostError) as error:
        device_from_yaml(yaml.safe_dump(data))
    assert {problem.field for problem in error.value.problems} == {"comm_sms.value", "peak_flops.int4"}
    data["peak_flops"] = {}
    with pytest.raises(CostError, match="a rate for at least one of bf16"):
        device_from_yaml(yaml.safe_dump(data))


@pytest.mark.parametrize("text", ["", "[1, 2]", "name: [", "name: h800\nname: h801\n"])
def test_what_is_no_device_file(text: str) -> None:
    with pytest.raises(CostError):
        device_from_yaml(text)


def test_unknown_device_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="h200, h800, or a YAML file that exists; did you mean 'h800'"):
        load_device("h80")
    with pytest.raises(CostError, match="a YAML file that exists"):
        load_device(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostError, match="can be read"):
        load_device(tmp_path / "binary.yaml")
