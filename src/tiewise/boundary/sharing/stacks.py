"""Stacks of layers in a model, and the part of a layer that each parameter belongs to: attention, ffn or neither.

    (stack, layers), *_ = find_stacks(model).items()      # "bert.encoder.layer", of 12
    layer, parts = layers[0]
    parts["output.LayerNorm.weight"]                      # "ffn"

A stack is an outermost list of modules that a forward pass on token ids runs. A module that mixes tokens is recognised
by its name (attention, attn, mixer, …), as every family of transformers has it; all other matrices are ffn. Norms are
placed by watching one forward pass. If layers begin with a norm, it goes with the matrices that read its output, or
with neither part if both read it. Otherwise, and if no matrix reads it, it goes with the matrix that ran before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.saved import is_on_meta
from tiewise.boundary.trial_runs import SEED, run_without_trace
from tiewise.core.errors import InstallError

ATTENTION, FFN, NEITHER = "attention", "ffn", "own"  # parts of a layer
_MIXES = re.compile(r"att(n|ention)|mixer|mamba|ssm", re.IGNORECASE)
_ROWS, _LENGTH = 2, 5  # of the random ids
_FIX = "sharing works on models that run on token ids"
PlacedLayer = tuple[nn.Module, dict[str, str]]  # a layer, and the part of every parameter by the parameter's name
Stacks = dict[str, list[PlacedLayer]]  # by a stack's name its layers in order


@dataclass(frozen=True)
class Call:
    """States that a module's first call read and wrote; None without a tensor of numbers."""

    read: Tensor | None
    wrote: Tensor | None


Calls = dict[str, Call]  # by the path of a module that holds parameters, in the order in which they ran


def find_stacks(model: Any) -> Stacks:
    """Find the stacks of a model and place every parameter, by running it on random ids.

    Raises:
        InstallError: the model is on the meta device, sharded, or has no list of layers that token ids run through.
    """
    _require_local_values(model)
    lists = _outermost_lists(model)
    calls = _record_calls(model, list(chain.from_iterable(lists.values())))
    stacks: Stacks = {}
    for name, layers in lists.items():
        layer_calls = [calls[id(layer)] for layer in layers]
        if {} not in layer_calls:  # every layer ran
            stacks[name] = _place_layers(name, layers, layer_calls)
    if not stacks:
        raise InstallError(f"{type(model).__name__} has no list of layers that token ids run through", _FIX)
    return stacks


def _require_local_values(model: nn.Module) -> None:
    """Raise an InstallError if parameters lack values, or have only a part of them here."""
    kind = type(model).__name__
    if is_on_meta(model):
        raise InstallError(f"{kind} is on the meta device", "load its weights first")
    for value in model.parameters():
        if hasattr(value, "full_tensor"):  # FSDP would undo the sharing at the next forward
            raise InstallError(f"{kind} is sharded", "share its layers before fully_shard")


def _place_layers(stack: str, layers: nn.ModuleList, calls: list[Calls]) -> list[PlacedLayer]:
    """Return the layers of one stack with the part of each parameter, by their calls."""
    norm_first = _begins_with_norm(layers[-1], calls[-1])
    placed = []
    for layer, layer_calls in zip(layers, calls, strict=True):
        placed.append((layer, place_parameters(stack, layer, layer_calls, norm_first)))
    return placed


def _outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists, by name, in which each module has a matrix."""
    lists: dict[str, nn.ModuleList] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(part) for part in module.modules()}
        has_matrix = {_has_matrix(layer, recurse=True) for layer in module}
        if has_matrix == {True}:  # of an empty list it is the empty set
            lists[name] = module
    return lists


def _has_matrix(module: nn.Module, *, recurse: bool) -> bool:
    """Return whether a module has a parameter of two or more dimensions.

    It may be in a module within only with `recurse`.
    """
    dimensions = [value.ndim for value in module.parameters(recurse)]
    return max(dimensions, default=0) > 1


def _begins_with_norm(layer: nn.Module, calls: Calls) -> bool:
    """Return whether the first module of a layer that runs, tables apart, has no matrix."""
    modules = [layer.get_submodule(path) for path in calls]
    first = next(module for module in modules if not isinstance(module, nn.Embedding))
    return not _has_matrix(first, recurse=False)


# one forward pass


def _record_calls(model: Any, layers: list[nn.Module]) -> dict[int, Calls]:
    """Return the calls within every layer, by its id, in one forward pass.

    The pass on random ids leaves no trace.
    """
    calls: dict[int, Calls] = {id(layer): {} for layer in layers}
    batch = _random_batch(model)
    with ExitStack() as hooks:
        for layer in dict.fromkeys(layers):  # each once, where a list repeats a layer
            _hook_modules(layer, calls[id(layer)], hooks)
        try:
            run_without_trace(model, batch)
        except Exception as error:  # a family that needs more than ids raises anything
            reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
            what = f"{type(model).__name__} does not run on token ids alone ({reason})"
            raise InstallError(what, _FIX) from None
    return calls


def _hook_modules(layer: nn.Module, calls: Calls, hooks: ExitStack) -> None:
    """Let every module of a layer with parameters record its first call, until `hooks` closes."""
    for path, module in layer.named_modules():
        if list(module.parameters(recurse=False)):
            handle = module.register_forward_hook(_recorder(path, calls), with_kwargs=True)
            hooks.callback(handle.remove)


def _recorder(path: str, calls: Calls) -> Callable[..., None]:
    """Return a forward hook that records the first call of a module under its path."""

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if path not in calls:
            calls[path] = Call(_first_tensor((*args, *kwargs.values())), _first_tensor((output,)))

    return record


def _random_batch(model: Any) -> dict[str, Tensor]:
    """Return a batch of random ids of the vocabulary's upper half.

    Special tokens are rare there.
    """
    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:
        raise InstallError(f"{type(model).__name__} has no table of tokens", _FIX)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(len(table) // 2, len(table), (_ROWS, _LENGTH), generator=generator, device="cpu")
    batch = {"input_ids": ids.to(table.device)}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


def _first_tensor(values: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor of numbers among a call's values, at any depth."""
    for value in values:
        if isinstance(value, tuple | list):
            value = _first_tensor(tuple(value))
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach()  # it stays alive, so that no other tensor gets its address
    return None


# the part of each parameter


def place_parameters(stack: str, layer: nn.Module, calls: Calls, norm_first: bool) -> dict[str, str]:
    """Return the part of every parameter of a layer, by the parameter's name."""
    part_of = _parts_of_matrices(stack, layer)
    norms = _Norms(part_of, calls, norm_first)
    parts = {}
    for name, _ in layer.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        if path in part_of:
            parts[name] = part_of[path]
        elif _MIXES.search(path.rpartition(".")[0]):
            parts[name] = ATTENTION
        else:
            parts[name] = norms.part(path)
    return parts


def _parts_of_matrices(stack: str, layer: nn.Module) -> dict[str, str]:
    """Return the part of every module with a matrix, by its path."""
    list_name = stack.rpartition(".")[2]
    parts = {}
    for path, module in layer.named_modules(remove_duplicate=False):
        if path and _has_matrix(module, recurse=False):
            parts[path] = _part_by_name(f"{list_name}.{path}")
    return parts


def _part_by_name(name: str) -> str:
    """Return the part of a matrix: attention if its module's name mixes tokens, else ffn."""
    if _MIXES.search(name):
        return ATTENTION
    return FFN


@dataclass(frozen=True)
class _Norms:
    """Places the modules without a matrix by the calls of one layer."""

    part_of: dict[str, str]  # of the modules with a matrix
    calls: Calls
    norm_first: bool  # whether layers begin with a norm

    def part(self, path: str) -> str:
        """Return the part of one norm; neither if it did not run, or no matrix ran."""
        if not path or path not in self.calls:
            return NEITHER
        readers = self._readers(path)
        if len(readers) > 1:
            return NEITHER
        if readers:
            return readers.pop()
        return self._part_of_nearest(path)

    def _part_of_nearest(self, path: str) -> str:
        """Return the part of the matrix that ran last before a norm, else of the first.

        It is neither if no matrix ran.
        """
        order = list(self.calls)
        before = order[: order.index(path)]
        for module in (*reversed(before), *order):
            if module in self.part_of:
                return self.part_of[module]
        return NEITHER

    def _readers(self, path: str) -> set[str]:
        """Return the parts whose matrices read what a norm wrote. Only layers that begin with a norm have any."""
        output = self.calls[path].wrote
        if not self.norm_first or output is None:
            return set()
        same_tensor, same_values = set(), set()
        for part, states in self._inputs_of_matrices(output.numel()):
            if states.data_ptr() == output.data_ptr():
                same_tensor.add(part)
            if torch.equal(states.flatten(), output.flatten()):
                same_values.add(part)
        # two norms may give equal values, as new ones do; a cast gives another tensor
        return same_tensor or same_values

    def _inputs_of_matrices(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield part and input of every matrix that ran on states of so many numbers."""
        for module, call in self.calls.items():
            if module not in self.part_of or call.read is None:
                continue
            if call.read.numel() == size:
                yield self.part_of[module], call.read
