"""Rows are matched by text: two lists, tokenizer files, what neither names, and what is left out."""

import json

import numpy as np
import pytest

from tiewise.analysis.row_pairs import by_text, one_vocabulary, texts_of
from tiewise.core.errors import CheckpointError


def listed(pairs):
    return list(zip(pairs.a.tolist(), pairs.b.tolist(), strict=True))


def test_texts_are_matched_wherever_they_stand():
    pairs = by_text(["the", "cat", None, "sat", "the"], ["sat", "x", "the", None, "the"])
    assert listed(pairs) == [(0, 2), (3, 0)]
    assert pairs.how == "by token text"


def test_masks_leave_out_rows_of_either_table():
    pairs = by_text(["a", "b", "c", "d"], ["d", "c", "b", "a"])
    mask_a, mask_b = np.array([True, False, False, False]), np.array([False, True, False, False])
    assert listed(pairs.without(mask_a, mask_b)) == [(1, 2), (3, 0)]
    assert listed(one_vocabulary(3, 5)) == [(0, 0), (1, 1), (2, 2)]


def test_no_common_token_is_one_line():
    with pytest.raises(CheckpointError, match=r"\(2 and 1 rows\) have no token in common; give the tokenizer"):
        by_text(["a", "b"], ["c"])


def test_texts_of_two_real_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    kinds = {
        "bpe": tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, [])),
        "unigram": tokenizers.Tokenizer(tokenizers.models.Unigram([("c", -1.0), ("z", -2.0), ("a", -3.0)])),
    }
    for name, made in kinds.items():
        made.add_special_tokens(["<s>"])
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        made.save(str(tmp_path / name / "tokenizer.json"))
    one, other = texts_of(tmp_path / "bpe", 6), texts_of(tmp_path / "unigram", 4)
    for (name, made), texts in zip(kinds.items(), (one, other), strict=True):
        assert texts == [made.id_to_token(i) for i in range(len(texts))], name
    assert {one[i] for i, _ in listed(by_text(one, other))} == {"a", "c", "<s>"}
    assert texts_of(tmp_path / "bpe", 2) == ["a", "b"]


def test_tokenizer_files_that_hold_no_texts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        texts_of(tmp_path, 3)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01a")
    with pytest.raises(CheckpointError, match="SentencePiece"):
        texts_of(tmp_path, 3)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        texts_of(tmp_path, 3)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert texts_of(tmp_path, 2) == ["a", None]
