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


def tree(root):
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def begin(out, settings, data="tokens", **options):
    with locked(out), starting(out, **{"overwrite": False, **options}) as stage:
        (stage / "data").mkdir()
        (stage / "data" / "train.bin").write_text(data)
        write_json(stage / "env.json", {"command": data})
        settings.save(stage)


@pytest.fixture
def old(tmp_path):
    """A finished run, with a note beside it."""
    out = tmp_path / "runs" / "old"
    begin(out, Settings(arms=("tied", "factored:64")), "old")
    for name in ("tied/seed-1/result.json", "factored-64/seed-1/result.json", "tuning/x/y", "mine/notes.txt"):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("{}")
    for name in ("results.json", "report.html", "tuning.json"):
        (out / name).write_text("{}")
    return out


def test_a_run_is_there_whole(tmp_path):
    out = tmp_path / "a" / "b"
    begin(out, Settings(steps=5))
    assert saved_run(out) == Settings(steps=5)
    assert set(tree(out)) == {"data", "data/train.bin", "env.json", "run.yaml"}


def fail(out, stop, **options):
    with locked(out), starting(out, **options) as stage:
        (stage / "data").mkdir()
        raise stop


def test_a_start_that_fails_leaves_nothing_not_even_parents(tmp_path):
    with pytest.raises(RunError, match="no good"):
        fail(tmp_path / "a" / "b", RunError("no good"), overwrite=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [RunError("no good"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_the_old_run(old, stop):
    before = tree(old)
    with pytest.raises(type(stop)):
        fail(old, stop, overwrite=True)
    assert tree(old) == before


def test_overwriting_replaces_the_run_and_keeps_what_is_not_ours(old):
    begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    assert set(tree(old)) == {"data", "data/train.bin", "env.json", "run.yaml", "mine", "mine/notes.txt"}
    assert (old / "data" / "train.bin").read_text() == "new"


def test_what_a_killed_start_left_is_no_obstacle(tmp_path):
    (tmp_path / "out" / ".starting" / "data").mkdir(parents=True)
    begin(tmp_path / "out", Settings())
    assert set(tree(tmp_path / "out")) == {"data", "data/train.bin", "env.json", "run.yaml"}


@pytest.mark.parametrize("moves", range(4))
def test_killed_while_the_new_run_is_put_in_place(old, monkeypatch, moves):
    """Whichever move was the last one, a resume finds the new run whole."""
    real, left = folder.replace_path, [moves]

    def limited(made, final):
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        real(made, final)

    monkeypatch.setattr(folder, "replace_path", limited)
    if moves < 3:
        with pytest.raises(SystemExit):
            begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    else:
        begin(old, Settings(arms=("untied",)), "new", overwrite=True)
    monkeypatch.setattr(folder, "replace_path", real)
    assert saved_run(old) == Settings(arms=("untied",))
    assert set(tree(old)) == {"data", "data/train.bin", "env.json", "run.yaml", "mine", "mine/notes.txt"}
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


def checkpoint(root, step, state):
    path = root / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_text("weights")
    if state is not None:
        (path / "trainer_state.json").write_text(state)


def test_the_newest_whole_checkpoint_is_taken_and_torn_ones_go(tmp_path):
    for step in (4, 8, 12):
        checkpoint(tmp_path, step, json.dumps({"global_step": step}))
    checkpoint(tmp_path, 100, None)
    checkpoint(tmp_path, 16, '{"global_step": 1')
    checkpoint(tmp_path, 20, json.dumps({"global_step": 16}))
    checkpoint(tmp_path, "last", json.dumps({"global_step": 1}))
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


HOLD = """
import sys, time
from pathlib import Path
from tiewise.training.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_one_is_refused_and_the_first_undisturbed(tmp_path):
    out = tmp_path / "a" / "run"
    with locked(out):
        (out / "file").write_text("x")
        for _ in range(2):
            with pytest.raises(RunError, match=r"another run is at work in .*run; wait for it, or choose another"):
                locked(out).__enter__()
        assert (out / "file").exists()
    with locked(out):
        pass
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_killed_holder_blocks_nobody(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="another run"):
            locked(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_for_the_lock_alone_is_gone_afterwards(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a" / "b"):
        1 / 0  # noqa: B018
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
    with locked(tmp_path), pytest.raises(RunError, match="another run"):
        locked(tmp_path).__enter__()


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


def through_python(path):
    path.write_bytes(bytes(10**6))


def through_torch(path):
    torch.save(torch.zeros(10**6), path)


def through_safetensors(path):
    save_file({"x": torch.zeros(10**6)}, path)


@pytest.mark.parametrize("write", [through_python, through_torch, through_safetensors])
def test_a_full_disk_by_any_library(small, write):
    with pytest.raises(Exception) as raised:
        write(small / "file")
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

    def full():
        with FULL.open("w") as file:
            file.write("x")

    with quiet_threads():
        for work in (full, lambda: {}["x"]):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert seen == [KeyError]


@pytest.mark.parametrize(("name", "says"), [("file", "is a file"), ("file/run", "cannot write to"), ("/proc/run", "")])
def test_where_no_lock_can_be(tmp_path, name, says):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=f"{says}.*choose another --out"):
        locked(tmp_path / name).__enter__()
