"""Width of the model that a config file describes. It is read without torch, for the default learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.planning.config import UNNAMED, Config

WIDTH_KEYS = ("hidden_size", "d_model", "n_embd", "emb_dim")  # the last two: classes without a record, as CTRL and XLM


def config_path(model: str) -> Path:
    """Return the path of a `config.json`, given itself or its folder."""
    path = Path(model)
    return path / "config.json" if path.is_dir() else path


def width_in_file(model: str) -> int | None:
    """Return the width D of the hidden states in a config file. None if no width can be read.

    What is wrong with such a file is reported where the model is built.
    """
    path = config_path(model)
    if not path.is_file():  # a pipe can be read once, by the builder
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return _width(record) if isinstance(record, Mapping) else None
    except (OSError, ValueError, RecursionError, PlanError):
        return None


def _width(values: Mapping[str, Any]) -> int:
    """Return the width in a config, or in the text config that it nests. Raises PlanError."""
    nested = values.get("text_config")
    if isinstance(nested, Mapping):
        return _width(nested)
    config = Config(values, str(values.get("model_type") or UNNAMED))
    key = next((key for key in WIDTH_KEYS if config.get(key) is not None), WIDTH_KEYS[0])
    return config.size(key)
