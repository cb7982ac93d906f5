"""A Hugging Face config as a family's class would complete it: the file's values, then the class's own defaults.

`families/defaults.json` records, per model type, the class defaults of transformers 5.23 for the keys that are read
here, and the class's other names for them (`n_embd` is GPT-2's `hidden_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.core.packaged import packaged_json

# Beyond these no model is meant; a plan of more layers would take minutes.
MOST, MOST_LAYERS = 10**12, 10_000


@cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Per model type: `defaults` (key -> value) and `names` (usual name -> the class's own)."""
    found: dict[str, dict[str, dict[str, Any]]] = packaged_json("planning/families/defaults.json")
    return found


class Config:
    """Values of one model's config, read by the usual names."""

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        known = recorded().get(family, {"defaults": {}, "names": {}})
        self.values, self.family = values, family
        self.defaults, self.names = known["defaults"], known["names"]

    def get(self, key: str) -> Any:
        """Value of `key`, under its usual or the family's own name; None where neither file nor class has one."""
        own = self.names.get(key, key)
        for found in (self.values, self.defaults):
            for name in (own, key):
                if name in found:
                    return found[name]
        return None

    def flag(self, key: str) -> bool:
        """Whether a switch is on; an absent one is off."""
        return bool(self.get(key))

    def size(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Read a whole number; `otherwise` where the config says null.

        Raises:
            PlanError: the key is missing or not a whole number of `least` or more.
        """
        value = self.get(key)
        if value is None:
            value = otherwise
        if value is None:
            what = f"the config of {self.family} has no {key}"
            raise PlanError(what, f"add {key} to the config, or plan from sizes")
        most = MOST_LAYERS if "layer" in key else MOST
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            what = f"{key} = {str(value)[:40]!r} in the config of {self.family}"
            raise PlanError(what, f"{key} must be a whole number from {least} to {most:,}")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Read a number above zero; `otherwise` where the config says null.

        Raises:
            PlanError: it is missing or not such a number.
        """
        value = self.get(key)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            what = f"{key} = {str(value)[:40]!r} in the config of {self.family}"
            raise PlanError(what, f"{key} must be a number above zero")
        return float(value)

    def indices(self, key: str) -> list[int]:
        """Read a list of layers; empty where the config says null.

        Raises:
            PlanError: it is no list.
        """
        value = self.get(key) or []
        if not isinstance(value, list):
            raise PlanError(f"{key} = {str(value)[:40]!r} in the config of {self.family}", f"{key} must be a list")
        return [each for each in value if isinstance(each, int)]

    def text(self, key: str) -> str:
        """Read a string; an absent one is empty."""
        value = self.get(key)
        return value if isinstance(value, str) else ""

    @property
    def head(self) -> str:
        """Which heads the saved class carries: `lm`, `pretraining`, or `none` (the bare model, other tasks).

        Without `architectures` the family's language model is meant.
        """
        named = self.values.get("architectures")
        name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "ForCausalLM"
        if name.endswith("ForPreTraining"):
            return "pretraining"
        language = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "MTModel")
        return "lm" if name.endswith(language) else "none"
