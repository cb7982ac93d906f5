"""Recorded runs of mlx-lm with tiny models, one a family.

`tools/make_mlx_outcomes.py` writes them into `data/mlx_lm.json`. `mlx_fit.py` compares a checkpoint with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# keys of a config that do not decide which tensors a class has, and their endings
NOT_OF_TENSORS = frozenset(
    ["tie_word_embeddings", "use_cache", "is_encoder_decoder", "is_decoder", "return_dict", "torchscript", "model_type"]
)
NOT_OF_TENSORS |= {"transformers_version", "dtype", "torch_dtype", "initializer_range", "hidden_act", "architectures"}
_NOT_OF_TENSORS_ENDINGS = ("_token_id", "dropout", "_coef", "_theta", "_scaling", "rope_parameters")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"(.+?)\.(\d{1,9})\.(.+)")


@dataclass(frozen=True)
class LayerPlace:
    """Place of a stored tensor in a numbered layer."""

    layers: str  # name of the list of layers: "model.layers"
    number: int  # of the layer
    pattern: str  # name in the layer, with # for each further number: "mlp.experts.#.up_proj.weight"


def numbered(name: str) -> LayerPlace | None:
    """Return the place of a tensor in a numbered layer; None for a tensor outside layers.

    >>> numbered("model.layers.3.mlp.experts.0.up_proj.weight")
    LayerPlace(layers='model.layers', number=3, pattern='mlp.experts.#.up_proj.weight')
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layers, number, rest = match.groups()
    return LayerPlace(layers, int(number), _NUMBER.sub("#", f".{rest}").removeprefix("."))


def pattern_of(name: str) -> str:
    """Return a tensor's name with # for each number between dots."""
    return _NUMBER.sub("#", name)


def text_layers(lists: Iterable[str], inputs: Sequence[str]) -> str | None:
    """Return the list of layers that shares most of its path with the input table."""
    path = inputs[0].split(".")
    return max(sorted(lists), key=lambda layers: _common_length(layers.split("."), path), default=None)


def _common_length(path: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of equal parts at the beginning of two paths."""
    length = 0
    for part, other_part in zip(path, other, strict=False):
        if part != other_part:
            break
        length += 1
    return length


@dataclass(frozen=True)
class MlxRun:
    """Record of one family in `data/mlx_lm.json`, whose `about` describes the fields."""

    ends: str
    inputs: Sequence[str]
    heads: Sequence[str]
    shape: Sequence[str | None]
    flag: str | None
    tensors: Sequence[str]
    layers: Mapping[str, Sequence[Sequence[str]]]
    skipped: Sequence[str]
    skipped_parts: Sequence[str]
    more_layers: bool
    converted: Sequence[str]
    keys: Sequence[Sequence[str]]
    by_default: Mapping[str, Any]
    not_null: Sequence[str]
    values: Mapping[str, Any]
    settings: Mapping[str, Any]
    unpackable: Sequence[str]
    refuses_wrong_dropped_head: bool
    stripped: Sequence[str]

    @property
    def text_layers(self) -> str | None:
        """Return the name of the text model's list of layers."""
        return text_layers(self.layers, self.inputs)

    def requires(self, name: str) -> bool:
        """Return whether mlx-lm needs this tensor, which is outside both ends."""
        place = numbered(name)
        if place is None:
            return pattern_of(name) in self.tensors
        return any(place.pattern in kind for kind in self.layers.get(place.layers, ()))


def config_value(config: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return (whether a config has a key, its value). The key may have a path: `text_config.vocab_size`."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def decides_on_tensors(key: str) -> bool:
    """Return whether a key of a config may decide which tensors a class has."""
    return key not in NOT_OF_TENSORS and not key.endswith(_NOT_OF_TENSORS_ENDINGS)


def kind_of_value(value: Any) -> Any:
    """Return the kind of a config's value that may decide on tensors.

    A string is its own kind, and a list of strings has the kind of the sorted set of them. Numbers are "zero" or
    "number", other lists "empty" or "list".
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return ("zero", "number")[bool(value)]
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            return sorted(set(value))
        return ("empty", "list")[bool(value)]
    return "object"
