"""Where a boundary has no meaning, or does something unknown, install says why and leaves the model as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from tiny_models import batch, build, step, variant
from torch import nn

from tiewise.boundary.install import install
from tiewise.errors import InstallError, SpecError


class LogitsOfItsOwn(tr.LlamaForCausalLM):
    """Llama with one more step between head and loss; `odd` is the step."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.odd(super().forward(input_ids=input_ids, **kwargs).logits, input_ids)
        loss = None if labels is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Sharpened(LogitsOfItsOwn):
    def odd(self, logits, ids):
        return torch.where(logits > 0, logits, 0.5 * logits)


class InPlace(LogitsOfItsOwn):
    def odd(self, logits, ids):
        return logits.div_(2)


class Copying(LogitsOfItsOwn):
    def odd(self, logits, ids):
        """Mix the vocabulary's distribution with one that points at the input."""
        pointer = F.one_hot(ids, logits.shape[-1]).float().mean(1, keepdim=True)
        return torch.log(0.9 * torch.softmax(logits, -1) + 0.1 * pointer)


class PastTheHead(LogitsOfItsOwn):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = hidden @ self.lm_head.weight.T
        return tr.modeling_outputs.CausalLMOutput(
            loss=F.cross_entropy(logits.flatten(0, 1), labels.view(-1)), logits=logits
        )


class SecretTable(LogitsOfItsOwn):
    """Reads its input table once more, unscaled, where the boundary cannot see it."""

    def odd(self, logits, ids):
        return logits + (self.model.embed_tokens.weight @ torch.ones(self.config.hidden_size, 1)).view(-1)


def _with(change, name="llama", **settings):
    model = build(name, **settings)
    change(model)
    return model


def _embedding(**settings):
    def change(model):
        model.set_input_embeddings(nn.Embedding(61, 16, **settings))

    return change


def _int8_head(model):
    head = model.lm_head
    del head.weight
    head.register_buffer("weight", torch.zeros(61, 16, dtype=torch.int8))


class ForeignHead(nn.Module):
    weight = nn.Parameter(torch.zeros(61, 16))

    def forward(self, hidden):
        return hidden @ self.weight.T


def _foreign_head(model):
    model.lm_head = ForeignHead()


# name -> (model, spec, what the refusal says)
CASES = {
    "label head": (lambda: variant("bert", tr.BertForSequenceClassification, num_labels=3), None, "scores 3 labels"),
    "label per token": (lambda: variant("bert", tr.BertForTokenClassification, num_labels=5), None, "scores 5 labels"),
    "encoder without a head": (lambda: variant("bert", tr.BertModel), None, "without a token head"),
    "unknown step": (lambda: variant("llama", Sharpened), None, "something else to its logits before the loss: __gt__"),
    "copy distribution": (lambda: variant("llama", Copying), None, "before the loss: softmax"),
    "step in place": (lambda: variant("llama", InPlace), None, "div_ would change logits in place"),
    "loss past the head": (lambda: variant("llama", PastTheHead), None, "past its output head"),
    "table read twice": (lambda: variant("llama", SecretTable), "tied+input_scale=sqrt_d", "would change by"),
    "sparse": (lambda: _with(_embedding(sparse=True)), None, "sparse gradients"),
    "max_norm": (lambda: _with(_embedding(max_norm=1.0)), None, "rewrites rows"),
    "scaled by frequency": (lambda: _with(_embedding(scale_grad_by_freq=True)), None, "token frequency"),
    "quantised head": (lambda: _with(_int8_head), None, "quantised weights"),
    "head that is no Linear": (lambda: _with(_foreign_head), None, "its output head is a ForeignHead"),
    "other widths": (
        lambda: tr.RemBertForMaskedLM(
            tr.RemBertConfig(
                vocab_size=61,
                hidden_size=16,
                input_embedding_size=8,
                output_embedding_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=24,
            )
        ),
        "tied",
        "8 wide, the output table 12",
    ),
    "other vocabularies": (lambda: _with(lambda m: _shorter_head(m), tied=False), "tied", "61 .* and|rows"),
    "no labels": (lambda: _with(lambda m: setattr(m, "forward", m.model.forward)), None, "takes no labels"),
    "no values yet": (lambda: _on_meta(), None, "meta device"),
    "backward hook": (
        lambda: _with(lambda m: m.lm_head.register_full_backward_hook(lambda *_: None)),
        None,
        "before the loss: a backward hook on its output head; register the hook after install",
    ),
    "cap of a cap": (lambda: build("gemma2"), "tied+softcap=5", "something else to its logits"),
}


def _shorter_head(model):
    model.lm_head = nn.Linear(16, 40, bias=False)


def _on_meta():
    with torch.device("meta"):
        return build("llama")


@pytest.mark.parametrize("case", CASES)
def test_refused_with_the_reason_and_left_alone(case):
    make, spec, reason = CASES[case]
    model = make()
    classes, entries = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: p.detach().clone() for name, p in parameters.items()}
    config = model.config.to_dict()
    with pytest.raises(InstallError, match=reason) as caught:
        install(model, spec)
    assert "\n" not in str(caught.value)
    assert caught.value.fix
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == entries
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    assert all(p.is_meta or torch.equal(p, values[name]) for name, p in after.items())
    assert model.config.to_dict() == config
    assert not any((m._forward_hooks or m._forward_pre_hooks) for m in model.modules())


def test_a_model_that_needs_more_than_ids_takes_a_batch():
    class Conditioned(LogitsOfItsOwn):
        def forward(self, input_ids=None, shift=None, labels=None, **kwargs):
            return tr.LlamaForCausalLM.forward(self, input_ids=input_ids + shift, labels=labels)

    model = variant("llama", Conditioned)
    with pytest.raises(InstallError, match=r"does not run on a random batch.*pass batch="):
        install(model)
    inputs = batch(model) | {"shift": torch.ones(1, dtype=torch.long)}
    inputs["input_ids"] = inputs["input_ids"] % 50
    plain = copy.deepcopy(model)
    install(model, batch=inputs)
    assert torch.allclose(step(model, inputs)[0], step(plain, inputs)[0])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("factored:17", "exceeds the model width"),
        ("tied+pad=61", "61 rows"),
        ("tied+vectors=glove.txt", "give install the model's tokenizer too"),
        ("tied+nonsense", "unknown option"),
    ],
)
def test_a_spec_that_cannot_be_had_is_refused_and_nothing_changes(spec, reason):
    model = build("llama")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(SpecError, match=reason):
        install(model, spec)
    assert all(p is before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert type(model) is tr.LlamaForCausalLM
