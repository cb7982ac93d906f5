"""Counts of a class that is built without weights, as JSON. It runs in the child process of `checkpoint.built_class`.

The total and the tables are exact. Parameters are sorted by their place: tables that token ids index, experts, towers
next to the language model, and all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tiewise.checkpoint.indexed_tensors import PLAIN_TABLE

EXPERTS = re.compile(r"(?:^|\.)experts\.")
# keys of the number of experts that a token uses, as the configs of transformers name it
CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    *("experts_per_token", "num_selected_experts"),
)


def answer(model: Any, _argument: Any) -> dict[str, Any]:
    """Return the counts of a model once its tensors are tied. `unsuitable` is the reason why it has none."""
    model.tie_weights()
    table, head = model.get_input_embeddings(), _output_embeddings(model)
    if getattr(table, "weight", None) is None:
        return {"unsuitable": "no table of tokens"}
    bias = getattr(head, "bias", None)
    if head is not None and head.weight.shape != table.weight.shape:
        return {"unsuitable": "two tables of different shapes"}
    counted = {id(each) for each in (table.weight, getattr(head, "weight", None), bias)}
    others = [(name, each) for name, each in model.named_parameters() if id(each) not in counted]
    reply = {
        "class": type(model).__name__,
        "vocab": table.weight.shape[0],
        "width": table.weight.shape[1],
        "has_head": head is not None,
        "tied": head is not None and head.weight is table.weight,
        "head_biases": int(bias is not None),
        "chosen": _chosen_experts(model.config),
    }
    return {**reply, **_sums(model, others, table)}


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
    sums = {"experts": 0, "towers": 0, "other": 0, "multiplied": 0}
    counts = set()
    text = _text_prefix(model, table)
    for name, parameter in others:
        size = parameter.numel()
        if not name.startswith(text):
            sums["towers"] += size
        elif PLAIN_TABLE.search(name.removesuffix(".weight")):
            tables.append(list(parameter.shape))
        elif EXPERTS.search(name):
            sums["experts"] += size
            if parameter.dim() > 1:
                counts.add(parameter.shape[0])
        else:
            sums["other"] += size
            sums["multiplied"] += size * (parameter.dim() > 1)
    return {**sums, "other_tables": tables, "expert_count": _expert_count(model, counts)}


def _text_prefix(model: Any, table: Any) -> str:
    """Return the prefix of the language model in a composite.

    It is "" for any other model.
    """
    if model.config.get_text_config() is model.config:
        return ""
    for name, module in model.named_modules():
        if module is table:
            parent, _, _ = name.rpartition(".")
            return f"{parent}.".removeprefix(".")
    return ""


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
