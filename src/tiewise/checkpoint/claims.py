"""What a config says of its vocabulary's ends: the flag at every level, sizes, and numbers that act at the boundary.

A config is a tree: the root, and below it the configs of parts (`text_config`, `decoder`).
Each level may carry the flag, and only the level that the class owning the head reads decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.families import class_ends, family
from tiewise.checkpoint.untrusted import short

FLAG = "tie_word_embeddings"
OWN_TYPE, BASE_TYPE = "tiewise", "base_model_type"  # what checkpoints of this package with factored tables say
OWN_PREFIX = "Tiewise"  # of their class names
MOST_DEPTH = 4
MOST_LEVELS = 64
_FOREIGN = ("vision", "visual", "audio", "image", "speech", "video", "codec", "vq_", "backbone_config", "quantization")
_PARTS = ("decoder", "encoder", "generator", "question_encoder", "llm_config", "language_config")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "model_dim", "dim", "n_embed")
_T5_LIKE = ("mt5", "switch_transformers")  # beside those whose classes tie whatever the flag says


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

    levels: tuple[Claim, ...]  # every level that is a model's config
    # the family ties its input tables whatever the flag says, and reads the flag for something else too
    t5_like: bool = False
    known: bool = False  # the family is in the architecture data
    # the class ties (True) or never ties (False) whatever the flag says; None where the flag rules
    fixed: bool | None = None

    @property
    def deciding(self) -> Claim | None:
        """The level whose flag decides; None without a config.

        Where two levels decide, one that says true is enough: that is how transformers 5 lifts the flag of a
        `text_config` to the root.
        """
        deciding = [claim for claim in self.levels if claim.decides] or list(self.levels[:1])
        return next((claim for claim in deciding if claim.effective), deciding[0] if deciding else None)

    @property
    def tied(self) -> bool | None:
        """Whether the config, read as its class reads it, ties the two ends; None where that cannot be known."""
        if self.fixed is not None:
            return self.fixed
        return None if self.deciding is None else self.deciding.effective


def read_claims(config: Mapping[str, Any] | None) -> Claims:
    """Read every level of a config. Any JSON value is taken; what makes no sense counts as absent."""
    if not isinstance(config, Mapping):
        return Claims(())
    kind = family_type(config)
    ends = class_ends(kind, architecture(config)) or class_ends(kind, None)
    levels = dict(model_levels(config))
    # by the data, else the outermost one that has the flag, else the root
    outermost = next((path for path, level in levels.items() if FLAG in level), "")
    deciding = (outermost,) if ends is None else ends.decides
    levels |= {path: {} for path in deciding if path not in levels}  # absent: the class takes its own default
    known = family(kind)
    nested = known.levels if known is not None else {}
    claims = []
    for path, level in levels.items():
        own = family(family_type(level) or nested.get(path))
        sizes, flag = {} if own is None else own.sizes, level.get(FLAG)
        claim = Claim(
            path,
            model_type=family_type(level),
            written=flag if isinstance(flag, bool) else None,
            default=None if own is None else False if own.loose and FLAG in level and flag is None else own.tie,
            decides=path in deciding,
            vocab_size=_first_count(level, (sizes.get("vocab_size", ""), "vocab_size")),
            hidden_size=_first_count(level, (sizes.get("hidden_size", ""), *_WIDTHS)),
            malformed=short(flag) if FLAG in level and not isinstance(flag, bool) else None,
        )
        claims.append(claim)
    fixed = None if ends is None or not (ends.always or ends.never) else ends.always
    t5_like = kind in _T5_LIKE or (fixed is True and ends is not None and "shared" in ends.inputs)
    return Claims(tuple(claims), t5_like=t5_like, known=known is not None, fixed=fixed)


def architecture(config: Mapping[str, Any]) -> str | None:
    """Name of the class that saved the checkpoint, of its base class where this package did; None where absent."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        return None
    return name.removeprefix(OWN_PREFIX) if config.get("model_type") == OWN_TYPE else name


def model_levels(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(dotted path, mapping) of every level that configures a model of tokens, the root first."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    waiting = [("", config, 0)]
    while waiting and len(found) < MOST_LEVELS:
        path, level, depth = waiting.pop(0)
        found.append((path, level))
        below = []
        for key, part in level.items() if depth < MOST_DEPTH else ():
            if not isinstance(key, str) or not isinstance(part, Mapping) or any(word in key for word in _FOREIGN):
                continue
            speaks = FLAG in part or "vocab_size" in part or bool(part.get("model_type"))
            if key in _PARTS or (key.endswith("_config") and speaks):
                below.append((f"{path}.{key}" if path else key, part, depth + 1))
        waiting = below + waiting
    return found


def _first_count(level: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((n for key in keys if (n := count(level.get(key))) is not None), None)


def family_type(level: Mapping[str, Any]) -> str | None:
    """The `model_type` of a level, of its base family where this package wrote the checkpoint; None where absent."""
    kind = level.get("model_type")
    if kind == OWN_TYPE:
        kind = level.get(BASE_TYPE)
    return kind if isinstance(kind, str) else None


def count(value: Any) -> int | None:
    """A positive whole number, else None."""
    return value if type(value) is int and 0 < value < 2**63 else None


SCALARS = {  # key: the value at which it does nothing
    "embedding_multiplier": 1.0,  # Granite, Falcon-H1: on the looked-up rows
    "embedding_scale": 1.0,  # HRM-Text: on the looked-up rows
    "scale_emb": 1.0,  # MiniCPM: on the looked-up rows
    "logits_scaling": 1.0,  # Granite: logits are divided by it; HyperCLOVA X: multiplied
    "logit_scale": 1.0,  # Cohere: logits are multiplied by it; MPT: the same
    "lm_head_multiplier": 1.0,  # Falcon-H1
    "output_multiplier_scale": 1.0,  # Grok, remote code
    "final_logit_softcapping": 0.0,  # Gemma 2: cap · tanh(logits / cap)
    "output_logit_soft_cap": 0.0,  # xLSTM
    "logits_soft_cap": 0.0,  # RecurrentGemma
    "dim_model_base": 0.0,  # MiniCPM: hidden states are divided by hidden_size / dim_model_base
    "scale_embedding": 0.0,  # BART: rows times sqrt(d_model) where true
    "scale_decoder_outputs": 0.0,  # T5: hidden states times 1 / sqrt(d_model) where true
    "logits_mup_width_multiplier": 1.0,  # Inkling: hidden states are divided by it
    "mup_enabled": 0.0,  # AFMoE: rows times sqrt(hidden_size) where true
    "rescale_embeddings": 0.0,  # BigBird: the same
    "mup_width_multiplier": 1.0,  # Phi-3-small, remote code
    "mup_embedding_multiplier": 0.0,  # Phi-3-small, remote code
}
WIDTHS = ("word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size")  # of the table


def read_scalars(levels: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the numbers that do something, by dotted key: as written, else by the family's default.

    A width of the table counts where it is not the hidden width.
    """
    found = {}
    for path, level in levels:
        known = family(family_type(level))
        defaults = known.scalars if known is not None else {}
        width = next((number(level.get(key)) for key in ("hidden_size", "d_model") if key in level), None)
        for key in (*SCALARS, *WIDTHS):
            value = number(level.get(key, defaults.get(key)))
            idle = width if key in WIDTHS else SCALARS[key]
            if value is not None and value != idle and not (key in WIDTHS and width is None):
                found[f"{path}.{key}" if path else key] = value
    return found


def number(value: Any) -> float | None:
    """A finite number, true as 1 and false as 0; None for anything else."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None
