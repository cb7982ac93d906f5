"""Drafts, whose tables belong to another model's vocabulary: B083 to B085.

EAGLE-3 (arXiv:2503.01840) drafts over the N most frequent of the target's V tokens. Its head has N rows, and two maps
lie next to it: `d2t` [N], the distance of row i's token from i, and `t2d` [V], whether a token has a row. How engines
read them: `llama_eagle3.py` of vLLM and of SGLang; how they are made: `process_token_dict_to_mappings` of SpecForge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import positive_int
from tiewise.checkpoint.draft import Draft
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.indexed_tensors import MTP_INPUT, MTP_OUTPUT
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    Observation,
    Observations,
    Severity,
    describe,
    difference,
    differing_copies,
    further_tables,
    numbers,
    rule,
)
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import UNRELATED, TableLikeness
from tiewise.checkpoint.tokenizer_ids import MOST_TOKENS, PIECES, Tokenizer
from tiewise.checkpoint.untrusted import short

AGAIN = "take the draft from its source again, or export it again with the maps that it was trained with"
OTHER = "give the target that it was trained for, or train a draft for this one"


@rule("B083", "error", "a draft's maps lead each row to a different token", kind="draft", reads="the maps")
def draft_maps(facts: Facts) -> Observations:
    """Engines add d2t to the row's number to get the target's token. If d2t is missing or was saved before it was set,
    row i means token i and nearly no proposal is accepted. Nothing else is wrong, and no shape shows it. Token ids
    instead of distances lead beyond the vocabulary. No trainer writes a map with two rows for one token, or with tokens
    that do not rise with the rows. t2d picks the logits that the head is trained against. If it marks other tokens than
    d2t leads to, the two come from different exports. Engines need no t2d; a trainer does.
    What to do: store the maps that the head was trained with; new ones belong to another head.
    Sources: Automodel#2447; EAGLE#222; EAGLE#258; SpecForge#534; verl-SpeCo#66; vllm llama_eagle3.py (read)
    """
    draft = facts.draft
    if draft is None:
        return
    if draft.map is not None:
        yield from _map_findings(facts, draft, draft.map)
    elif draft.reduced:
        name = "d2t"
        if draft.heads:
            name = "token_map"
        problem = f"the draft proposes {draft.size:,} of {facts.vocabulary:,} tokens, and their list {name} is missing"
        yield name, f"{problem}. Engines then take row i for token i, and reject nearly every proposal", AGAIN


def _map_findings(facts: Facts, draft: Draft, stored: Stored) -> Observations:
    """Report the faults of the map `stored` and of the marks next to it."""
    marks = draft.t2d
    if marks is None and not draft.holds_ids:
        yield Observation(
            "t2d", "d2t is stored without t2d: it serves, and cannot be trained on", AGAIN, severity="info"
        )
    if not facts.scan:
        return
    yield from _no_integers(stored)
    marked = None
    if marks is not None:
        yield from _no_integers(marks)
        marked = _marked(marks)
    if not _are_integers(stored):
        return
    draft_map = _DraftMap(short(stored.name), _integers(stored), draft.holds_ids, marked)
    vocabulary = facts.vocabulary
    if vocabulary is None:
        vocabulary = MOST_TOKENS
    yield from _map_faults(draft_map, draft.reduced, vocabulary)
    if marks is not None and marked is not None:
        yield from _other_marks(short(marks.name), draft_map.tokens(), marked)


_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


def _are_integers(tensor: Stored) -> bool:
    """Return whether a stored map is a list of integers, no longer than any vocabulary."""
    if len(tensor.shape) != 1 or tensor.rows > MOST_TOKENS:
        return False
    return tensor.dtype in _INTEGERS


def _no_integers(tensor: Stored) -> Observations:
    """Report a stored map that is no list of integers."""
    if not _are_integers(tensor):
        yield short(tensor.name), f"{describe(tensor)} must be a list of whole numbers", AGAIN


def _integers(tensor: Stored) -> NDArray[np.int64]:
    """Return the values of a stored list of integers."""
    return tensor.read().astype(np.int64)


def _marked(marks: Stored) -> NDArray[np.int64] | None:
    """Return the tokens that t2d marks; None if it is no list of integers."""
    if not _are_integers(marks):
        return None
    return np.flatnonzero(_integers(marks))


class _DraftMap(NamedTuple):
    """The map from the rows of a draft to tokens of the target."""

    name: str  # name of the tensor, as findings print it
    steps: NDArray[np.int64]  # [N] values as stored
    holds_ids: bool  # True if the values are token ids, False if they are distances from the row's number
    marked: NDArray[np.int64] | None  # tokens that t2d marks; None if it was not read

    def tokens(self) -> NDArray[np.int64]:
        """Return the token of each row [N]."""
        if self.holds_ids:
            return self.steps
        return self.steps + np.arange(len(self.steps))

    @property
    def marks_steps(self) -> bool:
        """Return whether t2d marks just the numbers that are stored as steps: they are tokens' ids."""
        return self.marked is not None and np.array_equal(self.marked, np.sort(self.steps))


def _map_faults(draft_map: _DraftMap, is_reduced: bool, vocabulary: int) -> Observations:
    """Report the first fault of a map; valid tokens are below `vocabulary`."""
    where, tokens = draft_map.name, draft_map.tokens()
    rows = f"{len(tokens):,}"
    has_steps = draft_map.holds_ids or bool(draft_map.steps.any())
    if is_reduced and not has_steps:
        yield where, f"{where} is all zeros, so its {rows} rows stand for the first {rows} tokens", AGAIN
        return
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if len(outside):
        yield _leads_outside(draft_map, outside, vocabulary)
        return
    distinct = len(np.unique(tokens))
    if distinct < len(tokens):
        yield where, f"several rows of {where} are one token: {rows} rows lead to {distinct:,} tokens", AGAIN
    elif not draft_map.holds_ids:
        yield from _falling_tokens(where, tokens)


def _leads_outside(draft_map: _DraftMap, outside: NDArray[np.int64], vocabulary: int) -> Observation:
    """Return the finding about rows that lead outside the vocabulary.

    A frequent cause is a map that stores ids instead of distances.
    """
    where = draft_map.name
    if draft_map.marks_steps:
        problem = f"{where} stores ids, and engines expect the difference between id and row"
        return Observation(where, problem, f"store {where}[i] − i for row i")
    tokens = draft_map.tokens()
    row = outside[0]
    problem = f"{len(outside):,} of {len(tokens):,} rows of {where} lead outside the {vocabulary:,} tokens"
    problem += f" (row {row:,} to token {tokens[row]:,})"
    return Observation(where, problem, AGAIN)


def _falling_tokens(where: str, tokens: NDArray[np.int64]) -> Observations:
    """Report a map whose tokens do not rise with its rows."""
    falls = np.flatnonzero(np.diff(tokens) < 0)
    if len(falls):
        row = falls[0] + 1
        pair = f"row {row:,}: token {tokens[row]:,} after {tokens[row - 1]:,}"
        problem = f"the tokens of {where} are not in ascending order ({pair})"
        yield Observation(where, problem, AGAIN, severity="warning")


def _other_marks(where: str, tokens: NDArray[np.int64], marked: NDArray[np.int64]) -> Observations:
    """Report that t2d marks other tokens than the map leads to."""
    apart = np.setxor1d(tokens, marked)
    if len(apart):
        problem = f"t2d and d2t name different tokens: {len(apart):,} are in only one of the two"
        yield where, f"{problem} ({numbers(apart[:4].tolist(), len(apart))})", AGAIN


@rule("B084", "error", "a draft has the rows that its config and its target say", kind="draft")
def draft_sizes(facts: Facts) -> Observations:
    """The head and d2t have a row for each of draft_vocab_size tokens. The input table and t2d have a row for each of
    vocab_size tokens. A draft without an input table looks tokens up in the target's, or reads its hidden states
    (Medusa), and must be as wide. A config with draft_vocab_size promises a head. If none is stored and the flag is
    false, SGLang leaves it random and accepts no draft (sglang#27908). EAGLE and EAGLE-2 state no such size, and all
    engines give them the target's head. Each head of Medusa has a row for every token, or for each of
    truncated_vocab_size with a token_map. Engines refuse other shapes, or copy what fits. Models of one family pad one
    vocabulary to different sizes (Qwen 2.5 has 151,936 rows up to 3B and 152,064 from 7B on, for 151,665 tokens):
    engines that compare sizes refuse such a pair, and users edit configs by hand. That is safe if no token has a row
    that only one of the two has; the tokenizer shows it.
    What to do: export the draft again; pad the smaller of the two with rows of zeros.
    Sources: SpecForge#76; SpecForge#602; sglang#27908; vllm#28549; vllm#42775; vllm#7252; vllm#13849; sglang
    llama_eagle3.py, vllm medusa.py (01dbb08), Medusa medusa_model.py (e2a5d20) (read)
    """
    draft, target = facts.draft, facts.target
    if draft is not None and facts.is_complete:
        size = _draft_size(facts, draft)
        yield from _wrong_rows(facts, draft, size)
        yield from _promised_head(facts, draft, size)
        if target is not None:
            yield from _other_width(facts, draft, target)
        yield from _wrong_head_count(facts, draft)
    if target is not None:
        yield from _other_vocabulary(facts, target)


class _Size(NamedTuple):
    """A number of rows, and the key of the config that gives it."""

    key: str
    rows: int | None  # None if the config does not give it


def _draft_size(facts: Facts, draft: Draft) -> _Size:
    """Return the number of tokens that a draft chooses from: its draft size, else the vocabulary."""
    if draft.size is None:
        return _Size("vocab_size", facts.vocabulary)
    if draft.heads:
        return _Size("truncated_vocab_size", draft.size)
    return _Size("draft_vocab_size", draft.size)


def _wrong_rows(facts: Facts, draft: Draft, size: _Size) -> Observations:
    """Report tensors whose rows the config contradicts, and a draft larger than its vocabulary."""
    vocabulary = _Size("vocab_size", facts.vocabulary)
    if size.rows is None:
        return  # the size of the vocabulary is unknown too
    if vocabulary.rows is not None and size.rows > vocabulary.rows:
        problem = f"{size.key} is {size.rows:,}, more than vocab_size, {vocabulary.rows:,}"
        yield "config.json", problem, CONFIG_FIX
    for tensor in _tensors_of_draft(facts, draft, vocabulary):
        yield from _other_rows(facts, tensor, size)
    for tensor in _tensors_of_vocabulary(facts, draft):
        yield from _other_rows(facts, tensor, vocabulary)


def _other_rows(facts: Facts, tensor: Stored, expected: _Size) -> Observations:
    """Report a tensor that has other rows than the config says.

    The shape of a packed table does not show its rows.
    """
    if expected.rows in (None, tensor.rows):
        return
    roles = facts.roles
    if tensor in roles.one_table_per_end and roles.is_packed(tensor):
        return
    problem = f"{short(tensor.name)} has {tensor.rows:,} rows, and {expected.key} is {expected.rows:,}"
    yield short(tensor.name), problem, AGAIN


def _tensors_of_draft(facts: Facts, draft: Draft, vocabulary: _Size) -> list[Stored]:
    """Return every tensor with a row for each token that the draft proposes."""
    tensors = list[Stored]()
    if draft.map is not None:
        tensors.append(draft.map)
    if facts.roles.output is not None:
        tensors.append(facts.roles.output)
    for head in draft.heads:
        is_picked_from = draft.map is not None and head.rows == vocabulary.rows
        if not is_picked_from:
            tensors.append(head)
    return tensors


def _tensors_of_vocabulary(facts: Facts, draft: Draft) -> list[Stored]:
    """Return every tensor with a row for each token of the target."""
    tensors = list[Stored]()
    if draft.t2d is not None:
        tensors.append(draft.t2d)
    if facts.roles.input is not None:
        tensors.append(facts.roles.input)
    return tensors + further_tables(facts, MTP_INPUT, MTP_OUTPUT)


def _promised_head(facts: Facts, draft: Draft, size: _Size) -> Observations:
    """Report that a config promises a head of the draft's size, and none is stored."""
    if draft.size is None or facts.tied:
        return
    if facts.roles.output is not None or facts.roles.output_end.quantised:
        return
    if draft.heads:
        return
    problem = f"{size.key} is {draft.size:,}, and no head of {draft.size:,} rows is stored"
    if not draft.reduced:
        problem += ". vLLM since #28549 (November 2025) uses the target's head, and SGLang draws one at random"
    yield "lm_head", problem, AGAIN


def _other_width(facts: Facts, draft: Draft, target: Facts) -> Observations:
    """Report a draft without an input table that is not as wide as the target's."""
    table = target.roles.plain_input_table
    if facts.roles.input is not None or table is None:
        return
    where, reads, width = "embed_tokens", "input table", facts.text.hidden_size
    if draft.heads:
        where, reads, width = "medusa_head", "hidden states", draft.heads[0].shape[1]
    if width is not None and width != table.shape[-1]:
        problem = f"the draft is {width:,} wide, and the target {table.shape[-1]:,}"
        problem += f". It reads the target's {reads}; the target's table is {describe(table)}"
        yield where, problem, OTHER


def _wrong_head_count(facts: Facts, draft: Draft) -> Observations:
    """Report that a config of Medusa gives another number of heads than are stored."""
    stored = len(draft.heads)
    planned = positive_int(facts.config.get("medusa_num_heads", facts.config.get("num_heads")))
    if planned is None or stored in (0, planned):
        return
    severity: Severity = "info"
    if planned > stored:
        severity = "error"
    problem = f"its config says {planned:,} heads, and {stored:,} are stored"
    yield Observation("config.json", problem, CONFIG_FIX, severity=severity)


def _other_vocabulary(facts: Facts, target: Facts) -> Observations:
    """Report that draft and target have vocabularies of two sizes.

    It is an error if tokens have rows that only one of the two has.
    """
    ours, theirs = facts.vocabulary, target.vocabulary
    if ours is None or theirs is None:
        return
    if ours == theirs:
        return
    where = "vocab_size"
    problem = f"the draft's vocabulary has {ours:,} rows, the target's {theirs:,}"
    last = _last_token(target, facts)
    if last is None:
        problem += "; without a tokenizer, the rows in use are unknown"
        yield Observation(where, problem, "copy the target's tokenizer.json into its folder", severity="warning")
        return
    less, more = sorted((ours, theirs))
    if last >= less:
        yield where, f"{problem}, and tokens up to {last:,} use rows that only one of the two has", OTHER
        return
    smaller = facts
    if theirs < ours:
        smaller = target
    remedy = "pad its input table and t2d with zeros, and set vocab_size"
    if smaller.draft is None:
        remedy = smaller.command("vocab resize", f"--vocab {more}", "--rows zero")
    problem += f". Rows {less:,} to {more - 1:,} have no token (the last is {last:,}), so padding is safe"
    yield Observation(where, problem, f"if an engine needs one size: {remedy}", severity="info")


def _last_token(*models: Facts) -> int | None:
    """Return the largest id of the first tokenizer that has any; None without one."""
    for model in models:
        tokenizer = model.tokenizer
        if tokenizer is not None and tokenizer.max_id >= 0:
            return tokenizer.max_id
    return None


@rule("B085", "error", "a draft's ids are the target's", kind="draft", reads="tokenizers, else the input tables")
def draft_ids(facts: Facts) -> Observations:
    """A proposal is accepted only if its id is the same token in the target. Two vocabularies of one size can differ in
    every id: acceptance falls to about 1 %, and no size shows it. The rule compares both tokenizers, id by id. For a
    draft without a tokenizer it compares the input table, which the draft's trainer copied from the target and froze. A
    draft of the layers that predict further tokens contains copies of both tables (B018). A Medusa head starts as a
    copy of the target's head. One that still is a copy was never trained, or is meant to be one (original_lm_head of
    vLLM's config).
    What to do: use the target that the draft was trained for, or train a draft for this one.
    Sources: SpecForge#764; vllm-ascend#9718; sglang#23838; llama.cpp#3812
    """
    target = facts.target
    if target is None:
        return
    if facts.roles.input is None:
        yield from differing_copies(facts, target.roles)
    yield from _heads_of_target(facts, target)
    ours, theirs = _with_texts(facts.tokenizer), _with_texts(target.tokenizer)
    if ours is not None and theirs is not None:
        yield from _other_tokens(ours, theirs)
    else:
        yield from _other_input_table(facts, target)


def _heads_of_target(facts: Facts, target: Facts) -> Observations:
    """Report heads of Medusa that are copies of the target's head."""
    head = target.roles.output or target.roles.input
    if head is None:
        return
    for draft_head in facts.draft_heads:
        if draft_head.shape != head.shape:
            continue
        alike = facts.compare(draft_head, head)
        if alike is not None and not alike.differing:
            problem = f"{short(draft_head.name)} equals the target's {short(head.name)} in every row"
            remedy = "none needed if only its blocks were trained"
            yield Observation(short(draft_head.name), problem, remedy, severity="info")


def _with_texts(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Return a tokenizer if the texts of its tokens were read.

    They were not read for SentencePiece models other than tokenizer.model.
    """
    if tokenizer is None or not tokenizer.base or tokenizer.lists_positions:
        return None
    return tokenizer


def _other_tokens(ours: Tokenizer, theirs: Tokenizer) -> Observations:
    """Report ids that are other tokens in the target, or that the draft lacks."""
    texts, target_texts = ours.texts, theirs.texts
    if (PIECES[0] in ours.files) is not (PIECES[0] in theirs.files):
        texts, target_texts = _with_plain_tab(texts), _with_plain_tab(target_texts)
    wrong = sorted(number for number, text in texts.items() if target_texts.get(number) != text)
    lacking = len(target_texts) - len(texts)
    if wrong:
        first = wrong[0]
        here, there = short(repr(texts[first]), 30), "no token"
        if first in target_texts:
            there = short(repr(target_texts[first]), 30)
        problem = f"{len(wrong):,} of the draft's {len(texts):,} ids are different tokens in the target, or none"
        problem += f". Id {first:,} is {here} here and {there} there"
        problem += f" (vocabularies {ours.fingerprint} and {theirs.fingerprint})"
        yield "tokenizer", problem, OTHER
    elif lacking:
        problem = f"the draft's tokenizer lacks {lacking:,} tokens of the target; all others agree"
        yield Observation("tokenizer", problem, "none needed: the draft never proposes them", severity="info")


def _with_plain_tab(texts: Mapping[int, str]) -> dict[int, str]:
    """Return texts of tokens with a plain tab. A conversion writes it for the byte token of Gemma's model."""
    return {number: "\t" if text == "<0x09>" else text for number, text in texts.items()}


def _other_input_table(facts: Facts, target: Facts) -> Observations:
    """Report that the input table is not the target's, or that no two can be compared."""
    # layers that predict further tokens bring a copy of the target's table, on which `copies` has reported
    copies_of_table = further_tables(facts, MTP_INPUT)
    table = facts.roles.plain_input_table
    if table is None and copies_of_table:
        table = copies_of_table[0]
    alike = _compare_rows(facts, table, target.roles.plain_input_table)
    if table is None or alike is None:
        problem = "the ids of draft and target were not compared, as one of the two has no tokenizer.json"
        yield Observation("tokenizer", problem, "copy each model's tokenizer.json into its folder", severity="info")
    elif alike.kind == UNRELATED and not copies_of_table:
        problem = f"the draft's input table is not the target's. {short(table.name)}: {difference(alike)}"
        yield Observation(short(table.name), problem, OTHER, severity="warning")


def _compare_rows(facts: Facts, table: Stored | None, target_table: Stored | None) -> TableLikeness | None:
    """Return how alike the rows of the same number are; None unless comparable.

    The longer one may be padded.
    """
    if table is None or target_table is None:
        return None
    rows = min(table.rows, target_table.rows)
    return facts.compare(_first_rows(table, rows), _first_rows(target_table, rows))


def _first_rows(table: Stored, rows: int) -> Stored:
    """Return the first rows of a stored table."""
    row_bytes = table.nbytes // max(1, table.rows)
    return replace(table, shape=(rows, *table.shape[1:]), end=table.start + row_bytes * rows)
