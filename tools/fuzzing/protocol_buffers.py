"""Mutations of protocol buffers (ONNX, SentencePiece) that leave the lengths of all messages right."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
NUMBERS = (0, 1, 2, 6, 7, 16, 23, 24, 127, 128, 255, 16_384, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
MOST_DEPTH = 8


@dataclass(frozen=True)
class Field:
    """One field of a message: its number, wire type and bytes; for a number, `value` is its encoding."""

    number: int
    wire_type: int
    value: bytes

    def encode(self) -> bytes:
        """Return the field's bytes."""
        head = varint(self.number << 3 | self.wire_type)
        if self.wire_type == BYTES:
            head += varint(len(self.value))
        return head + self.value


def varint(value: int) -> bytes:
    """Return a number of seven bits a byte."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _end_of_varint(data: bytes, at: int) -> int:
    """Return the offset after a number of variable length."""
    while data[at] > 127:
        at += 1
    return at + 1


def _number(data: bytes, start: int, end: int) -> int:
    """Return the value of a number of variable length."""
    value = 0
    for shift, byte in enumerate(data[start:end]):
        value |= (byte & 127) << 7 * shift
    return value


def fields_of(data: bytes) -> list[Field] | None:
    """Return the fields of a message; None if the bytes are none."""
    fields, at = list[Field](), 0
    try:
        while at < len(data):
            start = _end_of_varint(data, at)
            tag = _number(data, at, start)
            wire_type = tag & 7
            if wire_type == VARINT:
                end = _end_of_varint(data, start)
            elif wire_type == BYTES:
                after = _end_of_varint(data, start)
                end, start = after + _number(data, start, after), after
            else:
                end = start + {EIGHT: 8, FOUR: 4}[wire_type]
            if end > len(data) or tag < 8:
                return None
            fields.append(Field(tag >> 3, wire_type, data[start:end]))
            at = end
    except (IndexError, KeyError):
        return None
    return fields


def mutate_message(data: bytes, rng: Random, words: Sequence[str], depth: int = 0) -> bytes | None:
    """Return a message in which a field of it, or of a message inside, changed. None if `data` is no message."""
    fields = fields_of(data)
    if fields is None or depth > MOST_DEPTH:
        return None
    if not fields:
        return _new_field(rng, words).encode()
    at = rng.randrange(len(fields))
    if rng.random() < 0.25:
        _reorder(fields, at, rng, words)
    else:
        fields[at] = _changed(fields[at], rng, words, depth)
    return b"".join(field.encode() for field in fields)


def _reorder(fields: list[Field], at: int, rng: Random, words: Sequence[str]) -> None:
    """Remove, repeat or swap fields, or add a new one."""
    how, other = rng.randrange(4), rng.randrange(len(fields))
    if how == 0:
        del fields[at]
    elif how == 1:
        fields.insert(other, fields[at])
    elif how == 2:
        fields[at], fields[other] = fields[other], fields[at]
    else:
        fields.insert(at, _new_field(rng, words))


def _changed(field: Field, rng: Random, words: Sequence[str], depth: int) -> Field:
    """Return a field with another number or value."""
    if rng.random() < 0.07:
        return replace(field, number=rng.randrange(1, 21))
    if field.wire_type == VARINT:
        return replace(field, value=varint(rng.choice(NUMBERS)))
    if field.wire_type != BYTES:
        return replace(field, value=struct.pack("<Q", rng.choice(NUMBERS))[: len(field.value)])
    if rng.random() < 0.8:
        inner = mutate_message(field.value, rng, words, depth + 1)
        if inner is not None:
            return replace(field, value=inner)
    return replace(field, value=_bytes(field.value, rng, words))


def _bytes(value: bytes, rng: Random, words: Sequence[str]) -> bytes:
    """Return other bytes for a field of text or data."""
    how = rng.randrange(4)
    if how == 0:
        return rng.choice(words).encode()
    if how == 1:
        return value[: rng.randrange(len(value) + 1)]
    if how == 2:
        return value + rng.randbytes(rng.randrange(5))
    return b"".join(varint(rng.choice(NUMBERS)) for _ in range(rng.randrange(1, 4)))


def _new_field(rng: Random, words: Sequence[str]) -> Field:
    """Return a field of a random number."""
    number = rng.randrange(1, 16)
    if rng.random() < 0.5:
        return Field(number, BYTES, rng.choice(words).encode())
    return Field(number, VARINT, varint(rng.choice(NUMBERS)))
