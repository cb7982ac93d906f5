"""What a model that repeats one block of layers predicts if the block is applied more or less often than in training.

    found = application_sweep(open_model("checkpoint"), ids)       # a text in the model's tokens [N]
    found.applied[11].nll       # nll of the text after 12 applications, with its interval over windows
    found.applied[11].more      # the same less the nll after as many as in training, window by window
    found.unigram              # nll of the same tokens by their frequencies in the text alone

The model's own masks, positions, norms and head are used throughout: after as many applications as in training, the
nll is the model's own. A model applied less often is the same one cut off. See docs/refinement.md.

A model is asked as its family is pretrained; the draws are those of a seed, alike for two models with one tokenizer:

    next token    windows of the text as it stands; position i predicts token i + 1
    hidden        rows [CLS] A [SEP] B [SEP] of whole sentences in order, their tokens masked as in pretraining
                  (`tiewise.data.training_rows`): an encoder knows no text that begins anywhere
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.core.errors import DataError
from tiewise.core.frequency import token_counts
from tiewise.core.progress import progress
from tiewise.data.sentence_pairs import MARKS, Packing, Vocabulary, find_sentences
from tiewise.data.tokenizer import Ids, make_tokenizer, windows
from tiewise.data.training_rows import IGNORED, Masking, PairRows
from tiewise.internals.loaded import Opened
from tiewise.internals.repeats import LayerCall, Repeat, applied, one_block, relative
from tiewise.internals.stack import AppliedStack, find_stack
from tiewise.internals.tuned_lens import chunks
from tiewise.internals.two_paths import HIDDEN, NEXT

MOST = 24
TOKENS_AT_ONCE = 2048
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Applied:
    """The block applied `times` times; estimates are over windows, None where a window gave no number."""

    times: int  # n
    nll: Estimate | None  # nats per predicted token; each window counts alike
    more: Estimate | None  # nll less that of the same window after as many applications as in training
    change: Estimate | None  # ‖h_n − h_{n−1}‖ / ‖h_{n−1}‖ of the states before and after the n-th application


@dataclass(frozen=True)
class Sweep:
    """A block applied from once to 24 times, or to as often as the model applies it."""

    objective: str  # what is predicted: the next token, or hidden ones
    predicted: int  # tokens that are
    windows: int  # of text they stand in
    layers: int  # in the block
    trained: int  # how often the model applies it
    parameters: int  # of the whole model, each counted once
    separate: int  # of the same model if every application had parameters of its own
    unigram: Estimate  # nll of the predicted tokens by their frequencies in the whole text, one added to each count
    applied: tuple[Applied, ...]  # n = 1, 2, …

    @property
    def own(self) -> Applied:
        """As the model was trained."""
        return self.applied[self.trained - 1]

    @property
    def best(self) -> Applied:
        """Where the nll is lowest; the model's own where no other is lower, or none is a number."""
        own_first = [self.own, *self.applied]
        return min(own_first, key=lambda one: math.inf if one.nll is None else one.nll.value)


def application_sweep(opened: Opened, ids: Ids, length: int = 128, count: int = 64, seed: int = 0) -> Sweep:
    """Apply a model's one repeated block 1, 2, … 24 times and measure the nll of a text each time.

    Args:
        opened: the model.
        ids: the text in the model's tokens [N].
        length: tokens of a window, or as many as the model has positions.
        count: most windows; one gives no intervals.
        seed: of which tokens are hidden, where the model predicts hidden tokens.

    Raises:
        DataError: a text, or a tokenizer, that this model cannot be asked by (`questions`).
        UnsupportedError: the model has not one stack of layers, or its stack is not one block that is repeated.
    """
    stack = find_stack(opened)
    block = one_block(applied(stack, torch.full((1, 2), stack.token))[1])
    asked = questions(opened, stack.causal, ids, length, count, seed)
    counts = torch.from_numpy(token_counts(ids, opened.vocab)).double() + 1  # of each token: what a bias alone can know
    shares = (counts / counts.sum()).log()
    parts, unigram, predicted = [], [], 0
    for batch in asked.batches:
        parts.append(torch.stack(list(_measured(stack, block, batch))))
        unigram.append(_by_window(-shares[batch.targets], batch.where))
        predicted += len(batch.targets)
        progress("applications", sum(map(len, unigram)), asked.windows)
    nll, change = torch.cat(parts, -1).numpy().transpose(1, 0, 2)  # [n, windows] each
    members = [one.module for one in stack.applications[: block.period]]
    of_block = {id(p): p.numel() for module in members for p in module.parameters()}
    parameters = sum(p.numel() for p in opened.model.parameters())
    return Sweep(
        objective=asked.kind,
        predicted=predicted,
        windows=asked.windows,
        layers=block.period,
        trained=block.times,
        parameters=parameters,
        separate=parameters + (block.times - 1) * sum(of_block.values()),
        unigram=mean_interval(torch.cat(unigram)),
        applied=tuple(
            Applied(n, _estimate(nll[n - 1]), _estimate(nll[n - 1] - nll[block.times - 1]), _estimate(change[n - 1]))
            for n in range(1, len(nll) + 1)
        ),
    )


@torch.no_grad()
def _measured(stack: AppliedStack, block: Repeat, batch: Asked) -> Iterator[Tensor]:
    """Nll and change [2, b] after each application of the block."""
    others = {name: value for name, value in batch.given.items() if name != "input_ids"}
    states, calls = applied(stack, batch.given["input_ids"], **others)
    before = states[0]
    for state in islice(_states(states, calls, block), max(MOST, block.times)):
        nll = _nll(stack, state[batch.where], batch.targets)
        change = relative(state[batch.readable][:, None], before[batch.readable][:, None])  # [N, 1, D]: each by itself
        yield torch.stack([_by_window(nll, batch.where), _by_window(change.double(), batch.readable)])
        before = state


def _by_window(values: Tensor, where: Tensor) -> Tensor:
    """Mean [b] over each window's positions `where`, bool [b, T], of their values [M]."""
    sums = values.new_zeros(len(where)).index_add_(0, where.nonzero()[:, 0], values)
    return sums / where.sum(1)


def _states(states: list[Tensor], calls: list[LayerCall], block: Repeat) -> Iterator[Tensor]:
    """Yield what each application of the block writes: the model's own, and then further ones without end.

    A call after the last stands for the first again: where layers differ in their masks (some see a part of the text
    only), these go on in turn, as in a deeper model.
    """
    yield from states[block.period :: block.period]
    state = states[-1]
    while True:
        for start in range(0, len(calls), block.period):
            for call in calls[start : start + block.period]:
                state = call.again(state)
            yield state


def _nll(stack: AppliedStack, hidden: Tensor, targets: Tensor) -> Tensor:
    """Nll [M] in fp64 of `targets` if the last layer had written `hidden` [M, D]; few logits are held at once."""
    parts = chunks(len(targets), stack.opened.vocab)
    found = [F.cross_entropy(stack.to_logits(hidden[part]), targets[part], reduction="none") for part in parts]
    return torch.cat(found).double()


def _estimate(values: NDArray[np.float64]) -> Estimate | None:
    return mean_interval(values) if np.isfinite(values).all() else None


@dataclass(frozen=True)
class Asked:
    """A few windows of text."""

    given: dict[str, Tensor]  # what the model's forward takes, by name; `input_ids` [b, T] among them
    readable: Tensor  # positions that hold a token, bool [b, T]
    where: Tensor  # positions whose logits are asked for, bool [b, T], one or more in each window
    targets: Tensor  # the tokens that those are to predict [M]


@dataclass(frozen=True)
class Questions:
    """All that a model is asked of a text."""

    kind: str  # "next token" or "hidden", as `two_paths` names them
    windows: int  # how many there are
    batches: Iterator[Asked]  # a few windows at a time, so that few states and logits are held at once


def questions(opened: Opened, causal: bool, ids: Ids, length: int, count: int, seed: int) -> Questions:
    """Cut a text [N] into up to `count` windows of `length` tokens, and ask for its tokens.

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
    tokenizer = make_tokenizer(str(folder))
    found = {piece: getattr(tokenizer, f"{name}_id") for name, piece in MARKS.items()}
    missing = [piece for piece, number in found.items() if number is None or number >= vocab]
    if missing:
        what = f"{folder}: the model predicts hidden tokens, and its tokenizer has no {', '.join(missing)}"
        raise DataError(what, "put the model's own tokenizer beside it")
    sentences = find_sentences(ids, Vocabulary.of(tokenizer, vocab), tokenizer.eos_token_id)
    return PairRows(sentences, Packing(length, "none", short=0.0), Masking(), seed=seed)
