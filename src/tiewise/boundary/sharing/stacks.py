"""Stacks of layers in a model, and the part (attention, ffn or neither) of each parameter.

    (stack, layers), *_ = find_stacks(model).items()      # "bert.encoder.layer", of 12
    layer, parts = layers[0]
    parts["output.LayerNorm.weight"]                      # "ffn"

A stack is an outermost list of modules that run in a forward pass on token ids. A module that mixes tokens is
recognised by its name (attention, attn, mixer, …), which every family of transformers uses; all other matrices are ffn.
One observed forward pass assigns the norms. If layers begin with a norm, each norm belongs to the part whose matrices
read its output, and to neither part if both read it. Otherwise, and if no matrix reads it, it belongs to the part of
the matrix that ran before it.
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
_ROWS, _LENGTH = 2, 5  # shape of the random ids
_FIX = "sharing works on models that run on token ids"
PlacedLayer = tuple[nn.Module, dict[str, str]]  # a layer, and the part of every parameter by name
Stacks = dict[str, list[PlacedLayer]]  # name of a stack → its layers in order


@dataclass(frozen=True)
class Call:
    """Hidden states that a module's first call read and wrote.

    A field is None if the call had no floating-point tensor there.
    """

    read: Tensor | None
    wrote: Tensor | None


Calls = dict[str, Call]  # path of a module with parameters → its call, in the order of the calls


def find_stacks(model: Any) -> Stacks:
    """Find the stacks of a model and each parameter's part, by running random ids.

    Raises:
        InstallError: the model is on the meta device, sharded, or has no list of layers that token ids run through.
    """
    _require_local_values(model)
    lists = _find_outermost_lists(model)
    calls = _record_calls(model, list(chain.from_iterable(lists.values())))
    stacks: Stacks = {}
    for name, layers in lists.items():
        layer_calls = [calls[id(layer)] for layer in layers]
        first_modules = [_first_module(layer, its) for layer, its in zip(layers, layer_calls, strict=True)]
        ran = [module for module in first_modules if module is not None]
        if len(ran) == len(layers):
            norm_first = not _has_matrix(ran[-1], recurse=False)
            stacks[name] = _place_layers(name, layers, layer_calls, norm_first)
    if not stacks:
        raise InstallError(f"{type(model).__name__} has no list of layers that token ids run through", _FIX)
    return stacks


def _require_local_values(model: nn.Module) -> None:
    """Raise an InstallError if parameters have no values, or are sharded."""
    class_name = type(model).__name__
    if is_on_meta(model):
        raise InstallError(f"{class_name} is on the meta device", "load its weights first")
    for value in model.parameters():
        if hasattr(value, "full_tensor"):  # FSDP would undo the sharing at the next forward
            raise InstallError(f"{class_name} is sharded", "share its layers before fully_shard")


def _place_layers(stack: str, layers: nn.ModuleList, calls: list[Calls], norm_first: bool) -> list[PlacedLayer]:
    """Return the layers of one stack with the part of each parameter, by their calls."""
    placed = []
    for layer, layer_calls in zip(layers, calls, strict=True):
        placed.append((layer, place_parameters(stack, layer, layer_calls, norm_first)))
    return placed


def _find_outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists in which each module has a matrix, by name."""
    lists: dict[str, nn.ModuleList] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(part) for part in module.modules()}
        has_matrix = {_has_matrix(layer, recurse=True) for layer in module}
        if has_matrix == {True}:  # the set is empty if the list is
            lists[name] = module
    return lists


def _has_matrix(module: nn.Module, *, recurse: bool) -> bool:
    """Return whether a module has a parameter of two or more dimensions.

    With `recurse`, parameters of the modules inside count too.
    """
    dimensions = [value.ndim for value in module.parameters(recurse)]
    return max(dimensions, default=0) > 1


def _first_module(layer: nn.Module, calls: Calls) -> nn.Module | None:
    """Return the first module of a layer that runs, except tables; None if none runs."""
    for path in calls:
        module = layer.get_submodule(path)
        if not isinstance(module, nn.Embedding):
            return module
    return None


# one forward pass


def _record_calls(model: Any, layers: list[nn.Module]) -> dict[int, Calls]:
    """Return the calls within every layer, by the layer's id, in one forward pass.

    The pass on random ids leaves the model unchanged.
    """
    calls: dict[int, Calls] = {id(layer): {} for layer in layers}
    batch = _draw_batch(model)
    with ExitStack() as hooks:
        for layer in dict.fromkeys(layers):  # each layer once, even if the list repeats it
            _hook_modules(layer, calls[id(layer)], hooks)
        try:
            run_without_trace(model, batch)
        except Exception as error:  # a family that needs more than ids may raise any error
            reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
            what = f"{type(model).__name__} does not run on token ids alone ({reason})"
            raise InstallError(what, _FIX) from None
    return calls


def _hook_modules(layer: nn.Module, calls: Calls, hooks: ExitStack) -> None:
    """Make every module of a layer with parameters record its first call, until `hooks` closes."""
    for path, module in layer.named_modules():
        if list(module.parameters(recurse=False)):
            handle = module.register_forward_hook(_make_recorder(path, calls), with_kwargs=True)
            hooks.callback(handle.remove)


def _make_recorder(path: str, calls: Calls) -> Callable[..., None]:
    """Return a forward hook that records the first call of a module under its path."""

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the module's input and output if this is its first call."""
        if path not in calls:
            calls[path] = Call(_find_tensor((*args, *kwargs.values())), _find_tensor((output,)))

    return record


def _draw_batch(model: Any) -> dict[str, Tensor]:
    """Return a batch of random ids from the upper half of the vocabulary.

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


def _find_tensor(values: tuple[Any, ...]) -> Tensor | None:
    """Return the first floating-point tensor among a call's values, at any depth."""
    for value in values:
        if isinstance(value, tuple | list):
            value = _find_tensor(tuple(value))
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach()  # the reference keeps it alive, so that no other tensor gets its address
    return None


# the part of each parameter


def place_parameters(stack: str, layer: nn.Module, calls: Calls, norm_first: bool) -> dict[str, str]:
    """Return the part of every parameter of a layer, by the parameter's name."""
    part_of = _assign_matrices(stack, layer)
    norms = _NormParts(part_of, calls, norm_first)
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


def _assign_matrices(stack: str, layer: nn.Module) -> dict[str, str]:
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
class _NormParts:
    """Assignment of the modules without a matrix to parts, by the calls of one layer.

    Attributes:
        part_of: path of each module with a matrix → its part.
        calls: calls of the layer.
        norm_first: whether layers begin with a norm.
    """

    part_of: dict[str, str]
    calls: Calls
    norm_first: bool

    def part(self, path: str) -> str:
        """Return the part of one norm; neither if it did not run, or no matrix ran."""
        if not path or path not in self.calls:
            return NEITHER
        readers = self._find_readers(path)
        if len(readers) > 1:
            return NEITHER
        if readers:
            return readers.pop()
        return self._part_of_nearest(path)

    def _part_of_nearest(self, path: str) -> str:
        """Return the part of the matrix that ran last before a norm.

        If none ran before it, it is that of the first matrix; if no matrix ran, it is neither.
        """
        order = list(self.calls)
        before = order[: order.index(path)]
        for module in (*reversed(before), *order):
            if module in self.part_of:
                return self.part_of[module]
        return NEITHER

    def _find_readers(self, path: str) -> set[str]:
        """Return the parts whose matrices read the output of a norm.

        If layers do not begin with a norm, there is none.
        """
        output = self.calls[path].wrote
        if not self.norm_first or output is None:
            return set()
        same_tensor, same_values = set(), set()
        for part, states in self._inputs_of_matrices(output.numel()):
            if states.data_ptr() == output.data_ptr():
                same_tensor.add(part)
            if torch.equal(states.flatten(), output.flatten()):
                same_values.add(part)
        # two norms may return equal values, as untrained ones do; a cast returns another tensor
        return same_tensor or same_values

    def _inputs_of_matrices(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield part and input of every matrix that ran on states of so many numbers."""
        for module, call in self.calls.items():
            if module not in self.part_of or call.read is None:
                continue
            if call.read.numel() == size:
                yield self.part_of[module], call.read
