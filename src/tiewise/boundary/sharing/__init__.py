"""Layers that share parameters across depth: in any Hugging Face stack, saved once, loaded shared.

- `share`: `share_layers(model, "ffn")` and its handle `Shared`, which separates them again.
- `stacks`: the stacks of layers in a model, and the part of a layer that each parameter belongs to.
- `layout`: which parameters of which layers are shared, kept in the model's config.
"""
