"""Which rows do tokens have: norms and frequency, directions, untrained rows, contexts, and views in two dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.model_ends import View, views_of
from tiewise.analysis.path_tokens import sampled
from tiewise.analysis.row_directions import Anisotropy, Moments, Plane, anisotropy, gaussian_shares, moments, plane
from tiewise.analysis.single_rows import Norms, RowState, norms_of, row_state
from tiewise.analysis.token_contexts import ContextGroup, Contexts, contexts, furthest, grouped
from tiewise.analysis.token_texts import Groups, Texts, by_frequency, by_script, read_texts, shown
from tiewise.checkpoint.hf_folder import Folder, read_tokenizer
from tiewise.core.errors import DataError
from tiewise.core.found import TWO, Curve, Found, Listing, Points, Quantity, visible
from tiewise.core.frequency import bin_of, frequency_bins
from tiewise.core.numerals import NONE, count, plain
from tiewise.core.progress import doing
from tiewise.inspection.request import Subject
from tiewise.inspection.section import Bench, section

FREQUENT = 0.5  # of the sample: the text's most frequent tokens; the rest is drawn from all
NOTABLE = 10
NOTABLE_FROM = 100  # occurrences of a token that is named for its contexts
NAMED = 6  # tokens of a view that carry their text
BINS = tuple(found.label for found in frequency_bins(np.zeros(0, np.int64)))
CORRELATION = "norm by frequency"


@dataclass(frozen=True)
class TableTokens:
    """One table: stored, or behind its map."""

    name: str  # "both ends", "input" or "output", with "after its map" where a map is applied
    mapped: bool  # whether one is
    rows: int  # V
    width: int  # E or D
    norms: Norms  # of its rows
    anisotropy: Anisotropy  # of its rows
    plane: Plane  # its sampled rows in two dimensions
    state: RowState | None  # of its rows, of stored tables only


@dataclass(frozen=True)
class Notable:
    """A token whose left and right contexts differ far beyond the coin: JS and coin in nats."""

    token: int
    text: str
    count: int
    plug_in: float
    coin: float


@dataclass(frozen=True)
class ContextsFound:
    """What precedes tokens against what follows them."""

    plug_in: float  # JS in nats, mean over occurrences: the irreversibility of the text's pairs; too high
    coin: float  # what tossed directions would give
    # sides guessed from other parts of the text, with its interval over the parts; too low. Its interval lies above 0
    # where a difference is shown
    held_out: Estimate
    bins: tuple[ContextGroup, ...]  # by frequency
    scripts: tuple[ContextGroup, ...]  # by script; empty where the tokens' texts are not known
    notable: tuple[Notable, ...]  # tokens of 100 occurrences or more with the largest excess over the coin


@dataclass(frozen=True)
class TokensFound:
    """A checkpoint's tokens."""

    tables: tuple[TableTokens, ...]  # stored ones first; then those behind maps
    text: int  # tokens of the text; 0 without one
    seen: int  # different tokens among these
    contexts: ContextsFound | None  # None without a text
    sample: tuple[int, ...]  # tokens of the two-dimensional views
    labels: tuple[str, ...]  # their texts
    counts: tuple[int, ...]  # theirs in the text; empty without one
    unused: int | None  # rows that no text can produce, as the tokenizer's files say; None where there are none
    seed: int  # of every draw
    notes: tuple[str, ...]  # what is left out


@dataclass(frozen=True)
class _Known:
    """What is known of the tokens, whatever table they stand in."""

    texts: Texts | None
    scripts: Groups | None
    around: Contexts | None
    bins: Groups | None
    unused: NDArray[np.int64] | None
    sample: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64] | None:
        return None if self.around is None else self.around.counts


@section(asks="Which rows do tokens have, and what stands on both sides of them?", place=90)
def tokens(subject: Subject, bench: Bench) -> Found:
    """Measure norms, directions, unused rows and a plane of every table; with a text, frequency and contexts too."""
    ids = bench.ids(subject) if bench.reads(subject) else None
    return found_of(tokens_of(subject.folder, ids, bench.request.effort.samples, bench.request.seed))


def tokens_of(
    folder: Folder,
    ids: NDArray[np.int64] | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> TokensFound:
    """Measure the tables of a checkpoint token by token.

    Args:
        folder: the checkpoint; only its tables and its tokenizer's files are read.
        ids: a text in the model's own tokens [N]; without one, what needs a text is left out.
        samples: tokens of the two-dimensional views.
        seed: of every draw.

    Raises:
        CheckpointError: no table that can be read.
        DataError: a text of fewer than 100 tokens, or of tokens that the table does not have.
    """
    views, notes = views_of(folder)
    rows = min(view.table.rows for view in views)
    known, missing = _known(folder, rows, ids, samples, seed)
    tables: list[TableTokens] = []
    for view in views:
        tables.append(_table(view, known, tables[0].plane if tables else None, seed))
    counts = known.counts
    return TokensFound(
        tables=tuple(tables),
        text=0 if ids is None else len(ids),
        seen=0 if counts is None else int((counts > 0).sum()),
        contexts=_contexts(known),
        sample=tuple(map(int, known.sample)),
        labels=shown(known.texts, known.sample.tolist()),
        counts=() if counts is None else tuple(map(int, counts[known.sample])),
        unused=None if known.unused is None else len(known.unused),
        seed=seed,
        notes=(*notes, *missing),
    )


def _known(
    folder: Folder, rows: int, ids: NDArray[np.int64] | None, samples: int, seed: int
) -> tuple[_Known, list[str]]:
    missing = []
    try:
        texts = read_texts(folder, rows)
    except DataError as error:  # the tables can be measured without their texts
        texts, missing = None, [f"{error.what}: tokens have no texts and no scripts"]
    around = None if ids is None else contexts(ids, rows)
    bins = None if around is None else by_frequency(around.counts)
    chosen = _sample(None if around is None else around.counts, rows, samples, seed)
    unused = _unused(folder, rows, None if around is None else around.counts)
    scripts = None if texts is None else by_script(texts, () if unused is None else unused.tolist())
    return _Known(texts, scripts, around, bins, unused, chosen), missing


def _unused(folder: Folder, rows: int, counts: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Rows that no text can produce; None where no file says which tokens there are. What the text has is in use."""
    tokenizer = None if folder.single else read_tokenizer(folder)
    if tokenizer is None or not tokenizer.count:
        return None
    unused = np.ones(rows, bool)
    unused[[row for row in tokenizer.used if row < rows]] = False
    if counts is not None:
        unused &= counts == 0
    return np.nonzero(unused)[0]


def _sample(counts: NDArray[np.int64] | None, rows: int, samples: int, seed: int) -> NDArray[np.int64]:
    drawn = sampled(rows, samples, seed)
    if counts is None or samples >= rows:
        return drawn
    ranked = np.argsort(-counts, kind="stable")[: int(FREQUENT * samples)]
    rest = np.setdiff1d(np.arange(rows), ranked)
    return np.sort(np.concatenate([ranked, rest[sampled(len(rest), samples - len(ranked), seed)]]))


def _table(view: View, known: _Known, beside: Plane | None, seed: int) -> TableTokens:
    table = view.table
    with doing(f"products of {view.name}", table.rows):
        found: Moments = moments(table)
    state = None
    if view.stored is not None:
        unused = np.empty(0, np.int64) if known.unused is None else known.unused
        state = row_state(view.stored, table, unused, known.counts)
    rows = len(known.scripts.of) if known.scripts is not None else found.rows
    norms = norms_of(found.norms[:rows], known.counts, known.bins, known.scripts)
    shown_in = plane(table, found, known.sample, beside)
    measured = anisotropy(table, found, seed)
    return TableTokens(view.name, view.stored is None, table.rows, table.width, norms, measured, shown_in, state)


def _contexts(known: _Known) -> ContextsFound | None:
    around, bins = known.around, known.bins
    if around is None or bins is None:
        return None
    furthest_ids = furthest(around, NOTABLE_FROM, NOTABLE).tolist()
    named = zip(furthest_ids, shown(known.texts, furthest_ids), strict=True)
    return ContextsFound(
        around.weighted(around.plug_in),
        around.weighted(around.coin),
        around.guessed,
        grouped(around, bins),
        () if known.scripts is None else grouped(around, known.scripts),
        tuple(
            Notable(row, text, int(around.counts[row]), float(around.plug_in[row]), float(around.coin[row]))
            for row, text in named
        ),
    )


def found_of(found: TokensFound) -> Found:
    """Say how norms follow frequency, and give every table's directions, rows and views, and the text's contexts."""
    quantities = [q for table in found.tables for q in (*_norms(table), *_directions(table), *_rows(table))]
    quantities += [*_apart(found), *_sides(found)]
    quantities += [Quantity("tokens of the text", found.text, main=False)] if found.text else []
    quantities += [Quantity("different tokens in it", found.seen, main=False)] if found.text else []
    unused = "that no text can produce"
    quantities += (
        [Quantity("rows of no token", found.unused, main=False, why=unused)] if found.unused is not None else []
    )
    return Found(
        answer=_answer(found),
        quantities=tuple(quantities),
        curves=(*(c for table in found.tables for c in _lengths(table)), *_context_curves(found), *_spectra(found)),
        points=tuple(_views(found)),
        listings=tuple(listing for listing in _listings(found) if listing.rows),
        notes=found.notes,
    )


def _answer(found: TokensFound) -> str:
    sides: dict[str, list[str]] = {}
    for table in found.tables:
        norms = table.norms.frequency
        if norms is not None and abs(norms.spearman.value) > 1.96 * norms.chance:
            how = "longer" if norms.spearman.value > 0 else "shorter"
            sides.setdefault(how, []).append(table.name)
    if sides:
        said = " and ".join(f"{how} rows ({', '.join(names)})" for how, names in sides.items())
        return f"frequent tokens have {said} than rare ones"
    if any(table.norms.frequency is not None for table in found.tables):
        return "rows of frequent tokens are not shown to be longer or shorter"
    return "without a text, only where they point and which say little"


def _norms(table: TableTokens) -> Iterator[Quantity]:
    norms, name = table.norms, table.name
    if norms.frequency is not None:
        why = f"rank correlation of norm and count, 0 ± {plain(1.96 * norms.frequency.chance, 3)} by chance"
        for what, value in ((CORRELATION, norms.frequency.spearman), ("the same by value", norms.frequency.pearson)):
            yield Quantity.of_estimate(
                f"{what}, {name}", value, chance=0.0, unit="correlation", main=what == CORRELATION, why=why
            )
    yield Quantity(f"mean norm, {name}", norms.mean, n=table.rows, unit="norm", main=False)
    yield Quantity(f"deviation of norms, {name}", norms.deviation, unit="norm", main=False)
    for what, groups in (("tokens of count", norms.bins), ("tokens of script", norms.scripts)):
        for group in groups:
            if group.mean is not None:
                yield Quantity.of_estimate(
                    f"mean norm, {name}, {what} {group.label}", group.mean, unit="norm", main=False
                )


def _directions(table: TableTokens) -> Iterator[Quantity]:
    a, name = table.anisotropy, table.name
    why = f"0 ± {plain(1.96 * a.cosine_deviation, 4)} for random directions"
    main = table.norms.frequency is None
    yield Quantity.of_estimate(f"mean cosine, {name}", a.mean_cosine, chance=0.0, unit="cosine", main=main, why=why)
    yield Quantity(f"mean row's energy, {name}", a.mean_share, chance=1 / table.rows, unit="%", main=False)
    for lead in a.leading:
        what = f"variance in {lead.k} direction{'s' if lead.k > 1 else ''}, {name}"
        yield Quantity(what, lead.share, chance=lead.chance, unit="%", main=False, why="beside it: a Gaussian table")
    filled = f"directions filled, {name}"
    yield Quantity(
        filled, a.participation, chance=a.participation_chance, unit="directions", main=False, why="1 / Σ share²"
    )
    why = f"min Z / max Z over {count(a.isotropy.rows)} rows: 1 where no direction is special"
    scaled = f"isotropy, {name}"
    yield Quantity(scaled, a.isotropy.scaled, chance=a.isotropy.chance, unit="min/max", main=False, why=why)
    yield Quantity(f"isotropy as stored, {name}", a.isotropy.stored, unit="min/max", main=False)
    yield Quantity(f"variance of a row, {name}", table.plane.variance, unit="squared norm", main=False)
    for axis, share in zip(("first", "second"), table.plane.shares, strict=True):
        yield Quantity(f"variance along the {axis} axis, {name}", share, unit="%", main=False)


def _rows(table: TableTokens) -> Iterator[Quantity]:
    state, name = table.state, table.name
    if state is None:
        return
    yield Quantity(f"rows of zeros, {name}", len(state.zero), main=False)
    yield Quantity(f"rows equal to another, {name}", state.in_groups, main=False, why=f"in {state.groups} groups")
    if state.unseen is not None:
        yield Quantity(f"rows whose token the text lacks, {name}", state.unseen, main=False)
    near = state.near_unused
    if near is not None:
        why = f"within {plain(near.reach, 3)} of the mean of the {count(near.reference)} unused ones, as 95 % of these"
        yield Quantity(f"rows in use near unused ones, {name}", near.count, main=False, why=f"{why}: maybe untrained")
        yield Quantity(f"their share of rows in use, {name}", near.share, unit="%", main=False)


def _apart(found: TokensFound) -> Iterator[Quantity]:
    """How much more norms follow frequency at one end of two tables than at the other."""
    ends = {table.name: table.norms.frequency for table in found.tables if table.name in ("input", "output")}
    known = [norms.spearman for norms in ends.values() if norms is not None]
    if len(known) < 2:
        return
    low, high = sorted(known, key=lambda e: e.value)
    # ends of the two intervals taken together: wider than the interval of the difference needs to be
    yield Quantity(
        "difference of both ends' correlations", high.value - low.value, high.low - low.high, high.high - low.low,
        high.rows, chance=0.0, unit="correlation", main=False, p=_parted(low, high),
        question="Do norms follow frequency alike at both ends?", above=TWO,
        why="above zero norms follow frequency more at one end than at the other, and one table has one norm a row",
    )  # fmt: skip


def _parted(low: Estimate, high: Estimate) -> float:
    """p at which the two intervals of correlations, by Fisher's z, no longer meet."""
    if max(abs(low.value), abs(high.value)) >= 1:
        return float(low.value == high.value)
    each = 1 / math.sqrt(low.rows - 3) + 1 / math.sqrt(high.rows - 3)
    return math.erfc((math.atanh(high.value) - math.atanh(low.value)) / each / math.sqrt(2))


def _sides(found: TokensFound) -> Iterator[Quantity]:
    around = found.contexts
    if around is None:
        return
    yield Quantity.of_estimate(
        "left and right contexts differ by", around.held_out, chance=0.0, unit="nats per token", main=False,
        why="guessed from other parts of the text, too low on average; ln 2 = 0.693 is the most",
    )  # fmt: skip
    yield Quantity(
        "… from counts", around.plug_in, chance=around.coin, unit="nats per token", main=False,
        why="too high on average; beside it, directions tossed by a coin",
    )  # fmt: skip
    for what, groups in (("count", around.bins), ("script", around.scripts)):
        for group in groups:
            name = f"excess over tossed directions, {what} {group.label}"
            yield Quantity.of_estimate(name, group.excess, chance=0.0, unit="nats", main=False)


def _lengths(table: TableTokens) -> Iterator[Curve]:
    bins = table.norms.bins
    if bins:
        yield Curve(
            "Length of rows by token frequency", tuple(BINS.index(group.label) for group in bins),
            tuple(group.median for group in bins), tuple(group.quartiles[0] for group in bins),
            tuple(group.quartiles[1] for group in bins), along="times the text has the token", ticks=BINS,
            unit="row norm", which=table.name,
            why="Medians; half of the tokens of a bin lie inside the band. The text's counts stand for those of "
            "training, which are not known here.",
        )  # fmt: skip


def _context_curves(found: TokensFound) -> Iterator[Curve]:
    if found.contexts is None:
        return
    for what, along, groups in (
        ("frequency", "times the text has the token", found.contexts.bins),
        ("script", "script of the token", found.contexts.scripts),
    ):
        reads = {
            "guessed": [group.held_out for group in groups],
            "counts": [group.plug_in for group in groups],
            "tossed": [Estimate(group.coin, math.nan, math.nan, group.tokens) for group in groups],
        }
        for which, estimates in reads.items():
            if estimates:
                yield Curve.through(
                    f"Left and right contexts by {what}", enumerate(estimates), along=along, unit="nats",
                    ticks=tuple(group.label for group in groups), which=which, level=math.log(2),
                    level_name="no common neighbour",
                    why="How far what precedes a token differs from what follows it: 0 is the same. Counts give too "
                    "much, guesses from other parts of the text too little; tossed directions show what counts of "
                    "this size give where both sides are alike.",
                )  # fmt: skip


def _spectra(found: TokensFound) -> Iterator[Curve]:
    shapes = dict.fromkeys((table.rows, table.width) for table in found.tables)
    shares = {table.name: np.array(table.anisotropy.shares) for table in found.tables}
    shares |= {f"Gaussian, {rows:,} × {width:,}": gaussian_shares(rows, width) for rows, width in shapes}
    for which, found_shares in shares.items():
        yield Curve(
            "How many directions a table fills", tuple(range(1, len(found_shares) + 1)),
            tuple(map(float, np.cumsum(found_shares))), along="leading directions", unit="%", which=which, log_x=True,
            why="Share of the variance of the rows, less their mean, in the first directions; a curve far above that "
            "of a Gaussian table has few directions that matter.",
        )  # fmt: skip


def _views(found: TokensFound) -> Iterator[Points]:
    """Every table in two dimensions, coloured by frequency where that is known."""
    groups = tuple(map(int, bin_of(np.array(found.counts, np.int64)))) if found.counts else (0,) * len(found.sample)
    named = tuple(_worth_naming(found))
    many = f"{count(len(found.sample))} tokens" + (", half of them the text's most frequent," if found.counts else "")
    for table in found.tables:
        first, second = table.plane.shares
        yield Points(
            f"Rows in two dimensions: {table.name}", table.plane.points, found.labels, groups,
            BINS if found.counts else ("tokens",), named,
            (f"first axis, {first:.1%} of the variance", f"second axis, {second:.1%}"),
            why=f"{many} along the two directions of largest variance. Distances across the plane are true only in so "
            "far as these two hold the variance; the direction of an axis has no meaning.",
        )  # fmt: skip


def _worth_naming(found: TokensFound) -> Iterator[int]:
    """Places of the tokens to name in every view: frequent words that lie apart in the first."""
    points = np.array(found.tables[0].plane.points).reshape(-1, 2)
    order = np.argsort(-np.array(found.counts), kind="stable") if found.counts else np.arange(len(points))
    reach = np.ptp(points, axis=0) if len(points) else np.zeros(2)
    taken: list[int] = []
    for index in order.tolist():
        text = found.labels[index].strip()
        apart = all((np.abs(points[index] - points[other]) > (0.3, 0.1) * reach).any() for other in taken)
        if len(text) > 1 and text.isalpha() and apart:
            taken.append(index)
            yield index
        if len(taken) == NAMED:
            return


def _listings(found: TokensFound) -> Iterator[Listing]:
    for what, name in (("bins", "how often the text has a token"), ("scripts", "script")):
        rows = [
            (f"{table.name}: {g.label}", count(g.tokens), plain(g.median, 3), *(plain(q, 3) for q in g.quartiles))
            for table in found.tables
            for g in getattr(table.norms, what)
        ]
        groups = ("table and group", "tokens", "median norm", "first quartile", "third quartile")
        yield Listing(f"Row norms by {name}", groups, tuple(rows))
    if found.contexts is not None:
        yield _by_group("frequency", found.contexts.bins)
        yield _by_group("script", found.contexts.scripts)
        notable = tuple(
            (visible(t.text), count(t.count), plain(t.plug_in, 3), plain(t.coin, 3)) for t in found.contexts.notable
        )
        header = ("token", "occurrences", "divergence", "tossed")
        yield Listing("Tokens whose two sides differ most", header, notable)
    yield Listing("Rows that say little", ("table", "which", "rows"), tuple(_which_rows(found)))


def _by_group(what: str, groups: tuple[ContextGroup, ...]) -> Listing:
    rows = [
        (
            group.label, count(group.tokens), count(group.occurrences), plain(group.plug_in.value, 3),
            plain(group.coin, 3), plain(group.held_out.value, 3),
            NONE if group.beyond is None else f"{group.beyond:.1%}",
        )
        for group in groups
    ]  # fmt: skip
    header = ("group", "tokens", "occurrences", "from counts", "tossed", "guessed", "tokens beyond chance")
    return Listing(f"What precedes and what follows, by {what}", header, tuple(rows))


def _which_rows(found: TokensFound) -> Iterator[tuple[str, ...]]:
    for table in found.tables:
        state = table.state
        if state is None:
            continue
        if state.zero:
            yield table.name, "zero", ", ".join(f"#{row}" for row in state.zero[:20])
        for group in state.repeated:
            yield table.name, "equal", ", ".join(f"#{row}" for row in group)
        if state.near_unused is not None and state.near_unused.nearest:
            near = (f"#{one.row} (cosine {plain(one.cosine, 3)})" for one in state.near_unused.nearest)
            yield table.name, "near unused ones", ", ".join(near)
