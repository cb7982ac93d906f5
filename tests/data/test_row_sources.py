import json

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from tiewise.core.errors import DataError
from tiewise.data.sources import open_sources, parse_hub_name

ROWS = [{"text": "first row", "other": "1st", "n": 1}, {"text": None, "other": "2nd", "n": 2}]
ROWS += [{"text": "third\n\nrow", "other": "3rd", "n": 3}]


def texts(source):
    return [document.text for document in open_sources([source])]


def refuse(match, source):
    with pytest.raises(DataError, match=match) as caught:
        list(open_sources([source]))
    assert "\n" not in str(caught.value)
    assert caught.value.fix


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
    refuse(r"no file or folder '.*none.jsonl'", f"{tmp_path}/none.jsonl:text")


def test_rows_without_any_text(tmp_path):
    path = tmp_path / "null.jsonl"
    path.write_text('{"text": null}\n{"text": " "}\n')
    refuse(r"'.*null.jsonl' holds no text", str(path))


# --- hf: ------------------------------------------------------------------------------------------------------------


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
