"""Test the counts of each choice against the installed model, torch's FLOP counter and textbook formulas."""

import pytest
import torch
import transformers as tr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published_configs import standard_config, t5_config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiewise
from tiewise.core.errors import SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import budget, thresholds
from tiewise.planning.costs import Setting, all_costs
from tiewise.planning.read_config import Sizes, from_sizes, read

NONE = SharingSpec()
LLAMA = standard_config("llama", 32, 3, 4, 48, 96, num_key_value_heads=2)
OPT = standard_config("opt", 32, 2, 4, 0, 96, ffn_dim=48, word_embed_proj_dim=24, do_layer_norm_before=False)
del OPT["intermediate_size"]
BERT = standard_config("bert", 32, 2, 4, 48, 96)
T5 = t5_config("t5", 32, 8, 48, 2, 4, 96, decoder_start_token_id=0)
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 8}
KINDS = {"llama": (LLAMA, tr.AutoModelForCausalLM), "opt": (OPT, tr.AutoModelForCausalLM)}
KINDS |= {"bert": (BERT, tr.AutoModelForMaskedLM), "t5": (T5, tr.AutoModelForSeq2SeqLM)}
KINDS |= {"gemma2": (GEMMA, tr.AutoModelForCausalLM)}
SPECS = ["tied", "untied", "factored:8", "factored-untied:in=8,out=12", "residual:4", "spd", "projected:24"]
SPECS += ["projected", "tied+bias", "untied+bias", "projected:16,untied", "factored:8+bias"]


def build_model(name):
    values, auto = KINDS[name]
    sizes = dict(values)
    config = tr.AutoConfig.for_model(sizes.pop("model_type"), **sizes, attn_implementation="eager")
    torch.manual_seed(0)
    return auto.from_config(config)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_budget_counts_the_parameters_of_the_installed_model(name, text):
    model = build_model(name)
    tiewise.install(model, text)
    parameter_count = sum(p.numel() for p in model.parameters())
    assert budget(read(KINDS[name][0]), BoundarySpec.parse(text), NONE).total == parameter_count


@pytest.mark.parametrize("name", sorted(KINDS))
def test_flops_match_the_counter_of_torch(name):
    model = build_model(name)
    rows, length = 2, 16
    ids = torch.randint(5, 90, (rows, length))
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=ids, **more)
    architecture = read(KINDS[name][0])
    counted = all_costs(architecture, budget(architecture, architecture.boundary, NONE), Setting(rows, length))
    expected = counted["flops_per_token"]["forward"] * rows * length
    if name == "t5":  # torch also counts the scores of cross-attention
        expected += 4 * length * 2 * 4 * 8 * rows * length
    assert counter.get_total_flops() == expected


def test_budget_stores_all_experts_and_reads_the_active_ones():
    sizes = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    counted = budget(read(sizes), BoundarySpec("untied"), NONE)
    expert = 3 * 32 * 48
    assert counted.parameters["experts"] == 3 * 8 * expert
    assert counted.read == counted.total - 96 * 32 + 32 - 3 * 6 * expert


@pytest.mark.parametrize(
    ("text", "names"),
    [("attention", ["attention"]), ("ffn", ["intermediate", "output"]), ("all", [""]), ("all:groups=2", [""])],
)
def test_sharing_counts_like_a_bert_with_shared_layers(text, names):
    config = tr.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"} | {"num_hidden_layers": 5})
    model = tr.BertForMaskedLM(config)
    layers, spec = model.bert.encoder.layer, SharingSpec.parse(text)
    first: dict[int, nn.Module] = {}
    for index in range(5):
        owner = first.setdefault(index * spec.groups // 5, layers[index])
        if names == [""]:
            layers[index] = owner
        else:
            for name in names:
                setattr(layers[index], name, getattr(owner, name))
    parameter_count = sum(p.numel() for p in model.parameters())
    assert budget(read({**BERT, "num_hidden_layers": 5}), BoundarySpec("tied"), spec).total == parameter_count


def test_albert_keeps_its_sharing_and_counts_without_it_on_request():
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_groups": 3}
    architecture = read({"model_type": "albert", **sizes})
    assert str(architecture.sharing) == "all:groups=3"
    own = budget(architecture, BoundarySpec("tied"), architecture.sharing)
    apart = budget(architecture, BoundarySpec("tied"), NONE)
    assert own.total == architecture.total
    assert apart.total - own.total == 9 * 7_087_872
    assert apart.multiplied == own.multiplied


@given(
    st.integers(1, 3000),
    st.integers(1, 6).map(lambda n: 8 * n),
    st.integers(1, 9),
    st.sampled_from(["tied", "untied", "factored:4", "residual:2"]),
    st.sampled_from(["none", "attention", "ffn", "all", "all:groups=2"]),
)
@settings(max_examples=60)
def test_components_sum_to_the_textbook_total(vocab, d, layers, text, sharing):
    spec, share = BoundarySpec.parse(text), SharingSpec.parse(sharing)
    assume(share.groups <= layers)
    counted = budget(from_sizes(Sizes(vocab, d, layers)), spec, share)
    kept = {"attention": layers, "ffn": layers}
    for name in kept:
        if share.kind in ("all", name):
            kept[name] = share.groups
    plain = vocab * d
    ends = {"tied": plain, "untied": 2 * plain, "factored:4": 4 * vocab + 8 * d, "residual:2": plain + 4 * d}
    assert counted.total == ends[text] + (4 * kept["attention"] + 8 * kept["ffn"]) * d**2
    assert counted.multiplied == (4 + 8) * layers * d**2 + vocab * (4 if "fact" in text else d) + (
        8 * d if "fact" in text else 4 * d if "resid" in text else 0
    )


@pytest.mark.parametrize(
    ("spec", "sharing", "says"),
    [(spec, "none", "exceeds") for spec in ("factored:64", "residual:33", "factored-untied:in=8,out=64")]
    + [("tied", "all:groups=4", "4 groups of 3 layers"), ("tied", "all+rank=2", "the size of low-rank differences")],
)
def test_budget_refuses_boundaries_and_sharing_that_do_not_fit_the_model(spec, sharing, says):
    with pytest.raises(SpecError, match=says):
        budget(read(LLAMA), BoundarySpec.parse(spec), SharingSpec.parse(sharing))


def test_decoding_reads_the_cache_and_encoders_have_no_decoding():
    setting = Setting(length=100, dtype="bfloat16")
    llama, bert = ((a, budget(a, BoundarySpec("tied"), NONE)) for a in (read(LLAMA), read(BERT)))
    decode_bytes = all_costs(*llama, setting)["decode_bytes"]
    # bytes · layers · (keys, values) · (two heads of width eight)
    assert decode_bytes["cache_per_token"] == 2 * 3 * 2 * (2 * 8)
    assert decode_bytes["cache"] == 100 * decode_bytes["cache_per_token"]
    assert decode_bytes["weights"] == 2 * (llama[1].total - 96 * 32 + 32 + 96 * 32)
    assert all_costs(*bert, setting)["decode_bytes"] is None


@given(st.integers(10, 10**6), st.integers(8, 10**4), st.integers(1, 10**10))
def test_tying_saves_exactly_the_share_at_its_threshold(vocab, d, body):
    threshold_rows = thresholds(vocab, d, body)
    for share, row in zip((0.05, 0.1, 0.2, 0.3), threshold_rows, strict=False):
        table = row["value"] * d * d
        assert row["name"].endswith(f"{share:.0%}")
        assert row["here"] == vocab / d
        assert table / (2 * table + body) == pytest.approx(share)
    assert all(row["formula"] for row in threshold_rows)
    assert [row["value"] for row in thresholds(vocab, d, body, head=False)] == [
        row["value"] for row in threshold_rows[5::2]
    ]
