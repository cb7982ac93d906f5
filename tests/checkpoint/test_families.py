"""Test the committed architecture data against its generator and against transformers' renaming on load."""

import json
import random
import sys
from importlib import import_module
from pathlib import Path

import pytest
import transformers as tr
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from tiewise.checkpoint.claims import class_ends, without_tokens
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import Family, family_data
from tiewise.core.files import read_packaged_json

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
make_families = import_module("make_families")

DATA = json.loads((ROOT / "src/tiewise/checkpoint/data/families.json").read_text())
CLASSES = {name: entry for f in DATA["families"].values() for name, entry in f.get("classes", {}).items()}
ALWAYS = ["AlbertForMaskedLM", "BartForConditionalGeneration", "Blip2ForConditionalGeneration"]
ALWAYS += ["Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"]


def test_family_data_is_from_installed_transformers():
    assert family_data()["transformers"] == tr.__version__


def with_slow(quick, *others):
    """Return classes for `parametrize`; only `quick` ones lack the slow mark."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*others} - {*quick}))]


AGAIN = ["LlamaForCausalLM", "T5ForConditionalGeneration", "OPTForCausalLM", "Zamba2ForCausalLM", *DATA["secondary"]]


@pytest.mark.parametrize("name", with_slow(AGAIN, *ALWAYS, *random.Random(5).sample(sorted(CLASSES), 60)))
def test_generator_reproduces_committed_class_entry(name):
    assert json.loads(json.dumps(make_families.class_entry(make_families.class_named(name)))) == CLASSES[name]


@pytest.mark.parametrize("name", DATA["without_table"])
def test_generator_finds_no_table_in_classes_without_one(name):
    assert make_families.class_entry(make_families.class_named(name)) is None


@pytest.mark.slow
def test_generator_reproduces_all_committed_configs():
    made, tokenless = make_families.all_configs()
    made = json.loads(json.dumps(made))
    kept = {
        kind: {k: v for k, v in entry.items() if k not in ("classes", "auto")}
        for kind, entry in DATA["families"].items()
    }
    assert {kind: entry for kind, entry in kept.items() if entry} == made
    assert DATA["tokenless"] == tokenless


def test_family_data_lists_every_class_as_built_or_not_built():
    unknown = set(make_families.class_names()) - set(CLASSES) - set(DATA["not_built"])
    assert len(CLASSES) >= 350
    assert len(DATA["not_built"]) <= 20
    tokenless = ("PreTraining", "Musicgen")  # models of speech and images, and of several codebooks
    assert all(any(word in name for word in tokenless) for name in unknown), unknown


def test_families_file_is_small_and_has_generator_format():
    text = (ROOT / "src/tiewise/checkpoint/data/families.json").read_text()
    assert len(text) < 225_000  # 26 kB of it locate layers, and 21 kB describe modules between body and head
    assert make_families.families_json(DATA) == text


def test_family_and_class_ends_answer_by_config():
    assert family("llama").ends.tie is False
    assert family("gpt2").ends.tie is True
    assert family("nobody") == Family("nobody", is_written=False)
    assert class_ends("llama", None) == class_ends("llama", "LlamaForCausalLM") is not None
    assert class_ends("nobody", "BertForMaskedLM").output == "cls.predictions.decoder"
    assert class_ends("llama", "LlamaForSequenceClassification") is None
    assert class_ends("opt", None).maps == ("model.decoder.project_out", "model.decoder.project_in")
    assert without_tokens("wav2vec2", "Wav2Vec2ForPreTraining")
    assert not without_tokens("dbrx", "DbrxForCausalLM")  # not built, so it may have a table of tokens


OWN_RULES = sorted(name for name, entry in CLASSES.items() if "loads" in entry)
QUICK = ["LlamaForCausalLM", "Qwen2VLForConditionalGeneration", "Gemma3ForCausalLM", "BertForMaskedLM"]
PREFIXES = ["", "model.", "language_model.", "language_model.model.", "model.language_model.", "model.model."]
PREFIXES += ["_orig_mod.", "module.", "base_model.model.", "transformer.", "thinker.", "x", "xx"]


def prefixed_names():
    """Return the names of all classes' ends under every prefix."""
    modules = {m for entry in CLASSES.values() for m in (*entry.get("inputs", []), entry.get("output")) if m}
    modules |= {
        pair[end]
        for pair in read_packaged_json("checkpoint/data/usual_names.json")["pairs"]
        for end in ("input", "output")
    }
    biases = {bias for entry in CLASSES.values() for bias in entry.get("bias", [])}
    names = {f"{module}.weight" for module in modules} | biases
    return sorted({prefix + name for prefix in PREFIXES for name in names})


def loaded_names_in_transformers(model, names):
    """Return {name: name in the model, or None} by the steps of `convert_and_load_state_dict_in_model`."""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    others = [c for c in conversions if not isinstance(c, WeightRenaming)]
    state, prefix, found = model.state_dict(), model.base_model_prefix, {}
    for name in names:
        loaded = rename_source_key(name, renamings, others, prefix, state)[0]
        if loaded not in state and name in state:
            loaded = rename_source_key(name, [], [], prefix, state)[0]
        found[name] = loaded if loaded in state else None
    return found


LOADED = {*random.Random(7).sample(OWN_RULES, 16), *random.Random(8).sample(sorted(CLASSES), 8)}


@pytest.mark.parametrize("name", with_slow(QUICK, *LOADED))
def test_loaded_as_agrees_with_transformers(name):
    model_class = make_families.class_named(name)
    model = make_families._build(model_class, make_families._small(model_class))
    ends = class_ends(model.config.model_type, name)
    ours = {*(f"{module}.weight" for module in (*ends.inputs, ends.output) if module), *ends.biases}
    names = prefixed_names()
    for spelling, loaded in loaded_names_in_transformers(model, names).items():
        said = ends.loaded_as(spelling.removesuffix(".weight"))
        said = said if said is None or said in ends.biases else f"{said}.weight"
        assert said == (loaded if loaded in ours else None), spelling
