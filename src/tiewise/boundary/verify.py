"""Run a model on a small random batch, to hold it against its family's own classes and to ask what its loss counts.

In the family's own classes tables are folded with their maps and scales into dense [V, D] matrices:

    table_in = in_map(table) · input_scale            table_out = (table · out_map) · output_scale

That is the oracle of three questions, each a reason to refuse: does the loss agree, do the logits agree, and does a
training forward end in the fused loss without anything having asked for the logits?

The Trainer of transformers counts the labels of all micro-batches of a step, tells the model their number as
`num_items_in_batch`, and believes that the loss was divided by it. Of transformers 5.23 that is not true of all:

1. Classes that compute their loss inline take a mean over the micro-batch and ignore the number: under accumulation the
   gradients of BERT, T5 and BART come out as many times too large as there are micro-batches. `Link.averages` says so,
   and the hook after the forward gives such a loss its share of the step's: · labels here / `num_items_in_batch`.
2. The Trainer leaves out position 0 where `loss_type` is a loss that shifts. Classes named `…LMHeadModel` have none, so
   that it counts a label too many per row of GPT-2; a lone BART decoder has one that shifts, though its loss does not.

It decides by class names and signatures. Names are wrong for a quarter of the classes, so the model is asked instead.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from tiewise.boundary.boundary import dense_output
from tiewise.boundary.declare_tying import declare_tying
from tiewise.boundary.journal import Journal
from tiewise.boundary.lazy_logits import LazyLogits, computed
from tiewise.boundary.link import BACKWARD_HOOK, Link, attach, divisor
from tiewise.boundary.recorded_logits import Counts
from tiewise.boundary.saved import ENTRIES, ENTRY, Entry, forget, link_of
from tiewise.boundary.sharded_tables import ASIDE, narrowed
from tiewise.boundary.trial_runs import SEED, ordinary_ids, untraced
from tiewise.core.errors import InstallError, TiewiseError, TiewiseWarning, UnsupportedError
from tiewise.core.spec import BoundarySpec

Batch = dict[str, Any]
_ROWS, _LENGTH = 2, 8
# labels [B] of pairs of sentences, without which BERT's and ALBERT's pretraining classes compute no loss at all
_PAIR_LABELS = ("next_sentence_label", "sentence_order_label")
# relative to the largest value: rounding of the dtype, over a few hundred additions
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


# the family's own classes


def required_link(model: Any) -> Link:
    """Return the link of a model's installed boundary; an InstallError where there is none, or its head is another."""
    link: Link | None = link_of(model) if isinstance(model, nn.Module) else None
    if link is None:
        raise InstallError(f"{type(model).__name__} has no installed boundary", "call tiewise.install(model) first")
    if model.get_output_embeddings() is not link.head:
        raise InstallError(f"{type(model).__name__}: its head is not the installed one", "call tiewise.install(model)")
    return link


@contextmanager
def in_own_classes(link: Link) -> Iterator[None]:
    """Within this context the model runs in its family's own classes, with dense tables."""
    out_map, cap = getattr(link.head, "out_map", None), link.structure.softcap
    shift = getattr(out_map, "bias", None)
    if shift is not None:  # what a projection's bias adds to the logits is in none of the two tables
        with torch.no_grad():
            shift = (link.head.weight @ shift) * link.structure.output_scale

    def behind(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        logits = logits if shift is None else logits + shift
        return logits if cap is None else cap * torch.tanh(logits / cap)

    journal = Journal()
    with link.head.register_forward_hook(behind):
        try:
            _unswap(link, journal)
            yield
        finally:
            journal.undo()


@torch.no_grad()
def _unswap(link: Link, journal: Journal) -> None:
    """Put dense tables and the family's own classes in place; a table that needs no folding stays itself, tied."""
    in_map, out_map, structure = link.in_map, getattr(link.head, "out_map", None), link.structure
    modules: list[Any] = [*link.lookups, link.head]
    *tables, table_out = (module.weight for module in modules)
    if in_map is not None or structure.input_scale != 1.0:
        folded = {
            table: nn.Parameter((table if in_map is None else in_map(table)) * structure.input_scale)
            for table in set(tables)
        }
        tables = [folded[table] for table in tables]
    if out_map is not None or structure.output_scale != 1.0:
        table_out = nn.Parameter(dense_output(table_out, out_map, link.hidden_width) * structure.output_scale)
    for module, table in zip(modules, (*tables, table_out), strict=True):
        if table is not module.weight:  # what undo gives back is no longer in place where FSDP has gathered it since
            journal.set(module, "weight", table)
        journal.set(module, "__class__", type(module).plain_class)
        if ASIDE in vars(module):
            journal.set(module, "forward", vars(module)[ASIDE])


def plain_copy(model: Any) -> PreTrainedModel:
    """Return a copy in the family's own class, its tables dense and untied where maps or scales made them differ.

    Raises:
        InstallError: no boundary is installed.
        UnsupportedError: the family's class has no place for what the boundary adds to the logits.
    """
    link = required_link(model)
    fix = "keep the boundary, and load the model with tiewise.hf.load"
    if link.structure.softcap is not None:
        raise UnsupportedError(f"{link.spec}: a soft-cap is no matrix, so no dense table does the same", fix)
    if link.spec.out_bias:
        raise UnsupportedError(f"{link.spec}: the projection's bias is no table", fix)
    if link.structure.new_bias:
        raise UnsupportedError(f"{link.spec}: the family's own head has no bias to keep this one in", fix)
    plain = copy.deepcopy(model)
    made: Link = link_of(plain)
    _unswap(made, Journal())
    made.undo.undo()
    for module, name in ((made.ends.owner, "in_map"), (made.head, "out_map")):
        if hasattr(module, name):
            delattr(module, name)
    for lookup in made.lookups:
        lookup.embedding_dim = lookup.weight.shape[1]
    made.head.in_features = made.hidden_width
    forget(plain, ENTRY)
    declare_tying(plain, made.ends, Journal())
    return plain


# one forward


def random_batch(model: Any, link: Link) -> Batch:
    """Token ids and labels [2, 8], avoiding the special ids, and labels of pairs [2], on the model's device."""
    taken = inspect.signature(model.forward).parameters
    if "labels" not in taken:
        fix = "install works on models that compute their loss from labels"
        raise InstallError(f"{type(model).__name__}.forward takes no labels", fix)
    source = torch.Generator().manual_seed(SEED)
    rows = {"input_ids": min(len(lookup.weight) for lookup in link.lookups), "labels": len(link.head.weight)}
    # fewer where one table serves two vocabularies
    predicted = getattr(model.config.get_text_config(), "output_vocab_size", None) or rows["labels"]
    rows["labels"] = min(predicted, rows["labels"])
    drawn = {name: ordinary_ids(model, count, (_ROWS, _LENGTH), source) for name, count in rows.items()}
    drawn |= {name: torch.arange(_ROWS, device="cpu") % 2 for name in _PAIR_LABELS if name in taken}
    return {name: ids.to(link.head.weight.device) for name, ids in drawn.items()}


def run(model: Any, batch: Batch, *, training: bool = False) -> tuple[Tensor, Any]:
    """Loss and logits (as the model hands them out) of one forward that leaves no trace."""
    output = untraced(model, batch, training=training)
    if isinstance(output, dict):
        loss, logits = output.get("loss"), next((value for key, value in output.items() if "logits" in key), None)
    else:
        loss, logits = output[0], output[1]
    if not isinstance(loss, Tensor) or loss.dim():  # a tuple without a loss begins with the logits
        raise _no_loss(model, batch)
    return loss, logits


def _no_loss(model: Any, batch: Batch) -> InstallError:
    """Say that a model computed no loss, and what else it takes that may be the reason."""
    taken = inspect.signature(model.forward).parameters
    absent = [name for name in taken if name.endswith(("label", "labels")) and name not in batch]
    fix = "pass batch={...} with all inputs that its loss needs"
    fix += f"; this batch lacks {', '.join(absent)}" if absent else ""
    kind = getattr(type(model), "plain_class", type(model)).__name__
    return InstallError(f"{kind} computed no loss from {', '.join(batch)}", fix)


# what differs


def verify(model: Any, link: Link, batch: Batch) -> Tensor:
    """Return the reference loss of the batch."""
    kind = getattr(type(model), "plain_class", type(model)).__name__
    dtype = narrowed(model) or link.head.weight.dtype
    try:
        with in_own_classes(link):
            reference, reference_logits = run(model, batch)
        with model.register_forward_hook(_compute, prepend=True):  # before FSDP's own hook, which may free the table
            loss, logits = run(model, batch)
        _agree(f"{kind}: loss", loss, reference, dtype)
        if reference_logits is not None:
            _agree(f"{kind}: logits", computed(logits), reference_logits, dtype)
        link.counts = Counts()
        run(model, batch, training=True)
    except InstallError:
        raise
    except TiewiseError as error:
        raise InstallError(f"{kind}: {error.what}", error.fix) from error
    except Exception as error:  # any family may need any input: whatever it raises is the answer
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "pass batch={...} with the inputs that it needs, labels included"
        raise InstallError(f"{kind} does not run on a random batch: {reason}", fix) from error
    if link.counts.materialised:
        operations = ", ".join(dict.fromkeys(link.counts.operations))
        fix = "tiewise knows scales, one soft-cap, biases before it, casts, reshapes and slices between head and loss"
        if BACKWARD_HOOK in link.counts.operations:
            fix = "register the hook after install: it fires, and the logits are computed as long as it is there"
        elif link.structure.softcap is not None:
            fix = "leave softcap out: this family has steps of its own behind its head"
        raise InstallError(f"{kind} does something else to its logits before the loss: {operations}", fix)
    if not link.counts.fused:
        fix = "the loss must be torch.nn.functional.cross_entropy of what the head module returns"
        raise InstallError(f"{kind} computes its loss past its output head", fix)
    return reference


def _compute(model: nn.Module, args: Any, output: Any) -> None:
    for value in output.values() if isinstance(output, dict) else output:
        computed(value)


def _agree(what: str, got: Tensor | None, wanted: Tensor, kind: torch.dtype) -> None:
    tolerance = max(_TOLERANCE[kind], _TOLERANCE[wanted.dtype])  # families cast the logits of an fp64 model to fp32
    if got is None or got.shape != wanted.shape:
        raise InstallError(f"{what} changed shape", "please report this model")
    distance = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-12)
    if not distance <= tolerance:
        fix = "the model uses its tables in a way that the boundary does not know"
        raise InstallError(f"{what} would change by {distance:.1e} (allowed {tolerance:g})", fix)


# what the loss counts


def shifts_labels(model: Any, batch: Batch) -> bool:
    """Whether position 0's label never counts, because position i predicts label i + 1.

    With every label ignored, and with every label but those of position 0, a loss that shifts has nothing to count: it
    is the same nan, 0 or auxiliary loss.
    """
    nothing = torch.full_like(batch["labels"], -100)
    first = nothing.clone()
    position = first[:, 0] if first.dim() > 1 else first[:1]  # BERT takes flat labels, too
    position.fill_(batch["labels"].max())  # those of the batch may be ignored
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # which ignored labels cannot be made into
        batch = {"decoder_input_ids": batch["labels"].clamp(min=0), **batch}
    without, counted = (run(model, {**batch, "labels": labels})[0] for labels in (nothing, first))
    # an auxiliary loss may differ by the rounding of kernels that sum in any order, a label by whole nats
    return torch.allclose(counted, without, rtol=1e-5, atol=0, equal_nan=True)


def counts_items(model: Any, batch: Batch, base: Tensor) -> bool:
    """Whether the loss is divided by the `num_items_in_batch` it is given; `base` is the batch's without one."""
    more = torch.tensor(2 * batch["labels"].numel(), device=base.device)  # than any mean was divided by
    loss, _ = run(model, {**batch, "num_items_in_batch": more})
    return not torch.allclose(loss.float(), base.float(), rtol=1e-4, atol=0)


def correct_accounting(model: Any, link: Link, batch: Batch | None = None, base: Tensor | None = None) -> None:
    """Find out what the model's loss does with its labels and their number, and make the Trainer know it."""
    link.averages = False  # as the family's own classes are
    batch = random_batch(model, link) if batch is None else batch
    with in_own_classes(link):
        base = run(model, batch)[0] if base is None else base
        link.shifts = shifts_labels(model, batch)
        passes_items = getattr(model, "accepts_loss_kwargs", None)  # as the Trainer asks, and so does `counted` below
        if passes_items is None:
            parameters = inspect.signature(model.forward).parameters.values()
            passes_items = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        if not passes_items:
            return
        try:
            link.averages = not counts_items(model, batch, base)
        except TypeError:
            return  # it takes no such argument: the Trainer will say so itself
    known = getattr(model, "loss_type", None)
    counted = LOSS_MAPPING.get(known) is ForCausalLMLoss and not model.config.is_encoder_decoder
    if counted != link.shifts and (known is None or link.averages) and not model.config.is_encoder_decoder:
        wanted = ForCausalLMLoss if link.shifts else ForMaskedLMLoss
        link.undo.set(model, "loss_type", next(key for key, loss in LOSS_MAPPING.items() if loss is wanted))


@dataclass
class FusedLabelSmoother:
    """Put in place of `trainer.label_smoother`: the same loss, without the log-probabilities [N, V]."""

    epsilon: float  # label smoothing ε
    shifts: bool  # whether position i predicts label i + 1

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Smoothed cross-entropy, averaged over the labels of this batch or over `num_items_in_batch`."""
        logits: Any = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        logits = logits.deferred if isinstance(logits, LazyLogits) else logits
        if self.shifts:  # the Trainer's `shift_labels` goes by the name of the model's class
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = F.cross_entropy(
            logits.flatten(0, -2),
            labels.reshape(-1),
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=self.epsilon,
        )
        return loss if num_items_in_batch is None else loss / divisor(num_items_in_batch)


# of a model that transformers makes from a config


def _build(model: Any, value: Any) -> None:
    spec = BoundarySpec.parse(value)
    if spec.plain and model.get_output_embeddings() is None:
        return  # a part without a head: its table is as every loader has it
    attach(model, spec, Journal(), loading=True)


def _account(model: Any) -> None:
    link: Link | None = link_of(model)
    try:
        if link is not None:
            correct_accounting(model, link)
    except Exception as error:  # any family may need any input
        what = f"{type(model).plain_class.__name__}: how its loss counts labels could not be asked ({error})"
        fix = "call tiewise.install(model, batch={...}) with the inputs that it needs before a Trainer is built"
        warnings.warn(f"{what}; {fix}", TiewiseWarning, stacklevel=4)


ENTRIES[ENTRY] = Entry(_build, _account)
