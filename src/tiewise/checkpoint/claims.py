"""Claims of a config on tying, and the usual names of input embedding and output head.

A config is a tree: the root, and below it the configs of parts (`text_config`, `decoder`). Each level may carry the
flag `tie_word_embeddings`. The level that the class with the head reads decides. `families.py` has the facts on each
family. `data/usual_names.json` is written by hand, for families that the architecture data lacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from tiewise.checkpoint.composite_ends import PartPlace, part_inside, with_head_of_part, with_other_class
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import ClassEnds, ends_from, family_data
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import read_packaged_json

POSITION = re.compile(r"(^|\.)(wpe|(positions?|positional|pos)_embed\w*|embed_positions?|pos_emb)(\.|$)")
PACKED = ("qweight", "weight_packed", "qweight_packed", "B", "weight_q")  # parameters with packed numbers of a table
QUANTISATION_PARTS = re.compile(  # the other parameters of a quantised table: scales, zero points, statistics
    r"(qzeros|g_idx|scales|biases|zeros|SCB|weight_(scale|shape|zero_point|g_idx|scale_inv|format|scale_2|global_scale)"
    r"|input_scale|absmax|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))"
)
# names of classes that are a part of another class of their family, such as WhisperDecoder or T5Stack
_PART_CLASS = re.compile(r"((Encoder|Decoder)(With\w*Prenet)?(Wrapper)?|Stack)$")
_FOREIGN_STARTS = ("vision_", "audio_", "mtp_")  # prefixes of a part of a module's name
# endings of class names; a family's main class has the first ending that one of its classes has ("" fits any)
_MAIN_CLASSES = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "MTModel",
    "ForPreTraining",
    "",
)


class UsualNames(NamedTuple):
    """Names that modules and tensors usually have; `data/usual_names.json` describes each list."""

    pairs: tuple[tuple[str, str], ...]  # (input embedding, output head) after one prefix, longest paths first
    outputs: tuple[str, ...]
    exact_outputs: tuple[str, ...]
    biases: tuple[str, ...]
    maps: tuple[str, ...]
    wrappers: tuple[str, ...]
    foreign: tuple[str, ...]


@lru_cache(maxsize=1)
def usual_names() -> UsualNames:
    """Return the names in `data/usual_names.json`."""
    data = read_packaged_json("checkpoint/data/usual_names.json")
    pairs = [(pair["input"], pair["output"]) for pair in data["pairs"]]
    pairs.sort(key=_depth_of_input, reverse=True)
    names = {key: tuple(data[key]) for key in UsualNames._fields}
    return UsualNames(**names | {"pairs": tuple(pairs)})


def _depth_of_input(pair: tuple[str, str]) -> int:
    """Return the number of modules around the input embedding of a pair."""
    return pair[0].count(".")


def strip_wrappers(name: str) -> str:
    """Return a tensor's name without the wrappers of torch.compile, DDP, FSDP and PEFT.

    >>> strip_wrappers("base_model.model.model.embed_tokens.base_layer.weight")
    'model.embed_tokens.weight'
    """
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in usual_names().wrappers).replace(
        ".modules_to_save.default.", "."
    )


def ends_with(module: str, path: str) -> bool:
    """Return whether a module's name ends with a path.

    Only complete parts of the dotted name count.

    >>> ends_with("model.lm_head", "lm_head"), ends_with("model.my_lm_head", "lm_head")
    (True, False)
    """
    return f".{module}".endswith(f".{path}")


def ends_with_any(module: str, paths: Iterable[str]) -> bool:
    """Return whether a module's name ends with one of the paths, as `ends_with` compares it."""
    return f".{module}".endswith(tuple(f".{path}" for path in paths))


def in_layer(name: str) -> bool:
    """Return whether a module is inside a numbered layer. Tables there are no end of the model."""
    return re.search(r"\.\d+\.", f".{name}.") is not None


def is_foreign(name: str) -> bool:
    """Return whether a module belongs to another modality, a codec, or a draft head."""
    parts = name.split(".")
    if not set(parts).isdisjoint(usual_names().foreign):
        return True
    return any(part.startswith(_FOREIGN_STARTS) for part in parts)


def class_ends(model_type: str | None, architecture: str | None) -> ClassEnds | None:
    """Return the ends of a class, looked up in its family first. None: the family's main class."""
    classes = family(model_type).ends.classes
    if architecture is None:
        return _main_class(classes)
    if architecture in classes:
        return classes[architecture]
    for record in family_data()["families"].values():
        if architecture in record.get("classes", {}):
            return ends_from(record["classes"][architecture])
    return None


def _main_class(classes: Mapping[str, ClassEnds]) -> ClassEnds | None:
    """Return the ends of a family's main class, with a head if any class has one. None without classes."""
    candidates = sorted(classes.keys() - {*family_data()["secondary"]})
    for ending in _MAIN_CLASSES:
        for name in candidates:
            if name.endswith(ending):
                return classes[name]
    return None


def config_ends(config: Mapping[str, Any]) -> ClassEnds | None:
    """Return the ends of the class that a config names. None for an unknown class or part.

    The config chooses the parts of a composite class. VisionEncoderDecoder has the ends of its decoder's class, which
    the `model_type` of the level `decoder` names.
    """
    ends = class_ends(family_type(config), architecture(config))
    return _with_parts(config, ends)


def family_ends(config: Mapping[str, Any]) -> ClassEnds | None:
    """Return `config_ends`; for an unknown class, the ends of the family's main class."""
    return _with_parts(config, _class_or_main_class(config))


def _class_or_main_class(config: Mapping[str, Any]) -> ClassEnds | None:
    """Return the ends of the class that a config names, before it chooses parts.

    For an unknown class, return those of the family's main class. None if the family is unknown too.
    """
    model_type = family_type(config)
    return class_ends(model_type, architecture(config)) or class_ends(model_type, None)


def _with_parts(config: Mapping[str, Any], ends: ClassEnds | None) -> ClassEnds | None:
    """Return a composite's ends with the part classes that a config chooses. None if one is unknown."""
    if ends is None:
        return None
    ends = ends.chosen_by(config)
    if not ends.parts:
        return ends
    levels, defaults = dict(model_levels(config)), family(family_type(config)).ends.levels
    composite = ends
    for path, (module, use) in ends.parts.items():
        default = defaults.get(path)
        if default is None:
            continue
        part = PartPlace(f"{module}.", path)
        default_ends = part_ends(default, use)
        chosen = family_type(levels.get(path, {})) or default
        if chosen == default:
            composite = with_head_of_part(composite, part, default_ends)
            continue
        chosen_ends = part_ends(chosen, use)
        if family(chosen).is_tokenless:
            chosen_ends = chosen_ends or ClassEnds()
        if chosen_ends is None:
            return None
        replaced = default_ends or part_inside(composite, part.prefix)
        composite = with_other_class(composite, part, replaced, chosen_ends)
    return composite


def part_ends(model_type: str, use: str) -> ClassEnds | None:
    """Return the ends of a family's class as a part of a composite model.

    `use` is "lm" for the class with its head, "body" for the class without.
    """
    names = family(model_type).ends
    ends = names.classes.get(names.auto.get(use, "")) or class_ends(model_type, None)
    if ends is None or use == "lm":
        return ends
    bare = ends.without_prefix()
    # leave out a table that the part itself ties to another one, by the flag of its level
    inputs = tuple(name for name in bare.inputs if f"{name}.weight" not in bare.tied)
    return ClassEnds(inputs, positions=bare.positions, maps=bare.maps, layers=bare.layers)


def without_tokens(model_type: str | None, architecture: str | None) -> bool:
    """Return whether the architecture data covers a class and lists no token table for it.

    It is True as well for an unlisted part of a known family, such as WhisperDecoder, which needs no table.
    """
    record = family(model_type)
    if record.is_tokenless or architecture in family_data()["without_table"]:
        return True
    if architecture is None or not record.has_ends:
        return False
    if class_ends(model_type, architecture) is not None:
        return False
    if _PART_CLASS.search(architecture):
        return True
    return not record.ends.classes and architecture not in family_data()["not_built"]


FLAG = "tie_word_embeddings"
# model_type of checkpoints with a boundary that only tiewise loads, and the config key of their base family
TIEWISE_TYPE, BASE_TYPE = "tiewise", "base_model_type"
TIEWISE_PREFIX = "Tiewise"  # prefix of their class names
SPEC = "tiewise_boundary"  # config key of the installed boundary's spec
TEXT_PARTS = ("text_config", "decoder", "generator", "llm_config", "language_config")
MOST_DEPTH, MOST_LEVELS = 4, 64
_FOREIGN_LEVELS = (
    "vision",
    "visual",
    "audio",
    "image",
    "speech",
    "video",
    "codec",
    "vq_",
    "backbone_config",
    "quantization",
)
_MODEL_PARTS = ("decoder", "encoder", "text_encoder", "generator", "question_encoder", "llm_config", "language_config")


_HIDDEN_SIZES = ("hidden_size", "d_model", "n_embd", "model_dim", "dim", "n_embed")


@dataclass(frozen=True)
class Claim:
    """Claims of one level of a config: the root, `text_config`, `decoder`, …"""

    level: str  # dotted path below the root; "" is the root
    model_type: str | None = None  # `model_type` of this level; None if absent
    written: bool | None = None  # the flag in the file; None if absent or malformed
    # the class's default for an absent or null flag; None for an unknown class
    default: bool | None = None
    decides: bool = False  # the class with the head reads the flag of this level
    vocab_size: int | None = None  # vocabulary size V of this level; None if absent
    hidden_size: int | None = None  # hidden width D of this level, under the family's key; None if absent
    # the flag as text, if it is neither true nor false; else None
    malformed: str | None = None

    @property
    def effective(self) -> bool | None:
        """Return the flag that the class uses: the written one, else its default. None if unknown."""
        if self.written is not None:
            return self.written
        return self.default


@dataclass(frozen=True)
class Claims:
    """Claims of a config on tying, by level."""

    levels: tuple[Claim, ...] = ()  # every level that is a model's config, the root first
    # the family always ties its input tables; its flag also controls a scale
    t5_like: bool = False
    has_family_data: bool = False  # the family is in the architecture data
    # the class always ties (True) or never ties (False); None: the flag decides
    fixed: bool | None = None
    always_ties_others: bool = False  # the class always ties its other tensors

    @property
    def deciding(self) -> Claim:
        """Return the level whose flag decides; a level without claims if there is no config.

        If two levels decide, one with the flag true is enough: transformers 5 lifts the flag of a `text_config` to
        the root.
        """
        deciding = [claim for claim in self.levels if claim.decides]
        for claim in deciding:
            if claim.effective:
                return claim
        first, *_ = (*deciding, *self.levels, Claim(""))
        return first

    @property
    def tied(self) -> bool | None:
        """Return whether the class ties both ends with this config. None if unknown."""
        if self.fixed is not None:
            return self.fixed
        return self.deciding.effective

    @property
    def ties_others(self) -> bool | None:
        """Return whether the class ties its other tensors: input tables and biases. None if unknown."""
        if self.always_ties_others or self.fixed:
            return True
        return self.deciding.effective


def needs_tiewise(config: Mapping[str, Any]) -> bool:
    """Return whether transformers needs this package to open a model: factored tables, RNNs, ALBERTs."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return False
    return model_type == TIEWISE_TYPE or model_type.startswith(f"{TIEWISE_TYPE}-")


def read_claims(config: Mapping[str, Any] | None) -> Claims:
    """Read the claims of every level. A value of the wrong type counts as absent."""
    if not isinstance(config, Mapping):
        return Claims()
    levels = dict(model_levels(config))
    record = family(family_type(config))
    ends = family_ends(config)
    # the composite's default ends, used if a part of it is unknown
    default = _class_or_main_class(config)
    deciding = _deciding_levels(ends or default, levels)
    claims = []
    for path in dict.fromkeys((*levels, *deciding)):
        level = levels.get(path, {})  # absent: the class uses its default
        model_type = family_type(level) or record.ends.levels.get(path)
        claim = _read_level(path, level, model_type, path in deciding)
        claims.append(claim)
    has_unknown_part = ends is None and default is not None
    ends = ends or ClassEnds()
    return Claims(
        tuple(claims),
        t5_like=record.is_t5_like or _always_shares_inputs(ends),
        has_family_data=record.has_ends and not has_unknown_part,
        fixed=ends.fixed,
        always_ties_others=ends.joined,
    )


def _always_shares_inputs(ends: ClassEnds) -> bool:
    """Return whether a class always ties its head to the table `shared` of encoder and decoder."""
    return ends.always and any(ends_with(table, "shared") for table in ends.inputs)


def _deciding_levels(ends: ClassEnds | None, levels: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the levels that decide on tying.

    For an unknown class, this is the outermost level with the flag, else the root.
    """
    if ends is not None:
        return ends.decides
    for path, level in levels.items():
        if FLAG in level:
            return (path,)
    return ("",)


def _read_level(path: str, level: Mapping[str, Any], model_type: str | None, decides: bool) -> Claim:
    """Read one level of a config. The level or the one above it names the family."""
    ends = family(model_type).ends
    written, malformed, default = None, None, ends.tie
    key = flag_key(level, model_type)
    flag = level.get(key)
    if isinstance(flag, bool):
        written = flag
    elif key in level:
        malformed = short(flag)
        if flag is None and ends.loose:
            default = False  # such a config class takes null as false
    return Claim(
        path,
        family_type(level),
        written,
        default,
        decides,
        vocab_size=first_count([level], ends.sizes.get("vocab_size", ""), "vocab_size"),
        hidden_size=first_count([level], *width_keys(level, model_type)),
        malformed=malformed,
    )


def width_keys(level: Mapping[str, Any], model_type: str | None) -> list[str]:
    """Return the keys of a config's level for its hidden width, the family's key first."""
    own_key = family(model_type).ends.sizes.get("hidden_size", "")
    return [key for key in (own_key, *_HIDDEN_SIZES) if key in level]


def flag_key(level: Mapping[str, Any], model_type: str | None) -> str:
    """Return the key of the flag that a level's config class reads. LFM2 prefers its older `tie_embedding`."""
    older = family(model_type).ends.older_flag
    if older and older in level:
        return older
    return FLAG


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the class that saved the checkpoint; for a class of tiewise, its base class."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    name = names[0]
    if not isinstance(name, str):
        return None
    if config.get("model_type") == TIEWISE_TYPE:
        return name.removeprefix(TIEWISE_PREFIX)
    return name


def model_levels(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (dotted path, mapping) of every level that configures a token model, the root first."""
    levels, waiting = list[tuple[str, Mapping[str, Any]]](), [("", config, 0)]
    while waiting and len(levels) < MOST_LEVELS:
        path, level, depth = waiting.pop(0)
        levels.append((path, level))
        if depth == MOST_DEPTH:
            continue
        below = []
        for key, part in level.items():
            if isinstance(part, Mapping) and _is_model_level(key, part):
                below.append((dotted_path(path, key), part, depth + 1))
        waiting = below + waiting
    return levels


def dotted_path(path: str, key: str) -> str:
    """Return the dotted path of a key in the level at `path`; the root is ""."""
    if not path:
        return key
    return f"{path}.{key}"


def _is_model_level(key: Any, part: Mapping[str, Any]) -> bool:
    """Return whether a part of a config configures a token model, by its key and content."""
    if not isinstance(key, str) or is_foreign_level(key):
        return False
    if key in _MODEL_PARTS:
        return True
    if not key.endswith("_config"):
        return False
    names_tokens = not part.keys().isdisjoint((FLAG, "vocab_size"))
    return names_tokens or bool(part.get("model_type"))


def is_foreign_level(key: str) -> bool:
    """Return whether the key of a level belongs to a part without text, such as `vision_config`."""
    return any(word in key for word in _FOREIGN_LEVELS)


def family_type(level: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of a level; for tiewise's type, its base family. None if absent."""
    model_type = level.get("model_type")
    if model_type == TIEWISE_TYPE:
        model_type = level.get(BASE_TYPE)
    if not isinstance(model_type, str):
        return None
    return model_type


def is_of_text(level: str) -> bool:
    """Return whether a level of the config is the root or a text part."""
    return not level or level.rpartition(".")[2] in TEXT_PARTS


def positive_int(value: Any) -> int | None:
    """Return `value` if it is a positive integer, else None."""
    if type(value) is int and 0 < value < 2**63:
        return value
    return None


def first_count(levels: Iterable[Mapping[str, Any]], *keys: str) -> int | None:
    """Return the first positive integer under one of the keys, level by level. None if none."""
    for level in levels:
        for key in keys:
            size = positive_int(level.get(key))
            if size is not None:
                return size
    return None


def finite_number(value: Any) -> float | None:
    """Return a finite number as a float (true as 1, false as 0), else None."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    if not math.isfinite(as_float):
        return None
    return as_float
