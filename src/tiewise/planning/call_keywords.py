"""Keywords of `plan` as a model and a setting: `tiewise.plan(vocab=32_000, width=1024, layers=12, batch=4)`.

The names are those of the options of `tiewise plan`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, get_type_hints

from tiewise.checkpoint.hub_names import checkpoint_path, is_hub_path
from tiewise.core.errors import PlanError, did_you_mean
from tiewise.core.written_options import written_option
from tiewise.planning.catalogue import find
from tiewise.planning.config import NEEDED_SIZES, written_sizes
from tiewise.planning.costs import Setting
from tiewise.planning.read_config import Sizes, require_size
from tiewise.planning.resized import config_like

Function = TypeVar("Function", bound=Callable[..., Any])


class SizeKeywords(TypedDict, total=False):
    """Sizes of a model that `plan` takes as keywords (PEP 692); `Sizes` describes them."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool


class PlanKeywords(SizeKeywords, total=False):
    """Keywords of `plan`: sizes, a public model, and the conditions of a step, which `Setting` describes."""

    like: str
    batch: int
    length: int
    dtype: str
    init: float
    world: int
    tp: int
    fsdp: int


SIZES = get_type_hints(SizeKeywords)
KEYWORDS = get_type_hints(PlanKeywords)
LIKE = "like"  # keyword that names a model of the catalogue


def shows_keywords(function: Function) -> Function:
    """Replace the parameter `**keywords` of `plan` by its names in the signature that `help` prints."""
    *parameters, rest = inspect.signature(function).parameters.values()
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    listed = [
        inspect.Parameter(keyword, keyword_only, default=None, annotation=hint.__name__)
        for keyword, hint in KEYWORDS.items()
    ]
    vars(function)["__signature__"] = inspect.Signature([*parameters, *listed, rest])
    return function


def refuse_unknown(keywords: Iterable[str]) -> None:
    """Raise PlanError if a call has keywords that `plan` does not take.

    The message suggests the nearest name.
    """
    for keyword in keywords:
        if keyword not in KEYWORDS:
            remedy = f"{did_you_mean(keyword, KEYWORDS)}help(tiewise.plan) lists all"
            raise PlanError(f"tiewise.plan has no argument {keyword!r}", remedy)


def read_setting_keywords(setting: Setting | None, keywords: Mapping[str, Any]) -> Setting:
    """Return the setting of a call, from an object or from keywords.

    Raises:
        PlanError: the call has both, or a value is outside its range.
    """
    of_model = {*SIZES, LIKE}
    conditions = {keyword: each for keyword, each in keywords.items() if keyword not in of_model and each is not None}
    if setting is None:
        std = conditions.pop("init", None)
        return Setting(**conditions, std=std)
    if conditions:
        remedy = f"leave setting out, or write setting=Setting({next(iter(conditions))}=…)"
        raise PlanError(f"both setting and {', '.join(conditions)} are given", remedy)
    return setting


def read_size_keywords(model: Any, keywords: Mapping[str, Any]) -> Any:
    """Return the model of a call.

    That is its first argument or the model that it is like, also at other sizes, or a decoder of these sizes.

    Raises:
        PlanError: there is no model, the model cannot have these sizes, or a size is outside its range.
    """
    sizes = {size: keywords[size] for size in SIZES if keywords.get(size) is not None}
    for size, count in sizes.items():
        require_size(size, count)
    like = keywords.get(LIKE)
    if like is not None:
        _require_no_model(model, like)
        if not is_hub_path(checkpoint_path(like)):
            return resized_model(like, sizes) if sizes else find(like)
        model = like
    if model is not None and sizes:
        return _resized_named_model(model, sizes)
    if sizes:
        return decoder_of_sizes(sizes)
    return model


def _require_no_model(model: Any, like: str) -> None:
    """Raise PlanError if a call has a model next to `like`."""
    if model is not None:
        raise PlanError(f"a model and {written_option(LIKE, like)} at once", "leave one of them out")


def _resized_named_model(model: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a public model at other sizes. Raises PlanError for any other model."""
    if isinstance(model, str) and not is_config_path(model):
        return resized_model(model, sizes)
    kind = "path" if isinstance(model, str) else type(model).__name__
    problem = f"{', '.join(map(written_option, sizes))} with a {kind} as the model"
    raise PlanError(problem, "change the sizes in its config, or name a public model, such as gpt2")


def is_config_path(text: str) -> bool:
    """Return whether a text is an address hf://, a file, or a folder with a config.json."""
    if is_hub_path(checkpoint_path(text)):
        return True
    return os.path.isfile(text) or os.path.isfile(os.path.join(text, "config.json"))


def resized_model(name: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model of the catalogue at other sizes. Raises PlanError if it cannot have them."""
    if "gated" in sizes:
        problem = f"{written_option('gated')} does not apply to {name}, whose class decides it"
        raise PlanError(problem, "leave it out")
    return config_like(name, **sizes)


def decoder_of_sizes(sizes: Mapping[str, Any]) -> Sizes:
    """Return a decoder of these sizes. Raises PlanError if one that it needs is missing."""
    missing = [written_option(size) for size in NEEDED_SIZES if size not in sizes]
    if missing:
        raise PlanError(f"{', '.join(missing)} missing", f"sizes need {written_sizes()}")
    return Sizes(**sizes)
