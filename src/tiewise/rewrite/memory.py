"""Memory: what there is, for the few operations that cannot do with a few buffers."""

from __future__ import annotations

from tiewise.core.errors import CheckpointError

MEMINFO = "/proc/meminfo"


def available() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        with open(MEMINFO, encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def require(needed: int, purpose: str) -> None:
    """Refuse what would not fit.

    Raises:
        CheckpointError: the system has less than `needed` bytes available.
    """
    there = available()
    if there is not None and needed > there:
        fix = "close other programs, or run it on a larger machine"
        raise CheckpointError(f"{purpose} needs {gigabytes(needed)} of memory, and {gigabytes(there)} are free", fix)


def gigabytes(count: int) -> str:
    """Bytes in GB, for a person.

    >>> gigabytes(2_684_354_560)
    '2.7 GB'
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e9:.2g} GB"
