"""Minimal writer of ONNX files, written from onnx.proto and independent of tiewise's reader."""

import numpy as np

TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "float16": 10, "float64": 11, "bfloat16": 16}


def varint(value):
    out = b""
    value &= 2**64 - 1
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(field, value):
    return varint(field << 3) + varint(value)


def piece(field, data):
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def initialiser(name, values=None, *, dims=None, kind=None, at=None, packed=False, extra=b""):
    """Encode one tensor with the raw bytes of an array, an external location `at`, or no data."""
    dims = values.shape if dims is None else dims
    kind = TYPES[values.dtype.name] if kind is None else kind
    shape = piece(1, b"".join(map(varint, dims))) if packed else b"".join(number(1, length) for length in dims)
    encoded = shape + number(2, kind) + piece(8, name)
    if at is not None:
        encoded += number(14, 1) + b"".join(piece(13, piece(1, key) + piece(2, text)) for key, text in at.items())
    elif values is not None:
        encoded += piece(9, np.ascontiguousarray(values).tobytes())
    return encoded + extra


def node(operator, inputs, outputs, attributes=()):
    encoded = b"".join(piece(1, name) for name in inputs) + b"".join(piece(2, name) for name in outputs)
    return encoded + piece(4, operator) + b"".join(piece(5, attribute) for attribute in attributes)


def graph(nodes, initialisers=(), inputs=("input_ids",), outputs=("logits",), sparse=()):
    typed = piece(2, piece(1, number(1, 7) + piece(2, piece(1, piece(2, "batch")))))
    encoded = b"".join(piece(1, one) for one in nodes) + piece(2, "main")
    encoded += b"".join(piece(5, one) for one in initialisers)
    encoded += b"".join(piece(15, piece(1, piece(8, name))) for name in sparse)
    return encoded + b"".join(
        piece(f, piece(1, name) + typed) for f, of in ((11, inputs), (12, outputs)) for name in of
    )


def model(nodes, initialisers=(), **ends):
    return number(1, 10) + piece(2, "by hand") + piece(7, graph(nodes, initialisers, **ends)) + piece(8, number(2, 21))
