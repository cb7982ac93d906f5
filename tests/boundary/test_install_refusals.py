"""Where a boundary has no meaning, or does something unknown, install says why and leaves the model as it was."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tr
from tiny_models import batch, build, left_alone, sizes, step, variant
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiewise.boundary.install import install, installed
from tiewise.core.errors import InstallError, SpecError, UnsupportedError
from tiewise.ops.path_gradient import path_norms
from tiewise.sharing.share import share_layers


class LogitsOfItsOwn(tr.LlamaForCausalLM):
    """Llama with one more step between head and loss; `odd` is the step."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.odd(super().forward(input_ids=input_ids, **kwargs).logits, input_ids)
        loss = None if labels is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def _odd(step):
    """Make a Llama whose one more step between head and loss is `step(logits, ids)`."""
    return variant("llama", type("Odd", (LogitsOfItsOwn,), {"odd": lambda self, logits, ids: step(logits, ids)}))


def _copying(logits, ids):
    """Mix the vocabulary's distribution with one that points at the input."""
    pointer = F.one_hot(ids, logits.shape[-1]).float().mean(1, keepdim=True)
    return torch.log(0.9 * torch.softmax(logits, -1) + 0.1 * pointer)


class PastTheHead(LogitsOfItsOwn):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.model(input_ids=input_ids).last_hidden_state @ self.lm_head.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.view(-1))
        return tr.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class SecretTable(LogitsOfItsOwn):
    """Reads its input table once more, unscaled, where the boundary cannot see it."""

    def odd(self, logits, ids):
        return logits + (self.model.embed_tokens.weight @ torch.ones(self.config.hidden_size, 1)).view(-1)


def _with(change, **settings):
    model = build("llama", **settings)
    change(model)
    return model


def _embedding(**settings):
    return _with(lambda model: model.set_input_embeddings(nn.Embedding(61, 16, **settings)))


def _head(weight):
    """Make a Llama whose head has another weight, made from its own."""
    model = build("llama")
    table = model.lm_head.weight.detach()
    del model.lm_head.weight
    made = weight(table)
    (model.lm_head.register_buffer if made.dtype == torch.int8 else model.lm_head.__setattr__)("weight", made)
    return model


class ForeignHead(nn.Module):
    weight = nn.Parameter(torch.zeros(61, 16))

    def forward(self, hidden):
        return hidden @ self.weight.T


class Lora(nn.Module):
    """What PEFT puts in a module's place: it has the module's name, its own home and a `weight` of the module's."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight


def _adapter(end, kind, **settings):
    home = type(kind, (Lora,), {"__module__": "peft.tuners.lora.layer"})
    return _with(lambda model: model.set_submodule(end, home(model.get_submodule(end))), **settings)


def _eight_bit(model):
    model.lm_head.__class__ = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})


def _dynamic(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to be replaced by torchao
        which = {"lm_head": torch.ao.quantization.default_dynamic_qconfig}
        torch.ao.quantization.quantize_dynamic(model, which, inplace=True)


class Int8(torch.Tensor):
    """A tensor as torchao makes it: says fp32, holds int8, and is counted a Parameter."""

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


class Foreign(nn.Module):
    """Has both ends, and nothing else that install asks for."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.config = tr.LlamaConfig()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def _on_meta():
    with torch.device("meta"):
        return build("llama")


def _frozen(values):
    return nn.Parameter(values, requires_grad=False)


INT8 = torch.ones(61, 16, dtype=torch.int8)
REMBERT = sizes("vocab_size=61 hidden_size=16 num_hidden_layers=1 num_attention_heads=2 intermediate_size=24")
REMBERT |= sizes("input_embedding_size=8 output_embedding_size=12")
HEAD, LOOKUP = ("lm_head", "Linear"), ("model.embed_tokens", "Embedding")
HOOK = "before the loss: a backward hook on its output head; register the hook after install"
DYNAMIC = r"its output head is a Linear of torch\.ao\.nn\.quantized\.dynamic.*install before .*quantisation"

# name -> (model, spec, what the refusal says)
CASES = {
    "label head": (lambda: variant("bert", tr.BertForSequenceClassification, num_labels=3), None, "scores 3 labels"),
    "label per token": (lambda: variant("bert", tr.BertForTokenClassification, num_labels=5), None, "scores 5 labels"),
    "encoder without a head": (lambda: variant("bert", tr.BertModel), None, "without a token head"),
    "unknown step": (
        lambda: _odd(lambda logits, ids: torch.where(logits > 0, logits, 0.5 * logits)),
        None,
        "something else to its logits before the loss: __gt__",
    ),
    "copy distribution": (lambda: _odd(_copying), None, "before the loss: softmax"),
    "step in place": (lambda: _odd(lambda logits, ids: logits.add_(2)), None, "add_ would change logits in place"),
    "loss past the head": (lambda: variant("llama", PastTheHead), None, "past its output head"),
    "table read twice": (lambda: variant("llama", SecretTable), "tied+input_scale=sqrt_d", "would change by"),
    "sparse": (lambda: _embedding(sparse=True), None, "sparse gradients"),
    "max_norm": (lambda: _embedding(max_norm=1.0), None, "rewrites rows"),
    "scaled by frequency": (lambda: _embedding(scale_grad_by_freq=True), None, "token frequency"),
    "quantised head": (lambda: _head(lambda table: INT8), None, "quantised weights"),
    "adapter on the head": (
        lambda: _adapter(*HEAD),
        None,
        "its output head is a Linear of peft.tuners.lora.layer;.*before adapters",
    ),
    "adapter on the lookup": (
        lambda: _adapter(*LOOKUP, tied=False),
        None,
        "model.embed_tokens is a Embedding of peft.tuners.lora.layer;.*before adapters",
    ),
    "8-bit head": (lambda: _with(_eight_bit), None, "is a Linear8bitLt of bitsandbytes.nn.modules;.*quantisation"),
    "dynamically quantised head": (lambda: _with(_dynamic, tied=False), None, DYNAMIC),
    "quantised tensor": (
        lambda: _head(lambda table: _frozen(Int8(INT8))),
        "tied",
        r"quantised weights \(Int8.*before .*quantisation",
    ),
    "fp8 head": (
        lambda: _head(lambda table: _frozen(table.to(torch.float8_e4m3fn))),
        None,
        r"quantised weights \(Parameter, torch\.float8_e4m3fn\)",
    ),
    "computed weight": (lambda: _head(lambda table: table * 2), None, "has a weight that is computed"),
    "no model of transformers": (Foreign, "tied", "Foreign is no model of transformers"),
    "head that is no Linear": (
        lambda: _with(lambda m: setattr(m, "lm_head", ForeignHead())),
        None,
        "its output head is a ForeignHead",
    ),
    "other widths": (lambda: tr.RemBertForMaskedLM(tr.RemBertConfig(**REMBERT)), "tied", "8 wide, the output table 12"),
    "other vocabularies": (
        lambda: _with(lambda m: setattr(m, "lm_head", nn.Linear(16, 40, bias=False)), tied=False),
        "tied",
        "61 .* and|rows",
    ),
    "no labels": (lambda: _with(lambda m: setattr(m, "forward", m.model.forward)), None, "takes no labels"),
    "no values yet": (_on_meta, None, "meta device"),
    "backward hook": (lambda: _with(lambda m: m.lm_head.register_full_backward_hook(lambda *_: None)), None, HOOK),
    "cap of a cap": (lambda: build("gemma2"), "tied+softcap=5", "something else to its logits"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_the_reason_and_left_alone(case):
    make, spec, reason = CASES[case]
    model = make()
    with left_alone(model), pytest.raises(InstallError, match=reason) as caught:
        install(model, spec)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


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


@pytest.mark.parametrize(("spec", "reason"), [("factored:17", "exceeds the model width"), ("tied+pad=61", "61 rows")])
def test_a_spec_that_cannot_be_had_is_refused_and_nothing_changes(spec, reason):
    model = build("llama")
    with left_alone(model), pytest.raises(SpecError, match=reason):
        install(model, spec)


@pytest.fixture
def sharded():
    """`fully_shard` in a group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    yield shard
    dist.destroy_process_group()


@pytest.mark.parametrize("spec", [None, "tied", "untied", "factored:8", "tied+init=0.1", "spd"])
def test_a_sharded_model_keeps_its_tables_and_one_that_is_sharded_afterwards_trains(sharded, spec):
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
def test_ends_on_different_ranks_of_a_pipeline_are_refused(end, place):
    model = build("llama")
    owner, _, name = end.rpartition(".")
    setattr(model.get_submodule(owner), name, place)
    with left_alone(model), pytest.raises(InstallError, match=r"its ends are on different ranks: no rank has both"):
        install(model)


def test_a_handle_of_what_is_not_installed():
    model = build("llama")
    for other in (model, "runs/final"):
        with pytest.raises(InstallError, match=r"no installed boundary; call tiewise\.install"):
            installed(other)
    install(model)
    model.lm_head = nn.Linear(16, len(model.lm_head.weight), bias=False)
    with pytest.raises(InstallError, match=r"its head is not the installed one"):
        installed(model)
