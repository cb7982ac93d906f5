"""The arithmetic of parameters: what a linear map, a norm or a table holds, and what a token does with it.

A `Part` counts three things, which differ only where a token does not use everything that is stored:

    parameters   what is stored
    multiplied   weights that one token is multiplied by (2 FLOPs each, forward): 0 for norms, biases and lookups
    read         parameters that one token needs: all, but one row of a lookup and the chosen experts alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Every component that a budget may show, in the order in which it is shown.
COMPONENTS = (
    "input_table",
    "output_table",
    "maps",
    "positions",
    "token_types",
    "embedding_norm",
    "attention",
    "cross_attention",
    "mixer",
    "ffn",
    "experts",
    "shared_experts",
    "router",
    "norms",
    "pooler",
    "head_transform",
    "head_bias",
    "other",
)
Parts = Mapping[str, "Part"]


@dataclass(frozen=True)
class Part:
    """Counts of one component (see the module's docstring)."""

    parameters: int = 0
    multiplied: int = 0
    read: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(self.parameters + other.parameters, self.multiplied + other.multiplied, self.read + other.read)

    def times(self, stored: int, used: int | None = None) -> Part:
        """Return `stored` copies of this part, of which a token uses `used` (all, if not said)."""
        used = stored if used is None else used
        return Part(self.parameters * stored, self.multiplied * used, self.read * used)


def linear(width_from: int, width_to: int, bias: bool = False) -> Part:
    """`x @ weightᵀ + bias`, weight [to, from]."""
    weights = width_from * width_to
    whole = weights + (width_to if bias else 0)
    return Part(whole, weights, whole)


def plain(count: int) -> Part:
    """Parameters that are added or scaled by, not multiplied as a matrix: a norm, a bias."""
    return Part(count, 0, count)


def lookup(rows: int, width: int) -> Part:
    """A table [rows, width] of which a token reads one row."""
    return Part(rows * width, 0, width)


# What one norm of width d holds, by kind, as a multiple of d.
NORM_VECTORS = {"none": 0, "rms": 1, "layer": 2, "layer without bias": 1}


def norm(width: int, kind: str = "layer", count: int = 1) -> Part:
    """`count` norms of `width`: RMSNorm, LayerNorm with or without bias, or one without parameters."""
    return plain(NORM_VECTORS[kind] * width * count)


def merged(*several: Parts) -> dict[str, Part]:
    """Sum parts by component; components come in the order of `COMPONENTS`, empty ones are left out."""
    found: dict[str, Part] = {}
    for parts in several:
        for name, part in parts.items():
            found[name] = found[name] + part if name in found else part
    return {name: found[name] for name in COMPONENTS if name in found and found[name].parameters}


def total(parts: Parts) -> Part:
    """Sum over all components."""
    return sum(parts.values(), Part())
