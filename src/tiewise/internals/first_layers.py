"""Where each family keeps its first feed-forward block, and what it adds to a residual stream without attention.

Every entry is held against transformers' own class (`tests/internals/test_first_mlp.py`): with one layer, whose
attention gives nothing, its logits are those of the path through this block. No other family is guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.saved import BASE
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import InstallError


@dataclass(frozen=True)
class Block:
    """Names within a family's body.

    Args:
        layers: list of layers, below the model's body.
        before: norm whose output the block reads, the first of these that a layer has; none for the stream itself.
        steps: modules of the block, one after the other.
        after: norm of what the block gives; "" without.
        scale: attribute of the layer that its output is multiplied by; "" without.
    """

    layers: str = "layers"
    before: tuple[str, ...] = ("post_attention_layernorm",)
    steps: tuple[str, ...] = ("mlp",)
    after: str = ""
    scale: str = ""


_PLAIN = Block()
_SANDWICH = Block(before=("pre_feedforward_layernorm",), after="post_feedforward_layernorm")
_PARALLEL = Block(before=("input_layernorm",))

BLOCKS: Mapping[str, Block] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "glm", "gemma", "olmo"), _PLAIN),
    **dict.fromkeys(("gpt_neox", "starcoder2"), _PLAIN),
    **dict.fromkeys(("gpt2", "gpt_neo"), Block("h", ("ln_2",))),
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
    **dict.fromkeys(("cohere", "phi"), _PARALLEL),
    "olmo2": replace(_SANDWICH, before=()),
    "granite": replace(_PLAIN, scale="residual_multiplier"),
    "stablelm": Block(before=("post_attention_layernorm", "input_layernorm")),
    "gptj": Block("h", ("ln_1",)),
    "falcon": Block("h", ("ln_mlp", "post_attention_layernorm", "input_layernorm")),
    "opt": Block("decoder.layers", ("final_layer_norm",), ("fc1", "activation_fn", "fc2")),
}


@dataclass(frozen=True)
class FirstBlock:
    """The feed-forward block of a model's first layer.

    Args:
        family: the model's type.
        composition: what it computes, in the names of the model's own modules.
        before: norm, or None.
        steps: modules, one after the other.
        after: norm, or None.
        scale: times its output.
    """

    family: str
    composition: str
    before: Any
    steps: tuple[Any, ...]
    after: Any
    scale: float

    @property
    def parameters(self) -> int:
        """Parameters of the block and its norms, each counted once."""
        return sum(p.numel() for p in {id(p): p for p in self._parameters()}.values())

    def _parameters(self) -> Iterator[Tensor]:
        for part in (self.before, *self.steps, self.after):
            if isinstance(part, nn.Module):
                yield from part.parameters()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the stream [n, D] after the block, of the type of the block's weights."""
        x = x.to(next(self._parameters()).dtype)
        y = x[None] if self.before is None else self.before(x[None])
        for step in self.steps:
            y = step(y)
        if self.after is not None:
            y = self.after(y)
        return x + (y * self.scale)[0]


def first_block(model: Any) -> FirstBlock:
    """Find the block of a model's first layer.

    Raises:
        InstallError: a family whose first layer is not known exactly, a mixture of experts, or one that normalises the
            stream itself.
    """
    config = model.config.get_text_config()
    family = str(getattr(config, BASE, None) or getattr(config, "model_type", ""))
    fix = "its direct path alone can be measured"
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        what = f"a {short(family)} model begins with a mixture of experts: no one MLP stands in its path"
        raise InstallError(what, fix)
    names = BLOCKS.get(family)
    if names is None:
        raise InstallError(f"the first MLP of a model of type {short(family) or '(none)'} is not known", fix)
    if getattr(config, "do_layer_norm_before", True) is False:
        raise InstallError(f"this {family} model normalises the stream behind its first MLP", fix)
    layers = _within(model.base_model, names.layers)
    if not layers:
        raise InstallError(f"this {family} model has no layers", fix)
    return _block(family, layers[0], names)


def _block(family: str, layer: Any, names: Block) -> FirstBlock:
    before = next((name for name in names.before if getattr(layer, name, None) is not None), "")
    scale = float(getattr(layer, names.scale)) if names.scale else 1.0
    inner = "x"
    for name in (before, *names.steps, names.after):
        inner = f"{name}({inner})" if name else inner
    said = f"x + {inner}" if scale == 1 else f"x + {scale:g}·{inner}"
    steps = tuple(getattr(layer, name) for name in names.steps)
    after = getattr(layer, names.after) if names.after else None
    return FirstBlock(family, said, getattr(layer, before) if before else None, steps, after, scale)


def _within(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
