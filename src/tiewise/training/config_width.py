"""Width of the model that a config file describes. It is read without torch, for the default learning rate."""

from __future__ import annotations

import json
from pathlib import Path

from tiewise.core.errors import TiewiseError
from tiewise.planning.read_config import read


def config_path(model: str) -> Path:
    """Return the path of a `config.json`, given itself or its folder."""
    path = Path(model)
    return path / "config.json" if path.is_dir() else path


def width_in_file(model: str) -> int | None:
    """Return the width D of the hidden states in a config file. None if no width can be read.

    What is wrong with such a file is reported where the model is built.
    """
    try:
        record = json.loads(config_path(model).read_text(encoding="utf-8"))
        return read(record).width
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, TiewiseError):
        return None
