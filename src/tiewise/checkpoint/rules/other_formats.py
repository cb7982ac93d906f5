"""B060 and B061: what a PEFT adapter does to a tied base; B070 and B071: what a GGUF file keeps of the boundary."""

from __future__ import annotations

import shlex

from tiewise.checkpoint.adapter import COPY, LORA, AdapterFacts, EndUpdate
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import BY_NAME, HEAD, TABLE, TOKENS, Gguf, GgufFacts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG
from tiewise.checkpoint.rule import (
    ADAPTER,
    ERROR,
    FATAL,
    GGUF,
    INFO,
    WARNING,
    Said,
    Told,
    describe,
    difference,
    flag_at,
    names,
    rule,
)
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size

_CONVERT = "convert the checkpoint again with convert_hf_to_gguf.py"
_LEAST = BY_NAME["Q6_K"]
_PARTIAL = ("adapter", "mmproj", "imatrix")  # general.type of files that hold no whole model


@rule("B060", ERROR, "an adapter leaves a tied pair tied", kind=ADAPTER)
def adapter_on_tied(facts: AdapterFacts) -> Told:
    """The two ends of a tied model are one Parameter, and PEFT adapts modules. A low-rank update of one end acts at
    that end in training; a merge writes it into the shared table, and so changes the other end too. Updates of both
    ends are added to it twice, with ensure_weight_tying as without (measured with PEFT 0.21). Full copies
    (modules_to_save) of both ends drift apart unless ensure_weight_tying is set, and a copy of one end alone unties the
    pair: the merged model has two tables. PEFT then sets tie_word_embeddings to false at the root of the config; a flag
    in text_config stays true, and a loader that believes it drops the trained head. Unmerged, the adapter works as it
    was trained.
    What to do: untie the base and merge into that, or do not merge.
    Sources: peft#2777; peft#2018; peft#2864; peft#2944; transformers#45127; unsloth#9331
    """
    ends = [end for end in (facts.input, facts.output) if end is not None]
    if facts.base is None or facts.tied is None:
        if ends:
            why = "no base was given" if facts.base is None else "whether the base ties its ends is not known"
            what = f"it changes {_modules(ends)}; {why}, so what a merge makes of that is not known"
            yield _finding(facts, what, f"tiewise check {shlex.quote(str(facts.adapter.path))} --base BASE", INFO)
    elif facts.tied:
        yield from _low_rank(facts, [end for end in ends if end.kind == LORA])
        yield from _copies(facts, facts.base, [end for end in ends if end.kind == COPY])
        rows = {name: ids for name, ids in facts.adapter.token_rows.items() if name}
        if len(set(rows.values())) > 1:
            what = f"trainable_token_indices differ between {names(rows)}, which are one table in the base"
            yield _finding(facts, what, "train both ends on the same rows, or untie the base first")


def _low_rank(facts: AdapterFacts, ends: list[EndUpdate]) -> Told:
    if not ends:
        return
    what = f"low-rank update of {_modules(ends)} on a base whose two ends are one table"
    if facts.adapter.ties and len(ends) == 2:
        what = f"{what}: the two share their factors, and a merge adds the update twice to that table"
        yield _finding(facts, what, "load the adapter beside the base; do not merge it")
    else:
        other = "both updates to that table" if len(ends) == 2 else "it to the other end too, which was trained without"
        yield _finding(facts, f"{what}: a merge adds {other}", f"{_untie(facts)}, and merge into that")


def _copies(facts: AdapterFacts, base: Facts, ends: list[EndUpdate]) -> Told:
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
    nested = [flag_at(claim.level) for claim in base.claims.levels if claim.level and claim.written]
    merged = "a merge makes two tables, and only a merge by PEFT (0.21) sets tie_word_embeddings to false"
    if nested:
        merged = f"a merge leaves {names(nested)} true, and loaders that believe it drop the trained head"
    yield _finding(facts, f"{what}, on a base whose two ends are one table: {merged}", tell, severity)


@rule("B061", ERROR, "an adapter's tables have the shape of the base's", kind=ADAPTER)
def adapter_shapes(facts: AdapterFacts) -> Told:
    """An adapter whose table has other rows or another width than the base's was trained on another base, or after a
    resize: the loader refuses it, or asks for a resize first.
    What to do: resize the base to the adapter's rows, or give the base that it was trained on.
    Sources: unsloth-zoo#923; transformers#32852
    """
    if facts.base is None:
        return
    roles = facts.base.roles
    for update, stored in ((facts.input, roles.input), (facts.output, roles.output or roles.input)):
        if update is None or stored is None or len(stored.shape) != 2:
            continue
        rows, width = update.shape or (-1, -1)
        narrow = width not in (-1, stored.shape[1])
        if narrow or rows not in (-1, stored.rows):
            shape = f"[{'?' if rows < 0 else rows}, {'?' if width < 0 else width}]"
            what = f"its {update.kind} is of a table {shape}, and the base stores {describe(stored)}"
            fix = f"give the base that it was trained on ({short(facts.adapter.base_name) or 'unnamed'})"
            more = rows > stored.rows and not narrow
            yield short(update.module), what, facts.base.command("resize", f"--vocab {rows}") if more else fix
    worst = max((row for ids in facts.adapter.token_rows.values() for row in ids), default=-1)
    if roles.input is not None and worst >= roles.input.rows:
        what = f"trainable_token_indices name row {worst:,}, and the base stores {describe(roles.input)}"
        yield ADAPTER_CONFIG, what, facts.base.command("resize", f"--vocab {worst + 1}")


def _untie(facts: AdapterFacts) -> str:
    return facts.base.command("untie") if facts.base is not None else ""


def _finding(facts: AdapterFacts, evidence: str, repair: str, severity: str = ERROR) -> Said:
    return Said(short(facts.adapter.path.name), evidence, repair, severity=severity)


def _modules(ends: list[EndUpdate]) -> str:
    return " and ".join(short(end.module) for end in ends)


def _partial(gguf: Gguf) -> bool:
    """Whether the file is no model of its own: an adapter, a projector, or a vocabulary without tensors."""
    kind, architecture = (gguf.metadata.get(f"general.{key}") for key in ("type", "architecture"))
    return kind in _PARTIAL or not gguf.tensors or architecture == "clip"


@rule("B070", ERROR, "a GGUF file keeps its source's two ends", kind=GGUF)
def gguf_ends(facts: GgufFacts) -> Told:
    """llama.cpp looks for output.weight, and takes token_embd.weight in its place where the file has none: right for a
    tied model, silently wrong for one whose head was trained on its own. Whether a converter writes the head depends on
    the architecture: Gemma 2's skips lm_head by name even where it differs, Gemma 3's keeps it since 2025. The other
    way round, an architecture whose loader never learned to do without output.weight refuses a tied file (EXAONE,
    ChatGLM, Qwen 3 MoE and GPT-2 did until each was fixed), so older files of these hold a copy. The rows of both
    tables must equal the length of tokenizer.ggml.tokens, or the loader refuses their shape.
    What to do: set the flag of the source by its tensors (B012, B021), then convert again with a converter of today.
    Sources: llama.cpp#9065; llama.cpp#12506; llama.cpp#12483; llama.cpp#12567; llama.cpp#11345; llama.cpp#13768;
    llama.cpp#13328; llama.cpp#12456
    """
    gguf = facts.gguf
    if _partial(gguf):
        return
    if gguf.table is None:
        if gguf.tokens is not None:
            what = f"it carries {gguf.tokens:,} tokens and no {TABLE}"
            yield Said(short(gguf.path.name), what, _CONVERT, severity=FATAL)
        return
    for end in (gguf.table, gguf.head):
        if end is not None and gguf.tokens is not None and end.rows != gguf.tokens:
            what = f"{describe(end)} has {end.rows:,} rows, and {TOKENS} has {gguf.tokens:,} entries"
            yield end.name, what, f"give the tokenizer as many entries as rows, and {_CONVERT}"
    if facts.source is not None:
        stored = facts.source.roles.input
        comparable = stored is not None and len(stored.shape) == 2 and not facts.source.quantised
        if stored is not None and comparable and gguf.table.shape != stored.shape:
            what = f"it stores {describe(gguf.table)}, and its source {describe(stored)}"
            padded = gguf.table.shape[1:] == stored.shape[1:] and gguf.table.rows < stored.rows
            fix = "nothing, where the rows beyond the tokens are padding" if padded else _CONVERT
            yield Said(TABLE, what, fix, severity=WARNING if padded else ERROR)
        yield from _head_of_source(gguf, facts.source)


def _head_of_source(gguf: Gguf, source: Facts) -> Told:
    table, head = source.roles.input, source.roles.output
    if gguf.head is not None or table is None or head is None or source.quantised or source.claims.t5_like:
        return
    if source.ends is not None and source.ends.equal:
        return
    if source.ends is None and table.shape == head.shape:
        what = f"it stores no {HEAD}; its source stores {describe(head)}, which was not compared with the table"
        yield Said(HEAD, what, "check with the tables read", severity=WARNING)
        return
    how = difference(source.ends) if source.ends is not None else f"of another shape than {describe(table)}"
    what = f"it stores no {HEAD}, so that {TABLE} answers for it; its source stores {describe(head)}: {how}"
    untie = "set tie_word_embeddings to false in the source's config.json"
    yield HEAD, what, f"{untie}, and {_CONVERT} of today: older ones skip the head by name"


@rule("B071", WARNING, "a GGUF file stores a shared table once, and finely enough", kind=GGUF)
def gguf_types(facts: GgufFacts) -> Told:
    """Converters used to write a tied table twice, once as output.weight; loaders need only token_embd.weight. A table
    that serves both ends is the head too, which suffers more from rounding than other tensors: llama-quantize gives it
    at least Q6_K of its own accord. For Gemma 2B in Q4_K_M a perplexity of 9.68 was measured with the table in Q6_K,
    and of 9.48 in Q8_0 (llama.cpp#5650). A shared table below Q6_K was asked for by hand, or comes from an old tool.
    What to do: quantise again with --token-embedding-type; drop the head of the source where it equals the table.
    Sources: llama.cpp#5650; llama.cpp#12451; llama.cpp#12456
    """
    gguf, table, head = facts.gguf, facts.gguf.table, facts.gguf.head
    if _partial(gguf) or table is None:
        return
    if head is not None:
        if facts.equal:
            what = f"{HEAD} repeats {TABLE} byte for byte: {size(head.nbytes)} of {size(gguf.size)}"
            fix = f"convert again from a source without a head (tiewise dedupe); loaders then take {TABLE}"
            yield Said(HEAD, what, fix, severity=INFO)
        return
    kind = BY_NAME[table.dtype]
    if gguf.tokens is not None and kind.bits < _LEAST.bits:
        what = f"{TABLE} serves both ends as {kind.name}, {kind.bits:.2f} bits a value; a head asks for {_LEAST.name}"
        fix = f"quantise again with --token-embedding-type {_LEAST.name.lower()} (or q8_0)"
        yield TABLE, what, fix
