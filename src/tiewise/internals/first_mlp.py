"""The direct path with the first MLP in it: input row → MLP of layer 0 → final norm → output rows.

    h = x + MLP₀(norm(x))        x the input row as the body receives it, attention and positions left out

What h enters is the same direct path as without it: final norm, output rows, bias, soft-cap. One input table is
exchanged for another, whose rows are computed a few at a time, so every measure of `tiewise.analysis` applies to both.

Where each family keeps the block is said in `BLOCKS`. Every entry is held against transformers' own class: with one
layer, whose attention gives nothing, its logits are those of the path through this block. No other is guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from tiewise.analysis.bigram_counts import Chain, TextPair, text_pairs
from tiewise.analysis.bigram_maps import SHOWN, HeatMap, Likeness, frequent, likeness, path_map, text_map
from tiewise.analysis.bigram_paths import PathLoss, path_loss
from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import DirectPath, SampledAsymmetry, sampled_asymmetry
from tiewise.analysis.path_tokens import WordPair, find_pairs, sampled, word_pairs
from tiewise.analysis.token_table import Array, Behind
from tiewise.analysis.token_texts import read_as
from tiewise.boundary.saved import BASE
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import DataError, InstallError
from tiewise.core.progress import progress
from tiewise.internals.loaded import Opened


@dataclass(frozen=True)
class BlockNames:
    """Names within a family's body."""

    layers: str = "layers"  # list of layers, below the model's body
    before: tuple[str, ...] = ("post_attention_layernorm",)  # norm that the block reads: the first of these that exists
    steps: tuple[str, ...] = ("mlp",)  # modules of the block, one after the other
    after: str = ""  # norm of what the block gives
    scale: str = ""  # attribute of the layer that its output is multiplied by


_PLAIN = BlockNames()
_SANDWICH = BlockNames(before=("pre_feedforward_layernorm",), after="post_feedforward_layernorm")
_PARALLEL = BlockNames(before=("input_layernorm",))

BLOCKS: Mapping[str, BlockNames] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "glm", "gemma", "olmo"), _PLAIN),
    **dict.fromkeys(("gpt_neox", "starcoder2"), _PLAIN),
    **dict.fromkeys(("gpt2", "gpt_neo"), BlockNames("h", ("ln_2",))),
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
    **dict.fromkeys(("cohere", "phi"), _PARALLEL),
    "olmo2": replace(_SANDWICH, before=()),
    "granite": replace(_PLAIN, scale="residual_multiplier"),
    "stablelm": BlockNames(before=("post_attention_layernorm", "input_layernorm")),
    "gptj": BlockNames("h", ("ln_1",)),
    "falcon": BlockNames("h", ("ln_mlp", "post_attention_layernorm", "input_layernorm")),
    "opt": BlockNames("decoder.layers", ("final_layer_norm",), ("fc1", "activation_fn", "fc2")),
}


@dataclass(frozen=True)
class FirstBlock:
    """The feed-forward block of a model's first layer."""

    family: str  # the model's type
    composition: str  # what it computes, in the names of the model's own modules
    before: Any  # norm, or None
    steps: tuple[Any, ...]  # modules, one after the other
    after: Any  # norm, or None
    scale: float  # times its output

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
    layers = model.base_model
    for name in names.layers.split("."):
        layers = getattr(layers, name, None)
    if not layers:
        raise InstallError(f"this {family} model has no layers", fix)
    return _block(family, layers[0], names)


def _block(family: str, layer: Any, names: BlockNames) -> FirstBlock:
    before = next((name for name in names.before if getattr(layer, name, None) is not None), "")
    scale = float(getattr(layer, names.scale)) if names.scale else 1.0
    inner = "x"
    for name in (before, *names.steps, names.after):
        inner = f"{name}({inner})" if name else inner
    said = f"x + {inner}" if scale == 1 else f"x + {scale:g}·{inner}"
    steps = tuple(getattr(layer, name) for name in names.steps)
    after = getattr(layer, names.after) if names.after else None
    return FirstBlock(family, said, getattr(layer, before) if before else None, steps, after, scale)


@dataclass(frozen=True)
class PathView:
    """One of the two paths."""

    asymmetry: SampledAsymmetry  # on the sampled tokens
    pairs: tuple[WordPair, ...]  # requested words, both ways
    heat: HeatMap | None = None  # the shown tokens; None without a text, as all below
    likeness: Likeness | None = None  # of `heat` to the text's
    loss: PathLoss | None = None  # on the text's pairs, over the whole vocabulary


@dataclass(frozen=True)
class FirstMlp:
    """The direct path without and with the first MLP."""

    family: str  # the model's type
    composition: str  # what stands between input row and final norm, in the names of the model's modules
    parameters: int  # of the first MLP and its norms
    table_parameters: int  # of one table, V·E
    model_parameters: int  # of the whole model, shared ones once
    tied: bool  # whether both ends hold one table
    rows: int  # V
    samples: int  # tokens sampled
    without: PathView  # the direct path
    within: PathView  # the same with the first MLP in it
    change: SampledAsymmetry  # asymmetry within less without, on the same tokens and resamples
    target: HeatMap | None  # what the text has, for the shown tokens; None without a text
    text: tuple[TextPair, ...]  # requested words in the text, both ways; empty without one
    notes: tuple[str, ...]  # what else is applied, what is left out


def through_first_mlp(path: DirectPath, block: FirstBlock) -> DirectPath:
    """Return the path with the first MLP in it; it is never tied. Rows are computed in the type of its weights."""
    name, scale = f"{path.input.name} after the first MLP", path.input_scale

    def after(rows: Array) -> Array:
        found: Array = block(torch.from_numpy(rows * scale)).double().numpy()
        return found

    table = Behind(path.input, after, path.input.width, name)
    return replace(path, input=table, input_scale=1.0, notes=(*path.notes, f"first MLP: {block.composition}"))


def first_mlp_of(
    opened: Opened,
    pairs: Sequence[tuple[str, str]] = (),
    samples: int = 4000,
    seed: int = 0,
    chain: Chain | None = None,
    shown: int = SHOWN,
) -> FirstMlp:
    """Measure both paths on the same tokens.

    Args:
        opened: the checkpoint.
        pairs: pairs of words to ask of both ways; each word must be one token.
        samples: tokens whose logits to each other are compared; all where there are fewer.
        seed: of the samples and resamples.
        chain: pairs of a text in this model's tokens, for the heat maps.
        shown: its most frequent tokens to show; the requested words come after them.

    Raises:
        InstallError: a model without a known first MLP.
        CheckpointError: one without a direct path.
        DataError: words that are no tokens, a table of fewer than 8 rows, a text in other tokens.
    """
    block = first_block(opened.model)
    path = open_path(opened.folder)
    paths = path, through_first_mlp(path, block)
    ids = find_pairs(opened.folder, pairs, path.rows)
    chosen = sampled(path.rows, samples, seed)
    found, change = _asymmetries(paths, chosen, seed)
    asked = [word_pairs(path, pairs, ids) for path in paths]
    views = [PathView(*view) for view in zip(found, asked, strict=True)]
    target = None
    if chain is not None:
        words = [word for pair in ids for word in pair]
        target = _target(opened, chain, frequent(chain, shown, words))
        views = [_on_text(view, path, chain, target, seed) for view, path in zip(views, paths, strict=True)]
    return FirstMlp(
        family=block.family,
        composition=block.composition,
        parameters=block.parameters,
        table_parameters=path.input.rows * path.input.width,
        model_parameters=sum(p.numel() for p in opened.model.parameters()),
        tied=path.tied,
        rows=path.rows,
        samples=len(chosen),
        without=views[0],
        within=views[1],
        change=change,
        target=target,
        text=() if chain is None else text_pairs(chain, ids, pairs),
        notes=(*path.notes, "attention is left out"),
    )


def _asymmetries(
    paths: Sequence[DirectPath], chosen: ArrayLike, seed: int
) -> tuple[tuple[SampledAsymmetry, ...], SampledAsymmetry]:
    lefts = [path.left(path.input.take(chosen)) for path in paths]
    right = paths[0].output.take(chosen)
    total = len(paths) * len(right)
    return sampled_asymmetry(lefts, right, seed, tick=lambda done: progress("asymmetry", done, total))


def _target(opened: Opened, chain: Chain, ids: Sequence[int]) -> HeatMap:
    """What the text has."""
    if chain.vocabulary > opened.vocab:
        what = f"a text of {chain.vocabulary:,} different ids, the table has {opened.vocab:,} rows"
        raise DataError(what, "use the tokenizer that belongs to the model")
    return text_map(chain, ids, read_as(opened.folder, ids))


def _on_text(view: PathView, path: DirectPath, chain: Chain, target: HeatMap, seed: int) -> PathView:
    """The view with what a text says of it."""
    heat = path_map(path, chain, target.ids, target.texts)
    loss = path_loss(path, chain, seed=seed, tick=lambda done: progress("loss on the text", done, path.output.rows))
    return replace(view, heat=heat, likeness=likeness(target, heat, seed=seed), loss=loss)
