"""Dataclasses as plain values and back: what JSON and YAML hold, and one line for what they should not.

JSON has no infinity and no nan: a diverged run's numbers are written as null, and read back as nan.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiewise.core.errors import RunError

T = TypeVar("T")
_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def strict(value: Any) -> Any:
    """Return plain values as strict JSON takes them: infinities and nan become None."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_record(measured: Any) -> dict[str, Any]:
    """Return any dataclass as strict JSON takes it."""
    return strict(asdict(measured))


def from_record(cls: type[T], record: Any, where: str, fix: str = "correct it") -> T:
    """Read what `to_record` returned; a None where a number is meant is nan.

    Raises:
        RunError: on a missing field or a value of the wrong type, naming the field.
    """

    def build(cls: Any, record: Any, where: str) -> Any:
        if not isinstance(record, Mapping):
            raise RunError(f"{where} must be an object", fix)
        values, hints = {}, get_type_hints(cls)
        for item in fields(cls):
            if item.name in record:
                values[item.name] = read(hints[item.name], record[item.name], f"{where}: {item.name}")
            elif item.default is MISSING and item.default_factory is MISSING:
                raise RunError(f"{where}: {item.name} is missing", fix)
        return cls(**values)

    def read(hint: Any, value: Any, where: str) -> Any:
        outer, inner = get_origin(hint), get_args(hint)
        if outer in (Union, types.UnionType) and value is not None:
            return read(inner[0], value, where)
        if outer is list:
            if not isinstance(value, list):
                raise RunError(f"{where} must be a list", fix)
            return [read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
        if outer is dict and isinstance(value, Mapping):
            return {key: read(inner[1], item, f"{where}[{key!r}]") for key, item in value.items()}
        if outer is dict or is_dataclass(hint):
            return build(hint, value, where)
        return math.nan if hint is float and value is None else scalar(hint, value, where, fix)

    return build(cls, record, where)


def scalar(hint: Any, value: Any, where: str, fix: str) -> Any:
    """Return a value as what a field's hint says: a number, text, true or false, None where it is optional, or any.

    Raises:
        RunError: it is something else.
    """
    wanted = next((kind for kind in get_args(hint) if kind is not types.NoneType), hint)
    if wanted is Any or (value is None and wanted is not hint):
        return value
    if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool) != (
        wanted is bool
    ):
        raise RunError(f"{where} must be {_NAMES[wanted]}, not {value!r}", fix)
    return wanted(value)


def setting(hint: Any, value: Any, where: str) -> Any:
    """Return a value of YAML as what a field's hint says. Raises as `scalar`."""
    if get_origin(hint) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise RunError(f"{where} must be a list of text", "write [tied, untied], say")
    if isinstance(value, str) and (hint is float or float in get_args(hint)):
        with suppress(ValueError):  # YAML 1.1 takes 3e-3, without a point, for text
            value = float(value)
    return scalar(hint, value, where, "correct it")


def require(record: Any, names: str, holds: Callable[[Any], bool], fix: str) -> None:
    """See that something holds of the named fields of a dataclass, of those that are not None.

    Raises:
        RunError: it does not hold of one.
    """
    for name in names.split():
        value = getattr(record, name)
        if value is not None and not holds(value):
            raise RunError(f"{name} = {value!r}", fix)
