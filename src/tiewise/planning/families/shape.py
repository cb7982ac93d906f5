"""What all decoders have in common: sizes and switches that describe one layer, and the architecture they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiewise.core.errors import PlanError
from tiewise.core.mean_field import Signal
from tiewise.planning.architecture import Architecture, Cache, Ends, Layer, Stack
from tiewise.planning.config import Config
from tiewise.planning.parts import Part, Parts, linear, lookup, norm, plain


@dataclass(frozen=True)
class Attention:
    """Query, key, value and output maps; `norms` counts what norms of queries and keys hold, or sinks."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # of query, key and value
    out_bias: bool = False
    norms: int = 0

    def part(self, width: int) -> Part:
        """Parameters in a model of `width`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        maps = linear(width, queries, self.bias) + linear(width, keys, self.bias).times(2)
        return maps + linear(queries, width, self.out_bias) + plain(self.norms)

    @property
    def cache(self) -> Cache:
        """Keys and values per token."""
        return Cache(self.heads, self.head_dim, self.kv_heads)


@dataclass(frozen=True)
class FeedForward:
    """Two maps with an activation between, or three with a gate."""

    width: int
    gated: bool = True
    bias: bool = False

    def part(self, d: int) -> Part:
        """Parameters in a model of width `d`."""
        return linear(d, self.width, self.bias).times(2 if self.gated else 1) + linear(self.width, d, self.bias)


@dataclass(frozen=True)
class LatentAttention:
    """Keys and values through a narrow latent state (DeepSeek); queries too, where `q_rank` is not 0.

    A head's keys are `nope` wide and `rope` more that all heads share; its values `value` wide.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool = False

    def part(self, width: int) -> Part:
        """Parameters in a model of `width`."""
        queries = self.heads * (self.nope + self.rope)
        down = linear(width, self.kv_rank + self.rope, self.bias) + plain(self.kv_rank)
        up = linear(self.kv_rank, self.heads * (self.nope + self.value))
        out = linear(self.heads * self.value, width, self.bias)
        if not self.q_rank:
            return down + up + out + linear(width, queries)
        narrowed = linear(width, self.q_rank, self.bias) + plain(self.q_rank) + linear(self.q_rank, queries)
        return down + up + out + narrowed

    @property
    def kv_heads(self) -> int:
        """Every head has keys and values of its own."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Mean width of keys and values, which is what scores and averages cost."""
        return (self.nope + self.rope + self.value) // 2

    @property
    def cache(self) -> Cache:
        """The latent state and the shared part of the keys."""
        return Cache(self.heads, self.head_dim, self.heads, latent=self.kv_rank + self.rope)


@dataclass(frozen=True)
class Experts:
    """A router and `count` experts, of which a token uses `chosen`; perhaps a shared expert, perhaps behind a gate."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False

    def parts(self, d: int) -> Parts:
        """Parameters in a model of width `d`."""
        expert = FeedForward(self.width, bias=self.bias).part(d)
        router = linear(d, self.count, self.bias)
        parts = {
            "experts": expert.times(self.count, min(self.chosen, self.count)),
            "router": router + linear(d, 1) if self.shared_gate else router,
        }
        if self.shared_width:
            parts["shared_experts"] = FeedForward(self.shared_width, bias=self.shared_bias).part(d)
        return parts


@dataclass(frozen=True)
class Decoder:
    """A decoder's shape. Norm counts say which sublayer each norm belongs to; `own_norms` are read by both."""

    config: Config
    width: int
    layers: int
    attention: Attention | LatentAttention
    ffn: FeedForward
    norm: str = "rms"
    attention_norms: int = 1
    ffn_norms: int = 1
    own_norms: int = 0
    final_norm: bool = True
    positions: int = 0
    embedding_norm: bool = False
    head_bias: bool = False
    experts: Experts | None = None
    dense_layers: frozenset[int] = field(default_factory=frozenset)  # layers without experts, where there are any
    table_width: int | None = None  # another than the model's: linear maps without bias stand between (OPT-350M)
    signal: Signal | None = None

    def layer(self, index: int) -> Layer:
        """One layer's parts."""
        d = self.width
        dense: Parts = {"ffn": self.ffn.part(d)}
        forward = dense if self.experts is None or index in self.dense_layers else self.experts.parts(d)
        return Layer(
            {"attention": self.attention.part(d), "norms": norm(d, self.norm, self.attention_norms)},
            {**forward, "norms": norm(d, self.norm, self.ffn_norms)},
            {"norms": norm(d, self.norm, self.own_norms)} if self.own_norms else {},
        )

    def saved_per_token(self) -> int:
        """Values per token and layer kept for the backward pass: inputs of products, of norms and activations."""
        experts, a = self.experts, self.attention
        middle = self.ffn.width if experts is None else experts.width * experts.chosen + experts.shared_width
        return 4 * self.width + 2 * (a.heads + a.kv_heads) * a.head_dim + middle * (3 if self.ffn.gated else 2)

    def architecture(self) -> Architecture:
        """Put layers and ends together."""
        c, d = self.config, self.width
        around: dict[str, Part] = {}
        if self.positions:
            around["positions"] = lookup(self.positions, d)
        if self.embedding_norm:
            around["embedding_norm"] = norm(d, self.norm)
        if self.final_norm:
            around["norms"] = norm(d, self.norm)
        stack = Stack(
            "decoder",
            tuple(map(self.layer, range(self.layers))),
            around,
            cache=self.attention.cache,
            saved_per_token=self.saved_per_token(),
        )
        width = self.table_width or d
        maps = linear(width, d).times(2) if width != d else Part()
        has_head = c.head != "none"
        tied = has_head and c.flag("tie_word_embeddings")
        ends = Ends(c.size("vocab_size"), width, tied, has_head, maps=maps, head_biases=int(self.head_bias))
        return Architecture(c.family, d, ends, (stack,), signal=self.signal)


def heads_of(c: Config, width: int) -> tuple[int, int, int]:
    """(heads, key-value heads, head width) by the usual keys; a head's width defaults to width / heads.

    Raises:
        PlanError: the sizes contradict each other.
    """
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", heads)
    if heads % kv_heads:
        what = f"{heads} attention heads cannot be grouped over num_key_value_heads = {kv_heads}"
        raise PlanError(what, "the key-value heads must divide the heads")
    given = c.get("head_dim") is not None
    return heads, kv_heads, c.size("head_dim") if given else even(width, heads)


def even(width: int, heads: int) -> int:
    """Return width / heads.

    Raises:
        PlanError: it is not whole.
    """
    if width % heads:
        raise PlanError(f"hidden_size {width} is not a multiple of {heads} heads", "give sizes that divide")
    return width // heads
