"""Draws docs/pipeline.png, the README's picture: one step of a real plan, with and without overlap.

    python docs/make_picture.py

The times are computed from the H800's device file (assumed rates); nothing was measured on a GPU.
"""

from __future__ import annotations

from pathlib import Path

from tessera_rt import Mesh, Workload, build_plan, load_device, load_model, roofline_costs, save_picture, simulate

PICTURE = Path(__file__).with_name("pipeline.png")


def main() -> None:
    model = load_model("qwen3-next-80b")
    costs = roofline_costs(model, Workload(tokens=8192, context=8192, ep=32), load_device("h800"))
    plan = build_plan(model, Mesh(pp=4, vpp=2, ep=32), costs, microbatches=12)
    serial = build_plan(
        model,
        plan.mesh,
        costs,
        microbatches=12,
        joint=False,
        fixed_bounds=(0, *(stage.stop for stage in plan.stages)),
    )
    save_picture(
        [
            simulate(plan, model, costs, label=f"{model.name}, planned with overlap"),
            simulate(serial, model, costs, overlap=False, label="same layers, no overlap"),
        ],
        PICTURE,
    )


if __name__ == "__main__":
    main()
