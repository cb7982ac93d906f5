"""A config to an `Architecture`: exactly for the families that are known, by a generic formula for others.

architecture = read(json.load(open("config.json")))
architecture.total                       unique parameters
architecture.parameters()                the same by component
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture, Cache, Ends, Layer, Stack
from tiewise.planning.config import MOST, MOST_LAYERS, Config
from tiewise.planning.families import decoders, encoder_decoders, encoders, mixtures
from tiewise.planning.families.recurrent import mamba
from tiewise.planning.families.shape import Attention, FeedForward, even
from tiewise.planning.parts import Part

READERS = {
    **dict.fromkeys(decoders.READERS, decoders.read),
    **dict.fromkeys(mixtures.READERS, mixtures.read),
    **encoders.READERS,
    **encoder_decoders.READERS,
    "mamba": mamba,
}
UNGATED = ("relu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu2")  # others stand behind a gate today


def read(config: Mapping[str, Any]) -> Architecture:
    """Read a config; a nested text config (vision-language models) is read in the outer one's place.

    Raises:
        PlanError: a size is missing or contradicts another.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        inner = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        note = "read at text_config: the language model alone, without the other towers"
        family = nested.get("model_type") or f"{config.get('model_type', 'unknown')}_text"
        found = read({**nested, **inner, "model_type": family})
        return replace(found, notes=(*found.notes, note))
    family = str(config.get("model_type") or "unknown")[:60]
    c = Config(config, family)
    found = READERS[family](c) if family in READERS else _generic(c)
    std, scale = fresh_table(c)
    return replace(found, table_std=std, output_scale=found.signal.output_scale if found.signal else scale)


def fresh_table(c: Config) -> tuple[float, float]:
    """(std of a fresh table's entries, scale at the head) of families that are not followed through their layers.

    T5 draws its table with unit entries and scales hidden states by d^-½, but for the files that say untied (v1.1).
    """
    if c.family in ("t5", "mt5", "umt5"):
        scaled = c.family == "umt5" or (c.family == "t5" and c.values.get("tie_word_embeddings") is not False)
        return c.number("initializer_factor", 1.0), c.size("d_model") ** -0.5 if scaled else 1.0
    key = "initializer_range" if c.get("initializer_range") is not None else "init_std"
    return c.number(key, 0.02), 1.0


def _generic(c: Config) -> Architecture:
    d = c.size("hidden_size") if c.get("hidden_size") is not None else c.size("d_model")
    heads = c.get("num_attention_heads")
    sizes = Sizes(
        vocab=c.size("vocab_size"),
        width=d,
        layers=c.size("num_hidden_layers"),
        heads=c.size("num_attention_heads") if heads is not None else 1,
        kv_heads=c.get("num_key_value_heads"),
        head_dim=c.get("head_dim"),
        ffn=c.get("intermediate_size"),
        gated=(c.text("hidden_act") or c.text("hidden_activation")) not in UNGATED,
    )
    note = f"{c.family} is not a family that tiewise counts exactly: attention and ffn matrices alone are estimated"
    tied = c.get("tie_word_embeddings")
    found = from_sizes(sizes, True if tied is None else bool(tied))
    return replace(found, family=c.family, notes=(note,))


@dataclass(frozen=True)
class Sizes:
    """A decoder by its sizes alone. None: as many key-value heads as heads, D / heads, and an ffn of 4 D."""

    vocab: int
    width: int
    layers: int
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = MOST_LAYERS if name == "layers" else MOST
            if name != "gated" and value is not None and not (isinstance(value, int) and 1 <= value <= most):
                raise PlanError(f"{name} = {str(value)[:40]}", f"{name} must be a whole number from 1 to {most:,}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            what = f"{self.heads} heads cannot be grouped over {self.kv_heads} key-value heads"
            raise PlanError(what, "the key-value heads must divide the heads")


def from_sizes(sizes: Sizes, tied: bool = True) -> Architecture:
    """Build the generic decoder: four attention matrices and two of the ffn (three if gated), no biases, no norms.

    With full heads and an ffn of 4 D that is 12 D² per layer, the figure of the textbooks.
    """
    head_dim = sizes.head_dim or even(sizes.width, sizes.heads)
    attention = Attention(sizes.heads, sizes.kv_heads or sizes.heads, head_dim)
    ffn = FeedForward(sizes.ffn or 4 * sizes.width, sizes.gated)
    parts: tuple[dict[str, Part], dict[str, Part]]
    parts = {"attention": attention.part(sizes.width)}, {"ffn": ffn.part(sizes.width)}
    saved = 8 * sizes.width + ffn.width * (3 if sizes.gated else 2)
    cache = Cache(sizes.heads, head_dim, attention.kv_heads)
    stack = Stack("decoder", (Layer(*parts),) * sizes.layers, cache=cache, saved_per_token=saved)
    ends = Ends(sizes.vocab, sizes.width, tied)
    return Architecture("generic decoder", sizes.width, ends, (stack,), estimated=True)
