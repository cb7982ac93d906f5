"""Texts from files, folders, patterns, pipes and Python itself: what a text may be, and what it may not."""

import inspect
import io
import os
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.core.errors import DataError
from tiewise.data.documents import cut, decode
from tiewise.data.sources import builtin_documents, open_sources

PROSE = "\n\n".join(f"Paragraph {i} says {'word ' * (i % 40)}." for i in range(1000))


def texts(*sources):
    return [document.text for document in open_sources(sources)]


def refuse(match, *sources):
    with pytest.raises(DataError, match=match) as caught:
        list(open_sources(sources))
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# --- cutting and decoding -------------------------------------------------------------------------------------------


@given(
    text=st.text(alphabet="ab \n", max_size=400),
    size=st.integers(1, 60),
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_cut_loses_nothing_and_keeps_its_sizes(text, size, steps):
    pieces, start = [], 0
    for step in steps:
        pieces.append(text[start : start + step])
        start += step
    pieces.append(text[start:])
    documents = list(cut(pieces, size))
    assert "".join(documents) == text
    assert all(0 < len(document) <= 3 * size for document in documents[:-1])
    assert all(len(document) >= size for document in documents[:-1])


def first(pieces):
    return next(cut(pieces, 5))


def test_cut_prefers_blank_lines_then_lines_then_spaces():
    assert first(["aaaa bb\ncc\n\ndddddddddddddddd"]) == "aaaa bb\ncc\n\n"
    assert first(["aaaa bb\nccddddddddddddddd"]) == "aaaa bb\n"
    assert first(["aaaaa bb ccddddddddddddd"]) == "aaaaa "
    assert first(["a" * 20]) == "a" * 15


@given(
    text=st.text(alphabet="aé€𝄞\r\n", max_size=60),
    block=st.integers(1, 7),
)
@settings(max_examples=200)
def test_decode_equals_decoding_whole(text, block):
    pieces = "".join(decode(io.BytesIO(text.encode()), "x", block))
    assert pieces == text.replace("\r\n", "\n").replace("\r", "\n")


@given(before=st.text(alphabet="aé€𝄞", max_size=30), block=st.integers(1, 9), bad=st.sampled_from([b"\xff", b"\0"]))
def test_decode_names_the_first_byte_that_is_not_text(before, block, bad):
    data = before.encode() + bad + b"after" * 3
    with pytest.raises(DataError, match=rf"byte {len(before.encode())} "):
        list(decode(io.BytesIO(data), "x", block))


def test_decode_refuses_a_character_that_breaks_off():
    with pytest.raises(DataError, match="byte 2 cannot be read"):
        list(decode(io.BytesIO("ab€".encode()[:-1]), "x"))


# --- what a text may be ---------------------------------------------------------------------------------------------


def test_file_is_cut_into_about_a_hundred_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(PROSE)
    documents = texts(str(path))
    assert "".join(documents) == PROSE
    assert 50 <= len(documents) <= 100
    assert all(document.endswith("\n\n") for document in documents[:-1])


def test_large_file_is_cut_at_ten_thousand_characters(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(PROSE * 20)
    sizes = [len(document) for document in texts(str(path))]
    assert min(sizes[:-1]) >= 10_000
    assert max(sizes[:-1]) < 10_300  # the longest paragraph is below 300
    assert sizes[-1] <= 20_000


def test_byte_order_mark_and_line_ends_are_dropped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert texts(str(path)) == ["one\ntwo\n"]


def test_folder_takes_text_sorted_and_recursive(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "y.md").write_text("from y")
    (tmp_path / "a.txt").write_text("from a")
    (tmp_path / "z.unknown").write_text("from z")
    (tmp_path / "rows.jsonl").write_text('{"text": "from a row"}')
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    assert texts(str(tmp_path)) == ["from a", "from a row", "from z", "from y"]


def test_glob(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("2.txt", "1.txt", "sub/3.txt"):
        (tmp_path / name).write_text(f"from {name}")
    (tmp_path / "4.md").write_text("not this")
    assert texts(f"{tmp_path}/*.txt") == ["from 1.txt", "from 2.txt"]
    assert texts(f"{tmp_path}/**/*.txt") == ["from 1.txt", "from 2.txt", "from sub/3.txt"]


def test_file_whose_name_looks_like_a_pattern(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("here")
    assert texts(str(path)) == ["here"]


def test_standard_input(monkeypatch):
    stdin(monkeypatch, b"piped text")
    assert texts("-") == ["piped text"]


def test_several_texts_keep_their_order(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("from a")
    stdin(monkeypatch, b"piped")
    assert texts("-", str(tmp_path / "a.txt")) == ["piped", "from a"]


def test_fifo_streams_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if os.fork() == 0:
        path.write_text("through a pipe")
        os._exit(0)
    assert texts(str(path)) == ["through a pipe"]
    os.wait()


# --- what it may not be ---------------------------------------------------------------------------------------------


def test_missing_file_is_said_at_once(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder '.*none.txt'; check the path"):
        open_sources([str(tmp_path / "none.txt")])


def test_broken_files(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    refuse(r"the file '.*empty.txt' is empty; give", str(tmp_path / "empty.txt"))
    (tmp_path / "white.txt").write_text(" \n\n\t")
    refuse(r"'.*white.txt' holds no text; give", str(tmp_path / "white.txt"))
    (tmp_path / "nul.txt").write_bytes(b"abc\0")
    refuse(r"nul.txt is a binary file: byte 3 is zero; give UTF-8", str(tmp_path / "nul.txt"))
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    refuse(r"latin.txt is not UTF-8 text: byte 3 cannot be read; give UTF-8", str(tmp_path / "latin.txt"))


def test_broken_folders_and_patterns(tmp_path):
    refuse(r"the folder '.*' holds no text files; name", str(tmp_path))
    refuse(r"no file with text matches '.*\*.txt'; check the pattern", f"{tmp_path}/*.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse(r"cannot read '.*loop': ", str(tmp_path / "loop"))
    refuse(r"cannot read '.*File name too long", "word " * 100)


def test_standard_input_without_text(monkeypatch):
    stdin(monkeypatch, b"")
    refuse("'-' holds no text", "-")
    stdin(monkeypatch, b"a\xffb")
    refuse("standard input is not UTF-8 text: byte 1", "-")


@pytest.fixture
def ordinary_user():
    """No permission applies to the superuser, so act as nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def locked():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "inside").mkdir()
        (folder / "inside" / "a.txt").write_text("secret")
        (folder / "a.txt").write_text("secret")
        (folder / "a.txt").chmod(0)
        (folder / "inside").chmod(0)
        folder.chmod(0o755)
        yield folder
        (folder / "inside").chmod(0o755)


def test_no_permission(locked, ordinary_user):
    refuse(r"no permission to read '.*a.txt'; change its mode", str(locked / "a.txt"))
    refuse(r"no permission to read '.*inside'; change its mode", str(locked / "inside"))
    refuse(r"no permission to read '.*inside/a.txt'; change its mode", str(locked / "inside" / "a.txt"))
    refuse(r"no permission to read '.*'; change its mode", str(locked))


@pytest.fixture(scope="module")
def documents():
    loaded = set(sys.modules)
    found = list(builtin_documents())
    assert "turtle" not in set(sys.modules) - loaded  # its docstrings are read, it is not imported
    return {document.name: document.text for document in found}


def test_holds_topics_and_docstrings(documents):
    assert "for_stmt" in documents["topic for"] or "iterable" in documents["topic for"]
    assert inspect.getdoc(textwrap.dedent) in documents["module textwrap.py"]
    assert inspect.getdoc(textwrap.TextWrapper) in documents["module textwrap.py"]
    assert "module turtle.py" in documents
    assert sum(map(len, documents.values())) > 1_000_000


def test_leaves_out_tests_and_other_packages(documents):
    names = [name.removeprefix("module ").split("/") for name in documents if name.startswith("module ")]
    assert names
    for parts in names:
        assert {"site-packages", "test", "tests", "idle_test"}.isdisjoint(parts)


def test_sorted_topics_before_modules(documents):
    names = list(documents)
    topics = [name for name in names if name.startswith("topic ")]
    assert names[: len(topics)] == sorted(topics)


def test_docstrings_in_reading_order_with_nested_ones(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(
        '"""one"""\nif 1:\n    def f():\n        """two"""\n        class C:\n            "three"\n'
    )
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("def broken(:\n")
    (tmp_path / "d.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "e.py").write_text('"""not this"""')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert [(d.name, d.text) for d in builtin_documents()] == [("module a.py", "one\n\ntwo\n\nthree")]


def test_python_without_texts_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"carries no documentation; name a text of your own"):
        list(builtin_documents())
