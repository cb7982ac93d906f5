"""Write the trained tables that `tiewise explore` shows, from a comparison of two small models.

    .venv/bin/python tools/make_explorer_tables.py                  # trains for about five minutes on one core
    .venv/bin/python tools/make_explorer_tables.py --run FOLDER     # takes a finished run of COMMAND
    .venv/bin/python tools/make_explorer_tables.py --out FILE --steps 1000

The training text is the documentation that every Python carries, so another version of Python gives other numbers. The
file names the version, the text's digest and the command. It stores the rows of the most frequent whole words in fp16,
and how often each pair of words comes in both orders in the training text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from tiewise.inspection.workspace import comparison_of
from tiewise.training.data.corpus import PreparedText, load_prepared
from tiewise.training.folder import DATA, seed_folder
from tiewise.training.results import FINAL

TARGET = Path(__file__).parents[1] / "src" / "tiewise" / "report" / "explorer" / "data" / "trained_tables.json"
STEPS = 3000
SIZES = ["--set", "width=64", "--set", "layers=1", "--set", "batch=16"]
COMMAND = ["compare", "--text", "builtin", "--tokenizer", "bpe:2048", "--arms", "tied,untied", "--seeds", "1"]
MOST_WORDS, MOST_PAIRS = 512, 40
LEAST_OCCURRENCES = 40  # of a word in the training text
LEAST_WHOLE = 0.9  # share of a token's occurrences that no letter follows; " vari" of "variable" has less
LEAST_PAIR, MOST_REVERSED = 40, 0.1  # a pair needs so many occurrences; share of them that the other order may have
INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TrainingText:
    """Training split of a run, and the text of each token."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]  # occurrences of each token
    names: list[str]

    @classmethod
    def of_prepared(cls, prepared: PreparedText) -> TrainingText:
        """Read the training split of a prepared text."""
        names = [prepared.tokenizer.decode([token]) for token in range(prepared.vocab)]
        return cls(prepared.split("train").astype(np.int64), prepared.counts, names)

    def frequent_words(self, most: int) -> list[int]:
        """Return the most frequent tokens that are a whole word after a space, most frequent first."""
        counts = self.counts
        begins_with_letter = np.array([name[:1].isalpha() for name in self.names])
        continued = np.bincount(self.ids[:-1][begins_with_letter[self.ids[1:]]], minlength=len(self.names))
        words = []
        for token in np.argsort(-counts, kind="stable").tolist():
            is_whole = continued[token] <= (1 - LEAST_WHOLE) * counts[token]
            if counts[token] >= LEAST_OCCURRENCES and is_whole and self._is_word(token):
                words.append(token)
        return words[:most]

    def _is_word(self, token: int) -> bool:
        """Return whether a token is a space and at least two letters."""
        name = self.names[token]
        return len(name) > 2 and name[0] == " " and name[1:].isalpha()

    def one_way_pairs(self, words: list[int], most: int) -> list[list[int]]:
        """Return the most frequent pairs whose other order is rare: [place, place, count, count reversed]."""
        places = {token: place for place, token in enumerate(words)}
        counts = Counter(zip(self.ids[:-1].tolist(), self.ids[1:].tolist(), strict=True))
        pairs = []
        for (first, second), count in counts.most_common():
            reversed_count = counts[second, first]
            is_rare = reversed_count <= MOST_REVERSED * count
            if first in places and second in places and count >= LEAST_PAIR and is_rare:
                pairs.append([places[first], places[second], count, reversed_count])
        return pairs[:most]


def read_rows(run: Path, arm: str, tensor: str, rows: list[int]) -> str:
    """Return rows of a trained table as little-endian fp16 in base64."""
    with safe_open(seed_folder(run, arm, 1) / FINAL / "model.safetensors", "np") as file:
        table = file.get_tensor(tensor)
    return b64encode(table[rows].astype("<f2").tobytes()).decode("ascii")


def tables_of(run: Path, steps: int) -> dict[str, Any]:
    """Return the record of a finished run of COMMAND with these steps."""
    prepared, comparison = load_prepared(run / DATA), comparison_of(run)
    text = TrainingText.of_prepared(prepared)
    words = text.frequent_words(MOST_WORDS)
    return {
        "source": {
            "command": f"tiewise {' '.join(with_steps(steps))}",
            "python": prepared.facts["python"],
            "sha256": prepared.facts["sha256"],
            "tokens": len(text.ids),
            "vocab": prepared.vocab,
            "loss": {each.arm: round(each.heldout_nll, 4) for each in comparison.runs},
        },
        "width": comparison.setting["width"],
        "words": [text.names[token].strip() for token in words],
        "counts": text.counts[words].tolist(),
        "pairs": text.one_way_pairs(words, MOST_PAIRS),
        "tables": {
            "tied": read_rows(run, "tied", INPUT, words),
            "input": read_rows(run, "untied", INPUT, words),
            "output": read_rows(run, "untied", OUTPUT, words),
        },
    }


def with_steps(steps: int) -> list[str]:
    """Return COMMAND with a number of steps and the sizes."""
    return [*COMMAND, "--steps", str(steps), *SIZES]


def main() -> None:
    """Train unless a run is given, and write the file."""
    parser = argparse.ArgumentParser(description="Write the trained tables that `tiewise explore` shows.")
    parser.add_argument("--run", type=Path, help="finished run of the same command")
    parser.add_argument("--out", type=Path, default=TARGET, help="file to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run
        if run is None:
            run = Path(folder) / "run"
            command = [*with_steps(arguments.steps), "--out", str(run)]
            subprocess.run([sys.executable, "-m", "tiewise", *command], check=True)
        text = json.dumps(tables_of(run, arguments.steps), separators=(",", ":"), ensure_ascii=True)
    arguments.out.write_text(f"{text}\n", encoding="utf-8")
    print(f"{arguments.out}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
