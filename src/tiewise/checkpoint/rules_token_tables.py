"""Tables beside the two ends, and drafts, whose tables stand beside another model's: B017, B018, B083 to B085.

EAGLE-3 (arXiv:2503.01840) drafts over the N most frequent of the target's V tokens. Its head has N rows, and two maps
lie beside it: `d2t` [N], the distance of row i's token from i, and `t2d` [V], whether a token has a row. How engines
read them: `llama_eagle3.py` of vLLM and of SGLang; how they are made: `process_token_dict_to_mappings` of SpecForge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import architecture, count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import MOST_TOKENS, PIECES, Tokenizer
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rule import Said, Told, describe, difference, dotted, numbers, rule
from tiewise.checkpoint.stored import FLOATING, Reader, Stored
from tiewise.checkpoint.table_scans import CLOSE, SOME_ROWS, UNRELATED
from tiewise.checkpoint.token_tables import DRAFT_HEAD, MODALITY, MTP_INPUT, MTP_OUTPUT, NGRAM, PER_LAYER, rows_said
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
    yield from _copies(facts, facts.roles)


def _copies(facts: Facts, of: Roles) -> Told:
    """Which tables of further tokens are not those at the same end of a model: the checkpoint's own, or a target."""
    ends = {MTP_INPUT: of.input, MTP_OUTPUT: of.output or of.input}
    for other in facts.roles.others:
        end = ends.get(other.role)
        alike = None if end is None or end.shape != other.tensor.shape else facts.compare(end, other.tensor)
        if end is None or alike is None or not alike.differing:
            continue
        close = alike.kind in (SOME_ROWS, CLOSE)
        what = f"{describe(other.tensor)} is not {short(end.name)}: {difference(alike)}"
        what += "" if close or of is not facts.roles else "; transformers drafts with the main one in its place"
        fix = f"store {short(end.name)} under that name too" if close else "none if it was trained so"
        yield Said(short(other.tensor.name), what, fix, severity="warning" if close else "info")


AGAIN = "take the draft from its source again, or export it again with the maps that it was trained with"
OTHER = "give the target that it was trained for, or train a draft for this one"
# in a class's name; Eagle 2 and 2.5 are vision-language models too
_DRAFT = re.compile(
    r"(eagle|medusa|dflash|dspark)(?!.*(VL|Chat|Conditional))|speculator|nextn|mtp(model)?$", re.IGNORECASE
)


class Draft(NamedTuple):
    """What a folder says of its draft vocabulary; None for what it does not say."""

    map: Stored | None  # d2t, or token_map
    t2d: Stored | None
    size: int | None  # N
    vocabulary: int | None  # V
    reduced: bool  # it drafts over a part of the vocabulary, and so needs a map
    heads: tuple[Stored, ...]  # Medusa's, each [N or V, D]

    @property
    def holds_ids(self) -> bool:
        """Whether the map holds the tokens' ids; d2t holds their distances from the row."""
        return self.map is not None and self.map.name.endswith("token_map")


def draft_of(facts: Facts) -> Draft | None:
    """Return what makes a checkpoint a draft that no loader can use alone; None of a model of its own."""
    last = {name.rpartition(".")[2]: tensor for name, tensor in facts.folder.tensors.items()}
    said = (
        count(level.get(key)) for level in facts.levels.values() for key in ("draft_vocab_size", "truncated_vocab_size")
    )
    size = next((number for number in said if number is not None), None)
    heads = () if facts.roles.input is not None else _draft_heads(facts)  # a whole model may have such heads too
    table, t2d, every = last.get("d2t", last.get("token_map")), last.get("t2d"), vocabulary_of(facts)
    kind = f"{architecture(facts.config)} {facts.text.model_type}"
    if table is t2d is size is None and not heads and not any(map(_DRAFT.search, kind.split())):
        return None
    return Draft(table, t2d, size, every, size is not None and every is not None and size < every, heads)


def _draft_heads(facts: Facts) -> tuple[Stored, ...]:
    heads = (other.tensor for other in facts.roles.others if other.role == DRAFT_HEAD)
    return tuple(head for head in heads if head.dtype in FLOATING and len(head.shape) == 2)


def vocabulary_of(facts: Facts) -> int | None:
    """V by the config, else the rows of the input table, else of Medusa's heads; None where none says."""
    said = (facts.text, *facts.claims.levels)  # a speculator's config has it one level down
    tables = (facts.roles.counted, *_draft_heads(facts))
    rows = next((table.rows for table in tables if table is not None), None)
    return next((claim.vocab_size for claim in said if claim.vocab_size is not None), rows)


def _values(facts: Facts, tensor: Stored | None) -> NDArray[np.int64] | None:
    """A stored map; None where it may not be read, or is no list of whole numbers."""
    if tensor is None or not facts.scan or len(tensor.shape) != 1 or tensor.rows > MOST_TOKENS:
        return None
    if tensor.dtype not in ("I64", "I32", "I16", "I8", "U8", "BOOL"):
        return None
    with Reader(tensor) as reader:
        return reader.rows().astype(np.int64)


@rule("B083", "error", "a draft's maps lead each of its rows to a token of its own", kind="draft")
def draft_maps(facts: Facts) -> Told:
    """Engines add d2t to the row's number to get the target's token. Where it is missing or was saved before it was
    set, row i stands for token i and nearly no proposal is accepted; nothing else is wrong, and no shape shows it.
    Token ids in place of distances lead beyond the vocabulary. Rows of one token, or tokens that do not rise with the
    rows, are no map that a trainer made. t2d picks the logits that the head is trained against: where it marks other
    tokens than d2t leads to, the two are of two exports. Engines do without t2d; a trainer does not.
    What to do: store the maps that the head was trained with; new ones belong to another head.
    Sources: Automodel#2447; EAGLE#222; EAGLE#258; SpecForge#534; verl-SpeCo#66; vllm llama_eagle3.py (read)
    """
    draft = draft_of(facts)
    if draft is None or (draft.map is None and not draft.reduced):
        return
    if draft.map is None:
        name = "token_map" if draft.heads else "d2t"
        what = f"it drafts over {draft.size:,} of {draft.vocabulary:,} tokens, and no {name} says which"
        yield name, f"{what}: engines take row i for token i, and accept nearly nothing", AGAIN
        return
    if draft.t2d is None and not draft.holds_ids:
        yield Said("t2d", "d2t is stored without t2d: it serves, and cannot be trained on", AGAIN, severity="info")
    where, steps, marks = short(draft.map.name), _values(facts, draft.map), _values(facts, draft.t2d)
    for one, read in ((draft.map, steps), (draft.t2d, marks)):
        if one is not None and read is None and facts.scan:
            yield short(one.name), f"{describe(one)} is no list of whole numbers", AGAIN
    if steps is None:
        return
    most = draft.vocabulary if draft.vocabulary is not None else MOST_TOKENS
    ids = steps if draft.holds_ids else steps + np.arange(len(steps))
    outside, falls = np.flatnonzero((ids < 0) | (ids >= most)), np.flatnonzero(np.diff(ids) < 0)
    here = None if marks is None else np.flatnonzero(marks)
    if draft.reduced and not steps.any() and not draft.holds_ids:
        yield where, f"{where} is all zeros: its {len(ids):,} rows stand for the first {len(ids):,} tokens", AGAIN
    elif len(outside) and here is not None and np.array_equal(here, np.sort(steps)):
        what = f"{where} holds the tokens' ids, and engines add them to the row's number"
        yield where, what, f"store {where}[i] − i for row i"
    elif len(outside):
        first = f"row {outside[0]:,} to {ids[outside[0]]:,}"
        yield where, f"{len(outside):,} of {len(ids):,} rows of {where} lead outside {most:,} tokens ({first})", AGAIN
    elif (distinct := len(np.unique(ids))) < len(ids):
        yield where, f"the {len(ids):,} rows of {where} lead to {distinct:,} tokens: some have several rows", AGAIN
    elif len(falls) and not draft.holds_ids:
        pair = f"row {falls[0] + 1:,}: token {ids[falls[0] + 1]:,} after {ids[falls[0]]:,}"
        yield Said(where, f"the tokens of {where} do not rise with the rows ({pair})", AGAIN, severity="warning")
    if draft.t2d is not None and here is not None and len(apart := np.setxor1d(ids, here)):
        what = f"t2d marks other tokens than d2t leads to: {len(apart):,} are in one of the two alone"
        yield short(draft.t2d.name), f"{what} ({numbers(apart[:4].tolist(), len(apart))})", AGAIN


@rule("B084", "error", "a draft has the rows that its config and its target say", kind="draft")
def draft_sizes(facts: Facts) -> Told:
    """The head and d2t have a row for each of draft_vocab_size tokens, the input table and t2d one for each of
    vocab_size; a draft without an input table looks tokens up in the target's, or reads its hidden states (Medusa), and
    must be as wide. Each head of Medusa has a row for every token, or for each of truncated_vocab_size with a
    token_map. Engines refuse other shapes, or copy what fits. Models of one family pad one vocabulary to different
    sizes (Qwen 2.5 has 151,936 rows up to 3B and 152,064 from 7B on, for 151,665 tokens): engines that compare sizes
    refuse such a pair, and users edit configs by hand. That is safe where no token lies in the rows that only one has,
    which the tokenizer shows.
    What to do: export the draft again; pad the smaller of the two with rows of zeros.
    Sources: SpecForge#76; SpecForge#602; vllm#42775; vllm#7252; vllm#13849; sglang llama_eagle3.py, vllm medusa.py
    (01dbb08), Medusa medusa_model.py (e2a5d20) (read)
    """
    draft, roles, target, own = draft_of(facts), facts.roles, facts.target, vocabulary_of(facts)
    if draft is not None and facts.complete:
        of, rows = "truncated_vocab_size" if draft.heads else "draft_vocab_size", draft.size
        if rows is None:
            of, rows = "vocab_size", own
        if rows is not None and own is not None and rows > own:
            yield "config.json", f"{of} is {rows:,}, and vocab_size {own:,}", "edit config.json by hand"
        held = [(tensor, rows, of) for tensor in (draft.map, roles.output)]
        held += [(head, own if draft.map and head.rows == own else rows, of) for head in draft.heads]  # the map cuts it
        held += [(tensor, own, "vocab_size") for tensor in (draft.t2d, roles.input)]
        held += [(other.tensor, own, "vocab_size") for other in roles.others if other.role in (MTP_INPUT, MTP_OUTPUT)]
        for tensor, wanted, said in held:
            packed = tensor in roles.pair and roles.packed(tensor)
            if tensor is not None and wanted not in (None, tensor.rows) and not packed:
                what = f"{describe(tensor)} has {tensor.rows:,} rows, and {said} is {wanted:,}"
                yield short(tensor.name), what, AGAIN
        no_head = roles.output is None and not draft.heads and not roles.output_end.quantised
        if draft.reduced and no_head and not facts.tied:
            yield "lm_head", f"draft_vocab_size is {rows:,}, and no head of {rows:,} rows is stored", AGAIN
        shared = None if target is None or roles.input is not None else target.roles.counted
        width = next((head.shape[1] for head in draft.heads), facts.text.hidden_size)
        if shared is not None and width not in (None, shared.shape[-1]):
            where, reads = ("medusa_head", "hidden states") if draft.heads else ("embed_tokens", "input table")
            what = f"it is {width:,} wide and reads the target's {reads}, and the target's table is {describe(shared)}"
            yield where, what, OTHER
        planned, stored = count(facts.config.get("medusa_num_heads", facts.config.get("num_heads"))), len(draft.heads)
        if stored and planned is not None and planned != stored:
            what = f"its config says {planned:,} heads, and {stored:,} are stored"
            yield Said(
                "config.json", what, "edit config.json by hand", severity="error" if planned > stored else "info"
            )
    every = None if target is None else vocabulary_of(target)
    if target is None or own is None or every is None or own == every:
        return
    (less, smaller), (more, _) = sorted(((own, facts), (every, target)), key=lambda one: one[0])
    what = f"the draft's vocabulary has {own:,} rows, the target's {every:,}"
    tokenizer = next((one for one in (target.tokenizer, facts.tokenizer) if one is not None and one.count), None)
    if tokenizer is None:
        what += "; no tokenizer says whether tokens lie between"
        yield Said("vocab_size", what, "put the target's tokenizer.json beside it", severity="warning")
    elif tokenizer.max_id < less:
        fix = "pad its input table and t2d with zeros, and set vocab_size"
        fix = smaller.command("resize", f"--vocab {more}", "--rows zero") if draft_of(smaller) is None else fix
        what += f": rows {less:,} to {more - 1:,} hold no token (the last is {tokenizer.max_id:,}), so padding is safe"
        yield Said("vocab_size", what, f"where an engine wants one size: {fix}", severity="info")
    else:
        yield "vocab_size", f"{what}, and tokens up to {tokenizer.max_id:,} lie in the rows that only one has", OTHER


def _known(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """A tokenizer whose tokens' texts were read; of SentencePiece models other than tokenizer.model they are not."""
    return None if tokenizer is None or not tokenizer.base or set(tokenizer.files) & set(PIECES[1:]) else tokenizer


@rule("B085", "error", "a draft's ids are the target's", kind="draft")
def draft_ids(facts: Facts) -> Told:
    """A proposal is accepted where draft and target mean the same token by an id. Two vocabularies of one size can
    differ in every id: acceptance falls to about 1 %, and no size shows it. Told from both tokenizers, id by id; a
    draft without a tokenizer is told by its input table, which its trainer copied from the target and froze. A draft of
    the layers that predict further tokens brings copies of both tables (B018). A Medusa head begins as a copy of the
    target's head: one that still is has not been trained, or was meant so (original_lm_head of vLLM's config).
    What to do: use the target that the draft was trained for, or train a draft for this one.
    Sources: SpecForge#764; vllm-ascend#9718; sglang#23838; llama.cpp#3812
    """
    target = facts.target
    if target is None:
        return
    yield from _copies(facts, target.roles) if facts.roles.input is None else ()
    head = target.roles.output or target.roles.input
    for each in _draft_heads(facts):
        alike = None if head is None or head.shape != each.shape else facts.compare(each, head)
        if head is not None and alike is not None and not alike.differing:
            what = f"{describe(each)} is {short(head.name)} of the target, row by row"
            yield Said(short(each.name), what, "none if its blocks alone were to be trained", severity="info")
    ours, theirs = _known(facts.tokenizer), _known(target.tokenizer)
    copy = next((other.tensor for other in facts.roles.others if other.role == MTP_INPUT), None)
    tables = [one for one in (facts.roles.counted or copy, target.roles.counted) if one is not None]
    rows = min((one.rows for one in tables), default=0)  # of the longer one the first: it may be padded
    ends = [one.start + one.nbytes // max(1, one.rows) * rows for one in tables]
    tables = [replace(one, shape=(rows, *one.shape[1:]), end=end) for one, end in zip(tables, ends, strict=True)]
    if ours is not None and theirs is not None:
        one, other = ours.texts, theirs.texts
        if (PIECES[0] in ours.files) is not (PIECES[0] in theirs.files):  # a conversion writes Gemma's tab as it is
            one, other = (
                {number: "\t" if text == "<0x09>" else text for number, text in texts.items()} for texts in (one, other)
            )
        wrong = sorted(number for number, text in one.items() if other.get(number) != text)
        if wrong:
            there = short(repr(other[wrong[0]]), 30) if wrong[0] in other else "no token"
            what = f"{len(wrong):,} of its {len(one):,} ids are other tokens in the target, or none"
            what += f": {wrong[0]:,} is {short(repr(one[wrong[0]]), 30)} here and {there} there"
            yield "tokenizer", f"{what} (vocabularies {ours.fingerprint} and {theirs.fingerprint})", OTHER
        elif lacking := len(other) - len(one):
            what = f"{lacking:,} tokens of the target have no id in the draft's tokenizer; all others agree"
            yield Said("tokenizer", what, "none needed: it never proposes them", severity="info")
    elif len(tables) == 2 and (alike := facts.compare(*tables)) is not None:
        if alike.kind == UNRELATED and copy is None:  # of a copy it is said above
            what = f"its input table is not the target's: {difference(alike)}"
            yield Said(short(tables[0].name), what, OTHER, severity="warning")
    else:
        what = "nothing here says whose ids it has: no two tokenizers with texts, no two input tables to compare"
        yield Said("tokenizer", what, "put each model's own tokenizer.json beside it", severity="info")
