"""`probe`: compare the tables of a loaded model with those of its folder.

    tiewise.probe(model, "path")
    Wrong: the lookup is the file's, the head all zero; two tables here, and the config ties them.

Some loaders change a table without a message, and the generated text is noise. Examples are a launcher that forces the
tying flag, a class that looks for other tensor names, and an engine that fills the head from the input table.
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
from tiewise.core.errors import InstallError, UnsupportedError, require_path

SAME, ZERO, UNRELATED = "the file's", "all zero", "unrelated to the file's, as if drawn at random"
FROM_TABLE = "the file's input table, not the head that is stored"
_ALIKE = 0.1  # two tables with a smaller cosine are reported as unrelated
_PROBE_LOADED = "probe a model that is loaded, before it is quantised"


@dataclass(frozen=True, repr=False)
class Probe:
    """Result of `probe`: the state of a model's input embedding and output head.

    Its `repr` is one sentence.

    Attributes:
        sound: whether both compute what the folder's files say.
        lookup: state of the input table, such as `"the file's"` or `"all zero"`.
        head: state of the output table, in the same words.
        tied: whether both tables share one memory.
        claimed: whether the config ties them; None if it does not say.

    >>> Probe(sound=True, lookup="the file's", head="the file's", tied=True, claimed=True)
    Sound: the lookup is the file's, the head the file's; one table here, and the config ties them.
    """

    sound: bool
    lookup: str
    head: str
    tied: bool
    claimed: bool | None

    def __repr__(self) -> str:
        verdict = "Sound" if self.sound else "Wrong"
        tables = "one table" if self.tied else "two tables"
        claim = {True: "ties them", False: "does not tie them", None: "does not say"}[self.claimed]
        return f"{verdict}: the lookup is {self.lookup}, the head {self.head}; {tables} here, and the config {claim}."


def probe(model: nn.Module, folder: str | os.PathLike[str]) -> Probe:
    """Compare the tables of a loaded model with the folder that it was loaded from.

    Nothing is changed.

    Args:
        model: a loaded torch module, of transformers or of an inference engine. If it lacks `get_input_embeddings` or
            `get_output_embeddings`, its modules are found by the tensor names in the folder. Padding rows after the
            rows of the file are not compared.
        folder: a Hugging Face folder with plain tables.

    Returns:
        State of both tables.

    Raises:
        CheckpointError: the folder cannot be read, is quantised, or lacks an input embedding or an output head.
        InstallError: the model has no module with a table of the folder.
        UnsupportedError: a table is sharded, packed, or has no values yet.

    >>> from tempfile import mkdtemp
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> folder = mkdtemp()
    >>> model.save_pretrained(folder)
    >>> probe(model, folder)
    Sound: the lookup is the file's, the head the file's; one table here, and the config ties them.
    """
    require_module(model, UnsupportedError, "give the torch module that was loaded")
    require_path("probe(model, FOLDER)", folder)
    facts = Facts(open_folder(folder))
    require_readable_tables(facts, "probe")
    tables, head = facts.roles.input_tables, facts.roles.output
    lookups = [_weight(model, "get_input_embeddings", table.name) for table in tables]
    output = _weight(model, "get_output_embeddings", require_head(facts, "probe"))
    lookup_state = _state_of_lookups(lookups, tables)
    head_state = _state_of(output, head or tables[0])
    sound = lookup_state == SAME == head_state
    is_other_than_stored = head is not None and head_state != SAME
    if is_other_than_stored and _state_of(output, tables[0]) == SAME:
        head_state = FROM_TABLE
        # if the file has two tables and the config ties them, the input table is the one that counts
        sound = lookup_state == SAME and facts.tied is True
    tied = output.data_ptr() in {lookup.data_ptr() for lookup in lookups}
    return Probe(sound, lookup_state, head_state, tied, facts.tied)


def _weight(model: nn.Module, method: str, name: str) -> Tensor:
    """Return the weight [V, E] of an end.

    It is looked up by its full `name`, by the model's `method`, and by the module part of the name.
    """
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


def _module_named(model: nn.Module, last_part: str) -> nn.Module | None:
    """Return the first module whose name ends in `last_part`, or None."""
    for path, _ in model.named_modules():
        if path.rpartition(".")[2] == last_part:
            return model.get_submodule(path)
    return None


def _state_of_lookups(lookups: Sequence[Tensor], tables: Sequence[Stored]) -> str:
    """Return the state of the first lookup that differs from the file, else `SAME`."""
    for lookup, table in zip(lookups, tables, strict=True):
        state = _state_of(lookup, table)
        if state != SAME:
            return state
    return SAME


def _state_of(live: Tensor, stored: Stored) -> str:
    """Compare a live table with the stored one, and describe its state.

    The words complete the sentence "the lookup is …".
    """
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
        """Return the cosine Σ a b / √(Σ a² Σ b²); 0 if b is zero."""
        if not self.stored_square:
            return 0.0
        return self.product / math.sqrt(self.live_square * self.stored_square)


def _compare(live: Tensor, stored: Stored) -> _TableSums:
    """Read the stored table in spans of rows, and return the sums over both tables."""
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
