"""The direct path with the first MLP in it: input row → MLP of layer 0 → final norm → output rows.

    h = x + MLP₀(norm(x))        x the input row as the body receives it, attention and positions left out

What h enters is the same direct path as without it: final norm, output rows, bias, soft-cap. One input table is
exchanged for another, whose rows are computed a few at a time, so every measure of `tiewise.analysis` applies to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from numpy.typing import ArrayLike

from tiewise.analysis.bigram_counts import Chain, TextPair, text_pairs
from tiewise.analysis.bigram_maps import SHOWN, HeatMap, Likeness, frequent, likeness, path_map, text_map
from tiewise.analysis.bigram_paths import PathLoss, path_loss
from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import DirectPath, SampledAsymmetry, sampled_asymmetry
from tiewise.analysis.path_tokens import WordPair, find_pairs, sampled, word_pairs
from tiewise.analysis.token_table import Array, Behind
from tiewise.analysis.token_texts import read_as
from tiewise.core.errors import DataError
from tiewise.core.progress import doing
from tiewise.internals.first_layers import FirstBlock, first_block
from tiewise.internals.loaded import Opened


@dataclass(frozen=True)
class PathView:
    """One of the two paths.

    Args:
        asymmetry: on the sampled tokens.
        pairs: requested words, both ways.
        heat: the shown tokens; None without a text, as all below.
        likeness: of `heat` to the text's.
        loss: on the text's pairs, over the whole vocabulary.
    """

    asymmetry: SampledAsymmetry
    pairs: tuple[WordPair, ...]
    heat: HeatMap | None = None
    likeness: Likeness | None = None
    loss: PathLoss | None = None


@dataclass(frozen=True)
class FirstMlp:
    """The direct path without and with the first MLP.

    Args:
        family: the model's type.
        composition: what stands between input row and final norm, in the names of the model's modules.
        parameters: of the first MLP and its norms.
        table_parameters: of one table, V·E.
        model_parameters: of the whole model, shared ones once.
        tied: whether both ends hold one table.
        rows: V.
        samples: tokens sampled.
        without: the direct path.
        within: the same with the first MLP in it.
        change: asymmetry within less without, on the same tokens and resamples.
        target: what the text has, for the shown tokens; None without a text.
        text: requested words in the text, both ways; empty without one.
        notes: what else is applied, what is left out.
    """

    family: str
    composition: str
    parameters: int
    table_parameters: int
    model_parameters: int
    tied: bool
    rows: int
    samples: int
    without: PathView
    within: PathView
    change: SampledAsymmetry
    target: HeatMap | None
    text: tuple[TextPair, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


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
    with doing("asymmetry", total):
        return sampled_asymmetry(lefts, right, seed)


def _target(opened: Opened, chain: Chain, ids: Sequence[int]) -> HeatMap:
    """What the text has."""
    if chain.vocabulary > opened.vocab:
        what = f"a text of {chain.vocabulary:,} different ids, the table has {opened.vocab:,} rows"
        raise DataError(what, "use the tokenizer that belongs to the model")
    return text_map(chain, ids, read_as(opened.folder, ids))


def _on_text(view: PathView, path: DirectPath, chain: Chain, target: HeatMap, seed: int) -> PathView:
    """The view with what a text says of it."""
    heat = path_map(path, chain, target.ids, target.texts)
    with doing("loss on the text", path.output.rows):
        loss = path_loss(path, chain, seed=seed)
    return replace(view, heat=heat, likeness=likeness(target, heat, seed=seed), loss=loss)
