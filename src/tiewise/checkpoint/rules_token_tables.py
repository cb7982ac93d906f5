"""Tables beside the two ends have the rows that ids need, and copies are copies: B017, B018."""

from __future__ import annotations

from collections.abc import Mapping

from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import Said, Told, describe, difference, dotted, rule
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.table_scans import CLOSE, SOME_ROWS
from tiewise.checkpoint.token_tables import MODALITY, MTP_INPUT, MTP_OUTPUT, NGRAM, PER_LAYER, rows_said
from tiewise.checkpoint.untrusted import short


@rule("B017", "error", "every table that a token id indexes has the rows that ids need")
def other_tables(facts: Facts) -> Told:
    """Models look ids up in more than two tables: Gemma 3n and 4 in one that is as wide as all layers together,
    LongCat-Flash-Lite in tables of hashed n-grams, Gemma 3n in one each for ids of pictures and sounds, DeepSeek-V3 in
    those of the layer that predicts a further token. A tool that resizes input table and head and knows of no other
    leaves these as they were: a new id then raises an IndexError, or reads outside a table on a GPU
    (transformers#45276, #45335, #45324). The rows of an n-gram table are counted from vocab_size, so that another
    vocab_size means other rows for every n-gram.
    What to do: `tiewise resize` grows per-layer tables and those of further tokens with the rest, also where an earlier
    resize passed them by; tables of n-grams and of pictures or sounds must be trained for their vocabulary.
    Sources: transformers#45276; transformers#45335; transformers#45324; transformers modeling_gemma3n.py; mlx-lm
    models/longcat_flash_ngram.py; transformers modeling_blt.py
    """
    main, gemma3n = facts.roles.counted, str(facts.text.model_type).startswith("gemma3n")
    source = "take it from the checkpoint's source"
    grow = source if main is None else facts.command("resize", f"--vocab {main.rows}")
    others = [other for other in facts.roles.others if other.tensor.dtype in FLOATING]
    for other in others:
        table, where = other.tensor, short(other.tensor.name)
        said = rows_said(other, facts.config)
        if said is not None and said != table.rows:
            what = f"the config makes it {said:,} rows, and {describe(table)} has {table.rows:,}"
            what += ": every n-gram reads another row, or one outside" if other.role == NGRAM else ""
            back = "bring vocab_size back to what the model was trained with" if other.role == NGRAM else source
            yield where, what, grow if other.by_id else back
        if not other.by_id or main is None or table.rows == main.rows:
            continue
        # Gemma 3n reads its first row for all further ids; more rows than ids are padding
        if other.role == PER_LAYER and (gemma3n or table.rows > main.rows):
            continue
        what = f"{describe(table)} has {table.rows:,} rows, and {short(main.name)} {main.rows:,}"
        what += f": ids from {table.rows:,} on read outside it" if table.rows < main.rows else ""
        yield where, what, grow if table.rows < main.rows else source
    config = facts.levels.get(facts.text.level, {})
    wide = count(config.get("vocab_size_per_layer_input")) and count(config.get("hidden_size_per_layer_input"))
    if wide and main is not None and facts.complete and all(other.role != PER_LAYER for other in facts.roles.others):
        key = dotted(facts.text.level, "hidden_size_per_layer_input")
        yield key, f"it is {wide:,}, and no per-layer table is stored: one is drawn at random", source
    offsets: dict[int, Stored] = {}  # by first id; the last modality takes all ids that follow
    for other in (other for other in others if other.role == MODALITY):
        level = facts.config.get(f"{other.module.rpartition('.')[0].rpartition('embed_')[2]}_config")
        offset = count(level.get("vocab_offset")) if isinstance(level, Mapping) else None
        offsets |= {offset: other.tensor} if offset is not None else {}
    if offsets and main is not None and main.rows > (end := max(offsets) + offsets[max(offsets)].rows):
        last = offsets[max(offsets)]
        what = (
            f"ids from {max(offsets):,} on are looked up in {describe(last)}: those from {end:,} to {main.rows - 1:,}"
        )
        yield short(last.name), f"{what} read outside it", "bring the vocabulary back to its size, and use unused ids"


@rule(
    "B018",
    "warning",
    "a table of the layers that predict further tokens is the main one, or one of its own",
    scans=True,
)
def further_tokens(facts: Facts) -> Told:
    """DeepSeek-V3 stores its table and its head once more for the layer that predicts the token after next, and says
    that they are shared. Loaders differ in which they draft with: transformers 5 passes the copies by and takes the
    main ones (MtpModel in its modeling_layers.py), vLLM loads the copies (deepseek_mtp.py). A fine-tuning or a merge
    that changed the main tables alone leaves copies that are nearly equal: the text stays right, as every draft is
    verified, but fewer drafts are accepted where the copies are read. Tables of their own are only noted.
    What to do: store the main tables under the copies' names too, or leave the copies out where the loader shares.
    Sources: DeepSeek-V3 README_WEIGHTS.md; transformers modeling_layers.py (5.23.0); vLLM deepseek_mtp.py (03356f8)
    """
    ends = {MTP_INPUT: facts.roles.input, MTP_OUTPUT: facts.roles.output or facts.roles.input}
    for other in facts.roles.others:
        end = ends.get(other.role)
        alike = None if end is None or end.shape != other.tensor.shape else facts.compare(end, other.tensor)
        if end is None or alike is None or not alike.differing:
            continue
        close = alike.kind in (SOME_ROWS, CLOSE)
        what = f"{describe(other.tensor)} is not {short(end.name)}: {difference(alike)}"
        what += "" if close else "; transformers drafts with the main one in its place"
        fix = f"store {short(end.name)} under that name too" if close else "none if it was trained so"
        yield Said(short(other.tensor.name), what, fix, severity="warning" if close else "info")
