"""Upper bounds of the kernels on H100 and B200, from bytes, operations, tiles and occupancy. Nothing is run.

Writes results/kernel_bounds.json and results/kernel_bounds.md. The occupancy of each configuration comes from
results/kernel_report.json (made by bench_kernel_report.py).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tessera_rt.kernels.config_table import GATED_KERNELS, KERNELS, MINORS, WGRAD
from tessera_rt.kernels.configs import Choice, config_for, layout_of
from tessera_rt.kernels.efficiency import PEAKS, Bound, bound_of, data_work, layer_load
from tessera_rt.kernels.inspection import config_text
from tessera_rt.kernels.options import NO_GATE
from tessera_rt.kernels.shapes import RANKS, SHAPES, TOKENS_PER_RANK

RESULTS = Path(__file__).resolve().parent / "results"
COMMUNICATION_SMS = 16

NOTE = f"""# What the kernels can reach at best

Bounds from sizes, not measurements: no kernel has been run on a GPU, and no GPU number is claimed. Each bound is
min(peak x tile efficiency x wave efficiency, operations per byte x bandwidth); `kernels/efficiency.py` says what is
left out (everything that makes a real kernel slower).

Assumptions: {TOKENS_PER_RANK} tokens on each of {RANKS} expert-parallel ranks, uniform routing, bf16, fp32 main
gradients, the `large` configurations, inputs read once. Peaks are those of the vendor's data sheets for dense bf16.
"Load" is how a layer reads rows: gathered through pointers or in order by TMA; the bytes are the same.
"-{COMMUNICATION_SMS} SMs" is the bound with that many SMs left to communication. Occupancy is blocks per SM (of the
variant with fewest) and warps from the compiled code (`kernel_report.json`); the grid is one block per SM whatever the
occupancy, because the SM budget counts programs.

- *Tile* below 1: the last tile of each expert, or columns past N, are computed in vain. Uneven routing adds half a tile
  of rows per expert on average.
- *Wave* below 1: in the last round some SMs have no tile.
- The weight gradient reads and writes fp32 main gradients once per call: with few rows per expert that is its limit.
- The kernels that only move data (routing, gather-sum, bias gradient) have a least time, their bytes at full bandwidth;
  those under about 5 microseconds are bound by their launch instead, which a captured graph makes cheaper.
- The gathered weight gradient keeps two stages of copies in flight instead of the configured three (the row numbers are
  loaded in the loop too), so it will stay further below its bound than the others.
"""


def bounds_of(target: str) -> list[tuple[Bound, Bound, str, str]]:
    """(bound on all SMs, bound without the communication SMs, load, configuration) of every kernel and shape."""
    peak, found = PEAKS[target], []
    for kernel in KERNELS:
        for shape in SHAPES:
            gate = shape.gate if kernel in GATED_KERNELS else NO_GATE
            for weight in ("gate_up", "down") if kernel in WGRAD else ("gate_up",):
                load = layer_load(kernel, shape, weight)
                config = config_for(
                    Choice(
                        kernel=kernel, dtype="bfloat16", size="large", layout=layout_of(gate), load=load,
                        activation=gate.activation.name.lower(),
                        biased=shape.bias and kernel in ("forward", "forward_gate"),
                        architecture=target, minor=MINORS[-1],
                    )
                )  # fmt: skip
                whole = bound_of(kernel, shape, config, peak, sms=peak.sms, weight=weight)
                part = bound_of(kernel, shape, config, peak, sms=peak.sms - COMMUNICATION_SMS, weight=weight)
                found.append((whole, part, load, config_text(config)))
    return found


def occupancy(target: str) -> dict[tuple[str, str, str, str], int]:
    """Blocks per SM by (kernel, model, load, configuration) in bf16, of the variant that has fewest, from the newest
    Triton of the report."""
    file = RESULTS / "kernel_report.json"
    if not file.exists():
        sys.exit(f"{file} is missing: run bench_kernel_report.py first")
    reports = [entry for entry in json.loads(file.read_text(encoding="utf-8"))["reports"] if entry["target"] == target]
    newest = max(reports, key=lambda entry: tuple(map(int, entry["triton"].split("."))))
    blocks: dict[tuple[str, str, str, str], int] = {}
    for row in newest["rows"]:
        product = row["kernel"] in KERNELS
        if (row["dtype"], row["size"]) == ("bfloat16", "large") if product else row["dtype"] != "float16":
            key = (row["kernel"], row["model"], row["load"], row["config"])
            blocks[key] = min(blocks.get(key, row["blocks_per_sm"]), row["blocks_per_sm"])
    return blocks


def main() -> None:
    text, data = [NOTE], {}
    for target, peak in PEAKS.items():
        blocks = occupancy(target)
        text.append(f"\n## {peak.name} ({peak.flops / 1e12:.0f} TFLOPS, {peak.bandwidth / 1e12:.2f} TB/s)\n")
        head = ("kernel", "model", "sizes", "rows/expert", "load", "configuration", "blocks/SM", "GFLOP", "MB",
                "FLOP/byte", "tile", "wave", "bound TFLOPS", "of peak", f"-{COMMUNICATION_SMS} SMs",
                "limit")  # fmt: skip
        text += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        rows = []
        for whole, part, load, config in bounds_of(target):
            per_sm = blocks[whole.kernel.split()[0], whole.model, load, config]
            cells = (
                whole.kernel, whole.model, whole.sizes, f"{whole.rows_per_expert:.0f}", load, config, str(per_sm),
                f"{whole.work.flops / 1e9:.0f}", f"{whole.work.bytes / 1e6:.0f}", f"{whole.work.intensity:.0f}",
                f"{whole.tile_efficiency:.3f}", f"{whole.wave_efficiency:.3f}", f"{whole.flops / 1e12:.0f}",
                f"{whole.flops / peak.flops:.2f}", f"{part.flops / 1e12:.0f}", whole.limited_by,
            )  # fmt: skip
            text.append(f"| {' | '.join(cells)} |")
            said = {"load": load, "config": config, "blocks_per_sm": per_sm, "bound": whole.flops}
            rows.append(asdict(whole) | said)
        data[target] = rows + _data_rows(target, blocks, text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kernel_bounds.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (RESULTS / "kernel_bounds.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print("\n".join(text))


def _data_rows(target: str, blocks: dict[tuple[str, str, str, str], int], text: list[str]) -> list[dict[str, object]]:
    """The kernels that only move data: adds their table to the note, and returns its rows."""
    text += ["", "| kernel | model | blocks/SM | MFLOP | MB | least time us |", "|" + "---|" * 6]
    rows = []
    for shape in SHAPES:
        for kernel, work in data_work(shape).items():
            per_sm = min(count for key, count in blocks.items() if key[:2] == (kernel, shape.name))
            microseconds = work.bytes / PEAKS[target].bandwidth * 1e6
            cells = (kernel, shape.name, str(per_sm), f"{work.flops / 1e6:.1f}", f"{work.bytes / 1e6:.2f}",
                     f"{microseconds:.2f}")  # fmt: skip
            text.append(f"| {' | '.join(cells)} |")
            rows.append(
                {"kernel": kernel, "model": shape.name, "work": asdict(work), "blocks_per_sm": per_sm}
                | {"least_microseconds": microseconds}
            )
    return rows


if __name__ == "__main__":
    main()
