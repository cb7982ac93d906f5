"""Tests of word-level corpora against a plain count in Python."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from tiewise.core.errors import DataError
from tiewise.training.data.corpus import load_prepared
from tiewise.training.data.word_corpus import prepare_words, read_words, unknown_share, word_files

TRAIN = " the cat sat \n\n the <unk> sat on the mat \n"
VALID = "the dog sat\n"
TEST = "a cat ate a mat"  # no line end


def write_corpus(folder, train, valid, test):
    folder.mkdir(exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", TRAIN, VALID, TEST)


def reference_words(text):
    """Return the words and an <eos> for every line, as the word_language_model example counts them."""
    return [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]


def test_prepare_words_matches_plain_count_and_reports_unknown_words(corpus, tmp_path):
    text = prepare_words(str(corpus), tmp_path / "out")
    names, facts = text.tokenizer.convert_ids_to_tokens, text.facts
    assert names(text.split("train").tolist()) == reference_words(TRAIN)
    assert names(text.split("tune").tolist()) == ["the", "<unk>", "sat", "<eos>"]
    assert names(text.split("heldout").tolist()) == ["<unk>", "cat", "<unk>", "<unk>", "mat", "<eos>"]
    assert text.vocab == len(set(reference_words(TRAIN))) == 7
    # most frequent first; both occur three times, and "the" comes first in the text
    assert names([0, 1]) == ["the", "<eos>"]
    assert facts == load_prepared(tmp_path / "out").facts
    assert unknown_share(facts, "train") == 0  # an <unk> in the file counts as a word
    assert unknown_share(facts, "tune") == 1 / 4
    found = facts["splits"]["heldout"]
    assert [found[key] for key in ("unknown", "unknown_words", "characters")] == [3, 2, len(TEST) + 1]
    assert facts["splits"]["train"]["characters"] == len("the cat sat\n\nthe <unk> sat on the mat\n")


def test_prepare_words_adds_unk_when_training_file_lacks_it(tmp_path):
    text = prepare_words(str(write_corpus(tmp_path, "b a b\n", "c\n", "c\n")), tmp_path / "out")
    assert text.vocab == 4
    assert text.split("tune").tolist() == [3, text.eos_id]


def test_saved_word_tokenizer_gives_same_ids(corpus, tmp_path):
    text = prepare_words(str(corpus), tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(str(text.folder / "tokenizer"))
    assert saved.encode(TRAIN) == text.split("train").tolist()
    assert saved.encode(VALID) == text.split("tune").tolist()
    assert saved.unk_token == "<unk>"
    assert saved.eos_token_id == text.eos_id


def test_prepare_words_handles_many_lines_and_four_byte_ids(tmp_path):
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in row) for row in rng.integers(0, 90_000, (30_000, 5))]
    text = prepare_words(str(write_corpus(tmp_path, "\n".join(rows) + "\n", "w1\n", "w1\n")), tmp_path / "out")
    assert text.vocab > 1 << 16
    ids = text.split("train")
    assert len(ids) == 30_000 * 6
    assert text.tokenizer.convert_ids_to_tokens(ids[-6:].tolist()) == reference_words(rows[-1])


def test_word_files_divides_one_file_into_disjoint_parts(tmp_path):
    rows = [f"w{i}" for i in range(37)]
    write_corpus(tmp_path, "", "\n".join(rows) + "\n", "w1\n")
    first, last, _ = word_files(str(tmp_path), ("valid.txt@0-90", "valid.txt@90-100", "test.txt"))
    assert [line[0] for part in (first, last) for line in read_words(part)] == rows
    assert len(list(read_words(last))) == 37 - 33
    middle, *_ = word_files(str(tmp_path), ("valid.txt@10-20", "valid.txt", "test.txt"))
    assert [line[0] for line in read_words(middle)] == rows[3:7]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "has no train.txt"),
        (("valid.txt", "test.txt"), "2 files"),
        (("valid.txt@90-10", "valid.txt", "test.txt"), "empty part"),
        *(((wrong, "valid.txt", "test.txt"), "no part of a file") for wrong in ("valid.txt@x", "valid.txt@")),
        (("empty.txt", "valid.txt", "test.txt"), "no words"),
        (("valid.txt", "valid.txt@0-1", "test.txt"), "no words"),
        (("binary.txt", "valid.txt", "test.txt"), "binary file"),
        (("valid.txt", "test.txt", "blank.txt"), "no words"),
    ],
)
def test_prepare_words_refuses_unusable_files_and_writes_nothing(files, said, corpus, tmp_path):
    (corpus / "train.txt").unlink()
    (corpus / "empty.txt").write_text("")
    (corpus / "blank.txt").write_text("\n")  # its only token is the line end
    (corpus / "binary.txt").write_bytes(b"a\0b")
    for folder, match in ((corpus, said), (tmp_path / "nothing", "no corpus folder")):
        with pytest.raises(DataError, match=match) as refused:
            prepare_words(str(folder), tmp_path / "out", files)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out" / "data.json").exists()
