"""A new version of tiewise, or other sources of its losses, times backends and products again."""

import json
import shutil

import pytest

import tiewise
from tiewise.boundary.ops import fast_products, kernel_version
from tiewise.boundary.ops.kernel_version import hash_sources, kernel_sources


def test_version_has_that_of_tiewise_and_a_hash_of_the_sources():
    version, digest = kernel_version.kernel_version().split()
    assert version == tiewise.__version__
    assert len(digest) == 12
    assert digest == hash_sources(kernel_sources(kernel_version.SOURCES))[:12]


@pytest.mark.parametrize("name", ["row_loss.py", "row_kernels.py", "gpu_chunks.py", "compiled_rows.py", "kernels.cpp"])
def test_change_of_a_kernel_changes_the_hash(name, tmp_path):
    folder = shutil.copytree(kernel_version.SOURCES, tmp_path / "ops")
    before = hash_sources(kernel_sources(folder))
    assert before == hash_sources(kernel_sources(kernel_version.SOURCES))
    with (folder / name).open("a") as file:
        file.write("\n")
    assert hash_sources(kernel_sources(folder)) != before


def test_times_of_another_version_are_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_products, "cache_folder", lambda: tmp_path)
    measured = []

    def measure():
        measured.append(len(measured) + 1.0)
        return {"tiewise_ms": measured[-1]}

    times = []
    for version in ("0.2.0 a", "0.2.0 a", "0.2.0 b", "0.3.0 b", "0.2.0 a"):
        monkeypatch.setattr(fast_products, "kernel_version", lambda version=version: version)
        record = fast_products.cached_record("losses.json", {"device": "x"}, ("tiewise_ms",), measure)
        assert record["tiewise"] == version
        times.append(record["tiewise_ms"])
    assert times == [1, 1, 2, 3, 1]
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 3
