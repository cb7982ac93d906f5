"""Parts of a model, with every parameter counted by component.

Count           one component: parameters stored, multiplied with a token, and read for a token
LayerCounts     counts of one layer: attention and ffn, each with its norms, and parts common to both
AppliedLayers   L layers in a row, and the parts outside its layers (positions, final norm)
Architecture    the tables, the layers, and the parts of neither (pooler, head transform)
budget          counts under a boundary and a sharing
thresholds      sizes from which tying and factoring pay

A boundary acts where `tiewise.install` acts: on tables of the model's table width E. A model that maps between its
tables and its body (OPT-350M, ALBERT, ELECTRA) keeps those maps, and a factored table maps to E before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tiewise.core.errors import PlanError, SpecError
from tiewise.core.measurement import rounded
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec, largest_rank
from tiewise.planning.first_loss import FreshBody

# Every component that a plan may list, in the order of its rows.
COMPONENTS = (
    *("input_table", "output_table", "other_tables", "maps", "positions", "token_types", "embedding_norm"),
    *("attention", "cross_attention", "mixer", "ffn", "experts", "shared_experts", "router", "norms"),
    *("pooler", "head_transform", "head_bias", "towers", "other"),
)
Counts = Mapping[str, "Count"]  # by component


@dataclass(frozen=True)
class Count:
    """Parameters of one component. The three differ if a token does not use all stored parameters."""

    parameters: int = 0  # stored numbers
    multiplied: int = 0  # weights that one token is multiplied by (2 FLOPs each, forward): 0 for norms, biases, lookups
    read: int = 0  # numbers that one token needs: one row of a lookup, the chosen experts, and everything else

    def __add__(self, other: Count) -> Count:
        return Count(self.parameters + other.parameters, self.multiplied + other.multiplied, self.read + other.read)

    def times(self, stored: int, used: int | None = None) -> Count:
        """Return `stored` copies of this count, of which a token uses `used` (None: all).

        A bool counts as 0 or 1 copies.
        """
        if used is None:
            used = stored
        return Count(self.parameters * stored, self.multiplied * used, self.read * used)


def linear(width_from: int, width_to: int, bias: bool = False) -> Count:
    """Count the parameters of `x @ weightᵀ + bias`, weight [to, from]."""
    weights = width_from * width_to
    stored = weights
    if bias:
        stored += width_to
    return Count(stored, weights, stored)


def elementwise(count: int) -> Count:
    """Count parameters that are added or scale elementwise: a norm, a bias."""
    return Count(count, 0, count)


def lookup(rows: int, width: int) -> Count:
    """Count a table [rows, width], from which a token reads one row."""
    if not rows:
        return Count()
    return Count(rows * width, 0, width)


def norm(width: int, kind: str = "layer", count: int = 1) -> Count:
    """Count `count` norms of `width`.

    `kind` is rms, layer, layer without bias, or none, which has no parameters.
    """
    return elementwise({"none": 0, "rms": 1, "layer": 2, "layer without bias": 1}[kind] * width * count)


def feed_forward(d: int, width: int, gated: bool = True, bias: bool = False) -> Count:
    """Count two maps with an activation between them, or three with a gate."""
    return linear(d, width, bias).times(2 if gated else 1) + linear(width, d, bias)


def sum_by_component(*several: Counts) -> dict[str, Count]:
    """Sum counts by component, in the order of `COMPONENTS`, without empty components."""
    sums: dict[str, Count] = {}
    for counts in several:
        for name, count in counts.items():
            sums[name] = sums.get(name, Count()) + count
    filled = {name for name, count in sums.items() if count.parameters}
    return {name: sums[name] for name in COMPONENTS if name in filled}


def total(counts: Counts) -> Count:
    """Return the sum over all components."""
    return sum(counts.values(), Count())


def divide_width(width: int, heads: int) -> int:
    """Return the width of one of `heads` heads.

    Raises:
        PlanError: `heads` does not divide `width`.
    """
    if width % heads:
        raise PlanError(f"hidden_size {width} is not a multiple of {heads} heads", "choose heads that divide the width")
    return width // heads


@dataclass(frozen=True)
class Heads:
    """Shape of attention, or of the recurrent state that replaces it.

    It decides the cost of the scores and the values cached per token.
    """

    count: int = 0
    width: int = 0
    kv: int = 0  # heads of keys and values
    latent: int = 0  # values cached per token instead of keys and values (DeepSeek)
    state: int = 0  # values of a recurrent state per layer, independent of the length (Mamba)

    @classmethod
    def of(cls, d: int, count: int, kv: int | None = None, width: int | None = None) -> Heads:
        """Return heads with defaults.

        By default there are as many of keys and values as of queries, each D / heads wide.

        Raises:
            PlanError: the key-value heads do not divide the heads, or the heads do not divide D.
        """
        if kv is not None and count % kv:
            fix = "the key-value heads must divide the heads"
            raise PlanError(f"{count} heads cannot be grouped over {kv} key-value heads", fix)
        return cls(count, width or divide_width(d, count), kv or count)

    def maps(self, d: int, bias: bool = False, out_bias: bool = False, norms: int = 0) -> Count:
        """Count query, key, value and output maps in a model of width `d`.

        `norms` counts the parameters of norms of queries and keys, or of attention sinks.
        """
        queries, keys = self.count * self.width, self.kv * self.width
        inward = linear(d, queries, bias) + linear(d, keys, bias).times(2)
        return inward + linear(queries, d, out_bias) + elementwise(norms)


@dataclass(frozen=True)
class LayerCounts:
    """Counts of one layer by sublayer. Attention includes its norms and cross-attention."""

    attention: Counts
    ffn: Counts
    common: Counts = field(default_factory=dict)  # parts common to both sublayers: the one norm of a parallel block


@dataclass(frozen=True)
class AppliedLayers:
    """Layers in the order in which they are applied.

    `sharing` is the model's built-in sharing: which of the layers have the same parameters.
    """

    name: str  # "encoder" or "decoder"
    layers: tuple[LayerCounts, ...]
    around: Counts = field(default_factory=dict)
    heads: Heads = field(default_factory=Heads)  # of every layer, unless `layer_heads` lists them
    saved_per_token: int = 0  # values stored for the backward pass by one token in one layer (an estimate)
    normed_per_token: int = 0  # inputs of RMS norms, which store more for each (an estimate)
    sharing: SharingSpec = field(default_factory=SharingSpec)
    layer_heads: tuple[Heads, ...] = ()  # heads of each layer, if the layers differ

    @property
    def heads_by_layer(self) -> tuple[Heads, ...]:
        """Heads of each layer."""
        return self.layer_heads or (self.heads,) * len(self.layers)

    def stored(self, sharing: SharingSpec) -> dict[str, Count]:
        """Count unique parameters under `sharing`. Only layers of equal shape share.

        Raises:
            SpecError: more groups than layers, or low-rank differences, whose size depends on how matrices are fused.
        """
        if sharing.rank:
            problem = f"{sharing}: a config cannot tell the size of low-rank differences"
            raise SpecError(problem, "leave +rank out; share_layers(model, …).differences counts them")
        unique: dict[Any, Counts] = {}
        for index, layer in enumerate(self.layers):
            group = sharing.group_of(index, len(self.layers))
            for name, counts in vars(layer).items():
                shared = sharing.kind in ("all", name)
                key = group if shared else -1 - index  # negative and unique if this part is not shared
                unique[name, key, tuple(counts.items())] = counts
        return sum_by_component(self.around, *unique.values())

    def applied(self) -> Count:
        """Sum over every application of every layer, which sharing does not change."""
        applied = total(self.around)
        for layer in self.layers:
            applied += total(layer.attention) + total(layer.ffn) + total(layer.common)
        return applied


@dataclass(frozen=True)
class TokenTables:
    """Tables of the unchanged model, [`vocab`, `width`], with the head's maps and biases."""

    vocab: int
    width: int
    tied: bool
    head: bool = True
    maps: Count = field(default_factory=Count)
    head_biases: int = 0  # vectors of V at the head; BERT's untied class stores two and uses one


@dataclass(frozen=True)
class Architecture:
    """Sizes and counts of a model, as its config describes them."""

    family: str
    width: int
    ends: TokenTables
    stacks: tuple[AppliedLayers, ...]  # empty if layers are not counted one by one
    around: Counts = field(default_factory=dict)  # pooler, head transform, heads of other tasks
    fresh: FreshBody | None = None  # None for families whose first loss has not been measured
    table_std: float = 0.02  # initial scale of the table's entries
    output_scale: float = 1.0  # factor of hidden states or logits at the head
    frozen: int = 0  # parameters that are never trained: sinusoidal positions stored as tables
    estimated: bool = False  # counted by a generic formula
    not_counted: tuple[str, ...] = ()  # names of parts that are missing from every count
    tables_alone: bool = False  # only tables that token ids index are counted
    counts_active: bool = True  # a model that was built may not show how many experts a token uses
    notes: tuple[str, ...] = ()  # limits of the figures, in sentences

    @property
    def boundary(self) -> BoundarySpec:
        """Boundary of the unchanged model."""
        return BoundarySpec("tied" if self.ends.tied or not self.ends.head else "untied")

    @property
    def sharing(self) -> SharingSpec:
        """Sharing of layers in the unchanged model."""
        if not self.stacks:
            return SharingSpec()
        return self.stacks[0].sharing

    @property
    def kind(self) -> str:
        """Kind of model: decoder, encoder, encoder–decoder or recurrent model.

        A recurrent model has a recurrent state instead of attention. "" if the layers are not counted one by one.
        """
        heads = [each for stack in self.stacks for each in stack.heads_by_layer]
        recurrent = any(each.state for each in heads)
        attends = any(each.count for each in heads)
        if recurrent and not attends:
            return "recurrent model"
        return "–".join(stack.name for stack in self.stacks)

    @property
    def layers(self) -> int:
        """Number of applied layers, over all stacks."""
        return sum(len(stack.layers) for stack in self.stacks)

    def body(self, sharing: SharingSpec) -> dict[str, Count]:
        """Count unique parameters under `sharing`, without the tables, maps and biases at the ends.

        Raises as `AppliedLayers.stored` does.
        """
        return sum_by_component(self.around, *(stack.stored(sharing) for stack in self.stacks))

    def parameters(self) -> Mapping[str, int]:
        """Return unique parameters of the unchanged model by component.

        A tied table is counted once, as the input table.
        """
        parameters = dict(budget(self, self.boundary, self.sharing).parameters)
        if "head_bias" in parameters:  # a boundary has one bias, a class may store more
            parameters["head_bias"] = self.ends.vocab * self.ends.head_biases
        return parameters

    @property
    def total(self) -> int:
        """Number of unique parameters."""
        return sum(self.parameters().values())

    @property
    def active(self) -> int:
        """Number of unique parameters that one token uses, as in `Budget.active`."""
        return budget(self, self.boundary, self.sharing).active


@dataclass(frozen=True)
class Budget:
    """Unique parameters of one choice, and the work of one token."""

    boundary: BoundarySpec
    sharing: SharingSpec
    parameters: Mapping[str, int]  # by component
    frozen: int
    multiplied: int  # weights multiplied with one token, over every application of every layer, and the head's
    read: int | None  # parameters that one decoded token needs; None if the model has no decoder
    # Unique parameters that one token uses: one row of a lookup, the chosen experts, no tower, and everything else.
    active: int

    @property
    def total(self) -> int:
        """Number of unique parameters."""
        return sum(self.parameters.values())

    @property
    def trainable(self) -> int:
        """Number of unique parameters that get a gradient."""
        return self.total - self.frozen

    @property
    def tables(self) -> int:
        """Parameters of the tables, without their maps."""
        return self.parameters["input_table"] + self.parameters.get("output_table", 0)


def budget(architecture: Architecture, boundary: BoundarySpec, sharing: SharingSpec) -> Budget:
    """Count `architecture` under a choice of boundary and sharing.

    Raises:
        SpecError: a table or rank wider than the model's table, or more groups than layers.
    """
    ends, per_token = _counts_at_ends(architecture, boundary)
    body = architecture.body(sharing)
    around = total(architecture.around)
    applied, read = around, None
    for stack in architecture.stacks:
        applied += stack.applied()
        if stack.name == "decoder":
            read = per_token.read + stack.applied().read + around.read
    frozen = architecture.frozen
    if boundary.freeze:
        frozen += ends["input_table"].parameters
    return Budget(
        boundary,
        sharing,
        {name: count.parameters for name, count in sum_by_component(ends, body).items()},
        frozen,
        per_token.multiplied + applied.multiplied,
        read,
        _active_at_ends(architecture, boundary, ends) + _active_parameters(body),
    )


def _counts_at_ends(architecture: Architecture, boundary: BoundarySpec) -> tuple[Counts, Count]:
    """Return stored counts at both ends by component, and the counts of one token.

    Raises:
        SpecError: a table or rank wider than the model's table.
    """
    vocab, width = architecture.ends.vocab, architecture.ends.width
    boundary.require_free_tokens(vocab)
    in_width, out_width = boundary.table_widths(width)
    if boundary.kind == "residual" and (boundary.rank or 0) > width:
        raise SpecError(f"{boundary}: rank {boundary.rank} exceeds the table width {width}", f"choose a rank ≤ {width}")
    ends = {"input_table": lookup(vocab, in_width), "maps": architecture.ends.maps + _maps_between(boundary, width)}
    if not architecture.ends.head:
        return ends, total(ends)
    head = linear(out_width, vocab)
    biases = vocab * max(int(boundary.bias), min(architecture.ends.head_biases, 1))
    ends["head_bias"] = Count(biases, 0, biases)
    if boundary.tables == 2:
        ends["output_table"] = head
        return ends, total(ends)
    return ends, total(ends) + head  # tied: the head's table is counted as the input table


def _active_parameters(body: Counts) -> int:
    """Return the unique parameters of a body that one token uses.

    A part may be applied several times.
    """
    return sum(min(count.read, count.parameters) for count in body.values())


def _active_at_ends(architecture: Architecture, boundary: BoundarySpec, ends: Counts) -> int:
    """Return the unique parameters at both ends that one token uses.

    A tied head uses the complete table.
    """
    if architecture.ends.head and boundary.tables == 1:
        return total({**ends, "input_table": elementwise(ends["input_table"].parameters)}).read
    return total(ends).read


def _maps_between(boundary: BoundarySpec, width: int) -> Count:
    """Return the counts of a boundary's maps between its tables and the model."""
    shapes = boundary.map_shapes(width).values()
    stored = sum(prod(shape) for shape in shapes)
    matrices = sum(prod(shape) for shape in shapes if len(shape) > 1)
    # a definite map stores one square triangular factor: two products at the head, two solves at the input
    multiplied = matrices
    if boundary.kind == "spd":
        multiplied *= 3
    return Count(stored, multiplied, stored)


def thresholds(
    vocab: int, d: int, body: int | None, head: bool = True, estimated: bool = False
) -> list[dict[str, Any]]:
    """Return each formula for tying and factoring with its value.

    A body of B parameters (all but the tables) has c = B / d², which is 12 L for L plain layers. Tying saves V·d of
    2·V·d + B parameters. That is more than a share s if V/d > c·s / (1 − 2s); no V/d is enough for s ≥ ½. `here` is the
    model's figure, if the formula bounds one. If B is None, values that depend on it are None. If B is `estimated`,
    they are rounded and marked as estimated. Without a `head`, formulas of tying are left out.
    """
    formula = "1 / (1 + B/(V·d))"
    scale = "B not counted"
    share = saved = c = None
    if body is not None:
        table, c = vocab * d, body / d**2
        scale = f"c = B/d² ≈ {c:.3g}" if estimated else f"c = B/d² = {c:.4g}"
        share, saved = table / (table + body), table / (2 * table + body)
    one_map, two_maps = largest_rank(vocab, d, 1), largest_rank(vocab, d, 2)
    narrow = _threshold("largest k that still saves, one table and one map", "k(V + d) < V·d", one_map, d)
    if not head:
        name = "share of the model that is its table"
        return [_threshold(name, f"{formula}, {scale}", share, estimated=estimated), narrow]
    rows = []
    for s in (0.05, 0.1, 0.2, 0.3):
        bound = None if c is None else c * s / (1 - 2 * s)
        name = f"V/d above which tying saves more than {s:.0%}"
        rows.append(_threshold(name, f"c·s/(1−2s), s = {s:g}, {scale}", bound, vocab / d, estimated))
    return [
        *rows,
        _threshold("share of the untied model that tying saves", "V·d / (2·V·d + B)", saved, estimated=estimated),
        _threshold("share of the tied model that is its table", formula, share, estimated=estimated),
        _threshold("largest k that still saves, tied, maps at both ends", "k(V + 2d) < V·d", two_maps, d),
        narrow,
    ]


def _threshold(
    name: str, formula: str, value: float | None, here: float | None = None, estimated: bool = False
) -> dict[str, Any]:
    """Return the record of a threshold. `value` is rounded if it is `estimated`, and `here` is the model's figure."""
    is_rounded = estimated and value is not None
    if value is not None and estimated:
        value = rounded(value)
    return {"name": name, "formula": formula, "value": value, "here": here, "estimated": is_rounded}
