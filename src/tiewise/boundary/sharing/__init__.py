"""Layers of any Hugging Face model that share parameters, are saved once and load shared.

- `share`: `share_layers(model, "ffn")` and its handle `Shared`, which separates the layers again.
- `stacks`: the stacks of layers in a model, and the part of a layer that each parameter belongs to.
- `layout`: the shared parameters of each stack, stored in the model's config.
"""
