"""Layers that share parameters across depth: in any Hugging Face stack, saved once, loaded shared."""
