"""Requested pairs both ways, of every model and path, as rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiewise.analysis.text_pairs import TextPair
from tiewise.analysis.word_pairs import WordPair
from tiewise.numerals import count, plain
from tiewise.report.grid import Table
from tiewise.report.labels import visible


@dataclass(frozen=True)
class Asked:
    """What one path says of the requested pairs.

    Args:
        name: of the path.
        position: of its model, for the colour.
        filled: whether its marks are: the first MLP in the path fills them.
        pairs: what it says.
    """

    name: str
    position: int
    filled: bool
    pairs: Sequence[WordPair]


def logit_table(asked: Sequence[Asked]) -> Table:
    """Logits by direction, one column per path."""
    rows = [[way, *(plain(ways(one.pairs)[way][0], 3) for one in asked)] for way in ways(asked[0].pairs)]
    return Table(["order", *(one.name for one in asked)], rows)


def probability_table(asked: Sequence[Asked], text: Sequence[TextPair] = ()) -> Table:
    """Probabilities and ranks by direction, one column per path, and what the text has."""
    seen = in_text(text)
    rows = []
    for way in ways(asked[0].pairs):
        found = [ways(one.pairs)[way] for one in asked]
        said = [f"{chance:.3g} (rank {count(rank + 1)})" for _, chance, rank in found]
        rows.append([way, *said, *([_share(seen.get(way))] if text else [])])
    return Table(["order", *(one.name for one in asked), *(["text"] if text else [])], rows)


def ways(pairs: Sequence[WordPair]) -> dict[str, tuple[float, float, int]]:
    """{"New → York": (logit, probability, rank)}, both orders of every pair."""
    found = {}
    for pair in pairs:
        for a, b, said in ((pair.first, pair.second, pair.there), (pair.second, pair.first, pair.back)):
            found[f"{visible(a)} → {visible(b)}"] = (said.logit, said.probability, said.rank)
    return found


def in_text(pairs: Sequence[TextPair]) -> dict[str, float | None]:
    """{"New → York": share in the text}, both orders."""
    found: dict[str, float | None] = {}
    for pair in pairs:
        found[f"{visible(pair.first)} → {visible(pair.second)}"] = pair.probability_there
        found[f"{visible(pair.second)} → {visible(pair.first)}"] = pair.probability_back
    return found


def _share(value: float | None) -> str:
    return plain(None) if value is None else f"{value:.3g}"
