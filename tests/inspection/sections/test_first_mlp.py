"""The path through the first MLP against one-layer models of transformers with zero attention output."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from tests.inspection.running.one_layer_models import SETTINGS, SIZES, E, V, one_layer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tiewise.checkpoint.families import FAMILIES
from tiewise.core.errors import CheckpointError, DataError, InstallError
from tiewise.core.estimates import interaction_residuals
from tiewise.core.measurement import plain
from tiewise.inspection.running.loaded import open_model
from tiewise.inspection.sections.first_mlp import first_block, first_mlp_of, through_first_mlp
from tiewise.inspection.tables import model_tables as tables
from tiewise.inspection.tables.bigram_counts import Chain
from tiewise.inspection.tables.open_path import open_path
from tiewise.inspection.tables.path_matrix import transitions

WITH_NORM = {kind for kind, one in FAMILIES.items() if one.final_norm is not None and one.written_ends is None}
BLOCKS = [kind for kind, one in FAMILIES.items() if one.first_mlp is not None and one.written_ends is None]
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


def dense_logits(model):
    with torch.no_grad():
        return model(torch.arange(V)[:, None]).logits[:, 0].double().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "settings"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_through_first_mlp_matches_a_one_layer_model_without_attention(family, settings, tied, tmp_path):
    model = one_layer(family, tied, **settings)
    expected = dense_logits(model)
    found = opened(model, tmp_path)
    direct = open_path(found.folder)
    path = through_first_mlp(direct, first_block(found.model))
    wanted = [(0, 0), (3, 7), (7, 3), (39, 39), (20, 1)]
    expected = expected[tuple(np.transpose(wanted))]
    # some classes compute their norm in fp32 for any model dtype
    assert transitions(path, wanted)[0] == pytest.approx(expected, rel=4e-6, abs=4e-6)
    assert not path.tied
    assert np.abs(transitions(direct, wanted)[0] - expected).max() > 1e-2


def test_every_known_family_has_a_first_block_or_experts():
    assert WITH_NORM - set(BLOCKS) == {"mixtral", "olmoe"}
    assert set(BLOCKS) <= WITH_NORM


WORDS = [f"w{i}" for i in range(V)]


def centred(m):
    middle = np.eye(len(m)) - 1 / len(m)
    return middle @ m @ middle


def asymmetry_ratio(m):
    return ((m - m.T) ** 2).sum() / (m**2).sum()


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    """Build a GPT-NeoX in fp64, whose norms keep the model's dtype: logits are exact to rounding."""
    model = one_layer("gpt_neox")
    return model, opened(model, tmp_path_factory.mktemp("neox"), WORDS)


def test_first_mlp_of_matches_dense_logits_of_the_model(neox, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_VALUES", 7 * 12)  # several pieces
    model, found = neox
    whole = dense_logits(model)
    head, shift = model.lm_head.weight.detach().numpy(), model.gpt_neox.final_layer_norm.bias.detach().numpy()
    ids = np.random.default_rng(0).integers(0, 12, 500)
    chain = Chain.of(ids, V)
    asked = [("w3", "w7"), ("w0", "w39")]
    result = first_mlp_of(found, asked, samples=25, seed=3, chain=chain, most=6)
    rows = np.sort(np.random.default_rng(3).choice(V, 25, replace=False))
    s = (whole - head @ shift)[np.ix_(rows, rows)]
    assert result["asymmetry, with the first MLP"].value == pytest.approx(asymmetry_ratio(s), abs=1e-10)
    assert result["asymmetry, with the first MLP, centred"].value == pytest.approx(
        asymmetry_ratio(centred(s)), abs=1e-10
    )
    change = result["change"]
    apart = result["asymmetry, with the first MLP"].value - result["asymmetry, direct"].value
    assert (change.value, change.n) == (pytest.approx(apart), 25)
    said = "adds" if change.low > 0 else "removes" if change.high < 0 else "no effect"
    assert said in result.answer
    logs = log_softmax(whole, axis=1)
    (pairs,) = result.listings
    for row, (a, b) in zip(pairs.rows, [(3, 7), (7, 3), (0, 39), (39, 0)], strict=True):
        assert result[f"{row[0]}, with the first MLP"].value == pytest.approx(whole[a, b], abs=1e-10)
        rank = (whole[a] > whole[a, b]).sum() + 1
        assert row[4:7] == (plain(whole[a, b], 3), f"{np.exp(logs[a, b]):.3g}", str(rank))
        first = np.count_nonzero(ids == a)
        share = np.count_nonzero((ids == a) & (np.roll(ids, -1) == b)) / first if first else np.nan
        assert row[7] == (f"{share:.3g}" if first else "–")
    pi = np.bincount(ids, minlength=V) / len(ids)
    text, _, through = result.grids
    shown = [WORDS.index(word) for word in text.rows]
    assert set(shown) == set(np.argsort(-pi, kind="stable")[:6].tolist()) | {3, 7, 0}
    expected = interaction_residuals(logs[np.ix_(shown, shown)] - np.log(pi[shown]))
    np.testing.assert_allclose(through.values, expected, atol=5.1e-4)  # the grid is rounded to three decimals
    loss = result["loss on the text's pairs, with the first MLP"]
    assert loss.value == pytest.approx(-logs[ids, np.roll(ids, -1)].mean(), abs=1e-10)
    assert len({grid.top for grid in result.grids}) == 1
    block = model.gpt_neox.layers[0]
    counted = sum(p.numel() for part in (block.mlp, block.post_attention_layernorm) for p in part.parameters())
    cost = result["parameters of that MLP"]
    assert cost.value == counted
    assert cost.why == f"{counted / V / E:.0%} of one table, {counted / model.num_parameters():.0%} of the model"
    assert result.notes[0] == "25 tokens sampled; the map is x + mlp(post_attention_layernorm(x))"


def test_first_mlp_of_reports_only_asymmetry_without_text_and_pairs(neox):
    result = first_mlp_of(neox[1])
    assert (result.grids, result.listings) == ((), ())
    main = ["asymmetry, direct", "asymmetry, with the first MLP", "change"]
    assert [q.name for q in result.quantities if q.main] == main
    assert result.notes[0].startswith(f"{V} tokens sampled")


def test_through_first_mlp_ignores_attention_and_deeper_layers(tmp_path):
    """A second layer and nonzero attention change the logits of the model but not its path."""
    shallow = one_layer("llama")
    expected = dense_logits(shallow)
    config = AutoConfig.for_model("llama", **{k: v for k, v in shallow.config.to_dict().items() if k != "model_type"})
    config.num_hidden_layers, config.layer_types = 2, None
    deep = AutoModelForCausalLM.from_config(config).double()
    deep.load_state_dict({k: v for k, v in shallow.state_dict().items() if "o_proj" not in k}, strict=False)
    found = opened(deep, tmp_path)
    path = through_first_mlp(open_path(found.folder), first_block(found.model))
    assert transitions(path, [(4, 5)])[0].item() == pytest.approx(expected[4, 5], rel=4e-6)
    assert abs(dense_logits(deep)[4, 5] - expected[4, 5]) > 1e-3


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("mixtral", {"num_local_experts": 2}, "mixture of experts"),
        ("opt", {"do_layer_norm_before": False}, "normalises the stream"),
        ("bloom", {}, "bloom is not known"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_first_block_refuses_unsupported_models_with_the_reason(family, settings, reason):
    config = AutoConfig.for_model(family)
    for key, value in (SIZES | SETTINGS["opt"] | settings).items():
        setattr(config, key, value)
    with pytest.raises(InstallError, match=reason):
        first_block(AutoModelForCausalLM.from_config(config))


def test_first_mlp_of_refuses_foreign_texts_and_models_without_a_head(neox, tmp_path):
    with pytest.raises(DataError, match="different ids"):
        first_mlp_of(neox[1], chain=Chain.of(np.arange(60), 60))
    one_layer("llama").model.save_pretrained(tmp_path)
    with pytest.raises((CheckpointError, InstallError), match=r"head|body"):
        first_mlp_of(open_model(tmp_path))


def test_first_block_of_a_composite_is_that_of_its_text_model():
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**sizes)))
    layer = model.model.language_model.layers[0]
    x = torch.randn(5, 8)
    with torch.no_grad():
        expected = x + layer.mlp(layer.post_attention_layernorm(x))
    torch.testing.assert_close(first_block(model)(x), expected)
