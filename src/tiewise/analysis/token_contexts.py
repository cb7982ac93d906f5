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

    def weighted(self, values: Array) -> float:
        """Mean over occurrences."""
        seen = self.counts > 0
        return float((values[seen] * self.counts[seen]).sum() / self.counts.sum())


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
    sizes, place = np.unique((chain.counts + back)[once], return_inverse=True)
    by_size, values = np.array([tossed(int(m)) for m in sizes]).reshape(-1, 2), np.zeros((2, len(chain.keys)))
    values[:, once] = by_size[place].T
    coin, noise = (_spread(chain, of_pairs) for of_pairs in values)
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


def tossed(m: int) -> tuple[float, float]:
    """Mean and variance of x log(2x/m) + (m−x) log(2(m−x)/m), x binomial with m tosses of a fair coin.

    Twice this is the likelihood-ratio statistic of a fair coin, χ² with one degree of freedom for large m.
    """
    if m > EXACT_UP_TO:
        return 0.5 + 1 / (4 * m), 0.5 + 1 / (2 * m)
    x = np.arange(m + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((m - x[:-1]) / (x[:-1] + 1.0)))]) - m * math.log(2)
    share, one = np.exp(logs), x * np.log(2 * np.maximum(x, 1) / m)
    value = one + one[::-1]
    mean = float(share @ value)
    return mean, max(0.0, float(share @ np.square(value - mean)))


def _over_tokens(values: Array) -> Estimate:
    """Mean with an interval √2 as wide as that of independent values.

    Each pair of neighbours stands in the counts of both, and (x + y)² ≤ 2(x² + y²): no sharing can widen it more.
    """
    found = mean_interval(values)
    half = math.sqrt(2) * (found.high - found.value)
    return Estimate(found.value, found.value - half, found.value + half, found.rows)


def around_tokens(found: Contexts, groups: dict[str, Groups], texts: Texts | None) -> Found:
    """Say how far both sides of tokens differ: of the whole text, by group, and which tokens' differ most.

    `groups` are {"frequency": …, "script": …}. Means over a group count each token that the text has once; a group of
    fewer than two such tokens is left out.
    """
    unit = "nats per token"
    quantities = [
        Quantity.of_estimate(
            "left and right contexts differ by", mean_interval(found.by_part), chance=0.0, unit=unit, main=False,
            why="guessed from other parts of the text, too low on average; ln 2 = 0.693 is the most",
        ),
        Quantity(
            "… from counts", found.weighted(found.plug_in), chance=found.weighted(found.coin), unit=unit, main=False,
            why="too high on average; chance: directions tossed by a coin",
        ),
    ]  # fmt: skip
    curves, listings, excess = [], [], found.plug_in - found.coin
    enough = (found.counts >= ENOUGH) & (found.coin_deviation > 0)
    header = ("group", "tokens", "occurrences", "from counts", "tossed", "guessed", "tokens beyond chance")
    for kind, of in groups.items():
        rows, reads = [], []
        for _, label, inside in of:
            inside = inside & (found.counts > 0)
            if (tokens := int(inside.sum())) < 2:
                continue
            name = f"excess over tossed directions, {'count' if kind == 'frequency' else kind} {label}"
            apart = _over_tokens(excess[inside])  # 0 lies inside where no difference between left and right is shown
            quantities.append(Quantity.of_estimate(name, apart, chance=0.0, unit="nats", main=False))
            guessed_, counted = _over_tokens(found.held_out[inside]), _over_tokens(found.plug_in[inside])
            coin = Estimate(float(found.coin[inside].mean()), math.nan, math.nan, tokens)
            reads.append((guessed_, counted, coin))
            # 0.025 by chance where many neighbours make the coin nearly normal
            tested = excess[inside & enough] > Z * found.coin_deviation[inside & enough]
            levels = (plain(level.value, 3) for level in (counted, coin, guessed_))
            beyond = f"{tested.mean():.1%}" if len(tested) else NONE
            rows.append((label, count(tokens), count(found.counts[inside].sum()), *levels, beyond))
        listings.append(Listing(f"What precedes and what follows, by {kind}", header, tuple(rows)))
        for which, estimates in zip(("guessed", "counts", "tossed"), zip(*reads, strict=True), strict=bool(reads)):
            curves.append(Curve.through(
                f"Left and right contexts by {kind}", enumerate(estimates), unit="nats", which=which,
                along="times the text has the token" if kind == "frequency" else "script of the token",
                ticks=tuple(row[0] for row in rows), level=math.log(2), level_name="no common neighbour",
                why="How far what precedes a token differs from what follows it, 0 the same: counts give too much, "
                "guesses from other parts of the text too little; tossed is what alike sides give.",
            ))  # fmt: skip
    excess = np.where(found.counts >= NOTABLE_FROM, excess, -np.inf)
    ids = [row for row in np.argsort(-excess, kind="stable")[:NOTABLE].tolist() if np.isfinite(excess[row])]
    notable = tuple(
        (visible(text), count(found.counts[row]), plain(found.plug_in[row], 3), plain(found.coin[row], 3))
        for row, text in zip(ids, shown(texts, ids), strict=True)
    )
    columns = ("token", "occurrences", "divergence", "tossed")
    listings.append(Listing("Tokens whose two sides differ most", columns, notable))
    return Found("", tuple(quantities), tuple(curves), listings=tuple(listings))
