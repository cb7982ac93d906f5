"""Exact losses of made languages beside those of models without layers: `python -m benchmarks.language_floors FOLDER`.

FOLDER is a finished `tiewise sweep causes`. A model without layers reads one word. With two tables it can reach the
probability of the next word given that word. Symmetric logits can reach no more than the probability of the next word
alone, because all that a word tells of the next one in these languages is irreversible (`synthetic`). (Ends of
documents are reversible, and worth 0.0001 nats.) Both losses are those of the true probabilities on the tokens that the
models are measured on. The table is printed and written to `benchmarks/results/language_floors.csv`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.tables import write_table
from tiewise.training.data.corpus import PreparedText, load_prepared
from tiewise.training.data.synthetic import CLASSES, LENGTH, Language
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison

CSV_FILE = Path(__file__).parent / "results" / "language_floors.csv"
ENDS = 1 / (LENGTH + 1)  # share of tokens that end a document
ENDS_NEXT = 1 / LENGTH  # probability that a document ends after a word, if its place is not known


@dataclass(frozen=True)
class Floors:
    """Losses of true probabilities in nats per token."""

    alone: float  # of the next token alone, the best that symmetric logits reach
    pairs: float  # of the next token given one before it, the best that two tables reach
    tokens: int  # number of predicted tokens


class TrueProbabilities:
    """Probabilities of the tokens of a language of one script. A token None ends a document."""

    def __init__(self, language: Language) -> None:
        self.weights, self.moves = language.rank_weights(), language.moves()

    def alone(self, token: int | None) -> float:
        """Return the probability of a token, if nothing before it is known."""
        if token is None:
            return ENDS
        return float((1 - ENDS) * self.weights[token // CLASSES] / CLASSES)

    def after(self, before: int | None, token: int | None) -> float:
        """Return the probability of a token, given the one before it."""
        if token is None:
            return ENDS_NEXT
        if before is None:  # a document begins
            return float(self.weights[token // CLASSES] / CLASSES)
        move = self.moves[(token - before) % CLASSES]
        return float((1 - ENDS_NEXT) * self.weights[token // CLASSES] * move)


def floors(language: Language, tokens: list[str], length: int) -> Floors:
    """Return the losses on the tokens that blocks of `length` predict: all but the first of each.

    Raises ValueError for a language of several scripts.
    """
    if language.scripts != 1:
        raise ValueError("a language of one script is needed")
    numbers = {f"Ġ{word}": number for number, word in enumerate(language.words_of(0))}
    text = [numbers.get(token) for token in tokens]
    blocks = [text[start : start + length] for start in range(0, len(text) - length + 1, length)]
    predicted = [pair for block in blocks for pair in pairwise(block)]
    true = TrueProbabilities(language)
    alone = [true.alone(token) for _, token in predicted]
    pairs = [true.after(before, token) for before, token in predicted]
    return Floors(-float(np.log(alone).mean()), -float(np.log(pairs).mean()), len(predicted))


def heldout_tokens(text: PreparedText) -> list[str]:
    """Return the tokens of the held-out split as text."""
    return [str(token) for token in text.tokenizer.convert_ids_to_tokens(text.split("heldout").tolist())]


def row(cell: Path) -> dict[str, str]:
    """Return the row of one cell: exact losses, and by how much each arm is above the one that it can reach.

    Raises ValueError if the models were measured on other tokens.
    """
    comparison = Comparison.from_dict(read_json(cell / RESULTS))
    [name] = comparison.data["texts"]
    exact = floors(Language.parse(name), heldout_tokens(load_prepared(cell / "data")), comparison.setting["length"])
    measured = comparison.runs[0].documents
    if measured is None or sum(measured.tokens) != exact.tokens:
        raise ValueError(f"{cell}: the models were not measured on the whole held-out text")
    tied, untied = (np.mean([run.heldout_nll for run in comparison.of(arm)]) for arm in ("tied", "untied"))
    numbers = {
        "symmetric": exact.alone,
        "pairs": exact.pairs,
        "symmetric − pairs": exact.alone - exact.pairs,
        "tied − symmetric": tied - exact.alone,
        "untied − pairs": untied - exact.pairs,
    }
    return {"irreversibility": name.rpartition("=")[2]} | {name: f"{value:.4f}" for name, value in numbers.items()}


def main(study: Path) -> None:
    """Print and write the rows of the cells without layers."""
    write_table(CSV_FILE, [row(cell) for cell in sorted(study.glob("*-layers=0"))])
    print(CSV_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
