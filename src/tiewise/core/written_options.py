"""Options in messages, written as the reader writes them.

That is `--keep input` in a terminal and `keep='input'` in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_terminal = False  # True while a command of the terminal runs


@contextmanager
def for_terminal() -> Iterator[None]:
    """Write options as in a terminal within a block."""
    global _terminal
    before, _terminal = _terminal, True
    try:
        yield
    finally:
        _terminal = before


def written_option(name: str, value: object = None, flag: str | None = None) -> str:
    """Return an option as the reader writes it.

    Args:
        name: name of the parameter in Python.
        value: its value; None to name the option alone.
        flag: spelling in the terminal; None if it follows from the name.

    >>> written_option("keep", "input"), written_option("multiple_of")
    ("keep='input'", 'multiple_of')
    >>> with for_terminal():
    ...     written_option("keep", "input"), written_option("multiple_of")
    ('--keep input', '--multiple-of')
    """
    if _terminal:
        words = [flag or "--" + name.replace("_", "-")]
        if value is not None and value is not True:
            words.append(str(value))
        return " ".join(words)
    return name if value is None else f"{name}={value!r}"
