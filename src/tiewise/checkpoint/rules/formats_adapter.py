"""B060 and B061: what a PEFT adapter does to a base whose two ends are one table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tiewise.checkpoint.adapter import COPY, LORA, AdapterFacts, EndUpdate
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG
from tiewise.checkpoint.rule import ADAPTER, ERROR, INFO, WARNING, Finding, Rule, describe, flag_at, names
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short


def _tying(facts: AdapterFacts) -> Iterator[Finding]:
    ends = [end for end in (facts.input, facts.output) if end is not None]
    if facts.base is None or facts.tied is None:
        if ends:
            why = "no base was given" if facts.base is None else "whether the base ties its ends is not known"
            what = f"it changes {_modules(ends)}; {why}, so what a merge makes of that is not known"
            yield _finding(facts, what, f"tiewise check {_quoted(facts.adapter.path)} --base BASE", INFO)
    elif facts.tied:
        yield from _low_rank(facts, [end for end in ends if end.kind == LORA])
        yield from _copies(facts, facts.base, [end for end in ends if end.kind == COPY])
        yield from _token_rows(facts)


def _low_rank(facts: AdapterFacts, ends: list[EndUpdate]) -> Iterator[Finding]:
    if not ends:
        return
    what = f"low-rank update of {_modules(ends)} on a base whose two ends are one table"
    if facts.adapter.ties and len(ends) == 2:
        what = f"{what}: the two share their factors, and a merge adds the update twice to that table"
        yield _finding(facts, what, "load the adapter beside the base; do not merge it")
    else:
        other = "both updates to that table" if len(ends) == 2 else "it to the other end too, which was trained without"
        yield _finding(facts, f"{what}: a merge adds {other}", f"{_untie(facts)}, and merge into that")


def _copies(facts: AdapterFacts, base: Facts, ends: list[EndUpdate]) -> Iterator[Finding]:
    if not ends or (len(ends) == 2 and facts.equal):
        return
    tell = f"train with ensure_weight_tying=True, or {_untie(facts)} and merge into that"
    if len(ends) == 1:
        if facts.adapter.ties:  # PEFT wraps the other end with the same table when it loads the adapter
            return
        what = f"full copy of {_modules(ends)} alone"
    else:
        read = "whose rows were not compared" if facts.equal is None else "which differ"
        flag = "on" if facts.adapter.ties else "off"
        what = f"full copies of {_modules(ends)}, {read} (ensure_weight_tying is {flag})"
    severity = WARNING if len(ends) == 2 and facts.equal is None else ERROR
    yield _finding(facts, f"{what}, on a base whose two ends are one table: {_flags(base)}", tell, severity)


def _flags(base: Facts) -> str:
    nested = [flag_at(claim.level) for claim in base.claims.levels if claim.level and claim.written]
    if nested:
        return f"a merge leaves {names(nested)} true, and loaders that believe it drop the trained head"
    return "a merge makes two tables, and only a merge by PEFT (0.21) sets tie_word_embeddings to false"


def _token_rows(facts: AdapterFacts) -> Iterator[Finding]:
    rows = {name: ids for name, ids in facts.adapter.token_rows.items() if name}
    if len(set(rows.values())) > 1:
        what = f"trainable_token_indices differ between {names(rows)}, which are one table in the base"
        yield _finding(facts, what, "train both ends on the same rows, or untie the base first")


def _shapes(facts: AdapterFacts) -> Iterator[Finding]:
    if facts.base is None:
        return
    roles = facts.base.roles
    for update, stored in ((facts.input, roles.input), (facts.output, roles.output or roles.input)):
        if update is not None and stored is not None and len(stored.shape) == 2:
            yield from _shape(facts, facts.base, update, stored)
    worst = max((row for ids in facts.adapter.token_rows.values() for row in ids), default=-1)
    if roles.input is not None and worst >= roles.input.rows:
        what = f"trainable_token_indices name row {worst:,}, and the base stores {describe(roles.input)}"
        yield Finding("B061", ERROR, ADAPTER_CONFIG, what, _grow(facts.base, worst + 1))


def _shape(facts: AdapterFacts, base: Facts, update: EndUpdate, stored: Stored) -> Iterator[Finding]:
    rows, width = update.shape or (-1, -1)
    narrow = width not in (-1, stored.shape[1])
    if rows in (-1, stored.rows) and not narrow:
        return
    shape = f"[{'?' if rows < 0 else rows}, {'?' if width < 0 else width}]"
    what = f"its {update.kind} is of a table {shape}, and the base stores {describe(stored)}"
    trained_on = short(facts.adapter.base_name) if facts.adapter.base_name else "unnamed"
    other = f"give the base that it was trained on ({trained_on})"
    yield Finding(
        "B061", ERROR, short(update.module), what, _grow(base, rows) if rows > stored.rows and not narrow else other
    )


def _grow(base: Facts, rows: int) -> str:
    return base.command("resize", f"--vocab {rows}")


def _untie(facts: AdapterFacts) -> str:
    return facts.base.command("untie") if facts.base is not None else ""


def _finding(facts: AdapterFacts, evidence: str, repair: str, severity: str = ERROR) -> Finding:
    return Finding("B060", severity, short(facts.adapter.path.name), evidence, repair)


def _modules(ends: list[EndUpdate]) -> str:
    return " and ".join(short(end.module) for end in ends)


def _quoted(path: object) -> str:
    return shlex.quote(str(path))


RULES: tuple[Rule, ...] = (
    Rule(
        "B060",
        ERROR,
        "an adapter leaves a tied pair tied",
        """The two ends of a tied model are one Parameter, and PEFT adapts modules. A low-rank update of one end acts at
that end in training; a merge writes it into the shared table, and so changes the other end too. Updates of both ends
are added to it twice, with ensure_weight_tying as without (measured with PEFT 0.21). Full copies (modules_to_save) of
both ends drift apart unless ensure_weight_tying is set, and a copy of one end alone unties the pair: the merged model
has two tables. PEFT then sets tie_word_embeddings to false at the root of the config; a flag in text_config stays true,
and a loader that believes it drops the trained head. Unmerged, the adapter works as it was trained.
What to do: untie the base and merge into that, or do not merge.""",
        ("peft#2777", "peft#2018", "peft#2864", "peft#2944", "transformers#45127", "unsloth#9331"),
        _tying,
        kind=ADAPTER,
    ),
    Rule(
        "B061",
        ERROR,
        "an adapter's tables have the shape of the base's",
        """An adapter whose table has other rows or another width than the base's was trained on another base, or after
a resize: the loader refuses it, or asks for a resize first.
What to do: resize the base to the adapter's rows, or give the base that it was trained on.""",
        ("unsloth-zoo#923", "transformers#32852"),
        _shapes,
        kind=ADAPTER,
    ),
)
