"""How much word order does the first MLP give back to the direct path: input row → MLP of layer 0 → norm → output rows?

    h = x + MLP₀(norm(x))        x the input row as the body receives it, attention and positions left out

What h enters is the same direct path as without it: final norm, output rows, bias, soft-cap. One input table is
exchanged for another, whose rows are computed a few at a time, so every measure of `inspection.tables` applies to both.

The record of a family names its block (`first_mlp`). Tests compare each with transformers' own class: with one layer,
whose attention gives nothing, its logits are those of the path through this block. A family without it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.saved import BASE
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import BlockNames
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import DataError, InstallError, doing
from tiewise.core.estimates import Estimate
from tiewise.core.found import NATS, NONE, Found, Grid, Listing, Quantity, count, plain
from tiewise.inspection.bench import Bench, Subject, section
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.tables.bigram_counts import Chain, pair_counts
from tiewise.inspection.tables.bigram_paths import SHOWN, heat_maps, path_loss
from tiewise.inspection.tables.model_tables import Array, Behind
from tiewise.inspection.tables.open_path import DirectPath, open_path
from tiewise.inspection.tables.path_matrix import find_pairs, sampled, sampled_asymmetry, word_orders

ASYMMETRY = "‖S − Sᵀ‖²/‖S‖²"


@section(asks="How much word order does the first MLP give back?", place=20)
def first_mlp(subject: Subject, bench: Bench) -> Found:
    """Compare the direct path with the same path through the first MLP: a symmetric path knows no order of words."""
    opened, request = bench.opened(subject), bench.request
    chain = Chain.of(bench.ids(subject), opened.vocab) if bench.reads(subject) else None
    return first_mlp_of(opened, request.pairs, request.effort.samples, request.seed, chain)


def first_mlp_of(
    opened: Opened,
    words: Sequence[tuple[str, str]] = (),
    samples: int = 4000,
    seed: int = 0,
    chain: Chain | None = None,
    most: int = SHOWN,
) -> Found:
    """Say how far the MLP moves the path from symmetry, what it costs, and whether it then follows a text.

    `words` are pairs to ask of both ways, each word one token. Logits of `samples` tokens to each other are compared,
    all where there are fewer; `seed` draws them and resamples. Of a text's pairs in this model's tokens, `chain`, heat
    maps show the `most` frequent tokens, then the words, and losses are measured.

    Raises:
        InstallError: a model without a known first MLP.
        CheckpointError: one without a direct path.
        DataError: words that are no tokens, a table of fewer than 8 rows, a text in other tokens.
    """
    block, path = first_block(opened.model), open_path(opened.folder)
    paths = {"direct": path, "with the first MLP": through_first_mlp(path, block)}
    pairs, chosen = find_pairs(opened.folder, words, path.rows), sampled(path.rows, samples, seed)
    lefts = [one.left(one.input.take(chosen)) for one in paths.values()]
    with doing("asymmetry", len(paths) * len(chosen)):
        asymmetries = sampled_asymmetry(lefts, path.output.take(chosen), seed)
    change, _ = asymmetries[-1]
    quantities = [
        *_asymmetry_quantities(paths, asymmetries),
        _size_quantity(block, path, sum(p.numel() for p in opened.model.parameters())),
    ]
    grids: list[Grid] = []
    if chain is not None:
        if chain.vocabulary > opened.vocab:
            what = f"a text of {chain.vocabulary:,} different ids, a table of {opened.vocab:,} rows"
            raise DataError(what, "use the tokenizer that belongs to the model")
        titled = dict(zip(("Direct path", "With the first MLP"), paths.items(), strict=True))
        asked = [token for pair in pairs for token in pair]
        grids, follows = heat_maps(chain, opened.folder, titled, asked, most, seed)
        for (name, one), of_path in zip(paths.items(), follows, strict=True):
            with doing("loss on the text", one.output.rows):
                loss = path_loss(one, chain, seed=seed)
            title = f"loss on the text's pairs, {name}"
            quantities += [Quantity.of_estimate(title, loss, unit=NATS, main=False), *of_path]
    orders = {name: word_orders(one, words, pairs) for name, one in paths.items()}
    figure = "Requested pairs: logits"
    for name, by_order in orders.items():
        for order, (logit, _, _) in by_order.items():
            quantities.append(Quantity(f"{order}, {name}", logit, unit="logit", main=False, figure=figure))
    sample = count(len(chosen))
    return Found(
        answer=_answer(change),
        quantities=tuple(quantities),
        grids=tuple(grids),
        listings=(_requested_pairs(orders, pairs, chain),) if words else (),
        notes=(f"{sample} tokens sampled; the map is {block.composition}", *path.notes, "attention is left out"),
    )


def _answer(change: Estimate) -> str:
    """Say whether the asymmetry grows with the MLP; `change` is that with it less that without."""
    if change.low > 0:
        return "some"
    return "it takes some away" if change.high < 0 else "no clear amount"


def _asymmetry_quantities(paths: Iterable[str], asymmetries: Sequence[tuple[Estimate, Estimate]]) -> Iterator[Quantity]:
    """Yield the asymmetry of each path and its change, first as the paths are, then centred."""
    names = (*(f"asymmetry, {name}" for name in paths), "change")
    for number, (name, (estimate, _)) in enumerate(zip(names, asymmetries, strict=True)):
        yield Quantity.of_estimate(
            name, estimate, unit=ASYMMETRY, chance=0.0 if name == "change" else 2.0,
            why="" if number else "2: unrelated tables",
        )  # fmt: skip
    for name, (_, estimate) in zip(names, asymmetries, strict=True):
        why = "less row and column means"
        yield Quantity.of_estimate(f"{name}, centred", estimate, unit=ASYMMETRY, main=False, why=why)


def _size_quantity(block: FirstBlock, path: DirectPath, parameters: int) -> Quantity:
    """Report the size of the block, compared with one table and with the model's `parameters`."""
    of_block = sum(p.numel() for p in block.parameters.values())
    of_table = path.input.rows * path.input.width
    why = f"{of_block / of_table:.0%} of one table, {of_block / parameters:.0%} of the model"
    return Quantity("parameters of that MLP", of_block, main=False, why=why)


def _requested_pairs(
    orders: dict[str, dict[str, tuple[float, float, int]]], pairs: Sequence[tuple[int, int]], chain: Chain | None
) -> Listing:
    """List each requested pair both ways: by each path of `orders`, and how often the text has it."""
    columns = [f"{name}: {what}" for name in orders for what in ("logit", "probability", "rank")]
    shares = [math.nan] * (2 * len(pairs))
    if chain is not None:
        ways = [way for a, b in pairs for way in ((a, b), (b, a))]
        shares = pair_counts(chain, ways)[1].tolist()
    rows = []
    for order, share in zip(orders["direct"], shares, strict=True):
        row = [order]
        for by_order in orders.values():
            logit, log, rank = by_order[order]
            row += [plain(logit, 3), f"{math.exp(log):.3g}", count(rank + 1)]
        rows.append((*row, NONE if math.isnan(share) else f"{share:.3g}"))
    return Listing("Requested pairs", ("order", *columns, "in the text"), tuple(rows))


@dataclass(frozen=True)
class FirstBlock:
    """The feed-forward block of a model's first layer."""

    composition: str  # what it computes, in the names of the model's own modules
    steps: tuple[Callable[[Tensor], Tensor], ...]  # its norms and modules, one after the other
    scale: float  # times its output

    @property
    def parameters(self) -> dict[int, Tensor]:
        """Return the parameters of the block and its norms, each once."""
        modules = (part for part in self.steps if isinstance(part, nn.Module))
        return {id(p): p for module in modules for p in module.parameters()}

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the stream [n, D] after the block, of the type of the block's weights."""
        x = x.to(next(iter(self.parameters.values())).dtype)
        y = x[None]
        for step in self.steps:
            y = step(y)
        return x + (y * self.scale)[0]


def first_block(model: Any) -> FirstBlock:
    """Find the block of a model's first layer.

    Raises:
        InstallError: a family whose first layer is not known exactly, a mixture of experts, or one that normalises the
            stream itself.
    """
    config = model.config.get_text_config()
    kind = str(getattr(config, BASE, None) or getattr(config, "model_type", ""))
    fix = "its direct path alone can be measured"
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        raise InstallError(f"a {short(kind)} model begins with a mixture of experts", fix)
    record = family(kind)
    names = record.first_mlp
    if names is None:
        if record.is_known:
            raise InstallError(f"the first MLP of {short(kind)} is not known", fix)
        raise InstallError(f"{record.unknown}: its record would name the first MLP", fix)
    if getattr(config, "do_layer_norm_before", True) is False:
        raise InstallError(f"this {kind} model normalises the stream behind its first MLP", fix)
    layers = model.base_model
    for name in names.layers.split("."):
        layers = getattr(layers, name, None)
    if not layers:
        raise InstallError(f"this {kind} model has no layers", fix)
    return _block_of(layers[0], names)


def _block_of(layer: nn.Module, names: BlockNames) -> FirstBlock:
    """Return the feed-forward block of a layer, its modules by the names of the family's record."""
    before = next((name for name in names.before if getattr(layer, name, None) is not None), "")
    steps = [name for name in (before, *names.steps, names.after) if name]
    scale = float(getattr(layer, names.scale)) if names.scale else 1.0
    inner = "(".join([*reversed(steps), "x"]) + ")" * len(steps)
    composition = f"x + {inner}" if scale == 1 else f"x + {scale:g}·{inner}"
    return FirstBlock(composition, tuple(getattr(layer, name) for name in steps), scale)


def through_first_mlp(path: DirectPath, block: FirstBlock) -> DirectPath:
    """Return the path with the first MLP in it; it is never tied. Rows are computed in the type of its weights."""
    name, scale = f"{path.input.name} after the first MLP", path.input_scale

    def after(rows: Array) -> Array:
        behind: Array = block(torch.from_numpy(rows * scale)).double().numpy()
        return behind

    table = Behind(path.input, after, path.input.width, name)
    return replace(path, input=table, input_scale=1.0, notes=(*path.notes, f"first MLP: {block.composition}"))
