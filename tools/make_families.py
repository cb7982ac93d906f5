"""Write src/tiewise/checkpoint/data/families.json: the ends of every model class of transformers.

    .venv/bin/python tools/make_families.py             writes the file (a few minutes, no network, no weights)
    .venv/bin/python tools/make_families.py LlamaForCausalLM …     prints these classes' entries

Each class of the auto mappings below is built on the meta device from a config that the tests' `shrink` makes small.
The model's methods then give its input embeddings, its head, the keys that it may tie and the names that it saves. To
find which level of the config decides on tying, the tool removes the flag everywhere, sets it at one level and compares
the tables of the two ends.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "boundary"))
from shrink import shrink  # noqa: E402

from tiewise import install  # noqa: E402
from tiewise.boundary.locate import locate  # noqa: E402
from tiewise.boundary.tied_keys import allowed_keys  # noqa: E402
from tiewise.checkpoint.boundary_scalars import SCALARS, WIDTHS  # noqa: E402
from tiewise.checkpoint.built_class_child import built_in_class  # noqa: E402
from tiewise.checkpoint.claims import FLAG, POSITION, TIEWISE_TYPE, in_layer, is_foreign, model_levels  # noqa: E402
from tiewise.checkpoint.family_record import ClassEnds  # noqa: E402
from tiewise.core.errors import InstallError  # noqa: E402

TARGET = ROOT / "src" / "tiewise" / "checkpoint" / "data" / "families.json"
MAPPINGS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
)
# classes in no mapping of models with a head whose ends differ from those of their family's main class
SECONDARY = (
    *("Blip2TextModelWithProjection", "OpenAIGPTDoubleHeadsModel", "ProphetNetDecoder"),
    *("SeamlessM4TTextToUnitForConditionalGeneration", "SeamlessM4Tv2TextToUnitForConditionalGeneration"),
    "VisualBertForVisualReasoning",
)
# families of the classes that transformers does not export
NOT_EXPORTED = {"SeamlessM4Tv2TextToUnitForConditionalGeneration": "seamless_m4t_v2"}
# others in no such mapping: parts that Bark also saves alone, and a body that stores a head
UNMAPPED = ("BarkCoarseModel", "BarkSemanticModel", "FSMTModel", *SECONDARY)
# classes without a token table in families whose main class has one
WITHOUT_TABLE = ("Blip2VisionModelWithProjection", "SpeechT5ForSpeechToSpeech")
# classes with a text encoder in mappings whose other classes have several codebooks
TEXT_TO_SPEECH = ("SeamlessM4TForTextToSpeech", "SeamlessM4Tv2ForTextToSpeech", "SpeechT5ForTextToSpeech")
OLDER_FLAGS = ("tie_embedding", "tie_embeddings")  # keys of published configs
TABLE_WIDTH = 24  # no other axis of a shrunk model has this size
# settings of a nested level without which a class cannot be built: its default config leaves them empty
REQUIRED = {
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}
    },
}
PADDING_IDS = (3, 7)
_SIZE = re.compile(r"\d rows")
MOST_NUMBERS = 20_000_000  # parameters of a model that is built with weights and run
CAUSAL, SEQ2SEQ = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
ABOUT = (
    "Made by tools/make_families.py; do not edit. A family: tie, the flag where it is absent; loose, flags that are no"
    " boolean and are taken nevertheless; older_flag, an older key of the flag, which counts before it; levels, "
    "families of nested levels where they are not written; sizes, its own keys of sizes; scalars, numbers at the "
    "boundary by default. A class: inputs, output, positions, maps, names of modules, whose tensor is <name>.weight; "
    "bias, of tensors; tied, {target: source} that it may tie; disk, names in a saved file where they differ; prefix, "
    "of the body; loads, {module or bias: all other names in a file that are loaded into it}, unless that is this "
    "prefix put before or taken away; layers, what stands before a layer's number in a file that is loaded, but for "
    "this prefix; layer_ties, modules inside numbered layers that the same flag ties, with # for each number; decides,"
    " levels of the config whose flag rules (the root where not given), of several one that says true is enough; "
    "always or never, tied or not whatever the flag says; joined, the rest of tied is tied whatever the flag says; "
    "head, {tensor of the layers between body and head: its other names in files}; only_if, {tensor: [key of the "
    "config, value]} that the class has with this value alone, a key of a nested level with dots; instead, {key of the"
    " config: [value, {inputs, tied}]} of a class that has other input tables with this value; wide, {head: its width "
    "in hidden widths}; parts, {level of the config: [module, auto class]} where the model_type of the level chooses "
    "the class: lm, with a head, or body. auto, of a family: its classes as such parts. no_boundary: why "
    "tiewise.install refuses the class, which then has no factored tables. counts_from_pad: the positions of tokens "
    "start after the id of padding. bodies: classes without a head whose names end in LMModel. without_table: classes "
    "without a token table in families that have one. secondary: classes that are not the main class of their family."
)


def main() -> None:
    """Write the file, or print single entries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="print these classes' entries instead of writing the file")
    names = parser.parse_args().classes
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if names:
        for name in names:
            print(name, json.dumps(class_entry(class_named(name)), sort_keys=True))
        return
    TARGET.write_text(families_json(all_families()), "utf-8")


def class_named(name: str) -> Any:
    """Return the class of transformers with this name."""
    return built_in_class(name, NOT_EXPORTED.get(name))


def class_names() -> list[str]:
    """Return the names of the classes in the mappings."""
    values = [value for mapping in MAPPINGS for value in mapping.values()]
    return sorted(
        {
            *UNMAPPED,
            *TEXT_TO_SPEECH,
            *(name for value in values for name in ([value] if isinstance(value, str) else value)),
        }
    )


def all_families() -> dict[str, Any]:
    """Return the content of the file."""
    families, tokenless = all_configs()
    left_out = {}
    for name in class_names():
        try:
            model_class = class_named(name)
            entry = class_entry(model_class)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"
            continue
        if entry is not None:
            family = families.setdefault(model_class.config_class.model_type, {})
            family.setdefault("classes", {})[name] = entry
    for kind, family in families.items():
        family |= auto_classes(kind, family.get("classes", {}))
    return {
        "about": ABOUT,
        "transformers": transformers.__version__,
        "tokenless": tokenless,
        "bodies": bodies(),
        "without_table": list(WITHOUT_TABLE),
        "secondary": list(SECONDARY),
        "families": families,
        "not_built": left_out,
    }


def all_configs() -> tuple[dict[str, Any], list[str]]:
    """Return {family: entry} of all default configs, and the families without tokens.

    A config class that needs arguments is in neither.
    """
    families, tokenless = {}, []
    # importing tiewise registers its own types
    for kind in sorted(kind for kind in CONFIG_MAPPING if kind.split("-")[0] != TIEWISE_TYPE):
        try:
            entry = config_entry(CONFIG_MAPPING[kind])
        except Exception:  # the class needs arguments
            continue
        if entry is None:
            tokenless.append(kind)
        else:
            families[kind] = entry
    return families, tokenless


def bodies() -> list[str]:
    """Return the classes without a head whose names suggest one.

    LayoutLMModel, for example, is the body of LayoutLM.
    """
    values = [name for name in auto.MODEL_MAPPING_NAMES.values() if isinstance(name, str)]
    return sorted({name for name in values if name.endswith("LMModel")})


def auto_classes(kind: str, classes: dict[str, Any]) -> dict[str, Any]:
    """Return the classes that a composite builds for a part of this family.

    Key "lm" has the class with a head, "body" the class for the body alone.
    """
    causal, seq2seq = (name if name in classes else None for name in (CAUSAL.get(kind), SEQ2SEQ.get(kind)))
    classes_by_part = {"lm": causal or seq2seq, "body": seq2seq or causal}
    return {"auto": classes_by_part} if causal or seq2seq else {}


def families_json(data: dict[str, Any]) -> str:
    """Return the content as JSON, one line for each family."""
    lines = []
    for key in ("about", "transformers", "tokenless", "bodies", "without_table", "secondary"):
        lines.append(f"{json.dumps(key)}: {json.dumps(data[key])}")
    for key in ("families", "not_built"):
        rows = (f"{json.dumps(k)}: {_compact(v)}" for k, v in sorted(data[key].items()))
        lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def config_entry(config_class: Any) -> dict[str, Any] | None:
    """Return the record of a family's default config: flag, nested families, sizes, scalars."""
    config = config_class()
    full = config.to_dict()
    levels = {path: level for path, level in model_levels(full) if path}
    if FLAG not in full and "vocab_size" not in full and not any("vocab_size" in level for level in levels.values()):
        return None
    # a composite may copy another value from the defaults of its parts
    default = getattr(config_class, FLAG, None)
    entry: dict[str, Any] = {"tie": bool(default if isinstance(default, bool) else getattr(config, FLAG, False))}
    nested = {path: level["model_type"] for path, level in levels.items() if isinstance(level.get("model_type"), str)}
    names = getattr(config_class, "attribute_map", {})
    sizes = {key: names[key] for key in ("vocab_size", "hidden_size") if key in names}
    scalars = {key: full[key] for key in (*SCALARS, *WIDTHS) if isinstance(full.get(key), int | float)}
    loose = [word for word, value in (("any", "no"), ("null", None)) if _takes(config_class, value)]
    entry |= {"loose": loose[0]} if loose else {}
    older = [key for key in OLDER_FLAGS if _prefers(config_class, key)]
    entry |= {"older_flag": older[0]} if older else {}
    return entry | {k: v for k, v in (("levels", nested), ("sizes", sizes), ("scalars", scalars)) if v}


def _prefers(config_class: Any, key: str) -> bool:
    """Return whether a config class takes the flag from an older key that contradicts it."""
    for value in (True, False):
        try:
            config = config_class.from_dict({key: value, FLAG: not value})
        except Exception:  # it refuses one of the two values
            return False
        if getattr(config, FLAG, None) is not value:
            return False
    return True


def _takes(config_class: Any, flag: Any) -> bool:
    """Return whether a config class accepts a value of the tying flag."""
    try:
        config_class.from_dict({FLAG: flag})
    except Exception:
        return False
    return True


def class_entry(model_class: Any) -> dict[str, Any] | None:
    """Return the record of one class's ends, or None for a class without a token table.

    Raises:
        Exception: any error of building the class.
    """
    config = _small(model_class)
    model = _build(model_class, config)
    modules = dict(model.named_modules(remove_duplicate=False))
    if not _inputs(model, modules) and _result_of(model, "get_output_embeddings") is None:
        return _part_entry(model)
    inputs, keys = _inputs(model, modules), allowed_keys(model)
    output = _name(modules, _result_of(model, "get_output_embeddings"), matrix=True) or _declared(inputs, keys)
    if output is None and model_class.__name__ in UNMAPPED:
        output = _name(modules, getattr(model, "lm_head", None), matrix=True)
    if not inputs and output is None:  # several codebooks, each with a table and a head
        return None
    entry: dict[str, Any] = {"inputs": inputs, "output": output}
    entry["tied"] = _ties_at_ends(model)
    entry["instead"] = _instead(model_class, config, inputs)
    entry["layer_ties"] = _layer_ties(model_class, config)
    entry["bias"] = _biases(model, output, keys)
    entry["positions"] = _positions(modules, inputs)
    entry["maps"] = _maps(model_class, config, {*inputs, output})
    entry["disk"] = _disk(model, [*inputs, *([output] if output else []), *entry["maps"]], entry["bias"])
    entry |= _names(model, [*inputs, *([output] if output else [])], entry["bias"])
    entry["layers"] = _layers(model)
    entry["parts"] = _parts(model, [*inputs, *([output] if output else [])])
    if output is not None and inputs:
        entry |= _deciding(model_class, config, inputs, output)
        entry["wide"] = _wide(model, output)
        if _joined(model_class, config, entry):
            entry["joined"] = True
    if output is not None:
        head = _head(model_class, config, model, [*inputs, output], entry["bias"])
        entry["head"] = {name: _other_names(model, name) for name in head}
        entry["only_if"] = _switches(model_class, config, [*head, *entry["bias"]])
        entry["no_boundary"] = _no_boundary(model) or _refusal_of_install(model_class, config)
    if inputs:
        entry["counts_from_pad"] = _counts_from_pad(model_class, config)
    return {key: value for key, value in entry.items() if value not in (None, [], {}, "", False)}


def _no_boundary(model: Any) -> str:
    """Return why `install` refuses a model by its modules; "" if it does not."""
    try:
        locate(model)
    except InstallError as error:
        return error.problem.removeprefix(f"{type(model).__name__}: ")
    return ""


def _refusal_of_install(model_class: Any, config: Any) -> str:
    """Return why `install` refuses a model that it has run; "" if it does not.

    It is empty for a class that also needs pictures or sound: `install` takes a batch of them.
    """
    if sum(tensor.numel() for tensor in _build(model_class, config).parameters()) > MOST_NUMBERS:
        return ""
    try:
        install(model_class(config), "factored:4")
    except InstallError as error:
        needs_batch = "does not run on a random batch" in error.problem
        if needs_batch or _SIZE.search(error.problem):  # numbers of rows are those of the small model
            return ""
        name = model_class.__name__
        return error.problem.replace(f"Tiewise{name}", name).removeprefix(f"{name}: ")
    except Exception:  # the class cannot be built with weights
        return ""
    return ""


def _counts_from_pad(model_class: Any, config: Any) -> bool:
    """Return whether the positions of tokens depend on the id of padding, as RoBERTa's do.

    Two models with equal tensors and different ids of padding read a text without padding. The result is False for a
    class that also needs pictures or sound.
    """
    record = json.loads(json.dumps(config.to_dict(), default=str))
    if sum(tensor.numel() for tensor in _build(model_class, config).parameters()) > MOST_NUMBERS:
        return False
    results = []
    tensors: dict[str, Any] = {}
    for number in PADDING_IDS:
        try:
            torch.manual_seed(0)
            model = model_class(model_class.config_class.from_dict(_with_padding(record, number))).eval()
            tensors = tensors or model.state_dict()
            model.load_state_dict(tensors)
            results.append(_logits_of_text(model))
        except Exception:
            return False
    return not torch.allclose(*results, equal_nan=True)


def _with_padding(record: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a config's record with an id of padding at every level that has one."""
    changed = {}
    for key, value in record.items():
        if isinstance(value, dict):
            changed[key] = _with_padding(value, number)
        else:
            changed[key] = number if key == "pad_token_id" else value
    return changed


def _logits_of_text(model: Any) -> torch.Tensor:
    """Return the logits of a text, which an encoder reads too."""
    text = torch.arange(20, 28)[None]
    extra = {"decoder_input_ids": text} if model.config.is_encoder_decoder else {}
    torch.manual_seed(0)
    with torch.no_grad():
        return _logits(model(input_ids=text, use_cache=False, **extra))


def _logits(output: Any) -> torch.Tensor:
    """Return the logits in a model's output."""
    logits: torch.Tensor | None = getattr(output, "logits", None)
    if logits is None:  # of a class for pretraining
        logits = output.prediction_logits
    return logits


def _part_entry(model: Any) -> dict[str, Any] | None:
    """Return the entry of the first part that has a head, such as Qwen2.5-Omni's thinker.

    If no part has one, token tables that no method returns are inputs without a head.
    """
    for part, child in model.named_children():
        if isinstance(child, transformers.PreTrainedModel) and _result_of(child, "get_output_embeddings") is not None:
            inner = dict(child.named_modules(remove_duplicate=False))
            inputs, output = _inputs(child, inner), _name(inner, child.get_output_embeddings(), matrix=True)
            entry = {"inputs": [f"{part}.{name}" for name in inputs], "output": f"{part}.{output}"}
            both = [*entry["inputs"], entry["output"]]
            entry["no_boundary"] = _no_boundary(model)
            return entry | {"disk": _disk(model, both, [])} | _names(model, both, [])
    sizes = [level.get("vocab_size") for _, level in model_levels(model.config.to_dict())]
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    table_names = [name for name, module in tables.items() if module.num_embeddings in sizes and not in_layer(name)]
    return {"inputs": table_names} | _names(model, table_names, []) if table_names else None


def _layer_ties(model_class: Any, small: Any) -> list[str]:
    """Return the modules inside numbered layers that the class's flag ties.

    A `#` replaces the number: `model.layers.#.shared_transf`. A model makes the keys from its number of layers, and a
    small model may have too few layers to share any. So the default config is tried as well.
    """
    modules_by_stack: dict[str, list[str]] = {}  # name before the layer's number → names of modules
    for config in (small, model_class.config_class()):
        try:
            keys = allowed_keys(_build(model_class, config))
        except Exception:  # the class may need values that the default config lacks
            continue
        for target in filter(in_layer, keys):
            module = re.sub(r"(?<=\.)\d+(?=\.)", "#", target).rpartition(".")[0]
            modules_by_stack.setdefault(module.partition(".#")[0], []).append(module)
    return sorted(_common_module(modules) for modules in modules_by_stack.values())


def _common_module(names: list[str]) -> str:
    """Return the innermost module that contains all of these."""
    return os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")


def _small(model_class: Any) -> Any:
    """Return a small config that the class can be built from, or its default config."""
    try:
        config = _with_required(model_class, shrink(model_class))
        _build(model_class, config)
        return config
    except Exception:
        return model_class.config_class()


def _with_required(model_class: Any, config: Any) -> Any:
    """Return the config with the settings of `REQUIRED`."""
    more = REQUIRED.get(model_class.__name__)
    if more is None:
        return config
    record = config.to_dict()
    for level, settings in more.items():
        record[level] |= settings
    return type(config).from_dict(record)


def _build(model_class: Any, config: Any) -> Any:
    """Build a model of the class on the meta device."""
    with torch.device("meta"):
        return model_class(config)


def _result_of(model: Any, method: str) -> Any:
    """Return the result of a model's method, or None if the model does not implement it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _name(modules: dict[str, Any], module: Any, matrix: bool) -> str | None:
    """Return the name of a module in `modules`, or None.

    With `matrix`, also None if its weight is not a matrix.
    """
    if matrix and getattr(getattr(module, "weight", None), "ndim", 0) != 2:
        return None
    return next((name for name, other in modules.items() if module is not None and other is module), None)


def _declared(inputs: list[str], keys: dict[str, str]) -> str | None:
    """Return the head of a class that no method returns but that it may tie."""
    tied = [k.removesuffix(".weight") for k, v in keys.items() if v.removesuffix(".weight") in inputs]
    return next((name for name in tied if name not in inputs and not in_layer(name)), None)


def _inputs(model: Any, modules: dict[str, Any]) -> list[str]:
    """Return the names of the input embeddings of a model and of its encoder and decoder."""
    owners = (model, _result_of(model, "get_encoder"), _result_of(model, "get_decoder"))
    tables = [_result_of(owner, "get_input_embeddings") for owner in owners]
    tables = [module for module in tables if not isinstance(module, nn.Linear)]  # a Linear embeds patches of pictures
    names = [_name(modules, module, matrix=True) for module in tables]
    shared = [module.weight for module in tables if isinstance(module, nn.Embedding)]
    names += [n for n, m in modules.items() if isinstance(m, nn.Embedding) and any(m.weight is w for w in shared)]
    return list(dict.fromkeys(name for name in names if name is not None))


def _biases(model: Any, output: str | None, keys: dict[str, str]) -> list[str]:
    """Return the biases of the head: tensors near it with one number for each row."""
    if output is None:
        return []
    rows = model.get_submodule(output).weight.shape[0]
    near = [f"{output}.bias", f"{output.rpartition('.')[0]}.bias".lstrip("."), "final_logits_bias"]
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return [n for n in near if n in tensors and tensors[n].shape[-1] == rows]


def _positions(modules: dict[str, Any], inputs: list[str]) -> list[str]:
    """Return the names of the position embeddings outside layers and foreign parts."""
    tables = [n for n, m in modules.items() if isinstance(m, nn.Embedding) and n not in inputs and POSITION.search(n)]
    return [name for name in tables if not in_layer(name) and not is_foreign(name)]


def _maps(model_class: Any, config: Any, ends: set[str | None]) -> list[str]:
    """Return the linear modules between a table and the body.

    If the table's width changes alone, one of their axes changes.
    """
    keys = [key for key in WIDTHS if hasattr(config, key)]
    if not keys:
        return []
    other = type(config).from_dict(config.to_dict() | dict.fromkeys(keys, TABLE_WIDTH))
    try:
        model = _build(model_class, other)
    except Exception:
        return []
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in ends and not in_layer(n)}
    return [n for n, m in linear.items() if TABLE_WIDTH in (m.in_features, m.out_features)]


def _disk(model: Any, modules: list[str], biases: list[str]) -> dict[str, str]:
    """Return {name in the model: name in a saved file} of the names that differ."""
    renamed = {}
    for name in (*(f"{module}.weight" for module in modules), *biases):
        try:
            tensor = model.get_parameter_or_buffer(name)
        except AttributeError:
            continue
        saved = list(revert_weight_conversion(model, {name: tensor}))
        if len(saved) == 1 and saved[0] != name:
            renamed[name.removesuffix(".weight")] = saved[0].removesuffix(".weight")
    return renamed


def _names(model: Any, modules: list[str], biases: list[str]) -> dict[str, Any]:
    """Return the body's prefix, and names in files that are loaded into these tensors.

    The names are left out if the prefix alone explains them.
    """
    prefix, meta = model.base_model_prefix, model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    others = [conversion for conversion in conversions if conversion not in renamings]

    def loaded_as(name: str) -> str:
        """Return the tensor that a name is loaded into, as in `convert_and_load_state_dict_in_model`."""
        renamed = rename_source_key(name, renamings, others, prefix, meta)[0]
        if renamed not in meta and name in meta:
            renamed = rename_source_key(name, [], [], prefix, meta)[0]
        return renamed

    tensors = [name for name in (*(f"{module}.weight" for module in modules), *biases) if name in meta]
    plain = ClassEnds(biases=tuple(tensors), prefix=prefix)
    loads, prefix_explains = {}, True
    for name in tensors:
        spelt = {name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")}
        prefix_explains &= all(loaded_as(other) == plain.loaded_as(other) for other in spelt)
        for renaming in reversed(renamings):
            spelt |= {before for after in spelt for before in _before(renaming, after)}
        spellings = [other for other in spelt if loaded_as(other) == name]
        prefix_explains &= all(plain.loaded_as(other) == name for other in spellings)
        loads[name.removesuffix(".weight")] = sorted(
            other.removesuffix(".weight") for other in spellings if other != name
        )
    return ({"prefix": prefix} if prefix else {}) | ({} if prefix_explains else {"loads": loads})


def _layers(model: Any) -> list[str]:
    """Return the names before the layer numbers of text stacks, in model and files.

    A norm represents its layer, since matrices may be packed together on loading.
    """
    first: dict[str, str] = {}
    for name in sorted(model.state_dict(), key=lambda name: "norm" not in name):
        stack, layer, _ = name.partition(".0.")
        if layer and not is_foreign(stack) and not in_layer(f"{stack}."):
            first.setdefault(stack, name)
    prefix = f"{model.base_model_prefix}."
    names = dict.fromkeys(first)
    for name in first.values():
        spelt = _names(model, [], [name]).get("loads", {}).get(name.removesuffix(".weight"), [])
        names |= dict.fromkeys(other.partition(".0.")[0] for other in spelt if ".0." in other)
    by_prefix = {name for stack in first for name in (prefix + stack, stack.removeprefix(prefix))} - first.keys()
    return [name for name in names if name not in by_prefix]


def _other_names(model: Any, tensor: str) -> list[str]:
    """Return the other names in files that are loaded into a tensor.

    Names that differ by the body's prefix alone are left out.
    """
    module = tensor.removesuffix(".weight")
    loads = _names(model, [], [tensor]).get("loads", {}).get(module, [])
    bare = {name.removeprefix(f"{model.base_model_prefix}.") for name in loads}
    return sorted(bare - {module})


def _head(model_class: Any, config: Any, model: Any, ends: list[str], biases: list[str]) -> list[str]:
    """Return the tensors outside body and ends that the logits of token ids depend on."""
    body = f"{model.base_model_prefix}."
    if not hasattr(model, model.base_model_prefix):
        return []
    ends_and_biases = {f"{module}.weight" for module in ends} | set(biases)
    outer = [name for name, _ in model.named_parameters() if not name.startswith(body) and name not in ends_and_biases]
    outer = [name for name in outer if not in_layer(name) and not is_foreign(name)]
    if not outer or sum(tensor.numel() for tensor in model.parameters()) > MOST_NUMBERS:
        return []
    try:
        built = model_class(config)
        _logits(built(input_ids=torch.arange(4)[None])).sum().backward()
    except Exception:  # the model also needs pictures or sound
        return []
    return [name for name in outer if built.get_parameter(name).grad is not None]


def _wide(model: Any, output: str) -> dict[str, int]:
    """Return {head: its width in hidden widths} if it is wider than the model.

    Reformer's head, for example, reads two streams.
    """
    width, hidden = model.get_submodule(output).weight.shape[1], getattr(model.config, "hidden_size", None)
    is_multiple = isinstance(hidden, int) and width > hidden and width % hidden == 0
    record = model.config.to_dict()
    widths = [record[key] for key in record if re.search("emb|hidden|dim|d_model", key) and "position" not in key]
    return {output: width // hidden} if is_multiple and width not in widths else {}


def _parts(model: Any, ends: list[str]) -> dict[str, list[str]]:
    """Return {level of the config: [module, "lm" or "body"]} of the parts with an end.

    Only parts whose class follows from the level's `model_type` count.
    """
    parts = {}
    for level, config_class in type(model.config).sub_configs.items():
        part = getattr(model.config, level, None)
        if config_class is not AutoConfig or part is None:
            continue
        modules = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
        models = [name for name, module in modules.items() if name and module.config is part]
        models += [name for name, module in modules.items() if name and type(module.config) is type(part)]
        owner = next((name for name in models if any(end.startswith(f"{name}.") for end in ends)), None)
        if owner is not None:
            headed = any(getattr(transformers, name, None) is type(modules[owner]) for name in _language_models())
            parts[level] = [owner, "lm" if headed else "body"]
    return parts


def _language_models() -> list[str]:
    """Return the names of all decoders and sequence-to-sequence models with a head."""
    values = [*CAUSAL.values(), *SEQ2SEQ.values()]
    return [name for value in values for name in ([value] if isinstance(value, str) else value)]


def _joined(model_class: Any, config: Any, entry: dict[str, Any]) -> bool:
    """Return whether the tensors next to the head are tied under every flag.

    Only classes whose flag does not decide on the head can have this.
    """
    ends = {f"{entry['output']}.weight"}
    others = {target: source for target, source in entry["tied"].items() if target not in ends}
    if not others or not entry.get("never"):
        return False
    record = json.loads(json.dumps(config.to_dict(), default=str))
    levels = dict.fromkeys((path for path, _ in model_levels(record)), False)
    model = _build(model_class, model_class.config_class.from_dict(_with_flags(_without_flags(record), levels)))
    return all(_tensor(model, target) is _tensor(model, source) for target, source in others.items())


def _tensor(model: Any, name: str) -> Any:
    """Return a parameter or buffer by its name."""
    return model.get_parameter_or_buffer(name)


def _switches(model_class: Any, config: Any, tensors: list[str]) -> dict[str, list[Any]]:
    """Return {tensor: [key, value]}: the boolean of the config that a tensor needs.

    With any other value of the key, the class lacks the tensor. The key of a nested level has dots.
    """
    needed = {}
    for key, value, model in _with_each_switch(model_class, config) if tensors else ():
        names = set(model.state_dict())
        needed |= {tensor: [key, value] for tensor in tensors if tensor not in names}
    return needed


def _instead(model_class: Any, config: Any, inputs: list[str]) -> dict[str, list[Any]]:
    """Return {key: [value, {inputs, tied}]} of the booleans that give the class other input tables."""
    others = {}
    for key, value, model in _with_each_switch(model_class, config):
        names = _inputs(model, dict(model.named_modules(remove_duplicate=False)))
        if names != inputs:
            others[key] = [not value, {"inputs": names, "tied": _ties_at_ends(model)}]
    return others


def _ties_at_ends(model: Any) -> dict[str, str]:
    """Return {target: source} of the ties outside layers and parts of other modalities."""
    return {k: v for k, v in allowed_keys(model).items() if not in_layer(k) and not is_foreign(k)}


def _with_each_switch(model_class: Any, config: Any) -> Iterator[tuple[str, bool, Any]]:
    """Yield each boolean of the config, its value, and the model that has the other value.

    Booleans that the class refuses to change are left out, and so is the flag.
    """
    record = json.loads(json.dumps(config.to_dict(), default=str))
    for path, value in _switch_paths(record):
        other = copy.deepcopy(record)
        level = other
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = not value
        try:
            model = _build(model_class, model_class.config_class.from_dict(other))
        except Exception:
            continue
        yield ".".join(path), value, model


def _switch_paths(record: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the path and the value of each boolean of a config and its nested levels, without the flag."""
    for key, value in record.items():
        if isinstance(value, bool) and key != FLAG:
            yield (key,), value
        elif isinstance(value, dict):
            yield from (((key, *path), each) for path, each in _switch_paths(value))


def _before(renaming: WeightRenaming, name: str) -> set[str]:
    """Return names that a renaming may turn into this name.

    Some of them are candidates only: it turns them into another name.
    """
    names = {renaming.reverse_transform().rename_source_key(name)[0]}
    for target in filter(None, map(_literal, renaming.target_patterns)):
        for start in (start for start in range(len(name)) if name.startswith(target, start)):
            rest = name[start + len(target) :]
            names |= {name[:start] + _literal(source) + rest for source in renaming.source_patterns}
    return names


def _literal(pattern: str) -> str:
    """Return the only text that a pattern matches, or an empty text."""
    plain = pattern.removeprefix("^").replace(r"\.", ".")
    return "" if "\\" in plain else plain


def _deciding(model_class: Any, config: Any, inputs: list[str], output: str) -> dict[str, Any]:
    """Return which levels' flags decide whether the head is tied to an input table."""
    bare = json.loads(json.dumps(_without_flags(config.to_dict()), default=str))
    levels = [path for path, _ in model_levels(config.to_dict())]
    seen: dict[tuple[tuple[str, bool], ...], bool] = {}

    def is_tied(flags: dict[str, bool]) -> bool:
        """Return whether these flags tie the head."""
        key = tuple(sorted(flags.items()))
        if key not in seen:
            seen[key] = _is_tied(model_class, _with_flags(bare, flags), inputs, output)
        return seen[key]

    def matters(level: str) -> bool:
        """Return whether the flag of a level decides for some flags of the others."""
        others = [other for other in levels if other != level]
        settings = ({}, dict.fromkeys(others, False), dict.fromkeys(others, True))
        return any(is_tied(rest | {level: True}) != is_tied(rest | {level: False}) for rest in settings)

    deciding = [level for level in levels if matters(level)]
    if not deciding:
        return {"always" if is_tied({}) else "never": True}
    decides = {} if deciding == [""] else {"decides": deciding}
    if len(deciding) == 1:
        return decides
    either = [
        is_tied({first: v, second: not v})
        for first, second in itertools.combinations(deciding, 2)
        for v in (True, False)
    ]
    if not all(either):
        raise ValueError(f"the levels {deciding} decide in a way that the data has no word for")
    return decides


def _without_flags(value: Any) -> Any:
    """Return a config's record with the flag removed at every level."""
    if isinstance(value, dict):
        return {key: _without_flags(part) for key, part in value.items() if key != FLAG}
    return [_without_flags(part) for part in value] if isinstance(value, list | tuple) else value


def _with_flags(bare: dict[str, Any], flags: dict[str, bool]) -> dict[str, Any]:
    """Return a copy of a record with these flags, by level."""
    copied = json.loads(json.dumps(bare))
    for path, value in flags.items():
        level = copied
        for part in filter(None, path.split(".")):
            level = level[part]
        level[FLAG] = value
    return copied


def _is_tied(model_class: Any, record: dict[str, Any], inputs: list[str], output: str) -> bool:
    """Return whether the head of a model with this config is one of the input tables."""
    model = _build(model_class, model_class.config_class.from_dict(record))
    head = model.get_submodule(output)
    return any(model.get_submodule(name).weight is head.weight for name in inputs)


if __name__ == "__main__":
    main()
