"""Test that the files, classes and functions named in docs/dev/walk.md exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "dev" / "walk.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:[a-z_]+/)*[a-z_*]+\.py)(?:: (\w+))?`", PAGE)


@pytest.mark.parametrize(("file", "begin"), NAMED)
def test_file_named_on_walk_page_exists(file, begin):
    paths = list((ROOT / "src" / "tiewise").glob(file if "/" in file else f"**/{file}"))
    assert paths
    if begin:
        assert re.search(rf"^(?:class|def) {begin}\b", paths[0].read_text(encoding="utf-8"), re.M)


def test_walk_page_names_more_than_30_files():
    assert len(NAMED) > 30
