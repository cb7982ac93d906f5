"""Loss of a model with a repeated block, by the number of its applications.

The one block that a model repeats is applied 1 to 24 times, or as often as by the model if that is more, with the
model's masks, positions, norms and head. After as many applications as in training, the nll is the model's own; after
fewer, that of the truncated model. See docs/direct-path.md.

A model predicts tokens as its family is pretrained. The draws depend on the seed only, so that two models with one
tokenizer have the same:

    next token    windows of the text; position i predicts token i + 1
    hidden        rows [CLS] A [SEP] B [SEP] of full sentences in order, with tokens masked as in pretraining
                  (`tiewise.training.data.training_rows`): an encoder is not trained on text that starts within a
                  sentence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate

from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, mean_interval
from tiewise.core.files import format_bytes
from tiewise.core.measurement import NATS, Curve, Measurement, Quantity
from tiewise.core.progress import report_progress
from tiewise.core.text import token_counts
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.stack import AppliedStack, LayerCall, Repeat, find_stack, one_block, relative
from tiewise.inspection.workspace import InspectedModel, Workspace, mean_of, section
from tiewise.training.data.sentence_pairs import MARKS, Packing, Vocabulary, find_sentences
from tiewise.training.data.tokenizer import Ids, make_tokenizer, windows
from tiewise.training.data.training_rows import IGNORED, Masking, PairRows

MOST = 24
TRAINING = 16  # bytes per parameter of fp32 training: weight, gradient, AdamW's two moments
Values = NDArray[np.float64]


@section(question="Would applying the shared block more or less often predict better?", order=120, text=True)
def applications(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Measure a model's nll for 1 to 24 applications of its repeated block."""
    effort, opened = workspace.request.effort, workspace.opened(model)
    return applications_of(opened, workspace.ids(model), effort.length, effort.windows, workspace.request.seed)


@leaves_model
def applications_of(opened: Opened, ids: Ids, length: int = 128, count: int = 64, seed: int = 0) -> Measurement:
    """Measure a model's nll on a text [N] by the number of applications of its block.

    The repeated block is applied 1, 2, … 24 times. The text is in the model's tokens. It is cut into at most `count`
    windows of `length` tokens, at most the number of positions of the model; one window gives no intervals. `seed`
    draws the hidden tokens if the model predicts those.

    Raises:
        DataError: a text, or a tokenizer, that does not suit this model (`questions`).
        UnsupportedError: the model has no single stack of layers, or its stack is not one repeated block.
    """
    stack = find_stack(opened)
    block = one_block(stack.calls(torch.full((1, 2), stack.token)))
    batches = questions(opened, stack.causal, ids, length, count, seed)
    measured = _measured_by_window(stack, block, batches, _surprise(ids, opened.vocab))
    parameters = sum(p.numel() for p in opened.model.parameters())
    separate = parameters + (block.times - 1) * _block_parameters(stack, block)
    report = measurement_of(block, measured.nll, measured.change, measured.unigram, parameters, separate)
    predicted = sum(len(batch.targets) for batch in batches)
    predicted_tokens = "next" if stack.causal else "hidden"
    note = f"nll of {predicted:,} {predicted_tokens} tokens in {len(measured.unigram)} windows"
    return replace(report, notes=(note,))


def _surprise(ids: Ids, vocab: int) -> Tensor:
    """Return each token's nll by its frequency in a text [V].

    A bias alone can predict as well. One is added to each count.
    """
    counts = torch.from_numpy(token_counts(ids, vocab)).double() + 1
    return -(counts / counts.sum()).log()


def _block_parameters(stack: AppliedStack, block: Repeat) -> int:
    """Return how many parameters the repeated block has, each counted once."""
    parameters: set[nn.Parameter] = set()
    for application in stack.applications[: block.period]:
        parameters.update(application.module.parameters())
    return sum(p.numel() for p in parameters)


@dataclass(frozen=True)
class _ByWindow:
    """Measures of every window of a text."""

    nll: Values  # after 1, 2, … applications [n, windows]
    change: Values  # relative change of the state by each application [n, windows]
    unigram: Values  # nll by the tokens' frequencies [windows]


def _measured_by_window(stack: AppliedStack, block: Repeat, batches: Sequence[Question], surprise: Tensor) -> _ByWindow:
    """Measure all batches; `surprise` [V] is the nll of each token by its frequency."""
    total = sum(len(batch.where) for batch in batches)
    done = 0
    parts, unigram = [], []
    for batch in batches:
        parts.append(torch.stack(list(_measured(stack, block, batch))))
        unigram.append(_by_window(surprise[batch.targets], batch.where))
        done += len(batch.where)
        report_progress("applications", done, total)
    nll, change = torch.cat(parts, -1).numpy().transpose(1, 0, 2)
    return _ByWindow(nll, change, torch.cat(unigram).numpy())


def measurement_of(
    block: Repeat, nll: Values, change: Values, unigram: Values, parameters: int, separate: int
) -> Measurement:
    """Report the nll of other numbers of applications of `block`, compared with training's.

    `nll` is in nats per predicted token after 1, 2, … applications [n, windows], `change` is ‖h_n − h_{n−1}‖ /
    ‖h_{n−1}‖ of the states around each. `unigram` is the nll by the tokens' frequencies in the full text, one added to
    each count [windows]. The model has `parameters`, and would have `separate` if every application had its own.
    """
    trained, alone = nll[block.times - 1], mean_interval(unigram).value
    best = _best_number(nll, block.times)
    why = "the best of many: lower than another text would have it"
    more = mean_of("there − as trained", nll[best - 1] - trained, unit=NATS, chance=0.0, why=why)
    why = "compared with token frequencies alone"
    quantities = [
        mean_of("nll as trained", trained, unit=NATS, chance=alone, why=why),
        Quantity("best number", best, why=f"of 1 to {len(nll)}; in training {block.times}"),
        mean_of("nll there", nll[best - 1], unit=NATS, chance=alone),
        more,
        *_parameter_quantities(parameters, separate),
    ]
    mark: dict[str, Any] = {"along": "applications of the block", "mark": block.times}
    curves = [
        Curve.through(
            "Loss by how often the block is applied", _numbered(nll), unit=NATS, level=alone,
            level_name="token frequencies", why="Open marker: as trained.", **mark,
        ),
        Curve.through(
            "Loss less that of training's number", _numbered(nll - trained), unit=NATS, level=0.0,
            why="By window; above 0 is worse.", **mark,
        ),
        Curve.through(
            "Change by one more application", _numbered(change), unit="relative change", log=True,
            why="Relative to the state before.", **mark,
        ),
    ]  # fmt: skip
    return Measurement(_answer(block, best, len(nll), more), tuple(quantities), tuple(curves))


def _best_number(nll: Values, trained: int) -> int:
    """Return the number of applications with the lowest mean nll.

    If training's number has an equal nll, it is returned.
    """
    means = np.array([mean_interval(values).value for values in nll])
    means[np.isnan(means)] = np.inf  # a window has no finite nll
    best = int(means.argmin()) + 1
    return trained if means[trained - 1] == means[best - 1] else best


def _answer(block: Repeat, best: int, most: int, more: Quantity) -> str:
    """Return which number of applications predicts best.

    `more` is its nll less that of training's number.
    """
    layers = "layer" if block.period == 1 else f"block of {block.period} layers"
    if best == block.times:
        return f"no: {best} applications of the {layers}, as in training, predict best of 1 to {most}"
    applied = f"{best} applications of the {layers}"
    if more.high < 0:
        return f"yes: {applied} predict better than the {block.times} of training"
    return f"no difference detected between {applied} and the {block.times} of training"


def _parameter_quantities(parameters: int, separate: int) -> Iterator[Quantity]:
    """Yield the parameters of the model, and how many it would have if nothing were shared."""
    shared_size, separate_size = format_bytes(TRAINING * parameters), format_bytes(TRAINING * separate)
    yield Quantity("parameters", parameters, why=f"AdamW in fp32: {shared_size}, {separate_size} if none were shared")
    yield Quantity("parameters if each application had its own", separate, main=False)


def _numbered(values: Values) -> Iterator[tuple[int, Estimate]]:
    """Yield (number of applications, mean over windows) of values [n, windows]."""
    for number, of_windows in enumerate(values, 1):
        yield number, mean_interval(of_windows)


@torch.no_grad()
def _measured(stack: AppliedStack, block: Repeat, batch: Question) -> Iterator[Tensor]:
    """Yield nll and change [2, b] after each application of the block."""
    others = {name: value for name, value in batch.inputs.items() if name != "input_ids"}
    calls = stack.calls(batch.inputs["input_ids"], **others)
    before = calls[0].read
    for state in islice(_states(calls, block), max(MOST, block.times)):
        nll = _by_window(_losses(stack, state, batch), batch.where)
        change = relative(
            state[batch.readable][:, None], before[batch.readable][:, None]
        )  # [N, 1, D]: each position separately
        yield torch.stack([nll, _by_window(change.double(), batch.readable)])
        before = state


def _losses(stack: AppliedStack, state: Tensor, batch: Question) -> Tensor:
    """Return the nll of each predicted token from a state, fp64 [M]."""
    read = state[batch.where]
    losses = []
    for part in stack.parts(len(read)):
        logits = stack.to_logits(read[part])
        losses.append(F.cross_entropy(logits, batch.targets[part], reduction="none").double())
    return torch.cat(losses)


def _by_window(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean [b] of values [M] over each window's positions `where`, bool [b, T]."""
    sums = values.new_zeros(len(where)).index_add_(0, where.nonzero()[:, 0], values)
    return sums / where.sum(1)


def _states(calls: list[LayerCall], block: Repeat) -> Iterator[Tensor]:
    """Yield the output of each application of the block, without end.

    The model's own applications come first. A call after the last is the first one again: if layers differ in their
    masks (some see a part of the text only), the masks repeat in turn, as in a deeper model whose layers are a multiple
    of the masks.
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
    """Inputs of a model for a few windows of text, and the tokens to predict."""

    inputs: dict[str, Tensor]  # arguments of the model's forward by name, with `input_ids` [b, T]
    readable: Tensor  # positions with a token, bool [b, T]
    where: Tensor  # positions with a prediction, bool [b, T], one or more in each window
    targets: Tensor  # tokens to predict at these positions [M]


def questions(opened: Opened, causal: bool, ids: Ids, length: int, count: int, seed: int) -> list[Question]:
    """Cut a text [N] into up to `count` windows of `length` tokens, with tokens to predict.

    Raises:
        DataError: a text without one window; for hidden tokens, one without two sentences in one document, or a
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
    """Return questions for every next token of windows [n, T], `step` windows at a time."""
    questions_of_text = []
    for tokens in torch.split(torch.from_numpy(texts), step):
        where = torch.ones_like(tokens, dtype=torch.bool)
        where[:, -1] = False
        targets = tokens[:, 1:].flatten()
        questions_of_text.append(Question({"input_ids": tokens}, torch.ones_like(where), where, targets))
    return questions_of_text


def _hidden_tokens(opened: Opened, ids: Ids, length: int, count: int, seed: int) -> list[Question]:
    """Return questions for the masked tokens of up to `count` sequences, as in pretraining.

    The sequences have full sentences.
    """
    rows = _masked_rows(opened, ids, length, seed)
    has_segments = getattr(opened.model.config, "type_vocab_size", 0) >= 2  # RoBERTa has none
    count, step = min(count, len(rows)), opened.at_once(length)
    questions_of_text = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        batch = default_collate([rows[i] for i in range(start, stop)])
        labels = batch.pop("labels")
        if not has_segments:
            del batch["token_type_ids"]
        where = labels != IGNORED
        readable = batch["attention_mask"].bool()
        questions_of_text.append(Question(batch, readable, where, labels[where]))
    return questions_of_text


def _masked_rows(opened: Opened, ids: Ids, length: int, seed: int) -> PairRows:
    """Pack a text into rows of full sentences with hidden tokens.

    Raises:
        DataError: the tokenizer lacks the marks that such rows need.
    """
    folder, vocab = opened.folder.path, opened.vocab
    tokenizer = make_tokenizer(str(folder))
    missing = []
    for name, piece in MARKS.items():
        number = getattr(tokenizer, f"{name}_id")
        if number is None or number >= vocab:
            missing.append(piece)
    if missing:
        problem = f"{folder}: the model predicts hidden tokens, and its tokenizer has no {', '.join(missing)}"
        raise DataError(problem, "put the model's own tokenizer into its folder")
    sentences = find_sentences(ids, Vocabulary.of(tokenizer, vocab), tokenizer.eos_token_id)
    return PairRows(sentences, Packing(length, "none", short=0.0), Masking(), seed=seed)
