"""Files of pretrained vectors in every format, compared with an independent writer, and damaged files."""

import contextlib
import logging
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.vectors import load_vectors, row_tokens
from tiewise.core.errors import DataError

# --- writers by `struct` from the definitions of the formats, and the fastText vector of a word


def write_text(path, vectors, header=False):
    """Write GloVe text or, with `header`, word2vec and fastText text. Numbers read back bit for bit."""
    width = len(next(iter(vectors.values())))
    lines = [f"{len(vectors)} {width}"] if header else []
    lines += [" ".join([word, *(repr(float(value)) for value in row)]) for word, row in vectors.items()]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return path


def write_word2vec(path, vectors, end=b"\n", count=None, width=None):
    """Write word2vec's binary format; `count` and `width` replace the true numbers of its first line."""
    real = len(next(iter(vectors.values())))
    out = [f"{len(vectors) if count is None else count} {real if width is None else width}\n".encode()]
    out += [word.encode() + b" " + struct.pack(f"<{real}f", *row) + end for word, row in vectors.items()]
    path.write_bytes(b"".join(out))
    return path


def write_fasttext(path, words, matrix, **changes):
    """Write a fastText model with the rows of `matrix`: first those of `words`, then those of n-grams."""
    m, n = matrix.shape
    fields = {"magic": 793712314, "version": 12, "dim": n, "bucket": m - len(words), "minn": 3, "maxn": 6, "labels": []}
    fields |= {"count": len(words), "pruned": -1, "quantised": False, "m": m} | changes
    sizes = (fields["dim"], 5, 5, 1, 5, 1, 2, 2, fields["bucket"], fields["minn"], fields["maxn"], 100)
    out = struct.pack("<2i12id", fields["magic"], fields["version"], *sizes, 1e-4)
    labels = fields["labels"]
    out += struct.pack("<3i2q", fields["count"] + len(labels), fields["count"], len(labels), 1000, fields["pruned"])
    for kind, names in enumerate((words, labels)):
        out += b"".join(name.encode() + b"\0" + struct.pack("<qb", 7, kind) for name in names)
    out += struct.pack("<?2q", fields["quantised"], fields["m"], n) + matrix.astype("<f4").tobytes()
    path.write_bytes(out + struct.pack("<?2q", False, len(words), n) + bytes(4 * n * len(words)))
    return path


def fnv(ngram):
    """Return the 32-bit FNV-1a hash of UTF-8, with every byte sign-extended as in C++."""
    value = np.uint32(2166136261)
    with np.errstate(over="ignore"):
        for byte in np.frombuffer(ngram.encode(), np.int8):
            value = (value ^ byte.astype(np.int32).view(np.uint32)) * np.uint32(16777619)
    return int(value)


def fasttext_vector(word, words, matrix, minn=3, maxn=6):
    """Return the mean of the rows of a word and of its n-grams, by Python's characters."""
    marked, rows = f"<{word}>", [words.index(word)]
    for n in range(max(1, minn), maxn + 1) if word != "</s>" else ():
        for i in range(len(marked) - n + 1):
            if n > 1 or 0 < i < len(marked) - 1:
                rows.append(len(words) + fnv(marked[i : i + n]) % (len(matrix) - len(words)))
    return matrix[rows].astype(np.float64).mean(0)


# --- files that load


ABC = {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0], "c": [7.0, 8.0, 9.0]}
WRITERS = {
    "GloVe text": write_text,
    "word2vec text": lambda path, vectors: write_text(path, vectors, header=True),
    "word2vec binary": write_word2vec,
    "word2vec binary without line feeds": lambda path, vectors: write_word2vec(path, vectors, end=b""),
}
word = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "M")), min_size=1, max_size=9)


@st.composite
def words_and_vectors(draw):
    """Draw words and finite float32 vectors. They have at least two columns, as one could look like a header."""
    words = draw(st.lists(word, min_size=1, max_size=8, unique=True))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = draw(arrays(np.float32, (len(words), draw(st.integers(2, 6))), elements=finite))
    return dict(zip(words, values, strict=True))


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=25)
@given(vectors=words_and_vectors(), data=st.data())
def test_load_vectors_reads_back_every_format(form, vectors, data):
    asked = data.draw(st.permutations(list(vectors)))[: data.draw(st.integers(1, len(vectors)))]
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[form](Path(folder) / "a name that says nothing", vectors)
        found = load_vectors(path, [None, *asked])
    assert found[0].isnan().all()
    assert np.array_equal(found[1:].numpy(), np.stack([vectors[each] for each in asked]))


def test_binary_vectors_whose_bytes_look_like_a_number_load(tmp_path):
    vectors = {"0": np.float32([2e-9, 2e-9])}  # each has the bytes of "_p\t1"
    path = write_word2vec(tmp_path / "vectors.bin", vectors)
    assert np.array_equal(load_vectors(path, ["0"]).numpy(), [vectors["0"]])


@settings(max_examples=25)
@given(st.lists(word, min_size=1, max_size=8, unique=True), st.integers(1, 4), st.integers(-1, 3), st.integers(1, 50))
def test_fasttext_vectors_are_the_mean_of_a_word_and_its_ngrams(words, shortest, more, bucket):
    words = [*words, "</s>"]
    lengths = {"minn": shortest, "maxn": shortest + more} if more >= 0 else {"minn": 0, "maxn": 0}
    matrix = np.random.default_rng(0).normal(size=(len(words) + bucket, 3)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = write_fasttext(Path(folder) / "model", words, matrix, labels=["__label__x"], **lengths)
        found = load_vectors(path, [*reversed(words), "not there", "__label__x"])
    assert found[-2:].isnan().all()
    wanted = [fasttext_vector(each, words, matrix, **lengths) for each in reversed(words)]
    np.testing.assert_allclose(found[:-2].numpy(), wanted, rtol=2e-7, atol=1e-7)


def test_fnv_helper_matches_the_published_hashes():
    """The hashes are those of the FNV authors; bytes up to 127 need no sign extension."""
    assert [fnv(text) for text in ("", "a", "foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_load_vectors_does_not_hold_a_large_file_in_memory(tmp_path):
    """Reading two words from a file of 16 MB allocates less than 6 MB in Python and numpy."""
    row = np.ones(250, "<f4").tobytes()
    path = tmp_path / "v"
    with path.open("wb") as file:
        file.write(b"16000 250\n")
        file.writelines(b"w%d " % i + row for i in range(16_000))
    tracemalloc.start()
    assert load_vectors(path, ["w7", "w15999"]).isfinite().all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6


def test_load_vectors_accepts_tabs_spaces_and_carriage_returns(tmp_path):
    path = tmp_path / "v"
    path.write_bytes("a\t1\t2\r\nb  3 4 \r\nnaïve 5 6\r\n".encode())
    found = load_vectors(path, ["naïve", "b", "a"])
    assert found.tolist() == [[5, 6], [3, 4], [1, 2]]


def test_load_rows_initialises_and_freezes_a_table(tmp_path):
    vectors = load_vectors(write_text(tmp_path / "v", ABC), ["c", "unseen", "a"])
    boundary = Boundary("projected:3", 3, 8)
    drawn = boundary.table_in.detach().clone()
    boundary.load_rows(vectors, freeze=True)
    assert torch.equal(boundary.table_in[1], drawn[1])
    assert boundary.table_in[[0, 2]].tolist() == [ABC["c"], ABC["a"]]
    assert not boundary.table_in.requires_grad


@pytest.mark.parametrize("name", ["t.safetensors", "t"])
def test_safetensors_rows_follow_the_vocabulary(name, tmp_path):
    path = tensors([[0.0, 1], [2, 3], [4, 5]])(tmp_path / name)
    assert load_vectors(path, ["x", "y", "z"]).tolist() == [[0, 1], [2, 3], [4, 5]]


# --- files that load with a warning


def load_with_warnings(caplog, path, tokens):
    caplog.set_level(logging.WARNING)
    caplog.clear()
    found = load_vectors(path, tokens)
    assert all(line.startswith(f"{path} (") for line in caplog.messages)
    return found, [line.removeprefix(str(path)) for line in caplog.messages]


SPACED = {". . .": 1, "at name@domain.com": 2, " ": 3, "a": 4, "in 2009": 5, "7": 6, "\u00a0": 7, "x\u0085y": 8, "b": 9}


@pytest.mark.parametrize("header", ["", "9 3\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"])
def test_lines_of_words_with_spaces_are_split_from_the_right(tmp_path, caplog, header, end):
    """GloVe's 840B file has such words; here they are the first lines and most of the file."""
    path = tmp_path / "v"
    path.write_bytes((header + "".join(f"{word} {x} -{x}.5 {x}e-2{end}" for word, x in SPACED.items())).encode())
    found, lines = load_with_warnings(caplog, path, [*SPACED, "at", ".", "in"])
    assert found[:9].tolist() == pytest.approx(np.array([[x, -x - 0.5, x / 100] for x in SPACED.values()]), rel=1e-6)
    assert found[9:].isnan().all()
    form = "word2vec" if header else "GloVe"
    assert lines == [f" ({form} text): 3 of 12 words have no vector and start at random: at, ., in"]


def test_load_vectors_counts_broken_lines_and_names_the_first(tmp_path, caplog):
    path = tmp_path / "v"
    good = "".join(f"w{i} 1 2 3\n" for i in range(20))
    bad = "a 1 2 x\nstrange 1 2\nb 1 nan 3\nstrange 1 inf 3\nc 1 2 3 4\n\nd 1 1e99 3\n"
    path.write_text(good + bad + "z 7 8 9\n")
    found, lines = load_with_warnings(caplog, path, ["a", "b", "c", "d", "z"])
    assert lines == [
        " (GloVe text): 7 broken lines skipped: 21, 22, 23, 24, 25, …",
        " (GloVe text): 4 of 5 words have no vector and start at random: a, b, c, d",
    ]
    assert found[4].tolist() == [7, 8, 9]
    assert found[:4].isnan().all()


def test_numbers_of_broken_lines_include_the_header(tmp_path, caplog):
    path = tmp_path / "v"
    path.write_text("3 3\n" + "a 1 2 3\nb 1 2 x\nc 1 2 3\n")
    _, lines = load_with_warnings(caplog, path, ["a", "b", "c"])
    assert lines[0] == " (word2vec text): 1 broken lines skipped: 3"


def test_load_vectors_skips_binary_entries_that_are_not_finite(tmp_path, caplog):
    found, lines = load_with_warnings(
        caplog, write_word2vec(tmp_path / "v", {**ABC, "d": [1.0, np.nan, 2.0]}), ["d", "a"]
    )
    assert found[1].tolist() == ABC["a"]
    assert lines[0] == " (word2vec binary): 1 broken entries skipped: 4"
    matrix = np.ones((4, 2), np.float32)
    matrix[1:3, 0] = np.inf, -np.inf  # b and its n-grams, which all hash to one row, have no finite mean
    model = write_fasttext(tmp_path / "m", ["a", "b", "</s>"], matrix[[0, 1, 3, 2]])
    found, lines = load_with_warnings(caplog, model, ["</s>", "b"])
    assert lines[0] == " (fastText binary): 1 broken entries skipped: 2"


@pytest.mark.parametrize("form", WRITERS)
def test_first_vector_of_a_repeated_word_counts(form, tmp_path, caplog):
    path = WRITERS[form](tmp_path / "v", {**ABC, "d": [0.0, 1.0, 2.0]})
    path.write_bytes(path.read_bytes().replace(b"d", b"a"))
    found, lines = load_with_warnings(caplog, path, ["a"])
    assert found.tolist() == [ABC["a"]]
    assert len(lines) == 1
    assert lines[0].endswith("): a word stands in it again 1 times; its first vector counts")


def test_load_vectors_warns_if_the_text_header_has_another_count(tmp_path, caplog):
    path = write_text(tmp_path / "v", ABC, header=True)
    path.write_bytes(path.read_bytes().replace(b"3 3\n", b"9 3\n"))
    found, lines = load_with_warnings(caplog, path, ["a"])
    assert found.tolist() == [ABC["a"]]
    assert lines == [" (word2vec text): its first line says 9 words, and 3 lines follow: is the file whole?"]


def test_load_vectors_reads_and_warns_once_until_the_file_changes(tmp_path, caplog):
    path = write_text(tmp_path / "v", ABC)
    first, lines = load_with_warnings(caplog, path, ["a", "x"])
    first.zero_()
    assert len(lines) == 1
    again, lines = load_with_warnings(caplog, path, ["a", "x"])
    assert (again[0].tolist(), lines) == (ABC["a"], [])
    write_text(path, {"a": [3.0, 2.0, 1.5]})
    assert load_with_warnings(caplog, path, ["a", "x"])[0][0].tolist() == [3, 2, 1.5]


# --- files that are refused in one line


def raw(text):
    return lambda path: path.write_bytes(text) and path


def binary(vectors, **changes):
    return lambda path: write_word2vec(path, vectors, **changes)


def model(cut=0, **changes):
    return lambda path: short(write_fasttext(path, ["a", "b"], np.ones((4, 3), np.float32), **changes), cut)


def short(path, cut):
    path.write_bytes(path.read_bytes()[: -cut or None])
    return path


def tensors(rows):
    return lambda path: save_file({"table": torch.tensor(rows)}, path) or path


def test_row_tokens_supports_a_vocabulary_with_missing_ids():
    words = {f"t{number}": number for number in range(20)} | {"<lang>": 30}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
    fast.add_special_tokens({"additional_special_tokens": ["t3", "t4"]})  # tokens that exist already change nothing
    expected = [None] * 32
    for word, number in words.items():
        expected[number] = word
    for rows in (32, 31, 30, 21, 20, 5, 0):
        assert row_tokens(fast, rows) == expected[:rows]


BAD = [
    ("no such file", lambda path: path),
    ("no such file", lambda path: path.parent),
    ("not a safetensors file", lambda path: raw(b"a 1 2\n")(path.with_suffix(".safetensors"))),
    ("3 rows for a vocabulary of 2", tensors([[0.0, 1], [2, 3], [4, 5]])),
    ("1 rows hold values that are no finite numbers", tensors([[1.0, torch.inf], [2, 3]])),
    ("an empty file", lambda path: path.touch() or path),
    ("compressed by gzip; unpack it", raw(b"\x1f\x8b\x08 and so on")),
    *(
        (
            "a Git LFS pointer, not the file that it names; run `git lfs pull`",
            lambda path, suffix=suffix: raw(b"version https://git-lfs.github.com/spec/v1\noid x\n")(
                path.with_suffix(suffix)
            ),
        )
        for suffix in (".txt", ".safetensors")
    ),
    ("a zip archive; unpack it", raw(b"PK\x03\x04 and so on")),
    ("a pickle, which is never opened; save its vectors as text", raw(b"\x80\x04\x95 and so on")),
    ("none of the formats that are known; give GloVe", raw(b"Well, Prince,\nso Genoa and Lucca\nare now just\n")),
    ("none of the formats that are known", raw(bytes(range(256)) * 9)),
    ("none of the formats that are known", raw(b"a 1 2 x\nb 1 2 3\nc x\n")),
    ("cut short, or no word2vec file", raw(b"2 3\n")),
    ("tokens in it (GloVe text, 0 broken lines); check that file and", lambda p: write_text(p, {"z": [1.0, 2.0]})),
    ("tokens in it (word2vec binary, 2 broken entries)", binary(dict.fromkeys("ab", [np.nan] * 3))),
    ("says 300 numbers per word, and its lines have 3; correct", raw(b"2 300\na 1 2 3\nb 1 2 3\n")),
    ("20,000 numbers per word; use", raw(b"a" + b" 1" * 20_000 + b"\n")),
    ("line 21 has more than 1,048,576 bytes", raw(b"w 1 2\n" * 20 + b"a" + b" 1.5" * 300_000)),
    # word2vec binary
    ("cut short, or no word2vec file: its first line promises 9 words of 3", binary(ABC, count=9)),
    ("cut short, it ends at byte 45 within an entry; take", lambda p: short(write_word2vec(p, ABC), 4)),
    ("it continues after the 2 words of 3 numbers that its first line promises", binary(ABC, count=2)),
    ("first line", binary(ABC, width=2)),
    ("cut short", binary(ABC, width=4)),
    ("its first line says 0 numbers per word", binary(ABC, width=0)),
    ("its first line says 99,999 numbers", binary(ABC, width=99_999)),
    ("a word of more than 10,000 bytes at byte 4", raw(b"2 3\n" + b"\0" * 30_000)),
    # fastText
    ("version 11, not 12; save its vectors as text (.vec)", model(version=11)),
    ("a quantised fastText model; save its vectors as text (.vec)", model(quantised=True)),
    ("a pruned fastText model; save its vectors as text (.vec)", model(pruned=0)),
    ("cut short, it ends at byte 7 within an entry", raw(struct.pack("<i", 793712314) + b"\x0c\0\0")),
    ("cut short, it ends at byte 118 within", model(cut=102)),
    ("cut short, its matrix of 4 x 3 needs", model(cut=60)),
    ("contradicts itself: sizes that no model has", model(dim=0)),
    ("contradicts itself: sizes that no model has", model(count=-1)),
    ("contradicts itself: n-grams without rows", model(bucket=0)),
    ("contradicts itself: n-grams without rows", model(bucket=-1, maxn=0)),
    ("contradicts itself: a matrix of 5 x 3", model(m=5)),
    ("contradicts itself: a matrix of 4 x 3", model(bucket=1)),
    ("contradicts itself: labels among its words", model(count=1, bucket=3, labels=["c"])),
]


@pytest.mark.parametrize(("says", "write"), BAD, ids=[says for says, _ in BAD])
def test_load_vectors_refuses_unusable_files_in_one_line(says, write, tmp_path):
    path = write(tmp_path / "v")
    with pytest.raises(DataError) as error:
        load_vectors(path, ["a", "b"])
    assert str(error.value).startswith(f"vectors {path}: ")
    assert says in str(error.value)
    assert error.value.remedy
    assert len(str(error.value).splitlines()) == 1


@settings(max_examples=50)
@given(st.sampled_from([*WRITERS, "fastText"]), st.data())
def test_load_vectors_reads_or_refuses_damaged_files(form, data):
    """Each example replaces one byte and cuts the end off at any position."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v"
        model()(path) if form == "fastText" else WRITERS[form](path, ABC)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
        with contextlib.suppress(DataError):
            assert load_vectors(path, ["a", "b"]).isfinite().any()
