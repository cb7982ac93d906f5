"""Parts of a config: vocabulary sizes, the level of a class, and the quantisation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import positive_int
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import family_data
from tiewise.checkpoint.untrusted import read_json, short
from tiewise.core.errors import CheckpointError, similar_names

_NO_VOCABULARY = re.compile(r"type_vocab|multiple")  # keys on BERT's segments and on padding
TRANSFORMERS_SECTION = "quantization_config"  # key of the quantisation that transformers reads
_EXTRA_KEYS = ("additional_vocab_size", "prompt_types", "prompt_length", "num_codebooks", "codebook_vocab_size")


def vocabulary_sizes(levels: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Return the vocabulary sizes in levels of a config, with and without a family's extra rows."""
    sizes = set[int]()
    for level in levels:
        extra_rows = _extra_rows(level)
        for key, value in level.items():
            if "vocab" not in key or _NO_VOCABULARY.search(key):
                continue
            size = positive_int(value)
            if size is not None:
                sizes |= {size + extra for extra in extra_rows}
    return frozenset(sizes)


def _extra_rows(level: Mapping[str, Any]) -> set[int]:
    """Return the possible numbers of rows beyond a level's vocabulary, including 0."""
    numbers = {key: positive_int(level.get(key)) or 0 for key in _EXTRA_KEYS}
    record = family(level.get("model_type"))
    extra = {0, record.extra_rows, numbers["additional_vocab_size"]}
    prompt_rows = numbers["prompt_types"] * numbers["prompt_length"]
    extra.add(prompt_rows)
    if record.has_codebook_rows:
        codebook_rows = numbers["num_codebooks"] * numbers["codebook_vocab_size"]
        extra.add(codebook_rows + 1)
    return extra


def config_for(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part of a config that transformers gives to a class.

    It is the root, or the level of the class's family.

    Raises:
        CheckpointError: no class has this name, or no level has its family.
    """
    families = _families_of_class(name)
    types = set[str]()
    for part in (config, config.get("text_config"), *config.values()):
        if not isinstance(part, Mapping):
            continue
        model_type = part.get("model_type")
        if model_type in families:
            return {**part, "architectures": [name]}
        if isinstance(model_type, str):
            types.add(short(model_type))
    remedy = "write model_type into config.json"
    if types:
        remedy = f"choose a class of {' or '.join(sorted(types))}"
    raise CheckpointError(f"{name} is of the family {families[0]}, and no part of the config is", remedy)


def _families_of_class(name: str) -> list[str]:
    """Return the families that have a class of this name. Raise a CheckpointError if none has."""
    families, all_classes = list[str](), list[str]()
    for model_type, record in family_data()["families"].items():
        classes = record.get("classes", {})
        all_classes += classes
        if name in classes:
            families.append(model_type)
    if families:
        return families
    remedy = "write it as transformers does: LlamaForCausalLM"
    near = similar_names(name, all_classes)
    if near:
        remedy = f"did you mean {' or '.join(near)}?"
    version = family_data()["transformers"]
    problem = f"{short(name)} is none of the classes with an output head in the data on transformers {version}"
    raise CheckpointError(problem, remedy)


class QuantisationSection(NamedTuple):
    """Part of a config that describes a quantisation."""

    key: str  # dotted path in the config; "" if there is no such part
    values: Mapping[str, Any]


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes a quantisation; empty if absent."""
    return quantisation_section(config).values


def quantisation_section(config: Mapping[str, Any]) -> QuantisationSection:
    """Return the outermost part of a config that describes a quantisation, with its place."""
    return next(_sections(config), QuantisationSection("", {}))


def quantisation_keys(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys under which a config describes a quantisation.

    transformers reads "quantization_config" alone; MLX writes "quantization", and often the same again under the other.
    """
    return frozenset(section.key.rpartition(".")[2] for section in _sections(config))


def has_nameless_quantisation(config: Mapping[str, Any]) -> bool:
    """Return whether transformers reads a `quantization_config` that names no method, and refuses it.

    MLX writes such a section next to its own. The root counts, else the text part.
    """
    section = config.get(TRANSFORMERS_SECTION)
    text = config.get("text_config", config)
    if not section and isinstance(text, Mapping):
        section = text.get(TRANSFORMERS_SECTION)
    if not isinstance(section, Mapping) or section.get("load_in_8bit") or section.get("load_in_4bit"):
        return False
    return section.get("quant_method") is None


def _sections(config: Mapping[str, Any]) -> Iterator[QuantisationSection]:
    """Yield all descriptions of a quantisation, the outermost first."""
    levels = {"": config, "text_config.": config.get("text_config"), "llm_config.": config.get("llm_config")}
    for prefix, level in levels.items():
        if not isinstance(level, Mapping):
            continue
        for key in (TRANSFORMERS_SECTION, "compression_config", "quantization"):
            section = level.get(key)
            if isinstance(section, Mapping):
                yield QuantisationSection(prefix + key, section)


def read_quantisation(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read a quantisation from a config.json or from a separate file of the tool.

    Raises:
        CheckpointError: the file cannot be read, or describes no quantisation.
    """
    record = read_json(os.fspath(path), most=2**24)
    if isinstance(record, dict):
        section = quantisation(record)
        if section:
            return section
        if record and "model_type" not in record:  # a separate file of the tool
            return record
    remedy = "give a JSON file with quant_method, or a config.json that has quantization_config"
    raise CheckpointError(f"{path}: no config of a quantisation", remedy)
