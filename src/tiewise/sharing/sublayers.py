"""The stacks of a model, and which parameters of a layer are attention, which ffn, which belong to both.

    for stack in find_stacks(model):
        stack.name, len(stack.layers)            # "bert.encoder.layer", 12
        stack.parts[0]["output.LayerNorm.weight"]     # "ffn"

A stack is an outermost list of modules that a forward pass on token ids runs. What mixes tokens is told by name
(attention, attn, mixer, …), as every family of transformers has it; all other matrices are ffn. Norms are placed by
watching one forward pass: where layers begin with a norm, it goes with the matrices that read its output (with none of
the two if both read it), else, and where none reads it, with the matrix that ran before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.core.errors import InstallError

_MIXES = re.compile(r"att(n|ention)|mixer|mamba|ssm", re.IGNORECASE)
_SEED, _ROWS, _LENGTH = 20240229, 2, 5
_FIX = "sharing works on models that run on token ids"


@dataclass(frozen=True)
class LayerStack:
    """Layers of one list, in order.

    Args:
        name: of the list in its model.
        layers: its modules.
        parts: for every layer, its parameters' names → "attention", "ffn" or "own" (of neither alone).
    """

    name: str
    layers: tuple[nn.Module, ...]
    parts: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class _Ran:
    """One call of a module that holds parameters, in the order of calls."""

    path: str
    module: nn.Module
    read: Tensor | None
    wrote: Tensor | None


def find_stacks(model: Any) -> list[LayerStack]:
    """Find the stacks of a model and place every parameter of every layer, by running it on a few random ids.

    Raises:
        InstallError: the model does not run on token ids alone, or has no list of layers.
    """
    if any(value.is_meta for value in model.parameters()):
        raise InstallError(f"{type(model).__name__} is on the meta device", "load its weights first")
    if any(hasattr(value, "full_tensor") for value in model.parameters()):  # FSDP would undo it at the next forward
        raise InstallError(f"{type(model).__name__} is sharded", "share its layers before fully_shard")
    lists = list(_lists(model))
    with _recorded([layer for _, layers in lists for layer in layers]) as ran:
        _run(model)
    stacks = []
    for name, layers in lists:
        runs = [ran[id(layer)] for layer in layers]
        if all(runs):
            before = _begins_with_norm(runs[-1])
            stacks.append(
                LayerStack(name, layers, tuple(_parts(name, *pair, before) for pair in zip(layers, runs, strict=True)))
            )
    if not stacks:
        raise InstallError(f"{type(model).__name__} has no list of layers that token ids run through", _FIX)
    return stacks


def _lists(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(part) for part in module.modules()}
        if len(module) and all(any(value.ndim > 1 for value in layer.parameters()) for layer in module):
            yield name, tuple(module)


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[dict[int, list[_Ran]]]:
    """Record, for every layer by its id, the first call of every module in it that holds parameters."""
    ran: dict[int, list[_Ran]] = {id(layer): [] for layer in layers}
    with ExitStack() as held:
        for layer in {id(layer): layer for layer in layers}.values():
            for path, module in layer.named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    held.callback(module.register_forward_hook(_hook(path, ran[id(layer)]), with_kwargs=True).remove)
        yield ran


def _hook(path: str, into: list[_Ran]) -> Any:
    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if all(one.module is not module for one in into):
            into.append(_Ran(path, module, _first((*args, *kwargs.values())), _first((output,))))

    return after


def _first(values: tuple[Any, ...]) -> Tensor | None:
    for value in values:
        found = _first(tuple(value)) if isinstance(value, tuple | list) else value
        if isinstance(found, Tensor) and found.is_floating_point():
            return found.detach()  # the tensor itself, kept alive, so that its address is its own
    return None


def _run(model: Any) -> None:
    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:
        raise InstallError(f"{type(model).__name__} has no table of tokens", _FIX)
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(len(table) // 2, len(table), (_ROWS, _LENGTH), generator=generator).to(table.device)
    batch = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            model(**batch)
    except Exception as error:  # a family that wants more than ids raises anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InstallError(f"{type(model).__name__} does not run on token ids alone ({reason})", _FIX) from None
    finally:
        for module, mode in was:
            module.training = mode


def _is_matrix(module: nn.Module) -> bool:
    return any(value.ndim > 1 for value in module.parameters(recurse=False))


def _begins_with_norm(runs: list[_Ran]) -> bool:
    return not _is_matrix(next(one.module for one in runs if not isinstance(one.module, nn.Embedding)))


def _parts(stack: str, layer: nn.Module, runs: list[_Ran], norm_first: bool) -> dict[str, str]:
    place = {one.path: index for index, one in enumerate(runs)}
    mixes = {one.path: _kind(stack, one.path) for one in runs if _is_matrix(one.module)}
    parts = {}
    for name, _ in layer.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        module = layer.get_submodule(path)
        if not path:
            parts[name] = "own"
        elif _is_matrix(module):
            parts[name] = _kind(stack, path)
        elif _MIXES.search(path.rpartition(".")[0]):
            parts[name] = "attention"
        else:
            parts[name] = _norm_part(runs, place[path], mixes, norm_first) if path in place else "own"
    return parts


def _kind(stack: str, path: str) -> str:
    return "attention" if _MIXES.search(f"{stack.rpartition('.')[2]}.{path}") else "ffn"


def _norm_part(runs: list[_Ran], place: int, mixes: dict[str, str], norm_first: bool) -> str:
    norm = runs[place]
    if norm_first:
        for reads in (_is, _equals):  # two norms may give equal values, as new ones do; a cast gives another tensor
            readers = {mixes[one.path] for one in runs if one.path in mixes and reads(norm.wrote, one.read)}
            if readers:
                return readers.pop() if len(readers) == 1 else "own"
    before = [mixes[one.path] for one in runs[:place] if one.path in mixes]
    after = [mixes[one.path] for one in runs[place:] if one.path in mixes]
    return (before[-1:] or after[:1] or ["own"])[0]


def _is(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def _equals(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())
