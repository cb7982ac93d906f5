"""Results of a comparison for terminal, page and notebook: a verdict, and each arm's `Measurement`.

`comparison_view` is the terminal's view, `training_curves` has the curves over training, and `comparison_page` makes
the page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import NATS, Listing, Measurement, Quantity
from tiewise.report.papers import PaperComparison, paper_figures
from tiewise.report.sharing_order import compare_with_table_4, sharing_orders
from tiewise.report.views import ABREAST, rich_table, summary
from tiewise.training.finding import explanations, sentences
from tiewise.training.results import AT_LAST, MASKED, Comparison, Difference, RunResult, has_earlier_steps, over_seeds

DEMO = "This is the demo corpus. Your own text may give another answer: tiewise compare --text FILE"
SHORT = 16  # characters of a name within a heading
CHANCE = 0.5  # share of right answers by guessing: half of the measured pairs are in the text's order
LARGEST_EXPONENT = 700  # exp of more exceeds a float
# names of an ALBERT's shares of right answers
SHARES = {MASKED: "masked tokens right", "sop": "pairs right (sop)", "nsp": "pairs right (nsp)"}
SHARES_NOTE = "Shares: 95 % intervals over seeds (Student’s t), or of one seed’s rows (Wilson’s)."


def demo_banner(is_demo: bool) -> str:
    """Return the line above a page about the demo corpus; "" for any other text."""
    return DEMO if is_demo else ""


def verdict(comparison: Comparison) -> str:
    """Return the answer in one sentence; `finding.sentences` has the others."""
    return sentences(comparison)[0]


def finished_runs(comparison: Comparison) -> dict[str, list[RunResult]]:
    """Return the runs of every arm that has a finished run."""
    runs_by_arm = {}
    for arm in comparison.arms:
        runs = comparison.of(arm)
        if runs:
            runs_by_arm[arm] = runs
    return runs_by_arm


def first_runs(comparison: Comparison) -> dict[str, RunResult]:
    """Return the first run of every arm that has a finished run."""
    return {arm: runs[0] for arm, runs in finished_runs(comparison).items()}


def measure_arms(comparison: Comparison) -> dict[str, Measurement]:
    """Return the quantities of every arm that has a finished run, the most important first."""
    findings = {}
    for arm, runs in finished_runs(comparison).items():
        findings[arm] = Measurement("", tuple(_quantities(comparison, arm, runs))).about(arm)
    return findings


def results(comparison: Comparison) -> Listing:
    """Return a row for each arm: the numbers at the top of the page."""
    return summary(measure_arms(comparison), "Results by arm, mean ± deviation over seeds", "arm")


def share(runs: Sequence[RunResult], name: str) -> Quantity | None:
    """Return the mean share of right answers with its 95 % interval.

    The interval is Student's over seeds; for one seed it is Wilson's over rows.
    """
    shares = [run.shares[name] for run in runs if name in run.shares]
    if not shares:
        return None
    mean = mean_interval([one.share for one in shares])
    low, high = mean.low, mean.high
    if len(shares) == 1:
        low, high = shares[0].low, shares[0].high
    chance: float | None = CHANCE
    if name == MASKED:
        chance = None
    return Quantity(SHARES[name], mean.value, low, high, mean.rows, chance, unit="%")


def share_difference(comparison: Comparison, arm: str, name: str) -> Quantity | None:
    """Return the difference of a share of right answers from the reference's.

    None if there is only one arm.
    """
    q = _difference_column(comparison, arm, f"share:{name}", name)
    if q is None:
        return None
    return replace(q, unit="points", digits=2)


def difference(d: Difference | None) -> Quantity:
    """Return a paired difference as a quantity. One pair has no interval, and None has no value."""
    if d is None:
        return Quantity("", math.nan)
    low = high = math.nan
    if d.low is not None and d.high is not None:
        low, high = d.low, d.high
    return Quantity(d.metric, d.mean, low, high, n=d.n, chance=0.0, of=d.arm, unit=NATS, digits=4)


def _quantities(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    """Yield the columns of the report for one arm."""
    validation = _difference_column(comparison, arm, "heldout_nll", "validation")
    training = _difference_column(comparison, arm, "train_nll", "training")
    yield Quantity("parameters", runs[0].total_parameters)
    yield over_seeds("validation nll", [run.heldout_nll for run in runs], NATS)
    if validation is not None:
        yield validation
    yield from _last_steps(comparison, arm, runs)
    yield over_seeds("training nll", [run.train_nll for run in runs], NATS)
    if training is not None:
        yield replace(training, main=False)
    if _measured_shares(comparison):
        yield from _shares(comparison, arm, runs)
    else:  # perplexity and bits per byte need losses of all tokens of a text
        yield _perplexity(runs)
        yield Quantity("bits per byte", statistics.fmean(run.bits_per_byte for run in runs), digits=4)
    if runs[0].training_bytes is not None:
        yield Quantity("training memory", runs[0].training_bytes, unit="bytes")
    if len(comparison.seeds) > 1:  # the speed of a single run depends as much on the machine as on the arm
        yield _speed(runs)


def _last_steps(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    """Yield the selected step of an arm, and its validation loss at the last step.

    Nothing if every run of the comparison keeps its last step.
    """
    if not has_earlier_steps(comparison):
        return
    yield over_seeds("step", [float(run.selected_step or run.steps) for run in runs], "", 0)
    at_last = [run.heldout_nll if run.last is None else run.last.heldout_nll for run in runs]
    yield over_seeds("validation nll, last step", at_last, NATS)
    last = _difference_column(comparison, arm, f"{AT_LAST}heldout_nll", "last step")
    if last is not None:
        yield replace(last, main=False)


def _difference_column(comparison: Comparison, arm: str, metric: str, name: str) -> Quantity | None:
    """Return a column with the difference from the reference, empty if there is none.

    None if there is only one arm.
    """
    if len(comparison.arms) < 2:
        return None
    reference = comparison.reference
    if len(reference) > SHORT:
        reference = "reference"
    return replace(difference(comparison.difference(arm, metric)), name=f"{name} − {reference}")


def _measured_shares(comparison: Comparison) -> list[str]:
    """Return the names of the shares that any run has."""
    measured: set[str] = set()
    for run in comparison.runs:
        measured.update(run.shares)
    return [name for name in SHARES if name in measured]


def _shares(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    """Yield the shares of right answers of an ALBERT, each with its difference from the reference."""
    for name in _measured_shares(comparison):
        for q in (share(runs, name), share_difference(comparison, arm, name)):
            if q is not None:
                yield q


def _perplexity(runs: Sequence[RunResult]) -> Quantity:
    """Return exp of the mean validation nll; infinite if a float cannot hold it."""
    mean = statistics.fmean(run.heldout_nll for run in runs)
    perplexity = math.inf
    if mean <= LARGEST_EXPONENT:
        perplexity = math.exp(mean)
    return Quantity("perplexity", perplexity, digits=2)


def _speed(runs: Sequence[RunResult]) -> Quantity:
    """Return tokens per second over seeds; unknown if any run lacks it."""
    return over_seeds("tokens/s", [run.tokens_per_second for run in runs], "", 0)


def published_results(comparison: Comparison) -> dict[str, PaperComparison]:
    """Return published results for arms like the comparison's, by a title for each paper.

    Most comparisons have none.
    """
    published = {}
    recipe = comparison.setting.get("recipe")
    if recipe:
        perplexities = {arm: [run.perplexity for run in comparison.of(arm)] for arm in comparison.arms}
        changed = comparison.setting["changed"]
        published["Published figures"] = paper_figures(recipe, changed, perplexities, comparison.data)
    nll, pairs = sharing_orders(comparison)
    if nll:
        published["What layers share"] = compare_with_table_4(nll, pairs)
    return published


def comparison_view(comparison: Comparison) -> Group:
    """Return the finding, results with one column per arm, published results, and notes, for a terminal.

    Arms and the finding are `Text`, never markup: an arm's name may contain a square bracket.
    """
    table = results(comparison)
    tables = []
    for start in range(0, max(len(table.rows), 1), ABREAST):
        arms_across = zip(table.header, *table.rows[start : start + ABREAST], strict=True)
        tables.append(rich_table(list(arms_across), justified=True))
    answer, *others = sentences(comparison)
    published = [paper_view(*paper) for paper in published_results(comparison).values()]
    notes = explanations(comparison)
    if comparison.demo:
        notes.append(DEMO)
    lines = [Text(line) for line in others]
    return Group(Text(answer, "bold"), *lines, *tables, *published, *(Text(f"· {note}", "dim") for note in notes))


def paper_view(lines: Sequence[str], listing: Listing) -> Group:
    """Return published results next to a run: lines, and a table under them."""
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if listing.rows:
        parts.append(rich_table([listing.header, *listing.rows]))
    return Group(*parts)
