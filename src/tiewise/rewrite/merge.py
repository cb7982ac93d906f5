"""`merge`: an adapter's changes in its base's own tensors, so that the result does what base and adapter do together.

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
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import DELTA, WRAPPED, AdapterFacts, open_adapter
from tiewise.checkpoint.claims import ends_with, family_type
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import PIECES, open_folder, read_tokenizer
from tiewise.checkpoint.numeric_ends import readable
from tiewise.checkpoint.rule import describe, names
from tiewise.checkpoint.stored import CHUNK_BYTES, FLOATING, Reader, Stored, rounded, widened
from tiewise.checkpoint.untrusted import MOST_BYTES, inside, read_whole, short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change, NewTensor, Pieces, TableRows, hidden_vectors, measure_move
from tiewise.rewrite.engine import verb
from tiewise.rewrite.ties import parted

TURNED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")  # families whose layers store [in, out]
# settings under which an adapter does more than the sums of this file
BEYOND = "target_parameters layer_replication use_qalora use_bdlora alora_invocation_tokens arrow_config kasa_config"
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is
LINEAR, LOOKUP = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
KNOWN = {*LINEAR, *LOOKUP, "lora_B.bias", "lora_magnitude_vector", DELTA}
KNOWN |= {f"{wrap}{kind}" for wrap in ("", WRAPPED) for kind in ("weight", "bias")}
TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt"
)
PLAIN = re.compile(r"\^?(?:[\w.-]|\\[.dw])*(?:[*+](?:[\w.-]|\\[.dw])*)?")  # no groups, one repetition: never slow


@dataclass(frozen=True)
class Merged:
    """A tensor of the result."""

    old: Stored  # what it starts from: the base's tensor, or the adapter's copy of it
    dtype: str  # of the base's tensor
    factors: Callable[[], tuple[NDArray, NDArray]] | None = None  # [rows, r] and s·[r, columns], whose product is added
    length: Stored | None = None  # [rows]: that of each row once the product is added (DoRA)
    ids: tuple[int, ...] = ()  # rows that are replaced, each by one of
    rows: Stored | None = None

    def reader(self) -> Callable[[int, int], NDArray]:
        """Return what gives rows [start, stop) of the result in its type; it holds the two factors."""
        product = None if self.factors is None else self.factors()
        lengths = None if self.length is None else _whole(self.length)
        place = {row: at for at, row in enumerate(self.ids)}

        def read(start: int, stop: int) -> NDArray:
            with Reader(self.old) as reader:
                made = reader.rows(start, stop).astype(np.float64)
            if product is not None:
                made += (product[0][start:stop].astype(np.float64) @ product[1]).reshape(made.shape)
            if lengths is not None:
                made *= (lengths[start:stop] / np.linalg.norm(made, axis=1))[:, None]
            if self.rows is not None:
                with Reader(self.rows) as reader:
                    for row in place.keys() & set(range(start, stop)):
                        made[row - start] = reader.rows(place[row], place[row] + 1)[0]
            return rounded(made, self.dtype)

        return read

    def pieces(self) -> Pieces:
        """Yield its bytes."""
        read = self.reader()
        step = max(1, CHUNK_BYTES // (8 * math.prod(self.old.shape[1:])))
        for start in range(0, self.old.rows, step):
            yield read(start, min(start + step, self.old.rows)).tobytes()

    def table(self) -> TableRows:
        """It as a table [V, D]."""
        read = self.reader()
        return TableRows(self.old.rows, self.old.shape[1], lambda start, stop: widened(read(start, stop)))


@verb
def merge(facts: Facts, *, adapter: str | os.PathLike[str], force: bool = False) -> Change:
    """Write a LoRA adapter's changes into its base, so that the result does what base and adapter do together.

    On a base whose two ends are one table, an update that acts at one of them unties the result.

    Args:
        adapter: folder of the PEFT adapter; it is only read.
    """
    folder = open_folder(adapter)
    given = open_adapter(folder, facts)
    for fault in (*given.faults, *facts.folder.faults):
        raise CheckpointError(fault.what, fault.fix)
    readable(facts, "merge into")
    _require_sum(given)
    modules = {module: module for module in given.base_modules.values()} | given.base_modules
    lost = [module for module in given.parts if module not in modules]
    if lost or not given.parts:
        what = f"{given.path}: the base lacks {len(lost):,} of the modules that it changes: {names(lost, 2) or 'all'}"
        raise CheckpointError(what, "tiewise check ADAPTER --base BASE says how they should be called")
    words = read_tokenizer(folder)
    ids = [-1 if words is None else words.max_id, *(row for rows in given.token_rows.values() for row in rows)]
    tensors, roles = facts.folder.tensors, facts.roles
    table, head = roles.input, roles.output or roles.input
    assert table is not None
    assert head is not None
    if max(ids) >= table.rows:
        what = f"{given.path}: it names token {max(ids):,}, and the base has {table.rows:,} rows: some would be lost"
        raise CheckpointError(what, f"{facts.command('resize', f'--vocab {max(ids) + 1}')}, and merge into that")

    ends: dict[str, Merged] = {}  # "input" and "output": what comes of them
    body: list[NewTensor] = []
    at_end = {update.module: end for end in ("input", "output") if (update := getattr(given, end)) is not None}
    for module, parts in given.parts.items():
        end, stored = at_end.get(module), modules[module]
        own = {"input": table, "output": head}[end] if end else tensors.get(f"{stored}.weight")
        if not parts.keys() <= {"bias", f"{WRAPPED}bias"}:
            made = _weight(given, facts, module, own, end is not None)
            if end:
                ends[end] = made
            elif own is not None:
                body.append(NewTensor(own.name, own.dtype, own.shape, own.path.name, made.pieces))
        bias = tensors.get(f"{stored}.bias", tensors.get(f"{module}.bias"))
        if any(part.endswith("bias") for part in parts):
            made = _bias(given, module, bias)
            assert bias is not None
            body.append(NewTensor(bias.name, bias.dtype, bias.shape, bias.path.name, made.pieces))

    change = _tables(given, facts, table, head, ends, force)
    notes = list(change.notes)
    if body:
        notes.append(f"{len(body):,} tensors of the body change too; what that does to logits only running it shows")
    if "output" in ends and ends["output"].factors is not None:
        left, right = ends["output"].factors()
        inner = right @ hidden_vectors(head.shape[1]).T
        largest = max(np.abs(left[at : at + 4096] @ inner).max() for at in range(0, len(left), 4096))
        notes.append(f"predicted from B·A alone: the largest change of a logit is {largest:.3g}")
    own_files = (name for name in (*TOKENIZER.split(), *PIECES, "chat_template.jinja") if folder.has(name))
    files = {name: read_whole(inside(folder.path, name), MOST_BYTES) for name in own_files}
    if files:
        notes.append(f"taken from the adapter: {names(files)}")
    return replace(change, put=(*change.put, *body), files=files, notes=tuple(notes))


def _require_sum(given: AdapterFacts) -> None:
    """Raise where an adapter does more than the sums and copies of this file."""
    where, config, fix = given.path, given.config, "load it beside its base, or merge it with PEFT"
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: its peft_type is {short(config.get('peft_type'))}, and not LORA", fix)
    for key in BEYOND.split():
        if config.get(key):
            raise CheckpointError(f"{where}: it was trained with {key}, which is no sum that is known here", fix)
    first = config.get("init_lora_weights", True)
    if not isinstance(first, bool | str | None) or first not in INITIAL:
        fix = "convert it with PEFT first: path_initial_model_for_weight_conversion"
        raise CheckpointError(f"{where}: its training began with {short(first)}, which changes the base", fix)
    for module, parts in given.parts.items():
        for part, tensor in parts.items():
            if part not in KNOWN or tensor.dtype not in FLOATING:
                raise CheckpointError(f"{where}: {short(module)} has {short(part)} ({tensor.dtype}), unknown here", fix)


def _wrong(given: AdapterFacts, module: str, what: str) -> CheckpointError:
    return CheckpointError(f"{given.path}: {short(module)}: {what}", "tiewise check ADAPTER --base BASE says more")


def _weight(given: AdapterFacts, facts: Facts, module: str, own: Stored | None, at_end: bool) -> Merged:
    """What comes of the weight of a module, the base's `own`."""
    parts = given.parts[module]
    if own is None or own.dtype not in FLOATING:
        raise _wrong(given, module, "the base has no plain weight of this name; merge into one that is not quantised")
    old = parts.get("weight", parts.get(f"{WRAPPED}weight", own))
    if old.shape != own.shape:
        fix = facts.command("resize", f"--vocab {old.rows}", *(["--shrink"] if old.rows < own.rows else []))
        fix = f"{fix}, and merge into that" if at_end else "give the base that it was trained on"
        raise CheckpointError(
            f"{given.path}: it has {describe(old)}, and the base {describe(own)}: rows would be lost", fix
        )
    if DELTA in parts:
        ids = next((ids for name, ids in given.token_rows.items() if not name or ends_with(module, name)), ())
        if parts[DELTA].shape != (len(set(ids)), *own.shape[1:]) or len(ids) > len(set(ids)):
            raise _wrong(given, module, f"{describe(parts[DELTA])} are not the {len(ids):,} rows of its config")
        return Merged(old, own.dtype, ids=ids, rows=parts[DELTA])
    pair = next(((parts[a], parts[b]) for a, b in (LINEAR, LOOKUP) if a in parts and b in parts), None)
    if pair is None:
        if any(part.startswith("lora_") for part in parts):
            raise _wrong(given, module, "it has half of a low-rank update")
        return Merged(old, own.dtype)
    a, b = pair
    # of a square matrix the shapes do not say how it lies
    square = b.shape == a.shape[::-1] and own.shape[0] == own.shape[-1] and not at_end
    turned = family_type(facts.config) in TURNED if square else own.rows != b.rows
    turned = turned or LOOKUP[0] in parts
    if len(a.shape) != 2 or a.shape[:1] != b.shape[1:] or own.shape != (b.rows, a.shape[1])[:: -1 if turned else 1]:
        raise _wrong(given, module, f"{describe(b)} times {describe(a)} is no update of {describe(own)}")
    length = parts.get("lora_magnitude_vector")
    if (length is not None) != bool(given.config.get("use_dora")):
        raise _wrong(given, module, "use_dora and what is stored contradict each other")
    if length is not None and (turned or length.shape != own.shape[:1]):
        raise _wrong(given, module, "DoRA of a lookup, or of a matrix that is stored turned, is not merged here")
    scale = _scale(given, module, a.rows)

    def factors() -> tuple[NDArray, NDArray]:
        left, right = (_whole(a).T, _whole(b).T) if turned else (_whole(b), _whole(a))
        return left, right.astype(np.float64) * scale

    return Merged(old, own.dtype, factors, length)


def _bias(given: AdapterFacts, module: str, own: Stored | None) -> Merged:
    """What comes of the bias of a module, the base's `own`."""
    parts = given.parts[module]
    old, added = parts.get("bias", parts.get(f"{WRAPPED}bias", own)), parts.get("lora_B.bias")
    if own is None or old is None or {own.shape, old.shape, own.shape if added is None else added.shape} != {own.shape}:
        raise _wrong(given, module, "it has a bias for which the base has no place")
    if added is None:
        return Merged(old, own.dtype)
    scale = np.array([[_scale(given, module, parts["lora_B"].shape[-1])]]) if "lora_B" in parts else np.zeros((1, 1))
    return Merged(old, own.dtype, lambda: (_whole(added)[:, None], scale))


def _scale(given: AdapterFacts, module: str, rank: int) -> float:
    """The factor of a module's low-rank update."""
    patterns, alpha = given.config.get("alpha_pattern"), given.config.get("lora_alpha", 8)
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if len(module) > 300 or PLAIN.fullmatch(pattern) is None:  # it comes from a stranger
            what = f"{given.path}: alpha_pattern has {short(pattern)}, which may take long to match, and is not run"
            raise CheckpointError(what, "write the modules' names in its place")
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or rank < 1:
        raise CheckpointError(
            f"{given.path}: the lora_alpha of {short(module)} is {short(alpha)}", "it must be a number"
        )
    return float(alpha / (math.sqrt(rank) if given.config.get("use_rslora") else rank))


def _tables(
    given: AdapterFacts, facts: Facts, table: Stored, head: Stored, ends: dict[str, Merged], force: bool
) -> Change:
    """What comes of the two ends: one table again where both come out the same, else two. Completes `ends`."""
    roles = facts.roles
    if ends and (given.tied is None and not roles.headless):
        raise CheckpointError(f"{facts.path}: whether it ties its two ends is not known", "tiewise check says more")
    if ends and len(roles.inputs) > 1:
        raise CheckpointError(f"{facts.path}: it stores several input tables", "tiewise dedupe makes them one")
    if given.tied and len(ends) == 1:
        # PEFT gives trained rows of the input to the head as well, and with ensure_weight_tying a copy of either end
        (only,) = ends.values()
        if only.factors is None and (given.ties or (only.rows is not None and "input" in ends)):
            ends |= {"input": only, "output": only}
    one, two = ends.get("input"), ends.get("output")
    outputs = None if two is None else (TableRows.of(head), two.table())
    moved = measure_move(outputs, None if one is None else (TableRows.of(table), one.table()))
    change, put = Change(moved), dict[str, NewTensor]()
    pairs = zip(one.pieces(), two.pieces(), strict=True) if one is not None and two is not None else ()
    if given.tied and one is not two and not (one and two and all(a == b for a, b in pairs)):
        apart = parted(facts, force)
        notes = (*apart.notes, "the adapter parts the two ends of the tied base: the result has two tables")
        change, put = replace(apart, moved=moved, notes=notes), {new.name: new for new in apart.put}
    heads = [new for new in put if new.endswith(roles.output_name or "")] if roles.output is None else [head.name]
    for made, targets in ((one, [table.name]), (two, heads)):
        for name in targets if made is not None else ():
            put[name] = NewTensor(
                name, table.dtype, table.shape, (head if name in heads else table).path.name, made.pieces
            )
    return replace(change, put=tuple(put.values()))


def _whole(tensor: Stored) -> NDArray:
    with Reader(tensor) as reader:
        return reader.wide()
