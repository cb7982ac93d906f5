"""Is the difference real? Paired intervals over seeds, and the smallest difference that could have been found.

Arms of one seed share their data order and the initialisation of their body, so seeds are pairs: the interval is that
of the mean of the differences, with Student's t of n − 1 degrees of freedom. Every interval stands on its own (95 %
each); the finding is drawn from as many as there are arms, and from all their bins of frequency, so that a difference
counts as detected only where its p is below 0.05 with Holm's correction over the arms, or over all bins of all arms.

Sign: always arm − reference. For arms `untied` and `tied`, tied − untied in training nll is the *tying gap* and in
held-out nll the *generalisation gap*; see `gaps`. A finding in words has one form for the terminal, the report and
results.json: −0.0123 to +0.0040, 524,288 more parameters (+38.2 %).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiewise.core import student
from tiewise.core.numerals import NONE, count, plain, signed
from tiewise.training.results import Comparison, Difference, RunResult

ALPHA = 0.05
UNEQUAL = 0.05  # of the reference's parameters: what a comparison by width lets arms differ in
METRICS = ("heldout_nll", "train_nll", "bits_per_byte")


def paired(reference: Sequence[float], other: Sequence[float], *, arm: str = "", metric: str = "") -> Difference:
    """Compare two arms over the seeds they share: other − reference.

    With d the n differences, s their standard deviation (n − 1) and t the 97.5 % quantile of Student's t with n − 1
    degrees of freedom: interval = mean(d) ± t·s/√n (Student, Biometrika 1908). `detectable` = λ·s/√n, where λ is the
    noncentrality at which that two-sided 5 % test has 80 % power (see `student.detectable`); it takes s for the true
    spread. One pair has no interval, and a value that is not finite leaves nothing but a mean of nan.

    Raises:
        ValueError: when the lengths differ or there is no pair.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"pairs need equally many values, at least one: got {len(reference)} and {len(other)}")
    d = [b - a for a, b in zip(reference, other, strict=True)]
    n = len(d)
    if not all(map(math.isfinite, d)):
        return Difference(arm, metric, n, math.nan, None, None, None, False)
    mean = statistics.fmean(d)
    if n == 1:
        return Difference(arm, metric, n, mean, None, None, None, False)
    error = statistics.stdev(d) / math.sqrt(n)
    half = student.critical(n - 1) * error
    low, high = mean - half, mean + half
    p = student.two_sided(mean / error, n - 1) if error else float(not mean)
    return Difference(arm, metric, n, mean, low, high, student.detectable(n - 1) * error, low > 0 or high < 0, p)


def complete(comparison: Comparison) -> Comparison:
    """Fill the differences (every arm but the reference, every metric, every frequency bin) and the finding."""
    differences = list(_differences(comparison))
    for family in ("heldout_nll", "frequency:"):  # what the finding says of arms, and of their tokens
        read = {i: d.p for i, d in enumerate(differences) if d.metric.startswith(family) and d.p is not None}
        for i, p in zip(read, student.holm(list(read.values())), strict=True):
            differences[i] = replace(differences[i], p=p, detected=p < ALPHA)
    differenced = replace(comparison, differences=differences)
    return replace(differenced, finding=finding(differenced))


def gaps(comparison: Comparison) -> tuple[Difference, Difference] | None:
    """(tying gap, generalisation gap): tied − untied in training and in held-out nll; None without both arms."""
    if not {"tied", "untied"} <= set(comparison.arms):
        return None
    pairs = list(_pairs(comparison, "untied", "tied"))
    if not pairs:
        return None
    first, second = (
        paired(
            [getattr(u, metric) for u, _ in pairs], [getattr(t, metric) for _, t in pairs], arm="tied", metric=metric
        )
        for metric in ("train_nll", "heldout_nll")
    )
    return first, second


def _differences(comparison: Comparison) -> Iterator[Difference]:
    for arm in comparison.arms:
        if arm == comparison.reference:
            continue
        pairs = list(_pairs(comparison, comparison.reference, arm))
        for metric in METRICS if pairs else ():
            if metric == "bits_per_byte" and pairs[0][0].shares:
                continue  # masked tokens are not a text
            values = [(getattr(a, metric), getattr(b, metric)) for a, b in pairs]
            yield paired(*zip(*values, strict=True), arm=arm, metric=metric)
        runs = [run for pair in pairs for run in pair]
        for name in runs[0].shares if runs else ():
            if all(name in run.shares for run in runs):
                shares = [(a.shares[name].share, b.shares[name].share) for a, b in pairs]
                yield paired(*zip(*shares, strict=True), arm=arm, metric=f"share:{name}")
        yield from _bin_differences(arm, pairs)


def _bin_differences(arm: str, pairs: Sequence[tuple[RunResult, RunResult]]) -> Iterator[Difference]:
    by_label: dict[str, list[tuple[float, float]]] = {}
    for a, b in pairs:
        nll = {bin_.label: bin_.nll for bin_ in b.frequency}
        for bin_ in a.frequency:
            own = nll.get(bin_.label)
            if bin_.nll is not None and own is not None:
                by_label.setdefault(bin_.label, []).append((bin_.nll, own))
    for label, values in by_label.items():
        yield paired(*zip(*values, strict=True), arm=arm, metric=f"frequency:{label}")


def _pairs(comparison: Comparison, first: str, second: str) -> Iterator[tuple[RunResult, RunResult]]:
    """Runs of both arms with the same seed; a seed that only one of them finished is left out."""
    other = {run.seed: run for run in comparison.of(second)}
    return ((run, other[run.seed]) for run in comparison.of(first) if run.seed in other)


def interval(difference: Difference) -> str:
    """−0.0123 to +0.0040, or a dash where one pair gives no interval."""
    if difference.low is None:
        return NONE
    return f"{signed(difference.low)} to {signed(difference.high)}"


def finding(comparison: Comparison) -> str:
    """Say what the held-out losses show and no more: a line per arm, its differences being filled by `complete`."""
    reference = comparison.reference
    others = [arm for arm in comparison.arms if arm != reference]
    if not others:
        return f"{reference} is the only arm, so there is nothing to compare it with."
    return "\n".join(_sentence(comparison, arm) for arm in others)


def _sentence(comparison: Comparison, arm: str) -> str:
    difference = comparison.difference(arm, "heldout_nll")
    who = f"{arm} against {comparison.reference}:"
    if difference is None:
        return f"{who} no seed finished with both, so nothing is known yet."
    cost = _parameters(comparison, arm)
    if not math.isfinite(difference.mean):
        return f"{who} one of them diverged, so no difference can be stated; {cost}."
    measured = f"{signed(difference.mean)} nats/token"
    if difference.low is None:
        return f"{who} held-out loss {measured} from one seed, which cannot tell a difference from chance; {cost}."
    evidence = f"95 % interval {interval(difference)}, {difference.n} seeds"
    if difference.detected:
        side = "lower (better)" if difference.mean < 0 else "higher (worse)"
        measured = (
            f"{who} held-out loss is {side} by {plain(abs(difference.mean))} nats/token ({evidence}), with {cost}"
        )
        return f"{measured}.{_tokens(comparison, arm)}"
    if difference.low > 0 or (difference.high is not None and difference.high < 0):
        evidence += f", p = {plain(difference.p, 3)} with {len(comparison.arms) - 1} arms (Holm)"
    smallest = f"smallest detectable difference {plain(difference.detectable)}"
    measured = f"held-out loss {measured}, {evidence}; {smallest}"
    return f"{who} no difference detected at this budget ({measured}), with {cost}.{_tokens(comparison, arm)}"


def _tokens(comparison: Comparison, arm: str) -> str:
    """Which tokens an arm predicts better and worse than the reference: bins whose difference is detected."""
    found = [d for d in comparison.differences if d.arm == arm and d.metric.startswith("frequency:")]
    said = []
    for word, sign in (("better", -1), ("worse", 1)):
        bins = [d.metric.removeprefix("frequency:") for d in found if d.detected and sign * d.mean > 0]
        if bins:
            listed = " or ".join(filter(None, (", ".join(bins[:-1]), bins[-1])))
            said.append(f"{word} the tokens that the training text has {listed} times")
    return f" It predicts {', and '.join(said)} (p < 0.05 over all bins, Holm)." if said else ""


def _parameters(comparison: Comparison, arm: str) -> str:
    """Say how much larger an arm is, and how to compare equal sizes where the run could."""
    own, base = (comparison.of(name)[0].total_parameters for name in (arm, comparison.reference))
    if own == base:
        return "equally many parameters"
    side = "more" if own > base else "fewer"
    could = comparison.setting.get("match") == "width" and not comparison.of(arm)[0].shares  # ALBERTs cannot
    advice = "; --match parameters compares equal sizes" if could and abs(own - base) >= UNEQUAL * base else ""
    return f"{count(abs(own - base))} {side} parameters ({signed(100 * (own - base) / base, 1)} %{advice})"
