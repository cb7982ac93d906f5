"""Recipes on the command line: one run and a table, what was published beside them, and refusals of one line."""

import json

import pytest

TINY = ("--set=width=8", "--set=batch=2", "--set=length=4", "--set=epochs=1")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("train", "a b c d\n" * 12), ("valid", "a b x d\n" * 3), ("test", "b c d y\n" * 3)):
        (folder / f"{name}.txt").write_text(text)
    return "corpus"


def test_a_run_says_what_became_unknown_and_what_it_leaves(tiewise, corpus, tmp_path):
    said = tiewise("train", "--recipe", "pytorch-200", corpus, "--boundary", "untied", *TINY, "-o", "out")
    assert said.code == 0
    assert "<unk>" in said.err
    assert "20.00% of tune, 20.00% of heldout" in said.err
    assert "No published figure is known for pytorch-200 with width=8" in " ".join(said.out.split())
    assert (tmp_path / "out" / "untied" / "seed-1" / "final" / "tokenizer.json").is_file()


def test_a_comparison_has_the_papers_arms_and_a_report(tiewise, corpus, tmp_path):
    said = tiewise("compare", "--recipe", "press-wolf-small", corpus, *TINY, "--seeds", "1", "-o", "out", "--json")
    assert said.code == 0
    record = json.loads(said.out)
    assert record["arms"] == [
        "untied",
        "tied",
        "projected:untied,decay=0.0076923",
        "projected:decay=0.0076923",
    ]
    assert record["setting"]["recipe"] == "press-wolf-small"
    assert "width=8" in record["setting"]["changed"]
    assert "Published figures" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "lstm", "corpus"), "no recipe 'lstm'"),
        (("corpus",), "without --recipe"),
        (("--recipe", "awd"), "needs one corpus"),
        (("--recipe", "awd", "corpus", "--text", "builtin"), "needs one corpus"),
        (("--recipe", "awd", "elsewhere"), "no corpus folder"),
        (("--recipe", "awd", "corpus", "--set", "files=[none.txt, valid.txt, test.txt]"), "has no none.txt"),
        (("--recipe", "pytorch-200", "corpus", "--set", "embedding=100"), "projected"),
        (("--set", "epochs=3"), "add --recipe"),
    ],
)
def test_what_cannot_be_is_one_line(tiewise, corpus, arguments, said):
    found = tiewise("train", *arguments, "-o", "out")
    assert found.code == 2
    assert said in found.err
    assert len(found.err.strip().splitlines()) == 1
