"""How byte-level vocabularies write bytes as text."""

from __future__ import annotations


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else the next from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]
