"""Rules on the number of rows of tables and biases: B017, B030, B033, B035."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tiewise.checkpoint.claims import (
    SPEC,
    Claim,
    family_type,
    first_count,
    is_of_text,
    positive_int,
    usual_names,
    width_keys,
)
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.indexed_tensors import NGRAM, PER_LAYER, IndexedTensor, modality_config, rows_in_config
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    JsonEdit,
    Observation,
    Observations,
    Severity,
    describe,
    dotted,
    further_tables,
    names,
    resize_command,
    rule,
)
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import items_of, short

_SOURCE = "take it from the checkpoint's source"


@rule("B017", "error", "every table that a token id indexes has the rows that ids need")
def other_tables(facts: Facts) -> Observations:
    """Some models look token ids up in more than two tables. Gemma 3n and 4 have one that is as wide as all layers
    together, and Gemma 3n one each for ids of pictures and sounds. LongCat-Flash-Lite has tables of hashed n-grams, and
    DeepSeek-V3 those of the layer that predicts a further token. A tool that resizes only input table and head leaves
    these unchanged: a new id then raises an IndexError, or reads outside a table on a GPU (transformers#45276, #45335,
    #45324). The row of an n-gram depends on vocab_size, so another vocab_size gives every n-gram another row.
    What to do: `tiewise vocab resize` grows per-layer tables and those of further tokens with the rest, even if an
    earlier resize missed them; tables of n-grams and of pictures or sounds must be trained for their vocabulary.
    Sources: transformers#45276; transformers#45335; transformers#45324; transformers modeling_gemma3n.py; mlx-lm
    models/longcat_flash_ngram.py; transformers modeling_blt.py
    """
    others = [other for other in facts.roles.indexed_tensors if other.tensor.dtype in FLOATING]
    main = facts.lookup_table
    if main is None:
        for other in others:
            yield from _rows_of_config(facts, other, _SOURCE)
        return
    grow = resize_command(facts, main.rows)
    for other in others:
        yield from _rows_of_config(facts, other, grow)
        if other.has_row_per_token:
            yield from _rows_of_main(facts, other, main, grow)
    yield from _missing_per_layer_table(facts)
    yield from _beyond_modalities(facts, others, main)


def _rows_of_config(facts: Facts, other: IndexedTensor, grow: str) -> Observations:
    """Report a table whose number of rows differs from the config's.

    Args:
        grow: command that adds rows.
    """
    table, rows = other.tensor, rows_in_config(other, facts.config)
    if rows in (None, table.rows):
        return
    problem = f"{short(table.name)} has {table.rows:,} rows, and the config asks for {rows:,}"
    if other.role == NGRAM:
        problem += ", so every n-gram reads a wrong row"
        remedy = "set vocab_size to its value in training"
    elif other.has_row_per_token:
        remedy = grow
    else:
        remedy = _SOURCE
    yield short(table.name), problem, remedy


def _rows_of_main(facts: Facts, other: IndexedTensor, main: Stored, grow: str) -> Observations:
    """Report a table by id whose number of rows differs from the input table's.

    Args:
        main: the input table.
        grow: command that adds rows.
    """
    table, is_per_layer = other.tensor, other.role == PER_LAYER
    if table.rows == main.rows or (is_per_layer and _allows_other_rows(facts, table, main)):
        return
    where, remedy = short(table.name), _SOURCE
    problem = f"{short(table.name)} has {table.rows:,} rows, and {short(main.name)} has {main.rows:,}"
    if table.rows < main.rows:
        problem += f"; ids from {table.rows:,} on read outside it"
        remedy = grow
    yield where, problem, remedy


def _allows_other_rows(facts: Facts, per_layer: Stored, main: Stored) -> bool:
    """Return whether a per-layer table works with other rows than the input table `main`."""
    if per_layer.rows > main.rows:
        return True  # rows beyond the ids are padding
    # Gemma 3n reads the first row of its per-layer table for all further ids
    return family(facts.text.model_type).repeats_first_row


def _missing_per_layer_table(facts: Facts) -> Observations:
    """Report that the config gives the layers a table of tokens, and none is stored."""
    level = facts.text.level
    config = facts.levels.get(level, {})
    width, rows = (
        positive_int(config.get("hidden_size_per_layer_input")),
        positive_int(config.get("vocab_size_per_layer_input")),
    )
    if width is None or rows is None:
        return
    if facts.is_complete and not further_tables(facts, PER_LAYER):
        key = dotted(level, "hidden_size_per_layer_input")
        yield key, f"{key} is {width:,}, and no per-layer table is stored; one is drawn at random", _SOURCE


def _beyond_modalities(facts: Facts, others: list[IndexedTensor], main: Stored) -> Observations:
    """Report ids of the input table `main` that the last modality's table should have and lacks."""
    tables: dict[int, Stored] = {}  # {first id: table}; the last modality takes all further ids
    for other in others:
        offset = positive_int(modality_config(other, facts.config).get("vocab_offset"))
        if offset is not None:
            tables[offset] = other.tensor
    if not tables:
        return
    start = max(tables)
    last = tables[start]
    end = start + last.rows
    if main.rows > end:
        problem = f"ids from {end:,} to {main.rows - 1:,} read outside {short(last.name)}"
        problem += f". Ids from {start:,} on belong to {describe(last)}"
        yield short(last.name), problem, "restore the old size of the vocabulary, and give new tokens unused ids"


@rule("B030", "fatal", "both tables have the shapes that the model needs")
def table_shapes(facts: Facts) -> Observations:
    """Input and output table must have a row for the same tokens. An exception is a config that names two vocabularies.
    Both must be as wide as the model, except with a projection or a factored table (ALBERT, ELECTRA, OPT-350m,
    tiewise's classes). The width in the config must be a positive whole number. A resize of one end only leaves
    different sizes (transformers#35141), and loaders stop or draw the smaller table at random.
    What to do: take the shorter table from its source, or resize the model again in a tool that changes both ends. A
    wrong width is a wrong table. `tiewise repair` writes a malformed one.
    Sources: transformers#35141; transformers#45236; llama.cpp#12483
    """
    tables = [table for table in facts.roles.one_table_per_end if not facts.roles.is_packed(table)]
    if len(tables) == 2:
        yield from _unequal_rows(facts, *tables)
    yield from _lost_extra_rows(facts)
    if facts.text.hidden_size is None:
        yield from _malformed_widths(facts, tables)
        return
    for table in tables:
        if not facts.explains_width_of(table):
            problem = f"{short(table.name)} is {table.shape[1]:,} wide, and the model {facts.text.hidden_size:,}"
            problem += f". No projection and no key of the config explains it. {describe(table)}"
            yield short(table.name), problem, (CONFIG_FIX, "or take the table from its source")


def _malformed_widths(facts: Facts, tables: Sequence[Stored]) -> Observations:
    """Report a hidden width of the text level that is no positive whole number.

    Examples are "4096", 0 and null.
    """
    widths = {table.columns for table in tables}
    if len(widths) != 1:
        return
    width = widths.pop()
    for level, values in facts.levels.items():
        for key in width_keys(values, family_type(values)):
            where, written = dotted(level, key), values[key]
            if is_of_text(level) and positive_int(written) is None and not _may_be_null(values, key):
                problem = f"{where} is {short(json.dumps(written))}, which is no width. {describe(tables[0])}"
                yield _wrong_width(facts, where, problem, width)


def _may_be_null(level: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is null, and its class has null or nothing by default."""
    return level[key] is None and family(family_type(level)).keys.defaults.get(key) is None


def _wrong_width(facts: Facts, where: str, problem: str, width: int) -> Observation:
    """Return the finding about a malformed width.

    `repair` writes the tables' width, unless a map or the head's class may have another one.
    """
    if facts.roles.maps or facts.class_ends.wide:
        return Observation(where, problem, f"{CONFIG_FIX}: {where} = the width of the hidden states", severity="error")
    edit = JsonEdit(CONFIG, where, width)
    return Observation(where, problem, facts.command("repair"), safe=True, severity="error", edits=(edit,))


def _unequal_rows(facts: Facts, table: Stored, head: Stored) -> Observations:
    """Report that the two tables count different tokens, though the config names one vocabulary."""
    if table.rows == head.rows:
        return
    if facts.tied is True or not _may_differ(facts, table, head):
        problem = f"the two tables have different numbers of rows, {table.rows:,} and {head.rows:,}"
        problem += f". {describe(table)} and {describe(head)}"
        shorter = min(table, head, key=lambda end: end.rows)
        fixes = (f"take {short(shorter.name)} from its source", "or resize both ends again, from the model before")
        yield short(head.name), problem, fixes


def _may_differ(facts: Facts, table: Stored, head: Stored) -> bool:
    """Return whether a config has two numbers of rows, as Marian's `decoder_vocab_size`."""
    return SPEC in facts.config or {table.rows, head.rows} <= facts.vocabularies


def _lost_extra_rows(facts: Facts) -> Observations:
    """Report that an input table lacks the rows that its class adds to the vocabulary."""
    table, vocabulary, extra = facts.lookup_table, facts.text.vocab_size, facts.extra_rows
    if extra == 0:
        return
    if table is None or vocabulary is None:
        return
    rows = vocabulary + extra
    if table.rows == rows:
        return
    problem = f"{short(table.name)} has {table.rows:,} rows, and its class needs {rows:,}"
    problem += f". These are vocab_size = {vocabulary:,} and {extra} extra rows, which a resize in transformers drops"
    yield short(table.name), problem, "take the table from before the resize"


@rule("B033", "error", "vocab_size is the number of rows")
def vocab_size(facts: Facts) -> Observations:
    """Loaders give both tables the number of rows that vocab_size says. If the files have other shapes, vLLM and
    llama.cpp stop. transformers stops too, or with ignore_mismatched_sizes draws the table at random. The cause is a
    resize in one tool and a config from another, or a change of one level of a nested config. A size must be a positive
    whole number: transformers 5 stops at "32000" and 32000.0. Classes read the text
    level; a larger number at the root is a warning, because older releases and other tools read that one
    (transformers#40130). The rule respects sizes of other vocabularies in the config (decoder_vocab_size, per-layer
    tables), and paddings that the config declares.
    What to do: `tiewise repair` sets vocab_size to the number of rows; or resize the tables.
    Sources: transformers#45236; LlamaFactory#6749; transformers#40130; LlamaFactory#6840; lerobot#825
    """
    table, rows = facts.lookup_table, facts.text.vocab_size
    if table is None:
        return
    if rows is None:
        yield from _malformed_vocab_sizes(facts, table)
        return
    key = dotted(facts.text.level, "vocab_size")
    declared = {rows, _padded_rows(facts, rows), *facts.text_vocabularies}
    if table.rows not in declared:
        problem = f"{key} is {rows:,}, and {short(table.name)} has {table.rows:,} rows"
        yield _wrong_vocab_size(facts, key, problem, table.rows)
        return
    for claim in _levels_above(facts):
        if claim.vocab_size is not None and claim.vocab_size > max(declared):
            outer = dotted(claim.level, "vocab_size")
            problem = f"{outer} is {claim.vocab_size:,}, and {key} is {rows:,}, as {short(table.name)} has"
            problem += ". Tools that read the first number fail"
            yield Observation(outer, problem, f"{CONFIG_FIX}: {outer} = {table.rows}", severity="warning")


def _malformed_vocab_sizes(facts: Facts, table: Stored) -> Observations:
    """Report a `vocab_size` of the text level that is no positive whole number."""
    for level, written in facts.malformed_vocab_sizes.items():
        key = dotted(level, "vocab_size")
        problem = f"{key} is {short(json.dumps(written))}, which is no number of rows"
        problem += f". {short(table.name)} has {table.rows:,} rows"
        edit = JsonEdit(CONFIG, key, table.rows)
        yield Observation(key, problem, facts.command("repair"), safe=True, edits=(edit,))


def _wrong_vocab_size(facts: Facts, key: str, problem: str, rows: int) -> Observation:
    """Return the finding about a `vocab_size` that differs from the number of rows.

    `repair` writes it, unless the family has another name for the key.
    """
    if "vocab_size" not in facts.levels.get(facts.text.level, {}):
        return Observation(key, problem, f"{CONFIG_FIX}: {key} = {rows}")
    edit = JsonEdit(CONFIG, key, rows)
    return Observation(key, problem, facts.command("repair"), safe=True, edits=(edit,))


_PADDING_KEYS = ("pad_vocab_size_multiple", "pad_vocab_size_multiple_of", "make_vocab_size_divisible_by")


def _padded_rows(facts: Facts, rows: int) -> int:
    """Return a number of rows with the padding that the config declares."""
    multiple = first_count(facts.levels.values(), *_PADDING_KEYS) or 1
    return math.ceil(rows / multiple) * multiple


def _levels_above(facts: Facts) -> list[Claim]:
    """Return the levels of the config that contain the text level."""
    return [claim for claim in facts.claims.levels if _is_above(claim, facts.text.level)]


def _is_above(claim: Claim, level: str) -> bool:
    """Return whether a level of the config contains another one; the root contains all others."""
    if claim.level == level:
        return False
    return claim.level == "" or level.startswith(f"{claim.level}.")


@rule("B035", "warning", "the head's bias is as long as the vocabulary, and one")
def head_biases(facts: Facts) -> Observations:
    """A bias of the head has one entry for each row. It has the shape that its class gives it; transformers 5 refuses
    any other. Resizing a table without its bias leaves the bias short (transformers#35141, skeletoken#108). A bias on a
    tied causal head is noted for another reason: loaders that skip every tensor under a tied head's prefix drop the
    bias too, and the model writes garbage (vllm#46835). BERT and similar models store the bias under two names, which
    is correct while the two are equal. The note does not concern encoders.
    What to do: take the bias from the source; `tiewise vocab resize` changes tables and bias together.
    Sources: vllm#46835; transformers#35141; skeletoken#108
    """
    biases = {bias.name: bias for bias in facts.roles.biases}
    yield from _unequal_copies(facts, biases)
    yield from _fresh_biases(facts, biases)
    yield from _missing_biases(facts)
    rows = {table.rows for table in facts.roles.tables} | facts.vocabularies
    for bias in _all_biases(facts, biases):
        yield from _wrong_bias(facts, bias, rows)


def _unequal_copies(facts: Facts, biases: dict[str, Stored]) -> Observations:
    """Report stored biases that differ although the class ties them."""
    if facts.tied is not True or not facts.scan:
        return
    for target, source in facts.roles.ties.items():
        if target in biases and source in biases:
            yield from _unequal_bias(facts, biases[target], biases[source])


def _unequal_bias(facts: Facts, bias: Stored, other: Stored) -> Observations:
    """Report one such pair of biases, if the two differ."""
    if facts.are_equal(bias, other):
        return
    where = short(bias.name)
    problem = f"{where} and {short(other.name)} differ, and this class has one bias; loaders choose differently"
    remedy = "find out which copy was trained, and store only that one"
    yield Observation(where, problem, remedy, severity="error")


def _fresh_biases(facts: Facts, biases: Collection[str]) -> Observations:
    """Report biases that an untied model initialises, because only one of two is stored."""
    for target, source in facts.unfilled_ties:
        if target not in biases and target.endswith("bias"):
            where = short(target)
            problem = f"{where} is not stored, and an untied model of this class starts it anew"
            yield Observation(where, problem, f"store {short(source)} as {where} too", severity="error")


def _missing_biases(facts: Facts) -> Observations:
    """Report biases of the head that the file lacks, so that transformers initialises them."""
    missing = [facts.saved_name(name) for name in facts.missing_biases]
    if missing:  # several names may be those of one bias
        problem = f"the head's bias is not stored, and transformers starts it anew ({' or '.join(missing)})"
        remedy = ("take the bias from the source", "if the model was trained without one: store zeros")
        yield Observation(missing[0], problem, remedy, severity="error")


def _all_biases(facts: Facts, biases: dict[str, Stored]) -> Collection[Stored]:
    """Return the head's biases, including tensors that are one by name or class."""
    tensors, output = facts.folder.tensors, facts.roles.output_name
    every = biases | {name: tensors[name] for name in facts.misfits}
    endings = [f".{name}" for name in usual_names().biases]
    if output is not None:
        endings.append(f".{module_of(output)[0]}.bias")
    for name, tensor in tensors.items():
        if f".{name}".endswith(tuple(endings)) and _is_vector(tensor):
            every[name] = tensor
    return every.values()


def _is_vector(tensor: Stored) -> bool:
    """Return whether a tensor has the shape [N] or [1, N]."""
    return bool(tensor.shape) and tensor.shape[:-1] in ((), (1,))


def _wrong_bias(facts: Facts, bias: Stored, rows: set[int]) -> Observations:
    """Report a bias of a wrong length or shape, or of a tied head.

    Args:
        rows: valid lengths.
    """
    where = short(bias.name)
    expected = facts.misfits.get(bias.name)  # the class's shape, if it differs from the stored one
    if rows and bias.columns not in rows:
        yield _wrong_length(bias, rows, is_refused=expected is not None)
    elif expected is not None:
        problem = f"transformers refuses {describe(bias)}, because its class has the shape {list(expected)}"
        yield Observation(where, problem, "store it in that shape", severity="error")
    elif bias.name.endswith("lm_head.bias") and _is_tied_causal(facts):
        problem = "a tied head has a bias, which some loaders skip together with the head"
        problem += f". {describe(bias)}"
        remedy = "none needed; vLLM dropped it before #46835 was fixed"
        yield Observation(where, problem, remedy, severity="info")


def _wrong_length(bias: Stored, rows: set[int], *, is_refused: bool) -> Observation:
    """Return the finding about a bias whose length is none of `rows`."""
    listed = names(sorted(map(str, rows)))
    entries = "1 entry" if bias.columns == 1 else f"{bias.columns:,} entries"
    problem = f"{short(bias.name)} has {entries}, and the tables have {listed} rows"
    remedy = "take the bias from the source"
    severity: Severity = "warning"
    if is_refused:
        problem += "; transformers refuses to load it"
        severity = "error"
    return Observation(short(bias.name), problem, remedy, severity=severity)


def _is_tied_causal(facts: Facts) -> bool:
    """Return whether the model is tied, and was saved by a class that generates text."""
    if facts.tied is not True:
        return False
    architectures = items_of(str, facts.config.get("architectures"))
    return any(name.endswith("ForCausalLM") for name in architectures)
