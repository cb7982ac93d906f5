"""Which names in a file are loaded into an end, held against transformers' own renaming."""

import random
import sys
from pathlib import Path

import pytest
import transformers as tr
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from tiewise.checkpoint.families import class_ends
from tiewise.core.files import packaged_json

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import make_families

FAMILIES, USUAL = (packaged_json(f"checkpoint/data/{name}.json") for name in ("families", "usual_names"))
CLASSES = {n: e for family in FAMILIES["families"].values() for n, e in family.get("classes", {}).items()}
OWN_RULES = sorted(name for name, entry in CLASSES.items() if "loads" in entry)
QUICK = ["LlamaForCausalLM", "Qwen2VLForConditionalGeneration", "Gemma3ForCausalLM", "BertForMaskedLM"]
PREFIXES = ["", "model.", "language_model.", "language_model.model.", "model.language_model.", "model.model."]
PREFIXES += ["_orig_mod.", "module.", "base_model.model.", "transformer.", "thinker.", "x", "xx"]


def spelt():
    """Names of ends of all classes, behind prefixes of others."""
    modules = {m for entry in CLASSES.values() for m in (*entry.get("inputs", []), entry.get("output")) if m}
    modules |= {pair[end] for pair in USUAL["pairs"] for end in ("input", "output")}
    biases = {bias for entry in CLASSES.values() for bias in entry.get("bias", [])}
    names = {f"{module}.weight" for module in modules} | biases
    return sorted({prefix + name for prefix in PREFIXES for name in names})


def asked_of_transformers(model, names):
    """{name: name in the model, or None} by the steps of `convert_and_load_state_dict_in_model`."""
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


def cases():
    chosen = {*random.Random(7).sample(OWN_RULES, 16), *random.Random(8).sample(sorted(CLASSES), 8)} - set(QUICK)
    yield from QUICK
    yield from (pytest.param(name, marks=pytest.mark.slow) for name in sorted(chosen))


@pytest.mark.parametrize("name", list(cases()))
def test_a_name_is_loaded_where_transformers_loads_it(name):
    model_class = getattr(tr, name)
    model = make_families._build(model_class, make_families._small(model_class))
    ends = class_ends(model.config.model_type, name)
    ours = {*(f"{module}.weight" for module in (*ends.inputs, ends.output) if module), *ends.biases}
    names = spelt()
    for spelling, loaded in asked_of_transformers(model, names).items():
        said = ends.loaded_as(spelling.removesuffix(".weight"))
        said = said if said is None or said in ends.biases else f"{said}.weight"
        assert said == (loaded if loaded in ours else None), spelling
