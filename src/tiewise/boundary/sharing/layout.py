"""The layout of shared layers: made from a spec, written in a config and read back.

    "tiewise_sharing": {"spec": "ffn", "stacks": {"bert.encoder.layer": [
        {"layers": [0, 0, 0, 0], "names": ["intermediate.dense.weight", "intermediate.dense.bias", ...]}]}}

`layers` gives for every layer the first one that holds the same Parameters; a layer that shares with none names itself.
The layout is written out, not derived again, so that a checkpoint loads as it was saved whatever later versions decide.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from tiewise.boundary.sharing.stacks import ATTENTION, FFN, NEITHER, PlacedLayer, Stacks
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.sharing_spec import SharingSpec

ENTRY = "tiewise_sharing"
_SAVE_AGAIN = "save the model again with tiewise"
_SEVERAL_PARTS = {"all": (ATTENTION, FFN, NEITHER)}  # kinds of a spec that share more than the part of their name


def groups_of(sources: Sequence[int]) -> list[list[int]]:
    """Return the layers that share, two or more each.

    `sources` has for every layer the first one with the same Parameter.
    """
    groups: dict[int, list[int]] = {}
    for layer, source in enumerate(sources):
        groups.setdefault(source, []).append(layer)
    return [groups[source] for source in sorted(groups) if len(groups[source]) > 1]


@dataclass(frozen=True)
class Layout:
    """Shared layers of a model: their spec, and the sources of each parameter by stack."""

    spec: SharingSpec
    stacks: dict[str, dict[str, tuple[int, ...]]]

    def record(self) -> dict[str, Any]:
        """Return it as a config stores it."""
        stacks = {stack: _entries(shared) for stack, shared in self.stacks.items()}
        return {"spec": str(self.spec), "stacks": stacks}

    @classmethod
    def read(cls, value: Any) -> Layout:
        """Read the output of `record`, from a file that anybody may have written."""
        try:
            stacks = {str(stack): _sources(entries) for stack, entries in value["stacks"].items()}
            spec = SharingSpec.parse(str(value["spec"]))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            what = f"config.json: {ENTRY} is not a layout of shared layers ({type(error).__name__})"
            raise InstallError(what, _SAVE_AGAIN) from None
        for shared in stacks.values():
            _require_earlier_sources(shared.values())
        return cls(spec, stacks)


def _entries(shared: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return the entries of one stack in a config, from the sources of each parameter's name."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, sources in shared.items():
        names.setdefault(sources, []).append(name)
    return [{"layers": list(sources), "names": alike} for sources, alike in names.items()]


def _sources(entries: Any) -> dict[str, tuple[int, ...]]:
    """Return the sources of each parameter's name from the entries of one stack in a config."""
    sources = {}
    for entry in entries:
        layers = tuple(map(int, entry["layers"]))
        for name in entry["names"]:
            sources[str(name)] = layers
    return sources


def _require_earlier_sources(all_sources: Iterable[tuple[int, ...]]) -> None:
    """Raise an InstallError unless each layer names itself, or an earlier one that names itself."""
    for sources in all_sources:
        for layer, source in enumerate(sources):
            if not 0 <= source <= layer or sources[source] != source:
                raise InstallError(f"config.json: {ENTRY} names a source that is no layer before", _SAVE_AGAIN)


def make_layout(stacks: Stacks, spec: SharingSpec) -> Layout:
    """Decide what `stacks` share under `spec`: like with like.

    With a rank, they share matrices of linear maps alone.

    Raises:
        SpecError: no layer has the part that the spec shares, or there are too few layers for its groups.
    """
    shared_stacks = {}
    for stack, layers in stacks.items():
        shared = _shared_names(layers, spec)
        if shared:
            shared_stacks[stack] = shared
    if spec.kind not in {"all", *_present_parts(stacks)}:
        raise SpecError(f"{spec}: no {spec.kind} found in these layers", "choose all")
    return Layout(spec, shared_stacks)


def _present_parts(stacks: Stacks) -> set[str]:
    """Return the parts to which parameters of these layers belong."""
    present: set[str] = set()
    for _, parts in chain.from_iterable(stacks.values()):
        present.update(parts.values())
    return present


def _shared_names(layers: list[PlacedLayer], spec: SharingSpec) -> dict[str, tuple[int, ...]]:
    """Return the sources of every parameter that layers of one stack share, by its name."""
    first_with: dict[Hashable, int] = {}  # the first layer of each group with parameters like these
    sources: dict[str, list[int]] = {}
    for index, (layer, parts) in enumerate(layers):
        group = spec.group_of(index, len(layers))
        for name, likeness in _shareable(layer, parts, spec).items():
            layer_sources = sources.setdefault(name, list(range(len(layers))))
            layer_sources[index] = first_with.setdefault((group, name, likeness), index)
    return {name: tuple(of_layers) for name, of_layers in sources.items() if groups_of(of_layers)}


def _shareable(layer: nn.Module, parts: dict[str, str], spec: SharingSpec) -> dict[str, Hashable]:
    """Return what layers must have in common to share parameters, by their names.

    The names are those of a layer's parameters under the spec.
    """
    names_by_part: dict[str, list[str]] = {}
    for name, part in parts.items():
        names_by_part.setdefault(part, []).append(name)
    shareable: dict[str, Hashable] = {}
    for kind in _SEVERAL_PARTS.get(spec.kind, (spec.kind,)):
        likenesses = _likenesses(layer, names_by_part.get(kind, []))
        for name, likeness in likenesses.items():
            if not spec.rank or _is_weight_of_linear(layer, name):
                shareable[name] = (kind, likeness)
    return shareable


def _likenesses(layer: nn.Module, names: list[str]) -> dict[str, Hashable]:
    """Return what two layers must have in common to share parameters, by their names.

    A table needs its own shape in common, every other parameter the shapes of all others too. T5 has a table of
    relative positions in its first layer for all, which must not keep that layer from sharing the rest.
    """
    shapes = {name: tuple(layer.get_parameter(name).shape) for name in names}
    tables = {name: shape for name, shape in shapes.items() if isinstance(_owner(layer, name), nn.Embedding)}
    all_but_tables = frozenset(shapes.items() - tables.items())
    likenesses: dict[str, Hashable] = {name: (shape, all_but_tables) for name, shape in shapes.items()}
    for name, shape in tables.items():
        likenesses[name] = (shape, None)
    return likenesses


def _owner(layer: nn.Module, name: str) -> nn.Module:
    """Return the module that holds a parameter."""
    return layer.get_submodule(name.rpartition(".")[0])


def _is_weight_of_linear(layer: nn.Module, name: str) -> bool:
    """Return whether a parameter is a linear map's matrix, which can have a low-rank difference."""
    return name.endswith(".weight") and type(_owner(layer, name)) in (nn.Linear, Conv1D)
