"""Test `check --as CLASS` and layers under other names against loads with transformers."""

import random

import pytest
import saved_models as saved
import torch
import transformers as tr
from safetensors.torch import load_file, save_file
from tiny_checkpoints import llama

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError

GEMMA, TEXT, LLAMA = "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "LlamaForCausalLM"


def save_model(path, name, rename=None):
    """Save a tiny model with transformers, optionally rename its tensors, and return the folder."""
    saved.tiny(name).save_pretrained(path)
    if rename is not None:
        tensors = {rename(key): value for key, value in load_file(path / "model.safetensors").items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def current_outcome(path, name=None):
    """Return the outcome for the installed transformers."""
    (found,) = (one for one in check(path, as_class=name).outcomes if one.versions == tr.__version__)
    return found


def missing_share(path, name):
    """Return the share of a class's parameters that a load draws at random."""
    torch.manual_seed(0)
    model, info = getattr(tr, name).from_pretrained(path, output_loading_info=True)
    return len(info["missing_keys"]) / len(model.state_dict())


# a model saved as one class and loaded as another; the file has none of the text class's names
ELSEWHERE = [(GEMMA, TEXT), ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")]
ELSEWHERE += [("LlavaForConditionalGeneration", LLAMA)]


@pytest.mark.parametrize(("own", "name"), ELSEWHERE)
def test_check_as_text_class_of_composite_model_reports_all_tensors_random(own, name, tmp_path):
    path = save_model(tmp_path, own)
    assert current_outcome(path).right
    audit = check(path, as_class=name)
    assert (audit.worst, audit.record()["as"], check(path).record()["as"]) == ("fatal", name, None)
    assert {one.loader for one in audit.outcomes} == {"transformers"}
    assert current_outcome(path, name).outcome == columns.RANDOM_TABLE
    assert missing_share(path, name) == 1


def test_check_reports_random_table_if_config_names_text_class(tmp_path):
    """unsloth#5816 saved Gemma 3 with a text config and the names of the composite class."""
    path = save_model(tmp_path, TEXT, lambda key: f"language_model.{key}")
    assert current_outcome(path).outcome == columns.RANDOM_TABLE
    assert missing_share(path, TEXT) == 1


@pytest.mark.parametrize("name", [GEMMA, LLAMA, "T5GemmaForConditionalGeneration"])
def test_check_as_own_class_equals_check_without_class(name, tmp_path):
    path = save_model(tmp_path, name)
    assert current_outcome(path, name).outcome == current_outcome(path).outcome
    assert current_outcome(path, name).right
    assert missing_share(path, name) == 0


# layers under another prefix than the ends
RENAMED = [
    (LLAMA, "model.layers", "model.decoder.layers", True),
    (LLAMA, "model.layers", "layers", False),  # transformers adds the prefix
    ("GPT2LMHeadModel", "transformer.h", "transformer.blocks", True),
    ("GPT2LMHeadModel", "transformer.h", "h", False),
    ("BertForMaskedLM", "bert.encoder.layer", "encoder.layer", False),
    (GEMMA, "language_model.model.layers", "model.language_model.layers", False),  # the name in memory
]


@pytest.mark.parametrize(("name", "before", "after", "lost"), RENAMED)
def test_check_reports_layers_under_names_that_class_does_not_load(name, before, after, lost, tmp_path):
    path = save_model(tmp_path, name, lambda key: key.replace(f"{before}.", f"{after}.", 1))
    found = current_outcome(path)
    assert (found.outcome == columns.RANDOM_LAYERS) == lost
    assert (missing_share(path, name) > 0.5) == lost
    if lost:
        assert f"Layers under {after} are not read, as the class looks for them under {before}" in found.sentence
        assert check(path).at_least("error")[0].rule == "B080"


@pytest.mark.slow
@pytest.mark.parametrize("name", random.Random(3).sample(saved.classes(), 80))
def test_check_finds_no_foreign_layers_in_saved_model(name, tmp_path):
    try:
        saved.tiny(name).save_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}")
    audit = check(tmp_path, scan=False, select=["B017"])
    assert not audit.findings
    assert Facts(open_folder(tmp_path)).foreign_layers is None


REFUSED = [
    (
        "LlamaForCausalLn",
        "LlamaForCausalLn is none of the classes with an output head in .*; did you mean LlamaForCausalLM",
    ),
    ("LlamaModel", "LlamaModel is none of the classes with an output head in the data on transformers"),
    ("x", "write it as transformers does: LlamaForCausalLM"),
    ("BertForMaskedLM", "BertForMaskedLM is of the family bert, and no part of the config is; choose a class of llama"),
]


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_check_refuses_class_that_cannot_load_checkpoint(name, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        check(llama(tmp_path / "a"), as_class=name)


def test_check_as_class_refuses_folder_without_config(tmp_path):
    path = llama(tmp_path / "a")
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json to load LlamaForCausalLM by"):
        check(path, as_class=LLAMA)
