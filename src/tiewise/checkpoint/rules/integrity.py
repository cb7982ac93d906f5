"""Files are whole, and index, tables, config and tokenizer agree: B001 to B004, B017, B030 to B035."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.claims import count, ends_with, first_count, usual
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.hf_folder import CONFIG, INDEX, PIECES, SINGLE, Fault, Folder, Tokenizer, is_id
from tiewise.checkpoint.indexed_tensors import NGRAM, PER_LAYER, modality_config, rows_said
from tiewise.checkpoint.rules.rule import CONFIG_FIX, Said, Told, describe, dotted, names, numbers, rule, value_text
from tiewise.checkpoint.stored import FLOATING, Stored, widened
from tiewise.checkpoint.table_scans import SAMPLED_ROWS, row_lengths
from tiewise.checkpoint.untrusted import items_of, short

_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_MODEL_PICKLE = re.compile(r"(pytorch_model|model|tf_model|flax_model)[^/]*\.(bin|pt|pth|ckpt|h5|msgpack)")
_GENERATION = "generation_config.json"
_MODALITY = re.compile(r"image|audio|video|vision", re.IGNORECASE)


@rule("B001", "fatal", "every file can be read, and every header describes exactly its file", kind="any")
def unreadable(facts: Any) -> Told:
    """A safetensors file is a length, a header and tensors that lie one behind the other up to the last byte. A file
    that was cut short by a full disk or a broken download, or that a tool wrote wrongly, breaks one of these. Loaders
    then fail late, or read a tensor's bytes from the wrong place. Config, generation config and tokenizer files must be
    JSON objects. Weights that exist only as pickles are named and never opened, because opening them runs code.
    What to do: take the damaged file from its source again; compare its size with what the source says.
    Sources: https://github.com/huggingface/safetensors#format
    """
    if isinstance(facts, AdapterFacts):
        yield from ((fault.file, fault.what, fault.fix) for fault in facts.faults)
    if not isinstance(facts, Facts):
        return
    folder, tokenizer = facts.folder, facts.tokenizer
    for fault in folder.faults:
        if fault.file != INDEX and folder.has(fault.file):
            yield short(fault.file), _plain(fault, folder), fault.fix
    for one in (*(tokenizer.faults if tokenizer is not None else ()), facts.generation, facts.modelopt):
        if isinstance(one, Fault):
            yield Said(one.file, _plain(one, folder), one.fix, severity="warning")
    if folder.pickles and not folder.headers and not folder.faults:
        what = f"its weights are only in {names(folder.pickles)}, which unpickling would execute: they are not opened"
        yield folder.pickles[0], what, "load it in a sandbox that you trust and save it as safetensors; then check that"


def _plain(fault: Fault, folder: Folder) -> str:
    return fault.what.removeprefix(f"{folder.path}/")


@rule("B002", "fatal", "the index and the shards name the same tensors")
def index_and_shards(facts: Facts) -> Told:
    """model.safetensors.index.json maps every tensor to the shard that holds it. Tools that add, drop or rename tensors
    without rewriting it leave names that no shard holds, or tensors that no loader asks for. llama.cpp's converter
    stopped at a `wte` that only the index knew (llama.cpp#12456), and users edit the file by hand after merges
    (mergekit#385). A missing shard is fatal. Tensors that lie in another shard, or that the index forgot, can be mapped
    again from the headers; a name that no shard holds cannot be, unless it is the head of a tied model.
    What to do: `tiewise repair` rebuilds the index; a missing shard must be downloaded.
    Sources: llama.cpp#12456; mergekit#385
    """
    folder, held, weight_map = facts.folder, facts.folder.headers, facts.folder.weight_map
    mapped: dict[str, list[str]] = {}  # in one pass: there may be as many missing shards as tensors
    for name, file in (weight_map or {}).items() if folder.faults else ():
        mapped.setdefault(file, []).append(name)
    for fault in folder.faults:
        if fault.file == INDEX:
            yield INDEX, _plain(fault, folder), fault.fix
        elif not folder.has(fault.file) and weight_map is not None:
            lacking = mapped[fault.file]
            tensors = f"{len(lacking):,} tensor{'s' * (len(lacking) > 1)}"
            what = f"the index maps {tensors} to it ({names(lacking)}), and it is not there"
            yield short(fault.file), what, "download the missing file"
    if weight_map is None:
        if folder.config is None or folder.opened is not None or folder.has(INDEX) or not held:
            return
        shards = [name for name in held if _SHARD.fullmatch(name)]
        if shards:
            what = f"{len(shards)} shards ({names(shards)}) without an index: loaders of transformers find no weights"
            yield INDEX, what, "download the index, or write the checkpoint again"
        elif isinstance(folder.config.get("model_type"), str):
            what = f"transformers looks for {SINGLE} or {INDEX}, and the folder has {names(list(held))}"
            fix = f"rename it to {SINGLE}" if len(held) == 1 else "write the checkpoint again"
            yield Said(short(next(iter(held))), what, fix, severity="error")
        return
    wrong = [name for name, file in weight_map.items() if file in held and name not in held[file].tensors]
    if elsewhere := [name for name in wrong if name in folder.tensors]:
        what = f"{len(elsewhere):,} tensors lie in another shard than the index says ({names(elsewhere)})"
        yield Said(short(weight_map[elsewhere[0]]), what, facts.command("repair"), True, severity="error")
    if lost := [name for name in wrong if name not in folder.tensors]:
        spare = lost == [facts.roles.output_name] and facts.claims.tied is True
        what = f"the index names {len(lost):,} tensors that no shard holds ({names(lost)})"
        fix = facts.command("repair") if spare else "download the shards again, or the index that belongs to them"
        yield Said(INDEX, what, fix, spare, severity="error")
    if unknown := [name for name in folder.tensors if name not in weight_map]:
        file = folder.tensors[unknown[0]].path.name
        what = f"{len(unknown):,} stored tensors are missing from the index ({names(unknown)}): some loaders skip them"
        yield Said(short(file), what, facts.command("repair"), True, severity="error")


@rule("B003", "warning", "total_size is right, and no older weights lie beside the checkpoint")
def stale(facts: Facts) -> Told:
    """The index states the bytes of all tensors; a wrong number is harmless to most loaders and a sign that the file
    was edited or kept from before a rewrite. Files of weights that the index does not name are read by some tools all
    the same: mlx-lm takes every model*.safetensors of a folder. transformers deletes its own old shards before it
    writes new ones; other tools leave them. Optimizer states, adapters and training arguments are not meant here.
    What to do: `tiewise repair` corrects the number; move old weights out of the folder.
    Sources: transformers `save_pretrained`; mlx-lm `load_model`
    """
    folder, claimed = facts.folder, facts.folder.total_size
    held = sum(tensor.nbytes for tensor in folder.tensors.values())
    if claimed is not None and facts.complete and (isinstance(claimed, bool) or claimed != held):
        what = f"total_size is {value_text(claimed)}, and the tensors have {held:,} bytes"
        yield INDEX, what, facts.command("repair"), True
    old = [name for name in folder.extra if name.startswith("model") or _SHARD.fullmatch(name)]
    if old:
        first = SINGLE in old and folder.opened == SINGLE
        what = f"{len(old)} more files beside the checkpoint's own ({names(old)})"
        what += ": mlx-lm reads every model*.safetensors"
        what += f"; transformers opens {SINGLE}, and not what the index names" if first else ""
        fix = "move them out of the folder if they are old"
        yield Said(short(old[0]), what, fix, severity="error" if first else "warning")
    others = [name for name in folder.extra if name not in old]
    others += [name for name in folder.pickles if folder.headers and _MODEL_PICKLE.fullmatch(name)]
    if others:
        what = f"weights in other formats or layouts lie beside ({names(others)}); they are not compared"
        yield Said(short(others[0]), what, "remove them if they are older than the safetensors", severity="info")


@rule("B004", "error", "no name lies in two shards")
def name_in_two_shards(facts: Facts) -> Told:
    """Two shards that hold one name leave it to the loader which of the two it takes: the one that the index maps, or
    the one that is read last. Where both are equal this only wastes bytes; where they differ, two loaders make two
    models. It comes from merges and from expert or pipeline ranks that each wrote the shared table
    (Megatron-Bridge#919).
    What to do: `tiewise repair` drops copies that are equal. Where they differ, find out which one training ended with.
    Sources: Megatron-Bridge#919; mergekit#385
    """
    for copy in facts.folder.copies:
        kept = facts.folder.tensors[copy.name]
        equal = facts.same(copy, kept) if facts.scan else None
        how = {True: "equal", False: "different", None: "not compared"}[equal]
        what = f"{short(copy.name)} also lies in {short(kept.path.name)}, which is the one loaders should take; {how}"
        fix = facts.command("repair") if equal else "find out which one is meant, and write the shards again"
        yield f"{short(copy.path.name)}: {short(copy.name)}", what, fix, bool(equal)


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
    main = facts.roles.counted
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
        what = f"{describe(table)} has {table.rows:,} rows, and {short(main.name)} {main.rows:,}"
        per_layer = other.role == PER_LAYER  # of which Gemma 3n reads the first row for all further ids
        if table.rows < main.rows and not (per_layer and family(facts.text.model_type).repeats_first_row):
            yield where, f"{what}: ids from {table.rows:,} on read outside it", grow
        elif not per_layer:  # more rows than ids are padding there
            yield where, what, source
    config = facts.levels.get(facts.text.level, {})
    wide = count(config.get("vocab_size_per_layer_input")) and count(config.get("hidden_size_per_layer_input"))
    if wide and main is not None and facts.complete and all(other.role != PER_LAYER for other in facts.roles.others):
        key = dotted(facts.text.level, "hidden_size_per_layer_input")
        yield key, f"it is {wide:,}, and no per-layer table is stored: one is drawn at random", source
    offsets: dict[int, Stored] = {}  # by first id; the last modality takes all ids that follow
    for other in others:
        offset = count(modality_config(other, facts.config).get("vocab_offset"))
        offsets |= {offset: other.tensor} if offset is not None else {}
    if offsets and main is not None and main.rows > (end := max(offsets) + offsets[max(offsets)].rows):
        last = offsets[max(offsets)]
        what = f"ids from {max(offsets):,} on are looked up in {describe(last)}"
        what += f": those from {end:,} to {main.rows - 1:,} read outside it"
        yield short(last.name), what, "bring the vocabulary back to its size, and use unused ids"


@rule("B030", "fatal", "both tables have the shapes that the model needs")
def table_shapes(facts: Facts) -> Told:
    """Input and output table must count the same tokens unless the config names two vocabularies, and be as wide as the
    model unless a projection or a factored table stands between (ALBERT, ELECTRA, OPT-350m, tiewise's own). A resize
    that reached one end only leaves them apart (transformers#35141), and loaders stop or draw the smaller one anew.
    What to do: `tiewise resize --vocab` brings both ends and the bias to one size; a wrong width is a wrong table.
    Sources: transformers#35141; transformers#45236; llama.cpp#12483
    """
    ends = [table for table in facts.roles.pair if not facts.roles.packed(table)]
    if len({end.rows for end in ends}) == 2:
        table, head = ends
        # two sizes are meant where the config names both, as for Marian with `decoder_vocab_size`
        if facts.tied is True or not (SPEC in facts.config or {table.rows, head.rows} <= facts.vocabularies):
            what = f"{describe(table)} and {describe(head)} count different tokens"
            yield short(head.name), what, facts.command("resize", f"--vocab {max(table.rows, head.rows)}")
    counted, vocabulary = facts.roles.counted, facts.text.vocab_size
    if facts.extra_rows and counted is not None and vocabulary is not None:
        asked = vocabulary + facts.extra_rows
        if counted.rows != asked:
            what = f"{describe(counted)} has {counted.rows:,} rows, and {asked:,} rows are asked for: vocab_size "
            what += f"{vocabulary:,} and {facts.extra_rows} of the class's own, which a resize in transformers drops"
            yield short(counted.name), what, "take the table from before the resize"
    if facts.text.hidden_size is None:
        return
    for end in (end for end in ends if not facts.explains(end)):
        what = f"{describe(end)} is {end.shape[1]:,} wide, the model {facts.text.hidden_size:,}"
        what += ", and neither a projection nor a width in the config explains it"
        yield short(end.name), what, f"{CONFIG_FIX}, or take the table from its source"


def _room(facts: Facts) -> int | None:
    """Ids that have a row: those of the input table, and of the extra table of Idefics; None where none are counted."""
    extra = (count(level.get("additional_vocab_size")) or 0 for level in facts.levels.values())
    return None if facts.roles.counted is None else facts.roles.counted.rows + max(extra, default=0)


@rule("B031", "fatal", "every id of the tokenizer has a row")
def ids_without_row(facts: Facts) -> Told:
    """An id beyond the table reads outside it: a crash on the CPU, a device-side assert on a GPU, a wrong row in
    kernels that do not check. It comes from adding tokens to the tokenizer without resizing the model, or from saving
    the tokenizer of another version beside the weights. Where only added tokens lie beyond, text without them still
    works, and this is an error rather than fatal; where they stand for images or sounds that a text model cannot see,
    as in Gemma 3 1B, a warning.
    What to do: `tiewise resize --vocab N` gives both ends the missing rows, drawn like the existing ones.
    Sources: LlamaFactory#10547; unsloth-zoo#923; transformers#32852
    """
    tokenizer, room = facts.tokenizer, _room(facts)
    if tokenizer is None or room is None or tokenizer.max_id < room:
        return
    over, base = sorted(number for number in tokenizer.added if number >= room), tokenizer.base_max >= room
    listed = names([f"{number} {tokenizer.added[number]!r}" for number in over])
    how = f"its vocabulary reaches id {tokenizer.base_max:,}" if base else f"{len(over):,} added tokens: {listed}"
    what = f"the tokenizer ({', '.join(tokenizer.files)}) gives ids up to {tokenizer.max_id:,}"
    what += f" and the input table has {room:,} rows; {how}"
    fix = facts.command("resize", f"--vocab {tokenizer.max_id + 1}")
    foreign = all(_MODALITY.search(tokenizer.added[number]) for number in over)
    yield Said(tokenizer.files[0], what, fix, severity="fatal" if base else "warning" if foreign else "error")


@rule("B032", "info", "rows without a token are padding", reads="headers, rows of padding and a sample of the others")
def padding(facts: Facts) -> Told:
    """Tables are often longer than the tokenizer, so that the row count divides by 64 or by the number of ranks. Some
    vocabularies leave out ids too, and their rows have no token either. That is healthy. It bites when a script calls
    resize_token_embeddings(len(tokenizer)), which then shrinks the table, or when new tokens land on padding rows that
    were never trained (unsloth-zoo#923, LlamaFactory#10547). Generation masks no padding row: one that
    is far longer in the head than every token's, or whose bias is larger, can be sampled, and decodes to nothing
    (vllm#13175, NeMo-RL#237). That is a warning; the padding rows and a sample of the others are read for it.
    What to do: nothing for short rows. tiewise never shrinks padded rows unless told to, and initialises rows that
    become tokens. Long rows: suppress their ids, or cut them off and pad with --rows zero.
    Sources: unsloth-zoo#923; LlamaFactory#10547; vllm#13175; NeMo-RL#237
    """
    tokenizer, table = facts.tokenizer, facts.roles.counted
    if tokenizer is None or table is None or not 0 <= tokenizer.max_id < table.rows:
        return
    has_token = _rows_with_token(tokenizer, table.rows)
    spare, used = np.flatnonzero(~has_token), np.flatnonzero(has_token)
    if not len(spare):
        return
    between = int((spare < tokenizer.max_id).sum())
    what = f"{table.rows:,} rows, ids up to {tokenizer.max_id:,}: {len(spare):,} rows of padding"
    what += f", {between:,} of them between the tokens" if between else ""
    fix = "none; new tokens may use them, and resize_token_embeddings(len(tokenizer)) would cut them off"
    yield short(table.name), what, fix
    if facts.scan and not set(tokenizer.files) & set(PIECES[1:]):  # whose positions may not be the ids
        yield from _strong_padding(facts, spare, used, tokenizer.max_id)


def _rows_with_token(tokenizer: Tokenizer, rows: int) -> NDArray[np.bool_]:
    """Return for each row of a table whether a token has it; without a vocabulary proper, all up to the last token."""
    found = np.zeros(rows, bool)
    found[: 0 if tokenizer.base else tokenizer.max_id + 1] = True
    for ids in (tokenizer.base.values(), tokenizer.added):
        for number in ids:
            if number < rows:
                found[number] = True
    return found


FEWEST_USED = 20  # rows whose lengths say how long a row can be


def _fence(lengths: NDArray[np.float64]) -> float:
    """Return a length above which a row is none of these: two spans from median to longest beyond the longest."""
    return float(3 * lengths.max() - 2 * np.median(lengths))


def _strong_padding(facts: Facts, spare: NDArray[np.int64], used: NDArray[np.int64], last_id: int) -> Told:
    """Report padding rows of the head that are far longer than every used row, and biases that are larger."""
    roles = facts.roles
    if roles.headless or not len(used):
        return
    top = max(spare[-1], used[-1])
    fix = f"list their ids under suppress_tokens in {_GENERATION}"
    if spare[-1] > last_id:
        fix += f", or cut them off: {facts.command('resize', f'--vocab {last_id + 1}')}"
    head = roles.output if roles.output is not None or not facts.tied else roles.input
    if head is not None and not roles.packed(head) and head.rows > top and len(used) >= FEWEST_USED:
        lengths, sample = row_lengths(head, spare), row_lengths(head, used[:: -(-len(used) // SAMPLED_ROWS)])
        longest = int(lengths.argmax())
        if lengths[longest] > _fence(sample) and lengths[longest] > _fence(row_lengths(head, used)):
            median = float(np.median(sample))
            longer = f"{int((lengths > median).sum()):,} of {len(spare):,} padding rows of {short(head.name)}"
            what = f"{longer} are longer than the median used row ({median:.3g}), and row {spare[longest]:,}"
            what += f" ({lengths[longest]:.3g}) is far longer than any: nothing keeps it from being sampled"
            yield Said(short(head.name), what, fix, severity="warning")
    for bias in roles.biases:
        if bias.dtype not in FLOATING or math.prod(bias.shape) != bias.shape[-1] or bias.shape[-1] <= top:
            continue
        values = widened(bias.read()).reshape(-1)
        above = spare[values[spare] > values[used].max()]
        if len(above):
            what = f"{short(bias.name)} is larger at {len(above):,} padding rows ({numbers(above[:8], len(above))})"
            what += f" than at any token: {values[above].max():.3g} and {values[used].max():.3g}"
            yield Said(short(bias.name), f"{what}; they are sampled first", fix, severity="warning")


@rule("B033", "error", "vocab_size is the number of rows")
def vocab_size(facts: Facts) -> Told:
    """Loaders size both tables by vocab_size and then find other shapes in the files: transformers stops, or with
    ignore_mismatched_sizes draws the table anew; vLLM and llama.cpp stop. It comes from resizing in one tool and
    writing the config in another, and in nested configs from changing one level only. Classes read the text level; a
    larger number at the root is a warning, because older releases and other tools read that one (transformers#40130).
    Sizes of other vocabularies in the config (decoder_vocab_size, per-layer tables) are respected, and so are paddings
    that the config declares.
    What to do: set vocab_size to the number of rows at every level, or resize the tables.
    Sources: transformers#45236; LlamaFactory#6749; transformers#40130; LlamaFactory#6840; lerobot#825
    """
    text, table = facts.text, facts.roles.counted
    if text.vocab_size is None or table is None:
        return
    key = dotted(text.level, "vocab_size")
    padded = ("pad_vocab_size_multiple", "pad_vocab_size_multiple_of", "make_vocab_size_divisible_by")
    multiple = first_count(facts.levels.values(), *padded) or 1
    declared = {text.vocab_size, math.ceil(text.vocab_size / multiple) * multiple, *facts.text_vocabularies}
    if table.rows not in declared:
        what = f"{key} is {text.vocab_size:,}, and {describe(table)} has {table.rows:,} rows"
        yield key, what, f"{CONFIG_FIX}: {key} = {table.rows}"
        return
    for claim in facts.claims.levels:
        above = claim.level != text.level and f"{text.level}.".startswith(f"{claim.level}." if claim.level else "")
        if above and claim.vocab_size is not None and claim.vocab_size > max(declared):
            outer = dotted(claim.level, "vocab_size")
            what = f"{outer} is {claim.vocab_size:,}, and {key} is {text.vocab_size:,}, which {describe(table)} has"
            what += ": releases and tools that read the first number stop at the shape, or at the loss"
            yield Said(outer, what, f"{CONFIG_FIX}: {outer} = {table.rows}", severity="warning")


_ID_KEY = re.compile(r"(^|_)token_(ids?|index|indices)$")
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "forced_decoder_ids")
OTHER_VOCABULARY = re.compile(r"codebook|codec|t2u")  # in keys of ids that speech models look up in tables of their own
_STRICT = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "decoder_start"))
_SPECIAL = (*_STRICT, *(f"{name}_token_id" for name in ("sep", "cls", "mask", "forced_bos", "forced_eos")))


@rule("B034", "warning", "special ids lie inside the vocabulary")
def special_ids_outside(facts: Facts) -> Told:
    """Every level of config.json, and generation_config.json, name tokens by id: bos, eos, pad, decoder_start and every
    other key that ends in token_id, token_ids or token_index, and the lists suppress_tokens, begin_suppress_tokens,
    forced_decoder_ids, bad_words_ids and force_words_ids. A pad id beyond the tables crashes at the first padded batch,
    and without an end token generation never stops. An id in one of the lists raises an IndexError in generate, or does
    nothing. The placeholder of a picture or sound is an error: most classes look it up before they put the picture's
    vectors there, so that the first picture raises an IndexError (transformers#35683). Gemma 3, PaliGemma and their kin
    replace it first, and are not reported. Neither are ids that Idefics and Mllama look up in rows of their own, nor
    those of a codec. A negative pad id counts rows from the end. Ids go stale when a vocabulary is trimmed, or a
    tokenizer replaced. Ids that are absent are not reported: many families have none.
    What to do: write the ids that the tokenizer has; `tiewise resize` gives a placeholder the row that it lacks.
    Sources: LlamaFactory#6749; skeletoken#108; transformers#35683; transformers#36491; transformers#29836
    """
    rows = [table.rows for table in facts.roles.tables if not facts.roles.packed(table)]
    if not rows:
        return
    room = max(*rows, *facts.vocabularies, _room(facts) or 0)
    places = dict(facts.levels)
    places |= {_GENERATION: facts.generation} if isinstance(facts.generation, Mapping) else {}
    for level, record in places.items():
        strict = _STRICT if level in ("", facts.text.level, _GENERATION) else ()
        for name, value in record.items():
            if not _names_tokens(name) or not (bad := _outside(name, value, room, name in strict)):
                continue
            key = dotted(level, short(name))
            listed = ", ".join(f"{number:,}" if is_id(number) else value_text(number) for number in bad[:4])
            listed += f" and {len(bad) - 4:,} more" if len(bad) > 4 else ""
            what = f"{key} is {listed}; ids are whole numbers from 0 to {room - 1:,}, the largest vocabulary's last"
            placeholder = _ID_KEY.search(name) and name not in _SPECIAL and level != _GENERATION
            if not placeholder:
                yield key, what, f"edit {_GENERATION if level == _GENERATION else CONFIG} by hand: {key}"
            elif not any(family(level.get("model_type")).replaces_placeholders for level in (facts.config, record)):
                fix = f"{facts.command('resize', f'--vocab {max(bad) + 1}')}, or {CONFIG_FIX}: {key}"
                yield Said(key, f"{what}: the first use of this token reads outside the table", fix, severity="error")


def _names_tokens(name: Any) -> bool:
    """Whether the value of a config's key is ids of tokens of the vocabulary."""
    if not isinstance(name, str) or name.startswith("_") or OTHER_VOCABULARY.search(name):  # _: a class keeps it
        return False
    return name in _ID_LISTS or _ID_KEY.search(name) is not None


def _outside(name: str, value: Any, room: int, strict: bool) -> list[Any]:
    """Return those ids of a config's value that none of `room` rows has; if `strict`, also what is no id."""
    if strict:
        listed = value if isinstance(value, list) else [value]
        return [one for one in listed if one is not None and (not is_id(one) or one >= room)]
    if name == "forced_decoder_ids":  # pairs of a position and the id that is forced there
        value = [pair[1] for pair in items_of(list, value) if len(pair) == 2]
    found, waiting = list[int](), [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(one)
        elif is_id(one) and one >= room:
            found.append(one)
    return found


@rule("B035", "warning", "the head's bias is as long as the vocabulary, and one")
def head_biases(facts: Facts) -> Told:
    """A bias of the head has one entry for each row, in the shape that its class gives it; transformers 5 refuses any
    other. Resizing a table without it leaves it short (transformers#35141, skeletoken#108). A bias on a tied causal
    head is noted for another reason: loaders that skip every tensor under a tied head's prefix drop the bias too, and
    the model speaks garbage (vllm#46835). BERT and its kin store the bias under two names, which is healthy while the
    two are equal, and encoders are not meant by that note.
    What to do: take the bias from the source; `tiewise resize` changes tables and bias together.
    Sources: vllm#46835; transformers#35141; skeletoken#108
    """
    roles, refused = facts.roles, facts.misfits
    biases = {bias.name: bias for bias in roles.biases}
    for target, source in roles.ties.items():  # names that the class holds to be one bias
        a, b = biases.get(target), biases.get(source)
        if facts.tied is True and facts.scan and a is not None and b is not None and not facts.same(a, b):
            what = f"{short(target)} is not {short(source)}, and the two are one in this class: loaders differ in which"
            fix = "find out which one was trained, and store that one alone"
            yield Said(short(target), what, fix, severity="error")
    for target, source in facts.fresh:
        if target not in biases and target.endswith("bias"):
            what = f"{short(source)} is stored alone, and an untied model of this class starts {short(target)} anew"
            yield Said(short(target), what, f"store it as {short(target)} too", severity="error")
    if lost := facts.missing_biases:  # several are names of one
        what = f"{' or '.join(map(facts.named, lost))} is not stored: transformers starts the head's bias anew"
        fix = "take the bias from the source, or store zeros if the model was trained without one"
        yield Said(facts.named(lost[0]), what, fix, severity="error")
    generates = any(name.endswith("ForCausalLM") for name in items_of(str, facts.config.get("architectures")))
    rows = {table.rows for table in roles.tables} | facts.vocabularies
    # beside these, vectors under a name of the head's bias, whatever their length
    ends = {*usual().biases, *([f"{module_of(roles.output_name)[0]}.bias"] if roles.output_name is not None else [])}
    biases |= {name: facts.folder.tensors[name] for name in refused}
    for name, tensor in facts.folder.tensors.items():
        if tensor.shape and tensor.shape[:-1] in ((), (1,)) and any(ends_with(name, end) for end in ends):
            biases[name] = tensor
    for bias in biases.values():
        if rows and bias.shape[-1] not in rows:
            what = f"{describe(bias)} has {bias.shape[-1]:,} entries, the tables {names(sorted(map(str, rows)))} rows"
            what += ": transformers refuses to load it" if bias.name in refused else ""
            fix = "take the bias from the source; `tiewise resize` changes tables and bias together"
            yield Said(short(bias.name), what, fix, severity="error" if bias.name in refused else "warning")
        elif bias.name in refused:
            what = f"{describe(bias)} has the shape {list(refused[bias.name])} in its class: transformers refuses it"
            yield Said(short(bias.name), what, "store it in that shape", severity="error")
        elif facts.tied is True and bias.name.endswith("lm_head.bias") and generates:
            what = f"{describe(bias)} belongs to a tied head: a loader that skips tied heads by prefix drops it"
            yield Said(short(bias.name), what, "none needed; vLLM before its fix of #46835 drops it", severity="info")
