"""Attach a boundary to a model: structure, declared tying, swapped classes, hooks. What install verifies afterwards.

Kept apart from `install` because a model class that is being loaded attaches too, on the meta device, where nothing
can be run.
"""

from __future__ import annotations

from typing import Any

from tiewise.boundary.declare import declare_tying
from tiewise.boundary.journal import Journal
from tiewise.boundary.link import NAME, Link, attach_hooks
from tiewise.boundary.locate import Ends, locate
from tiewise.boundary.modules import Head, Lookup, swapped
from tiewise.boundary.structure import Structure, restructure
from tiewise.core.spec import BoundarySpec


def attach(model: Any, spec: BoundarySpec | None, journal: Journal, *, loading: bool = False) -> Link:
    """Build `spec` into the model (None: leave it as it is) and link its ends; every change goes into `journal`.

    Args:
        loading: the model is being built from a config that was saved with this spec.

    Raises:
        InstallError, SpecError: with the reason; the caller undoes the journal.
    """
    ends = locate(model)
    hidden_width = ends.head.weight.shape[1]
    structure = restructure(ends, spec.plainly(), journal) if spec is not None else Structure()
    native = declare_tying(model, ends, journal, loading=loading)
    link = Link(spec or BoundarySpec("tied" if ends.tied else "untied"), ends, structure)
    link.hidden_width = hidden_width
    link.plain = structure.plain and native
    journal.later(link.undo.undo)
    _swap(model, ends, link)
    return link


def _swap(model: Any, ends: Ends, link: Link) -> None:
    undo, structure = link.undo, link.structure
    module: Any
    for _, module in ends.lookups:
        undo.hide(module, "input_scale", structure.input_scale)
        undo.hide(module, NAME, link)
        undo.set(module, "__class__", swapped(type(module), Lookup))
    module = ends.head
    undo.hide(module, "output_scale", structure.output_scale)
    undo.hide(module, "softcap", structure.softcap)
    undo.hide(module, NAME, link)
    undo.set(module, "__class__", swapped(type(module), Head))
    undo.hide(model, NAME, link)
    attach_hooks(model, undo)
