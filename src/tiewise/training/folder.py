"""What lies on disk, and what of it may be believed after a kill: files whole or absent, checkpoints finished or not.

OUT/  run.yaml  env.json  data/  tuning.json  results.json  report.html
      <arm>/seed-<s>/  checkpoint-<n>/…  metrics.jsonl  tensorboard/  final/  result.json (last)
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tiewise.data.atomic import written_whole
from tiewise.errors import RunError
from tiewise.training.settings import FILE, Settings

_OURS = (FILE, "env.json", "data", "tuning", "tuning.json", "calibration", "results.json", "report.html")


def open_run(out: Path, settings: Settings | None, *, resume: bool, overwrite: bool) -> Settings:
    """Make a run's folder, or take up the one that is there.

    Args:
        out: the folder.
        settings: what was asked for; None to take what the folder says (resume).
        resume: continue the run in `out`.
        overwrite: replace the run in `out`.

    Raises:
        RunError: a folder that exists already, that holds something else, or that cannot be written.
    """
    if resume:
        if not (out / FILE).is_file():
            raise RunError(f"{out} holds no run to resume", "leave --resume out to start one")
        return Settings.load(out / FILE)
    assert settings is not None
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            _make_room(out, overwrite)
        out.mkdir(parents=True, exist_ok=True)
        settings.save(out)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}", "choose another --out") from None
    return settings


def _make_room(out: Path, overwrite: bool) -> None:
    if not out.is_dir():
        raise RunError(f"{out} is a file", "choose another --out")
    if not (out / FILE).is_file():
        raise RunError(f"{out} exists and is no run of tiewise", "choose another --out")
    if not overwrite:
        raise RunError(f"{out} holds a run already", "add --resume to finish it, --overwrite to replace it")
    for arm in Settings.load(out / FILE).arms:
        shutil.rmtree(out / folder_name(arm), ignore_errors=True)
    for name in _OURS:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def folder_name(arm: str) -> str:
    """Name of an arm's folder: its spec with what file systems dislike replaced."""
    return re.sub(r"[^\w.=+-]", "-", arm)[:120]


def write_json(path: Path, record: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    with written_whole(path) as file:
        file.write((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON, or return None where there is none (absent or damaged)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def newest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """(newest whole checkpoint, its step) of one training run; torn ones are removed.

    The Trainer writes `trainer_state.json` last, so a checkpoint where it parses is whole.
    """
    found: tuple[Path | None, int] = (None, 0)
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        state = read_json(path / "trainer_state.json")
        if not step.isdigit() or state is None or state.get("global_step") != int(step):
            shutil.rmtree(path, ignore_errors=True)
        elif found[0] is None or int(step) > found[1]:
            found = (path, int(step))
    return found


def replace_folder(made: Path, final: Path) -> None:
    """Put a finished folder in its place."""
    if final.exists():
        shutil.rmtree(final)
    os.replace(made, final)
