"""Text inside figures, where plotly reads a small HTML: what a user wrote must appear as it was written."""

from __future__ import annotations

import html

from tiewise.core.found import visible


def token_label(token: str) -> str:
    """Return a token as plotly text: visible, and with its markup escaped (a quote is no markup to plotly)."""
    return html.escape(visible(token), quote=False)
