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

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tiewise.boundary.boundary import penalty_of
from tiewise.boundary.decoding import decoding
from tiewise.boundary.link import Link, attach
from tiewise.boundary.locate import Journal, declare_tying, locate, own_config
from tiewise.boundary.ops.exact_top import ExactTop
from tiewise.boundary.ops.path_gradient import PathRecord, gather, path_norms
from tiewise.boundary.recorded_logits import Counts
from tiewise.boundary.saved import BASE, ENTRY, NAME, declare_family, link_of, on_meta
from tiewise.boundary.sharded_tables import KEPT, held, require_same_tables, require_whole_table, reshard, spread, units
from tiewise.boundary.undisturbed import generator_states, restore_generators
from tiewise.boundary.vectors import check_rows, load_vectors, row_tokens, start_from_rows
from tiewise.boundary.verify import Batch, FusedLabelSmoother, correct_accounting, random_batch, required_link, verify
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
        if record.is_known:
            return ()
        return (f"{record.unknown}: its ends come from the model's own methods, and install verified the result",)

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
        """The lookup path's rows since its last `clear`, or None where `track` is off."""
        return self._link.options.record

    def track(self, on: bool = True) -> PathRecord | None:
        """Record the lookup path's gradient rows, for `path_norms`; clear them at each step."""
        self._link.options = replace(self._link.options, record=PathRecord() if on else None)
        return self.record

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
            grads = [held(table.grad) for table in (table_in, table_out)]
            a, b = (0.0 if rows is None else path_norms(rows, PathRecord(), shard).total for rows, shard in grads)
            return PathNorms(a, b, math.hypot(a, b), math.nan)
        (rows, shard), record = held(table_in.grad), self.record
        if record is not None and spread(self._link.head):  # whose ranks see the same tokens
            mesh = cast("Any", table_in).device_mesh
            if mesh.size() < torch.distributed.get_world_size():
                fix = "average the record's rows as the gradient was, and call tiewise.path_norms(…, shard)"
                raise UnsupportedError("path_norms where others hold the same rows and see other tokens", fix)
            for dimension in range(mesh.ndim - 1):
                record = gather(record, group=mesh.get_group(dimension))
            if shard is not None and KEPT in vars(self._link.head):  # the sum of all ranks' tokens
                record = PathRecord([(ids, of_lookup / shard.size) for ids, of_lookup in record.pieces])
        elif record is not None:
            record = gather(record, shard)
        return path_norms(rows, record, shard)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return (input table [V, E], output table [V, E]) as they are now: the same Parameter where tied."""
        return self._link.ends.source.weight, self._link.head.weight

    def penalty(self) -> Tensor | None:
        """Return the penalty of a `projected` spec, to be added to the loss (`penalty_of`)."""
        out_map = getattr(self._link.head, "out_map", None)
        return None if out_map is None else penalty_of(self.spec, out_map)

    def label_smoother(self, epsilon: float) -> FusedLabelSmoother:
        """Return a label smoother for `trainer.label_smoother` that takes one sweep; the Trainer's own takes two."""
        return FusedLabelSmoother(epsilon, self._link.shifts)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context the model hands out deferred logits whether or not it gets labels."""
        self._link.always += 1
        try:
            yield
        finally:
            self._link.always -= 1

    def exact_decoding(self) -> AbstractContextManager[ExactTop]:
        """Within this context `generate` finds greedy and `top_k` tokens without computing the other logits.

        The context gives the `ExactTop` of the head's table, made on entry. Anything else computes the logits.

        Raises:
            UnsupportedError: a table in fp64, or not on the CPU, or sharded.
        """
        require_whole_table(self.model, self._link.head, "exact_decoding")
        return decoding(self._link)

    def untie(self, optimizer: torch.optim.Optimizer | None = None, state: str = "copy") -> None:
        """Give the output head a table of its own with the same values; handles and options, such as a bias, stay.

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
        own = {} if state == "reset" else _known_state(optimizer, table_in)
        if state == "split":
            own |= {key: own[key] * 0.5 for key in FIRST if own.get(key) is not None}
        table_out = nn.Parameter(table_in.detach().clone(), requires_grad=table_in.requires_grad)
        self._become("untied", table_out)
        if optimizer is not None:
            _replace(optimizer, self.model, [table_in], [table_in, table_out], own)

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
        one, two = (_known_state(optimizer, table) for table in (table_in, table_out))
        if table_in.shape != table_out.shape:
            sizes = f"{tuple(table_in.shape)} and {tuple(table_out.shape)}"
            raise UnsupportedError(f"tables of {sizes} cannot become one", "tie tables of one shape")
        self._become("tied", table_in)
        with torch.no_grad():
            if keep == "output":
                table_in.copy_(table_out)
            elif keep == "mean":
                table_in.add_(table_out).mul_(0.5)
        if optimizer is None:
            return
        merged = one | two
        for key in one.keys() & two.keys():
            a, b = one[key], two[key]
            merged[key] = a if b is None else b if a is None else max(a, b) if key in COUNTER else a + b
        _replace(optimizer, self.model, [table_in, table_out], [table_in], merged)

    def _become(self, kind: str, table_out: Tensor) -> None:
        """Give the head a table and say everywhere what the boundary is now; verified, or nothing has changed."""
        model, link, journal = self.model, self._link, Journal()
        require_whole_table(model, link.head, f"{link.spec} to {kind}")
        try:
            journal.set(link, "spec", replace(link.spec, kind=kind))
            journal.set(link.head, "weight", table_out)
            journal.set(link, "plain", declare_tying(model, link.ends, journal) and link.structure.plain)
            _declare(model, link, journal)
            install(model)
        except BaseException:
            journal.undo()
            raise

    def uninstall(self) -> None:
        """Give the model its own classes back; its tables stay as they are.

        Raises:
            UnsupportedError: its own classes cannot hold them.
        """
        if not self._link.plain:
            fix = "export it with tiewise.hf.plain_copy, or keep the boundary"
            raise UnsupportedError(f"{self.spec} is more than the model's own classes can hold", fix)
        self._link.undo.undo()


def installed(model: Any) -> Installed:
    """Return the handle of a model's installed boundary; nothing is verified again.

    Raises:
        InstallError: there is none, or the model's head was replaced since.
    """
    return Installed(model, required_link(model))


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
    if wanted is not None:
        wanted.require(INSTALL)
    if wanted is None or wanted.vectors is None:
        return build_into(model, wanted, batch)
    if tokenizer is None:
        what = f"{wanted}: a file of vectors names words, and a model has only rows"
        raise SpecError(what, "give install the model's tokenizer too: tokenizer=…")
    tokens = row_tokens(tokenizer, len(locate(model).source.weight))
    rows = load_vectors(wanted.vectors, tokens)
    plain = replace(wanted, vectors=None, freeze=False)
    made = build_into(model, plain, batch, rows=rows)
    start_from_rows(made.tables()[0], rows, wanted.freeze, wanted)
    absent = rows.isnan().any(1).tolist()
    made.missing_vectors = tuple(token for token, gone in zip(tokens, absent, strict=True) if token and gone)
    return made


def build_into(
    model: Any,
    spec: BoundarySpec | str | None,
    batch: Batch | None = None,
    *,
    loaded: bool = False,
    rows: Tensor | None = None,
) -> Installed:
    """Install, with tables that have their values (`loaded`), or for `rows` that one will start from and must fit."""
    spec = None if spec is None else BoundarySpec.parse(spec)
    old: Link | None = link_of(model)
    ends = locate(model)  # says what sharding, adapters or quantisation have made of them, also since
    has = BoundarySpec("tied" if ends.tied else "untied") if old is None else old.spec
    if units(model) or any(spread(module) for module in (ends.source, ends.head)):
        verified = old is not None and old.structure.folded
        require_same_tables(model, spec, has, changed=rows is not None, verified=verified)
    if old is not None:
        if model.get_output_embeddings() is old.head and spec in (None, old.spec):
            return _checked(model, old, batch)
        Installed(model, old).uninstall()
    if on_meta(model):
        raise InstallError(f"{type(model).__name__} is on the meta device", "load its weights first")
    journal, drawn = Journal(), generator_states()
    try:
        build = spec if spec is None or not loaded else replace(spec, init=None, vectors=None, freeze=False)
        link = attach(model, build, journal)
        link.spec = spec or link.spec
        if rows is not None:
            check_rows(link.ends.source.weight, rows, link.spec)
        if spec is not None:
            _declare(model, link, journal)
        return _checked(model, link, batch)
    except BaseException:
        journal.undo()
        if old is not None:
            _put_back(model, build_into(model, old.spec, loaded=True)._link, old)
        restore_generators(drawn)
        raise


def _put_back(model: Any, made: Link, old: Link) -> None:
    """Make `old` the link of a model again, in place of the `made` one, so that handles of it stay valid."""
    of_user = {name: getattr(old, name) for name in ("options", "logits", "counts", "always", "lazy")}
    vars(old).update(vars(made) | of_user)
    for module in (model, *old.lookups, old.head):
        setattr(module, NAME, old)


def _checked(model: nn.Module, link: Link, batch: Batch | None) -> Installed:
    """Verify a link and find out how its loss counts labels; a link that is refused stays as it was."""
    before = dict(vars(link))
    link.counts = Counts()  # of the forwards below, which are not the user's
    try:
        batch = random_batch(model, link) if batch is None else batch
        base = verify(model, link, batch)
        correct_accounting(model, link, batch, base)
    except BaseException:
        vars(link).update(before)
        raise
    finally:
        link.counts = before["counts"]
        reshard(model)
    return Installed(model, link)


def _declare(model: Any, link: Link, journal: Journal) -> None:
    """Write the spec into the model's config, and change type where its own classes cannot hold the boundary."""
    config = own_config(model, journal)
    journal.set(config, ENTRY, str(link.spec.plainly()))
    if not link.plain:
        declare_family(model, config, journal)


# What each known optimizer keeps per parameter and that is linear in the gradient or in its square.
FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "max_exp_avg_sq")
COUNTER = ("step",)
State = dict[str, Any]


def _known_state(optimizer: torch.optim.Optimizer | None, table: Tensor) -> State:
    state = {} if optimizer is None else dict(optimizer.state.get(table, {}))
    unknown = [key for key, value in state.items() if key not in (*FIRST, *SECOND, *COUNTER) and value is not None]
    if unknown:
        what = f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which cannot be copied or merged"
        raise UnsupportedError(what, "use SGD, Adam or AdamW, or change the boundary without an optimizer")
    return state


def _replace(optimizer: Any, model: nn.Module, old: list[Any], new: list[Any], state: State) -> None:
    """Put the tables `new`, each with this state, in place of `old`, in the order of a new optimizer's group."""
    place = {id(p): i for i, p in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if all(p is not table for table in old)]
        if len(held) < len(group["params"]):
            added = new if any(p is old[0] for p in group["params"]) else []
            group["params"] = sorted([*held, *added], key=lambda p: place.get(id(p), len(place)))
    for table in (*old, *new):
        optimizer.state.pop(table, None)
    for table in new if state else ():
        optimizer.state[table] = {key: x.clone() if torch.is_tensor(x) else x for key, x in state.items()}


# at a step of training


class _Scheduled(TrainerCallback):
    """Changes the boundary once, before the step after `step` optimizer steps; not where it is changed already."""

    def __init__(self, becomes: str, step: int, choice: str, choices: tuple[str, ...]) -> None:
        if not hasattr(step, "__index__") or step < 0 or choice not in choices:
            what = f"the boundary cannot change after {step!r} steps by {choice!r}"
            raise SpecError(what, f"give a number of steps, and one of {', '.join(choices)}")
        self.becomes, self.step, self.choice, self.done = becomes, step, choice, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.done or state.global_step < self.step:
            return
        self.done = True
        installed = install(kw["model"])
        if installed.spec.kind == self.becomes:  # a run resumed from a checkpoint that was written after the change
            return
        if args.world_size > 1:
            fix = "train on one process, or start from the final boundary"
            raise UnsupportedError("changing the boundary while several processes train", fix)
        change = installed.tie if self.becomes == "tied" else installed.untie
        change(getattr(kw["optimizer"], "optimizer", kw["optimizer"]), self.choice)


def tie_at(step: int, keep: str = "mean") -> TrainerCallback:
    """Callback for any `transformers.Trainer`: tie the model's tables after `step` optimizer steps.

    `keep` says whose values the table starts from: input, output or their mean. To resume from a checkpoint that was
    written after the step, tie the model first (`tiewise.installed(model).tie()`): it must fit what it loads.
    """
    return _Scheduled("tied", step, keep, KEEP)


def untie_at(step: int, state: str = "copy") -> TrainerCallback:
    """Callback for any `transformers.Trainer`: untie the model's tables after `step` optimizer steps.

    `state` says what the optimizer keeps for both: copy, split or reset. To resume from a checkpoint that was written
    after the step, untie the model first (`tiewise.installed(model).untie()`): it must fit what it loads.
    """
    return _Scheduled("untied", step, state, STATE)
