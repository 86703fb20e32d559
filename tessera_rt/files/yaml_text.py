"""YAML in and out without its traps: one reading of numbers and booleans, no duplicate keys, errors with line, column.

PyYAML reads YAML 1.1, where ``1e-5`` is a text, ``010`` is eight, ``1:30`` is ninety and ``no`` is false. Here plain
scalars are read as YAML 1.2's core schema says (https://yaml.org/spec/1.2.2/#103-core-schema), decimal numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

from tessera_rt.errors import Problem, SpecError, TesseraError

_CORE: Final = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ("~", "n", "N", "")),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), tuple("tTfF")),
    ("int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), tuple("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        tuple("-+0123456789."),
    ),
    ("merge", re.compile(r"^<<$"), ("<",)),
)


class _Loader(yaml.SafeLoader):
    """Safe loader of the core schema that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes every text which the loader would read as something else."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}  # those of YAML 1.1 are not wanted


class Folded(str):
    """A text that ``dump_yaml`` breaks at its spaces into indented lines (``>-``); it reads back as one line."""

    __slots__ = ()


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Texts with line ends other than newline are escaped: PyYAML would write them as they are and read a newline."""
    escaped = any(end in text for end in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if escaped else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(
    Folded, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:str", str(data), style=">")
)
for _name, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list(_first))


def parse_yaml(text: str, where: str, error: type[TesseraError] = SpecError) -> object:
    """The data of one YAML document. ``where`` names the source in errors.

    Raises ``error`` for an empty text and for bad syntax, with line and column counted from 1.
    """
    if not text.strip():
        raise error.of(where, [Problem("file", "", "a YAML document", "it is empty")])
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        lines = text.splitlines()
        line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
        why = " ".join(filter(None, (fault.context, fault.problem)))
        raise error.of(where, [Problem(place, line, "YAML", why)]) from None
    except yaml.reader.ReaderError as fault:
        before = text[: fault.position]
        place = f"line {before.count(chr(10)) + 1}, column {fault.position - before.rfind(chr(10))}"
        problem = Problem(place, text[fault.position : fault.position + 1], "YAML", "remove this unprintable character")
        raise error.of(where, [problem]) from None
    except RecursionError:
        raise error.of(where, [Problem("file", text[:40], "YAML", "it is nested too deeply")]) from None
    except ValueError as fault:  # such as a date with a month 13, or an integer of 5000 digits
        raise error.of(where, [Problem("file", str(fault), "YAML with values that exist")]) from None


def dump_yaml(data: object, *, width: int = 120) -> str:
    """YAML of plain data, in its own order of keys; ``parse_yaml`` reads the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=None)
