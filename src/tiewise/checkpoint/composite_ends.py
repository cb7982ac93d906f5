"""Ends of a composite model, such as VisionEncoderDecoder, with another class as one of its parts.

The architecture data has the composite with its default parts. A config chooses others, and then the names of their
ends replace those of the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tiewise.checkpoint.family_record import ClassEnds

Value = TypeVar("Value")


class PartPlace(NamedTuple):
    """Place of a part in a composite model."""

    at: str  # prefix of its modules, "decoder."
    path: str  # level of the config, "decoder"


def with_other_class(ends: ClassEnds, part: PartPlace, old: ClassEnds, new: ClassEnds) -> ClassEnds:
    """Return a composite's ends with the class `new` instead of `old` as a part."""
    at, inner = part.at, _inside(part, new)
    respelling = _Respelling(at, old, new)
    moved = replace(
        ends,
        inputs=_with_part(ends.inputs, at, inner.inputs),
        biases=_with_part(ends.biases, at, inner.biases),
        positions=_with_part(ends.positions, at, inner.positions),
        maps=_with_part(ends.maps, at, inner.maps),
        layers=_with_part(ends.layers, at, inner.layers),
        head={**_outside(ends.head, at), **inner.head},
        only_if={**_outside(ends.only_if, at), **inner.only_if},
        wide={**_outside(ends.wide, at), **inner.wide},
        tied=_ties(ends, at, inner),
        disk=respelling.disk(ends),
        loads=respelling.loads(ends),
    )
    if not _has_head_in(ends, at):
        return moved
    levels = [level for level in ends.decides if level != part.path]
    return replace(
        moved,
        output=inner.output,
        decides=tuple(dict.fromkeys([*levels, *inner.decides])),
        always=new.always,
        never=new.never,
        joined=new.joined,
    )


def with_head_of_part(ends: ClassEnds, part: PartPlace, of_part: ClassEnds | None) -> ClassEnds:
    """Add the layers between body and head of a part. A composite's data do not name them."""
    if of_part is None or not _has_head_in(ends, part.at):
        return ends
    inner = _inside(part, of_part)
    return replace(ends, head={**ends.head, **inner.head}, only_if={**ends.only_if, **inner.only_if})


def _has_head_in(ends: ClassEnds, at: str) -> bool:
    """Return whether the head of a composite is a module of the part at `at`."""
    return ends.output is not None and ends.output.startswith(at)


def _inside(part: PartPlace, ends: ClassEnds) -> ClassEnds:
    """Return the ends of a class under their names as a part of a composite."""
    at = part.at
    output = ends.output
    if output is not None:
        output = at + output
    ties = {at + target: at + source for target, source in ends.tied.items()}
    head = {at + name: _behind(at, others) for name, others in ends.head.items()}
    switches = {at + name: (f"{part.path}.{key}", value) for name, (key, value) in ends.only_if.items()}
    levels = [f"{part.path}.{level}".rstrip(".") for level in ends.decides]
    return replace(
        ends,
        inputs=_behind(at, ends.inputs),
        output=output,
        biases=_behind(at, ends.biases),
        positions=_behind(at, ends.positions),
        maps=_behind(at, ends.maps),
        layers=_behind(at, ends.layers),
        tied=ties,
        decides=tuple(levels),
        head=head,
        only_if=switches,
        wide={at + name: times for name, times in ends.wide.items()},
    )


def _behind(at: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names behind the prefix of a part."""
    return tuple(at + name for name in names)


def _with_part(composite: Iterable[str], at: str, inner: Iterable[str]) -> tuple[str, ...]:
    """Return a composite's names outside a part, and the names of the part's new class."""
    outside = [name for name in composite if not name.startswith(at)]
    return tuple(dict.fromkeys([*outside, *inner]))


def _outside(by_name: Mapping[str, Value], at: str) -> dict[str, Value]:
    """Return those items whose names are not of the part."""
    return {name: value for name, value in by_name.items() if not name.startswith(at)}


def _ties(ends: ClassEnds, at: str, inner: ClassEnds) -> dict[str, str]:
    """Return {target: source} of a composite's ties. A head outside the part is tied to the part's new table."""
    ties = {target: source for target, source in ends.tied.items() if not source.startswith(at)}
    ties |= inner.tied
    if ends.output is None or _has_head_in(ends, at):
        return ties
    if not inner.inputs:
        return ties
    head = f"{ends.output}.weight"
    is_tied_to_part = ends.tied.get(head, "").startswith(at)
    if is_tied_to_part:
        ties[head] = f"{inner.inputs[0]}.weight"
    return ties


class _Respelling:
    """Names in files of a composite with the class `new` at modules `at` instead of `old`.

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
            old = self._renamed_end(name)
            if old is not None and saved_as.endswith(old):
                disk[self._new_name(name, old)] = self._new_name(saved_as, old)
        return disk

    def loads(self, ends: ClassEnds) -> dict[str, Sequence[str]] | None:
        """Return `loads` of the composite with the new class; None if neither class has other names."""
        if ends.loads is None and self.new.loads is None:
            return None
        loads = self._respelt_loads(ends.loads or {})
        inner_loads = self.new.loads or {}
        # the head comes last: of two ends that one name in a file may be loaded into, the last gets it
        new_names = [*self.new.inputs, *self.new.biases]
        if self.new.output is not None:
            new_names.append(self.new.output)
        for name in new_names:
            full_name = self.at + name
            spellings = [*loads.get(full_name, ()), *_behind(self.at, inner_loads.get(name, ()))]
            if ends.prefix:
                spellings.append(f"{ends.prefix}.{full_name}")
            loads[full_name] = list(dict.fromkeys(spellings))
        return loads

    def _respelt_loads(self, outer_loads: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return `loads` of the composite's data with the new part's names instead of the old one's."""
        loads = _outside(outer_loads, self.at)
        for name, others in outer_loads.items():
            old = self._renamed_end(name)
            if old is None:
                continue
            new_name = self._new_name(name, old)
            loads[new_name] = [self._new_name(other, old) for other in others if other.endswith(old)]
        return loads

    def _renamed_end(self, name: str) -> str | None:
        """Return the old part's name of an end that the new part renames. None for any other name."""
        old = name.removeprefix(self.at)
        if not name.startswith(self.at) or old not in self.renamed:
            return None
        return old

    def _new_name(self, name: str, old: str) -> str:
        """Return `name` with the new part's name of an end instead of its ending `old`."""
        return name.removesuffix(old) + self.renamed[old]
