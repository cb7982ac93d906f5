"""What a head and a lookup compute, as functions of tensors: fused, exact, and with one gradient buffer.

- `cross_entropy`: `linear_cross_entropy`, a head's loss without its logits, over `chunked`, its arithmetic.
- `path_gradient`: `tied_lookup`, by which both ends of a table write into one gradient, and the norms of its two paths.
- `log_prob`: log-probabilities, log-sum-exps and entropies, with gradients for any of them.
- `soft_targets`: losses against whole distributions, a teacher's or one from the table itself.
"""
