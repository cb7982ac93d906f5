"""The gradients section: sums over batches, rows and bins against numpy, Adam's step against torch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.tiny_models import FAMILIES, V, build, variant
from tests.inspection.running.test_two_paths import KINDS, gradients_by_hand, open_in_fp64, text

from tiewise.core.errors import DataError
from tiewise.core.measurement import NEITHER, ONE, Quantity, count, plain
from tiewise.core.progress import listen_to_progress
from tiewise.core.text import BINS, frequency_bins
from tiewise.inspection.running.two_paths import NEXT, AdamPaths, RowSums, TextLoss, row_sums, separate_leaves
from tiewise.inspection.sections import gradients
from tiewise.inspection.sections.gradients import (
    HISTOGRAM,
    PathGradients,
    answer,
    by_batch,
    gradients_of,
    measurement_of,
)

SHARE = "head path's share"


def norms_by_path(found, where="whole text"):
    ends = ("lookup path", "head path", "both together")
    return [found[f"norm of the {end}, {where}"].value for end in ends]


def batch_gradients(found, windows, size, seed=0):
    """Return (A, B) of each full batch as dense arrays, in the order of the batches."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    loss = TextLoss(found, windows, seed)
    with separate_leaves(found.ends) as leaves:
        made = [leaves.gradient(loss, which) for which in order.split(size) if len(which) == size]
    return [(g.a.numpy(), g.b.numpy()) for g in made]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt_350m", "bart", "bert"])
def test_gradients_of_the_whole_text_match_the_gradient_of_the_mean_loss(name, tmp_path):
    model, windows = open_in_fp64(build(name), tmp_path), text()
    total, b, nll = gradients_by_hand(model, windows)
    found = gradients_of(model, windows, batch=2)
    wanted = [part.norm().item() for part in (total - b, b, total)]
    assert norms_by_path(found) == pytest.approx(wanted, rel=1e-6)  # batching changes the rounding of fp32 norms
    assert found["loss"].value == pytest.approx(nll, rel=1e-6)
    assert found["loss"].n == TextLoss(model, windows).per_window * 5
    assert found.notes[1].endswith("a mask or first token" if name in KINDS else "the head path alone")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradients_of_matches_numpy_per_batch(name, tmp_path):
    model, windows = open_in_fp64(build(name), tmp_path), text(9)
    found, pairs = gradients_of(model, windows, batch=2), batch_gradients(model, windows, 2)
    both = [(np.linalg.norm(a), np.linalg.norm(b)) for a, b in pairs]
    assert found[f"{SHARE} per batch"].n == 4
    assert found["norm of the lookup path per batch"].value == pytest.approx(np.mean([a for a, _ in both]), rel=1e-12)
    assert found["norm of the head path per batch"].value == pytest.approx(np.mean([b for _, b in both]), rel=1e-12)
    assert found[f"{SHARE} per batch"].value == pytest.approx(np.mean([b / (a + b) for a, b in both]), rel=1e-12)
    cosines = [(a * b).sum() / (x * y) for (a, b), (x, y) in zip(pairs, both, strict=True)]
    assert found["cosine of the two paths per batch"].value == pytest.approx(np.mean(cosines), abs=1e-12)


def test_gradients_of_matches_numpy_by_row_and_frequency_bin(tmp_path):
    model, windows, longer = open_in_fp64(build("gpt2"), tmp_path), text(8), np.arange(V) ** 2 // 3
    found = gradients_of(model, windows, batch=8, counts=longer)
    ((a, b),) = batch_gradients(model, windows, 8)
    rows_a, rows_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    share, seen = rows_b / (rows_a + rows_b), np.bincount(windows.flatten(), minlength=V)
    absent = found["absent tokens' part of the head path"]
    assert absent.n == (seen == 0).sum() > 5
    assert absent.value == pytest.approx((rows_b[seen == 0] ** 2).sum() / (rows_b**2).sum(), rel=1e-10)
    for at in (0.05, 0.25, 0.5, 0.75, 0.95):
        quantile = found[f"{SHARE} in a row, {at:.0%} quantile, gradient"]
        assert quantile.n == (seen > 0).sum()
        assert quantile.value == pytest.approx(np.quantile(share[seen > 0], at), rel=1e-10)
    places = np.minimum(share[seen > 0] * HISTOGRAM, HISTOGRAM - 1).astype(int)  # the last bin includes a share of 1
    (rows,) = [curve for curve in found.curves if curve.which == "gradient"]
    assert rows.y == pytest.approx((np.bincount(places, minlength=HISTOGRAM) / (seen > 0).sum()).tolist())
    bins, longest = found.listings
    best = int(np.argmax(rows_a**2 + rows_b**2))
    wanted = (plain(rows_a[best]), plain(rows_b[best]), str(Quantity("", share[best], unit="%")))
    assert longest.rows[0][:6] == (f"w{best}", str(best), str(seen[best]), *wanted)
    for label, row, index in zip(BINS, bins.rows, range(6), strict=True):
        inside = frequency_bins(longer) == index
        assert row[1:4] == (str(inside.sum()), count(longer[inside].sum()), plain(np.linalg.norm(a[inside])))
        if inside.any():
            of_b = (b[inside] ** 2).sum() / (b**2).sum()
            assert found[f"head path: {label} times"].value == pytest.approx(of_b, rel=1e-10)
    assert sum(q.value for q in found.quantities if q.name.startswith("lookup path: ")) == pytest.approx(1)


def test_adam_step_by_path_adds_up_to_the_step_of_torch(tmp_path):
    model, windows = open_in_fp64(build("gpt2"), tmp_path), text(8)
    pairs = [tuple(map(torch.from_numpy, pair)) for pair in batch_gradients(model, windows, 2)]
    weight = torch.nn.Parameter(torch.zeros(V, 16, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0)
    for a, b in pairs:
        before = weight.detach().clone()
        weight.grad = a + b
        optimizer.step()
    moments = AdamPaths(*pairs[0], True, (0.9, 0.999), 1e-8)
    for pair in pairs:
        moments.add(*pair)
    one, two = moments.step()
    step = before - weight.detach()
    assert (one + two - step).norm() <= 1e-10 * step.norm()
    wanted = [part.norm().item() for part in (one, two, step)]
    assert norms_by_path(gradients_of(model, windows, batch=2), "Adam's step") == pytest.approx(wanted, rel=1e-8)


def test_gradients_of_reports_the_older_norm_over_positions(tmp_path):
    model, windows = open_in_fp64(build("gpt2"), tmp_path), text(4) % 4 + 3
    ids, kept = torch.from_numpy(windows), []
    hook = model.ends.main_lookup.register_forward_hook(lambda m, i, out: (out.retain_grad(), kept.append(out))[0])
    F.cross_entropy(model.model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    hook.remove()
    found = gradients_of(model, windows, batch=4)
    by_position, share, share_l1 = (
        next(q.value for q in found.quantities if "not commensurable" in q.name and q.name.startswith(name))
        for name in ("norm at the lookup's outputs", f"{SHARE},", f"{SHARE} of L1")
    )
    ((a, b),) = batch_gradients(model, windows, 4)
    l1, norm = kept[0].grad.abs().sum().item(), np.linalg.norm(b)
    assert by_position == pytest.approx(kept[0].grad.norm().item(), rel=1e-10)
    assert share == pytest.approx(norm / (by_position + norm), rel=1e-10)
    assert share_l1 == pytest.approx(np.abs(b).sum() / (l1 + np.abs(b).sum()), rel=1e-10)
    # squared norms do not add over positions of one token
    assert by_position != pytest.approx(np.linalg.norm(a), rel=0.01)


def test_by_batch_estimates_norms_without_bias():
    """Norms at any batch size, also infinite, estimated from few batches average to the truth."""
    draw = np.random.default_rng(0)
    truth, spread, size, n = np.array([6.0, -3.0, 1.5]), 1.5, 4, 5
    squares = {1: [], 64: [], math.inf: []}
    for _ in range(4000):
        a = truth + spread / math.sqrt(size) * draw.standard_normal((n, 3))
        rows = torch.from_numpy(a)[:, None]
        singles = [row_sums(row, row, True).split() for row in rows]
        mean = float(np.linalg.norm(a.mean(0)))
        for windows, (norm, _) in zip((*gradients.SIZES, math.inf), by_batch(singles, (mean, mean), size), strict=True):
            if windows in squares:
                squares[windows].append(norm**2)
    for windows, found in squares.items():
        error = np.std(found) / math.sqrt(len(found))
        assert abs(np.mean(found) - (truth @ truth + 3 * spread**2 / windows)) < 4.5 * error


def test_batch_size_curve_matches_the_measured_batch_size(tmp_path):
    model, windows = open_in_fp64(build("gpt2"), tmp_path), text(64)
    found = gradients_of(model, windows, batch=8)
    (curve,) = [curve for curve in found.curves if curve.log_x]
    by_size = dict(zip(curve.x, curve.y, strict=True))
    a, b = (math.sqrt(np.mean([np.linalg.norm(g[i]) ** 2 for g in batch_gradients(model, windows, 8)])) for i in (0, 1))
    assert (curve.mark, by_size[8]) == (8, pytest.approx(b / (a + b), rel=1e-10))
    assert by_size[64] == pytest.approx(found[f"{SHARE} of norms, whole text"].value, rel=1e-10)


def test_gradients_of_one_batch_have_no_interval_and_no_batch_size_curve(tmp_path):
    said = []
    with listen_to_progress(lambda *what: said.append(what)):
        found = gradients_of(open_in_fp64(variant("llama", FAMILIES["llama"][0]), tmp_path), text(8), batch=8)
    assert math.isnan(found[f"{SHARE} per batch"].low)
    assert not any(curve.log_x for curve in found.curves)
    assert said == [("gradients", 8, 8)]


@pytest.mark.parametrize("batch", [4, 0])
def test_gradients_of_refuses_empty_batches_and_too_few_windows(batch, tmp_path):
    with pytest.raises(DataError, match=f"batches of {batch} from 3 windows"):
        gradients_of(open_in_fp64(build("gpt2"), tmp_path), text(3), batch=batch)


def uniform_row_sums(share, cosine, rows=10):
    """Return the sums of equal rows."""
    a2, b2 = np.full(rows, (1 - share) ** 2), np.full(rows, share**2)
    return RowSums(a2, b2, cosine * np.sqrt(a2 * b2), np.sqrt(a2), np.sqrt(b2))


def paths(share=0.7, cosine=0.3, null=(-0.1, 0.1), **changed):
    """Return the gradients of a table of ten tokens, two of which occur in no window."""
    split = uniform_row_sums(share, cosine).split()
    each = tuple(replace(split, share_b=share + x, cosine=cosine + 5 * x) for x in (-0.02, 0.0, 0.02))
    given = {"objective": NEXT, "length": 16, "predicted": 720, "nll": 2.5, "batch": 8}
    given |= {"batches": each, "looked_up": ((2 * split.b, 3 * split.b_l1),) * 3, "mean": (split.a, split.b)}
    given |= {
        "gradient": uniform_row_sums(share, cosine),
        "null": null,
        "update": uniform_row_sums(0.6, -0.5),
        "longest": ((3, " <b>"),),
    }
    given |= {"seen": np.array([0, 0, *range(3, 11)]), "counts": np.array([0, 0, *range(30, 38)])}
    return PathGradients(**given | changed)


@pytest.mark.parametrize(
    ("share", "whole", "said"),
    [
        (
            (0.68, 0.72),
            (0.7, 0.3),
            "the head's gradient is larger; both point the same way (cosine 0.300)",
        ),
        (
            (0.28, 0.32),
            (0.3, -0.5),
            "the lookup's gradient is larger; they are opposed (cosine −0.500)",
        ),
        (
            (0.28, 0.32),
            (0.3, -0.008),
            "the lookup's gradient is larger; both are nearly perpendicular (cosine −0.008)",
        ),
        (
            (0.48, 0.52),
            (0.5, 0.06),
            "no larger gradient detected; their directions are unrelated (cosine 0.060)",
        ),
        ((0.68, 0.72), (0.7, math.nan), "the head's gradient is larger; the two tables are separate"),
        ((math.nan, math.nan), (math.nan, math.nan), "both gradients are zero on this text"),
    ],
)
def test_answer_names_the_stronger_path_and_the_agreement_of_both(share, whole, said):
    printed = answer(Quantity("", whole[0], *share), uniform_row_sums(*whole).split(), (-0.1, 0.1))
    assert printed.replace("over the whole text ", "") == said


def test_measurement_of_reports_batches_text_and_step_without_empty_bins():
    found = measurement_of(paths())
    assert found.answer.startswith("the head's gradient is larger; over the whole text both point the same way (")
    cosine = found["cosine of the two paths per batch"]
    assert (cosine.chance, cosine.speaks) == (0.0, ONE)
    assert replace(cosine, value=-0.3, low=-0.4, high=-0.2).speaks == NEITHER
    assert found["share in Adam's step"].value == pytest.approx(0.6)
    whole = found["cosine, whole text"]
    assert (whole.value, whole.null) == (pytest.approx(0.3), (-0.1, 0.1))
    assert found["absent tokens' part of Adam's step"].value == pytest.approx(0.2)
    assert "2 of 10 tokens occur in no window and get the head path alone" in found.notes
    by_count = [q.name for q in found.quantities if q.figure == "Head path's share by how often a token occurs"]
    assert by_count == [f"{times} times{step}" for times in ("0", "10–99") for step in ("", ", Adam's step")]
    bins, longest = found.listings
    assert bins.rows[0][:3] == ("0", "2", "0")
    assert longest.rows[0][:3] == ("␣<b>", "3", "4")
    apart = measurement_of(paths(cosine=math.nan, null=(math.nan, math.nan)))
    assert not any(q.question for q in apart.quantities)
