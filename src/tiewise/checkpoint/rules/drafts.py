"""Drafts, whose tables stand beside another model's: B083 to B085.

EAGLE-3 (arXiv:2503.01840) drafts over the N most frequent of the target's V tokens. Its head has N rows, and two maps
lie beside it: `d2t` [N], the distance of row i's token from i, and `t2d` [V], whether a token has a row. How engines
read them: `llama_eagle3.py` of vLLM and of SGLang; how they are made: `process_token_dict_to_mappings` of SpecForge.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import MOST_TOKENS, PIECES, Tokenizer
from tiewise.checkpoint.indexed_tensors import MTP_INPUT, MTP_OUTPUT
from tiewise.checkpoint.rules.rule import CONFIG_FIX, Said, Told, copies, describe, difference, numbers, rule
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import UNRELATED
from tiewise.checkpoint.untrusted import short

AGAIN = "take the draft from its source again, or export it again with the maps that it was trained with"
OTHER = "give the target that it was trained for, or train a draft for this one"


def _values(facts: Facts, tensor: Stored | None) -> NDArray[np.int64] | None:
    """A stored map; None where it may not be read, or is no list of whole numbers."""
    if tensor is None or not facts.scan or len(tensor.shape) != 1 or tensor.rows > MOST_TOKENS:
        return None
    if tensor.dtype not in ("I64", "I32", "I16", "I8", "U8", "BOOL"):
        return None
    return tensor.read().astype(np.int64)


@rule("B083", "error", "a draft's maps lead each of its rows to a token of its own", kind="draft", reads="the maps")
def draft_maps(facts: Facts) -> Told:
    """Engines add d2t to the row's number to get the target's token. Where it is missing or was saved before it was
    set, row i stands for token i and nearly no proposal is accepted; nothing else is wrong, and no shape shows it.
    Token ids in place of distances lead beyond the vocabulary. Rows of one token, or tokens that do not rise with the
    rows, are no map that a trainer made. t2d picks the logits that the head is trained against: where it marks other
    tokens than d2t leads to, the two are of two exports. Engines do without t2d; a trainer does not.
    What to do: store the maps that the head was trained with; new ones belong to another head.
    Sources: Automodel#2447; EAGLE#222; EAGLE#258; SpecForge#534; verl-SpeCo#66; vllm llama_eagle3.py (read)
    """
    draft, every = facts.draft, facts.vocabulary
    if draft is None or (draft.map is None and not draft.reduced):
        return
    if draft.map is None:
        name = "token_map" if draft.heads else "d2t"
        what = f"it drafts over {draft.size:,} of {every:,} tokens, and no {name} says which"
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
    most = every if every is not None else MOST_TOKENS
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
    must be as wide. A config that says draft_vocab_size promises a head: where none is stored and the flag is false,
    SGLang leaves it random and accepts no draft (sglang#27908). EAGLE and EAGLE-2 say no such size, and all engines
    give them the target's head. Each head of Medusa has a row for every token, or for each of truncated_vocab_size with
    a token_map. Engines refuse other shapes, or copy what fits. Models of one family pad one vocabulary to different
    sizes (Qwen 2.5 has 151,936 rows up to 3B and 152,064 from 7B on, for 151,665 tokens): engines that compare sizes
    refuse such a pair, and users edit configs by hand. That is safe where no token lies in the rows that only one has,
    which the tokenizer shows.
    What to do: export the draft again; pad the smaller of the two with rows of zeros.
    Sources: SpecForge#76; SpecForge#602; sglang#27908; vllm#28549; vllm#42775; vllm#7252; vllm#13849; sglang
    llama_eagle3.py, vllm medusa.py
    (01dbb08), Medusa medusa_model.py (e2a5d20) (read)
    """
    draft, roles, target, own = facts.draft, facts.roles, facts.target, facts.vocabulary
    if draft is not None and facts.complete:
        of, rows = "truncated_vocab_size" if draft.heads else "draft_vocab_size", draft.size
        of, rows = ("vocab_size", own) if rows is None else (of, rows)
        if rows is not None and own is not None and rows > own:
            yield "config.json", f"{of} is {rows:,}, and vocab_size {own:,}", CONFIG_FIX
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
        if draft.size is not None and no_head and not facts.tied:
            what = f"{of} is {rows:,}, and no head of {rows:,} rows is stored"
            borrowed = ": vLLM since #28549 (November 2025) takes the target's head, and SGLang draws one at random"
            yield "lm_head", what + ("" if draft.reduced else borrowed), AGAIN
        shared = None if target is None or roles.input is not None else target.roles.counted
        width = next((head.shape[1] for head in draft.heads), facts.text.hidden_size)
        if shared is not None and width not in (None, shared.shape[-1]):
            where, reads = ("medusa_head", "hidden states") if draft.heads else ("embed_tokens", "input table")
            what = f"it is {width:,} wide and reads the target's {reads}, and the target's table is {describe(shared)}"
            yield where, what, OTHER
        planned, stored = count(facts.config.get("medusa_num_heads", facts.config.get("num_heads"))), len(draft.heads)
        if stored and planned is not None and planned != stored:
            what = f"its config says {planned:,} heads, and {stored:,} are stored"
            yield Said("config.json", what, CONFIG_FIX, severity="error" if planned > stored else "info")
    every = None if target is None else target.vocabulary
    if target is None or own is None or every is None or own == every:
        return
    (less, smaller), (more, _) = sorted(((own, facts), (every, target)), key=lambda one: one[0])
    what = f"the draft's vocabulary has {own:,} rows, the target's {every:,}"
    tokenizer = next((one for one in (target.tokenizer, facts.tokenizer) if one is not None and one.max_id >= 0), None)
    if tokenizer is None:
        what += "; no tokenizer says whether tokens lie between"
        yield Said("vocab_size", what, "put the target's tokenizer.json beside it", severity="warning")
    elif tokenizer.max_id < less:
        fix = "pad its input table and t2d with zeros, and set vocab_size"
        fix = smaller.command("resize", f"--vocab {more}", "--rows zero") if smaller.draft is None else fix
        what += f": rows {less:,} to {more - 1:,} hold no token (the last is {tokenizer.max_id:,}), so padding is safe"
        yield Said("vocab_size", what, f"where an engine wants one size: {fix}", severity="info")
    else:
        yield "vocab_size", f"{what}, and tokens up to {tokenizer.max_id:,} lie in the rows that only one has", OTHER


def _known(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """A tokenizer whose tokens' texts were read; of SentencePiece models other than tokenizer.model they are not."""
    return None if tokenizer is None or not tokenizer.base or set(tokenizer.files) & set(PIECES[1:]) else tokenizer


@rule("B085", "error", "a draft's ids are the target's", kind="draft", reads="tokenizers, else the input tables")
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
    yield from copies(facts, target.roles) if facts.roles.input is None else ()
    head = target.roles.output or target.roles.input
    for each in facts.draft_heads:
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
            tab = {"<0x09>": "\t"}
            one, other = ({number: tab.get(text, text) for number, text in both.items()} for both in (one, other))
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
