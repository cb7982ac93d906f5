"""ALBERT runs on the command line: sharings times boundaries, and refusals of one line."""

import json
import random

import pytest
import yaml
from cli_tiny import refused

SIZES = ("width=16", "layers=2", "heads=2", "length=24", "batch=4", "measured=480")
TINY = [*(f"--set={item}" for item in SIZES), "--steps=6", "--tokenizer=bpe:300"]


def documents(count, sentences):
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefgh") for _ in range(3)) for _ in range(40)]

    def sentence():
        return " ".join(draw.choice(words) for _ in range(4)).capitalize() + "."

    rows = [" ".join(sentence() for _ in range(sentences)) for _ in range(count)]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def texts(tmp_path):
    (tmp_path / "text.jsonl").write_text(documents(80, 8))
    (tmp_path / "ones.jsonl").write_text(documents(300, 1))


@pytest.fixture
def albert(tiewise):
    """Run `compare` or `train` on an ALBERT of a second."""

    def run(command, *options, text="text.jsonl"):
        return tiewise(command, "--recipe=albert-small", "--text", text, *TINY, "--out=run", *options)

    return run


def test_every_sharing_with_every_boundary(albert, tmp_path):
    said = albert("compare", "--share=none,all:groups=2+rank=2", "--boundary=factored:8,tied", "--seeds=1", "--json")
    assert said.code == 0
    arms = [
        f"{boundary}+share={share}" for boundary in ("factored:8", "tied") for share in ("none", "all:groups=2+rank=2")
    ]
    record = json.loads(said.out)
    assert [run["arm"] for run in record["runs"]] == record["arms"] == arms
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["arms"] == arms
    sizes = [run["total_parameters"] for run in record["runs"]]
    assert sizes[0] < sizes[2]


def test_sharings_with_the_recipe_s_own_boundary(albert, tmp_path):
    assert albert("train", "--share=ffn").code == 0
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["arms"] == ["factored:64+share=ffn"]


REFUSED = [
    (
        "compare",
        ["--share=some"],
        "unknown sharing 'some' in 'some'; choose one of none, attention, ffn, all, sandwich",
    ),
    ("compare", ["--share=all,all:groups=1"], "an arm is given twice"),
    ("compare", ["--share=ffn", "--arms=tied+share=all"], "leave +share= out, or --share"),
    ("compare", ["--resume", "--share=ffn"], "--resume takes its settings from the run"),
    (
        "compare",
        ["--arms=factored:8+share=all,rank=4"],
        "unknown sharing 'all,rank=4' in 'all,rank=4'; write all:groups=2 or all+rank=4, say",
    ),
    ("train", ["--share=none,ffn"], "2 boundaries (factored:64+share=none, factored:64+share=ffn) for one run"),
]


@pytest.mark.parametrize(("command", "options", "says"), REFUSED)
def test_refused(albert, tree, command, options, says):
    before = tree()
    assert says in refused(albert(command, *options))
    assert tree() == before


def test_documents_of_one_sentence(albert, tree):
    before = tree()
    assert "no document has two sentences" in refused(albert("train", text="ones.jsonl"))
    assert tree() == before


@pytest.mark.parametrize("options", [[], ["--recipe=pytorch-200", "corpus"]])
def test_models_that_do_not_share(tiewise, options):
    assert "--recipe albert-small" in refused(tiewise("compare", "--share=ffn", *options))
