"""The verbs of adapters: `merge` writes one into its base, `slim` leaves out of one what its base has.

`merge`: the adapter's changes in its base's own tensors, so that the result does what base and adapter do together.

    linear      W + s·B A       s = alpha / r, or alpha / √r (rsLoRA); W is stored [out, in], or turned as in GPT-2
    DoRA        m · (W + s·B A) / ‖W + s·B A‖, row by row
    lookup      E + s·(B A)ᵀ
    full copy, trained rows     in the place of what the base has

Computed in fp64 from pieces of a few MB, and rounded once to the base's type. On a tied base an update of one end acts
at that end alone while it is not merged, and in the one table it would act at both: where the two ends come out
different, the result stores both.

`slim`: an adapter that stores whole tables keeps the rows that differ from its base, as PEFT's trained rows. PEFT's
`trainable_tokens_delta` holds a row's new values, not a difference, so that base and rows together are the copy, bit
for bit: the result is read back and compared so, every row. On a tied base PEFT gives trained rows of the input table
to the head too; a copy that acts at one end alone cannot be written so, and is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import BASE, COPY, DELTA, LORA, PREFIX, WEIGHTS, AdapterFacts, end_modules, open_adapter
from tiewise.checkpoint.claims import ends_with, family_type, number
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, TOKENIZER_FILES, Folder, open_folder, read_tokenizer
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rewrite.change import (
    Change,
    Moved,
    NewTensor,
    NothingToDo,
    Pieces,
    TableRows,
    gathered,
    hidden_vectors,
    measure_move,
)
from tiewise.checkpoint.rewrite.engine import Place, Receipt, verb
from tiewise.checkpoint.rewrite.file_plan import edited_file
from tiewise.checkpoint.rewrite.ties import parted
from tiewise.checkpoint.rules.adapter import empty_tensors
from tiewise.checkpoint.rules.rule import describe, names
from tiewise.checkpoint.stored import FLOATING, Reader, Stored, read_header, rounded, widened
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, doing

TURNED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")  # families whose layers store [in, out]
# settings under which an adapter does more than the sums of this file
BEYOND = "target_parameters layer_replication use_qalora use_bdlora alora_invocation_tokens arrow_config kasa_config"
INITIAL = ("True", "False", "None", "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is
LINEAR, LOOKUP = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
WHOLE = {f"{wrap}{kind}" for wrap in ("", BASE) for kind in ("weight", "bias")}
KNOWN = {*LINEAR, *LOOKUP, "lora_B.bias", "lora_magnitude_vector", DELTA, *WHOLE}
PLAIN = re.compile(r"\^?(?:[\w.-]|\\[.dw])*(?:[*+](?:[\w.-]|\\[.dw])*)?")  # no groups, one repetition: never slow

SAME = Moved(0.0, 0.0, "every row, bit for bit: the base and the rows that are kept are the copies again")


@dataclass(frozen=True)
class Merged:
    """A tensor of the result."""

    old: Stored  # what it starts from: the base's tensor, or the adapter's copy of it
    dtype: str  # of the base's tensor
    factors: Callable[[], tuple[NDArray, NDArray]] | None = None  # [rows, r] and s·[r, columns], whose product is added
    length: Stored | None = None  # [rows]: that of each row once the product is added (DoRA)
    ids: tuple[int, ...] = ()  # rows that are replaced, each by one of
    rows: Stored | None = None

    def table(self) -> TableRows:
        """Its rows, in its type; it holds the two factors."""
        product = None if self.factors is None else self.factors()
        lengths = None if self.length is None else widened(self.length.read())
        ids = np.array(self.ids, np.int64)

        @np.errstate(all="ignore")  # an adapter may hold infinities; the result then says so
        def read(start: int, stop: int) -> NDArray:
            made = self.old.read(start, stop).astype(np.float64)
            if product is not None:
                made += (product[0][start:stop].astype(np.float64) @ product[1]).reshape(made.shape)
            if lengths is not None:
                made *= (lengths[start:stop] / np.linalg.norm(made, axis=1))[:, None]
            if self.rows is not None:
                here = np.flatnonzero((ids >= start) & (ids < stop))
                with Reader(self.rows) as reader:
                    made[ids[here] - start] = reader.take(here)
            return rounded(made, self.dtype)

        return TableRows(self.old.rows, math.prod(self.old.shape[1:]), read)

    def pieces(self) -> Pieces:
        """Yield its bytes."""
        return self.table().pieces()


def merge(
    source: Place,
    to: Place | None = None,
    *,
    base: Place | None = None,
    adapter: Place | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write a LoRA adapter's changes into its base, so that the result does what base and adapter do together.

    On a base whose two ends are one table, an update that acts at one of them unties the result. The first argument is
    the adapter with `base=`, as on the command line, or the base with `adapter=`.

    Args:
        source: folder of the PEFT adapter, or of the base where `adapter` is given; it is only read.
        to: the folder to make; its parent exists.
        base: checkpoint folder that the adapter was trained on; it is only read.
        adapter: folder of the PEFT adapter, where `source` is the base; it is only read.
        dry_run: foresee and measure everything, write nothing.
        force: also where it changes the model's function, or breaks a rule of `check`; recorded.

    Raises:
        CheckpointError: neither or both of `base` and `adapter`, a source that cannot be read or must not be rewritten
            so, or a destination that cannot be used. Nothing is left at `to` or beside it then.
    """
    for given in (source, base, adapter):
        if hasattr(given, "named_parameters"):
            return _merge_into_base(given, to, adapter=adapter)  # which refuses a live model
    if (base is None) == (adapter is None):
        what = f"merge of {source} has {'no base' if base is None else 'base and adapter both'}"
        raise CheckpointError(what, "call merge(adapter, to, base=base), as on the command line")
    if base is not None:
        return _merge_into_base(base, to, adapter=source, dry_run=dry_run, force=force)
    return _merge_into_base(source, to, adapter=adapter, dry_run=dry_run, force=force)


def _merge_change(facts: Facts, *, adapter: Place, force: bool = False) -> Change:
    """Return what becomes of a base when an adapter is merged into it."""
    folder, table = open_folder(adapter), readable(facts, "merge into")[0]
    given, tensors, head = open_adapter(folder, facts), facts.folder.tensors, facts.roles.output or table
    _require_numbers(given)
    modules = {module: module for module in given.base_modules.values()} | given.base_modules
    for what, fix in _against(given, facts, folder, modules):
        raise CheckpointError(f"{given.path}: {what}", fix)

    ends: dict[str, Merged] = {}  # "input" and "output": what comes of them
    body: list[NewTensor] = []
    at_end = {update.module: end for end in ("input", "output") if (update := getattr(given, end)) is not None}
    for module, parts in given.parts.items():
        end, stored = at_end.get(module, ""), modules[module]
        if any("bias" not in part for part in parts):
            own = {"input": table, "output": head}.get(end, tensors.get(f"{stored}.weight"))
            made, own = _merged(given, module, "weight", own, turned=not end and family_type(facts.config) in TURNED)
            if end:
                ends[end] = made
            else:
                body.append(NewTensor.like(own, made.pieces))
        if any("bias" in part for part in parts):
            made, own = _merged(given, module, "bias", tensors.get(f"{stored}.bias", tensors.get(f"{module}.bias")))
            body.append(NewTensor.like(own, made.pieces))

    if len({tensor.name for tensor in body}) < len(body):
        raise CheckpointError(f"{given.path}: it changes a tensor of the base twice, under two names", "one must go")
    change = _tables(given, facts, ends, (table, head), force)
    notes = list(change.notes)
    if body:
        notes.append(f"tensors of the body that change too: {len(body):,}; what that does to logits only a run shows")
    if "output" in ends and ends["output"].factors is not None:
        left, right = ends["output"].factors()
        inner = right @ hidden_vectors(head.shape[1]).T
        largest = max(np.abs(left[at : at + 4096] @ inner).max() for at in range(0, len(left), 4096))
        notes.append(f"predicted from B·A alone: the largest change of a logit is {largest:.3g}")
    files = folder.read(*TOKENIZER_FILES)
    notes += [f"taken from the adapter: {names(files)}"] if files else []
    return replace(change, put=(*change.put, *body), texts=files, notes=tuple(notes))


_merge_change.__name__ = "merge"  # the verb's name in receipts
_merge_into_base = verb(_merge_change)


def _require_numbers(given: AdapterFacts) -> None:
    """Raise where a tensor of an adapter holds no numbers, as after a save under ZeRO-3 without gathering."""
    empty = empty_tensors(given)
    if empty is not None:
        raise CheckpointError(f"{given.path}: {empty.evidence}", empty.repair)


def _against(
    given: AdapterFacts, facts: Facts, folder: Folder, modules: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(what, way out) of whatever keeps a merge from doing all that the adapter does."""
    config, beside = given.config, "load it beside its base, or merge it with PEFT"
    yield from ((fault.what, fault.fix) for fault in (*given.faults, *facts.folder.faults))
    if config.get("peft_type") != "LORA":
        yield f"its peft_type is {short(config.get('peft_type'))}, and not LORA", beside
    beyond = filter(config.get, BEYOND.split())
    yield from ((f"it was trained with {key}, no sum that is known here", beside) for key in beyond)
    if (first := str(config.get("init_lora_weights", True))) not in INITIAL:
        fix = "convert it with PEFT first: path_initial_model_for_weight_conversion"
        yield f"its training began with {short(first)}, which changes the base", fix
    if lost := [module for module in given.parts if module not in modules]:
        what = f"the base lacks {len(lost):,} of its {len(given.parts):,} modules, {names(lost, 2)}"
        yield what, "tiewise check ADAPTER --base BASE says how they should be called"
    for module, parts in given.parts.items():
        odd = (part for part, tensor in parts.items() if part not in KNOWN or tensor.dtype not in FLOATING)
        yield from ((f"{short(module)} has {short(part)}, unknown here", beside) for part in odd)
    words, rows = read_tokenizer(folder), readable(facts, "merge into")[0].rows
    ids = [-1 if words is None else words.max_id, *(row for ids in given.token_rows.values() for row in ids)]
    if max(ids) >= rows:
        fix = f"{facts.command('resize', f'--vocab {max(ids) + 1}')}, and merge into that"
        yield f"it names token {max(ids):,}, and the base has {rows:,} rows: what it learned would be lost", fix
    if given.input is not None or given.output is not None:
        if given.tied is None and not facts.roles.headless:
            yield "whether the base ties its two ends is not known", f"tiewise check {facts.path} says more"
        if len(facts.roles.inputs) > 1:
            yield "the base stores several input tables", "tiewise dedupe makes them one"


def _merged(
    given: AdapterFacts, module: str, kind: str, own: Stored | None, turned: bool = False
) -> tuple[Merged, Stored]:
    """What comes of the base's `own` tensor, a module's "weight" or "bias", and that tensor."""
    parts, config = given.parts[module], given.config

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{given.path}: {short(module)}: {what}", "tiewise check ADAPTER --base BASE says more")

    if own is None or own.dtype not in FLOATING:
        raise wrong(f"the base has no plain {kind} of this name; if it is quantised, merge into what it was made from")
    old = parts.get(kind, parts.get(f"{BASE}{kind}", own))
    if old.shape != own.shape:
        raise wrong(f"{describe(old)} would lose rows in the place of {describe(own)}; tiewise resize the base first")
    if DELTA in parts:
        ids = next((ids for name, ids in given.token_rows.items() if not name or ends_with(module, name)), ())
        if parts[DELTA].shape != (len(set(ids)), *own.shape[1:]) or len(ids) > len(set(ids)) or min(ids, default=0) < 0:
            raise wrong(f"{describe(parts[DELTA])} are not the {len(ids):,} rows of its config")
        return Merged(old, own.dtype, ids=ids, rows=parts[DELTA]), own
    if not any(part.startswith("lora_") and ("bias" in part) == (kind == "bias") for part in parts):
        return Merged(old, own.dtype), own
    pair = next((pair for pair in (LINEAR, LOOKUP) if parts.keys() >= set(pair)), None)
    if pair is None:
        raise wrong("it has half of a low-rank update")
    a, b = (parts[part] for part in pair)
    scale, bias = _scale(given, module, a.rows), parts.get("lora_B.bias")
    if kind == "bias":
        if bias is None or bias.shape != own.shape:
            raise wrong("its bias is not as long as the base's")
        return Merged(old, own.dtype, lambda: (widened(bias.read())[:, None], np.array([[scale]]))), own
    # a square matrix does not say how it lies; of others the shapes do
    square = own.shape == b.shape[:1] + a.shape[1:] == a.shape[1:] + b.shape[:1]
    turned = pair == LOOKUP or (turned if square else own.rows != b.rows)
    if not len(own.shape) == len(a.shape) == 2 or a.shape[:1] != b.shape[1:] or {a.shape[1], b.rows} != set(own.shape):
        raise wrong(f"{describe(b)} times {describe(a)} is no update of {describe(own)}")
    length = parts.get("lora_magnitude_vector")
    if (length is None) is bool(config.get("use_dora")) or (length is not None and length.shape != own.shape[:1]):
        raise wrong("use_dora and what is stored contradict each other")
    if length is not None and turned:
        raise wrong("DoRA of a lookup, or of a matrix that is stored turned, is not merged here; PEFT does it")

    def factors() -> tuple[NDArray, NDArray]:
        one, two = (widened(part.read()) for part in (a, b))
        left, right = (one.T, two.T) if turned else (two, one)
        return left, right.astype(np.float64) * scale

    return Merged(old, own.dtype, factors, length), own


def _scale(given: AdapterFacts, module: str, rank: int) -> float:
    """The factor of a module's low-rank update."""
    config = given.config
    patterns, alpha = config.get("alpha_pattern"), config.get("lora_alpha", 8)
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if len(module) > 300 or PLAIN.fullmatch(pattern) is None:  # it comes from a stranger
            what = f"{given.path}: alpha_pattern has {short(pattern)}, which may take long to match, and is not run"
            raise CheckpointError(what, "write the modules' names in its place")
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    alpha = number(alpha)
    if alpha is None or rank < 1:
        raise CheckpointError(f"{given.path}: {short(module)} has rank {rank} and no lora_alpha", "it must be a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _tables(
    given: AdapterFacts, facts: Facts, ends: dict[str, Merged], old: tuple[Stored, Stored], force: bool
) -> Change:
    """What comes of the two ends: one table again where both come out the same, else two. Completes `ends`."""
    (table, head), roles = old, facts.roles
    if given.tied and len(ends) == 1:
        # PEFT gives trained rows of the input to the head as well, and with ensure_weight_tying a copy of either end
        (only,) = ends.values()
        if only.factors is None and (given.ties or (only.rows is not None and "input" in ends)):
            ends |= {"input": only, "output": only}
    one, two = ends.get("input"), ends.get("output")
    outputs = None if two is None else (TableRows.of(head), two.table())
    moved = measure_move(outputs, None if one is None else (TableRows.of(table), one.table()))
    change, put = Change(moved), dict[str, NewTensor]()
    both = zip(one.pieces(), two.pieces(), strict=True) if one is not None and two is not None else [(b"", None)]
    if given.tied and one is not two and any(a != b for a, b in both):
        apart = parted(facts, force)
        notes = (*apart.notes, "the adapter parts the two ends of the tied base: the result has two tables")
        change, put = replace(apart, moved=moved, notes=notes), {new.name: new for new in apart.put}
    heads = [new for new in put if new.endswith(roles.output_name or "")] if roles.output is None else [head.name]
    for made, was, targets in ((one, table, [table.name]), (two, head, heads)):
        if made is not None:
            put |= {name: NewTensor.like(was, made.pieces, name=name) for name in targets}
    return replace(change, put=tuple(put.values()))


# the adapter alone


@verb
def slim(facts: Facts, *, base: str | os.PathLike[str], force: bool = False) -> Change:
    """Keep of an adapter's copies of whole tables the rows that differ from its base, as `trainable_token_indices`.

    A copy of the base's own table that PEFT saved below a low-rank update goes altogether.

    Args:
        base: checkpoint folder of the model that the adapter was trained on; it is only read.
    """
    model = Facts(open_folder(base))
    adapter = open_adapter(facts.folder, model)
    _require_numbers(adapter)
    readable(model, "slim an adapter of")
    pairs = ((adapter.input, model.roles.input), (adapter.output, model.roles.output or model.roles.input))
    ends = [(end, end.copy, table) for end, table in pairs if end is not None and end.copy is not None and table]
    if not ends:
        raise NothingToDo(f"{adapter.path}: it stores no copy of a table of the base", "there is nothing to slim")
    first = end_modules(model)[0] or ""  # a list of rows that names no module is of the input table
    gone = {end.module for end, _, _ in ends if end.kind == COPY}
    _require_rows_will_do(adapter, model, gone)

    kept: dict[str, tuple[Stored, Stored, list[int]]] = {}  # module → its copy, the base's table, rows that differ
    for end, copy, table in ends:
        if copy.shape != table.shape or not {copy.dtype, table.dtype} <= set(FLOATING):
            what = f"{adapter.path}: {describe(copy)} is no copy of {describe(table)}"
            raise CheckpointError(what, "tiewise check ADAPTER --base BASE says more")
        with doing(f"comparing {short(copy.name)} with the base", copy.nbytes):
            ids = changed_rows(copy, table).tolist()
        if ids and end.kind == LORA:
            what = f"{adapter.path}: below a low-rank update, {short(copy.name)} has {len(ids):,} rows of its own"
            raise CheckpointError(what, "PEFT has no place for both; tiewise merge joins them")
        if len(ids) > copy.rows // 2:
            what = f"{adapter.path}: {len(ids):,} of {copy.rows:,} rows of {short(copy.name)} differ from the base"
            raise CheckpointError(what, "was it trained on another base? If not, the copy is what it needs")
        if end.kind == COPY and not (adapter.tied and kept):  # of a tied pair PEFT keeps the rows once, at the input
            kept[first if adapter.tied else end.module] = (copy, table, ids)

    rows = {name or first: list(ids) for name, ids in adapter.token_rows.items()}
    changed = {module: (copy, ids) for module, (copy, _, ids) in kept.items() if ids}
    rows |= {module: ids for module, (_, ids) in changed.items()}
    saved = [name for name in adapter.listed("modules_to_save") if not any(ends_with(one, name) for one in gone)]
    config = {"modules_to_save": saved or None, "trainable_token_indices": rows or None} if gone else {}
    put = [
        NewTensor(_delta(module), copy.dtype, (len(ids), copy.shape[1]), WEIGHTS, partial(gathered, copy, ids))
        for module, (copy, ids) in changed.items()
    ]
    if not put and len(ends) == len(adapter.tensors):
        raise CheckpointError(f"{adapter.path}: nothing but the tables of the base", "leave it out: it does nothing")
    said = (f"{len(ids):,} of {copy.rows:,} rows of {short(module)}" for module, (copy, _, ids) in kept.items())

    def flaws(made: Path) -> Iterator[str]:
        stored = read_header(made / WEIGHTS).tensors
        written = json.loads((made / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("trainable_token_indices") or {}
        for module, (copy, table, _) in kept.items():
            again = Merged(table, copy.dtype, ids=tuple(written.get(module, ())), rows=stored.get(_delta(module)))
            with doing(f"comparing every row of {short(module)}", copy.nbytes):
                if any(a != b for a, b in zip(again.pieces(), Merged(copy, copy.dtype).pieces(), strict=True)):
                    yield f"its rows of {short(module)} are not those of the copy"

    return Change(
        SAME,
        drop=frozenset(copy.name for _, copy, _ in ends),
        put=tuple(put),
        texts={ADAPTER_CONFIG: edited_file(facts.folder, ADAPTER_CONFIG, config)},
        notes=(f"kept: {' and '.join(said) or 'the low-rank updates; the copies were the tables of the base'}",),
        flaws=flaws,
    )


def _require_rows_will_do(adapter: AdapterFacts, model: Facts, copies: set[str]) -> None:
    """Raise where PEFT's trained rows would not do what the copies of these modules do."""
    untie, wrong = f"{model.command('untie')}, and slim for that", ""
    tied, ends = adapter.tied, [end for end in (adapter.input, adapter.output) if end is not None]
    if adapter.config.get("peft_type") != "LORA":
        wrong, untie = "its peft_type is not LORA", "keep it: rows beside other updates are not known"
    elif copies and tied is None:
        wrong, untie = "whether the base ties its two ends is not known", f"tiewise check {model.path} says more"
    elif copies and tied and len(ends) == 2 and not adapter.equal:
        wrong = "what it does to the two ends differs, and the base has one table for both"
    elif copies and tied and len(ends) == 1 and not adapter.ties:
        wrong = f"only {short(ends[0].module)} has a copy, and trained rows of a tied base act at both ends"
    elif model.roles.biases and (copies if tied else copies & {adapter.output.module if adapter.output else ""}):
        wrong, untie = "the head has a bias, which PEFT (0.21) leaves out where rows are trained", "keep the copy"
    others = [m for m, parts in adapter.parts.items() if "weight" in parts and m not in copies]
    for name in adapter.listed("modules_to_save"):
        if any(ends_with(m, name) for m in copies) and any(ends_with(m, name) for m in others):
            wrong, untie = f"modules_to_save names {short(name)}, which is more than a table", "write full names there"
    if wrong:
        raise CheckpointError(f"{adapter.path}: {wrong}", untie)


def _delta(module: str) -> str:
    return f"{PREFIX}{module}.token_adapter.{DELTA}"
