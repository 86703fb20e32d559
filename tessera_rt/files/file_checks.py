"""What readers and writers of data files share: strict models, faults with field and remedy, whole files or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tessera_rt.errors import Problem
from tessera_rt.files.model_validation import ABSENT, nearest

_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


class StrictModel(BaseModel):
    """Base of the models that check files: no unknown keys, no conversion of types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Every fault pydantic found in data for ``model``: field, value, what is allowed, and a remedy if there is one."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def part_fault(value: object, allowed: str, remedy: str = "") -> PydanticCustomError:
    """For validators: what to raise when only ``value``, a part of the field, is wrong."""
    return PydanticCustomError("part", "must be {allowed}", {"value": value, "allowed": allowed, "remedy": remedy})


def field_name(location: Sequence[str | int]) -> str:
    """``("stages", 1, "rank")`` -> ``stages[1].rank``; ``file`` for the whole."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "file"


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that readers see the old or the whole new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    location, kind, context, value = details["loc"], details["type"], details.get("ctx", {}), details["input"]
    field = field_name(location)
    if kind == "missing":
        return Problem(field, ABSENT, "given", "add it; a file that was cut off lacks its end")
    if kind == "extra_forbidden":
        known = tuple(_model_at(model, location[:-1]).model_fields)
        remedy = nearest(str(location[-1]), known) or f"known: {', '.join(known)}"
        return Problem(field, value, "left out: there is no such key", remedy)
    if kind == "greater_than_equal":
        return Problem(field, value, f"at least {context['ge']}")
    if kind == "less_than_equal":
        return Problem(field, value, f"at most {context['le']}")
    if kind == "greater_than":
        return Problem(field, value, f"more than {context['gt']}")
    if kind == "less_than":
        return Problem(field, value, f"less than {context['lt']}")
    if kind in ("literal_error", "enum"):
        return Problem(field, value, f"one of {context['expected']}")
    if kind == "part":
        return Problem(field, context["value"], context["allowed"], context["remedy"])
    allowed = _ALLOWED.get(kind, details["msg"])
    remedy = "write it without quotes" if isinstance(value, str) and "number" in allowed else ""
    return Problem(field, value, allowed, remedy)


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """The model of the mapping at ``location``, found through the annotations of lists and mappings."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = current.model_fields[str(part)].annotation
        else:  # list[X], tuple[X, ...], dict[str, X]
            current = next(arg for arg in reversed(get_args(current)) if arg is not Ellipsis)
    assert isinstance(current, type) and issubclass(current, BaseModel)
    return current
