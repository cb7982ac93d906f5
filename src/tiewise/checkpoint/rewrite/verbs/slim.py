"""`slim`: store only the rows of an adapter's table copies that differ from its base.

PEFT reads these rows as trained rows. Its `trainable_tokens_delta` contains the new values of a row, not a difference.
The base's table with these rows is therefore the copy, bit for bit; `slim` reads the result back and compares every
row. On a tied base, PEFT also gives trained rows of the input table to the head. `slim` refuses a copy that acts at
one end only, because trained rows cannot express it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tiewise.checkpoint.adapter import (
    DELTA,
    PREFIX,
    WEIGHTS,
    AdapterFacts,
    EndUpdate,
    end_modules,
    open_adapter,
)
from tiewise.checkpoint.claims import ends_with
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, open_folder
from tiewise.checkpoint.numeric_ends import require_readable_tables
from tiewise.checkpoint.peft_methods import COPY, LORA, is_lora
from tiewise.checkpoint.rewrite.change import Change, Movement, NewTensor, NothingToDo, Pieces, gather_rows, same_pieces
from tiewise.checkpoint.rewrite.json_edits import edit_json_file
from tiewise.checkpoint.rewrite.merged import MergedTensor, Obstacle, require_numbers
from tiewise.checkpoint.rewrite.registry import ADAPTER, Option, verb
from tiewise.checkpoint.rules.rule import describe
from tiewise.checkpoint.stored import FLOATING, Stored, read_header
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress_of

SAME = Movement(0.0, 0.0, "every row, bit for bit: the base and the rows that are kept are the copies again")


@verb(order=100, group="adapter", source=ADAPTER, of_adapter=True, example="adapter --base=tied")
def slim(
    facts: Facts,
    *,
    base: Annotated[
        str | os.PathLike[str], Option("Checkpoint that it was trained on. It is only read.", metavar="DIR")
    ],
    force: bool = False,
) -> Change:
    """Reduce an adapter's table copies to the rows that differ from its base.

    PEFT reads these rows as `trainable_token_indices`. A copy of the base's table that PEFT saved below a low-rank
    update is dropped completely.

    >>> import tiewise  # `adapter` copies both tables of `tied`; one row was trained
    >>> receipt = tiewise.checkpoint.slim("adapter", "slim-adapter", base="tied")
    >>> receipt.bytes_before, receipt.bytes_after
    (2560, 32)

    Args:
        base: checkpoint folder of the model that the adapter was trained on; it is only read.
    """
    model = Facts(open_folder(base))
    adapter = open_adapter(facts.folder, model)
    require_numbers(adapter)
    require_readable_tables(model, "slim an adapter of")
    copies = _copies(adapter, model)
    if not copies:
        raise NothingToDo(f"{adapter.path}: it stores no copy of a table of the base", "there is nothing to slim")
    copied_modules = {copy.end.module for copy in copies if copy.end.form == COPY}
    _require_rows_will_do(adapter, model, copied_modules)

    result = _SlimAdapter(adapter, copies, copied_modules, end_modules(model)[0] or "")
    if not result.changed and len(copies) == len(adapter.tensors):
        raise CheckpointError(
            f"{adapter.path}: it only repeats the tables of the base", "do not use it: it changes nothing"
        )
    config = edit_json_file(facts.folder, ADAPTER_CONFIG, result.config())
    return Change(
        SAME,
        drop=frozenset(copy.stored.name for copy in copies),
        put=tuple(copy.rows_tensor() for copy in result.changed),
        texts={ADAPTER_CONFIG: config},
        summary=result.summary(),
        flaws=result.flaws,
    )


@dataclass(frozen=True)
class TableCopy:
    """A copy of one of the base's tables in an adapter."""

    end: EndUpdate
    stored: Stored  # the copy in the adapter
    table: Stored  # the base's table


@dataclass(frozen=True)
class SlimmedCopy:
    """A table copy, reduced to the rows that differ from the base's table."""

    module: str  # module whose rows PEFT trains
    stored: Stored  # the full copy in the adapter
    table: Stored  # the base's table
    ids: list[int]  # numbers of the rows that differ

    @property
    def name(self) -> str:
        """Name of the tensor that stores the rows that differ."""
        return f"{PREFIX}{self.module}.token_adapter.{DELTA}"

    def rows_tensor(self) -> NewTensor:
        """Return the tensor of the rows that differ."""
        shape = (len(self.ids), self.stored.shape[1])
        return NewTensor(self.name, self.stored.dtype, shape, WEIGHTS, self.pieces)

    def pieces(self) -> Pieces:
        """Yield the bytes of these rows."""
        return gather_rows(self.stored, self.ids)

    def equals_base_with(self, rows: Stored | None, ids: tuple[int, ...]) -> bool:
        """Return True if the base's table with `rows` at `ids` is the copy, byte for byte."""
        result = MergedTensor(self.table, self.stored.dtype, ids=ids, rows=rows)
        copy = MergedTensor(self.stored, self.stored.dtype)
        return same_pieces(result.pieces(), copy.pieces())


def _copies(adapter: AdapterFacts, model: Facts) -> list[TableCopy]:
    """Return the copies of the base's tables that an adapter stores, the input's first."""
    table = model.roles.input
    head = model.roles.output or table  # a tied base stores one table for both
    copies = []
    for end, base in ((adapter.input, table), (adapter.output, head)):
        if end is None or base is None:
            continue
        if end.copy is not None:
            copies.append(TableCopy(end, end.copy, base))
    return copies


class _SlimAdapter:
    """An adapter that has rows instead of full copies, and a check of the result."""

    def __init__(
        self, adapter: AdapterFacts, copies: list[TableCopy], copied_modules: set[str], input_module: str
    ) -> None:
        """Compare every copy with its table.

        Args:
            copied_modules: modules of the base that the adapter stores a full copy of.
            input_module: module of the input table; a list of trained rows without a module belongs to it.

        Raises:
            CheckpointError: a copy has another shape or type than its table, or trained rows cannot express it.
        """
        self.adapter = adapter
        self.copied_modules = copied_modules
        self.input_module = input_module
        self.slimmed = self._slimmed(copies)
        self.changed = [copy for copy in self.slimmed if copy.ids]  # other copies equal the base's table

    def _slimmed(self, copies: list[TableCopy]) -> list[SlimmedCopy]:
        """Return every full copy, reduced to its changed rows."""
        slimmed: list[SlimmedCopy] = []
        for copy in copies:
            ids = _changed_ids(self.adapter, copy)
            if copy.end.form != COPY:
                continue
            if not self.adapter.tied:
                slimmed.append(SlimmedCopy(copy.end.module, copy.stored, copy.table, ids))
            elif not slimmed:  # PEFT stores the rows of a tied pair once, at the input
                slimmed.append(SlimmedCopy(self.input_module, copy.stored, copy.table, ids))
        return slimmed

    def config(self) -> dict[str, Any]:
        """Return the changes of adapter_config.json: trained rows replace full copies."""
        if not self.copied_modules:
            return {}
        names = self.adapter.names_under("modules_to_save")
        saved = [name for name in names if not _names_any(name, self.copied_modules)]
        # PEFT writes null if there is none
        return {"modules_to_save": saved or None, "trainable_token_indices": self._trained_rows() or None}

    def _trained_rows(self) -> dict[str, list[int]]:
        """Return the ids of trained rows by module, including those that the adapter already has."""
        rows: dict[str, list[int]] = {}
        for module, ids in self.adapter.token_rows.items():
            rows[module or self.input_module] = list(ids)
        for copy in self.changed:
            rows[copy.module] = copy.ids
        return rows

    def summary(self) -> str:
        """Return the change in one clause: the number of retained rows of each copy."""
        if not self.slimmed:
            return "the low-rank updates stay, without the copies, which equal the tables of the base"
        counts = []
        for copy in self.slimmed:
            counts.append(f"{len(copy.ids):,} of {copy.stored.rows:,} rows of {short(copy.module)}")
        return f"{' and '.join(counts)} are stored, instead of full copies"

    def flaws(self, folder: Path) -> Iterator[str]:
        """Yield a sentence for each module whose rows in the finished result differ from the copy."""
        stored = read_header(folder / WEIGHTS).tensors
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        written = config.get("trainable_token_indices") or {}
        for copy in self.slimmed:
            with progress_of(f"comparing every row of {short(copy.module)}", copy.stored.nbytes):
                if not copy.equals_base_with(stored.get(copy.name), tuple(written.get(copy.module, ()))):
                    yield f"its rows of {short(copy.module)} are not those of the copy"


def _changed_ids(adapter: AdapterFacts, copy: TableCopy) -> list[int]:
    """Return the numbers of the rows in which a copy differs from the base's table.

    Raise if trained rows cannot express the copy.
    """
    stored, table = copy.stored, copy.table
    if stored.shape != table.shape or not {stored.dtype, table.dtype} <= set(FLOATING):
        problem = f"{adapter.path}: {describe(stored)} is not a copy of {describe(table)}"
        raise CheckpointError(problem, "run tiewise check ADAPTER --base BASE")
    with progress_of(f"comparing {short(stored.name)} with the base", stored.nbytes):
        ids: list[int] = changed_rows(stored, table).tolist()
    if ids and copy.end.form == LORA:
        problem = f"{adapter.path}: {short(stored.name)} has {len(ids):,} changed rows and a low-rank update"
        raise CheckpointError(problem, "PEFT cannot store both; tiewise adapter merge joins them")
    if len(ids) > stored.rows // 2:
        problem = f"{adapter.path}: {len(ids):,} of {stored.rows:,} rows of {short(stored.name)} differ from the base"
        raise CheckpointError(problem, "give the base that it was trained on; if this is it, keep the copy")
    return ids


def _names_any(name: str, modules: Collection[str]) -> bool:
    """Return True if `name`, an entry of `modules_to_save`, names one of these modules."""
    return any(ends_with(module, name) for module in modules)


# reasons why trained rows cannot replace a copy


def _require_rows_will_do(adapter: AdapterFacts, model: Facts, modules: set[str]) -> None:
    """Raise if PEFT's trained rows would act differently from the copies of these modules."""
    obstacle = _shared_name(adapter, modules) or _obstacle(adapter, model, modules)
    if obstacle is not None:
        raise CheckpointError(f"{adapter.path}: {obstacle.problem}", obstacle.remedy)


def _obstacle(adapter: AdapterFacts, model: Facts, modules: set[str]) -> Obstacle | None:
    """Return why trained rows act differently from the copies, None if they act alike."""
    if not is_lora(adapter.config):
        return Obstacle("its peft_type is not LORA", "keep it: rows beside other updates are not known")
    if not modules:
        return None
    if adapter.tied is None:
        remedy = f"run tiewise check {model.path}"
        return Obstacle("it is unknown if the base is tied", remedy)
    if adapter.difference_of_ends is not None:
        return Obstacle(adapter.difference_of_ends, f"{model.command('untie')}, and slim for that")
    if model.roles.biases and _acts_on_head(adapter, modules):
        return Obstacle("the head has a bias, which PEFT (0.21) leaves out where rows are trained", "keep the copy")
    return None


def _acts_on_head(adapter: AdapterFacts, modules: set[str]) -> bool:
    """Return True if trained rows of one of these modules act at the output head."""
    if adapter.tied:
        return True
    return adapter.output is not None and adapter.output.module in modules


def _shared_name(adapter: AdapterFacts, modules: set[str]) -> Obstacle | None:
    """Return an obstacle if an entry of `modules_to_save` is ambiguous.

    Such an entry names a copied table and also another module with a full copy. The last one is returned.
    """
    fully_copied = {module for module, parts in adapter.parts.items() if "weight" in parts}
    others = fully_copied - modules
    for name in reversed(adapter.names_under("modules_to_save")):
        if _names_any(name, modules) and _names_any(name, others):
            problem = f"modules_to_save names {short(name)}, which is more than a table"
            return Obstacle(problem, "write full names there")
    return None
