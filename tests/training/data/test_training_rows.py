"""Tests of training rows: blocks, segment pairs and masks, checked on sentences with known tokens."""

import numpy as np
import pytest
import torch

from tiewise.core.errors import DataError
from tiewise.training.data.corpus import Blocks
from tiewise.training.data.sentence_pairs import Packing, Sentences, Vocabulary, make_pairs
from tiewise.training.data.training_rows import IGNORED, Masking, PairRows, apply_mask, choose_masked


def random_sentences(documents=30, most=12, longest=9, seed=0, least=1):
    """Return sentences of random length whose tokens are the number of the sentence plus 10."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(least, most + 1, documents)
    lengths = draw.integers(1, longest + 1, counts.sum())
    tokens = np.repeat(np.arange(len(lengths)) + 10, lengths)
    ends = np.cumsum(lengths)
    return Sentences(words(len(lengths) + 10), tokens, ends - lengths, ends, np.concatenate([[0], np.cumsum(counts)]))


def words(vocab):
    """Return a vocabulary of marks 0 … 3, followed by tokens that each are one word."""
    pieces = tuple(b"" if i < 4 else b" t%d" % i for i in range(vocab))
    flags = np.zeros(vocab, bool)
    return Vocabulary(pieces, flags, flags, np.arange(vocab), (0, 1, 2, 3))


def pair_rows(sentences, packing, seed=1, **options):
    return PairRows(sentences, packing, Masking(), seed=seed, **options)


def document_of(sentences, token):
    return int(np.searchsorted(sentences.documents, token - 10, side="right")) - 1


def is_contiguous(*segments):
    """Return whether the sentence numbers of the tokens increase by at most one across the segments."""
    return bool((np.diff(np.concatenate(segments)) <= 1).all() and (np.diff(np.concatenate(segments)) >= 0).all())


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_pair_labels_match_order_and_origin_of_segments(objective, length):
    sentences = random_sentences()
    data = pair_rows(sentences, Packing(length, objective))
    torn = 0
    for i in range(len(data)):
        a, b, label = data.pair(i)
        assert min(len(a), len(b)) >= 1
        assert len(a) + len(b) <= length - 3
        same = document_of(sentences, a[0]) == document_of(sentences, b[0])
        assert all(map(is_contiguous, (a, b)))
        if label == 0 and objective == "nsp":
            assert not same
        else:
            earlier, later = (b, a) if label == 0 else (a, b)
            assert (same, is_contiguous(earlier, later)) == (True, True)
            assert earlier[-1] < later[0]
        torn += len(a) + len(b) == length - 3
    assert objective != "none" or data.pair(0)[2] is None
    assert torn > 0


@pytest.mark.parametrize("length", [60, 12])
def test_pair_rows_read_every_sentence_at_most_once_per_epoch(length):
    sentences = random_sentences(least=2, documents=60)
    data = pair_rows(sentences, Packing(length, "sop", short=0))
    counts = np.zeros(len(sentences), int)
    for i in range(len(data)):
        counts[data._pairs[i, 0] : data._pairs[i, 2]] += 1
    assert set(counts) <= {0, 1}
    for begin, stop in zip(sentences.documents[:-1], sentences.documents[1:], strict=True):
        left = np.flatnonzero(counts[begin:stop] == 0)  # packing may leave over one sentence at the end of a document
        assert left.tolist() in ([], [0], [stop - begin - 1])


@pytest.mark.parametrize("objective", ["sop", "nsp"])
def test_make_pairs_keeps_requested_share_in_order(objective):
    sentences = random_sentences(documents=400)
    for share in (0.0, 0.3, 0.5, 1.0):
        label = make_pairs(sentences, Packing(30, objective, share), np.random.default_rng(5))[:, 3]
        assert abs(label.mean() - share) <= 5 * np.sqrt(share * (1 - share) / len(label))


def test_pair_rows_produce_model_inputs_with_expected_layout():
    sentences = random_sentences()
    data = pair_rows(sentences, Packing(24, "sop"))
    for i in range(20):
        a, b, label = data.pair(i)
        row = data[i]
        assert all(value.shape == (24,) and value.dtype == torch.long for name, value in row.items() if value.dim())
        whole = torch.where(row["labels"] != -100, row["labels"], row["input_ids"])
        size = len(a) + len(b) + 3
        assert whole.tolist() == [0, *a, 1, *b, 1] + [3] * (24 - size)
        assert row["token_type_ids"].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (24 - size)
        assert row["attention_mask"].tolist() == [1] * size + [0] * (24 - size)
        assert row["pair_labels"].item() == label
        assert (row["labels"] != -100).any()


def test_pair_rows_depend_on_seed_alone_and_change_every_epoch():
    sentences = random_sentences()
    forward, backward = (pair_rows(sentences, Packing(24), count=500) for _ in range(2))
    one = [forward[i] for i in range(500)]
    other = [backward[i] for i in reversed(range(500))][::-1]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)
    ids, epoch = [tuple(row["input_ids"].tolist()) for row in one], forward.rows_per_epoch
    assert epoch < 250
    assert set(ids[:epoch]).isdisjoint(ids[epoch : 2 * epoch])
    assert tuple(pair_rows(sentences, Packing(24), seed=2)[0]["input_ids"].tolist()) != ids[0]


@pytest.mark.parametrize("objective", ["sop", "nsp"])
def test_pair_labels_are_independent_of_lengths_and_edge_tokens(objective):
    # sentences are random, so a feature that predicts the label is an artefact of making pairs
    draw = np.random.default_rng(8)
    lengths = draw.integers(1, 30, 16_000)
    ends = np.cumsum(lengths)
    tokens = draw.integers(10, 20, ends[-1])
    tokens[ends - 1], tokens[ends - lengths], tokens[:1] = 5, 6, 7  # a full stop, a capital, the first token
    sentences = Sentences(words(20), tokens, ends - lengths, ends, np.append(np.arange(0, 16_000, 8), 16_000))
    data = pair_rows(sentences, Packing(32, objective), seed=3)
    found = [data.pair(i) for i in range(len(data))]
    label = np.array([row[2] for row in found])
    features = [[a[0] for a, _, _ in found], [b[0] for _, b, _ in found]]
    features += [[a[-1] for a, _, _ in found], [b[-1] for _, b, _ in found]]
    if objective == "sop":  # nsp pairs differ slightly in length: see docs/albert.md
        features += [[np.sign(len(a) - len(b)) for a, b, _ in found], [len(a) + len(b) == 29 for a, b, _ in found]]
    for values in map(np.array, features):
        for value in set(values.tolist()):
            of_it = label[values == value]
            assert abs(of_it.mean() - label.mean()) < 5 * 0.5 / np.sqrt(len(of_it)), value


def test_pair_rows_refuse_texts_without_pairs():
    with pytest.raises(DataError, match="no document has two sentences"):
        pair_rows(random_sentences(most=1), Packing())
    with pytest.raises(DataError, match="nsp in one document"):
        pair_rows(random_sentences(documents=1, least=4), Packing(objective="nsp"))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((Packing, wrong) for wrong in ({"objective": "order"}, {"length": 4}, {"in_order": 1.5}, {"short": -1})),
        *((Masking, wrong) for wrong in ({"share": 0}, {"share": 1.1}, {"longest": 0}, {"random": np.nan})),
        (Masking, {"masked": 0.8, "random": 0.3}),
    ],
)
def test_packing_and_masking_refuse_invalid_values(kind, wrong):
    with pytest.raises(DataError):
        kind(**wrong)


# masks


def is_near_share(found, expected, count, sigmas=5):
    """Return whether a share of `count` draws is within `sigmas` standard deviations of `expected`."""
    return abs(found - expected) < sigmas * np.sqrt(max(expected * (1 - expected), 1e-9) / count)


def test_apply_mask_replaces_chosen_inputs_80_10_10():
    draw, options = np.random.default_rng(1), Masking()
    ids = draw.integers(4, 1000, 200_000)
    chosen = np.zeros(len(ids), bool)
    chosen[::3] = True
    inputs, labels = apply_mask(ids, chosen, 2, np.arange(4, 1000), options, draw)
    assert np.array_equal(inputs[~chosen], ids[~chosen])
    assert np.array_equal(labels, np.where(chosen, ids, IGNORED))
    masked, same = inputs[chosen] == 2, inputs[chosen] == ids[chosen]
    count, by_chance = chosen.sum(), 0.1 / 996
    assert is_near_share(masked.mean(), 0.8, count)
    assert is_near_share(same.mean(), 0.1 + by_chance, count)
    others = inputs[chosen][~masked & ~same]
    assert is_near_share(len(others) / count, 0.1 - by_chance, count)
    spread = np.bincount(others, minlength=1000)[4:]
    assert others.min() >= 4
    # for uniform draws the variance of a count is its mean
    assert (spread - spread.mean()).std() < 1.3 * np.sqrt(spread.mean())


@pytest.mark.parametrize(("masked", "random", "expected"), [(1, 0, "mask"), (0, 0, "same"), (0, 1, "random")])
def test_apply_mask_obeys_shares_of_zero_and_one(masked, random, expected):
    ids = np.arange(100, 1100)
    options = Masking(masked=masked, random=random)
    inputs, _ = apply_mask(ids, np.ones(1000, bool), 2, 50, options, np.random.default_rng(0))
    assert {"mask": (inputs == 2).all(), "same": (inputs == ids).all(), "random": (inputs < 50).all()}[expected]


@pytest.mark.parametrize("whole", [True, False])
def test_choose_masked_selects_requested_share_of_whole_words(whole):
    draw = np.random.default_rng(2)
    total = taken = 0
    for _ in range(300):
        begins = draw.random(120) < (0.6 if whole else 1)
        begins[[1, 61]] = True
        words = np.cumsum(begins)
        words[[0, 60, 119]] = -1
        chosen = choose_masked(words, Masking(), draw)
        assert not chosen[words < 0].any()
        for number in np.unique(words[words >= 0]):
            assert len(set(chosen[words == number])) == 1  # a word is masked entirely or not at all
        total += (words >= 0).sum()
        taken += chosen.sum()
        assert chosen.sum() <= round(0.15 * (words >= 0).sum())
    assert taken / total == pytest.approx(0.15, abs=0.004)


def test_choose_masked_draws_run_lengths_of_paper():
    assert Masking().lengths == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    draw, options = np.random.default_rng(3), Masking(share=0.004)
    counts = np.zeros(7)
    for _ in range(400):
        chosen = choose_masked(np.arange(5000), options, draw)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]]).astype(int)))
        counts += np.bincount(edges[1::2] - edges[::2], minlength=7)[:7]
    found = counts / counts.sum()  # a few runs touch by chance, and the last run is cut short
    assert found[1:4] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert found[4:].sum() < 0.01


def test_choose_masked_draws_runs_that_stop_at_gaps():
    options, draw = Masking(share=0.5), np.random.default_rng(4)
    # two of four words are masked; both middle words only by two runs of one, or by one run if there is no gap
    gap, none = (
        np.mean([choose_masked(np.array(words), options, draw)[1:3].all() for _ in range(2500)])
        for words in ([0, 1, 3, 4], [0, 1, 2, 3])
    )
    assert gap < none - 0.05


def test_choose_masked_selects_at_least_one_token_if_any_word_exists():
    assert choose_masked(np.array([-1, 0, -1]), Masking(), np.random.default_rng(0)).tolist() == [False, True, False]
    # one word, longer than the requested share
    one = choose_masked(np.zeros(50, int), Masking(), np.random.default_rng(0))
    assert one.tolist() == [True] * 8 + [False] * 42
    assert not choose_masked(np.array([-1, -1]), Masking(), np.random.default_rng(0)).any()


# blocks


def test_blocks_are_contiguous_and_drop_the_rest():
    data = Blocks(np.arange(1003, dtype="<u2"), 10)
    assert len(data) == 100
    together = torch.cat([data[i]["input_ids"] for i in range(len(data))])
    assert together.dtype == torch.int64
    assert together.tolist() == list(range(1000))
    assert torch.equal(data[7]["labels"], data[7]["input_ids"])
    data[7]["labels"].fill_(-100)
    assert data[7]["input_ids"].tolist() == list(range(70, 80))
    for index in (100, -1):
        with pytest.raises(IndexError):
            data[index]


def test_pair_rows_refuse_index_out_of_range():
    data = pair_rows(random_sentences(), Packing(), count=5)
    for index in (5, -1):
        with pytest.raises(IndexError, match=f"row {index} of 5"):
            data[index]


@pytest.mark.parametrize(("count", "length"), [(9, 10), (0, 1), (9, 0), (9, -1)])
def test_blocks_refuse_too_few_tokens(count, length):
    with pytest.raises(DataError, match=f"{count} tokens hold no block of {length}; give more text"):
        Blocks(np.zeros(count, np.uint16), length)
