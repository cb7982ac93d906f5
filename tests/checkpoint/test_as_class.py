"""`check --as CLASS` and layers under foreign names: what is said is what transformers does, asked by loading."""

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


def folder(path, name, rename=None):
    """A tiny model as transformers saves it; renamed, its tensors have other names."""
    saved.tiny(name).save_pretrained(path)
    if rename is not None:
        tensors = {rename(key): value for key, value in load_file(path / "model.safetensors").items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def said(path, name=None):
    """What is said of the installed transformers."""
    (found,) = (one for one in check(path, as_class=name).outcomes if one.versions == tr.__version__)
    return found


def missing(path, name):
    """Share of a class's parameters that a load draws anew."""
    torch.manual_seed(0)
    model, info = getattr(tr, name).from_pretrained(path, output_loading_info=True)
    return len(info["missing_keys"]) / len(model.state_dict())


# a model that is saved as one class and loaded as another: nothing of the text class's names is in the file
ELSEWHERE = [(GEMMA, TEXT), ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")]
ELSEWHERE += [("LlavaForConditionalGeneration", LLAMA)]


@pytest.mark.parametrize(("own", "name"), ELSEWHERE)
def test_a_text_class_on_a_composite_models_names_draws_everything(own, name, tmp_path):
    path = folder(tmp_path, own)
    assert said(path).right
    audit = check(path, as_class=name)
    assert (audit.worst, audit.record()["as"], check(path).record()["as"]) == ("fatal", name, None)
    assert {one.loader for one in audit.outcomes} == {"transformers"}
    assert said(path, name).outcome == columns.RANDOM_TABLE
    assert missing(path, name) == 1


def test_the_same_where_the_config_names_the_text_class(tmp_path):
    """As unsloth#5816 saved Gemma 3: a text config over the names of the composite."""
    path = folder(tmp_path, TEXT, lambda key: f"language_model.{key}")
    assert said(path).outcome == columns.RANDOM_TABLE
    assert missing(path, TEXT) == 1


@pytest.mark.parametrize("name", [GEMMA, LLAMA, "T5GemmaForConditionalGeneration"])
def test_its_own_class_is_right(name, tmp_path):
    path = folder(tmp_path, name)
    assert said(path, name).outcome == said(path).outcome
    assert said(path, name).right
    assert missing(path, name) == 0


# where the layers lie under other names than the ends
RENAMED = [
    (LLAMA, "model.layers", "model.decoder.layers", True),
    (LLAMA, "model.layers", "layers", False),  # its prefix is put before
    ("GPT2LMHeadModel", "transformer.h", "transformer.blocks", True),
    ("GPT2LMHeadModel", "transformer.h", "h", False),
    ("BertForMaskedLM", "bert.encoder.layer", "encoder.layer", False),
    (GEMMA, "language_model.model.layers", "model.language_model.layers", False),  # as it is called in memory
]


@pytest.mark.parametrize(("name", "before", "after", "lost"), RENAMED)
def test_layers_that_its_class_does_not_load(name, before, after, lost, tmp_path):
    path = folder(tmp_path, name, lambda key: key.replace(f"{before}.", f"{after}.", 1))
    found = said(path)
    assert (found.outcome == columns.RANDOM_LAYERS) == lost
    assert (missing(path, name) > 0.5) == lost
    if lost:
        assert f"Layers under {after} are not read, as the class looks for them under {before}" in found.sentence
        assert check(path).at_least("error")[0].rule == "B080"


@pytest.mark.slow
@pytest.mark.parametrize("name", random.Random(3).sample(saved.classes(), 80))
def test_whatever_a_class_saves_it_finds_again(name, tmp_path):
    try:
        saved.tiny(name).save_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}")
    audit = check(tmp_path, scan=False, select=["B017"])
    assert not audit.findings
    assert Facts(open_folder(tmp_path)).foreign_layers is None


REFUSED = [
    ("LlamaForCausalLn", "has no class LlamaForCausalLn with a table of tokens; did you mean LlamaForCausalLM"),
    ("x", "write it as transformers does: LlamaForCausalLM"),
    ("BertForMaskedLM", "BertForMaskedLM is of the family bert, and no part of the config is; choose a class of llama"),
]


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_a_class_that_cannot_load_it_is_refused(name, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        check(llama(tmp_path / "a"), as_class=name)


def test_what_has_no_config(tmp_path):
    path = llama(tmp_path / "a")
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json to load LlamaForCausalLM by"):
        check(path, as_class=LLAMA)
