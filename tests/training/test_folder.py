"""The run's folder: whole or as it was, one run at a time, only whole checkpoints, and a full disk called one."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.tiny_checkpoints import llama

import tiewise
from tiewise.core.errors import RunError
from tiewise.training import folder
from tiewise.training.folder import (
    disk_error,
    folder_name,
    locked,
    newest_checkpoint,
    quiet_threads,
    read_json,
    saved_run,
    starting,
    write_json,
)
from tiewise.training.settings import FILE, Settings

WHOLE = {"data", "data/train.bin", "env.json", "run.yaml"}


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def begin(out, settings, data="tokens", overwrite=False, stop=None):
    with locked(out), starting(out, overwrite=overwrite) as stage:
        (stage / "data").mkdir()
        (stage / "data" / "train.bin").write_text(data)
        if stop is not None:
            raise stop
        write_json(stage / "env.json", {"command": data})
        settings.save(stage)


@pytest.fixture
def old(tmp_path):
    """A finished run, with a note beside it."""
    out = tmp_path / "runs" / "old"
    begin(out, Settings(arms=("tied", "factored:64")), "old")
    made = ("tied/seed-1/result.json", "factored-64/seed-1/result.json", "tuning/x/y", "mine/notes.txt")
    for name in (*made, "results.json", "report.html", "tuning.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    return out


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_is_there_whole(tmp_path, killed):
    """Where a start was killed before, too."""
    out = tmp_path / "a" / "b"
    if killed:
        (out / ".starting" / "data").mkdir(parents=True)
    begin(out, Settings(steps=5))
    assert saved_run(out) == Settings(steps=5)
    assert set(tree(out)) == WHOLE


@pytest.mark.parametrize("stop", [RunError("no good"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_the_old_run_or_nothing_not_even_parents(old, tmp_path, stop):
    before = tree(tmp_path)
    for out in (tmp_path / "a" / "b", old):
        with pytest.raises(type(stop)):
            begin(out, Settings(), overwrite=True, stop=stop)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moves", range(4))
def test_killed_while_the_new_run_is_put_in_place(old, monkeypatch, moves):
    """Whichever move was the last one, a resume finds the new run whole, and what is not ours beside it."""
    real, left = folder.replace_path, [moves]

    def limited(made, final):
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        real(made, final)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "replace_path", limited)
        try:
            begin(old, Settings(arms=("untied",)), "new", overwrite=True)
        except SystemExit:
            assert moves < 3
    assert saved_run(old) == Settings(arms=("untied",))
    assert set(tree(old)) == WHOLE | {"mine", "mine/notes.txt"}
    assert (old / "data" / "train.bin").read_text() == "new"


def test_a_damaged_run_is_not_replaced(old):
    (old / FILE).write_text("arms: [..]")
    before = tree(old)
    with pytest.raises(ValueError, match="unknown boundary"):
        begin(old, Settings(), overwrite=True)
    assert tree(old) == before


def test_names_of_folders_are_readable_and_never_two_alike():
    assert folder_name("factored-untied:in=64,out=128+bias") == "factored-untied-in=64-out=128+bias"
    arms = ["tied+vectors=a/b", "tied+vectors=a-b", "tied+vectors=" + "x" * 200, "tied+vectors=" + "x" * 201]
    names = [folder_name(arm) for arm in arms]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name) < 100 for name in names)


def test_the_newest_whole_checkpoint_is_taken_and_torn_ones_go(tmp_path):
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


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    path.write_text('{"a"')
    assert read_json(path) is None


def refused(out):
    with pytest.raises(RunError, match=r"another run is at work in .*; wait for it, or choose another"):
        locked(out).__enter__()


def test_a_second_one_is_refused_and_the_first_undisturbed(tmp_path):
    out = tmp_path / "a" / "run"
    with locked(out):
        (out / "file").write_text("x")
        for _ in range(2):
            refused(out)
        assert (out / "file").exists()
    with locked(out):
        pass
    assert [path.name for path in out.iterdir()] == ["file"]


HOLD = """
import sys, time
from pathlib import Path
from tiewise.training.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_holder_blocks_nobody(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        refused(tmp_path)
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_for_the_lock_alone_is_gone_afterwards(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_while_it_was_opened_is_taken_anew(tmp_path, monkeypatch):
    """Two come at once: the second opens the first's file, which is gone when it gets the lock."""
    real, opened = os.open, []

    def raced(path, *arguments):
        handle = real(path, *arguments)
        if str(path).endswith(".lock") and not opened:
            opened.append(path)
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", raced)
    with locked(tmp_path):
        refused(tmp_path)


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
import filelock
from tiewise.rewrite import untie
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


def test_where_the_system_has_no_fcntl_locks_are_files(tmp_path):
    """As on Windows, whose own locks filelock takes there."""
    llama(tmp_path / "a")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_FCNTL]  # filelock says so, too
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("another run is at work in run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_fcntl_is_never_taken_for_granted():
    source = Path(tiewise.__file__).parent
    importing = {path.name: path.read_text() for path in source.rglob("*.py") if "import fcntl" in path.read_text()}
    assert all("try:\n    import fcntl\nexcept ImportError" in text for text in importing.values()), list(importing)
    assert list(importing) == ["new_folder.py"]


@pytest.mark.parametrize(("name", "says"), [("file", "is a file"), ("file/run", "cannot write to"), ("/proc/run", "")])
def test_where_no_lock_can_be(tmp_path, name, says):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=f"{says}.*choose another --out"):
        locked(tmp_path / name).__enter__()


FULL = Path("/dev/full")


def said(error, out):
    return str(disk_error(error, out, "make room"))


@pytest.fixture
def small(tmp_path):
    """A file system of 64 kB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)  # lazily: an error holds its file open


WRITERS = {
    "python": lambda path: path.write_bytes(bytes(10**6)),
    "torch": lambda path: torch.save(torch.zeros(10**6), path),
    "safetensors": lambda path: save_file({"x": torch.zeros(10**6)}, path),
}


@pytest.mark.parametrize("by", WRITERS)
def test_a_full_disk_by_any_library(small, by):
    with pytest.raises(Exception) as raised:
        WRITERS[by](small / "file")
    expected = f"cannot write to {small / 'run'}: No space left on device (file system {small}); make room"
    assert said(raised.value, small / "run") == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_the_reason_is_the_systems(tmp_path, code):
    assert os.strerror(code) in said(OSError(code, "x"), tmp_path)
    assert os.strerror(code) in said(Exception(f"I/O error: something (os error {code})"), tmp_path)


def test_a_torch_error_on_a_disk_with_room_is_not_called_full(tmp_path):
    line = said(RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), tmp_path)
    assert os.strerror(errno.EIO) in line


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "x"), RuntimeError("mat1 and mat2"), KeyError("x"), BrokenPipeError(), OSError()],
)
def test_other_errors_are_not_of_the_disk(tmp_path, error):
    assert disk_error(error, tmp_path, "") is None


@pytest.mark.skipif(not FULL.exists(), reason="a system without /dev/full")
def test_a_threads_writing_error_prints_nothing_and_another_error_does(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: seen.append(arguments.exc_type))
    with quiet_threads():
        for work in (lambda: FULL.write_text("x"), lambda: {}["x"]):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert seen == [KeyError]
