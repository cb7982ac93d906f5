"""`install`: give a Hugging Face model a boundary: its tables as a spec says, the fused loss, one gradient buffer.

    installed = install(model)                 # what the model has, faster and smaller in training
    installed = install(model, "factored:128") # two maps and a narrow table instead
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()                            # one [V, E] gradient buffer where the table is tied

Install verifies itself on a random batch and refuses, leaving the model as it was, where it would change what the
model computes or could not keep the logits from being built. See docs/install.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tiewise.boundary.accounting import FusedLabelSmoother, correct_accounting
from tiewise.boundary.attach import attach
from tiewise.boundary.deferred import Counts
from tiewise.boundary.journal import Journal
from tiewise.boundary.link import Link, link_of
from tiewise.boundary.locate import locate
from tiewise.boundary.maps import penalty_of
from tiewise.boundary.probe import Batch, on_meta, random_batch
from tiewise.boundary.saved import declare_boundary
from tiewise.boundary.vectors import check_rows, load_vectors, row_tokens, start_from_rows
from tiewise.boundary.verify import verify
from tiewise.core.errors import InstallError, SpecError, UnsupportedError
from tiewise.core.spec import BoundarySpec
from tiewise.ops.path_gradient import PathRecord


class Installed:
    """Handle of an installed boundary; `install(model)` on the same model gives another one of the same."""

    def __init__(self, model: Any, link: Link, missing_vectors: tuple[str, ...] = ()) -> None:
        self.model = model
        self.missing_vectors = missing_vectors  # tokens that this installation's file of vectors did not have
        self._link = link

    @property
    def spec(self) -> BoundarySpec:
        """What is installed."""
        return self._link.spec

    @property
    def counts(self) -> Counts:
        """Fused losses, materialised logits and the operations that asked for them, since installation."""
        return self._link.counts

    @property
    def record(self) -> PathRecord | None:
        """Path A's rows since its last `clear`, or None where `track` is off."""
        return self._link.options.record

    def track(self, on: bool = True) -> PathRecord | None:
        """Record Path A's gradient rows, for `tiewise.ops.path_gradient.path_norms`; clear them at each step."""
        self._link.options = replace(self._link.options, record=PathRecord() if on else None)
        return self.record

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return (input table [V, E], output table [V, E]) as they are now: the same Parameter where tied."""
        return self._link.ends.source.weight, self._link.head.weight

    def penalty(self) -> Tensor | None:
        """Return the penalty of a `projected` spec, to be added to the loss (`tiewise.boundary.maps.penalty_of`)."""
        return penalty_of(self.spec, getattr(self._link.head, "out_map", None))

    def label_smoother(self, epsilon: float) -> FusedLabelSmoother:
        """Return what to set as `trainer.label_smoother` to keep label smoothing fused."""
        return FusedLabelSmoother(epsilon, self._link.shifts)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context the model hands out deferred logits whether or not it gets labels."""
        self._link.always += 1
        try:
            yield
        finally:
            self._link.always -= 1

    def uninstall(self) -> None:
        """Give the model its own classes back; its tables stay as they are.

        Raises:
            UnsupportedError: its own classes cannot hold them.
        """
        if not self._link.plain:
            fix = "export it with tiewise.hf.densify, or keep the boundary"
            raise UnsupportedError(f"{self.spec} is more than the model's own classes can hold", fix)
        self._link.undo.undo()


def install(
    model: Any, spec: BoundarySpec | str | None = None, *, batch: Batch | None = None, tokenizer: Any = None
) -> Installed:
    """Install a boundary into a Hugging Face model with a token head, in place.

    Args:
        model: any model with `get_input_embeddings`, `get_output_embeddings` and a loss from `labels`.
        spec: the boundary to build; None keeps what the model has.
        batch: keyword arguments for one forward, labels included, for models that need more than token ids.
        tokenizer: of the model, for `+vectors=FILE`: it names the rows of the input table. The rows that the file has
            start from it, `missing_vectors` of what is returned names the others, and the installed and saved spec
            does not name the file: its values are in the table.

    Raises:
        SpecError: the spec cannot be had in a model of these sizes, or needs a tokenizer.
        DataError: a file of vectors that cannot be used.
        InstallError: the model has no boundary, or not one that this library knows; the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise InstallError(f"a {type(model).__name__} is no model", "load it first, with tiewise.load(path) say")
    wanted = None if spec is None else BoundarySpec.parse(spec)
    if wanted is not None and wanted.vectors is not None:
        return _install_with_vectors(model, wanted, batch, tokenizer)
    return _install(model, wanted, wanted, batch)


def reinstall(model: Any, spec: BoundarySpec | str | None, batch: Batch | None = None) -> Installed:
    """Install what a loaded model was saved with: as `install`, but no table is drawn anew."""
    saved = None if spec is None else BoundarySpec.parse(spec)
    as_loaded = None if saved is None else replace(saved, init=None, vectors=None, freeze=False)
    return _install(model, saved, as_loaded, batch)


def _install_with_vectors(model: Any, spec: BoundarySpec, batch: Batch | None, tokenizer: Any) -> Installed:
    assert spec.vectors is not None
    if tokenizer is None:
        what = f"{spec}: a file of vectors names words, and a model has only rows"
        raise SpecError(what, "give install the model's tokenizer too: tokenizer=…")
    tokens = row_tokens(tokenizer, len(locate(model).source.weight))
    rows = load_vectors(spec.vectors, tokens).rows
    plain = replace(spec, vectors=None, freeze=False)
    installed = _install(model, plain, plain, batch, rows)
    start_from_rows(installed.tables()[0], rows, spec.freeze, spec)
    absent = rows.isnan().any(1).tolist()
    missing = tuple(token for token, gone in zip(tokens, absent, strict=True) if gone and token is not None)
    return Installed(model, installed._link, missing)


def _install(
    model: Any,
    spec: BoundarySpec | None,
    build: BoundarySpec | None,
    batch: Batch | None,
    rows: Tensor | None = None,
) -> Installed:
    """Install `build` and call it `spec`; `rows` are what the input table will start from, and must fit it."""
    old = link_of(model)
    if old is not None:
        locate(model)  # says what sharding, adapters or quantisation have since made of its ends
        if model.get_output_embeddings() is old.head and spec in (None, old.spec):
            return _checked(model, old, batch)
        Installed(model, old).uninstall()
    if on_meta(model):
        raise InstallError(f"{type(model).__name__} is on the meta device", "load its weights first")
    journal = Journal()
    try:
        link = attach(model, build, journal)
        link.spec = spec or link.spec
        if rows is not None:
            check_rows(link.ends.source.weight, rows, link.spec)
        declare_boundary(model, link, journal, asked=spec is not None)
        return _checked(model, link, batch)
    except BaseException:
        journal.undo()
        if old is not None:
            reinstall(model, old.spec)._link.options = old.options
        raise


def _checked(model: nn.Module, link: Link, batch: Batch | None) -> Installed:
    batch = random_batch(model, link) if batch is None else batch
    base = verify(model, link, batch)
    correct_accounting(model, link, batch, base)
    return Installed(model, link)
