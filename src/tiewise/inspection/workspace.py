"""A section, and what it is given: one checkpoint under a name, and a `Workspace` that all sections share.

    @section(question="Would applying the shared block more or less often predict better?", order=120, text=True)
    def applications(model, workspace) -> Measurement: ...

A section is such a function in a file of the folder `sections`, found by itself: `--only` takes its name, and words,
table, figures and JSON follow from what it finds. What a model does not allow raises `NotApplicable`, with the reason.

On the bench lie texts in each model's own tokens, and models that are loaded once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core import Late
from tiewise.core.errors import CheckpointError, DataError, RunError, TiewiseError
from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import Measurement, Quantity
from tiewise.core.text import token_counts
from tiewise.training.folder import DATA, RESULTS, read_json
from tiewise.training.results import Comparison

if TYPE_CHECKING:
    from tiewise.inspection.running.loaded import Opened

FULL = find_spec("torch") is not None and find_spec("transformers") is not None  # else tables alone are read
LACKS = "needs torch and transformers: pip install 'tiewise[torch]'"
_CORPUS, _TOKENIZER = Late("tiewise.training.data.corpus"), Late("tiewise.training.data.tokenizer")
_LOADED = Late("tiewise.inspection.running.loaded")
FEWEST = 10  # windows: eight to measure on, two to hold out
STDIN = "-"
BYTES = 64  # of standard input that are kept for each token that is read: no text needs so many
T = TypeVar("T")
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Effort:
    """How much is read and run; more of each makes intervals shorter."""

    windows: int = 64  # pieces of text that models are run on; a quarter as many more are held out for the lenses
    length: int = 128  # tokens of each, or as many as the model has positions
    tokens: int = 2_000_000  # most tokens of the text that are read for bigrams and frequencies
    samples: int = 4000  # rows of a table that are compared pair by pair
    lens_steps: int = 250  # steps that every tuned lens is trained for
    held_out: float = 0.2  # share of the rows that maps between two tables are not fitted on; 0 fits and scores all


@dataclass(frozen=True)
class Request:
    """What to inspect a model for."""

    texts: tuple[str, ...] = ()  # sources of text, as `--text` takes them; none leaves out what needs a text
    pairs: tuple[tuple[str, str], ...] = ()  # token texts (before, after) whose transitions are asked for
    only: tuple[str, ...] = ()  # names of sections; none for all that the models and the text allow
    seed: int = 0  # of every draw
    effort: Effort = Effort()  # how much work


@dataclass(frozen=True)
class InspectedModel:
    """One checkpoint under a name."""

    label: str  # what it is called in words and figures
    folder: Folder  # the checkpoint
    run: Path | None = None  # the comparison's folder, where it comes from one


def comparison_of(run: Path) -> Comparison:
    """Read what a comparison measured."""
    record = read_json(run / RESULTS)
    if record is None:
        raise RunError(f"{run / RESULTS} cannot be read", "run the comparison again")
    return Comparison.from_dict(record)


@dataclass
class Workspace:
    """Texts and models of one inspection, read and loaded at first use."""

    request: Request
    subjects: tuple[InspectedModel, ...]
    _results: dict[object, Any] = field(default_factory=dict)  # of `once`, by name

    def once(self, name: object, make: Callable[[], T]) -> T:
        """Call `make` the first time that this name is used, and return its result every time."""
        if name not in self._results:
            self._results[name] = make()
        result: T = self._results[name]
        return result

    def reads(self, subject: InspectedModel) -> bool:
        """Return True if there is a text for this model, and the packages that read it."""
        return FULL and (bool(self.request.texts) or subject.run is not None)

    def require_text(self, subject: InspectedModel) -> None:
        """Raise NotApplicable where there is none, or nothing that reads it."""
        if not FULL:
            raise NotApplicable(LACKS)
        if not self.reads(subject):
            raise NotApplicable("needs a text", "give --text")

    def ids(self, subject: InspectedModel) -> Ids:
        """Return the text in this model's tokens [N].

        Without a requested text, that is the text that the comparison held out.

        Raises:
            DataError: as `read_tokens`; or the text is too short for the windows that models are run on.
        """
        return self.once(("ids", subject.label), lambda: self._read(subject))

    def _read(self, subject: InspectedModel) -> Ids:
        """Read the text in a model's tokens [N]; DataError if it is too short."""
        if not self.request.texts and subject.run is not None:
            ids = self._held_out(subject.run)
        else:
            ids = self._given(subject.folder)
        length = self.request.effort.length
        least = FEWEST * length
        if len(ids) < least:
            what = f"the text has {len(ids):,} tokens, {FEWEST} windows of {length} need {least:,}"
            raise DataError(what, "give a longer text, or --length")
        return ids

    def _held_out(self, run: Path) -> Ids:
        """Return the tokens of the text that a comparison held out, as many as are read."""
        tokens = _CORPUS.load_prepared(run / DATA).split("heldout")
        ids: Ids = tokens[: self.request.effort.tokens].astype("int64")
        return ids

    def _given(self, folder: Folder) -> Ids:
        """Return the tokens of the requested texts by a folder's own tokenizer."""
        table = Facts(folder).roles.input
        if table is None:
            raise CheckpointError(f"{folder.path}: no input table is stored", "`tiewise check` says what is")
        most, texts = self.request.effort.tokens, self.request.texts
        if STDIN in texts:
            path, _ = self.once(STDIN, lambda: _copied_stdin(BYTES * most))
            texts = tuple(path if text == STDIN else text for text in texts)
        ids: Ids = _TOKENIZER.read_tokens(folder.path, texts, table.rows, most)
        return ids

    def counts(self, subject: InspectedModel, rows: int) -> Ids:
        """Return how often each token of a table of `rows` rows occurs.

        For a model of a comparison without a text of its own, in the text that it was trained on; otherwise in the text
        that was given.
        """
        run = subject.run
        if run is None or not self.of_training_text(subject):
            of_text: Ids = token_counts(self.ids(subject), rows)
            return of_text
        of_training = self.once(("training", run), lambda: self.training_counts(run))[:rows]
        counts = np.zeros(rows, np.int64)
        counts[: len(of_training)] = of_training
        return counts

    def of_training_text(self, subject: InspectedModel) -> bool:
        """Return True if `counts` are those of the text that the model was trained on."""
        return subject.run is not None and not self.request.texts

    def windows(self, subject: InspectedModel) -> tuple[Ids, Ids]:
        """Return (windows to measure on [n, T], windows held out [m, T]).

        They are taken in turn from the whole text.
        """
        effort = self.request.effort
        length = min(effort.length, self.opened(subject).longest or effort.length)
        ids = self.ids(subject)
        count = min(effort.windows + effort.windows // 4, len(ids) // length)
        windows: Ids = _TOKENIZER.windows(ids, length, count)
        is_held_out = np.arange(count) % 5 == 4
        return windows[~is_held_out], windows[is_held_out]

    def opened(self, subject: InspectedModel) -> Opened:
        """Return the model, loaded; raises as `open_model`."""

        def load() -> Opened:
            model: Opened = _LOADED.open_model(subject.folder.path)
            return model

        return self.once(("model", subject.label), load)

    @staticmethod
    def training_counts(run: Path) -> Ids:
        """Return how often each token occurs in a comparison's training text.

        Raises:
            DataError: the prepared text is not there, or what reads it.
        """
        if not FULL:
            raise DataError(LACKS)
        counts: Ids = _CORPUS.load_prepared(run / DATA).counts
        return counts


def mean_of(name: str, values: ArrayLike, **more: Any) -> Quantity:
    """Return the mean of independent values (of windows, batches or seeds) and its interval, under a name."""
    return Quantity.of_estimate(name, mean_interval(values), **more)


def longer_path(share: Quantity) -> str:
    """Name the use of a table whose gradient is longer, by the interval of the head path's share of both norms."""
    if share.low > 0.5:
        return "the head"
    if share.high < 0.5:
        return "the lookup"
    return "neither clearly"


class NotApplicable(TiewiseError):
    """A section that has no meaning for these subjects: left out, and the reason said."""


Measured = Callable[[InspectedModel, Workspace], Measurement]


@dataclass(frozen=True)
class Section:
    """One section."""

    name: str
    question: str  # its title
    order: int  # sections are reported in rising order; no two have the same
    measure: Measured
    text: bool = False  # whether it needs a text
    weight: int = 1  # how many times as long it takes as most others, roughly; for progress


SECTIONS: dict[str, Section] = {}


def section(*, question: str, order: int, text: bool = False, weight: int = 1) -> Callable[[Measured], Measured]:
    """Register a function of the folder `sections` as a section."""

    def registered(measure: Measured) -> Measured:
        SECTIONS[measure.__name__] = Section(measure.__name__, question, order, measure, text, weight)
        return measure

    return registered


def _copied_stdin(most: int) -> tuple[str, TemporaryDirectory[str]]:
    """Copy whole lines of standard input, which passes once, until they have `most` bytes.

    Returns the file and its folder, which is removed with this object.
    """
    folder = TemporaryDirectory(prefix="tiewise-")
    path = os.path.join(folder.name, STDIN)
    count = 0
    with open(path, "wb") as file:
        for line in sys.stdin.buffer:
            count += file.write(line)
            if count >= most:
                break
    if not count:
        raise DataError("standard input holds no text", "pipe one in")
    return path, folder
