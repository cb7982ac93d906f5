"""One run at a time in a folder; a lock that nobody holds any more stands in nobody's way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.tiny_checkpoints import llama

import tiewise
from tiewise.core.errors import RunError
from tiewise.training.folder import locked

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


@pytest.mark.parametrize(("name", "says"), [("file", "is a file"), ("file/run", "cannot write to"), ("/proc/run", "")])
def test_where_no_lock_can_be(tmp_path, name, says):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=f"{says}.*choose another --out"):
        locked(tmp_path / name).__enter__()


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
