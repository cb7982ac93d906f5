"""Ends of a composite model, such as VisionEncoderDecoder, with another class as one of its parts.

The architecture data has the composite with its default parts. A config chooses others, and then the names of their
ends replace those of the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tiewise.checkpoint.family_record import ClassEnds

Value = TypeVar("Value")


class PartPlace(NamedTuple):
    """Place of a part in a composite model."""

    at: str  # prefix of its modules, "decoder."
    path: str  # level of the config, "decoder"


def with_other_class(ends: ClassEnds, part: PartPlace, old: ClassEnds, new: ClassEnds) -> ClassEnds:
    """Return a composite's ends with the class `new` instead of `old` as a part."""
    at, respelling = part.at, _Respelling(part.at, old, new)
    moved = replace(
        ends,
        inputs=_names(ends.inputs, at, new.inputs),
        biases=_names(ends.biases, at, new.biases),
        positions=_names(ends.positions, at, new.positions),
        maps=_names(ends.maps, at, new.maps),
        layers=_names(ends.layers, at, new.layers),
        head={**_outside(ends.head, at), **_head_of_part(part, new)},
        only_if={**_outside(ends.only_if, at), **_switches_of_part(part, new)},
        wide={**_outside(ends.wide, at), **{at + name: times for name, times in new.wide.items()}},
        tied=_ties(ends, at, new),
        disk=respelling.disk(ends),
        loads=respelling.loads(ends),
    )
    if ends.output is None or not ends.output.startswith(at):
        return moved
    levels = [level for level in ends.decides if level != part.path]
    levels += [f"{part.path}.{level}".rstrip(".") for level in new.decides]
    return replace(
        moved,
        output=None if new.output is None else at + new.output,
        decides=tuple(dict.fromkeys(levels)),
        always=new.always,
        never=new.never,
        joined=new.joined,
    )


def with_head_of_part(ends: ClassEnds, part: PartPlace, of_part: ClassEnds | None) -> ClassEnds:
    """Add the layers between body and head of a part, which a composite's data do not name."""
    if of_part is None or ends.output is None or not ends.output.startswith(part.at):
        return ends
    return replace(
        ends,
        head={**ends.head, **_head_of_part(part, of_part)},
        only_if={**ends.only_if, **_switches_of_part(part, of_part)},
    )


def _names(composite: Iterable[str], at: str, of_part: Iterable[str]) -> tuple[str, ...]:
    """Return a composite's names outside a part, and the names of the part's new class below it."""
    outside = [name for name in composite if not name.startswith(at)]
    return tuple(dict.fromkeys([*outside, *(at + name for name in of_part)]))


def _outside(by_name: Mapping[str, Value], at: str) -> dict[str, Value]:
    """Return those items whose names are not of the part."""
    return {name: value for name, value in by_name.items() if not name.startswith(at)}


def _head_of_part(part: PartPlace, ends: ClassEnds) -> dict[str, tuple[str, ...]]:
    """Return `head` of a class as a composite with this class as a part has it."""
    return {part.at + name: tuple(part.at + other for other in others) for name, others in ends.head.items()}


def _switches_of_part(part: PartPlace, ends: ClassEnds) -> dict[str, tuple[str, Any]]:
    """Return `only_if` of a class as a composite with this class as a part has it."""
    return {part.at + name: (f"{part.path}.{key}", value) for name, (key, value) in ends.only_if.items()}


def _ties(ends: ClassEnds, at: str, new: ClassEnds) -> dict[str, str]:
    """Return {target: source} of a composite's ties; a head outside the part is tied to the part's new table."""
    ties = {target: source for target, source in ends.tied.items() if not source.startswith(at)}
    ties |= {at + target: at + source for target, source in new.tied.items()}
    has_outer_head = ends.output is not None and not ends.output.startswith(at)
    head = f"{ends.output}.weight"
    if has_outer_head and new.inputs and ends.tied.get(head, "").startswith(at):
        ties[head] = f"{at}{new.inputs[0]}.weight"
    return ties


class _Respelling:
    """Names in files of a composite with the class `new` instead of `old` at the modules `at`.

    A file that calls the old part's table `x.embed_tokens` calls that of the new one `x.wte`.
    """

    def __init__(self, at: str, old: ClassEnds, new: ClassEnds) -> None:
        self.at, self.new = at, new
        self.renamed = dict(zip(old.inputs, new.inputs, strict=False))
        self.renamed |= dict(zip(old.biases, new.biases, strict=False))
        if old.output is not None and new.output is not None:
            self.renamed[old.output] = new.output

    def disk(self, ends: ClassEnds) -> dict[str, str]:
        """Return `disk` of the composite with the new class."""
        disk = _outside(ends.disk, self.at)
        for name, saved_as in ends.disk.items():
            new_name, spellings = self._respelt(name, [saved_as])
            if new_name is not None and spellings:
                disk[new_name] = spellings[0]
        return disk

    def loads(self, ends: ClassEnds) -> dict[str, Sequence[str]] | None:
        """Return `loads` of the composite with the new class; None if neither class has other names."""
        if ends.loads is None and self.new.loads is None:
            return None
        outer_loads, inner_loads = ends.loads or {}, self.new.loads or {}
        loads = _outside(outer_loads, self.at)
        for name, others in outer_loads.items():
            new_name, spellings = self._respelt(name, others)
            if new_name is not None:
                loads[new_name] = spellings
        new_names = [*self.new.inputs, *self.new.biases]
        if self.new.output is not None:
            new_names.append(self.new.output)
        for name in new_names:
            spellings = [*loads.get(self.at + name, ())]
            spellings += [self.at + other for other in inner_loads.get(name, ())]
            if ends.prefix:
                spellings.append(f"{ends.prefix}.{self.at}{name}")
            loads[self.at + name] = list(dict.fromkeys(spellings))
        return loads

    def _respelt(self, name: str, others: Iterable[str]) -> tuple[str | None, list[str]]:
        """Return a name of the old part, and other names of it, as those of the new part; None for any other name."""
        old = name.removeprefix(self.at)
        if not name.startswith(self.at) or old not in self.renamed:
            return None, []
        new = self.renamed[old]
        return self.at + new, [other.removesuffix(old) + new for other in others if other.endswith(old)]
