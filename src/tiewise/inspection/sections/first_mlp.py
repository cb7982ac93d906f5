"""The direct path through the first MLP of a model.

    input row → MLP of layer 0 → norm → output rows
    h = x + MLP₀(norm(x))        x the input row as the body receives it, attention and positions left out

The question is how much knowledge of word order the MLP adds. After h the path is unchanged: final norm, output rows,
bias, soft-cap. One input table is exchanged for another, whose rows are computed a few at a time, so every measure of
`inspection.tables` applies to both.

The record of a family names its block (`first_mlp`). Tests compare each with transformers' own class: its logits with
one layer, whose attention returns zero, are those of the path through this block. A family without a record is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.saved import BASE
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import BlockNames
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import DataError, InstallError
from tiewise.core.estimates import Estimate
from tiewise.core.measurement import NATS, NONE, Grid, Listing, Measurement, Quantity, count, plain
from tiewise.core.progress import progress_of
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.tables.bigram_counts import Chain, pair_counts
from tiewise.inspection.tables.bigram_paths import MAP_TOKENS, heat_maps, path_loss
from tiewise.inspection.tables.model_tables import Array, Ids, MappedTable
from tiewise.inspection.tables.open_path import DirectPath, open_path
from tiewise.inspection.tables.path_matrix import WordOrders, find_pairs, sampled, sampled_asymmetry, word_orders
from tiewise.inspection.workspace import InspectedModel, Workspace, section

ASYMMETRY = "‖S − Sᵀ‖²/‖S‖²"
TITLES = ("Direct path", "With the first MLP")  # titles of the heat maps of both paths


@section(question="Does the first feed-forward layer add word order?", order=20)
def first_mlp(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Compare the direct path with the same path through the first MLP.

    A symmetric path has no knowledge of word order.
    """
    opened, request = workspace.opened(model), workspace.request
    chain = None
    if workspace.has_text(model):
        chain = Chain.of(workspace.ids(model), opened.vocab)
    return first_mlp_of(opened, request.pairs, request.effort.samples, request.seed, chain)


def first_mlp_of(
    opened: Opened,
    words: Sequence[tuple[str, str]] = (),
    samples: int = 4000,
    seed: int = 0,
    chain: Chain | None = None,
    most: int = MAP_TOKENS,
) -> Measurement:
    """Measure how far the first MLP moves the path from symmetry, and its cost.

    With a text, it also reports how far each path follows it. `words` are pairs to evaluate in both orders, each word
    one token. The logits of `samples` tokens to each other are compared, or of all tokens if there are fewer; `seed`
    draws them and resamples. `chain` has a text's pairs in this model's tokens. With it, losses are measured, and heat
    maps show the `most` frequent tokens, then the words.

    Raises:
        InstallError: a model whose first MLP has no record.
        CheckpointError: one without a direct path.
        DataError: words that are no tokens, a table of fewer than 8 rows, a text in other tokens.
    """
    block, path = first_block(opened.model), open_path(opened.folder)
    paths = {"direct": path, "with the first MLP": through_first_mlp(path, block)}
    pairs = find_pairs(opened.folder, words, path.rows)
    chosen = sampled(path.rows, samples, seed)
    asymmetries = _asymmetries(paths, path, chosen, seed)
    quantities = _asymmetry_quantities(paths, asymmetries)
    parameters = sum(p.numel() for p in opened.model.parameters())
    quantities.append(_size_quantity(block, path, parameters))
    grids: list[Grid] = []
    if chain is not None:
        _require_vocabulary(chain, opened.vocab)
        titled = dict(zip(TITLES, paths.items(), strict=True))
        grids, follows = heat_maps(chain, opened.folder, titled, list(itertools.chain.from_iterable(pairs)), most, seed)
        quantities += _text_quantities(paths, chain, follows, seed)
    orders = {name: word_orders(one, words, pairs) for name, one in paths.items()}
    quantities += _logit_quantities(orders)
    listings: list[Listing] = []
    if words:
        listings.append(_requested_pairs(orders, _shares_in_text(chain, pairs)))
    sample = f"{count(len(chosen))} tokens sampled; the map is {block.composition}"
    change, _ = asymmetries[-1]
    return Measurement(
        answer=_answer(change),
        quantities=tuple(quantities),
        grids=tuple(grids),
        listings=tuple(listings),
        notes=(sample, *path.notes, "attention is left out"),
    )


def _require_vocabulary(chain: Chain, rows: int) -> None:
    """Refuse a text whose tokens are not those of a table of `rows` rows."""
    if chain.vocabulary > rows:
        problem = f"a text of {chain.vocabulary:,} different ids, a table of {rows:,} rows"
        raise DataError(problem, "use the tokenizer that belongs to the model")


def _asymmetries(
    paths: Mapping[str, DirectPath], direct: DirectPath, chosen: Ids, seed: int
) -> list[tuple[Estimate, Estimate]]:
    """Measure the asymmetry of each path between `chosen` tokens, and last its change.

    Each is (of M, of the centred M).
    """
    lefts = []
    for path in paths.values():
        rows = path.input.take(chosen)
        lefts.append(path.left(rows))
    with progress_of("asymmetry", len(paths) * len(chosen)):
        return sampled_asymmetry(lefts, direct.output.take(chosen), seed)


def _text_quantities(
    paths: Mapping[str, DirectPath], chain: Chain, follows: Sequence[Sequence[Quantity]], seed: int
) -> Iterator[Quantity]:
    """Yield each path's loss on a text's pairs, then the quantities `follows`."""
    for (name, path), of_path in zip(paths.items(), follows, strict=True):
        with progress_of("loss on the text", path.output.rows):
            loss = path_loss(path, chain, seed=seed)
        yield Quantity.of_estimate(f"loss on the text's pairs, {name}", loss, unit=NATS, main=False)
        yield from of_path


def _logit_quantities(orders: Mapping[str, WordOrders]) -> Iterator[Quantity]:
    """Yield the logit of each requested pair in both orders, by each path."""
    figure = "Requested pairs: logits"
    for name, by_order in orders.items():
        for order, (logit, _, _) in by_order.items():
            yield Quantity(f"{order}, {name}", logit, unit="logit", main=False, figure=figure)


def _answer(change: Estimate) -> str:
    """Return whether the asymmetry grows with the MLP.

    `change` is the asymmetry with the MLP less that without it.
    """
    if change.low > 0:
        return "the first feed-forward layer adds knowledge of word order here"
    if change.high < 0:
        return "the first feed-forward layer removes some knowledge of word order here"
    return "no effect of the first feed-forward layer on word order was detected"


def _asymmetry_quantities(paths: Iterable[str], asymmetries: Sequence[tuple[Estimate, Estimate]]) -> list[Quantity]:
    """Return the asymmetry of each path and its change, then the same centred."""
    names = [f"asymmetry, {name}" for name in paths]
    *of_paths, change = asymmetries
    quantities = []
    why = "2: unrelated tables"  # written once
    for name, (as_it_is, _) in zip(names, of_paths, strict=True):
        quantities.append(Quantity.of_estimate(name, as_it_is, unit=ASYMMETRY, chance=2.0, why=why))
        why = ""
    quantities.append(Quantity.of_estimate("change", change[0], unit=ASYMMETRY, chance=0.0))
    why = "less row and column means"
    for name, (_, centred) in zip([*names, "change"], asymmetries, strict=True):
        title = f"{name}, centred"
        quantities.append(Quantity.of_estimate(title, centred, unit=ASYMMETRY, main=False, why=why))
    return quantities


def _size_quantity(block: FirstBlock, path: DirectPath, parameters: int) -> Quantity:
    """Return the size of the block, compared with one table and with the model's `parameters`."""
    of_block = sum(p.numel() for p in block.parameters.values())
    of_table = path.input.rows * path.input.width
    why = f"{of_block / of_table:.0%} of one table, {of_block / parameters:.0%} of the model"
    return Quantity("parameters of that MLP", of_block, main=False, why=why)


def _shares_in_text(chain: Chain | None, pairs: Sequence[tuple[int, int]]) -> list[str]:
    """Return p(second | first) of each pair in both orders, as text.

    Without a text, it is a dash.
    """
    if chain is None:
        return [NONE] * (2 * len(pairs))
    ordered_pairs = []
    for a, b in pairs:
        ordered_pairs += [(a, b), (b, a)]
    _, shares, _ = pair_counts(chain, ordered_pairs)
    return [NONE if math.isnan(share) else f"{share:.3g}" for share in shares.tolist()]


def _requested_pairs(orders: Mapping[str, WordOrders], shares: Sequence[str]) -> Listing:
    """List each requested pair in both orders, by each path and in the text."""
    header = ["order"]
    for name in orders:
        header += [f"{name}: logit", f"{name}: probability", f"{name}: rank"]
    header.append("in the text")
    rows = []
    for order, share in zip(orders["direct"], shares, strict=True):
        row = [order]
        for by_order in orders.values():
            logit, log_probability, rank = by_order[order]
            row += [plain(logit, 3), f"{math.exp(log_probability):.3g}", count(rank + 1)]
        rows.append((*row, share))
    return Listing("Requested pairs", tuple(header), tuple(rows))


@dataclass(frozen=True)
class FirstBlock:
    """The feed-forward block of a model's first layer."""

    composition: str  # formula of the block, in the model's module names
    steps: tuple[Callable[[Tensor], Tensor], ...]  # its norms and modules, in the order of application
    scale: float  # factor of its output

    @property
    def parameters(self) -> dict[int, Tensor]:
        """Return the parameters of the block and its norms, each once."""
        parameters: dict[int, Tensor] = {}
        for step in self.steps:
            if isinstance(step, nn.Module):
                parameters |= {id(p): p for p in step.parameters()}
        return parameters

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the stream [n, D] after the block, in the type of the block's weights."""
        x = x.to(next(iter(self.parameters.values())).dtype)
        y = x[None]
        for step in self.steps:
            y = step(y)
        return x + (y * self.scale)[0]


def _layers(body: Any, path: str) -> Any:
    """Return the list of layers at a dotted path in a body; None without one."""
    layers = body
    for name in path.split("."):
        layers = getattr(layers, name, None)
    return layers


def first_block(model: Any) -> FirstBlock:
    """Find the feed-forward block of a model's first layer.

    Raises:
        InstallError: a family without an exact record of its first layer, a mixture of experts, or one that normalises
            the stream itself.
    """
    config = model.config.get_text_config()
    model_type = str(getattr(config, BASE, None) or getattr(config, "model_type", ""))
    fix = "its direct path alone can be measured"
    if _has_experts(model):
        raise InstallError(f"a {short(model_type)} model begins with a mixture of experts", fix)
    record = family(model_type)
    names = record.first_mlp
    if names is None and record.has_facts:
        raise InstallError(f"the first MLP of {short(model_type)} is not known", fix)
    if names is None:
        raise InstallError(f"{record.unknown_message}: its record would name the first MLP", fix)
    if getattr(config, "do_layer_norm_before", True) is False:
        raise InstallError(f"this {model_type} model normalises the stream behind its first MLP", fix)
    layers = _layers(model.base_model, names.layers)
    if not layers and hasattr(model, "get_decoder"):  # the text model of a composite such as LLaVA
        layers = _layers(model.get_decoder(), names.layers)
    if not layers:
        raise InstallError(f"this {model_type} model has no layers", fix)
    return _block_of(layers[0], names)


def _has_experts(model: nn.Module) -> bool:
    """Return True if any layer of a model is a mixture of experts."""
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def _block_of(layer: nn.Module, names: BlockNames) -> FirstBlock:
    """Return the feed-forward block of a layer, with the module names of the family's record."""
    steps: list[str] = []
    for name in names.before:  # the first of these norms that the layer has
        if getattr(layer, name, None) is not None:
            steps.append(name)
            break
    steps += names.steps
    if names.after:
        steps.append(names.after)
    composition = "x"
    for name in steps:
        composition = f"{name}({composition})"
    scale = 1.0
    if names.scale:
        scale = float(getattr(layer, names.scale))
    if scale != 1:
        composition = f"{scale:g}·{composition}"
    modules = tuple(getattr(layer, name) for name in steps)
    return FirstBlock(f"x + {composition}", modules, scale)


def through_first_mlp(path: DirectPath, block: FirstBlock) -> DirectPath:
    """Return the path with the first MLP in it; it is never tied.

    Rows are computed in the type of the MLP's weights.
    """
    name, scale = f"{path.input.name} after the first MLP", path.input_scale

    def after(rows: Array) -> Array:
        """Return the rows after the block, in fp64."""
        mapped: Array = block(torch.from_numpy(rows * scale)).double().numpy()
        return mapped

    table = MappedTable(path.input, after, path.input.width, name)
    return replace(path, input=table, input_scale=1.0, notes=(*path.notes, f"first MLP: {block.composition}"))
