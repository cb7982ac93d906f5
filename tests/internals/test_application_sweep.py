"""A block applied more or less often, against transformers' own models of that many layers."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from scipy.stats import t
from tests.boundary.tiny_models import _BERT, FAMILIES, V, build
from tests.internals.test_path_gradients import opened, text
from tests.internals.test_refinement import Affine, with_layers

from tiewise.errors import UnsupportedError
from tiewise.internals import application_sweep as sweep_module
from tiewise.internals.application_sweep import application_sweep
from tiewise.internals.refinement import refinement
from tiewise.internals.text_loss import HIDDEN, NEXT, TextLoss
from tiewise.models import OpenAlbertConfig, OpenAlbertForPreTraining
from tiewise.sharing.share import share_layers

TRAINED = 3
COUNTS = np.random.default_rng(1).integers(0, 50, V)


def albert(layers=TRAINED, **settings):
    torch.manual_seed(0)
    config = tr.AlbertConfig(**_BERT | {"embedding_size": 8, "num_hidden_layers": layers, "initializer_range": 0.3})
    config.update(settings)
    return tr.AlbertForMaskedLM(config)


def open_albert(layers=TRAINED, sharing="all"):
    torch.manual_seed(0)
    config = OpenAlbertConfig(
        vocab_size=V,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=40,
        initializer_range=0.3,
        sharing=sharing,
    )
    return OpenAlbertForPreTraining(config)


def decoder(name, layers=TRAINED, sharing="all", **settings):
    kind, config, sizes = FAMILIES[name]
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    torch.manual_seed(0)
    model = kind(config(**sizes | {depth: layers, "initializer_range": 0.3} | settings))
    share_layers(model, sharing)
    return model


def nll_by_window(model, loss, weights=None):
    """Of a whole model's own forward, window by window; `weights` of a model whose layers are all one."""
    model = model.double().eval()
    if weights is not None:
        missing = model.load_state_dict(weights.state_dict(), strict=False).missing_keys
        assert not any(f".{i}." in name for name in missing for i in (0, 1))  # of layers, only what these already are
    ids, asked, targets = loss.asked(torch.arange(len(loss.windows)))
    with torch.no_grad():
        logits = model(ids).logits[asked]
    return F.cross_entropy(logits, targets, reduction="none").reshape(len(ids), -1).mean(-1).numpy()


MODELS = {
    "albert": (albert, HIDDEN),
    "albert, two in a group": (lambda layers=TRAINED: albert(layers, inner_group_num=2), HIDDEN),
    "open albert": (open_albert, HIDDEN),
    "llama": (lambda layers=TRAINED: decoder("llama", layers), NEXT),
    "gpt2": (lambda layers=TRAINED: decoder("gpt2", layers), NEXT),
}


@pytest.mark.parametrize("name", MODELS)
def test_n_applications_are_a_model_of_n_layers(name, tmp_path):
    make, objective = MODELS[name]
    found, windows = opened(make(), tmp_path), text()
    got, loss = application_sweep(found, windows, COUNTS, seed=4), TextLoss(found, windows, 4)
    assert (got.objective, got.trained, got.layers, got.windows) == (objective, TRAINED, 1, 5)
    assert got.predicted == {NEXT: 11, HIDDEN: 2}[objective] * 5
    assert [one.times for one in got.course] == list(range(1, 25))
    own = nll_by_window(found.model, loss)
    assert got.own.nll.value == pytest.approx(own.mean(), rel=1e-12)
    seen = []
    for times in (1, 2, 3, 4, 9):
        each = nll_by_window(make(times), loss, found.model)
        one = got.course[times - 1]
        assert one.nll.value == pytest.approx(each.mean(), rel=1e-9)
        half = t.ppf(0.975, 4) * each.std(ddof=1) / 5**0.5
        assert one.nll.high - one.nll.value == pytest.approx(half, rel=1e-6)
        assert one.more.value == pytest.approx((each - own).mean(), rel=1e-6, abs=1e-12)
        seen.append(one.nll.value)
    assert len(set(np.round(seen, 4))) > 1  # applications do something
    json.dumps(got.record(), allow_nan=False)


def test_layers_that_see_a_part_of_the_text_in_turn_go_on_in_turn(tmp_path):
    sizes = {"sliding_window": 3, "attn_implementation": "eager"}
    found, windows = opened(decoder("gemma2", 2, **sizes), tmp_path), text()
    assert len(set(found.model.config.layer_types)) == 2
    got, loss = application_sweep(found, windows, COUNTS), TextLoss(found, windows)
    for times in (1, 2, 3, 4, 7):
        each = nll_by_window(decoder("gemma2", times, **sizes), loss, found.model)
        assert got.course[times - 1].nll.value == pytest.approx(each.mean(), rel=1e-9)


def test_a_block_of_two_layers_is_applied_as_one(tmp_path):
    found, windows = opened(open_albert(6, "all:cycle=2"), tmp_path), text()
    got, loss = application_sweep(found, windows, COUNTS), TextLoss(found, windows)
    assert (got.layers, got.trained) == (2, 3)
    assert got.own.nll.value == pytest.approx(nll_by_window(found.model, loss).mean(), rel=1e-12)
    deeper = nll_by_window(open_albert(10, "all:cycle=2"), loss, found.model)
    assert got.course[4].nll.value == pytest.approx(deeper.mean(), rel=1e-9)


def test_changes_are_those_of_the_refinement_section(tmp_path):
    found, windows = opened(decoder("llama"), tmp_path), text()
    got = application_sweep(found, windows, COUNTS)
    (rest,) = refinement(found, windows, further=21).trained.repeats
    assert [one.change.value for one in got.course] == pytest.approx([e.value for e in rest.residual], rel=1e-6)


def test_the_unigram_is_of_the_given_counts(tmp_path):
    found, windows = opened(decoder("llama"), tmp_path), text()
    got = application_sweep(found, windows, COUNTS)
    shares = (COUNTS + 1) / (COUNTS.sum() + V)
    assert got.unigram.value == pytest.approx(-np.log(shares[windows[:, 1:]]).mean(), rel=1e-12)


@pytest.mark.parametrize("make", [albert, open_albert, lambda layers=TRAINED: decoder("llama", layers)])
def test_parameters_with_and_without_sharing_are_those_of_built_models(make, tmp_path):
    model = make()
    got = application_sweep(opened(model, tmp_path), text(2), COUNTS)
    assert got.parameters == sum({id(p): p.numel() for p in model.parameters()}.values())
    if make is albert:
        model = albert(num_hidden_groups=TRAINED)
    else:
        share_layers(model, "none")
    assert got.separate == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert got.separate > got.parameters


def test_more_layers_than_24_are_all_measured(tmp_path):
    got = application_sweep(opened(open_albert(26), tmp_path), text(2), COUNTS)
    assert len(got.course) == got.trained == 26


def test_pieces_do_not_change_the_numbers(tmp_path, monkeypatch):
    found, windows = opened(albert(), tmp_path), text()
    whole = application_sweep(found, windows, COUNTS)
    monkeypatch.setattr(sweep_module, "TOKENS_AT_ONCE", 24)
    monkeypatch.setattr("tiewise.internals.translators.LOGITS", 3 * V)
    apart = application_sweep(found, windows, COUNTS)
    for one, other in zip(whole.course, apart.course, strict=True):
        assert one.nll.value == pytest.approx(other.nll.value, rel=1e-12)


def test_what_is_not_finite_is_no_number_and_never_the_best():
    layer = Affine(1e9 * np.eye(16), np.zeros(16))  # fp32 ends at 3e38
    got = application_sweep(with_layers([layer] * 2), text(), COUNTS)
    assert (got.course[-1].nll, got.course[-1].more, got.course[-1].change) == (None, None, None)
    assert got.own.nll.value >= got.best.nll.value > 0
    assert got.record()["course"][-1]["nll"] is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("gpt2"), "every layer has parameters of its own"),
        (lambda: albert(1), "one layer, applied once"),
        (lambda: albert(4, num_hidden_groups=2), "its 4 layers share parameters in part only"),
        (lambda: open_albert(3, "ffn"), "its 3 layers share parameters in part only"),
        (lambda: open_albert(4, "sandwich"), "in part only"),
        (lambda: open_albert(3, "all+rank=2"), "in part only"),
        (lambda: open_albert(5, "all:cycle=2"), "in part only"),
        (lambda: build("t5"), "an encoder and a decoder"),
    ],
)
def test_where_no_block_is_repeated_the_reason_is_one_line(make, reason, tmp_path):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        application_sweep(opened(make(), tmp_path), text(), COUNTS)
    assert "\n" not in str(caught.value)
