"""Operations that trainers apply to deferred logits, compared with computed logits in values, gradients and counts."""

import pytest
import torch
import torch.nn.functional as F
from transformers.trainer_pt_utils import LabelSmoother

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.recorded_logits import Counts, PassTargets
from tiewise.core.errors import UnsupportedError

B, T, E, V = 3, 4, 5, 11
TARGETS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3))
HEADS = {
    "plain": lambda z: z,
    "cast, shifted, cooled": lambda z: z.float()[:, :-1] / 0.7,
    "capped": lambda z: torch.tanh(z / 2) * 2,
    "scaled, capped, cooled": lambda z: torch.tanh(z * 1.5 / 2).mul(2) / 0.7,
    "kept positions": lambda z: z[:, -3:, :].contiguous(),
    "cooled in place": lambda z: z[:, :-1][:, -2:].div_(0.9),
}


def leaves(dtype=torch.float64, seed=0):
    """Return hidden states, a table and a bias that require gradients."""
    torch.manual_seed(seed)
    shapes = (B, T, E), (V, E), (V,)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def at(z):
    """Return target tokens [..., 1] for the positions of `z`."""
    return TARGETS[:, : z.shape[1], None]


def selective(z, t):
    """Return log-probabilities as trainers compute them to save memory: a logit minus the log-sum-exp of its row."""
    return z.gather(-1, t)[..., 0] - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def selective_narrow(z, t):
    """Return log-probabilities as trainers compute them from half-precision logits: a log-softmax per row."""
    return torch.stack([F.log_softmax(row, dim=-1).gather(-1, i)[:, 0] for row, i in zip(z, t, strict=True)])


def entropy_in_pieces(z, size=5):
    """Return entropies, computed from pieces of the flattened rows."""
    pieces = [F.log_softmax(piece, dim=-1) for piece in z.reshape(-1, z.shape[-1]).split(size, dim=0)]
    return torch.cat([-(torch.exp(log_p) * log_p).sum(-1) for log_p in pieces]).reshape(z.shape[:-1])


def entropy_of_softmax(z):
    """Return entropies as implementations of PPO compute them."""
    p = torch.nn.functional.softmax(z, dim=-1)
    return torch.logsumexp(z, dim=-1) - torch.sum(p * z, dim=-1)


# name -> (operation on logits, number of passes over the vocabulary)
ASKED = {
    "gather": (lambda z: z.gather(-1, at(z)).squeeze(-1), 1),
    "torch.gather by name": (lambda z: torch.gather(input=z, dim=2, index=at(z)), 1),
    "logsumexp": (lambda z: torch.logsumexp(z, -1), 1),
    "logsumexp kept": (lambda z: z.logsumexp(dim=-1, keepdim=True), 1),
    "log-softmax gathered": (lambda z: torch.gather(z.log_softmax(-1), -1, at(z)).squeeze(-1), 1),
    "log-softmax taken": (lambda z: torch.take_along_dim(z.log_softmax(dim=-1), at(z), dim=2).squeeze(-1), 1),
    "softmax gathered": (lambda z: torch.softmax(z, -1).gather(2, at(z)), 1),
    "selective": (lambda z: selective(z, at(z)), 1),
    "selective, narrow": (lambda z: selective_narrow(z, at(z)), B),
    "entropy": (lambda z: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1), 1),
    "entropy in pieces": (entropy_in_pieces, 1),
    "entropy of softmax": (entropy_of_softmax, 1),
    "entropy of both": (lambda z: -torch.sum(F.softmax(z, -1) * F.log_softmax(z, -1), -1, keepdim=True), 1),
    "both": (lambda z: selective(z, at(z)) + 0.3 * entropy_in_pieces(z), 1),
    "both, entropy first": (lambda z: entropy_of_softmax(z) - selective(z, at(z)), 2),
    "other tokens too": (lambda z: z.gather(-1, at(z)) - z.gather(-1, (at(z) + 1) % V), 2),
    "halves": (lambda z: torch.stack([torch.logsumexp(half, -1).sum() for half in z.chunk(2, dim=0)]), 1),
    "columns": (lambda z: torch.stack([torch.logsumexp(column, -1) for column in z.unbind(1)]), 1),
    "pieces of pieces": (lambda z: torch.cat([piece.logsumexp(-1) for row in z for piece in row.split(1)]), 1),
    "minus log-softmax gathered": (lambda z: (-z.log_softmax(-1)).gather(-1, at(z)), 1),
    "log-softmax summed": (lambda z: F.log_softmax(z, -1).sum(-1), 1),
    "minus log-softmax summed": (lambda z: torch.sum(-F.log_softmax(z, -1), dim=2, keepdim=True), 1),
    "summed in a type": (lambda z: torch.neg(F.log_softmax(z, -1)).sum(dim=-1, dtype=z.dtype), 1),
    "smoothed labels": (lambda z: LabelSmoother(0.3)({"logits": z}, at(z)[..., 0].where(at(z)[..., 0] != 4, -100)), 2),
    "cross-entropy of chosen": (lambda z: F.cross_entropy(z[TARGETS[:, : z.shape[1]] > 3], at(z)[at(z) > 3]), 1),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("asked", ASKED)
def test_deferred_logits_give_the_values_and_gradients_of_computed_logits(asked, head):
    ask, passes = ASKED[asked]
    counts, given = Counts(), leaves()
    found = ask(HEADS[head](Deferred(*given, counts)))
    mine = leaves()
    wanted = ask(HEADS[head](F.linear(*mine)))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert (counts.fused, counts.materialised) == (passes, 0)
    weights = torch.randn(found.shape, dtype=found.dtype)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    rounding = 1e-5 if "cast" in head else 1e-9  # rounding of the computed logits in fp32
    for got, expected in zip(given, mine, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=rounding, atol=rounding)


def test_pass_targets_match_without_reading_device_values():
    """Meta tensors have no values, so a comparison raises an error where a GPU would synchronise."""
    labels = torch.zeros(B, T, 1, dtype=torch.long, device="meta")
    known = PassTargets(labels.reshape(-1))
    assert known.match(labels.reshape(-1))
    with pytest.raises(NotImplementedError):
        known.match(labels.reshape(-1)[1:])  # other targets
    labels += 1
    with pytest.raises(NotImplementedError):
        known.match(labels.reshape(-1))  # changed targets


def test_targets_written_in_place_start_a_new_pass():
    labels, z = at(torch.empty(B, T, V)).clone(), Deferred(*leaves(), Counts())
    first = z.gather(-1, labels)
    labels.numpy()[:] = (labels.numpy() + 1) % V  # a change that autograd does not see
    second = z.gather(-1, labels)
    torch.testing.assert_close(second, F.linear(*leaves()).gather(-1, labels))
    assert not torch.equal(first, second)
    assert z.counts.fused == 2


WITHOUT_GRADIENT = {
    "argmax": lambda z: z.argmax(dim=-1),
    "argmax kept": lambda z: torch.argmax(z, 2, keepdim=True),
    "mean": lambda z: z.detach().mean(-1),
    "mean of all": lambda z: z.detach()[TARGETS[:, : z.shape[1]] > 3].mean(),
    "argmax of log-softmax": lambda z: F.log_softmax(z, -1).argmax(-1),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("asked", WITHOUT_GRADIENT)
def test_metrics_compute_logits_one_chunk_at_a_time(asked, head):
    counts = Counts()
    found = WITHOUT_GRADIENT[asked](HEADS[head](Deferred(*leaves(), counts)))
    assert counts.materialised == 0
    assert not found.requires_grad
    torch.testing.assert_close(found, WITHOUT_GRADIENT[asked](HEADS[head](F.linear(*leaves()))))


OTHERWISE = {  # in addition to the calls of test_deferred.py with every argument
    "probabilities summed": lambda z: z.softmax(-1).sum(-1),
    "product with another's": lambda z: (z.softmax(-1) * (z / 2)).sum(-1),
    "product with a slice": lambda z: (z.softmax(-1)[0] * z.log_softmax(-1)[0]).sum(-1),
    "product, sliced": lambda z: (z.softmax(-1) * z)[:2].sum(-1),
    "product, averaged": lambda z: (z.softmax(-1) * z).mean(-1),
    "log-softmax twice as large": lambda z: torch.logsumexp(2 * z.log_softmax(-1), -1),
    "some tokens of a log-softmax": lambda z: z.log_softmax(-1)[..., 2:5],
    "iterated tokens": lambda z: torch.stack(list(z[0, 0])),
    "mean with gradient": lambda z: z.mean(-1),
    "bias behind a log-softmax": lambda z: z.log_softmax(-1) + torch.ones(V, dtype=torch.float64),
    "cross-entropy of a log-softmax": lambda z: F.cross_entropy(z.log_softmax(-1).view(-1, V), at(z).reshape(-1)),
}


@pytest.mark.parametrize("asked", OTHERWISE)
def test_unsupported_operations_compute_the_logits(asked):
    counts = Counts()
    torch.testing.assert_close(
        OTHERWISE[asked](Deferred(*leaves(), counts)), OTHERWISE[asked](F.linear(*leaves())), rtol=1e-12, atol=1e-12
    )
    assert counts.materialised
    assert not counts.fused


def test_gather_refuses_a_token_outside_the_vocabulary_as_torch_does():
    for wrong in (-100, V):
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
            Deferred(*leaves(), Counts()).gather(-1, torch.full((B, T, 1), wrong))


def test_pass_without_gradients_is_not_reused_for_one_with_gradients():
    counts, given = Counts(), leaves()
    z = Deferred(*given, counts)
    with torch.no_grad():
        assert not entropy_in_pieces(z).requires_grad
    assert counts.fused == 1
    entropy = entropy_in_pieces(z)
    with torch.no_grad():
        assert not z.logsumexp(-1).requires_grad
        assert not z.detach().logsumexp(-1).requires_grad
    assert not entropy_in_pieces(z.detach()).requires_grad
    assert counts.fused == 2
    entropy.sum().backward()
    assert all(x.grad.norm() > 0 for x in given[:2])


def test_writing_into_a_result_does_not_change_later_results():
    z, targets = Deferred(*leaves(), Counts()), TARGETS[..., None].clone()
    first = z.log_softmax(-1).gather(-1, targets)
    kept = first.clone()
    targets.fill_(0)
    assert not torch.equal(z.log_softmax(-1).gather(-1, targets), kept)
    with torch.no_grad():
        first[0] = 7.0
        z.logsumexp(-1).fill_(7.0)
    assert torch.equal(z.log_softmax(-1).gather(-1, TARGETS[..., None]), kept)


def test_bf16_logits_give_fp32_log_probabilities_of_bf16_products():
    given = leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        z = Deferred(*given, Counts())
    assert z.dtype == torch.bfloat16
    found = selective_narrow(z, at(z))
    rounded = [x.detach().bfloat16() for x in given]
    wanted = F.log_softmax(F.linear(*rounded).float(), -1).gather(-1, at(z))[..., 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-2)


def test_in_place_scale_makes_other_views_of_the_logits_unreadable():
    z = Deferred(*leaves(), Counts())
    log_p, view = z.log_softmax(-1), z[:, 1:]
    z /= 2
    torch.testing.assert_close(z.real(), F.linear(*leaves()) / 2)
    torch.testing.assert_close(log_p.gather(-1, at(z)), F.linear(*leaves()).log_softmax(-1).gather(-1, at(z)))
    for read in (view.real, lambda: view.logsumexp(-1), lambda: view.argmax(-1), lambda: (view * 2).real()):
        with pytest.raises(UnsupportedError, match="scaled in place") as e:
            read()
        assert "logits / temperature" in e.value.remedy


def test_in_place_scale_is_refused_without_gradients_and_after_a_read():
    z = Deferred(*leaves(), Counts())
    with torch.no_grad(), pytest.raises(UnsupportedError, match="in place"):
        z.div_(2)
    z.real()
    with pytest.raises(UnsupportedError, match="in place"):
        z.mul_(2)
