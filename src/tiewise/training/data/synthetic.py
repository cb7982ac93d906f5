"""Artificial languages (`synthetic:irreversibility=0.3,scripts=2`), which vary one cause of a tying gap at a time.

A word has a script, a rank, and one of three classes, A → B → C → A. The next word's class is the same in one case of
three, else one step forward with probability f, else one step back. Its script is the same in seven of eight cases,
else any. Its rank is drawn independently, p(r) ∝ r^−zipf. Classes are equally frequent, and a step and its reverse
differ in f alone:

    irreversibility = ⅔ (ln 2 − h(f)) nats,   h the binary entropy; 0 at f = ½, 0.46 at f = 1

This is exact for any exponent, scripts and words, and it is all that a word tells about the next one's class. At f = ½
the rest has no negative eigenvalues: the floor of a direct path of one table with an output bias is that of two tables
plus the irreversibility, and no more. Words of one rank are equally frequent; over ranks the vocabulary has Zipf's
exponent. A document has 128 words and is drawn independently of the others. Equal options give equal text on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice, product
from typing import Any

import numpy as np
import scipy

from tiewise.core.errors import DataError, TiewiseError, did_you_mean
from tiewise.core.records import read_setting, require

NAME = "synthetic"
CLASSES, STAYS, LENGTH = 3, 7 / 8, 128
MOVES = 2 / 3  # probability that the class changes
_LETTERS = (range(0x61, 0x7B), range(0x430, 0x450), range(0x10D0, 0x10F1), range(0x5D0, 0x5EB))
SCRIPTS = len(_LETTERS)  # Latin, Cyrillic, Georgian, Hebrew


@dataclass(frozen=True)
class Language:
    """Properties of an artificial language."""

    irreversibility: float = 0.3  # nats per word
    zipf: float = 1.0
    scripts: int = 1
    types: int = 1024  # number of distinct words in all scripts together
    words: int = 500_000  # length of the text

    @classmethod
    def parse(cls, text: str) -> Language:
        """Read `synthetic:NAME=VALUE,…`; options without a value have their defaults.

        Raises DataError.
        """
        try:
            language = cls(**cls._read_options(text))
            language._check()
        except TiewiseError as error:
            raise DataError(error.problem, error.remedy) from None
        return language

    @classmethod
    def _read_options(cls, text: str) -> dict[str, Any]:
        """Return the options in a text, in the types of their defaults."""
        defaults = {field.name: field.default for field in fields(cls)}
        options = {}
        for part in text.removeprefix(NAME).removeprefix(":").split(","):
            if not part:
                continue
            name, _, value = part.partition("=")
            if name not in defaults:
                listed = ", ".join(f"{option}={default}" for option, default in defaults.items())
                remedy = f"{did_you_mean(name, defaults)}known, with their defaults: {listed}"
                raise DataError(f"{text!r} has no {name!r}", remedy)
            number = int(value) if value.isdecimal() else value
            options[name] = read_setting(type(defaults[name]), number, f"{name} in {text!r}")
        return options

    def _check(self) -> None:
        """Raise RunError for an option out of its range."""
        require(self, "irreversibility", lambda nats: 0 <= nats <= MOVES * np.log(2), "use nats from 0 to 0.46")
        require(self, "zipf", lambda exponent: 0 <= exponent <= 4, "use an exponent from 0 to 4")
        require(self, "scripts", lambda n: 1 <= n <= SCRIPTS, f"use 1 to {SCRIPTS}")
        least = CLASSES * self.scripts
        require(self, "types", lambda n: least <= n <= 100_000, f"use {least} (a word for each class) to 100000")
        require(self, "words", lambda n: n >= LENGTH, f"use {LENGTH} or more")

    @property
    def forward(self) -> float:
        """Probability f of a step forward, at least ½."""

        def missing(f: float) -> float:
            """Return the irreversibility at f minus that of this language."""
            return float(MOVES * (np.log(2) - scipy.special.entr([f, 1 - f]).sum()) - self.irreversibility)

        return float(scipy.optimize.brentq(missing, 0.5, 1))

    def rank_weights(self) -> np.ndarray:
        """Return the probability of each rank, float64[ranks]."""
        weights: np.ndarray = np.arange(1.0, self.types // (CLASSES * self.scripts) + 1) ** -self.zipf
        weights /= weights.sum()
        return weights

    def moves(self) -> tuple[float, float, float]:
        """Return the probabilities of the next word's class: the same, one step forward, one step back."""
        return 1 - MOVES, MOVES * self.forward, MOVES * (1 - self.forward)

    def words_of(self, script: int) -> list[str]:
        """Return the words of a script. The word at 3 r + c has rank r and class c, both from 0."""
        return _spell_words(_LETTERS[script], len(self.rank_weights()) * CLASSES)

    def documents(self) -> Iterator[str]:
        """Yield the documents, with a space before each word, so that all tokens have one form."""
        draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(0)))
        weights = self.rank_weights()
        moved = self.moves()
        words = [self.words_of(script) for script in range(self.scripts)]
        for _ in range(self.words // LENGTH):
            steps = draw.choice((0, 1, -1), LENGTH, p=moved)
            classes = (draw.randint(CLASSES) + np.cumsum(steps)) % CLASSES
            changes = np.where(draw.random_sample(LENGTH) < STAYS, 0, draw.randint(self.scripts, size=LENGTH))
            scripts = (draw.randint(self.scripts) + np.cumsum(changes)) % self.scripts
            numbers = draw.choice(len(weights), LENGTH, p=weights) * CLASSES + classes
            places = zip(scripts.tolist(), numbers.tolist(), strict=True)
            yield "".join(f" {words[script][number]}" for script, number in places)


def _spell_words(letters: range, count: int) -> list[str]:
    """Return `count` different words of two letters or more, short ones first."""
    alphabet = [chr(letter) for letter in letters]
    words = chain.from_iterable(product(alphabet, repeat=size) for size in range(2, 6))
    return ["".join(word[::-1]) for word in islice(words, count)]
