"""Tensors that `from_pretrained` of transformers draws at random, observed without numbers.

A tensor that no file stores starts with the numbers that its class gives it: a matrix is drawn at random, a norm starts
as ones, a count of experts as zeros. `drawn_tensors` lets the class initialise a model on the meta device, records
every operation, and follows random numbers through copies and in-place changes. It runs in `built_class_child.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operations that replace every number of their first argument
REPLACING = ("zero_", "fill_", "copy_")


def drawn_tensors(model: Any, names: Collection[str]) -> list[str] | None:
    """Return those of a model's tensors that it starts with random numbers.

    Tensors that a file has filled must be marked as initialised, as `from_pretrained` marks them. The result is None if
    the class cannot initialise a model without numbers.
    """
    if not names:
        return []
    recorder = _DrawRecorder()
    try:
        with recorder:
            model.initialize_weights()
    except Exception:  # the code of a class may need numbers
        return None
    return [name for name in names if recorder.is_drawn(model.get_parameter_or_buffer(name))]


class _DrawRecorder(TorchDispatchMode):
    """Record of the memory that holds random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: set[int] = set()  # storages with random numbers

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor holds random numbers."""
        return _storage(tensor) in self.drawn

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether its results are random."""
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        if name in REPLACING and _is_whole(args[0]):
            inputs = inputs[1:]
        is_random = torch.Tag.nondeterministic_seeded in operation.tags
        is_random = is_random or any(self.is_drawn(each) for each in inputs)
        for written in _tensors(result):
            self._mark(written, is_random)
        return result

    def _mark(self, tensor: torch.Tensor, is_random: bool) -> None:
        """Record whether a result holds random numbers."""
        if is_random:
            self.drawn.add(_storage(tensor))
        elif _is_whole(tensor):
            self.drawn.discard(_storage(tensor))


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: torch.Tensor) -> bool:
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
