"""The terminal's view of a rewrite: what came, what went, and what it did to the model."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from tiewise.checkpoint.rule import names, size
from tiewise.rewrite.receipt import Receipt

SHOWN = 6  # names of tensors in one cell


def receipt_table(receipt: Receipt) -> Table:
    """Return a receipt as a table of two columns without lines. Names are `Text`, never markup."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _lines(receipt):
        table.add_row(name, Text(value))
    return table


def _lines(receipt: Receipt) -> list[tuple[str, str]]:
    done = "would write" if receipt.dry_run else "written"
    lines = [(done, str(receipt.to))]
    if receipt.written:
        lines.append(("tensors in", names(receipt.written, SHOWN)))
    if receipt.dropped:
        lines.append(("tensors out", names(receipt.dropped, SHOWN)))
    counts = (("rewritten", receipt.rewritten), ("linked", receipt.linked), ("copied", receipt.copied))
    lines.append(("files", ", ".join(f"{len(files)} {word}" for word, files in counts if files) or "none"))
    lines.append(("bytes", f"{size(receipt.bytes_before)} → {size(receipt.bytes_after)}"))
    lines.append(("logits", f"largest change {receipt.logit_change:.3g}"))
    lines.append(("input rows", f"largest change {receipt.input_change:.3g}"))
    lines.append(("measured", receipt.measured_on))
    return lines + [("note", note) for note in receipt.notes]
