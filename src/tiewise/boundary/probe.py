"""Does a live model hold at its two ends what its folder does? Asked after loading, before it is trusted.

    tiewise.probe(model, "path")
    Wrong: the lookup is the file's, the head all zero; two tables here, and the config ties them.

A launcher that forces a flag, a class that looks for other names, an engine that fills a head from the table: all load
without a word, and the text that comes out is noise.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiewise.boundary.locate import ask
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.numeric_ends import readable, require_head
from tiewise.checkpoint.stored import Reader, Stored, widened
from tiewise.core.errors import InstallError, UnsupportedError

SAME, ZERO, DRAWN = "the file's", "all zero", "unrelated to the file's, as if drawn at random"
FROM_TABLE = "the file's input table, not the head that is stored"
_ALIKE = 0.1  # the cosine of two tables below which they have nothing in common


@dataclass(frozen=True, repr=False)
class Probe:
    """What a live model holds at its two ends; its `repr` is one sentence."""

    sound: bool  # both ends compute what the file says
    lookup: str  # what its table is: "the file's", "all zero", …
    head: str
    tied: bool  # both ends are one memory
    claimed: bool | None  # what the config says of that; None where it does not say

    def __repr__(self) -> str:
        said = {True: "ties them", False: "does not tie them", None: "does not say"}[self.claimed]
        here = f"{'one table' if self.tied else 'two tables'} here, and the config {said}"
        return f"{'Sound' if self.sound else 'Wrong'}: the lookup is {self.lookup}, the head {self.head}; {here}."


def probe(model: nn.Module, folder: str | os.PathLike[str]) -> Probe:
    """Hold a live model's lookup and head against the folder that it was loaded from. Nothing is changed.

    Args:
        model: loaded, of transformers or of an engine; ends that it does not name itself are found by their names in
            the folder. Rows that padding adds behind the file's are not looked at.
        folder: a Hugging Face folder with plain tables.

    Raises:
        CheckpointError: the folder cannot be read, is quantised, or has no two ends.
        InstallError: the model has no module where an end should be.
        UnsupportedError: an end is sharded, packed, or has no values yet.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"a {type(model).__name__} is no model", "give the torch module that was loaded")
    facts = Facts(open_folder(folder))
    readable(facts, "probe")  # or there is no table
    tables, head = facts.roles.inputs, facts.roles.output
    lookups = [_weight(model, "get_input_embeddings", table.name) for table in tables]
    output = _weight(model, "get_output_embeddings", require_head(facts, "probe"))
    found = next((said for pair in zip(lookups, tables, strict=True) if (said := _held(*pair)) != SAME), SAME)
    own = _held(output, head or tables[0])
    sound = found == SAME == own
    if own != SAME and head is not None and _held(output, tables[0]) == SAME:
        own, sound = FROM_TABLE, found == SAME and facts.tied is True  # of two that differ, a tie keeps the table
    tied = output.data_ptr() in {lookup.data_ptr() for lookup in lookups}
    return Probe(sound, found, own, tied, facts.tied)


def _weight(model: nn.Module, method: str, name: str) -> Tensor:
    """The weight [V, E] that has this name, or is of the end that the model says, or of a module called so at last."""
    weight = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if weight is None:
        last = name.removesuffix(".weight").rpartition(".")[2]
        called = (part for path, part in model.named_modules() if path.rpartition(".")[2] == last)
        weight = getattr(ask(model, method) or next(called, None), "weight", None)
    if not isinstance(weight, Tensor):
        raise InstallError(f"{type(model).__name__} has no table {name}", "probe the whole model, with both ends")
    if hasattr(weight, "full_tensor"):
        raise UnsupportedError(f"{name} is sharded", "probe before sharding")
    if weight.is_meta or not weight.is_floating_point() or weight.dim() != 2:
        what = f"{name} holds {'no values yet' if weight.is_meta else f'packed numbers ({weight.dtype})'}"
        raise UnsupportedError(what, "probe a model that is loaded, before it is quantised")
    return weight.detach()


def _held(live: Tensor, stored: Stored) -> str:
    """What a live table is, in words that follow "the lookup is"."""
    if live.shape[1] != stored.shape[1] or len(live) < stored.rows:
        return f"of another shape, {list(live.shape)} where the file has {list(stored.shape)}"
    differing, own, both, its = 0, 0.0, 0.0, 0.0
    with Reader(stored) as reader:
        for start, stop in reader.spans():
            rows, wanted = live[start:stop].cpu(), torch.from_numpy(widened(reader.rows(start, stop)))
            differing += int((rows != wanted.to(rows.dtype)).any(1).sum())
            a, b = rows.double(), wanted.double()
            own, both, its = own + float((a * a).sum()), both + float((a * b).sum()), its + float((b * b).sum())
    if not differing:
        return SAME
    if not own:
        return ZERO
    if not math.isfinite(own):
        return "not all numbers"
    alike = both / math.sqrt(own * its) if its else 0.0
    return DRAWN if abs(alike) < _ALIKE else f"other than the file's in {differing:,} of {stored.rows:,} rows"
