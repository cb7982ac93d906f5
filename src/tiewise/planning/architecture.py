"""What a model is made of, as far as a budget needs it: tables, stacks of layers, and what stands around them.

Architecture    ends (tables and their maps) + stacks + what belongs to the whole (pooler, head transform)
Stack           L layers applied in a row, with what belongs to them as a whole (positions, final norm)
Layer           attention and ffn, each with its norms, and what belongs to neither alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiewise.core.errors import SpecError
from tiewise.core.mean_field import Signal
from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.parts import Part, Parts, merged, total


@dataclass(frozen=True)
class Layer:
    """One layer's parts by sublayer; the attention's dictionary holds its norms too, and cross-attention."""

    attention: Parts
    ffn: Parts
    own: Parts = field(default_factory=dict)  # what both sublayers read: the one norm of a parallel block

    @property
    def parts(self) -> dict[str, Part]:
        """All parts by component."""
        return merged(self.attention, self.ffn, self.own)


@dataclass(frozen=True)
class Cache:
    """What attention keeps per token and layer, and how wide its scores are."""

    heads: int = 0
    head_dim: int = 0
    kv_heads: int = 0
    latent: int = 0  # values kept per token in place of keys and values (DeepSeek)
    state: int = 0  # values of a recurrent state per layer, whatever the length (Mamba)

    @property
    def values_per_token(self) -> int:
        """Values kept for one token of one layer."""
        return self.latent or 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Stack:
    """Layers in the order in which they are applied; `sharing` says which of them are one in the stored model."""

    name: str
    layers: tuple[Layer, ...]
    around: Parts = field(default_factory=dict)
    sharing: SharingSpec = field(default_factory=SharingSpec)
    cache: Cache = field(default_factory=Cache)
    saved_per_token: int = 0  # values that one token of one layer leaves for the backward pass (an estimate)

    def stored(self, sharing: SharingSpec) -> dict[str, Part]:
        """Unique parts of the stack under `sharing`; layers of different shape share among their own kind.

        Raises:
            SpecError: more groups than layers, or low-rank differences, whose size depends on how matrices are fused.
        """
        if sharing.rank:
            what = f"{sharing}: low-rank differences are counted on a model, not from its config"
            raise SpecError(what, "plan without the rank; share_layers(model, …).differences counts them")
        kept: list[Parts] = [self.around]
        seen: set[tuple[str, int, tuple[tuple[str, Part], ...]]] = set()
        for index, layer in enumerate(self.layers):
            group = sharing.group_of(index, len(self.layers))
            for name, parts in (("attention", layer.attention), ("ffn", layer.ffn), ("own", layer.own)):
                if sharing.kind in ("all", name):
                    key = (name, group, tuple(parts.items()))
                    if key in seen:
                        continue
                    seen.add(key)
                kept.append(parts)
        return merged(*kept)

    def applied(self) -> Part:
        """Sum over every application of every layer: what a token is multiplied by does not know of sharing."""
        return total(self.around) + sum((total(layer.parts) for layer in self.layers), Part())


@dataclass(frozen=True)
class Ends:
    """The tables as the model itself has them: `vocab` rows of `width`, and what the head adds."""

    vocab: int
    width: int
    tied: bool
    head: bool = True
    maps: Part = field(default_factory=Part)
    head_biases: int = 0  # vectors of V at the head; BERT's untied class stores two and uses one


@dataclass(frozen=True)
class Architecture:
    """A model as its config describes it.

    `estimated` marks counts from a generic formula; `notes` say what a reader should know before believing a number.
    """

    family: str
    width: int
    ends: Ends
    stacks: tuple[Stack, ...]
    around: Parts = field(default_factory=dict)  # pooler, head transform, heads of other tasks
    signal: Signal | None = None
    table_std: float = 0.02  # of a fresh table's entries
    output_scale: float = 1.0  # what the class multiplies hidden states or logits by at its head
    frozen: int = 0  # parameters that are never trained: sinusoidal positions stored as tables
    estimated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sharing(self) -> SharingSpec:
        """How the model itself shares its layers."""
        return self.stacks[0].sharing if self.stacks else SharingSpec()

    @property
    def layers(self) -> int:
        """Layers applied, over all stacks."""
        return sum(len(stack.layers) for stack in self.stacks)

    def body(self, sharing: SharingSpec | None = None) -> dict[str, Part]:
        """Unique parts of everything but tables, their maps and the head's bias, under `sharing` (None: its own)."""
        return merged(self.around, *(stack.stored(sharing or stack.sharing) for stack in self.stacks))

    def parameters(self) -> Mapping[str, int]:
        """Unique parameters by component of the model as it is; a tied table is counted once, at the input."""
        ends = self.ends
        tables = {"input_table": Part(ends.vocab * ends.width), "maps": ends.maps}
        if ends.head and not ends.tied:
            tables["output_table"] = Part(ends.vocab * ends.width)
        if ends.head:
            tables["head_bias"] = Part(ends.vocab * ends.head_biases)
        return {name: part.parameters for name, part in merged(tables, self.body()).items()}

    @property
    def total(self) -> int:
        """Unique parameters."""
        return sum(self.parameters().values())
