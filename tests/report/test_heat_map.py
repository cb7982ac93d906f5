"""The direct path: what centring removes and keeps, one scale for all arms, tokens shown as they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.report.comparison_sample import sample_comparison

from tiewise.report.heat_map import asymmetry, centred, direct_path_panels
from tiewise.report.labels import token_label
from tiewise.training.results import ArmDirectPath

sizes = st.integers(3, 8)
values = st.floats(-5, 5)


@given(sizes.flatmap(lambda n: st.tuples(*[arrays(float, n, elements=values)] * 3)))
def test_rows_and_columns_are_removed_whatever_the_diagonal_holds(parts):
    row, column, diagonal = parts
    left = centred(row[:, None] + column[None, :] + np.diag(diagonal))
    assert left[~np.eye(len(row), dtype=bool)] == pytest.approx(0, abs=1e-9)


@given(sizes.flatmap(lambda n: arrays(float, (n, n), elements=values)))
def test_a_symmetric_path_stays_symmetric_and_centring_is_idempotent(logits):
    once = centred(logits + logits.T)
    assert once == pytest.approx(once.T, abs=1e-9)
    off = ~np.eye(len(logits), dtype=bool)
    assert centred(once)[off] == pytest.approx(once[off], abs=1e-9)


@given(sizes.flatmap(lambda n: arrays(float, (n, n), elements=values)))
def test_it_is_the_least_squares_fit(logits):
    n = len(logits)
    off = ~np.eye(n, dtype=bool)
    rows, columns = np.nonzero(off)
    design = np.hstack([np.eye(n)[rows], np.eye(n)[columns]])
    residual = logits[off] - design @ np.linalg.lstsq(design, logits[off], rcond=None)[0]
    assert centred(logits)[off] == pytest.approx(residual, abs=1e-8)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens_do_not_fail(n):
    assert centred(np.ones((n, n)).tolist()).shape[0] == n


def test_all_arms_share_a_scale_set_off_the_diagonal():
    maps = [panel.figure for panel in direct_path_panels(sample_comparison())]
    limits = {(m.layout.coloraxis.cmin, m.layout.coloraxis.cmax) for m in maps}
    assert len(limits) == 1
    ((low, high),) = limits
    z = [np.array(m.data[0].z) for m in maps]
    off = max(np.abs(v[~np.eye(len(v), dtype=bool)]).max() for v in z)
    assert high == pytest.approx(off, abs=1e-3)
    assert low == -high
    assert max(np.abs(v).max() for v in z) > 1.5 * high  # the diagonal would have drowned the rest


def test_asymmetry_is_forward_minus_backward():
    path = ArmDirectPath("untied", ["a", "b"], [[0.0, 3.0], [1.0, 0.0]])
    assert asymmetry(path, "a", "b") == 2.0
    assert asymmetry(path, "b", "a") == -2.0
    assert asymmetry(path, "a", "c") is None


def test_positions_not_labels_are_coordinates():
    comparison = sample_comparison()
    figure = next(direct_path_panels(comparison)).figure
    assert list(figure.data[0].x) == list(range(len(comparison.direct_path[0].tokens)))
    assert figure.layout.xaxis.ticktext[0] == "␣the"


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "␣the"), ("\n", "⏎"), ("<b>", "&lt;b&gt;"), ("a&b", "a&amp;b"), ("\x00", "\\x00"), ("", "(empty)")],
)
def test_tokens_are_visible_and_never_markup(token, shown):
    assert token_label(token) == shown
