"""The direct path with the first MLP in it: input row → MLP of layer 0 → final norm → output rows.

    h = x + MLP₀(norm(x))        x the input row as the body receives it, attention and positions left out

What h enters is the same direct path as without it: final norm, output rows, bias, soft-cap. One input table is exchanged
for another, whose rows are computed a few at a time, so every measure of `tiewise.analysis` applies to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.bigrams import Chain
from tiewise.analysis.direct_path import DirectPath
from tiewise.analysis.heat import SHOWN, HeatMap, Likeness, frequent, likeness, path_map, text_map
from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_tokens import sampled
from tiewise.analysis.sampled_asymmetry import SampledAsymmetry, sampled_asymmetry
from tiewise.analysis.tables import Array, Ids, Table
from tiewise.analysis.token_texts import read_as
from tiewise.analysis.word_pairs import WordPair, find_pairs, word_pairs
from tiewise.checkpoint.facts import Progress, silent
from tiewise.errors import DataError
from tiewise.internals.first_layers import FirstBlock, first_block
from tiewise.internals.loaded import Opened

TAKEN = 1024  # rows that pass the MLP at once, whose inner width is several times the model's


class AfterMlp(Table):
    """Rows of an input table as they leave the first MLP, in fp64, computed in the type of the model's weights.

    Args:
        table: input table [V, E].
        scale: times every row, before the block.
        block: the first MLP with its norms and the residual sum.
    """

    def __init__(self, table: Table, scale: float, block: FirstBlock) -> None:
        self.table, self.scale, self.block = table, scale, block
        self.name, self.rows, self.width = f"{table.name} after the first MLP", table.rows, table.width

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop)."""
        return self._after(self.table.read(start, stop))

    def _take(self, ids: Ids, dtype: type[np.floating]) -> NDArray:
        parts = [self._after(self.table.take(ids[i : i + TAKEN])) for i in range(0, len(ids), TAKEN)]
        return np.concatenate(parts).astype(dtype)

    def _after(self, rows: Array) -> Array:
        found: Array = self.block(torch.from_numpy(rows * self.scale)).double().numpy()
        return found


@dataclass(frozen=True)
class PathView:
    """One of the two paths.

    Args:
        asymmetry: on the sampled tokens.
        pairs: requested words, both ways.
        heat: the shown tokens; None without a text.
        likeness: of `heat` to the text's; None without a text.
    """

    asymmetry: SampledAsymmetry
    pairs: tuple[WordPair, ...]
    heat: HeatMap | None
    likeness: Likeness | None


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
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def through_first_mlp(path: DirectPath, block: FirstBlock) -> DirectPath:
    """Return the path with the first MLP in it; it is never tied."""
    table = AfterMlp(path.input, path.input_scale, block)
    return replace(path, input=table, input_scale=1.0, notes=(*path.notes, f"first MLP: {block.composition}"))


def first_mlp_of(
    opened: Opened,
    pairs: Sequence[tuple[str, str]] = (),
    samples: int = 4000,
    seed: int = 0,
    progress: Progress = silent,
    chain: Chain | None = None,
    shown: int = SHOWN,
) -> FirstMlp:
    """Measure both paths on the same tokens.

    Args:
        opened: the checkpoint.
        pairs: pairs of words to ask of both ways; each word must be one token.
        samples: tokens whose logits to each other are compared; all where there are fewer.
        seed: of the samples and resamples.
        progress: hears of tokens done.
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
    (without, within), change = _asymmetries(paths, chosen, seed, progress)
    target, heats = _heats(opened, paths, chain, shown, ids)
    views = [
        PathView(found, word_pairs(one, pairs, ids), heat, None if target is None else likeness(target, heat, seed=seed))
        for one, found, heat in zip(paths, (without, within), heats, strict=True)
    ]
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
        notes=(*path.notes, "attention is left out"),
    )


def _asymmetries(
    paths: Sequence[DirectPath], chosen: ArrayLike, seed: int, progress: Progress
) -> tuple[tuple[SampledAsymmetry, ...], SampledAsymmetry]:
    lefts = [path.left(path.input.take(chosen)) for path in paths]
    right = paths[0].output.take(chosen)
    total = len(paths) * len(right)
    return sampled_asymmetry(lefts, right, seed, tick=lambda done: progress("asymmetry", done, total))


def _heats(
    opened: Opened, paths: Sequence[DirectPath], chain: Chain | None, shown: int, pairs: Sequence[tuple[int, int]]
) -> tuple[HeatMap | None, Sequence[Any]]:
    """The text's map and each path's; None where there is no text."""
    if chain is None:
        return None, [None] * len(paths)
    ids = frequent(chain, shown, [word for pair in pairs for word in pair])
    if max(ids) >= paths[0].rows:
        what = f"token {max(ids)} of the text is outside the tables' {paths[0].rows:,} rows"
        raise DataError(what, "use the tokenizer that belongs to the model")
    texts = read_as(opened.folder, ids)
    return text_map(chain, ids, texts), [path_map(path, chain, ids, texts) for path in paths]
