"""`Workspace` and `section`: the inputs that all sections share, and their registry.

    @section(question="Would applying the shared block more or less often predict better?", order=120, text=True)
    def applications(model, workspace) -> Measurement: ...

A section is such a function in its own file of the folder `sections`; no list names it. `--only` takes the function's
name. Sentences, table, figures and JSON are made from the `Measurement` that it returns. If a section does not apply to
a model, it raises `NotApplicable` with the reason.

The workspace reads the text in each model's tokens and loads each model once.
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
from tiewise.checkpoint.hub_names import files_needed_on_disk, is_hub_path
from tiewise.core import Late
from tiewise.core.errors import CheckpointError, DataError, RunError, TiewiseError
from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import Measurement, Quantity
from tiewise.core.text import token_counts
from tiewise.training.folder import DATA, RESULTS, read_json
from tiewise.training.results import Comparison

if TYPE_CHECKING:
    from tiewise.inspection.running.loaded import Opened

HAS_TORCH = find_spec("torch") is not None and find_spec("transformers") is not None  # without: only stored tables
MISSING_PACKAGES = "needs torch and transformers: pip install 'tiewise[torch]'"
_CORPUS, _TOKENIZER = Late("tiewise.training.data.corpus"), Late("tiewise.training.data.tokenizer")
_LOADED = Late("tiewise.inspection.running.loaded")
FEWEST = 10  # windows: eight to measure on, two held out
STDIN = "-"
BYTES = 64  # of standard input that are copied per token to be read; no text needs more
T = TypeVar("T")
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Effort:
    """Amounts of text, rows and steps; larger ones make intervals shorter."""

    windows: int = 64  # windows of text that models run on; a quarter as many more are held out for the lenses
    length: int = 128  # tokens per window, at most the number of positions of the model
    tokens: int = 2_000_000  # largest number of text tokens that are read for bigrams and frequencies
    samples: int = 4000  # rows of a table that are compared pair by pair
    lens_steps: int = 250  # training steps of each tuned lens
    held_out: float = 0.2  # share of the rows that no map between two tables is fitted on; 0 fits and scores all


@dataclass(frozen=True)
class Request:
    """Options of one inspection."""

    texts: tuple[str, ...] = ()  # sources of text, as `--text` takes them; () leaves out sections that need one
    pairs: tuple[tuple[str, str], ...] = ()  # token texts (before, after) whose transitions are reported
    only: tuple[str, ...] = ()  # names of sections; if empty, all that the models and the text allow
    seed: int = 0  # of all random draws
    effort: Effort = Effort()  # amounts of text, rows and steps
    word_pairs: str | None = None  # file of rated word pairs; None leaves out the section `word_pairs`


@dataclass(frozen=True)
class InspectedModel:
    """One checkpoint under a name."""

    label: str  # the model's name in sentences and figures
    folder: Folder  # the opened checkpoint
    run: Path | None = None  # folder of the comparison that the model belongs to, if any


def comparison_of(run: Path) -> Comparison:
    """Read the results of a comparison from its folder."""
    record = read_json(run / RESULTS)
    if record is None:
        raise RunError(f"{run / RESULTS} cannot be read", "run the comparison again")
    return Comparison.from_dict(record)


@dataclass
class Workspace:
    """Texts and models of one inspection, read and loaded at first use."""

    request: Request
    models: tuple[InspectedModel, ...]
    _results: dict[object, Any] = field(default_factory=dict)  # results of `once`, by name

    def once(self, name: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called the first time that this name is used."""
        if name not in self._results:
            self._results[name] = make()
        result: T = self._results[name]
        return result

    def has_text(self, model: InspectedModel) -> bool:
        """Return True if this model has a text and the packages that read it are installed."""
        return HAS_TORCH and (bool(self.request.texts) or model.run is not None)

    def require_text(self, model: InspectedModel) -> None:
        """Raise NotApplicable if this model has no text, or the packages that read it are missing."""
        if not HAS_TORCH:
            raise NotApplicable(MISSING_PACKAGES)
        if not self.has_text(model):
            raise NotApplicable("needs a text", "give --text")

    def ids(self, model: InspectedModel) -> Ids:
        """Return the text in this model's tokens [N].

        Without a requested text, it is the held-out text of the model's comparison.

        Raises:
            DataError: as `read_tokens`; or the text is too short for the windows that models are run on.
        """
        return self.once(("ids", model.label), lambda: self._read(model))

    def _read(self, model: InspectedModel) -> Ids:
        """Read the text in a model's tokens [N]; DataError if it is too short."""
        if not self.request.texts and model.run is not None:
            ids = self._heldout_tokens(model.run)
        else:
            ids = self._requested_tokens(model.folder)
        length = self.request.effort.length
        least = FEWEST * length
        if len(ids) < least:
            problem = f"the text has {len(ids):,} tokens, {FEWEST} windows of {length} need {least:,}"
            raise DataError(problem, "give a longer text, or --length")
        return ids

    def _heldout_tokens(self, run: Path) -> Ids:
        """Return the first `effort.tokens` tokens of a comparison's held-out text."""
        tokens = _CORPUS.load_prepared(run / DATA).split("heldout")
        ids: Ids = tokens[: self.request.effort.tokens].astype("int64")
        return ids

    def _requested_tokens(self, folder: Folder) -> Ids:
        """Return the tokens of the requested texts by the tokenizer in a model's folder."""
        if is_hub_path(folder.path):
            raise files_needed_on_disk(folder.path)
        table = Facts(folder).roles.input
        if table is None:
            raise CheckpointError(f"{folder.path}: no input table is stored", "`tiewise check` says what is")
        most, texts = self.request.effort.tokens, self.request.texts
        if STDIN in texts:
            path, _ = self.once(STDIN, lambda: _copy_stdin(BYTES * most))
            texts = tuple(path if text == STDIN else text for text in texts)
        ids: Ids = _TOKENIZER.read_tokens(folder.path, texts, table.rows, most)
        return ids

    def counts(self, model: InspectedModel, rows: int) -> Ids:
        """Return how often each token of a table of `rows` rows occurs.

        The text is the requested one. For a model of a comparison without a requested text, it is the training text.
        """
        run = model.run
        if run is None or not self.counts_training_text(model):
            of_text: Ids = token_counts(self.ids(model), rows)
            return of_text
        of_training = self.once(("training", run), lambda: self.training_counts(run))[:rows]
        counts = np.zeros(rows, np.int64)
        counts[: len(of_training)] = of_training
        return counts

    def counts_training_text(self, model: InspectedModel) -> bool:
        """Return True if `counts` are those of the text that the model was trained on."""
        return model.run is not None and not self.request.texts

    def windows(self, model: InspectedModel) -> tuple[Ids, Ids]:
        """Return (windows to measure on [n, T], held-out windows [m, T]).

        Both are spread over the entire text: every fifth window is held out.
        """
        effort = self.request.effort
        length = min(effort.length, self.opened(model).longest or effort.length)
        ids = self.ids(model)
        count = min(effort.windows + effort.windows // 4, len(ids) // length)
        windows: Ids = _TOKENIZER.windows(ids, length, count)
        is_heldout = np.arange(count) % 5 == 4
        return windows[~is_heldout], windows[is_heldout]

    def opened(self, model: InspectedModel) -> Opened:
        """Return the loaded model; raises as `open_model`."""

        def load() -> Opened:
            """Load the model."""
            loaded: Opened = _LOADED.open_model(model.folder.path)
            return loaded

        return self.once(("model", model.label), load)

    @staticmethod
    def training_counts(run: Path) -> Ids:
        """Return how often each token occurs in a comparison's training text.

        Raises:
            DataError: the prepared text is missing, or the packages that read it are.
        """
        if not HAS_TORCH:
            raise DataError(MISSING_PACKAGES)
        counts: Ids = _CORPUS.load_prepared(run / DATA).counts
        return counts


def mean_of(name: str, values: ArrayLike, **more: Any) -> Quantity:
    """Return the mean of independent values and its interval as a named quantity.

    The values are of windows, batches or seeds.
    """
    return Quantity.of_estimate(name, mean_interval(values), **more)


def longer_path(share: Quantity) -> str:
    """Return which use of a table has the larger gradient.

    `share` is the head path's share of both norms. Neither is larger if its interval includes one half.
    """
    if share.low > 0.5:
        return "the head's gradient is larger"
    if share.high < 0.5:
        return "the lookup's gradient is larger"
    return "no larger gradient detected"


class NotApplicable(TiewiseError):
    """Error of a section that does not apply to a model; its message is the reason."""


Measure = Callable[[InspectedModel, Workspace], Measurement]


@dataclass(frozen=True)
class Section:
    """A question about a model, and the function that measures the answer."""

    name: str
    question: str  # its title
    order: int  # sections are reported in rising order; no two have the same
    measure: Measure
    text: bool = False  # True if the section needs a text
    weight: int = 1  # approximate duration relative to most other sections, for progress


SECTIONS: dict[str, Section] = {}


def section(*, question: str, order: int, text: bool = False, weight: int = 1) -> Callable[[Measure], Measure]:
    """Register a function of the folder `sections` as a section."""

    def register(measure: Measure) -> Measure:
        """Register the function under its name and return it."""
        SECTIONS[measure.__name__] = Section(measure.__name__, question, order, measure, text, weight)
        return measure

    return register


def _copy_stdin(most: int) -> tuple[str, TemporaryDirectory[str]]:
    """Copy full lines of standard input to a file until they have `most` bytes.

    Standard input can be read once only. The result is the file's path and its folder, which is deleted with the
    returned
    object.
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
