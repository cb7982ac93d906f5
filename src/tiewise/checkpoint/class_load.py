"""Loading of every tensor of one checkpoint by the installed transformers.

A tensor is loaded, missing, or has another shape than the class.

`ask_load` asks the class itself (`built_class.py`). The architecture data answers the same for the two ends alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.built_class import ClassQuestion, NotBuilt, ask
from tiewise.checkpoint.stored import Stored

QUESTION = "tiewise.checkpoint.class_load_answer"


@dataclass(frozen=True)
class Mismatch:
    """A stored tensor whose shape differs from the class."""

    name: str  # in the class
    stored: tuple[int, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class ClassLoad:
    """Result of `from_pretrained` for each tensor of a class. All names are those of the class."""

    version: str  # of transformers
    tensors: int  # number of the class's parameters and saved buffers
    missing: tuple[str, ...]  # parameters that no stored tensor and no tie fills, in the class's order
    missing_buffers: tuple[str, ...]  # saved buffers that start with the values of the class
    # missing tensors and buffers that start with random numbers or uninitialised; the others start with fixed numbers
    random: frozenset[str]
    unexpected: tuple[str, ...]  # stored tensors that the class does not load
    mismatched: tuple[Mismatch, ...]
    failed: tuple[str, ...]  # tensors that a conversion of the stored ones does not give
    ties: Mapping[str, str]  # {target: source} of the ties with this config, in the order in which they are made
    tables: tuple[str, ...]  # input tables that the class names: of the model, its encoder and its decoder
    absent: tuple[str, ...]  # tensors of ties that no stored tensor fills
    sources: Mapping[str, str]  # {tensor of a tie: stored tensor that is loaded into it unchanged}
    types: Mapping[str, str]  # {tensor of a tie: its torch type after loading, such as "bfloat16"}

    @property
    def is_refused(self) -> bool:
        """Return whether `from_pretrained` raises an error."""
        return bool(self.mismatched or self.failed)

    def tied_to(self, name: str) -> str:
        """Return the source of a tensor by all ties of this config; itself without a tie."""
        seen = {name}
        while self.ties.get(name, name) not in seen:
            name = self.ties[name]
            seen.add(name)
        return name


def ask_load(
    config: Mapping[str, Any], class_name: str, tensors: Mapping[str, Stored], dtype: str | None = None
) -> ClassLoad | NotBuilt:
    """Return how the class with this config loads tensors of these names and shapes.

    Args:
        config: content of config.json.
        class_name: class of transformers.
        tensors: {name: stored tensor}.
        dtype: torch type of the model if the config names none, such as "float16".
    """
    stored = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()}
    reply = ask(ClassQuestion(config, class_name, QUESTION, {"tensors": stored, "dtype": dtype}))
    if isinstance(reply, NotBuilt):
        return reply
    missing = (*reply["missing"], *reply["missing_buffers"])
    mismatched = []
    for name, shape, needed in reply["mismatched"]:
        mismatched.append(Mismatch(name, tuple(shape), tuple(needed)))
    return ClassLoad(
        reply["version"],
        reply["tensors"],
        tuple(reply["missing"]),
        tuple(reply["missing_buffers"]),
        frozenset(missing if reply["random"] is None else reply["random"]),
        tuple(reply["unexpected"]),
        tuple(mismatched),
        tuple(reply["failed"]),
        reply["ties"],
        tuple(reply["tables"]),
        tuple(name for name in reply["absent"] if name in reply["types"]),
        reply["sources"],
        reply["types"],
    )
