"""`generate` with an exact decoding: the tokens are those of plain `generate`, and the logits were not computed."""

import copy

import pytest
import torch
from tests.boundary.tiny_models import GENERATIVE, V, build, pair

from tiewise.boundary.decoding import TopLogits
from tiewise.boundary.install import install
from tiewise.core.errors import UnsupportedError

PROMPT = torch.randint(3, V, (3, 5), generator=torch.Generator().manual_seed(1))
ANSWERED = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 7},
    {"do_sample": True, "top_k": 20, "temperature": 0.6, "top_p": 0.9},
]
COMPUTED = [
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "bad_words_ids": [[7], [8]]},
    {"do_sample": True, "top_k": 0, "min_p": 0.02},
    {"do_sample": True, "top_k": V},
]


def said(model, **options):
    torch.manual_seed(3)
    return model.generate(PROMPT, max_new_tokens=8, pad_token_id=0, **options)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", GENERATIVE)
def test_tokens_are_those_of_plain_generate_and_no_logits_are_computed(name, tied):
    model, plain, installed = pair(name, tied=tied)
    model.eval(), plain.eval()
    installed.counts.materialised = 0
    with installed.exact_decoding() as top:
        for options in ANSWERED:
            top.counts.queries = 0
            assert torch.equal(said(model, **options), said(plain, **options))
            assert top.counts.queries >= 3
    assert installed.counts.materialised == 0
    assert torch.equal(said(model, **ANSWERED[1]), said(plain, **ANSWERED[1]))


@pytest.mark.parametrize("options", COMPUTED, ids=lambda o: list(o)[1])
def test_what_asks_for_other_tokens_computes_the_logits(options):
    model, plain, installed = pair("llama")
    model.eval(), plain.eval()
    with installed.exact_decoding():
        assert torch.equal(said(model, **options), said(plain, **options))
    assert installed.counts.materialised > 0


@pytest.mark.parametrize("spec", ["factored:6+bias", "tied+output_scale=0.5", "untied+softcap=0.8"])
def test_boundaries_with_maps_scales_caps_and_biases(spec):
    model = build("llama").eval()
    installed = install(model, spec)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    before = [said(model, **options) for options in ANSWERED]
    with installed.exact_decoding() as top:
        assert all(torch.equal(said(model, **o), true) for o, true in zip(ANSWERED, before, strict=True))
    assert top.counts.queries > 0


def test_scores_that_are_asked_for_are_whole_and_true():
    model, plain, installed = pair("gemma2")
    model.eval(), plain.eval()
    wanted = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with installed.exact_decoding():
        found, true = said(model, **wanted), said(plain, **wanted)
    torch.testing.assert_close([x + 0 for x in found.scores], list(true.scores))
    torch.testing.assert_close([x + 0 for x in found.logits], list(true.logits))


def top_logits(**settings):
    model, plain, installed = pair("llama", **settings)
    model.eval(), plain.eval()
    with installed.exact_decoding(), torch.no_grad():
        logits = model(input_ids=PROMPT).logits[:, -1]
        assert isinstance(logits, TopLogits)
        return logits, plain(input_ids=PROMPT).logits[:, -1], installed


def test_every_answer_is_true_of_the_logits():
    logits, true, installed = top_logits()
    assert logits.shape == true.shape
    for x, y in ((logits, true), (logits / 0.7, true / 0.7)):
        values, tokens = torch.topk(x, 5)
        true_values, true_tokens = torch.topk(y, 5)
        assert torch.equal(tokens, true_tokens)
        torch.testing.assert_close(values, true_values)
        assert torch.equal(x.argmax(-1, keepdim=True), y.argmax(-1, keepdim=True))
        assert torch.equal(x < values[:, 3:4], y < true_values[:, 3:4])
        mask = y < true_values[:, 2:3]
        torch.testing.assert_close(x.masked_fill(mask, -9.0), y.masked_fill(mask, -9.0))
    assert installed.counts.materialised == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x < x.topk(3).values[:, :1] - 100.0,  # below what was found
        lambda x: x < torch.zeros(()),
        lambda x: x.topk(3, largest=False).values,
        lambda x: x.topk(2, dim=0).values,
        lambda x: x.argmax(),
        lambda x: x.argmax(0),
        lambda x: x.masked_fill(torch.eye(len(x), V).bool(), 0.0),
        lambda x: (x.topk(2), x.masked_fill(torch.ones(V).bool(), 0.0))[1],
        lambda x: x.softmax(-1),
        lambda x: x.to(torch.float64),
        lambda x: x * torch.ones(V),
        lambda x: torch.stack([x, x]),
    ],
)
def test_what_is_not_known_computes_them(ask):
    logits, true, installed = top_logits()
    torch.testing.assert_close(ask(logits), ask(true))
    assert installed.counts.materialised > 0


def test_tied_scores_are_not_told_apart_by_a_bound_that_they_reach():
    model, plain, installed = pair("llama", tied=False)
    for each in (model, plain):
        each.get_output_embeddings().weight.data[10:20] = each.get_output_embeddings().weight.data[10].abs() * 3
        each.eval()
    options = {"do_sample": True, "top_k": 3}
    with installed.exact_decoding():
        assert torch.equal(said(model, **options), said(plain, **options))


def test_outside_the_context_in_training_and_with_labels_nothing_changes():
    model, _, installed = pair("llama")
    batch = {"input_ids": PROMPT, "labels": PROMPT}
    model.eval()
    before = model(**batch).loss
    with installed.exact_decoding():
        assert torch.equal(model(**batch).loss, before)
        model.train()
        model(**batch).loss.backward()
        model.eval()
        plain = model(input_ids=PROMPT).logits.sum()
        plain.backward()
    assert not isinstance(model(input_ids=PROMPT).logits, TopLogits)
    assert copy.deepcopy(model)(**batch).loss == before


def test_a_table_that_changes_is_read_anew_and_another_one_is_not_mistaken_for_it():
    model, plain, installed = pair("llama", tied=False)
    model.eval(), plain.eval()
    with installed.exact_decoding() as top, torch.no_grad():
        for each in (model, plain):
            each.lm_head.weight.neg_()
        assert torch.equal(said(model, do_sample=False), said(plain, do_sample=False))
        asked = top.counts.queries
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).contiguous())
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.flip(0).contiguous())
        assert torch.equal(said(model, do_sample=False), said(plain, do_sample=False))
    assert asked == top.counts.queries


def test_bf16_models_get_the_exact_largest():
    model, _, installed = pair("llama")
    model.to(torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=PROMPT).last_hidden_state[:, -1]
        with installed.exact_decoding():
            found = model(input_ids=PROMPT).logits[:, -1].float().argmax(-1)
    assert torch.equal(found, (hidden.double() @ model.lm_head.weight.double().T).argmax(-1))


def test_a_model_in_fp64_is_refused():
    _, _, installed = pair("llama")
    installed.model.double()
    with pytest.raises(UnsupportedError, match="fp32, bf16 or fp16"), installed.exact_decoding():
        pass
