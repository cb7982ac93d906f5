"""Files of word vectors, written with `struct` from the formats' definitions, and what fastText makes of a word."""

import struct

import numpy as np


def text(path, vectors, header=False):
    """GloVe, or word2vec and fastText with `header`; numbers are written so that they come back bit for bit."""
    width = len(next(iter(vectors.values())))
    lines = [f"{len(vectors)} {width}"] if header else []
    lines += [" ".join([word, *(repr(float(value)) for value in row)]) for word, row in vectors.items()]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return path


def word2vec(path, vectors, end=b"\n", count=None, width=None):
    """word2vec's binary format; `count` and `width` are what its first line says, right unless given."""
    real = len(next(iter(vectors.values())))
    out = [f"{len(vectors) if count is None else count} {real if width is None else width}\n".encode()]
    out += [word.encode() + b" " + struct.pack(f"<{real}f", *row) + end for word, row in vectors.items()]
    path.write_bytes(b"".join(out))
    return path


def fasttext(path, words, matrix, **changes):
    """A fastText model with the rows of `matrix`, those of n-grams behind those of `words`."""
    m, n = matrix.shape
    said = {
        "magic": 793712314,
        "version": 12,
        "dim": n,
        "bucket": m - len(words),
        "minn": 3,
        "maxn": 6,
        "labels": [],
        "count": len(words),
        "pruned": -1,
        "quantised": False,
        "m": m,
        **changes,
    }
    out = struct.pack("<ii", said["magic"], said["version"])
    for value in (said["dim"], 5, 5, 1, 5, 1, 2, 2, said["bucket"], said["minn"], said["maxn"], 100):
        out += struct.pack("<i", value)
    out += struct.pack("<d", 1e-4)
    labels = said["labels"]
    out += struct.pack("<iiiqq", said["count"] + len(labels), said["count"], len(labels), 1000, said["pruned"])
    for kind, names in enumerate((words, labels)):
        for name in names:
            out += name.encode() + b"\0" + struct.pack("<qb", 7, kind)
    out += struct.pack("<?", said["quantised"]) + struct.pack("<qq", said["m"], n)
    out += b"".join(struct.pack(f"<{n}f", *row) for row in matrix)
    out += struct.pack("<?qq", False, len(words), n) + b"".join(struct.pack(f"<{n}f", *[0] * n) for _ in words)
    path.write_bytes(out)
    return path


def fnv(ngram):
    """32-bit FNV-1a of UTF-8, every byte a signed char, as C++ widens it."""
    value = np.uint32(2166136261)
    with np.errstate(over="ignore"):
        for byte in np.frombuffer(ngram.encode(), np.int8):
            value = (value ^ byte.astype(np.int32).view(np.uint32)) * np.uint32(16777619)
    return int(value)


def fasttext_vector(word, words, matrix, minn=3, maxn=6):
    """The mean of a word's own row and its n-grams', over the characters of a Python string."""
    marked, rows = f"<{word}>", [words.index(word)]
    for n in range(max(1, minn), maxn + 1) if word != "</s>" else ():
        for i in range(len(marked) - n + 1):
            if n > 1 or 0 < i < len(marked) - 1:
                rows.append(len(words) + fnv(marked[i : i + n]) % (len(matrix) - len(words)))
    return matrix[rows].astype(np.float64).mean(0)
