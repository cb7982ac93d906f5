"""Compare a live model's two ends with its folder, after loading and before it is trusted.

    tiewise.probe(model, "path")
    Wrong: the lookup is the file's, the head all zero; two tables here, and the config ties them.

A launcher that forces a flag, a class that looks for other names, an engine that fills a head from the table: all load
without a message, and the generated text is noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiewise.boundary.locate import call_if_present, require_module
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.numeric_ends import require_head, require_readable_tables
from tiewise.checkpoint.stored import Reader, Stored, widened
from tiewise.core.errors import InstallError, UnsupportedError

SAME, ZERO, UNRELATED = "the file's", "all zero", "unrelated to the file's, as if drawn at random"
FROM_TABLE = "the file's input table, not the head that is stored"
_ALIKE = 0.1  # the cosine of two tables below which they have nothing in common
_PROBE_LOADED = "probe a model that is loaded, before it is quantised"


@dataclass(frozen=True, repr=False)
class Probe:
    """State of a live model's two ends; its `repr` is one sentence."""

    sound: bool  # both ends compute what the file says
    lookup: str  # state of its table: "the file's", "all zero", …
    head: str
    tied: bool  # both ends are one memory
    claimed: bool | None  # whether the config ties them; None where it does not say

    def __repr__(self) -> str:
        verdict = "Sound" if self.sound else "Wrong"
        tables = "one table" if self.tied else "two tables"
        claim = {True: "ties them", False: "does not tie them", None: "does not say"}[self.claimed]
        return f"{verdict}: the lookup is {self.lookup}, the head {self.head}; {tables} here, and the config {claim}."


def probe(model: nn.Module, folder: str | os.PathLike[str]) -> Probe:
    """Compare a live model's lookup and head with the folder that it was loaded from. Nothing is changed.

    Args:
        model: loaded, of transformers or of an engine; ends that it does not name itself have the names of the
            folder. Rows that padding adds behind the file's are not compared.
        folder: a Hugging Face folder with plain tables.

    Raises:
        CheckpointError: the folder cannot be read, is quantised, or has no two ends.
        InstallError: the model has no module where an end should be.
        UnsupportedError: an end is sharded, packed, or has no values yet.
    """
    require_module(model, UnsupportedError, "give the torch module that was loaded")
    facts = Facts(open_folder(folder))
    require_readable_tables(facts, "probe")  # or there is no table
    tables, head = facts.roles.input_tables, facts.roles.output
    lookups = [_weight(model, "get_input_embeddings", table.name) for table in tables]
    output = _weight(model, "get_output_embeddings", require_head(facts, "probe"))
    lookup_state = _state_of_lookups(lookups, tables)
    head_state = _state_of(output, head or tables[0])
    sound = lookup_state == SAME == head_state
    is_other_than_stored = head is not None and head_state != SAME
    if is_other_than_stored and _state_of(output, tables[0]) == SAME:
        head_state = FROM_TABLE
        sound = lookup_state == SAME and facts.tied is True  # of two that differ, a tie keeps the table
    tied = output.data_ptr() in {lookup.data_ptr() for lookup in lookups}
    return Probe(sound, lookup_state, head_state, tied, facts.tied)


def _weight(model: nn.Module, method: str, name: str) -> Tensor:
    """Return the weight [V, E] with this name, of the end that the model names, or of a module with its last name."""
    weight = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if weight is None:
        module = call_if_present(model, method) or _module_named(model, name.removesuffix(".weight").rpartition(".")[2])
        weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise InstallError(f"{type(model).__name__} has no table {name}", "probe the whole model, with both ends")
    if hasattr(weight, "full_tensor"):
        raise UnsupportedError(f"{name} is sharded", "probe before sharding")
    if weight.is_meta:
        raise UnsupportedError(f"{name} holds no values yet", _PROBE_LOADED)
    if not weight.is_floating_point() or weight.dim() != 2:
        raise UnsupportedError(f"{name} holds packed numbers ({weight.dtype})", _PROBE_LOADED)
    return weight.detach()


def _module_named(model: nn.Module, last: str) -> nn.Module | None:
    """Return the first module whose name ends in this part, or None."""
    for path, _ in model.named_modules():
        if path.rpartition(".")[2] == last:
            return model.get_submodule(path)
    return None


def _state_of_lookups(lookups: Sequence[Tensor], tables: Sequence[Stored]) -> str:
    """Return the state of the first lookup that is not the file's."""
    for lookup, table in zip(lookups, tables, strict=True):
        state = _state_of(lookup, table)
        if state != SAME:
            return state
    return SAME


def _state_of(live: Tensor, stored: Stored) -> str:
    """Describe a live table next to the stored one, in words that follow "the lookup is"."""
    if live.shape[1] != stored.shape[1] or len(live) < stored.rows:
        return f"of another shape, {list(live.shape)} where the file has {list(stored.shape)}"
    sums = _compare(live, stored)
    if not sums.differing_rows:
        return SAME
    if not sums.live_square:
        return ZERO
    if not math.isfinite(sums.live_square):
        return "not all numbers"
    if abs(sums.cosine()) < _ALIKE:
        return UNRELATED
    return f"other than the file's in {sums.differing_rows:,} of {stored.rows:,} rows"


@dataclass
class _TableSums:
    """Sums over the elements of a live table a and a stored table b."""

    differing_rows: int = 0
    live_square: float = 0.0  # Σ a²
    product: float = 0.0  # Σ a b
    stored_square: float = 0.0  # Σ b²

    def cosine(self) -> float:
        """Return Σ a b / √(Σ a² Σ b²); 0 where the stored table is."""
        if not self.stored_square:
            return 0.0
        return self.product / math.sqrt(self.live_square * self.stored_square)


def _compare(live: Tensor, stored: Stored) -> _TableSums:
    sums = _TableSums()
    with Reader(stored) as reader:
        for start, stop in reader.spans():
            rows, expected = live[start:stop].cpu(), torch.from_numpy(widened(reader.rows(start, stop)))
            sums.differing_rows += int((rows != expected.to(rows.dtype)).any(1).sum())
            a, b = rows.double(), expected.double()
            sums.live_square += float((a * a).sum())
            sums.product += float((a * b).sum())
            sums.stored_square += float((b * b).sum())
    return sums
