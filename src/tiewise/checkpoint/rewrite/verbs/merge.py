"""`merge`: write an adapter's changes into the tensors of its base.

The result computes what base and adapter compute together.

    linear      W + s·B A       s = alpha / r, or alpha / √r (rsLoRA); W is stored [out, in], in GPT-2 [in, out]
    DoRA        m · (W + s·B A) / ‖W + s·B A‖, row by row
    lookup      E + s·(B A)ᵀ
    full copy, trained rows     replace the tensor, or its rows, in the base

The sums are computed in fp64 from pieces of a few MB, and rounded once to the base's type. On a tied base, an adapter
may update one end only. In one shared table the update would act at both ends. If the merged ends differ, the result
therefore stores two tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from tiewise.checkpoint.adapter import BASE, DELTA, LINEAR, LOOKUP, MERGED_PARTS, AdapterFacts, open_adapter
from tiewise.checkpoint.claims import ends_with, finite_number
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.numeric_ends import require_readable_tables
from tiewise.checkpoint.peft_methods import USE_PEFT, reasons_against_merge
from tiewise.checkpoint.rewrite.change import (
    Change,
    Movement,
    NewTensor,
    Pair,
    Rows,
    TableRows,
    hidden_vectors,
    measure_movement,
    same_pieces,
)
from tiewise.checkpoint.rewrite.engine import AnyPath, Receipt
from tiewise.checkpoint.rewrite.merged import MergedTensor, Obstacle, require_numbers
from tiewise.checkpoint.rewrite.registry import ADAPTER, Option, make_runner, verb
from tiewise.checkpoint.rewrite.ties import untied_change
from tiewise.checkpoint.rules.rule import counted, describe, names
from tiewise.checkpoint.stored import FLOATING, Stored, widened
from tiewise.checkpoint.tokenizer_ids import TOKENIZER_FILES, read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

# no groups and one repetition, so matching is never slow
SAFE_PATTERN = re.compile(r"\^?(?:[\w.-]|\\[.dw])*(?:[*+](?:[\w.-]|\\[.dw])*)?")
MOST_LETTERS = 300  # longest name of a module that is matched with a pattern
DORA_CONTRADICTION = "use_dora and what is stored contradict each other"


def _merge_change(facts: Facts, *, adapter: AnyPath, force: bool = False) -> Change:
    """Return the change of a base into which an adapter is merged."""
    folder, input_table = open_folder(adapter), require_readable_tables(facts, "merge into")[0]
    opened = open_adapter(folder, facts)
    require_numbers(opened)
    modules = {module: module for module in opened.base_modules.values()} | opened.base_modules
    for obstacle in _obstacles(opened, facts, folder, modules):
        raise CheckpointError(f"{opened.path}: {obstacle.problem}", obstacle.remedy)

    ends = _MergedEnds(opened, facts, input_table, facts.roles.output or input_table)
    body = _merge_modules(ends, modules)
    names_in_body = {tensor.name for tensor in body}
    if len(names_in_body) < len(body):
        raise CheckpointError(
            f"{opened.path}: it changes a tensor of the base twice, under two names", "remove one of the two"
        )
    ends.share_rows()
    change = ends.change(force)
    notes = list(change.notes)
    if body:
        notes.append(f"{counted(len(body), 'tensor')} of the body changed too, which the largest change leaves out")
    notes += ends.prediction()
    files = folder.read(*TOKENIZER_FILES)
    if files:
        notes.append(f"taken from the adapter: {names(files)}")
    put = (*change.put, *body)
    return replace(change, put=put, texts=files, notes=tuple(notes), summary=_summary(put, ends))


def _summary(put: Sequence[NewTensor], ends: _MergedEnds) -> str:
    """Return the change in one clause: the number of changed tensors, and a lost tie."""
    changed = len({tensor.name for tensor in put})
    summary = f"the adapter is part of the model, with {counted(changed, 'tensor')} changed"
    if ends.are_parted:
        summary += "; the one table became two"
    return summary


def _merge_modules(ends: _MergedEnds, modules: Mapping[str, str]) -> list[NewTensor]:
    """Merge every module of the adapter.

    Args:
        ends: the two ends of the base; the function adds their merged tables to `ends.merged`.
        modules: {name of a module in the base's class: its name in the base's files}.

    Returns:
        The changed tensors of the body.
    """
    adapter, facts = ends.adapter, ends.facts
    tensors = facts.folder.tensors
    body: list[NewTensor] = []
    for module in adapter.parts:
        update, stored = ModuleUpdate(adapter, module), modules[module]
        end = ends.end_of(module)
        if update.parts_by_parameter["weight"]:
            if end is not None:
                ends.merged[end] = update.merged("weight", update.require(ends.table_of(end), "weight"))
            else:
                base = update.require(tensors.get(f"{stored}.weight"), "weight")
                merged = update.merged("weight", base, is_transposed=facts.family.stores_transposed)
                body.append(NewTensor.like(base, merged.pieces))
        if update.parts_by_parameter["bias"]:
            bias = tensors.get(f"{stored}.bias", tensors.get(f"{module}.bias"))
            base = update.require(bias, "bias")
            merged = update.merged("bias", base)
            body.append(NewTensor.like(base, merged.pieces))
    return body


_merge_change.__name__ = "merge"  # the verb's name in receipts
_merge_into_base = make_runner(_merge_change)


@verb(
    order=110,
    group="adapter",
    details="",
    source=ADAPTER,
    logits_differ="the adapter changes them",
    example="adapter --base=tied",
)
def merge(
    source: AnyPath,
    to: AnyPath | None = None,
    *,
    base: Annotated[
        AnyPath | None,
        Option("Checkpoint that it was trained on. It is only read.", metavar="DIR", required=True),
    ] = None,
    adapter: AnyPath | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write an adapter's changes into its base. A tied base gets two tables if its ends become different.

    The result computes what base and LoRA adapter compute together. The first argument is the adapter with `base=`, as
    on the command line, or the base with `adapter=`.

    >>> import tiewise  # `adapter` was trained on `tied`
    >>> receipt = tiewise.checkpoint.merge("adapter", "merged", base="tied")
    >>> receipt.written
    ('model.embed_tokens.weight',)

    Args:
        source: folder of the PEFT adapter, or of the base if `adapter` is set; it is only read.
        to: path of the new folder; its parent must exist.
        base: checkpoint folder that the adapter was trained on; it is only read.
        adapter: folder of the PEFT adapter, if `source` is the base; it is only read.
        dry_run: plan and measure everything, but write nothing.
        force: proceed although the change alters the model's function or breaks a rule of `check`; the result
            records it.

    Returns:
        A `Receipt`: the changed tensors and files, and how far logits and input rows move.

    Raises:
        CheckpointError: the caller sets neither or both of `base` and `adapter`, a source cannot be read, `merge`
            refuses it, or `to` cannot be used. Nothing is left at `to` or next to it.
    """
    for path in (source, base, adapter):
        if hasattr(path, "named_parameters"):
            return _merge_into_base(path, to, adapter=adapter)  # raises: a live model is no folder
    remedy = "call merge(adapter, to, base=base), as on the command line"
    if base is None:
        if adapter is None:
            raise CheckpointError(f"merge of {source} has no base", remedy)
        return _merge_into_base(source, to, adapter=adapter, dry_run=dry_run, force=force)
    if adapter is not None:
        raise CheckpointError(f"merge of {source} has base and adapter both", remedy)
    return _merge_into_base(base, to, adapter=source, dry_run=dry_run, force=force)


# reasons against a merge: it would lose something that the adapter does


def _obstacles(adapter: AdapterFacts, facts: Facts, folder: Folder, modules: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield every reason against a merge, the most serious first."""
    for fault in (*adapter.faults, *facts.folder.faults):
        yield Obstacle(fault.problem, fault.remedy)
    yield from _unknown_training(adapter)
    yield from _unknown_modules(adapter, modules)
    yield from _unknown_parts(adapter)
    yield from _missing_rows(adapter, facts, folder)
    if adapter.input is not None or adapter.output is not None:
        yield from _unclear_ends(adapter, facts)


def _unknown_training(adapter: AdapterFacts) -> Iterator[Obstacle]:
    """Yield each setting under which an adapter computes more than this module merges."""
    for problem, remedy in reasons_against_merge(adapter.config):
        yield Obstacle(problem, remedy)


def _unknown_modules(adapter: AdapterFacts, modules: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield one obstacle if the base lacks modules of the adapter."""
    lost = [module for module in adapter.parts if module not in modules]
    if lost:
        problem = f"the base lacks {len(lost):,} of its {len(adapter.parts):,} modules, {names(lost, 2)}"
        yield Obstacle(problem, "tiewise check ADAPTER --base BASE says how they should be called")


def _unknown_parts(adapter: AdapterFacts) -> Iterator[Obstacle]:
    """Yield each tensor of the adapter that this module cannot merge."""
    for module, parts in adapter.parts.items():
        for part, tensor in parts.items():
            if part not in MERGED_PARTS or tensor.dtype not in FLOATING:
                yield Obstacle(f"{short(module)} has {short(part)}, unknown here", USE_PEFT)


def _missing_rows(adapter: AdapterFacts, facts: Facts, folder: Folder) -> Iterator[Obstacle]:
    """Yield an obstacle if the base has no row for the adapter's largest token id."""
    rows = require_readable_tables(facts, "merge into")[0].rows
    tokenizer = read_tokenizer(folder)
    largest = -1
    if tokenizer is not None:
        largest = tokenizer.max_id
    for ids in adapter.token_rows.values():
        largest = max(largest, *ids, -1)
    if largest >= rows:
        problem = f"it names token {largest:,}, and the base has {rows:,} rows: what it learned would be lost"
        resize = facts.command("vocab resize", f"--vocab {largest + 1}")
        yield Obstacle(problem, f"{resize}, and merge into that")


def _unclear_ends(adapter: AdapterFacts, facts: Facts) -> Iterator[Obstacle]:
    """Yield each reason why an end's update cannot be assigned to a table of the base."""
    if adapter.tied is None and not facts.roles.headless:
        remedy = f"run tiewise check {facts.path}"
        yield Obstacle("it is unknown if the base is tied", remedy)
    if len(facts.roles.input_tables) > 1:
        remedy = "tiewise repair makes them one"
        if facts.claims.ties_others is False:  # encoder and decoder have separate tables on purpose
            remedy = USE_PEFT
        yield Obstacle("the base stores several input tables", remedy)


# one module


class ModuleUpdate:
    """Tensors that an adapter stores for one module of the base."""

    def __init__(self, adapter: AdapterFacts, module: str) -> None:
        self.adapter = adapter
        self.module = module
        self.parts = adapter.parts[module]
        # names of the parts that change the module's "weight", and of those that change its "bias"
        self.parts_by_parameter: dict[str, list[str]] = {"weight": [], "bias": []}
        for part in self.parts:
            if "bias" in part:
                self.parts_by_parameter["bias"].append(part)
            else:
                self.parts_by_parameter["weight"].append(part)

    def error(self, problem: str) -> CheckpointError:
        """Return an error that names the module and says why it cannot be merged."""
        remedy = "run tiewise check ADAPTER --base BASE"
        return CheckpointError(f"{self.adapter.path}: {short(self.module)}: {problem}", remedy)

    def require(self, base: Stored | None, parameter: str) -> Stored:
        """Return `base`, the module's "weight" or "bias" in the base.

        Raise if it is missing or quantised.
        """
        if base is None or base.dtype not in FLOATING:
            remedy = "if it is quantised, merge into what it was made from"
            raise self.error(f"the base has no plain {parameter} of this name; {remedy}")
        return base

    def merged(self, parameter: str, base: Stored, is_transposed: bool = False) -> MergedTensor:
        """Return the merged form of `base`, the module's "weight" or "bias".

        Args:
            is_transposed: True if the base's family stores weights as [in, out].
        """
        old = self.parts.get(parameter, self.parts.get(f"{BASE}{parameter}", base))
        if old.shape != base.shape:
            why = f"{describe(old)} would lose rows in the place of {describe(base)}"
            raise self.error(f"{why}; run tiewise vocab resize on the base first")
        if DELTA in self.parts:
            return MergedTensor(old, base.dtype, ids=self._replaced_rows(base), rows=self.parts[DELTA])
        if not self._has_low_rank(parameter):
            return MergedTensor(old, base.dtype)
        a, b = self._low_rank_pair()
        scale = _scale(self.adapter, self.module, a.rows)
        if parameter == "bias":
            term = BiasTerm(self._bias(base), scale)
            return MergedTensor(old, base.dtype, term.factors)
        product = LowRank(a, b, scale, self._is_transposed(base, a, b, is_transposed))
        return MergedTensor(old, base.dtype, product.factors, self._trained_lengths(base, product.is_transposed))

    def _replaced_rows(self, base: Stored) -> tuple[int, ...]:
        """Return the ids of replaced rows; raise if the config lists other ids."""
        rows, ids = self.parts[DELTA], self._listed_rows()
        has_row_for_each = rows.shape == (len(ids), *base.shape[1:])
        are_distinct = len(set(ids)) == len(ids)
        if not has_row_for_each or not are_distinct or min(ids, default=0) < 0:
            raise self.error(f"{describe(rows)} are not the {len(ids):,} rows of its config")
        return ids

    def _listed_rows(self) -> tuple[int, ...]:
        """Return the ids of trained rows that the config lists for this module."""
        for name, ids in self.adapter.token_rows.items():
            if not name or ends_with(self.module, name):
                return ids
        return ()

    def _has_low_rank(self, parameter: str) -> bool:
        """Return True if a low-rank update changes the module's "weight" or "bias"."""
        return any(part.startswith("lora_") for part in self.parts_by_parameter[parameter])

    def _low_rank_pair(self) -> tuple[Stored, Stored]:
        """Return A and B of a low-rank update."""
        for a, b in (LINEAR, LOOKUP):
            if a in self.parts and b in self.parts:
                return self.parts[a], self.parts[b]
        raise self.error("it has half of a low-rank update")

    def _bias(self, base: Stored) -> Stored:
        """Return the bias of a low-rank update."""
        bias = self.parts.get("lora_B.bias")
        if bias is None or bias.shape != base.shape:
            raise self.error("its bias is not as long as the base's")
        return bias

    def _is_transposed(self, base: Stored, a: Stored, b: Stored, is_transposed: bool) -> bool:
        """Return True if the base stores the transpose of B A.

        Raise if neither B A nor its transpose has the base's shape.
        """
        are_matrices = len(base.shape) == len(a.shape) == 2 and a.shape[:1] == b.shape[1:]
        if not are_matrices or {a.shape[1], b.rows} != set(base.shape):
            raise self.error(f"{describe(b)} times {describe(a)} is no update of {describe(base)}")
        if not self.parts.keys() >= set(LINEAR):
            return True
        if base.shape[0] == base.shape[1]:  # the shape of a square matrix leaves the order open
            return is_transposed
        return base.rows != b.rows

    def _trained_lengths(self, base: Stored, is_transposed: bool) -> Stored | None:
        """Return the row lengths that DoRA trained, None without DoRA."""
        length = self.parts.get("lora_magnitude_vector")
        has_lengths, uses_dora = length is not None, bool(self.adapter.config.get("use_dora"))
        if has_lengths != uses_dora:
            raise self.error(DORA_CONTRADICTION)
        if length is None:
            return None
        if length.shape != base.shape[:1]:
            raise self.error(DORA_CONTRADICTION)
        if is_transposed:
            raise self.error("DoRA of a lookup, or of a matrix that is stored turned, is not merged here; PEFT does it")
        return length


@dataclass(frozen=True)
class LowRank:
    """A product s·B A that is added to a weight."""

    a: Stored  # [r, in]
    b: Stored  # [out, r]
    scale: float
    is_transposed: bool  # True if the weight is stored [in, out]

    def factors(self) -> tuple[Rows, Rows]:
        """Read both factors of s·B A, or of its transpose if the weight is stored so."""
        a, b = widened(self.a.read()), widened(self.b.read())
        left, right = b, a
        if self.is_transposed:
            left, right = a.T, b.T
        return left, right.astype(np.float64) * self.scale


@dataclass(frozen=True)
class BiasTerm:
    """A vector that is added to a bias, times a scale."""

    bias: Stored
    scale: float

    def factors(self) -> tuple[Rows, Rows]:
        """Read the scaled vector as a product [rows, 1] · [1, 1]."""
        return widened(self.bias.read())[:, None], np.array([[self.scale]])


def _scale(adapter: AdapterFacts, module: str, rank: int) -> float:
    """Return the factor s of a module's low-rank update."""
    alpha = finite_number(_written_alpha(adapter, module))
    if alpha is None or rank < 1:
        problem = f"{adapter.path}: {short(module)} has rank {rank} and no lora_alpha"
        raise CheckpointError(problem, "it must be a number")
    if adapter.config.get("use_rslora"):
        return alpha / math.sqrt(rank)
    return alpha / rank


def _written_alpha(adapter: AdapterFacts, module: str) -> Any:
    """Return the alpha of a module as the config writes it.

    The first entry of `alpha_pattern` that matches the module's name decides, else `lora_alpha`.
    """
    patterns = adapter.config.get("alpha_pattern")
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            if (
                len(module) > MOST_LETTERS or SAFE_PATTERN.fullmatch(pattern) is None
            ):  # both come from an untrusted folder
                problem = f"alpha_pattern has {short(pattern)}, which could take very long to match, and was not used"
                raise CheckpointError(f"{adapter.path}: {problem}", "write the names of the modules instead")
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    return adapter.config.get("lora_alpha", 8)


# the two ends


@dataclass
class _MergedEnds:
    """The two ends of a base, and their merged tables."""

    adapter: AdapterFacts
    facts: Facts
    input_table: Stored
    output_table: Stored  # the input table if the base is tied
    merged: dict[str, MergedTensor] = field(default_factory=dict)  # by "input" and "output"; only ends that change

    def end_of(self, module: str) -> str | None:
        """Return "input" or "output" for the module of an end, None for other modules."""
        for end, update in (("output", self.adapter.output), ("input", self.adapter.input)):
            if update is not None and update.module == module:
                return end
        return None

    def table_of(self, end: str) -> Stored:
        """Return the base's table of an end."""
        return {"input": self.input_table, "output": self.output_table}[end]

    def share_rows(self) -> None:
        """Apply a change of one end of a tied base to both ends, as PEFT does.

        PEFT gives trained rows of the input to the head as well. With `ensure_weight_tying`, it does the same with a
        full copy of either end.
        """
        if not self.adapter.tied or len(self.merged) != 1:
            return
        ((end, only),) = self.merged.items()
        if only.factors is not None:
            return
        is_trained_rows_of_input = end == "input" and only.rows is not None
        if self.adapter.ensures_tying or is_trained_rows_of_input:
            self.merged.update({"input": only, "output": only})

    def change(self, force: bool) -> Change:
        """Return the change of both ends.

        A tied base keeps one table if both merged ends are equal, else it gets two.
        """
        change = Change(self._measured())
        if self.are_parted:
            parts = untied_change(self.facts, force)
            note = "the adapter changes the two ends differently, so the tied base became untied"
            change = replace(parts, movement=change.movement, notes=(*parts.notes, note))
        put = {tensor.name: tensor for tensor in change.put}
        head_names = self._head_names(put)
        new_input, new_output = self.merged.get("input"), self.merged.get("output")
        if new_input is not None:
            put[self.input_table.name] = NewTensor.like(self.input_table, new_input.pieces)
        if new_output is not None:
            for name in head_names:
                put[name] = NewTensor.like(self.output_table, new_output.pieces, name=name)
        return replace(change, put=tuple(put.values()))

    def _head_names(self, put: Collection[str]) -> list[str]:
        """Return the names under which the result stores the head.

        Args:
            put: names of the copies that `untied_change` stores.
        """
        if self.facts.roles.output is not None:
            return [self.output_table.name]
        output_name = self.facts.roles.output_name or ""
        return [name for name in put if name.endswith(output_name)]

    def _measured(self) -> Movement:
        """Measure how far the changed ends move."""
        pairs: dict[str, Pair] = {}
        for end, merged in self.merged.items():
            pairs[end] = (TableRows.of(self.table_of(end)), merged.table())
        return measure_movement(pairs.get("output"), pairs.get("input"))

    @cached_property
    def are_parted(self) -> bool:
        """Return True if the one table of a tied base becomes two different ones."""
        new_input, new_output = self.merged.get("input"), self.merged.get("output")
        if not self.adapter.tied or new_input is new_output:
            return False
        if new_input is None or new_output is None:
            return True
        return not same_pieces(new_input.pieces(), new_output.pieces())

    def prediction(self) -> list[str]:
        """Return a note on the largest change of a logit that B A alone causes.

        The list is empty if the head has no low-rank update.
        """
        new_output = self.merged.get("output")
        if new_output is None or new_output.factors is None:
            return []
        left, right = new_output.factors()
        inner = right @ hidden_vectors(self.output_table.shape[1]).T
        largest = max(np.abs(left[at : at + 4096] @ inner).max() for at in range(0, len(left), 4096))
        return [f"the low-rank update alone would change a logit by up to {largest:.3g}"]
