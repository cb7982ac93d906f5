"""Whole files: the old one or the new one, and nothing beside it."""

import errno
import os

import pytest

from tiewise.core.files import atomic_replacement, cache_folder, format_bytes, sync_to_disk, write_atomically


def interrupted(path):
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, "é")
    with pytest.raises(KeyboardInterrupt), atomic_replacement(path) as made:
        interrupted(made)
    assert path.read_bytes() == "é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    seen = []

    def fsync(descriptor):
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), sorted(os.listdir(tmp_path))))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "a", b"1")
    (neighbour, before), (folder, after) = seen
    assert before == [neighbour]
    assert neighbour != "a"
    assert (folder, after) == (tmp_path.name, ["a"])


def test_a_folder_that_no_system_syncs_passes_and_a_file_does_not(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    sync_to_disk(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        write_atomically(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12, "12 bytes"),
        (999, "999 bytes"),
        (999.4, "999 bytes"),
        (999.5, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (8.03e9, "8.03 GB"),
        (2e12, "2 TB"),
        (2.62144e17, "262,144 TB"),
    ],
)
def test_size(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(("variable", "folder"), [(None, "home/.cache"), ("", "home/.cache"), ("other", "other")])
def test_an_empty_variable_of_the_cache_is_as_none(tmp_path, monkeypatch, variable, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_folder() == tmp_path / folder / "tiewise"
