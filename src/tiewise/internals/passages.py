"""What a text costs a model, passage by passage: models with different tokenizers are compared in bits per byte.

A passage is a few hundred characters of one document. Its cost is −log p of all its tokens, the first of them read
after the model's start token alone; so each model is asked for the same bytes, however it cuts them, and they pair up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, jackknife, ratio
from tiewise.core.files import to_record
from tiewise.core.long_work import progress
from tiewise.data.documents import ended
from tiewise.data.sources import Text, open_sources
from tiewise.data.tokenizer import make_tokenizer, pieces
from tiewise.internals.loaded import Opened, open_model

SHORTEST, CHARACTERS = 100, 400  # of a passage: as a fortieth of the text, within these
MOST, FEWEST = 200, 10  # passages
READ = 4_000_000  # characters of a text that passages are taken from
LONGEST = 1024  # tokens read at once, where a model has more positions


def passages(texts: Text | Sequence[Text], most: int = MOST) -> list[str]:
    """Cut texts (as in `tiewise.data.sources`) into passages, at white space, and return some of them, evenly apart.

    Raises:
        DataError: a text that cannot be read, or that is too short for ten passages.
    """
    return evenly((text for text, _ in pieces(ended(open_sources(texts)))), most)


def evenly(texts: Iterable[str], most: int = MOST) -> list[str]:
    """As `passages`, of texts that are at hand."""
    held, total = list[str](), 0
    for text in texts:
        held.append(text)
        total += len(text)
        if total > READ:
            break
    size = max(SHORTEST, min(CHARACTERS, total // (4 * FEWEST)))
    found = [passage for text in held for passage in _cut(text, size)]
    if len(found) < FEWEST:
        what = f"{total:,} characters of text are too few to measure a loss on"
        raise DataError(what, f"give {2 * FEWEST * SHORTEST:,} or more")
    count = min(most, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def _cut(text: str, size: int) -> Iterator[str]:
    start = 0
    while len(text) - start >= size:
        space = max(text.rfind(" ", start + 1, start + size), text.rfind("\n", start + 1, start + size))
        stop = space if space > start + size // 2 else start + size
        yield text[start:stop]
        start = stop


def passage_nats(path: str | os.PathLike[str], texts: Sequence[str]) -> NDArray[np.float64]:
    """Return −log p of each passage [n] by the model in a folder, with the tokenizer beside it.

    Raises:
        CheckpointError, InstallError: as `open_model`.
        DataError: no tokenizer in the folder that can be read, or one that names tokens without a row.
    """
    opened = open_model(path)
    tokenizer = make_tokenizer(os.fspath(path))
    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.encode_special_tokens = True  # words such as "<eos>" in a text stay words
    engine.no_truncation()
    engine.no_padding()
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    length = min(LONGEST, opened.longest or LONGEST) - 1
    windows, owners = list[list[int]](), list[int]()
    for number, encoding in enumerate(engine.encode_batch_fast(list(texts), add_special_tokens=False)):
        for at in range(0, len(encoding.ids), length):
            windows.append([start, *encoding.ids[at : at + length]])
            owners.append(number)
    largest = max(map(max, windows))
    if largest >= opened.vocab:
        what = f"the tokenizer in {opened.folder.path} names token {largest}, the table has {opened.vocab:,} rows"
        raise DataError(what, "put the tokenizer that belongs to the model beside it (`tiewise check` compares them)")
    costs = np.zeros(len(texts))
    np.add.at(costs, owners, _nats(opened, windows, start))
    return costs


@torch.no_grad()
def _nats(opened: Opened, windows: list[list[int]], pad: Any) -> NDArray[np.float64]:
    """−log p of each window's tokens but the first; the model is causal, so padding behind changes nothing."""
    found, order = np.zeros(len(windows)), sorted(range(len(windows)), key=lambda number: len(windows[number]))
    done = 0
    while done < len(order):
        group = order[done : done + opened.at_once(len(windows[order[-1]]))]
        longest = max(len(windows[number]) for number in group)
        ids = torch.tensor([windows[number] + [pad] * (longest - len(windows[number])) for number in group])
        logits = opened.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double().numpy()
        found[group] = [losses[row, : len(windows[number]) - 1].sum() for row, number in enumerate(group)]
        done += len(group)
        progress("measuring the loss", done, len(order))
    return found


@dataclass(frozen=True)
class LossChange:
    """What one model costs on a text against another, in bits per byte."""

    before: float
    after: float
    more: Estimate  # after − before, with its interval over passages

    def said(self) -> str:
        """In a line."""
        interval = f"{self.more.value:+.4f}, 95 % interval {self.more.low:+.4f} to {self.more.high:+.4f}"
        return f"{self.before:.4f} → {self.after:.4f} bits per byte ({interval}, {self.more.rows} passages)"


def cost_change(before: NDArray[np.float64], after: NDArray[np.float64], texts: Sequence[str]) -> LossChange:
    """Compare what passages cost two models, in nats [n]; the interval leaves out one passage at a time."""
    sizes = math.log(2) * np.array([len(text.encode()) for text in texts])

    def per_byte(nats: NDArray[np.float64], units: Sequence[int]) -> float:
        return float(nats[list(units)].sum() / sizes[list(units)].sum())

    every = range(len(texts))
    more = jackknife(lambda units: per_byte(after - before, units), every)
    return LossChange(per_byte(before, every), per_byte(after, every), more)


@dataclass(frozen=True)
class Healed:
    """What a rewrite had lost on held-out text, and what came back; all in bits per byte but `share`."""

    model: str  # folder of the healed model
    teacher: float
    lost: LossChange  # the model as it was given, against the teacher
    left: LossChange  # the healed model, against the teacher
    share: Estimate  # of the loss that came back, with its interval over passages

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return to_record(self)

    def said(self) -> str:
        """In a sentence."""
        figures = f"{self.lost.after:.4f} → {self.left.after:.4f} bits per byte, the teacher {self.teacher:.4f}"
        if not self.lost.more.low > 0:
            return f"nothing measurable was lost: {figures} ({self.share.rows} held-out passages)"
        interval = f"95 % interval {self.share.low:.0%} to {self.share.high:.0%}, {self.share.rows} held-out passages"
        return f"{self.share.value:.0%} of the loss came back ({interval}): {figures}"


def healed(model: Path, before: str, teacher: str, texts: Sequence[str]) -> Healed:
    """Measure a healed model, what it was before, and its teacher. Raises as `passage_nats`."""
    original, was, found = (passage_nats(path, texts) for path in (teacher, before, model))

    def share(units: Sequence[int]) -> float:
        its = list(units)
        return ratio(float((was[its] - found[its]).sum()), float((was[its] - original[its]).sum()))

    lost, left = cost_change(original, was, texts), cost_change(original, found, texts)
    return Healed(str(model), lost.before, lost, left, jackknife(share, range(len(texts))))
