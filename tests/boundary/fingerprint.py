"""A full description of a model and of the random generators, to compare before and after."""

import random
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig


class Fingerprint:
    """State of a model and of the generators that a caller can observe; equal if nothing changed.

    It does not use the code under test. It describes every attribute of every module by value or, for objects of
    unknown type, by identity. Described objects are kept alive, so that no identity is used twice.
    """

    def __init__(self, model):
        self._alive, self._open = [], set()
        self.found = {name or "model": self._module(module) for name, module in model.named_modules()}
        self.found["parameters"] = {
            name: (id(p), p.requires_grad, _numbers(p), self._value(p.grad))
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.found["generators"] = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
        self.found["queued for CUDA"] = [
            self._queued(call) for call in torch.cuda._lazy_seed_tracker.get_calls() if call
        ]
        self.found["modes"] = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype())

    def __eq__(self, other):
        return self.found == other.found

    def changes(self, other):
        """Return the names of attributes that differ, for a readable failure."""
        found = []
        for name in {**self.found, **other.found}:
            one, two = self.found.get(name), other.found.get(name)
            if one != two and isinstance(one, dict) and isinstance(two, dict):
                found += [f"{name}: {key}" for key in {**one, **two} if one.get(key) != two.get(key)]
            elif one != two:
                found.append(name)
        return found

    def _module(self, module):
        return {"class": str(type(module)), **{name: self._value(value) for name, value in vars(module).items()}}

    def _value(self, value):
        if isinstance(value, nn.Module | nn.Parameter):
            self._alive.append(value)
            return id(value)
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            return id(value), _numbers(value)
        if isinstance(value, PreTrainedConfig | GenerationConfig):
            if id(value) in self._open:
                return id(value)
            self._open.add(id(value))
            described = (id(value), str(type(value)), {name: self._value(v) for name, v in vars(value).items()})
            self._open.discard(id(value))
            return described
        if isinstance(value, dict):
            return [(self._value(key), self._value(one)) for key, one in value.items()]
        if isinstance(value, list | tuple):
            return type(value).__name__, [self._value(one) for one in value]
        if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device):
            return repr(value)
        self._alive.append(value)
        return id(value)

    @staticmethod
    def _queued(call):
        function = call[0]
        return function.__name__, tuple(cell.cell_contents for cell in function.__closure__ or ())


@contextmanager
def left_alone(model):
    """Check that the block changes neither the model nor the random generators."""
    before = Fingerprint(model)
    yield
    assert before.changes(Fingerprint(model)) == []


def _numbers(tensor):
    kind = str(type(tensor)), str(tensor.dtype), tuple(tensor.shape)
    here = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, the local part
    if here.is_meta or type(here) not in (torch.Tensor, torch.nn.Parameter) or here.is_quantized:
        return kind
    flat = here.detach().cpu().reshape(-1).contiguous()
    return *kind, flat.view(torch.uint8).numpy().tobytes()
