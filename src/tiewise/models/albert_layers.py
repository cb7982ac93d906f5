"""Parts of an ALBERT: embeddings, one layer (attention, then ffn, each with the norm behind it), and a stack of them.

    e = norm(token + position + segment) · projection                    norm before (as released)
    e = norm((token + position + segment) · projection)                  norm after
    a = norm(x + attention(x))          y = norm(a + down(act(up(a))))

Config is taken as any object with the fields of `OpenAlbertConfig`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tiewise.core.errors import SpecError


class Embeddings(nn.Module):
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


class Attention(nn.Module):
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


class FeedForward(nn.Module):
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


class Layer(nn.Module):
    """Attention, then ffn."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.ffn = FeedForward(config)

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
