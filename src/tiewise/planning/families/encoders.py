"""Encoders with a masked-language-model head: BERT and its kin, ELECTRA, ALBERT, ModernBERT.

The head transforms the hidden state (dense, activation, norm) before the table; `ForPreTraining` adds what it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.architecture import Architecture, Ends, Layer, Stack
from tiewise.planning.config import Config
from tiewise.planning.families.shape import Attention, FeedForward, even
from tiewise.planning.parts import Part, Parts, linear, lookup, norm


@dataclass(frozen=True)
class Encoder:
    """Sizes and heads of a post-norm encoder. `table` is the embedding's width."""

    config: Config
    width: int
    layers: int
    heads: int
    ffn: int
    token_types: int
    table: int
    pooler: bool = False
    sentence_head: bool = False  # two classes on the pooled state (BERT's NSP, ALBERT's SOP)
    inner: int = 1  # layers of one group, applied together (ALBERT)
    sharing: SharingSpec = field(default_factory=SharingSpec)

    def attention(self) -> Attention:
        """Attention with biases throughout."""
        return Attention(self.heads, self.heads, even(self.width, self.heads), bias=True, out_bias=True)

    def layer(self) -> Layer:
        """Attention and ffn, a norm after each."""
        d, n = self.width, self.inner
        one = norm(d).times(n)
        ffn = FeedForward(self.ffn, gated=False, bias=True).part(d).times(n)
        return Layer({"attention": self.attention().part(d).times(n), "norms": one}, {"ffn": ffn, "norms": one})

    def architecture(self) -> Architecture:
        """Put layers, embeddings and heads together."""
        c, d, e = self.config, self.width, self.table
        embeddings: dict[str, Part] = {
            "positions": lookup(c.size("max_position_embeddings"), e),
            "embedding_norm": norm(e),
        }
        if self.token_types:
            embeddings["token_types"] = lookup(self.token_types, e)
        saved = self.inner * (8 * d + 2 * self.ffn)
        layers = (self.layer(),) * self.layers
        stack = Stack("encoder", layers, embeddings, self.sharing, self.attention().cache, saved)
        mapped = e != d or c.family == "albert"  # ALBERT maps even where the widths are equal
        maps = linear(e, d, bias=True) if mapped else Part()
        has_head = c.head == "lm" or (c.head == "pretraining" and c.family in ("bert", "albert"))
        tied = has_head and c.flag("tie_word_embeddings")
        unused = c.family in ("bert", "roberta") and not tied  # untied, the class keeps the bias twice
        biases = (2 if unused else 1) if has_head else 0
        ends = Ends(c.size("vocab_size"), e, tied, has_head, maps=maps, head_biases=biases)
        return Architecture(c.family, d, ends, (stack,), self.around(has_head))

    def around(self, has_head: bool) -> Parts:
        """Pooler, head transform and the heads of other tasks."""
        d, e = self.width, self.table
        parts: dict[str, Part] = {}
        if self.pooler:
            parts["pooler"] = linear(d, d, True)
        if has_head:
            parts["head_transform"] = linear(d, e, True) + norm(e)
        if self.sentence_head:
            parts["other"] = linear(d, 2, True)
        elif self.config.family == "electra" and self.config.head == "pretraining":
            parts["other"] = linear(d, d, True) + linear(d, 1, True)  # the discriminator's head
        return parts


def _bert(c: Config) -> Architecture:
    d, head = c.size("hidden_size"), c.head
    return Encoder(
        c,
        d,
        c.size("num_hidden_layers"),
        c.size("num_attention_heads"),
        c.size("intermediate_size"),
        c.size("type_vocab_size"),
        d,
        pooler=head == "none" or (head == "pretraining" and c.family == "bert"),
        sentence_head=head == "pretraining" and c.family == "bert",
    ).architecture()


def _distilbert(c: Config) -> Architecture:
    d = c.size("hidden_size")
    layers, heads = c.size("num_hidden_layers"), c.size("num_attention_heads")
    return Encoder(c, d, layers, heads, c.size("hidden_dim"), 0, d).architecture()


def _electra(c: Config) -> Architecture:
    d, layers, heads = c.size("hidden_size"), c.size("num_hidden_layers"), c.size("num_attention_heads")
    ffn, types, table = c.size("intermediate_size"), c.size("type_vocab_size"), c.size("embedding_size")
    return Encoder(c, d, layers, heads, ffn, types, table).architecture()


def _albert(c: Config) -> Architecture:
    d, layers, heads = c.size("hidden_size"), c.size("num_hidden_layers"), c.size("num_attention_heads")
    ffn, types, table = c.size("intermediate_size"), c.size("type_vocab_size"), c.size("embedding_size")
    sharing = SharingSpec("all", c.size("num_hidden_groups"))
    heads_on_top = {"pooler": c.head != "lm", "sentence_head": c.head == "pretraining"}
    inner = c.size("inner_group_num")
    return Encoder(c, d, layers, heads, ffn, types, table, inner=inner, sharing=sharing, **heads_on_top).architecture()


def _modernbert(c: Config) -> Architecture:
    d, heads, layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    kind = "layer" if c.flag("norm_bias") else "layer without bias"
    bias = c.flag("attention_bias")
    attention = Attention(heads, heads, even(d, heads), bias, bias)
    forward = FeedForward(c.size("intermediate_size"), gated=True, bias=c.flag("mlp_bias"))
    ffn = {"ffn": forward.part(d), "norms": norm(d, kind)}
    first = Layer({"attention": attention.part(d)}, ffn)  # its input is the embedding's own norm
    rest = Layer({"attention": attention.part(d), "norms": norm(d, kind)}, ffn)
    saved = 8 * d + 3 * forward.width
    outside = {"embedding_norm": norm(d, kind), "norms": norm(d, kind)}
    stack = Stack("encoder", (first, *[rest] * (layers - 1)), outside, cache=attention.cache, saved_per_token=saved)
    has_head = c.head == "lm"
    around = {"head_transform": linear(d, d, c.flag("classifier_bias")) + norm(d, kind)} if has_head else {}
    tied = has_head and c.flag("tie_word_embeddings")
    ends = Ends(c.size("vocab_size"), d, tied, has_head, head_biases=int(has_head and c.flag("decoder_bias")))
    return Architecture(c.family, d, ends, (stack,), around)


READERS: dict[str, Callable[[Config], Architecture]] = {
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "electra": _electra,
    "albert": _albert,
    "modernbert": _modernbert,
}
