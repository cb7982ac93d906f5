"""Whatever a person can get wrong: one line that names it and the way out, exit 2, and nothing left behind."""

import json
import os

import numpy as np
import pytest
import yaml
from cli_tiny import TINY, refused

from tiewise.cli.main import COMMANDS
from tiewise.training.folder import locked

SMALL = ["compare", *TINY, "--arms=tied,untied", "--seeds=1"]


@pytest.fixture(autouse=True)
def files(tmp_path, text):
    """Texts and settings that cannot be used."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(np.random.default_rng(0).bytes(4000))
    (tmp_path / "short.txt").write_text("one two three")
    (tmp_path / "little.txt").write_text("\n\n".join(f"{i} some words of a text that is not long" for i in range(20)))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(50)))
    (tmp_path / "odd.yaml").write_text("breadth: 3")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")


TEXTS = [
    (["missing.txt"], "missing.txt"),
    (["binary.txt"], "binary.txt"),
    (["short.txt"], "give more text"),
    (["rows.jsonl:title"], "title"),
    (["rows.jsonl"], "text"),
    (["hf:"], "hf:"),
    (["-"], "standard input is empty"),
    (["little.txt", "--set=batch=64"], "training blocks of 16 tokens, and one step takes 64; give more text"),
]


@pytest.mark.parametrize(("given", "says"), TEXTS)
def test_a_text_that_cannot_be_used(tiewise, tree, given, says):
    before = tree()
    assert says in refused(tiewise(*SMALL, "--out", "a/run", "-t", *given))
    assert tree() == before


OPTIONS = [
    (["--arms=factored"], "factored:128, say"),
    (["--arms=tied,factored:17"], "k = 17 exceeds the model width 16; choose k ≤ 16"),
    (["--arms="], "unknown boundary ''"),
    (["--seeds=0"], "seeds = 0"),
    (["--steps=many"], "'--steps'"),
    (["--minutes=1"], "both steps and minutes are given"),  # TINY has steps
    (["--model=nothing"], "use llama, gpt2, or the path of a config.json"),
    (["--tokenizer=bpe:12"], "bpe:12"),
    (["--set=width"], "write --set NAME=VALUE"),
    (["--set=breadth=3"], "unknown setting 'breadth' in --set"),
    (["--set=width=wide"], "width in --set must be a whole number"),
    (["--set=width={"], "the value cannot be read"),
    (["--set=seed=1"], "seed is a setting of train"),
    (["--config=odd.yaml"], "unknown setting 'breadth' in odd.yaml"),
    (["--sparkle"], "--sparkle"),
    (["--out"], "--out"),
    (["more"], "more"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_an_option_that_cannot_be_used(tiewise, tree, text, options, says):
    before = tree()
    assert says in refused(tiewise(*SMALL, "-t", text, "--out=a/run", *options))
    assert tree() == before


def test_an_unknown_command(tiewise):
    assert "'sparkle'" in refused(tiewise("sparkle"))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("other", "other exists and is no run of tiewise; choose another --out"),
        ("file", "file is a file; choose another --out"),
        ("file/run", "cannot write to file/run"),
        ("/proc/run", "cannot write to /proc/run"),
    ],
)
def test_an_output_folder_that_cannot_be_used(tiewise, tree, text, out, says):
    before = tree()
    for more in ([], ["--overwrite"]):
        assert says in refused(tiewise(*SMALL, "-t", text, "--out", out, *more))
    assert tree() == before


def test_a_folder_that_holds_a_run(compare, tiewise, tree):
    assert compare("--arms=tied", "--seeds=1", "--out=run").code == 0
    before = tree()
    assert "--resume to finish it, --overwrite to replace it" in refused(compare("--out=run", "--arms=tied"))
    assert "is no run" not in refused(compare("--out=run", "--overwrite", "--arms=factored:500"))
    assert tree() == before
    assert compare("--arms=untied", "--seeds=1", "--out=run", "--overwrite").code == 0


def test_a_folder_in_which_a_run_is_at_work(compare, tiewise, tree, tmp_path):
    assert compare("--arms=tied", "--seeds=1", "--out=run").code == 0
    with locked(tmp_path / "run"):
        before = tree()
        for said in (tiewise("compare", "--out=run", "--resume"), compare("--out=run", "--overwrite", "--arms=tied")):
            assert "another run is at work in run; wait for it, or choose another --out" in refused(said)
        assert tree() == before
    assert tiewise("compare", "--out=run", "--resume").code == 0


def test_resume_without_a_run(tiewise, tree):
    before = tree()
    assert "none holds no run to resume" in refused(tiewise("compare", "--resume", "--out", "none"))
    assert "other holds no run to resume" in refused(tiewise("train", "--resume", "--out", "other"))
    assert tree() == before


@pytest.mark.parametrize(
    "more",
    [["--steps=3"], ["--set=width=8"], ["--config=odd.yaml"], ["-t", "text.txt"], ["--no-tune"], ["--overwrite"]],
)
def test_resume_with_other_settings(tiewise, more):
    line = refused(tiewise("compare", "--resume", "--out", "run", *more))
    assert "--resume takes its settings from the run; give only --out run --resume" in line


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--seed=0"], "seed = 0"),
        (["--set=tune=true"], "tune is a setting of compare"),
        (["--set=arms=[tied, untied]"], "2 boundaries (tied, untied) for one run"),
    ],
)
def test_what_train_does_not_take(tiewise, tree, text, more, says):
    before = tree()
    assert says in refused(tiewise("train", "-t", text, *TINY, "--out=run", *more))
    assert tree() == before


def test_a_damaged_run(compare, tiewise, tmp_path):
    assert compare("--arms=tied", "--seeds=1", "--out=run").code == 0
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump({**record, "width": "wide"}))
    assert "width in run/run.yaml must be a whole number" in refused(tiewise("compare", "--out=run", "--resume"))
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump(record))
    (tmp_path / "run" / "data" / "train.bin").write_bytes(b"")
    assert "train.bin" in refused(tiewise("compare", "--out=run", "--resume"))


@pytest.mark.parametrize("verb", [verb for verbs in COMMANDS.values() for verb in verbs])
@pytest.mark.parametrize("empty", ["", "--out=", "--to="])
def test_an_empty_argument_is_an_unset_variable(tiewise, tree, verb, empty):
    before = tree()
    assert "an argument is empty: is a variable unset?" in refused(tiewise(verb, empty))
    assert tree() == before


@pytest.mark.parametrize("verb", [["check"], ["inspect"], ["untie", "--to", "new"]])
def test_a_pipe_or_a_device_is_called_one(tiewise, tmp_path, verb):
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "/dev/zero"):
        assert f"{path}: a pipe, device or socket; give a checkpoint folder" in refused(tiewise(*verb, path))
