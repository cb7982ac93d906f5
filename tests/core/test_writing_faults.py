"""Test that every writing error has a meaning and a remedy that fit it. A person wrote the remedies down."""

import errno
import os
import resource
from pathlib import Path

import pytest

from tiewise.checkpoint.rewrite.new_folder import cannot_write
from tiewise.core.errors import RunError
from tiewise.core.files import write_result
from tiewise.core.writing_faults import writing_fault

DISK = "choose another disk"
REMEDIES = {
    errno.ENOSPC: f"make room there, or {DISK}",
    errno.EDQUOT: f"make room there, or {DISK}",
    errno.EFBIG: f"raise the limit on the size of a file (ulimit -f), or {DISK}",
    errno.EIO: f"check the disk, or {DISK}",
    errno.ESTALE: f"check the disk, or {DISK}",
    errno.EROFS: f"mount it for writing, or {DISK}",
    errno.EACCES: "give a folder that you may write",
    errno.EPERM: "give a folder that you may write",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "close other programs, or raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs, or raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "close other programs",
    errno.EBUSY: "close the program that uses it, or choose another path",
    errno.ENOENT: "choose another path",
}
NO_OTHER_PLACE = (errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # another place does not help


@pytest.mark.parametrize("code", REMEDIES)
def test_error_of_a_rewrite_has_the_remedy_of_its_reason(code):
    line = str(cannot_write(Path("new"), OSError(code, os.strerror(code))))
    assert f"({os.strerror(code)}); " in line
    assert line.endswith(f"; {REMEDIES[code]}")


@pytest.mark.parametrize("code", REMEDIES)
def test_another_place_is_advised_only_where_it_helps(code):
    remedy = writing_fault(OSError(code, "x")).remedy("choose another --out")
    assert remedy.endswith("choose another --out") == (code not in NO_OTHER_PLACE)


def test_error_without_a_number_has_a_remedy():
    assert writing_fault(OSError("broken")).remedy() == "choose another path"


def test_too_long_name_of_a_result_is_refused_with_its_remedy(tmp_path):
    with pytest.raises(RunError, match=r"File name too long; choose a shorter name$"):
        write_result("x", tmp_path / ("x" * 300), "out")


def test_too_many_open_files_are_reported_with_their_remedy(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(RunError) as raised:
            write_result("x", tmp_path / "x", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files; close other programs, or raise the limit on open files" in str(raised.value)
