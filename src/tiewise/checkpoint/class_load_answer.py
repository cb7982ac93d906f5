"""Answer of a class to the question which of its tensors a checkpoint fills. It runs in `built_class_child.py`.

The class loads tensors of the stored names, types and shapes on the meta device, with the functions that
`from_pretrained` of the installed transformers uses: renamings, conversions such as packed experts, ties, and names
that may be missing. No number is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tiewise.checkpoint.stored import TORCH_TYPES


def answer(model: Any, stored: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return what `from_pretrained` reports of a checkpoint.

    Args:
        model: the class on the meta device.
        stored: {name of a stored tensor: [safetensors type, shape]}.
    """
    import transformers

    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = list(model.state_dict())
    info = _load(model, _meta_tensors(stored))
    missing = [name for name in names if name in info.missing_keys]
    return {
        "version": transformers.__version__,
        "tensors": len(names),
        "missing": [name for name in missing if name in parameters],
        "missing_buffers": [name for name in missing if name not in parameters],
        "unexpected": sorted(info.unexpected_keys),
        "mismatched": sorted([name, list(shape), list(needed)] for name, shape, needed in info.mismatched_keys),
        "failed": sorted(info.conversion_errors),
        "ties": dict(model.all_tied_weights_keys),
    }


def _meta_tensors(stored: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return tensors without numbers, of the stored types and shapes."""
    import torch

    types = {short: getattr(torch, name, torch.uint8) for name, short in TORCH_TYPES.items()}
    tensors = {}
    for name, (dtype, shape) in stored.items():
        tensors[name] = torch.empty(shape, dtype=types.get(dtype, torch.uint8), device="meta")
    return tensors


def _load(model: Any, tensors: Mapping[str, Any]) -> Any:
    """Load tensors as `from_pretrained` does and return its `LoadStateDictInfo`."""
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
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return info
