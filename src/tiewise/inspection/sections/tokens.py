"""Rows of tokens: norms and frequency, directions, untrained rows, contexts, and planes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.tokenizer_ids import read_tokenizer
from tiewise.core.errors import TiewiseError
from tiewise.core.estimates import Estimate, Z, mean_interval
from tiewise.core.measurement import (
    NATS,
    NONE,
    TWO,
    Curve,
    Listing,
    Measurement,
    Points,
    Quantity,
    count,
    plain,
    visible,
)
from tiewise.core.progress import progress_of
from tiewise.core.text import BINS, frequency_bins
from tiewise.inspection.tables.align_tables import Score
from tiewise.inspection.tables.bigram_counts import Contexts, contexts
from tiewise.inspection.tables.model_tables import AFTER_MAP, BOTH, Array, Ids, StoredTable, TokenTable, views_of
from tiewise.inspection.tables.path_matrix import sampled
from tiewise.inspection.tables.token_rows import (
    Moments,
    directions,
    gaussian_shares,
    moments,
    norms_by_count,
    plane,
    untrained_rows,
)
from tiewise.inspection.tables.token_texts import Groups, Texts, by_script, read_texts, token_names
from tiewise.inspection.workspace import InspectedModel, Workspace, mean_of, section

FREQUENT = 0.5  # share of the sample: the text's most frequent tokens; the others are random
NAMED = 6  # labelled tokens of a view
FREQUENCY, SCRIPT = "frequency", "script"  # properties that group tokens
LEADING_PART = 4  # one in four directions counts as leading where both sides of a map are compared
OFTEN = "times the text has the token"
ENOUGH = 10  # occurrences from which a token is compared with its null
NOTABLE, NOTABLE_FROM = 10, 100  # most listed tokens, and their fewest occurrences


@section(question="How do rows depend on the frequency of their token?", order=90)
def tokens(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Measure norms, directions, untrained rows and a plane of every table.

    With a text, frequency and contexts are measured too.
    """
    effort, seed = workspace.request.effort, workspace.request.seed
    if not workspace.has_text(model):
        return tokens_of(model.folder, None, effort.samples, seed)
    views, _ = views_of(model.folder)
    rows = min(table.rows for table in views.values())
    counts = workspace.counts(model, rows)
    report = tokens_of(model.folder, workspace.ids(model), effort.samples, seed, counts)
    counted_text = "the given text, which need not be that of training"
    if workspace.counts_training_text(model):
        counted_text = "the text that the model was trained on"
    return replace(report, notes=(*report.notes, f"Token counts are those of {counted_text}."))


def tokens_of(
    folder: Folder, ids: Ids | None = None, samples: int = 2000, seed: int = 0, counts: Ids | None = None
) -> Measurement:
    """Measure the tables of a checkpoint token by token.

    Only the tables and the tokenizer's files are read. Without a text `ids` [N], in the model's own tokens, the
    measures of a text are left out. `counts` [V] are the occurrences of each token in another text, preferably the
    training text; None counts `ids`. Two-dimensional views show `samples` tokens; `seed` is of all random draws.

    Raises:
        CheckpointError: no readable table.
        DataError: a text of fewer than 100 tokens, or of tokens that the table lacks.
    """
    views, notes = views_of(folder)
    rows = min(table.rows for table in views.values())
    texts = None
    try:
        texts = read_texts(folder, rows)
    except TiewiseError as error:  # the tables can be measured without the texts
        notes = (*notes, f"{error.problem}: no texts, no scripts")
    around = None
    if ids is not None:
        around = contexts(ids, rows)
        if counts is None:
            counts = around.counts
    vocabulary = _Vocabulary(rows, texts, counts, _unused_rows(folder, rows, counts, around))
    groups = vocabulary.groups()
    report = _TablesReport(vocabulary, groups, _Sample.of(vocabulary, samples, seed), seed)
    for name, table in views.items():
        report.add(name, table)

    sides = Measurement("")
    if around is not None:
        sides = around_tokens(around, groups, texts)
    quantities = [*report.quantities, *_apart(report.by_count), *sides.quantities]
    if vocabulary.unused is not None:
        unused = len(vocabulary.unused)
        quantities.append(Quantity("rows of no token", unused, main=False, why="no text can produce them"))
    mapped = tuple(_maps(report.shares))
    for one_map in mapped:
        quantities += one_map.quantities(rows)
    listings = (*report.norm_listings(), *sides.listings, report.little_listing())
    return Measurement(
        answer=_answer(report.by_count),
        quantities=tuple(quantities),
        curves=(*report.curves, *sides.curves, *_filled_directions(report.shares, views.values())),
        points=tuple(report.points),
        listings=tuple(listing for listing in listings if listing.rows),
        notes=(*notes, *(one_map.sentence() for one_map in mapped)),
    )


# the vocabulary, and the tokens that are drawn


@dataclass(frozen=True)
class _Vocabulary:
    """Facts about the tokens that all tables of one model share."""

    rows: int  # V, of the shortest table
    texts: Texts | None  # None without a readable tokenizer
    counts: Ids | None  # occurrences of each token [V]; None without a text
    unused: Ids | None  # rows that no text can produce, ascending; None if no file lists the tokens

    def groups(self) -> dict[str, Groups]:
        """Group the tokens by frequency and by script, as far as either is available."""
        groups: dict[str, Groups] = {}
        if self.counts is not None:
            groups[FREQUENCY] = Groups(BINS, frequency_bins(self.counts))
        if self.texts is not None:
            unused = [] if self.unused is None else self.unused.tolist()
            groups[SCRIPT] = by_script(self.texts, unused)
        return groups


def _unused_rows(folder: Folder, rows: int, counts: Ids | None, around: Contexts | None) -> Ids | None:
    """Return the rows that no text can produce, ascending.

    None if no file lists the tokens. Rows of tokens that a text has are in use, even if the tokenizer's files lack
    them.
    """
    if folder.single:
        return None
    tokenizer = read_tokenizer(folder)
    if tokenizer is None or tokenizer.max_id < 0:
        return None
    used = set(tokenizer.used)
    if counts is not None:
        used.update(np.flatnonzero(counts).tolist())
    if around is not None:
        used.update(np.flatnonzero(around.counts).tolist())
    return np.setdiff1d(np.arange(rows), list(used))


@dataclass(frozen=True)
class _Sample:
    """Tokens that two-dimensional views show."""

    ids: Ids  # ascending [n]
    labels: tuple[str, ...]  # their texts
    counts: Ids | None  # occurrences of each in the text [n]

    @classmethod
    def of(cls, vocabulary: _Vocabulary, size: int, seed: int) -> _Sample:
        """Draw tokens at random; with a text, half of them are its most frequent ones."""
        ids = sampled(vocabulary.rows, size, seed)
        counts = vocabulary.counts
        if counts is None:
            return cls(ids, token_names(vocabulary.texts, ids.tolist()), None)
        if size < vocabulary.rows:
            ranked = np.argsort(-counts, kind="stable")[: int(FREQUENT * size)]
            rest = np.setdiff1d(np.arange(vocabulary.rows), ranked)
            of_rest = rest[sampled(len(rest), size - len(ranked), seed)]
            ids = np.sort(np.concatenate([ranked, of_rest]))
        return cls(ids, token_names(vocabulary.texts, ids.tolist()), counts[ids])

    @property
    def bands(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the group of each token by frequency, and the names of the groups."""
        if self.counts is None:
            return (0,) * len(self.labels), ("tokens",)
        return tuple(int(band) for band in frequency_bins(self.counts)), BINS

    @property
    def caption(self) -> str:
        """Return a sentence with the number of tokens in a view."""
        how = "." if self.counts is None else ", half the text's most frequent."
        return f"{count(len(self.labels))} tokens{how}"


# each table


class _TablesReport:
    """Report on one table after the other; `add` takes the next."""

    def __init__(self, vocabulary: _Vocabulary, groups: dict[str, Groups], sample: _Sample, seed: int) -> None:
        self.vocabulary, self.groups, self.sample, self.seed = vocabulary, groups, sample, seed
        self.quantities: list[Quantity] = []
        self.curves: list[Curve] = []
        self.points: list[Points] = []
        self.by_count: dict[str, Score] = {}  # table → rank correlation of norm and count
        self.shares: dict[str, Array] = {}  # table → share of its variance in each direction
        self._norm_rows: dict[str, list[tuple[str, ...]]] = {FREQUENCY: [], SCRIPT: []}
        self._little: list[tuple[str, str, str]] = []
        self._first_plane: Array | None = None  # of the first table; the axes of all others are aligned with it
        self._named: tuple[int, ...] = ()  # labelled tokens in every view

    def add(self, name: str, table: TokenTable) -> None:
        """Measure a table's norms, directions, untrained rows and a view."""
        with progress_of(f"products of {name}", table.rows):
            sums = moments(table)
        # groups and counts cover only the rows that all tables have
        norms = sums.norms[: self.vocabulary.rows] if self.groups else sums.norms
        correlated = self._norms_by_count(name, norms)
        self.quantities += [
            Quantity(f"mean norm, {name}", float(norms.mean()), n=table.rows, unit="norm", main=False),
            Quantity(f"deviation of norms, {name}", float(norms.std()), unit="norm", main=False),
        ]
        for grouping, of in self.groups.items():
            self._norms_by_group(name, norms, grouping, of)
        self.quantities += directions(name, table, sums, self.seed, main=not correlated)
        if isinstance(table, StoredTable):
            counted, listed = untrained_rows(name, table, self.vocabulary.unused, self.vocabulary.counts)
            self.quantities += counted
            self._little += listed
        self.shares[name] = sums.shares
        self._view(name, table, sums)

    def norm_listings(self) -> list[Listing]:
        """Return the rows' norms in groups by frequency and by script."""
        header = ("table and group", "tokens", "median norm", "first quartile", "third quartile")
        return [
            Listing("Row norms by token frequency", header, tuple(self._norm_rows[FREQUENCY])),
            Listing("Row norms by script", header, tuple(self._norm_rows[SCRIPT])),
        ]

    def little_listing(self) -> Listing:
        """Return the list of rows that look untrained."""
        return Listing("Rows that say little", ("table", "which", "rows"), tuple(self._little))

    def _norms_by_count(self, name: str, norms: Array) -> bool:
        """Report the correlation of norms with the text's counts; return False if there is none."""
        if self.vocabulary.counts is None:
            return False
        correlations = norms_by_count(norms, self.vocabulary.counts)
        if correlations is None:
            return False
        by_value, by_rank = correlations
        self.by_count[name] = by_rank
        deviation = plain(1.96 * by_rank.deviation, 3)
        why = f"rank correlation of norm and count, 0 ± {deviation} by chance"
        ranked = Quantity.of_estimate(
            f"norm by frequency, {name}", by_rank.estimate, chance=0.0, unit="correlation", why=why
        )
        valued = Quantity.of_estimate(
            f"the same by value, {name}", by_value.estimate, chance=0.0, unit="correlation", why=why, main=False
        )
        self.quantities += [ranked, valued]
        return True

    def _norms_by_group(self, name: str, norms: Array, grouping: str, of: Groups) -> None:
        """Report median, quartiles and mean of the norms in each group of tokens."""
        medians: list[tuple[int, Estimate]] = []  # (index of the group, median and quartiles)
        for index, label, inside in of:
            values = norms[inside]
            if not len(values):
                continue
            low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            cells = (f"{name}: {label}", count(len(values)), plain(median, 3), plain(low, 3), plain(high, 3))
            self._norm_rows[grouping].append(cells)
            medians.append((index, Estimate(median, low, high, len(values))))
            if len(values) > 1:
                title = f"mean norm, {name}, tokens of {_group_word(grouping)} {label}"
                self.quantities.append(mean_of(title, values, unit="norm", main=False))
        if grouping == FREQUENCY:
            self.curves.append(Curve.through(
                "Length of rows by token frequency", medians, along=OFTEN, ticks=of.labels,
                unit="row norm", which=name, why="Medians and quartiles.",
            ))  # fmt: skip

    def _view(self, name: str, table: TokenTable, sums: Moments) -> None:
        """Add the sampled tokens' rows along the table's two leading directions."""
        sample = self.sample
        xy = plane(table, sums, sample.ids, self._first_plane)
        if self._first_plane is None:
            self._first_plane = xy
            self._named = _worth_naming(xy, sample.labels, sample.counts)
        first, second = np.append(sums.shares, 0.0)[:2]  # a table of width 1 has no second axis
        axes = f"first axis, {first:.1%} of the variance", f"second axis, {second:.1%}"
        coordinates = tuple((x, y) for x, y in xy.tolist())
        title = f"Rows in two dimensions: {name}"
        groups, legend = sample.bands
        points = Points(title, coordinates, sample.labels, groups, legend, self._named, axes, why=sample.caption)
        self.points.append(points)


def _group_word(grouping: str) -> str:
    """Return the word for a grouping before a group's label."""
    return "count" if grouping == FREQUENCY else grouping


def _worth_naming(xy: Array, labels: tuple[str, ...], counts: Ids | None) -> tuple[int, ...]:
    """Return the indices of frequent words whose points are far enough apart to be labelled."""
    if not len(xy):
        return ()
    label_distance = (0.3, 0.1) * np.ptp(xy, axis=0)  # labels are readable if either coordinate differs by this
    order = np.arange(len(xy))
    if counts is not None:
        order = np.argsort(-counts, kind="stable")
    taken: list[int] = []
    for index in order.tolist():
        text = labels[index].strip()
        if len(text) < 2 or not text.isalpha():
            continue
        is_apart = (np.abs(xy[index] - xy[taken]) > label_distance).any(axis=1)
        if is_apart.all():
            taken.append(index)
        if len(taken) == NAMED:
            break
    return tuple(taken)


def _filled_directions(shares: dict[str, Array], tables: Iterable[TokenTable]) -> Iterator[Curve]:
    """Yield the cumulative variance of leading directions for each table.

    Gaussian tables of the same shapes follow.
    """
    shapes = dict.fromkeys((table.rows, table.width) for table in tables)
    gaussian = {f"Gaussian, {rows:,} × {width:,}": gaussian_shares(rows, width) for rows, width in shapes}
    for which, of_directions in (shares | gaussian).items():
        numbers = tuple(range(1, len(of_directions) + 1))
        together = tuple(np.cumsum(of_directions).tolist())
        yield Curve(
            "How many directions a table fills", numbers, together,
            along="leading directions", unit="%", which=which, log_x=True,
            why="Far above the Gaussian's: few directions matter.",
        )  # fmt: skip


# before and after a map


@dataclass(frozen=True)
class _Mapped:
    """Variance of a table's rows in each direction, before and after a map.

    The directions are the principal components of the rows. After the map, rows [V, D] fill at most E directions.
    """

    end: str  # the end that the map belongs to
    before: Array  # share of the variance in each direction, falling [E]
    after: Array  # falling [D]

    @property
    def leading(self) -> int:
        """Return a quarter of E: the number of directions that are compared."""
        return max(1, len(self.before) // LEADING_PART)

    def quantities(self, rows: int) -> Iterator[Quantity]:
        """Yield the variance in the leading directions before and after the map.

        The chance level before it is that of a Gaussian table [V, E].
        """
        name = f"variance in {self.leading} of {len(self.before)} directions"
        figure = "Variance before and after the map"
        chance = float(gaussian_shares(rows, len(self.before))[: self.leading].sum())
        yield Quantity(
            f"{name}, before the {self.end}'s map", self._of_leading(self.before), chance=chance, unit="%", main=False,
            figure=figure, why="chance: Gaussian table",
        )  # fmt: skip
        after = self._of_leading(self.after)
        yield Quantity(f"{name}, after the {self.end}'s map", after, unit="%", main=False, figure=figure)

    def sentence(self) -> str:
        """Return how the map changes the share of the leading directions."""
        before, after = self._of_leading(self.before), self._of_leading(self.after)
        directions = f"the {self.leading} leading of {len(self.before)} directions"
        return f"{self.end}: {directions} have {before:.1%} of the rows' variance before the map, {after:.1%} after it"

    def _of_leading(self, shares: Array) -> float:
        """Return the share of the leading directions."""
        return float(shares[: self.leading].sum())


def _maps(shares: dict[str, Array]) -> Iterator[_Mapped]:
    """Yield the variance on both sides of each map, from the `shares` of all views."""
    for name, after in shares.items():
        if name.endswith(AFTER_MAP):
            end = name.removesuffix(AFTER_MAP).strip()
            before = shares[end if end in shares else BOTH]
            yield _Mapped(end, before, after)


# norms and frequency


def _answer(by_count: dict[str, Score]) -> str:
    """Return whether frequent tokens have longer or shorter rows, and in which tables."""
    if not by_count:
        return "without a text, there are no frequencies to compare rows with"
    sides: dict[str, list[str]] = {}
    for name, score in by_count.items():
        if abs(score.estimate.value) > 1.96 * score.deviation:
            side = "longer" if score.estimate.value > 0 else "shorter"
            sides.setdefault(side, []).append(name)
    if not sides:
        return "no effect of frequency on the length of rows was detected"
    parts = [f"{how} rows ({', '.join(names)})" for how, names in sides.items()]
    return f"frequent tokens have {' and '.join(parts)}"


def _apart(by_count: dict[str, Score]) -> Iterator[Quantity]:
    """Yield the difference of both tables' correlations of norm and frequency."""
    both = [by_count[name].estimate for name in ("input", "output") if name in by_count]
    if len(both) < 2:
        return
    low, high = sorted(both, key=lambda estimate: estimate.value)
    # the two intervals combined: wider than the interval of the difference needs to be
    yield Quantity(
        "difference of both ends' correlations", high.value - low.value, high.low - low.high, high.high - low.low,
        high.rows, chance=0.0, unit="correlation", main=False, p=_p_of_difference(low, high),
        question="Do frequent words have longer rows at one end than at the other?", above=TWO,
        why="above zero: more at one end",
    )  # fmt: skip


def _p_of_difference(low: Estimate, high: Estimate) -> float:
    """Return p at which the intervals of two correlations, by Fisher's z, no longer overlap."""
    if max(abs(low.value), abs(high.value)) >= 1:
        return float(low.value == high.value)
    each = 1 / math.sqrt(low.rows - 3) + 1 / math.sqrt(high.rows - 3)
    distance = math.atanh(high.value) - math.atanh(low.value)
    return math.erfc(distance / each / math.sqrt(2))


# what precedes and what follows a token


def around_tokens(around: Contexts, groups: dict[str, Groups], texts: Texts | None) -> Measurement:
    """Measure how far the left and right contexts of tokens differ.

    It reports the full text, groups, and the tokens that differ most. `groups` are {"frequency": …, "script": …}. Means
    over a group count each token of the text once; a group of fewer than two such tokens is left out.
    """
    counted, tossed = around.weighted(around.plug_in), around.weighted(around.coin)
    quantities = [
        mean_of(
            "left and right contexts differ by", around.by_part, chance=0.0, unit=NATS, main=False,
            why="guessed from other parts: too low; at most ln 2",
        ),
        Quantity(
            "… from counts", counted, chance=tossed, unit=NATS, main=False,
            why="too high; chance: tossed directions",
        ),
    ]  # fmt: skip
    curves: list[Curve] = []
    listings: list[Listing] = []
    header = ("group", "tokens", "occurrences", "from counts", "tossed", "guessed", "tokens beyond chance")
    for grouping, of in groups.items():
        sides = _sides_of_groups(around, of)
        for group in sides:
            name = f"excess over tossed directions, {_group_word(grouping)} {group.label}"
            quantities.append(Quantity.of_estimate(name, group.excess, chance=0.0, unit="nats", main=False))
        rows = tuple(group.cells for group in sides)
        listings.append(Listing(f"What precedes and what follows, by {grouping}", header, rows))
        curves += _context_curves(grouping, sides)
    listings.append(_notable_tokens(around, texts))
    quantities += [
        Quantity("tokens of the text", int(around.counts.sum()), main=False),
        Quantity("different tokens in it", int((around.counts > 0).sum()), main=False),
    ]
    return Measurement("", tuple(quantities), tuple(curves), listings=tuple(listings))


@dataclass(frozen=True)
class _GroupSides:
    """Divergence of left and right contexts in one group of tokens, in nats."""

    label: str
    tokens: int  # tokens of the group that the text has
    occurrences: int
    excess: Estimate  # counted − tossed; includes 0 if left and right cannot be distinguished
    guessed: Estimate  # too low
    counted: Estimate  # too high
    tossed: Estimate  # chance level, without an interval
    beyond: str  # share of tokens beyond chance: 2.5 % by chance for many neighbours (nearly normal)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the group's row of the listing."""
        return (
            self.label,
            count(self.tokens),
            count(self.occurrences),
            plain(self.counted.value, 3),
            plain(self.tossed.value, 3),
            plain(self.guessed.value, 3),
            self.beyond,
        )


def _sides_of_groups(around: Contexts, groups: Groups) -> list[_GroupSides]:
    """Measure each group that has two tokens of the text or more."""
    excess = around.plug_in - around.coin
    is_tested = (around.counts >= ENOUGH) & (around.coin_deviation > 0)
    sides = []
    for _, label, in_group in groups:
        inside = in_group & (around.counts > 0)
        tokens_inside = int(inside.sum())
        if tokens_inside < 2:
            continue
        tested = inside & is_tested
        beyond = NONE
        if tested.any():
            is_beyond = excess[tested] > Z * around.coin_deviation[tested]
            beyond = f"{is_beyond.mean():.1%}"
        tossed = float(around.coin[inside].mean())
        of_group = _GroupSides(
            label,
            tokens_inside,
            int(around.counts[inside].sum()),
            excess=_over_tokens(excess[inside]),
            guessed=_over_tokens(around.heldout[inside]),
            counted=_over_tokens(around.plug_in[inside]),
            tossed=Estimate(tossed, math.nan, math.nan, tokens_inside),
            beyond=beyond,
        )
        sides.append(of_group)
    return sides


def _over_tokens(values: Array) -> Estimate:
    """Return the mean with an interval √2 as wide as that of independent values.

    Each pair of neighbours is in the counts of both tokens, and (x + y)² ≤ 2(x² + y²): this is the largest effect of
    the shared counts.
    """
    mean = mean_interval(values)
    half = math.sqrt(2) * (mean.high - mean.value)
    return replace(mean, low=mean.value - half, high=mean.value + half)


def _context_curves(grouping: str, sides: Sequence[_GroupSides]) -> Iterator[Curve]:
    """Yield the three estimates of every group as curves; none without groups."""
    if not sides:
        return
    estimates = {
        "guessed": [group.guessed for group in sides],
        "counts": [group.counted for group in sides],
        "tossed": [group.tossed for group in sides],
    }
    along = OFTEN if grouping == FREQUENCY else "script of the token"
    labels = tuple(group.label for group in sides)
    for which, of_groups in estimates.items():
        yield Curve.through(
            f"Left and right contexts by {grouping}", enumerate(of_groups), unit="nats", which=which,
            along=along, ticks=labels, level=math.log(2), level_name="no common neighbour",
            why="Counts say too much, guesses too little; tossed: no difference.",
        )  # fmt: skip


def _notable_tokens(around: Contexts, texts: Texts | None) -> Listing:
    """List the frequent tokens whose two sides differ most beyond chance."""
    excess = np.where(around.counts >= NOTABLE_FROM, around.plug_in - around.coin, -np.inf)
    largest = np.argsort(-excess, kind="stable")[:NOTABLE]
    ids = largest[np.isfinite(excess[largest])].tolist()
    rows = []
    for row, text in zip(ids, token_names(texts, ids), strict=True):
        divergence, tossed = plain(around.plug_in[row], 3), plain(around.coin[row], 3)
        rows.append((visible(text), count(around.counts[row]), divergence, tossed))
    return Listing("Tokens whose two sides differ most", ("token", "occurrences", "divergence", "tossed"), tuple(rows))
