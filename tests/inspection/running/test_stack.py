"""Layers, hidden states and logits of a model's stack, against transformers' own outputs."""

import pytest
import torch
import transformers as tr
from tests.boundary.tiny_models import _BERT, _LLAMA, FAMILIES, V, build

from tiewise import install
from tiewise.boundary.locate import locate
from tiewise.core.errors import UnsupportedError
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.running.stack import find_stack

MORE = {
    "bloom": (tr.BloomForCausalLM, tr.BloomConfig, {"vocab_size": V, "hidden_size": 16, "n_layer": 3, "n_head": 2}),
    "falcon": (tr.FalconForCausalLM, tr.FalconConfig, _LLAMA | {"num_hidden_layers": 3}),
    "mistral": (tr.MistralForCausalLM, tr.MistralConfig, _LLAMA),
    "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig, _LLAMA),
    "olmo2": (tr.Olmo2ForCausalLM, tr.Olmo2Config, _LLAMA),
    "albert": (tr.AlbertForMaskedLM, tr.AlbertConfig, _BERT | {"embedding_size": 8, "num_hidden_layers": 5}),
}
ENCODER_DECODERS = ("t5", "t5_v11", "bart", "marian")
NAMES = sorted((FAMILIES.keys() | MORE.keys()) - set(ENCODER_DECODERS))


def open_tiny_model(name, **settings):
    if name in FAMILIES:
        model = build(name, **settings).eval()
    else:
        kind, config, given = MORE[name]
        torch.manual_seed(0)
        model = kind(config(**(given | settings))).eval()
    return Opened(None, model, locate(model))


def random_ids(rows=3, length=9, seed=1):
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_stack_states_and_logits_match_transformers(name):
    found = open_tiny_model(name)
    stack, ids = find_stack(found), random_ids()
    with torch.no_grad():
        output = found.model(ids, output_hidden_states=True)
    states = stack.states(ids)
    depth = found.model.config.num_hidden_layers
    assert len(stack.applications) == depth
    assert len(states) == depth + 1
    for mine, theirs in zip(states[:depth], output.hidden_states[:depth], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)  # transformers' last state may include the final norm
    again = stack.to_logits(states[-1])
    assert (again - output.logits).abs().max() <= 1e-5 * output.logits.abs().max()
    assert stack.causal == (name not in ("bert", "roberta", "albert"))
    assert len({id(one.module) for one in stack.applications}) == (1 if name == "albert" else depth)


def test_to_logits_and_its_gradient_match_the_formula_for_any_shape():
    found = open_tiny_model("gemma2")
    stack = find_stack(found)
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 3, 4, 16, generator=source, requires_grad=True)
    wanted_at = hidden.detach().clone().requires_grad_()

    root = wanted_at.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    normed = wanted_at / root * (1 + found.model.model.norm.weight)
    wanted = 0.5 * torch.tanh(normed @ found.model.lm_head.weight.T / 0.5)
    got = stack.to_logits(hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    weights = torch.randn(got.shape, generator=source)
    (mine,) = torch.autograd.grad((got * weights).sum(), hidden)
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), wanted_at)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["factored:4", "tied+softcap=0.5"])
def test_to_logits_includes_an_installed_boundary(spec):
    model = build("llama").eval()
    install(model, spec)
    stack, ids = find_stack(Opened(None, model, locate(model))), random_ids()
    with torch.no_grad():
        wanted = model(ids).logits + 0
    assert (stack.to_logits(stack.states(ids)[-1]) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_find_stack_lists_a_shared_layer_once_per_application():
    stack = find_stack(open_tiny_model("albert", inner_group_num=2))  # a group of two is applied as one
    assert len({id(one.module) for one in stack.applications}) == 1
    assert len(stack.applications) == 5
    assert stack.width == 16


def test_find_stack_leaves_the_model_unchanged():
    found = open_tiny_model("gpt2")
    before = found.model(random_ids()).logits
    stack = find_stack(found)
    stack.to_logits(stack.states(random_ids())[-1])
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in found.model.modules())
    assert torch.equal(before, found.model(random_ids()).logits)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_find_stack_refuses_encoder_decoders(name):
    with pytest.raises(UnsupportedError, match="an encoder and a decoder"):
        find_stack(open_tiny_model(name))


class _Bypass(tr.LlamaForCausalLM):
    """Llama whose logits read the input embedding a second time."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids, **options)
        output.logits = output.logits + self.lm_head(self.model.embed_tokens(input_ids))
        return output


def test_find_stack_refuses_logits_that_depend_on_more_than_the_last_layer():
    torch.manual_seed(0)
    model = _Bypass(tr.LlamaConfig(**_LLAMA)).eval()
    with pytest.raises(UnsupportedError, match="more than the last layer"):
        find_stack(Opened(None, model, locate(model)))


def test_find_stack_refuses_a_layer_that_does_not_read_its_predecessor():
    found = open_tiny_model("llama")

    def doubled(module, args, kwargs):
        return (args[0] * 2, *args[1:]), kwargs

    found.model.model.layers[1].register_forward_pre_hook(doubled, with_kwargs=True)
    with pytest.raises(UnsupportedError, match="layer 1 does not read what layer 0 wrote"):
        find_stack(found)


class _NormBehindLayers(torch.nn.Module):
    """Norm that applies another list of layers first."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.layers = norm, torch.nn.ModuleList([torch.nn.Linear(16, 16)])

    def forward(self, states):
        return self.norm(self.layers[0](states))


def test_find_stack_refuses_several_lists_of_layers():
    found = open_tiny_model("llama")
    found.model.model.norm = _NormBehindLayers(found.model.model.norm)
    with pytest.raises(UnsupportedError, match=r"several lists of layers, model.layers and model.norm.layers"):
        find_stack(found)
