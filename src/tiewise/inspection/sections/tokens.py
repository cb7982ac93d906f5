"""Which rows do tokens have: norms and frequency, directions, untrained rows, contexts, and views in two dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tiewise.checkpoint.hf_folder import Folder, read_tokenizer
from tiewise.core.errors import TiewiseError, doing
from tiewise.core.estimates import Estimate, Z, mean_interval
from tiewise.core.found import NATS, NONE, TWO, Curve, Found, Listing, Points, Quantity, count, plain, visible
from tiewise.core.text import BINS, bin_of
from tiewise.inspection.bench import Bench, Subject, mean_of, section
from tiewise.inspection.tables.align_tables import Score
from tiewise.inspection.tables.bigram_counts import Contexts, contexts
from tiewise.inspection.tables.model_tables import Array, Ids, StoredTable, views_of
from tiewise.inspection.tables.path_matrix import sampled
from tiewise.inspection.tables.token_rows import (
    directions,
    gaussian_shares,
    moments,
    norms_by_count,
    plane,
    saying_little,
)
from tiewise.inspection.tables.token_texts import Groups, Texts, by_script, read_texts, token_names

FREQUENT = 0.5  # of the sample: the text's most frequent tokens; the rest is drawn from all
NAMED = 6  # tokens of a view that carry their text
FREQUENCY, SCRIPT = "frequency", "script"  # what tokens are grouped by
OFTEN = "times the text has the token"
ENOUGH = 10  # occurrences from which a token is compared with its own null
NOTABLE, NOTABLE_FROM = 10, 100  # tokens that are named for their contexts, and their occurrences at least


@section(asks="Which rows do tokens have, and what stands on both sides?", place=90)
def tokens(subject: Subject, bench: Bench) -> Found:
    """Measure norms, directions, unused rows and a plane of every table; with a text, frequency and contexts too."""
    effort, seed = bench.request.effort, bench.request.seed
    if not bench.reads(subject):
        return tokens_of(subject.folder, None, effort.samples, seed)
    rows = min(table.rows for table in views_of(subject.folder)[0].values())
    found = tokens_of(subject.folder, bench.ids(subject), effort.samples, seed, bench.counts(subject, rows))
    trained = bench.of_training_text(subject)
    whose = (
        "the text that the model was trained on" if trained else "the given text, which need not be that of training"
    )
    return replace(found, notes=(*found.notes, f"Token counts are those of {whose}."))


def tokens_of(
    folder: Folder, ids: Ids | None = None, samples: int = 2000, seed: int = 0, counts: Ids | None = None
) -> Found:
    """Measure the tables of a checkpoint token by token; only these and its tokenizer's files are read.

    Without a text `ids` [N], in the model's own tokens, what needs one is left out. `counts` [V] say how often each
    token occurs in another text, which is better that of training; None counts `ids`. Two-dimensional views show
    `samples` tokens; `seed` is of every draw.

    Raises:
        CheckpointError: no table that can be read.
        DataError: a text of fewer than 100 tokens, or of tokens that the table does not have.
    """
    views, notes = views_of(folder)
    rows = min(table.rows for table in views.values())
    try:
        texts = read_texts(folder, rows)
    except TiewiseError as error:  # the tables can be measured without their texts
        texts, notes = None, (*notes, f"{error.what}: no texts, no scripts")
    around = None if ids is None else contexts(ids, rows)
    if counts is None and around is not None:
        counts = around.counts
    tokenizer, unused = None if folder.single else read_tokenizer(folder), None
    # rows that no text can produce, where a file says which tokens there are; what the text has is in use
    if tokenizer is not None and tokenizer.max_id >= 0:
        in_text = [] if counts is None else np.flatnonzero(counts).tolist()
        in_text += [] if around is None else np.flatnonzero(around.counts).tolist()
        unused = np.setdiff1d(np.arange(rows), [*tokenizer.used, *in_text])
    groups = {} if counts is None else {FREQUENCY: Groups(BINS, bin_of(counts))}
    groups |= {} if texts is None else {SCRIPT: by_script(texts, () if unused is None else unused.tolist())}
    sample = sampled(rows, samples, seed)
    if counts is not None and samples < rows:
        ranked = np.argsort(-counts, kind="stable")[: int(FREQUENT * samples)]
        rest = np.setdiff1d(np.arange(rows), ranked)
        sample = np.sort(np.concatenate([ranked, rest[sampled(len(rest), samples - len(ranked), seed)]]))
    labels, often = token_names(texts, sample.tolist()), None if counts is None else counts[sample]

    quantities: list[Quantity] = []
    by_count: dict[str, Score] = {}  # table → rank correlation of norm and count
    curves: list[Curve] = []
    norm_rows: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in (FREQUENCY, SCRIPT)}
    filled: dict[str, Array] = {}  # table → share of its variance in each direction
    beside: Array | None = None  # the first table's plane, where those that carry their text lie apart
    named: tuple[int, ...] = ()
    points: list[Points] = []
    many = f"{count(len(labels))} tokens" + ("." if counts is None else ", half the text's most frequent.")
    band_of, bands = ((0,) * len(labels), ("tokens",)) if often is None else (tuple(map(int, bin_of(often))), BINS)
    little: list[tuple[str, str, str]] = []
    for name, table in views.items():
        with doing(f"products of {name}", table.rows):
            sums = moments(table)
        norms = sums.norms[:rows] if groups else sums.norms
        correlations = None if counts is None else norms_by_count(norms, counts)
        if correlations is not None:
            by_value, by_count[name] = correlations
            why = f"rank correlation of norm and count, 0 ± {plain(1.96 * by_count[name].deviation, 3)} by chance"
            by_rank, how = by_count[name].estimate, {"chance": 0.0, "unit": "correlation", "why": why}
            quantities.append(Quantity.of_estimate(f"norm by frequency, {name}", by_rank, **how))
            quantities.append(Quantity.of_estimate(f"the same by value, {name}", by_value.estimate, main=False, **how))
        quantities.append(Quantity(f"mean norm, {name}", float(norms.mean()), n=table.rows, unit="norm", main=False))
        quantities.append(Quantity(f"deviation of norms, {name}", float(norms.std()), unit="norm", main=False))
        for kind, of in groups.items():
            band = []  # of each group its place, with median and quartiles
            for place, label, inside in of:
                if not len(values := norms[inside]):
                    continue
                low, median, high = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
                listed = (count(len(values)), *(plain(q, 3) for q in (median, low, high)))
                norm_rows[kind].append((f"{name}: {label}", *listed))
                band.append((place, Estimate(median, low, high, len(values))))
                if len(values) > 1:
                    what = f"mean norm, {name}, tokens of {'count' if kind == FREQUENCY else kind} {label}"
                    quantities.append(mean_of(what, values, unit="norm", main=False))
            if kind == FREQUENCY:
                curves.append(Curve.through(
                    "Length of rows by token frequency", band, along=OFTEN, ticks=of.labels,
                    unit="row norm", which=name, why="Medians and quartiles.",
                ))  # fmt: skip
        quantities += directions(name, table, sums, seed, main=correlations is None)
        if isinstance(table, StoredTable):
            counted, rows_of = saying_little(name, table, unused, counts)
            quantities, little = [*quantities, *counted], [*little, *rows_of]
        filled[name] = sums.shares
        xy = plane(table, sums, sample, beside)
        if beside is None:
            beside, named = xy, _worth_naming(xy, labels, often)
        first, second = (*sums.shares[:2], 0.0)[:2]
        axes = f"first axis, {first:.1%} of the variance", f"second axis, {second:.1%}"
        places = tuple(map(tuple, xy.tolist()))
        points.append(Points(f"Rows in two dimensions: {name}", places, labels, band_of, bands, named, axes, why=many))
    quantities += _apart(by_count)
    sides = Found("") if around is None else around_tokens(around, groups, texts)
    quantities += sides.quantities
    if unused is not None:
        quantities.append(Quantity("rows of no token", len(unused), main=False, why="no text can produce them"))
    shapes = dict.fromkeys((table.rows, table.width) for table in views.values())
    filled |= {f"Gaussian, {rows:,} × {width:,}": gaussian_shares(rows, width) for rows, width in shapes}
    curves += sides.curves
    for which, shares in filled.items():
        curves.append(Curve(
            "How many directions a table fills", tuple(range(1, len(shares) + 1)), tuple(map(float, np.cumsum(shares))),
            along="leading directions", unit="%", which=which, log_x=True,
            why="Far above the Gaussian's: few directions matter.",
        ))  # fmt: skip
    header = ("table and group", "tokens", "median norm", "first quartile", "third quartile")
    listings = (
        Listing("Row norms by token frequency", header, tuple(norm_rows[FREQUENCY])),
        Listing("Row norms by script", header, tuple(norm_rows[SCRIPT])),
        *sides.listings,
        Listing("Rows that say little", ("table", "which", "rows"), tuple(little)),
    )
    return Found(
        answer=_answer(by_count),
        quantities=tuple(quantities),
        curves=tuple(curves),
        points=tuple(points),
        listings=tuple(listing for listing in listings if listing.rows),
        notes=notes,
    )


def _answer(by_count: dict[str, Score]) -> str:
    if not by_count:
        return "without a text: directions, and rows that say little"
    sides: dict[str, list[str]] = {}
    for name, score in by_count.items():
        if abs(score.estimate.value) > 1.96 * score.deviation:
            sides.setdefault("longer" if score.estimate.value > 0 else "shorter", []).append(name)
    said = " and ".join(f"{how} rows ({', '.join(names)})" for how, names in sides.items())
    return f"frequent tokens have {said}" if sides else "frequent tokens have neither longer nor shorter rows"


def _apart(by_count: dict[str, Score]) -> Iterator[Quantity]:
    """How much more norms follow frequency at one end of two tables than at the other."""
    known = [by_count[name].estimate for name in ("input", "output") if name in by_count]
    if len(known) < 2:
        return
    low, high = sorted(known, key=lambda e: e.value)
    # p at which the two intervals, by Fisher's z, no longer meet
    p = float(low.value == high.value)
    if max(abs(low.value), abs(high.value)) < 1:
        each = 1 / math.sqrt(low.rows - 3) + 1 / math.sqrt(high.rows - 3)
        p = math.erfc((math.atanh(high.value) - math.atanh(low.value)) / each / math.sqrt(2))
    # ends of the two intervals taken together: wider than the interval of the difference needs to be
    yield Quantity(
        "difference of both ends' correlations", high.value - low.value, high.low - low.high, high.high - low.low,
        high.rows, chance=0.0, unit="correlation", main=False, p=p,
        question="Do norms follow frequency alike at both ends?", above=TWO,
        why="above zero: more at one end",
    )  # fmt: skip


def _worth_naming(xy: Array, labels: tuple[str, ...], counts: Ids | None) -> tuple[int, ...]:
    """Places of frequent words that lie apart."""
    reach = np.ptp(xy, axis=0) if len(xy) else np.zeros(2)
    taken: list[int] = []
    for index in range(len(xy)) if counts is None else np.argsort(-counts, kind="stable").tolist():
        text = labels[index].strip()
        apart = all((np.abs(xy[index] - xy[other]) > (0.3, 0.1) * reach).any() for other in taken)
        if len(taken) < NAMED and len(text) > 1 and text.isalpha() and apart:
            taken.append(index)
    return tuple(taken)


def _over_tokens(values: Array) -> Estimate:
    """Mean with an interval √2 as wide as that of independent values.

    Each pair of neighbours stands in the counts of both, and (x + y)² ≤ 2(x² + y²): no sharing can widen it more.
    """
    found = mean_interval(values)
    half = math.sqrt(2) * (found.high - found.value)
    return replace(found, low=found.value - half, high=found.value + half)


def around_tokens(found: Contexts, groups: dict[str, Groups], texts: Texts | None) -> Found:
    """Say how far both sides of tokens differ: of the whole text, by group, and which tokens' differ most.

    `groups` are {"frequency": …, "script": …}. Means over a group count each token that the text has once; a group of
    fewer than two such tokens is left out.
    """
    quantities = [
        mean_of(
            "left and right contexts differ by", found.by_part, chance=0.0, unit=NATS, main=False,
            why="guessed from other parts: too low; at most ln 2",
        ),
        Quantity(
            "… from counts", found.weighted(found.plug_in), chance=found.weighted(found.coin), unit=NATS, main=False,
            why="too high; chance: tossed directions",
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
            name = f"excess over tossed directions, {'count' if kind == FREQUENCY else kind} {label}"
            of_group = (_over_tokens(values[inside]) for values in (excess, found.held_out, found.plug_in))
            apart, guessed_, counted = of_group  # 0 lies inside the first where left and right are not told apart
            quantities.append(Quantity.of_estimate(name, apart, chance=0.0, unit="nats", main=False))
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
                along=OFTEN if kind == FREQUENCY else "script of the token",
                ticks=tuple(row[0] for row in rows), level=math.log(2), level_name="no common neighbour",
                why="Counts say too much, guesses too little; tossed: no difference.",
            ))  # fmt: skip
    excess = np.where(found.counts >= NOTABLE_FROM, excess, -np.inf)
    ids = [row for row in np.argsort(-excess, kind="stable")[:NOTABLE].tolist() if np.isfinite(excess[row])]
    notable = tuple(
        (visible(text), count(found.counts[row]), plain(found.plug_in[row], 3), plain(found.coin[row], 3))
        for row, text in zip(ids, token_names(texts, ids), strict=True)
    )
    columns = ("token", "occurrences", "divergence", "tossed")
    listings.append(Listing("Tokens whose two sides differ most", columns, notable))
    quantities += [
        Quantity("tokens of the text", int(found.counts.sum()), main=False),
        Quantity("different tokens in it", int((found.counts > 0).sum()), main=False),
    ]
    return Found("", tuple(quantities), tuple(curves), listings=tuple(listings))
