"""What a config claims of its vocabulary's ends, and what is known of the names and families that it speaks of.

A config is a tree: the root, and below it the configs of parts (`text_config`, `decoder`). Each level may carry the
flag, and only the level that the class owning the head reads decides. `families.py` has what is known of each family;
`data/usual_names.json` is written by hand, for families that are not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import ClassEnds, ends_from, family_data
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import packaged_json

POSITION = re.compile(r"(^|\.)(wpe|(positions?|positional|pos)_embed\w*|embed_positions?|pos_emb)(\.|$)")
PACKED = ("qweight", "weight_packed", "qweight_packed", "B", "weight_q")  # the bytes of a quantised table
BESIDE = re.compile(
    r"(qzeros|g_idx|scales|biases|zeros|SCB|weight_(scale|shape|zero_point|g_idx|scale_inv|format|scale_2|global_scale)"
    r"|input_scale|absmax|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))"
)


@lru_cache(maxsize=1)
def usual() -> SimpleNamespace:
    """The hand-written names, longest paths first; what each list holds is said in the file."""
    data = packaged_json("checkpoint/data/usual_names.json")
    pairs = sorted(((pair["input"], pair["output"]) for pair in data["pairs"]), key=lambda p: -p[0].count("."))
    return SimpleNamespace(**{key: tuple(value) for key, value in data.items() if key != "about"} | {"pairs": pairs})


def unwrapped(name: str) -> str:
    """Return a tensor's name without what torch.compile, DDP, FSDP and PEFT put around modules.

    >>> unwrapped("base_model.model.model.embed_tokens.base_layer.weight")
    'model.embed_tokens.weight'
    """
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in usual().wrappers).replace(".modules_to_save.default.", ".")


def ends_with(module: str, path: str) -> bool:
    """Whether a module's name ends with a path of whole parts: model.lm_head with lm_head, my_lm_head not."""
    return f".{module}".endswith(f".{path}")


def in_layer(name: str) -> bool:
    """Whether a module lies inside a numbered layer: tables there belong to no end of the model."""
    return re.search(r"\.\d+\.", f".{name}.") is not None


def is_foreign(name: str) -> bool:
    """Whether a module belongs to another modality, a codec, or a draft head."""
    return any(part in usual().foreign or part.startswith(("vision_", "audio_", "mtp_")) for part in name.split("."))


def class_ends(model_type: str | None, architecture: str | None) -> ClassEnds | None:
    """Return what is known of a class, of its family's own or any other's; of the family's main class for None."""
    classes = family(model_type).ends.classes
    if architecture is None:
        main = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "MTModel", "ForPreTraining")
        return next((classes[name] for end in (*main, "") for name in sorted(classes) if name.endswith(end)), None)
    if architecture in classes:
        return classes[architecture]
    generated = (record.get("classes", {}) for record in family_data()["families"].values())
    return next((ends_from(those[architecture]) for those in generated if architecture in those), None)


def config_ends(config: Mapping[str, Any]) -> ClassEnds | None:
    """Return what is known of the class that a config names, with the parts that the config chooses; None if unknown.

    VisionEncoderDecoder has the ends of its decoder's class, which the `model_type` of the level `decoder` chooses.
    """
    return _with_parts(config, class_ends(family_type(config), architecture(config)))


def family_ends(config: Mapping[str, Any]) -> ClassEnds | None:
    """Return what `config_ends` returns, of the family's main class if the class that the config names is unknown."""
    kind, name = family_type(config), architecture(config)
    return _with_parts(config, class_ends(kind, name) or class_ends(kind, None))


def _with_parts(config: Mapping[str, Any], ends: ClassEnds | None) -> ClassEnds | None:
    """Put the classes that a config chooses in the place of a composite's default parts; None if one is unknown."""
    levels, defaults = dict(model_levels(config)), family(family_type(config)).ends.levels
    for path, (module, how) in ({} if ends is None else ends.parts).items():
        default = defaults.get(path)
        if ends is None or default is None:
            continue
        chosen = family_type(levels.get(path, {})) or default
        if chosen == default:
            ends = _with_head(ends, f"{module}.", path, part_ends(chosen, how))
            continue
        old, new = part_ends(default, how), part_ends(chosen, how)
        if new is None and not family(chosen).is_tokenless:
            return None
        ends = _exchanged(ends, f"{module}.", path, old or ClassEnds(), new or ClassEnds())
    return ends


def part_ends(kind: str, how: str) -> ClassEnds | None:
    """Return the ends of a family's class as a part of a composite: "lm" with its head, "body" without."""
    names = family(kind).ends
    ends = names.classes.get(names.auto.get(how, "")) or class_ends(kind, None)
    if ends is None or how == "lm":
        return ends
    bare = ends.renamed(lambda name: name.removeprefix(f"{ends.prefix}."))
    layers = tuple(layer.removeprefix(f"{ends.prefix}.") for layer in ends.layers)
    # a table that the part ties to another of its own, by the flag of its own level, is not looked for
    inputs = tuple(name for name in bare.inputs if f"{name}.weight" not in bare.tied)
    return ClassEnds(inputs, positions=bare.positions, maps=bare.maps, layers=layers)


def _exchanged(ends: ClassEnds, at: str, path: str, old: ClassEnds, new: ClassEnds) -> ClassEnds:
    """Return a composite's ends with the class `new` instead of `old` at the modules `at` and the level `path`."""

    def others(names: Iterable[str]) -> list[str]:
        return [name for name in names if not name.startswith(at)]

    def placed(names: Iterable[str]) -> list[str]:
        return [at + name for name in names]

    made: dict[str, Any] = {}
    for key in ("inputs", "biases", "positions", "maps", "layers"):
        made[key] = tuple(dict.fromkeys((*others(getattr(ends, key)), *placed(getattr(new, key)))))
    for key in ("head", "only_if", "wide"):
        kept = {name: value for name, value in getattr(ends, key).items() if not name.startswith(at)}
        made[key] = kept | {at + name: _below(key, value, at, path) for name, value in getattr(new, key).items()}
    kept = {target: source for target, source in ends.tied.items() if not source.startswith(at)}
    made["tied"] = kept | {at + target: at + source for target, source in new.tied.items()}
    made["disk"], made["loads"] = _names_in_files(ends, at, old, new)
    if ends.output is not None and ends.output.startswith(at):
        made["output"] = None if new.output is None else at + new.output
        inner = [f"{path}.{level}".rstrip(".") for level in new.decides]
        made["decides"] = tuple(dict.fromkeys((*(level for level in ends.decides if level != path), *inner)))
        made |= {"always": new.always, "never": new.never, "joined": new.joined}
    elif ends.output is not None:  # a head of the composite's own, tied to a table of the part
        source = ends.tied.get(f"{ends.output}.weight", "")
        if source.startswith(at) and new.inputs:
            made["tied"] |= {f"{ends.output}.weight": f"{at}{new.inputs[0]}.weight"}
    return replace(ends, **made)


def _with_head(ends: ClassEnds, at: str, path: str, part: ClassEnds | None) -> ClassEnds:
    """Add the layers between body and head of a part at the modules `at`; a composite's own data do not name them."""
    if part is None or ends.output is None or not ends.output.startswith(at):
        return ends
    added = {
        key: {at + name: _below(key, value, at, path) for name, value in getattr(part, key).items()}
        for key in ("head", "only_if")
    }
    return replace(ends, head={**ends.head, **added["head"]}, only_if={**ends.only_if, **added["only_if"]})


def _names_in_files(
    ends: ClassEnds, at: str, old: ClassEnds, new: ClassEnds
) -> tuple[dict[str, str], dict[str, Sequence[str]] | None]:
    """Return `disk` and `loads` of a composite with the class `new` instead of `old` at the modules `at`.

    A file that calls the old part's table `x.embed_tokens` calls that of the new one `x.wte`.
    """
    pairs = dict(zip(old.inputs, new.inputs, strict=False)) | dict(zip(old.biases, new.biases, strict=False))
    if old.output is not None and new.output is not None:
        pairs[old.output] = new.output

    def respelt(own: str, others: Iterable[str]) -> tuple[str, list[str]]:
        before = own.removeprefix(at)
        after = pairs[before]
        return at + after, [other.removesuffix(before) + after for other in others if other.endswith(before)]

    def stays(own: str) -> bool:
        return not own.startswith(at)

    disk = {own: name for own, name in ends.disk.items() if stays(own)}
    for own, name in ends.disk.items():
        if not stays(own) and own.removeprefix(at) in pairs:
            after, moved = respelt(own, [name])
            disk |= {after: moved[0]} if moved else {}
    if ends.loads is None and new.loads is None:
        return disk, None
    loads: dict[str, Sequence[str]] = {own: names for own, names in (ends.loads or {}).items() if stays(own)}
    for own, names in (ends.loads or {}).items():
        if not stays(own) and own.removeprefix(at) in pairs:
            after, spelt = respelt(own, names)
            loads[after] = spelt
    for name in (*new.inputs, *new.biases, *((new.output,) if new.output is not None else ())):
        inner = [at + other for other in (new.loads or {}).get(name, ())]
        outer = [f"{ends.prefix}.{at}{name}"] if ends.prefix else []
        loads[at + name] = list(dict.fromkeys((*loads.get(at + name, ()), *inner, *outer)))
    return disk, loads


def _below(key: str, value: Any, at: str, path: str) -> Any:
    """Return what one class says of a tensor, as a composite with this class at the modules `at` says it."""
    if key == "only_if":
        return (f"{path}.{value[0]}", value[1])
    return tuple(at + name for name in value) if key == "head" else value


def without_tokens(model_type: str | None, architecture: str | None) -> bool:
    """Whether a known class has no table of tokens at all: the data was made from it, and found none."""
    record = family(model_type)
    if record.is_tokenless or architecture is None:
        return record.is_tokenless
    if not record.has_ends or record.ends.classes or architecture in family_data()["not_built"]:
        return False
    return class_ends(model_type, architecture) is None


FLAG = "tie_word_embeddings"
OWN_TYPE, BASE_TYPE = "tiewise", "base_model_type"  # what checkpoints of this package with factored tables say
OWN_PREFIX = "Tiewise"  # of their class names
MOST_DEPTH, MOST_LEVELS = 4, 64
_FOREIGN = ("vision", "visual", "audio", "image", "speech", "video", "codec", "vq_", "backbone_config", "quantization")
_PARTS = ("decoder", "encoder", "text_encoder", "generator", "question_encoder", "llm_config", "language_config")


@dataclass(frozen=True)
class Claim:
    """One level of a config: the root, `text_config`, `decoder`, …"""

    level: str  # dotted path below the root; "" is the root
    model_type: str | None = None  # of this level; None where absent
    written: bool | None = None  # the flag as written; None where absent or malformed
    # what this level's class takes where the flag is absent or null; None where the class is unknown
    default: bool | None = None
    decides: bool = False  # the class that owns the head reads this level
    vocab_size: int | None = None  # of this level; None where absent
    hidden_size: int | None = None  # width D of this level, under whatever key the family has; None where absent
    # what stands where the flag should be and is neither true nor false, as text; None elsewhere
    malformed: str | None = None

    @property
    def effective(self) -> bool | None:
        """The flag as the class will take it; None where neither written nor known."""
        return self.default if self.written is None else self.written


@dataclass(frozen=True)
class Claims:
    """All levels, the root first."""

    levels: tuple[Claim, ...] = ()  # every level that is a model's config
    # the family ties its input tables whatever the flag says, and reads the flag for something else too
    t5_like: bool = False
    known: bool = False  # the family is in the architecture data
    # the class ties (True) or never ties (False) whatever the flag says; None where the flag rules
    fixed: bool | None = None
    joined: bool = False  # the class ties its other tensors whatever the flag says

    @property
    def deciding(self) -> Claim:
        """The level whose flag decides; one that claims nothing without a config.

        Where two levels decide, one that says true is enough: that is how transformers 5 lifts the flag of a
        `text_config` to the root.
        """
        deciding = [claim for claim in self.levels if claim.decides] or [*self.levels[:1], Claim("")]
        return next((claim for claim in deciding if claim.effective), deciding[0])

    @property
    def tied(self) -> bool | None:
        """Whether the config, read as its class reads it, ties the two ends; None where that cannot be known."""
        return self.deciding.effective if self.fixed is None else self.fixed

    @property
    def ties_others(self) -> bool | None:
        """Whether the class ties what it may tie beside its head: input tables, biases; None where not known."""
        return True if self.joined or self.fixed else self.deciding.effective


def of_tiewise(config: Mapping[str, Any]) -> bool:
    """Whether transformers opens a model only with our code: factored tables, and RNNs and ALBERTs of ours."""
    kind = config.get("model_type")
    return isinstance(kind, str) and (kind == OWN_TYPE or kind.startswith(f"{OWN_TYPE}-"))


def read_claims(config: Mapping[str, Any] | None) -> Claims:
    """Read every level of a config. Any JSON value is taken; what makes no sense counts as absent."""
    if not isinstance(config, Mapping):
        return Claims()
    kind, levels, claims = family_type(config), dict(model_levels(config)), []
    ends, default = family_ends(config), class_ends(kind, architecture(config)) or class_ends(kind, None)
    if default is not None:  # the composite's own, if a part of it is unknown
        deciding = (ends or default).decides
    else:  # the outermost level that has the flag, else the root
        deciding = (next((path for path, level in levels.items() if FLAG in level), ""),)
    for path in dict.fromkeys((*levels, *deciding)):
        level = levels.get(path, {})  # absent: the class takes its own default
        own, flag = family(family_type(level) or family(kind).ends.levels.get(path)).ends, level.get(FLAG)
        widths = ("hidden_size", "d_model", "n_embd", "model_dim", "dim", "n_embed")
        claim = Claim(
            path,
            model_type=family_type(level),
            written=flag if isinstance(flag, bool) else None,
            default=False if own.loose and FLAG in level and flag is None else own.tie,
            decides=path in deciding,
            vocab_size=first_count([level], own.sizes.get("vocab_size", ""), "vocab_size"),
            hidden_size=first_count([level], own.sizes.get("hidden_size", ""), *widths),
            malformed=short(flag) if FLAG in level and not isinstance(flag, bool) else None,
        )
        claims.append(claim)
    fixed = None if ends is None or not (ends.always or ends.never) else ends.always
    t5_like = family(kind).is_t5_like or bool(
        fixed and ends is not None and any(ends_with(table, "shared") for table in ends.inputs)
    )
    known = family(kind).has_ends and (ends is not None or default is None)
    joined = ends is not None and ends.joined
    return Claims(tuple(claims), t5_like=t5_like, known=known, fixed=fixed, joined=joined)


def architecture(config: Mapping[str, Any]) -> str | None:
    """Name of the class that saved the checkpoint, of its base class where this package did; None where absent."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        return None
    return name.removeprefix(OWN_PREFIX) if config.get("model_type") == OWN_TYPE else name


def model_levels(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(dotted path, mapping) of every level that configures a model of tokens, the root first."""
    found, waiting = list[tuple[str, Mapping[str, Any]]](), [("", config, 0)]
    while waiting and len(found) < MOST_LEVELS:
        path, level, depth = waiting.pop(0)
        found.append((path, level))
        below = []
        for key, part in level.items() if depth < MOST_DEPTH else ():
            if not isinstance(key, str) or not isinstance(part, Mapping) or is_foreign_level(key):
                continue
            speaks = FLAG in part or "vocab_size" in part or bool(part.get("model_type"))
            if key in _PARTS or (key.endswith("_config") and speaks):
                below.append((f"{path}.{key}" if path else key, part, depth + 1))
        waiting = below + waiting
    return found


def is_foreign_level(key: str) -> bool:
    """Whether a level of a config, by its key, is of a part without text: `vision_config`."""
    return any(word in key for word in _FOREIGN)


def family_type(level: Mapping[str, Any]) -> str | None:
    """The `model_type` of a level, of its base family where this package wrote the checkpoint; None where absent."""
    kind = level.get("model_type")
    kind = level.get(BASE_TYPE) if kind == OWN_TYPE else kind
    return kind if isinstance(kind, str) else None


def count(value: Any) -> int | None:
    """A positive whole number, else None."""
    return value if type(value) is int and 0 < value < 2**63 else None


def first_count(levels: Iterable[Mapping[str, Any]], *keys: str) -> int | None:
    """The first positive whole number that a level has under one of the keys; None for none."""
    return next((n for level in levels for key in keys if (n := count(level.get(key))) is not None), None)


SCALARS = {  # key: the value at which it does nothing
    # on the looked-up rows: Granite and Falcon-H1; HRM-Text; MiniCPM
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "scale_emb"), 1.0),
    # logits are divided by it in Granite, else multiplied: HyperCLOVA X, Cohere and MPT, Falcon-H1, Grok (remote code)
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale"), 1.0),
    # cap · tanh(logits / cap): Gemma 2; xLSTM; RecurrentGemma
    **dict.fromkeys(("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"), 0.0),
    # hidden states are divided by hidden_size / it (MiniCPM); rows times sqrt(d_model) where true (BART)
    **dict.fromkeys(("dim_model_base", "scale_embedding"), 0.0),
    "scale_decoder_outputs": 0.0,  # T5: hidden states times 1 / sqrt(d_model) where true
    "logits_mup_width_multiplier": 1.0,  # Inkling: hidden states are divided by it
    # rows times sqrt(hidden_size) where true: AFMoE; BigBird
    **dict.fromkeys(("mup_enabled", "rescale_embeddings"), 0.0),
    **{"mup_width_multiplier": 1.0, "mup_embedding_multiplier": 0.0},  # Phi-3-small, remote code
}
WIDTHS = ("word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size")  # of the table


def read_scalars(levels: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the numbers that do something, by dotted key: as written, else by the family's default.

    A width of the table counts where it is not the hidden width.
    """
    found = {}
    for path, level in levels:
        defaults = family(family_type(level)).ends.scalars
        width = next((number(level.get(key)) for key in ("hidden_size", "d_model") if key in level), None)
        for key, nothing in (SCALARS | (dict.fromkeys(WIDTHS, width) if width is not None else {})).items():
            value = number(level.get(key, defaults.get(key)))
            if value is not None and value != nothing:
                found[f"{path}.{key}" if path else key] = value
    return found


def number(value: Any) -> float | None:
    """A finite number, true as 1 and false as 0; None for anything else."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None
    return None
