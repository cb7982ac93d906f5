"""The small Flax decoder compared with transformers' Llama on one file, and `tied_io_embed` with its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx
from fp64_truth import error
from safetensors.torch import load_file

import tiewise
from tiewise.boundary.flax.find_tables import find_tables
from tiewise.boundary.flax.models import FlaxDecoder, count_parameters, tied_io_embed
from tiewise.boundary.flax.parameter_files import read, write
from tiewise.core.errors import CheckpointError, SpecError

V, D = 13, 8
IDS = np.random.default_rng(0).integers(0, V, (2, 5))
TARGETS = np.random.default_rng(1).integers(0, V, (2, 5))


def build_llama(spec):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=spec == "tied", rms_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return model if spec in ("tied", "untied") else tiewise.install(model, spec).model


@pytest.mark.parametrize("spec", ["tied", pytest.param("untied", marks=pytest.mark.slow), "factored:3"])
def test_flax_decoder_equals_pytorch_llama_and_writes_the_same_file(spec, tmp_path):
    theirs, ours = build_llama(spec), FlaxDecoder(spec, V, D, 2, 2, 24, rngs=nnx.Rngs(0))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    ours.load_named(read(path))
    write(tmp_path / "ours.safetensors", ours.named())
    first, second = load_file(path), load_file(tmp_path / "ours.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert count_parameters(ours) == sum(p.numel() for p in theirs.parameters())
    assert find_tables(nnx.state(ours, nnx.Param), V).one == (spec != "untied")
    logits = theirs(torch.tensor(IDS)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGETS).flatten())
    loss.backward()
    value, grads = nnx.jit(nnx.value_and_grad(lambda m: m.loss(IDS, TARGETS)))(ours)
    assert error(nnx.jit(lambda m: m.logits(IDS))(ours), logits.detach()) < 1e-5
    assert abs(float(value) - loss.item()) < 1e-5 * loss.item()
    nnx.update(ours, grads)  # the gradients under the parameters' names
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    for name, gradient in ours.named().items():
        assert error(gradient, wanted[name]) < 2e-5, name


def test_flax_decoder_refuses_invalid_sizes_and_tensors():
    with pytest.raises(SpecError, match="width 8 does not divide into 3 heads"):
        FlaxDecoder("tied", V, D, 1, 3, rngs=nnx.Rngs(0))
    model = FlaxDecoder("tied", V, D, 1, 2, rngs=nnx.Rngs(0))
    named, table = model.named(), "model.embed_tokens.weight"
    for message, given in {
        "has the unknown x": named | {"x": np.zeros(1)},
        r"lacks model\.embed_tokens\.weight": {k: v for k, v in named.items() if k != table},
        r"embed_tokens\.weight has shape \(2, 8\), not \(13, 8\)": named | {table: np.zeros((2, D))},
    }.items():
        with pytest.raises(CheckpointError, match=message):
            model.load_named(given)


class TiedEinsum(linen.Module):
    """The definition of `tied_io_embed` as one einsum."""

    @linen.compact
    def __call__(self, ids):
        w = self.param("embedding", linen.initializers.normal(stddev=0.02), (10, 3))
        return jnp.einsum("tv,vd,wd->tw", jax.nn.one_hot(ids, 10), w, w)


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_tied_io_embed_returns_the_logits_of_its_definition(seed):
    logits = tied_io_embed(seed, jnp.array([0.0, 2.0, 9.0, 2.0]), 10.0, 3.0)
    assert logits.shape == (40,)
    wanted, _ = TiedEinsum().init_with_output(jax.random.PRNGKey(seed), jnp.array([0, 2, 9, 2]))
    np.testing.assert_allclose(logits, wanted.ravel(), rtol=1e-5, atol=1e-9)
