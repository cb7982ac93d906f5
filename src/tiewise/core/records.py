"""Dataclasses as JSON and YAML values, and checks of their fields.

JSON has no infinity and no NaN. A number of a diverged run is written as null and read back as NaN.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiewise.core.errors import RunError, TiewiseError, suggest_choices

T = TypeVar("T")
_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def to_strict_json(value: Any) -> Any:
    """Return plain values with None for each infinity and NaN, as strict JSON requires."""
    if isinstance(value, dict):
        return {key: to_strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(item) for item in value]
    is_non_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_non_finite else value


def to_record(instance: Any) -> dict[str, Any]:
    """Return a dataclass instance as values of strict JSON."""
    record: dict[str, Any] = to_strict_json(asdict(instance))
    return record


def from_record(cls: type[T], record: Any, where: str, remedy: str = "correct it") -> T:
    """Read a dataclass instance from a result of `to_record`.

    Raises:
        RunError: a field is missing or has a wrong type; the message starts with `where`.
    """
    value: T = _read_value(cls, record, where, remedy)
    return value


def _read_value(hint: Any, value: Any, where: str, remedy: str) -> Any:
    """Return a JSON value as the type of a hint: dataclass, list, dict, optional or scalar."""
    outer, inner = get_origin(hint), get_args(hint)
    if outer in (Union, types.UnionType) and value is not None:
        return _read_value(inner[0], value, where, remedy)
    if outer is list:
        if not isinstance(value, list):
            raise RunError(f"{where} must be a list", remedy)
        return [_read_value(inner[0], item, f"{where}[{i}]", remedy) for i, item in enumerate(value)]
    if outer is dict:
        items = _require_object(value, where, remedy).items()
        return {key: _read_value(inner[1], item, f"{where}[{key!r}]", remedy) for key, item in items}
    if is_dataclass(hint):
        return _read_dataclass(hint, _require_object(value, where, remedy), where, remedy)
    if hint is float and value is None:
        return math.nan
    return read_scalar(hint, value, where, remedy)


def _require_object(value: Any, where: str, remedy: str) -> Mapping[str, Any]:
    """Return a value that is a JSON object; raise RunError for any other."""
    if not isinstance(value, Mapping):
        raise RunError(f"{where} must be an object", remedy)
    return value


def _read_dataclass(cls: Any, record: Mapping[str, Any], where: str, remedy: str) -> Any:
    """Return a dataclass from a JSON object; raise RunError for a missing field without a default."""
    values, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        is_required = item.default is MISSING and item.default_factory is MISSING
        if item.name in record:
            values[item.name] = _read_value(hints[item.name], record[item.name], f"{where}: {item.name}", remedy)
        elif is_required:
            raise RunError(f"{where}: {item.name} is missing", remedy)
    return cls(**values)


def read_scalar(hint: Any, value: Any, where: str, remedy: str) -> Any:
    """Return a value as the type of a field's hint.

    The hint is a number, text, bool or Any. An optional field also accepts None.

    Raises:
        RunError: the value has another type, or is an integer of 64 bits or more.
    """
    expected = next((hinted for hinted in get_args(hint) if hinted is not types.NoneType), hint)
    is_optional = expected is not hint
    if expected is Any or (value is None and is_optional):
        return value
    accepted = (int, float) if expected is float else expected
    is_mixed_up = isinstance(value, bool) != (expected is bool)  # Python counts a bool as an int
    if not isinstance(value, accepted) or is_mixed_up:
        raise RunError(f"{where} must be {_NAMES[expected]}, not {value!r}", remedy)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # arrays count in int64
        raise RunError(f"{where} is too large a number", remedy)
    return expected(value)


def read_setting(hint: Any, value: Any, where: str) -> Any:
    """Return a YAML value as the type of a field's hint. Raises as `read_scalar`."""
    if get_origin(hint) is tuple:
        return _read_texts(value, where)
    takes_float = hint is float or float in get_args(hint)
    if takes_float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 reads 3e-3, without a point, as text
            value = float(value)
    return read_scalar(hint, value, where, "correct it")


def _read_texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple; raise RunError for anything else."""
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
        return tuple(items)
    raise RunError(f"{where} must be a list of text", "write [tied, untied], say")


def require(
    record: Any, names: str, holds: Callable[[Any], bool], remedy: str, error: type[TiewiseError] = RunError
) -> None:
    """Raise `error` if a named field is not None and fails the test `holds`.

    `names` are separated by spaces.
    """
    for name in names.split():
        value = getattr(record, name)
        if value is not None and not _passes(holds, value):
            raise error(f"{name} = {repr(value)[:80]}", remedy)


def _passes(holds: Callable[[Any], bool], value: Any) -> bool:
    """Return whether a value passes a test. A value of a type that the test cannot read fails it."""
    try:
        return holds(value)
    except TypeError:  # a text instead of a number
        return False


def require_choice(record: Any, name: str, supported: Collection[str], error: type[TiewiseError] = RunError) -> None:
    """Raise `error` unless a field of a record is None or a supported name.

    The remedy names the nearest supported name.
    """
    value = getattr(record, name)
    is_supported = isinstance(value, str) and value in supported
    if value is not None and not is_supported:
        raise error(f"{name} = {repr(value)[:80]}", suggest_choices(value, supported))
