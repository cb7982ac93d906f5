"""Loss of a text and gradients by path, against autograd and the head's outer products."""

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.tiny_models import FAMILIES, V, build

from tiewise import install
from tiewise.boundary.locate import locate
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.running.two_paths import (
    HALF,
    HIDDEN,
    NEXT,
    AdamPaths,
    TextLoss,
    cosine_null,
    row_sums,
    separate_leaves,
)

T = 12
MASK = 2
NAMES = ("gpt2", "llama", "gemma2", "cohere", "granite", "opt", "opt_350m", "t5", "t5_v11", "bart", "bert")
KINDS = {"t5": HALF, "t5_v11": HALF, "bart": HALF, "bert": HIDDEN}


def write_mask_tokenizer(path):
    """Write a folder with a tokenizer whose token 2 is the mask; open it."""
    words = {f"w{i}": i for i in range(V)} | {"[MASK]": MASK}
    (path / "config.json").write_text("{}")
    tokenizer = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return open_folder(path)


def open_in_fp64(model, path):
    model = model.double().eval()
    return Opened(write_mask_tokenizer(path), model, locate(model))


def text(count=5, length=T):
    return np.random.default_rng(0).integers(3, V - 7, (count, length))


def logits_of(model, kind, ids, masked):
    """Return the logits at predicted positions and their target tokens."""
    if kind == NEXT:
        return model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    if kind == HIDDEN:
        return model(masked).logits[masked == MASK], ids[masked == MASK]
    first, second = ids[:, : T // 2], ids[:, T // 2 :]
    start = torch.full((len(ids), 1), model.config.decoder_start_token_id)
    return model(first, decoder_input_ids=torch.cat([start, second[:, :-1]], 1)).logits.flatten(0, 1), second.flatten()


def loss_and_inputs(found, windows):
    """Return the `TextLoss` of windows and the ids that the model receives."""
    seen, loss = [], TextLoss(found, windows)
    spy = found.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw.get("input_ids")), with_kwargs=True)
    loss.total(torch.arange(len(windows)))
    spy.remove()
    return loss, seen[-1]


def gradients_by_hand(found, windows):
    """Return the whole gradient by autograd, the head's Σ ∂L/∂logit · hidden, and the loss."""
    model, ends = found.model, found.ends
    kept, (loss, masked) = {}, loss_and_inputs(found, windows)

    def keep(module, inputs, output):
        output.retain_grad()
        kept["in"], kept["out"] = inputs[0], output

    hook = ends.head.register_forward_hook(keep)
    model.zero_grad()
    nll = F.cross_entropy(*logits_of(model, loss.objective, torch.from_numpy(windows), masked))
    nll.backward()
    hook.remove()
    hidden, slope = kept["in"].detach().flatten(0, -2), kept["out"].grad.flatten(0, -2)
    total = ends.main_lookup.weight.grad.clone()
    model.zero_grad()
    return total, slope.T @ hidden, nll.item()


def gradients_by_path(found, windows):
    with separate_leaves(found.ends) as leaves:
        return leaves.gradient(TextLoss(found, windows), torch.arange(len(windows)))


@pytest.mark.parametrize(("name", "kind"), [("bert", HIDDEN), ("llama", NEXT)])
def test_text_loss_kind_is_independent_of_the_weight_scale(name, kind, tmp_path):
    model_class, config_class, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(settings | {"initializer_range": 1e-3})))
    assert TextLoss(open_in_fp64(model, tmp_path), text()).objective == kind


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in NAMES), ("gpt2", False), ("llama", False), ("gemma2", False)]
)
def test_separate_leaves_split_the_gradient_of_tied_and_untied_tables(name, tied, tmp_path):
    found, windows = open_in_fp64(build(name, tied=tied), tmp_path), text()
    total, b, nll = gradients_by_hand(found, windows)
    got = gradients_by_path(found, windows)
    assert TextLoss(found, windows).objective == KINDS.get(name, NEXT)
    assert found.ends.tied == tied
    assert (got.a + got.b * tied - total).norm() <= 1e-10 * total.norm()
    assert (got.b - b).norm() <= 1e-10 * b.norm()
    assert min(got.a.norm(), got.b.norm()) > 1e-3 * total.norm()  # both paths contribute
    assert got.nll == pytest.approx(nll, rel=1e-12)
    assert TextLoss(found, windows).per_window == {NEXT: 11, HALF: 6, HIDDEN: 2}[KINDS.get(name, NEXT)]


@pytest.mark.parametrize("spec", ["factored:8", "residual:4", "tied+bias", "tied+alpha=0.5", "projected:24"])
def test_separate_leaves_split_the_gradient_of_an_installed_boundary(spec, tmp_path):
    model = build("llama")
    install(model, spec)
    found, windows = open_in_fp64(model, tmp_path), text()
    ids = torch.from_numpy(windows)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    total = found.ends.main_lookup.weight.grad.clone()
    got = gradients_by_path(found, windows)
    assert (got.a + got.b - total).norm() <= 1e-10 * total.norm()
    assert got.a.norm() > 0 < got.b.norm()


def test_separate_leaves_restore_the_model(tmp_path):
    found = open_in_fp64(build("t5"), tmp_path)
    model = found.model
    table = model.shared.weight
    table.grad = torch.ones_like(table)
    before = copy.deepcopy(model.state_dict())
    gradients_by_path(found, text())
    assert model.shared.weight is table is model.lm_head.weight is model.encoder.embed_tokens.weight
    assert torch.equal(table.grad, torch.ones_like(table))
    assert all(p.grad is None for p in model.parameters() if p is not table)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(DataError, match="stop False"), separate_leaves(found.ends):
        raise DataError(f"stop {model.lm_head.weight is table}")
    assert model.lm_head.weight is table


def test_separate_leaves_give_the_same_gradient_for_pieces_of_a_batch(tmp_path):
    found, windows = open_in_fp64(build("gpt2"), tmp_path), text(7)
    loss = TextLoss(found, windows)
    with separate_leaves(found.ends) as leaves:
        whole = leaves.gradient(loss, torch.arange(7))
        loss.at_once = 2
        pieces = leaves.gradient(loss, torch.arange(7))
    for name in ("a", "b"):
        assert (getattr(whole, name) - getattr(pieces, name)).norm() <= 1e-12 * getattr(whole, name).norm()
    assert pieces.rows_l2 == pytest.approx(whole.rows_l2, rel=1e-12)
    assert pieces.nll == pytest.approx(whole.nll, rel=1e-12)


def test_adam_paths_step_two_tables_separately():
    draw = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2)) for _ in range(4)]
    moments, steps = AdamPaths(*pairs[0], False, (0.9, 0.98), 1e-8), []
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


def test_cosine_null_is_below_the_cosine_of_paths_that_agree():
    """Rows of B contain A's rows of the same tokens, so permuted rows have lower cosines."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(40, 16, generator=draw, dtype=torch.float64)
    a[20:] = 0
    b = torch.randn(40, 16, generator=draw, dtype=torch.float64)
    b[:20] += 2 * a[:20]
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    low, high = cosine_null(a, b, torch.arange(20), 0, 99)
    assert low < 0 < high < cosine


@pytest.mark.parametrize("one_table", [True, False])
def test_row_sums_match_numpy(one_table):
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(9 if one_table else 7, 3)), draw.normal(size=(9, 3))
    b[2] = 0
    found, rows = row_sums(torch.from_numpy(a), torch.from_numpy(b), one_table), np.array([0, 2, 5])
    longer = np.vstack([a, np.zeros((9 - len(a), 3))])
    lengths = np.linalg.norm(longer, axis=1), np.linalg.norm(b, axis=1)
    assert found.share_b == pytest.approx(lengths[1] / (lengths[0] + lengths[1]), rel=1e-10)
    one, two, split = longer[rows], b[rows], found.split(rows)
    norms = np.linalg.norm(one), np.linalg.norm(two)
    assert (split.a, split.b) == pytest.approx(norms, rel=1e-10)
    assert split.b_l1 == pytest.approx(np.abs(two).sum(), rel=1e-10)
    assert split.share_b_l1 == pytest.approx(np.abs(two).sum() / (np.abs(one).sum() + np.abs(two).sum()), rel=1e-10)
    assert split.energy_b == pytest.approx(norms[1] ** 2 / (norms[0] ** 2 + norms[1] ** 2), rel=1e-10)
    cosine = (one * two).sum() / (norms[0] * norms[1]) if one_table else math.nan
    assert split.cosine == pytest.approx(cosine, rel=1e-10, nan_ok=True)
    assert split.total == pytest.approx(np.linalg.norm(one + two) if one_table else math.hypot(*norms), rel=1e-10)


@pytest.mark.parametrize(
    ("windows", "what"),
    [
        (text(0), "windows of shape"),
        (text(3)[:, :1], "windows of shape"),
        (text(3) + V, "in tables of"),
        (text(3) - V, "in tables of"),
        (text(3, length=50), "40 positions"),
    ],
)
def test_text_loss_refuses_unusable_windows(windows, what, tmp_path):
    with pytest.raises(DataError, match=what):
        TextLoss(open_in_fp64(build("gpt2"), tmp_path), windows)


def test_text_loss_refuses_a_masked_model_without_a_mask_token(tmp_path):
    found = open_in_fp64(build("bert"), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"no \[MASK\]"):
        TextLoss(Opened(open_folder(tmp_path), found.model, found.ends), text())
