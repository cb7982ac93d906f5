"""Run a user's model and leave it exactly as it was.

    with undisturbed(model):
        model(**batch)                  # may register hooks, write buffers, draw random numbers

Afterwards every module has the attributes, submodules, hooks, buffers, mode and parameters that it had, `config` and
random generators included. Objects keep their identity, so that handles of hooks and optimizers stay valid.

A forward can change more than it says: transformers registers hooks at the first forward that captures hidden states
and notes that in an attribute, BigBird replaces its attention after a short batch, rotary embeddings grow a buffer.

Seeding uses the generators themselves. `torch.manual_seed` would also queue a seed for CUDA's later start, which
nothing can take back.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from tiewise.boundary.sharded_tables import fsdp_units

_CONFIGS = (PreTrainedConfig, GenerationConfig)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # and no subclass, whose methods may do more
# what fully_shard sets up in a first forward and keeps for all later ones
_OF_SHARDING = frozenset((
    "_parameters",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
))  # fmt: skip


# random generators


@contextmanager
def preserve_generators(seed: int | None = None) -> Iterator[None]:
    """Restore every random generator at the end of this context. With a `seed`, start each from it."""
    states = generator_states()
    try:
        if seed is not None:
            seed_generators(seed)
        yield
    finally:
        restore_generators(states)


def generator_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """Return the state of every random generator, each with the function that sets it."""
    of_torch = [(generator.set_state, generator.get_state()) for generator in _generators()]
    return [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state()), *of_torch]


def restore_generators(states: list[tuple[Callable[[Any], Any], Any]]) -> None:
    """Set every random generator to what `generator_states` returned."""
    for set_state, state in states:
        set_state(state)


def seed_generators(seed: int) -> None:
    """Start every random generator from a seed, without queuing one for accelerators that have not been started."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in _generators():
        generator.manual_seed(seed)


def _generators() -> list[torch.Generator]:
    """Return torch's default generators: the CPU's, that of MPS, and those of accelerators that have been started."""
    started: list[torch.Generator] = []
    if _is_started(torch.cuda):
        started += torch.cuda.default_generators
    if torch.backends.mps.is_available():
        started.append(torch.mps._get_default_mps_generator())
    if _is_started(torch.xpu):
        started += torch.xpu.default_generators
    return [torch.default_generator, *started]


def _is_started(accelerator: Any) -> bool:
    """Return whether torch has started an accelerator, whose module it is given."""
    return bool(accelerator.is_initialized())


# a model


@contextmanager
def undisturbed(model: nn.Module, *, training: bool | None = None, seed: int | None = None) -> Iterator[None]:
    """Restore a model and the random generators at the end of this context.

    Args:
        model: any model, installed or not; of a sharded one, what `fully_shard` sets up in a first forward stays.
        training: mode of all its modules within the context; None keeps each module's own.
        seed: as in `preserve_generators`.
    """
    with preserve_generators(seed):
        before = _Snapshot(model)
        try:
            if training is not None:
                for module in model.modules():
                    module.training = training  # `train` may do more: some adapters merge their weights there
            yield
        except BaseException:
            before.restore(every_value=True)
            raise
        else:
            before.restore()


class _Snapshot:
    """Attributes of every module and config of a model, with entries of containers and values of buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.passed_over: frozenset[str] = frozenset()
        if fsdp_units(model):
            self.passed_over = _OF_SHARDING
        self.containers: list[tuple[Any, Any]] = []  # (container, a shallow copy of it)
        self.tensors: list[tuple[Tensor, Tensor, int | None]] = []  # (tensor, its values, its version)
        self.parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        self.seen: set[int] = set()
        for module in model.modules():
            self._object(module)
            if isinstance(module, nn.Embedding) and module.max_norm is not None:  # its forward rescales rows
                self._tensor(module.weight)

    def _object(self, holder: Any) -> None:
        attributes = vars(holder)
        self.containers.append((attributes, dict(attributes)))
        for name, value in attributes.items():
            if name not in self.passed_over:
                self._value(value)

    def _value(self, value: Any) -> None:
        if id(value) in self.seen or isinstance(value, nn.Module | nn.Parameter):
            return
        if isinstance(value, tuple):
            self._each(value)
            return
        if type(value) in _CONTAINERS:
            self.seen.add(id(value))
            self.containers.append((value, value.copy()))
            self._each(value)
        elif isinstance(value, Tensor):
            self.seen.add(id(value))
            self._tensor(value)
        elif isinstance(value, _CONFIGS):
            self.seen.add(id(value))
            self._object(value)

    def _each(self, values: Iterable[Any]) -> None:
        if isinstance(values, dict):
            values = values.values()
        for value in values:
            self._value(value)

    def _tensor(self, tensor: Tensor) -> None:
        version = None
        if not tensor.is_inference():
            version = tensor._version
        self.tensors.append((tensor, tensor.detach().clone(), version))

    def restore(self, every_value: bool = False) -> None:
        """Give everything back; with `every_value` also to tensors whose version says that nobody wrote to them.

        An operation that raises may have written without counting the version up.
        """
        for container, copied in self.containers:
            _refill(container, copied)
        for parameter, gradient, trains in self.parameters:
            _restore_parameter(parameter, gradient, trains)
        for tensor, values, version in self.tensors:
            if every_value or _may_be_written(tensor, version):
                with torch.no_grad():
                    tensor.copy_(values)


def _restore_parameter(parameter: nn.Parameter, gradient: Tensor | None, trains: bool) -> None:
    """Give a Parameter its gradient and its mode back; one that has them is not written."""
    if parameter.grad is not gradient:
        parameter.grad = gradient
    if parameter.requires_grad != trains:
        parameter.requires_grad_(trains)


def _may_be_written(tensor: Tensor, version: int | None) -> bool:
    """Return whether somebody may have written to a tensor since this version. None is that of one that counts none."""
    return version is None or tensor._version != version


def _refill(container: Any, copied: Any) -> None:
    """Give a container the entries of a copy, in their order. An unchanged one is not written."""
    if _entries(container) == _entries(copied):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(copied)
    else:
        container.extend(copied)


def _entries(container: Any) -> list[Any]:
    """Return keys and identities of what a container holds, in order."""
    if isinstance(container, dict):
        return [(name, id(value)) for name, value in container.items()]
    return [id(value) for value in container]
