"""What a model is asked of a text, as its family is pretrained: the next token, or hidden ones.

    next token    windows of the text as it stands; position i predicts token i + 1
    hidden        rows [CLS] A [SEP] B [SEP] of whole sentences in order, their tokens masked as in pretraining
                  (`tiewise.data.pretraining`): an encoder knows no text that begins anywhere

The draws are those of a seed: two models with one tokenizer are asked the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import default_collate

from tiewise.core.errors import DataError
from tiewise.data.masking import IGNORED, Masking
from tiewise.data.pretraining import MARKS, Marks, PairRows
from tiewise.data.sentence_order import Packing
from tiewise.data.sentences import find_sentences
from tiewise.data.tokenizer import make_tokenizer
from tiewise.data.windows import Ids, windows
from tiewise.internals.loaded import Opened
from tiewise.internals.text_loss import HIDDEN, NEXT

TOKENS_AT_ONCE = 2048
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Asked:
    """A few windows of text.

    Args:
        given: what the model's forward takes, by name; `input_ids` [b, T] among them.
        readable: positions that hold a token, bool [b, T].
        where: positions whose logits are asked for, bool [b, T], one or more in each window.
        targets: the tokens that those are to predict [M].
    """

    given: dict[str, Tensor]
    readable: Tensor
    where: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Questions:
    """All that a model is asked.

    Args:
        kind: "next token" or "hidden", as `text_loss` names them.
        windows: how many there are.
        batches: a few windows at a time, so that few states and logits are held at once.
    """

    kind: str
    windows: int
    batches: Iterator[Asked]


def questions(opened: Opened, causal: bool, ids: Ids, length: int, count: int, seed: int) -> Questions:
    """Cut a text into up to `count` windows of `length` tokens, and ask for its tokens.

    Args:
        opened: the model.
        causal: whether it predicts the next token.
        ids: the text in its tokens [N].
        length: T; no longer than the model's positions.
        count: most windows.
        seed: of the rows and the masks, where tokens are hidden.

    Raises:
        DataError: a text without one window, or, where tokens are hidden, without two sentences in one document, or a
            tokenizer without the marks that its rows need.
    """
    length = min(length, opened.longest or length)
    step = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // opened.vocab) // length)
    if causal:
        count = min(count, len(ids) // length)
        if not count or length < 2:
            raise DataError(f"{len(ids)} tokens hold no window of {length}", "give a longer text, or another length")
        return Questions(NEXT, count, map(_next_tokens, torch.from_numpy(windows(ids, length, count)).split(step)))
    rows = _rows(opened, ids, length, seed)
    count = min(count, len(rows))
    starts = range(0, count, step)
    return Questions(HIDDEN, count, (_hidden_tokens(opened, rows, i, min(i + step, count)) for i in starts))


def _next_tokens(ids: Tensor) -> Asked:
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, -1] = False
    return Asked({"input_ids": ids}, torch.ones_like(where), where, ids[:, 1:].flatten())


def _hidden_tokens(opened: Opened, rows: PairRows, start: int, stop: int) -> Asked:
    batch = default_collate([rows[i] for i in range(start, stop)])
    labels = batch.pop("labels")
    if getattr(opened.model.config, "type_vocab_size", 0) < 2:  # RoBERTa's: it does not tell segments apart
        del batch["token_type_ids"]
    where = labels != IGNORED
    return Asked(batch, batch["attention_mask"].bool(), where, labels[where])


def _rows(opened: Opened, ids: Ids, length: int, seed: int) -> PairRows:
    folder, vocab = opened.folder.path, opened.vocab
    tokenizer = make_tokenizer(str(folder), lambda: iter(()))
    found = {piece: getattr(tokenizer, f"{name}_id") for name, piece in MARKS.items()}
    missing = [piece for piece, number in found.items() if number is None or number >= vocab]
    if missing:
        what = f"{folder}: the model predicts hidden tokens, and its tokenizer has no {', '.join(missing)}"
        raise DataError(what, "put the model's own tokenizer beside it")
    marks = Marks.read(tokenizer, vocab)
    sentences = find_sentences(ids, marks.vocabulary, tokenizer.eos_token_id)
    return PairRows(sentences, marks, Packing(length, "none", short=0.0), Masking(), seed=seed)
