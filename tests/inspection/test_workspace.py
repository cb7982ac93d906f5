"""Texts and tokens of an inspection: standard input, held-out windows, end tokens, unusable tokenizers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats
from tests.inspection.tiny_folders import write_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.inspection.inspection import open_models
from tiewise.inspection.sections.tokens import tokens
from tiewise.inspection.workspace import Effort, Request, Workspace
from tiewise.training.data.corpus import prepare
from tiewise.training.data.tokenizer import read_tokens
from tiewise.training.folder import DATA

WORDS = [f"w{i}" for i in range(39)]
SMALL = Effort(length=2)


def write_tokenizer(folder, first=()):
    words = [*first, *WORDS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


@pytest.fixture
def subjects(tmp_path):
    folders = [write_model(tmp_path / name, rows=39, num_attention_heads=2) for name in ("a", "b")]
    return open_models([write_tokenizer(folder) for folder in folders])


def test_workspace_reads_standard_input_once_for_all_models(subjects, pipe_in):
    draw = np.random.default_rng(0)
    pipe_in("\n".join(" ".join(draw.choice(WORDS, 12)) for _ in range(30)).encode())
    workspace = Workspace(Request(texts=("-",), effort=SMALL), subjects)
    first, second = map(workspace.ids, subjects)
    assert len(first) == 360
    np.testing.assert_array_equal(first, second)


def test_workspace_counts_tokens_of_a_run_in_its_training_text(tmp_path):
    """The text has half of the words, at unequal frequencies, and an added end token."""
    folder = write_tokenizer(write_model(tmp_path / "m", rows=40, num_attention_heads=2))
    (subject,) = open_models([folder])
    draw = np.random.default_rng(0)
    text = [[f"w{min(19, int(i))}" for i in draw.geometric(0.2, 40)] for _ in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in text))
    run = tmp_path / "run"
    prepare([str(tmp_path / "text.jsonl")], str(folder), run / DATA, length=2)
    train = np.fromfile(run / DATA / "train.bin", "<u2")
    heldout = np.fromfile(run / DATA / "heldout.bin", "<u2")
    of_run = replace(subject, run=run)
    workspace = Workspace(Request(effort=SMALL), (of_run,))
    assert workspace.counts(of_run, 40).tolist() == np.bincount(train, minlength=40).tolist()
    assert workspace.counts(of_run, 30).tolist() == np.bincount(train, minlength=40)[:30].tolist()
    assert workspace.counts(of_run, 45).tolist() == np.bincount(train, minlength=45).tolist()
    assert workspace.ids(of_run).tolist() == heldout.tolist()
    found = tokens(of_run, workspace)
    by_count = stats.spearmanr(norms(of_run)[np.unique(train)], np.bincount(train)[np.unique(train)]).statistic
    assert found["norm by frequency, both ends"].value == pytest.approx(by_count, abs=1e-9)
    lacks = int((np.bincount(train, minlength=40) == 0).sum())
    assert found["rows whose token the text lacks, both ends"].value == lacks > 0
    assert found.notes[-1] == "Token counts are those of the text that the model was trained on."
    given = Workspace(Request(texts=(str(tmp_path / "text.jsonl"),), effort=SMALL), (of_run,))
    assert given.counts(of_run, 40).tolist() == np.bincount(given.ids(of_run), minlength=40).tolist()
    assert "which need not be that of training" in tokens(of_run, given).notes[-1]


def norms(subject):
    return np.linalg.norm(load_file(subject.folder.path / "model.safetensors")["model.embed_tokens.weight"], axis=1)


def test_workspace_refuses_empty_standard_input(subjects, pipe_in):
    pipe_in(b"")
    with pytest.raises(DataError, match="standard input holds no text; pipe one in"):
        Workspace(Request(texts=("-",), effort=SMALL), subjects).ids(subjects[0])


def test_workspace_stops_reading_endless_standard_input(subjects, pipe_in):
    def lines():
        while True:
            yield b"w1 w2 w3\n"

    pipe_in(lines())
    workspace = Workspace(Request(texts=("-",), effort=Effort(length=2, tokens=500)), subjects)
    assert len(workspace.ids(subjects[0])) == 500


@pytest.mark.parametrize(("longest", "length"), [(None, 4), (3, 3)])
def test_workspace_holds_out_every_fifth_window(subjects, tmp_path, longest, length):
    """Of ten windows, eight are measured and two others are held out for the lenses."""
    words = np.random.default_rng(0).choice(WORDS, 60)
    (tmp_path / "text.txt").write_text(" ".join(words))
    workspace = Workspace(Request(texts=(str(tmp_path / "text.txt"),), effort=Effort(length=4, windows=8)), subjects)
    workspace.once(("model", subjects[0].label), lambda: SimpleNamespace(longest=longest))
    ids = [WORDS.index(word) for word in words]
    cut = [ids[start : start + length] for start in range(0, 60 - length + 1, length)]
    ten = [cut[number * len(cut) // 10] for number in range(10)]
    measured, held = workspace.windows(subjects[0])
    assert measured.tolist() == ten[:4] + ten[5:9]
    assert held.tolist() == [ten[4], ten[9]]


@pytest.mark.parametrize("ends", [0, 1])
def test_read_tokens_ends_documents_only_if_the_tokenizer_has_an_end_token(ends, tmp_path):
    """An end token added to a tokenizer without one would have an id beyond the table."""
    (tmp_path / "text.txt").write_text("w0 w1 w2 " * 400)
    ids = read_tokens(write_tokenizer(tmp_path, ["</s>"] * ends), [str(tmp_path / "text.txt")], 39 + ends)
    assert ids[ids >= ends].tolist() == [ends, ends + 1, ends + 2] * 400
    assert (ids < ends).any() == ends


def test_read_tokens_accepts_strings_paths_and_a_single_text(tmp_path):
    text, folder = tmp_path / "text.txt", write_tokenizer(tmp_path)
    text.write_text("w0 w1 w2 " * 400)
    for place in (folder, str(folder)):
        for texts in (text, str(text), [text], (str(text),)):
            assert len(read_tokens(place, texts, 39)) == 1200
    with pytest.raises(DataError, match="holds no tokenizer"):
        read_tokens(str(tmp_path / "nowhere"), "builtin", 20)


def test_read_tokens_refuses_a_tokenizer_of_another_model(tmp_path):
    (tmp_path / "text.txt").write_text("w0 w1 w30 " * 400)
    with pytest.raises(DataError, match="gives token 30, the table has 20 rows"):
        read_tokens(write_tokenizer(tmp_path), [str(tmp_path / "text.txt")], 20)


def test_read_tokens_names_the_file_that_replaces_a_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{nope")
    with pytest.raises(DataError, match=r"put the model's own tokenizer\.json into its folder"):
        read_tokens(tmp_path, ["builtin"], 20)
