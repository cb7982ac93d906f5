"""Tests of run folders: atomic replacement, locks, complete checkpoints and errors of a full disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.tiny_checkpoints import llama

import tiewise
from tiewise.core.disk_errors import disk_error, quiet_threads
from tiewise.core.errors import RunError
from tiewise.core.step_names import BEST
from tiewise.training import folder
from tiewise.training.folder import folder_name, locked, newest_checkpoint, read_json, saved_run, stage_run, write_json
from tiewise.training.settings import FILE, Settings

WHOLE = {"data", "data/train.bin", "env.json", "run.yaml"}


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def start_run(out, settings, data="tokens", overwrite=False, stop=None):
    with locked(out), stage_run(out, overwrite=overwrite) as stage:
        (stage / "data").mkdir()
        (stage / "data" / "train.bin").write_text(data)
        if stop is not None:
            raise stop
        write_json(stage / "env.json", {"command": data})
        settings.save(stage)


@pytest.fixture
def finished_run(tmp_path):
    """Write a finished run and a note in its folder."""
    out = tmp_path / "runs" / "old"
    start_run(out, Settings(arms=("tied", "factored:64")), "old")
    made = ("tied/seed-1/result.json", "factored-64/seed-1/result.json", "tuning/x/y", "mine/notes.txt")
    for name in (*made, "results.json", "report.html", "tuning.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    return out


def test_stage_run_completes_in_folder_of_killed_start(tmp_path):
    (tmp_path / "a" / ".starting" / "data").mkdir(parents=True)
    start_run(tmp_path / "a", Settings(steps=5))
    assert saved_run(tmp_path / "a") == Settings(steps=5, learning_rate=0.004, select=BEST)
    assert set(tree(tmp_path / "a")) == WHOLE


@pytest.mark.parametrize("stop", [RunError("no good"), KeyboardInterrupt()])
def test_failed_start_leaves_old_run_and_creates_no_folders(finished_run, tmp_path, stop):
    before = tree(tmp_path)
    for out in (tmp_path / "a" / "b", finished_run):
        with pytest.raises(type(stop)):
            start_run(out, Settings(), overwrite=True, stop=stop)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moves", range(4))
def test_saved_run_returns_new_run_after_kill_during_replacement(finished_run, monkeypatch, moves):
    """After a kill at any move, the folder holds the new run and the user's files."""
    real, done = folder.replace_path, []

    def limited(made, final):
        if len(done) == moves:
            raise SystemExit
        done.append(real(made, final))

    killed = pytest.raises(SystemExit) if moves < 3 else nullcontext()
    with monkeypatch.context() as patch, killed:
        patch.setattr(folder, "replace_path", limited)
        start_run(finished_run, Settings(arms=("untied",)), "new", overwrite=True)
    assert saved_run(finished_run) == Settings(arms=("untied",), learning_rate=0.004, select=BEST)
    assert set(tree(finished_run)) == WHOLE | {"mine", "mine/notes.txt"}
    assert (finished_run / "data" / "train.bin").read_text() == "new"


def test_stage_run_refuses_to_replace_damaged_run(finished_run):
    (finished_run / FILE).write_text("arms: [..]")
    before = tree(finished_run)
    with pytest.raises(ValueError, match="unknown boundary"):
        start_run(finished_run, Settings(), overwrite=True)
    assert tree(finished_run) == before


def test_folder_names_are_readable_and_unique():
    assert folder_name("factored-untied:in=64,out=128+bias") == "factored-untied-in=64-out=128+bias"
    arms = ["tied+vectors=a/b", "tied+vectors=a-b", "tied+vectors=" + "x" * 200, "tied+vectors=" + "x" * 201]
    names = [folder_name(arm) for arm in arms]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name) < 100 for name in names)


def test_newest_checkpoint_returns_last_complete_one_and_removes_incomplete_ones(tmp_path):
    states = {step: json.dumps({"global_step": step}) for step in (4, 8, 12)}
    torn = {100: None, 16: '{"global_step": 1', 20: json.dumps({"global_step": 16}), "last": '{"global_step": 1}'}
    for step, state in {**states, **torn}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_text("weights")
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-12", 12)
    assert newest_checkpoint(tmp_path / "checkpoint-12") == (None, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_write_json_keeps_old_file_when_new_value_is_invalid(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    path.write_text('{"a"')
    assert read_json(path) is None


def assert_locked(out):
    with pytest.raises(RunError, match=r"another run is at work in .*; wait for it, or choose another"):
        locked(out).__enter__()


def test_stage_run_refuses_to_replace_run_that_another_process_trains(tmp_path):
    out = tmp_path / "run"
    start_run(out, Settings())
    part = out / "tied" / "seed-2"
    part.mkdir(parents=True)
    before = tree(out)
    says = "another run is at work in .*run/tied/seed-2; wait for it, or choose another"
    with locked(part), pytest.raises(RunError, match=says):
        start_run(out, Settings(seeds=5), "others", overwrite=True)
    assert tree(out) == before
    with ExitStack() as later, pytest.raises(RunError, match=says), locked(out), stage_run(out, overwrite=True):
        later.enter_context(locked(part))  # the other process starts while the new run is prepared
    assert tree(out) == before
    (part / ".lock").touch()  # a crash leaves this file
    start_run(out, Settings(seeds=5), "others", overwrite=True)
    assert not part.exists()


def test_locked_refuses_second_holder_and_removes_empty_folder(tmp_path):
    out = tmp_path / "a" / "run"
    with locked(out):
        assert_locked(out)
        assert_locked(out)
    assert list(tmp_path.iterdir()) == []
    with locked(out):
        (out / "file").write_text("x")
    assert [path.name for path in out.iterdir()] == ["file"]


HOLD = """
import sys, time
from pathlib import Path
from tiewise.training.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_locked_succeeds_after_holder_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert_locked(tmp_path)
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_locked_retries_when_lock_file_is_removed_while_opening(tmp_path, monkeypatch):
    """Another process removes the lock file after it is opened and before it is locked."""
    real, opened = os.open, []

    def raced(path, *arguments):
        handle = real(path, *arguments)
        if str(path).endswith(".lock") and not opened:
            opened.append(path)
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", raced)
    with locked(tmp_path):
        assert_locked(tmp_path)


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
import filelock
from tiewise.checkpoint.rewrite import untie
from tiewise.core.errors import RunError
from tiewise.training.folder import locked
assert filelock.FileLock is filelock.SoftFileLock
untie("a", "b")
with locked(Path("run")):
    try:
        locked(Path("run")).__enter__()
    except RunError as error:
        print(error)
"""


def test_locks_use_files_when_fcntl_is_missing(tmp_path):
    """Windows lacks fcntl, too; filelock uses its locks there. Only one module imports fcntl."""
    importing = [
        path.name for path in Path(tiewise.__file__).parent.rglob("*.py") if "import fcntl" in path.read_text()
    ]
    assert importing == ["new_folder.py"]
    llama(tmp_path / "a")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_FCNTL]  # filelock warns about soft locks
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("another run is at work in run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


FULL = Path("/dev/full")


def test_disk_error_reports_full_disk_from_any_library(tmp_path):
    """Write to a file system of 64 kB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("only root can mount")
    writers = (
        lambda path: path.write_bytes(bytes(10**6)),
        lambda path: torch.save(torch.zeros(10**6), path),
        lambda path: save_file({"x": torch.zeros(10**6)}, path),
    )
    out = tmp_path / "run"
    try:
        for write in writers:
            with pytest.raises(Exception) as raised:
                write(tmp_path / "file")
            said = f"cannot write to {out}: No space left on device (file system {tmp_path}); make room there, then try"
            assert str(disk_error(raised.value, out, "then try")) == said
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)  # lazily, because an error keeps its file open


TORCH = "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"  # on a disk with free space
OF_THE_DISK = [(RuntimeError(TORCH), errno.EIO)]
for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
    OF_THE_DISK += [(OSError(code, "x"), code), (Exception(f"I/O error: something (os error {code})"), code)]
OTHERS = [FileNotFoundError(errno.ENOENT, "x"), RuntimeError("mat1 and mat2"), KeyError("x"), BrokenPipeError()]


@pytest.mark.parametrize(("error", "code"), [*OF_THE_DISK, *((error, None) for error in (*OTHERS, OSError()))])
def test_disk_error_returns_system_reason_only_for_disk_errors(tmp_path, error, code):
    found = disk_error(error, tmp_path, "then try again")
    assert found is None if code is None else os.strerror(code) in str(found)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "make room there, then try again"),
        (errno.EDQUOT, "make room there, then try again"),
        (errno.EFBIG, "raise the limit on the size of a file (ulimit -f), then try again"),
        (errno.EIO, "check the disk, then try again"),
        (errno.EROFS, "mount it for writing, then try again"),
    ],
)
def test_disk_error_names_the_remedy_of_its_reason(tmp_path, code, remedy):
    assert str(disk_error(OSError(code, "x"), tmp_path, "then try again")).endswith(f"; {remedy}")


@pytest.mark.skipif(not FULL.exists(), reason="a system without /dev/full")
def test_quiet_threads_silences_only_disk_errors(monkeypatch):
    seen = []

    def hook(arguments):
        seen.append(arguments.exc_type)

    monkeypatch.setattr(threading, "excepthook", hook)
    with quiet_threads():
        for work in (lambda: FULL.write_text("x"), lambda: {}["x"]):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert seen == [KeyError]
    assert threading.excepthook is hook
