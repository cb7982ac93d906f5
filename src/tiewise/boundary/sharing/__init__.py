"""Layers that share parameters across depth: in any Hugging Face stack, saved once, loaded shared.

- `share`: `share_layers(model, "ffn")` and its handle `Shared`, which separates them again.
- `layout`: which parameters of which layers those are, found in a model and kept in its config.
"""
