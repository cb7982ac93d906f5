"""Sizes and choices of an ALBERT, and its parts: embeddings, and one layer (attention, then ffn, each normed).

    e = norm(token + position + segment) · projection                    norm before (as released)
    e = norm((token + position + segment) · projection)                  norm after
    a = norm(x + attention(x))          y = norm(a + down(act(up(a))))

Letters: V tokens, E width of the three tables (token, position, segment), H hidden width, L layers. Which of the layers
share is `config.sharing`, in the written form of `SharingSpec`; it stands in `config.json` as `tiewise.share_layers`
writes it, so that both are one thing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from tiewise.core.errors import SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.sharing.layout import ENTRY, LayerStack, make_layout


class AlbertEmbeddings(nn.Module):
    """Three tables of width E, summed, normed and projected to H."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.embedding_size
        self.token = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.segment = nn.Embedding(config.type_vocab_size, width)
        self.projection = nn.Linear(width, config.hidden_size) if config.projection else nn.Identity()
        self.norm_first = config.norm == "before"
        self.norm = nn.LayerNorm(width if self.norm_first else config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, segments: Tensor | None, positions: Tensor | None) -> Tensor:
        """Embed tokens [B, T] of segments [B, T] (all 0 unless given) at positions [.., T] (0 … T − 1): [B, T, H].

        Raises:
            SpecError: more tokens than positions.
        """
        length, room = input_ids.shape[1], self.position.num_embeddings
        if positions is None:
            if length > room:
                raise SpecError(f"a sequence of {length} tokens, and {room} positions", f"cut it to {room} tokens")
            positions = torch.arange(length, device=input_ids.device)
        segments = torch.zeros_like(input_ids) if segments is None else segments
        x = self.token(input_ids) + self.segment(segments) + self.position(positions)
        if self.norm_first:
            return self.projection(self.dropout(self.norm(x)))
        return self.dropout(self.norm(self.projection(x)))


class AlbertAttention(nn.Module):
    """All tokens read all tokens that are not padding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.share = config.attention_probs_dropout_prob
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, readable: Tensor | None) -> Tensor:
        """x [B, T, H] → [B, T, H]; `readable` bool [B, 1, 1, T]."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        dropped = self.share if self.training else 0.0
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=readable, dropout_p=dropped)
        return self.norm(x + self.dropout(self.dense(read.transpose(1, 2).flatten(2))))


class AlbertFeedForward(nn.Module):
    """Two linear maps with an activation between."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] → [.., H]."""
        return self.norm(x + self.down(self.act(self.up(x))))


class AlbertLayer(nn.Module):
    """Attention, then ffn."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = AlbertFeedForward(config)

    def forward(self, x: Tensor, readable: Tensor | None) -> Tensor:
        """x [B, T, H] → [B, T, H]."""
        return self.ffn(self.attention(x, readable))


def make_real(module: nn.Module, device: torch.device) -> None:
    """Give parameters that are on no device room on `device`, one for one: what modules share stays shared."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if old not in real:
                real[old] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            setattr(part, name, real[old])


NORMS = ("before", "after")
STACK = "layers"  # the list of layers in the encoder
# Lan et al. 2020, Table 1, for V = 30,000; the MLPs are four times as wide, the heads as in the released models.
PRESETS = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "xlarge": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
    "xxlarge": {"hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 64},
}


class OpenAlbertConfig(PreTrainedConfig):
    """Config of `OpenAlbertModel` and the models around it.

    `sharing="all"`, as a keyword or set later, says what the layers of a new model share; unless said they share
    nothing.

    Raises:
        SpecError: sizes or options that no model can have.
    """

    model_type = "tiewise-albert"

    vocab_size: int = 30_000
    embedding_size: int = 128  # E
    hidden_size: int = 768  # H
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None  # None: 4·H
    hidden_act: str = "gelu_new"
    norm: str = "before"  # of the summed embeddings: before their projection to H, at width E, or after it, at width H
    projection: bool = True  # False: none, for E = H
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    classifier_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        sharing = kwargs.pop("sharing", None)
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        check(self)
        if sharing is not None:
            self.sharing = sharing

    @property
    def sharing(self) -> str:
        """What layers share."""
        entry = getattr(self, ENTRY, None)
        return "none" if entry is None else str(entry["spec"])

    @sharing.setter
    def sharing(self, text: SharingSpec | str) -> None:
        spec = SharingSpec.parse(text)
        if spec.kind == "none":
            self.__dict__.pop(ENTRY, None)
            return
        with torch.device("meta"):
            layer = AlbertLayer(self)
        parts = {name: name.partition(".")[0] for name, _ in layer.named_parameters()}
        count = self.num_hidden_layers
        layout = make_layout([LayerStack(STACK, (layer,) * count, (parts,) * count)], spec)
        setattr(self, ENTRY, layout.record())


def preset(name: str, **changes: Any) -> OpenAlbertConfig:
    """Return the config of a published size (base, large, xlarge, xxlarge), one layer for all, with these changes.

    `norm="after", hidden_act="gelu", vocab_size=30522` gives the variant that is often drawn.

    Raises:
        SpecError: no such size.
    """
    if name not in PRESETS:
        raise SpecError(f"no ALBERT of size {name[:40]!r}", f"choose one of {', '.join(PRESETS)}")
    return OpenAlbertConfig(**{"sharing": "all", **PRESETS[name], **changes})


def check(config: Any) -> None:
    """Refuse what cannot be built."""
    sizes = ("vocab_size", "embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "intermediate_size", "max_position_embeddings", "type_vocab_size"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise SpecError(f"{name} = {value!r}", "sizes are whole numbers, 1 or more")
    width, heads = config.hidden_size, config.num_attention_heads
    if width % heads:
        raise SpecError(f"{heads} heads do not divide width {width}", "choose heads that do")
    if config.norm not in NORMS:
        raise SpecError(f"norm = {str(config.norm)[:40]!r}", "choose before or after the projection")
    if not config.projection and config.embedding_size != width:
        what = f"tables of width {config.embedding_size} without a projection to {width}"
        raise SpecError(what, "leave projection on, or give both one width")
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"):
        if not 0 <= getattr(config, name) < 1:
            raise SpecError(f"{name} = {getattr(config, name)}", "give the share that is dropped, 0 or more, below 1")
