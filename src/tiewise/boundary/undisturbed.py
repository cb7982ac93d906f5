"""`undisturbed`: run a user's model and restore it exactly.

    with undisturbed(model):
        model(**batch)                  # may register hooks, write buffers, draw random numbers

Afterwards every module has its earlier attributes, submodules, hooks, buffers, mode and parameters. `config` and the
random generators are restored too. Objects keep their identity, so handles of hooks and optimizers stay valid.

A forward can have lasting effects. transformers registers hooks at the first forward that captures hidden states, and
notes that in an attribute. BigBird replaces its attention after a short batch. Rotary embeddings enlarge a buffer.

Seeds are set on the generators themselves. `torch.manual_seed` would also queue a seed for a later start of CUDA, which
cannot be undone.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from tiewise.boundary.sharded_tables import fsdp_units

_CONFIGS = (PreTrainedConfig, GenerationConfig)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # without subclasses, whose methods may do more
_PLAIN_TYPES = (NoneType, bool, str, int, float)
# attributes that fully_shard sets in the first forward and needs in later ones
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
    """Restore every random generator at the end of this context.

    With a `seed`, all generators start from it.
    """
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
    """Set every random generator to a state from `generator_states`."""
    for set_state, state in states:
        set_state(state)


def seed_generators(seed: int) -> None:
    """Seed every random generator, without queuing a seed for accelerators that are not started."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in _generators():
        generator.manual_seed(seed)


def _generators() -> list[torch.Generator]:
    """Return torch's default generators of the CPU, of MPS, and of started CUDA and XPU devices."""
    started: list[torch.Generator] = []
    if _is_started(torch.cuda):
        started += torch.cuda.default_generators
    if torch.backends.mps.is_available():
        started.append(torch.mps._get_default_mps_generator())
    if _is_started(torch.xpu):
        started += torch.xpu.default_generators
    return [torch.default_generator, *started]


def _is_started(accelerator: Any) -> bool:
    """Return whether torch has started an accelerator, such as `torch.cuda`."""
    return bool(accelerator.is_initialized())


# a model


@contextmanager
def undisturbed(model: nn.Module, *, training: bool | None = None, seed: int | None = None) -> Iterator[None]:
    """Restore a model and the random generators at the end of this context.

    Args:
        model: any model, with or without a boundary. If it is sharded, attributes that `fully_shard` sets in a first
            forward stay.
        training: mode of all modules within the context; None leaves the mode of each module.
        seed: as in `preserve_generators`.
    """
    with preserve_generators(seed):
        before = _Snapshot(model)
        try:
            if training is not None:
                for module in model.modules():
                    module.training = training  # not by `train()`, in which some adapters merge their weights
            yield
        except BaseException:
            before.restore(every_value=True)
            raise
        else:
            before.restore()


class _Snapshot:
    """Copy of the attributes of a model's modules and configs.

    It includes entries of containers and values of buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ignored_attributes: frozenset[str] = frozenset()
        if fsdp_units(model):
            self.ignored_attributes = _OF_SHARDING
        self.containers: list[tuple[Any, Any]] = []  # (container, shallow copy)
        self.tensors: list[tuple[Tensor, Tensor, int | None]] = []  # (tensor, copy of its values, version)
        self.parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        self.copied_ids: set[int] = set()
        for module in model.modules():
            self._copy_attributes(module)
            if isinstance(module, nn.Embedding) and module.max_norm is not None:  # its forward rescales rows
                self._copy_tensor(module.weight)

    def _copy_attributes(self, holder: Any) -> None:
        """Copy the attributes of a module or config."""
        attributes = vars(holder)
        self.containers.append((attributes, dict(attributes)))
        for name, value in attributes.items():
            if name not in self.ignored_attributes:
                self._copy_value(value)

    def _copy_value(self, value: Any) -> None:
        """Copy a value that is a container, a tensor or a config, once."""
        if type(value) in _PLAIN_TYPES or id(value) in self.copied_ids:
            return
        if type(value) in _CONTAINERS:  # checked first, because a module has about ten
            self.copied_ids.add(id(value))
            self.containers.append((value, value.copy()))
            self._copy_values(value)
        elif isinstance(value, tuple):
            self._copy_values(value)
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # it may be lazy or have no memory
            self.copied_ids.add(id(value))
            self._copy_tensor(value)
        elif isinstance(value, _CONFIGS):
            self.copied_ids.add(id(value))
            self._copy_attributes(value)

    def _copy_values(self, values: Iterable[Any]) -> None:
        """Copy the values of a container."""
        if isinstance(values, dict):
            values = values.values()
        for value in values:
            self._copy_value(value)

    def _copy_tensor(self, tensor: Tensor) -> None:
        """Copy the values of a tensor and note its version."""
        version = None
        if not tensor.is_inference():
            version = tensor._version
        self.tensors.append((tensor, tensor.detach().clone(), version))

    def restore(self, every_value: bool = False) -> None:
        """Restore all attributes, gradients and values.

        `every_value` also restores tensors whose version counter is unchanged. An operation that raised may have
        written to a tensor without incrementing it.
        """
        for container, copied in self.containers:
            _refill(container, copied)
        for parameter, gradient, requires_grad in self.parameters:
            _restore_parameter(parameter, gradient, requires_grad)
        for tensor, values, version in self.tensors:
            if every_value or _may_be_written(tensor, version):
                with torch.no_grad():
                    tensor.copy_(values)


def _restore_parameter(parameter: nn.Parameter, gradient: Tensor | None, requires_grad: bool) -> None:
    """Restore a Parameter's gradient and `requires_grad`, if they changed."""
    if parameter.grad is not gradient:
        parameter.grad = gradient
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def _may_be_written(tensor: Tensor, version: int | None) -> bool:
    """Return whether a tensor may have been written to since this version.

    The version is None for an inference tensor, which has no counter.
    """
    return version is None or tensor._version != version


def _refill(container: Any, copied: Any) -> None:
    """Restore a container's entries and their order from a copy, if they changed."""
    both_empty = len(container) + len(copied) == 0  # true of most containers of a module
    if both_empty or _entries(container) == _entries(copied):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(copied)
    else:
        container.extend(copied)


def _entries(container: Any) -> list[int]:
    """Return the ids of a container's items, or of its keys and values, in order."""
    values = getattr(container, "values", tuple)  # of a dict
    return [id(entry) for entry in (*container, *values())]
