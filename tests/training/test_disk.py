"""Writing errors of every library that writes are known as such, and nothing else is."""

import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiewise.training.folder import disk_error, quiet_threads

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
