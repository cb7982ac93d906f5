"""Tokens of a checkpoint in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.single_rows import NormGroup
from tiewise.analysis.token_contexts import ContextGroup
from tiewise.analysis.tokens import ContextsFound, TableTokens, TokensFound
from tiewise.core.numerals import NONE, count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.labels import visible

TITLE = "Tokens, their rows and their contexts"
FEW = 30  # tokens below which a group is not named in a sentence
Z = 1.96


def lines(found: Mapping[str, TokensFound]) -> list[str]:
    """Return what was found, most important first."""
    said = [line for label, one in found.items() for line in _frequency(label, one)]
    said += [line for label, one in found.items() for table in one.tables for line in _directions(label, table)]
    said += [line for names, around in different_contexts(found) for line in _contexts(names, around)]
    said += [line for label, one in found.items() for line in _rows(label, one)]
    return said + [line for label, one in found.items() for line in _planes(label, one)]


def tables(found: Mapping[str, TokensFound]) -> list[tuple[str, Table]]:
    """Return every number as a table of text."""
    made = [("Row norms by how often the text has a token", norms_table(found, "bins"))]
    made.append(("Row norms by script", norms_table(found, "scripts")))
    made.append(("Directions of the rows", anisotropy_table(found)))
    for names, around in different_contexts(found):
        made.append((f"What precedes and what follows, by frequency ({names})", contexts_table(around.bins)))
        made.append((f"What precedes and what follows, by script ({names})", contexts_table(around.scripts)))
        made.append((f"Tokens whose two sides differ most ({names})", _notable(around)))
    made.append(("Rows that say little", _states(found)))
    made.append(("Two-dimensional views", planes_table(found)))
    return [(caption, table) for caption, table in made if table.rows]


def different_contexts(found: Mapping[str, TokensFound]) -> list[tuple[str, ContextsFound]]:
    """(names of models, their text's contexts): models that read the same tokens stand together."""
    groups: list[tuple[list[str], ContextsFound]] = []
    for label, one in found.items():
        if one.contexts is None:
            continue
        home = next((names for names, around in groups if around == one.contexts), None)
        if home is None:
            groups.append(([label], one.contexts))
        else:
            home.append(label)
    return [(", ".join(names), around) for names, around in groups]


def interval(estimate: Estimate, digits: int = 3) -> str:
    """Return [low, high]."""
    return f"[{plain(estimate.low, digits)}, {plain(estimate.high, digits)}]"


def percent(share: float) -> str:
    """12.3 %."""
    return f"{100 * share:.1f} %"


def name_of(label: str, table: TableTokens) -> str:
    """Name a model's table."""
    return f"{label}, {table.name}"


def _frequency(label: str, found: TokensFound) -> Iterator[str]:
    for table in found.tables:
        norms = table.norms.frequency
        if norms is None:
            continue
        rho, limit = norms.spearman, Z * norms.chance
        if abs(rho.value) <= limit:
            how = "neither longer nor shorter rows than rare ones, as far as is shown"
        else:
            how = "longer rows than rare ones" if rho.value > 0 else "shorter rows than rare ones"
        yield (
            f"In {name_of(label, table)}, frequent tokens have {how}: rank correlation of norm and count "
            f"{signed(rho.value, 3)} {interval(rho)} over {count(rho.rows)} tokens of the text "
            f"(within ±{limit:.3f} by chance){_span(table.norms.bins)}."
        )


def _span(bins: tuple[NormGroup, ...]) -> str:
    named = [group for group in bins if group.tokens >= FEW]
    if len(named) < 2:
        return ""
    first, last = named[0], named[-1]
    return (
        f"; the median norm is {plain(first.median, 3)} where the count is {first.label} and {plain(last.median, 3)} "
        f"where it is {last.label}"
    )


def _directions(label: str, table: TableTokens) -> Iterator[str]:
    found = table.anisotropy
    cosine = found.mean_cosine
    text = (
        f"The rows of {name_of(label, table)}, have a mean cosine of {plain(cosine.value, 3)} {interval(cosine)} "
        f"(0 ± {Z * found.cosine_deviation:.1g} for random directions); their mean is {percent(found.mean_share)} of "
        "their energy"
    )
    if found.leading:
        one = found.leading[0]
        text += (
            f", one direction holds {percent(one.share)} of the variance ({percent(one.chance)} in a Gaussian table), "
            f"and the variance fills {found.participation:.0f} directions ({found.participation_chance:.0f})"
        )
    yield f"{text}."


def _contexts(names: str, found: ContextsFound) -> Iterator[str]:
    guessed = found.held_out
    shows = "differs from" if guessed.low > 0 else "is not shown to differ from"
    yield (
        f"What precedes a token {shows} what follows it ({names}): divergence of {plain(found.plug_in, 3)} nats per "
        f"occurrence from counts, which is too high on average, and {plain(guessed.value, 3)} {interval(guessed)} "
        "guessed from other parts of the text, which is too low on average; tossed directions give "
        f"{plain(found.coin, 3)}, and ln 2 = 0.693 is the most."
    )
    for what, groups in (("count", found.bins), ("script", found.scripts)):
        named = sorted((g for g in groups if g.tokens >= FEW), key=lambda group: group.excess.value)
        if len(named) > 1:
            least, most = named[0], named[-1]
            yield (
                f"By {what}, the excess over tossed directions is least for {least.label} "
                f"({plain(least.excess.value, 3)} {interval(least.excess)}, {count(least.tokens)} tokens) and most for "
                f"{most.label} ({plain(most.excess.value, 3)} {interval(most.excess)}, {count(most.tokens)} tokens)."
            )


def _rows(label: str, found: TokensFound) -> Iterator[str]:
    for table in found.tables:
        state = table.state
        if state is None:
            continue
        parts = [f"{count(len(state.zero))} zero rows", f"{count(state.in_groups)} rows equal to another"]
        if found.unused is not None:
            parts.append(f"{count(found.unused)} rows of no token that text can produce")
        if state.unseen is not None:
            parts.append(f"{count(state.unseen)} whose token this text does not have")
        text = f"Of the {count(table.rows)} rows of {name_of(label, table)}: {', '.join(parts)}"
        near = state.near_unused
        if near is not None:
            text += (
                f"; {count(near.count)} rows in use ({percent(near.share)}) lie as near to the mean of the "
                f"{count(near.reference)} unused ones as these do themselves, and may be untrained"
            )
        yield f"{text}."


def _planes(label: str, found: TokensFound) -> Iterator[str]:
    shares = [f"{percent(sum(table.plane.shares))} ({table.name})" for table in found.tables]
    yield f"Two directions show {', '.join(shares)} of the variance of {label}: the views are that much of the tables."


def norms_table(found: Mapping[str, TokensFound], groups: str) -> Table:
    """Row norms by `bins` or `scripts`."""
    header = ["table and group", "tokens", "median norm", "quartiles", "mean norm", "95 % interval"]
    rows = []
    for label, one in found.items():
        for table in one.tables:
            for group in getattr(table.norms, groups):
                quartiles = " to ".join(plain(value, 3) for value in group.quartiles)
                mean = (plain(group.mean.value, 3), interval(group.mean)) if group.mean is not None else (NONE, NONE)
                name = f"{name_of(label, table)}: {group.label}"
                rows.append([name, count(group.tokens), plain(group.median, 3), quartiles, *mean])
    return Table(header, rows)


def anisotropy_table(found: Mapping[str, TokensFound]) -> Table:
    """Mean cosine, mean row, leading directions, participation and isotropy of every table, with chance levels."""
    rows = []
    for label, one in found.items():
        for table in one.tables:
            a = table.anisotropy
            name = name_of(label, table)
            rows.append([f"{name}: mean cosine", plain(a.mean_cosine.value), interval(a.mean_cosine, 4), "0"])
            rows.append([f"{name}: mean row's energy", percent(a.mean_share), NONE, percent(1 / table.rows)])
            for lead in a.leading:
                what = f"{name}: variance in {lead.k} direction{'s' if lead.k > 1 else ''}"
                rows.append([what, percent(lead.share), NONE, percent(lead.chance)])
            filled = [plain(a.participation, 1), NONE, plain(a.participation_chance, 1)]
            rows.append([f"{name}: directions filled", *filled])
            rows.append([f"{name}: isotropy, scaled", _small(a.isotropy.scaled), NONE, plain(a.isotropy.chance, 3)])
            rows.append([f"{name}: isotropy, as stored", _small(a.isotropy.stored), NONE, NONE])
    return Table(["table and measure", "value", "95 % interval", "by chance"], rows)


def _small(value: float) -> str:
    return plain(value, 3) if value >= 0.01 else f"{value:.1e}"


def contexts_table(groups: tuple[ContextGroup, ...]) -> Table:
    """Divergence of left and right contexts by group."""
    header = ["group", "tokens", "from counts", "tossed", "excess", "95 % interval", "guessed", "beyond chance"]
    rows = [
        [
            group.label,
            count(group.tokens),
            plain(group.plug_in.value, 3),
            plain(group.coin, 3),
            plain(group.excess.value, 3),
            interval(group.excess),
            plain(group.held_out.value, 3),
            NONE if group.beyond is None else percent(group.beyond),
        ]
        for group in groups
    ]
    return Table(header, rows)


def _notable(found: ContextsFound) -> Table:
    rows = [[visible(t.text), count(t.count), plain(t.plug_in, 3), plain(t.coin, 3)] for t in found.notable]
    return Table(["token", "occurrences", "divergence", "tossed"], rows)


def _states(found: Mapping[str, TokensFound]) -> Table:
    header = ["table", "zero", "equal to another", "not in the text", "near unused rows", "unused rows", "nearest"]
    rows = []
    for label, one in found.items():
        for table in one.tables:
            state = table.state
            if state is None:
                continue
            near = state.near_unused
            cells = [count(len(state.zero)), count(state.in_groups)]
            cells.append(NONE if state.unseen is None else count(state.unseen))
            cells += [NONE, NONE, NONE] if near is None else _near(near.count, near.reference, near.nearest)
            rows.append([name_of(label, table), *cells])
    return Table(header, rows)


def _near(found: int, reference: int, nearest: tuple) -> list[str]:
    shown = ", ".join(f"#{suspect.row}" for suspect in nearest[:8])
    return [count(found), count(reference), shown or NONE]


def planes_table(found: Mapping[str, TokensFound]) -> Table:
    """Variances along the two axes of every view."""
    rows = [
        [name_of(label, table), f"{table.rows:,} × {table.width:,}", plain(table.plane.variance, 3)]
        + [percent(share) for share in table.plane.shares]
        for label, one in found.items()
        for table in one.tables
    ]
    return Table(["table", "shape", "variance of a row", "first axis", "second axis"], rows)
