"""Remedy for a missing path that may be a name of the Hugging Face hub.

tiewise reads folders and loads nothing from the hub. If the local cache has the model, its folder can be read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
FOLDER_REMEDY = "give a checkpoint folder, or one .safetensors file"


def remedy_for_missing(path: Path) -> str:
    """Return the remedy for a missing folder.

    For a name of the hub, it is the command that stores the model.
    """
    name = path.as_posix()
    if not HUB_NAME.fullmatch(name) or (path.parent != Path() and path.parent.exists()):
        return FOLDER_REMEDY
    cached = cached_folder(name)
    if cached is not None:
        return f"{FOLDER_REMEDY}; the cache of the hub has {name}: {cached}"
    return f"{FOLDER_REMEDY}; for a model of the hub: hf download {name} --local-dir {path.name}"


def cached_folder(name: str) -> Path | None:
    """Return the newest folder of a model in the local cache of the hub.

    None: the cache lacks the model.
    """
    snapshots = _cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        folders = sorted(snapshots.iterdir(), key=os.path.getmtime)
    except OSError:
        return None
    return next(reversed(folders), None)


def _cache() -> Path:
    """Return the folder of the local cache, as huggingface_hub chooses it."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
