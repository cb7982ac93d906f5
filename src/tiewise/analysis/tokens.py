"""A checkpoint's tokens: norms and frequency, anisotropy, untrained rows, contexts, and views in two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.model_ends import View, views_of
from tiewise.analysis.path_tokens import sampled
from tiewise.analysis.row_directions import Anisotropy, Moments, Plane, anisotropy, moments, plane
from tiewise.analysis.single_rows import Norms, RowState, norms_of, row_state
from tiewise.analysis.token_contexts import ContextGroup, Contexts, contexts, furthest, grouped
from tiewise.analysis.token_texts import Groups, Texts, by_frequency, by_script, read_texts, shown
from tiewise.checkpoint.hf_folder import Folder, read_tokenizer
from tiewise.core.errors import DataError
from tiewise.core.progress import doing

FREQUENT = 0.5  # of the sample: the text's most frequent tokens; the rest is drawn from all
NOTABLE = 10
NOTABLE_FROM = 100  # occurrences of a token that is named for its contexts


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
