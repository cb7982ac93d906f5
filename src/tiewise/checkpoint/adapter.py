"""A PEFT adapter folder: what it asks for, what its tensors hold, which modules of the base they are for; and settings
under which another one would leave the two ends what they are.

The tensors decide where they can be read. A pattern in the config is never run: one from a stranger could take for
ever, and the tensors' names say what it matched.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import ends_with, in_layer, is_foreign, unwrapped, usual
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Fault, Folder, json_object, noting, open_folder
from tiewise.checkpoint.stored import Stored, read_header
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import inside, items_of
from tiewise.core.errors import CheckpointError, doing

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
LORA, COPY, TOKENS = "low-rank update", "full copy", "trained rows"
PREFIX = "base_model.model."  # before the name of every module
DELTA, BASE = "trainable_tokens_delta", "base_layer."
# what follows a module's name in a tensor's; the adapter's own name may stand in it where another tool saved
_PARTS = re.compile(
    r"(?P<module>.+?)\.(?:token_adapter\.|modules_to_save\.(?:\w+\.(?=\w))?)?"
    r"(?P<part>(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta)(?:\.(?!bias$)\w+)??(?:\.weight)?"
    r"|lora_B(?:\.\w+)?\.bias|(?:base_layer\.)?(?:weight|bias))"
)


@dataclass(frozen=True)
class EndUpdate:
    """What the adapter does to one module."""

    module: str  # its name in the base, "model.embed_tokens"
    kind: str  # "low-rank update", "full copy" or "trained rows"
    # [V, E] that the base's table must have, -1 where the adapter's tensors do not say; None where they say nothing
    shape: tuple[int, int] | None = None
    copy: Stored | None = None  # the stored full copy, also the one below a low-rank update; None without


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
        return items_of(str, self.config.get(key))

    @cached_property
    def token_rows(self) -> dict[str, tuple[int, ...]]:
        """`trainable_token_indices` by the name of the module, "" where the config does not name it."""
        rows = self.config.get("trainable_token_indices")
        by_module = rows if isinstance(rows, Mapping) else {"": rows}  # a list alone names no module
        return {name: items_of(int, ids) for name, ids in by_module.items() if isinstance(ids, list)}

    @property
    def ties(self) -> bool:
        """Whether PEFT ties what it adds to the two ends."""
        return self.config.get("ensure_weight_tying") is True

    @cached_property
    def parts(self) -> dict[str, dict[str, Stored]]:
        """{module: {part: tensor}}, the part without the adapter's own name; of unknown tensors the last of the name.

        Parts are "weight" and "bias" of a full copy, "base_layer.weight", "lora_A", "lora_B", "lora_B.bias",
        "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector" and "trainable_tokens_delta".
        """
        found: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            match = _PARTS.fullmatch(name.removeprefix(PREFIX))
            module, part = match.group("module", "part") if match else module_of(name.removeprefix(PREFIX))
            if match and part.startswith(("lora_", DELTA)):
                part = "lora_B.bias" if part.endswith(".bias") else part.partition(".")[0]
            found.setdefault(module, {})[part] = tensor
        return found

    @cached_property
    def base_modules(self) -> dict[str, str]:
        """{module as the base's class names it: as the base's files do}."""
        base = self.base
        if base is None:
            return {}
        known, (own, head), table, found = base.roles.known, end_modules(base), base.roles.input, dict[str, str]()
        # the class may put its body elsewhere than the files do: what stands before the input table's name says so
        stored = "" if table is None else unwrapped(module_of(table.name)[0])
        before, after = (name.removesuffix((own or "").rpartition(".")[2]) for name in (stored, own or ""))
        for module in dict.fromkeys(module_of(name)[0] for name in base.folder.tensors):
            plain = unwrapped(module)
            end = known.loaded_as(plain) if known is not None else None
            if end is None and not plain.startswith(before) and known is not None and known.prefix:
                found[f"{known.prefix}.{plain}"] = module  # other parts, vision towers, went below it too
            found[end or (after + plain.removeprefix(before) if plain.startswith(before) else plain)] = module
        if base.roles.output is None and head is not None and table is not None:
            found[head] = module_of(table.name)[0]  # a tied head has no tensor of its own
        return found

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
        for module, found in self.parts.items():
            if not any(ends_with(module, one) for one in wanted) or in_layer(module) or is_foreign(module):
                continue
            parts = {part: tensor for part, tensor in found.items() if len(tensor.shape) == 2}
            copy = parts.get("weight", parts.get(f"{BASE}weight"))
            if low_rank := {part: tensor for part, tensor in parts.items() if part.startswith("lora_")}:
                # a linear layer's A is [r, E] and its B [V, r]; a lookup's A is [r, V] and its B [E, r]
                shape = [-1, -1]
                for part, tensor in low_rank.items():
                    lookup, first = part.startswith("lora_embedding"), part.endswith("A")
                    shape[first != lookup] = tensor.shape[first]
                return EndUpdate(module, LORA, (shape[0], shape[1]), copy)
            if DELTA in parts:
                return EndUpdate(module, TOKENS, (-1, parts[DELTA].shape[1]))
            if copy is not None:
                return EndUpdate(module, COPY, (copy.shape[0], copy.shape[1]), copy)
        if self.tensors:  # they say more than the config
            return None
        claims = {COPY: self.listed("modules_to_save"), LORA: self.listed("target_modules"), TOKENS: self.token_rows}
        named = (EndUpdate(module, kind) for kind, modules in claims.items() for module in modules if module)
        return next((one for one in named if any(ends_with(name, one.module) for name in wanted)), None)

    def command(self, verb: str) -> str:
        """Return the command line of a verb that makes a new folder of it and its base."""
        base = "BASE" if self.base is None else shlex.quote(str(self.base.path))
        return f"tiewise {verb} {shlex.quote(str(self.path))} --base {base} --to NEW_DIR"

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


def end_modules(base: Facts) -> tuple[str | None, str | None]:
    """Modules of the input table and of the head as the base's class names them; None for an end that is not known."""
    roles, known = base.roles, base.roles.known
    stored = (None if roles.input is None else roles.input.name, None if roles.headless else roles.output_name)
    plain = [None if name is None else unwrapped(module_of(name)[0]) for name in stored]
    found = [(known.loaded_as(name) if known is not None and name is not None else None) or name for name in plain]
    return found[0], found[1]


def open_adapter(folder: Folder, base: Facts | None = None, scan: bool = True) -> AdapterFacts:
    """Read an adapter's config and the header of its tensors; `adapter_model.bin` is not opened.

    The base is the one that is given: the path in `base_model_name_or_path` is a stranger's, and is never followed.
    """
    config, tensors, faults = json_object(folder.path, ADAPTER_CONFIG), dict[str, Stored](), list[Fault]()
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


def lora_config(model: Any, new_tokens: Iterable[int] = (), *, tables: bool = False) -> dict[str, Any]:
    """Return keyword arguments for `peft.LoraConfig`: low-rank updates of the body, and of the tables what is asked.

    As PEFT 0.21 does it: rows of a tied input table are trained at the head too, and whole tables that are one are one
    only with `ensure_weight_tying`. Rank and the rest are yours to add.

    Args:
        model: a checkpoint folder, whose tables are compared, or a Hugging Face model.
        new_tokens: ids whose rows are trained at both ends; each needs a row (`tiewise resize` gives it one).
        tables: train both tables whole instead.

    Raises:
        CheckpointError: no table is found, it is not known whether it is shared, or a token has no row.
    """
    ids = [int(token) for token in new_tokens]
    if hasattr(model, "get_input_embeddings"):
        where, both = type(model).__name__, [model.get_input_embeddings(), model.get_output_embeddings()]
        names = [next((name for name, one in model.named_modules() if one is end), None) for end in both]
        rows = len(both[0].weight)
        tied: bool | None = both[1] is not None and both[0].weight is both[1].weight
    else:
        facts = Facts(open_folder(os.fspath(model)))
        where, names, tied = str(facts.path), list(end_modules(facts)), facts.truth if facts.claims.tied else False
        rows = 0 if facts.roles.counted is None else facts.roles.counted.rows
    ends = [name for name in names if name is not None]
    if not ends or tied is None:
        what = "no input table was found" if not ends else "whether its two ends are one table is not known"
        raise CheckpointError(f"{where}: {what}", "tiewise check says what is there")
    if wrong := [token for token in (min(ids, default=0), max(ids, default=0)) if ids and not 0 <= token < rows]:
        fix = f"tiewise resize --vocab {wrong[0] + 1} gives it one" if wrong[0] >= 0 else "ids begin at 0"
        raise CheckpointError(f"{where}: of {rows:,} rows none is token {wrong[0]}'s", fix)
    config: dict[str, Any] = {"target_modules": "all-linear"}  # which leaves the head out
    if tables:
        return config | {"modules_to_save": ends, "ensure_weight_tying": tied}
    return config | ({"trainable_token_indices": dict.fromkeys(ends[: 1 if tied else 2], ids)} if ids else {})
