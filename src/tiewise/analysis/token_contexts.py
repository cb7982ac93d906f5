"""How far what precedes a token differs from what follows it.

For a token t with predecessors p and successors s, both of n occurrences,

    JS_t = ½ KL(p ‖ (p+s)/2) + ½ KL(s ‖ (p+s)/2),      0 (the same) ≤ JS_t ≤ ln 2 (no neighbour on both sides)

is what a neighbour says of its own side (Lin 1991). Weighted by occurrences, its mean over tokens is the
irreversibility I of `bigram_counts`: with Q[t, b] = π_t s_b and Q[b, t] = π_t p_b the two sums are one.

From counts it is too high: a neighbour that is seen once has one side only. Three levels stand beside it: its exact
expectation with every pair's directions tossed by a fair coin; the same sides guessed from other parts of the text,
which is too low; and the interval over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tiewise.analysis.bigram_counts import Chain, guessed, ring_and_parts
from tiewise.analysis.model_tables import Array, Ids
from tiewise.analysis.token_texts import Groups, Texts, shown
from tiewise.core.estimates import Estimate, Z, mean_interval
from tiewise.core.found import NONE, Curve, Found, Listing, Quantity, count, plain, visible

PARTS = 10
EXACT_UP_TO = 1000  # occurrences of a pair whose tosses are summed one by one; above, the χ² limit
ENOUGH = 10  # occurrences from which a token is compared with its own null
NOTABLE, NOTABLE_FROM = 10, 100  # tokens that are named for their contexts, and their occurrences at least


@dataclass(frozen=True)
class Contexts:
    """Each token's divergence in nats, [V]; NaN for tokens that the text does not have."""

    counts: Ids  # occurrences
    plug_in: Array  # JS from the counts as they are; on average too high
    coin: Array  # its expectation where directions are tossed
    coin_deviation: Array  # standard deviation of the same
    # sides guessed from the other parts of the text; on average too low, and below 0 where guesses mislead
    held_out: Array
    by_part: Array  # mean of the same over the occurrences of each part [parts]

    @property
    def excess(self) -> Array:
        """plug_in − coin [V]."""
        return self.plug_in - self.coin

    @property
    def score(self) -> Array:
        """The excess in standard deviations of the coin [V]; NaN below 10 occurrences or where the coin has none."""
        enough = (self.counts >= ENOUGH) & (self.coin_deviation > 0)
        spread = np.where(enough, self.coin_deviation, np.nan)
        return self.excess / spread

    @property
    def guessed(self) -> Estimate:
        """`held_out` per occurrence, with the 95 % interval over the parts (Student's t)."""
        return mean_interval(self.by_part)

    def weighted(self, values: Array) -> float:
        """Mean over occurrences."""
        seen = self.counts > 0
        return float((values[seen] * self.counts[seen]).sum() / self.counts.sum())


@dataclass(frozen=True)
class ContextGroup:
    """One group of tokens; means are over tokens, each counted once; 95 % intervals allow for shared pairs."""

    label: str  # of the group
    tokens: int  # in the group and in the text
    occurrences: int  # of these together
    plug_in: Estimate  # mean divergence from counts, in nats
    coin: float  # mean of what tossed directions would give
    excess: Estimate  # plug_in − coin; its interval contains 0 where no difference between left and right is shown
    held_out: Estimate  # mean of the lower estimate
    # share of tokens (of 10 occurrences or more) above the coin's mean by 1.96 deviations; 0.025 by chance where many
    # neighbours make the coin nearly normal. None without such tokens
    beyond: float | None


def contexts(ids: ArrayLike, vocabulary: int, parts: int = PARTS) -> Contexts:
    """Measure every token of a text [N], closed into a ring."""
    chain, sliced = ring_and_parts(ids, vocabulary, parts)
    back = chain.counted(chain.reversed_keys)
    other = chain.before != chain.after
    counts = chain.tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(counts > 0, 0.5 / counts, np.nan)
    plug_in = _spread(chain, np.where(other, chain.counts * np.log(2 * chain.counts / (chain.counts + back)), 0.0))
    once = other & ((chain.before < chain.after) | (back == 0))
    tossed = np.zeros((2, len(chain.keys)))
    tossed[:, once] = _tossed((chain.counts + back)[once])
    coin, noise = (_spread(chain, values) for values in tossed)
    held_out, by_part = np.zeros(vocabulary), []
    for part in sliced:
        nats = guessed(chain, part)
        held_out += _spread(part, nats)
        by_part.append(nats.sum() / part.pairs)
    coin_deviation = np.sqrt(noise) * scale
    return Contexts(counts, plug_in * scale, coin * scale, coin_deviation, held_out * scale, np.array(by_part))


def _spread(chain: Chain, values: Array) -> Array:
    """Sum a value of each pair seen into both of its tokens [V]."""
    made = np.zeros(chain.vocabulary)
    for tokens in (chain.before, chain.after):
        made += np.bincount(tokens, values, chain.vocabulary)
    return made


def _tossed(both: Ids) -> Array:
    """Mean and variance of x log(2x/m) + (m−x) log(2(m−x)/m), x binomial with m tosses [2, n]; by m.

    Twice this is the likelihood-ratio statistic of a fair coin, χ² with one degree of freedom for large m.
    """
    sizes, place = np.unique(both, return_inverse=True)
    found = [_toss(int(m)) if m <= EXACT_UP_TO else (0.5 + 1 / (4 * int(m)), 0.5 + 1 / (2 * int(m))) for m in sizes]
    table: Array = np.array(found).reshape(-1, 2)[place].T
    return table


def _toss(m: int) -> tuple[float, float]:
    x = np.arange(m + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((m - x[:-1]) / (x[:-1] + 1.0)))]) - m * math.log(2)
    share = np.exp(logs)
    inner = 2 * np.maximum(x, 1) / m
    one = x * np.log(inner)
    value = one + one[::-1]
    mean = float(share @ value)
    return mean, max(0.0, float(share @ np.square(value - mean)))


def grouped(found: Contexts, groups: Groups) -> tuple[ContextGroup, ...]:
    """Average over the tokens of each group that the text has; groups with fewer than two such tokens are left out."""
    made = []
    for place, label in enumerate(groups.labels):
        inside = (groups.of == place) & (found.counts > 0)
        if inside.sum() < 2:
            continue
        scores = found.score[inside]
        scores = scores[np.isfinite(scores)]
        made.append(
            ContextGroup(
                label,
                tokens=int(inside.sum()),
                occurrences=int(found.counts[inside].sum()),
                plug_in=_over_tokens(found.plug_in[inside]),
                coin=float(found.coin[inside].mean()),
                excess=_over_tokens(found.excess[inside]),
                held_out=_over_tokens(found.held_out[inside]),
                beyond=float((scores > Z).mean()) if len(scores) else None,
            )
        )
    return tuple(made)


def _over_tokens(values: Array) -> Estimate:
    """Mean with an interval √2 as wide as that of independent values.

    Each pair of neighbours stands in the counts of both, and (x + y)² ≤ 2(x² + y²): no sharing can widen it more.
    """
    found = mean_interval(values)
    half = math.sqrt(2) * (found.high - found.value)
    return Estimate(found.value, found.value - half, found.value + half, found.rows)


def furthest(found: Contexts, least: int, top: int) -> Ids:
    """Tokens of `least` occurrences or more with the largest excess, largest first."""
    excess = np.where(found.counts >= least, found.excess, -np.inf)
    order = np.argsort(-excess, kind="stable")[:top]
    return order[np.isfinite(excess[order])]


def around_tokens(found: Contexts, groups: dict[str, Groups], texts: Texts | None) -> Found:
    """Say how far both sides of tokens differ: of the whole text, by group, and which tokens' differ most.

    Args:
        found: the contexts.
        groups: of the tokens: {"frequency": …, "script": …}.
        texts: of the tokens, where they are known.
    """
    quantities = [
        Quantity.of_estimate(
            "left and right contexts differ by", found.guessed, chance=0.0, unit="nats per token", main=False,
            why="guessed from other parts of the text, too low on average; ln 2 = 0.693 is the most",
        ),
        Quantity(
            "… from counts", found.weighted(found.plug_in), chance=found.weighted(found.coin), unit="nats per token",
            main=False, why="too high on average; chance: directions tossed by a coin",
        ),
    ]  # fmt: skip
    curves, listings = [], []
    for kind, of in groups.items():
        made = grouped(found, of)
        rows: list[tuple[str, ...]] = []
        for group in made:
            name = f"excess over tossed directions, {'count' if kind == 'frequency' else kind} {group.label}"
            quantities.append(Quantity.of_estimate(name, group.excess, chance=0.0, unit="nats", main=False))
            levels = (plain(level, 3) for level in (group.plug_in.value, group.coin, group.held_out.value))
            beyond = NONE if group.beyond is None else f"{group.beyond:.1%}"
            rows.append((group.label, count(group.tokens), count(group.occurrences), *levels, beyond))
        header = ("group", "tokens", "occurrences", "from counts", "tossed", "guessed", "tokens beyond chance")
        listings.append(Listing(f"What precedes and what follows, by {kind}", header, tuple(rows)))
        reads = {
            "guessed": [group.held_out for group in made],
            "counts": [group.plug_in for group in made],
            "tossed": [Estimate(group.coin, math.nan, math.nan, group.tokens) for group in made],
        }
        for which, estimates in reads.items():
            if estimates:
                curves.append(Curve.through(
                    f"Left and right contexts by {kind}", enumerate(estimates), unit="nats", which=which,
                    along="times the text has the token" if kind == "frequency" else "script of the token",
                    ticks=tuple(group.label for group in made), level=math.log(2), level_name="no common neighbour",
                    why="How far what precedes a token differs from what follows it, 0 the same: counts give too much, "
                    "guesses from other parts of the text too little; tossed is what alike sides give.",
                ))  # fmt: skip
    ids = furthest(found, NOTABLE_FROM, NOTABLE).tolist()
    notable = tuple(
        (visible(text), count(found.counts[row]), plain(found.plug_in[row], 3), plain(found.coin[row], 3))
        for row, text in zip(ids, shown(texts, ids), strict=True)
    )
    columns = ("token", "occurrences", "divergence", "tossed")
    listings.append(Listing("Tokens whose two sides differ most", columns, notable))
    return Found("", tuple(quantities), tuple(curves), listings=tuple(listings))
