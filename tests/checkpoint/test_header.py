"""Test headers, folders and comparisons of tables against files that the safetensors library writes."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import with_rows

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.stored import Reader, read_header, widened
from tiewise.checkpoint.table_scans import likeness, same_bytes
from tiewise.core.errors import CheckpointError


def header(record, data=b"", length=None):
    """Return the bytes of a file; a record of type bytes is written unchanged."""
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reader_returns_tensors_and_metadata_that_safetensors_wrote(tmp_path):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    narrow = table.astype(ml_dtypes.bfloat16)
    save_file({"a": table, "b": narrow, "s": np.array(2.0)}, tmp_path / "m.safetensors", {"format": "pt"})
    found = read_header(tmp_path / "m.safetensors")
    assert found.metadata == {"format": "pt"}
    told = {n: (t.dtype, t.shape) for n, t in found.tensors.items()}
    assert told == {"a": ("F32", (4, 3)), "b": ("BF16", (4, 3)), "s": ("F64", ())}
    with Reader(found.tensors["a"]) as reader:
        np.testing.assert_array_equal(reader.rows(1, 3), table[1:3])
        assert list(reader.spans(24)) == [(0, 2), (2, 4)]
    np.testing.assert_array_equal(widened(found.tensors["b"].read()), table)
    assert found.tensors["s"].read().reshape(()) == 2.0


@pytest.mark.parametrize(
    ("record", "data", "says"),
    [
        ({"a": entry(offsets=(0, 8))}, b"\0" * 8, "8 bytes do not hold F32"),
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"\0" * 6, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(8, 12))}, b"\0" * 12, "leaves 4 bytes free"),
        ({"a": entry()}, b"\0" * 2, "ends 2 bytes before"),
        ({"a": entry()}, b"\0" * 9, "has 5 bytes after its tensors"),
        ({"a": entry(dtype="F99")}, b"\0" * 4, "unknown dtype F99"),
        ({"a": entry(shape=(-1,))}, b"\0" * 4, "its shape"),
        ({"a": entry(shape=(2**62, 2**62), offsets=(0, 4))}, b"\0" * 4, "do not hold"),
        ({"a": entry(offsets=(4, 0))}, b"\0" * 4, "its data_offsets"),
        ({"a": entry(offsets=(True, 4))}, b"\0" * 4, "its data_offsets"),
        ({"a": 3}, b"", "no JSON object"),
        ([], b"", "no JSON object"),
        (b'{"a": 1, "a": 2}', b"", "names a twice"),
        (b"{", b"", "not readable as JSON"),
        (b"[" * 100_000, b"", "not readable as JSON"),
        (b"\xff\xfe", b"", "not readable as JSON"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        *(({}, length, "header claims") for length in (2**60, 2**64 - 1, 100, 100_000_001)),
    ],
)
def test_read_header_refuses_broken_header_with_one_line_error(tmp_path, record, data, says):
    whole = header(record, length=data) if isinstance(data, int) else header(record, data)
    (tmp_path / "m.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_header(tmp_path / "m.safetensors")
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_open_folder_follows_links_of_hub_cache(tmp_path):
    home = tmp_path / "models--a--b"
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    save_file({"a": np.zeros(1)}, home / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert list(open_folder(snapshot).tensors) == ["a"]


def test_open_folder_lists_tensors_of_intact_shards_beside_broken_one(tmp_path):
    save_file({"a": np.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"cut")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    folder = open_folder(tmp_path)
    assert list(folder.tensors) == ["a"]
    assert [fault.file for fault in folder.faults] == ["model-00002-of-00002.safetensors"]


TABLE = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)


def write_pair(tmp_path, a, b):
    save_file({"a": a, "b": b}, tmp_path / "m.safetensors")
    tensors = read_header(tmp_path / "m.safetensors").tensors
    return tensors["a"], tensors["b"]


@pytest.mark.parametrize(
    ("other", "kind", "differing"),
    [
        (TABLE.copy(), "identical", 0),
        (with_rows(7, 250, of=TABLE), "some rows", 2),
        (TABLE + np.float32(1e-3), "close", 300),
        (TABLE[::-1].copy(), "unrelated", 300),
    ],
)
def test_likeness_classifies_pair_and_counts_differing_rows(tmp_path, other, kind, differing):
    found = likeness(*write_pair(tmp_path, TABLE, other))
    assert (found.kind, found.differing) == (kind, differing)
    rows = (other != TABLE).any(1)
    moved, own = np.linalg.norm((TABLE - other)[rows]), np.linalg.norm(TABLE[rows])
    assert found.relative == pytest.approx(moved / own if differing else 0, rel=1e-6)


def test_same_bytes_detects_difference_in_last_byte(tmp_path):
    big = np.zeros((3, 2**18 + 1), np.uint8)
    other = big.copy()
    other[-1, -1] = 1
    assert not same_bytes(*write_pair(tmp_path, big, other))
    assert same_bytes(*write_pair(tmp_path, big, big))
