"""Public language models: vocabulary, width, depth, tying, and how far each was checked.

`data/models.json` has one model a line. A model's `config` has the sizes of its class under transformers' keys, so that
the model can be planned like it. `config_source` says where these were read: repository of GitHub, path and commit; or
a class default of transformers; or "memory" for values that nobody looked up. `parameters` is the count of
transformers 5.23 when it builds that config on the meta device, with the token head and without vision or audio
towers. `class_default` names the figures that equal the default of transformers' config class, if all three sizes do.

The catalogue copies published figures. `BETTER` says so next to every table of its models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from tiewise.core.errors import PlanError, did_you_mean, similar_names, suggest_choices
from tiewise.core.files import read_packaged_json

BETTER = "The catalogue copies published figures; `tiewise check PATH` reads the files themselves."
NAMED_SIZE = re.compile(r"(?:^|-)(\d+(?:\.\d+)?)([bm])(?:-|$)")


@dataclass(frozen=True)
class Model:
    """A model of the catalogue. Letters as in `tiewise.core`; None for an unknown value."""

    name: str
    family: str  # model type of transformers
    vocab: int | None
    width: int
    layers: int
    tied: bool | None
    parameters: int | None
    status: str
    source: str
    table_width: int | None = None  # E, if it differs from D
    layer_groups: int | None = None  # number of distinct layers, if layers share parameters
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
        """Share of all parameters in the one or two tables of V · E. None if a figure is unknown."""
        if self.vocab is None or self.parameters is None or self.tied is None:
            return None
        tables = 1 if self.tied else 2
        return self.vocab * (self.table_width or self.width) * tables / self.parameters

    @property
    def size(self) -> float | None:
        """Number of parameters: exact, or else the size in the model's name."""
        if self.parameters is not None:
            return float(self.parameters)
        in_name = NAMED_SIZE.search(self.name)
        if in_name is None:
            return None
        return float(in_name[1]) * {"b": 1e9, "m": 1e6}[in_name[2]]

    @property
    def checked(self) -> str:
        """Verification status in one word: verified, partly, or no."""
        if self.status.startswith("verified"):
            return "verified"
        if "verified" in self.status.replace("unverified", ""):
            return "partly"
        return "no"

    def record(self) -> dict[str, Any]:
        """Return the model's stored and computed figures as a mapping that JSON can store."""
        computed = {"ratio": self.ratio, "table_share": self.table_share, "checked": self.checked}
        return {**asdict(self), "class_default": list(self.class_default), **computed}


# sort key → attribute of `Model`
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
    """Return all models, in the catalogue's order."""
    return tuple(
        Model(**{**record, "class_default": tuple(record.get("class_default", ()))})
        for record in read_packaged_json("planning/data/models.json")
    )


def select(
    tied: bool | None = None,
    family: str = "",  # prefix of a name or a model type
    min_vocab: int = 0,
    min_size: float | None = None,  # parameters, at least
    max_size: float | None = None,  # parameters, fewer than this
    sort: str | None = None,
) -> list[Model]:
    """Return the models that pass all filters, in the catalogue's order or sorted.

    Unknown figures are sorted last. A model with an unknown figure does not pass a bound on that figure.

    Raises:
        PlanError: the sort key is unknown, or no model belongs to this family.
    """
    if sort is not None and sort not in SORTS:
        raise PlanError(f"cannot sort by {sort!r}", suggest_choices(sort, SORTS))
    of_family = _models_of_family(family)
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


def _models_of_family(family: str) -> list[Model]:
    """Return models whose name or type begins with `family`; PlanError if there are none."""
    prefix = family.lower()
    matching, names = [], set()
    for model in models():
        names |= {model.name, model.family}
        if model.name.startswith(prefix) or model.family.startswith(prefix):
            matching.append(model)
    if matching:
        return matching
    remedy = f"{did_you_mean(family, sorted(names))}`tiewise plan --list` lists all"
    raise PlanError(f"no model's name or type begins with {family!r}", remedy)


def _has_size(model: Model, least: float | None, most: float | None) -> bool:
    """Return whether a model has at least `least` and fewer than `most` parameters.

    None sets no bound.
    """
    if least is None and most is None:
        return True
    if model.size is None:
        return False
    return (least is None or model.size >= least) and (most is None or model.size < most)


def find(name: str) -> Model:
    """Return the model of this name. Case, spaces and an owner before a slash do not matter.

    Raises:
        PlanError: no model has this name; the message lists the closest names.
    """
    spelled = _normalise_name(name.rpartition("/")[2])
    by_name = {_normalise_name(model.name): model for model in models()}
    for spelling in (spelled, spelled.removesuffix("-hf")):
        if spelling in by_name:
            return by_name[spelling]
    close = similar_names(spelled, by_name, count=4)
    short_name = name if len(name) <= 60 else name[:57] + "..."
    hint = "`tiewise plan --list` lists all"
    if close:
        hint = f"did you mean {' or '.join(by_name[each].name for each in close)}? {hint}"
    raise PlanError(f"the catalogue has no model {short_name!r}", hint)


def neighbours(vocab: int, width: int, layers: int | None, count: int = 6, but: Iterable[str] = ()) -> list[Model]:
    """Return the models nearest in size, nearest first.

    The distance is √(ln²(V/V') + ln²(D/D') + ln²(L/L')). A factor counts the same in each of the three, up or down:
    twice the vocabulary is as far as twice the depth. V, D and L decide the size of a table compared with the body; the
    count of all parameters follows from them. Models named in `but` and models without a vocabulary are left out. If L
    is unknown (None, 0), its term is left out too. Of models with equal V, D, L and tying only the first counts: later
    versions of one model are not further evidence.
    """
    excluded = distinct(model for model in models() if model.name in set(but))

    def distance(model: Model) -> float:
        """Return the distance of `model` from the sizes."""
        assert model.vocab is not None, "a candidate has a vocabulary"
        depth = layers or model.layers  # an unknown depth counts as the model's, so that its term is ln²(1) = 0
        pairs = ((model.vocab, vocab), (model.width, width), (model.layers, depth))
        return math.hypot(*(math.log(theirs / ours) for theirs, ours in pairs))

    with_vocab = (model for model in models() if model.vocab)
    candidates = [model for model in distinct((*excluded, *with_vocab)) if model not in excluded]
    return sorted(candidates, key=distance)[:count]


def distinct(listed: Iterable[Model]) -> list[Model]:
    """Return the first of all models with equal V, D, L and tying, in their order."""
    by_choice: dict[tuple[int | None, int, int, bool | None], Model] = {}
    for model in listed:
        by_choice.setdefault((model.vocab, model.width, model.layers, model.tied), model)
    return list(by_choice.values())


def _normalise_name(name: str) -> str:
    """Return a name in the form used for comparison: lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
