"""Alignment of tables against dense fp64 computations, planted maps and simulation."""

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from safetensors.numpy import save_file

from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.tables.align_tables import align, nearer_end, toward
from tiewise.inspection.tables.model_tables import Pairs, by_text, one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings

QUICK = {"permutations": 1, "neighbours": 3, "subspaces": (4,)}


def related_tables(rows=400, d1=12, d2=12, noise=0.5):
    """Return A with a mean and an uneven spectrum, and its noisy linear image B."""
    draw = np.random.default_rng(0)
    a = draw.normal(size=(rows, d1)) * np.linspace(2, 0.3, d1) + draw.normal(size=d1)
    return a, a @ draw.normal(size=(d1, d2)) + noise * draw.normal(size=(rows, d2)) + draw.normal(size=d2)


def cosines(x, y):
    return (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


def fit_dense_maps(x, y, rank):
    """Fit orthogonal, linear and reduced-rank maps of fp64 rows by their definitions."""
    linear = np.linalg.lstsq(x, y, rcond=None)[0]
    _, _, right = np.linalg.svd(x @ linear, full_matrices=False)
    left, _, other = np.linalg.svd(x.T @ y, full_matrices=False)
    return {"orthogonal": left @ other, "linear": linear, f"rank {rank}": linear @ right[:rank].T @ right[:rank]}


@pytest.mark.parametrize("widths", [(12, 12), (12, 9), (9, 12)])
@pytest.mark.parametrize("view", ["centred", "raw"])
def test_align_scores_match_dense_maps(widths, view):
    a, b = related_tables(d1=widths[0], d2=widths[1])
    found = align(a, b, one_vocabulary(400, 400), AlignSettings(ranks=(3,), raw=True, **QUICK))
    held, fit = np.split(np.random.default_rng(0).permutation(400), [80])  # the documented split, drawn independently
    mean_a, mean_b = (t[fit].mean(0) if view == "centred" else 0 for t in (a, b))
    x, y = a - mean_a, b - mean_b
    for name, matrix in fit_dense_maps(x[fit], y[fit], 3).items():
        for rows, which in (("fitted", fit), ("held out", held)):
            got = found.score(name, rows, view).estimate
            assert got.value == pytest.approx(cosines(x[which] @ matrix, y[which]).mean(), abs=1e-10)
            assert got.rows == len(which)
    if widths[0] == widths[1]:
        assert found.score("identity", view=view).estimate.value == pytest.approx(cosines(x, y)[held].mean(), abs=1e-10)
    else:
        assert found.left_out == (f"no identity map: widths {widths[0]} and {widths[1]} differ",)


@pytest.mark.parametrize("rows", [400, 9000])  # with held-out rows, fewer than 9,000 would be scored
def test_align_fits_and_scores_all_rows_when_none_are_held_out(rows):
    """The oracle is the mean cosine of centred rows after one scipy rotation of all rows."""
    a, b = related_tables(rows=rows)
    pairs = one_vocabulary(rows, rows)
    found = align(a, b, pairs, AlignSettings(held_out=0, raw=True, **QUICK | {"permutations": 0}))
    for view, x, y in (("centred", a - a.mean(0), b - b.mean(0)), ("raw", a, b)):
        rotation, _ = scipy.linalg.orthogonal_procrustes(x, y)
        score = found.score("orthogonal", "fitted", view)
        assert score.estimate.value == pytest.approx(cosines(x @ rotation, y).mean(), abs=1e-9)
        assert score.estimate.rows == rows
    assert found.fitted_rows == found.pairs == rows
    assert {score.rows for score in found.scores if score.rows} == {"fitted"}
    leans = {x.measure: x for x in nearer_end(b, a, b, pairs, AlignSettings(held_out=0, **QUICK))}
    rotation, _ = scipy.linalg.orthogonal_procrustes(a - a.mean(0), b - b.mean(0))
    expected = cosines((a - a.mean(0)) @ rotation, b - b.mean(0)).mean()
    assert leans["orthogonal"].input.value == pytest.approx(expected, abs=1e-9)


def test_align_scores_are_invariant_to_row_scale():
    """Powers of two scale without rounding; trained tables have rows far below length 1."""
    a, b = related_tables()
    pairs, settings = one_vocabulary(400, 400), AlignSettings(ranks=(3,), **QUICK)
    large, small = align(a, b, pairs, settings), align(a * 2.0**-12, b * 2.0**-9, pairs, settings)
    assert len(large.scores) > 5
    for one, other in zip(large.scores, small.scores, strict=True):
        assert other.estimate.value == pytest.approx(one.estimate.value, abs=1e-9), one.measure


def test_align_measures_without_a_map_match_dense_computation():
    a, b = related_tables(d2=12, noise=3.0)
    found = align(a, b, one_vocabulary(400, 400), AlignSettings(**QUICK))
    x, y = a - a.mean(0), b - b.mean(0)
    kx, ky = x @ x.T, y @ y.T
    likeness = (kx * ky).sum() / np.linalg.norm(kx) / np.linalg.norm(ky)
    assert found.score("CKA").estimate.value == pytest.approx(likeness, abs=1e-10)
    (ux, sx, vx), (uy, sy, vy) = (np.linalg.svd(t, full_matrices=False) for t in (x, y))
    for spectrum, values in zip(found.spectra, (sx, sy), strict=True):
        np.testing.assert_allclose(spectrum.values, values, rtol=1e-10)
    for space, one, other in zip(found.subspaces, (ux[:, :4], vx[:4].T), (uy[:, :4], vy[:4].T), strict=True):
        angles = scipy.linalg.subspace_angles(one, other)
        np.testing.assert_allclose(space.cosines, np.sort(np.cos(angles))[::-1], atol=1e-10)
        assert space.value == pytest.approx(np.mean(np.cos(angles) ** 2), abs=1e-10)
    na, nb = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    assert found.score("norms, by rank").estimate.value == pytest.approx(scipy.stats.spearmanr(na, nb)[0], abs=1e-10)
    expected, norms = scipy.stats.pearsonr(na, nb), found.score("norms").estimate
    low, high = expected.confidence_interval()
    assert (norms.value, norms.low, norms.high) == pytest.approx((expected[0], low, high), abs=1e-10)


def test_align_neighbours_match_a_full_cosine_matrix(monkeypatch):
    monkeypatch.setattr("tiewise.inspection.tables.align_tables.BLOCK", 37)
    a, b = related_tables(rows=200, noise=4.0)
    found = align(a, b, one_vocabulary(200, 200), AlignSettings(neighbours=5, permutations=2))

    def near(t):
        unit = (t - t.mean(0)) / np.linalg.norm(t - t.mean(0), axis=1, keepdims=True)
        similar = unit @ unit.T
        np.fill_diagonal(similar, -2)
        return [set(np.argsort(row)[-5:]) for row in similar]

    shares = np.array([len(one & other) / 5 for one, other in zip(near(a), near(b), strict=True)])
    near = found.score("neighbours")
    assert near.estimate.value == pytest.approx(shares.mean(), abs=1e-12)
    half = scipy.stats.t.ppf(0.975, 199) * scipy.stats.sem(shares)
    assert near.estimate.high - near.estimate.value == pytest.approx(half, rel=1e-6)
    assert near.chance == 5 / 199
    assert near.estimate.low > max(near.null)


def test_align_scores_and_null_of_unrelated_tables_are_at_chance():
    draw = np.random.default_rng(5)
    a, b = draw.normal(size=(2, 2000, 64))
    found = align(a, b, one_vocabulary(2000, 2000), AlignSettings(ranks=(8,), permutations=4, neighbours=5))
    for score in (score for score in found.scores if score.rows):
        wide = 5 * score.deviation + 0.015 * score.chance  # the error of the asymptotic formula at n/d = 25
        assert abs(score.estimate.value - score.chance) < wide, score
        assert all(abs(value - score.chance) < wide for value in score.null), score
        assert score.p == (1 + sum(v >= score.estimate.value for v in score.null)) / 5
    far = {s.measure for s in found.scores if s.rows == "fitted" and s.chance > 0.08}
    assert far == {"orthogonal", "linear", "rank 8"}


def test_align_null_of_related_tables_is_far_below_the_score():
    found = align(*related_tables(), one_vocabulary(400, 400), AlignSettings(permutations=9, neighbours=0))
    for score in map(found.score, ("orthogonal", "linear")):
        assert score.p == 0.1
        assert score.estimate.low > max(score.null) + 0.1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_align_gives_equal_scores_from_files_and_arrays(tmp_path, dtype):
    a, b = (t.astype(dtype) for t in related_tables(rows=500))
    save_file({"a": a, "b": b[::-1].copy()}, tmp_path / "t.safetensors")
    stored = read_header(tmp_path / "t.safetensors").tensors
    rows = np.arange(0, 500, 7)
    pairs = Pairs(rows, 499 - rows, "by token text")
    options = AlignSettings(permutations=2, neighbours=3, subspaces=(4,))
    told = []
    with listen_to_progress(lambda *said: told.append(said)):
        streamed = align(stored["a"], stored["b"], pairs, options)
    wide = [t.astype(np.float64)[rows] for t in (a, b)]
    whole = align(*wide, one_vocabulary(len(rows), len(rows)), options)
    assert [repr(score) for score in streamed.scores] == [repr(score) for score in whole.scores]
    assert {what for what, *_ in told} >= {"products", "permuted products", "scoring", "neighbours"}
    assert all(0 < done <= total for _, done, total in told)


def test_align_in_fp32_stays_close_to_fp64_and_reports_its_error():
    a, b = related_tables(rows=3000, d1=40, d2=40)
    narrow, pairs = (a.astype(np.float32), b.astype(np.float32)), one_vocabulary(3000, 3000)
    one, other = (align(*narrow, pairs, AlignSettings(precision=p, **QUICK)) for p in ("fp64", "fp32"))
    assert (one.precision, one.error) == ("fp64", 0.0)
    assert other.precision == "fp32"
    assert 1e-9 < other.error < 1e-6
    (printed,) = (quantity for quantity in other.quantities() if quantity.name == "relative error of a product")
    assert float(str(printed).replace("−", "-")) == pytest.approx(other.error, abs=6e-9)
    (bound,) = (quantity for quantity in one.quantities() if quantity.name == "relative error of a product")
    assert str(bound) == "2.2e−16"
    for exact, rough in zip(one.scores, other.scores, strict=True):
        assert rough.estimate.value == pytest.approx(exact.estimate.value, abs=1e-5)


def test_nearer_end_names_the_end_that_the_table_was_made_from():
    draw = np.random.default_rng(3)
    first, second = draw.normal(size=(2, 800, 20))
    turn = np.linalg.qr(draw.normal(size=(20, 20)))[0]
    table = np.concatenate([draw.normal(size=(5, 20)), second @ turn + 0.5 * draw.normal(size=(800, 20))])
    pairs = by_text([None] * 5 + [str(i) for i in range(800)], [str(i) for i in range(800)])
    found = nearer_end(table, first, second, pairs, AlignSettings(neighbours=5))
    leans = {(lean.measure, lean.view): lean for lean in found}
    for name in ("orthogonal", "linear", "neighbours"):
        lean = leans[name, "centred"]
        assert toward(lean.difference) == "output"
        assert lean.difference.value == pytest.approx(lean.output.value - lean.input.value, abs=1e-12)
        assert lean.difference.low < lean.difference.value < lean.difference.high
    swapped = nearer_end(table, second, first, pairs, AlignSettings(neighbours=5))
    assert {toward(lean.difference) for lean in swapped if lean.measure != "identity"} == {"input"}
    same = nearer_end(table, second, second, pairs, AlignSettings(neighbours=5))
    assert {toward(lean.difference) for lean in same} == {"neither"}


def test_align_reports_zero_participation_for_a_table_of_equal_rows():
    _, b = related_tables()
    found = align(np.ones((400, 12)), b, one_vocabulary(400, 400), AlignSettings(**QUICK))
    alike, spread = found.spectra
    assert (alike.participation, alike.mean_share) == (0, 1)
    assert spread.participation > 1


def test_align_counts_zero_rows_and_pairs_can_leave_them_out():
    a, b = related_tables()
    a[:3] = 0
    pairs = one_vocabulary(400, 400)
    whole, rest = (align(a, b, some, AlignSettings(**QUICK)) for some in (pairs, pairs.without(~a.any(axis=1))))
    assert (whole.zero_rows, rest.zero_rows, rest.pairs) == (3, 0, 397)


HELD_OUT_MESSAGE = r"held_out = .*; use a share from 0 \(fit and score all rows\) to 0.5"


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda a, b: (a, b[:10]), {}, "10 paired rows are too few"),
        (lambda a, b: (a, b[:, :5]), {"maps": ("identity",)}, "widths 12 and 5 differ; orthogonal, linear"),
        (lambda a, b: (a, b), {"maps": ("affine",)}, "no map is called affine"),
        (lambda a, b: (a, np.where(b == b.max(), np.nan, b)), {}, "NaN"),
        (lambda a, b: (np.tile(a[:16], 2), b[:16]), {"maps": ("linear",)}, "13 rows to fit on, and more than 24"),
        (lambda a, b: (a.astype(int), b), {}, "no table of floating values"),
        (lambda a, b: (a, b), {"precision": "fp8"}, "no precision is called fp8"),
        (lambda a, b: (a, b), {"maps": (), "ranks": (13,)}, "ranks go from 1 to 12"),
        *((lambda a, b: (a, b), {"held_out": share}, HELD_OUT_MESSAGE) for share in (-0.1, 0.6, float("nan"))),
    ],
)
def test_align_refuses_bad_input_with_a_one_line_message(change, options, said):
    a, b = change(*related_tables())
    with pytest.raises(CheckpointError, match=said) as caught:
        align(a, b, one_vocabulary(len(a), len(b)), AlignSettings(**options))
    assert "\n" not in str(caught.value)


def test_align_refuses_a_row_beyond_the_table():
    rows = np.arange(400)
    with pytest.raises(CheckpointError, match="has 400 rows and its vocabulary names row 400"):
        align(*related_tables(), Pairs(rows, rows + 1, "by token text"))
