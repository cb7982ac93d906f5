"""How much memory there is, for the few operations that cannot do with a few buffers."""

from __future__ import annotations

from tiewise.core.errors import CheckpointError

MEMINFO = "/proc/meminfo"


def require(needed: int, purpose: str) -> None:
    """Refuse what would not fit; nothing happens where the system does not say what is free.

    Raises:
        CheckpointError: the system has fewer than `needed` bytes available without swapping.
    """
    try:
        with open(MEMINFO, encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return
    if needed > free:
        fix = "close other programs, or run it on a larger machine"
        raise CheckpointError(f"{purpose} needs {gigabytes(needed)} of memory, and {gigabytes(free)} are free", fix)


def gigabytes(count: int) -> str:
    """Bytes in GB, for a person.

    >>> gigabytes(2_684_354_560)
    '2.7 GB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e9:.2g} GB"
