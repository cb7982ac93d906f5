"""Tests of the conversion from and to Hugging Face ALBERT against transformers' outputs and files."""

import pytest
import torch
import transformers
from albert_tools import TINY, batch, perturbed
from benchmarks.sharing import measure, measure_activation_bytes, render_table

from tiewise.core.errors import UnsupportedError
from tiewise.training.models import (
    OpenAlbertConfig,
    OpenAlbertForPreTraining,
    OpenAlbertModel,
    from_hugging_face,
    to_hugging_face,
)

KINDS = (transformers.AlbertForPreTraining, transformers.AlbertModel, transformers.AlbertForSequenceClassification)
GROUPS = ({}, {"num_hidden_groups": 2}, {"num_hidden_groups": 4}, {"num_hidden_groups": 6}, {"inner_group_num": 2})


def hugging_face_model(kind=KINDS[0], labels=None, **fields):
    torch.manual_seed(7)
    usual = 3 if kind is KINDS[2] else 2
    config = transformers.AlbertConfig(**TINY, initializer_range=0.3, num_labels=labels or usual, **fields)
    return perturbed(kind(config).eval())


def assert_saved_as(ours, other, folder):
    """Check that our model, converted back and saved, has bit-identical weights."""
    to_hugging_face(ours).save_pretrained(folder)
    read = type(other).from_pretrained(folder).state_dict()
    assert other.state_dict().keys() == read.keys() or isinstance(other, transformers.AlbertForMaskedLM)
    assert all(torch.equal(value, read[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("fields", GROUPS, ids=str)
def test_converted_albert_matches_hugging_face_outputs_and_losses(fields):
    other = hugging_face_model(**fields)
    ours = from_hugging_face(other)
    ids, mask, segments, labels, pairs = batch()
    a = other(ids, mask, segments, labels=labels, sentence_order_label=1 - pairs)
    b = ours(ids, mask, segments, labels=labels, pair_labels=pairs)
    torch.testing.assert_close(b.logits, a.prediction_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(b.pair_logits, a.sop_logits.flip(-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(b.loss, a.loss, rtol=1e-6, atol=0)
    a.loss.backward()
    b.loss.backward()
    first = other.albert.encoder.albert_layer_groups[0].albert_layers[0]
    torch.testing.assert_close(ours.albert.layers[0].ffn.up.weight.grad, first.ffn.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", GROUPS, ids=str)
def test_albert_conversion_round_trip_keeps_every_weight(kind, fields, tmp_path):
    other = hugging_face_model(kind, **fields)
    ours = from_hugging_face(other)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in other.parameters())
    assert_saved_as(ours, other, tmp_path)


@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("fields", GROUPS, ids=str)
def test_albert_for_masked_lm_converts_with_equal_logits_and_loss(fields, labels, tmp_path):
    other = hugging_face_model(transformers.AlbertForMaskedLM, labels, **fields)
    ours = from_hugging_face(other)
    ids, mask, segments, wanted, pairs = batch()
    a, b = other(ids, mask, segments, labels=wanted), ours(ids, mask, segments, labels=wanted, pair_labels=pairs)
    torch.testing.assert_close(b.logits, a.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(b.mlm_loss, a.loss, rtol=1e-6, atol=0)
    assert torch.isfinite(b.pair_loss)
    assert_saved_as(ours, other, tmp_path)


def test_albert_encoder_without_pooler_converts_with_equal_hidden_states():
    other = transformers.AlbertModel(transformers.AlbertConfig(**TINY), add_pooling_layer=False).eval()
    ids, mask, segments, _, _ = batch()
    got = from_hugging_face(other)(ids, mask, segments).last_hidden_state
    torch.testing.assert_close(got, other(ids, mask, segments).last_hidden_state, rtol=0, atol=1e-5)


UNSUPPORTED_FIELDS = [{"norm": "after"}, {"projection": False, "embedding_size": TINY["hidden_size"]}]
UNSUPPORTED_FIELDS += [{"sharing": text} for text in ("ffn", "sandwich", "all:cycle=4", "all+rank=2")]


@pytest.mark.parametrize("fields", UNSUPPORTED_FIELDS, ids=str)
def test_to_hugging_face_refuses_fields_that_transformers_lacks(fields):
    with pytest.raises(UnsupportedError, match="no place for"):
        to_hugging_face(OpenAlbertForPreTraining(OpenAlbertConfig(**{**TINY, **fields})))


def test_from_hugging_face_refuses_unsupported_models_by_name():
    bert = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, hidden_size=12))
    repeated = hugging_face_model(num_hidden_groups=2, inner_group_num=2)
    cases = {
        "BertModel has no model of ours": bert,
        "4 labels": hugging_face_model(labels=4),
        "groups or repeats": repeated,
    }
    for said, model in cases.items():
        with pytest.raises(UnsupportedError, match=said):
            from_hugging_face(model)


def test_kept_bytes_counts_saved_activations_without_weights():
    weight = torch.nn.Linear(5, 7, bias=False)
    given = torch.ones(3, 5)
    kept = 3 * 5 + 3 * 7  # the input of the layer and of the square
    assert measure_activation_bytes(weight, lambda: weight(given).pow(2).sum()) == 4 * kept


def test_sharing_benchmark_measures_costs_of_four_ways_to_share_layers():
    found = measure(2, 8, 64, 3, 16, 50, rounds=2)
    assert found.equal
    none, attention, ffn, whole = found.costs
    sizes = {"vocab_size": 50, "embedding_size": 16, "hidden_size": 64}
    layer = OpenAlbertModel(OpenAlbertConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)).layers[0]
    parts = {name: sum(p.numel() for p in getattr(layer, name).parameters()) for name in ("attention", "ffn")}
    assert none.parameters - attention.parameters == 2 * parts["attention"]
    assert none.parameters - ffn.parameters == 2 * parts["ffn"]
    assert none.parameters - whole.parameters == 2 * sum(parts.values())
    assert {cost.flops for cost in found.costs} == {none.flops}
    assert {cost.activations for cost in found.costs} == {none.activations}
    assert [cost.state for cost in found.costs] == [16 * cost.parameters for cost in found.costs]
    assert all(len(cost.forward) == len(cost.step) == 2 for cost in found.costs)
    rows = render_table(found).splitlines()
    assert "the same bit for bit" in rows[0]
    assert [row.split(" | ")[0] for row in rows[4:]] == ["| none", "| attention", "| ffn", "| all"]
