"""Text inside figures, where plotly reads a small HTML: what a user wrote must appear as it was written."""

from __future__ import annotations

import html

_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible(token: str) -> str:
    """Make white space and control characters visible: " the" becomes ␣the."""
    shown = token.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown) or "(empty)"


def token_label(token: str) -> str:
    """Return a token as plotly text: visible, and with its markup escaped (a quote is no markup to plotly)."""
    return html.escape(visible(token), quote=False)
