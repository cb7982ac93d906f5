"""Tests of sentence and word boundaries in known texts for three kinds of tokenizer."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.training.data.sentence_pairs import Vocabulary, find_sentences
from tiewise.training.data.tokenizer import make_tokenizer

DOCUMENTS = [
    [
        "“Well,” said Mr. Pickwick, “that is it.”",
        "J. Smith came at 5.30 p.m. sharp!",
        "He said no… and left.",
        "Was it I?",
        "It was I.",
        "(So it was.)",
        "Chapter One",
        "“Go!” he cried, and went.",
    ],
    ["One alone, e.g. this."],
    ["First – with é.", "Second here.", "Third."],
]
JOINTS = [" ", "\n", " ", "  ", "\n", "\n \n", "\n\n"]
TEXTS = ["\n" + "".join(s + j for s, j in zip(d, [*JOINTS[: len(d) - 1], ""], strict=True)) + "\n\n" for d in DOCUMENTS]


def make_vocabulary(kind):
    tokenizer = make_tokenizer(kind, lambda: iter(TEXTS * 3))
    return tokenizer, Vocabulary.of(tokenizer, len(tokenizer))


@pytest.mark.parametrize("kind", ["bpe:300", "bpe:600", "bytes"])
def test_find_sentences_splits_documents_into_sentences(kind):
    tokenizer, vocabulary = make_vocabulary(kind)
    eos = tokenizer.eos_token_id
    tokens = np.concatenate([[*tokenizer(t, add_special_tokens=False)["input_ids"], eos] for t in TEXTS])
    found = find_sentences(tokens, vocabulary, eos)
    said = [tokenizer.decode(found.between(i, i + 1)).strip() for i in range(len(found))]
    assert said == [sentence for document in DOCUMENTS for sentence in document]
    assert found.documents.tolist() == [0, 8, 9, 12]
    assert eos not in [t for s, e in zip(found.starts, found.ends, strict=True) for t in tokens[s:e]]


def test_vocabulary_marks_word_starts_and_find_sentences_skips_blank_documents():
    tokenizer, vocabulary = make_vocabulary("bytes")
    starts = vocabulary.word_starts(np.array(tokenizer("I can't, né?")["input_ids"]))
    assert np.flatnonzero(starts).tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 12]
    eos, words = tokenizer.eos_token_id, tokenizer("Some words.")["input_ids"]
    blank = tokenizer(" \n\n ")["input_ids"]
    found = find_sentences(np.array([eos, *words, eos, *blank, eos, eos, *words]), vocabulary, eos)
    assert len(found) == 2
    assert found.documents.tolist() == [0, 1, 2]
    assert len(find_sentences(np.array([], int), vocabulary, eos)) == 0


def test_vocabulary_reads_wordpiece_tokens():
    pieces = ["[UNK]", "a", "##b", "c", ".", "D"]
    engine = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    vocabulary = Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=engine, unk_token="[UNK]"), 7)
    assert vocabulary.pieces == (b"", b" a", b"b", b" c", b" .", b" D", b"")
    assert vocabulary.word_starts(np.array([1, 2, 3, 4, 5])).tolist() == [True, False, True, True, True]
    found = find_sentences(np.array([1, 2, 3, 4, 5, 3, 4]), vocabulary, eos=99)
    assert found.starts.tolist() == [0, 4]


def test_vocabulary_reads_sentencepiece_byte_tokens_as_bytes():
    """Llama 2 writes line ends and letters without a token, such as é, as byte tokens."""
    pieces = ["<unk>", "▁a", "b", ".", "<0x0A>", "<0xC3>", "<0xA9>"]
    engine = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    vocabulary = Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=engine, unk_token="<unk>"), 7)
    assert vocabulary.pieces == (b"", b" a", b"b", b".", b"\n", b"\xc3", b"\xa9")
    assert vocabulary.word_starts(np.array([1, 5, 6, 2, 3])).tolist() == [True, False, False, False, True]
    found = find_sentences(np.array([1, 2, 4, 4, 1, 3]), vocabulary, eos=99)  # a blank line separates two sentences
    assert found.starts.tolist() == [0, 4]


def test_vocabulary_maps_tokens_to_variant_with_leading_space():
    tokenizer, vocabulary = make_vocabulary("bpe:600")
    names = tokenizer.get_vocab()
    pairs = [(i, names[f"Ġ{name}"]) for name, i in names.items() if f"Ġ{name}" in names]
    assert len(pairs) > 5
    assert all(vocabulary.spaced[plain] == spaced for plain, spaced in pairs)
    rest = set(range(len(tokenizer))) - {plain for plain, _ in pairs}
    assert all(vocabulary.spaced[i] == i for i in rest)
