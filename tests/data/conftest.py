import json
import random

import pytest


def word(generator):
    return "".join(generator.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(7))


@pytest.fixture(scope="session")
def rows():
    """100 documents, each with a word of its own that occurs 40 times, and a paragraph that all share."""
    generator = random.Random(0)
    own = [word(generator) for _ in range(100)]
    filler = [word(generator)[:3] for _ in range(50)]
    bodies = [" ".join(x for _ in range(40) for x in (name, generator.choice(filler))) for name in own]
    return own, [f"Shared  boilerplate.\n\n{body}\n\nShared boilerplate." for body in bodies]


@pytest.fixture
def source(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows[1]))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "data"
