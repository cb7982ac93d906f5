"""Norms, directions, groups and planes of tables against dense numpy, scipy and simulation; planted untrained rows."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import scipy.stats
from token_checkpoints import factored, gaussian, opt, untied

from tiewise.analysis.model_ends import views_of
from tiewise.analysis.row_directions import anisotropy, gaussian_shares, gaussian_spectrum, mean_cosine, moments, plane
from tiewise.analysis.single_rows import near_unused, norms_of, row_state
from tiewise.analysis.token_table import HeldTable, StoredTable
from tiewise.analysis.token_texts import Groups, by_frequency, script_of
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.progress import heard
from tiewise.inspection.sections.tokens import tokens_of


def cone(rows=400, width=12, seed=0):
    """Rows that share a direction, with a spectrum that falls."""
    generator = np.random.default_rng(seed)
    return 0.5 + generator.standard_normal((rows, width)) / np.arange(1, width + 1)


def measured(values, seed=0):
    table = HeldTable(values)
    return anisotropy(table, moments(table), seed)


def cosines(values):
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    return (unit @ unit.T)[~np.eye(len(values), dtype=bool)]


def test_mean_cosine_is_that_of_all_pairs():
    values = cone()
    assert mean_cosine(moments(HeldTable(values))).value == pytest.approx(cosines(values).mean(), abs=1e-13)


def test_its_interval_is_the_jackknifes():
    values = cone(120)
    found = mean_cosine(moments(HeldTable(values)))
    without = np.array([cosines(np.delete(values, row, axis=0)).mean() for row in range(len(values))])
    deviation = np.sqrt((len(values) - 1) * without.var())
    assert (found.high - found.low) / 2 / 1.959964 == pytest.approx(deviation, rel=0.03)


def test_rows_of_zeros_have_no_direction():
    values = np.vstack([cone(50), np.zeros((3, 12))])
    found = mean_cosine(moments(HeldTable(values)))
    assert found.rows == 50
    assert found.value == pytest.approx(cosines(values[:50]).mean(), abs=1e-12)


def test_spread_of_the_mean_cosine_of_random_rows():
    drawn = [mean_cosine(moments(HeldTable(gaussian(40, 10, seed)))).value for seed in range(400)]
    assert np.std(drawn) == pytest.approx(measured(gaussian(40, 10)).cosine_deviation, rel=0.15)
    assert abs(np.mean(drawn)) < 5 * np.std(drawn) / 20


def test_spectrum_equals_the_dense_decomposition():
    values = cone()
    found = measured(values)
    squares = np.linalg.svd(values - values.mean(0), compute_uv=False) ** 2
    assert found.shares == pytest.approx(squares / squares.sum(), abs=1e-12)
    assert found.leading[1].share == pytest.approx((squares / squares.sum())[:10].sum())
    assert found.participation == pytest.approx(squares.sum() ** 2 / (squares**2).sum())
    assert found.mean_share == pytest.approx(len(values) * (values.mean(0) ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize(("rows", "width"), [(600, 60), (80, 60), (40, 60)])
def test_gaussian_levels_are_those_of_gaussian_tables(rows, width):
    found = [measured(gaussian(rows, width, seed)) for seed in range(12)]
    shares = np.mean([one.shares for one in found], axis=0)
    assert gaussian_shares(rows, width) == pytest.approx(shares, abs=0.12 * shares[0])
    assert gaussian_spectrum(rows, width).sum() == pytest.approx(width, rel=1e-3)
    assert found[0].participation_chance == pytest.approx(np.mean([one.participation for one in found]), rel=0.03)
    for place, lead in enumerate(found[0].leading):
        assert lead.chance == pytest.approx(np.mean([one.leading[place].share for one in found]), rel=0.08)


def test_isotropy_is_the_partition_functions():
    values = cone(300, 8).astype(np.float32).astype(np.float64)
    found = measured(values).isotropy
    _, axes = np.linalg.eigh(values.T @ values)
    for scale, value in ((1.0, found.stored), (1 / np.sqrt((values**2).mean()), found.scaled)):
        sums = np.exp(scale * values @ np.hstack([axes, -axes])).sum(0)
        assert value == pytest.approx(sums.min() / sums.max(), rel=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(2000, 40), (400, 60)])
def test_isotropy_by_chance_is_that_of_gaussian_tables(rows, width):
    found = [measured(gaussian(rows, width, seed)).isotropy for seed in range(12)]
    assert found[0].chance == pytest.approx(np.mean([one.scaled for one in found]), rel=0.06)


def test_values_that_are_no_numbers_and_empty_tables():
    values = cone(20)
    values[3, 1] = np.nan
    with pytest.raises(DataError, match="values that are no numbers"):
        moments(HeldTable(values))
    with pytest.raises(DataError, match="a table of 0 rows that are not zero"):
        moments(HeldTable(np.zeros((5, 3))))


def test_norms_follow_counts_as_scipy_says():
    generator = np.random.default_rng(4)
    counts = generator.zipf(1.4, 500).clip(max=10**6) * (generator.random(500) > 0.2)
    norms = 1 / (1 + np.log1p(counts)) + 0.1 * generator.random(500)
    found = norms_of(norms, counts, by_frequency(counts)).frequency
    seen = counts > 0
    assert found.spearman.value == pytest.approx(scipy.stats.spearmanr(norms[seen], counts[seen])[0], abs=1e-12)
    assert found.pearson.value == pytest.approx(np.corrcoef(norms[seen], np.log(counts[seen]))[0, 1], abs=1e-12)
    permuted = [scipy.stats.spearmanr(generator.permutation(norms[seen]), counts[seen])[0] for _ in range(600)]
    assert found.chance == pytest.approx(np.std(permuted), rel=0.12)


def test_norms_by_group():
    norms, of = np.arange(10.0), np.array([0] * 6 + [2] * 3 + [3])
    found = norms_of(norms, scripts=Groups(("a", "none", "b", "alone"), of))
    assert [(group.label, group.tokens) for group in found.scripts] == [("a", 6), ("b", 3), ("alone", 1)]
    assert found.scripts[0].median == 2.5
    assert found.scripts[0].quartiles == (1.25, 3.75)
    assert found.scripts[0].mean.value == 2.5
    assert found.scripts[2].mean is None
    assert found.frequency is None
    assert found.bins == ()


@pytest.mark.parametrize("counts", [np.zeros(9, int), np.full(9, 3), np.array([1, 2, 3, 0, 0, 0, 0, 0, 0])])
def test_no_correlation_without_different_counts(counts):
    assert norms_of(np.arange(9.0), counts, by_frequency(counts)).frequency is None


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (" the", "Latin"),
        ("ё", "Cyrillic"),
        ("λό", "Greek"),
        ("漢字", "Han"),
        ("のは", "Kana"),
        ("カ", "Kana"),
        ("ｶ", "Kana"),
        ("Ａ", "Latin"),
        ("한국", "Hangul"),
        ("ال", "Arabic"),
        ("של", "Hebrew"),
        ("का", "Devanagari"),
        ("ไทย", "other letters"),
        (" 12", "digits"),
        ("), ", "punctuation"),
        ("\n\t ", "white space"),
        ("", "white space"),
        ("\ufffd", "parts of characters"),
        ("a漢字", "Han"),
        (None, "no token"),
    ],
)
def test_scripts(text, script):
    assert script_of(text) == script


def test_plane_is_the_leading_plane():
    values = cone()
    table = HeldTable(values)
    ids = np.array([0, 7, 399])
    found = plane(table, moments(table), ids)
    centred = values - values.mean(0)
    _, s, axes = np.linalg.svd(centred, full_matrices=False)
    assert found.shares == pytest.approx((s**2 / (s**2).sum())[:2], abs=1e-12)
    assert np.abs(found.points) == pytest.approx(np.abs(centred[ids] @ axes[:2].T), abs=1e-9)
    assert found.variance == pytest.approx((centred**2).sum(1).mean())


def test_a_plane_is_turned_to_the_one_beside_it():
    values = cone()
    first = plane(HeldTable(values), moments(HeldTable(values)), np.arange(50))
    turned = values * np.where(np.arange(12) % 2, 1, -1)
    second = plane(HeldTable(turned), moments(HeldTable(turned)), np.arange(50), beside=first)
    assert np.array(second.points) == pytest.approx(np.array(first.points), abs=1e-9)


def test_a_factored_table_before_and_after_its_maps(tmp_path):
    table, into, out = gaussian(30, 4), gaussian(10, 4, 1), gaussian(4, 10, 2)
    views, notes = views_of(factored(tmp_path / "m", table, into, out))
    assert [view.name for view in views] == ["both ends", "input after its map", "output after its map"]
    assert [view.stored is not None for view in views] == [True, False, False]
    for view, dense in zip(views, (table, table @ into.T, table @ out), strict=True):
        assert view.table.read(0, 30) == pytest.approx(dense.astype(float), abs=1e-5)
        assert view.table.take([3, 1]) == pytest.approx(dense[[3, 1]].astype(float), abs=1e-5)
    assert notes


def test_a_familys_own_projections(tmp_path):
    table, into, out = gaussian(30, 4), gaussian(10, 4, 1), gaussian(4, 10, 2)
    views, notes = views_of(opt(tmp_path / "m", table, into, out))
    assert [view.name for view in views] == ["both ends", "input after its map", "output after its map"]
    for view, dense in zip(views[1:], (table @ into.T, table @ out), strict=True):
        assert view.table.read(0, 30) == pytest.approx(dense.astype(float), abs=1e-5)
        assert view.table.take([29]) == pytest.approx(dense[[29]].astype(float), abs=1e-5)
    assert any("left out" in note for note in notes)


def test_two_tables_are_two_views(tmp_path):
    views, notes = views_of(untied(tmp_path / "m", gaussian(20, 6), gaussian(20, 6, 1)))
    assert [view.name for view in views] == ["input", "output"]
    assert notes == ()


V = 60
WORDS = ["<unk>", *(f"w{chr(97 + row // 26)}{chr(97 + row % 26)}" for row in range(39)), *"0123456789", *"абвгд"]
WORDS += [f"<reserved_{row}>" for row in range(V - len(WORDS))]


def text(length=3000, vocabulary=V - 5):
    return np.random.default_rng(0).zipf(1.3, length) % vocabulary


def test_planted_rows_are_found(tmp_path):
    values = gaussian(V, 8)
    values[[4, 9]] = 0
    values[[11, 30, 31]] = values[10]
    values[50] = values[2]
    stored = untied(tmp_path / "m", values, gaussian(V, 8, 1)).tensors["model.embed_tokens.weight"]
    counts = np.ones(V, np.int64)
    counts[[1, 2, 3]] = 0
    state = row_state(stored, StoredTable(stored), np.empty(0, np.int64), counts)
    assert state.zero == (4, 9)
    assert state.repeated == ((10, 11, 30, 31), (2, 50))
    assert (state.groups, state.in_groups, state.unseen) == (2, 6, 3)
    assert state.near_unused is None


def test_rows_left_where_unused_ones_are():
    generator = np.random.default_rng(3)
    values = 3 * generator.standard_normal((200, 16))
    unused, left = np.arange(180, 200), np.array([17, 40, 99])
    values[unused] = 5 + 0.1 * generator.standard_normal((20, 16))
    values[left] = 5 + 0.05 * generator.standard_normal((3, 16))
    found = near_unused(HeldTable(values), unused)
    assert {suspect.row for suspect in found.nearest} == set(left.tolist())
    assert (found.reference, found.count, found.share) == (20, 3, 3 / 180)
    own = [np.linalg.norm(values[row] - values[unused[unused != row]].mean(0)) for row in unused]
    assert found.reach == pytest.approx(np.quantile(own, 0.95))
    centre, mean = values[unused].mean(0), values.mean(0)
    first = found.nearest[0]
    assert first.distance == pytest.approx(np.linalg.norm(values[first.row] - centre))
    row, direction = values[first.row] - mean, centre - mean
    cosine = row @ direction / np.linalg.norm(row) / np.linalg.norm(direction)
    assert first.cosine == pytest.approx(cosine)


def test_by_chance_trained_rows_are_not_near():
    values = np.random.default_rng(4).standard_normal((400, 32))
    values[:30] *= 0.1
    assert near_unused(HeldTable(values), np.arange(30)).count == 0


def test_everything_of_a_model_with_text_and_tokenizer(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), WORDS)
    told = []
    with heard(lambda *said: told.append(said)):
        found = tokens_of(folder, text(), samples=20, seed=1)
    assert [table.name for table in found.tables] == ["input", "output"]
    assert found.text == 3000
    assert found.seen == len(np.unique(text()))
    assert found.unused == 5
    assert {group.label for group in found.contexts.scripts} == {"Latin", "digits", "Cyrillic"}
    assert found.tables[0].norms.scripts[0].tokens == 39
    assert {g.label: g.tokens for g in found.tables[0].norms.scripts}["special tokens"] == 6
    assert len(found.sample) == len(found.labels) == len(found.counts) == 20
    assert [found.labels[at] for at in range(20)] == [WORDS[row] for row in found.sample]
    assert found.counts == tuple(np.bincount(text(), minlength=V)[list(found.sample)])
    most = np.argsort(-np.bincount(text(), minlength=V), kind="stable")[:10]
    assert set(most) <= set(found.sample)
    assert len(set(found.sample)) == 20
    assert found.tables[0].state.near_unused.reference == 5
    json.dumps(asdict(found), allow_nan=False)
    assert told
    assert all(done <= total for _, done, total in told)


def test_what_needs_no_text(tmp_path):
    found = tokens_of(untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1)))
    assert found.contexts is None
    assert found.counts == ()
    assert found.unused is None
    assert found.labels[:2] == ("#0", "#1")
    assert found.tables[0].norms.frequency is None
    assert found.tables[0].state.unseen is None
    assert any("no tokenizer.json" in note for note in found.notes)
    json.dumps(asdict(found), allow_nan=False)


def test_a_factored_model_is_seen_before_and_after(tmp_path):
    folder = factored(tmp_path / "m", gaussian(V, 4), gaussian(10, 4, 1), gaussian(4, 10, 2), WORDS)
    found = tokens_of(folder, text())
    assert [(table.width, table.state is None) for table in found.tables] == [(4, False), (10, True), (10, True)]
    assert sum(found.tables[1].anisotropy.shares[:4]) == pytest.approx(1)
    json.dumps(asdict(found), allow_nan=False)


def test_a_word_and_a_token_of_the_text_are_in_use(tmp_path):
    words = ["<unk>", "reserved", "dummy", "<reserved_1>", "<reserved_2>", *(f"w{row}" for row in range(V - 7))]
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), words)
    assert tokens_of(folder).unused == 4  # two names, and two rows without a token
    assert tokens_of(folder, text() % 4).unused == 3


def test_the_same_seed_gives_the_same(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), WORDS)
    once, again, other = (tokens_of(folder, text(), samples=30, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once.sample != other.sample


def test_what_cannot_be_measured(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1))
    with pytest.raises(DataError, match="50 tokens in 10 parts"):
        tokens_of(folder, text(50))
    with pytest.raises(DataError, match="outside a vocabulary of 60"):
        tokens_of(folder, np.full(200, V))
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no input table"):
        tokens_of(type(folder)(folder.path, (), folder.config, None, {}, {}))


MEMORY = """
import sys, tracemalloc
import numpy as np
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.checkpoint.hf_folder import open_folder
assert not {"torch", "transformers", "plotly"} & set(sys.modules)
folder = open_folder(sys.argv[1])
ids = np.random.default_rng(0).integers(0, 120_000, 200_000)
tracemalloc.start()
found = tokens_of(folder, ids)
print(tracemalloc.get_traced_memory()[1], found.tables[0].rows)
"""


@pytest.mark.slow
def test_a_large_table_is_streamed_without_torch(tmp_path):
    """120,000 × 512 in fp16: 123 MB in the file, 491 MB in fp64; what is held is a piece, E × E and a sample."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((120_000, 512), np.float32).astype(np.float16)
    untied(tmp_path / "m", table, table[::-1].copy())
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, rows = map(int, done.stdout.split())
    assert rows == 120_000
    assert peak < 150 * 2**20
