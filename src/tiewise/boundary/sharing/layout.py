"""Layout of shared layers: made from a spec, written to a config and read back.

    "tiewise_sharing": {"spec": "ffn", "stacks": {"bert.encoder.layer": [
        {"layers": [0, 0, 0, 0], "names": ["intermediate.dense.weight", "intermediate.dense.bias", ...]}]}}

For every layer, `layers` names the first layer with the same Parameters; a layer that shares with none names itself.
The config stores the layout in full, so that a checkpoint loads as it was saved even if a later version would choose
another layout.
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
_PARTS_OF_KIND = {
    "all": (ATTENTION, FFN, NEITHER)
}  # spec kind → parts that it shares, for kinds that are not the name of a part


def groups_of(sources: Sequence[int]) -> list[list[int]]:
    """Return the groups of layers that share, each of two or more layers.

    `sources` has, for every layer, the first layer with the same Parameter.
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
        """Return the layout as a config stores it."""
        stacks = {stack: _to_entries(shared) for stack, shared in self.stacks.items()}
        return {"spec": str(self.spec), "stacks": stacks}

    @classmethod
    def read(cls, value: Any) -> Layout:
        """Return the layout in an untrusted config entry, which `record` writes.

        Raises:
            InstallError: the entry is not a layout.
        """
        try:
            stacks = {str(stack): _from_entries(entries) for stack, entries in value["stacks"].items()}
            spec = SharingSpec.parse(str(value["spec"]))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            what = f"config.json: {ENTRY} is not a layout of shared layers ({type(error).__name__})"
            raise InstallError(what, _SAVE_AGAIN) from None
        for shared in stacks.values():
            _require_earlier_sources(shared.values())
        return cls(spec, stacks)


def _to_entries(shared: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return the entries of one stack in a config, from the sources of each parameter."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, sources in shared.items():
        names.setdefault(sources, []).append(name)
    return [{"layers": list(sources), "names": alike} for sources, alike in names.items()]


def _from_entries(entries: Any) -> dict[str, tuple[int, ...]]:
    """Return the sources of each parameter, from the entries of one stack in a config."""
    sources = {}
    for entry in entries:
        layers = tuple(map(int, entry["layers"]))
        for name in entry["names"]:
            sources[str(name)] = layers
    return sources


def _require_earlier_sources(all_sources: Iterable[tuple[int, ...]]) -> None:
    """Raise an InstallError for a layer whose source is not itself or an earlier source."""
    for sources in all_sources:
        for layer, source in enumerate(sources):
            if not 0 <= source <= layer or sources[source] != source:
                raise InstallError(f"config.json: {ENTRY} names a source that is no layer before", _SAVE_AGAIN)


def make_layout(stacks: Stacks, spec: SharingSpec) -> Layout:
    """Return the layout of `stacks` under `spec`: parameters are shared only with similar ones.

    If the spec has a rank, only the matrices of linear maps are shared.
    """
    shared_stacks = {}
    for stack, layers in stacks.items():
        shared = _find_shared(layers, spec)
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


def _find_shared(layers: list[PlacedLayer], spec: SharingSpec) -> dict[str, tuple[int, ...]]:
    """Return the sources of every parameter that layers of one stack share, by its name."""
    first_with: dict[Hashable, int] = {}  # the first layer with similar parameters, for each group, name and likeness
    sources: dict[str, list[int]] = {}
    for index, (layer, parts) in enumerate(layers):
        group = spec.group_of(index, len(layers))
        for name, likeness in _find_shareable(layer, parts, spec).items():
            layer_sources = sources.setdefault(name, list(range(len(layers))))
            layer_sources[index] = first_with.setdefault((group, name, likeness), index)
    return {name: tuple(by_layer) for name, by_layer in sources.items() if groups_of(by_layer)}


def _find_shareable(layer: nn.Module, parts: dict[str, str], spec: SharingSpec) -> dict[str, Hashable]:
    """Return the likenesses of a layer's parameters that the spec shares, by their names.

    Two layers share a parameter only if its likeness is equal in both.
    """
    names_by_part: dict[str, list[str]] = {}
    for name, part in parts.items():
        names_by_part.setdefault(part, []).append(name)
    shareable: dict[str, Hashable] = {}
    for kind in _PARTS_OF_KIND.get(spec.kind, (spec.kind,)):
        likenesses = _find_likenesses(layer, names_by_part.get(kind, []))
        for name, likeness in likenesses.items():
            if not spec.rank or _is_weight_of_linear(layer, name):
                shareable[name] = (kind, likeness)
    return shareable


def _find_likenesses(layer: nn.Module, names: list[str]) -> dict[str, Hashable]:
    """Return the properties that must be equal in two layers that share a parameter, by name.

    For a table it is its shape; for any other parameter it is the shapes of all parameters except tables. T5 has one
    table of relative positions, in its first layer, which must not prevent that layer from sharing the rest.
    """
    shapes = {name: tuple(layer.get_parameter(name).shape) for name in names}
    tables = {name: shape for name, shape in shapes.items() if isinstance(_module_of(layer, name), nn.Embedding)}
    all_but_tables = frozenset(shapes.items() - tables.items())
    likenesses: dict[str, Hashable] = {name: (shape, all_but_tables) for name, shape in shapes.items()}
    for name, shape in tables.items():
        likenesses[name] = (shape, None)
    return likenesses


def _module_of(layer: nn.Module, name: str) -> nn.Module:
    """Return the module that contains a parameter."""
    return layer.get_submodule(name.rpartition(".")[0])


def _is_weight_of_linear(layer: nn.Module, name: str) -> bool:
    """Return whether a parameter is the matrix of a linear map, which allows a low-rank difference."""
    return name.endswith(".weight") and type(_module_of(layer, name)) in (nn.Linear, Conv1D)
