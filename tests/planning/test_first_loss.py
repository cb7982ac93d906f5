"""The predicted loss of the first step equals the measured one within 2 %, for real models of several families."""

import warnings

import pytest
import torch
import transformers as tr
from first_losses import OTHERS, SIZES, config, measured

from tiewise.core.spec import BoundarySpec
from tiewise.planning.catalogue import models
from tiewise.planning.costs import first_loss, first_step_of, kept_losses
from tiewise.planning.plan import described
from tiewise.planning.read_config import READERS, read

# (std of every matrix, std of the tables): the usual start, a start far too wide, and tables of unit normals alone
STARTS = [(0.02, None), (0.2, None), (0.02, 0.07), (0.02, 1.0)]
BAR = 0.02


def predicted(values, tied, table_std=None):
    spec = BoundarySpec("tied" if tied else "untied", init=table_std)
    return first_loss(read(values), spec, length=64)


def check(family, tied, std, table_std, seeds=2):
    values = config(family, std, tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = measured(values, table_std, seeds=seeds)
    assert predicted(values, tied, table_std)["nll"] == pytest.approx(real, rel=BAR)


@pytest.mark.parametrize(("std", "table_std"), STARTS[2:])
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_first_loss_where_a_tied_table_meets_itself(family, std, table_std):
    check(family, True, std, table_std)


@pytest.mark.parametrize("family", sorted(SIZES))
def test_first_loss_of_the_usual_start(family):
    check(family, True, 0.02, None)


@pytest.mark.slow
@pytest.mark.parametrize(("std", "table_std"), STARTS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(SIZES))
def test_first_loss_of_every_family_and_start(family, tied, std, table_std):
    check(family, tied, std, table_std)


@pytest.mark.slow
@pytest.mark.parametrize(("std", "table_std"), STARTS)
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_first_loss_of_the_other_families(family, std, table_std):
    check(family, True, std, table_std, seeds=4)


def test_no_family_is_followed_that_was_not_measured():
    followed = {family for family in READERS if read({"model_type": family}).fresh is not None}
    assert followed == set(SIZES) | set(OTHERS)


@pytest.mark.slow
def test_first_loss_of_gpt2_at_its_real_size():
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    values = config("gpt2", 0.02, True, **sizes)
    real = measured(values, seeds=1, sequences=2)
    assert predicted(values, True)["nll"] == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize("family", ["bert", "albert", "bart"])
def test_families_that_are_not_followed_start_from_their_own_std(family):
    sizes = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {"bert": sizes, "albert": {**sizes, "intermediate_size": 256, "embedding_size": 64}}
    sides = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 256))}
    values["bart"] = {"vocab_size": 2000, "d_model": 128, **sides}
    key = "init_std" if family == "bart" else "initializer_range"
    config = tr.AutoConfig.for_model(family, **{**values[family], key: 0.1})
    auto = tr.AutoModelForSeq2SeqLM if family == "bart" else tr.AutoModelForMaskedLM
    torch.manual_seed(0)
    with torch.no_grad():
        logits = auto.from_config(config).eval()(torch.randint(10, 2000, (8, 64))).logits
    measured = (logits.logsumexp(-1) - logits.mean(-1)).mean().item()
    architecture = read({"model_type": family, **values[family], key: 0.1})
    assert first_loss(architecture, BoundarySpec("tied"))["nll"] == pytest.approx(measured, rel=BAR)


def test_what_is_not_known_is_said():
    bert = read({"model_type": "bert"})
    found = first_loss(bert, BoundarySpec("tied"))
    assert "independent" in found["assumed"]
    assert first_loss(read({"model_type": "bert", "architectures": ["BertModel"]}), BoundarySpec("tied")) is None


def test_random_maps_hide_a_row_from_itself():
    values = config("llama", 0.02, True)
    tied = first_loss(read(values), BoundarySpec("tied", init=0.2))
    factored = first_loss(read(values), BoundarySpec.parse("factored:96+init=0.2"))
    assert tied["own"] > 0.5
    assert factored["own"] is None
    assert factored["nll"] < tied["nll"] / 2


def catalogued():
    """(start, as what it is drawn) of every model of the catalogue that can be planned and has a head."""
    for row in models():
        if row.vocab is None and row.config is None:
            continue
        _, architecture = described(row)
        for kind in ("tied", "untied"):
            if architecture.ends.head:
                yield first_step_of(architecture, BoundarySpec(kind)), f"{row.name} {kind}"


def check_kept(start):
    (nll, own), (nll_kept, own_kept) = start.computed(), kept_losses()[repr(start)]
    assert nll_kept == pytest.approx(nll, rel=1e-9), start
    assert own_kept is own is None or own_kept == pytest.approx(own, rel=1e-9), start


def test_losses_are_kept_for_every_model_of_the_catalogue_and_nothing_else():
    wanted = {repr(start) for start, _ in catalogued()}
    assert wanted == set(kept_losses()), "run tools/make_first_losses.py"


@pytest.mark.parametrize("name", ["gpt2 tied", "gpt2 untied", "gemma-2-2b tied"])
def test_a_loss_that_is_kept_is_the_loss(name):
    check_kept(next(start for start, what in catalogued() if what == name))


@pytest.mark.slow
def test_every_loss_that_is_kept_is_the_loss():
    for start, _ in catalogued():
        check_kept(start)
