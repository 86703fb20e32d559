"""The checks of compiled text on hand-written PTX."""

from __future__ import annotations

import pytest

from tessera_rt.kernels.offline import has_scalar_dot, instructions
from tessera_rt.kernels.ptx_checks import plain_loads_in_wait_loops, releases_without_barrier, waits_without_acquire

HEAD = ".visible .entry f(\n.param .u64 p\n)\n{\n"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("st.global.b32 [%rd1], %r1;\nbar.sync 0;\natom.global.sys.release.exch.b32 %r2, [%rd2], %r3;", 0),
        ("bar.sync 0;\nst.global.b32 [%rd1], %r1;\natom.global.sys.release.exch.b32 %r2, [%rd2], %r3;", 1),
        ("@%p1 st.global.b32 [%rd1], %r1;\n@%p2 red.release.gpu.global.add.u32 [%rd2], 1;", 1),
        ("atom.global.sys.release.exch.b32 %r2, [%rd2], %r3;", 1),
        ("bar.sync 0;\nst.shared.b32 [%r9], %r1;\nst.release.sys.global.b32 [%rd2], %r3;", 0),
        ("st.global.b32 [%rd1], %r1;\natom.global.sys.relaxed.add.u32 %r2, [%rd2], 1;", 0),
        ("st.global.b32 [%rd1], %r1;\nfence.acq_rel.sys;", 1),
    ],
)
def test_releases(body: str, count: int) -> None:
    assert len(releases_without_barrier(f"{HEAD}{body}\nret;\n}}")) == count


LOOPS = {
    "plain load of a fixed address": (
        "$L1:\nld.global.b32 %r1, [%rd1];\nsetp.lt.s32 %p1, %r1, 5;\n@%p1 bra $L1;",
        ["ld.global.b32 %r1, [%rd1];"],
    ),
    "volatile load": ("$L1:\nld.volatile.global.b32 %r1, [%rd1];\nsetp.lt.s32 %p1, %r1, 5;\n@%p1 bra $L1;", []),
    "acquire": ("$L1:\nld.acquire.sys.global.b32 %r1, [%rd1];\nsetp.lt.s32 %p1, %r1, 5;\n@%p1 bra $L1;", []),
    "moving address": (
        "$L1:\nld.global.b32 %r1, [%rd1];\nadd.s64 %rd1, %rd1, 4;\nsetp.lt.u64 %p1, %rd1, %rd2;\n@%p1 bra $L1;",
        [],
    ),
    "lost load": ("setp.lt.s32 %p1, %r1, 5;\n$L1:\n@%p1 bra $L1;", ["loop $L1 polls nothing"]),
    "nothing at all": ("$L1:\nbra.uni $L1;", ["loop $L1 polls nothing"]),
    "a loop that works": ("$L1:\nld.global.b32 %r1, [%rd1];\nst.global.b32 [%rd2], %r1;\n@%p1 bra $L1;", []),
    "exit in the middle": (
        "$L1:\nadd.s32 %r1, %r1, 1;\nsetp.lt.s32 %p1, %r1, 5;\n@!%p1 bra $L2;\nbra.uni $L1;\n$L2:",
        [],
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_wait_loops(name: str) -> None:
    body, want = LOOPS[name]
    assert plain_loads_in_wait_loops(f"{HEAD}{body}\nret;\n}}") == want


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("$L1:\nld.volatile.global.b32 %r1, [%rd1];\n@%p1 bra $L1;", 1),
        ("$L1:\nadd.s32 %r2, %r2, 1;\natom.global.sys.relaxed.add.u32 %r1, [%rd1], 0;\n@%p1 bra $L1;", 1),
        ("$L1:\nld.acquire.sys.global.b32 %r1, [%rd1];\n@%p1 bra $L1;", 0),
        ("$L1:\natom.global.sys.acquire.add.u32 %r1, [%rd1], 0;\n@%p1 bra $L1;", 0),
        ("$L1:\natom.global.sys.release.exch.b32 %r1, [%rd1], 1;\n@%p1 bra $L1;", 0),
        ("$L1:\nld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];\n@%p1 bra $L1;", 0),
        ("$L1:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;\n@!%p1 bra $L1;", 0),
    ],
)
def test_waits_without_acquire(body: str, count: int) -> None:
    assert len(waits_without_acquire(f"{HEAD}{body}\nret;\n}}")) == count


def test_scalar_dots_are_those_left_in_a_blocked_layout() -> None:
    layouts = "#blocked = #ttg.blocked<{}>\n#mma = #ttg.nvidia_mma<{}>\n"
    scalar = "%3 = tt.dot %1, %2, %0, inputPrecision = ieee : tensor<64x32xf32, #a> -> tensor<64x64xf32, #blocked>"
    tensor = scalar.replace("#blocked>", "#mma>")
    assert has_scalar_dot(layouts + scalar) and not has_scalar_dot(layouts + tensor)


def test_instructions_of_a_disassembly() -> None:
    sass = "        /*0000*/   LDC R1, c[0x0][0x28] ;\n        /*0010*/   @!P0 STG.E.128 desc[UR4][R2.64], R4 ;\n"
    assert instructions(sass) == ["LDC", "STG.E.128"]
