"""A model at other sizes: its config, and its counts as formulas of the sizes.

    like("gpt2", width=1024)    its config with D = 1024, for `plan`
    growth(config)              every count as a sum of products of sizes: 4·L·D² + 4·L·D is {"DDL": 4, "DL": 4}

Counts have a single source: the readers of configs and `architecture.budget`. `growth` runs them on integers that
remember the products of sizes they were computed from. The terms therefore evaluate to the figures of `tiewise plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from tiewise.checkpoint.families import family
from tiewise.core.errors import PlanError
from tiewise.core.sharing_spec import KINDS, SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.written_options import written_option
from tiewise.planning import catalogue
from tiewise.planning.architecture import Architecture, budget
from tiewise.planning.config import UNNAMED, Config, is_integer, written_sizes
from tiewise.planning.read_config import Sizes, from_sizes, read

# Names of sizes in `tiewise plan`, with the letter of each and the usual keys of configs; a family has one of the keys.
LETTERS = {"vocab": "V", "width": "D", "layers": "L", "ffn": "F", "heads": "H", "kv_heads": "K"}
KEYS = {
    "vocab": ("vocab_size",),
    "width": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "ffn": ("intermediate_size", "ffn_hidden_size"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
}
RANK, GROUPS = "k", "g"  # letters of a factored table's width, and of the number of groups of layers that share
BOUNDARIES = ("untied", "tied", "factored")
AT_ENDS = ("input_table", "output_table", "maps", "head_bias")  # components that the boundary decides

Terms = Mapping[str, int]  # product of letters → its factor; letters after a slash divide: "DDK/H"
Product = tuple[tuple[str, int], ...]  # (letter, power), sorted
Divided = set[tuple[str, str]]  # (dividend, divisor), as letters


class Size(int):
    """An integer that remembers its sum of products of sizes. `divided` collects its divisions."""

    products: dict[Product, int]
    divided: Divided

    @classmethod
    def make(cls, value: int, products: Mapping[Product, int], divided: Divided) -> Size:
        """Return `value` with this sum of products."""
        size = cls(value)
        size.products = {letters: times for letters, times in products.items() if times}
        size.divided = divided
        return size

    def __add__(self, other: int) -> Size:
        if other == 0 and not isinstance(other, Size):
            return self  # shortcut: most sums start at 0
        total = Counter(self.products)
        total.update(_products_of(other))
        return self.make(int(self) + int(other), total, self.divided)

    def __mul__(self, other: int) -> Size:
        return self._times(int(self) * int(other), _products_of(other))

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: int) -> Size:
        return self + other * -1

    def __mod__(self, other: int) -> int:
        if isinstance(other, Size) and self.products != other.products:
            self.divided.add(("".join(terms_of(self)), "".join(terms_of(other))))
        return int(self) % int(other)

    def __floordiv__(self, other: int) -> Size:
        """Divide by one product of sizes, which must divide this number."""
        ((by, times),) = _products_of(other).items()
        assert times == 1, f"{other} is no size"
        assert not int(self) % int(other), f"{self} // {other}"
        return self._times(int(self) // int(other), {tuple((letter, -power) for letter, power in by): 1})

    def _times(self, value: int, other: Mapping[Product, int]) -> Size:
        """Return `value` as the product of this sum and another."""
        total: Counter[Product] = Counter()
        for (ours, often), (theirs, times) in product(self.products.items(), other.items()):
            powers = Counter(dict(ours))
            powers.update(dict(theirs))
            total[tuple(sorted(item for item in powers.items() if item[1]))] += often * times
        return self.make(value, total, self.divided)


def _products_of(number: int) -> Mapping[Product, int]:
    """Return the products of a number. A plain integer is a multiple of the empty product."""
    return number.products if isinstance(number, Size) else {(): int(number)}


def terms_of(number: int) -> Terms:
    """Return the products of a number as strings. The key "" has the constant term."""
    terms = {}
    for powers, times in _products_of(number).items():
        above = "".join(letter * power for letter, power in powers)  # a power below 0 gives ""
        below = "".join(letter * -power for letter, power in powers)
        terms[f"{above}/{below}" if below else above] = times
    return terms


def resize_config(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a config of the same family with other `sizes`.

    Sizes for which the family has no key are left out.
    """
    keys = family(config.get("model_type")).keys
    changed = dict(config)
    for name, value in sizes.items():
        for key in KEYS[name]:
            written = keys.names.get(key, key)
            if written in config or written in keys.defaults or key in keys.names:
                changed = _without_aliases(changed, keys.names, written)
                changed[written] = value
        if name == "width" and config.get("word_embed_proj_dim") == config.get("hidden_size"):
            changed["word_embed_proj_dim"] = value  # OPT's tables stay as wide as the model, if they were
    return changed


def _without_aliases(config: Mapping[str, Any], names: Mapping[str, str], written: str) -> dict[str, Any]:
    """Return a config without other names of a key, whose value the class would use instead."""
    return {key: value for key, value in config.items() if names.get(key) != written}


def config_like(name: str, **sizes: int) -> dict[str, Any]:
    """Return the config of a catalogue model with other sizes.

    The sizes are vocab, width, layers, ffn, heads and kv_heads. All others stay as in the config: a wider model has the
    same feed-forward width and head width, if the config sets them.

    Raises:
        PlanError: the catalogue has no such model or no config of it, or its counts do not depend on one of the sizes.
    """
    listed = catalogue.find(name)
    if not listed.config:
        raise PlanError(f"only V, D and L of {listed.name} are known", f"give {written_sizes()} without a model's name")
    config = dict(listed.config)
    if len(read(config).stacks) > 1:
        raise PlanError(f"{listed.name} has an encoder and a decoder", "give a config.json with the sizes of both")
    divided: Divided = set()
    traced = read(resize_config(config, _trace_sizes({**_sizes(config), **sizes}, divided)))
    counts = budget(traced, BoundarySpec("untied"), SharingSpec()).parameters
    used = _letters(map(terms_of, counts.values())).union(*divided, "L")
    for size in sizes:
        if LETTERS[size] not in used:
            raise PlanError(f"{listed.name} has no size {size}", f"leave {written_option(size)} out")
    tied = {} if listed.tied is None else {"tie_word_embeddings": listed.tied}
    return {**resize_config(config, sizes), **tied, "_name_or_path": f"like {listed.name}"}


@dataclass(frozen=True)
class Growth:
    """Counts of one family as functions of sizes. Letters as in `LETTERS`, and `RANK` and `GROUPS`."""

    sizes: Mapping[str, int]  # the model's sizes on which its counts depend
    table_width: Terms  # E
    ends: Mapping[str, Mapping[str, Terms]]  # boundary → component → terms
    body: Mapping[str, Mapping[str, Terms]]  # kind of sharing → component → terms
    divided: Divided  # (dividend, divisor): sizes that must divide others

    def record(self) -> dict[str, Any]:
        """Return the terms of the parameter counts as JSON can store them. They do not depend on `sizes`."""
        return {
            "table_width": self.table_width,
            "ends": self.ends,
            "body": self.body,
            "divided": sorted(self.divided),
        }


def growth(model: Mapping[str, Any] | Sizes) -> Growth | None:
    """Return the counts of a config, or of a generic decoder, as terms of its sizes.

    None if its layers are not all alike, or if a size is not one number.

    Raises:
        PlanError: a size is missing or contradicts another, as `plan` reports it.
    """
    architecture = _architecture_at(model, {})  # raises for a malformed config
    sizes = _sizes(model)
    if not _has_equal_layers(architecture) or not all(map(is_integer, sizes.values())):
        return None
    divided: Divided = set()
    traced = _trace_sizes(sizes, divided)
    one, two = _architecture_at(model, {**traced, "layers": 1}), _architecture_at(model, {**traced, "layers": 2})
    depth, rank, groups = (_letter(letter, divided) for letter in (LETTERS["layers"], RANK, GROUPS))
    ends = {name: _terms_at_ends(one, name, rank) for name in BOUNDARIES}
    bodies = {kind: _terms_of_body(one, two, kind, depth, groups) for kind in KINDS}
    used = set[str]().union(*divided)
    for by_component in (*ends.values(), *bodies.values()):
        used |= _letters(by_component.values())
    matters = {name: value for name, value in sizes.items() if LETTERS[name] in used}
    return Growth(matters, terms_of(one.ends.width), ends, bodies, divided)


def _has_equal_layers(architecture: Architecture) -> bool:
    """Return whether a model has one stack, and all layers of it are alike."""
    if len(architecture.stacks) != 1:
        return False
    layers = architecture.stacks[0].layers
    return all(layer == layers[0] for layer in layers)


def _letter(letter: str, divided: Divided) -> Size:
    """Return 1 as a size that remembers a letter."""
    return Size.make(1, {((letter, 1),): 1}, divided)


def _terms_at_ends(architecture: Architecture, boundary: str, rank: Size) -> dict[str, Terms]:
    """Return the terms of each component that the boundary decides."""
    spec = BoundarySpec(boundary, width=rank if boundary == "factored" else None)
    parameters = budget(architecture, spec, SharingSpec()).parameters
    return {part: terms_of(parameters[part]) for part in AT_ENDS if part in parameters}


def _terms_of_body(one: Architecture, two: Architecture, kind: str, depth: Size, groups: Size) -> dict[str, Terms]:
    """Return the terms of each component of the body under a kind of sharing.

    Counts grow linearly with layers and with groups, so three of them decide the terms.

    Args:
        one: the model with one layer.
        two: the model with two layers.
        kind: kind of sharing.
        depth: L, the number of layers, as a letter.
        groups: number of groups of layers that share, as a letter.
    """
    shared = SharingSpec(kind)
    in_two_groups = shared if kind == "none" else SharingSpec(kind, groups=2)
    of_one, of_two, of_groups = one.body(shared), two.body(shared), two.body(in_two_groups)
    terms = {}
    for part, count in of_two.items():
        single, double, split = of_one[part].parameters, count.parameters, of_groups[part].parameters
        per_layer, per_group = double - single, split - double
        fixed = single - per_layer - per_group
        terms[part] = terms_of(fixed + per_layer * depth + per_group * groups)
    return terms


def _sizes(model: Mapping[str, Any] | Sizes) -> dict[str, int]:
    """Return all sizes of a config or of its class, in the order of `LETTERS`.

    A size that it lacks is left out.
    """
    if isinstance(model, Sizes):
        sizes = {name: getattr(model, name) for name in KEYS}
    else:
        config = Config(model, str(model.get("model_type") or UNNAMED))
        sizes = {name: _first_value(config, keys) for name, keys in KEYS.items()}
    if sizes["ffn"] is None and sizes["width"] is not None:
        sizes["ffn"] = 4 * sizes["width"]
    if sizes["kv_heads"] is None:
        sizes["kv_heads"] = sizes["heads"]
    return {name: value for name, value in sizes.items() if value is not None}


def _first_value(config: Config, keys: Iterable[str]) -> Any:
    """Return the first value of these keys that is neither null nor 0, else None."""
    return next((config.get(key) for key in keys if config.get(key)), None)


def _architecture_at(model: Mapping[str, Any] | Sizes, sizes: Mapping[str, int]) -> Architecture:
    """Return the architecture of a model at other sizes."""
    if isinstance(model, Sizes):
        return from_sizes(Sizes(**{**vars(model), **sizes}))
    return read(resize_config(model, sizes))


def _trace_sizes(sizes: Mapping[str, int], divided: Divided) -> dict[str, int]:
    """Return sizes that remember their letters.

    The number of layers stays a plain integer, because layers are counted one by one.
    """
    traced: dict[str, int] = {}
    for name, value in sizes.items():
        if name == "layers":
            traced[name] = value
        else:
            traced[name] = Size.make(value, {((LETTERS[name], 1),): 1}, divided)
    return traced


def _letters(terms: Iterable[Terms]) -> set[str]:
    """Return all letters of these terms."""
    letters: set[str] = set()
    for each in terms:
        letters.update(*each)
    return letters
