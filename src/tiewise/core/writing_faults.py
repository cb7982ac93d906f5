"""Meaning and remedies of the writing errors of the system."""

from __future__ import annotations

import errno
from dataclasses import dataclass

_ANOTHER_DISK = "choose another disk"
_ANOTHER_PATH = "choose another path"
_CANNOT = "cannot be written"


@dataclass(frozen=True)
class WritingFault:
    """Meaning and remedies of a writing error.

    Attributes:
        meaning: what happened, such as "no space left while writing".
        cure: what makes the same place writable; "" if nothing simple does.
        elsewhere: advice to write to another place; "" if that does not help.
    """

    meaning: str
    cure: str
    elsewhere: str

    def remedy(self, elsewhere: str | None = None) -> str:
        """Return all that helps, as one clause.

        Args:
            elsewhere: how this caller names another place, such as "choose another --out"; None: the usual words.

        >>> writing_fault(OSError(errno.ENOSPC, "No space left on device")).remedy("choose another --out")
        'make room there, or choose another --out'
        """
        if not self.elsewhere:
            return self.cure
        elsewhere = elsewhere or self.elsewhere
        if not self.cure:
            return elsewhere
        return f"{self.cure}, or {elsewhere}"


NO_SPACE = WritingFault("no space left while writing", "make room there", _ANOTHER_DISK)
_TOO_LARGE = WritingFault("a file became too large", "raise the limit on the size of a file (ulimit -f)", _ANOTHER_DISK)
_BROKEN = WritingFault("the disk or its file system failed", "check the disk", _ANOTHER_DISK)
_READ_ONLY = WritingFault("the file system is read-only", "mount it for writing", _ANOTHER_DISK)
_NOT_ALLOWED = WritingFault(_CANNOT, "", "give a folder that you may write")
_LONG_NAME = WritingFault(_CANNOT, "choose a shorter name", "")
_BAD_NAME = WritingFault(_CANNOT, "choose a name that the file system allows", "")
_OPEN_FILES = WritingFault(_CANNOT, "close other programs, or raise the limit on open files (ulimit -n)", "")
_NO_MEMORY = WritingFault(_CANNOT, "close other programs", "")
_IN_USE = WritingFault(_CANNOT, "close the program that uses it", _ANOTHER_PATH)
_OTHER = WritingFault(_CANNOT, "", _ANOTHER_PATH)

# names of errors, because some systems lack some of them
_FAULTS_BY_NAME = {
    "ENOSPC": NO_SPACE,
    "EDQUOT": NO_SPACE,
    "EFBIG": _TOO_LARGE,
    "EIO": _BROKEN,
    "ENXIO": _BROKEN,
    "ENODEV": _BROKEN,
    "EREMOTEIO": _BROKEN,
    "ESTALE": _BROKEN,
    "ENOTCONN": _BROKEN,
    "ETIMEDOUT": _BROKEN,
    "EROFS": _READ_ONLY,
    "EACCES": _NOT_ALLOWED,
    "EPERM": _NOT_ALLOWED,
    "ENAMETOOLONG": _LONG_NAME,
    "EILSEQ": _BAD_NAME,
    "EMFILE": _OPEN_FILES,
    "ENFILE": _OPEN_FILES,
    "ENOMEM": _NO_MEMORY,
    "EBUSY": _IN_USE,
    "ETXTBSY": _IN_USE,
}


def writing_fault(error: OSError) -> WritingFault:
    """Return the fault that a writing error means."""
    name = errno.errorcode.get(error.errno or 0, "")
    return _FAULTS_BY_NAME.get(name, _OTHER)
