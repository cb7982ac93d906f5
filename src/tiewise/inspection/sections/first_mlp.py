"""How much word order does the first MLP give back to the direct path?"""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.analysis.bigram_counts import Chain, TextPair
from tiewise.analysis.path_tokens import Transition, WordPair
from tiewise.core.found import Found, Grid, Listing, Quantity, visible
from tiewise.core.numerals import count, plain
from tiewise.inspection.request import Subject
from tiewise.inspection.section import section
from tiewise.inspection.sections.bigrams import like_text, nll_of, path_grid, text_grid
from tiewise.inspection.workbench import Workbench
from tiewise.internals.first_mlp import FirstMlp, first_mlp_of

ASYMMETRY = "‖S − Sᵀ‖²/‖S‖²"
LOGITS = "Requested pairs: logits"
PATHS = ("direct", "with the first MLP")


@section(asks="How much word order does the first MLP give back to the direct path?", place=20)
def first_mlp(subject: Subject, bench: Workbench) -> Found:
    """Set the direct path beside the same with the first MLP in it: a symmetric path knows no order of words."""
    opened, request = bench.opened(subject), bench.request
    chain = Chain.of([bench.ids(subject)], opened.vocab) if bench.reads(subject) else None
    return found_of(first_mlp_of(opened, request.pairs, request.effort.samples, request.seed, chain))


def found_of(found: FirstMlp) -> Found:
    """Say how far the MLP moves the path from symmetry, what it costs, and whether it then follows the text."""
    change = Quantity.of_estimate("change", found.change.ratio, unit=ASYMMETRY, chance=0.0)
    before, after = found.without.asymmetry, found.within.asymmetry
    return Found(
        answer="some" if change.low > 0 else "it takes some away" if change.high < 0 else "no clear amount",
        quantities=(
            Quantity.of_estimate(
                "asymmetry, direct", before.ratio, unit=ASYMMETRY, chance=2.0, why="2: unrelated tables"
            ),
            Quantity.of_estimate("asymmetry, with the first MLP", after.ratio, unit=ASYMMETRY, chance=2.0),
            change,
            *_centred(found),
            Quantity("parameters of that MLP", found.parameters, main=False, why=_cost(found)),
            *_text(found),
            *_logits(found),
        ),
        grids=tuple(_grids(found)),
        listings=(_pairs(found),) if found.without.pairs else (),
        notes=(f"{count(found.samples)} tokens sampled; the map is {found.composition}", *found.notes),
    )


def _centred(found: FirstMlp) -> Iterator[Quantity]:
    why = "less row and column means, which the normaliser and a bias can take up"
    views = (found.without.asymmetry, found.within.asymmetry, found.change)
    for name, view in zip((*(f"asymmetry, {path}" for path in PATHS), "change"), views, strict=True):
        yield Quantity.of_estimate(f"{name}, centred", view.centred, unit=ASYMMETRY, main=False, why=why)


def _cost(found: FirstMlp) -> str:
    whole = found.parameters / found.model_parameters
    return f"{found.parameters / found.table_parameters:.0%} of one table, {whole:.0%} of the model"


def _text(found: FirstMlp) -> Iterator[Quantity]:
    for path, view in zip(PATHS, (found.without, found.within), strict=True):
        if view.loss is not None:
            yield nll_of(f"loss on the text's pairs, {path}", view.loss, main=False)
        yield from like_text(view.likeness, path)


def _logits(found: FirstMlp) -> Iterator[Quantity]:
    for path, view in zip(PATHS, (found.without, found.within), strict=True):
        for order, said in _ways(view.pairs):
            yield Quantity(f"{order}, {path}", said.logit, unit="logit", main=False, figure=LOGITS)


def _ways(pairs: tuple[WordPair, ...]) -> Iterator[tuple[str, Transition]]:
    """("New → York", what a path says of it), both orders of every pair."""
    for pair in pairs:
        yield f"{visible(pair.first)} → {visible(pair.second)}", pair.there
        yield f"{visible(pair.second)} → {visible(pair.first)}", pair.back


def _grids(found: FirstMlp) -> Iterator[Grid]:
    if found.target is not None:
        yield text_grid(found.target)
        for name, view in (("Direct path", found.without), ("With the first MLP", found.within)):
            if view.heat is not None:
                yield path_grid(name, view.heat, found.target)


def _pairs(found: FirstMlp) -> Listing:
    header = (
        "order",
        *(f"{path}: {what}" for path in PATHS for what in ("logit", "probability", "rank")),
        "in the text",
    )
    text = _in_text(found.text)
    rows = []
    for (order, without), (_, within) in zip(_ways(found.without.pairs), _ways(found.within.pairs), strict=True):
        cells = [
            cell
            for said in (without, within)
            for cell in (plain(said.logit, 3), f"{said.probability:.3g}", count(said.rank + 1))
        ]
        share = text.get(order)
        rows.append((order, *cells, plain(None) if share is None else f"{share:.3g}"))
    return Listing("Requested pairs", header, tuple(rows))


def _in_text(pairs: tuple[TextPair, ...]) -> dict[str, float | None]:
    found = {}
    for pair in pairs:
        found[f"{visible(pair.first)} → {visible(pair.second)}"] = pair.probability_there
        found[f"{visible(pair.second)} → {visible(pair.first)}"] = pair.probability_back
    return found
