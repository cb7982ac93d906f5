"""Names of texts (`--text`), read without the libraries that read the texts.

`sources` has the list of all forms.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path

from tiewise.training.data.documents import unreadable
from tiewise.training.data.synthetic import NAME

BUILTIN, STDIN = "builtin", "-"
SYNTHETIC, HUB = f"{NAME}:", "hf:"
TABLES = (".jsonl", ".ndjson", ".parquet")
FIELD = "text"  # default field of a row


def split_field(text: str) -> tuple[str, str]:
    """Return the path and the field of `FILE.jsonl:FIELD`; of another path, the default field."""
    path, _, field = text.rpartition(":")
    if path.endswith(TABLES):
        return path, field or FIELD
    return text, FIELD


def require_exists(text: str) -> None:
    """Raise DataError if `text` names a file or folder that is missing or unreachable.

    Patterns, generated texts and texts of the Hub are not checked.
    """
    if text in (BUILTIN, STDIN) or text.startswith((SYNTHETIC, HUB)):
        return
    name, _ = split_field(text)
    path = Path(name).expanduser()
    if not os.path.lexists(path) and glob.has_magic(name):
        return
    require_state(path)


def require_state(path: Path) -> os.stat_result:
    """Return the state of a file or folder; raises DataError if it has none."""
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
