"""Scaled lookup gradients in the first fifth of training only: `python -m benchmarks.early_alpha FOLDER`.

Study 20. Lopardo et al. 2026 (arXiv:2603.26663) say that early gradients of the head shape a tied table, to the cost of
the early layers. Does a larger gradient at the lookup (α = 5), or a smaller one (α = ¼), in the first fifth of training
change that? α is 1 in the rest. As a control, the second cell has the same α throughout. Each run keeps its best step.

Fixed before any run, for each α less tied, paired over five seeds: the held-out loss; the tuned lens's KL to the final
distribution, in nats, before any layer and after the first; and which table of untied models the tied one resembles
(`inspect --only which_end`, output less input, by CKA above chance). The claim predicts that α = 5 lowers both KLs and
the resemblance to the output, and α = ¼ raises them. Holm's correction covers all losses and KLs; the resemblance has
an interval of its own. Forty runs and their lenses take about an hour and a half of one core; a second call continues.
The table is printed and written to `benchmarks/results/early_alpha.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import TrainerCallback

import tiewise
from benchmarks import study_curves
from benchmarks.study_runs import train_comparison
from benchmarks.tables import write_table
from tiewise.boundary.installation import Installed
from tiewise.core.measurement import Measurement
from tiewise.training.folder import seed_folder
from tiewise.training.kinds.decoder import KIND
from tiewise.training.results import Comparison, Difference, correct_by_holm, paired
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

CELLS = {"alpha-in-first-fifth": 0.2, "alpha-throughout": 1.0}  # fraction of the steps with α
SETTINGS = Settings(
    arms=("tied", "untied", "tied+alpha=0.25", "tied+alpha=5"),
    seeds=5,
    steps=600,
    width=64,
    layers=4,
    learning_rate=0.004,
    tokenizer="bpe:2048",
    measured=65_536,
)
CSV_FILE = Path(__file__).parent / "results" / "early_alpha.csv"
NAME = "early-alpha"
LENS_STEPS, WINDOWS = 1000, 256
KL_CURVE, LENS = "How far is each layer from the final distribution?", "tuned lens"
RESEMBLANCE = "output − input, by CKA above chance"
Row = dict[str, str]


class EarlyAlpha(TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types
    """Callback that sets α to 1 from step `until` on; before, α is that of the spec."""

    def __init__(self, installed: Installed, until: int) -> None:
        self.link, self.until = installed._link, until

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Set α for this step, also in a run that was resumed."""
        alpha = self.link.spec.alpha if state.global_step < self.until else 1.0
        self.link.options = replace(self.link.options, alpha=alpha)


def make_trainer(fraction: float, plain: Any, job: Job, installed: Installed) -> TiewiseTrainer:
    """Return the Trainer of a decoder that has α in a first fraction of its steps."""
    trainer: TiewiseTrainer = plain(job, installed)
    trainer.add_callback(EarlyAlpha(installed, round(fraction * job.settings.steps)))
    return trainer


def train(folder: Path, settings: Settings) -> dict[str, Comparison]:
    """Train the comparisons that the folder lacks, and return both."""
    comparisons = {}
    for cell, fraction in CELLS.items():
        out = folder / cell
        with patch.object(KIND, "trainer", partial(make_trainer, fraction, KIND.trainer)):
            comparisons[cell] = train_comparison(settings, out, "benchmarks.early_alpha")
    return comparisons


def lens_distances(model: Path, steps: int) -> tuple[float, float]:
    """Return the tuned lens's KL in nats before any layer and after the first."""
    inspection = tiewise.inspect(model, text="builtin", only=["lens"], windows=WINDOWS, lens_steps=steps)
    (measured,) = inspection.found("lens").values()
    assert isinstance(measured, Measurement)
    curve = next(curve for curve in measured.curves if (curve.name, curve.which) == (KL_CURVE, LENS))
    return curve.y[0], curve.y[1]


def outcomes(comparison: Comparison, arm: str, lens_steps: int) -> dict[str, list[float]]:
    """Return an arm's compared values by seed."""
    assert comparison.folder is not None
    models = [seed_folder(comparison.folder, arm, seed) / "final" for seed in comparison.seeds]
    first, second = zip(*(lens_distances(model, lens_steps) for model in models), strict=True)
    losses = [run.heldout_nll for run in comparison.of(arm)]
    return {"heldout_nll": losses, "KL before any layer": list(first), "KL after layer 1": list(second)}


def compare_arms(comparison: Comparison, lens_steps: int) -> list[Difference]:
    """Return the differences of every α to tied, by metric."""
    tied, *others = (arm for arm in comparison.arms if arm != "untied")
    reference = outcomes(comparison, tied, lens_steps)
    return [
        paired(reference[metric], values, arm=arm, metric=metric)
        for arm in others
        for metric, values in outcomes(comparison, arm, lens_steps).items()
    ]


def resemblances(cell: str, comparison: Comparison) -> Iterator[Row]:
    """Yield for every tied arm which table of the untied models it resembles."""
    assert comparison.folder is not None
    found = tiewise.inspect(comparison.folder, only=["which_end"]).found("which_end")
    for arm, measured in found.items():
        assert isinstance(measured, Measurement)
        q = next(q for q in measured.quantities if q.name == RESEMBLANCE)
        yield {"cell": cell, "arm": arm, "metric": RESEMBLANCE} | _numbers(float(q.value), q.low, q.high)


def _numbers(value: float, low: float | None, high: float | None, p: float | None = None) -> Row:
    """Return a value with its interval and corrected p as text."""
    numbers = {"value": value, "low": low, "high": high, "p_holm": p}
    return {name: "" if number is None else f"{number:.5f}" for name, number in numbers.items()}


def main(folder: Path, settings: Settings = SETTINGS, lens_steps: int = LENS_STEPS) -> None:
    """Train in the folder, and write table and curves."""
    comparisons = train(folder, settings)
    found = [(cell, d) for cell, comparison in comparisons.items() for d in compare_arms(comparison, lens_steps)]
    corrected = correct_by_holm([d for _, d in found])
    rows: list[Row] = []
    for (cell, _), d in zip(found, corrected, strict=True):
        rows.append({"cell": cell, "arm": d.arm, "metric": d.metric} | _numbers(d.mean, d.low, d.high, d.p))
    for cell, comparison in comparisons.items():
        rows += resemblances(cell, comparison)
    write_table(CSV_FILE, rows)
    print(CSV_FILE.read_text(encoding="utf-8"))
    study_curves.write(study_curves.collect(folder), study_curves.CURVES / f"{NAME}.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
