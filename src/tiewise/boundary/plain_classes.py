"""A model with an installed boundary in its family's own classes, for a while or as a copy.

There tables are folded with their maps and scales into dense [V, D] matrices:

    table_in = in_map(table) · input_scale            table_out = (table · out_map) · output_scale
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tiewise.boundary.boundary import apply_map, dense_output, soft_cap
from tiewise.boundary.declare_tying import declare_tying
from tiewise.boundary.journal import Journal
from tiewise.boundary.link import Link
from tiewise.boundary.saved import ENTRY, link_of, remove_entry
from tiewise.boundary.sharded_tables import PARALLEL_FORWARD
from tiewise.core.errors import InstallError, UnsupportedError


def require_link(model: Any) -> Link:
    """Return the link of a model's installed boundary. InstallError if there is none, or the head was replaced."""
    link: Link | None = None
    if isinstance(model, nn.Module):
        link = link_of(model)
    if link is None:
        raise InstallError(f"{type(model).__name__} has no installed boundary", "call tiewise.install(model) first")
    if model.get_output_embeddings() is not link.head:
        raise InstallError(f"{type(model).__name__}: its head is not the installed one", "call tiewise.install(model)")
    return link


@contextmanager
def in_plain_classes(link: Link) -> Iterator[None]:
    """Within this context the model runs in its family's own classes, with dense tables."""
    cap, shift = link.structure.softcap, _logit_shift(link)

    def add_rest(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        """Apply the rest of the boundary, which no table can hold."""
        if shift is not None:
            logits = logits + shift
        return soft_cap(logits, cap)

    journal = Journal()
    with link.head.register_forward_hook(add_rest):
        try:
            _unswap(link, journal)
            yield
        finally:
            journal.undo()


@torch.no_grad()
def _logit_shift(link: Link) -> Tensor | None:
    """Return what a projection's bias adds to the logits [V], or None."""
    out_map = getattr(link.head, "out_map", None)
    bias = getattr(out_map, "bias", None)
    if bias is None:
        return None
    shift: Tensor = (link.head.weight @ bias) * link.structure.output_scale
    return shift


@torch.no_grad()
def _unswap(link: Link, journal: Journal) -> None:
    """Put dense tables and the family's own classes in place. A table that needs no folding stays itself, tied."""
    modules: list[Any] = [*link.lookups, link.head]
    tables = [*_dense_inputs(link), _dense_output(link)]
    for module, table in zip(modules, tables, strict=True):
        if table is not module.weight:  # where FSDP gathers a table, its old value would be out of place at `undo`
            journal.set(module, "weight", table)
        journal.set(module, "__class__", type(module).plain_class)
        if PARALLEL_FORWARD in vars(module):
            journal.set(module, "forward", vars(module)[PARALLEL_FORWARD])


def _dense_inputs(link: Link) -> list[Tensor]:
    """Return the dense table of every lookup; lookups that share one share the result."""
    tables = [lookup.weight for lookup in link.lookups]
    in_map, scale = link.in_map, link.structure.input_scale
    if in_map is None and scale == 1.0:
        return tables
    dense: dict[Tensor, Tensor] = {}
    for table in set(tables):
        dense[table] = nn.Parameter(apply_map(in_map, table) * scale)
    return [dense[table] for table in tables]


def _dense_output(link: Link) -> Tensor:
    """Return the dense table of the head."""
    table, out_map, scale = link.head.weight, getattr(link.head, "out_map", None), link.structure.output_scale
    if out_map is None and scale == 1.0:
        return table
    return nn.Parameter(dense_output(table, out_map, link.hidden_width) * scale)


def plain_copy(model: Any) -> PreTrainedModel:
    """Return a copy in the family's own class, its tables dense and untied where maps or scales made them differ.

    Raises:
        InstallError: no boundary is installed.
        UnsupportedError: the family's class has no place for what the boundary adds to the logits.
    """
    _require_tables_alone(require_link(model))
    plain = copy.deepcopy(model)
    link: Link = link_of(plain)
    _unswap(link, Journal())
    link.journal.undo()
    for module, name in ((link.ends.owner, "in_map"), (link.head, "out_map")):
        if hasattr(module, name):
            delattr(module, name)
    for lookup in link.lookups:
        lookup.embedding_dim = lookup.weight.shape[1]
    link.head.in_features = link.hidden_width
    remove_entry(plain, ENTRY)
    declare_tying(plain, link.ends, Journal())
    return plain


def _require_tables_alone(link: Link) -> None:
    """Refuse a boundary with options that no dense table of the family's class can hold."""
    remedy = "keep the boundary, and load the model with tiewise.hf.load"
    if link.structure.softcap is not None:
        raise UnsupportedError(f"{link.spec}: a soft-cap is no matrix, so no dense table does the same", remedy)
    if link.spec.out_bias:
        raise UnsupportedError(f"{link.spec}: the projection's bias is no table", remedy)
    if link.structure.new_bias:
        raise UnsupportedError(f"{link.spec}: the family's own head has no bias to keep this one in", remedy)
