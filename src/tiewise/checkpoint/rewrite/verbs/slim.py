"""`slim`: an adapter without what its base has.

An adapter that stores whole tables keeps the rows that differ from its base, as PEFT's trained rows. PEFT's
`trainable_tokens_delta` holds a row's new values, not a difference, so that base and rows together are the copy, bit
for bit: the result is read back and compared so, every row. On a tied base PEFT gives trained rows of the input table
to the head too; a copy that acts at one end alone cannot be written so, and is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from tiewise.checkpoint.adapter import COPY, DELTA, LORA, PREFIX, WEIGHTS, AdapterFacts, end_modules, open_adapter
from tiewise.checkpoint.claims import ends_with
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, open_folder
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rewrite.change import Change, Moved, NewTensor, NothingToDo, gathered
from tiewise.checkpoint.rewrite.file_plan import edited_file
from tiewise.checkpoint.rewrite.merged import Merged, require_numbers
from tiewise.checkpoint.rewrite.registry import ADAPTER, Option, verb
from tiewise.checkpoint.rules.rule import describe
from tiewise.checkpoint.stored import FLOATING, Stored, read_header
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, doing

SAME = Moved(0.0, 0.0, "every row, bit for bit: the base and the rows that are kept are the copies again")


@verb(order=100, source=ADAPTER, of_adapter=True, example="adapter --base=tied")
def slim(
    facts: Facts,
    *,
    base: Annotated[
        str | os.PathLike[str], Option("Checkpoint that it was trained on. It is only read.", metavar="DIR")
    ],
    force: bool = False,
) -> Change:
    """Keep of an adapter's copies of tables only the rows that differ from its base.

    PEFT reads them as `trainable_token_indices`. A copy of the base's own table that PEFT saved below a low-rank update
    goes altogether.

    Args:
        base: checkpoint folder of the model that the adapter was trained on; it is only read.
    """
    model = Facts(open_folder(base))
    adapter = open_adapter(facts.folder, model)
    require_numbers(adapter)
    readable(model, "slim an adapter of")
    pairs = ((adapter.input, model.roles.input), (adapter.output, model.roles.output or model.roles.input))
    ends = [(end, end.copy, table) for end, table in pairs if end is not None and end.copy is not None and table]
    if not ends:
        raise NothingToDo(f"{adapter.path}: it stores no copy of a table of the base", "there is nothing to slim")
    first = end_modules(model)[0] or ""  # a list of rows that names no module is of the input table
    gone = {end.module for end, _, _ in ends if end.kind == COPY}
    _require_rows_will_do(adapter, model, gone)

    kept: dict[str, tuple[Stored, Stored, list[int]]] = {}  # module → its copy, the base's table, rows that differ
    for end, copy, table in ends:
        if copy.shape != table.shape or not {copy.dtype, table.dtype} <= set(FLOATING):
            what = f"{adapter.path}: {describe(copy)} is no copy of {describe(table)}"
            raise CheckpointError(what, "tiewise check ADAPTER --base BASE says more")
        with doing(f"comparing {short(copy.name)} with the base", copy.nbytes):
            ids = changed_rows(copy, table).tolist()
        if ids and end.kind == LORA:
            what = f"{adapter.path}: below a low-rank update, {short(copy.name)} has {len(ids):,} rows of its own"
            raise CheckpointError(what, "PEFT has no place for both; tiewise merge joins them")
        if len(ids) > copy.rows // 2:
            what = f"{adapter.path}: {len(ids):,} of {copy.rows:,} rows of {short(copy.name)} differ from the base"
            raise CheckpointError(what, "was it trained on another base? If not, the copy is what it needs")
        if end.kind == COPY and not (adapter.tied and kept):  # of a tied pair PEFT keeps the rows once, at the input
            kept[first if adapter.tied else end.module] = (copy, table, ids)

    rows = {name or first: list(ids) for name, ids in adapter.token_rows.items()}
    changed = {module: (copy, ids) for module, (copy, _, ids) in kept.items() if ids}
    rows |= {module: ids for module, (_, ids) in changed.items()}
    saved = [name for name in adapter.listed("modules_to_save") if not any(ends_with(one, name) for one in gone)]
    config = {"modules_to_save": saved or None, "trainable_token_indices": rows or None} if gone else {}
    put = [
        NewTensor(_delta(module), copy.dtype, (len(ids), copy.shape[1]), WEIGHTS, partial(gathered, copy, ids))
        for module, (copy, ids) in changed.items()
    ]
    if not put and len(ends) == len(adapter.tensors):
        raise CheckpointError(f"{adapter.path}: nothing but the tables of the base", "leave it out: it does nothing")
    said = (f"{len(ids):,} of {copy.rows:,} rows of {short(module)}" for module, (copy, _, ids) in kept.items())

    def flaws(made: Path) -> Iterator[str]:
        stored = read_header(made / WEIGHTS).tensors
        written = json.loads((made / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("trainable_token_indices") or {}
        for module, (copy, table, _) in kept.items():
            again = Merged(table, copy.dtype, ids=tuple(written.get(module, ())), rows=stored.get(_delta(module)))
            with doing(f"comparing every row of {short(module)}", copy.nbytes):
                if any(a != b for a, b in zip(again.pieces(), Merged(copy, copy.dtype).pieces(), strict=True)):
                    yield f"its rows of {short(module)} are not those of the copy"

    return Change(
        SAME,
        drop=frozenset(copy.name for _, copy, _ in ends),
        put=tuple(put),
        texts={ADAPTER_CONFIG: edited_file(facts.folder, ADAPTER_CONFIG, config)},
        notes=(f"kept: {' and '.join(said) or 'the low-rank updates; the copies were the tables of the base'}",),
        flaws=flaws,
    )


def _require_rows_will_do(adapter: AdapterFacts, model: Facts, copies: set[str]) -> None:
    """Raise where PEFT's trained rows would not do what the copies of these modules do."""
    untie, wrong = f"{model.command('untie')}, and slim for that", ""
    tied, ends = adapter.tied, [end for end in (adapter.input, adapter.output) if end is not None]
    if adapter.config.get("peft_type") != "LORA":
        wrong, untie = "its peft_type is not LORA", "keep it: rows beside other updates are not known"
    elif copies and tied is None:
        wrong, untie = "whether the base ties its two ends is not known", f"tiewise check {model.path} says more"
    elif copies and tied and len(ends) == 2 and not adapter.equal:
        wrong = "what it does to the two ends differs, and the base has one table for both"
    elif copies and tied and len(ends) == 1 and not adapter.ties:
        wrong = f"only {short(ends[0].module)} has a copy, and trained rows of a tied base act at both ends"
    elif model.roles.biases and (copies if tied else copies & {adapter.output.module if adapter.output else ""}):
        wrong, untie = "the head has a bias, which PEFT (0.21) leaves out where rows are trained", "keep the copy"
    others = [m for m, parts in adapter.parts.items() if "weight" in parts and m not in copies]
    for name in adapter.listed("modules_to_save"):
        if any(ends_with(m, name) for m in copies) and any(ends_with(m, name) for m in others):
            wrong, untie = f"modules_to_save names {short(name)}, which is more than a table", "write full names there"
    if wrong:
        raise CheckpointError(f"{adapter.path}: {wrong}", untie)


def _delta(module: str) -> str:
    return f"{PREFIX}{module}.token_adapter.{DELTA}"
