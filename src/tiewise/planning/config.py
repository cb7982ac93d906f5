"""A Hugging Face config as a family's class would complete it: the file's values, then the class's own defaults.

The record of a family has the class defaults of transformers 5.23 for the keys that are read here, and the class's
other names for them (`n_embd` is GPT-2's `hidden_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint import families
from tiewise.core.errors import PlanError
from tiewise.planning.architecture import TokenTables

# Beyond these no model is meant; a plan of more layers would take minutes.
MOST, MOST_LAYERS = 10**12, 10_000
GENERIC, UNNAMED = "generic decoder", "unknown"  # families of sizes alone, and of a config without model_type
LANGUAGE_HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "MTModel")


class Config:
    """Values of one model's config, read by the usual names; each reader raises `PlanError` for what cannot be."""

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        self.values, self.family = values, family
        self.record = families.family("" if family == UNNAMED else family)
        self.defaults, self.names = self.record.keys.defaults, self.record.keys.names

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Value of `key`, under its usual or the family's own name; `otherwise` for null, and where there is none."""
        places = ((found, name) for found in (self.values, self.defaults) for name in (self.names.get(key, key), key))
        value = next((found[name] for found, name in places if name in found), None)
        return otherwise if value is None else value

    def flag(self, key: bool | str) -> bool:
        """Whether a switch is on, which may be known without the config; an absent one is off."""
        return key if isinstance(key, bool) else bool(self.get(key))

    def text(self, key: str) -> str:
        """Read a string; an absent one is empty."""
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def size(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Read a whole number of `least` or more; `otherwise` where the config says null."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise self._missing(key)
        most = MOST_LAYERS if "layer" in key and "per_layer" not in key else MOST
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refused(key, value, f"a whole number from {least} to {most:,}")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Read a number above zero; `otherwise` where the config says null."""
        value = self.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise self._refused(key, value, "a number above zero")
        return float(value)

    def indices(self, key: str) -> list[int]:
        """Read a list of layers; empty where the config says null."""
        value = self.get(key) or []
        if not isinstance(value, list):
            raise self._refused(key, value, "a list")
        return [each for each in value if isinstance(each, int)]

    def _missing(self, key: str) -> PlanError:
        """Return the error for a size that neither the config nor the family's class has."""
        fix = f"add {key} to the config, or plan from sizes"
        if self.record.is_known or self.family == GENERIC:
            return PlanError(f"the config of {self.family} has no {key}", fix)
        usual = "hidden_size or d_model" if key == "d_model" else key
        return PlanError(f"{self.record.unknown}: the config has no {usual}", f"{fix}: --vocab, --width and --layers")

    def _refused(self, key: str, value: Any, must: str) -> PlanError:
        return PlanError(f"{key} = {str(value)[:40]!r} in the config of {self.family}", f"{key} must be {must}")

    @property
    def class_name(self) -> str:
        """The saved class; without `architectures` the family's language model is meant."""
        named = self.values.get("architectures")
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "ForCausalLM"

    @property
    def head(self) -> str:
        """Which heads the class carries: `lm`, `pretraining`, or `none` (the bare model, other tasks)."""
        if self.class_name.endswith("ForPreTraining"):
            return "pretraining"
        return "lm" if self.class_name.endswith(LANGUAGE_HEADS) else "none"

    def token_tables(self, width: int, head: bool | None = None, **more: Any) -> TokenTables:
        """Return the tables of [vocab_size, `width`], tied as the config says, where the class has a `head`."""
        head = self.head != "none" if head is None else head
        return TokenTables(self.size("vocab_size"), width, head and self.flag("tie_word_embeddings"), head, **more)
