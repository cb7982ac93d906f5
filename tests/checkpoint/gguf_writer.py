"""Minimal writer of GGUF files, written from the format's description and independent of tiewise's reader."""

import struct

FORMS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i")}
FORMS |= {"f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    number, form = FORMS[kind]
    return struct.pack("<I" + form, number, value)


def string(value):
    return struct.pack("<I", 8) + text(value)


def strings(values):
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(text(value) for value in values)


def numbers(kind, values):
    number, form = FORMS[kind]
    return struct.pack("<IIQ", 9, number, len(values)) + struct.pack(f"<{len(values)}{form}", *values)


def info(name, axes, kind, offset):
    """Return the entry of one tensor; `axes` are in ggml's order, the width first."""
    return text(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes) + struct.pack("<IQ", kind, offset)


def opening(tensors, keys, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def gguf(keys=(), tensors=(), align=32):
    """Return a complete file; keys: (name, bytes of type and value); tensors: (name, axes, type number, bytes)."""
    head = opening(len(tensors), len(keys)) + b"".join(text(name) + value for name, value in keys)
    offset, data = 0, b""
    for name, axes, kind, raw in tensors:
        head += info(name, axes, kind, offset)
        padded = raw + b"\0" * (-len(raw) % align)
        data += padded
        offset += len(padded)
    return head + b"\0" * (-len(head) % align) + data


def model(rows=8, width=32, *, tokens=None, table=None, head=None, kind=0, head_kind=0, keys=()):
    """Return the file of a tiny model; `table` and `head` are raw bytes, and the table has a default."""
    table = bytes(range(256)) * (rows * width * 4 // 256) if table is None else table
    metadata = [("general.architecture", string("llama"))]
    metadata.append(("tokenizer.ggml.tokens", strings([f"t{i}" for i in range(rows if tokens is None else tokens)])))
    tensors = [("token_embd.weight", (width, rows), kind, table)]
    if head is not None:
        tensors.append(("output.weight", (width, rows), head_kind, head))
    return gguf((*metadata, *keys), tensors)
