"""Which parameters of which layers are one: made from a spec, written in a config, read back from one.

    "tiewise_sharing": {"spec": "ffn", "stacks": {"bert.encoder.layer": [
        {"layers": [0, 0, 0, 0], "names": ["intermediate.dense.weight", "intermediate.dense.bias", ...]}]}}

`layers` gives for every layer the first one that holds the same Parameters; a layer that shares with none names itself.
The layout is written out, not derived again, so that a checkpoint loads as it was saved whatever later versions decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from tiewise.core.errors import InstallError, SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.sharing.sublayers import LayerStack

ENTRY = "tiewise_sharing"


@dataclass(frozen=True)
class Same:
    """Parameters `names` (of a layer) that layer i has in common with layer `layers[i]`."""

    layers: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def groups(self) -> list[list[int]]:
        """Layers that share, two or more each."""
        found: dict[int, list[int]] = {}
        for layer, source in enumerate(self.layers):
            found.setdefault(source, []).append(layer)
        return [group for group in found.values() if len(group) > 1]


@dataclass(frozen=True)
class Layout:
    """What a model shares: its spec, and for every stack by name what its layers have in common."""

    spec: SharingSpec
    stacks: dict[str, tuple[Same, ...]]

    def record(self) -> dict[str, Any]:
        """As a config keeps it."""
        stacks = {
            name: [{"layers": list(same.layers), "names": list(same.names)} for same in found]
            for name, found in self.stacks.items()
        }
        return {"spec": str(self.spec), "stacks": stacks}

    @classmethod
    def read(cls, value: Any) -> Layout:
        """Read what `record` gave, from a file that anybody may have written.

        Raises:
            InstallError: it is something else.
        """
        try:
            stacks = {
                str(name): tuple(
                    Same(tuple(map(int, same["layers"])), tuple(map(str, same["names"]))) for same in found
                )
                for name, found in value["stacks"].items()
            }
            spec = SharingSpec.parse(str(value["spec"]))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            what = f"config.json: {ENTRY} is not a layout of shared layers ({type(error).__name__})"
            raise InstallError(what, "save the model again with tiewise") from None
        for found in stacks.values():
            for same in found:
                if any(
                    source > layer or source < 0 or same.layers[source] != source
                    for layer, source in enumerate(same.layers)
                ):
                    what = f"config.json: {ENTRY} names a source that is no layer before"
                    raise InstallError(what, "save the model again with tiewise")
        return cls(spec, stacks)


def make_layout(stacks: list[LayerStack], spec: SharingSpec) -> Layout:
    """Decide what `stacks` share under `spec`: like with like, a sublayer of other shapes with its own kind alone.

    With a rank, matrices of linear maps are shared and everything else stays each layer's own.

    Raises:
        SpecError: more groups than layers, or nothing in the model of the kind that is to be shared.
    """
    found = {stack.name: _of_stack(stack, spec) for stack in stacks}
    if spec.kind in ("attention", "ffn") and not any(spec.kind in p.values() for s in stacks for p in s.parts):
        raise SpecError(f"{spec}: no {spec.kind} found in these layers", "choose all")
    return Layout(spec, {name: same for name, same in found.items() if same})


def _of_stack(stack: LayerStack, spec: SharingSpec) -> tuple[Same, ...]:
    first: dict[Any, int] = {}
    sources: dict[str, list[int]] = {}
    count = len(stack.layers)
    for index, (layer, parts) in enumerate(zip(stack.layers, stack.parts, strict=True)):
        group = spec.group_of(index, count)
        for kind in ("attention", "ffn", "own"):
            names = [name for name, part in parts.items() if part == kind and spec.kind in ("all", kind)]
            shapes = {name: tuple(layer.get_parameter(name).shape) for name in names}
            alike = frozenset((n, shape) for n, shape in shapes.items() if not _is_lookup(layer, n))
            for name in names if not spec.rank else [n for n in names if is_linear(layer, n)]:
                key = (group, kind, name, shapes[name], None if _is_lookup(layer, name) else alike)
                source = first.setdefault(key, index)
                sources.setdefault(name, list(range(count)))[index] = source
    by_sources: dict[tuple[int, ...], list[str]] = {}
    for name, found in sources.items():
        by_sources.setdefault(tuple(found), []).append(name)
    return tuple(Same(layers, tuple(names)) for layers, names in by_sources.items() if Same(layers, ()).groups)


def is_linear(layer: nn.Module, name: str) -> bool:
    """Whether a parameter is the matrix of a plain linear map."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and type(layer.get_submodule(path)) in (nn.Linear, Conv1D)


def _is_lookup(layer: nn.Module, name: str) -> bool:
    """Whether a parameter is a table of relative positions, which T5 keeps in the first layer for all."""
    return isinstance(layer.get_submodule(name.rpartition(".")[0]), nn.Embedding)
