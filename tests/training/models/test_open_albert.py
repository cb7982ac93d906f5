"""Tests of the ALBERT model against published sizes and a forward pass in fp64 numpy."""

import math

import numpy as np
import pytest
import torch
from albert_tools import TINY, batch, dense_forward, perturbed
from safetensors import safe_open
from transformers import AutoModelForPreTraining, AutoModelForSequenceClassification

import tiewise
from tiewise.core.errors import InstallError, SpecError
from tiewise.training.models import (
    OpenAlbertConfig,
    OpenAlbertForPreTraining,
    OpenAlbertForSequenceClassification,
    OpenAlbertModel,
    preset,
)

SHARINGS = ("none", "attention", "ffn", "all", "all:groups=2", "all:cycle=3", "sandwich", "all+rank=2")
CHAPTER = {"norm": "after", "hidden_act": "gelu", "vocab_size": 30_522}


def size(model):
    return sum(p.numel() for p in model.parameters())


def on_meta(kind, config):
    with torch.device("meta"):
        return kind(config)


SIZES = {"base": (11_683_584, 11_882_428), "large": (17_683_968, 17_916_604)}
SIZES |= {"xlarge": (58_724_864, 59_092_668), "xxlarge": (222_595_584, 223_233_724)}


@pytest.mark.parametrize("name", SIZES)
def test_presets_match_published_parameter_counts(name):
    models = on_meta(OpenAlbertModel, preset(name)), on_meta(OpenAlbertForPreTraining, preset(name, **CHAPTER))
    assert tuple(map(size, models)) == SIZES[name]


def test_parts_of_base_preset_match_published_parameter_counts():
    model = on_meta(OpenAlbertForPreTraining, preset("base", **CHAPTER))
    assert size(model.albert.embeddings) == 4_073_216
    assert size(model.albert) - size(model.albert.pooler) == 11_161_088
    assert size(model.albert.pooler) == 590_592
    assert size(on_meta(OpenAlbertForPreTraining, preset("base", vocab_size=30_522))) == 11_881_148
    counts = {"none": 85_054_464, "attention": 59_051_520, "ffn": 33_090_816, "all": 7_087_872}
    for sharing, count in counts.items():
        assert size(on_meta(OpenAlbertModel, preset("base", sharing=sharing)).layers) == count


@pytest.mark.parametrize("sharing", ["none", "attention", "all:cycle=2"])
def test_open_albert_matches_fp64_numpy_reference(sharing):
    torch.manual_seed(1)
    config = OpenAlbertConfig(**TINY, norm="after", hidden_act="gelu", initializer_range=0.4, sharing=sharing)
    model = perturbed(OpenAlbertForPreTraining(config).double().eval())
    ids, mask, segments, labels, pairs = batch()
    out = model(ids, mask, segments, labels=labels, pair_labels=pairs)
    logits, pair_logits = dense_forward(model.state_dict(), ids.numpy(), mask, segments.numpy(), layers=6, heads=4)
    np.testing.assert_allclose(out.logits.detach().numpy(), logits, atol=1e-10)
    np.testing.assert_allclose(out.pair_logits.detach().numpy(), pair_logits, atol=1e-10)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    known = labels.numpy() != -100
    mlm = -logs[known, labels.numpy()[known]].mean()
    pair = -(pair_logits - np.log(np.exp(pair_logits).sum(-1, keepdims=True)))[range(3), pairs.numpy()].mean()
    assert out.mlm_loss.item() == pytest.approx(mlm, rel=1e-10)
    assert out.pair_loss.item() == pytest.approx(pair, rel=1e-10)
    assert out.loss.item() == pytest.approx(mlm + pair, rel=1e-10)
    found = model(ids, mask, segments, labels=labels, predict=labels != -100).loss.item()
    assert found == pytest.approx(mlm, rel=1e-10)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_saved_albert_stores_shared_weights_once_and_reloads_exactly(sharing, tmp_path):
    torch.manual_seed(3)
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**TINY, sharing=sharing)).eval()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    again = AutoModelForPreTraining.from_pretrained(tmp_path)
    ids, mask, segments, *_ = batch()
    assert stored == size(model) == size(again)
    assert again.config.sharing == model.config.sharing
    assert torch.equal(again(ids, mask, segments).logits, model(ids, mask, segments).logits)


@pytest.mark.parametrize("sharing", ["none", "all", "ffn+rank=2"])
def test_initial_losses_match_uniform_predictions(sharing):
    torch.manual_seed(4)
    sizes = {**TINY, "vocab_size": 3000, "embedding_size": 32, "hidden_size": 64}
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**sizes, sharing=sharing))
    ids, mask, segments, _, _ = batch(rows=40, vocab=3000)
    out = model(ids, mask, segments, labels=ids, pair_labels=torch.arange(40) % 2)
    assert out.mlm_loss.item() == pytest.approx(math.log(3000), rel=0.05)
    assert out.pair_loss.item() == pytest.approx(math.log(2), rel=0.05)


@pytest.mark.parametrize("spec", ["tied", "untied", "factored:4", "factored-untied:4"])
def test_installed_boundary_fuses_loss_and_matches_plain_gradients(spec):
    torch.manual_seed(5)
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**TINY, sharing="all"))
    installed = tiewise.install(model, spec)
    ids, mask, segments, labels, pairs = batch()
    given = {"labels": labels, "pair_labels": pairs, "predict": labels != -100}
    model(ids, mask, segments, **given).loss.backward()
    fused = [p.grad.clone() for p in model.parameters()]
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    model.zero_grad()
    plain = model.eval()(ids, mask, segments)
    wanted = torch.nn.functional.cross_entropy
    (wanted(plain.logits.flatten(0, 1), labels.flatten()) + wanted(plain.pair_logits, pairs)).backward()
    for a, b in zip(fused, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_fine_tuning_starts_from_the_pretrained_encoder(tmp_path):
    torch.manual_seed(6)
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**TINY, norm="after", sharing="ffn"))
    model.save_pretrained(tmp_path)
    tuned = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(tuned, OpenAlbertForSequenceClassification)
    ids, mask, segments, *_ = batch()
    before = model.eval().albert(ids, mask, segments).pooler_output
    assert torch.equal(tuned.eval().albert(ids, mask, segments).pooler_output, before)
    labels = torch.tensor([0, 2, 1])
    optimizer = torch.optim.AdamW(tuned.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(tuned(ids, labels=labels, attention_mask=mask, token_type_ids=segments).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(InstallError, match="labels share no table with tokens"):
        tiewise.install(tuned)


def test_hidden_states_include_every_application_of_shared_layer():
    model = OpenAlbertModel(OpenAlbertConfig(**TINY, sharing="all")).eval()
    ids, mask, segments, *_ = batch()
    out = model(ids, mask, segments, output_hidden_states=True)
    x = out.hidden_states[0]
    for state in out.hidden_states[1:]:
        x = model.layers[0](x, mask[:, None, None, :].bool())
        assert torch.equal(x, state)
    assert len(out.hidden_states) == 7


REFUSED = {
    "5 heads do not divide width 24": {"num_attention_heads": 5},
    "unknown sharing 'some'": {"sharing": "some"},
    "7 groups of 6 layers": {"sharing": "all:groups=7"},
    "norm = 'between'": {"norm": "between"},
    "without a projection": {"projection": False},
    "vocab_size = 0": {"vocab_size": 0},
    "hidden_dropout_prob = 1.0": {"hidden_dropout_prob": 1.0},
    "classifier_dropout_prob = '0'": {"classifier_dropout_prob": "0"},
    "hidden_act = 'gellu'": {"hidden_act": "gellu"},
    "initializer_range = -0.02": {"initializer_range": -0.02},
    "layer_norm_eps = -1": {"layer_norm_eps": -1},
}


@pytest.mark.parametrize("said", REFUSED)
def test_open_albert_config_refuses_invalid_values(said):
    with pytest.raises(SpecError, match=said):
        OpenAlbertConfig(**{**TINY, **REFUSED[said]})


def test_open_albert_refuses_too_long_inputs_and_unknown_presets():
    with pytest.raises(SpecError, match="21 tokens, and 20 positions"):
        OpenAlbertModel(OpenAlbertConfig(**TINY))(torch.zeros(1, 21, dtype=torch.long))
    with pytest.raises(SpecError, match="no ALBERT of size"):
        preset("huge")
