"""Config entry of an installed boundary.

When transformers makes a model from a config with this entry, the boundary is built into the model.
"""

from __future__ import annotations

import warnings
from typing import Any

from tiewise.boundary.free_rows import free_rows_of
from tiewise.boundary.journal import Journal
from tiewise.boundary.label_accounting import correct_accounting
from tiewise.boundary.link import Link, attach
from tiewise.boundary.saved import ENTRIES, ENTRY, Entry, link_of
from tiewise.core.errors import TiewiseWarning
from tiewise.core.spec import BoundarySpec


def _build(model: Any, value: Any) -> None:
    """Attach the boundary that the entry's value names, before the model has weights."""
    spec = BoundarySpec.parse(value)
    if spec.plain and model.get_output_embeddings() is None:
        return  # a model without a head, whose plain table needs no boundary
    attach(model, spec, Journal(), loading=True)


def _account(model: Any) -> None:
    """Correct how a loaded model's labels are counted, or warn if it does not run.

    SpecError: the ids of its free rows are wrong.
    """
    link: Link | None = link_of(model)
    head = model.get_output_embeddings()
    free = free_rows_of(head)
    if free is not None:
        free.check_ids(len(head.weight))
    try:
        if link is not None:
            correct_accounting(model, link)
    except Exception as error:  # any family may need any input
        problem = f"{type(model).plain_class.__name__}: how its loss counts labels could not be asked ({error})"
        remedy = "call tiewise.install(model, batch={...}) with the inputs that it needs before a Trainer is built"
        warnings.warn(f"{problem}; {remedy}", TiewiseWarning, stacklevel=4)


ENTRIES[ENTRY] = Entry(_build, _account)
