"""What lies on disk, and what of it may be believed after a kill: files whole or absent, checkpoints finished or not.

OUT/  run.yaml  env.json  data/  tuning.json  results.json  report.html
      <arm>/seed-<s>/  checkpoint-<n>/…  metrics.jsonl  tensorboard/  final/  dense/  result.json (last)

A run is prepared in OUT/.starting and becomes OUT's run in one go, `run.yaml` last: a text that turns out too short or
an arm that this model cannot have leaves nothing behind, and the run that was there before is still there. One process
at a time works in it: `locked` holds `OUT/.lock`, which a crash releases by itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tiewise.core.errors import RunError
from tiewise.core.files import format_bytes, write_atomically
from tiewise.core.spec import MODEL_TYPE
from tiewise.training.remote_worker import TOKEN
from tiewise.training.results import DENSE, FINAL
from tiewise.training.settings import FILE, Settings

ENVIRONMENT, DATA, LOCK, SPEED = "env.json", "data", ".lock", "calibration"
METRICS = "metrics.jsonl"  # in a run's folder: a line for every point of its curve
RESULT = "result.json"  # in a run's folder, written last
RESULTS = "results.json"
_STAGE = ".starting"
_STAGED = (DATA, ENVIRONMENT, FILE)  # what a run starts with, in the order in which it is put in place
_PRODUCED = (SPEED, "tuning", "tuning.json", RESULTS, "report.html")  # what it makes, beside its arms' folders


@contextmanager
def starting(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Within this context a folder in `out` (`locked`) takes what becomes its run, unless the block raises."""
    if (out / FILE).is_file():
        if not overwrite:
            remedy = "choose another --out, or add --resume to finish it, --overwrite to replace it"
            raise RunError(f"{out} holds a run already", remedy)
        Settings.load(out / FILE).checked()  # says what is there to be replaced
        _require_idle(out)
    elif out.exists() and _holds_other_files(out):
        raise RunError(f"{out} exists and is no run of tiewise", "choose another --out")
    stage = out / _STAGE
    try:
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        yield stage
        _require_idle(out)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _install_stage(out)


def _holds_other_files(out: Path) -> bool:
    """Return whether a folder holds anything but what a start itself makes."""
    return any(path.name not in (_STAGE, LOCK, TOKEN) for path in out.iterdir())


def _require_idle(out: Path) -> None:
    """Refuse to replace what others still train a part of (`compare --element`): they hold that part's folder alone."""
    for lock in sorted(out.glob(f"*/seed-*/{LOCK}")):
        with locked(lock.parent):
            pass


def saved_run(out: Path) -> Settings:
    """Return the settings of the run in `out`."""
    if (out / _STAGE / FILE).is_file():  # killed while it was put in place
        _install_stage(out)
    if not (out / FILE).is_file():
        raise RunError(f"{out} holds no run to resume", "leave --resume out to start one")
    return Settings.load(out / FILE).checked()


def _install_stage(out: Path) -> None:
    """Replace what `out` holds by what is staged. Done again after a kill, it ends in the same state."""
    old: list[str] = []
    if (out / FILE).is_file():
        old = [folder_name(arm) for arm in Settings.load(out / FILE).checked().arms]
    for name in (*old, *_PRODUCED):
        remove(out / name)
    for name in _STAGED:
        if (out / _STAGE / name).exists():
            replace_path(out / _STAGE / name, out / name)
    shutil.rmtree(out / _STAGE)


def replace_path(source: Path, final: Path) -> None:
    """Put a finished file or folder in its place."""
    if final.is_dir():
        shutil.rmtree(final)
    os.replace(source, final)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_name(arm: str) -> str:
    """Return the name of an arm's folder: its canonical spec, with `:` and `,` as `-`.

    A hash stands for other characters and for great length.
    """
    name = re.sub(r"[:,]", "-", arm)
    safe = re.sub(r"[^\w.=+-]", "-", name)
    if safe == name and len(name) <= 80:
        return name
    return f"{safe[:70]}-{sha256(arm.encode()).hexdigest()[:8]}"


def seed_folder(out: Path, arm: str, seed: int) -> Path:
    """Return where a comparison in `out` has the run of an arm with a seed."""
    return out / folder_name(arm) / f"seed-{seed}"


def write_json(path: Path, record: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, or return None where there is none (absent or damaged)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a `metrics.jsonl`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_lines(path: Path, step: int) -> None:
    """Drop the lines of a `metrics.jsonl` after `step`, and a torn last one."""
    lines = [line for line in read_lines(path) if line["step"] <= step]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a `metrics.jsonl`; a torn last line, left by a kill, is not one."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))
    return lines


def how_it_loads(run: Path) -> str:
    """Say what else than a plain `from_pretrained` loads a finished run's model; "" where that does."""
    config = read_json(run / FINAL / "config.json") or {}
    if config.get("model_type") != MODEL_TYPE:
        return ""
    dense = sum(path.stat().st_size for path in (run / DENSE).glob("*"))
    other = f", {DENSE} beside it ({format_bytes(dense)}) with any transformers" if dense else ""
    return f"loads with tiewise.load{other}"


def newest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """Return (newest whole checkpoint, its step) of one training run; torn ones are removed."""
    by_step: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        state = read_json(path / "trainer_state.json") or {}  # which is written last
        step: Any = state.get("global_step")
        if path.name == f"checkpoint-{step}":
            by_step[step] = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    newest = max(by_step, default=0)
    return by_step.get(newest), newest


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold `out` within this context; a folder that was made for the lock alone goes again, and so does its file."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file", "choose another --out")
    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    lock = FileLock(out / LOCK, timeout=0.2, mode=0o644)  # a moment, for a file that its holder just removes
    _acquire(lock, out)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock.lock_file)  # before it is released: who opened it meanwhile sees that it is gone
        lock.release()
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()


def _acquire(lock: FileLock, out: Path) -> None:
    """Take the lock of a folder, which is made if need be. Raises RunError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(f"another run is at work in {out}", "wait for it, or choose another --out") from None
    except NotImplementedError:
        pass  # a file system without locks: nothing can be known there
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}", "choose another --out") from None
