"""Blocks, and pairs of segments: what labels mean, that nothing else tells them, that rows come from the seed."""

import numpy as np
import pytest
import torch

from tiewise.core.errors import DataError
from tiewise.training.data.corpus import Blocks
from tiewise.training.data.sentence_pairs import Packing, Sentences, Vocabulary, make_pairs
from tiewise.training.data.training_rows import IGNORED, Masking, PairRows, apply_mask, choose_masked


def planted(documents=30, most=12, longest=9, seed=0, least=1):
    """Sentences of documents: every token is the number of its sentence plus 10, each sentence of random length."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(least, most + 1, documents)
    lengths = draw.integers(1, longest + 1, counts.sum())
    tokens = np.repeat(np.arange(len(lengths)) + 10, lengths)
    ends = np.cumsum(lengths)
    return Sentences(words(len(lengths) + 10), tokens, ends - lengths, ends, np.concatenate([[0], np.cumsum(counts)]))


def words(vocab):
    """Marks 0 … 3, tokens from 4 on, each a word of its own."""
    pieces = tuple(b"" if i < 4 else b" t%d" % i for i in range(vocab))
    flags = np.zeros(vocab, bool)
    return Vocabulary(pieces, flags, flags, np.arange(vocab), (0, 1, 2, 3))


def rows(sentences, packing, seed=1, **options):
    return PairRows(sentences, packing, Masking(), seed=seed, **options)


def document_of(sentences, token):
    return int(np.searchsorted(sentences.documents, token - 10, side="right")) - 1


def unbroken(*segments):
    """Whether tokens that number their sentence go on from one segment to the next without a jump."""
    return bool((np.diff(np.concatenate(segments)) <= 1).all() and (np.diff(np.concatenate(segments)) >= 0).all())


@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_labels_say_what_was_done(objective, length):
    sentences = planted()
    data = rows(sentences, Packing(length, objective))
    torn = 0
    for i in range(len(data)):
        a, b, label = data.pair(i)
        assert min(len(a), len(b)) >= 1
        assert len(a) + len(b) <= length - 3
        same = document_of(sentences, a[0]) == document_of(sentences, b[0])
        assert all(map(unbroken, (a, b)))
        if label == 0 and objective == "nsp":
            assert not same
        else:
            earlier, later = (b, a) if label == 0 else (a, b)
            assert (same, unbroken(earlier, later)) == (True, True)
            assert earlier[-1] < later[0]
        torn += len(a) + len(b) == length - 3
    assert objective != "none" or data.pair(0)[2] is None
    assert torn > 0


@pytest.mark.parametrize("length", [60, 12])
def test_every_sentence_is_read_once_an_epoch(length):
    sentences = planted(least=2, documents=60)
    data = rows(sentences, Packing(length, "sop", short=0))
    counts = np.zeros(len(sentences), int)
    for i in range(len(data)):
        counts[data._pairs[i, 0] : data._pairs[i, 2]] += 1
    assert set(counts) <= {0, 1}
    for begin, stop in zip(sentences.documents[:-1], sentences.documents[1:], strict=True):
        left = np.flatnonzero(counts[begin:stop] == 0)  # one may be left over, where the packing of a document ended
        assert left.tolist() in ([], [0], [stop - begin - 1])


@pytest.mark.parametrize("objective", ["sop", "nsp"])
def test_share_in_order(objective):
    sentences = planted(documents=400)
    for share in (0.0, 0.3, 0.5, 1.0):
        label = make_pairs(sentences, Packing(30, objective, share), np.random.default_rng(5))[:, 3]
        assert abs(label.mean() - share) <= 5 * np.sqrt(share * (1 - share) / len(label))


def test_rows_as_the_model_reads_them():
    sentences = planted()
    data = rows(sentences, Packing(24, "sop"))
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


def test_rows_are_a_function_of_the_seed_and_change_with_the_epoch():
    sentences = planted()
    forward, backward = (rows(sentences, Packing(24), count=500) for _ in range(2))
    one = [forward[i] for i in range(500)]
    other = [backward[i] for i in reversed(range(500))][::-1]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)
    ids, epoch = [tuple(row["input_ids"].tolist()) for row in one], forward.rows_per_epoch
    assert epoch < 250
    assert set(ids[:epoch]).isdisjoint(ids[epoch : 2 * epoch])
    assert tuple(rows(sentences, Packing(24), seed=2)[0]["input_ids"].tolist()) != ids[0]


@pytest.mark.parametrize("objective", ["sop", "nsp"])
def test_nothing_but_the_order_tells_the_label(objective):
    # sentences at random: whatever predicts the label beyond chance is an artefact of how pairs are made
    draw = np.random.default_rng(8)
    lengths = draw.integers(1, 30, 16_000)
    ends = np.cumsum(lengths)
    tokens = draw.integers(10, 20, ends[-1])
    tokens[ends - 1], tokens[ends - lengths], tokens[:1] = 5, 6, 7  # a full stop, a capital, the first of all
    sentences = Sentences(words(20), tokens, ends - lengths, ends, np.append(np.arange(0, 16_000, 8), 16_000))
    data = rows(sentences, Packing(32, objective), seed=3)
    found = [data.pair(i) for i in range(len(data))]
    label = np.array([row[2] for row in found])
    features = [[a[0] for a, _, _ in found], [b[0] for _, b, _ in found]]
    features += [[a[-1] for a, _, _ in found], [b[-1] for _, b, _ in found]]
    if objective == "sop":  # strangers are about as long, not exactly: told in docs/albert.md
        features += [[np.sign(len(a) - len(b)) for a, b, _ in found], [len(a) + len(b) == 29 for a, b, _ in found]]
    for values in map(np.array, features):
        for value in set(values.tolist()):
            of_it = label[values == value]
            assert abs(of_it.mean() - label.mean()) < 5 * 0.5 / np.sqrt(len(of_it)), value


def test_texts_without_pairs():
    with pytest.raises(DataError, match="no document has two sentences"):
        rows(planted(most=1), Packing())
    with pytest.raises(DataError, match="nsp in one document"):
        rows(planted(documents=1, least=4), Packing(objective="nsp"))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((Packing, wrong) for wrong in ({"objective": "order"}, {"length": 4}, {"in_order": 1.5}, {"short": -1})),
        *((Masking, wrong) for wrong in ({"share": 0}, {"share": 1.1}, {"longest": 0}, {"random": np.nan})),
        (Masking, {"masked": 0.8, "random": 0.3}),
    ],
)
def test_refused(kind, wrong):
    with pytest.raises(DataError):
        kind(**wrong)


# masks


def within(found, expected, count, sigmas=5):
    """Whether a share of `count` draws is what is expected, up to chance."""
    return abs(found - expected) < sigmas * np.sqrt(max(expected * (1 - expected), 1e-9) / count)


def test_inputs_are_replaced_80_10_10():
    draw, options = np.random.default_rng(1), Masking()
    ids = draw.integers(4, 1000, 200_000)
    chosen = np.zeros(len(ids), bool)
    chosen[::3] = True
    inputs, labels = apply_mask(ids, chosen, 2, np.arange(4, 1000), options, draw)
    assert np.array_equal(inputs[~chosen], ids[~chosen])
    assert np.array_equal(labels, np.where(chosen, ids, IGNORED))
    masked, same = inputs[chosen] == 2, inputs[chosen] == ids[chosen]
    count, by_chance = chosen.sum(), 0.1 / 996
    assert within(masked.mean(), 0.8, count)
    assert within(same.mean(), 0.1 + by_chance, count)
    others = inputs[chosen][~masked & ~same]
    assert within(len(others) / count, 0.1 - by_chance, count)
    spread = np.bincount(others, minlength=1000)[4:]
    assert others.min() >= 4
    assert (spread - spread.mean()).std() < 1.3 * np.sqrt(spread.mean())  # uniform: the variance of a count is its mean


@pytest.mark.parametrize(("masked", "random", "expected"), [(1, 0, "mask"), (0, 0, "same"), (0, 1, "random")])
def test_shares_at_their_ends(masked, random, expected):
    ids = np.arange(100, 1100)
    options = Masking(masked=masked, random=random)
    inputs, _ = apply_mask(ids, np.ones(1000, bool), 2, 50, options, np.random.default_rng(0))
    assert {"mask": (inputs == 2).all(), "same": (inputs == ids).all(), "random": (inputs < 50).all()}[expected]


@pytest.mark.parametrize("whole", [True, False])
def test_share_of_tokens(whole):
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
            assert len(set(chosen[words == number])) == 1  # a word is taken whole or not at all
        total += (words >= 0).sum()
        taken += chosen.sum()
        assert chosen.sum() <= round(0.15 * (words >= 0).sum())
    assert taken / total == pytest.approx(0.15, abs=0.004)


def test_runs_have_the_papers_lengths():
    assert Masking().lengths == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    draw, options = np.random.default_rng(3), Masking(share=0.004)
    counts = np.zeros(7)
    for _ in range(400):
        chosen = choose_masked(np.arange(5000), options, draw)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]]).astype(int)))
        counts += np.bincount(edges[1::2] - edges[::2], minlength=7)[:7]
    found = counts / counts.sum()  # a few runs meet by chance, and the last of 20 tokens is cut short
    assert found[1:4] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert found[4:].sum() < 0.01


def test_no_run_goes_over_a_gap():
    options, draw = Masking(share=0.5), np.random.default_rng(4)
    # of four words two are taken; the middle two together only by two runs of one, or by one run over no gap
    gap, none = (
        np.mean([choose_masked(np.array(words), options, draw)[1:3].all() for _ in range(2500)])
        for words in ([0, 1, 3, 4], [0, 1, 2, 3])
    )
    assert gap < none - 0.05


def test_one_token_at_least_and_nothing_of_nothing():
    assert choose_masked(np.array([-1, 0, -1]), Masking(), np.random.default_rng(0)).tolist() == [False, True, False]
    one = choose_masked(np.zeros(50, int), Masking(), np.random.default_rng(0))  # one word, longer than its share
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


def test_pairs_have_no_rows_before_the_first_or_after_the_last():
    data = rows(planted(), Packing(), count=5)
    for index in (5, -1):
        with pytest.raises(IndexError, match=f"row {index} of 5"):
            data[index]


@pytest.mark.parametrize(("count", "length"), [(9, 10), (0, 1), (9, 0), (9, -1)])
def test_too_few_tokens(count, length):
    with pytest.raises(DataError, match=f"{count} tokens hold no block of {length}; give more text"):
        Blocks(np.zeros(count, np.uint16), length)
