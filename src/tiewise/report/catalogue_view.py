"""The terminal's view of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tiewise.core.numerals import NONE, plain
from tiewise.planning.catalogue import BETTER, Model

SOURCE = 19  # letters of a source
WIDE = 100  # columns of a terminal that has room for everything
HEADER = ("model", "V", "D", "L", "V/D", "params", "tables", "tied", "status", "source")


def models_table(found: Sequence[Model], width: int) -> Table:
    """Return one row per model and under it how to know better; sources are left out below `WIDE` columns."""
    many = f"{len(found)} model{'' if len(found) == 1 else 's'}"
    caption = f"\n{many}; tables: their share of all parameters; ≈: what the name says.\n{BETTER}"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = Text(caption), "left"
    shown = HEADER if width >= WIDE else HEADER[:-1]
    for name in shown:
        left = name in ("model", "tied", "status", "source")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for model in found:
        table.add_row(*map(Text, _cells(model)[: len(shown)]))
    return table


def _cells(model: Model) -> list[str]:
    source = (
        model.source.split(";")[0].split(",")[0].replace(" config class default", "").replace(" configs/models", "")
    )
    return [
        model.name,
        f"{model.vocab:,}" if model.vocab else NONE,
        f"{model.width:,}",
        str(model.layers),
        plain(model.ratio, 1),
        short(model.size) if model.parameters or not model.size else f"≈ {short(model.size)}",
        f"{model.table_share:.1%}".replace("%", " %") if model.table_share else NONE,
        {True: "yes", False: "no", None: "?"}[model.tied],
        model.checked,
        source if len(source) <= SOURCE else source[: SOURCE - 1].rstrip() + "…",
    ]


def short(count: float | None) -> str:
    """7.24 B, 494 M: three digits, B for billions; a dash where it is not known."""
    if count is None:
        return NONE
    for unit in ("", " k", " M", " B"):
        if abs(count) < 999.5:
            return f"{count:.0f}{unit}" if count >= 100 or not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"
