"""The same function in the family's own classes: tables folded with their maps and scales into dense [V, D] matrices.

    table_in = in_map(table) · input_scale            table_out = (table · out_map) · output_scale

It is the oracle against which an installed model is verified, and what exporting a dense model writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.journal import Journal
from tiewise.boundary.link import Link
from tiewise.boundary.maps import dense_tables


@contextmanager
def plainly(link: Link) -> Iterator[None]:
    """Within this context the model runs in its family's own classes, with dense tables."""
    journal = Journal()
    with _shift(link), _softcap(link):
        try:
            unswap(link, journal)
            yield
        finally:
            journal.undo()


def unswap(link: Link, journal: Journal) -> None:
    """Put dense tables and the family's own classes in place."""
    modules: list[Any] = [*link.lookups, link.head]
    made: dict[int, Tensor] = {}
    tables = [made.setdefault(id(module.weight), _dense_in(link, module)) for module in link.lookups]
    tables.append(_dense_out(link))
    for module, table in zip(modules, tables, strict=True):
        journal.set(module, "weight", table)
        journal.set(module, "__class__", type(module).plain_class)


def _dense_in(link: Link, lookup: nn.Embedding) -> Tensor:
    in_map, scale = getattr(lookup, "in_map", None), link.structure.input_scale
    if in_map is None and scale == 1.0:
        return lookup.weight  # the Parameter itself, so that tied stays tied
    dense = dense_tables(lookup.weight, link.head.weight, in_map, None, link.hidden_width)[0]
    return nn.Parameter(dense.detach() * scale)


def _dense_out(link: Link) -> Tensor:
    head, scale = link.head, link.structure.output_scale
    out_map = getattr(head, "out_map", None)
    if out_map is None and scale == 1.0:
        return head.weight
    dense = dense_tables(link.lookups[0].weight, head.weight, None, out_map, link.hidden_width)[1]
    return nn.Parameter(dense.detach() * scale)


def _shift(link: Link) -> Any:
    """What a projection's bias adds to the logits; it is in none of the two tables."""
    bias = getattr(getattr(link.head, "out_map", None), "bias", None)
    if bias is None:
        return nullcontext()
    with torch.no_grad():
        shift = (link.head.weight @ bias) * link.structure.output_scale
    return link.head.register_forward_hook(lambda module, args, logits: logits + shift)


def _softcap(link: Link) -> Any:
    cap = link.structure.softcap
    if cap is None:
        return nullcontext()
    # a hook's handle removes itself at the end of a with block
    return link.head.register_forward_hook(lambda module, args, logits: cap * torch.tanh(logits / cap))
