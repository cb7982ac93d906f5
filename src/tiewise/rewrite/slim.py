"""`slim`: an adapter that stores whole tables keeps the rows that differ from its base, as PEFT's trained rows.

PEFT's `trainable_tokens_delta` holds a row's new values, not a difference, so that base and rows together are the copy,
bit for bit: the result is read back and compared so, every row. On a tied base PEFT gives trained rows of the input
table to the head too; a copy that acts at one end alone cannot be written so, and is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tiewise.checkpoint.adapter import COPY, DELTA, LORA, PREFIX, WEIGHTS, AdapterFacts, open_adapter
from tiewise.checkpoint.claims import ends_with, module_of
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, open_folder
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rule import describe
from tiewise.checkpoint.stored import FLOATING, Reader, Stored, read_header
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import MOST_BYTES, inside, read_whole, short
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import doing, progress
from tiewise.rewrite.change import Change, Moved, NewTensor, Pieces
from tiewise.rewrite.engine import verb
from tiewise.rewrite.file_plan import edited

SAME = Moved(0.0, 0.0, "nothing: the base and the rows that are kept are the copies again, bit for bit")


@verb
def slim(facts: Facts, *, base: str | os.PathLike[str], force: bool = False) -> Change:
    """Keep of an adapter's copies of whole tables the rows that differ from its base, as `trainable_token_indices`.

    A copy of the base's own table that PEFT saved below a low-rank update goes altogether.

    Args:
        base: checkpoint folder of the model that the adapter was trained on; it is only read.
    """
    model = Facts(open_folder(base))
    adapter = open_adapter(facts.folder, model)
    readable(model, "slim an adapter of")
    tables = (model.roles.input, model.roles.output or model.roles.input)
    pairs = zip((adapter.input, adapter.output), tables, strict=True)
    ends = [(end, end.copy, table) for end, table in pairs if end is not None and end.copy is not None and table]
    if not ends:
        raise CheckpointError(f"{adapter.path}: it stores no copy of a table of the base", "there is nothing to slim")
    _require_rows_can_say_it(adapter, model)

    kept: dict[str, tuple[Stored, Stored, list[int]]] = {}  # module → its copy, the base's table, rows that differ
    for end, copy, table in ends:
        if copy.shape != table.shape or not {copy.dtype, table.dtype} <= set(FLOATING):
            fix = "tiewise check ADAPTER --base BASE says more"
            raise CheckpointError(f"{adapter.path}: {describe(copy)} is no copy of {describe(table)}", fix)
        with doing(f"comparing {short(copy.name)} with the base", copy.nbytes):
            ids = changed_rows(copy, table).tolist()
        if end.kind == LORA and ids:
            what = f"{short(copy.name)} lies below a low-rank update and differs from the base in {len(ids):,} rows"
            raise CheckpointError(f"{adapter.path}: {what}", "PEFT has no place for both; tiewise merge joins them")
        if len(ids) > copy.rows // 2:
            what = f"{adapter.path}: {len(ids):,} of {copy.rows:,} rows of {short(copy.name)} differ from the base"
            raise CheckpointError(what, "was it trained on another base? If not, the copy is what it needs")
        if end.kind == COPY and not (adapter.tied and kept):  # of a tied pair PEFT keeps the rows once, at the input
            first = next(m for m, stored in adapter.base_modules.items() if stored == module_of(table.name)[0])
            kept[first if adapter.tied and end is not adapter.input else end.module] = (copy, table, ids)

    put, gone = [], {end.module for end, _, _ in ends if end.kind == COPY}
    rows = {name or ends[0][0].module: list(ids) for name, ids in adapter.token_rows.items()}
    for module, (copy, _, ids) in kept.items():
        if ids:
            rows[module] = ids
            shape, name = (len(ids), copy.shape[1]), f"{PREFIX}{module}.token_adapter.{DELTA}"
            put.append(NewTensor(name, copy.dtype, shape, WEIGHTS, partial(_rows, copy, ids)))
    saved = [name for name in adapter.listed("modules_to_save") if not any(ends_with(one, name) for one in gone)]
    config = {"modules_to_save": saved or None, "trainable_token_indices": rows or None} if gone else {}
    text = read_whole(inside(adapter.path, ADAPTER_CONFIG), MOST_BYTES).decode()
    count = " and ".join(f"{len(ids):,} of {copy.rows:,} rows of {short(m)}" for m, (copy, _, ids) in kept.items())
    return Change(
        SAME,
        drop=frozenset(copy.name for _, copy, _ in ends),
        put=tuple(put),
        files={ADAPTER_CONFIG: edited(text, config).encode()},
        notes=(f"kept: {count or 'none, the copies are the tables of the base'}",),
        accept=lambda made: _require_same(made, kept),
    )


def _require_rows_can_say_it(adapter: AdapterFacts, model: Facts) -> None:
    """Raise where PEFT's trained rows would not do what the copies do."""
    where, copies = adapter.path, [e for e in (adapter.input, adapter.output) if e is not None and e.kind == COPY]
    if adapter.config.get("peft_type") != "LORA":
        what = f"{where}: its peft_type is {short(adapter.config.get('peft_type'))}"
        raise CheckpointError(what, "rows beside other updates are known of LORA alone; tiewise check reads it")
    if not copies:
        return
    untie = f"{model.command('untie')}, and slim for that"
    if adapter.tied is None:
        raise CheckpointError(f"{model.path}: whether it ties its two ends is not known", "tiewise check says more")
    if adapter.tied and len(copies) == 2 and not adapter.equal:
        what = f"{where}: its copies of the two ends differ, and the base has one table for both"
        raise CheckpointError(what, untie)
    if adapter.tied and len(copies) == 1 and not adapter.ties:
        what = f"{where}: only {short(copies[0].module)} has a copy, and trained rows of a tied base act at both ends"
        raise CheckpointError(what, untie)
    if model.roles.biases and (adapter.tied or adapter.output in copies):
        what = f"{where}: the head has a bias, which PEFT (0.21) leaves out where rows of the head are trained"
        raise CheckpointError(what, "keep the copy")
    modules = {end.module for end in copies}
    for name in adapter.listed("modules_to_save"):
        other = next((m for m, parts in adapter.parts.items() if m not in modules and "weight" in parts), "")
        if other and any(ends_with(module, name) for module in modules) and ends_with(other, name):
            what = f"{where}: modules_to_save names {short(name)}, which is {short(other)} too"
            raise CheckpointError(what, "write the full names of both into adapter_config.json first")


def _rows(copy: Stored, ids: Sequence[int]) -> Pieces:
    with Reader(copy) as reader:
        yield from (reader.rows(row, row + 1).tobytes() for row in ids)


def _require_same(made: Path, kept: dict[str, tuple[Stored, Stored, list[int]]]) -> None:
    """Raise unless base and written rows are the copies that they stand for, every row, bit for bit."""
    stored = read_header(made / WEIGHTS).tensors
    record = json.loads((made / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("trainable_token_indices") or {}
    for module, (copy, table, _) in kept.items():
        ids = np.array(record.get(module, []), np.int64)
        delta = stored.get(f"{PREFIX}{module}.token_adapter.{DELTA}")
        with Reader(copy) as old, Reader(table) as own, Reader(delta or copy) as rows:
            for start, stop in old.spans():
                here = ids[(ids >= start) & (ids < stop)]
                wanted, found = old.wide(start, stop), own.wide(start, stop)
                wide = np.result_type(wanted, found)
                wanted, found = wanted.astype(wide), found.astype(wide)
                if len(here):
                    first = int(np.searchsorted(ids, here[0]))
                    found[here - start] = rows.wide(first, first + len(here))
                if wanted.tobytes() != found.tobytes():
                    what = f"the result was not kept: its rows of {short(module)} are not those of the copy"
                    raise CheckpointError(what, "was the adapter written meanwhile? If not, report this")
                progress("comparing every row", stop, copy.rows)
