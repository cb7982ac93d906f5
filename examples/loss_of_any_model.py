"""Compute the fused loss of a custom tied model and compare it with the plain loss."""

import torch
from torch import nn

import tiewise

V, D = 8000, 128
torch.manual_seed(0)
table, body = nn.Parameter(torch.randn(V, D) / D**0.5), nn.GRU(D, D, batch_first=True)
ids = torch.randint(0, V, (8, 65))


def plain() -> torch.Tensor:
    """Return the loss as PyTorch computes it from logits."""
    hidden, _ = body(nn.functional.embedding(ids[:, :-1], table))
    return nn.functional.cross_entropy((hidden @ table.T).flatten(0, 1), ids[:, 1:].flatten())


def fused() -> torch.Tensor:
    """Return the same loss without logits.

    The lookup passes the table on to the head, so both gradients are added in one buffer.
    """
    rows, tied = tiewise.boundary.tied_lookup(table, ids[:, :-1])
    hidden, _ = body(rows)
    return tiewise.linear_cross_entropy(hidden, tied, ids[:, 1:])


results = []
for loss in (plain, fused):
    table.grad = None
    value = loss()
    value.backward()
    results.append((value.item(), table.grad))
(plain_loss, plain_grad), (fused_loss, fused_grad) = results
difference = (plain_grad - fused_grad).norm() / plain_grad.norm()
print(f"plain {plain_loss:.6f}, fused {fused_loss:.6f}; gradients differ by {difference:.1e}")
assert abs(plain_loss - fused_loss) < 1e-5
