"""Sizes and inputs of tiny ALBERT models, and a forward pass in fp64 numpy."""

import math

import numpy as np
import torch

TINY = {
    "vocab_size": 61,
    "embedding_size": 8,
    "hidden_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}


def batch(seed=0, rows=3, length=11, vocab=61):
    """Return ids, a padding mask with a short row, segments, masked-token labels and pair labels."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length), generator=g)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    segments = torch.zeros_like(ids)
    segments[:, 5:] = 1
    labels = torch.where(torch.rand(ids.shape, generator=g) < 0.4, ids, -100)
    return ids, mask, segments, labels, torch.tensor([0, 1, 1])[:rows]


@torch.no_grad()
def perturbed(model):
    """Add noise to every parameter and return the model. Biases start at 0 and norms at 1."""
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return model


def dense_forward(weights, ids, mask, segments, *, layers, heads, eps=1e-12):
    """Return (logits, pair logits) in fp64, with the norm after the projection and GELU by erf."""
    w = {name: value.double().numpy() for name, value in weights.items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    at = "albert.embeddings"
    x = w[f"{at}.token.weight"][ids] + w[f"{at}.segment.weight"][segments]
    x = norm(linear(x + w[f"{at}.position.weight"][: ids.shape[1]], f"{at}.projection"), f"{at}.norm")
    for i in range(layers):
        name = f"albert.layers.{i}"
        parts = [linear(x, f"{name}.attention.{part}") for part in ("query", "key", "value")]
        q, k, v = (p.reshape(*p.shape[:2], heads, -1).transpose(0, 2, 1, 3) for p in parts)
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
        scores = np.where(np.asarray(mask)[:, None, None, :] > 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        read = (shares / shares.sum(-1, keepdims=True)) @ v
        read = read.transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(x + linear(read, f"{name}.attention.dense"), f"{name}.attention.norm")
        x = norm(x + linear(gelu(linear(x, f"{name}.ffn.up")), f"{name}.ffn.down"), f"{name}.ffn.norm")
    head = norm(gelu(linear(x, "predictions.dense")), "predictions.norm")
    return linear(head, "predictions.decoder"), linear(np.tanh(linear(x[:, 0], "albert.pooler")), "pair")
