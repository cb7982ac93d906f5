"""Texts from files, folders, patterns, pipes and Python itself: what a text may be, and what it may not."""

import inspect
import json
import os
import sys
import sysconfig
import tempfile
import textwrap
import threading
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tiewise.core.errors import DataError
from tiewise.training.data.sources import builtin_texts, open_sources, parse_hub_name

PROSE = "\n\n".join(f"Paragraph {i} says {'word ' * (i % 40)}." for i in range(1000))


def texts(*sources):
    return [document.text for document in open_sources(sources)]


def refuse(match, *sources):
    with pytest.raises(DataError, match=match) as caught:
        list(open_sources(sources))
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


# what a text may be


def test_file_is_cut_into_about_a_hundred_parts_of_ten_thousand_characters_at_most(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(PROSE)
    documents = texts(str(path))
    assert "".join(documents) == PROSE
    assert 50 <= len(documents) <= 100
    assert all(document.endswith("\n\n") for document in documents[:-1])
    path.write_text(PROSE * 20)
    sizes = [len(document) for document in texts(str(path))]
    assert 10_000 <= min(sizes[:-1]) <= max(sizes[:-1]) < 10_300  # the longest paragraph is below 300
    assert sizes[-1] <= 20_000
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")  # byte order mark and line ends
    assert texts(str(path)) == ["one\ntwo\n"]


def written(folder, files):
    """Write {name: bytes} below a folder; its path."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


FOLDER = {"b/y.md": b"from y", "a.txt": b"from a", "z.unknown": b"from z", "rows.jsonl": b'{"text": "from a row"}'}
FOLDER |= {"image.png": b"\x89PNG\0\0", "nul.txt": b"a\0b", "empty.txt": b"", ".hidden": b"no", ".git/a": b"no"}


def test_folder_takes_text_sorted_and_recursive_and_a_pattern_what_it_names(tmp_path):
    assert texts(str(written(tmp_path / "a", FOLDER))) == ["from a", "from a row", "from z", "from y"]
    names = ("1.txt", "2.txt", "sub/3.txt")
    written(tmp_path / "b", {name: f"from {name}".encode() for name in (*names[::-1], "4.md")})
    assert texts(f"{tmp_path}/b/*.txt") == [f"from {name}" for name in names[:2]]
    assert texts(f"{tmp_path}/b/**/*.txt") == [f"from {name}" for name in names]


def test_several_texts_keep_their_order(tmp_path, pipe_in):
    written(tmp_path, {"a[1].txt": b"from a"})  # its name looks like a pattern
    pipe_in(b"piped")
    assert texts("-", str(tmp_path / "a[1].txt")) == ["piped", "from a"]


def test_fifo_streams_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=["through a pipe"])
    writer.start()
    assert texts(str(path)) == ["through a pipe"]
    writer.join()


# what it may not be


def test_missing_file_is_said_at_once(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder '.*none.txt'; check the path"):
        open_sources([str(tmp_path / "none.txt")])


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.txt", b"", r"the file '.*a.txt' is empty; give"),
        ("a.txt", b" \n\n\t", r"'.*a.txt' holds no text; give"),
        ("a.txt", b"abc\0", r"a.txt is a binary file: byte 3 is zero; give UTF-8"),
        ("a.txt", b"caf\xe9", r"a.txt is not UTF-8 text: byte 3 cannot be read; give UTF-8"),
        ("a.jsonl", b'{"text": "good"}\n{"text": ', r"line 2: not JSON \(Expecting value"),
        ("a.jsonl", b'{"text": "good"}\n[1, 2]\n', "line 2: not a JSON object; write one object per line"),
        ("a.jsonl", b'{"text": "good"}\n{"text": "\xff"}\n', r"line 2: not JSON \(not UTF-8\)"),
        ("a.jsonl", b'{"text": "good"}\n' + b"[" * 100_000, "line 2: nested too deeply"),
        ("a.jsonl", b'{"text": null}\n{"text": " "}\n', r"'.*a.jsonl' holds no text"),
        ("a.parquet", b"plain text that calls itself something else", r"a.parquet cannot be read as Parquet: "),
    ],
)
def test_broken_files(tmp_path, name, data, match):
    refuse(match, str(written(tmp_path, {name: data}) / name))


def test_broken_folders_and_patterns(tmp_path):
    refuse(r"the folder '.*' holds no text files; name", str(tmp_path))
    refuse(r"no file with text matches '.*\*.txt'; check the pattern", f"{tmp_path}/*.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse(r"cannot read '.*loop': ", str(tmp_path / "loop"))
    refuse(r"cannot read '.*File name too long", "word " * 100)
    refuse(r"no file or folder '.*none.parquet'", f"{tmp_path}/none.parquet:text")


@pytest.fixture
def locked():
    """A folder in which nothing may be read; permissions do not hold for the superuser, who is nobody meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), os.geteuid()
        (folder / "inside").mkdir()
        for path in (folder / "inside" / "a.txt", folder / "a.txt"):
            path.write_text("secret")
        for path, mode in ((folder / "a.txt", 0), (folder / "inside", 0), (folder, 0o755)):
            path.chmod(mode)
        if user == 0:
            os.seteuid(65534)
        yield folder
        os.seteuid(user)
        (folder / "inside").chmod(0o755)


@pytest.mark.parametrize("name", ["a.txt", "inside", "inside/a.txt", ""])
def test_no_permission(locked, name):
    refuse(rf"no permission to read '.*{name}'; change its mode", str(locked / name))


# rows of tables and of datasets

ROWS = [{"text": "first row", "other": "1st", "n": 1}, {"text": None, "other": "2nd", "n": 2}]
ROWS += [{"text": "third\n\nrow", "other": "3rd", "n": 3}]


@pytest.fixture
def tables(tmp_path):
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet, row_group_size=1)
    return jsonl, parquet


@pytest.mark.parametrize("kind", [0, 1])
def test_rows_are_documents(tables, kind):
    rows = tables[kind]
    for name in (f"{rows}", f"{rows}:text"):
        assert texts(name) == ["first row", "third\n\nrow"]
    for name in (f"{rows}:other", f"{rows.parent}/*{rows.suffix}:other"):
        assert texts(name) == ["1st", "2nd", "3rd"]


def test_missing_and_wrong_fields(tables):
    jsonl, parquet = tables
    refuse(r"rows.jsonl, line 1: no field 'body'; .* fields seen: text, other, n$", f"{jsonl}:body")
    refuse(r"rows.jsonl, line 1: field 'n' is a int, not a string; name a field", f"{jsonl}:n")
    refuse(r"rows.parquet: no column 'body'; .* columns: text, other, n$", f"{parquet}:body")
    refuse(r"rows.parquet: column 'n' holds int64, not strings; name a column", f"{parquet}:n")


# hf:


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path):
    rows = {split: [json.dumps({"text": f"{split} {i}", "n": i}) for i in range(4)] for split in ("train", "test")}
    return written(tmp_path / "data", {f"{split}.jsonl": "\n".join(lines).encode() for split, lines in rows.items()})


def test_dataset_folder_and_splits(folder):
    assert texts(f"hf:{folder}") == [f"train {i}" for i in range(4)]
    assert texts(f"hf:{folder}:test") == [f"test {i}" for i in range(4)]
    assert texts(f"hf:{folder}:train[:2]") == ["train 0", "train 1"]


def test_rows_without_a_text_are_passed_over(tmp_path):
    datasets.Dataset.from_dict({"text": ["a", "", None, "b"]}).save_to_disk(tmp_path / "gaps")
    assert texts(f"hf:{tmp_path}/gaps") == ["a", "b"]


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
    found = list(builtin_texts())
    assert "turtle" not in set(sys.modules) - loaded  # its docstrings are read, it is not imported
    return dict(found)


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
    nested = b'"""one"""\nif 1:\n    def f():\n        """two"""\n        class C:\n            "three"\n'
    written(tmp_path, {"a.py": nested, "b.py": b"x = 1\n", "c.py": b"def broken(:\n", "d.py": b"\xff\xfe\0"})
    written(tmp_path, {"test/e.py": b"'no'"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert list(builtin_texts()) == [("module a.py", "one\n\ntwo\n\nthree")]
    (tmp_path / "a.py").unlink()
    with pytest.raises(DataError, match=r"carries no documentation; name a text of your own"):
        list(builtin_texts())
