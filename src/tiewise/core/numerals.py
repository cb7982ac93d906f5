"""Numbers as text: one form for the terminal, the report and results.json.

+0.0123   −0.0123   524,288
"""

from __future__ import annotations

import math

MINUS = "−"
NONE = "–"


def plain(value: float | None, digits: int = 4) -> str:
    """5.2851, or a dash where no number was measured; a zero has no sign."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:,.{digits}f}".replace("-", MINUS)
    return text if text.strip("−0.,") else text.removeprefix(MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """+0.0123 or −0.0123, or a dash where no number was measured; a zero has no sign."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:+,.{digits}f}".replace("-", MINUS)
    return text[1:] if not text.strip("+−0.,") else text


def count(value: float) -> str:
    """1,234,567."""
    return f"{value:,.0f}"
