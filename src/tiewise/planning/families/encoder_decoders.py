"""Encoder-decoders: T5 and its kin, BART and its kin. One table serves encoder, decoder and head where it is tied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tiewise.planning.architecture import Architecture, Ends, Layer, Stack
from tiewise.planning.config import Config
from tiewise.planning.families.shape import Attention, FeedForward, even
from tiewise.planning.parts import Part, lookup, norm, plain

FORCED = (
    "transformers 5.23 builds this class tied whatever the file says; "
    "this file says untied, and its checkpoint may hold a separate head: compare with the choice untied"
)


def _layer(d: int, attention: Attention, ffn: FeedForward, kind: str, cross: bool) -> Layer:
    mixing = {"attention": attention.part(d), "norms": norm(d, kind, 2 if cross else 1)}
    if cross:
        mixing["cross_attention"] = attention.part(d)
    return Layer(mixing, {"ffn": ffn.part(d), "norms": norm(d, kind)})


def _saved(d: int, attention: Attention, ffn: FeedForward, cross: bool) -> int:
    mixing = 2 * d + 4 * attention.heads * attention.head_dim
    return mixing * (2 if cross else 1) + 2 * d + ffn.width * (3 if ffn.gated else 2)


def _t5(c: Config) -> Architecture:
    d, heads = c.size("d_model"), c.size("num_heads")
    attention = Attention(heads, heads, c.size("d_kv"))
    ffn = FeedForward(c.size("d_ff"), gated=c.text("feed_forward_proj").startswith("gated-"))
    bias = plain(c.size("relative_attention_num_buckets") * heads)
    everywhere = c.family == "umt5"
    counts = {"encoder": c.size("num_layers"), "decoder": c.size("num_decoder_layers", c.size("num_layers"))}
    named = c.values.get("architectures")
    if isinstance(named, list) and str(named[:1]).endswith("EncoderModel']"):
        del counts["decoder"]
    stacks = []
    for name, layers in counts.items():
        cross = name == "decoder"
        layer = _layer(d, attention, ffn, "rms", cross)
        if everywhere:
            layer = replace(layer, attention={**layer.attention, "positions": bias})
        around = {"norms": norm(d, "rms"), **({} if everywhere else {"positions": bias})}
        saved = _saved(d, attention, ffn, cross)
        stacks.append(Stack(name, (layer,) * layers, around, cache=attention.cache, saved_per_token=saved))
    head = c.head != "none"
    notes = (FORCED,) if head and c.values.get("tie_word_embeddings") is False else ()
    return Architecture(c.family, d, Ends(c.size("vocab_size"), d, head, head), tuple(stacks), notes=notes)


def _bart(c: Config) -> Architecture:
    d, vocab = c.size("d_model"), c.size("vocab_size")
    learned = c.family in ("bart", "mbart")
    positions = c.size("max_position_embeddings") + (2 if learned else 0)
    stacks = []
    for name in ("encoder", "decoder"):
        heads = c.size(f"{name}_attention_heads")
        attention = Attention(heads, heads, even(d, heads), bias=True, out_bias=True)
        ffn = FeedForward(c.size(f"{name}_ffn_dim"), gated=False, bias=True)
        cross = name == "decoder"
        around: dict[str, Part] = {"positions": lookup(positions, d)}
        if learned:
            around["embedding_norm"] = norm(d)
        if c.family in ("mbart", "pegasus"):
            around["norms"] = norm(d)
        layers = (_layer(d, attention, ffn, "layer", cross),) * c.size(f"{name}_layers")
        saved = _saved(d, attention, ffn, cross)
        stacks.append(Stack(name, layers, around, cache=attention.cache, saved_per_token=saved))
    head = c.head != "none"
    own: dict[str, Part] = {}
    notes: tuple[str, ...] = ()
    rows = vocab
    if c.family == "marian" and not c.flag("share_encoder_decoder_embeddings"):
        rows = c.size("decoder_vocab_size", vocab)
        own["other"] = lookup(vocab, d)
        notes = ("the encoder has a table of its own, counted as other",)
    elif not c.flag("tie_word_embeddings"):
        own["other"] = lookup(vocab, d).times(2, 0)
        notes = ("untied, the class also stores a table of the encoder's and one of the decoder's, counted as other",)
    frozen = 0 if learned else 2 * positions * d
    ends = Ends(rows, d, head and c.flag("tie_word_embeddings"), head)
    return Architecture(c.family, d, ends, tuple(stacks), own, frozen=frozen, notes=notes)


READERS: dict[str, Callable[[Config], Architecture]] = {
    "t5": _t5,
    "mt5": _t5,
    "umt5": _t5,
    "bart": _bart,
    "mbart": _bart,
    "marian": _bart,
    "pegasus": _bart,
}
