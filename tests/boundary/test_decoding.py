"""`generate` with `exact_decoding`, compared with plain `generate`, and counts of computed logits."""

import copy

import pytest
import torch
from tests.boundary.tiny_models import V, build, pair

from tiewise.boundary.decoding import TopLogits
from tiewise.boundary.installation import install
from tiewise.core.errors import UnsupportedError

PROMPT = torch.randint(3, V, (3, 5), generator=torch.Generator().manual_seed(1))
ANSWERED = [{"do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 0.6, "top_p": 0.9}]
# every kind of head: plain, bias, soft-cap, factor, projected widths, after an encoder
FAMILIES = [("llama", False), ("phi", True), ("gemma2", True), ("granite", True), ("opt_350m", True), ("bart", False)]
FAMILIES += [("t5", True), ("t5_v11", False)]
COMPUTED = [
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "bad_words_ids": [[7], [8]]},
    {"do_sample": True, "top_k": 0, "min_p": 0.02},
    {"do_sample": True, "top_k": V},
]


def generate(model, **options):
    torch.manual_seed(3)
    return model.generate(PROMPT, max_new_tokens=4, pad_token_id=0, **options)


def pair_in_evaluation(name, **settings):
    model, plain, installed = pair(name, **settings)
    return model.eval(), plain.eval(), installed


@pytest.fixture(scope="module")
def llama():
    return pair_in_evaluation("llama")


@pytest.mark.parametrize(("name", "tied"), FAMILIES)
def test_exact_decoding_generates_the_tokens_of_plain_generate_without_logits(name, tied):
    model, plain, installed = pair_in_evaluation(name, tied=tied)
    installed.counts.materialised = 0
    with installed.exact_decoding() as top:
        for options in ANSWERED:
            top.counts.queries = 0
            assert torch.equal(generate(model, **options), generate(plain, **options))
            assert top.counts.queries >= 3
    assert installed.counts.materialised == 0


def test_exact_decoding_computes_the_logits_for_other_strategies(llama):
    model, plain, installed = llama
    with installed.exact_decoding():
        for options in COMPUTED:
            installed.counts.materialised = 0
            assert torch.equal(generate(model, **options), generate(plain, **options))
            assert installed.counts.materialised > 0


@pytest.mark.parametrize("spec", ["factored:6+bias", "tied+output_scale=0.5", "untied+softcap=0.8"])
def test_exact_decoding_keeps_tokens_with_maps_scales_caps_and_biases(spec):
    model = build("llama").eval()
    installed = install(model, spec)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    before = [generate(model, **options) for options in ANSWERED]
    with installed.exact_decoding() as top:
        assert all(torch.equal(generate(model, **o), true) for o, true in zip(ANSWERED, before, strict=True))
    assert top.counts.queries > 0


def test_exact_decoding_returns_complete_scores_on_request(llama):
    model, plain, installed = llama
    wanted = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with installed.exact_decoding():
        found, true = generate(model, **wanted), generate(plain, **wanted)
    torch.testing.assert_close([x + 0 for x in found.scores], list(true.scores))
    torch.testing.assert_close([x + 0 for x in found.logits], list(true.logits))


def top_logits(model, plain, installed):
    installed.counts.materialised = 0
    with installed.exact_decoding(), torch.no_grad():
        logits = model(input_ids=PROMPT).logits[:, -1]
        assert isinstance(logits, TopLogits)
        return logits, plain(input_ids=PROMPT).logits[:, -1], installed


def test_top_logits_operations_equal_those_of_the_computed_logits(llama):
    logits, true, installed = top_logits(*llama)
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
        lambda x: x < x.topk(3).values[:, :1] - 100.0,  # a bound below all returned scores
        lambda x: x.topk(3, largest=False).values,
        lambda x: x.topk(2, dim=0).values,
        lambda x: x.argmax(0),
        lambda x: x.masked_fill(torch.eye(len(x), V).bool(), 0.0),
        lambda x: (x.topk(2), x.masked_fill(torch.ones(V).bool(), 0.0))[1],
        lambda x: x.softmax(-1),
        lambda x: x.to(torch.float64),
        lambda x: torch.stack([x, x]),
    ],
)
def test_top_logits_compute_the_logits_for_other_operations(ask, llama):
    logits, true, installed = top_logits(*llama)
    torch.testing.assert_close(ask(logits), ask(true), rtol=1e-5, atol=1e-5)  # both are rounded to fp32
    assert installed.counts.materialised > 0


def test_top_logits_keep_every_token_with_the_score_of_the_bound():
    model, _, installed = pair_in_evaluation("llama", tied=False)
    with torch.no_grad():  # ten tokens share the largest logit at each position
        hidden = model.model(input_ids=PROMPT).last_hidden_state[:, -1]
        model.lm_head.weight[10:20] = 9 * hidden.sum(0)
        assert ((hidden @ model.lm_head.weight.T).argmax(-1) // 10 == 1).all()
    with installed.exact_decoding(), torch.no_grad():
        logits = model(input_ids=PROMPT).logits[:, -1]
        below = logits < logits.topk(3).values[:, -1:]
        assert (~below).nonzero()[:, 1].tolist() == [*range(10, 20)] * len(PROMPT)
        assert torch.equal(logits.masked_fill(below, -9.0) == -9, below)
        first = model.generate(PROMPT, max_new_tokens=1, pad_token_id=0, do_sample=True, top_k=3)[:, -1]
    assert (first // 10 == 1).all()
    assert installed.counts.materialised == 0


def test_exact_decoding_changes_nothing_in_training_or_with_labels(llama):
    model, _, installed = llama
    batch = {"input_ids": PROMPT, "labels": PROMPT}
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


def test_exact_decoding_follows_a_changed_table_and_ignores_a_replaced_one():
    model, plain, installed = pair_in_evaluation("llama", tied=False)
    with installed.exact_decoding() as top, torch.no_grad():
        for each in (model, plain):
            each.lm_head.weight.neg_()
        assert torch.equal(generate(model, do_sample=False), generate(plain, do_sample=False))
        asked = top.counts.queries
        for each in (model, plain):
            each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight.flip(0).contiguous())
        assert torch.equal(generate(model, do_sample=False), generate(plain, do_sample=False))
    assert asked == top.counts.queries


def test_exact_decoding_is_exact_for_bf16_and_refuses_fp64():
    model, _, installed = pair("llama")
    model.to(torch.bfloat16).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=PROMPT).last_hidden_state[:, -1]
        with installed.exact_decoding():
            found = model(input_ids=PROMPT).logits[:, -1].float().argmax(-1)
    assert torch.equal(found, (hidden.double() @ model.lm_head.weight.double().T).argmax(-1))
    model.double()
    with pytest.raises(UnsupportedError, match="fp32, bf16 or fp16"), installed.exact_decoding():
        pass
