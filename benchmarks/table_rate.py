"""Learning rate of tables over widths: `python -m benchmarks.table_rate FOLDER`.

Study 19. Which rule for the learning rate of a table transfers from width 64 to 128 and 256? Tables and head have one
of seven rates. All other parameters have 0.512 / D, which fits the best rates of whole models at widths 32, 64 and 128
(`benchmarks/results/tuned_rates.csv`). The runs are widths × tied and untied × AdamW and Muon for the hidden matrices
× seven rates × two seeds: 168 runs, about 80 minutes of one core; a second call continues.

Fixed before any run: a rule multiplies the best rate at width 64 by (D / 64)^p. It transfers if the held-out loss, a
mean over seeds at the best steps, exceeds the lowest one of each larger width by at most 5 %. Between two rates the
loss is interpolated along the logarithm. Beyond the measured rates a rule has no result. A first plan had one rate
for all other parameters at every width; it was changed before any run, since that rate is too low at width 64. The
rates first were 0.001 to 0.064. At width 64 with AdamW the largest was the best, so 0.128 and 0.256 replaced the two
smallest before the other runs.

Muon takes steps of the root mean square of AdamW's (`match_rms_adamw`), so one rate serves both. The result is printed
and written to `table_rate.csv` and `table_rate_rules.csv` in `benchmarks/results`, the curves to its folder `curves`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import tiewise
from benchmarks import study_curves
from benchmarks.study_runs import train_comparison
from benchmarks.tables import write_table
from tiewise.boundary.installation import Installed
from tiewise.training.data.corpus import Blocks
from tiewise.training.kinds.decoder import KIND
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings
from tiewise.training.trainer import ADAM_BETAS, Job, TiewiseTrainer

WIDTHS = (64, 128, 256)
OPTIMIZERS = ("adamw", "muon")  # of the hidden matrices; all other parameters have AdamW
RATES = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)  # of tables and head
BODY_RATE = 0.512  # learning rate × width of all other parameters
SETTINGS = Settings(
    arms=("untied", "tied"), seeds=2, steps=300, layers=2, tokenizer="bpe:2048", measured=65_536, train_tokens=400_000
)
RULES = {"constant": 0.0, "1/√D": -0.5, "1/D": -1.0, "√D": 0.5}  # exponent of the width
TOLERANCE = 0.05  # of the lowest loss
CSV_FILE = Path(__file__).parent / "results" / "table_rate.csv"
RULES_FILE = CSV_FILE.with_name("table_rate_rules.csv")
NAME = "table-rate"
Losses = dict[int, dict[float, float]]  # width → rate of the tables → held-out loss


class JoinedOptimizer(Optimizer):
    """Several optimizers with one state and one list of groups, as a Trainer needs."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give each part its groups and the common state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, whose groups and tensors are new objects."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with each part."""
        for part in self.parts:
            part.step(closure)


def make_optimizer(model: nn.Module, optimizer: str, rate: float, table_rate: float, decay: float) -> Optimizer:
    """Return the optimizer of a model whose tables and head have a rate of their own."""
    tables, head, hidden, vectors = tiewise.param_groups(model, lr=rate, table_lr=table_rate)
    vectors["weight_decay"] = 0.0
    if optimizer == "adamw":
        return AdamW([tables, head, hidden, vectors], betas=ADAM_BETAS, weight_decay=decay)
    muon = Muon(hidden["params"], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return JoinedOptimizer([muon, AdamW([tables, head, vectors], betas=ADAM_BETAS, weight_decay=decay)])


def make_trainer(optimizer: str, table_rate: float, job: Job, installed: Installed) -> TiewiseTrainer:
    """Return the Trainer of a decoder with this optimizer."""
    s = job.settings
    made = make_optimizer(installed.model, optimizer, s.learning_rate, table_rate, s.weight_decay)
    rows = Blocks(job.text.split("train"), s.length)
    return TiewiseTrainer(installed, optimizers=(made, None), **KIND.trainer_parts(job, installed, rows))


def train(
    folder: Path, settings: Settings, widths: Sequence[int], rates: Sequence[float]
) -> dict[tuple[str, str], Losses]:
    """Train the comparisons that the folder lacks, and return losses by optimizer and arm."""
    by_model: dict[tuple[str, str], Losses] = {}
    for optimizer, width, rate in itertools.product(OPTIMIZERS, widths, rates):
        out = folder / f"optimizer={optimizer}-width={width}-rate={rate:g}"
        of_width = replace(settings, width=width, learning_rate=BODY_RATE / width)
        with patch.object(KIND, "trainer", partial(make_trainer, optimizer, rate)):
            comparison = train_comparison(of_width, out, "benchmarks.table_rate")
        for arm in comparison.arms:
            losses = by_model.setdefault((optimizer, arm), {})
            losses.setdefault(width, {})[rate] = _loss(comparison, arm)
    return by_model


def _loss(comparison: Comparison, arm: str) -> float:
    """Return an arm's held-out loss, a mean over seeds."""
    return fmean(run.heldout_nll for run in comparison.of(arm))


def excess_of_rules(losses: Mapping[int, Mapping[float, float]]) -> dict[str, float]:
    """Return by rule the largest excess over the lowest loss of a larger width, as a fraction of that loss.

    The rule starts from the best rate of the smallest width. nan: it leaves the measured rates.
    """
    least = min(losses)
    best = min(losses[least], key=lambda rate: losses[least][rate])
    excess = {}
    for rule, exponent in RULES.items():
        over = [
            _interpolated(of_width, best * (width / least) ** exponent) / min(of_width.values()) - 1
            for width, of_width in losses.items()
            if width > least
        ]
        excess[rule] = float(np.max(over))
    return excess


def _interpolated(losses: Mapping[float, float], rate: float) -> float:
    """Return the loss at a rate, linear in its logarithm between measured ones; nan beyond them."""
    measured = sorted(losses)
    logs = [math.log(one) for one in measured]
    values = [losses[one] for one in measured]
    at = round(math.log(rate), 12)
    return float(np.interp(at, np.round(logs, 12), values, left=math.nan, right=math.nan))


def transfers(excess: float) -> bool:
    """Return whether a rule transfers; one without a result does not."""
    return excess <= TOLERANCE


def loss_rows(by_model: Mapping[tuple[str, str], Losses]) -> Iterator[dict[str, str]]:
    """Yield a row for each optimizer, arm and width, with a column for each rate."""
    for (optimizer, arm), losses in by_model.items():
        for width, of_width in losses.items():
            columns = {f"{rate:g}": f"{loss:.4f}" for rate, loss in of_width.items()}
            yield {"optimizer": optimizer, "arm": arm, "width": str(width)} | columns


def rule_rows(by_model: Mapping[tuple[str, str], Losses]) -> Iterator[dict[str, str]]:
    """Yield a row for each optimizer and arm, with the excess of each rule in percent."""
    for (optimizer, arm), losses in by_model.items():
        columns = {}
        for rule, excess in excess_of_rules(losses).items():
            columns[rule] = "outside" if math.isnan(excess) else f"{100 * excess:.2f}"
        yield {"optimizer": optimizer, "arm": arm} | columns


def main(
    folder: Path,
    settings: Settings = SETTINGS,
    widths: Sequence[int] = WIDTHS,
    rates: Sequence[float] = RATES,
) -> None:
    """Train in the folder, and write losses, rules and curves."""
    by_model = train(folder, settings, widths, rates)
    write_table(CSV_FILE, list(loss_rows(by_model)))
    write_table(RULES_FILE, list(rule_rows(by_model)))
    for path in (CSV_FILE, RULES_FILE):
        print(path.read_text(encoding="utf-8"))
    for (optimizer, arm), losses in by_model.items():
        rules = [rule for rule, excess in excess_of_rules(losses).items() if transfers(excess)]
        print(f"{optimizer}, {arm}: rules that transfer: {', '.join(rules) or 'none'}")
    study_curves.write(study_curves.collect(folder), study_curves.CURVES / f"{NAME}.jsonl")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
