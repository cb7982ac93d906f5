"""A Hugging Face config, completed with the defaults of the family's class.

The record of a family contains the class defaults of transformers 5.23 for the keys that are read here, and the
class's other names for them (`n_embd` is GPT-2's `hidden_size`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint import families
from tiewise.core.errors import PlanError, to_printable
from tiewise.core.written_options import written_option
from tiewise.planning.architecture import TokenTables

# Larger sizes are refused as mistakes; a plan of 10,000 layers takes several seconds.
MOST, MOST_LAYERS = 10**12, 2_000
GENERIC, UNNAMED = "generic decoder", "unknown"  # family names for bare sizes, and for a config without model_type
NEEDED_SIZES = ("vocab", "width", "layers")  # sizes that a plan without a config needs
# Keys that are no target of an alias in their class: a value under the usual key does not replace theirs.
WITHOUT_ALIAS = ("n_embed", "n_inner", "ffn_dim")
LANGUAGE_HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "MTModel")


def written_sizes() -> str:
    """Return the sizes that a plan without a config needs, as the reader writes them."""
    first, second, third = map(written_option, NEEDED_SIZES)
    return f"{first}, {second} and {third}"


def is_integer(value: object) -> bool:
    """Return whether a value is an integer. JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def saved_class(values: Mapping[str, Any]) -> str:
    """Return the class name in a config's `architectures`; "" if it names none."""
    match values.get("architectures"):
        case [str(name), *_]:
            return to_printable(name)
    return ""


class Config:
    """Values of one model's config, read by the usual key names.

    A method raises `PlanError` if a required value is missing or invalid.
    """

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        self.values, self.family = values, family
        self.record = families.family("" if family == UNNAMED else family)
        self.defaults, self.names = self.record.keys.defaults, self.record.keys.names

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of `key`, under its usual or the family's name.

        `otherwise` is returned for null and for a missing key. If a file has both names, the class of transformers sets
        its attribute to the value under the usual name.
        """
        attribute = self.names.get(key, key)
        value = self._first_value(*self._aliases(attribute), attribute, key)
        return otherwise if value is None else value

    def _aliases(self, attribute: str) -> list[str]:
        """Return the file's other names of an attribute of the class, the last one first."""
        if attribute in WITHOUT_ALIAS:
            return []
        aliases = [name for name in self.values if self.names.get(name) == attribute]
        return aliases[::-1]

    def knows(self, key: str) -> bool:
        """Return whether the class reads a key. True for a family without data on its keys."""
        has_data = self.record.written_keys is None and bool(self.defaults)
        return not has_data or key in self.defaults or key in self.names

    def _first_value(self, *names: str) -> Any:
        """Return the value of the first name that the file has, else that the defaults have.

        A null counts as a value.
        """
        for values in (self.values, self.defaults):
            for name in names:
                if name in values:
                    return values[name]
        return None

    @property
    def width(self) -> int:
        """Width D of hidden states, which configs call hidden_size or d_model."""
        if self.get("hidden_size") is None:
            return self.size("d_model")
        return self.size("hidden_size")

    def flag(self, key: bool | str) -> bool:
        """Return whether a switch is on; a missing key is off. A bool is returned as it is."""
        return key if isinstance(key, bool) else bool(self.get(key))

    def text(self, key: str) -> str:
        """Return a string; "" if the key is missing."""
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def size(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`; `otherwise` if the config says null."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise self._missing(key)
        return self.require_size(key, value, least)

    def require_size(self, key: str, value: Any, least: int = 1) -> int:
        """Return a value of `key`. Raise PlanError unless it is a whole number of at least `least`."""
        counts_layers = "layer" in key and "per_layer" not in key
        most = MOST_LAYERS if counts_layers else MOST
        if not is_integer(value) or not least <= value <= most:
            raise self._refused(key, value, f"a whole number from {least} to {most:,}")
        size: int = value  # not converted by int(): `resized` traces sizes with a subclass of int
        return size

    def number(self, key: str, otherwise: float | None = None) -> float:
        """Return a number above zero; `otherwise` if the config says null."""
        value = self.get(key, otherwise)
        is_number = isinstance(value, float) or is_integer(value)
        if not is_number or not 0 < value <= MOST:
            raise self._refused(key, value, "a number above zero")
        return float(value)

    def indices(self, key: str) -> list[int]:
        """Return a list of layer indices; empty if the config says null."""
        value = self.get(key) or []
        if not isinstance(value, list):
            raise self._refused(key, value, "a list")
        return [each for each in value if isinstance(each, int)]

    def _missing(self, key: str) -> PlanError:
        """Return the error for a size that neither the config nor the family's class has."""
        remedy = f"add {key} to the config, or plan from sizes"
        if self.record.has_facts or self.family == GENERIC:
            return PlanError(f"the config of {self.family} has no {key}", remedy)
        usual = "hidden_size or d_model" if key == "d_model" else key
        return PlanError(f"{self.record.unknown_message}: the config has no {usual}", f"{remedy}: {written_sizes()}")

    def _refused(self, key: str, value: Any, must: str) -> PlanError:
        """Return the error for a value that is not what the key `must` be."""
        return PlanError(f"{key} = {str(value)[:40]!r} in the config of {self.family}", f"{key} must be {must}")

    @property
    def class_name(self) -> str:
        """Name of the saved class. Without `architectures` it is a causal language model."""
        return saved_class(self.values) or "ForCausalLM"

    @property
    def head(self) -> str:
        """Heads of the class: `lm`, `pretraining`, or `none` (without a head, or for other tasks)."""
        if self.class_name.endswith("ForPreTraining"):
            return "pretraining"
        if self.class_name.endswith(LANGUAGE_HEADS):
            return "lm"
        return "none"

    def token_tables(self, width: int, head: bool | None = None, **more: Any) -> TokenTables:
        """Return the tables of [vocab_size, `width`].

        They are tied if the config says so and the class has a `head`.
        """
        if head is None:
            head = self.head != "none"
        tied = head and self.flag("tie_word_embeddings")
        return TokenTables(self.size("vocab_size"), width, tied, head, **more)
