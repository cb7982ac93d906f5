"""Draft models: they propose tokens to a target model, often over a part of its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tiewise.checkpoint.stored import Stored

DRAFT_SIZE_KEYS = ("draft_vocab_size", "truncated_vocab_size")  # config keys
# part of a draft's class name; Eagle 2 and 2.5 are also vision-language models, which are excluded
_DRAFT = re.compile(
    r"(eagle|medusa|dflash|dspark)(?!.*(VL|Chat|Conditional))|speculator|nextn|mtp(model)?$", re.IGNORECASE
)


class Draft(NamedTuple):
    """Draft vocabulary of a folder. An absent part is None."""

    map: Stored | None  # map [N] from draft ids to target ids: d2t or token_map
    t2d: Stored | None  # map [V] from target ids to the draft vocabulary
    size: int | None  # draft vocabulary size N
    reduced: bool  # N is smaller than V, so the draft needs a map
    heads: tuple[Stored, ...]  # draft heads of Medusa, each [N or V, D]

    @property
    def holds_ids(self) -> bool:
        """Return whether the map stores target ids. d2t stores differences between target and draft id."""
        return self.map is not None and self.map.name.endswith("token_map")

    @property
    def has_parts(self) -> bool:
        """Return whether the folder has any part of a draft vocabulary."""
        if self.map is not None or self.t2d is not None:
            return True
        return self.size is not None or bool(self.heads)


def read_draft(
    tensors: Mapping[str, Stored], size: int | None, vocabulary: int | None, heads: tuple[Stored, ...]
) -> Draft:
    """Return the draft vocabulary of a folder.

    Args:
        tensors: all tensors of the folder, by name.
        size: draft vocabulary size N in the config; None if absent.
        vocabulary: vocabulary size V of the target; None if unknown.
        heads: draft heads of Medusa.
    """
    last_parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    map_to_target = last_parts.get("d2t", last_parts.get("token_map"))
    is_reduced = False
    if size is not None and vocabulary is not None:
        is_reduced = size < vocabulary
    return Draft(map_to_target, last_parts.get("t2d"), size, is_reduced, heads)


def is_called_draft(architecture: str | None, model_type: str | None) -> bool:
    """Return whether the name of the class or the model type is that of a draft."""
    names = f"{architecture} {model_type}".split()
    return any(_DRAFT.search(name) for name in names)
