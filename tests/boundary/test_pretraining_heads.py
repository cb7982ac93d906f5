"""Installed classes whose loss also needs a sentence label, such as `BertForPreTraining`."""

import copy

import pytest
import torch
import transformers as tr
from tiny_models import _BERT, V, assert_same_step, batch, without_dropout

from tiewise.boundary.installation import install
from tiewise.core.errors import InstallError

LABEL = dict.fromkeys(("Bert", "BigBird", "Ernie", "FNet", "MegatronBert"), "next_sentence_label")
LABEL["Albert"] = "sentence_order_label"


def _build(family, **settings):
    made = getattr(tr, f"{family}ForPreTraining")
    special = {"sep_token_id": 2, "cls_token_id": 1}
    torch.manual_seed(0)
    return made(made.config_class(**{**_BERT, **special, **settings}))


def _inputs(family, model):
    return {**batch(model), LABEL[family]: torch.tensor([0, 1, 1])}


@pytest.mark.parametrize("spec", [None, "untied"])
@pytest.mark.parametrize("family", LABEL)
def test_installed_pretraining_model_takes_the_step_of_the_plain_one(family, spec):
    plain = without_dropout(_build(family, embedding_size=8) if family == "Albert" else _build(family))
    model = copy.deepcopy(plain)
    installed = install(model, spec)
    if spec is None:
        assert_same_step(model, plain, _inputs(family, model))
    else:
        model.train()(**_inputs(family, model)).loss.backward()
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)


@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_install_names_the_label_that_a_batch_lacks(family):
    model = _build(family)
    given = batch(model)
    says = f"{family}ForPreTraining computed no loss from input_ids, labels; pass .* this batch lacks {LABEL[family]}"
    with pytest.raises(InstallError, match=says):
        install(model, batch=given)
    model.config.return_dict = False
    with pytest.raises(InstallError, match=says):
        install(model, batch=given)


def test_install_refuses_mobilebert_whose_loss_is_past_the_head():
    sizes = {"embedding_size": 8, "true_hidden_size": 16, "intra_bottleneck_size": 16}
    with pytest.raises(InstallError, match="computes its loss past its output head"):
        install(_build("MobileBert", **sizes))


@pytest.mark.parametrize("return_dict", [True, False])
def test_installed_model_returns_no_loss_without_the_sentence_label(return_dict):
    model = without_dropout(_build("Bert")).eval()
    inputs = {**batch(model), "return_dict": return_dict}
    wanted = model(**inputs)
    install(model)
    got = model(**inputs, num_items_in_batch=torch.tensor(7))
    assert "loss" not in got if return_dict else len(got) == 2
    logits = [output["prediction_logits"] if return_dict else output[0] for output in (got, wanted)]
    assert logits[0].shape[-1] == V
    torch.testing.assert_close(logits[0] + 0, logits[1])
