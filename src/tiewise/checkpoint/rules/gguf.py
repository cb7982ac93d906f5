"""Rules that compare the two ends of a GGUF file, and its source: B070 and B071."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.gguf_file import BY_NAME, HEAD, TABLE, TOKENS, GgufFacts
from tiewise.checkpoint.rules.rule import Said, Told, describe, difference, rule
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size

CONVERT = "convert the checkpoint again with convert_hf_to_gguf.py"


@rule("B070", "error", "a GGUF file keeps its source's two ends", kind="gguf")
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
    if facts.partial:
        return
    table, tokens = facts.table, facts.tokens
    if table is None:
        if tokens is not None:
            what = f"it carries {tokens:,} tokens and no {TABLE}"
            yield Said(short(facts.path.name), what, CONVERT, severity="fatal")
        return
    for end in (table, *facts.heads):
        if tokens is not None and end.rows != tokens:
            what = f"{describe(end)} has {end.rows:,} rows, and {TOKENS} has {tokens:,} entries"
            yield end.name, what, f"give the tokenizer as many entries as rows, and {CONVERT}"
    source = facts.source
    if source is None or source.quantised or source.roles.input is None:
        return
    yield from _other_shape(table, source.roles.input)
    if facts.head is None:
        yield from _dropped_head(source, source.roles.input)


def _other_shape(table: Stored, stored: Stored) -> Told:
    """Report a table of a GGUF file that has another shape than the source's table `stored`."""
    if len(stored.shape) != 2 or table.shape == stored.shape:
        return
    what = f"it stores {describe(table)}, and its source {describe(stored)}"
    has_fewer_rows = table.shape[1:] == stored.shape[1:] and table.rows < stored.rows
    if has_fewer_rows:  # a converter may cut the padding off
        fix = "nothing, where the rows beyond the tokens are padding"
        yield Said(TABLE, what, fix, severity="warning")
    else:
        yield Said(TABLE, what, CONVERT, severity="error")


def _dropped_head(source: Facts, stored: Stored) -> Told:
    """Report that a file lacks the head of its source, whose input table is `stored`."""
    head = source.roles.output
    if head is None or source.claims.t5_like:
        return
    alike = source.ends
    if alike is not None and alike.equal:
        return
    if alike is None and stored.shape == head.shape:
        what = f"it stores no {HEAD}; its source stores {describe(head)}, which was not compared with the table"
        yield Said(HEAD, what, "check with the tables read", severity="warning")
        return
    how = difference(alike) if alike is not None else f"of another shape than {describe(stored)}"
    what = f"it stores no {HEAD}, so that {TABLE} answers for it; its source stores {describe(head)}: {how}"
    untie = "set tie_word_embeddings to false in the source's config.json"
    yield HEAD, what, f"{untie}, and {CONVERT} of today: older ones skip the head by name"


@rule("B071", "warning", "a GGUF file stores a shared table once, and finely enough", kind="gguf")
def gguf_types(facts: GgufFacts) -> Told:
    """Converters used to write a tied table twice, once as output.weight; loaders need only token_embd.weight. A table
    that serves both ends is the head too, which suffers more from rounding than other tensors: llama-quantize gives it
    at least Q6_K of its own accord. For Gemma 2B in Q4_K_M a perplexity of 9.68 was measured with the table in Q6_K,
    and of 9.48 in Q8_0 (llama.cpp#5650). A shared table below Q6_K was asked for by hand, or comes from an old tool.
    What to do: quantise again with --token-embedding-type; drop the head of the source where it equals the table.
    Sources: llama.cpp#5650; llama.cpp#12451; llama.cpp#12456
    """
    table, head = facts.table, facts.head
    if facts.partial or table is None:
        return
    if head is not None:
        if facts.equal:
            what = f"{HEAD} repeats {TABLE} byte for byte: {size(head.nbytes)} of {size(facts.size)}"
            fix = f"convert again from a source without a head (tiewise dedupe); loaders then take {TABLE}"
            yield Said(HEAD, what, fix, severity="info")
        return
    kind, least = BY_NAME[table.dtype], BY_NAME["Q6_K"]
    if facts.tokens is not None and kind.bits < least.bits:
        what = f"{TABLE} serves both ends as {kind.name}, {kind.bits:.2f} bits a value; a head asks for {least.name}"
        yield TABLE, what, f"quantise again with --token-embedding-type {least.name.lower()} (or q8_0)"
