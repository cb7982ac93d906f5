"""Vocabularies of 512 to 16,384 tokens at equal operations: `python -m benchmarks.vocabulary FOLDER`.

Study 18. Does the size of the vocabulary change whether tying pays, if training takes equally many operations? A larger
vocabulary has a larger head, so it gets fewer steps. Operations are those of the products with weights; tied and untied
models have equally many. Losses are bits per byte, since tokens differ. Each run keeps its best step.

Fixed before any run: tied less untied in bits per byte at each size, with intervals over seeds and held-out documents
and Holm's correction over the six sizes. The learning rate of each arm is tuned at each size: a first plan of wider
models at the default rate was stopped within its first size, its losses not looked at, when tuning removed most
differences of another study.
All runs take about 70 minutes of one core; a second call continues. The table is printed and written to
`benchmarks/results/vocabulary.csv`, the curves to `benchmarks/results/curves/vocabulary.jsonl`, and the chosen rates to
`tuned_rates.csv` by the name of the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks import study_curves, tuned_rates
from benchmarks.study_runs import train_comparison
from benchmarks.tables import write_table
from tiewise.training.kinds.decoder import make_config
from tiewise.training.results import Comparison, Difference, correct_by_holm, differences
from tiewise.training.settings import Settings

VOCABULARIES = (512, 1024, 2048, 4096, 8192, 16_384)
# `steps` are those of the smallest vocabulary; the whole held-out text is measured, so it is the same for all
SETTINGS = Settings(arms=("untied", "tied"), seeds=5, steps=2400, width=64, layers=2, learning_rate=0.008, tune=True)
CSV_FILE = Path(__file__).parent / "results" / "vocabulary.csv"
NAME = "vocabulary"


def weights_per_token(settings: Settings, vocab: int) -> int:
    """Return the entries of the weights that multiply each token: those of the body and of the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(settings, vocab))  # tied: one table, which is the head
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)


def steps_for(settings: Settings, vocab: int, least: int) -> int:
    """Return the steps that take as many operations as `settings.steps` with a vocabulary of `least` tokens."""
    return round(settings.steps * weights_per_token(settings, least) / weights_per_token(settings, vocab))


def cells(settings: Settings, vocabularies: Sequence[int]) -> dict[str, Settings]:
    """Return the settings of each vocabulary by the name of its folder."""
    least = min(vocabularies)
    return {
        f"vocabulary={vocab}": replace(settings, tokenizer=f"bpe:{vocab}", steps=steps_for(settings, vocab, least))
        for vocab in vocabularies
    }


def train(folder: Path, by_name: dict[str, Settings]) -> dict[str, Comparison]:
    """Train the comparisons that the folder lacks, and return all of them."""
    return {
        name: train_comparison(settings, folder / name, "benchmarks.vocabulary") for name, settings in by_name.items()
    }


def table(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Return a row for each vocabulary: the arms' losses and their difference, in bits per byte."""
    found = [differences(comparison, "untied", "tied")["bits_per_byte"] for comparison in comparisons]
    corrected = correct_by_holm(found)
    return [_row(comparison, d) for comparison, d in zip(comparisons, corrected, strict=True)]


def _row(comparison: Comparison, d: Difference) -> dict[str, str]:
    """Return the row of one vocabulary."""
    row = {"vocabulary": str(comparison.setting["vocab"]), "steps": str(comparison.setting["steps"])}
    for arm in comparison.arms:
        losses = [run.bits_per_byte for run in comparison.of(arm)]
        row[arm] = f"{sum(losses) / len(losses):.5f}"
    numbers = {"tied − untied": d.mean, "low": d.low, "high": d.high, "p_holm": d.p, "detectable": d.detectable}
    row |= {name: "" if value is None else f"{value:.5f}" for name, value in numbers.items()}
    return row | {"seeds": str(d.n), "documents": str(d.documents)}


def main(folder: Path, settings: Settings = SETTINGS, vocabularies: Sequence[int] = VOCABULARIES) -> None:
    """Train in the folder, and write table, curves and chosen rates."""
    rows = table(list(train(folder, cells(settings, vocabularies)).values()))
    write_table(CSV_FILE, rows)
    print(CSV_FILE.read_text(encoding="utf-8"))
    study_curves.write(study_curves.collect(folder), study_curves.CURVES / f"{NAME}.jsonl")
    tuned_rates.replace_rows([folder])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
