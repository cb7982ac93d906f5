"""What bigrams cost a direct path, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.bigrams import Irreversibility
from tiewise.analysis.bigrams_found import BigramsFound
from tiewise.numerals import count, plain
from tiewise.report.grid import Table
from tiewise.report.labels import visible

TITLE = "Bigrams and the direct path"


def lines(found: Mapping[str, BigramsFound]) -> list[str]:
    """Say what the text costs any direct path, tied or not, and where each model's own stands."""
    made: list[str] = []
    for label, one in found.items():
        made += [line for line in _text_lines(one) if line not in made]
        made += _own_lines(label, one)
    return made


def tables(found: Mapping[str, BigramsFound]) -> list[tuple[str, Table]]:
    """Return what is paid on the whole text and on its frequent tokens, and the pairs that go one way."""
    made = [
        ("On the whole text, nats per token", Table(["measure", *found], list(_whole(found)))),
        ("On its most frequent tokens, nats per token", Table(["path", *found], list(_frequent(found)))),
    ]
    seen: list[tuple] = []
    for one in found.values():
        pairs = (*one.asked, *one.one_way)
        if pairs in seen:
            continue
        seen.append(pairs)
        rows = [
            [
                f"{visible(pair.first)} → {visible(pair.second)}",
                count(pair.there),
                count(pair.back),
                _share(pair.probability_there),
                _share(pair.probability_back),
                f"{pair.irreversibility:.2g}",
            ]
            for pair in pairs
        ]
        header = ["pair", "there", "back", "p(second | first)", "p(first | second)", "of I"]
        made.append(("Requested pairs, and those that add most to I", Table(header, rows)))
    return made


def parts(found: Mapping[str, BigramsFound]) -> dict[str, dict[str, float]]:
    """{path: {part: nats per token}} on the frequent tokens: the best tied and untied path, then each model's own."""
    made: dict[str, dict[str, float]] = {}
    for one in found.values():
        split = one.frequent.split
        tied = {"irreversibility": split.irreversibility, "definiteness": split.definiteness, "rank": split.tied_rank}
        best = {"best untied": {"rank": split.untied_rank}, "best tied": tied}
        for name, above in best.items():
            whole = {"entropy": split.entropy} | {part: max(0.0, value) for part, value in above.items()}
            made.setdefault(f"{name}, width {one.width}", whole)
    for label, one in found.items():
        h = one.frequent.split.entropy
        made[f"{label}, its own"] = {"entropy": h, "above entropy": max(0.0, one.frequent.own - h)}
    return made


def _text_lines(one: BigramsFound) -> Iterator[str]:
    whole, part = one.irreversibility, one.frequent
    yield (
        f"The text has {count(one.tokens)} tokens and {count(one.different)} different pairs: behind a known token the "
        f"next has an entropy of {plain(one.entropy, 3)} nats as counted (too low where pairs are rare), "
        f"{plain(one.unigram, 3)} without it."
    )
    yield (
        f"No direct path with symmetric logits, of any width, can avoid paying the text's irreversibility: between "
        f"{_interval(whole)} (guessed from other parts, too low on average) and {plain(whole.plug_in, 3)} nats per "
        f"token (as counted, too high on average); directions tossed by a coin would give {plain(whole.coin, 3)}."
    )
    split = part.split
    merged = " and one state for all others" if part.share < 1 else ""
    yield (
        f"On the {count(part.kept)} most frequent tokens ({part.share:.0%} of the text){merged}, the best tied path "
        f"found of width {count(one.width)} pays {plain(split.tied.nll, 3)} nats: entropy {plain(split.entropy, 3)} + "
        f"irreversibility {plain(split.irreversibility, 3)} + definiteness {plain(split.definiteness, 3)} + rank "
        f"{plain(split.tied_rank, 3)}; the best untied one {plain(split.untied.nll, 3)}: entropy + rank "
        f"{plain(split.untied_rank, 3)}."
    )
    if one.width >= part.kept + (part.share < 1):
        yield f"At width {count(one.width)} so few tokens leave nothing for rank to cost."


def _own_lines(label: str, one: BigramsFound) -> Iterator[str]:
    own = one.own
    yield (
        f"{label}'s own direct path pays {plain(own.nll, 2)} [{plain(own.low, 2)}, {plain(own.high, 2)}] nats per "
        f"token on the whole text, {plain(one.frequent.own, 2)} on the frequent tokens; a bias alone would pay "
        f"{plain(one.unigram, 2)} on the whole text."
    )
    if one.likeness.all is not None:
        order = ""
        if one.likeness.direction is not None:
            order = f", of which order is likelier by {_tested(one.likeness.direction, one.likeness.direction_p)}"
        yield (
            f"On the most frequent tokens {label}'s direct path correlates with the text by "
            f"{_tested(one.likeness.all, one.likeness.all_p)}{order} (0 by chance)."
        )


def _whole(found: Mapping[str, BigramsFound]) -> Iterator[list[str]]:
    all_ = list(found.values())
    yield ["tokens", *(count(one.tokens) for one in all_)]
    yield ["different pairs", *(count(one.different) for one in all_)]
    yield ["entropy of tokens alone", *(plain(one.unigram) for one in all_)]
    yield ["entropy H, as counted", *(plain(one.entropy) for one in all_)]
    yield ["irreversibility I, as counted", *(plain(one.irreversibility.plug_in) for one in all_)]
    yield ["… guessed from other parts", *(_interval(one.irreversibility) for one in all_)]
    yield ["… of tossed directions", *(plain(one.irreversibility.coin) for one in all_)]
    yield ["own direct path", *(f"{plain(o.own.nll)} [{plain(o.own.low)}, {plain(o.own.high)}]" for o in all_)]


def _frequent(found: Mapping[str, BigramsFound]) -> Iterator[list[str]]:
    all_ = [one.frequent for one in found.values()]
    yield ["tokens kept", *(f"{count(one.kept)} ({one.share:.0%} of the text)" for one in all_)]
    yield ["entropy H", *(plain(one.split.entropy) for one in all_)]
    yield ["irreversibility I, as counted", *(plain(one.split.irreversibility) for one in all_)]
    yield ["… guessed from other parts", *(_interval(one.irreversibility) for one in all_)]
    yield ["definiteness", *(plain(one.split.definiteness) for one in all_)]
    yield ["rank, tied", *(plain(one.split.tied_rank) for one in all_)]
    yield ["rank, untied", *(plain(one.split.untied_rank) for one in all_)]
    yield ["best tied path", *(plain(one.split.tied.nll) for one in all_)]
    yield ["best untied path", *(plain(one.split.untied.nll) for one in all_)]
    yield ["own direct path", *(plain(one.own) for one in all_)]
    worst = (max(f.gradient for f in (one.split.full, one.split.tied, one.split.untied)) for one in all_)
    yield ["largest gradient left by the fits", *(f"{value:.1g}" for value in worst)]


def _interval(found: Irreversibility) -> str:
    return f"{plain(found.held_out, 3)} [{plain(found.low, 3)}, {plain(found.high, 3)}]"


def _share(value: float | None) -> str:
    return plain(None) if value is None else f"{value:.3g}"


def _tested(value: float, p: float | None) -> str:
    return plain(value, 2) if p is None else f"{plain(value, 2)} (p = {p:.2g})"
