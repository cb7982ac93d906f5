"""Fused, exact functions of tensors for a lookup and an output head, with one gradient buffer.

- `cross_entropy`: `linear_cross_entropy`, a head's loss without its logits; `chunked` has its arithmetic.
- `path_gradient`: `tied_lookup`, which gives both uses of a table one gradient buffer, and the norms of the two paths.
- `log_prob`: log-probabilities, log-sum-exps and entropies, with gradients for each.
- `soft_targets`: losses against full distributions, from a teacher or from the table itself.
"""
