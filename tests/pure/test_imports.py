"""Who may import whom, held by reading the sources, and that planning needs neither torch nor triton.

The path of the data runs one way (model description, costs, overlap graph, interleavings, partition, plan, engine,
kernels), and so do the imports. A new top-level module belongs into `WORDS` or into `MAY_IMPORT`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = "tessera_rt"
ROOT = Path(__file__).resolve().parents[2]

WORDS = (
    "cost_sources",
    "costs",
    "errors",
    "files",
    "model_spec",
    "plan",
    "plan_check",
    "presets",
    "rendezvous",
    "tasks",
    "timeline",
)
ENTRY = ("bench_ranks", "cli", "demo", "emulate", "profile", "start", "train")  # may import all, nobody imports them
# Who may import what besides itself: groups ("words"), or single modules of one ("moe.steps").
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "words": (),
    "differentiable_once": (),
    "kernels": ("differentiable_once", "errors"),
    "split": ("differentiable_once", "kernels", "words"),
    "scheduler": ("words",),
    "planner": ("scheduler", "words"),
    "waits": ("words",),
    "moe": ("differentiable_once", "kernels", "split", "waits", "words"),
    "engine": ("moe.steps", "moe.transport", "split", "waits", "kernels", "words"),
    "cuda_graphs": ("differentiable_once", "errors"),
    "models": ("moe", "split", "words"),
    "integrations": ("differentiable_once", "kernels.options", "kernels.weights", "moe", "split", "words"),
    "microbench": ("kernels", "moe", "words"),
    "testing": ("cuda_graphs", "kernels", "words", "split", "moe", "models", "scheduler"),  # no other group imports it
    "config": ("scheduler", "words"),
    "data": ("config", "words"),
    "launch": ("engine.watchdog", "waits", "words"),
    "checkpoint": ("words",),
    "progress": (),
    PACKAGE: ("words", "scheduler", "planner", "cuda_graphs"),  # tessera_rt/__init__.py, which all may import
}
WITHOUT_TORCH = ("words", "scheduler", "planner", "config", PACKAGE)  # anywhere in their files
TORCH = ("torch", "triton")


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int
    at_import_time: bool
    """Neither in a function nor under `if TYPE_CHECKING`."""


def group_of(module: str) -> str:
    top = module.removeprefix(f"{PACKAGE}.").partition(".")[0]
    return "words" if top in WORDS else top


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def known_prefix(name: str, modules: Mapping[str, str]) -> str:
    """The longest part of a dotted name that is a module of ours, else the name itself."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), name)


def imports_of(module: str, sources: Mapping[str, str]) -> Iterator[Import]:
    is_package = any(name.startswith(f"{module}.") for name in sources)

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        yield from (f"{base}.{alias.name}" for alias in node.names)

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                yield Import(known_prefix(target, sources), node.lineno, at_import_time)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import_time and not inside_function and not type_checking)

    yield from visit(ast.parse(sources[module]), True)


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every import in the sources (by module name) that the rules forbid, and every module they don't know."""
    problems = []
    graph: nx.DiGraph[str] = nx.DiGraph()
    at_import_time: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(sources)
    for module in sources:
        group = group_of(module)
        if group not in MAY_IMPORT and group not in ENTRY:
            problems.append(f"{module}: not in WORDS, MAY_IMPORT or ENTRY of this test")
            continue
        for found in imports_of(module, sources):
            where = f"{module}:{found.line} imports {found.target}"
            if is_within(found.target, (PACKAGE,)):
                graph.add_edge(module, found.target)
                short = found.target.removeprefix(f"{PACKAGE}.")
                free = group in ENTRY or group_of(found.target) in (group, PACKAGE)
                if (
                    not free
                    and group_of(found.target) not in MAY_IMPORT[group]
                    and not is_within(short, MAY_IMPORT[group])
                ):
                    problems.append(f"{where}: {group} may import {', '.join(MAY_IMPORT[group]) or 'nothing of ours'}")
            elif group in WITHOUT_TORCH and is_within(found.target, TORCH):
                problems.append(f"{where}: {group} must work without it")
            if found.at_import_time:
                at_import_time.add_edge(module, found.target)
    cli = f"{PACKAGE}.cli"
    if cli in at_import_time:
        for target in sorted(nx.descendants(at_import_time, cli)):
            if is_within(target, TORCH):
                chain = nx.shortest_path(at_import_time, cli, target)
                problems.append(f"{' -> '.join(chain)}: the command line must start without it")
    problems += [f"circular: {' -> '.join([*cycle, cycle[0]])}" for cycle in nx.simple_cycles(graph)]
    return problems


def repository_sources() -> dict[str, str]:
    """Every module of the package, also those behind the links, by import name."""
    sources = {}
    for folder, names, files in os.walk(ROOT / PACKAGE, followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def test_imports_follow_the_rules() -> None:
    assert broken_rules(repository_sources()) == []


def test_planning_and_the_command_line_load_without_torch() -> None:
    modules = [name for name in repository_sources() if group_of(name) in (*WITHOUT_TORCH, "cli")]
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = sorted({"torch", "triton"} & set(sys.modules))
    assert not loaded, f"importing {name} loads {loaded}"
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({"tasks": "import torch"}, "tasks:1 imports torch: words must work without it"),
        ({"planner.cut": "def f():\n    from torch.nn import Linear"}, "planner must work without it"),
        ({"tasks": "from tessera_rt.planner import cut", "planner.cut": ""}, "words may import nothing of ours"),
        ({"scheduler.a": "import tessera_rt.planner.cut", "planner.cut": ""}, "scheduler may import words"),
        ({"kernels.a": "from tessera_rt import tasks", "tasks": ""}, "kernels may import differentiable_once, errors"),
        ({"engine.loop": "from tessera_rt.moe.block import Block", "moe.block": ""}, "engine may import moe.steps"),
        ({"engine.loop": "from ..scheduler import a", "scheduler.a": ""}, "engine may import"),
        ({"engine.loop": "from tessera_rt.profile import run", "profile": ""}, "engine may import"),
        ({"helpers": ""}, "tessera_rt.helpers: not in WORDS"),
        ({"plan": "from . import tasks", "tasks": "from .plan import Plan"}, "circular"),
        ({"plan": "import tessera_rt.plan"}, "circular"),
        ({"cli": "from tessera_rt import train", "train": "import torch.nn"}, "must start without it"),
    ],
)
def test_planted_violations_are_found(sources: dict[str, str], problem: str) -> None:
    problems = broken_rules({"tessera_rt": ""} | {f"{PACKAGE}.{name}": text for name, text in sources.items()})
    assert len(problems) == 1 and problem in problems[0], problems


def test_allowed_imports_pass() -> None:
    sources = {
        "": "from tessera_rt.plan import Plan",
        ".errors": "",
        ".plan": "from tessera_rt.errors import PlanError",
        ".kernels.gemm": "import triton\nfrom tessera_rt.errors import TransportError",
        ".scheduler.lists": "from tessera_rt.plan import Plan",
        ".planner.cut": "from tessera_rt.scheduler import lists\nfrom .other import x",
        ".planner.other": "",
        ".moe": "",
        ".moe.steps": "import torch",
        ".engine.loop": "from tessera_rt.moe.steps import Program",
        ".cli": "if TYPE_CHECKING:\n    import torch\ndef train():\n    from tessera_rt.train import run",
        ".train": "import torch\nfrom tessera_rt.engine import loop",
    }
    assert broken_rules({f"{PACKAGE}{name}": text for name, text in sources.items()}) == []
