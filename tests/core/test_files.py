"""Test atomic writes: a folder has the old or the new file, and no temporary one."""

import errno
import os

import pytest

from tiewise.core.files import atomic_replacement, cache_folder, format_bytes, sync_to_disk, write_atomically


def write_half_and_interrupt(path):
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def test_atomic_replacement_keeps_old_file_if_block_raises(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, "é")
    with pytest.raises(KeyboardInterrupt), atomic_replacement(path) as made:
        write_half_and_interrupt(made)
    assert path.read_bytes() == "é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_syncs_bytes_before_rename_and_folder_after(tmp_path, monkeypatch):
    seen = []

    def fsync(descriptor):
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), sorted(os.listdir(tmp_path))))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "a", b"1")
    (neighbour, before), (folder, after) = seen
    assert before == [neighbour]
    assert neighbour != "a"
    assert (folder, after) == (tmp_path.name, ["a"])


def test_sync_error_is_ignored_for_folder_and_raised_for_file(tmp_path, monkeypatch):
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
def test_format_bytes_rounds_to_three_digits_with_unit(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(("variable", "folder"), [(None, "home/.cache"), ("", "home/.cache"), ("other", "other")])
def test_cache_folder_treats_empty_xdg_variable_as_unset(tmp_path, monkeypatch, variable, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_folder() == tmp_path / folder / "tiewise"
