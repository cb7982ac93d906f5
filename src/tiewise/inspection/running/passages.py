"""Loss of models on passages of a text, in bits per byte.

Bits per byte compare models with different tokenizers. A passage is a few hundred characters of one document. Its cost
is −log p of all its tokens; the first is predicted from the model's start token alone. So every model predicts the same
bytes, however it splits them into tokens, and costs can be compared in pairs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tiewise.boundary.undisturbed import undisturbed
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, jackknife, ratio
from tiewise.core.measurement import percent
from tiewise.core.progress import report_progress
from tiewise.core.records import to_record
from tiewise.core.result import PrintedResult, Row
from tiewise.inspection.running.loaded import Opened, open_model
from tiewise.training.data.tokenizer import make_tokenizer, plain_engine

SHORTEST, LARGEST = 100, 400  # characters of a passage: a fortieth of the text, within these limits
FEWEST, MOST = 10, 200  # number of passages
READ = 4_000_000  # characters of the text that passages are taken from
LONGEST = 1024  # tokens in one forward, if the model has more positions
Nats = NDArray[np.float64]


def passages(texts: Iterable[str], most: int = MOST, read: int = READ) -> list[str]:
    """Cut texts into passages at white space, and return at most `most`, evenly spaced.

    Once `read` characters are read, no further text is taken.

    Raises:
        DataError: the texts are too short for ten passages.
    """
    taken: list[str] = []
    total = 0
    for text in texts:
        taken.append(text)
        total += len(text)
        if total > read:
            break
    size = max(SHORTEST, min(LARGEST, total // (4 * FEWEST)))
    cut: list[str] = []
    for text in taken:
        cut += _cut(text, size)
    if len(cut) < FEWEST:
        problem = f"{total:,} characters of text are too few to measure a loss on"
        raise DataError(problem, f"give {2 * FEWEST * SHORTEST:,} or more")
    count = min(most, len(cut))
    return [cut[number * len(cut) // count] for number in range(count)]


def _cut(text: str, size: int) -> Iterator[str]:
    """Yield passages of at most `size` characters.

    Each is cut at the last white space of its second half.
    """
    start = 0
    while len(text) - start >= size:
        space = max(text.rfind(white, start + size // 2, start + size) for white in " \n")
        stop = space if space > 0 else start + size
        yield text[start:stop]
        start = stop


@torch.no_grad()
def passage_nats(path: str | os.PathLike[str], texts: Sequence[str]) -> Nats:
    """Return −log p [n] of passages by the model in a folder, in nats.

    The folder's tokenizer encodes the passages.

    Raises:
        CheckpointError, InstallError: as `open_model`.
        DataError: the folder has no readable tokenizer, or the tokenizer names tokens without a row.
    """
    opened, tokenizer = open_model(path), make_tokenizer(os.fspath(path))
    windows = _windows_of(tokenizer, texts, min(LONGEST, opened.longest or LONGEST))
    largest = max(max(window.ids) for window in windows)
    if largest >= opened.vocab:
        problem = f"the tokenizer in {opened.folder.path} names token {largest}, the table has {opened.vocab:,} rows"
        raise DataError(
            problem, "put the tokenizer that belongs to the model into its folder (`tiewise check` compares them)"
        )
    costs = np.zeros(len(texts))
    step = opened.at_once(max(len(window.ids) for window in windows))
    for at in range(0, len(windows), step):
        group = windows[at : at + step]
        nats = _window_nats(opened, [window.ids for window in group], padding=windows[0].ids[0])
        for window, cost in zip(group, nats, strict=True):
            costs[window.passage] += cost
        report_progress("measuring the loss", at + len(group), len(windows))
    return costs


class _Window(NamedTuple):
    """Tokens of a passage, or of a part of it, that one forward reads."""

    passage: int  # number of the passage
    ids: list[int]  # the start token, then those of the passage


def _windows_of(tokenizer: Any, texts: Sequence[str], longest: int) -> list[_Window]:
    """Encode passages, and cut them into windows of at most `longest` tokens.

    Each starts with the start token.
    """
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    length = longest - 1
    encoded = plain_engine(tokenizer).encode_batch_fast(list(texts), add_special_tokens=False)
    windows = []
    for number, encoding in enumerate(encoded):
        for at in range(0, len(encoding.ids), length):
            windows.append(_Window(number, [start, *encoding.ids[at : at + length]]))
    return windows


def _window_nats(opened: Opened, windows: Sequence[Sequence[int]], padding: int) -> list[float]:
    """Return −log p of each window without its first token, in nats.

    Windows are padded at the end, which a causal model cannot see.
    """
    longest = max(len(window) for window in windows)
    padded = []
    for window in windows:
        lacking = longest - len(window)
        padded.append([*window, *[padding] * lacking])
    ids = torch.tensor(padded)
    with undisturbed(opened.model):
        logits = opened.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double()
    return [float(of_window[: len(window) - 1].sum()) for window, of_window in zip(windows, losses, strict=True)]


@dataclass(frozen=True)
class CostChange:
    """Costs of passages by one model and by another, in bits per byte."""

    before: float
    after: float
    more: Estimate  # after − before, with its delete-one interval over passages

    def sentence(self) -> str:
        """Return the change as one line of text."""
        interval = f"{self.more.value:+.4f}, 95 % interval {self.more.low:+.4f} to {self.more.high:+.4f}"
        return f"{self.before:.4f} → {self.after:.4f} bits per byte ({interval}, {self.more.rows} passages)"


def cost_change(before: Nats, after: Nats, texts: Sequence[str]) -> CostChange:
    """Compare the costs of passages by two models, in nats [n]."""
    bits = math.log(2) * np.array([len(text.encode()) for text in texts])

    def per_byte(nats: Nats, units: Sequence[int]) -> float:
        """Return bits per byte over the passages of these numbers."""
        return float(nats[list(units)].sum() / bits[list(units)].sum())

    every = range(len(texts))
    more = jackknife(lambda units: per_byte(after - before, units), every)
    return CostChange(per_byte(before, every), per_byte(after, every), more)


@dataclass(frozen=True, repr=False)
class Healed(PrintedResult):
    """Loss of a rewrite on held-out text, and the share that healing recovered.

    Attributes:
        model: folder of the healed model.
        lost: change from the teacher to the model before healing, in bits per byte.
        left: change from the teacher to the healed model, in bits per byte.
        share: share of the lost nats that healing recovered, with its delete-one interval over passages.

    >>> from tiewise.core.estimates import Estimate
    >>> more = Estimate(0.2, 0.1, 0.3, rows=40)
    >>> lost, left = CostChange(1.0, 1.2, more), CostChange(1.0, 1.05, more)
    >>> healed_model = Healed("runs/heal/final", lost, left, Estimate(0.75, 0.6, 0.9, rows=40))
    >>> healed_model.sentence().partition(":")[0]
    'Healing recovered 75 % of what was lost (95 % CI 60 % to 90 %, 40 held-out passages)'
    """

    model: str
    lost: CostChange
    left: CostChange
    share: Estimate

    def record(self) -> dict[str, Any]:
        """Return all fields as JSON takes them."""
        return to_record(self)

    def answer_text(self) -> str:
        """Return the sentence, and the folder of the model."""
        return f"{self.sentence()}\nmodel: {self.model}"

    def rows(self) -> list[Row]:
        """Return the loss of the teacher, of the model before healing and of the healed model."""
        costs = {"teacher": self.lost.before, "before healing": self.lost.after, "healed": self.left.after}
        return [{"model": name, "bits per byte": cost} for name, cost in costs.items()]

    def sentence(self) -> str:
        """Return the result as one sentence."""
        lost, share = self.lost, self.share
        figures = f"{lost.after:.4f} → {self.left.after:.4f} bits per byte, and {lost.before:.4f} for the teacher"
        if lost.more.high < 0:
            problem = "The teacher predicts this text worse than the rewritten model, so there was no loss to recover"
            return f"{problem}: {figures} ({share.rows} held-out passages)"
        if not lost.more.low > 0:
            return f"The rewrite lost nothing measurable: {figures} ({share.rows} held-out passages)"
        interval = f"95 % CI {percent(share.low, 0)} to {percent(share.high, 0)}, {share.rows} held-out passages"
        return f"Healing recovered {percent(share.value, 0)} of what was lost ({interval}): {figures}"


def healed(model: str | os.PathLike[str], before: str, teacher: str, texts: Sequence[str]) -> Healed:
    """Measure a healed model, the model before healing, and its teacher.

    Raises as `passage_nats`.
    """
    original = passage_nats(teacher, texts)
    was = passage_nats(before, texts)
    now = passage_nats(model, texts)

    def share(units: Sequence[int]) -> float:
        """Return the recovered share of the lost nats, over the passages of these numbers."""
        chosen = list(units)
        came_back, lost = (was - now)[chosen].sum(), (was - original)[chosen].sum()
        return ratio(float(came_back), float(lost))

    lost, left = cost_change(original, was, texts), cost_change(original, now, texts)
    return Healed(os.fspath(model), lost, left, jackknife(share, range(len(texts))))
