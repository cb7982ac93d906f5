"""Test the remedy for a folder that does not exist but may be a model's name on the Hugging Face hub."""

from pathlib import Path

import pytest

from tiewise.checkpoint.hub_names import FOLDER_REMEDY, cached_folder, remedy_for_missing


@pytest.mark.parametrize(("name", "folder"), [("gpt2", "gpt2"), ("openai/gpt-oss-20b", "gpt-oss-20b")])
def test_remedy_for_name_of_the_hub_is_a_download(name, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert remedy_for_missing(Path(name)).endswith(f"hf download {name} --local-dir {folder}")


def test_remedy_names_the_newest_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--me--A" / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    assert cached_folder("me/A") == snapshot
    assert remedy_for_missing(Path("me/A")).endswith(f"me/A: {snapshot}")


def test_remedy_for_a_path_names_no_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (tmp_path / "none", Path("../none"), Path("runs/none"), Path("a/b/c")):
        assert remedy_for_missing(path) == FOLDER_REMEDY
