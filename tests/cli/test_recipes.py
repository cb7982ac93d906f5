"""Test recipes on the command line: runs, published figures, pretrained vectors, and sharings with boundaries."""

import json
import random

import pytest
import torch
import yaml
from cli_tiny import assert_refused
from safetensors.torch import load_file
from tokenizers import Tokenizer

TINY = ("--set=width=8", "--set=batch=2", "--set=length=4", "--set=epochs=1")


@pytest.fixture
def vectors(tmp_path):
    """Return a function that writes a file of vectors whose numbers encode word and column."""

    def write(name, width):
        rows = [f"{word} {' '.join(f'{i}.{column}' for column in range(width))}\n" for i, word in enumerate("abc", 1)]
        (tmp_path / name).write_text("".join(rows))
        return name

    return write


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in (("train", "a b c d\n" * 12), ("valid", "a b x d\n" * 3), ("test", "b c d y\n" * 3)):
        (folder / f"{name}.txt").write_text(text)
    return "corpus"


def test_recipe_run_reports_unknown_words_and_writes_tokenizer(tiewise, corpus, tmp_path):
    said = tiewise("train", "--recipe", "pytorch-200", corpus, "--boundary", "untied", *TINY, "-o", "out")
    assert said.code == 0
    assert "<unk>" in said.err
    assert "20.00% of tune, 20.00% of heldout" in said.err
    assert "No published figure is known for pytorch-200 with width=8" in " ".join(said.out.split())
    assert (tmp_path / "out" / "untied" / "seed-1" / "final" / "tokenizer.json").is_file()


def trained_tensors(folder):
    return load_file(next((folder / "out").glob("*/seed-1/final/model.safetensors")))


@pytest.mark.parametrize("freeze", ["", "+freeze"])
def test_recipe_trains_pretrained_vectors_unless_frozen(freeze, tiewise, corpus, vectors, tmp_path, caplog):
    boundary = f"tied+vectors={vectors('eight', 8)}{freeze}"
    said = tiewise("train", "--recipe", "pytorch-200", corpus, "--boundary", boundary, *TINY, "-o", "out")
    assert said.code == 0
    (line,) = [line for line in caplog.messages if "no vector" in line]  # one message, though the file is read twice
    assert "eight (GloVe text): 3 of 6 words have no vector and start at random: " in line
    assert set(line.rpartition(": ")[2].split(", ")) == {"d", "<eos>", "<unk>"}
    tokenizer = Tokenizer.from_file(str(next(tmp_path.rglob("final/tokenizer.json"))))
    rows = trained_tensors(tmp_path)["embed.weight"][[tokenizer.token_to_id(word) for word in "abc"]]
    written = torch.tensor([[float(f"{i}.{column}") for column in range(8)] for i in (1, 2, 3)])
    assert torch.equal(rows, written) == bool(freeze)


def test_width_of_vectors_changes_only_shapes_of_table_and_maps(tiewise, corpus, vectors, tmp_path):
    shapes = {}
    for width in (300, 50):
        boundary = f"projected:{width}+vectors={vectors(f'{width}.txt', width)}"
        said = tiewise("train", "--recipe", "pytorch-200", corpus, "--boundary", boundary, *TINY, "-o", f"{width}/out")
        assert said.code == 0
        shapes[width] = {name: tuple(tensor.shape) for name, tensor in trained_tensors(tmp_path / str(width)).items()}
    assert shapes[300].keys() == shapes[50].keys()
    differing = {name for name in shapes[300] if shapes[300][name] != shapes[50][name]}
    assert {name for name in differing if "_map" in name} == {"embed.in_map.weight", "head.out_map.weight"}
    assert {name for name in differing if "_map" not in name} == {"embed.weight"}
    assert shapes[50]["embed.in_map.weight"] == (8, 50)
    assert shapes[50]["head.out_map.weight"] == (50, 8)


@pytest.mark.parametrize(
    ("boundary", "said"),
    [
        ("tied+vectors=five.txt", "vectors (6, 5) do not fit the table (6, 8); use factored:5"),
        (
            "tied+vectors=nine.txt",
            "vectors (6, 9) do not fit the table (6, 8); use factored:9 or, beyond the model's width, projected:9",
        ),
        ("tied+vectors=absent.txt", "absent.txt: no such file"),
    ],
)
def test_train_refuses_missing_or_misfit_vectors_with_one_line(boundary, said, tiewise, corpus, vectors):
    vectors("five.txt", 5)
    vectors("nine.txt", 9)
    assert_refused(
        tiewise("train", "--recipe", "pytorch-200", corpus, "--boundary", boundary, *TINY, "-o", "out"), said
    )


def test_compare_recipe_trains_arms_of_paper_and_writes_report(tiewise, corpus, tmp_path):
    said = tiewise("compare", "--recipe", "press-wolf-small", corpus, *TINY, "--seeds", "1", "-o", "out", "--json")
    assert said.code == 0
    record = json.loads(said.out)
    assert record["arms"] == ["untied", "tied", "projected:untied,decay=0.0076923", "projected:decay=0.0076923"]
    assert record["setting"]["recipe"] == "press-wolf-small"
    assert "width=8" in record["setting"]["changed"]
    assert "Published figures" in (tmp_path / "out" / "report.html").read_text()


@pytest.fixture
def albert(tiewise, tmp_path):
    """Return a function that runs `compare` or `train` on an ALBERT that trains for a second."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=3)) for _ in range(40)]
    rows = [" ".join(" ".join(draw.choices(words, k=4)).capitalize() + "." for _ in range(8)) for _ in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    sizes = ("width=16", "layers=2", "heads=2", "length=24", "batch=4", "measured=480")
    tiny = [*(f"--set={item}" for item in sizes), "--steps=6", "--tokenizer=bpe:300", "--out=run"]
    return lambda command, *more: tiewise(command, "--recipe=albert-small", "--text=text.jsonl", *tiny, *more)


def test_compare_trains_every_sharing_with_every_boundary(albert, tmp_path):
    said = albert("compare", "--share=none,all:groups=2+rank=2", "--boundary=factored:8,tied", "--seeds=1", "--json")
    assert said.code == 0
    arms = [f"{end}+share={share}" for end in ("factored:8", "tied") for share in ("none", "all:groups=2+rank=2")]
    record = json.loads(said.out)
    assert [run["arm"] for run in record["runs"]] == record["arms"] == arms
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["arms"] == arms
    sizes = [run["total_parameters"] for run in record["runs"]]
    assert sizes[0] < sizes[2]


def test_train_share_keeps_boundary_of_recipe(albert, tmp_path):
    assert albert("train", "--share=ffn").code == 0
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["arms"] == ["factored:64+share=ffn"]
