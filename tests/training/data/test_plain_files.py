"""Tests that preparing a plain file keeps its characters, its tokens and a single end token."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tiewise.core.text import cut_pieces
from tiewise.training.data.corpus import prepare
from tiewise.training.data.tokenizer import read_tokens

SPLITS = ("train", "tune", "heldout")


def book(paragraphs=900):
    """Return a text of distinct paragraphs with indented lines and varying numbers of blank lines."""
    draw = random.Random(3)
    words = ["war", "peace", "prince", "said", "the", "and", "of", "in", "1812", "don't", "l'Empereur", "é", "—"]
    text = "\n \n\n"
    for i in range(paragraphs):
        lines = (" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(draw.randint(1, 5)))
        text += f"Of {i}. " + "\n  ".join(lines) + draw.choice(["\n\n", "\n\n\n", "\n \t\n", "  \n\n\n\n"])
    return text + "\n"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "book.txt").write_text(book(), encoding="utf-8")
    return tmp_path / "book.txt"


def decoded(prepared, name):
    ids = prepared.split(name)
    assert (ids == prepared.eos_id).tolist() == [False] * (len(ids) - 1) + [True]
    return prepared.tokenizer.decode(ids[:-1].tolist())


@pytest.mark.parametrize("kind", ["bytes", "bpe:600"])
def test_contiguous_splits_concatenate_to_file(kind, file, tmp_path):
    prepared = prepare([str(file)], kind, tmp_path / "data", length=8, split="contiguous")
    assert "".join(decoded(prepared, name) for name in SPLITS) == book()
    shares = [prepared.facts["splits"][name]["characters"] / len(book()) for name in SPLITS]
    np.testing.assert_allclose(shares, (0.88, 0.04, 0.08), atol=0.012)  # the file is split in parts of one hundredth
    assert [prepared.facts["splits"][name]["documents"] for name in SPLITS] == [1, 1, 1]


def test_random_splits_keep_every_character_once_and_end_once(file, tmp_path):
    prepared = prepare([str(file)], "bytes", tmp_path / "data", length=8)
    texts = {name: decoded(prepared, name) for name in SPLITS}
    assert sorted("".join(texts.values())) == sorted(book())
    assert prepared.facts["dropped_paragraphs"] == 0
    held = [part for part in texts["heldout"].split("Of ") if part]
    at = sorted(book().index("Of " + part) for part in held)
    assert at[0] < 0.3 * len(book())  # held-out parts are spread between training parts
    assert at[-1] > 0.6 * len(book())


def test_prepare_drops_repeated_paragraph_with_preceding_blank_lines_only(tmp_path):
    once = [f"Paragraph {i} stands alone.\n\n\n" for i in range(60)]
    (tmp_path / "a.txt").write_text("".join(f"{p}Chapter\n\n\n" if i % 2 else p for i, p in enumerate(once)))
    prepared = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "data", length=4, split="contiguous")
    assert prepared.facts["dropped_paragraphs"] == 29
    kept = "".join([*once[:2], "Chapter\n\n\n", *once[2:]])
    assert "".join(decoded(prepared, name) for name in SPLITS) == kept


def test_each_file_ends_once_in_every_split_with_its_text(file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Another text, of one part.")
    texts = [str(file), str(other), str(file)]  # the second copy has no new paragraph
    prepared = prepare(texts, "bytes", tmp_path / "data", length=8)
    ends = {name: int((prepared.split(name) == prepared.eos_id).sum()) for name in SPLITS}
    assert ends == {name: prepared.facts["splits"][name]["documents"] for name in SPLITS}
    assert (sum(ends.values()), prepared.facts["documents"]) == (4, 2)


def tokenizer(kind):
    if kind == "bytes":
        engine = Tokenizer(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        # pairs of newlines are tokens, so a cut after a blank line would change the ids
        engine.train_from_iterator([book(), *["\n\n", "\n\n\n"] * 500], trainer)
        return engine
    letters = [(c, -5.0) for c in "▁abcdefghijklmnopqrstuvwxyz\n.'"]
    engine = Tokenizer(models.Unigram([("<unk>", 0.0), *letters, ("▁and", -2.0), ("▁▁", -3.0)], 0))
    if kind == "metaspace":
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:  # as in Llama 2
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return engine


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "prepended"])
def test_read_tokens_of_long_file_matches_encoding_of_whole_text(kind, tmp_path):
    text = book(3000)
    assert len(text) > 100_000  # several parts and several pieces
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    engine = tokenizer(kind)
    engine.save(str(tmp_path / "tokenizer.json"))
    expected = engine.encode(text, add_special_tokens=False).ids
    assert read_tokens(tmp_path, [str(tmp_path / "long.txt")], engine.get_vocab_size()).tolist() == expected


def test_cut_pieces_keeps_text_and_limits_length():
    texts = [("a b " * 40_000, False), ("c\n" * 70_000, False), ("日本" * 90_000, True), ("", True), ("end", True)]
    found = list(cut_pieces(texts))
    documents = "".join(text + "\0" * ends for text, ends in found)
    assert documents == "".join(text + "\0" * ends for text, ends in texts)
    assert max(len(text) for text, _ in found) <= 1 << 16
