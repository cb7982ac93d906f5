"""Files of a run, and which of them are complete after a kill.

Files are complete or absent; checkpoints are complete or removed.

OUT/  run.yaml  env.json  data/  tuning.json  results.json  report.html
      <arm>/seed-<s>/  checkpoint-<n>/…  metrics.jsonl  final/  dense/  result.json (last)

A run is prepared in OUT/.starting and becomes OUT's run in one step, with `run.yaml` last. If a text is too short, or
the model cannot have an arm, nothing is left behind, and the earlier run is still there. One process at a time works in
OUT: `locked` holds `OUT/.lock`, which a crash releases.
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
from tiewise.core.writing_faults import writing_fault
from tiewise.training.remote_worker import TOKEN
from tiewise.training.results import DENSE, FINAL
from tiewise.training.settings import FILE, Settings

ENVIRONMENT, DATA, LOCK, SPEED = "env.json", "data", ".lock", "calibration"
METRICS = "metrics.jsonl"  # file of a run with a line per point of its curve
RESULT = "result.json"  # file of a run that is written last
RESULTS = "results.json"
REPORT = "report.html"  # page of a comparison or a sweep
_STAGE = ".starting"
_STAGED = (DATA, ENVIRONMENT, FILE)  # files of a prepared run, in the order in which they are moved into OUT
_PRODUCED = (
    SPEED,
    "tuning",
    "tuning.json",
    RESULTS,
    REPORT,
)  # files that a run writes


@contextmanager
def stage_run(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Prepare a run in a subfolder of `out`, and install it as this context ends.

    `out` must be `locked`. If the block raises, `out` stays as it was.
    """
    if (out / FILE).is_file():
        if not overwrite:
            remedy = "choose another --out, or add --resume to finish it, --overwrite to replace it"
            raise RunError(f"{out} holds a run already", remedy)
        Settings.load(out / FILE).checked()  # raises if the run to be replaced cannot be read
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
    """Return whether a folder has other files than those of a start."""
    return any(path.name not in (_STAGE, LOCK, TOKEN) for path in out.iterdir())


def _require_idle(out: Path) -> None:
    """Refuse to replace a comparison while another process trains a run of it.

    Such a process (`compare --element`) locks only the folder of its run.
    """
    for lock in sorted(out.glob(f"*/seed-*/{LOCK}")):
        with locked(lock.parent):
            pass


def saved_run(out: Path) -> Settings:
    """Return the settings of the run in `out`; RunError if there is none."""
    if (out / _STAGE / FILE).is_file():  # killed while the run was moved into `out`
        _install_stage(out)
    if not (out / FILE).is_file():
        raise RunError(f"{out} holds no run to resume", "leave --resume out to start one")
    return Settings.load(out / FILE).checked()


def _install_stage(out: Path) -> None:
    """Replace the run in `out` by the prepared one.

    A repetition after a kill ends in the same state.
    """
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
    """Move a finished file or folder to its final path."""
    if final.is_dir():
        shutil.rmtree(final)
    os.replace(source, final)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_name(arm: str) -> str:
    """Return the name of an arm's folder: its canonical spec, with `:` and `,` as `-`.

    For other characters, or a long name, a hash is appended.
    """
    name = re.sub(r"[:,]", "-", arm)
    safe = re.sub(r"[^\w.=+-]", "-", name)
    if safe == name and len(name) <= 80:
        return name
    return f"{safe[:70]}-{sha256(arm.encode()).hexdigest()[:8]}"


def seed_folder(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of the run of an arm with a seed, in a comparison's `out`."""
    return out / folder_name(arm) / f"seed-{seed}"


def write_json(path: Path, record: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; return None if the file is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a `metrics.jsonl`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_lines(path: Path, step: int) -> None:
    """Drop the lines of a `metrics.jsonl` after `step`, and an incomplete last one."""
    lines = [line for line in read_lines(path) if line["step"] <= step]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a `metrics.jsonl`.

    A kill may have left an incomplete last line, which is dropped.
    """
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))
    return lines


def how_it_loads(run: Path) -> str:
    """Return what is needed to load a finished run's model, as text.

    Empty if a plain `from_pretrained` loads it.
    """
    config = read_json(run / FINAL / "config.json") or {}
    if config.get("model_type") != MODEL_TYPE:
        return ""
    dense = sum(path.stat().st_size for path in (run / DENSE).glob("*"))
    if dense == 0:
        return "loads with tiewise.load"
    copy = f"its copy with plain tables in {DENSE}/ ({format_bytes(dense)})"
    return f"loads with tiewise.load; {copy} loads with any transformers"


def newest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """Return (newest complete checkpoint, its step) of a run; incomplete ones are removed."""
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
    """Lock the folder `out` within this context.

    A folder created only for the lock is removed at the end, like the lock's file.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file", "choose another --out")
    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    lock = FileLock(out / LOCK, timeout=0.2, mode=0o644)  # waits while another process removes the file
    _acquire(lock, out)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock.lock_file)  # before the release, so another process that opened it sees that it is gone
        lock.release()
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()


def _acquire(lock: FileLock, out: Path) -> None:
    """Lock a folder, and create it if needed. Raises RunError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(f"another run is at work in {out}", "wait for it, or choose another --out") from None
    except NotImplementedError:
        pass  # a file system without locks
    except OSError as error:
        remedy = writing_fault(error).remedy("choose another --out")
        raise RunError(f"cannot write to {out}: {error.strerror}", remedy) from None
