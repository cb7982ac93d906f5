"""The path with the first MLP is what transformers' own class says when its one layer's attention gives nothing."""

import numpy as np
import pytest
import torch
from one_layer_models import E, V, one_layer
from scipy.special import log_softmax
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tiewise.analysis import token_table as tables
from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.open_path import FAMILIES, open_path
from tiewise.analysis.path_tokens import transitions
from tiewise.core.errors import CheckpointError, DataError, InstallError
from tiewise.internals.first_mlp import BLOCKS, first_block, first_mlp_of, through_first_mlp
from tiewise.internals.loaded import open_model

VARIANTS = [
    *((family, {}) for family in BLOCKS),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": False, "parallel_attn": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
]


def opened(model, folder, words=()):
    """Save a model, with a tokenizer of whole words, and open it in fp64."""
    model.save_pretrained(folder)
    if words:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    return open_model(folder, torch.float64)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(V)[:, None]).logits[:, 0].double().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "settings"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_one_layer_without_attention_is_the_path(family, settings, tied, tmp_path):
    model = one_layer(family, tied, **settings)
    expected = logits_of(model)
    found = opened(model, tmp_path)
    direct = open_path(found.folder)
    path = through_first_mlp(direct, first_block(found.model))
    wanted = [(0, 0), (3, 7), (7, 3), (39, 39), (20, 1)]
    for one in transitions(path, wanted):
        # some classes compute their norm in fp32, whatever the model's type
        assert one.logit == pytest.approx(expected[one.before, one.after], rel=4e-6, abs=4e-6)
    assert not path.tied
    without = transitions(direct, wanted)
    assert max(abs(one.logit - expected[one.before, one.after]) for one in without) > 1e-2


def test_every_known_family_has_a_block_or_experts():
    assert set(FAMILIES) - set(BLOCKS) == {"mixtral", "olmoe"}
    assert set(BLOCKS) <= set(FAMILIES)


WORDS = [f"w{i}" for i in range(V)]


def centred(m):
    middle = np.eye(len(m)) - 1 / len(m)
    return middle @ m @ middle


def ratio(m):
    return ((m - m.T) ** 2).sum() / (m**2).sum()


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    """GPT-NeoX in fp64, whose norms keep the model's type: logits are exact to rounding."""
    model = one_layer("gpt_neox")
    return model, opened(model, tmp_path_factory.mktemp("neox"), WORDS)


def test_everything_equals_the_models_own_dense_logits(neox, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_VALUES", 7 * 12)  # several pieces
    model, found = neox
    whole = logits_of(model)
    head, shift = model.lm_head.weight.detach().numpy(), model.gpt_neox.final_layer_norm.bias.detach().numpy()
    ids = np.random.default_rng(0).integers(0, 12, 500)
    chain = Chain.of([ids], V)
    asked = [("w3", "w7"), ("w0", "w39")]
    result = first_mlp_of(found, asked, samples=25, seed=3, chain=chain, shown=6)
    rows = np.sort(np.random.default_rng(3).choice(V, 25, replace=False))
    s = (whole - head @ shift)[np.ix_(rows, rows)]
    assert result.within.asymmetry.ratio.value == pytest.approx(ratio(s), abs=1e-10)
    assert result.within.asymmetry.centred.value == pytest.approx(ratio(centred(s)), abs=1e-10)
    logs = log_softmax(whole, axis=1)
    for (a, b), pair in zip([(3, 7), (0, 39)], result.within.pairs, strict=True):
        assert (pair.there.logit, pair.back.logit) == pytest.approx((whole[a, b], whole[b, a]), abs=1e-10)
        chances = pair.there.log_probability, pair.back.log_probability
        assert chances == pytest.approx((logs[a, b], logs[b, a]), abs=1e-10)
    shown = result.target.ids
    pi = np.bincount(ids, minlength=V) / len(ids)
    np.testing.assert_allclose(
        result.within.heat.matrix, logs[np.ix_(shown, shown)] - np.log(pi[list(shown)]), atol=1e-10
    )
    assert set(shown) == set(np.argsort(-pi, kind="stable")[:6].tolist()) | {3, 7, 0}
    assert result.within.loss.nll == pytest.approx(-logs[ids, np.roll(ids, -1)].mean(), abs=1e-10)
    assert result.text[0].there == sum((ids == 3) & (np.roll(ids, -1) == 7))
    block = model.gpt_neox.layers[0]
    counted = sum(p.numel() for part in (block.mlp, block.post_attention_layernorm) for p in part.parameters())
    assert result.parameters == counted
    assert result.composition == "x + mlp(post_attention_layernorm(x))"
    assert (result.table_parameters, result.model_parameters) == (V * E, model.num_parameters())
    assert result.samples == 25


def test_without_a_text_there_are_no_maps(neox):
    result = first_mlp_of(neox[1])
    assert (result.target, result.within.heat, result.without.loss, result.text) == (None, None, None, ())
    assert result.samples == V


def test_deeper_layers_and_attention_say_nothing(tmp_path):
    """A second layer, and an attention that gives something, change the model but not its path."""
    shallow = one_layer("llama")
    expected = logits_of(shallow)
    config = AutoConfig.for_model("llama", **{k: v for k, v in shallow.config.to_dict().items() if k != "model_type"})
    config.num_hidden_layers, config.layer_types = 2, None
    deep = AutoModelForCausalLM.from_config(config).double()
    deep.load_state_dict({k: v for k, v in shallow.state_dict().items() if "o_proj" not in k}, strict=False)
    found = opened(deep, tmp_path)
    path = through_first_mlp(open_path(found.folder), first_block(found.model))
    (one,) = transitions(path, [(4, 5)])
    assert one.logit == pytest.approx(expected[4, 5], rel=4e-6)
    assert abs(logits_of(deep)[4, 5] - expected[4, 5]) > 1e-3


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mixtral", {"num_local_experts": 2}, "mixture of experts"),
        ("opt", {"do_layer_norm_before": False}, "normalises the stream"),
        ("bloom", {}, "bloom is not known"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_other_models_are_refused_with_the_reason(family, settings, reason):
    config = AutoConfig.for_model(family)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": V, "pad_token_id": 0}
    more = {"intermediate_size": 24, "num_key_value_heads": 2, "word_embed_proj_dim": 16, "ffn_dim": 24}
    for key, value in {**sizes, **more, **settings}.items():
        setattr(config, key, value)
    with pytest.raises(InstallError, match=reason):
        first_block(AutoModelForCausalLM.from_config(config))


def test_bad_input_is_one_line(neox, tmp_path):
    found = neox[1]
    with pytest.raises(DataError, match="not one token"):
        first_mlp_of(found, [("w3", "nothing")])
    with pytest.raises(DataError, match="different ids"):
        first_mlp_of(found, chain=Chain.of([np.arange(60)], 60))
    body = one_layer("llama").model
    body.save_pretrained(tmp_path)
    with pytest.raises((CheckpointError, InstallError), match=r"head|body"):
        first_mlp_of(open_model(tmp_path))
