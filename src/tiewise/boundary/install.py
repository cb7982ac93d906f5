"""`install`: give a Hugging Face model a boundary: its tables as a spec says, the fused loss, one gradient buffer.

    installed = install(model)                 # what the model has, faster and smaller in training
    installed = install(model, "factored:128") # two maps and a narrow table instead
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()                            # one [V, E] gradient buffer where the table is tied
    installed.untie(optimizer)                 # in the middle of training, the optimizer's state included

Install verifies itself on a random batch and refuses, leaving the model as it was, where it would change what the
model computes or could not keep the logits from being built. See docs/install.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import tiewise.boundary.config_entry  # noqa: F401  (its entry of a config)
from tiewise.boundary.boundary import penalty_of
from tiewise.boundary.declare_tying import copy_config, declare_tying
from tiewise.boundary.decoding import decoding
from tiewise.boundary.journal import Journal
from tiewise.boundary.label_accounting import FusedLabelSmoother, correct_accounting
from tiewise.boundary.link import Link, attach
from tiewise.boundary.locate import locate, require_module
from tiewise.boundary.ops.exact_top import ExactTop
from tiewise.boundary.ops.path_gradient import PathRecord
from tiewise.boundary.optimizer_state import State, merge, replace_tables, split, state_of
from tiewise.boundary.plain_classes import require_link
from tiewise.boundary.random_batch import Batch, random_batch
from tiewise.boundary.recorded_logits import Counts
from tiewise.boundary.saved import BASE, ENTRY, NAME, declare_family, is_on_meta, link_of
from tiewise.boundary.sharded_tables import (
    fsdp_units,
    is_row_parallel,
    require_same_tables,
    require_unsharded_table,
    reshard,
)
from tiewise.boundary.table_norms import norms_of_one_table, norms_of_two_tables
from tiewise.boundary.undisturbed import generator_states, restore_generators
from tiewise.boundary.vectors import check_rows, load_vectors, row_tokens, start_from_rows
from tiewise.boundary.verify import verify
from tiewise.boundary.watch import unwatch
from tiewise.checkpoint.families import family
from tiewise.core.backends import PathNorms
from tiewise.core.errors import InstallError, SpecError, UnsupportedError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import INSTALL

# choices of `Installed.tie` and `Installed.untie`
KEEP, STATE = ("input", "output", "mean"), ("copy", "split", "reset")


class Installed:
    """Handle of an installed boundary; `installed(model)` gives another one of the same."""

    def __init__(self, model: Any, link: Link, missing_vectors: tuple[str, ...] = ()) -> None:
        self.model = model
        self.missing_vectors = missing_vectors  # tokens that this installation's file of vectors did not have
        self._link = link

    def __repr__(self) -> str:
        notes = "".join(f"; {note}" for note in self.notes)
        return f"Installed({self.spec} on {type(self.model).__name__}{notes})"

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what tiewise does not know of this model; empty for a known family."""
        config = self.model.config
        record = family(getattr(config, BASE, None) or getattr(config, "model_type", None))
        if record.has_facts:
            return ()
        return (
            f"{record.unknown_message}: its ends come from the model's own methods, and install verified the result",
        )

    @property
    def spec(self) -> BoundarySpec:
        """The installed boundary."""
        return self._link.spec

    @property
    def counts(self) -> Counts:
        """Fused losses, materialised logits and the operations that asked for them, since installation."""
        return self._link.counts

    @property
    def record(self) -> PathRecord | None:
        """The lookup path's rows since its last `clear`, or None where `track` is off."""
        return self._link.options.record

    def track(self, on: bool = True) -> PathRecord | None:
        """Record the lookup path's gradient rows, for `path_norms`; clear them at each step."""
        record = None
        if on:
            record = PathRecord()
        self._link.options = replace(self._link.options, record=record)
        return record

    def unwatch(self) -> None:
        """Skip the assertions of the first steps under DDP and FSDP2, or what is left of them (`boundary.watch`)."""
        unwatch(self.model)

    def fp32_logits(self, on: bool = True) -> None:
        """Answer losses and log-probabilities of a bf16 or fp16 model as `logits="fp32"` of `LossOptions` promises."""
        self._link.logits = "fp32" if on else None

    def path_norms(self) -> PathNorms:
        """Norms of both paths in the gradient, between the last backward of a step and clipping.

        One table needs `track()` before the forward, for what the lookup path brought; of two each holds its own path,
        and they have no cosine. Over several processes the lookup path's rows are averaged as DDP and FSDP2 average
        gradients, and those of sharded tables are put together: all processes must ask.

        Raises:
            UnsupportedError: one table that has no gradient yet, or no record; rows that tensor parallelism has spread
                over some of the ranks, beside others who see other tokens, without `fully_shard` over those.
        """
        table_in, table_out = self.tables()
        if table_in is not table_out:
            return norms_of_two_tables(table_in, table_out)
        return norms_of_one_table(table_in, self._link.head, self.record)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return (input table [V, E], output table [V, E]) as they are now: the same Parameter where tied."""
        return self._link.ends.source.weight, self._link.head.weight

    def penalty(self) -> Tensor | None:
        """Return the penalty of a `projected` spec, to be added to the loss (`penalty_of`)."""
        out_map = getattr(self._link.head, "out_map", None)
        if out_map is None:
            return None
        return penalty_of(self.spec, out_map)

    def label_smoother(self, epsilon: float) -> FusedLabelSmoother:
        """Return a label smoother for `trainer.label_smoother` that takes one sweep; the Trainer's own takes two."""
        return FusedLabelSmoother(epsilon, self._link.shifts_labels)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context the model hands out deferred logits whether or not it gets labels."""
        self._link.deferral_depth += 1
        try:
            yield
        finally:
            self._link.deferral_depth -= 1

    def exact_decoding(self) -> AbstractContextManager[ExactTop]:
        """Within this context `generate` finds greedy and `top_k` tokens without computing the other logits.

        The context gives the `ExactTop` of the head's table, made on entry. Anything else computes the logits.

        Raises:
            UnsupportedError: a table in fp64, or not on the CPU, or sharded.
        """
        require_unsharded_table(self.model, self._link.head, "exact_decoding")
        return decoding(self._link)

    def untie(self, optimizer: torch.optim.Optimizer | None = None, state: str = "copy") -> None:
        """Give the output head a table of its own with the same values. Handles and options, such as a bias, stay.

        Args:
            optimizer: SGD, Adam or AdamW that trains the model, to be given a state for it; None where there is none.
            state: each table inherits the state that the shared one had (`copy`), or half of its first moments
                (`split`, so that the two still add up to the shared one), or starts fresh (`reset`).

        Raises:
            SpecError: an unknown `state`, or a boundary that is not tied.
            UnsupportedError: an optimizer that keeps what this method does not know.
        """
        if state not in STATE:
            raise SpecError(f"unknown optimizer state {state!r}", f"choose one of {', '.join(STATE)}")
        if self.spec.kind != "tied":
            raise SpecError(f"{self.spec} cannot be untied", "untie a model whose boundary is tied")
        table_in = self.tables()[0]
        table_state: State = {}
        if state != "reset":
            table_state = state_of(optimizer, table_in)
        if state == "split":
            table_state = split(table_state)
        table_out = nn.Parameter(table_in.detach().clone(), requires_grad=table_in.requires_grad)
        self._change_kind("untied", table_out)
        if optimizer is not None:
            replace_tables(optimizer, self.model, [table_in], [table_in, table_out], table_state)

    def tie(self, optimizer: torch.optim.Optimizer | None = None, keep: str = "mean") -> None:
        """Give both ends one table, and the optimizer the sum of their states.

        A shared table's gradient is the sum of its paths' gradients, so momenta and first moments add exactly; second
        moments add exactly where the paths' gradients are uncorrelated. Step counters take the larger.

        Args:
            optimizer: as in `untie`.
            keep: whose values the table starts from: `input`, `output` or their `mean`.

        Raises:
            SpecError: an unknown `keep`, or a boundary that is not untied.
            UnsupportedError: as in `untie`, and tables of unlike shapes.
        """
        if keep not in KEEP:
            raise SpecError(f"unknown keep {keep!r}", f"choose one of {', '.join(KEEP)}")
        if self.spec.kind != "untied":
            raise SpecError(f"{self.spec} cannot be tied", "tie a model whose boundary is untied")
        table_in, table_out = self.tables()
        state_in, state_out = state_of(optimizer, table_in), state_of(optimizer, table_out)
        if table_in.shape != table_out.shape:
            sizes = f"{tuple(table_in.shape)} and {tuple(table_out.shape)}"
            raise UnsupportedError(f"tables of {sizes} cannot become one", "tie tables of one shape")
        self._change_kind("tied", table_in)
        with torch.no_grad():
            if keep == "output":
                table_in.copy_(table_out)
            elif keep == "mean":
                table_in.add_(table_out).mul_(0.5)
        if optimizer is not None:
            merged = merge(state_in, state_out)
            replace_tables(optimizer, self.model, [table_in, table_out], [table_in], merged)

    def _change_kind(self, kind: str, table_out: Tensor) -> None:
        """Give the head a table and say everywhere what the boundary is now. It is verified, or nothing changes."""
        model, link, journal = self.model, self._link, Journal()
        require_unsharded_table(model, link.head, f"{link.spec} to {kind}")
        try:
            journal.set(link, "spec", replace(link.spec, kind=kind))
            journal.set(link.head, "weight", table_out)
            journal.set(link, "is_plain", declare_tying(model, link.ends, journal) and link.structure.is_plain)
            _declare_spec(model, link, journal)
            install(model)
        except BaseException:
            journal.undo()
            raise

    def uninstall(self) -> None:
        """Give the model its own classes back; its tables stay as they are.

        Raises:
            UnsupportedError: its own classes cannot hold them.
        """
        if not self._link.is_plain:
            remedy = "export it with tiewise.hf.plain_copy, or keep the boundary"
            raise UnsupportedError(f"{self.spec} is more than the model's own classes can hold", remedy)
        self._link.journal.undo()


def installed(model: Any) -> Installed:
    """Return the handle of a model's installed boundary; nothing is verified again.

    Raises:
        InstallError: there is none, or the model's head was replaced since.
    """
    return Installed(model, require_link(model))


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
    require_module(model)
    if spec is None:
        return build_into(model, None, batch)
    spec = BoundarySpec.parse(spec)
    spec.require(INSTALL)
    if spec.vectors is None:
        return build_into(model, spec, batch)
    return _install_with_vectors(model, spec, spec.vectors, batch, tokenizer)


def _install_with_vectors(
    model: nn.Module, spec: BoundarySpec, file: str, batch: Batch | None, tokenizer: Any
) -> Installed:
    """Install a boundary whose input table starts from a file of word vectors."""
    if tokenizer is None:
        problem = f"{spec}: a file of vectors names words, and a model has only rows"
        raise SpecError(problem, "give install the model's tokenizer too: tokenizer=…")
    tokens = row_tokens(tokenizer, len(locate(model).source.weight))
    rows = load_vectors(file, tokens)
    without_file = replace(spec, vectors=None, freeze=False)
    handle = build_into(model, without_file, batch, rows=rows)
    start_from_rows(handle.tables()[0], rows, spec.freeze, spec)
    is_missing = rows.isnan().any(1).tolist()
    named = zip(tokens, is_missing, strict=True)
    handle.missing_vectors = tuple(token for token, missing in named if missing and token)
    return handle


def build_into(
    model: Any,
    spec: BoundarySpec | str | None,
    batch: Batch | None = None,
    *,
    loaded: bool = False,
    rows: Tensor | None = None,
) -> Installed:
    """Install a boundary. `loaded` tables keep their values; a table that starts from `rows` must fit them."""
    if spec is not None:
        spec = BoundarySpec.parse(spec)
    old_link: Link | None = link_of(model)
    _require_unsharded_change(model, old_link, spec, rows)
    if old_link is not None:
        if model.get_output_embeddings() is old_link.head and spec in (None, old_link.spec):
            return _verify_link(model, old_link, batch)
        Installed(model, old_link).uninstall()
    if is_on_meta(model):
        raise InstallError(f"{type(model).__name__} is on the meta device", "load its weights first")
    journal, generators = Journal(), generator_states()
    try:
        link = _attach_link(model, spec, journal, loaded=loaded)
        if rows is not None:
            check_rows(link.ends.source.weight, rows, link.spec)
        if spec is not None:
            _declare_spec(model, link, journal)
        return _verify_link(model, link, batch)
    except BaseException:
        journal.undo()
        if old_link is not None:
            _restore_link(model, build_into(model, old_link.spec, loaded=True)._link, old_link)
        restore_generators(generators)
        raise


def _require_unsharded_change(
    model: Any, old_link: Link | None, spec: BoundarySpec | None, rows: Tensor | None
) -> None:
    """Refuse to change or to verify tables that are sharded, and ends that adapters or quantisation have changed."""
    ends = locate(model)  # refuses such ends, also where they were changed since an earlier install
    if not (fsdp_units(model) or is_row_parallel(ends.source) or is_row_parallel(ends.head)):
        return
    if old_link is None:
        has, verified = ends.plain_spec, False
    else:
        has, verified = old_link.spec, old_link.structure.needs_folding
    require_same_tables(model, spec, has, changed=rows is not None, verified=verified)


def _attach_link(model: Any, spec: BoundarySpec | None, journal: Journal, *, loaded: bool) -> Link:
    """Attach a spec and return its link; `loaded` tables keep their values."""
    built = spec
    if spec is not None and loaded:
        built = replace(spec, init=None, vectors=None, freeze=False)
    link = attach(model, built, journal)
    link.spec = spec or link.spec
    return link


def _restore_link(model: Any, new: Link, old_link: Link) -> None:
    """Make `old_link` the link of a model again, with the state of the `new` one, so that handles of it stay valid."""
    user_attributes = ("options", "logits", "counts", "deferral_depth", "make_lazy")
    set_by_user = {name: getattr(old_link, name) for name in user_attributes}
    vars(old_link).update(vars(new) | set_by_user)
    for module in (model, *old_link.lookups, old_link.head):
        setattr(module, NAME, old_link)


def _verify_link(model: nn.Module, link: Link, batch: Batch | None) -> Installed:
    """Verify a link and find out how its loss counts labels. A link that is refused stays as it was."""
    before = dict(vars(link))
    link.counts = Counts()  # for the forwards below, which are not the user's
    try:
        if batch is None:
            batch = random_batch(model, link)
        base = verify(model, link, batch)
        correct_accounting(model, link, batch, base)
    except BaseException:
        vars(link).update(before)
        raise
    finally:
        link.counts = before["counts"]
        reshard(model)
    return Installed(model, link)


def _declare_spec(model: Any, link: Link, journal: Journal) -> None:
    """Write the spec into the model's config, and change type where its own classes cannot hold the boundary."""
    config = copy_config(model, journal)
    journal.set(config, ENTRY, str(link.spec.plainly()))
    if not link.is_plain:
        declare_family(model, config, journal)
