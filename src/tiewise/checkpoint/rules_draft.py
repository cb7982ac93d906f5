"""A draft that proposes tokens to a larger model: its maps, its sizes, and whose ids it speaks of: B083 to B087.

EAGLE-3 (arXiv:2503.01840) drafts over the N most frequent of the target's V tokens. Its head has N rows, and two maps
are stored beside it: `d2t` [N], the distance of row i's token from i (token = i + d2t[i]), and `t2d` [V], whether a
token has a row. EAGLE and EAGLE-2 use the target's own head and need no maps. How engines read them: `load_weights` of
vLLM's and of SGLang's `llama_eagle3.py`; how they are made: `process_token_dict_to_mappings` of SpecForge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import architecture, count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import MOST_TOKENS, PIECES, Tokenizer
from tiewise.checkpoint.rule import Said, Told, describe, difference, numbers, rule
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.checkpoint.table_scans import CLOSE, UNRELATED
from tiewise.checkpoint.untrusted import short

AGAIN = "take the draft from its source again, or export it again with the maps that it was trained with"
_DRAFT = re.compile(r"eagle|medusa|dflash|dspark|speculator", re.IGNORECASE)


@dataclass(frozen=True)
class Draft:
    """What a folder says of its draft vocabulary."""

    d2t: Stored | None  # the two maps, where they are stored
    t2d: Stored | None
    size: int | None  # N of the config; None where it names none
    vocabulary: int | None  # V that the draft's ids are of, by its config; None where that does not say

    @property
    def reduced(self) -> bool:
        """Whether it drafts over a part of the vocabulary, and so needs a map."""
        return self.size is not None and self.vocabulary is not None and self.size < self.vocabulary


def draft_of(facts: Facts) -> Draft | None:
    """Return what makes a checkpoint a draft that no loader can use alone; None of a model of its own."""
    last = {name.rpartition(".")[2]: tensor for name, tensor in facts.folder.tensors.items()}
    levels = facts.levels.values()
    size = next((n for level in levels if (n := count(level.get("draft_vocab_size"))) is not None), None)
    maps = last.get("d2t"), last.get("t2d")
    if maps == (None, None) and size is None and not _DRAFT.search(architecture(facts.config) or ""):
        return None
    return Draft(*maps, size, vocabulary_of(facts))


def vocabulary_of(facts: Facts) -> int | None:
    """V by the config, else the rows of the input table; None where neither says."""
    said = (facts.text, *facts.claims.levels)  # a speculator's config has it one level down
    rows = None if facts.roles.counted is None else facts.roles.counted.rows
    return next((claim.vocab_size for claim in said if claim.vocab_size is not None), rows)


def _values(facts: Facts, tensor: Stored | None, kinds: str) -> NDArray[np.int64] | None:
    """A stored map as whole numbers; None where it may not be read, or is none."""
    if tensor is None or not facts.scan or len(tensor.shape) != 1 or tensor.rows > MOST_TOKENS:
        return None
    if tensor.dtype not in kinds.split():
        return None
    with Reader(tensor) as reader:
        return reader.rows().astype(np.int64)


D2T, T2D = "I64 I32 I16", "BOOL U8 I8 I32 I64"  # types of the two maps


@rule("B083", "error", "a draft's map leads each of its rows to a token of its own", kind="draft")
def draft_map(facts: Facts) -> Told:
    """A draft with a vocabulary of its own needs d2t: engines add it to the row's number to get the target's token.
    Where it is missing or was saved before it was set, all distances are zero, every row stands for the token of its
    own number, and nearly no proposal is accepted; nothing else is wrong, and no shape shows it. Token ids stored in
    place of distances lead beyond the vocabulary. Two rows of one token, or tokens that do not rise with the rows, are
    no map that a trainer made: t2d, a mask, gives it the tokens in rising order.
    What to do: store the map that the head was trained with; a map made anew belongs to another head.
    Sources: Automodel#2447; EAGLE#222; EAGLE#258; SpecForge#534; vllm llama_eagle3.py (read)
    """
    draft = draft_of(facts)
    if draft is None or (draft.d2t is None and not draft.reduced):
        return
    if draft.d2t is None:
        what = (
            f"it drafts over {draft.size:,} of {draft.vocabulary:,} tokens, and no d2t says which: engines take row i"
        )
        yield "d2t", f"{what} for token i, and accept nearly nothing", AGAIN
        return
    where, steps = short(draft.d2t.name), _values(facts, draft.d2t, D2T)
    if steps is None:
        if facts.scan:
            yield where, f"{describe(draft.d2t)} is no list of whole numbers", AGAIN
        return
    with np.errstate(over="ignore"):
        ids = steps + np.arange(len(steps))
    most = draft.vocabulary if draft.vocabulary is not None else MOST_TOKENS
    outside = np.flatnonzero((ids < 0) | (ids >= most))
    marked = _values(facts, draft.t2d, T2D)
    if draft.reduced and not steps.any():
        yield where, f"it is all zeros: its {len(ids):,} rows stand for the first {len(ids):,} tokens", AGAIN
    elif marked is not None and np.array_equal(np.flatnonzero(marked), np.sort(steps)) and steps.any() and len(outside):
        what = "it holds the tokens' ids, and engines add them to the row's number"
        yield where, f"{what}: {len(outside):,} rows lead beyond the vocabulary", "store d2t[i] − i in place of d2t[i]"
    elif len(outside):
        first = f"row {outside[0]:,} to {ids[outside[0]]:,}"
        yield where, f"{len(outside):,} of {len(ids):,} rows lead outside the {most:,} tokens ({first})", AGAIN
    elif (distinct := len(np.unique(ids))) < len(ids):
        yield where, f"its {len(ids):,} rows lead to {distinct:,} tokens: some have several rows", AGAIN
    elif (np.diff(ids) < 0).any():
        row = int(np.flatnonzero(np.diff(ids) < 0)[0]) + 1
        what = f"its tokens do not rise with the rows (row {row:,}: token {ids[row]:,} after {ids[row - 1]:,})"
        yield Said(where, f"{what}, as t2d and every trainer that uses it take them to", AGAIN, severity="warning")


@rule("B084", "error", "t2d marks the tokens that d2t leads to", kind="draft")
def draft_marks(facts: Facts) -> Told:
    """t2d picks the target's logits that a draft is trained against, d2t turns its rows into tokens when it is served.
    Where the two differ, the head was trained on other tokens than it proposes: the training's accuracy looks fine and
    acceptance collapses. Engines read d2t alone; a draft without t2d serves, and only cannot be trained on.
    What to do: take both maps from one export.
    Sources: SpecForge#534; SpecForge#602; verl-SpeCo#66
    """
    draft = draft_of(facts)
    if draft is None or draft.d2t is None:
        return
    if draft.t2d is None:
        yield Said("t2d", "d2t is stored without t2d: it serves, and cannot be trained on", AGAIN, severity="info")
        return
    steps, marked = _values(facts, draft.d2t, D2T), _values(facts, draft.t2d, T2D)
    if steps is None or marked is None:
        if facts.scan and marked is None:
            yield short(draft.t2d.name), f"{describe(draft.t2d)} is no list of marks", AGAIN
        return
    with np.errstate(over="ignore"):
        ids = np.unique(steps + np.arange(len(steps)))
    here = np.flatnonzero(marked)
    if len(apart := np.setxor1d(ids, here)):
        what = f"it marks {len(here):,} tokens, and d2t leads to {len(ids):,}: {len(apart):,} are in one alone"
        yield short(draft.t2d.name), f"{what} ({numbers(apart[:4].tolist(), len(apart))})", AGAIN


@rule("B085", "error", "a draft's tables and maps have the rows that its config says", kind="draft")
def draft_sizes(facts: Facts) -> Told:
    """The head and d2t have a row for each of draft_vocab_size tokens, the input table and t2d one for each of
    vocab_size. An engine that builds its modules by the config refuses other shapes, or copies what fits. A draft
    without an input table of its own looks tokens up in the target's, which must be as wide as the draft.
    What to do: correct the config, or export the draft again.
    Sources: SpecForge#76; SpecForge#602; sglang llama_eagle3.py, vllm llama_eagle3.py (read)
    """
    draft, roles = draft_of(facts), facts.roles
    if draft is None or not facts.complete:
        return
    rows, every = draft.size if draft.size is not None else draft.vocabulary, draft.vocabulary
    if rows is not None and every is not None and rows > every:
        yield "config.json", f"draft_vocab_size is {rows:,}, and vocab_size {every:,}", "edit config.json by hand"
    of = "draft_vocab_size" if draft.size is not None else "vocab_size"
    held = [(draft.d2t, rows, of), (draft.t2d, every, "vocab_size")]
    ends = ((roles.output, rows, of), (roles.input, every, "vocab_size"))
    held += [one for one in ends if one[0] is not None and not roles.packed(one[0])]
    for tensor, wanted, said in held:
        if tensor is not None and wanted is not None and tensor.rows != wanted:
            yield short(tensor.name), f"{describe(tensor)} has {tensor.rows:,} rows, and {said} is {wanted:,}", AGAIN
    if draft.reduced and roles.output is None and not facts.tied and not roles.output_end.quantised:
        yield "lm_head", f"draft_vocab_size is {rows:,}, and no head of {rows:,} rows is stored", AGAIN
    shared = None if facts.target is None or roles.input is not None else facts.target.roles.counted
    if shared is not None and facts.text.hidden_size not in (None, shared.shape[-1]):
        what = f"it has no input table and is {facts.text.hidden_size:,} wide; the target's, which it would use, is"
        yield "embed_tokens", f"{what} {describe(shared)}", "give the target that it was trained for"


@rule("B086", "error", "a draft's ids are the target's", kind="draft")
def draft_ids(facts: Facts) -> Told:
    """A proposal is accepted where draft and target mean the same token by an id. Two vocabularies of one size can
    differ in every id: acceptance falls to about 1 %, and no size shows it. Told from both tokenizers, id by id; a
    draft without a tokenizer is told by its input table, which its trainer copied from the target and froze.
    What to do: use the target that the draft was trained for, or train a draft for this one.
    Sources: SpecForge#764; vllm-ascend#9718; sglang#23838; llama.cpp#3812
    """
    target = facts.target
    if target is None:
        return
    ours, theirs, fix = _known(facts.tokenizer), _known(target.tokenizer), "give the target that it was trained for"
    if ours is not None and theirs is not None:
        if ours.fingerprint == theirs.fingerprint:
            return
        one, other = ours.texts, theirs.texts
        wrong = sorted(number for number, text in one.items() if other.get(number) != text)
        if wrong:
            what = f"{len(wrong):,} of its {len(one):,} ids are other tokens in the target, or none"
            there = short(repr(other[wrong[0]]), 30) if wrong[0] in other else "no token"
            what += f": {wrong[0]:,} is {short(repr(one[wrong[0]]), 30)} here and {there} there"
            yield "tokenizer", f"{what} (vocabularies {ours.fingerprint} and {theirs.fingerprint})", fix
        else:
            what = (
                f"{len(other) - len(one):,} tokens of the target have no id in the draft's tokenizer; all others agree"
            )
            yield Said("tokenizer", what, "none needed: it never proposes them", severity="info")
        return
    table, stored = facts.roles.counted, target.roles.counted
    alike = None if table is None or stored is None else facts.compare(table, stored)
    if alike is not None and table is not None:
        what = f"its input table against the target's: {difference(alike)}"
        if alike.kind == UNRELATED:
            yield Said(
                short(table.name), f"{what}. It was trained for another target, or trained on", fix, severity="warning"
            )
        elif alike.kind == CLOSE:
            yield Said(short(table.name), f"{what}, as of a table that was trained on", "none needed", severity="info")
    else:
        what = "nothing here says which tokens its ids are: no tokenizer on both sides whose texts can be read, and no"
        fix = "compare with --target where both folders have their tokenizer.json"
        yield Said("tokenizer", f"{what} input table of the target's shape that may be", fix, severity="info")


def _known(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """A tokenizer that was read and has its tokens' texts; of SentencePiece models only positions are read."""
    return None if tokenizer is None or not tokenizer.base or set(tokenizer.files) & set(PIECES) else tokenizer


@rule("B087", "error", "rows that only one of draft and target has are padding", kind="draft")
def draft_padding(facts: Facts) -> Told:
    """Models of one family pad one vocabulary to different sizes: Qwen 2.5 has 151,936 rows up to 3B and 152,064 from
    7B on, for 151,665 tokens. An engine that compares sizes refuses such a pair, and users then edit configs by hand.
    That is safe where no token lies in the rows that only one of the two has, which the tokenizer shows.
    What to do: pad the smaller with rows of zeros; draft ids stay as they are.
    Sources: vllm#42775; vllm#7252; vllm#13849
    """
    target, own = facts.target, vocabulary_of(facts)
    every = None if target is None else vocabulary_of(target)
    if target is None or own is None or every is None or own == every:
        return
    less, more = sorted((own, every))
    what = f"the draft's vocabulary has {own:,} rows, the target's {every:,}"
    tokenizer = next((one for one in (target.tokenizer, facts.tokenizer) if one is not None and one.count), None)
    if tokenizer is None:
        yield Said(
            "vocab_size",
            f"{what}; no tokenizer says whether tokens lie between",
            "add tokenizer.json",
            severity="warning",
        )
    elif tokenizer.max_id < less:
        smaller = facts if own < every else target
        fix = smaller.command("resize", f"--vocab {more}", "--rows zero")
        fix = fix if draft_of(smaller) is None else "pad its input table and t2d with zeros, and set vocab_size"
        what += f": rows {less:,} to {more - 1:,} hold no token (the last is {tokenizer.max_id:,}), so padding is safe"
        yield Said("vocab_size", what, f"where an engine wants one size: {fix}", severity="info")
    else:
        what = f"{what}, and tokens up to {tokenizer.max_id:,} lie in the rows that only one has"
        yield "vocab_size", what, "give the target that it was trained for"
