"""A PEFT adapter folder: what it asks for, what its tensors hold at the two ends, and what that does to a tied base.

B060 and B061. The tensors decide where they can be read. A pattern in `target_modules` is never run: one from a
stranger could take for ever, and the tensors' names say what it matched.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import ends_with, in_layer, is_foreign, module_of, usual
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Fault, Folder, noting
from tiewise.checkpoint.rule import ADAPTER, ERROR, INFO, WARNING, Said, Told, describe, dotted, names, rule
from tiewise.checkpoint.stored import Stored, read_header
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import inside, short
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import doing

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
LORA, COPY, TOKENS = "low-rank update", "full copy", "trained rows"
# what follows a module's name in a tensor's; the adapter's own name may stand in it where another tool saved
_PARTS = re.compile(
    r"(?P<module>.+?)\.(?P<part>base_layer\.weight|lora_(?:A|B|embedding_A|embedding_B)(?:\.\w+)?(?:\.weight)?"
    r"|(?:token_adapter\.)?trainable_tokens_delta(?:\.\w+)?|(?:modules_to_save\.(?:\w+\.)?)?weight)"
)


@dataclass(frozen=True)
class EndUpdate:
    """What the adapter does to one module."""

    module: str  # its name in the base, "model.embed_tokens"
    kind: str  # "low-rank update", "full copy" or "trained rows"
    # [V, E] that the base's table must have, -1 where the adapter's tensors do not say; None where they say nothing
    shape: tuple[int, int] | None = None
    copy: Stored | None = None  # the stored full copy; None otherwise


@dataclass(frozen=True)
class AdapterFacts:
    """One adapter as it lies on disk, and the checkpoint that it changes."""

    path: Path  # the folder
    config: Mapping[str, Any]  # adapter_config.json
    tensors: dict[str, Stored]  # by name; empty where they could not be read, or are pickled
    faults: tuple[Fault, ...] = ()  # what could not be read
    base: Facts | None = None  # None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    def listed(self, key: str) -> tuple[str, ...]:
        """The names under a key; none where a pattern or "all-linear" stands there."""
        return _only(str, self.config.get(key))

    @cached_property
    def token_rows(self) -> dict[str, tuple[int, ...]]:
        """`trainable_token_indices` by the name of the module, "" where the config does not name it."""
        rows = self.config.get("trainable_token_indices")
        by_module = rows if isinstance(rows, Mapping) else {"": rows}  # a list alone names no module
        return {name: _only(int, ids) for name, ids in by_module.items() if isinstance(ids, list)}

    @property
    def ties(self) -> bool:
        """Whether PEFT ties what it adds to the two ends."""
        return self.config.get("ensure_weight_tying") is True

    @cached_property
    def input(self) -> EndUpdate | None:
        """What the adapter does to the input table."""
        paths = [path.rpartition(".")[2] for path, _ in usual().pairs]
        return self.update(paths, None if self.base is None else self.base.roles.input_name)

    @cached_property
    def output(self) -> EndUpdate | None:
        """What the adapter does to the output head."""
        return self.update(usual().outputs, None if self.base is None else self.base.roles.output_name)

    def update(self, usually: Sequence[str], stored: str | None = None) -> EndUpdate | None:
        """What is done to the module of the base's table `stored`, or to one of a usual name; None for nothing."""
        module = module_of(stored or "")[0]
        # PEFT names modules as they are once loaded: the last part at least is as it is stored
        wanted = usually if stored is None else (module, module.rpartition(".")[2])
        at_end: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            match = _PARTS.fullmatch(name.removeprefix("base_model.model."))
            if match is None or not any(ends_with(match["module"], one) for one in wanted):
                continue
            if len(tensor.shape) == 2 and not in_layer(name) and not is_foreign(name):
                at_end.setdefault(match["module"], {})[match["part"]] = tensor
        for module, parts in at_end.items():
            if low_rank := {part: tensor for part, tensor in parts.items() if part.startswith("lora_")}:
                # a linear layer's A is [r, E] and its B [V, r]; a lookup's A is [r, V] and its B [E, r]
                shape = [-1, -1]
                for part, tensor in low_rank.items():
                    lookup, first = part.startswith("lora_embedding"), part.split(".")[0].endswith("A")
                    shape[first != lookup] = tensor.shape[first]
                return EndUpdate(module, LORA, (shape[0], shape[1]))
            for part, tensor in parts.items():
                if "trainable_tokens_delta" in part:
                    return EndUpdate(module, TOKENS, (-1, tensor.shape[1]))
                if not part.startswith("base_layer"):
                    return EndUpdate(module, COPY, (tensor.shape[0], tensor.shape[1]), tensor)
        if self.tensors:  # they say more than the config
            return None
        claims = {COPY: self.listed("modules_to_save"), LORA: self.listed("target_modules"), TOKENS: self.token_rows}
        named = (EndUpdate(module, kind) for kind, modules in claims.items() for module in modules if module)
        return next((one for one in named if any(ends_with(name, one.module) for name in wanted)), None)

    @cached_property
    def tied(self) -> bool | None:
        """Whether the base has one table at both ends, by flag and by tensors; None where that is not known."""
        if self.base is None or self.base.roles.output is None or self.base.claims.tied is False:
            return None if self.base is None else self.base.claims.tied
        return self.base.truth

    @cached_property
    def equal(self) -> bool | None:
        """Whether the adapter's full copies of both ends hold the same bytes; None without both, or unread."""
        a, b = (None if end is None else end.copy for end in (self.input, self.output))
        if a is None or b is None or not self.scan:
            return None
        with doing("comparing the adapter's two copies", a.nbytes):
            return same_bytes(a, b)


def open_adapter(folder: Folder, base: Facts | None = None, scan: bool = True) -> AdapterFacts:
    """Read an adapter's config and the header of its tensors; `adapter_model.bin` is not opened."""
    config = folder.json(ADAPTER_CONFIG)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{folder.path / ADAPTER_CONFIG}: no JSON object", "take it from its source again")
    tensors: dict[str, Stored] = {}
    faults: list[Fault] = []
    if folder.has(WEIGHTS):
        with noting(faults, WEIGHTS):
            tensors = read_header(inside(folder.path, WEIGHTS)).tensors
    elif folder.has(PICKLE):
        fix = "save the adapter again with safe_serialization=True"
        faults.append(Fault(PICKLE, f"{folder.path / PICKLE}: pickled tensors are not opened", fix))
    else:
        fix = "take the adapter from its source again"
        faults.append(Fault(WEIGHTS, f"{folder.path}: an adapter without {WEIGHTS}", fix))
    return AdapterFacts(folder.path, config, tensors, tuple(faults), base, scan)


def _only(kind: type, value: Any) -> tuple[Any, ...]:
    """The items of a list that are of a type; empty where `value` is no list."""
    return tuple(item for item in value if type(item) is kind) if isinstance(value, list) else ()


@rule("B060", ERROR, "an adapter leaves a tied pair tied", kind=ADAPTER)
def adapter_on_tied(facts: AdapterFacts) -> Told:
    """The two ends of a tied model are one Parameter, and PEFT adapts modules. A low-rank update of one end acts at
    that end in training; a merge writes it into the shared table, and so changes the other end too. Updates of both
    ends are added to it twice, with ensure_weight_tying as without (measured with PEFT 0.21). Full copies
    (modules_to_save) of both ends drift apart unless ensure_weight_tying is set, and a copy of one end alone unties the
    pair: the merged model has two tables. PEFT then sets tie_word_embeddings to false at the root of the config; a flag
    in text_config stays true, and a loader that believes it drops the trained head. Unmerged, the adapter works as it
    was trained.
    What to do: untie the base and merge into that, or do not merge.
    Sources: peft#2777; peft#2018; peft#2864; peft#2944; transformers#45127; unsloth#9331
    """
    where, base = short(facts.path.name), facts.base
    ends = [end for end in (facts.input, facts.output) if end is not None]
    if base is None or facts.tied is None:
        if ends:
            why = "no base was given" if base is None else "whether the base ties its ends is not known"
            what = f"it changes {_modules(ends)}; {why}, so what a merge makes of that is not known"
            yield Said(where, what, f"tiewise check {shlex.quote(str(facts.path))} --base BASE", severity=INFO)
        return
    if not facts.tied:
        return
    untie = base.command("untie")
    if low_rank := [end for end in ends if end.kind == LORA]:
        what = f"low-rank update of {_modules(low_rank)} on a base whose two ends are one table"
        both = len(low_rank) == 2
        if facts.ties and both:
            what = f"{what}: the two share their factors, and a merge adds the update twice to that table"
            yield where, what, "load the adapter beside the base; do not merge it"
        else:
            other = "both updates to that table" if both else "it to the other end too, which was trained without"
            yield where, f"{what}: a merge adds {other}", f"{untie}, and merge into that"
    copies = [end for end in ends if end.kind == COPY]
    # where one is alone and the two shall be tied, PEFT wraps the other end with the same table when it loads it
    if copies and not (facts.ties if len(copies) == 1 else facts.equal):
        what, severity = f"full copy of {_modules(copies)} alone", ERROR
        if len(copies) == 2:
            read = "whose rows were not compared" if facts.equal is None else "which differ"
            flag = "on" if facts.ties else "off"
            what = f"full copies of {_modules(copies)}, {read} (ensure_weight_tying is {flag})"
            severity = WARNING if facts.equal is None else ERROR
        nested = [dotted(claim.level) for claim in base.claims.levels if claim.level and claim.written]
        merged = "a merge makes two tables, and only a merge by PEFT (0.21) sets tie_word_embeddings to false"
        if nested:
            merged = f"a merge leaves {names(nested)} true, and loaders that believe it drop the trained head"
        fix = f"train with ensure_weight_tying=True, or {untie} and merge into that"
        yield Said(where, f"{what}, on a base whose two ends are one table: {merged}", fix, severity=severity)
    rows = {name: ids for name, ids in facts.token_rows.items() if name}
    if len(set(rows.values())) > 1:
        what = f"trainable_token_indices differ between {names(rows)}, which are one table in the base"
        yield where, what, "train both ends on the same rows, or untie the base first"


def _modules(ends: list[EndUpdate]) -> str:
    return " and ".join(short(end.module) for end in ends)


@rule("B061", ERROR, "an adapter's tables have the shape of the base's", kind=ADAPTER)
def adapter_shapes(facts: AdapterFacts) -> Told:
    """An adapter whose table has other rows or another width than the base's was trained on another base, or after a
    resize: the loader refuses it, or asks for a resize first.
    What to do: resize the base to the adapter's rows, or give the base that it was trained on.
    Sources: unsloth-zoo#923; transformers#32852
    """
    if facts.base is None:
        return
    roles, name = facts.base.roles, facts.config.get("base_model_name_or_path")
    named = short(name) if isinstance(name, str) and name else "unnamed"
    for update, stored in ((facts.input, roles.input), (facts.output, roles.output or roles.input)):
        if update is None or stored is None or len(stored.shape) != 2:
            continue
        rows, width = update.shape or (-1, -1)
        narrow = width not in (-1, stored.shape[1])
        if narrow or rows not in (-1, stored.rows):
            shape = f"[{'?' if rows < 0 else rows}, {'?' if width < 0 else width}]"
            what = f"its {update.kind} is of a table {shape}, and the base stores {describe(stored)}"
            fix = f"give the base that it was trained on ({named})"
            more = rows > stored.rows and not narrow
            yield short(update.module), what, facts.base.command("resize", f"--vocab {rows}") if more else fix
    worst = max((row for ids in facts.token_rows.values() for row in ids), default=-1)
    if roles.input is not None and worst >= roles.input.rows:
        what = f"trainable_token_indices name row {worst:,}, and the base stores {describe(roles.input)}"
        yield ADAPTER_CONFIG, what, facts.base.command("resize", f"--vocab {worst + 1}")
