"""Tests of LAMB against numpy and AdamW, and of averaged SGD against torch's ASGD."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tiewise.core.errors import RunError
from tiewise.training.optimizers import AveragedSGD, Lamb, lamb_groups, trust_ratio


def reference_lamb(x, gradients, lr, beta1, beta2, eps, decay, adapt):
    m = v = np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        u = r + decay * x
        ratio = np.sqrt((x**2).sum()) / np.sqrt((u**2).sum()) if adapt else 1.0
        x = x - lr * ratio * u
    return x


def lamb_steps(x, gradients, saved=None, **options):
    """Take LAMB steps, starting from the saved state of an earlier optimizer if given."""
    p = torch.nn.Parameter(torch.as_tensor(x).clone())
    optimizer = Lamb([p], **options)
    if saved is not None:
        optimizer.load_state_dict(copy.deepcopy(saved))
    for g in gradients:
        p.grad = torch.as_tensor(g).clone()
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_matches_numpy_reference_after_resume(adapt, decay):
    """Take six steps, the last three after a resume."""
    draw = np.random.default_rng(0)
    x, gradients = draw.normal(size=(7, 5)), draw.normal(size=(6, 7, 5)) * 3
    numbers = {"lr": 0.05, "eps": 1e-3, "weight_decay": decay}
    p, optimizer = lamb_steps(x, gradients[:3], betas=(0.8, 0.95), adapt=adapt, **numbers)
    p, _ = lamb_steps(p.detach().numpy(), gradients[3:], optimizer.state_dict())
    expected = reference_lamb(x, gradients, 0.05, 0.8, 0.95, 1e-3, decay, adapt)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12)


def train_both(ours, theirs, mine, other, steps):
    """Train two equal layers on the same batches."""
    for _ in range(steps):
        x, y = torch.randn(7, 5, dtype=ours.weight.dtype), torch.randn(7, 3, dtype=ours.weight.dtype)
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def test_lamb_without_trust_ratio_matches_adamw():
    torch.manual_seed(0)
    one = nn.Linear(5, 3).double()
    other = copy.deepcopy(one)
    ours = Lamb(one.parameters(), lr=1e-2, weight_decay=0.1, adapt=False)
    train_both(one, other, ours, torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6), 5)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("x", [np.zeros(3), np.ones(3)])
def test_trust_ratio_is_one_for_zero_norm(x):
    assert trust_ratio(torch.tensor(x), torch.zeros(3)).item() == 1
    assert trust_ratio(torch.zeros(3), torch.tensor(x)).item() == 1
    p, _ = lamb_steps(np.zeros(3), [np.ones(3)], lr=0.1, weight_decay=0.0)
    assert p.detach().numpy() == pytest.approx(-0.1, rel=1e-4)


def test_lamb_keeps_float32_moments_for_bfloat16_parameters():
    ones = torch.ones(4, dtype=torch.bfloat16)
    p, optimizer = lamb_steps(ones, [ones])
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert p.dtype == torch.bfloat16


def test_lamb_groups_lists_shared_parameters_once():
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    b.weight = a.weight
    decayed, plain = lamb_groups(torch.nn.Sequential(a, torch.nn.LayerNorm(3), b), 0.01)
    assert len(decayed["params"]) == 1 and decayed["adapt"] and decayed["weight_decay"] == 0.01  # noqa: PT018
    assert len(plain["params"]) == 4 and not plain["adapt"] and plain["weight_decay"] == 0  # noqa: PT018


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"eps": 0}, {"betas": (0.9, 1.0)}, {"weight_decay": float("nan")}])
def test_lamb_refuses_invalid_options(wrong):
    with pytest.raises(RunError):
        Lamb([torch.nn.Parameter(torch.ones(2))], **wrong)


def test_averaged_sgd_matches_torch_asgd():
    torch.manual_seed(0)
    ours = nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    mine = AveragedSGD(ours.parameters(), 0.1, 1e-3)
    asgd = torch.optim.ASGD(theirs.parameters(), lr=0.1, lambd=0.0, t0=-1, weight_decay=1e-3)
    mine.average()
    train_both(ours, theirs, mine, asgd, 12)
    stepped = ours.weight.detach().clone()
    with mine.averaged():
        torch.testing.assert_close(ours.weight, asgd.state[theirs.weight]["ax"])
    torch.testing.assert_close(ours.weight, stepped)
    torch.testing.assert_close(stepped, theirs.weight)
