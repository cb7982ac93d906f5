"""Texts from files, folders, patterns, pipes and Python itself: what a text may be, and what it may not."""

import inspect
import io
import json
import os
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from tiewise.core.errors import DataError
from tiewise.data.sources import builtin_documents, open_sources, parse_hub_name

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


# what a text may be


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
    assert 10_000 <= min(sizes[:-1]) <= max(sizes[:-1]) < 10_300  # the longest paragraph is below 300
    assert sizes[-1] <= 20_000
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")  # byte order mark and line ends
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


def test_several_texts_keep_their_order(tmp_path, monkeypatch):
    (tmp_path / "a[1].txt").write_text("from a")  # its name looks like a pattern
    stdin(monkeypatch, b"piped")
    assert texts("-", str(tmp_path / "a[1].txt")) == ["piped", "from a"]


def test_fifo_streams_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if os.fork() == 0:
        path.write_text("through a pipe")
        os._exit(0)
    assert texts(str(path)) == ["through a pipe"]
    os.wait()


# what it may not be


def test_missing_file_is_said_at_once(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder '.*none.txt'; check the path"):
        open_sources([str(tmp_path / "none.txt")])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", r"the file '.*a.txt' is empty; give"),
        (b" \n\n\t", r"'.*a.txt' holds no text; give"),
        (b"abc\0", r"a.txt is a binary file: byte 3 is zero; give UTF-8"),
        (b"caf\xe9", r"a.txt is not UTF-8 text: byte 3 cannot be read; give UTF-8"),
    ],
)
def test_broken_files(tmp_path, data, match):
    (tmp_path / "a.txt").write_bytes(data)
    refuse(match, str(tmp_path / "a.txt"))


def test_broken_folders_and_patterns(tmp_path):
    refuse(r"the folder '.*' holds no text files; name", str(tmp_path))
    refuse(r"no file with text matches '.*\*.txt'; check the pattern", f"{tmp_path}/*.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse(r"cannot read '.*loop': ", str(tmp_path / "loop"))
    refuse(r"cannot read '.*File name too long", "word " * 100)


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


# rows of tables and of datasets

ROWS = [{"text": "first row", "other": "1st", "n": 1}, {"text": None, "other": "2nd", "n": 2}]
ROWS += [{"text": "third\n\nrow", "other": "3rd", "n": 3}]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=1)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def rows(request):
    return request.getfixturevalue(request.param)


def test_rows_are_documents(rows):
    assert texts(str(rows)) == ["first row", "third\n\nrow"]
    assert texts(f"{rows}:text") == ["first row", "third\n\nrow"]
    assert texts(f"{rows}:other") == ["1st", "2nd", "3rd"]
    assert texts(f"{rows.parent}/*{rows.suffix}:other") == ["1st", "2nd", "3rd"]


def test_missing_and_wrong_fields(jsonl, parquet):
    refuse(r"rows.jsonl, line 1: no field 'body'; .* fields seen: text, other, n$", f"{jsonl}:body")
    refuse(r"rows.jsonl, line 1: field 'n' is a int, not a string; name a field", f"{jsonl}:n")
    refuse(r"rows.parquet: no column 'body'; .* columns: text, other, n$", f"{parquet}:body")
    refuse(r"rows.parquet: column 'n' holds int64, not strings; name a column", f"{parquet}:n")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"text": ', r"line 2: not JSON \(Expecting value"),
        (b"[1, 2]", "line 2: not a JSON object; write one object per line"),
        (b'{"text": "\xff"}', r"line 2: not JSON \(not UTF-8\)"),
        (b"[" * 100_000, "line 2: nested too deeply"),
    ],
)
def test_bad_line_is_named(tmp_path, line, match):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    refuse(match, str(path))


def test_not_a_table(tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_text("plain text that calls itself something else")
    refuse(r"bad.parquet cannot be read as Parquet: ", str(path))
    refuse(r"no file or folder '.*none.parquet'", f"{tmp_path}/none.parquet:text")
    (tmp_path / "null.jsonl").write_text('{"text": null}\n{"text": " "}\n')
    refuse(r"'.*null.jsonl' holds no text", str(tmp_path / "null.jsonl"))


# hf:


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"{split} {i}", "n": i} for i in range(4)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data"


def test_dataset_folder_and_splits(folder):
    assert texts(f"hf:{folder}") == [f"train {i}" for i in range(4)]
    assert texts(f"hf:{folder}:test") == [f"test {i}" for i in range(4)]
    assert texts(f"hf:{folder}:train[:2]") == ["train 0", "train 1"]


def test_saved_datasets(tmp_path):
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert texts(f"hf:{tmp_path}/one") == ["a", "b"]
    assert texts(f"hf:{tmp_path}/both") == ["a", "b"]
    assert texts(f"hf:{tmp_path}/both:test") == ["b"]


def test_the_only_column_of_strings_is_taken(tmp_path):
    datasets.Dataset.from_dict({"n": [1, 2], "body": ["a", "b"]}).save_to_disk(tmp_path / "one")
    assert texts(f"hf:{tmp_path}/one") == ["a", "b"]
    datasets.Dataset.from_dict({"title": ["t"], "body": ["a"]}).save_to_disk(tmp_path / "two")
    refuse(r"no column 'text', and 2 others hold text; save .* columns: title, body", f"hf:{tmp_path}/two")


def test_datasets_that_are_not_there(folder):
    refuse(r"hf:.*:nope cannot be read: .*nope.*; check the split", f"hf:{folder}:nope")
    refuse(r"hf:./none/there: no folder './none/there'; write hf:owner", "hf:./none/there")
    refuse(r"hf:owner/none:train cannot be read: .*; check the name and the network; offline", "hf:owner/none:train")


@pytest.mark.parametrize("name", ["", ":train", "a//b", "a/b/c/d"])
def test_names_that_cannot_be(name):
    refuse(r"does not name a dataset; write hf:owner/name", f"hf:{name}")


def test_names():
    assert parse_hub_name("owner/name") == ("owner/name", None, "train", None)
    assert parse_hub_name("owner/name/config:validation[:1%]") == ("owner/name", "config", "validation[:1%]", None)
    assert parse_hub_name("name:test") == ("name", None, "test", None)


# what Python carries


@pytest.fixture(scope="module")
def documents():
    loaded = set(sys.modules)
    found = list(builtin_documents())
    assert "turtle" not in set(sys.modules) - loaded  # its docstrings are read, it is not imported
    return {document.name: document.text for document in found}


def test_builtin_holds_topics_then_docstrings_of_this_python_alone(documents):
    assert "for_stmt" in documents["topic for"] or "iterable" in documents["topic for"]
    assert inspect.getdoc(textwrap.dedent) in documents["module textwrap.py"]
    assert inspect.getdoc(textwrap.TextWrapper) in documents["module textwrap.py"]
    assert "module turtle.py" in documents
    assert sum(map(len, documents.values())) > 1_000_000
    topics = [name for name in documents if name.startswith("topic ")]
    assert list(documents)[: len(topics)] == sorted(topics)
    for name in list(documents)[len(topics) :]:
        parts = name.removeprefix("module ").split("/")
        assert {"site-packages", "test", "tests", "idle_test"}.isdisjoint(parts)


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
