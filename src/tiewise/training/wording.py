"""Findings in words: one form for the terminal, the report and results.json.

−0.0123 to +0.0040   524,288 more parameters (+38.2 %)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiewise.core.numerals import NONE, count, plain, signed
from tiewise.training.results import Comparison, Difference

UNEQUAL = 0.05  # of the reference's parameters: what a comparison by width lets arms differ in


def interval(difference: Difference) -> str:
    """−0.0123 to +0.0040, or a dash where one pair gives no interval."""
    if difference.low is None:
        return NONE
    return f"{signed(difference.low)} to {signed(difference.high)}"


def finding(comparison: Comparison) -> str:
    """Say what the held-out losses show and no more: per arm the difference, what is known of it, and its parameters.

    One line per arm.
    The comparison's differences must be filled (`tiewise.training.statistics.complete`).
    """
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
            said.append(f"{word} the tokens that the training text has {_listed(bins)} times")
    return f" It predicts {', and '.join(said)} (p < 0.05 over all bins, Holm)." if said else ""


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _parameters(comparison: Comparison, arm: str) -> str:
    """Say how much larger an arm is, and how to compare equal sizes where the run could."""
    own, base = (comparison.of(name)[0].total_parameters for name in (arm, comparison.reference))
    if own == base:
        return "equally many parameters"
    side = "more" if own > base else "fewer"
    could = comparison.setting.get("match") == "width" and not comparison.of(arm)[0].shares  # ALBERTs cannot
    advice = "; --match parameters compares equal sizes" if could and abs(own - base) >= UNEQUAL * base else ""
    return f"{count(abs(own - base))} {side} parameters ({signed(100 * (own - base) / base, 1)} %{advice})"
