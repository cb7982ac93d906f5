"""The committed architecture data is what the generator makes from the installed transformers."""

import json
import random
import sys
from pathlib import Path

import pytest
import transformers as tr

from tiewise.checkpoint.families import class_ends, data_version, family, without_tokens

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_families  # noqa: E402

DATA = json.loads((ROOT / "src/tiewise/checkpoint/data/families.json").read_text())
CLASSES = {name: entry for f in DATA["families"].values() for name, entry in f.get("classes", {}).items()}
ALWAYS = [
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "OPTForCausalLM",
    "T5ForConditionalGeneration",
]


def _same(name):
    made = make_families.class_entry(getattr(tr, name))
    return json.loads(json.dumps(made)) == CLASSES[name]


def test_made_from_the_installed_version():
    assert data_version() == tr.__version__


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "OPTForCausalLM"])
def test_a_class_made_again(name):
    assert _same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ALWAYS, *random.Random(5).sample(sorted(CLASSES), 60)}))
def test_many_classes_made_again(name):
    assert _same(name)


@pytest.mark.slow
def test_every_config_made_again():
    made, tokenless = make_families.all_configs()
    made = json.loads(json.dumps(made))
    kept = {kind: {k: v for k, v in entry.items() if k != "classes"} for kind, entry in DATA["families"].items()}
    assert {kind: entry for kind, entry in kept.items() if entry} == made
    assert DATA["tokenless"] == tokenless


def test_every_class_is_there_or_said_to_be_missing():
    unknown = set(make_families.class_names()) - set(CLASSES) - set(DATA["not_built"])
    assert len(CLASSES) >= 350
    assert len(DATA["not_built"]) <= 20
    tokenless = ("PreTraining", "Musicgen")  # speech, images; several codebooks
    assert all(any(word in name for word in tokenless) for name in unknown), unknown


def test_the_file_is_small_and_one_line_a_family():
    text = (ROOT / "src/tiewise/checkpoint/data/families.json").read_text()
    assert len(text) < 160_000
    assert make_families.written(DATA) == text


def test_asked_by_config():
    assert family("llama").tie is False
    assert family("gpt2").tie is True
    assert family("nobody") is None
    assert class_ends("llama", None).name == "LlamaForCausalLM"
    assert class_ends("nobody", "BertForMaskedLM").output == "cls.predictions.decoder"
    assert class_ends("llama", "LlamaForSequenceClassification") is None
    assert class_ends("opt", None).maps == ("model.decoder.project_out", "model.decoder.project_in")
    assert without_tokens("wav2vec2", "Wav2Vec2ForPreTraining")
    assert not without_tokens("dbrx", "DbrxForCausalLM")  # not built, so not known to have none
