"""Encoders with a masked-language-model head (BERT and its kin), and encoder-decoders (T5 and BART and theirs).

An encoder's head transforms the hidden state (dense, activation, norm) before the table, and `ForPreTraining` adds what
it adds. In an encoder-decoder one table serves encoder, decoder and head where it is tied.
"""

from __future__ import annotations

from dataclasses import replace

from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Heads,
    LayerCounts,
    TokenTables,
    elementwise,
    even,
    feed_forward,
    linear,
    lookup,
    norm,
)
from tiewise.planning.config import Config

FORCED = (
    "transformers 5.23 builds this class tied whatever the file says; "
    "this file says untied, and its checkpoint may hold a separate head: compare with the choice untied"
)


def _bert(c: Config) -> Architecture:
    """Read post-norm encoders: BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    ffn = c.size("hidden_dim" if c.family == "distilbert" else "intermediate_size")
    types = 0 if c.family == "distilbert" else c.size("type_vocab_size")
    width = c.size("embedding_size") if c.family in ("electra", "albert") else d
    albert, pretraining = c.family == "albert", c.head == "pretraining"
    inner = c.size("inner_group_num") if albert else 1  # layers of one group, applied together
    heads = Heads(count, even(d, count), count)
    one = norm(d).times(inner)
    layer = LayerCounts(
        {"attention": heads.maps(d, bias=True, out_bias=True).times(inner), "norms": one},
        {"ffn": feed_forward(d, ffn, gated=False, bias=True).times(inner), "norms": one},
    )
    embeddings = {"positions": lookup(c.size("max_position_embeddings"), width), "embedding_norm": norm(width)}
    stack = AppliedLayers(
        "encoder",
        (layer,) * c.size("num_hidden_layers"),
        {**embeddings, "token_types": lookup(types, width)},
        heads,
        inner * (8 * d + 2 * ffn),
        SharingSpec("all", c.size("num_hidden_groups")) if albert else SharingSpec(),
    )
    judges_pairs = pretraining and c.family in ("bert", "albert")  # two classes on the pooled state: NSP, SOP
    has_head = c.head == "lm" or judges_pairs
    around: dict[str, Count] = {}
    if judges_pairs or (c.head == "none" and c.family in ("bert", "roberta", "albert")):
        around["pooler"] = linear(d, d, True)
    if has_head:
        around["head_transform"] = linear(d, width, True) + norm(width)
    if judges_pairs:
        around["other"] = linear(d, 2, True)
    elif pretraining and c.family == "electra":
        around["other"] = linear(d, d, True) + linear(d, 1, True)  # the discriminator's head
    maps = linear(width, d, bias=True) if width != d or albert else Count()  # ALBERT maps even where widths are equal
    ends = c.token_tables(width, has_head, maps=maps, head_biases=int(has_head))
    if has_head and not ends.tied and c.family in ("bert", "roberta"):
        ends = replace(ends, head_biases=2)  # untied, the class keeps the bias twice
    return Architecture(c.family, d, ends, (stack,), around)


def _modernbert(c: Config) -> Architecture:
    d, count, ffn = c.size("hidden_size"), c.size("num_attention_heads"), c.size("intermediate_size")
    kind, has_head = "layer" if c.flag("norm_bias") else "layer without bias", c.head == "lm"
    bias, heads = c.flag("attention_bias"), Heads(count, even(d, count), count)
    maps, one = heads.maps(d, bias, bias), norm(d, kind)
    forward = {"ffn": feed_forward(d, ffn, bias=c.flag("mlp_bias")), "norms": one}
    first = LayerCounts({"attention": maps}, forward)  # its input is the embedding's own norm
    rest = LayerCounts({"attention": maps, "norms": one}, forward)
    layers = (first, *[rest] * (c.size("num_hidden_layers") - 1))
    stack = AppliedLayers("encoder", layers, {"embedding_norm": one, "norms": one}, heads, 8 * d + 3 * ffn)
    around = {"head_transform": linear(d, d, c.flag("classifier_bias")) + one} if has_head else {}
    ends = c.token_tables(d, has_head, head_biases=int(has_head and c.flag("decoder_bias")))
    return Architecture(c.family, d, ends, (stack,), around)


def _side(
    name: str, d: int, heads: Heads, ffn: int, gated: bool, kind: str, biases: bool, **more: Count
) -> tuple[LayerCounts, int]:
    """(one layer of an encoder-decoder's side, the values of it that a token keeps for the backward pass)."""
    maps, times = heads.maps(d, biases, biases), 2 if name == "decoder" else 1  # a decoder attends to the source too
    mixing = {"attention": maps, "cross_attention": maps.times(times - 1), "norms": norm(d, kind, times), **more}
    layer = LayerCounts(mixing, {"ffn": feed_forward(d, ffn, gated, biases), "norms": norm(d, kind)})
    return layer, times * (2 * d + 4 * heads.count * heads.width) + 2 * d + ffn * (3 if gated else 2)


def _t5(c: Config) -> Architecture:
    d, count, ffn = c.size("d_model"), c.size("num_heads"), c.size("d_ff")
    heads, gated = Heads(count, c.size("d_kv"), count), c.text("feed_forward_proj").startswith("gated-")
    relative = elementwise(c.size("relative_attention_num_buckets") * count)
    of_layer = {"positions": relative} if c.family == "umt5" else {}  # the others have them once a side
    of_side = {} if of_layer else {"positions": relative}
    sides = {"encoder": c.size("num_layers"), "decoder": c.size("num_decoder_layers", c.size("num_layers"))}
    named = c.values.get("architectures")
    if isinstance(named, list) and str(named[:1]).endswith("EncoderModel']"):
        del sides["decoder"]
    stacks = []
    for name, layers in sides.items():
        layer, kept = _side(name, d, heads, ffn, gated, "rms", False, **of_layer)
        stacks.append(AppliedLayers(name, (layer,) * layers, {"norms": norm(d, "rms"), **of_side}, heads, kept))
    head = c.head != "none"
    notes = (FORCED,) if head and c.values.get("tie_word_embeddings") is False else ()
    return Architecture(c.family, d, TokenTables(c.size("vocab_size"), d, head, head), tuple(stacks), notes=notes)


def _bart(c: Config) -> Architecture:
    d, vocab = c.size("d_model"), c.size("vocab_size")
    learned = c.family in ("bart", "mbart")  # positions; the others' are sinusoids, stored and never trained
    positions = c.size("max_position_embeddings") + (2 if learned else 0)
    around = {
        "positions": lookup(positions, d),
        "embedding_norm": norm(d, count=int(learned)),
        "norms": norm(d, count=int(c.family in ("mbart", "pegasus"))),
    }
    stacks = []
    for name in ("encoder", "decoder"):
        count, ffn = c.size(f"{name}_attention_heads"), c.size(f"{name}_ffn_dim")
        heads = Heads(count, even(d, count), count)
        layer, kept = _side(name, d, heads, ffn, False, "layer", True)
        stacks.append(AppliedLayers(name, (layer,) * c.size(f"{name}_layers"), around, heads, kept))
    ends, other = c.token_tables(d), Count()
    notes: tuple[str, ...] = ()
    if c.family == "marian" and not c.flag("share_encoder_decoder_embeddings"):
        ends, other = replace(ends, vocab=c.size("decoder_vocab_size", vocab)), lookup(vocab, d)
        notes = ("the encoder has a table of its own, counted as other",)
    elif not c.flag("tie_word_embeddings"):
        other = lookup(vocab, d).times(2, 0)
        notes = ("untied, the class also stores a table of the encoder's and one of the decoder's, counted as other",)
    frozen = 0 if learned else 2 * positions * d
    return Architecture(c.family, d, ends, tuple(stacks), {"other": other}, frozen=frozen, notes=notes)


ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra", "albert"), _bert),
    "modernbert": _modernbert,
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus"), _bart),
}
