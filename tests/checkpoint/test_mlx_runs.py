"""Test predicted loads with mlx-lm of whole models: config keys, all tensors, files. Slow tests load them."""

import json

import pytest
import random_folders as folders
import torch
from asked_classes import asking_in_this_process
from test_loaders_by_family import VERSION, write_saved

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.mlx_fit import MlxFit, MlxFolder
from tiewise.checkpoint.mlx_loading import MlxLoading
from tiewise.checkpoint.mlx_runs import MlxRun, numbered, text_layers

FIRST = "model.layers.0"


def without(*names):
    """Return a change that removes tensors."""
    return lambda checkpoint: [checkpoint.tensors.pop(name) for name in names]


def with_tensor(name, *shape):
    """Return a change that stores one tensor more."""
    return lambda checkpoint: checkpoint.tensors.update({name: torch.ones(shape)})


def with_keys(**keys):
    """Return a change of the config; a key of None is removed."""

    def change(checkpoint):
        for key, value in keys.items():
            checkpoint.config.pop(key)
            if value is not None:
                checkpoint.config[key] = value

    return change


def without_keys(*keys):
    return lambda checkpoint: [checkpoint.config.pop(key) for key in keys]


def with_null(key):
    return lambda checkpoint: checkpoint.config.update({key: None})


def with_biases(checkpoint):
    checkpoint.config["attention_bias"] = True
    for part in "qkvo":
        name = f"self_attn.{part}_proj.bias"
        checkpoint.tensors |= {f"model.layers.{number}.{name}": torch.ones(32) for number in (0, 1)}


def with_biases_of_attention(checkpoint):
    """Write the biases of those layers that have attention."""
    checkpoint.config["attention_bias"] = True
    for name in [name for name in checkpoint.tensors if ".self_attn." in name and "_proj.weight" in name]:
        rows = checkpoint.tensors[name].shape[0]
        checkpoint.tensors[name.replace(".weight", ".bias")] = torch.ones(rows)


def with_head_of_half_the_width(checkpoint):
    """Store a head with half the columns of the table."""
    table = checkpoint.tensors[checkpoint.inputs[0]]
    checkpoint.tensors["lm_head.weight"] = table[:, ::2] + 1


def with_packed_ends(*names):
    """Store a head that differs from the table, and pack these tensors as mlx-lm packs them."""

    def change(checkpoint):
        table = checkpoint.tensors[checkpoint.inputs[0]]
        (head,) = checkpoint.heads
        checkpoint.tensors[head] = table + 1
        folders.pack_as_mlx(checkpoint, [name for name in (checkpoint.inputs[0], head) if name.split(".")[-2] in names])

    return change


def packed_without_its_section(checkpoint):
    """Pack every matrix as mlx-lm does, and leave out the section that says so."""
    changed_by(folders.quantise_as_mlx)(checkpoint)
    del checkpoint.config["quantization"]


def packed_with_both_sections(checkpoint):
    """Pack every matrix as mlx-lm does, and copy its section as mlx-lm itself writes it."""
    changed_by(folders.quantise_as_mlx)(checkpoint)
    checkpoint.config["quantization_config"] = checkpoint.config["quantization"]


def with_table_of_half_the_width(checkpoint):
    """Halve the input table, to a width that the config has for another part."""
    checkpoint.config["head_dim"] = 16
    (name,) = checkpoint.inputs
    checkpoint.tensors[name] = checkpoint.tensors[name][:, ::2]


def with_prefix(prefix):
    return lambda checkpoint: checkpoint.rename(list(checkpoint.tensors), lambda name: prefix + name)


def without_vision_layer(checkpoint):
    gone = [name for name in checkpoint.tensors if "vision_tower.encoder.layers.1." in name]
    without(*gone)(checkpoint)
    assert gone


def in_f64(checkpoint):
    checkpoint.tensors["model.norm.weight"] = checkpoint.tensors["model.norm.weight"].double()


def cut(name):
    """Return a change that stores the first half of a tensor."""
    return lambda checkpoint: checkpoint.tensors.update({name: checkpoint.tensors[name][..., ::2]})


def without_a_shard(checkpoint):
    checkpoint.shards, checkpoint.lost_shard = 2, 1


def with_names_of_mlx(checkpoint):
    """Stack the experts under the names with which mlx-lm saves them."""
    for number in (0, 1):
        block = f"model.layers.{number}.block_sparse_moe"
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            experts = [checkpoint.tensors.pop(f"{block}.experts.{expert}.{old}.weight") for expert in range(4)]
            checkpoint.tensors[f"{block}.switch_mlp.{new}.weight"] = torch.stack(experts)


def changed_by(change):
    """Return a change of `random_folders`, with a fixed seed."""
    return lambda checkpoint: change(checkpoint, folders.random.Random(0))


# case: family, change of the tied model, outcome, words of the sentence
CASES = {
    "healthy": ("llama", lambda checkpoint: None, columns.TIED, ""),
    "no norm": ("llama", without("model.norm.weight"), columns.ERROR, "model.norm.weight is not stored"),
    "no matrix": ("llama", without(f"{FIRST}.mlp.up_proj.weight"), columns.ERROR, "mlp.up_proj.weight is not stored"),
    "one more": ("llama", with_tensor("model.extra.weight", 4), columns.ERROR, "has no model.extra.weight"),
    "frequencies": ("llama", with_tensor(f"{FIRST}.self_attn.rotary_emb.inv_freq", 4), columns.TIED, ""),
    "one layer more": ("llama", changed_by(folders.add_layer), columns.ERROR, "layers.2 is beyond"),
    "one layer less": ("llama", with_keys(num_hidden_layers=3), columns.ERROR, "model.layers.2 is not stored"),
    "biases": ("llama", with_biases, columns.TIED, ""),
    "no biases": ("llama", with_keys(attention_bias=True), columns.ERROR, "_proj.bias is not stored"),
    "no key": ("llama", with_keys(rms_norm_eps=None), columns.ERROR, "needs rms_norm_eps"),
    "null": ("llama", with_null("intermediate_size"), columns.ERROR, "null for intermediate_size"),
    "no default key": ("llama", with_keys(rope_parameters=None), columns.TIED, ""),
    "F64": ("llama", in_f64, columns.ERROR, "F64"),
    "half a norm": ("llama", cut("model.norm.weight"), columns.ERROR, "[16], and its model [32]"),
    "half a matrix": ("llama", cut(f"{FIRST}.mlp.up_proj.weight"), columns.ERROR, "up_proj.weight has the shape"),
    "shard lost": ("llama", without_a_shard, columns.ERROR, "is not stored"),
    "packed": ("llama", changed_by(folders.quantise_as_mlx), columns.TIED, ""),
    "an expert less": ("mixtral", without(f"{FIRST}.block_sparse_moe.experts.1.w1.weight"), columns.ERROR, "expert"),
    "names of mlx-lm": ("mixtral", with_names_of_mlx, columns.TIED, ""),
    "bias of a part that it lacks": ("mistral3", with_tensor("multi_modal_projector.extra.bias", 4), columns.TIED, ""),
    "packed router": ("glm4_moe_lite", changed_by(folders.quantise_as_mlx), columns.ERROR, "mlp.gate.scales"),
    "biases of one kind of layer": ("qwen3_next", with_biases_of_attention, columns.TIED, ""),
    "multi-token parts": ("qwen3_next", with_tensor("mtp.layers.0.norm.weight", 4), columns.TIED, ""),
    "half a dropped head": ("llama", with_head_of_half_the_width, columns.DROPPED, ""),
    "half a head that is read": ("helium", with_head_of_half_the_width, columns.ERROR, "[99, 16]"),
    "two packed ends": ("llama", with_packed_ends("embed_tokens", "lm_head"), columns.ERROR, "has no lm_head.scales"),
    "two packed ends of Gemma": ("gemma2", with_packed_ends("embed_tokens", "lm_head"), columns.ERROR, ""),
    "two packed ends, head unused": ("helium", with_packed_ends("embed_tokens", "lm_head"), columns.DROPPED, ""),
    "packed head alone": ("llava", with_packed_ends("lm_head"), columns.ERROR, "has no language_model.lm_head.scales"),
    "plain head next to a packed table": ("llama", with_packed_ends("embed_tokens"), columns.DROPPED, ""),
    "packed head of a class with a head": ("helium", with_packed_ends("lm_head"), columns.DROPPED, ""),
    "packed without a section": ("llama", packed_without_its_section, columns.ERROR, "scales"),
    "packed with both sections": ("llama", packed_with_both_sections, columns.TIED, ""),
    "table of another width": ("llama", with_table_of_half_the_width, columns.ERROR, "has the shape"),
    "prefix that it removes": ("laguna", with_prefix("language_model."), columns.DEPENDS, "not those of its class"),
    "no vision layer": ("gemma3", without_vision_layer, columns.TIED, ""),
    "layers counted by a list": ("nemotron_h", changed_by(folders.add_layer), columns.ERROR, "beyond the config"),
    "another body": ("gpt2", lambda checkpoint: None, columns.ERROR, "transformer."),
    "no key of a family without a run": ("exaone4", without_keys("rope_theta"), columns.ERROR, "needs rope_theta"),
    "F64 of a family without a run": ("gpt_oss", in_f64, columns.ERROR, "F64"),
    "the body's names": ("gpt2", changed_by(folders.drop_prefix), columns.TIED, ""),
}


@pytest.fixture(autouse=True)
def whole_models(monkeypatch):
    """Let `check` judge whole models, as it does outside the tests."""
    monkeypatch.delenv("TIEWISE_NO_BUILD")


def mlx_outcome(path, builds=True):
    """Return the predicted outcome of mlx-lm alone."""
    facts = Facts(open_folder(path), builds=builds)
    with asking_in_this_process():
        return MlxLoading(facts, facts.claims.levels[0].model_type).outcome()


def write_case(path, case):
    kind, change, *_ = CASES[case]
    return write_saved(path, kind, change)


@pytest.mark.parametrize("case", CASES)
def test_predict_compares_whole_model_with_run_of_mlx(tmp_path, case):
    *_, outcome, words = CASES[case]
    write_case(tmp_path, case)
    predicted = mlx_outcome(tmp_path)
    assert (predicted.versions, predicted.outcome) == (VERSION, outcome)
    assert words in predicted.sentence


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_mlx_lm_loads_whole_model_as_predicted(tmp_path, case):
    pytest.importorskip("mlx_lm")
    from observed_loads import observe_mlx

    write_case(tmp_path, case)
    refused = bool(observe_mlx(tmp_path, None, None).error)
    assert refused == (CASES[case][2] == columns.ERROR)


def test_tensors_that_mlx_lm_passes_by_may_be_missing(tmp_path):
    path = write_case(tmp_path, "no vision layer")
    with asking_in_this_process():
        rows = predict(Facts(open_folder(path), builds=True))
    outcomes = {row.loader: row.outcome for row in rows}
    assert outcomes["mlx-lm"] == columns.TIED
    assert outcomes["transformers"] == columns.RANDOM_TENSORS


def test_setting_that_was_not_run_makes_missing_tensor_uncertain(tmp_path):
    """A class may have other tensors with a setting of another kind, so that nobody can tell."""
    path = write_saved(tmp_path, "llama", without(f"{FIRST}.mlp.up_proj.weight"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"some_new_option": True}))
    assert mlx_outcome(path).outcome == columns.DEPENDS
    assert "some_new_option" in mlx_outcome(path).sentence


def test_check_without_build_judges_ends_alone(tmp_path):
    path = write_case(tmp_path, "no norm")
    assert mlx_outcome(path).outcome == columns.ERROR
    assert mlx_outcome(path, builds=False).outcome == columns.TIED


RECORD = {
    "ends": "ttdee euuee ttdee", "inputs": ["a.embed.weight"], "heads": ["head.weight"], "shape": ["v", "w"],
    "flag": "t", "tensors": ["a.norm.weight"],
    "layers": {"a.layers": [["x.weight", "z.weight?"], ["y.weight"]]}, "skipped": ["inv_freq"],
    "skipped_parts": ["vision."], "more_layers": True, "converted": [], "keys": [["d", "e"]], "by_default": {"f": 4},
    "not_null": ["d"], "values": {}, "unpackable": ["a.layers.#.gate"], "refuses_wrong_dropped_head": False,
    "stripped": [],
    "settings": {"y_bias=true": {"more": ["a.layers.#.y.bias"], "kinds": {"a.layers.#.y.bias": [1]}},
                 "some=true": {"more": ["a.layers.#.s.weight?"]}},
}  # fmt: skip
HEALTHY = ("a.embed.weight", "a.norm.weight", "a.layers.0.x.weight", "a.layers.1.y.weight")


def misfit(*names, config=None, defaults=None, rows=None, packed=()):
    level = {"d": 1, "f": 4} if config is None else config
    folder = MlxFolder(frozenset(names), frozenset(packed), level, level, "", 2, rows, defaults or {})
    return MlxFit(MlxRun(**RECORD), folder).misfit()


@pytest.mark.parametrize(
    ("names", "is_certain"),
    [
        (HEALTHY, None),
        ((*HEALTHY, "a.layers.0.z.weight", "a.layers.1.inv_freq", "vision.any.weight", "a.layers.2.x.weight"), None),
        ((*HEALTHY[:3], "a.layers.1.x.weight"), None),  # a layer may be of any kind that was run
        (HEALTHY[:3], True),
        ((*HEALTHY[:3], "a.layers.1.z.weight"), False),
        ((*HEALTHY, "vision_other.weight"), True),
        ((*HEALTHY, "b.layers.0.x.weight"), True),
    ],
)
def test_misfit_of_names(names, is_certain):
    found = misfit(*names)
    assert (found and found.is_certain) == is_certain


@pytest.mark.parametrize(
    ("config", "defaults", "is_certain"),
    [
        ({"e": 1, "f": 1}, {}, None),
        ({"f": 1}, {}, True),
        ({"d": None, "f": 1}, {}, True),
        ({"d": 1}, {"f": 4}, None),
        ({"d": 1}, {"f": 5}, False),
    ],
)
def test_misfit_of_config_keys(config, defaults, is_certain):
    found = misfit(*HEALTHY, config=config, defaults=defaults)
    assert (found and found.is_certain) == is_certain


@pytest.mark.parametrize(
    ("names", "is_certain"),
    [
        ((*HEALTHY, "a.layers.1.y.bias"), None),
        (HEALTHY, False),  # layer 1 is of no kind that was run with the setting
        ((*HEALTHY, "a.layers.0.y.bias"), False),
        ((*HEALTHY, "a.layers.1.z.bias"), True),
    ],
)
def test_setting_changes_its_kinds_of_layers_alone(names, is_certain):
    found = misfit(*names, config={"d": 1, "f": 4, "y_bias": True})
    assert (found and found.is_certain) == is_certain


def test_setting_that_changes_some_layers_of_a_kind_requires_nothing():
    config = {"d": 1, "f": 4, "some": True}
    assert misfit(*HEALTHY, config=config) is None
    assert misfit(*HEALTHY, "a.layers.0.s.weight", config=config) is None
    assert misfit(*HEALTHY, "a.layers.0.s.weight").is_certain


def test_packed_module_must_be_one_that_can_be_packed():
    assert misfit(*HEALTHY, packed=["a.layers.0.x"]) is None
    refused = misfit(*HEALTHY, packed=["a.layers.0.gate", "a.layers.0.x"])
    assert refused.is_certain
    assert "a.layers.0.gate.scales" in refused.sentence


def test_text_layers_are_those_next_to_the_input_table():
    lists = ["vision_tower.layers", "language_model.model.layers"]
    assert text_layers(lists, ["language_model.model.embed_tokens.weight"]) == lists[1]
    assert text_layers([], ["a"]) is None


def test_every_recorded_family_has_a_text_list_and_a_load():
    for kind, record in mlx_data()["families"].items():
        run = MlxRun(**record)
        assert {"u", "t"} & set(run.ends), kind
        assert run.text_layers is not None
        assert numbered(f"{run.text_layers}.0.x.weight").layers == run.text_layers
