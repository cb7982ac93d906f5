"""Public language models: vocabulary, width, depth, and whether they tie. Each row says how far it was checked.

`data/models.json` has one model a line. A row's `config` holds the sizes of its class in transformers' own keys,
so that a model can be planned like it; `parameters` is what transformers 5.23 counts when it builds that config on the
meta device, with the token head and without towers for other senses. `class_default` names the figures that equal the
default of transformers' config class, where all three sizes do.

A catalogue repeats what others wrote, which `BETTER` says wherever rows are shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from tiewise.core.errors import PlanError, nearest_name, similar_names, suggest_choices
from tiewise.core.files import read_packaged_json

BETTER = "`tiewise check PATH` on the files themselves is better evidence than this catalogue."
NAMED_SIZE = re.compile(r"(?:^|-)(\d+(?:\.\d+)?)([bm])(?:-|$)")


@dataclass(frozen=True)
class Model:
    """One row. Letters as in `tiewise.core`; None where nobody was seen to say."""

    name: str
    family: str  # model type of transformers
    vocab: int | None
    width: int
    layers: int
    tied: bool | None
    parameters: int | None
    status: str
    source: str
    table_width: int | None = None  # E, where it differs from D
    layer_groups: int | None = None  # distinct layers, where layers share parameters
    class_default: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    config_source: str | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """V / D."""
        if not self.vocab:
            return None
        return self.vocab / self.width

    @property
    def table_share(self) -> float | None:
        """Share of the whole that its table or two tables, each V · E, hold. None where something is not known."""
        if self.vocab is None or self.parameters is None or self.tied is None:
            return None
        tables = 1 if self.tied else 2
        return self.vocab * (self.table_width or self.width) * tables / self.parameters

    @property
    def size(self) -> float | None:
        """Parameters: the exact count, or where there is none the size in the model's name."""
        if self.parameters is not None:
            return float(self.parameters)
        in_name = NAMED_SIZE.search(self.name)
        if in_name is None:
            return None
        return float(in_name[1]) * {"b": 1e9, "m": 1e6}[in_name[2]]

    @property
    def checked(self) -> str:
        """The verification status in one word: verified, partly, or no."""
        if self.status.startswith("verified"):
            return "verified"
        if "verified" in self.status.replace("unverified", ""):
            return "partly"
        return "no"

    def record(self) -> dict[str, Any]:
        """Return everything that is known of it, as JSON takes it."""
        computed = {"ratio": self.ratio, "table_share": self.table_share, "checked": self.checked}
        return {**asdict(self), "class_default": list(self.class_default), **computed}


# what rows can be sorted by → a model's attribute
SORTS = {
    "name": "name",
    "size": "size",
    "vocab": "vocab",
    "width": "width",
    "layers": "layers",
    "ratio": "ratio",
    "share": "table_share",
}


@cache
def models() -> tuple[Model, ...]:
    """Return all rows, in the catalogue's order."""
    return tuple(
        Model(**{**row, "class_default": tuple(row.get("class_default", ()))})
        for row in read_packaged_json("planning/data/models.json")
    )


def select(
    tied: bool | None = None,
    family: str = "",  # how a name or a model type begins
    min_vocab: int = 0,
    min_size: float | None = None,  # parameters, this many or more
    max_size: float | None = None,  # parameters, fewer than this
    sort: str | None = None,
) -> list[Model]:
    """Return the rows that pass, in the catalogue's order or sorted, unknown figures last.

    A row whose figure is not known does not pass a bound on it.

    Raises:
        PlanError: there is no such sort, or no model of this family.
    """
    if sort is not None and sort not in SORTS:
        raise PlanError(f"cannot sort by {sort!r}", suggest_choices(sort, SORTS))
    of_family = _of_family(family)
    selected = []
    for model in of_family:
        has_tying = tied is None or model.tied is tied
        has_vocab = (model.vocab or 0) >= min_vocab
        if has_tying and has_vocab and _has_size(model, min_size, max_size):
            selected.append(model)
    if sort is None:
        return selected
    figure = attrgetter(SORTS[sort])
    return sorted(selected, key=lambda model: (figure(model) is None, figure(model) or 0))


def _of_family(family: str) -> list[Model]:
    """Return models whose name or type begins with this; PlanError if there are none."""
    prefix = family.lower()
    matching, names = [], set()
    for model in models():
        names |= {model.name, model.family}
        if model.name.startswith(prefix) or model.family.startswith(prefix):
            matching.append(model)
    if matching:
        return matching
    hint, near = "`tiewise models` lists all", nearest_name(family, sorted(names))
    if near is not None:
        hint = f"did you mean {near}? {hint}"
    raise PlanError(f"no model's name or type begins with {family!r}", hint)


def _has_size(model: Model, least: float | None, most: float | None) -> bool:
    """Return whether a model has at least `least` and fewer than `most` parameters, if these are given."""
    if least is None and most is None:
        return True
    if model.size is None:
        return False
    return (least is None or model.size >= least) and (most is None or model.size < most)


def find(name: str) -> Model:
    """Return the row of this name. Case, spaces and an owner before a slash do not matter.

    Raises:
        PlanError: there is none; the message names the closest.
    """
    spelled = _plain(name.rpartition("/")[2])
    by_name = {_plain(model.name): model for model in models()}
    for spelling in (spelled, spelled.removesuffix("-hf")):
        if spelling in by_name:
            return by_name[spelling]
    close = similar_names(spelled, by_name, count=4)
    short_name = name if len(name) <= 60 else name[:57] + "..."
    hint = "`tiewise models` lists them"
    if close:
        hint = f"close: {', '.join(by_name[each].name for each in close)}"
    raise PlanError(f"the catalogue has no model {short_name!r}", hint)


def neighbours(vocab: int, width: int, layers: int | None, count: int = 6, but: Iterable[str] = ()) -> list[Model]:
    """Return the models nearest in size: the smallest √(ln²(V/V') + ln²(D/D') + ln²(L/L')), nearest first.

    A factor counts the same in each of the three, up or down: twice the vocabulary is as far as twice the depth. V, D
    and L decide what a table weighs against a body; the count of all parameters follows from them. Models named in
    `but` and rows without a vocabulary are left out. If L is not known (None, 0), its term is left out too.
    """
    skipped = set(but)

    def distance(model: Model) -> float:
        assert model.vocab is not None, "a candidate has a vocabulary"
        depth = layers or model.layers  # an unknown depth counts as the model's, so that its term is ln²(1) = 0
        pairs = ((model.vocab, vocab), (model.width, width), (model.layers, depth))
        return math.hypot(*(math.log(theirs / ours) for theirs, ours in pairs))

    candidates = [model for model in models() if model.vocab and model.name not in skipped]
    return sorted(candidates, key=distance)[:count]


def _plain(name: str) -> str:
    """Return a name as it is compared: in lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
