"""Rules that compare the two ends of a GGUF file, and its source: B070 and B071."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.gguf_file import BY_NAME, HEAD, TABLE, TOKENS, GgufFacts
from tiewise.checkpoint.rules.rule import Observation, Observations, Severity, describe, difference, rule
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import extent_of_comparison
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import format_bytes

CONVERT = "convert the checkpoint again with convert_hf_to_gguf.py"


@rule("B070", "error", "a GGUF file keeps its source's two ends", kind="gguf")
def gguf_ends(facts: GgufFacts) -> Observations:
    """llama.cpp looks for output.weight. If the file has none, it takes token_embd.weight: right for a tied model,
    silently wrong for a model with a separately trained head. The architecture decides if a converter writes the head:
    Gemma 2's skips lm_head by name even if it differs, Gemma 3's writes it since 2025. Conversely, an architecture
    whose loader requires output.weight refuses a tied file (EXAONE, ChatGLM, Qwen 3 MoE and GPT-2 did until each was
    fixed), so older files of these contain a copy. The rows of both tables must equal the length of
    tokenizer.ggml.tokens, or the loader refuses their shape.
    What to do: set the flag of the source by its tensors (B012, B021), then convert again with a current converter.
    Sources: llama.cpp#9065; llama.cpp#12506; llama.cpp#12483; llama.cpp#12567; llama.cpp#11345; llama.cpp#13768;
    llama.cpp#13328; llama.cpp#12456
    """
    if facts.partial:
        return
    table, source = facts.table, facts.source
    if table is None:
        yield from _lost_table(facts)
        return
    yield from _other_rows_than_tokens(facts, table)
    if source is None or source.quantised:
        return
    stored = source.roles.input
    if stored is not None:
        yield from _other_shape(table, stored)
        if facts.head is None:
            yield from _dropped_head(source, stored)


def _lost_table(facts: GgufFacts) -> Observations:
    """Report a file that has tokens and no table for them."""
    if facts.tokens is not None:
        problem = f"the file has {facts.tokens:,} tokens and no {TABLE}"
        yield Observation(short(facts.path.name), problem, CONVERT, severity="fatal")


def _other_rows_than_tokens(facts: GgufFacts, table: Stored) -> Observations:
    """Report tables whose number of rows is not the number of tokens."""
    tokens = facts.tokens
    if tokens is None:
        return
    for end in (table, *facts.heads):
        if end.rows != tokens:
            problem = f"{end.name} has {end.rows:,} rows, and {TOKENS} has {tokens:,} entries"
            remedy = f"give the tokenizer {end.rows:,} entries, and {CONVERT}"
            yield end.name, problem, remedy


def _other_shape(table: Stored, stored: Stored) -> Observations:
    """Report a table of a GGUF file that has another shape than the source's table `stored`."""
    if len(stored.shape) != 2 or table.shape == stored.shape:
        return
    problem = f"the file's table is {describe(table)}, and its source's {describe(stored)}"
    remedy = CONVERT
    severity: Severity = "error"
    has_fewer_rows = table.rows < stored.rows
    if has_fewer_rows and table.shape[1:] == stored.shape[1:]:  # a converter may cut the padding off
        remedy = "none needed if the rows after the last token are padding"
        severity = "warning"
    yield Observation(TABLE, problem, remedy, severity=severity)


def _dropped_head(source: Facts, stored: Stored) -> Observations:
    """Report that a file lacks the head of its source, whose input table is `stored`."""
    head = source.roles.output
    if head is None or source.claims.t5_like:
        return
    alike = source.ends_likeness
    if alike is not None and alike.equal:
        return
    if alike is not None:
        how = difference(alike)
    elif stored.shape != head.shape:
        how = f"of another shape than {describe(stored)}"
    else:
        problem = f"the file stores no {HEAD}, and its source stores {describe(head)}, which was not compared"
        yield Observation(HEAD, problem, "check again without --headers", severity="warning")
        return
    problem = f"the file lost its source's head, and uses {TABLE} instead. The source has {describe(head)}: {how}"
    remedy = f"set tie_word_embeddings to false in the source's config.json, and {CONVERT} of today"
    yield HEAD, problem, (remedy, "older converters skip the head by name")


@rule("B071", "warning", "a GGUF file stores a shared table once, and finely enough", kind="gguf")
def gguf_types(facts: GgufFacts) -> Observations:
    """Converters used to write a tied table twice, once as output.weight; loaders need only token_embd.weight. A table
    that serves both ends is the head too, which suffers more from rounding than other tensors: llama-quantize gives it
    at least Q6_K by default. For Gemma 2B in Q4_K_M a perplexity of 9.68 was measured with the table in Q6_K, and of
    9.48 in Q8_0 (llama.cpp#5650). A shared table below Q6_K was requested explicitly, or comes from an old tool.
    What to do: quantise again with --token-embedding-type; drop the head of the source if it equals the table.
    Sources: llama.cpp#5650; llama.cpp#12451; llama.cpp#12456
    """
    if facts.partial or facts.table is None:
        return
    if facts.head is None:
        yield from _coarse_table(facts, facts.table)
    elif facts.equal:
        problem = (
            f"the file stores its table twice, which costs {format_bytes(facts.head.nbytes)} of"
            f" {format_bytes(facts.size)}. {HEAD} equals {TABLE} {extent_of_comparison(facts.table, facts.head)}"
        )
        remedy = "remove the head from the source with tiewise repair, and convert it again"
        yield Observation(HEAD, problem, remedy, severity="info")


def _coarse_table(facts: GgufFacts, table: Stored) -> Observations:
    """Report a shared table that is rounded more than llama-quantize rounds a head."""
    ggml_type, least = BY_NAME[table.dtype], BY_NAME["Q6_K"]
    if facts.tokens is not None and ggml_type.bits < least.bits:
        stored_as = f"{ggml_type.name}, {ggml_type.bits:.2f} bits a value"
        problem = f"{TABLE} is too coarse for a head: {stored_as}; use {least.name}"
        remedy = f"quantise again with --token-embedding-type {least.name.lower()} (or q8_0)"
        yield TABLE, problem, remedy
