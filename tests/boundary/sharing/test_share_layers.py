"""Shared layers, compared with stacks built by hand, sums of separate gradients, the budget and saved files."""

import copy
import json

import pytest
import torch
import transformers as tr
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.boundary.fingerprint import left_alone
from tests.boundary.tiny_models import _BERT, _LLAMA, FAMILIES, V, build, sizes, trainer
from torch import nn

import tiewise.hf
from tiewise import install
from tiewise.boundary.journal import Journal
from tiewise.boundary.sharing.share import _relax, share_layers
from tiewise.boundary.sharing.stacks import find_stacks
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.inspection.running.loaded import open_model
from tiewise.inspection.sections.refinement import refinement_of
from tiewise.planning.architecture import budget
from tiewise.planning.read_config import read

_DEEP = {"num_hidden_layers": 5}


def llama(**changed):
    torch.manual_seed(0)
    return tr.LlamaForCausalLM(tr.LlamaConfig(**(_LLAMA | _DEEP | changed))).eval()


def bert(kind=tr.BertForMaskedLM, **changed):
    torch.manual_seed(0)
    return kind(tr.BertConfig(**(_BERT | _DEEP | changed))).eval()


def ids(rows=2, length=7):
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(input_ids=ids()).logits


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


# the modules of a layer that belong to each part, listed by hand
LLAMA_PARTS = {"attention": ("self_attn", "input_layernorm"), "ffn": ("mlp", "post_attention_layernorm")}
BERT_PARTS = {"attention": ("attention",), "ffn": ("intermediate", "output")}
GROUPS = {
    "attention": [0, 0, 0, 0, 0],
    "ffn": [0, 0, 0, 0, 0],
    "all": [0, 0, 0, 0, 0],
    "all:groups=2": [0, 0, 0, 3, 3],
    "ffn:cycle=2": [0, 1, 0, 1, 0],
    "sandwich": [0, 1, 1, 1, 4],
    "all:cycle=2,ends=1": [0, 1, 2, 1, 4],
}


@pytest.mark.parametrize("text", GROUPS)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_shared_model_equals_one_whose_weights_are_copied_by_hand(family, text):
    model = llama() if family == "llama" else bert()
    layers = model.model.layers if family == "llama" else model.bert.encoder.layer
    parts = LLAMA_PARTS if family == "llama" else BERT_PARTS
    kind = text.partition(":")[0]
    mine = [prefix for part, prefixes in parts.items() if kind in ("all", "sandwich", part) for prefix in prefixes]
    by_hand = copy.deepcopy(model)
    copied = by_hand.model.layers if family == "llama" else by_hand.bert.encoder.layer
    saved = 0
    with torch.no_grad():
        for i, source in enumerate(GROUPS[text]):
            for name, value in copied[i].named_parameters():
                if name.partition(".")[0] in mine and source != i:
                    value.copy_(copied[source].get_parameter(name))
                    saved += value.numel()
    before = count_parameters(model)
    shared = share_layers(model, text)
    assert torch.equal(logits(model), logits(by_hand))
    assert shared.parameters == count_parameters(model) == before - saved
    for i, source in enumerate(GROUPS[text]):
        for name, value in layers[i].named_parameters():
            assert (value is layers[source].get_parameter(name)) == (source == i or name.partition(".")[0] in mine)


def test_shared_base_model_returns_its_hidden_states():
    model, by_hand = bert(tr.BertModel), bert(tr.BertModel)
    share_layers(model, "all")
    by_hand.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, wanted = (one(input_ids=ids(), output_hidden_states=True).hidden_states for one in (model, by_hand))
    assert len(found) == len(wanted) == 6
    assert all(map(torch.equal, found, wanted))


def test_share_layers_none_changes_nothing():
    model = bert(tr.BertModel)
    with left_alone(model):
        assert share_layers(model, "none").spec == SharingSpec()


@pytest.mark.parametrize("text", GROUPS)
def test_shared_gradients_are_sums_over_the_sharing_layers(text):
    model = llama().train()
    apart = copy.deepcopy(model)
    share_layers(model, text)
    with torch.no_grad():
        for name, value in model.named_parameters(remove_duplicate=False):
            apart.get_parameter(name).copy_(value)
    for one in (model, apart):
        one(input_ids=ids(), labels=ids()).loss.backward()
    groups = [sorted(names) for names in same_parameters(model)]
    assert max(map(len, groups)) > 1
    for names in groups:
        total = sum(apart.get_parameter(name).grad.double() for name in names)
        found = model.get_parameter(names[0]).grad.double()
        assert (found - total).norm() <= 1e-5 * total.norm() + 1e-9
    assert len(list(model.parameters())) == len(groups)  # an optimizer sees each once


RARE = [pytest.param(text, marks=pytest.mark.slow) for text in GROUPS if text not in ("ffn", "all:groups=2")]


@pytest.mark.parametrize("text", ["ffn", "all:groups=2", "all+rank=2", "ffn:cycle=2+rank=3", *RARE])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_file_holds_each_tensor_once_and_loads_shared(tmp_path, text, tied):
    model = llama(tie_word_embeddings=tied)
    share_layers(model, text)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 (no dict)
    assert stored == count_parameters(model)
    loaded, info = tr.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert same_parameters(loaded) == same_parameters(model)
    assert share_layers(loaded).spec == SharingSpec.parse(text)
    loaded.tie_weights()
    assert same_parameters(loaded) == same_parameters(model)
    loaded.save_pretrained(tmp_path / "again")
    again = tiewise.hf.load(tmp_path / "again")
    assert torch.equal(logits(again.eval()), logits(model))
    assert same_parameters(again) == same_parameters(model)


def same_parameters(model):
    """Return the sets of parameter names that denote one parameter."""
    groups: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), set()).add(name)
    return {frozenset(names) for names in groups.values()}


def test_shared_encoder_loads_without_its_head_and_with_another_head(tmp_path):
    model = bert()
    share_layers(model, "attention")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        states = model.bert(input_ids=ids()).last_hidden_state
    for auto in (tr.AutoModel, tr.AutoModelForSequenceClassification):
        loaded = auto.from_pretrained(tmp_path).eval()
        body = loaded.base_model
        with torch.no_grad():
            assert torch.equal(body(input_ids=ids()).last_hidden_state, states)
        layers = body.encoder.layer
        assert layers[0].attention.self.query.weight is layers[4].attention.self.query.weight
        assert layers[0].intermediate.dense.weight is not layers[4].intermediate.dense.weight


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "gemma2", "gpt_neox"])
def test_shared_models_of_other_families_load_as_saved(tmp_path, name):
    model = build(name).eval()
    share_layers(model, "all")
    model.save_pretrained(tmp_path)
    auto = tr.AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else tr.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path).eval()
    batch = {"input_ids": ids(), "labels": ids()}
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert same_parameters(loaded) == same_parameters(model)


@pytest.mark.parametrize(
    ("tied", "steps"),
    [
        (True, [(install, "factored:4"), (share_layers, "ffn")]),
        (True, [(share_layers, "ffn"), (install, "factored:4")]),
        (False, [(share_layers, "all"), (install, "untied")]),
    ],
)
def test_shared_layers_and_a_boundary_are_saved_together(tmp_path, tied, steps):
    model = llama(tie_word_embeddings=tied)
    for verb, spec in steps:
        verb(model, spec)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    loaded = tiewise.hf.load(tmp_path)
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert same_parameters(loaded) == same_parameters(model)
    with torch.no_grad():
        dense = tiewise.hf.plain_copy(loaded)
    assert (logits(dense) - logits(model)).abs().max() <= 1e-5
    dense.save_pretrained(tmp_path / "dense")
    again = tr.AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(logits(again), logits(dense))
    assert "tiewise_boundary" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_separate_keeps_the_function_and_saves_as_the_family_does(tmp_path):
    model, plain = llama(), llama()
    shared = share_layers(model, "ffn:groups=2")
    before = logits(model)
    shared.separate()
    assert shared.spec == SharingSpec()
    assert type(model) is tr.LlamaForCausalLM
    assert len(same_parameters(model)) == len(same_parameters(plain))
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert torch.equal(logits(tr.LlamaForCausalLM.from_pretrained(tmp_path).eval()), before)


def test_sharing_again_follows_the_last_spec():
    model = llama()
    share_layers(model, "all")
    share_layers(model, "attention:groups=5")  # five runs of five layers: nothing is shared
    assert len(same_parameters(model)) == len(same_parameters(llama()))
    share_layers(model, "sandwich")
    assert share_layers(model).spec == SharingSpec.parse("sandwich")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_full_rank_differences_keep_a_trained_model_exactly(name):
    model = build(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 4}).double().eval()
    before = logits(model)
    shared = share_layers(model, "all+rank=1000")
    assert (logits(model) - before).abs().max() <= 1e-12 * before.abs().max()
    assert shared.differences > 0
    shared.separate()
    assert (logits(model) - before).abs().max() <= 1e-12 * before.abs().max()


@settings(max_examples=8)
@given(st.integers(1, 8), st.sampled_from(["first", "mean"]), st.integers(0, 1000))
def test_differences_are_the_best_low_rank_approximation(rank, values, seed):
    model = llama(num_hidden_layers=3)
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    weights = [layer.mlp.up_proj.weight.detach().double() for layer in model.model.layers]
    share_layers(model, f"ffn+rank={rank}", values=values)
    centre = weights[0] if values == "first" else sum(weights) / 3
    for layer, weight in zip(model.model.layers, weights, strict=True):
        up = layer.mlp.up_proj
        kept = up.delta_out.detach().double() @ up.delta_in.detach().double()
        lost = torch.linalg.svdvals(weight - centre)[rank:].square().sum()  # Eckart & Young 1936
        missing = weight - up.weight.detach() - kept
        assert float(missing.square().sum()) == pytest.approx(float(lost), rel=1e-4, abs=1e-8)
        assert up.delta_in.shape == (rank, 16)
        assert up.delta_out.shape == (24, rank)


def test_differences_of_equal_layers_can_learn():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.load_state_dict(model.model.layers[0].state_dict())
    before = logits(model)
    share_layers(model, "all+rank=2")
    assert (logits(model) - before).abs().max() <= 1e-5
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    up = model.model.layers[2].mlp.up_proj
    assert up.delta_out.grad.norm() > 0
    assert up.delta_in.norm() > 0


def test_values_mean_shares_the_mean_of_the_layers_without_a_rank():
    model = llama()
    mean = sum(layer.mlp.up_proj.weight for layer in model.model.layers) / 5
    share_layers(model, "all", values="mean")
    torch.testing.assert_close(model.model.layers[3].mlp.up_proj.weight, mean)


def test_share_layers_shares_the_layer_groups_of_albert():
    torch.manual_seed(0)
    config = tr.AlbertConfig(**(_BERT | {"embedding_size": 8, "num_hidden_layers": 6, "num_hidden_groups": 3}))
    model = tr.AlbertForMaskedLM(config).eval()
    one = count_parameters(model.albert.encoder.albert_layer_groups[0])
    before = count_parameters(model)
    assert share_layers(model, "all").parameters == before - 2 * one


def test_copies_and_new_models_of_the_config_share_layers():
    model = llama()
    share_layers(model, "ffn+rank=2")
    copied = copy.deepcopy(model)
    assert same_parameters(copied) == same_parameters(model)
    assert torch.equal(logits(copied), logits(model))
    for made in (type(model)(model.config), tr.AutoModelForCausalLM.from_config(model.config)):
        assert same_parameters(made) == same_parameters(model)
        up = made.model.layers[3].mlp.up_proj
        assert up.delta_in.norm() > 0
        assert not up.delta_out.any()


def test_trainer_saves_and_resumes_a_model_with_shared_layers(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in ids(8)]
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 100}
    options |= {"seed": 3, "data_seed": 3, "lr_scheduler_type": "constant"}

    def train(out, steps, resume=None):
        model = llama()
        share_layers(model, "all+rank=2")
        trainer(model, out, rows, max_steps=steps, **options).train(resume_from_checkpoint=resume)
        return model.eval()

    through = train(tmp_path / "a", 4)
    resumed = train(tmp_path / "b", 4, str(tmp_path / "a" / "checkpoint-2"))
    assert same_parameters(resumed) == same_parameters(through)
    assert (logits(resumed) - logits(through)).abs().max() <= 1e-5


def test_inspection_reports_shared_layers_as_repeated(tmp_path):
    model = llama()
    share_layers(model, "all:cycle=2")
    model.save_pretrained(tmp_path)
    found = refinement_of(open_model(tmp_path), ids().numpy(), further=3)
    assert [row[-2] for row in found.listings[0].rows] == ["no", "no", "all, as 1", "all, as 2", "all, as 1"]
    assert found.answer.startswith("a block of 2 layers is applied 2 times")
    assert found["small differences grow by, fresh weights"].why.endswith("applications 1 to 4")


def test_generation_keeps_a_separate_cache_per_shared_layer():
    model = llama()
    share_layers(model, "all")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids(), use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))


def on_meta():
    with torch.device("meta"):
        return llama()


def mamba():
    return tr.MambaForCausalLM(tr.MambaConfig(**sizes("vocab_size=61 hidden_size=16 num_hidden_layers=2 state_size=4")))


@pytest.mark.parametrize(
    ("make", "text", "says"),
    [
        (llama, "all:groups=9", "9 groups of 5 layers"),
        (llama, "all:ends=3", "two ends of 3"),
        (llama, "everything", "unknown sharing"),
        (lambda: llama(num_hidden_layers=0), "all", "no list of layers"),
        (on_meta, "all", "meta device"),
        (mamba, "ffn", "no ffn found"),
    ],
)
def test_refused_sharing_leaves_the_model_unchanged(make, text, says):
    model = make()
    with left_alone(model), pytest.raises((SpecError, InstallError), match=says):
        share_layers(model, text)


def test_share_layers_restores_the_model_after_an_error(monkeypatch):
    model = llama()
    share_layers(model, "ffn")
    before, shared = logits(model), same_parameters(model)

    def fail(*_):
        monkeypatch.undo()
        raise RuntimeError("midway")

    monkeypatch.setattr("tiewise.boundary.sharing.share.declare_family", fail)
    with pytest.raises(RuntimeError, match="midway"):
        share_layers(model, "all")
    assert torch.equal(logits(model), before)
    assert same_parameters(model) == shared


def _entry(sources, name="mlp.up_proj.weight", stack="model.layers", spec="all"):
    return {"spec": spec, "stacks": {stack: [{"layers": sources, "names": [name]}]}}


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"spec": "all"},
        {"spec": "everything", "stacks": {}},
        _entry([3, 0, 0, 0, 0]),
        _entry([0, 0]),
        _entry([float("inf")] * 5),
        _entry([0] * 5, name="input_layernorm.weight", spec="all+rank=2"),
        _entry([0] * 5, name="mlp.other.weight"),
        _entry([0] * 5, stack="elsewhere"),
    ],
)
def test_loading_refuses_an_invalid_sharing_config_in_one_line(tmp_path, entry):
    model = llama()
    share_layers(model, "all")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tiewise_sharing": entry}))
    with pytest.raises(InstallError) as caught:
        tr.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


# --- parameter counts of real models of many families, compared with the budget of their configs

_WIDE = sizes("num_hidden_layers=4 num_attention_heads=4 hidden_size=32 intermediate_size=48")
_LLAMA4 = _LLAMA | _WIDE | {"num_key_value_heads": 2}
_BERT4 = _BERT | _WIDE
_SHORT = sizes(f"vocab_size={V} hidden_size=32 n_layer=4 n_head=4")
_GPT = sizes(f"vocab_size={V} n_embd=32 n_layer=4 n_head=4 n_positions=40 bos_token_id=1 eos_token_id=2")
_DISTIL = sizes(f"vocab_size={V} dim=32 n_layers=4 n_heads=4 hidden_dim=48 max_position_embeddings=40")
_FALCON = sizes(f"vocab_size={V} hidden_size=32 num_hidden_layers=4 num_attention_heads=4")
_FALCON_NEW = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
_UMT5 = sizes(f"vocab_size={V} d_model=32 d_kv=8 d_ff=48 num_layers=4 num_decoder_layers=4 num_heads=4")
_UMT5 |= sizes("decoder_start_token_id=0 pad_token_id=0")
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_DEEPSEEK = _LLAMA4 | _LATENT | _EXPERTS | {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
# families that place norms, biases or experts differently from `FAMILIES`
MORE = {
    "albert": (tr.AlbertForMaskedLM, tr.AlbertConfig, _BERT4 | {"embedding_size": 16, "num_hidden_groups": 4}),
    "bloom": (tr.BloomForCausalLM, tr.BloomConfig, _SHORT),
    "deepseek": (tr.DeepseekV2ForCausalLM, tr.DeepseekV2Config, _DEEPSEEK | {"num_key_value_heads": 4}),
    "distilbert": (tr.DistilBertForMaskedLM, tr.DistilBertConfig, _DISTIL),
    "electra": (tr.ElectraForMaskedLM, tr.ElectraConfig, _BERT4 | {"embedding_size": 16}),
    "falcon": (tr.FalconForCausalLM, tr.FalconConfig, _FALCON),
    "falcon_new": (tr.FalconForCausalLM, tr.FalconConfig, _FALCON_NEW),
    "gptj": (tr.GPTJForCausalLM, tr.GPTJConfig, _GPT | {"rotary_dim": 4}),
    "gpt_oss": (tr.GptOssForCausalLM, tr.GptOssConfig, _LLAMA4 | {"num_local_experts": 4, "head_dim": 8}),
    "mixtral": (tr.MixtralForCausalLM, tr.MixtralConfig, _LLAMA4 | {"num_local_experts": 4}),
    "modernbert": (tr.ModernBertForMaskedLM, tr.ModernBertConfig, _BERT4 | {"cls_token_id": 1, "sep_token_id": 2}),
    "olmo": (tr.OlmoForCausalLM, tr.OlmoConfig, _LLAMA4),
    "olmo2": (tr.Olmo2ForCausalLM, tr.Olmo2Config, _LLAMA4),
    "stablelm": (tr.StableLmForCausalLM, tr.StableLmConfig, _LLAMA4 | {"use_parallel_residual": True}),
    "umt5": (tr.UMT5ForConditionalGeneration, tr.UMT5Config, _UMT5),
}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def four_layers(name):
    """Return a random model of four layers."""
    torch.manual_seed(0)
    kind, config, settings = (FAMILIES | MORE)[name]
    return kind(config(**settings | {key: 4 for key in _DEPTHS if key in settings}))


QUICK = {"bert", "falcon_new", "gemma2", "gpt2", "gpt_neox", "modernbert", "phi", "t5"}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(FAMILIES.keys() | MORE.keys())],
)
def test_parameter_counts_equal_the_predicted_budget(name):
    for text in ("none", *GROUPS):
        model = four_layers(name)
        architecture = read(model.config.to_dict() | {"architectures": [type(model).__name__]})
        assert not architecture.estimated
        predicted = budget(architecture, architecture.boundary, SharingSpec.parse(text)).total
        assert share_layers(model, text).parameters == predicted, text


@pytest.mark.parametrize(
    ("name", "norm", "part"),
    [
        ("gpt_neox", "input_layernorm.weight", "attention"),  # parallel branches, two new norms of one input
        ("gpt_neox", "post_attention_layernorm.weight", "ffn"),
        ("phi", "input_layernorm.weight", "own"),  # parallel branches that read one norm
    ],
)
def test_norms_belong_to_the_branch_that_reads_them(name, norm, part):
    (((_, parts), *_),) = find_stacks(four_layers(name)).values()
    assert parts[norm] == part


def test_a_list_of_tables_is_no_stack():
    """MusicGen has such a list: one table for each codebook."""
    model = four_layers("llama")
    (name, layers), *_ = find_stacks(model).items()
    tables = torch.nn.ModuleList(torch.nn.Embedding(len(model.model.embed_tokens.weight), 4) for _ in range(2))
    model.model.tables = tables
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: [table(*args) for table in tables] and None
    )
    assert [(key, len(value)) for key, value in find_stacks(model).items()] == [(name, len(layers))]


def test_find_stacks_leaves_modes_and_hooks_unchanged():
    model = four_layers("llama").train()
    model.model.layers[1].eval()
    find_stacks(model)
    assert [layer.training for layer in model.model.layers] == [True, False, True, True]
    assert not any(module._forward_hooks for module in model.modules())


def test_fresh_differences_start_at_zero_with_maps_of_unit_rows():
    torch.manual_seed(0)
    linear = nn.Linear(400, 30)
    _relax(linear, 8, None, Journal())
    assert linear.delta_in.shape == (8, 400)
    assert linear.delta_in.std().item() == pytest.approx(400**-0.5, rel=0.05)
    assert not linear.delta_out.any()
