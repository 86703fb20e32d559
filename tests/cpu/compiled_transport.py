"""What the compiler makes of the transport's kernels, as JSON, for test_kernels_transport_compiled.py: run in a process
of its own, without the interpreter."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import triton

from tessera_rt.kernels.offline import compile_for, target_named
from tessera_rt.kernels.ptx_checks import (
    plain_loads_in_wait_loops,
    releases_without_barrier,
    waits_without_acquire,
)
from tessera_rt.kernels.shipped_transport import transport_launches


def main() -> None:
    target, model = target_named(sys.argv[1]), sys.argv[2]
    found = {}
    for launch in transport_launches(target.name, ""):
        wanted = launch.model == model and launch.dtype in ("bfloat16", "int32")
        if not wanted or "rows rows" in launch.sizes or launch.key in found:  # one choice per unit is the simpler code
            continue
        compiled = compile_for(target, launch.function, launch.args, launch.options)
        ptx = compiled.ptx
        found[launch.key] = {
            "kernel": launch.kernel,
            "sizes": launch.sizes,
            "spills": compiled.spills,
            "registers": compiled.registers,
            "releases": len(re.findall(r"\b(?:atom|red|st)\.[\w.]*(?:release|acq_rel)", ptx)),
            "bare_releases": releases_without_barrier(ptx),
            "acquires": len(re.findall(r"\bld\.global\.sys\.acquire", ptx)),
            "bare_waits": [*waits_without_acquire(ptx), *plain_loads_in_wait_loops(ptx)],
            "stores": Counter(re.findall(r"\bst\.global(?:\.[\w]+)+", ptx)),
        }
    print(json.dumps({"triton": triton.__version__, "kernels": list(found.values())}))


if __name__ == "__main__":
    main()
