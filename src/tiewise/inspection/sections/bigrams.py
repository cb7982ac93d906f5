"""What must a direct path pay for the order of words in this text?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tiewise.analysis.bigram_counts import TextPair
from tiewise.analysis.bigram_maps import HeatMap, Likeness
from tiewise.analysis.bigram_paths import PathLoss
from tiewise.analysis.bigrams_found import BigramsFound, bigrams_of
from tiewise.core.found import Found, Grid, Listing, Quantity, Stack, visible
from tiewise.core.numerals import count, plain
from tiewise.inspection.section import section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench

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


@section(asks="What must a direct path pay for the order of words in this text?", place=30, text=True)
def bigrams(subject: Subject, bench: Workbench) -> Found:
    """Split a text's bigram loss into what any direct path pays, and what each symmetry of a tied one adds."""
    ids, request = bench.ids(subject), bench.request
    like = next((found for other, found in bench.fitted if np.array_equal(other, ids)), None)
    found = bigrams_of(ids, subject.folder, request.pairs, None, request.seed, like)
    bench.fitted.append((ids, found))
    return found_of(found)


def found_of(found: BigramsFound) -> Found:
    """Say what the text costs a symmetric path, and where the model's own stands."""
    i, own = found.irreversibility, found.own
    return Found(
        answer=f"a symmetric one, as a tied model's, at least {plain(i.held_out, 3)} nats per token, at any width"
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
