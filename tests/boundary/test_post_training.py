"""GRPO and DPO losses as trainers write them over `model(…).logits`, compared with the plain model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.boundary.test_deferred_statistics import entropy_in_pieces, selective
from tests.boundary.tiny_models import Allocations, assert_same_gradients, build, gradients, without_dropout

import tiewise
from tiewise.core import backends
from tiewise.core.errors import UnsupportedError

MODELS = ("llama", "gpt2", "gemma2")  # the last with a soft-cap
PROMPT, COMPLETION = 4, 6


def sequences(rows, seed):
    """Return token ids [rows, PROMPT + COMPLETION] and a mask of the completion tokens that count."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 61, (rows, PROMPT + COMPLETION), generator=source)
    mask = torch.arange(COMPLETION) < torch.randint(2, COMPLETION + 1, (rows, 1), generator=source)
    return ids, mask


def completion_logits(model, ids, temperature, in_place):
    """Return the logits [B, COMPLETION, V] that predict the completion, divided by the temperature."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=COMPLETION + 1).logits
    logits = logits[:, :-1, :][:, -COMPLETION:, :]
    return logits.div_(temperature) if in_place else logits / temperature


def grpo_loss(model, reference, temperature=0.9, in_place=False, beta=0.04, clip=0.2):
    """Return the GRPO loss (Shao et al. 2024, eq. 3) on the half of the tokens with the highest entropy."""
    ids, mask = sequences(4, seed=1)
    t = ids[:, -COMPLETION:, None]
    with torch.no_grad():
        # an older policy that is close to the current one
        old = selective(completion_logits(model, ids, temperature, in_place), t)
        old = old + 0.1 * torch.linspace(-1, 1, old.numel()).view_as(old)
        before = selective(completion_logits(reference, ids, temperature, in_place), t)
    logits = completion_logits(model, ids, temperature, in_place)
    log_p = selective(logits, t)
    with torch.no_grad():
        entropy = entropy_in_pieces(logits, size=7)
    chosen = mask & (entropy >= entropy[mask].median())
    advantage = torch.tensor([1.0, -0.5, 0.3, -0.8])[:, None]
    ratio = torch.exp(log_p - old)
    kl = torch.exp(before - log_p) - (before - log_p) - 1
    each = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage) + beta * kl
    return ((each * chosen).sum(-1) / mask.sum(-1)).mean(), {"entropy": entropy[mask].mean(), "kl": kl[chosen].mean()}


def dpo_loss(model, reference, beta=0.3, nll=0.2):
    """Return the DPO loss (Rafailov et al. 2023, eq. 7) with the nll of the chosen sequences, and metrics."""
    ids, mask = sequences(6, seed=2)  # three chosen, then three rejected
    labels = ids[:, 1:].clone()
    mask = torch.cat([torch.zeros(6, PROMPT - 1, dtype=torch.bool), mask], 1)

    def summed(logits):
        each = selective(logits, labels[..., None])
        each[~mask] = 0.0
        return each.sum(-1)

    logits = model(input_ids=ids, use_cache=False).logits[..., :-1, :].contiguous()
    with torch.no_grad():
        before = summed(reference(input_ids=ids, use_cache=False).logits[..., :-1, :].contiguous())
    won, lost = (summed(logits) - before).chunk(2)
    chosen = logits.chunk(2, dim=0)[0]
    likelihood = F.cross_entropy(chosen[mask[:3]], labels[:3][mask[:3]])
    metrics = {
        "entropy": entropy_in_pieces(logits.detach())[mask].mean(),
        "logits": logits.detach().chunk(2, dim=0)[1][mask[3:]].mean(-1).sum(),
        "accuracy": (chosen.argmax(dim=-1) == labels[:3])[mask[:3]].float().mean(),
    }
    return -F.logsigmoid(beta * (won - lost)).mean() + nll * likelihood, metrics


LOSSES = {
    "grpo": grpo_loss,
    "grpo in place": lambda model, reference: grpo_loss(model, reference, in_place=True),
    "dpo": dpo_loss,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_grpo_and_dpo_losses_equal_plain_ones_without_computing_logits(loss, name, tied):
    plain = without_dropout(build(name, tied)).train()
    reference = build(name, tied, seed=7).eval()
    model, frozen = copy.deepcopy(plain), copy.deepcopy(reference)
    installed, of_reference = tiewise.install(model), tiewise.install(frozen)
    with of_reference.deferred():
        got, metrics = LOSSES[loss](model, frozen)
        got.backward()
    assert torch.is_tensor(
        frozen(input_ids=sequences(1, seed=1)[0]).logits
    )  # logits are deferred only within that block
    wanted, expected = LOSSES[loss](plain, reference)
    wanted.backward()
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(metrics, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model), gradients(plain), 1e-5)
    for counts in (installed.counts, of_reference.counts):
        assert (counts.materialised, counts.operations) == (0, [])
        assert counts.fused >= 1


@pytest.mark.parametrize("loss", LOSSES)
def test_grpo_and_dpo_allocate_nothing_of_the_size_of_the_logits(loss, monkeypatch):
    monkeypatch.setattr(backends, "MINIMUM_ROWS", 4)  # tokens per chunk
    monkeypatch.setattr(backends, "CHUNK_ELEMENTS", {"cpu": 0, "cuda": 0})
    plain = build("llama", vocab_size=1500).train()
    model, reference = copy.deepcopy(plain), copy.deepcopy(plain).eval()
    tiewise.install(model)
    with Allocations() as of_plain:
        LOSSES[loss](plain, copy.deepcopy(reference))[0].backward()
    with tiewise.install(reference).deferred(), Allocations() as made:
        LOSSES[loss](model, reference)[0].backward()
    assert of_plain.largest >= 4 * (COMPLETION + 1) * 1500
    assert made.largest == model.lm_head.weight.numel()


def test_fp32_logits_of_a_bf16_model_are_near_fp64():
    model = build("llama", hidden_size=64).to(torch.bfloat16)
    installed, table = tiewise.install(model), model.lm_head.weight
    installed.fp32_logits()
    ids = torch.randint(3, 61, (4, 50), generator=torch.Generator().manual_seed(1))
    t = ids.roll(-1, 1).view(-1)
    with torch.no_grad():
        table.mul_(8)  # logits so large that bf16 rounds them by about 0.1
        hidden = model.model(input_ids=ids).last_hidden_state.view(-1, 64)
        true = (hidden.double() @ table.double().T / 0.7).log_softmax(-1)
        rounded = ((hidden @ table.T).float() / 0.7).log_softmax(-1)
        logits = model(input_ids=ids).logits.float().view(-1, 61) / 0.7
        nll, log_p = F.cross_entropy(logits, t, reduction="none"), logits.log_softmax(-1)
        found = log_p.gather(-1, t[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
    assert table is model.model.embed_tokens.weight
    picked = true.gather(-1, t[:, None])[:, 0]
    assert (rounded.gather(-1, t[:, None])[:, 0] - picked).abs().max() > 1e-2
    assert max((nll + picked).abs().max(), (found - picked).abs().max()) < 1e-3
    assert (entropy + (true.exp() * true).sum(-1)).abs().max() < 1e-3
    assert installed.counts.materialised == 0


@pytest.mark.parametrize("spec", ["tied+softcap=5", "tied+pad=1", "projected"])
def test_fused_lm_head_refuses_a_boundary_that_is_more_than_a_table(spec):
    model, ids = build("llama").train(), sequences(2, seed=3)[0]
    installed = tiewise.install(model, spec)
    with pytest.raises(UnsupportedError, match="more than a table; take TRL"):
        model(ids, labels=ids, fused_lm_head=True)
    model(ids, labels=ids, fused_lm_head=False).loss.backward()
    assert installed.counts.fused == 1
