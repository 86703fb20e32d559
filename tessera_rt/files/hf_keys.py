"""Reading keys of a Hugging Face ``config.json``: every missing or wrong key is collected, then reported at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tessera_rt.errors import Problem
from tessera_rt.files.model_validation import ABSENT, MAX_SIZE

_T = TypeVar("_T")


class ConfigKeys:
    """Reads keys of a config and collects what is missing or wrong.

    A key that cannot be read gives a harmless stand-in: the caller goes on to find further faults, and ``problems``
    keeps the result from being used. Each method takes alternative names of the key, the first found counts; a key of
    value null counts as missing, except where null is a value.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self.problems: list[Problem] = []

    def has(self, *names: str) -> bool:
        return any(self._config.get(name) is not None for name in names)

    def raw(self, *names: str) -> tuple[str, object]:
        """(name, value) of the key; ABSENT where none of the names is there."""
        for name in names:
            if self._config.get(name) is not None:
                return name, self._config[name]
        return names[0], ABSENT

    def fail(self, name: str, value: object, allowed: str, remedy: str = "") -> None:
        if not self.failed(name):
            self.problems.append(Problem(name, value, allowed, remedy))

    def failed(self, *names: str) -> bool:
        return any(problem.field in names for problem in self.problems)

    def is_null(self, name: str) -> bool:
        return name in self._config and self._config[name] is None

    def size(
        self, *names: str, default: int | None = None, null: int | None = None, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        name, value = self.raw(*names)
        if null is not None and any(map(self.is_null, names)):
            return null
        if value is ABSENT and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(name, value, f"an integer from {least} to {most}")
            return max(least, 1)
        return value

    def number(self, *names: str, default: float | None = None, above: float = 0.0, inclusive: bool = False) -> float:
        name, value = self.raw(*names)
        if value is ABSENT and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            if value > above or (inclusive and value == above):
                return float(value)
        self.fail(name, value, f"a finite number {'of at least' if inclusive else 'above'} {above:g}")
        return 1.0

    def flag(self, name: str, default: bool | None = None) -> bool:
        _, value = self.raw(name)
        if value is ABSENT and default is not None:
            return default
        if not isinstance(value, bool):
            self.fail(name, value, "true or false")
        return value is True

    def choice(self, name: str, values: Mapping[str, _T], default: str) -> _T:
        _, value = self.raw(name)
        text = default if value is ABSENT else value
        if not isinstance(text, str) or text not in values:
            self.fail(name, value, f"one of {', '.join(values)}")
            return values[default]
        return values[text]

    def names(self, *keys: str, values: Mapping[str, str], count: int | None) -> list[str] | None:
        """A list of names (or a text of letters) translated by ``values``; None where the key is absent."""
        name, given = self.raw(*keys)
        if given is ABSENT:
            return None
        items: Sequence[object] = list(given) if isinstance(given, list | str) else [given]
        wrong = sorted({str(item) for item in items if not isinstance(item, str) or item not in values})
        if wrong or not isinstance(given, list | str):
            self.fail(name, ", ".join(wrong), f"made of {', '.join(values)}")
            return None
        if self.failed("num_hidden_layers"):
            return None
        if count is not None and len(items) != count:
            self.fail(name, f"{len(items)} layers", f"{count} layers long (num_hidden_layers)")
            return None
        return [values[str(item)] for item in items]

    def indices(self, name: str, count: int) -> frozenset[int]:
        _, value = self.raw(name)
        if value is ABSENT or self.failed("num_hidden_layers"):
            return frozenset()
        good = isinstance(value, list) and all(type(item) is int and 0 <= item < count for item in value)
        if not good or not isinstance(value, list):
            self.fail(name, value, f"a list of layer numbers from 0 to {count - 1}")
            return frozenset()
        return frozenset(value)

    def rope(self, name: str, default: float | None = None) -> float:
        """``rope_theta`` or ``partial_rotary_factor``: at the top level, or in ``rope_parameters`` (transformers 5)."""
        _, nested = self.raw("rope_parameters")
        if not self.has(name) and isinstance(nested, Mapping):
            if isinstance(nested.get("full_attention"), Mapping):  # one set for each kind of attention
                nested = nested["full_attention"]
            inner = ConfigKeys(nested)
            value = inner.number(name, default=default)
            self.problems += [
                Problem(f"rope_parameters.{problem.field}", problem.value, problem.allowed)
                for problem in inner.problems
            ]
            return value
        return self.number(name, default=default)

    def head_dim(self, heads: int, hidden: int, needed: bool) -> int:
        """``head_dim``; unless ``needed``, null or missing means hidden_size / num_attention_heads."""
        if needed or self.has("head_dim", "attention_head_dim"):
            return self.size("head_dim", "attention_head_dim")
        if hidden % heads and not self.failed("hidden_size", "num_attention_heads"):
            allowed = f"given where num_attention_heads ({heads}) does not divide hidden_size ({hidden})"
            self.fail("head_dim", ABSENT, allowed)
        return max(hidden // heads, 1)
