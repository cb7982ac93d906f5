"""`merge`: an adapter's changes written into its base's own tensors, so that the result does what base and adapter do.

    linear      W + s·B A       s = alpha / r, or alpha / √r (rsLoRA)      W stored [out, in], or turned as in GPT-2
    lookup      E + s·(B A)ᵀ    DoRA    m · (W + s·B A) / ‖W + s·B A‖, row by row
    full copy, trained rows     take the place of what the base has

Computed in fp64 from pieces of a few MB, and rounded once to the base's type. On a tied base an update of one end acts
at that end alone while it is not merged. A merge into the one table would make it act at the other end too: where the
two ends come out different, the result stores both.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
# settings under which what an adapter does is more than the products and copies of this file
BEYOND: tuple[str, ...] = (
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
)
BEYOND += ("arrow_config", "kasa_config", "monteclora_config")
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is
LOOKUP, LINEAR = ("lora_embedding_A", "lora_embedding_B"), ("lora_A", "lora_B")
KNOWN = {*LOOKUP, *LINEAR, "lora_B.bias", "lora_magnitude_vector", DELTA, "weight", "bias"}
KNOWN |= {f"{WRAPPED}weight", f"{WRAPPED}bias"}
WORDS: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
WORDS += ("merges.txt", "vocab.txt", "chat_template.jinja", *PIECES)


Factors = Callable[[], tuple[NDArray, NDArray]]


@dataclass(frozen=True)
class Merged:
    """A tensor of the result."""

    old: Stored  # what it starts from: the base's tensor, or the adapter's copy of it
    dtype: str  # of the base's tensor
    factors: Factors | None = None  # of the product that is added: [rows, r] and [r, columns], the scale in the second
    length: Stored | None = None  # [rows]: that of each row once the product is added (DoRA)
    ids: tuple[int, ...] = ()  # rows that are replaced, each by one of
    rows: Stored | None = None

    def reader(self) -> Callable[[int, int], NDArray]:
        """Return what gives rows [start, stop) of the result in its type; it holds the two factors."""
        left, right = self.factors() if self.factors is not None else (None, None)
        lengths = None if self.length is None else _whole(self.length)
        place = {row: at for at, row in enumerate(self.ids)}

        def read(start: int, stop: int) -> NDArray:
            with Reader(self.old) as reader:
                made = reader.rows(start, stop).astype(np.float64)
            if left is not None and right is not None:
                made += (left[start:stop].astype(np.float64) @ right).reshape(made.shape)
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
        with Reader(self.old) as reader:
            spans = list(reader.spans(CHUNK_BYTES // 2))
        yield from (read(start, stop).tobytes() for start, stop in spans)

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
    given = open_adapter(open_folder(adapter), facts)
    for fault in (*given.faults, *facts.folder.faults):
        raise CheckpointError(fault.what, fault.fix)
    readable(facts, "merge into")
    _require_sum(given)
    _require_rows(given, facts)
    stored = {module: module for module in given.base_modules.values()} | given.base_modules
    lost = [module for module in given.parts if module not in stored]
    if lost:
        what = f"{given.path}: the base has no {names(lost, 2)}: a merge would lose what {len(lost):,} modules learned"
        raise CheckpointError(what, "tiewise check ADAPTER --base BASE says how they should be called")

    roles = facts.roles
    table, head = roles.input, roles.output or roles.input
    assert table is not None
    assert head is not None
    ends: dict[str, Merged] = {}  # "input" and "output": what comes of them
    body: list[NewTensor] = []
    for module, parts in given.parts.items():
        end = next((e for e in ("input", "output") if (u := getattr(given, e)) is not None and u.module == module), "")
        weight = {"input": table, "output": head}.get(end) or facts.folder.tensors.get(f"{stored[module]}.weight")
        made, bias = _merged(given, facts, module, parts, weight, bool(end))
        if end and made is not None:
            ends[end] = made
        elif made is not None and weight is not None:
            body.append(NewTensor(weight.name, weight.dtype, weight.shape, weight.path.name, made.pieces))
        body += [] if bias is None else [bias]
    if not ends and not body:
        raise CheckpointError(f"{given.path}: it holds no tensor", "there is nothing to merge")

    change = _tables(given, facts, ends, force)
    notes = list(change.notes)
    if body:
        notes.append(f"{len(body):,} tensors of the body change too; what that does to logits only running it shows")
    if given.output is not None and (made := ends.get("output")) is not None and made.factors is not None:
        left, right = made.factors()
        notes.append(f"predicted from B·A alone: logits change by {_predicted(left, right, head.shape[1]):.3g} at most")
    files = _tokenizer(given, facts)
    if files:
        notes.append(f"{names(sorted(files))} {'is' if len(files) == 1 else 'are'} the adapter's")
    return replace(change, put=(*change.put, *body), files=files, notes=tuple(notes))


def _require_sum(given: AdapterFacts) -> None:
    """Raise where what an adapter does is more than the products, copies and rows that this file adds."""
    where, config = given.path, given.config
    beside = "load the adapter beside its base, or merge it with PEFT"
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: its peft_type is {short(config.get('peft_type'))}, and not LORA", beside)
    for key in BEYOND:
        if config.get(key):
            raise CheckpointError(f"{where}: it was trained with {key}, which is no sum that this knows", beside)
    if (first := config.get("init_lora_weights", True)) not in INITIAL:
        what = f"{where}: it began with {short(first)}, which changes the base, and is no update of the base as it is"
        raise CheckpointError(
            what, "convert it first: path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    for module, parts in given.parts.items():
        for part, tensor in parts.items():
            if part not in KNOWN or tensor.dtype not in FLOATING:
                what = f"{where}: {short(module)} has {short(part)} ({tensor.dtype}), which is not known"
                raise CheckpointError(what, beside)


def _require_rows(given: AdapterFacts, facts: Facts) -> None:
    """Raise where a merge would lose rows: of tables that are longer or shorter, or of tokens that have none."""
    for end, table in ((given.input, facts.roles.input), (given.output, facts.roles.output or facts.roles.input)):
        rows = -1 if end is None or end.shape is None else end.shape[0]
        if end is not None and table is not None and rows not in (-1, table.rows):
            what = f"{given.path}: {short(end.module)} has {rows:,} rows, and the base's {table.rows:,}"
            shrink = ["--shrink"] if rows < table.rows else []
            raise CheckpointError(what, f"{facts.command('resize', f'--vocab {rows}', *shrink)}, and merge into that")
    words = read_tokenizer(open_folder(given.path))
    needed = max([row for ids in given.token_rows.values() for row in ids], default=-1)
    needed = max(needed, -1 if words is None else words.max_id)
    if facts.roles.input is not None and needed >= facts.roles.input.rows:
        what = f"{given.path}: it names token {needed:,}, and the base has {facts.roles.input.rows:,} rows"
        raise CheckpointError(what, f"{facts.command('resize', f'--vocab {needed + 1}')}, and merge into that")


def _merged(
    given: AdapterFacts, facts: Facts, module: str, parts: Mapping[str, Stored], weight: Stored | None, at_end: bool
) -> tuple[Merged | None, NewTensor | None]:
    """What comes of a module's weight and of its bias; None for what stays."""

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{given.path}: {short(module)}: {what}", "tiewise check ADAPTER --base BASE says more")

    made: Merged | None = None
    bias: NewTensor | None = None
    if weight is None and not parts.keys() <= {"bias", f"{WRAPPED}bias"}:
        raise wrong("the base has no weight of that name; is it quantised? Merge into the checkpoint before that")
    if weight is not None and weight.dtype not in FLOATING:
        raise wrong(f"the base's weight is quantised ({weight.dtype}); merge into the checkpoint before that")
    start = parts.get("weight", parts.get(f"{WRAPPED}weight", weight))
    if weight is not None and start is not None:
        if start.shape != weight.shape:
            raise wrong(f"it has {describe(start)}, and the base {describe(weight)}")
        made = None if start is weight else Merged(start, weight.dtype)
    pair = next(((parts[a], parts[b]) for a, b in (LINEAR, LOOKUP) if a in parts and b in parts), None)
    if pair is None and any(part.startswith("lora_") for part in parts):
        raise wrong("it has half of a low-rank update")
    scale = 0.0 if pair is None else _scale(given, module, pair[0].rows)
    if pair is not None and weight is not None and start is not None:
        a, b = pair
        straight = len(a.shape) == len(b.shape) == len(weight.shape) == 2 and a.rows == b.shape[1]
        square = straight and weight.shape[0] == weight.shape[1] == b.rows == a.shape[1]
        lookup = LOOKUP[0] in parts
        # of a square matrix the shapes do not say how it lies
        turned = lookup or (not at_end and family_type(facts.config) in TURNED if square else weight.shape[0] != b.rows)
        if not straight or weight.shape != ((a.shape[1], b.rows) if turned else (b.rows, a.shape[1])):
            raise wrong(f"{describe(b)} times {describe(a)} is no update of {describe(weight)}")
        length = parts.get("lora_magnitude_vector")
        if length is not None and (turned or length.shape != (weight.rows,)):
            raise wrong("DoRA of a lookup or a turned matrix normalises its columns, which is not done here")
        if length is None and given.config.get("use_dora"):
            raise wrong("it was trained with DoRA, and stores no lora_magnitude_vector")

        def factors() -> tuple[NDArray, NDArray]:
            first, last = (_whole(a).T, _whole(b).T) if turned else (_whole(b), _whole(a))
            return first, last.astype(np.float64) * scale

        made = Merged(start, weight.dtype, factors, length)
    if DELTA in parts and weight is not None and start is not None:
        delta, rows = parts[DELTA], given.token_rows
        ids = next((ids for name, ids in rows.items() if ends_with(module, name) or not name), ())
        if pair is not None or delta.shape != (len(set(ids)), *weight.shape[1:]) or len(set(ids)) != len(ids):
            raise wrong(f"{describe(delta)} are not the {len(ids):,} rows that trainable_token_indices names")
        made = Merged(start, weight.dtype, ids=ids, rows=delta)
    added = parts.get("lora_B.bias")
    own = next(
        (t for n in (given.base_modules.get(module), module) if (t := facts.folder.tensors.get(f"{n}.bias"))), None
    )
    begun = parts.get("bias", parts.get(f"{WRAPPED}bias", own if added is not None else None))
    if begun is not None or added is not None:
        if own is None or begun is None or any(t is not None and t.shape != own.shape for t in (begun, added)):
            raise wrong("it has a bias for which the base has no place")
        sum_ = Merged(
            begun, own.dtype, None if added is None else lambda: (_whole(added)[:, None], np.array([[scale]]))
        )
        bias = NewTensor(own.name, own.dtype, own.shape, own.path.name, sum_.pieces)
    return made, bias


def _scale(given: AdapterFacts, module: str, rank: int) -> float:
    """The factor of a module's low-rank update."""
    patterns, alpha = given.config.get("alpha_pattern") or {}, given.config.get("lora_alpha", 8)
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        # a stranger's pattern is run only where it cannot take long: no groups, and one repetition at most
        if len(module) > 300 or re.fullmatch(r"\^?(?:[\w.-]|\\[.dw])*(?:[*+](?:[\w.-]|\\[.dw])*)?", pattern) is None:
            what = f"{given.path}: alpha_pattern has {short(pattern)}, which is no plain name; patterns are not run"
            raise CheckpointError(what, "write the modules' names in its place")
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or rank < 1:
        raise CheckpointError(f"{given.path}: its lora_alpha is {short(alpha)}, of rank {rank}", "it must be a number")
    return float(alpha / (math.sqrt(rank) if given.config.get("use_rslora") else rank))


def _tables(given: AdapterFacts, facts: Facts, ends: dict[str, Merged], force: bool) -> Change:
    """What comes of the two ends: one table again where both come out the same, else two."""
    roles = facts.roles
    if not ends:
        return Change()
    table, head = roles.input, roles.output or roles.input
    assert table is not None
    assert head is not None
    if given.tied is None and not roles.headless:
        raise CheckpointError(f"{facts.path}: whether it ties its two ends is not known", "tiewise check says more")
    if len(roles.inputs) > 1:
        raise CheckpointError(f"{facts.path}: it stores several input tables", "tiewise dedupe it first")
    if given.tied:
        # PEFT gives trained rows of the input to the head as well, and with ensure_weight_tying a copy of either end
        shared = given.ties or all(end.rows is not None for end in ends.values())
        if len(ends) == 1 and shared and next(iter(ends.values())).factors is None:
            ends = dict.fromkeys(("input", "output"), next(iter(ends.values())))
    one, two = ends.get("input"), ends.get("output")
    outputs = None if two is None else (TableRows.of(head), two.table())
    moved = measure_move(outputs, None if one is None else (TableRows.of(table), one.table()))
    put, config, notes = dict[str, NewTensor](), dict[str, Any](), tuple[str, ...]()
    if given.tied and not _same(one, two):
        apart = parted(facts, force)
        put, config = {new.name: new for new in apart.put}, dict(apart.config)
        notes = (*apart.notes, "the adapter changes the two ends of a tied base differently: the result has two tables")
    names_of_head = (
        [new for new in put if new.endswith(roles.output_name or "")] if roles.output is None else [head.name]
    )
    for made, where in ((one, [table.name]), (two, names_of_head)):
        for name in where if made is not None else ():
            put[name] = NewTensor(name, table.dtype, table.shape, head.path.name, made.pieces)
    return Change(moved, put=tuple(put.values()), config=config, notes=notes)


def _same(one: Merged | None, two: Merged | None) -> bool:
    if one is None or two is None:
        return one is two
    return one is two or all(a == b for a, b in zip(one.pieces(), two.pieces(), strict=True))


def _predicted(left: NDArray, right: NDArray, width: int) -> float:
    """The largest entry of B·A at the hidden vectors that logits are measured with."""
    inner, largest = right @ hidden_vectors(width).T, 0.0
    for start in range(0, len(left), 4096):
        largest = max(largest, float(np.abs(left[start : start + 4096] @ inner).max(initial=0.0)))
    return largest


def _tokenizer(given: AdapterFacts, facts: Facts) -> dict[str, bytes]:
    """The files of the adapter's tokenizer, where it has one that is not the base's."""
    folder = open_folder(given.path)
    found = {name: read_whole(inside(folder.path, name), MOST_BYTES) for name in WORDS if folder.has(name)}
    old = facts.folder
    return {
        name: text
        for name, text in found.items()
        if not old.has(name) or read_whole(inside(old.path, name), MOST_BYTES) != text
    }


def _whole(tensor: Stored) -> NDArray:
    with Reader(tensor) as reader:
        return reader.wide()
