"""Both paths against plain autograd of the whole table, the head's own outer products, and torch's Adam."""

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.tiny_models import FAMILIES, V, build, variant

from tiewise import install
from tiewise.analysis.estimates import mean_interval
from tiewise.boundary.locate import locate
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError
from tiewise.core.frequency import bin_of
from tiewise.core.progress import heard
from tiewise.internals.loaded import Opened
from tiewise.internals.path_gradients import HISTOGRAM, by_batch, path_gradients
from tiewise.internals.text_loss import HALF, HIDDEN, NEXT, TextLoss
from tiewise.internals.two_paths import Adam, AdamPaths, cosine_null, parted, row_sums

T = 12
MASK = 2
NAMES = ("gpt2", "llama", "gemma2", "cohere", "granite", "opt", "opt_350m", "t5", "t5_v11", "bart", "bert")
KINDS = {"t5": HALF, "t5_v11": HALF, "bart": HALF, "bert": HIDDEN}


def folder(path):
    """A folder with a tokenizer whose token 2 is the mask."""
    words = {f"w{i}": i for i in range(V)} | {"[MASK]": MASK}
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}})
    )
    return open_folder(path)


def opened(model, path):
    model = model.double().eval()
    return Opened(folder(path), model, locate(model))


def text(count=5, seed=0, length=T):
    return np.random.default_rng(seed).integers(3, V - 7, (count, length))


def logits_of(model, kind, ids, masked):
    """(logits of what is predicted, the tokens), asked of the model by hand."""
    if kind == NEXT:
        return model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    if kind == HIDDEN:
        return model(masked).logits[masked == MASK], ids[masked == MASK]
    first, second = ids[:, : T // 2], ids[:, T // 2 :]
    start = torch.full((len(ids), 1), model.config.decoder_start_token_id)
    return model(first, decoder_input_ids=torch.cat([start, second[:, :-1]], 1)).logits.flatten(0, 1), second.flatten()


def by_hand(found, windows):
    """(gradient of the undivided table by plain autograd, the head's part as Σ ∂L/∂logit · hidden, the loss)."""
    model, ends = found.model, found.ends
    ids, seen, kept = torch.from_numpy(windows), [], {}
    loss = TextLoss(found, windows)
    spy = model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw.get("input_ids")), with_kwargs=True)
    loss.total(torch.arange(len(windows)))
    spy.remove()

    def keep(module, inputs, output):
        output.retain_grad()
        kept["in"], kept["out"] = inputs[0], output

    hook = ends.head.register_forward_hook(keep)
    model.zero_grad()
    nll = F.cross_entropy(*logits_of(model, loss.kind, ids, seen[-1]))
    nll.backward()
    hook.remove()
    hidden, slope = kept["in"].detach().flatten(0, -2), kept["out"].grad.flatten(0, -2)
    total = ends.source.weight.grad.clone()
    model.zero_grad()
    return total, slope.T @ hidden, nll.item()


def divided(found, windows):
    with parted(found.ends) as leaves:
        return leaves.gradient(TextLoss(found, windows), torch.arange(len(windows)))


@pytest.mark.parametrize(("name", "kind"), [("bert", HIDDEN), ("llama", NEXT)])
def test_what_is_predicted_does_not_depend_on_the_size_of_the_weights(name, kind, tmp_path):
    model_class, config_class, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(settings | {"initializer_range": 1e-3})))
    assert TextLoss(opened(model, tmp_path), text()).kind == kind


@pytest.mark.parametrize("name", NAMES)
def test_a_plus_b_is_the_gradient_of_the_whole_table(name, tmp_path):
    found, windows = opened(build(name), tmp_path), text()
    total, b, nll = by_hand(found, windows)
    got = divided(found, windows)
    assert TextLoss(found, windows).kind == KINDS.get(name, NEXT)
    assert found.ends.tied
    assert (got.a + got.b - total).norm() <= 1e-10 * total.norm()
    assert (got.b - b).norm() <= 1e-10 * b.norm()
    assert min(got.a.norm(), got.b.norm()) > 1e-3 * total.norm()  # neither path is nothing
    assert got.nll == pytest.approx(nll, rel=1e-12)
    measured = path_gradients(found, windows, batch=2)
    assert measured.whole.a == pytest.approx((total - b).norm().item(), rel=1e-6)  # batches round fp32 norms otherwise
    assert measured.whole.b == pytest.approx(b.norm().item(), rel=1e-6)
    assert measured.whole.total == pytest.approx(total.norm().item(), rel=1e-6)
    assert measured.nll == pytest.approx(nll, rel=1e-6)
    assert measured.predicted == {NEXT: 11, HALF: 6, HIDDEN: 2}[measured.objective] * 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
def test_the_loss_is_the_models_own(name, tmp_path):
    found, windows = opened(build(name), tmp_path), text()
    ids = torch.from_numpy(windows)
    inputs = {"input_ids": ids, "labels": ids}
    if name in KINDS:
        inputs = {"input_ids": ids[:, : T // 2], "labels": ids[:, T // 2 :].contiguous()}
    with torch.no_grad():
        own = found.model(**inputs).loss.item()
    assert divided(found, windows).nll == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("spec", ["factored:8", "residual:4", "tied+bias", "tied+alpha=0.5", "projected:24"])
def test_a_boundary_of_ours_is_divided_too(spec, tmp_path):
    model = build("llama")
    install(model, spec)
    found, windows = opened(model, tmp_path), text()
    ids = torch.from_numpy(windows)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    total = found.ends.source.weight.grad.clone()
    got = divided(found, windows)
    assert (got.a + got.b - total).norm() <= 1e-10 * total.norm()
    assert got.a.norm() > 0 < got.b.norm()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_two_tables_have_a_path_each(name, tmp_path):
    found, windows = opened(build(name, tied=False), tmp_path), text()
    a, b, _ = by_hand(found, windows)
    got = divided(found, windows)
    assert (got.a - a).norm() <= 1e-10 * a.norm()
    assert (got.b - b).norm() <= 1e-10 * b.norm()
    measured = path_gradients(found, windows, batch=2)
    assert not measured.tied
    assert math.isnan(measured.whole.cosine)
    assert measured.whole.total == pytest.approx(math.hypot(a.norm().item(), b.norm().item()), rel=1e-6)


def test_the_model_is_left_as_it_was(tmp_path):
    found = opened(build("t5"), tmp_path)
    model = found.model
    table = model.shared.weight
    table.grad = torch.ones_like(table)
    before = copy.deepcopy(model.state_dict())
    path_gradients(found, text(), batch=2)
    assert model.shared.weight is table is model.lm_head.weight is model.encoder.embed_tokens.weight
    assert torch.equal(table.grad, torch.ones_like(table))
    assert all(p.grad is None for p in model.parameters() if p is not table)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(DataError, match="stop False"), parted(found.ends):
        raise DataError(f"stop {model.lm_head.weight is table}")
    assert model.lm_head.weight is table


def test_pieces_of_a_batch_give_the_same_gradient(tmp_path):
    found, windows = opened(build("gpt2"), tmp_path), text(7)
    loss = TextLoss(found, windows)
    with parted(found.ends) as leaves:
        whole = leaves.gradient(loss, torch.arange(7))
        loss.at_once = 2
        pieces = leaves.gradient(loss, torch.arange(7))
    for name in ("a", "b"):
        assert (getattr(whole, name) - getattr(pieces, name)).norm() <= 1e-12 * getattr(whole, name).norm()
    assert pieces.rows_l2 == pytest.approx(whole.rows_l2, rel=1e-12)
    assert pieces.nll == pytest.approx(whole.nll, rel=1e-12)


def batches(found, windows, size, seed=0):
    """Each whole batch's (A, B) as dense arrays, in the order in which they are taken."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    loss = TextLoss(found, windows, seed)
    with parted(found.ends) as leaves:
        made = [leaves.gradient(loss, which) for which in order.split(size) if len(which) == size]
    return [(g.a.numpy(), g.b.numpy()) for g in made]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_per_batch_norms_and_shares_by_numpy(name, tmp_path):
    found, windows = opened(build(name), tmp_path), text(9)
    got = path_gradients(found, windows, batch=2)
    pairs = batches(found, windows, 2)
    norms = [(np.linalg.norm(a), np.linalg.norm(b)) for a, b in pairs]
    assert got.per_batch.batches == 4
    assert got.per_batch.a.value == pytest.approx(np.mean([a for a, _ in norms]), rel=1e-12)
    assert got.per_batch.share_b.value == pytest.approx(np.mean([b / (a + b) for a, b in norms]), rel=1e-12)
    cosines = [(a * b).sum() / (x * y) for (a, b), (x, y) in zip(pairs, norms, strict=True)]
    assert got.per_batch.cosine.value == pytest.approx(np.mean(cosines), abs=1e-12)
    assert got.activation.b.value == pytest.approx(got.per_batch.b.value, rel=1e-12)


def test_shares_by_row_and_bin_by_numpy(tmp_path):
    found, windows = opened(build("gpt2"), tmp_path), text(8)
    longer = np.arange(V) ** 2 // 3
    got = path_gradients(found, windows, batch=8, counts=longer)
    ((a, b),) = batches(found, windows, 8)
    rows_a, rows_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    share, seen = rows_b / (rows_a + rows_b), np.bincount(windows.flatten(), minlength=V)
    assert got.rows.tokens == (seen > 0).sum()
    assert got.rows.absent == (seen == 0).sum() > 5
    assert got.rows.absent_of_b == pytest.approx((rows_b[seen == 0] ** 2).sum() / (rows_b**2).sum(), rel=1e-10)
    assert got.rows.quantiles == pytest.approx(np.quantile(share[seen > 0], [0.05, 0.25, 0.5, 0.75, 0.95]), rel=1e-10)
    places = np.minimum(share[seen > 0] * HISTOGRAM, HISTOGRAM - 1).astype(int)  # a share of 1 is in the last
    heights = np.bincount(places, minlength=HISTOGRAM) / (seen > 0).sum()
    assert got.rows.histogram == pytest.approx(heights.tolist())
    best = int(np.argmax(rows_a**2 + rows_b**2))
    assert (got.rows.top[0].token, got.rows.top[0].count) == (best, seen[best])
    assert got.rows.top[0].text == f"w{best}"
    assert got.rows.top[0].share_b == pytest.approx(share[best], rel=1e-10)
    for index, one in enumerate(got.bins):
        inside = bin_of(longer) == index
        assert one.tokens == inside.sum()
        if inside.any():
            assert one.gradient.a == pytest.approx(np.linalg.norm(a[inside]), rel=1e-10, abs=1e-15)
            assert one.gradient.b_l1 == pytest.approx(np.abs(b[inside]).sum(), rel=1e-10)
            assert one.of_b == pytest.approx((b[inside] ** 2).sum() / (b**2).sum(), rel=1e-10)
    w = got.whole
    assert w.energy_b == pytest.approx((b**2).sum() / ((a**2).sum() + (b**2).sum()), rel=1e-10)
    assert w.share_b_l1 == pytest.approx(np.abs(b).sum() / (np.abs(a).sum() + np.abs(b).sum()), rel=1e-10)
    assert sum(one.of_a for one in got.bins) == pytest.approx(1)


def test_the_step_by_path_adds_up_to_that_of_torch(tmp_path):
    found, windows = opened(build("gpt2"), tmp_path), text(8)
    pairs = [tuple(map(torch.from_numpy, pair)) for pair in batches(found, windows, 2)]
    weight = torch.nn.Parameter(torch.zeros(V, 16, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0)
    for a, b in pairs:
        before = weight.detach().clone()
        weight.grad = a + b
        optimizer.step()
    moments = AdamPaths(*pairs[0], True, Adam())
    for pair in pairs:
        moments.add(*pair)
    one, two = moments.step()
    step = before - weight.detach()
    assert (one + two - step).norm() <= 1e-10 * step.norm()
    got = path_gradients(found, windows, batch=2).update
    assert got.total == pytest.approx(step.norm().item(), rel=1e-8)
    assert (got.a, got.b) == pytest.approx((one.norm().item(), two.norm().item()), rel=1e-8)


def test_two_tables_are_stepped_apart():
    draw = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(4)]
    moments, steps = AdamPaths(*pairs[0], False, Adam(beta2=0.98)), []
    weights = [torch.nn.Parameter(torch.zeros(5, 3, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.Adam(weights, lr=1.0, betas=(0.9, 0.98))
    for pair in pairs:
        moments.add(*pair)
        before = [w.detach().clone() for w in weights]
        for weight, gradient in zip(weights, pair, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        steps = [b - w.detach() for b, w in zip(before, weights, strict=True)]
    for got, wanted in zip(moments.step(), steps, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_the_older_convention_counts_every_position_as_a_row(tmp_path):
    found, windows = opened(build("gpt2"), tmp_path), text(4) % 4 + 3
    ids, kept = torch.from_numpy(windows), []
    hook = found.ends.source.register_forward_hook(lambda m, i, out: (out.retain_grad(), kept.append(out))[0])
    logits = found.model(ids).logits[:, :-1].flatten(0, 1)
    F.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    hook.remove()
    got = path_gradients(found, windows, batch=4).activation
    assert got.a.value == pytest.approx(kept[0].grad.norm().item(), rel=1e-10)
    a, b = got.a.value, got.b.value
    assert got.share_b.value == pytest.approx(b / (a + b), rel=1e-12)
    ((dense, _),) = batches(found, windows, 4)
    assert got.a.value != pytest.approx(np.linalg.norm(dense), rel=0.01)  # rows of one token do not add as squares


def test_norms_by_batch_size_are_unbiased():
    """Mean gradient G with scatter: the norms at any size from few batches average to the truth, also at no noise."""
    draw = np.random.default_rng(0)
    truth, spread, size, n = np.array([6.0, -3.0, 1.5]), 1.5, 4, 5
    squares = {1: [], 64: [], None: []}
    for _ in range(4000):
        a = truth + spread / math.sqrt(size) * draw.standard_normal((n, 3))
        rows = torch.from_numpy(a)[:, None]
        singles = [row_sums(row, row, True).split() for row in rows]
        mean = float(np.linalg.norm(a.mean(0)))
        for at in by_batch(singles, (mean, mean), size):
            if at.windows in squares:
                squares[at.windows].append(at.a**2)
    for windows, found in squares.items():
        wanted = truth @ truth + (0 if windows is None else 3 * spread**2 / windows)
        error = np.std(found) / math.sqrt(len(found))
        assert abs(np.mean(found) - wanted) < 4.5 * error


def test_the_batch_size_that_was_run_is_predicted(tmp_path):
    found, windows = opened(build("gpt2"), tmp_path), text(64)
    got = path_gradients(found, windows, batch=8)
    squares = [np.linalg.norm(a) ** 2 for a, _ in batches(found, windows, 8)]
    at = next(x for x in got.by_batch if x.windows == 8)
    assert at.a == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-10)
    at = next(x for x in got.by_batch if x.windows == 64)
    assert at.a == pytest.approx(got.whole.a, rel=1e-10)


def test_paths_that_pull_one_way_stand_out_of_the_null():
    """Rows of B that contain A's rows of the same tokens: other tokens' rows of A have no such cosine."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(40, 16, generator=draw, dtype=torch.float64)
    a[20:] = 0
    b = torch.randn(40, 16, generator=draw, dtype=torch.float64)
    b[:20] += 2 * a[:20]
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    low, high = cosine_null(a, b, torch.arange(20), 0, 99)
    assert low < 0 < high < cosine


def test_one_batch_has_no_interval_and_no_scatter(tmp_path):
    found = opened(variant("llama", FAMILIES["llama"][0]), tmp_path)
    said = []
    with heard(lambda *what: said.append(what)):
        got = path_gradients(found, text(8), batch=8)
    assert math.isnan(got.per_batch.share_b.low)
    assert got.by_batch == ()
    assert said == [("gradients", 8, 8)]


@pytest.mark.parametrize(
    ("windows", "batch", "what"),
    [
        (text(3), 4, "batches of 4"),
        (text(3), 0, "batches of 0"),
        (text(0), 1, "windows of shape"),
        (text(3)[:, :1], 1, "windows of shape"),
        (text(3) + V, 1, "in tables of"),
        (text(3, length=50), 1, "40 positions"),
    ],
)
def test_what_cannot_be_run_is_said(windows, batch, what, tmp_path):
    with pytest.raises(DataError, match=what):
        path_gradients(opened(build("gpt2"), tmp_path), windows, batch=batch)


def test_a_masked_model_without_a_mask_token_is_refused(tmp_path):
    found = opened(build("bert"), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no \[MASK\]"):
        path_gradients(Opened(open_folder(tmp_path), found.model, found.ends), text(), batch=1)


def test_intervals_are_students():
    found = mean_interval([1.0, 2.0, 4.0])
    assert found.value == pytest.approx(7 / 3)
    half = 4.302652729911275 * np.std([1, 2, 4], ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(mean_interval([1.0, math.nan]).value)
    assert mean_interval([]).rows == 0
