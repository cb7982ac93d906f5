"""Ends of a composite model, such as VisionEncoderDecoder, with another class as a part.

The architecture data has the composite with its default parts. If a config chooses other parts, the names of their
ends replace those of the default parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from tiewise.checkpoint.family_record import ClassEnds

Value = TypeVar("Value")


class PartPlace(NamedTuple):
    """Place of a part in a composite model."""

    prefix: str  # prefix of its modules, such as "decoder."
    path: str  # level of the config, such as "decoder"


def with_other_class(ends: ClassEnds, part: PartPlace, old: ClassEnds, new: ClassEnds) -> ClassEnds:
    """Return a composite's ends with the class `new` instead of `old` as a part."""
    prefix, inner = part.prefix, _inside(part, new)
    respelling = _Respelling(prefix, old, new)
    moved = replace(
        ends,
        inputs=_with_part(ends.inputs, prefix, inner.inputs),
        biases=_with_part(ends.biases, prefix, inner.biases),
        positions=_with_part(ends.positions, prefix, inner.positions),
        maps=_with_part(ends.maps, prefix, inner.maps),
        layers=_layers(ends, prefix, old, new),
        head={**_outside(ends.head, prefix), **inner.head},
        only_if={**_outside(ends.only_if, prefix), **inner.only_if},
        wide={**_outside(ends.wide, prefix), **inner.wide},
        tied=_ties(ends, prefix, inner),
        disk=respelling.disk(ends),
        loads=respelling.loads(ends),
    )
    if not _has_head_in(ends, prefix):
        return moved
    levels = [level for level in ends.decides if level != part.path]
    return replace(
        moved,
        output=inner.output,
        decides=tuple(dict.fromkeys([*levels, *inner.decides])),
        always=new.always,
        never=new.never,
        joined=new.joined,
        no_boundary=new.no_boundary,
        counts_from_pad=new.counts_from_pad,
    )


def with_head_of_part(ends: ClassEnds, part: PartPlace, part_ends: ClassEnds | None) -> ClassEnds:
    """Return a composite's ends with the tensors between body and head of a part added.

    The architecture data of the composite lacks them.
    """
    if part_ends is None or not _has_head_in(ends, part.prefix):
        return ends
    inner = _inside(part, part_ends)
    return replace(ends, head={**ends.head, **inner.head}, only_if={**ends.only_if, **inner.only_if})


def part_inside(ends: ClassEnds, prefix: str) -> ClassEnds:
    """Return the ends of a part that the architecture data lacks, by the composite's names."""
    output = None
    if ends.output is not None and _has_head_in(ends, prefix):
        output = ends.output.removeprefix(prefix)
    return ClassEnds(
        inputs=tuple(name.removeprefix(prefix) for name in ends.inputs if name.startswith(prefix)),
        output=output,
        biases=tuple(name.removeprefix(prefix) for name in ends.biases if name.startswith(prefix)),
    )


def _has_head_in(ends: ClassEnds, prefix: str) -> bool:
    """Return whether the head of a composite is inside the part with this prefix."""
    return ends.output is not None and ends.output.startswith(prefix)


def _inside(part: PartPlace, ends: ClassEnds) -> ClassEnds:
    """Return the ends of a class under their names as a part of a composite."""
    prefix = part.prefix
    output = ends.output
    if output is not None:
        output = prefix + output
    ties = {prefix + target: prefix + source for target, source in ends.tied.items()}
    head = {prefix + name: _prefixed(prefix, others) for name, others in ends.head.items()}
    switches = {prefix + name: (f"{part.path}.{key}", value) for name, (key, value) in ends.only_if.items()}
    levels = [f"{part.path}.{level}".rstrip(".") for level in ends.decides]
    return replace(
        ends,
        inputs=_prefixed(prefix, ends.inputs),
        output=output,
        biases=_prefixed(prefix, ends.biases),
        positions=_prefixed(prefix, ends.positions),
        maps=_prefixed(prefix, ends.maps),
        layers=_prefixed(prefix, ends.layers),
        tied=ties,
        decides=tuple(levels),
        head=head,
        only_if=switches,
        wide={prefix + name: times for name, times in ends.wide.items()},
    )


def _prefixed(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return names with the prefix of a part added."""
    return tuple(prefix + name for name in names)


def _with_part(composite: Iterable[str], prefix: str, inner: Iterable[str]) -> tuple[str, ...]:
    """Return a composite's names outside a part, and the names of the part's new class."""
    outside = [name for name in composite if not name.startswith(prefix)]
    return tuple(dict.fromkeys([*outside, *inner]))


def _layers(ends: ClassEnds, prefix: str, old: ClassEnds, new: ClassEnds) -> tuple[str, ...]:
    """Return the names before layer numbers of a composite whose part has the class `new`.

    The result is empty if the names in files, which may lack the part's prefix, do not follow from the data.
    """
    if set(old.layers) == set(new.layers):
        return ends.layers
    part_module = prefix.removesuffix(".").rpartition(".")[2]
    layers = list(_prefixed(prefix, new.layers))
    for name in ends.layers:
        if name.startswith(prefix):
            continue
        is_of_part = part_module in name.split(".")
        old_layers = [layer for layer in old.layers if f".{name}".endswith(f".{layer}")]
        if is_of_part and not old_layers:
            return ()
        if not is_of_part:
            layers.append(name)
        for layer in old_layers:
            layers += [name.removesuffix(layer) + new_layer for new_layer in new.layers]
    return tuple(dict.fromkeys(layers))


def _outside(by_name: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the items whose names are outside the part."""
    return {name: value for name, value in by_name.items() if not name.startswith(prefix)}


def _ties(ends: ClassEnds, prefix: str, inner: ClassEnds) -> dict[str, str]:
    """Return {target: source} of a composite's ties. A head outside the part is tied to the part's new table."""
    ties = {target: source for target, source in ends.tied.items() if not source.startswith(prefix)}
    ties |= inner.tied
    if ends.output is None or _has_head_in(ends, prefix):
        return ties
    if not inner.inputs:
        return ties
    head = f"{ends.output}.weight"
    is_tied_to_part = ends.tied.get(head, "").startswith(prefix)
    if is_tied_to_part:
        ties[head] = f"{inner.inputs[0]}.weight"
    return ties


class _Respelling:
    """Names in files of a composite whose part has the class `new`, not `old`.

    Where a file of the old composite has `x.embed_tokens`, a file of the new one has `x.wte`.
    """

    def __init__(self, prefix: str, old: ClassEnds, new: ClassEnds) -> None:
        self.prefix, self.new = prefix, new
        self.renamed = dict(zip(old.inputs, new.inputs, strict=False))
        self.renamed |= dict(zip(old.biases, new.biases, strict=False))
        if old.output is not None and new.output is not None:
            self.renamed[old.output] = new.output

    def disk(self, ends: ClassEnds) -> dict[str, str]:
        """Return `disk` of the composite with the new class."""
        disk = _outside(ends.disk, self.prefix)
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
        # the head comes last: if one stored name may be loaded into two ends, the last one gets it
        new_names = [*self.new.inputs, *self.new.biases]
        if self.new.output is not None:
            new_names.append(self.new.output)
        for name in new_names:
            full_name = self.prefix + name
            spellings = [*loads.get(full_name, ()), *_prefixed(self.prefix, inner_loads.get(name, ()))]
            if ends.prefix:
                spellings.append(f"{ends.prefix}.{full_name}")
            loads[full_name] = list(dict.fromkeys(spellings))
        return loads

    def _respelt_loads(self, outer_loads: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return `loads` of the composite's data with the new part's names instead of the old one's."""
        loads = _outside(outer_loads, self.prefix)
        for name, others in outer_loads.items():
            old = self._renamed_end(name)
            if old is None:
                continue
            new_name = self._new_name(name, old)
            loads[new_name] = [self._new_name(other, old) for other in others if other.endswith(old)]
        return loads

    def _renamed_end(self, name: str) -> str | None:
        """Return the old part's name of an end that the new part renames, else None."""
        old = name.removeprefix(self.prefix)
        if not name.startswith(self.prefix) or old not in self.renamed:
            return None
        return old

    def _new_name(self, name: str, old: str) -> str:
        """Return `name` with its ending `old` replaced by the new part's name."""
        return name.removesuffix(old) + self.renamed[old]
