"""Models and specs that `install` refuses: the message gives the reason, and the model is unchanged."""

import copy
import warnings

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tr
from fingerprint import left_alone
from tiny_models import batch, build, sizes, step, variant
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiewise.boundary.installation import install, installed
from tiewise.boundary.ops.path_gradient import path_norms
from tiewise.boundary.sharing.share import share_layers
from tiewise.core.errors import InstallError, SpecError, UnsupportedError


class ExtraLogitStep(tr.LlamaForCausalLM):
    """Llama with an extra step between head and loss, the method `odd`."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.odd(super().forward(input_ids=input_ids, **kwargs).logits, input_ids)
        loss = None if labels is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def _with_step(step):
    """Return a Llama with the extra step `step(logits, ids)` between head and loss."""
    return variant("llama", type("Odd", (ExtraLogitStep,), {"odd": lambda self, logits, ids: step(logits, ids)}))


def _leaky(logits, ids):
    return torch.where(logits > 0, logits, 0.5 * logits)


def _copying(logits, ids):
    """Mix the distribution over the vocabulary with a copy distribution over the input tokens."""
    pointer = F.one_hot(ids, logits.shape[-1]).float().mean(1, keepdim=True)
    return torch.log(0.9 * torch.softmax(logits, -1) + 0.1 * pointer)


class LossPastTheHead(ExtraLogitStep):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.model(input_ids=input_ids).last_hidden_state @ self.lm_head.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class SecretTable(ExtraLogitStep):
    """A model that reads its input table a second time, unscaled, outside the boundary."""

    def odd(self, logits, ids):
        return logits + (self.model.embed_tokens.weight @ torch.ones(self.config.hidden_size, 1)).view(-1)


class OtherLogits(ExtraLogitStep):
    """A model that computes its loss by the head but returns logits of the unscaled table."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        loss = F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=hidden @ self.lm_head.weight.T)


def _changed_llama(change, **settings):
    model = build("llama", **settings)
    change(model)
    return model


def _embedding(**settings):
    return _changed_llama(lambda model: model.set_input_embeddings(nn.Embedding(61, 16, **settings)))


def _head(weight):
    """Return a Llama whose head has the weight `weight(table)`."""
    model = build("llama")
    table = model.lm_head.weight.detach()
    del model.lm_head.weight
    model.lm_head.weight = weight(table)
    return model


def _adapter(end):
    return _changed_llama(
        lambda model: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[end]), model), tied=False
    )


def _eight_bit(model):
    model.lm_head.__class__ = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})


def _dynamic(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao warns that torchao replaces it
        which = {"lm_head": torch.ao.quantization.default_dynamic_qconfig}
        torch.ao.quantization.quantize_dynamic(model, which, inplace=True)


class Int8(torch.Tensor):
    """A tensor as torchao makes it: it reports fp32, holds int8 and can be a Parameter."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].held)
        return function(*(a.held.float() if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def _foreign():
    """Return a model that looks tokens up but lacks everything else that install needs."""
    model = nn.Module()
    model.embed, model.config = nn.Embedding(61, 16), tr.LlamaConfig()
    model.get_input_embeddings = lambda: model.embed
    return model


def _fewer_words():
    return _changed_llama(lambda model: setattr(model, "lm_head", nn.Linear(16, 40, bias=False)), tied=False)


def _on_meta():
    with torch.device("meta"):
        return build("llama")


REMBERT = sizes("vocab_size=61 hidden_size=16 num_hidden_layers=1 num_attention_heads=2 intermediate_size=24")
REMBERT |= sizes("input_embedding_size=8 output_embedding_size=12")
HOOK = "before the loss: a backward hook on its output head; register the hook after install"
DYNAMIC = r"its output head is a Linear of torch\.ao\.nn\.quantized\.dynamic.*install before .*quantisation"
INT8 = r"quantised weights \(Int8.*before .*quantisation"
FP8 = r"quantised weights \(Parameter, torch\.float8_e4m3fn\)"


def _frozen_parameter(values):
    return nn.Parameter(values, requires_grad=False)


# name -> (pattern of the message, function that builds the model[, spec])
CASES = {
    "label head": ("scores 3 labels", lambda: variant("bert", tr.BertForSequenceClassification, num_labels=3)),
    "encoder without a head": ("without a token head", lambda: variant("bert", tr.BertModel)),
    "unknown step": ("something else to its logits before the loss: __gt__", lambda: _with_step(_leaky)),
    "copy distribution": ("before the loss: softmax", lambda: _with_step(_copying)),
    "step in place": ("add_ would change logits in place", lambda: _with_step(lambda logits, ids: logits.add_(2))),
    "loss past the head": ("past its output head", lambda: variant("llama", LossPastTheHead)),
    "table read twice": ("would change by", lambda: variant("llama", SecretTable), "tied+input_scale=sqrt_d"),
    "other logits than the loss's": (
        "logits would change by 1.0e",
        lambda: variant("llama", OtherLogits),
        "tied+output_scale=0.5",
    ),
    "sparse": ("sparse gradients", lambda: _embedding(sparse=True)),
    "max_norm": ("rewrites rows", lambda: _embedding(max_norm=1.0)),
    "scaled by frequency": ("token frequency", lambda: _embedding(scale_grad_by_freq=True)),
    "adapter on the head": (
        "its output head is a Linear of peft.tuners.lora.layer;.*before adapters",
        lambda: _adapter("lm_head"),
    ),
    "adapter on the lookup": (
        "model.embed_tokens is a Embedding of peft.tuners.lora.layer;.*before adapters",
        lambda: _adapter("embed_tokens"),
    ),
    "8-bit head": ("is a Linear8bitLt of bitsandbytes.nn.modules;.*quantisation", lambda: _changed_llama(_eight_bit)),
    "dynamically quantised head": (DYNAMIC, lambda: _changed_llama(_dynamic, tied=False)),
    "quantised tensor": (INT8, lambda: _head(lambda table: _frozen_parameter(Int8(table.to(torch.int8))))),
    "fp8 head": (FP8, lambda: _head(lambda table: _frozen_parameter(table.to(torch.float8_e4m3fn)))),
    "computed weight": ("has a weight that is computed", lambda: _head(lambda table: table * 2)),
    "no model of transformers": ("Module is no model of transformers", _foreign),
    "other widths": ("8 wide, the output table 12", lambda: tr.RemBertForMaskedLM(tr.RemBertConfig(**REMBERT)), "tied"),
    "other vocabularies": ("needs one vocabulary, and the tables have .* 61, .* 40 rows", _fewer_words, "tied"),
    "no labels": ("takes no labels", lambda: _changed_llama(lambda m: setattr(m, "forward", m.model.forward))),
    "no values yet": ("meta device", _on_meta),
    "backward hook": (HOOK, lambda: _changed_llama(lambda m: m.lm_head.register_full_backward_hook(lambda *_: None))),
    "cap of a cap": ("something else to its logits", lambda: build("gemma2"), "tied+softcap=5"),
}


@pytest.mark.parametrize(("reason", "make", "spec"), [(*case, None)[:3] for case in CASES.values()], ids=CASES)
def test_install_refuses_with_the_reason_and_leaves_the_model_unchanged(reason, make, spec):
    model = make()
    with left_alone(model), pytest.raises(InstallError, match=reason) as caught:
        install(model, spec)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_install_takes_a_batch_for_models_that_need_more_than_ids():
    class Conditioned(ExtraLogitStep):
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


@pytest.mark.parametrize(("spec", "reason"), [("factored:17", "exceeds the model width"), ("tied+pad=61", "61 rows")])
def test_install_refuses_an_invalid_spec_and_leaves_the_model_unchanged(spec, reason):
    model = build("llama")
    with left_alone(model), pytest.raises(SpecError, match=reason):
        install(model, spec)


@pytest.fixture
def sharded():
    """Return a function that applies `fully_shard` in a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    yield shard
    dist.destroy_process_group()


@pytest.mark.parametrize("spec", [None, "tied", "untied", "factored:8", "tied+init=0.1", "spd"])
def test_install_keeps_sharded_tables_and_supports_sharding_afterwards(sharded, spec):
    if spec in (None, "tied"):
        install(sharded(build("llama")), spec)
    else:
        with left_alone(model := sharded(build("llama"))), pytest.raises(InstallError, match="would change them"):
            install(model, spec)
    with pytest.raises(InstallError, match="sharded; share its layers before fully_shard"):
        share_layers(sharded(build("llama")), "ffn")
    model = build("llama")
    handle = install(model, spec)
    inputs, plain = batch(model), copy.deepcopy(model)
    install(plain)
    record, plain_record = handle.track(), install(plain).track()
    step(plain, inputs)
    sharded(model)
    if spec == "factored:8":
        with pytest.raises(InstallError, match=r"verified on whole tables only; take its handle by tiewise\.installed"):
            install(model)
    step(model, inputs)
    gradient, wanted = handle.tables()[0].grad, plain.get_input_embeddings().weight.grad
    with pytest.raises(UnsupportedError, match=r"sharded gradient \(DTensor\); give gradient.full_tensor"):
        path_norms(gradient, record)
    got, wanted = path_norms(gradient.full_tensor(), record), path_norms(wanted, plain_record)
    assert (got.a, got.b) == pytest.approx((wanted.a, wanted.b), rel=1e-5)


@pytest.mark.parametrize("end", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("place", [None, nn.Identity()])
def test_install_refuses_a_pipeline_that_separates_embedding_and_head(end, place):
    model = build("llama")
    owner, _, name = end.rpartition(".")
    setattr(model.get_submodule(owner), name, place)
    with left_alone(model), pytest.raises(InstallError, match=r"its ends are on different ranks: no rank has both"):
        install(model)


def test_installed_refuses_a_model_without_a_boundary():
    model = build("llama")
    for other in (model, "runs/final"):
        with pytest.raises(InstallError, match=r"no installed boundary; call tiewise\.install"):
            installed(other)
    install(model)
    model.lm_head = nn.Linear(16, len(model.lm_head.weight), bias=False)
    with pytest.raises(InstallError, match=r"its head is not the installed one"):
        installed(model)


def test_path_norms_before_track_names_track():
    model = build("llama")
    handle = install(model, "tied")
    with pytest.raises(UnsupportedError, match=r"call installed\.track\(\) before the forward"):
        handle.path_norms()
