"""The text of an inspection: one standard input for several models, end tokens, tokenizers that cannot be read."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tests.inspection.tiny_folders import write_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.data.tokenizer import read_tokens
from tiewise.inspection.bench import Bench, Effort, Request
from tiewise.inspection.inspection import subjects_of

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
    return subjects_of([write_tokenizer(folder) for folder in folders])


def standard_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))


def test_standard_input_is_read_once_for_all_models(subjects, monkeypatch):
    draw = np.random.default_rng(0)
    standard_input(monkeypatch, "\n".join(" ".join(draw.choice(WORDS, 12)) for _ in range(30)))
    bench = Bench(Request(texts=("-",), effort=SMALL), subjects)
    first, second = map(bench.ids, subjects)
    assert len(first) == 360
    np.testing.assert_array_equal(first, second)


def test_empty_standard_input_is_one_line(subjects, monkeypatch):
    standard_input(monkeypatch, "")
    with pytest.raises(DataError, match="standard input holds no text; pipe one in"):
        Bench(Request(texts=("-",), effort=SMALL), subjects).ids(subjects[0])


def test_an_endless_standard_input_ends(subjects, monkeypatch):
    def lines():
        while True:
            yield b"w1 w2 w3\n"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines()))
    bench = Bench(Request(texts=("-",), effort=Effort(length=2, tokens=500)), subjects)
    assert len(bench.ids(subjects[0])) == 500


@pytest.mark.parametrize(("longest", "length"), [(None, 4), (3, 3)])
def test_every_fifth_window_is_held_out(subjects, tmp_path, longest, length):
    """Ten windows: eight to measure on and two for the lenses, which none of the others is."""
    words = np.random.default_rng(0).choice(WORDS, 60)
    (tmp_path / "text.txt").write_text(" ".join(words))
    bench = Bench(Request(texts=(str(tmp_path / "text.txt"),), effort=Effort(length=4, windows=8)), subjects)
    bench.once(("model", subjects[0].label), lambda: SimpleNamespace(longest=longest))
    ids = [WORDS.index(word) for word in words]
    cut = [ids[start : start + length] for start in range(0, 60 - length + 1, length)]
    ten = [cut[number * len(cut) // 10] for number in range(10)]
    measured, held = bench.windows(subjects[0])
    assert measured.tolist() == ten[:4] + ten[5:9]
    assert held.tolist() == [ten[4], ten[9]]


@pytest.mark.parametrize("ends", [0, 1])
def test_documents_are_ended_where_the_tokenizer_has_an_end_token(ends, tmp_path):
    """Without one it would be given one beyond the table, which is no fault of the text's or the model's."""
    (tmp_path / "text.txt").write_text("w0 w1 w2 " * 400)
    ids = read_tokens(write_tokenizer(tmp_path, ["</s>"] * ends), [str(tmp_path / "text.txt")], 39 + ends)
    assert ids[ids >= ends].tolist() == [ends, ends + 1, ends + 2] * 400
    assert (ids < ends).any() == ends


def test_paths_are_texts_or_paths_and_one_text_needs_no_list(tmp_path):
    text, folder = tmp_path / "text.txt", write_tokenizer(tmp_path)
    text.write_text("w0 w1 w2 " * 400)
    for place in (folder, str(folder)):
        for texts in (text, str(text), [text], (str(text),)):
            assert len(read_tokens(place, texts, 39)) == 1200
    with pytest.raises(DataError, match="holds no tokenizer"):
        read_tokens(str(tmp_path / "nowhere"), "builtin", 20)


def test_another_models_tokenizer_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("w0 w1 w30 " * 400)
    with pytest.raises(DataError, match="gives token 30, the table has 20 rows"):
        read_tokens(write_tokenizer(tmp_path), [str(tmp_path / "text.txt")], 20)


def test_a_damaged_tokenizer_says_what_to_put_there(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{nope")
    with pytest.raises(DataError, match=r"put the model's own tokenizer\.json beside its weights"):
        read_tokens(tmp_path, ["builtin"], 20)
