"""The loss without logits, in a model of your own: one table, one gradient buffer, next to the plain loss."""

import torch
from torch import nn

import tiewise

V, D = 8000, 128
torch.manual_seed(0)
table, body = nn.Parameter(torch.randn(V, D) / D**0.5), nn.GRU(D, D, batch_first=True)
ids = torch.randint(0, V, (8, 65))


def plain() -> torch.Tensor:
    """What anyone would write."""
    hidden, _ = body(nn.functional.embedding(ids[:, :-1], table))
    return nn.functional.cross_entropy((hidden @ table.T).flatten(0, 1), ids[:, 1:].flatten())


def fused() -> torch.Tensor:
    """The same: the lookup hands the table on, and its gradient is added where the head's lies."""
    rows, tied = tiewise.tied_lookup(table, ids[:, :-1])
    hidden, _ = body(rows)
    return tiewise.linear_cross_entropy(hidden, tied, ids[:, 1:])


found = []
for loss in (plain, fused):
    table.grad = None
    value = loss()
    value.backward()
    found.append((value.item(), table.grad))
(one, there), (other, here) = found
print(f"plain {one:.6f}, fused {other:.6f}; gradients differ by {(there - here).norm() / there.norm():.1e}")
assert abs(one - other) < 1e-5
