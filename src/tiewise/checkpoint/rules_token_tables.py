"""Tables beside the two ends have the rows that ids need, and copies are copies: B017, B018."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from tiewise.checkpoint.claims import count, number
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import Said, Told, describe, difference, dotted, rule
from tiewise.checkpoint.stored import FLOATING
from tiewise.checkpoint.table_scans import CLOSE, SOME_ROWS
from tiewise.checkpoint.token_tables import MODALITY, MTP_INPUT, MTP_OUTPUT, NGRAM, PER_LAYER, TokenTable
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
    roles, main = facts.roles, facts.roles.counted
    config = facts.levels.get(facts.text.level, {})
    gemma3n = str(facts.text.model_type).startswith("gemma3n")
    own = count(config.get("vocab_size_per_layer_input"))
    per_layer = [other for other in roles.others if other.role == PER_LAYER]
    for other in (other for other in roles.others if other.by_id and other.tensor.dtype in FLOATING):
        table, where, rows = other.tensor, short(other.tensor.name), other.tensor.rows
        said = own if other in per_layer else None
        if said is not None and said != rows:
            key = dotted(facts.text.level, "vocab_size_per_layer_input")
            yield where, f"{key} is {said:,}, and {describe(table)} has {rows:,} rows", _resize(facts)
        if main is None or rows == main.rows or (rows > main.rows and other in per_layer):
            continue
        if other in per_layer and gemma3n:  # its class reads the first row for all further ids
            continue
        what = f"{describe(table)} has {rows:,} rows, and {short(main.name)} {main.rows:,}"
        what += f": ids from {rows:,} on read outside it" if rows < main.rows else ""
        yield where, what, _resize(facts) if rows < main.rows else "take it from the checkpoint's source"
    width = count(config.get("hidden_size_per_layer_input"))
    if own and width and main is not None and facts.complete and not per_layer and not facts.folder.single:
        what = f"the config says a table of {own:,} rows for each layer, and none is stored: it is drawn at random"
        yield dotted(facts.text.level, "vocab_size_per_layer_input"), what, "take it from the checkpoint's source"
    yield from _hashed(facts)
    ends = [(other, *_offset(facts, other)) for other in roles.others if other.role == MODALITY]
    for other, _, wanted in ends:
        if wanted is not None and wanted != other.tensor.rows:
            what = f"its config says {wanted:,} tokens, and {describe(other.tensor)} has {other.tensor.rows:,} rows"
            yield short(other.tensor.name), what, "take it from the checkpoint's source"
    last, first, _ = max(ends, key=lambda end: end[1] or 0, default=(None, None, None))
    if last is not None and first is not None and main is not None and main.rows > first + last.tensor.rows:
        what = f"ids from {first:,} on are looked up in {describe(last.tensor)}: those from"
        what += f" {first + last.tensor.rows:,} to {main.rows - 1:,} read outside it"
        yield short(last.tensor.name), what, "bring the vocabulary back to its size, and use ids that are unused"


def _resize(facts: Facts) -> str:
    main = facts.roles.counted
    return facts.command("resize", f"--vocab {main.rows}") if main is not None else "take it from its source"


def _offset(facts: Facts, other: TokenTable) -> tuple[int | None, int | None]:
    """(first id, number of ids) of a modality, as the config says them."""
    kind = other.module.rpartition(".")[0].rpartition("embed_")[2]  # vision, audio
    level = facts.config.get(f"{kind}_config")
    found = level if isinstance(level, dict) else {}
    return count(found.get("vocab_offset")), count(found.get("vocab_size"))


def _hashed(facts: Facts) -> Iterator[Said]:
    """Tables of n-grams that have other rows than the hash of their class makes of the config."""
    config, tables = facts.levels.get(facts.text.level, {}), {}
    for other in facts.roles.others:
        if other.role == NGRAM and other.tensor.dtype in FLOATING:
            tables[other.module] = other.tensor
    ratio, vocab = number(config.get("ngram_vocab_size_ratio")), facts.text.vocab_size
    for module, table in tables.items():
        index = module.rpartition(".embedders.")[2]
        wanted = None
        if index.isdecimal() and len(index) < 9 and ratio is not None and vocab is not None:  # odd sizes, one each
            wanted = int(ratio * vocab + 2 * int(index) + 1)
        elif module.endswith("encoder_hash_tok_embedding"):
            sizes = config.get("encoder_hash_byte_group_size")
            keys = ("encoder_hash_byte_group_vocab", "encoder_hash_byte_group_nb_functions")
            numbers = [count(config.get(key)) for key in keys]
            numbers.append(len(sizes) if isinstance(sizes, list) else None)
            wanted = prod(n for n in numbers if n is not None) if None not in numbers else None
        if wanted is not None and wanted != table.rows:
            what = f"the config makes it {wanted:,} rows, and {describe(table)} has {table.rows:,}"
            fix = "bring vocab_size back to what the model was trained with"
            yield Said(short(table.name), f"{what}: every n-gram reads another row, or one outside", fix)


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
