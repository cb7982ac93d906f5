"""Names of tensors, taken apart: what wraps them, what they lie beside, what the two ends are usually called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

POSITION = re.compile(
    r"(^|\.)(wpe|positions?_embed\w*|embed_positions?|pos_embed\w*|positional_embed\w*|pos_emb)(\.|$)"
)
PACKED = ("qweight", "weight_packed", "qweight_packed", "B", "weight_q")  # the bytes of a quantised table
BESIDE = re.compile(
    r"(qzeros|g_idx|scales|biases|zeros|SCB|weight_(scale|shape|zero_point|g_idx|scale_inv|format|scale_2|global_scale)"
    r"|input_scale|absmax|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))"
)
_INSIDE = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Usual:
    """The hand-written names."""

    pairs: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    whole_outputs: tuple[str, ...]
    maps: tuple[str, ...]
    biases: tuple[str, ...]
    wrappers: frozenset[str]
    foreign: frozenset[str]


def read_data(name: str) -> Any:
    """Return a data file of this package."""
    return json.loads((files("tiewise.checkpoint") / "data" / name).read_text("utf-8"))


@lru_cache(maxsize=1)
def usual() -> Usual:
    """Read the hand-written names, longest paths first."""
    data = read_data("usual_names.json")
    pairs = sorted(((pair["input"], pair["output"]) for pair in data["pairs"]), key=lambda p: -p[0].count("."))
    return Usual(
        tuple(pairs),
        outputs=tuple(data["outputs"]),
        whole_outputs=tuple(data["whole_outputs"]),
        maps=tuple(data["maps"]),
        biases=tuple(data["biases"]),
        wrappers=frozenset(data["wrappers"]),
        foreign=frozenset(data["foreign"]),
    )


def unwrapped(name: str) -> str:
    """Return a tensor's name without what torch.compile, DDP, FSDP and PEFT put around modules.

    >>> unwrapped("base_model.model.model.embed_tokens.base_layer.weight")
    'model.embed_tokens.weight'
    """
    if name.startswith("base_model.model."):
        name = name.removeprefix("base_model.model.")
    parts = [part for part in name.split(".") if part not in usual().wrappers]
    return ".".join(parts).replace(".modules_to_save.default.", ".")


def module_of(name: str) -> tuple[str, str]:
    """(module, parameter) of a tensor's name."""
    module, _, parameter = name.rpartition(".")
    return module, parameter


def ends_with(module: str, path: str) -> bool:
    """Whether a module's name ends with a path of whole parts.

    >>> ends_with("model.lm_head", "lm_head"), ends_with("model.my_lm_head", "lm_head")
    (True, False)
    """
    return module == path or module.endswith(f".{path}")


def in_layer(name: str) -> bool:
    """Whether a module lies inside a numbered layer: tables there belong to no end of the model."""
    return bool(_INSIDE.search(f".{name}."))


def is_foreign(name: str) -> bool:
    """Whether a module belongs to another modality, a codec, or a draft head."""
    return any(part in usual().foreign or part.startswith(("vision_", "audio_", "mtp_")) for part in name.split("."))
