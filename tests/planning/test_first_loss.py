"""Test the predicted loss of the first step against real models of several families, within 2 %."""

import warnings

import pytest
import torch
import transformers as tr
from published_configs import bart_config, standard_config

from tiewise.checkpoint.families import FAMILIES
from tiewise.core.spec import BoundarySpec
from tiewise.planning.catalogue import models
from tiewise.planning.costs import first_loss, first_step_inputs, stored_first_losses
from tiewise.planning.plan import plan, resolve_model
from tiewise.planning.read_config import read

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)

# (std of every matrix, std of the tables): the common start, a far too wide one, and two with wider tables alone
STARTS = [(0.02, None), (0.2, None), (0.02, 0.07), (0.02, 1.0)]
BAR = 0.02
VOCAB, T = 2000, 64


def plain_sizes(layers=3, heads=6, **more):
    return {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": heads, **more}


def gated_sizes(layers=3, heads=6, **more):
    return plain_sizes(layers, heads, num_key_value_heads=2, intermediate_size=512, **more)


def gpt_sizes(layers, heads):
    return {"n_embd": 192, "n_layer": layers, "n_head": heads, "n_positions": T}


OPT = {"ffn_dim": 768, "max_position_embeddings": T, "word_embed_proj_dim": 192, "dropout": 0.0}
SIZES = {
    "gpt2": gpt_sizes(4, 4),
    "llama": gated_sizes(4),
    "gemma2": gated_sizes(3, 4, head_dim=48, query_pre_attn_scalar=48),
    "gpt_neox": plain_sizes(4, 4, intermediate_size=768),
    "opt": plain_sizes(4, 4, **OPT),
    "qwen3": gated_sizes(head_dim=32),
}
COMMON = gated_sizes(pad_token_id=0, bos_token_id=1, eos_token_id=2)
MULTIPLIERS = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
NEO = {"hidden_size": 192, "num_layers": 4, "num_heads": 6, "max_position_embeddings": T}
OTHERS = {
    **dict.fromkeys(("mistral", "qwen2", "phi", "phi3", "cohere", "cohere2", "olmo", "stablelm"), COMMON),
    **dict.fromkeys(("starcoder2", "smollm3"), COMMON),
    **{family: {**COMMON, "head_dim": 32} for family in ("gemma", "glm", "ernie4_5")},
    "gemma3_text": {**COMMON, "head_dim": 32, "query_pre_attn_scalar": 32},
    "granite": {**COMMON, **MULTIPLIERS, "attention_multiplier": 1 / 64},
    "gptj": {**gpt_sizes(3, 6), "rotary_dim": 16},
    "gpt_bigcode": gpt_sizes(3, 6),
    "gpt_neo": {**NEO, "attention_types": [[["global", "local"], 2]]},
    "falcon": plain_sizes(),
}


def make_config(family, std, tied, **more):
    key = "init_std" if family == "opt" else "initializer_range"
    named = {"model_type": family, "vocab_size": VOCAB, "tie_word_embeddings": tied, key: std}
    return {**named, **(SIZES | OTHERS)[family], **more}


def measure_first_loss(values, table_std=None, seeds=2, sequences=8, auto=tr.AutoModelForCausalLM):
    """Return the mean nll over fresh models and every possible target.

    If `table_std` is given, both tables are drawn again with it.
    """
    sizes = dict(values)
    config = tr.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    losses = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = auto.from_config(config).eval()
        tables = {id(t): t for t in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
        for table in tables.values():
            if table_std is not None:
                torch.nn.init.normal_(table, std=table_std)
        ids = torch.randint(2, config.vocab_size, (sequences, T))
        with torch.no_grad():
            logits = model(ids).logits
        losses.append((logits.logsumexp(-1) - logits.mean(-1)).mean().item())
    return sum(losses) / len(losses)


def predict_first_loss(values, tied, table_std=None):
    spec = BoundarySpec("tied" if tied else "untied", init=table_std)
    return first_loss(read(values), spec, length=64)


# Wide tied tables of two families and the common start of every family in SIZES are quick; all others are slow.
QUICK = [(family, True, start) for family in ("gpt2", "gemma2") for start in STARTS[2:]]
QUICK += [(family, True, STARTS[0]) for family in SIZES]
ALL = [(family, tied, start) for family in SIZES for tied in (True, False) for start in STARTS]
ALL += [(family, True, start) for family in OTHERS for start in STARTS]


@pytest.mark.parametrize(
    ("family", "tied", "start"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL],
    ids=str,
)
def test_first_loss_matches_real_models_of_every_family_and_start(family, tied, start):
    std, table_std = start
    values = make_config(family, std, tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = measure_first_loss(values, table_std, seeds=2 if family in SIZES else 4)
    assert predict_first_loss(values, tied, table_std)["nll"] == pytest.approx(real, rel=BAR)


def test_first_loss_follows_exactly_the_measured_families():
    needed = {"lfm2_moe": {"layer_types": ["conv"] * 32}}  # its class has no default
    configs = [{"model_type": family, **needed.get(family, {})} for family in READERS]
    followed = {config["model_type"] for config in configs if read(config).fresh is not None}
    assert followed == set(SIZES) | set(OTHERS)


@pytest.mark.slow
def test_first_loss_matches_gpt2_at_its_real_size():
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    values = make_config("gpt2", 0.02, True, **sizes)
    real = measure_first_loss(values, seeds=1, sequences=2)
    assert predict_first_loss(values, True)["nll"] == pytest.approx(real, rel=0.002)


SIDES = bart_config("bart", 128, 2, 256, 4, VOCAB, init_std=0.1)
ENCODERS = [
    standard_config("bert", 128, 2, 4, 256, VOCAB),
    standard_config("albert", 128, 2, 4, 256, VOCAB, embedding_size=64),
]


@pytest.mark.parametrize("values", [SIDES, *ENCODERS], ids=lambda values: values["model_type"])
def test_first_loss_of_other_families_matches_their_initial_std(values):
    auto = tr.AutoModelForSeq2SeqLM if values is SIDES else tr.AutoModelForMaskedLM
    values = {"initializer_range": 0.1, **values}
    real = measure_first_loss(values, seeds=1, auto=auto)
    assert predict_first_loss(values, True)["nll"] == pytest.approx(real, rel=BAR)


def test_first_loss_states_its_assumption_and_is_none_without_a_head():
    assert "independent" in first_loss(read({"model_type": "bert"}), BoundarySpec("tied"))["assumed"]
    assert first_loss(read({"model_type": "bert", "architectures": ["BertModel"]}), BoundarySpec("tied")) is None


def test_no_first_loss_is_predicted_for_a_head_that_starts_from_vectors():
    arms = ("tied", "tied+vectors=rows.txt", "factored:64+vectors=rows.txt", "untied+vectors=rows.txt")
    record = plan("gpt2", arms).record()
    losses = [choice["first_loss"] and choice["first_loss"]["nll"] for choice in record["choices"]]
    assert losses[1:3] == [None, None]
    assert losses[3] == plan("gpt2", "untied").choices[0]["first_loss"]["nll"]  # its head is drawn
    assert "No first loss is predicted where the head starts from a file of vectors." in record["notes"]
    assert "No first loss" not in " ".join(plan("gpt2").record()["notes"])


def test_first_loss_of_a_wide_start_raises_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_loss(read(make_config("llama", 7.0, True)), BoundarySpec("tied"))["nll"] > 100


def test_random_maps_remove_the_self_similarity_term():
    values = make_config("llama", 0.02, True)
    tied = first_loss(read(values), BoundarySpec("tied", init=0.2))
    factored = first_loss(read(values), BoundarySpec.parse("factored:96+init=0.2"))
    assert tied["own"] > 0.5
    assert factored["own"] is None
    assert factored["nll"] < tied["nll"] / 2


def catalogue_starts():
    """Yield (start, name and boundary) of every model of the catalogue that can be planned and has a head."""
    for row in models():
        if row.vocab is None and row.config is None:
            continue
        _, architecture = resolve_model(row)
        for kind in ("tied", "untied"):
            if architecture.ends.head:
                yield first_step_inputs(architecture, BoundarySpec(kind)), f"{row.name} {kind}"


def check_stored(start):
    (nll, own), (nll_kept, own_kept) = start.compute(), stored_first_losses()[repr(start)]
    assert nll_kept == pytest.approx(nll, rel=1e-9), start
    assert own_kept is own is None or own_kept == pytest.approx(own, rel=1e-9), start


def test_stored_losses_cover_exactly_the_models_of_the_catalogue():
    wanted = {repr(start) for start, _ in catalogue_starts()}
    assert wanted == set(stored_first_losses()), "run tools/make_first_losses.py"


@pytest.mark.parametrize("name", ["gpt2 tied", "gpt2 untied", "gemma-2-2b tied"])
def test_stored_loss_equals_the_computed_loss(name):
    check_stored(next(start for start, what in catalogue_starts() if what == name))


@pytest.mark.slow
def test_every_stored_loss_equals_the_computed_loss():
    for start, _ in catalogue_starts():
        check_stored(start)
