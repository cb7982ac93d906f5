"""What several measures share: a text in each model's own tokens, and models that are loaded once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tiewise.analysis.token_texts import find_tokens
from tiewise.checkpoint.facts import Facts
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.frequency import token_counts
from tiewise.data.corpus import load_prepared
from tiewise.data.tokenizer import Ids, read_tokens, windows
from tiewise.inspection.request import Subject
from tiewise.inspection.section import Bench
from tiewise.internals.loaded import Opened, open_model
from tiewise.training.folder import DATA

FEWEST = 10  # windows: eight to measure on, two to hold out
STDIN = "-"
BYTES = 64  # of standard input that are kept for each token that is read: no text needs so many


@dataclass
class Workbench(Bench):
    """Texts and models of one inspection, read and loaded at first use."""

    _ids: dict[str, Ids] = field(default_factory=dict)
    _kept: TemporaryDirectory[str] | None = None
    _opened: dict[str, Opened] = field(default_factory=dict)

    def check(self) -> None:
        """Read what was given before anything is measured.

        Raises:
            DataError: a text that is too short, a tokenizer that is missing, or a pair that is not two tokens.
        """
        for subject in self.subjects:
            for pair in self.request.pairs:
                find_tokens(subject.folder, pair)
            if self.request.texts:
                self.ids(subject)

    def reads(self, subject: Subject) -> bool:
        """Whether there is a text for this model."""
        return bool(self.request.texts) or subject.run is not None

    def ids(self, subject: Subject) -> Ids:
        """The text in this model's tokens [N]; of a comparison without one, the text that it held out.

        Raises:
            DataError: as `read_tokens`; or the text is too short for the windows that models are run on.
        """
        if subject.label not in self._ids:
            ids, length = self._read(subject), self.request.effort.length
            if len(ids) < FEWEST * length:
                what = f"the text has {len(ids):,} tokens, {FEWEST} windows of {length} need {FEWEST * length:,}"
                raise DataError(what, "give a longer text, or --length")
            self._ids[subject.label] = ids
        return self._ids[subject.label]

    def windows(self, subject: Subject) -> tuple[Ids, Ids]:
        """(windows to measure on [n, T], windows held out [m, T]), taken in turn from the whole text."""
        effort = self.request.effort
        length = min(effort.length, self.opened(subject).longest or effort.length)
        ids = self.ids(subject)
        count = min(effort.windows + effort.windows // 4, len(ids) // length)
        found, held = windows(ids, length, count), np.arange(count) % 5 == 4
        return found[~held], found[held]

    def opened(self, subject: Subject) -> Opened:
        """The model, loaded.

        Raises:
            CheckpointError, InstallError: as `open_model`.
        """
        if subject.label not in self._opened:
            self._opened[subject.label] = open_model(subject.folder.path)
        return self._opened[subject.label]

    @staticmethod
    def training_counts(run: Path) -> Ids:
        """How often each token occurs in a comparison's training text.

        Raises:
            DataError: the prepared text is not there.
        """
        text = load_prepared(run / DATA)
        return token_counts(text.split("train"), text.vocab)

    def _read(self, subject: Subject) -> Ids:
        effort = self.request.effort
        if not self.request.texts and subject.run is not None:
            return load_prepared(subject.run / DATA).split("heldout")[: effort.tokens].astype("int64")
        table = Facts(subject.folder).roles.input
        if table is None:
            what = f"{subject.folder.path}: no input table is stored"
            raise CheckpointError(what, "`tiewise check` says what is")
        texts = self.request.texts
        if STDIN in texts:  # which passes once and is read by every model, from a copy in a file
            if self._kept is None:
                self._kept = TemporaryDirectory(prefix="tiewise-")
                _keep(Path(self._kept.name) / STDIN, BYTES * effort.tokens)
            texts = tuple(str(Path(self._kept.name) / STDIN) if text == STDIN else text for text in texts)
        return read_tokens(subject.folder.path, texts, table.rows, effort.tokens)


def _keep(path: Path, most: int) -> None:
    """Copy whole lines of standard input until there are `most` bytes."""
    count = 0
    with path.open("wb") as file:
        for line in sys.stdin.buffer:
            count += file.write(line)
            if count >= most:
                break
    if not count:
        raise DataError("standard input holds no text", "give a text that is not empty")
