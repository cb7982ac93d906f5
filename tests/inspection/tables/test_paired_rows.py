"""Rows paired by token text, and CKA without frequency against dense regressions and planted tables."""

import json

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import CheckpointError, DataError
from tiewise.inspection.tables.align_tables import CKA_CURVE, CKA_LINE, align
from tiewise.inspection.tables.model_tables import Pairs, by_text, one_vocabulary, texts_of
from tiewise.inspection.tables.table_maps import CURVE, LINE, AlignSettings, directions


def list_pairs(pairs):
    return list(zip(pairs.a.tolist(), pairs.b.tolist(), strict=True))


def test_by_text_pairs_equal_texts_and_masks_leave_out_rows():
    pairs = by_text(["the", "cat", None, "sat", "the"], ["sat", "x", "the", None, "the"])
    assert (list_pairs(pairs), pairs.how) == ([(0, 2), (3, 0)], "by token text")
    pairs = by_text(["a", "b", "c", "d"], ["d", "c", "b", "a"])
    mask_a, mask_b = np.array([True, False, False, False]), np.array([False, True, False, False])
    assert list_pairs(pairs.without(mask_a, mask_b)) == [(1, 2), (3, 0)]
    assert list_pairs(one_vocabulary(3, 5)) == [(0, 0), (1, 1), (2, 2)]


def test_by_text_refuses_vocabularies_without_a_common_token():
    with pytest.raises(CheckpointError, match=r"\(2 and 1 rows\) have no token in common; give the tokenizer"):
        by_text(["a", "b"], ["c"])


def test_texts_of_reads_bpe_and_unigram_tokenizers(tmp_path):
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
    assert {one[i] for i, _ in list_pairs(by_text(one, other))} == {"a", "c", "<s>"}
    assert texts_of(tmp_path / "bpe", 2) == ["a", "b"]


def test_texts_of_refuses_unusable_files_and_reads_a_sentencepiece_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for file, content, said in (
        ("vocab", b"", r"no tokenizer\.json"),
        ("spiece.model", b"\x0a\x03\x0a\x01a", "SentencePiece"),
        ("tokenizer.json", b"{", "JSON"),
    ):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            texts_of(tmp_path, 3)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01b\x0a\x05\x0a\x03\xe2\x96\x81")
    assert texts_of(tmp_path, 3) == ["b", "▁", None]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert texts_of(tmp_path, 2) == ["a", None]


QUICK = AlignSettings(permutations=0, neighbours=0, subspaces=(4,))
ROWS = 900


def gaussian(seed, d=10, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, d))


def zipf_counts(rows=ROWS, seed=7):
    """Return counts like those of a text, in random order: few frequent, many rare, some zero."""
    drawn = np.random.default_rng(seed).zipf(1.4, 30_000)
    return np.random.default_rng(seed + 1).permutation(np.bincount(drawn[drawn <= rows], minlength=rows + 1)[1:])


def dense_cka(a, b, counts, powers):
    """Return CKA and its chance level from token kernels, after regressing every column."""
    f = np.log(counts + 1.0)
    x = np.column_stack([f**power for power in range(powers + 1)])
    a, b = (t - x @ scipy.linalg.lstsq(x, t)[0] for t in (a, b))
    ka, kb = a @ a.T, b @ b.T
    norms = np.linalg.norm(ka) * np.linalg.norm(kb)
    degrees = len(a) - 1 - powers
    return (ka * kb).sum() / norms, np.trace(ka) * np.trace(kb) / degrees / norms


def cka_without_frequency(a, b, counts, powers):
    """Return CKA without frequency and the shares of A and of B that the regression removed."""
    found = align(a, b, one_vocabulary(len(a), len(b)), QUICK, counts=counts)
    measure = CKA_LINE if powers == LINE else CKA_CURVE
    return found.score(measure), *found.taken_out[measure]


@pytest.mark.parametrize("powers", [LINE, CURVE])
@pytest.mark.parametrize("piece", [2**30, 64 * 40])
def test_cka_without_frequency_matches_a_dense_regression(powers, piece, monkeypatch):
    # the small value sums over many pieces
    monkeypatch.setattr("tiewise.inspection.tables.table_maps.CHUNK_BYTES", piece)
    counts = zipf_counts()
    shape = np.log1p(counts)[:, None] * gaussian(3, 10, 1) + np.sqrt(counts)[:, None] * gaussian(4, 10, 1)
    a, b = gaussian(0) + shape + 5, (gaussian(0) + 2 * gaussian(1) + shape)[:, :7] - 3
    found, share_a, _ = cka_without_frequency(a, b, counts, powers)
    assert (found.estimate.value, found.chance) == pytest.approx(dense_cka(a, b, counts, powers), abs=1e-10)
    centred = a - a.mean(0)
    f = np.column_stack([np.log(counts + 1.0) ** power for power in range(powers + 1)])
    left = np.square(a - f @ scipy.linalg.lstsq(f, a)[0]).sum() / np.square(centred).sum()
    assert share_a == pytest.approx(1 - left, abs=1e-10)


def test_cka_without_frequency_uses_the_paired_rows():
    a, b, counts = gaussian(0), gaussian(0) + gaussian(1), zipf_counts()
    first, second = np.random.default_rng(2).permutation(ROWS)[:300], np.random.default_rng(3).permutation(ROWS)[:300]
    found = align(a, b, Pairs(first, second, "by token text"), QUICK, counts=counts[first]).score(CKA_CURVE)
    assert found.estimate.value == pytest.approx(dense_cka(a[first], b[second], counts[first], CURVE)[0], abs=1e-10)


def test_cka_chance_matches_the_mean_over_unrelated_tables():
    counts = zipf_counts(rows=60)
    found = [
        cka_without_frequency(gaussian(2 * s, 6, 60), gaussian(2 * s + 1, 6, 60), counts, CURVE)[0] for s in range(300)
    ]
    apart = np.array([cka.estimate.value - cka.chance for cka in found])
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(len(apart))
    # such an error would be detected
    assert np.mean([cka.chance for cka in found]) * 3 / 60 > 4 * apart.std() / np.sqrt(len(apart)) / 2


def test_cka_without_frequency_is_zero_for_a_function_of_frequency():
    counts = zipf_counts()
    a = np.outer(np.log1p(counts), gaussian(0, 10, 1)) + 4
    found = align(a + 0, gaussian(1), one_vocabulary(ROWS, ROWS), AlignSettings(maps=("identity",)), counts=counts)
    assert [found.score(measure).estimate.value for measure in (CKA_LINE, CKA_CURVE)] == [0.0, 0.0]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_directions_are_orthonormal_centred_and_span_the_powers(counts):
    q = directions(counts)
    assert q.shape[1] <= min(CURVE, len(set(counts)) - 1)
    np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=1e-12)
    np.testing.assert_allclose(q.sum(0), 0, atol=1e-12)
    if q.shape[1]:
        f = np.log1p(np.array(counts, float))
        rounding = 1e-14 * f.max() / np.ptp(f) * len(f)  # of log(count + 1), if all counts are nearly equal
        f -= f.mean()
        np.testing.assert_allclose(np.abs(q[:, 0]), np.abs(f) / np.linalg.norm(f), atol=1e-12 + rounding)


def test_directions_drop_out_if_counts_take_too_few_values():
    assert directions(np.full(30, 4)).shape == (30, 0)
    assert directions([0] * 20 + [9] * 20).shape == (40, 1)
    assert directions([0] * 20 + [9] * 20 + [50]).shape == (41, 2)
    for counts in (np.ones(ROWS), None):
        assert align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK, counts=counts).taken_out == {}


def test_directions_and_align_refuse_invalid_counts():
    for counts in ([-1, 2, 3], [1.0, np.nan, 2], np.ones((3, 2))):
        with pytest.raises(DataError, match="counts of tokens must be one number of 0 or more"):
            directions(counts)
    with pytest.raises(DataError, match=r"counts of shape \[3\] for 900 pairs"):
        align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK, counts=[1, 2, 3])
