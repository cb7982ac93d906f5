"""`merge`: an adapter's changes in its base's own tensors, so that the result does what both do together.

    linear      W + s·B A       s = alpha / r, or alpha / √r (rsLoRA); W is stored [out, in], or turned as in GPT-2
    DoRA        m · (W + s·B A) / ‖W + s·B A‖, row by row
    lookup      E + s·(B A)ᵀ
    full copy, trained rows     in the place of what the base has

Computed in fp64 from pieces of a few MB, and rounded once to the base's type. On a tied base an update of one end acts
at that end alone while it is not merged, and in the one table it would act at both: where the two ends come out
different, the result stores both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import BASE, DELTA, AdapterFacts, open_adapter
from tiewise.checkpoint.claims import ends_with, number
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import TOKENIZER_FILES, Folder, open_folder, read_tokenizer
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rewrite.change import Change, NewTensor, TableRows, hidden_vectors, measure_move
from tiewise.checkpoint.rewrite.engine import Place, Receipt
from tiewise.checkpoint.rewrite.merged import Merged, require_numbers
from tiewise.checkpoint.rewrite.registry import ADAPTER, Option, runner, verb
from tiewise.checkpoint.rewrite.ties import parted
from tiewise.checkpoint.rules.rule import describe, names
from tiewise.checkpoint.stored import FLOATING, Stored, widened
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

# settings under which an adapter does more than the sums of this file
BEYOND = "target_parameters layer_replication use_qalora use_bdlora alora_invocation_tokens arrow_config kasa_config"
INITIAL = ("True", "False", "None", "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is
LINEAR, LOOKUP = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
WHOLE = {f"{wrap}{kind}" for wrap in ("", BASE) for kind in ("weight", "bias")}
KNOWN = {*LINEAR, *LOOKUP, "lora_B.bias", "lora_magnitude_vector", DELTA, *WHOLE}
PLAIN = re.compile(r"\^?(?:[\w.-]|\\[.dw])*(?:[*+](?:[\w.-]|\\[.dw])*)?")  # no groups, one repetition: never slow


def _merge_change(facts: Facts, *, adapter: Place, force: bool = False) -> Change:
    """Return what becomes of a base when an adapter is merged into it."""
    folder, table = open_folder(adapter), readable(facts, "merge into")[0]
    given, tensors, head = open_adapter(folder, facts), facts.folder.tensors, facts.roles.output or table
    require_numbers(given)
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
            made, own = _merged(given, module, "weight", own, turned=not end and facts.family.stores_transposed)
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
_merge_into_base = runner(_merge_change)


@verb(
    order=110,
    details="",
    source=ADAPTER,
    logits_differ="the adapter changes them",
    example="adapter --base=tied",
)
def merge(
    source: Place,
    to: Place | None = None,
    *,
    base: Annotated[
        Place | None,
        Option("Checkpoint that it was trained on. It is only read.", metavar="DIR", required=True),
    ] = None,
    adapter: Place | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write an adapter's changes into its base; where they part the two ends of a tied base, it has two tables.

    The result does what base and LoRA adapter do together. The first argument is
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
