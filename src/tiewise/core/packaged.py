"""The figures that come with tiewise: JSON files beside the code."""

from __future__ import annotations

import json
import pkgutil
from typing import Any


def packaged_json(path: str) -> Any:
    """Return what a JSON file of the package holds, by its path below `tiewise/`.

    By pkgutil: importlib.resources, which it stands for, imports tempfile and shutil, a tenth of a plan's time.

    Raises:
        FileNotFoundError: there is no such file.
    """
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path  # None only for loaders that keep no data; Python's own all do
    return json.loads(data)
