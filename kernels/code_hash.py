"""A hash of what a function's code depends on, so that a committed report can say which of its rows are out of date."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
_PACKAGE = "tessera_rt.kernels."
_HOST_ONLY = "launch_metadata"  # a keyword of triton.jit that tells profilers something and compiles to nothing


@dataclass(frozen=True, slots=True)
class _Module:
    """Top-level definitions by name, and names imported from modules of this folder with their origin."""

    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str]]


class CodeHashes:
    """Hashes of functions in modules of this folder; each source is read once per instance."""

    def __init__(self) -> None:
        self._modules: dict[str, _Module] = {}
        self._hashes: dict[tuple[str, str], str] = {}

    def of(self, module: str, name: str) -> str:
        """sha256 over the syntax of ``name`` in ``module`` (a file of this folder, without .py) and of everything of
        this folder that it uses, directly or not. Comments, layout, docstrings and launch metadata do not count.

        Names are resolved by text: a local variable named like a top-level definition counts as a use of it.
        """
        if (module, name) not in self._hashes:
            self._hashes[module, name] = self._hash(module, name)
        return self._hashes[module, name]

    def _hash(self, module: str, name: str) -> str:
        parts: dict[tuple[str, str], str] = {}
        waiting = [(module, name)]
        while waiting:
            place = waiting.pop()
            if place in parts:
                continue
            of_module = self._module(place[0])
            node = of_module.definitions[place[1]]
            parts[place] = ast.dump(node)
            for used in {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}:
                if used in of_module.definitions:
                    waiting.append((place[0], used))
                elif used in of_module.imports:
                    waiting.append(of_module.imports[used])
        text = "\n".join(f"{file} {name}\n{dump}" for (file, name), dump in sorted(parts.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            source = (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
            self._modules[name] = _read_module(source)
        return self._modules[name]


def _read_module(source: str) -> _Module:
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = _Compiled().visit(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                definitions |= {child.id: node for child in ast.walk(target) if isinstance(child, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            file = (node.module or "").removeprefix(_PACKAGE)
            imports |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return _Module(definitions, imports)


class _Compiled(ast.NodeTransformer):
    """Leaves out what is not compiled: docstrings and launch metadata."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [word for word in node.keywords if word.arg != _HOST_ONLY]
        return self.generic_visit(node)
