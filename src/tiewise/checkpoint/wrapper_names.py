"""Prefixes that training wrappers put before the names of all tensors, which `tiewise repair` removes."""

from __future__ import annotations

import re
from collections.abc import Iterable

# torch.compile; DDP and DataParallel; FSDP; activation checkpointing
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PEFT = "base_model.model"  # PEFT; a merged model keeps it if its state_dict is saved as it is
_PARTS_OF_ADAPTERS = re.compile(r"\.(base_layer|lora_\w+|modules_to_save|original_module)\.")


def unwrapped_names(names: Iterable[str], table: str, expected: str) -> dict[str, str]:
    """Return {stored name: new name} of every tensor below the wrapper of the input table.

    Return an empty dictionary if the table's name is not `WRAPPER.expected`, if a new name is taken, or if an adapter
    is not merged.

    >>> unwrapped_names(["_orig_mod.wte.weight", "_orig_mod.ln.weight", "x"], "_orig_mod.wte.weight", "wte.weight")
    {'_orig_mod.ln.weight': 'ln.weight', '_orig_mod.wte.weight': 'wte.weight'}
    """
    stored = set(names)
    wrapper = table.removesuffix(f".{expected}")
    parts = wrapper.replace(_PEFT, "module").split(".")
    if wrapper == table or not set(parts) <= set(WRAPPERS):
        return {}
    if _PARTS_OF_ADAPTERS.search(" ".join(stored)):
        return {}
    renamed = {name: name.removeprefix(f"{wrapper}.") for name in sorted(stored) if name.startswith(f"{wrapper}.")}
    if not stored.isdisjoint(renamed.values()):
        return {}
    return renamed
