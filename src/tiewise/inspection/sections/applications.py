"""Would applying the shared block more or less often predict better?

The one block that a model repeats is applied 1 to 24 times, or to as often as the model does, with its own masks,
positions, norms and head: after as many applications as in training the nll is the model's own, after fewer that of the
model cut off. See docs/refinement.md.

A model is asked as its family is pretrained; the draws are those of a seed, alike for two models with one tokenizer:

    next token    windows of the text as it stands; position i predicts token i + 1
    hidden        rows [CLS] A [SEP] B [SEP] of whole sentences in order, their tokens masked as in pretraining
                  (`tiewise.training.data.training_rows`): an encoder knows no text that begins anywhere
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from tiewise.core.errors import DataError, progress
from tiewise.core.estimates import mean_interval
from tiewise.core.files import size
from tiewise.core.found import NATS, Curve, Found, Quantity
from tiewise.core.text import token_counts
from tiewise.inspection.bench import Bench, Subject, mean_of, section
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.stack import AppliedStack, LayerCall, Repeat, find_stack, one_block, relative
from tiewise.training.data.sentence_pairs import MARKS, Packing, Vocabulary, find_sentences
from tiewise.training.data.tokenizer import Ids, make_tokenizer, windows
from tiewise.training.data.training_rows import IGNORED, Masking, PairRows

MOST = 24
TRAINING = 16  # bytes of fp32 training by parameter: weight, gradient, AdamW's two moments
Values = NDArray[np.float64]


@section(asks="Would applying the shared block more or less often predict better?", place=120, text=True)
def applications(subject: Subject, bench: Bench) -> Found:
    """Apply the one block that a model repeats 1 to 24 times, and measure its nll each time."""
    effort, opened = bench.request.effort, bench.opened(subject)
    return applications_of(opened, bench.ids(subject), effort.length, effort.windows, bench.request.seed)


@leaves_model
def applications_of(opened: Opened, ids: Ids, length: int = 128, count: int = 64, seed: int = 0) -> Found:
    """Apply a model's one repeated block 1, 2, … 24 times and measure the nll of a text [N] in its tokens each time.

    The text is cut into at most `count` windows of `length` tokens, or as many as the model has positions; one gives no
    intervals. `seed` draws which tokens are hidden, where the model predicts hidden tokens.

    Raises:
        DataError: a text, or a tokenizer, that this model cannot be asked by (`questions`).
        UnsupportedError: the model has not one stack of layers, or its stack is not one block that is repeated.
    """
    stack = find_stack(opened)
    block = one_block(stack.calls(torch.full((1, 2), stack.token)))
    asked = questions(opened, stack.causal, ids, length, count, seed)
    counts = torch.from_numpy(token_counts(ids, opened.vocab)).double() + 1  # of each token: what a bias alone can know
    surprise = -(counts / counts.sum()).log()
    parts, unigram = [], []
    for batch in asked:
        parts.append(torch.stack(list(_measured(stack, block, batch))))
        unigram.append(_by_window(surprise[batch.targets], batch.where))
        progress("applications", sum(map(len, unigram)), sum(len(batch.where) for batch in asked))
    nll, change = torch.cat(parts, -1).numpy().transpose(1, 0, 2)  # [n, windows] after 1, 2, … applications
    of_block = {p for one in stack.applications[: block.period] for p in one.module.parameters()}
    parameters, repeated = (sum(p.numel() for p in of) for of in (opened.model.parameters(), of_block))
    separate = parameters + (block.times - 1) * repeated
    predicted, kind = sum(len(batch.targets) for batch in asked), "next" if stack.causal else "hidden"
    note = f"nll of {predicted:,} {kind} tokens in {nll.shape[1]} windows"
    return replace(found_of(block, nll, change, torch.cat(unigram).numpy(), parameters, separate), notes=(note,))


def found_of(block: Repeat, nll: Values, change: Values, unigram: Values, parameters: int, separate: int) -> Found:
    """Say what other numbers of applications of `block` give, beside that of training.

    `nll` is in nats per predicted token after 1, 2, … applications [n, windows], `change` ‖h_n − h_{n−1}‖ / ‖h_{n−1}‖
    of the states around each, `unigram` the nll by the tokens' frequencies in the whole text, one added to each count
    [windows]. The whole model has `parameters`, and `separate` if every application had its own.
    """
    own, most, alone = nll[block.times - 1], len(nll), mean_interval(unigram)
    means = [mean_interval(values).value for values in nll]  # nan where a window gave no number
    # of equals that of training
    best = min((block.times, *range(1, most + 1)), key=lambda n: (math.isnan(means[n - 1]), means[n - 1]))
    why = "the best of many: lower than another text would have it"
    more = mean_of("there − as trained", nll[best - 1] - own, unit=NATS, chance=0.0, why=why)
    mark: dict[str, Any] = {"along": "applications of the block", "mark": block.times}
    what = "layer" if block.period == 1 else f"block of {block.period} layers"
    answer = f"no: the {what} is applied {best} times, and no number up to {most} is better"
    if best != block.times:
        said = "yes: {} do better than" if more.high < 0 else "not told apart: {} and"
        answer = f"{said.format(f'{best} applications of the {what}')} the {block.times} of training"
    return Found(
        answer=answer,
        quantities=(
            mean_of("nll as trained", own, unit=NATS, chance=alone.value, why="beside it: token frequencies alone"),
            Quantity("best number", best, why=f"of 1 to {most}; in training {block.times}"),
            mean_of("nll there", nll[best - 1], unit=NATS, chance=alone.value),
            more,
            Quantity(
                "parameters", parameters,
                why=f"AdamW in fp32: {size(TRAINING * parameters)}, {size(TRAINING * separate)} if none were shared",
            ),
            Quantity("parameters if each application had its own", separate, main=False),
        ),
        curves=(
            Curve.through(
                "Loss by how often the block is applied", enumerate(map(mean_interval, nll), 1),
                unit=NATS, level=alone.value, level_name="token frequencies", **mark,
                why="Open marker: as trained.",
            ),
            Curve.through(
                "Loss less that of training's number", enumerate(map(mean_interval, nll - own), 1),
                unit=NATS, level=0.0, **mark,
                why="By window; above 0 is worse.",
            ),
            Curve.through(
                "Change by one more application", enumerate(map(mean_interval, change), 1),
                unit="relative change", log=True, **mark,
                why="Relative to the state before.",
            ),
        ),
    )  # fmt: skip


@torch.no_grad()
def _measured(stack: AppliedStack, block: Repeat, batch: Question) -> Iterator[Tensor]:
    """Nll and change [2, b] after each application of the block."""
    others = {name: value for name, value in batch.given.items() if name != "input_ids"}
    calls = stack.calls(batch.given["input_ids"], **others)
    before = calls[0].read
    for state in islice(_states(calls, block), max(MOST, block.times)):
        read, nll = state[batch.where], []
        for part in stack.parts(len(read)):
            nll.append(F.cross_entropy(stack.to_logits(read[part]), batch.targets[part], reduction="none").double())
        change = relative(state[batch.readable][:, None], before[batch.readable][:, None])  # [N, 1, D]: each by itself
        yield torch.stack([_by_window(torch.cat(nll), batch.where), _by_window(change.double(), batch.readable)])
        before = state


def _by_window(values: Tensor, where: Tensor) -> Tensor:
    """Mean [b] over each window's positions `where`, bool [b, T], of their values [M]."""
    sums = values.new_zeros(len(where)).index_add_(0, where.nonzero()[:, 0], values)
    return sums / where.sum(1)


def _states(calls: list[LayerCall], block: Repeat) -> Iterator[Tensor]:
    """Yield what each application of the block writes: the model's own, and then further ones without end.

    A call after the last stands for the first again: where layers differ in their masks (some see a part of the text
    only), these go on in turn, as in a deeper model if the layers are a whole number of turns.
    """
    yield from (call.wrote for call in calls[block.period - 1 :: block.period])
    state = calls[-1].wrote
    while True:
        for start in range(0, len(calls), block.period):
            for call in calls[start : start + block.period]:
                state = call.again(state)
            yield state


@dataclass(frozen=True)
class Question:
    """What a model is asked of a few windows of text."""

    given: dict[str, Tensor]  # what the model's forward takes, by name; `input_ids` [b, T] among them
    readable: Tensor  # positions that hold a token, bool [b, T]
    where: Tensor  # positions whose logits are asked for, bool [b, T], one or more in each window
    targets: Tensor  # the tokens that those are to predict [M]


def questions(opened: Opened, causal: bool, ids: Ids, length: int, count: int, seed: int) -> list[Question]:
    """Cut a text [N] into up to `count` windows of `length` tokens, and ask for its tokens.

    Raises:
        DataError: a text without one window, or, where tokens are hidden, without two sentences in one document, or a
            tokenizer without the marks that its rows need.
    """
    length = min(length, opened.longest or length)
    if causal:
        count = min(count, len(ids) // length)
        if not count or length < 2:
            raise DataError(f"{len(ids)} tokens hold no window of {length}", "give a longer text, or --length")
        return _next_tokens(windows(ids, length, count), opened.at_once(length))
    return _hidden_tokens(opened, ids, length, count, seed)


def _next_tokens(texts: Ids, step: int) -> list[Question]:
    """Ask for every next token of windows [n, T], `step` windows at a time."""
    found = []
    for tokens in torch.split(torch.from_numpy(texts), step):
        where = torch.ones_like(tokens, dtype=torch.bool)
        where[:, -1] = False
        found.append(Question({"input_ids": tokens}, torch.ones_like(where), where, tokens[:, 1:].flatten()))
    return found


def _hidden_tokens(opened: Opened, ids: Ids, length: int, count: int, seed: int) -> list[Question]:
    """Ask for hidden tokens of up to `count` rows of whole sentences, as in pretraining."""
    folder, vocab = opened.folder.path, opened.vocab
    tokenizer = make_tokenizer(str(folder))
    marks = {piece: getattr(tokenizer, f"{name}_id") for name, piece in MARKS.items()}
    missing = [piece for piece, number in marks.items() if number is None or number >= vocab]
    if missing:
        what = f"{folder}: the model predicts hidden tokens, and its tokenizer has no {', '.join(missing)}"
        raise DataError(what, "put the model's own tokenizer beside it")
    sentences = find_sentences(ids, Vocabulary.of(tokenizer, vocab), tokenizer.eos_token_id)
    rows = PairRows(sentences, Packing(length, "none", short=0.0), Masking(), seed=seed)
    has_segments = getattr(opened.model.config, "type_vocab_size", 0) >= 2  # RoBERTa has none
    count, step = min(count, len(rows)), opened.at_once(length)
    found = []
    for start in range(0, count, step):
        batch = default_collate([rows[i] for i in range(start, min(start + step, count))])
        labels = batch.pop("labels")
        if not has_segments:
            del batch["token_type_ids"]
        where = labels != IGNORED
        found.append(Question(batch, batch["attention_mask"].bool(), where, labels[where]))
    return found
