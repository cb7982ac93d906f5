"""What must a direct path pay for the order of words in this text?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiewise.analysis.bigram_counts import (
    Chain,
    Ids,
    Irreversibility,
    TextPair,
    irreversibility,
    one_way_pairs,
    text_pairs,
)
from tiewise.analysis.bigram_maps import HeatMap, Likeness, frequent, likeness, path_map, text_map
from tiewise.analysis.bigram_paths import (
    MOST_TOKENS,
    Frequent,
    PathLoss,
    Split,
    frequent_loss,
    keep_frequent,
    path_loss,
    split,
)
from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.path_tokens import find_pairs
from tiewise.analysis.token_texts import read_as
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError
from tiewise.core.found import Found, Grid, Listing, Quantity, Stack, visible
from tiewise.core.numerals import count, plain
from tiewise.core.progress import doing, progress
from tiewise.inspection.request import Subject
from tiewise.inspection.section import section
from tiewise.inspection.workbench import Workbench

LEAST = 1000  # tokens of a text
NATS = "nats per token"
PARTS = (
    "On the most frequent tokens, all others as one state. Irreversibility is what no symmetric logits of any width "
    "can avoid, definiteness what W Wᵀ pays beyond, rank what the width costs. A model's own path was trained for more "
    "than bigrams."
)
IN_TEXT = (
    "How much likelier the next token (column) is behind the current one (row) than anywhere in the text, log Q/(ππ) "
    "in nats, less what its row and its column have in common. Crosses: pairs that the text never has."
)
BY_PATH = (
    "log p(next | current) − log π(next) in nats, by the path's softmax over the whole vocabulary and the text's π, "
    "less what its row and its column have in common; colours end where the text's do."
)


@dataclass(frozen=True)
class Fits:
    """How much is fitted."""

    kept: int = 255  # most frequent tokens on which paths are fitted; 2 to 2,047, all others are one state
    starts: int = 1  # random starts of each narrow fit
    steps: int = 250  # L-BFGS steps of each start
    sampled: int = 4096  # pairs whose probability the model's own path is asked for


@dataclass(frozen=True)
class FrequentSplit:
    """The exact split on the most frequent tokens."""

    kept: int  # tokens kept; all others are one further state where `share` is below 1
    share: float  # of the text's tokens that are kept
    irreversibility: Irreversibility  # I of the reduced chain, from both sides; `split` holds the plug-in
    split: Split  # what paths of the model's width pay on it
    own: float  # the model's own direct path on it, nats per token
    drawn: int  # tokens that stood for all others in `own`


@dataclass(frozen=True)
class BigramsFound:
    """Bigrams of a text in one model's tokens."""

    tokens: int  # of the text
    vocabulary: int  # rows of the model's input table
    seen: int  # different tokens
    different: int  # different pairs
    width: int  # of the model's tables
    tied: bool  # whether the model is
    unigram: float  # entropy of the tokens' frequencies: what a bias alone pays
    entropy: float  # H of the counts as they are; too low where pairs are rare
    irreversibility: Irreversibility  # I of the text, from both sides
    own: PathLoss  # loss of the model's direct path over the whole vocabulary
    frequent: FrequentSplit  # the split on the most frequent tokens
    asked: tuple[TextPair, ...]  # requested words, both ways
    one_way: tuple[TextPair, ...]  # the pairs that add most to I
    target: HeatMap  # log Q/(ππ) of the most frequent tokens
    heat: HeatMap  # the same of the model's direct path
    likeness: Likeness  # of the two
    notes: tuple[str, ...]  # what the path applies and leaves out


@section(asks="What must a direct path pay for the order of words in this text?", place=30, text=True)
def bigrams(subject: Subject, bench: Workbench) -> Found:
    """Split a text's bigram loss into what any direct path pays, and what each symmetry of a tied one adds."""
    ids, request = bench.ids(subject), bench.request
    fitted: list[tuple[Ids, BigramsFound]] = bench.once("bigrams", list)  # texts whose direct paths were fitted
    like = next((found for other, found in fitted if np.array_equal(other, ids)), None)
    found = bigrams_of(ids, subject.folder, request.pairs, None, request.seed, like)
    fitted.append((ids, found))
    return found_of(found)


def bigrams_of(
    ids: Ids,
    folder: Folder,
    pairs: Sequence[tuple[str, str]] = (),
    fits: Fits | None = None,
    seed: int = 0,
    like: BigramsFound | None = None,
) -> BigramsFound:
    """Measure a text and a model's direct path on it.

    Args:
        ids: the text in the model's tokens [N].
        folder: the model's checkpoint.
        pairs: pairs of words to count and to ask of.
        fits: how much is fitted.
        seed: of draws and starts.
        like: another model's result on the same text and width; its fits hold here too.

    Raises:
        CheckpointError: a model without a direct path.
        DataError: fewer than 1,000 tokens, tokens that a table does not have, words that are no tokens.
    """
    fits = fits or Fits()
    if len(ids) < LEAST:
        raise DataError(f"a text of {len(ids):,} tokens", f"bigrams need {LEAST:,} or more: give a longer text")
    if not 2 <= fits.kept < MOST_TOKENS:
        raise DataError(f"{fits.kept:,} tokens kept", f"keep 2 to {MOST_TOKENS - 1:,}")
    path = open_path(folder)
    asked = find_pairs(folder, pairs, path.rows)
    chain = Chain.of([ids], path.rows)
    whole = irreversibility(ids, path.rows, seed=seed)
    progress("model's path on the text", 0, path.output.rows)
    with doing("own path", path.output.rows):
        own = path_loss(path, chain, fits.sampled, seed)
    shown = frequent(chain, also=[word for pair in asked for word in pair])
    texts = read_as(folder, shown)
    target, heat = text_map(chain, shown, texts), path_map(path, chain, shown, texts)
    return BigramsFound(
        tokens=len(ids),
        vocabulary=path.rows,
        seen=int((chain.tokens > 0).sum()),
        different=len(chain.keys),
        width=path.input.width,
        tied=path.tied,
        unigram=_unigram(chain),
        entropy=chain.entropy,
        irreversibility=whole,
        own=own,
        frequent=_frequent(ids, chain, path, fits, seed, like),
        asked=text_pairs(chain, asked, pairs),
        one_way=_one_way(chain, folder),
        target=target,
        heat=heat,
        likeness=likeness(target, heat, seed=seed),
        notes=path.notes,
    )


def _unigram(chain: Chain) -> float:
    shares = chain.tokens[chain.tokens > 0] / chain.pairs
    return float(-(shares * np.log(shares)).sum())


def _frequent(
    ids: Ids,
    chain: Chain,
    path: DirectPath,
    fits: Fits,
    seed: int,
    like: BigramsFound | None,
) -> FrequentSplit:
    kept = keep_frequent(chain, fits.kept)
    reduced = kept.of(ids)
    known = _known(like, chain, path, kept)
    if known is None:
        progress("fitted paths", 0, 1)
        found = split(reduced, path.input.width, fits.starts, fits.steps, seed)
        known = irreversibility(kept.state[ids], kept.states, seed=seed), found
        progress("fitted paths", 1, 1)
    own, drawn = frequent_loss(path, chain, kept, reduced, seed)
    return FrequentSplit(len(kept.ids), kept.share, *known, own, drawn)


def _known(
    like: BigramsFound | None, chain: Chain, path: DirectPath, kept: Frequent
) -> tuple[Irreversibility, Split] | None:
    """Fits of another model, where they were made on this very chain and width."""
    if like is None or (like.width, like.tokens, like.different) != (path.input.width, chain.pairs, len(chain.keys)):
        return None
    same = like.entropy == chain.entropy and (like.frequent.kept, like.frequent.share) == (len(kept.ids), kept.share)
    return (like.frequent.irreversibility, like.frequent.split) if same else None


def _one_way(chain: Chain, folder: Folder) -> tuple[TextPair, ...]:
    ids = one_way_pairs(chain)
    texts = read_as(folder, np.array(ids, np.int64).ravel().tolist())
    return text_pairs(chain, ids, list(zip(texts[::2], texts[1::2], strict=True)))


def found_of(found: BigramsFound) -> Found:
    """Say what the text costs a symmetric path, and where the model's own stands."""
    i, own = found.irreversibility, found.own
    return Found(
        answer="a symmetric one, as a tied model's, pays for it at any width"
        if i.low > 0
        else "nothing that can be told from chance in this text",
        quantities=(
            Quantity(
                "irreversibility", i.held_out, i.low, i.high, i.parts, unit=NATS,
                why="what symmetric logits cost: guessed from other parts of the text, too low on average",
            ),
            Quantity(
                "… as counted", i.plug_in, chance=i.coin, unit=NATS, main=False,
                why="too high on average; beside it, directions tossed by a coin",
            ),
            nll_of("own direct path pays", own),
            Quantity("a bias alone pays", found.unigram, unit=NATS),
            *(Quantity(name, value, unit=NATS, main=False, why=why) for name, value, why in _others(found)),
            *like_text(found.likeness),
        ),
        stacks=tuple(_stacks(found)),
        grids=(text_grid(found.target), path_grid("Direct path", found.heat, found.target)),
        listings=(pair_listing((*found.asked, *found.one_way)),),
        notes=tuple(_notes(found)),
    )  # fmt: skip


def _notes(found: BigramsFound) -> Iterator[str]:
    frequent, split = found.frequent, found.frequent.split
    yield f"{count(found.tokens)} tokens of text, {count(found.different)} different pairs"
    yield f"the split is of the {count(frequent.kept)} most frequent tokens, {frequent.share:.0%} of the text"
    if found.width >= frequent.kept + (frequent.share < 1):
        yield f"width {found.width} leaves nothing for rank to cost"
    left = max(fit.gradient for fit in (split.full, split.tied, split.untied))
    yield f"largest gradient left by the fits: {left:.1g}"


def _others(found: BigramsFound) -> Iterator[tuple[str, float, str]]:
    frequent, split = found.frequent, found.frequent.split
    yield "entropy behind a known token", found.entropy, "as counted: too low where pairs are rare"
    yield "frequent tokens: entropy", split.entropy, ""
    yield "frequent tokens: irreversibility", split.irreversibility, "as counted"
    yield "frequent tokens: definiteness", split.definiteness, "what W Wᵀ costs beyond, at full width"
    yield "frequent tokens: rank, tied", split.tied_rank, f"what width {found.width} costs beyond"
    yield "frequent tokens: rank, untied", split.untied_rank, ""
    yield "frequent tokens: best tied path", split.tied.nll, ""
    yield "frequent tokens: best untied path", split.untied.nll, ""
    yield "frequent tokens: own path", frequent.own, ""


def _stacks(found: BigramsFound) -> Iterator[Stack]:
    """The best untied and tied path of the model's width, and its own, from the entropy up."""
    split, own = found.frequent.split, found.frequent.own
    tied = (("irreversibility", split.irreversibility), ("definiteness", split.definiteness), ("rank", split.tied_rank))
    paths = {
        f"best untied, width {found.width}": (("rank", split.untied_rank),),
        f"best tied, width {found.width}": tied,
        "": (("above entropy", own - split.entropy),),
    }
    for bar, above in paths.items():
        parts = (("entropy", split.entropy), *((part, max(0.0, value)) for part, value in above))
        yield Stack("What a direct path pays", bar, parts, NATS, why=PARTS)


def nll_of(name: str, loss: PathLoss, main: bool = True) -> Quantity:
    """A path's loss on a text's pairs: with an interval where some were drawn, without where all were taken."""
    low, high = (math.nan, math.nan) if loss.exact else (loss.low, loss.high)
    return Quantity(name, loss.nll, low, high, loss.sampled, unit=NATS, main=main)


def like_text(likeness: Likeness | None, path: str = "direct path") -> Iterator[Quantity]:
    """How far a path follows the text over its most frequent tokens: correlations, with their p by permuting tokens."""
    if likeness is None:
        return
    for name, value, p in (
        (f"{path} follows the text", likeness.all, likeness.all_p),
        (f"{path} follows which order is likelier", likeness.direction, likeness.direction_p),
    ):
        if value is not None:
            said = "" if p is None else f"p = {p:.2g} by permuted tokens"
            yield Quantity(name, value, chance=0.0, unit="correlation", main=False, why=said)


def text_grid(target: HeatMap) -> Grid:
    """What the text has behind what, over its most frequent tokens."""
    return replace(_grid("Bigrams", target, target, IN_TEXT), of="the text")


def path_grid(name: str, said: HeatMap, target: HeatMap) -> Grid:
    """What a path says of the same tokens, in the text's colours."""
    return _grid(name, said, target, BY_PATH)


def _grid(name: str, said: HeatMap, target: HeatMap, why: str) -> Grid:
    values, colours = said.interaction, target.interaction
    off = colours[~np.eye(len(colours), dtype=bool) & ~np.isnan(colours)]
    top = float(np.abs(off).max(initial=0.0)) or 1.0
    rows = tuple(tuple(round(float(value), 3) for value in row) for row in values)
    return Grid(name, said.texts, said.texts, rows, top, ("current token", "next token"), why=why)


def pair_listing(pairs: tuple[TextPair, ...]) -> Listing:
    """How often the text has two tokens behind each other, both ways."""
    header = ("pair", "there", "back", "p(second | first)", "p(first | second)", "of the irreversibility")
    rows = tuple(
        (
            f"{visible(pair.first)} → {visible(pair.second)}", count(pair.there), count(pair.back),
            _share(pair.probability_there), _share(pair.probability_back), f"{pair.irreversibility:.2g}",
        )
        for pair in pairs
    )  # fmt: skip
    return Listing("Requested pairs, and those that add most to the irreversibility", header, rows)


def _share(value: float | None) -> str:
    return plain(None) if value is None else f"{value:.3g}"
