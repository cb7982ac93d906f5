"""Mutations of GGUF files that leave counts, lengths and the order of the parts right."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by number of the type
TEXT, ARRAY = 8, 9
NUMBERS = (0, 1, 2, 3, 4, 8, 9, 13, 31, 32, 33, 63, 64, 255, 256, 4096, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
ALIGNMENT = 32


@dataclass(frozen=True)
class Key:
    """Name, number of the type and bytes of the value of one key."""

    name: bytes
    value_type: int
    value: bytes


@dataclass(frozen=True)
class Info:
    """Entry of one tensor."""

    name: bytes
    axes: tuple[int, ...]
    type_number: int
    offset: int


@dataclass
class GgufParts:
    """Parts of a file."""

    version: int
    keys: list[Key]
    infos: list[Info]
    data: bytes

    def encode(self, rng: Random) -> bytes:
        """Return the file; one in ten claims other counts."""
        counts = [len(self.infos), len(self.keys)]
        if rng.random() < 0.1:
            counts[rng.randrange(2)] = rng.choice(NUMBERS)
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        for key in self.keys:
            head += _text(key.name) + struct.pack("<I", key.value_type) + key.value
        for info in self.infos:
            axes = info.axes
            head += _text(info.name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
            head += struct.pack("<IQ", info.type_number, info.offset)
        return head + bytes(-len(head) % ALIGNMENT) + self.data


class _Parser:
    """Parser of a file that was written right; struct.error or ValueError for any other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        """Read one number."""
        value: int = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def take(self, count: int) -> bytes:
        """Read some bytes."""
        part = self.data[self.at : self.at + count]
        if len(part) < count:
            raise ValueError("the file ends")
        self.at += count
        return part

    def text(self) -> bytes:
        """Read a length and that many bytes."""
        return self.take(self.number("<Q"))

    def parts(self) -> GgufParts:
        """Read the whole file."""
        if self.take(4) != b"GGUF":
            raise ValueError("no GGUF file")
        version, tensors, keys = self.number("<I"), self.number("<Q"), self.number("<Q")
        if max(tensors, keys) > 1000:
            raise ValueError("too many parts")
        parts = GgufParts(version, [self.key() for _ in range(keys)], [self.info() for _ in range(tensors)], b"")
        self.at += -self.at % ALIGNMENT
        parts.data = self.data[self.at :]
        return parts

    def key(self) -> Key:
        """Read one key."""
        name, value_type, start = self.text(), self.number("<I"), self.at
        self.pass_value(value_type)
        return Key(name, value_type, self.data[start : self.at])

    def pass_value(self, value_type: int) -> None:
        """Read past a value."""
        if value_type == TEXT:
            self.text()
        elif value_type == ARRAY:
            element_type, count = self.number("<I"), self.number("<Q")
            if element_type == TEXT:
                for _ in range(min(count, 10_000)):
                    self.text()
            else:
                self.take(count * SCALARS.get(element_type, len(self.data)))
        else:
            self.take(SCALARS.get(value_type, len(self.data)))

    def info(self) -> Info:
        """Read the entry of one tensor."""
        name, count = self.text(), self.number("<I")
        if count > 100:
            raise ValueError("too many axes")
        axes = tuple(self.number("<Q") for _ in range(count))
        return Info(name, axes, self.number("<I"), self.number("<Q"))


def mutate_gguf(data: bytes, rng: Random, words: Sequence[str]) -> bytes | None:
    """Return a GGUF file in which a few parts changed; None if `data` cannot be parsed."""
    try:
        parts = _Parser(data).parts()
        for _ in range(rng.choice((1, 1, 2, 3))):
            _change(parts, rng, words)
        return parts.encode(rng)
    except (struct.error, ValueError):  # not such a file, or a number that is too large
        return None


def _change(parts: GgufParts, rng: Random, words: Sequence[str]) -> None:
    """Change one part."""
    how = rng.random()
    if how < 0.1:
        parts.version = rng.choice((2, 3, 3, 1, 4, 0x03000000))
    elif how < 0.2:
        _reorder(rng.choice((parts.keys, parts.infos)), rng)
    elif how < 0.3:
        parts.data = parts.data[: rng.randrange(len(parts.data) + 1)] + bytes(rng.choice((0, 1, 32, 64)))
    elif how < 0.65 and parts.keys:
        at = rng.randrange(len(parts.keys))
        parts.keys[at] = _changed_key(parts.keys[at], rng, words)
    elif parts.infos:
        at = rng.randrange(len(parts.infos))
        parts.infos[at] = _changed_info(parts.infos[at], rng, words)


def _reorder(entries: list[Key] | list[Info], rng: Random) -> None:
    """Swap, remove or repeat entries."""
    if not entries:
        return
    a, b = rng.randrange(len(entries)), rng.randrange(len(entries))
    how = rng.randrange(3)
    if how == 0:
        entries[a], entries[b] = entries[b], entries[a]
    elif how == 1:
        del entries[a]
    else:
        entries.insert(b, entries[a])


def _changed_key(key: Key, rng: Random, words: Sequence[str]) -> Key:
    """Return a key with another name, type or value."""
    how = rng.randrange(4)
    if how == 0:
        return replace(key, name=rng.choice(words).encode())
    value_type = rng.choice((*SCALARS, TEXT, ARRAY, 13)) if how == 1 else key.value_type
    return replace(key, value_type=value_type, value=_value(value_type, rng, words))


def _value(value_type: int, rng: Random, words: Sequence[str]) -> bytes:
    """Return the bytes of a random value."""
    if value_type == TEXT:
        return _text(rng.choice((rng.choice(words).encode(), b"\xff\xfe", b"x" * rng.choice((0, 900, 4097)))))
    if value_type != ARRAY:
        return _scalar(SCALARS.get(value_type, 4), rng)
    element_type, count = rng.choice((*SCALARS, TEXT, ARRAY, 13)), rng.randrange(5)
    values = b"".join(_value(element_type, rng, words) for _ in range(count)) if element_type != ARRAY else b""
    claimed = rng.choice(NUMBERS) if rng.random() < 0.2 else count
    return struct.pack("<IQ", element_type, claimed) + values


def _scalar(nbytes: int, rng: Random) -> bytes:
    """Return a number of some bytes."""
    return (rng.choice(NUMBERS) % 256**nbytes).to_bytes(nbytes, "little")


def _changed_info(info: Info, rng: Random, words: Sequence[str]) -> Info:
    """Return the entry of a tensor with another name, shape, type or offset."""
    how = rng.randrange(4)
    if how == 0:
        return replace(info, name=rng.choice(words).encode())
    if how == 1:
        axes = [*info.axes, rng.choice(NUMBERS)][-rng.randrange(1, 6) :]
        rng.shuffle(axes)
        return replace(info, axes=tuple(axes))
    if how == 2:
        return replace(info, type_number=rng.choice((rng.randrange(42), rng.choice(NUMBERS) % 2**32)))
    return replace(info, offset=rng.choice((info.offset + 32, max(0, info.offset - 32), rng.choice(NUMBERS))))


def _text(value: bytes) -> bytes:
    """Return a length and the bytes."""
    return struct.pack("<Q", len(value)) + value
