"""Counts of a class that is built without weights, as JSON. It runs in the child process of `checkpoint.built_class`.

The total and the tables are exact. Parameters are sorted by their place: tables that token ids index, tables of
positions, experts, towers next to the language model, and all others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from tiewise.checkpoint.indexed_tensors import PLAIN_TABLE
from tiewise.core.errors import to_printable
from tiewise.planning.uncounted import TOWER

POSITIONS = re.compile(r"(?:^|[._])(?:wpe|position_embeddings?|embed_positions|token_type_embeddings)\.weight$")
EXPERTS = re.compile(r"(?:^|\.)experts\.")
# keys of the number of experts that a token uses, as the configs of transformers name it
CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    *("experts_per_token", "num_selected_experts"),
)


def answer(model: Any, sizes: list[str] | None) -> dict[str, Any]:
    """Return the counts of a model once its tensors are tied. `unsuitable` is the reason why it has none.

    Args:
        model: the built model.
        sizes: keys that its config class has to read; a class silently builds its default for a size of another name.
    """
    unread = _unread_keys(type(model.config), sizes or [])
    if unread:
        return {"unsuitable": f"no key {to_printable(unread[0])}"}
    model.tie_weights()
    table, head = model.get_input_embeddings(), _output_embeddings(model)
    if getattr(table, "weight", None) is None:
        return {"unsuitable": "no table of tokens"}
    if head is None:
        return _counts(model, table, None, 0)
    extra_rows = len(table.weight) - len(head.weight)
    if extra_rows < 0 or head.weight.shape[1:] != table.weight.shape[1:]:
        return {"unsuitable": "two tables of different shapes"}
    return _counts(model, table, head, extra_rows)


def _counts(model: Any, table: Any, head: Any | None, extra_rows: int) -> dict[str, Any]:
    """Return the counts of a model whose input table has `extra_rows` more rows than its head."""
    bias, (rows, width) = getattr(head, "bias", None), table.weight.shape
    counted = {id(each) for each in (table.weight, getattr(head, "weight", None), bias)}
    others = [(name, each) for name, each in model.named_parameters() if id(each) not in counted]
    sums = _sums(model, others, table)
    if extra_rows:  # tokens that a model reads and never writes
        sums["other_tables"].append([extra_rows, width])
    return {
        "class": type(model).__name__,
        "vocab": rows - extra_rows,
        "width": width,
        "has_head": head is not None,
        "tied": head is not None and head.weight is table.weight,
        "head_biases": int(bias is not None),
        "chosen": _chosen_experts(model.config),
        **sums,
    }


def _unread_keys(config_class: Any, keys: list[str]) -> list[str]:
    """Return the keys that a config class does not read, sorted."""
    return sorted({*keys} - {*inspect.signature(config_class).parameters, *config_class.attribute_map})


def _output_embeddings(model: Any) -> Any:
    """Return the output head with a weight; None for a class without one."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if getattr(head, "weight", None) is None:
        return None
    return head


def _sums(model: Any, others: list[tuple[str, Any]], table: Any) -> dict[str, Any]:
    """Return the numbers of parameters by their place."""
    tables: list[list[int]] = []
    positions: list[list[int]] = []
    sums = {"experts": 0, "towers": 0, "other": 0, "multiplied": 0}
    counts = set()
    text, body = _text_prefix(model, table), f"{model.base_model_prefix}."
    for name, parameter in others:
        size = parameter.numel()
        if _is_of_tower(name, text, body):
            sums["towers"] += size
        elif PLAIN_TABLE.search(name.removesuffix(".weight")):
            tables.append(list(parameter.shape))
        elif POSITIONS.search(name):
            positions.append(list(parameter.shape))
        elif EXPERTS.search(name):
            sums["experts"] += size
            if parameter.dim() > 1:
                counts.add(parameter.shape[0])
        else:
            sums["other"] += size
            sums["multiplied"] += size * (parameter.dim() > 1)
    return {**sums, "other_tables": tables, "positions": positions, "expert_count": _expert_count(model, counts)}


def _is_of_tower(name: str, text: str, body: str) -> bool:
    """Return whether a parameter lies outside the language model, whose prefix is `text`.

    If that prefix is empty, the name behind the prefix of the `body` decides: an older composite has no separate config
    of its language model.
    """
    if text:
        return not name.startswith(text)
    return bool(TOWER.search(name.removeprefix(body)))


def _text_prefix(model: Any, table: Any) -> str:
    """Return the prefix of the language model in a composite.

    The language model is the smallest part with the table and with layers, or the largest part around it with the same
    config. The prefix is "" for any other model.
    """
    text_config = model.config.get_text_config()
    if text_config is model.config:
        return ""
    for name, module in model.named_modules():
        if module is table:
            part = _outer(name)
            while part and not _has_layers(model.get_submodule(part)):
                part = _outer(part)
            while _outer(part) and getattr(model.get_submodule(_outer(part)), "config", None) is text_config:
                part = _outer(part)
            return f"{part}.".removeprefix(".")
    return ""


def _outer(name: str) -> str:
    """Return the name of the module that holds a module; "" for the model."""
    return name.rpartition(".")[0]


def _has_layers(module: Any) -> bool:
    """Return whether a module contains a list of modules."""
    return any(type(part).__name__ == "ModuleList" for part in module.modules())


def _expert_count(model: Any, first_dimensions: set[int]) -> int | None:
    """Return the number of experts in a layer.

    None if it differs between layers or cannot be read.
    """
    numbered = set(_numbers_of_experts(model))
    if numbered:
        (count, *more) = numbered
        if not more:
            return count
        return None
    if len(first_dimensions) == 1:
        return next(iter(first_dimensions))
    return None


def _numbers_of_experts(model: Any) -> Iterator[int]:
    """Yield the length of each list of experts that are separate modules."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and type(module).__name__ == "ModuleList":
            yield len(module)


def _chosen_experts(config: Any) -> int | None:
    """Return the number of experts that a token uses; None if no key says it."""
    text = config.get_text_config()
    for key in CHOSEN:
        chosen = getattr(text, key, None)
        if type(chosen) is int:
            return chosen
    return None
