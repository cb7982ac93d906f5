"""Which parameters of which layers are one: found in a model, made from a spec, written in a config and read back.

    (stack, layers), *_ = find_stacks(model).items()      # "bert.encoder.layer", of 12
    layer, parts = layers[0]
    parts["output.LayerNorm.weight"]                      # "ffn"

A stack is an outermost list of modules that a forward pass on token ids runs. What mixes tokens is told by name
(attention, attn, mixer, …), as every family of transformers has it; all other matrices are ffn. Norms are placed by
watching one forward pass: where layers begin with a norm, it goes with the matrices that read its output (with none of
the two if both read it), else, and where none reads it, with the matrix that ran before it.

    "tiewise_sharing": {"spec": "ffn", "stacks": {"bert.encoder.layer": [
        {"layers": [0, 0, 0, 0], "names": ["intermediate.dense.weight", "intermediate.dense.bias", ...]}]}}

`layers` gives for every layer the first one that holds the same Parameters; a layer that shares with none names itself.
The layout is written out, not derived again, so that a checkpoint loads as it was saved whatever later versions decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tiewise.boundary.saved import on_meta
from tiewise.boundary.trial_runs import SEED, untraced
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.sharing_spec import SharingSpec

_MIXES = re.compile(r"att(n|ention)|mixer|mamba|ssm", re.IGNORECASE)
_ROWS, _LENGTH = 2, 5
_FIX = "sharing works on models that run on token ids"
# by a stack's name its layers in order, and of every parameter of each, by name: attention, ffn, or own (neither's)
Stacks = dict[str, list[tuple[nn.Module, dict[str, str]]]]
# of a layer's modules that hold parameters, by path and in order: what the first call of each read and wrote
_Calls = dict[str, tuple[Tensor | None, Tensor | None]]


def find_stacks(model: Any) -> Stacks:
    """Find the stacks of a model and place every parameter of every layer, by running it on a few random ids."""
    kind = type(model).__name__
    if on_meta(model):
        raise InstallError(f"{kind} is on the meta device", "load its weights first")
    if any(hasattr(value, "full_tensor") for value in model.parameters()):  # FSDP would undo it at the next forward
        raise InstallError(f"{kind} is sharded", "share its layers before fully_shard")
    lists: dict[str, nn.ModuleList] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            if len(module) and all(any(value.ndim > 1 for value in layer.parameters()) for layer in module):
                lists[name] = module
    calls = _calls(model, [layer for layers in lists.values() for layer in layers])
    stacks: Stacks = {}
    for name, layers in lists.items():
        runs = [calls[id(layer)] for layer in layers]
        if all(runs):
            begins = next(m for m in map(layers[-1].get_submodule, runs[-1]) if not isinstance(m, nn.Embedding))
            pairs = zip(layers, runs, strict=True)
            stacks[name] = [(layer, _parts(name, layer, run, not _is_matrix(begins))) for layer, run in pairs]
    if not stacks:
        raise InstallError(f"{kind} has no list of layers that token ids run through", _FIX)
    return stacks


def _calls(model: Any, layers: list[nn.Module]) -> dict[int, _Calls]:
    """For every layer by its id, the calls in one forward pass on random ids that leaves no trace."""
    kind, calls = type(model).__name__, {id(layer): _Calls() for layer in layers}

    def noted(path: str, into: _Calls) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if path not in into:
                into[path] = _first((*args, *kwargs.values())), _first((output,))

        return after

    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:
        raise InstallError(f"{kind} has no table of tokens", _FIX)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(len(table) // 2, len(table), (_ROWS, _LENGTH), generator=generator, device="cpu").to(
        table.device
    )
    batch = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    with ExitStack() as held:
        for layer in {id(layer): layer for layer in layers}.values():
            for path, module in layer.named_modules():
                if list(module.parameters(recurse=False)):
                    hook = noted(path, calls[id(layer)])
                    held.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        try:
            untraced(model, batch)
        except Exception as error:  # a family that wants more than ids raises anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InstallError(f"{kind} does not run on token ids alone ({reason})", _FIX) from None
    return calls


def _first(values: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor of numbers among a call's values."""
    for value in values:
        found = _first(tuple(value)) if isinstance(value, tuple | list) else value
        if isinstance(found, Tensor) and found.is_floating_point():
            return found.detach()  # the tensor itself, kept alive, so that its address is its own
    return None


def _is_matrix(module: nn.Module) -> bool:
    return any(value.ndim > 1 for value in module.parameters(recurse=False))


def _parts(stack: str, layer: nn.Module, calls: _Calls, norm_first: bool) -> dict[str, str]:
    """What each parameter of a layer is of: attention, ffn, or own (neither's)."""
    kinds = {  # of the modules with a matrix
        path: "attention" if _MIXES.search(f"{stack.rpartition('.')[2]}.{path}") else "ffn"
        for path, module in layer.named_modules(remove_duplicate=False)
        if path and _is_matrix(module)
    }
    matrices = [path for path in calls if path in kinds]

    def of_norm(path: str) -> str:
        norm = calls[path][1]
        if norm_first and norm is not None:
            read = [(x, kinds[by]) for by in matrices if (x := calls[by][0]) is not None and x.numel() == norm.numel()]
            # two norms may give equal values, as new ones do; a cast gives another tensor
            same = {kind for x, kind in read if x.data_ptr() == norm.data_ptr()}
            readers = same or {kind for x, kind in read if torch.equal(x.flatten(), norm.flatten())}
            if readers:
                return readers.pop() if len(readers) == 1 else "own"
        order = list(calls)
        before = [by for by in matrices if order.index(by) < order.index(path)]
        return kinds[(before[-1:] or matrices)[0]]  # the matrix that ran before it, else the first behind

    parts = {}
    for name, _ in layer.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        if path in kinds:
            parts[name] = kinds[path]
        elif _MIXES.search(path.rpartition(".")[0]):
            parts[name] = "attention"
        else:
            parts[name] = of_norm(path) if path and path in calls and matrices else "own"
    return parts


# what they share

ENTRY = "tiewise_sharing"


def groups_of(sources: Sequence[int]) -> list[list[int]]:
    """Layers that share, two or more each; `sources` has for every layer the first one with the same Parameter."""
    groups = [[i for i, of in enumerate(sources) if of == source] for source in sorted(set(sources))]
    return [group for group in groups if len(group) > 1]


@dataclass(frozen=True)
class Layout:
    """What a model shares: its spec, and for every stack by name the sources of every parameter's name in a layer."""

    spec: SharingSpec
    stacks: dict[str, dict[str, tuple[int, ...]]]

    def record(self) -> dict[str, Any]:
        """As a config keeps it."""
        stacks = {}
        for stack, shared in self.stacks.items():
            names: dict[tuple[int, ...], list[str]] = {}
            for name, sources in shared.items():
                names.setdefault(sources, []).append(name)
            stacks[stack] = [{"layers": list(sources), "names": alike} for sources, alike in names.items()]
        return {"spec": str(self.spec), "stacks": stacks}

    @classmethod
    def read(cls, value: Any) -> Layout:
        """Read what `record` gave, from a file that anybody may have written."""
        fix = "save the model again with tiewise"
        try:
            stacks = {
                str(stack): {str(name): tuple(map(int, s["layers"])) for s in found for name in s["names"]}
                for stack, found in value["stacks"].items()
            }
            spec = SharingSpec.parse(str(value["spec"]))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            what = f"config.json: {ENTRY} is not a layout of shared layers ({type(error).__name__})"
            raise InstallError(what, fix) from None
        for layers in (sources for shared in stacks.values() for sources in shared.values()):
            if any(not 0 <= source <= layer or layers[source] != source for layer, source in enumerate(layers)):
                raise InstallError(f"config.json: {ENTRY} names a source that is no layer before", fix)
        return cls(spec, stacks)


def make_layout(stacks: Stacks, spec: SharingSpec) -> Layout:
    """Decide what `stacks` share under `spec`: like with like; with a rank, matrices of linear maps alone."""
    found = {}
    for stack, layers in stacks.items():
        first: dict[Any, int] = {}  # the first layer with parameters like these, in each group
        sources: dict[str, list[int]] = {}
        for index, (layer, parts) in enumerate(layers):
            group = spec.group_of(index, len(layers))
            for kind in ("attention", "ffn", "own") if spec.kind == "all" else (spec.kind,):
                names = [name for name, part in parts.items() if part == kind]
                shapes = {name: tuple(layer.get_parameter(name).shape) for name in names}
                owners = {name: layer.get_submodule(name.rpartition(".")[0]) for name in names}
                # T5 keeps a table of relative positions in the first layer for all
                lookups = {name for name, owner in owners.items() if isinstance(owner, nn.Embedding)}
                alike = frozenset((name, shape) for name, shape in shapes.items() if name not in lookups)
                for name in names:
                    if spec.rank and not (name.endswith(".weight") and type(owners[name]) in (nn.Linear, Conv1D)):
                        continue
                    key = (group, kind, name, shapes[name], None if name in lookups else alike)
                    sources.setdefault(name, list(range(len(layers))))[index] = first.setdefault(key, index)
        shared = {name: tuple(of) for name, of in sources.items() if groups_of(of)}
        if shared:
            found[stack] = shared
    if spec.kind != "all" and not any(spec.kind in p.values() for layers in stacks.values() for _, p in layers):
        raise SpecError(f"{spec}: no {spec.kind} found in these layers", "choose all")
    return Layout(spec, found)
