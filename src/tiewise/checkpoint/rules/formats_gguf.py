"""B070 and B071: what a GGUF file keeps of the boundary, alone and beside the checkpoint that it was made from."""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import BY_NAME, HEAD, TABLE, TOKENS, Gguf, GgufFacts
from tiewise.checkpoint.rule import ERROR, FATAL, GGUF, INFO, WARNING, Finding, Rule, describe, difference, size
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short

_CONVERT = "convert the checkpoint again with convert_hf_to_gguf.py"
_LEAST = BY_NAME["Q6_K"]
_PARTIAL = ("adapter", "mmproj", "imatrix")  # general.type of files that hold no whole model


def _partial(gguf: Gguf) -> bool:
    """Whether the file is no model of its own: an adapter, a projector, or a vocabulary without tensors."""
    return gguf.metadata.get("general.type") in _PARTIAL or not gguf.tensors or gguf.architecture == "clip"


def _boundary(facts: GgufFacts) -> Iterator[Finding]:
    gguf = facts.gguf
    if _partial(gguf):
        return
    if gguf.table is None:
        if gguf.tokens is not None:
            what = f"it carries {gguf.tokens:,} tokens and no {TABLE}"
            yield Finding("B070", FATAL, short(gguf.path.name), what, _CONVERT)
        return
    for end in (gguf.table, gguf.head):
        if end is not None and gguf.tokens is not None and end.rows != gguf.tokens:
            what = f"{describe(end)} has {end.rows:,} rows, and {TOKENS} has {gguf.tokens:,} entries"
            yield Finding("B070", ERROR, end.name, what, f"give the tokenizer as many entries as rows, and {_CONVERT}")
    if facts.source is not None:
        yield from _rows_of_source(gguf.table, facts.source)
        yield from _head_of_source(gguf, facts.source)


def _rows_of_source(table: Stored, source: Facts) -> Iterator[Finding]:
    stored = source.roles.input
    if stored is None or len(stored.shape) != 2 or source.quantised or table.shape == stored.shape:
        return
    what = f"it stores {describe(table)}, and its source {describe(stored)}"
    padded = table.shape[1:] == stored.shape[1:] and table.rows < stored.rows
    fix = "nothing, where the rows beyond the tokens are padding" if padded else _CONVERT
    yield Finding("B070", WARNING if padded else ERROR, TABLE, what, fix)


def _head_of_source(gguf: Gguf, source: Facts) -> Iterator[Finding]:
    table, head = source.roles.input, source.roles.output
    if gguf.head is not None or table is None or head is None or source.quantised or source.claims.t5_like:
        return
    if source.ends is not None and source.ends.equal:
        return
    if source.ends is None and table.shape == head.shape:
        what = f"it stores no {HEAD}; its source stores {describe(head)}, which was not compared with the table"
        yield Finding("B070", WARNING, HEAD, what, "check with the tables read")
        return
    how = difference(source.ends) if source.ends is not None else f"of another shape than {describe(table)}"
    what = f"it stores no {HEAD}, so that {TABLE} answers for it; its source stores {describe(head)}: {how}"
    untie = "set tie_word_embeddings to false in the source's config.json"
    yield Finding("B070", ERROR, HEAD, what, f"{untie}, and {_CONVERT} of today: older ones skip the head by name")


def _types(facts: GgufFacts) -> Iterator[Finding]:
    gguf, table, head = facts.gguf, facts.gguf.table, facts.gguf.head
    if _partial(gguf) or table is None:
        return
    if head is not None:
        if facts.equal:
            what = f"{HEAD} repeats {TABLE} byte for byte: {size(head.nbytes)} of {size(gguf.size)}"
            fix = f"convert again from a source without a head (tiewise dedupe); loaders then take {TABLE}"
            yield Finding("B071", INFO, HEAD, what, fix)
        return
    kind = BY_NAME[table.dtype]
    if gguf.tokens is not None and kind.bits < _LEAST.bits:
        what = f"{TABLE} serves both ends as {kind.name}, {kind.bits:.2f} bits a value; a head asks for {_LEAST.name}"
        fix = f"quantise again with --token-embedding-type {_LEAST.name.lower()} (or q8_0)"
        yield Finding("B071", WARNING, TABLE, what, fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "B070",
        ERROR,
        "a GGUF file keeps its source's two ends",
        """llama.cpp looks for output.weight, and takes token_embd.weight in its place where the file has none: right
for a tied model, silently wrong for one whose head was trained on its own. Whether a converter writes the head depends
on the architecture: Gemma 2's skips lm_head by name even where it differs, Gemma 3's keeps it since 2025. The other way
round, an architecture whose loader never learned to do without output.weight refuses a tied file (EXAONE, ChatGLM,
Qwen 3 MoE and GPT-2 did until each was fixed), so older files of these hold a copy. The rows of both tables must equal
the length of tokenizer.ggml.tokens, or the loader refuses their shape.
What to do: set the flag of the source by its tensors (B012, B021), then convert again with a converter of today.""",
        (
            "llama.cpp#9065",
            "llama.cpp#12506",
            "llama.cpp#12483",
            "llama.cpp#12567",
            "llama.cpp#11345",
            "llama.cpp#13768",
            "llama.cpp#13328",
            "llama.cpp#12456",
        ),
        _boundary,
        kind=GGUF,
    ),
    Rule(
        "B071",
        WARNING,
        "a GGUF file stores a shared table once, and finely enough",
        """Converters used to write a tied table twice, once as output.weight; loaders need only token_embd.weight. A
table that serves both ends is the head too, which suffers more from rounding than other tensors: llama-quantize gives
it at least Q6_K of its own accord. For Gemma 2B in Q4_K_M a perplexity of 9.68 was measured with the table in Q6_K, and
of 9.48 in Q8_0 (llama.cpp#5650). A shared table below Q6_K was asked for by hand, or comes from an old tool.
What to do: quantise again with --token-embedding-type; drop the head of the source where it equals the table.""",
        ("llama.cpp#5650", "llama.cpp#12451", "llama.cpp#12456"),
        _types,
        kind=GGUF,
    ),
)
