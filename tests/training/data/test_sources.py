"""Tests of texts from files, folders, patterns, pipes, datasets and the documentation of Python."""

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
from tiewise.training.data.text_names import require_exists

PROSE = "\n\n".join(f"Paragraph {i} says {'word ' * (i % 40)}." for i in range(1000))


def read_texts(*sources):
    return [document.text for document in open_sources(sources)]


def assert_refused(match, *sources):
    with pytest.raises(DataError, match=match) as caught:
        list(open_sources(sources))
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["builtin", "-", "synthetic:words=9", "hf:a/b", "*.none", ".", "a.jsonl:words"])
def test_require_exists_accepts_text_that_may_exist(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    require_exists(name)


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl:words", "a.jsonl/b"])
def test_require_exists_refuses_missing_text(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"a\.jsonl/b|no file or folder 'none"):
        require_exists(name)


# accepted texts


def test_open_sources_cuts_file_into_bounded_parts_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(PROSE)
    documents = read_texts(str(path))
    assert "".join(documents) == PROSE
    assert 50 <= len(documents) <= 100
    assert all(document.endswith("\n\n") for document in documents[:-1])
    path.write_text(PROSE * 20)
    sizes = [len(document) for document in read_texts(str(path))]
    assert 10_000 <= min(sizes[:-1]) <= max(sizes[:-1]) < 10_300  # the longest paragraph is below 300
    assert sizes[-1] <= 20_000
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")  # byte order mark and foreign line ends
    assert read_texts(str(path)) == ["one\ntwo\n"]


def write_files(folder, files):
    """Write {name: bytes} into a folder and return its path."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


FOLDER = {"b/y.md": b"from y", "a.txt": b"from a", "z.unknown": b"from z", "rows.jsonl": b'{"text": "from a row"}'}
FOLDER |= {"image.png": b"\x89PNG\0\0", "nul.txt": b"a\0b", "empty.txt": b"", ".hidden": b"no", ".git/a": b"no"}


def test_folder_yields_sorted_text_files_and_pattern_yields_its_matches(tmp_path):
    assert read_texts(str(write_files(tmp_path / "a", FOLDER))) == ["from a", "from a row", "from z", "from y"]
    names = ("1.txt", "2.txt", "sub/3.txt")
    write_files(tmp_path / "b", {name: f"from {name}".encode() for name in (*names[::-1], "4.md")})
    assert read_texts(f"{tmp_path}/b/*.txt") == [f"from {name}" for name in names[:2]]
    assert read_texts(f"{tmp_path}/b/**/*.txt") == [f"from {name}" for name in names]


def test_open_sources_keeps_order_of_several_texts(tmp_path, pipe_in):
    write_files(tmp_path, {"a[1].txt": b"from a"})  # its name looks like a pattern
    pipe_in(b"piped")
    assert read_texts("-", str(tmp_path / "a[1].txt")) == ["piped", "from a"]


def test_open_sources_reads_named_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=["through a pipe"])
    writer.start()
    assert read_texts(str(path)) == ["through a pipe"]
    writer.join()


# refused texts


def test_open_sources_refuses_missing_file_before_iteration(tmp_path):
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
def test_open_sources_refuses_broken_files(tmp_path, name, data, match):
    assert_refused(match, str(write_files(tmp_path, {name: data}) / name))


def test_open_sources_refuses_broken_folders_and_patterns(tmp_path):
    assert_refused(r"the folder '.*' holds no text files; name", str(tmp_path))
    assert_refused(r"no file with text matches '.*\*.txt'; check the pattern", f"{tmp_path}/*.txt")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert_refused(r"cannot read '.*loop': ", str(tmp_path / "loop"))
    assert_refused(r"cannot read '.*File name too long", "word " * 100)
    assert_refused(r"no file or folder '.*none.parquet'", f"{tmp_path}/none.parquet:text")


@pytest.fixture
def unreadable_folder():
    """Make a folder without read permission; root ignores permissions, so the test runs as user nobody."""
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
def test_open_sources_reports_missing_read_permission(unreadable_folder, name):
    assert_refused(rf"no permission to read '.*{name}'; change its mode", str(unreadable_folder / name))


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
def test_open_sources_reads_table_rows_as_documents(tables, kind):
    rows = tables[kind]
    for name in (f"{rows}", f"{rows}:text"):
        assert read_texts(name) == ["first row", "third\n\nrow"]
    for name in (f"{rows}:other", f"{rows.parent}/*{rows.suffix}:other"):
        assert read_texts(name) == ["1st", "2nd", "3rd"]


def test_open_sources_refuses_missing_and_non_text_fields(tables):
    jsonl, parquet = tables
    assert_refused(r"rows.jsonl, line 1: no field 'body'; .* fields seen: text, other, n$", f"{jsonl}:body")
    assert_refused(r"rows.jsonl, line 1: field 'n' is a int, not a string; name a field", f"{jsonl}:n")
    assert_refused(r"rows.parquet: no column 'body'; .* columns: text, other, n$", f"{parquet}:body")
    assert_refused(r"rows.parquet: column 'n' holds int64, not strings; name a column", f"{parquet}:n")


# datasets: hf:


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path):
    rows = {split: [json.dumps({"text": f"{split} {i}", "n": i}) for i in range(4)] for split in ("train", "test")}
    return write_files(
        tmp_path / "data", {f"{split}.jsonl": "\n".join(lines).encode() for split, lines in rows.items()}
    )


def test_hf_source_reads_dataset_folder_and_its_splits(folder):
    assert read_texts(f"hf:{folder}") == [f"train {i}" for i in range(4)]
    assert read_texts(f"hf:{folder}:test") == [f"test {i}" for i in range(4)]
    assert read_texts(f"hf:{folder}:train[:2]") == ["train 0", "train 1"]


def test_hf_source_skips_rows_without_text(tmp_path):
    datasets.Dataset.from_dict({"text": ["a", "", None, "b"]}).save_to_disk(tmp_path / "gaps")
    assert read_texts(f"hf:{tmp_path}/gaps") == ["a", "b"]


def test_hf_source_reads_saved_datasets(tmp_path):
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert read_texts(f"hf:{tmp_path}/one") == ["a", "b"]
    assert read_texts(f"hf:{tmp_path}/both") == ["a", "b"]
    assert read_texts(f"hf:{tmp_path}/both:test") == ["b"]


def test_hf_source_selects_only_string_column(tmp_path):
    datasets.Dataset.from_dict({"n": [1, 2], "body": ["a", "b"]}).save_to_disk(tmp_path / "one")
    assert read_texts(f"hf:{tmp_path}/one") == ["a", "b"]
    datasets.Dataset.from_dict({"title": ["t"], "body": ["a"]}).save_to_disk(tmp_path / "two")
    assert_refused(r"no column 'text', and 2 others hold text; save .* columns: title, body", f"hf:{tmp_path}/two")


def test_hf_source_refuses_missing_datasets_and_splits(folder):
    assert_refused(r"hf:.*:nope cannot be read: .*nope.*; check the split", f"hf:{folder}:nope")
    assert_refused(r"hf:./none/there: no folder './none/there'; write hf:owner", "hf:./none/there")
    assert_refused(
        r"hf:owner/none:train cannot be read: .*; check the name and the network; offline", "hf:owner/none:train"
    )


@pytest.mark.parametrize("name", ["", ":train", "a//b", "a/b/c/d"])
def test_hf_source_refuses_malformed_names(name):
    assert_refused(r"does not name a dataset; write hf:owner/name", f"hf:{name}")


def test_parse_hub_name_splits_owner_config_and_split():
    assert parse_hub_name("owner/name") == ("owner/name", None, "train", None)
    assert parse_hub_name("owner/name/config:validation[:1%]") == ("owner/name", "config", "validation[:1%]", None)
    assert parse_hub_name("name:test") == ("name", None, "test", None)


# the documentation of Python


@pytest.fixture(scope="module")
def documents():
    loaded = set(sys.modules)
    found = list(builtin_texts())
    assert "turtle" not in set(sys.modules) - loaded  # the docstrings are read without an import
    return dict(found)


def test_builtin_texts_contain_topics_then_standard_library_docstrings(documents):
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


NESTED = b'''"""one"""
if 1:
    def f():
        """two"""
        class C:
            "three"
else:
    def f(): "four"
try:
    class D: "five"
except ValueError:
    class D: "six"
else:
    class D: "seven"
finally:
    async def g(): "eight"
match 1:
    case 1:
        with open("x"):
            for i in "":
                class E: "nine"
'''


def test_builtin_texts_list_nested_docstrings_in_reading_order(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.py": NESTED, "b.py": b"x = 1\n", "c.py": b"def broken(:\n", "d.py": b"\xff\xfe\0"})
    write_files(tmp_path, {"a/z.py": b"'before'", "test/e.py": b"'no'", "b/test/f.py": b"'no'"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    words = "one two three four five six seven eight nine"
    assert list(builtin_texts()) == [("module a/z.py", "before"), ("module a.py", words.replace(" ", "\n\n"))]
    (tmp_path / "a.py").unlink()
    (tmp_path / "a" / "z.py").unlink()
    with pytest.raises(DataError, match=r"carries no documentation; name a text of your own"):
        list(builtin_texts())
