"""`install`: build a boundary into a Hugging Face model.

    installed = install(model)                 # the tables that the model has, with the fused loss
    installed = install(model, "factored:128") # two maps and a narrow table instead
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()                            # one [V, E] gradient buffer if the table is tied
    installed.untie(optimizer)                 # during training, with the optimizer's state

The model then has the tables of the spec, and its training loss is fused: no [N, V] logits are computed. `install`
verifies the result on a random batch. It refuses, and leaves the model as it was, if the boundary would change the
model's results or if the model needs the logits. See docs/install.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

import tiewise.boundary.config_entry  # noqa: F401  (its entry of a config)
from tiewise.boundary.boundary import penalty_of
from tiewise.boundary.declare_tying import copy_config, declare_tying
from tiewise.boundary.decoding import return_top_logits
from tiewise.boundary.journal import Journal
from tiewise.boundary.label_accounting import FusedLabelSmoother, correct_accounting
from tiewise.boundary.link import Link, attach
from tiewise.boundary.locate import locate, require_module
from tiewise.boundary.ops.exact_top import ExactTop
from tiewise.boundary.ops.path_gradient import PathRecord, PathSums
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
from tiewise.boundary.shared_names import named_tables, shared_parameters
from tiewise.boundary.table_norms import sums_of_one_table, sums_of_two_tables
from tiewise.boundary.undisturbed import generator_states, restore_generators
from tiewise.boundary.vectors import check_rows, load_vectors, row_tokens, start_from_rows
from tiewise.boundary.verify import verify
from tiewise.boundary.watch import unwatch
from tiewise.checkpoint.families import family
from tiewise.core.backends import PathNorms
from tiewise.core.errors import InstallError, SpecError, UnsupportedError
from tiewise.core.result import html_table
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import INSTALL

# choices of `Installed.tie` and `Installed.untie`
KEEP, STATE = ("input", "output", "mean"), ("copy", "split", "reset")


class Installed:
    """Handle of an installed boundary.

    `install(model)` and `installed(model)` return one. All handles of a model share its state.

    Attributes:
        model: the model with the boundary.
        missing_vectors: tokens that the spec's file of word vectors lacks; empty without `+vectors=FILE`.

    >>> import tiewise
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> tiewise.install(model, "tied")
    Installed(tied on ...: transformer.wte.weight = lm_head.weight [50, 8])
    """

    def __init__(self, model: Any, link: Link, missing_vectors: tuple[str, ...] = ()) -> None:
        self.model = model
        self.missing_vectors = missing_vectors
        self._link = link

    def __repr__(self) -> str:
        tables = ", ".join(map(str, named_tables(self.model, self.tables())))
        notes = "".join(f"; {note}" for note in self.notes)
        return f"Installed({self.spec} on {type(self.model).__name__}: {tables}{notes})"

    def _repr_html_(self) -> str:
        """Return the tables and all shared parameters, with names and shapes, for a notebook."""
        tables = named_tables(self.model, self.tables())
        others = [one for one in shared_parameters(self.model) if one not in tables]
        rows = [{"parameter": " = ".join(one.names), "shape": list(one.shape)} for one in (*tables, *others)]
        count = "share one table" if len(tables) == 1 else "have two tables"
        heading = f"{self.spec} on {type(self.model).__name__}: input embedding and output head {count}."
        return f"<p>{escape('; '.join([heading, *self.notes]))}</p>{html_table(rows)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on an unknown model family; empty for a family that tiewise knows."""
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
        """Numbers of fused losses and of computed logits since installation.

        Its `operations` name the operations that needed the logits.
        """
        return self._link.counts

    @property
    def record(self) -> PathRecord | None:
        """Gradient rows of the lookup path since the last `clear`; None if `track` is off."""
        return self._link.options.record

    def track(self, on: bool = True) -> PathRecord | None:
        """Start or stop to record the lookup path's gradient rows, which `path_norms` needs.

        Args:
            on: whether to record.

        Returns:
            The record, whose `clear()` must be called once per optimizer step; None if `on` is False.
        """
        record = None
        if on:
            record = PathRecord()
        self._link.options = replace(self._link.options, record=record)
        return record

    def unwatch(self) -> None:
        """Stop the checks of the first training steps under DDP and FSDP2 (`boundary.watch`)."""
        unwatch(self.model)

    def fp32_logits(self, on: bool = True) -> None:
        """Compute losses and log-probabilities of a bf16 or fp16 model from fp32 logits.

        Args:
            on: whether to do so, as `logits="fp32"` of `LossOptions` does; False returns to the default.
        """
        self._link.logits = "fp32" if on else None

    def path_norms(self) -> PathNorms:
        """Return the norms of both paths in the tables' gradient.

        Call it after the last backward of a step and before gradient clipping. A tied table needs `track()` before the
        forward, to record the lookup path. With two tables, each gradient is one path, and the cosine is nan. With
        several processes the lookup path's rows are averaged as DDP and FSDP2 average gradients, and rows of sharded
        tables are gathered. So all processes must call it.

        Returns:
            Norms of the lookup path, the head path and their sum, and the cosine of the two paths.

        Raises:
            UnsupportedError: a tied table has no gradient yet, or no record. Or tensor parallelism spreads the rows
                over some ranks, other ranks hold the same rows and see other tokens, and `fully_shard` does not
                connect them.
        """
        return self.path_sums().norms()

    def path_sums(self) -> PathSums:
        """Return the norms that `path_norms` reads, as tensors, without waiting for the device.

        A training loop can collect them at every step and read them at the next log. With several processes that
        average the lookup path's rows, it waits for the device to exchange them. Raises as `path_norms`.

        Returns:
            Norms of the lookup path (`a`), the head path (`b`) and their sum (`total`), and the cosine of the two.
        """
        table_in, table_out = self.tables()
        if table_in is not table_out:
            return sums_of_two_tables(table_in, table_out)
        if self.record is None:
            remedy = "call installed.track() before the forward, which records it"
            raise UnsupportedError("path_norms of a tied table whose lookup path was not recorded", remedy)
        return sums_of_one_table(table_in, self._link.head, self.record)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the current input table [V, E] and output table [V, E].

        They are the same Parameter if tied.
        """
        return self._link.ends.main_lookup.weight, self._link.head.weight

    def penalty(self) -> Tensor | None:
        """Return the penalty of a `projected` spec, λ‖P‖₂ + c/2 ‖P‖²_F.

        Add it to the loss. Other specs, and a `projected` spec without penalty and decay, return None.
        """
        out_map = getattr(self._link.head, "out_map", None)
        if out_map is None:
            return None
        return penalty_of(self.spec, out_map)

    def label_smoother(self, epsilon: float) -> FusedLabelSmoother:
        """Return a fused label smoother for `trainer.label_smoother`.

        It reads the vocabulary once; the Trainer's default reads it twice.

        Args:
            epsilon: label smoothing ε, between 0 and 1.
        """
        return FusedLabelSmoother(epsilon, self._link.shifts_labels)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context in which the model returns deferred logits, with or without labels."""
        self._link.deferral_depth += 1
        try:
            yield
        finally:
            self._link.deferral_depth -= 1

    def exact_decoding(self) -> AbstractContextManager[ExactTop]:
        """Return a context in which `generate` finds greedy and `top_k` tokens without all logits.

        On entry the context builds and returns the `ExactTop` of the head's table. Other ways of decoding compute the
        logits.

        Raises:
            UnsupportedError: the table is fp64, not on the CPU, or sharded, or some tokens have free rows.
        """
        if self.spec.free is not None:
            remedy = "generate without the context, or from tiewise.hf.plain_copy(model)"
            raise UnsupportedError(f"exact_decoding of {self.spec}, whose head has no one table", remedy)
        require_unsharded_table(self.model, self._link.head, "exact_decoding")
        return return_top_logits(self._link)

    def untie(self, optimizer: torch.optim.Optimizer | None = None, state: str = "copy") -> None:
        """Give the output head a separate table with the values of the tied one.

        Handles and options, such as a bias, stay.

        Args:
            optimizer: the SGD, Adam or AdamW that trains the model, which gets the new table and its state. None if
                there is no optimizer.
            state: optimizer state of both tables. `copy`: each gets the state of the shared table. `split`: each gets
                it with half of the first moments, whose sum is the old one. `reset`: both start without state.

        Raises:
            SpecError: `state` is unknown, or the boundary is not tied.
            UnsupportedError: the optimizer stores entries that this method does not know.
        """
        if state not in STATE:
            raise SpecError(f"unknown optimizer state {state!r}", f"choose one of {', '.join(STATE)}")
        if self.spec.kind != "tied" or self.spec.free is not None:
            raise SpecError(f"{self.spec} cannot be untied", "untie a model whose boundary is tied, without free rows")
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
        """Give input embedding and output head one table, and the optimizer the sum of their states.

        A shared table's gradient is the sum of its paths' gradients, so momenta and first moments add exactly. Second
        moments add exactly if the paths' gradients are uncorrelated. The larger step counter stays.

        Args:
            optimizer: as in `untie`.
            keep: the values that the table starts from: `input`, `output` or their `mean`.

        Raises:
            SpecError: `keep` is unknown, or the boundary is not untied.
            UnsupportedError: the tables differ in shape, or the optimizer stores entries that this method does not
                know.
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
        """Set the head's table and the spec's kind, and verify the model.

        If the verification fails, nothing changes.
        """
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
        """Restore the model's original classes. Its tables stay as they are.

        Raises:
            UnsupportedError: the original classes cannot hold the boundary.
        """
        if not self._link.is_plain:
            remedy = "export it with tiewise.hf.plain_copy, or keep the boundary"
            raise UnsupportedError(f"{self.spec} is more than the model's own classes can hold", remedy)
        self._link.journal.undo()


def installed(model: Any) -> Installed:
    """Return the handle of a model's installed boundary, without verifying it again.

    Args:
        model: model that `install` or `tiewise.load` has given a boundary.

    Raises:
        InstallError: the model has no installed boundary, or its head was replaced after `install`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> _ = install(model)
    >>> installed(model).spec.kind
    'tied'
    """
    return Installed(model, require_link(model))


def install(
    model: Any,
    spec: BoundarySpec | str | None = None,
    *,
    batch: Batch | None = None,
    tokenizer: Any = None,
    counts: Any = None,
) -> Installed:
    """Install a boundary into a Hugging Face model with a token head, in place.

    Args:
        model: any model with `get_input_embeddings`, `get_output_embeddings` and a loss from `labels`.
        spec: the boundary to build; None uses the tables that the model has.
        batch: keyword arguments of one forward, with labels, for a model that needs more than token ids.
        tokenizer: the model's tokenizer, which `+vectors=FILE` needs: it names the rows of the input table. Rows of
            tokens that the file has start from the file; `missing_vectors` of the handle lists the other tokens. The
            installed and saved spec does not name the file, since its values are in the table.
        counts: [V], how often each token occurs in the training text, which `+free=K` needs. The model stores the ids
            of the K most frequent tokens, and a loaded model has the same ones.

    Returns:
        Handle of the boundary.

    Raises:
        SpecError: a model of these sizes cannot have the spec, or the spec needs a tokenizer or counts.
        DataError: the file of vectors cannot be used.
        InstallError: the model has no input embedding or output head, or uses them in an unknown way. The model is
            as it was.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> handle = install(model, "factored:4")
    >>> [tuple(table.shape) for table in handle.tables()]
    [(50, 4), (50, 4)]
    """
    require_module(model)
    if spec is None:
        return build_into(model, None, batch)
    spec = BoundarySpec.parse(spec)
    spec.require(INSTALL)
    if spec.vectors is None:
        return build_into(model, spec, batch, counts=counts)
    return _install_with_vectors(model, spec, batch, tokenizer, counts)


def _install_with_vectors(
    model: nn.Module, spec: BoundarySpec, batch: Batch | None, tokenizer: Any, counts: Any
) -> Installed:
    """Install a boundary whose input table starts from a file of word vectors."""
    file = spec.vectors
    assert file is not None, "the caller checks it"
    if tokenizer is None:
        problem = f"{spec}: a file of vectors names words, and a model has only rows"
        raise SpecError(problem, "give install the model's tokenizer too: tokenizer=…")
    tokens = row_tokens(tokenizer, len(locate(model).main_lookup.weight))
    rows = load_vectors(file, tokens)
    without_file = replace(spec, vectors=None, freeze=False)
    handle = build_into(model, without_file, batch, rows=rows, counts=counts)
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
    counts: Any = None,
) -> Installed:
    """Install a boundary.

    Tables that are `loaded` keep their values. `rows` must have the shape of the input table. `counts` are those of
    `install`.
    """
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
        link = _attach_link(model, spec, journal, loaded=loaded, counts=counts)
        if rows is not None:
            check_rows(link.ends.main_lookup.weight, rows, link.spec)
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
    """Refuse to change or to verify sharded tables.

    `locate` also refuses ends that adapters or quantisation have changed.
    """
    ends = locate(model)  # they may have changed after an earlier install
    if not (fsdp_units(model) or is_row_parallel(ends.main_lookup) or is_row_parallel(ends.head)):
        return
    if old_link is None:
        present_spec, verified = ends.plain_spec, False
    else:
        present_spec, verified = old_link.spec, old_link.structure.needs_folding
    require_same_tables(model, spec, present_spec, changed=rows is not None, verified=verified)


def _attach_link(model: Any, spec: BoundarySpec | None, journal: Journal, *, loaded: bool, counts: Any) -> Link:
    """Attach a spec and return its link. Tables that are `loaded` keep their values."""
    built = spec
    if spec is not None and loaded:
        built = replace(spec, init=None, vectors=None, freeze=False)
    link = attach(model, built, journal, counts=counts)
    link.spec = spec or link.spec
    return link


def _restore_link(model: Any, new: Link, old_link: Link) -> None:
    """Make `old_link` the link of a model again, with the state of the `new` one.

    So handles that hold `old_link` stay valid.
    """
    user_attributes = ("options", "logits", "counts", "deferral_depth", "make_lazy")
    set_by_user = {name: getattr(old_link, name) for name in user_attributes}
    vars(old_link).update(vars(new) | set_by_user)
    for module in (model, *old_link.lookups, old_link.head):
        setattr(module, NAME, old_link)


def _verify_link(model: nn.Module, link: Link, batch: Batch | None) -> Installed:
    """Verify a link and learn how its loss counts labels.

    If the link is refused, its state is restored.
    """
    before = dict(vars(link))
    link.counts = Counts()  # so that the forwards below do not count as the user's
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
    """Write the spec into the model's config.

    If the family's classes cannot hold the boundary, model and config also change their classes.
    """
    config = copy_config(model, journal)
    journal.set(config, ENTRY, str(link.spec.plainly()))
    if not link.is_plain:
        declare_family(model, config, journal)
