"""Tensors that `from_pretrained` of transformers starts with random numbers, observed without numbers.

A tensor that no file stores starts with the numbers that its class gives it: a matrix is drawn at random, a norm starts
as ones, a count of experts as zeros. A few classes omit a tensor, which then holds what was in its memory.
`random_tensors` lets the class initialise a model on the meta device, records every operation, and follows random
numbers through copies and in-place changes. It runs in `built_class_child.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operations that replace every number of their first argument
REPLACING = ("zero_", "fill_", "copy_")


def random_tensors(model: Any, names: Collection[str]) -> list[str] | None:
    """Return those of a model's tensors that start with random numbers, or uninitialised.

    Tensors that a file has filled must be marked as initialised, as `from_pretrained` marks them. The result is None if
    the class cannot initialise a model without numbers.
    """
    if not names:
        return []
    recorder = _RandomRecorder()
    try:
        with recorder:
            model.initialize_weights()
    except Exception:  # the code of a class may need numbers
        return None
    return [name for name in names if not recorder.is_fixed(model.get_parameter_or_buffer(name))]


class _RandomRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of the memory that is written, and of that with random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()  # storages that an operation has changed
        self.random: set[int] = set()  # storages with random numbers

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Return whether the class has given a tensor numbers, and none of them is random."""
        return _storage(tensor) in self.written - self.random

    def is_random(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has random numbers."""
        return _storage(tensor) in self.random

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether its results are random."""
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        if name in REPLACING and _covers_memory(args[0]):
            inputs = inputs[1:]
        is_random = torch.Tag.nondeterministic_seeded in operation.tags
        is_random = is_random or any(self.is_random(tensor) for tensor in inputs)
        for tensor in _tensors(result):
            self._mark(tensor, is_random)
            if operation._schema.is_mutable:
                self.written.add(_storage(tensor))
        return result

    def _mark(self, tensor: torch.Tensor, is_random: bool) -> None:
        """Record whether a result has random numbers."""
        if is_random:
            self.random.add(_storage(tensor))
        elif _covers_memory(tensor):
            self.random.discard(_storage(tensor))


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _covers_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers all of its memory."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
