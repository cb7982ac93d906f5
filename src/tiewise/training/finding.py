"""The finding of a comparison: a sentence for each arm, the answer first, and explanations.

    untied wins on this text: validation loss 0.053 nats/token lower than tied (95 % CI 0.013–0.092, 3 seeds and 39
    documents), with 57 % more parameters.

An arm wins if its validation loss is the only one that is significantly lower than that of the reference. The reference
wins if every other arm is significantly worse. Arms are compared with the reference only, never with each other.
`verdicts` has the rule, also for arms that are equivalent within the margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiewise.core.measurement import loss_digits, magnitudes, plain, signed
from tiewise.core.step_names import LAST
from tiewise.training.descent import descent_note, descents
from tiewise.training.interval_sample import sample_note
from tiewise.training.results import AT_LAST, Comparison, Difference, correct_by_holm, differences, has_earlier_steps
from tiewise.training.settings import Settings
from tiewise.training.verdicts import BETTER, EQUIVALENT, UNDECIDED, VERDICTS, WORSE, verdict_of, with_verdicts

UNEQUAL = 0.05  # share of the reference's parameters from which `--match parameters` is advised
TABLE_FACTOR = 8  # best rate of tables over that of the body in small decoders, at least (docs/dev/atlas.md)
UNKNOWN = "unknown"
OUTCOMES = *VERDICTS, UNKNOWN


def complete(comparison: Comparison) -> Comparison:
    """Fill in the differences and the finding of a comparison.

    Differences are those of every arm but the reference, in every metric and every frequency bin.
    """
    others = comparison.others
    measured: list[Difference] = []
    for arm in others:
        measured += differences(comparison, comparison.reference, arm).values()
    # the finding compares arms, at two steps, and their tokens by frequency
    for metric in ("heldout_nll", f"{AT_LAST}heldout_nll"):
        measured = _corrected_family(measured, metric, margin=margin_of(comparison))
    measured = _corrected_family(measured, "frequency:")
    comparison = replace(comparison, differences=measured, descents=descents(comparison))
    return replace(comparison, finding="\n".join(sentences(comparison)))


def margin_of(comparison: Comparison) -> float:
    """Return the margin of a comparison; an older one, which has none, gets the default."""
    margin: float = comparison.setting.get("margin", Settings.margin)
    return margin


def _corrected_family(measured: Sequence[Difference], family: str, *, margin: float | None = None) -> list[Difference]:
    """Return differences with Holm's correction over the metrics that begin with `family`.

    With a margin they have a verdict. The order stays.
    """
    of_family = [replace(d, margin=margin) for d in measured if d.metric.startswith(family)]
    correct = correct_by_holm if margin is None else with_verdicts
    corrected = iter(correct(of_family))
    return [next(corrected) if d.metric.startswith(family) else d for d in measured]


def sentences(comparison: Comparison) -> list[str]:
    """Return the answer, then a sentence for every other arm.

    Better arms are first, the lowest loss before the others; arms that cannot be compared are last.
    """
    arms = _arms_by_outcome(comparison)
    outcomes = [outcome for outcome in OUTCOMES if arms[outcome]]
    if not outcomes:
        return [f"Only {comparison.reference} was trained, so there is nothing to compare it with."]
    if outcomes == [WORSE]:
        return _reference_wins(comparison, arms[WORSE])
    alone = len(arms[BETTER]) == 1
    lines = [_better(comparison, arm, alone=alone) for arm in arms[BETTER]]
    describe_by_outcome = {EQUIVALENT: _equivalent, UNDECIDED: _undecided, WORSE: _worse, UNKNOWN: _unknown}
    for outcome, describe in describe_by_outcome.items():
        lines += [describe(comparison, arm) for arm in arms[outcome]]
    return lines


def _arms_by_outcome(comparison: Comparison) -> dict[str, list[str]]:
    """Return the arms other than the reference by outcome; the better ones by their loss."""
    arms: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
    for arm in comparison.others:
        arms[_outcome(_difference(comparison, arm))].append(arm)
    means = {d.arm: d.mean for d in _loss_differences(comparison)}
    arms[BETTER].sort(key=means.__getitem__)
    return arms


def _loss_differences(comparison: Comparison) -> list[Difference]:
    """Return the differences in validation loss."""
    return [d for d in comparison.differences if d.metric == "heldout_nll"]


def explanations(comparison: Comparison) -> list[str]:
    """Return sentences that explain the finding.

    They state if training ended too late or too early, how the last steps compare, which sample the intervals cover,
    what so many seeds can detect, which tokens differ, and how to compare best learning rates and equal sizes.
    """
    others = comparison.others
    lines = [_best_steps(comparison), descent_note(comparison.descents)]
    lines += [_at_last_step(comparison, arm) for arm in others] + [sample_note(comparison)]
    lines += [_power(comparison, arm) for arm in others] + [_by_frequency(comparison, arm) for arm in others]
    lines.append(_rate_to_choose(comparison))
    if any(_advises_match(comparison, arm) for arm in others):
        lines.append("The arms differ in size; --match parameters compares equal sizes.")
    return [line for line in lines if line]


def _best_steps(comparison: Comparison) -> str:
    """Return which arms were at their best before their last step; "" if none was."""
    ranges = []
    for arm in comparison.arms:
        runs = comparison.of(arm)
        steps = [run.lowest_tuning_step for run in runs if run.lowest_tuning_step is not None]
        if steps and min(steps) < runs[0].steps:
            ranges.append(f"{arm} at {_range_in_words(min(steps), max(steps))} of {runs[0].steps:,}")
    if not ranges:
        return ""
    best = f"Lowest loss on tuning text before the end: {', '.join(ranges)}."
    if comparison.setting.get("select") == LAST:
        return f"{best} The results are those of the last step; --select best compares the best ones."
    return f"{best} The results are those of these steps; --select last keeps the last ones."


def _rate_to_choose(comparison: Comparison) -> str:
    """Return the option that chooses another rate for each arm; "" without a detected difference.

    In the atlas, most differences of tied and untied models vanish at the best rate of each, and grow again where
    tables have their own.
    """
    outcomes = set(map(_outcome, _loss_differences(comparison)))
    if outcomes.isdisjoint((BETTER, WORSE)):
        return ""
    run, setting = comparison.runs[0], comparison.setting
    rate = run.learning_rate
    if not setting.get("tune"):
        of_tables = "" if run.table_rate is None else f", and {run.table_rate:g} of their tables"
        return (
            f"All arms have the learning rate {rate:g}{of_tables}; --tune compares the best rate of each, which can "
            "end a difference."
        )
    is_sharded = comparison.env.get("processes", 1) > 1  # no rate of tables then
    if setting.get("table_rate", rate) is None and not is_sharded:  # a kind without this setting does not record it
        return (
            f"Each arm has one learning rate; --set table_rate={TABLE_FACTOR * rate:g} lets --tune choose that of its "
            "tables, which can change a difference."
        )
    return ""


def _range_in_words(low: int, high: int) -> str:
    """Return a range of steps as text, "step 180" or "steps 180–240"."""
    if low == high:
        return f"step {low:,}"
    return f"steps {low:,}–{high:,}"


def _at_last_step(comparison: Comparison, arm: str) -> str:
    """Return an arm's difference at the last step; "" if every run keeps its last step."""
    d = comparison.difference(arm, f"{AT_LAST}heldout_nll")
    if d is None or not has_earlier_steps(comparison) or not math.isfinite(d.mean):
        return ""
    interval = ""
    if d.low is not None and d.high is not None:
        interval = f" (95 % CI {signed(d.low, _digits(d))} to {signed(d.high, _digits(d))})"
    difference = f"validation loss {arm} − {comparison.reference} is {signed(d.mean, _digits(d))} nats/token"
    return f"At the last step, {difference}{interval}."


def _difference(comparison: Comparison, arm: str) -> Difference | None:
    """Return the difference in validation loss between an arm and the reference."""
    return comparison.difference(arm, "heldout_nll")


def _outcome(d: Difference | None) -> str:
    """Return the outcome of an arm. It is unknown without an interval."""
    if d is None or d.low is None:
        return UNKNOWN
    return verdict_of(d)


def _better(comparison: Comparison, arm: str, *, alone: bool) -> str:
    """Return the sentence about an arm with a lower loss. It wins if it is `alone`."""
    reference = comparison.reference
    beginning, end = f"{arm} beats {reference} on this text:", "lower"
    if alone:
        beginning, end = f"{arm} wins on this text:", f"lower than {reference}"
    return _loss_sentence(comparison, arm, beginning, end)


def _worse(comparison: Comparison, arm: str) -> str:
    """Return the sentence about an arm with a higher loss."""
    return _loss_sentence(comparison, arm, f"{arm}:", f"higher than {comparison.reference}")


def _reference_wins(comparison: Comparison, arms: Sequence[str]) -> list[str]:
    """Return the sentences of a comparison in which every other arm has a higher loss."""
    reference = comparison.reference
    if len(arms) == 1:
        (arm,) = arms
        size = size_in_words(comparison, reference, arm)
        return [_loss_sentence(comparison, arm, f"{reference} wins on this text:", f"lower than {arm}", size)]
    answer = f"{reference} wins on this text: {_join(arms, 'and')} have a higher validation loss."
    return [answer, *(_worse(comparison, arm) for arm in arms)]


def _loss_sentence(comparison: Comparison, arm: str, beginning: str, end: str, size: str = "") -> str:
    """Return a sentence about a significant difference in validation loss, without its sign."""
    d = _difference(comparison, arm)
    assert d is not None
    assert d.low is not None
    assert d.high is not None
    digits = _digits(d)
    evidence = f"95 % CI {magnitudes(d.low, d.high, digits)}, {d.sample}"
    size = size or size_in_words(comparison, arm, comparison.reference)
    return f"{beginning} validation loss {plain(abs(d.mean), digits)} nats/token {end} ({evidence}), with {size}."


def _equivalent(comparison: Comparison, arm: str) -> str:
    """Return the sentence about an arm whose loss is equivalent to the reference's."""
    d = _difference(comparison, arm)
    assert d is not None
    subject = f"{arm} and {comparison.reference} are equivalent within {d.margin:g} nats/token on this text"
    return f"{subject}: {_signed_loss(comparison, d)}."


def _undecided(comparison: Comparison, arm: str) -> str:
    """Return the sentence about an arm for which neither a difference nor equivalence is shown."""
    d = _difference(comparison, arm)
    assert d is not None
    subject = "No difference detected"
    if d.margin:
        subject = f"Undecided: no difference detected, nor equivalence within {d.margin:g} nats/token"
    return f"{subject}: {_signed_loss(comparison, d, _why_undecided(comparison, d))}."


def _why_undecided(comparison: Comparison, d: Difference) -> str:
    """Return Holm's p as text if only the correction withholds a verdict, else ""."""
    assert d.low is not None
    assert d.high is not None
    p = None
    if d.margin and max(-d.low, d.high) < d.margin:
        p = d.p_equivalence
    elif d.low > 0 or d.high < 0:
        p = d.p
    if p is None:
        return ""
    return f"; p = {plain(p, 3)} corrected for {len(comparison.arms) - 1} arms"


def _signed_loss(comparison: Comparison, d: Difference, why: str = "") -> str:
    """Return a difference in validation loss with its sign, interval and difference in size.

    `why` follows the interval.
    """
    assert d.low is not None
    assert d.high is not None
    digits, reference = _digits(d), comparison.reference
    evidence = f"95 % CI {signed(d.low, digits)} to {signed(d.high, digits)}, {d.sample}{why}"
    loss = f"validation loss {d.arm} − {reference} is {signed(d.mean, digits)} nats/token"
    return f"{loss} ({evidence}), with {size_in_words(comparison, d.arm, reference)}"


def _unknown(comparison: Comparison, arm: str) -> str:
    """Return the sentence about an arm without an interval: unfinished, diverged, or one seed."""
    d, reference = _difference(comparison, arm), comparison.reference
    if d is None:
        return f"{arm} and {reference} have no finished seed in common, so they cannot be compared yet."
    if not math.isfinite(d.mean):
        diverged = _join([each for each in (arm, reference) if _has_diverged(comparison, each)], "and")
        return f"{diverged} diverged, so {arm} cannot be compared with {reference}; try a lower learning rate."
    side = "higher"
    if d.mean < 0:
        side = "lower"
    loss = f"validation loss {plain(abs(d.mean), _digits(d))} nats/token {side} than {reference}"
    size = size_in_words(comparison, arm, reference)
    return f"One seed cannot show which is better: {arm} has a {loss}, with {size}. Use --seeds 3 or more."


def _has_diverged(comparison: Comparison, arm: str) -> bool:
    """Return whether a run of an arm ended with an infinite loss or NaN."""
    return any(not math.isfinite(run.heldout_nll) for run in comparison.of(arm))


def _digits(d: Difference) -> int:
    """Return the digits after the point of a difference: more for a small one."""
    return loss_digits(d.mean, d.low or 0.0, d.high or 0.0)


def size_in_words(comparison: Comparison, arm: str, other: str) -> str:
    """Return how many parameters an arm has more or fewer than another, as text."""
    part = _size_difference(comparison, arm, other)
    if not part:
        return "the same number of parameters"
    percent, word = 100 * abs(part), "fewer"
    if part > 0:
        word = "more"
    if percent >= 10:
        return f"{percent:.0f} % {word} parameters"
    return f"{percent:.2g} % {word} parameters"


def _size_difference(comparison: Comparison, arm: str, other: str) -> float:
    """Return the parameters that an arm has more, as a share of the other's."""
    size, other_size = (comparison.of(each)[0].total_parameters for each in (arm, other))
    return (size - other_size) / other_size


def _advises_match(comparison: Comparison, arm: str) -> bool:
    """Return whether an arm differs from the reference in size, and can be matched."""
    runs = comparison.of(arm)
    if comparison.setting.get("match") != "width" or not runs or not comparison.of(comparison.reference):
        return False
    if runs[0].shares:  # ALBERTs cannot be matched
        return False
    return abs(_size_difference(comparison, arm, comparison.reference)) >= UNEQUAL


def _power(comparison: Comparison, arm: str) -> str:
    """Return which difference so many seeds can detect; "" unless it is undecided."""
    d = _difference(comparison, arm)
    if d is None or _outcome(d) != UNDECIDED:
        return ""
    least = f"{plain(d.detectable, _digits(d))} nats/token"
    power = f"{d.sample} detect a true difference of {least} in 80 of 100 repetitions"
    return f"{arm}: {power}; more of them detect smaller differences."


def _by_frequency(comparison: Comparison, arm: str) -> str:
    """Return which tokens, by frequency, an arm predicts better and worse. "" if no bin differs."""
    better: list[str] = []
    worse: list[str] = []
    for d in comparison.differences:
        if d.arm == arm and d.detected and d.metric.startswith("frequency:"):
            bins = worse
            if d.mean < 0:
                bins = better
            bins.append(d.metric.removeprefix("frequency:"))
    clauses = [
        f"{word} tokens seen {_join(bins, 'or')} times" for word, bins in (("better", better), ("worse", worse)) if bins
    ]
    if not clauses:
        return ""
    predicts = " and ".join(clauses)
    return f"{arm} predicts {predicts} in the training text (p < 0.05 over seeds, corrected for all bins)."


def _join(words: Sequence[str], last: str) -> str:
    """Return "a", "a or b", or "a, b or c", for `last` = "or"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
