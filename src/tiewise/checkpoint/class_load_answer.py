"""Answer of a class to the question which of its tensors a checkpoint fills. It runs in `built_class_child.py`.

The class loads tensors of the stored names, types and shapes on the meta device, with the functions that
`from_pretrained` of the installed transformers uses: renamings, conversions such as packed experts, ties, and names
that may be missing. No number is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.stored import TORCH_TYPES
from tiewise.core import Late

initial_values = Late("tiewise.checkpoint.initial_values")  # it needs torch


def answer(model: Any, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `from_pretrained` reports of a checkpoint.

    Args:
        model: the class on the meta device.
        argument: {"tensors": {name of a stored tensor: [safetensors type, shape]}, "dtype": torch type of the model
            if its config names none}.
    """
    import transformers

    stored = argument["tensors"]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = list(model.state_dict())
    sources, tables = _sources(model, stored), _input_tables(model)
    load = _load(model, _meta_tensors(stored))
    missing = [name for name in names if name in load.info.missing_keys]
    return {
        "version": transformers.__version__,
        "tensors": len(names),
        "missing": [name for name in missing if name in parameters],
        "missing_buffers": [name for name in missing if name not in parameters],
        "random": initial_values.random_tensors(model, missing),
        "unexpected": sorted(load.info.unexpected_keys),
        "mismatched": sorted([name, list(shape), list(needed)] for name, shape, needed in load.info.mismatched_keys),
        "failed": sorted(load.info.conversion_errors),
        "ties": load.ties,
        "absent": sorted(load.absent),
        "sources": {name: source for name, source in sources.items() if name in load.tied},
        "tables": tables,
        "types": _loaded_types(model, load.tied, argument["dtype"]),
    }


@dataclass(frozen=True)
class _Load:
    """Tensors of a class after a load on the meta device."""

    info: Any  # `LoadStateDictInfo` of transformers
    ties: dict[str, str]  # {target: source}, in the order in which they are made
    absent: frozenset[str]  # tensors that no stored tensor fills, before the ties

    @property
    def tied(self) -> frozenset[str]:
        """Return the tensors of all ties."""
        return frozenset((*self.ties, *self.ties.values()))


def _input_tables(model: Any) -> list[str]:
    """Return the input tables that the class names.

    It may name one for the model, one for its encoder and one for its decoder.
    """
    names = {id(module): name for name, module in model.named_modules()}
    tables = {}
    for owner in (model, _ask(model, "get_encoder"), _ask(model, "get_decoder")):
        module = _ask(owner, "get_input_embeddings")
        if id(module) in names and hasattr(module, "weight"):
            tables[f"{names[id(module)]}.weight"] = True
    return list(tables)


def _ask(owner: Any, method: str) -> Any:
    """Return what a method of a model returns; None if it has none or refuses."""
    try:
        return getattr(owner, method)()
    except (AttributeError, NotImplementedError):
        return None


def _sources(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return {tensor of the class: stored tensor} for tensors that are loaded unchanged.

    Of several stored tensors the first in transformers' order counts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    of_class, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        target, converter = rename_source_key(name, renamings, converters, prefix, of_class)
        if target not in of_class and name in of_class:
            target, converter = rename_source_key(name, [], [], prefix, of_class)
        if converter is None:
            sources.setdefault(target, name)
    return sources


def _loaded_types(model: Any, names: Iterable[str], default: str | None) -> dict[str, str]:
    """Return {tensor: name of its torch type after loading}."""
    from transformers.core_model_loading import build_glob_alternation

    main = _torch_type(model.config.dtype or default or "float32")
    types = dict.fromkeys(names, str(main).removeprefix("torch."))
    plan = model._get_dtype_plan(main)
    if not plan:
        return types
    pattern, _, _ = build_glob_alternation(list(plan))  # every type of a plan is float32
    for name in types:
        if pattern.search(name):
            types[name] = "float32"
    return types


def _torch_type(dtype: Any) -> Any:
    """Return a torch type, which may be given by its name."""
    import torch

    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _meta_tensors(stored: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return tensors without numbers, of the stored types and shapes."""
    import torch

    types = {short: getattr(torch, name, torch.uint8) for name, short in TORCH_TYPES.items()}
    tensors = {}
    for name, (dtype, shape) in stored.items():
        tensors[name] = torch.empty(shape, dtype=types.get(dtype, torch.uint8), device="meta")
    return tensors


def _load(model: Any, tensors: Mapping[str, Any]) -> _Load:
    """Load tensors as `from_pretrained` does."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    conversions = get_model_conversion_mapping(model)
    for conversion in conversions:
        if getattr(conversion, "force_cpu", False):  # a tensor without numbers cannot leave the meta device
            conversion.force_cpu = False
    settings = LoadStateDictConfig(device_map={"": "meta"}, dtype=torch.float32, weight_mapping=conversions)
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=dict(tensors), load_config=settings)
    model.mark_tied_weights_as_initialized(info)
    ties, absent = dict(model.all_tied_weights_keys), frozenset(info.missing_keys)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return _Load(info, ties, absent)
