"""Test that `check` reports nothing about models that transformers saves and reads again exactly."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import tiny_classes as made
import torch
import transformers as tr
from asked_classes import asking_in_this_process
from quantised_layouts import LAYOUTS, write_layout
from safetensors.torch import load_file, save_file
from tiny_checkpoints import D, V, llama_config, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.built_class_child import built_in_class
from tiewise.checkpoint.claims import FLAG, class_ends
from tiewise.checkpoint.family_record import family_data
from tiewise.checkpoint.loader_columns import ERROR

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
healthy_models = import_module("healthy_models")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_reports_nothing_about_quantised_layouts(tmp_path, layout, tied):
    write_layout(layout, tied, tmp_path / "model")
    with asking_in_this_process():
        assert check(tmp_path / "model").at_least("warning") == ()


@pytest.mark.parametrize("tied", [True, False])
def test_names_in_files_follow_a_part_of_another_family(tmp_path, tied):
    """Cosmos 3 stores its language model without prefix, and the data lacks its default language model as a part."""
    text = made.TEXT_CONFIGS["llama"](tie_word_embeddings=tied).to_dict()
    config = {"architectures": ["Cosmos3OmniForConditionalGeneration"], "model_type": "cosmos3_omni", FLAG: tied}
    tensors = {"embed_tokens.weight": table(made.ROWS, made.WIDTH)}
    if not tied:
        tensors["lm_head.weight"] = table(made.ROWS, made.WIDTH, seed=1)
    audit = check(write_checkpoint(tmp_path / "cosmos", config | {"text_config": text}, tensors))
    assert audit.roles.unloaded_names == {}
    assert audit.at_least("warning") == ()


def test_head_of_model_inside_another_is_not_its_head(tmp_path):
    """BLT's patcher is a language model with a table and a head; BltModel itself has no head."""
    tensors = {
        f"{owner}.embed_tokens.weight": table(seed=seed) for seed, owner in enumerate(["local_encoder", "patcher"])
    }
    tensors["patcher.lm_head.weight"] = table(seed=2)
    config = {"architectures": ["BltModel"], "model_type": "blt", "vocab_size": V, "hidden_size": D, FLAG: True}
    audit = check(write_checkpoint(tmp_path / "blt", config, tensors))
    assert audit.roles.headless
    assert audit.roles.output is None
    assert audit.at_least("warning") == ()


def test_ids_of_class_without_tokens_are_not_judged(tmp_path):
    """Published decision transformers say vocab_size 1 and keep GPT-2's end token."""
    config = tr.DecisionTransformerConfig(n_layer=1, n_head=1, hidden_size=8, state_dim=3, act_dim=2, max_ep_len=16)
    tr.DecisionTransformerModel(config).save_pretrained(tmp_path)
    assert config.eos_token_id > config.vocab_size
    assert check(tmp_path).at_least("warning") == ()


def test_output_layer_of_model_without_tokens_is_no_head(tmp_path):
    """TimesFM reads numbers; its output_layer has the usual name of a head."""
    tensors = {"input_ff_layer.output_layer.weight": table(32, 40)}
    config = {"architectures": ["TimesFmModel"], "model_type": "timesfm", "hidden_size": 32, "intermediate_size": 40}
    audit = check(write_checkpoint(tmp_path / "timesfm", config, tensors))
    assert audit.roles.tables == ()
    assert audit.at_least("warning") == ()


def test_text_to_speech_class_has_no_head(tmp_path):
    tensors = {"speecht5.encoder.prenet.embed_tokens.weight": table()}
    config = {"architectures": ["SpeechT5ForTextToSpeech"], "model_type": "speecht5", "vocab_size": V, FLAG: False}
    audit = check(write_checkpoint(tmp_path / "speecht5", config | {"hidden_size": D}, tensors))
    assert audit.roles.headless
    assert audit.at_least("warning") == ()


@pytest.mark.parametrize(
    ("copied", "error", "words"),
    [(False, RuntimeError, "ignore_mismatched_sizes"), (True, ValueError, "has no `quant_method` attribute")],
)
def test_folder_that_mlx_packed_is_healthy_though_transformers_refuses_it(tmp_path, copied, error, words):
    """transformers ignores the key `quantization` and finds tensors of another shape.

    It reads a copy under its own key, which names no method.
    """
    tr.LlamaForCausalLM(made.TEXT_CONFIGS["llama"](tie_word_embeddings=True)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for module in [name.removesuffix(".weight") for name in tensors if "proj" in name]:
        rows, columns = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = torch.zeros(rows, columns // 8, dtype=torch.uint32)
        for part in ("scales", "biases"):
            tensors[f"{module}.{part}"] = torch.ones(rows, 1, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    section = {"group_size": 16, "bits": 4}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization": section}
    if copied:
        config["quantization_config"] = section
    (tmp_path / "config.json").write_text(json.dumps(config))
    with asking_in_this_process():
        audit = check(tmp_path)
    assert audit.at_least("warning") == ()
    row = next(row for row in audit.outcomes if (row.loader, row.versions) == ("transformers", tr.__version__))
    assert row.outcome == ERROR
    with pytest.raises(error, match=words):
        tr.LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(("version", "severity"), [("5.23.0", "info"), ("4.57.1", "warning"), (None, "warning")])
def test_older_transformers_counts_only_for_configs_that_it_may_read(tmp_path, version, severity):
    """transformers 4 reads the text part's flag, and the class of this composite the root's."""
    tensors = {"model.language_model.embed_tokens.weight": table()}
    config = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", FLAG: True}
    config |= {"text_config": llama_config(False), "vision_config": {"model_type": "internvl_vision"}}
    if version is not None:
        config["transformers_version"] = version
    audit = check(write_checkpoint(tmp_path / "internvl", config, tensors))
    severities = {finding.rule: finding.severity for finding in audit.findings}
    assert (severities["B021"], severities["B080"]) == (severity, severity)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("SpeechT5ForSpeechToSpeech", False),
        ("SeamlessM4TTextToUnitForConditionalGeneration", False),
        ("Blip2VisionModelWithProjection", False),
        ("Blip2TextModelWithProjection", False),
        ("VisualBertForVisualReasoning", False),
        ("ProphetNetDecoder", False),
        ("OpenAIGPTDoubleHeadsModel", None),
        ("seamless_m4t_v2.SeamlessM4Tv2TextToUnitForConditionalGeneration", False),
        ("whisper.WhisperDecoder", False),
        ("switch_transformers.SwitchTransformersStack", False),
        ("speecht5.SpeechT5EncoderWithSpeechPrenet", None),
        ("BarkCausalModel", None),
        ("PPDocLayoutV2ReadingOrder", None),
    ],
)
@pytest.mark.parametrize("build", [True, False])
def test_ends_of_another_class_of_the_family_are_not_expected(tmp_path, name, flag, build):
    """No mapping of models with a head has these classes. The result is the same if transformers is not asked."""
    package, _, class_name = name.rpartition(".")
    model_class = built_in_class(class_name, package)
    healthy_models.write_class(model_class, flag, tmp_path)
    _, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    with asking_in_this_process():
        assert check(tmp_path, build=build).at_least("warning") == ()


def test_secondary_class_does_not_stand_for_its_family():
    """SeamlessM4T's text-to-unit part has a usual name of a main class."""
    ends = class_ends("seamless_m4t", None)
    assert ends.inputs == class_ends("seamless_m4t", "SeamlessM4TForSpeechToText").inputs


def test_part_without_model_type_has_the_extra_rows_of_its_class(tmp_path):
    """The input table of Mllama has eight rows more than the head, which its text class adds."""
    healthy_models.write_class(tr.MllamaForConditionalGeneration, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, info = tr.MllamaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["mismatched_keys"]
    with asking_in_this_process():
        assert check(tmp_path).at_least("warning") == ()
    assert check(tmp_path, build=False).at_least("warning") == ()


def test_equal_single_file_next_to_shards_is_healthy(tmp_path):
    model = tr.LlamaForCausalLM(made.TEXT_CONFIGS["llama"](tie_word_embeddings=False))
    model.save_pretrained(tmp_path, max_shard_size=4000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    save_file({name: x for shard in shards for name, x in load_file(shard).items()}, tmp_path / "model.safetensors")
    with asking_in_this_process():
        audit = check(tmp_path)
    assert audit.at_least("warning") == ()
    assert all(row.right for row in audit.outcomes)
    again = tr.LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(("weights", "severity"), [(True, "info"), (False, "warning")])
def test_adapter_next_to_full_model_is_noted(tmp_path, weights, severity):
    """transformers loads such an adapter on top of the model, and stops if its weights are missing."""
    peft = pytest.importorskip("peft")
    model = tr.LlamaForCausalLM(made.TEXT_CONFIGS["llama"](tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    if not weights:
        (tmp_path / "adapter_model.safetensors").unlink()
    (finding,) = check(tmp_path, select=["B003"]).findings
    assert (finding.severity, finding.where) == (severity, "adapter_config.json")
    ids = torch.arange(8)[None]
    if weights:
        loaded = tr.LlamaForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, adapted.eval()(ids).logits)
    else:
        with pytest.raises(OSError, match="adapter_model"):
            tr.LlamaForCausalLM.from_pretrained(tmp_path)


def without_architectures(folder):
    """Remove the class's name from a config, as older tools left it out."""
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
# the ids of special tokens, which the defaults set beyond this vocabulary
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["LlamaModel", "BertModel", "DistilBertModel", "GPT2Model", "Qwen3Model", "OPTModel"])
def test_body_without_class_name_expects_no_head(tmp_path, name, tied):
    body = getattr(tr, name)
    body(body.config_class(**SIZES, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    without_architectures(tmp_path)
    _, loaded = body.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loaded.values())  # nothing is missing, unexpected or mismatched
    assert check(tmp_path).at_least("error") == ()


def test_model_without_class_name_and_head_still_lacks_its_head(tmp_path):
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=tensors)
    found = check(without_architectures(tmp_path)).at_least("fatal")
    assert [finding.rule for finding in found] == ["B011"]


@pytest.mark.slow
def test_check_reports_nothing_about_sampled_models():
    """A seeded part of the cases of tools/healthy_models.py; the tool runs all of them."""
    arguments = healthy_models.read_arguments(["--sample", "60", "--seed", "3"])
    with asking_in_this_process():
        outcomes = [healthy_models.run(case) for case in healthy_models.chosen_cases(arguments)]
    checked = [outcome for outcome in outcomes if outcome.state == "checked"]
    assert len(checked) >= 20
    assert {outcome.name: outcome.errors for outcome in checked if outcome.errors} == {}
    assert [outcome.name for outcome in checked if outcome.loader.endswith("(wrong)")] == []


MARIAN = {"vocab_size": 99, "decoder_vocab_size": 77, "share_encoder_decoder_embeddings": False, "d_model": 32}
MARIAN |= {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
MARIAN |= {"max_position_embeddings": 32, "pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
MARIAN |= {"bos_token_id": 0, "forced_eos_token_id": 0}


def save_marian(folder, tied):
    """Save a MarianMTModel with a vocabulary of its encoder and another of its decoder."""
    tr.MarianMTModel(tr.MarianConfig(**MARIAN, tie_word_embeddings=tied)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_modernvbert(folder, has_bias):
    """Save a ModernVBertForMaskedLM whose text config decides about the head's bias."""
    record = healthy_models.small_config(tr.ModernVBertForMaskedLM).to_dict()
    record["text_config"]["decoder_bias"] = has_bias
    tr.ModernVBertForMaskedLM(tr.ModernVBertConfig.from_dict(record)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def load_problems(model_class, folder):
    """Return the keys that `from_pretrained` finds missing or of another shape."""
    _, info = model_class.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    return {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}


def rules_of(folder, builds):
    """Return the rules of the errors that `check` reports, with or without the installed class."""
    with asking_in_this_process():
        return {finding.rule for finding in check(folder, build=builds).at_least("error")}


@pytest.mark.parametrize("builds", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_marian_with_two_vocabularies_is_healthy_and_its_faults_are_found(tmp_path, tied, builds):
    tensors = save_marian(tmp_path, tied)
    assert tensors["final_logits_bias"].shape == (1, 77)
    assert load_problems(tr.MarianMTModel, tmp_path) == set()
    assert rules_of(tmp_path, builds) == set()
    wide = {**tensors, "final_logits_bias": torch.zeros(1, 99)}
    save_file(wide, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_problems(tr.MarianMTModel, tmp_path) == {"final_logits_bias"}
    assert "B035" in rules_of(tmp_path, builds)
    del tensors["model.encoder.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_problems(tr.MarianMTModel, tmp_path) == {"model.encoder.embed_tokens.weight"}
    assert rules_of(tmp_path, builds)


@pytest.mark.parametrize("builds", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_of_modernvbert_is_expected_if_its_text_config_says_so(tmp_path, has_bias, builds):
    tensors = save_modernvbert(tmp_path, has_bias)
    assert ("lm_head.bias" in tensors) is has_bias
    assert load_problems(tr.ModernVBertForMaskedLM, tmp_path) == set()
    assert rules_of(tmp_path, builds) == set()
    tensors.pop("lm_head.bias", None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_problems(tr.ModernVBertForMaskedLM, tmp_path) == ({"lm_head.bias"} if has_bias else set())
    assert ("B035" in rules_of(tmp_path, builds)) is has_bias


def switches_at_ends():
    """Return (class, key of its config, value) of every switch by which a class lacks an end or has another one."""
    cases = set()
    for record in family_data()["families"].values():
        for name, entry in record.get("classes", {}).items():
            cases |= {(name, key, not value) for key, value in entry.get("only_if", {}).values()}
            cases |= {(name, key, value) for key, (value, _) in entry.get("instead", {}).items()}
    return sorted(cases)


@pytest.mark.parametrize("builds", [True, False])
@pytest.mark.parametrize(("name", "key", "value"), switches_at_ends())
def test_check_reports_no_error_about_a_class_with_another_switch(tmp_path, name, key, value, builds):
    model_class = getattr(tr, name)
    record = json.loads(json.dumps(healthy_models.small_config(model_class).to_dict(), default=str))
    *path, last = key.split(".")
    level = record
    for part in path:
        level = level[part]
    level[last] = value
    model_class(model_class.config_class.from_dict(record)).save_pretrained(tmp_path)
    assert load_problems(model_class, tmp_path) == set()
    assert rules_of(tmp_path, builds) == set()
