"""A model with an installed boundary, run in its plain classes or copied into them.

The plain classes are those of the model's family. Their dense [V, D] tables combine tables, maps and scales:

    table_in = in_map(table) · input_scale            table_out = (table · out_map) · output_scale

With free rows, the table of `table_out` has them.
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
from tiewise.boundary.free_rows import output_table
from tiewise.boundary.journal import Journal
from tiewise.boundary.link import Link
from tiewise.boundary.saved import ENTRY, link_of, remove_entry
from tiewise.boundary.sharded_tables import PARALLEL_FORWARD
from tiewise.core.errors import InstallError, UnsupportedError


def require_link(model: Any) -> Link:
    """Return the link of a model's installed boundary.

    Raises:
        InstallError: no boundary is installed, or the head was replaced.
    """
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
    """Run the model in its family's plain classes, with dense tables, within this context."""
    cap, shift = link.structure.softcap, _logit_shift(link)

    def add_rest(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        """Add the bias's share and the soft-cap, which no table can hold."""
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
    """Return the logits [V] that a projection's bias adds, or None without a bias."""
    out_map = getattr(link.head, "out_map", None)
    bias = getattr(out_map, "bias", None)
    if bias is None:
        return None
    shift: Tensor = (link.head.weight @ bias) * link.structure.output_scale
    return shift


@torch.no_grad()
def _unswap(link: Link, journal: Journal) -> None:
    """Set dense tables and the family's plain classes.

    A table without maps and scales stays the same Parameter, so a tied one stays tied.
    """
    modules: list[Any] = [*link.lookups, link.head]
    tables = [*_dense_inputs(link), _dense_output(link)]
    for module, table in zip(modules, tables, strict=True):
        if table is not module.weight:  # else leave it: FSDP may free a gathered table, and `undo` would set that one
            journal.set(module, "weight", table)
        journal.set(module, "__class__", type(module).plain_class)
        if PARALLEL_FORWARD in vars(module):
            journal.set(module, "forward", vars(module)[PARALLEL_FORWARD])


def _dense_inputs(link: Link) -> list[Tensor]:
    """Return the dense table of every lookup. Lookups that share a table share the dense one."""
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
    table, out_map, scale = output_table(link.head), getattr(link.head, "out_map", None), link.structure.output_scale
    is_stored = table is link.head.weight
    if is_stored and out_map is None and scale == 1.0:
        return table
    return nn.Parameter(dense_output(table, out_map, link.hidden_width) * scale)


def plain_copy(model: Any) -> PreTrainedModel:
    """Return a copy of a model in its family's plain class, with dense tables.

    The copy computes the same function. If maps or scales make the dense tables differ, they are untied.

    Args:
        model: model with an installed boundary; it does not change.

    Raises:
        InstallError: no boundary is installed.
        UnsupportedError: the boundary has a soft-cap or a bias that the plain class cannot hold.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from tiewise import install
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> _ = install(model, "factored:4")
    >>> plain_copy(model).get_input_embeddings().weight.shape
    torch.Size([50, 8])
    """
    _require_tables_alone(require_link(model))
    plain = copy.deepcopy(model)
    link: Link = link_of(plain)
    _unswap(link, Journal())
    link.journal.undo()
    for module, name in ((link.ends.first_lookup, "in_map"), (link.head, "out_map"), (link.head, "free")):
        if hasattr(module, name):
            delattr(module, name)
    for lookup in link.lookups:
        lookup.embedding_dim = lookup.weight.shape[1]
    link.head.in_features = link.hidden_width
    remove_entry(plain, ENTRY)
    vars(plain.config).update(link.spec.export_entry())
    declare_tying(plain, link.ends, Journal())
    return plain


def _require_tables_alone(link: Link) -> None:
    """Refuse a boundary whose options no dense table of the family's class can hold."""
    remedy = "keep the boundary, and load the model with tiewise.hf.load"
    if link.structure.softcap is not None:
        raise UnsupportedError(f"{link.spec}: a soft-cap is no matrix, so no dense table does the same", remedy)
    if link.spec.out_bias:
        raise UnsupportedError(f"{link.spec}: the projection's bias is no table", remedy)
    if link.structure.has_new_bias:
        raise UnsupportedError(f"{link.spec}: the family's own head has no bias to keep this one in", remedy)
