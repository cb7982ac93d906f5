"""A PEFT adapter's folder: its config, its tensors, and the modules of the base that they change.

The tensors decide where they can be read. A pattern in the config is never run: an untrusted one could take for ever,
and the names of the tensors show which modules it matched.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import ends_with, ends_with_any, strip_wrappers, usual_names
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Fault, Folder, json_object, recording_faults
from tiewise.checkpoint.stored import Stored, read_header
from tiewise.checkpoint.stored_modules import may_be_end
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import items_of, path_inside
from tiewise.core.progress import progress_of

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
LORA, COPY, TOKENS = "low-rank update", "full copy", "trained rows"
PREFIX = "base_model.model."  # of the name of every module
DELTA, BASE = "trainable_tokens_delta", "base_layer."
# the parts of a tensor's name; the adapter's own name may be in it if another tool saved it
_PARTS = re.compile(
    r"(?P<module>.+?)\.(?:token_adapter\.|modules_to_save\.(?:\w+\.(?=\w))?)?"
    r"(?P<part>(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta)(?:\.(?!bias$)\w+)??(?:\.weight)?"
    r"|lora_B(?:\.\w+)?\.bias|(?:base_layer\.)?(?:weight|bias))"
)


@dataclass(frozen=True)
class EndUpdate:
    """Change that the adapter makes to one module."""

    module: str  # its name in the base, "model.embed_tokens"
    kind: str  # "low-rank update", "full copy" or "trained rows"
    # [V, E] that the base's table must have, -1 where the adapter's tensors do not say; None where they say nothing
    shape: tuple[int, int] | None = None
    copy: Stored | None = None  # the stored full copy, also the one below a low-rank update; None without


@dataclass(frozen=True)
class AdapterFacts:
    """One adapter as it is stored, and the checkpoint that it changes."""

    path: Path  # the folder
    config: Mapping[str, Any]  # adapter_config.json
    tensors: dict[str, Stored]  # by name; empty where they could not be read, or are pickled
    faults: tuple[Fault, ...] = ()  # what could not be read
    base: Facts | None = None  # None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    def names_under(self, key: str) -> tuple[str, ...]:
        """Return the names under a key; none if it has a pattern or "all-linear"."""
        return items_of(str, self.config.get(key))

    @cached_property
    def token_rows(self) -> dict[str, tuple[int, ...]]:
        """Return `trainable_token_indices` by the name of the module, "" where the config does not name it."""
        rows = self.config.get("trainable_token_indices")
        by_module = rows if isinstance(rows, Mapping) else {"": rows}  # a list alone names no module
        return {name: items_of(int, ids) for name, ids in by_module.items() if isinstance(ids, list)}

    @property
    def ties(self) -> bool:
        """Return whether PEFT ties the tensors that it adds to the two ends."""
        return self.config.get("ensure_weight_tying") is True

    @cached_property
    def parts(self) -> dict[str, dict[str, Stored]]:
        """Return {module: {part: tensor}}, the part without the adapter's name.

        The part of an unknown tensor is the last of its name.

        Parts are "weight" and "bias" of a full copy, "base_layer.weight", "lora_A", "lora_B", "lora_B.bias",
        "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector" and "trainable_tokens_delta".
        """
        by_module: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            module, part = _module_and_part(name.removeprefix(PREFIX))
            by_module.setdefault(module, {})[part] = tensor
        return by_module

    @cached_property
    def base_modules(self) -> dict[str, str]:
        """Return {module as the base's class names it: as the base's files do}."""
        if self.base is None:
            return {}
        return _modules_by_class_name(self.base)

    @cached_property
    def input(self) -> EndUpdate | None:
        """Return what the adapter does to the input table."""
        names = [path.rpartition(".")[2] for path, _ in usual_names().pairs]
        if self.base is None:
            return self.update(names)
        return self.update(names, self.base.roles.input_name)

    @cached_property
    def output(self) -> EndUpdate | None:
        """Return what the adapter does to the output head."""
        if self.base is None:
            return self.update(usual_names().outputs)
        return self.update(usual_names().outputs, self.base.roles.output_name)

    def update(self, usual: Sequence[str], stored: str | None = None) -> EndUpdate | None:
        """Return the update of one end's module, or None if the adapter leaves it alone.

        The module is that of the base's table `stored`, else one of a usual name.
        """
        names = usual
        if stored is not None:
            # PEFT names modules as they are once loaded: the last part at least is as it is stored
            module = module_of(stored)[0]
            names = (module, module.rpartition(".")[2])
        for module, parts in self.parts.items():
            if ends_with_any(module, names) and may_be_end(module):
                update = _stored_update(module, parts)
                if update is not None:
                    return update
        if self.tensors:  # they say more than the config
            return None
        return self._configured_update(names)

    def _configured_update(self, names: Sequence[str]) -> EndUpdate | None:
        """Return what the config alone says is done to one of the modules; None for nothing."""
        by_kind = {
            COPY: self.names_under("modules_to_save"),
            LORA: self.names_under("target_modules"),
            TOKENS: self.token_rows,
        }
        for kind, modules in by_kind.items():
            for module in filter(None, modules):
                if any(ends_with(name, module) for name in names):
                    return EndUpdate(module, kind)
        return None

    def command(self, verb: str) -> str:
        """Return the command line of a verb that makes a folder of it and its base."""
        base = "BASE"
        if self.base is not None:
            base = shlex.quote(str(self.base.path))
        return f"tiewise {verb} {shlex.quote(str(self.path))} --base {base} --to NEW_DIR"

    @cached_property
    def tied(self) -> bool | None:
        """Return whether the base has one table at both ends, by flag and by tensors.

        It is None if that is not known.
        """
        if self.base is None:
            return None
        if self.base.roles.output is None or self.base.claims.tied is False:
            return self.base.claims.tied
        return self.base.tables_are_tied

    @cached_property
    def equal(self) -> bool | None:
        """Return whether the adapter's full copies of both ends hold the same bytes.

        It is None without both copies, and if they may not be read.
        """
        if self.input is None or self.output is None:
            return None
        a, b = self.input.copy, self.output.copy
        if a is None or b is None:
            return None
        if not self.scan:
            return None
        with progress_of("comparing the adapter's two copies", a.nbytes):
            return same_bytes(a, b)


def _module_and_part(name: str) -> tuple[str, str]:
    """Return the base's module of a tensor of the adapter, and its part.

    Parts are those of `AdapterFacts.parts`.
    """
    match = _PARTS.fullmatch(name)
    if match is None:
        return module_of(name)
    module, part = match["module"], match["part"]
    if part.startswith(("lora_", DELTA)):
        part = "lora_B.bias" if part.endswith(".bias") else part.partition(".")[0]
    return module, part


def _stored_update(module: str, parts: Mapping[str, Stored]) -> EndUpdate | None:
    """Return what the stored parts of one module do to it. It is None if none of them is a matrix that changes it."""
    matrices = {part: tensor for part, tensor in parts.items() if len(tensor.shape) == 2}
    copy = matrices.get("weight", matrices.get(f"{BASE}weight"))
    low_rank = {part: tensor for part, tensor in matrices.items() if part.startswith("lora_")}
    if low_rank:
        return EndUpdate(module, LORA, _shape_of_update(low_rank), copy)
    if DELTA in matrices:
        return EndUpdate(module, TOKENS, (-1, matrices[DELTA].shape[1]))
    if copy is None:
        return None
    rows, width = copy.shape
    return EndUpdate(module, COPY, (rows, width), copy)


def _shape_of_update(low_rank: Mapping[str, Stored]) -> tuple[int, int]:
    """Return the shape [V, E] of a low-rank update. An axis whose factor is not stored has length -1."""
    rows = width = -1
    for part, tensor in low_rank.items():
        is_first = part.endswith("A")  # a linear layer's A is [r, E] and its B [V, r]; a lookup's A is [r, V], B [E, r]
        length = tensor.shape[1] if is_first else tensor.shape[0]
        if is_first == part.startswith("lora_embedding"):
            rows = length
        else:
            width = length
    return rows, width


def end_modules(base: Facts) -> tuple[str | None, str | None]:
    """Return the modules of input table and head as the base's class names them.

    An end that is not known is None.
    """
    roles = base.roles
    input_module = output_module = None
    if roles.input is not None:
        input_module = _class_module(base, roles.input.name)
    if roles.output_name is not None and not roles.headless:
        output_module = _class_module(base, roles.output_name)
    return input_module, output_module


def _modules_by_class_name(base: Facts) -> dict[str, str]:
    """Return {module as the base's class names it: as the base's files do}."""
    class_ends, table = base.roles.class_ends, base.roles.input
    input_module, head_module = end_modules(base)
    stored_prefix, class_prefix = _body_prefixes(table, input_module)
    modules = dict[str, str]()
    for module in dict.fromkeys(module_of(name)[0] for name in base.folder.tensors):
        plain = strip_wrappers(module)
        end = _loaded_as(base, plain)
        if end is not None:
            modules[end] = module
        elif plain.startswith(stored_prefix):
            modules[class_prefix + plain.removeprefix(stored_prefix)] = module
        else:
            if class_ends is not None and class_ends.prefix:  # other parts, vision towers, may be below it too
                modules[f"{class_ends.prefix}.{plain}"] = module
            modules[plain] = module
    if table is None or head_module is None:
        return modules
    if base.roles.output is None:
        modules[head_module] = module_of(table.name)[0]  # a tied head has no separate tensor
    return modules


def _body_prefixes(table: Stored | None, input_module: str | None) -> tuple[str, str]:
    """Return the prefix of the body's modules in the files, and that in the class.

    The class may put its body elsewhere: the two names of the input table differ by it.
    """
    if table is None or input_module is None:
        return "", ""
    stored_module = strip_wrappers(module_of(table.name)[0])
    last_part = input_module.rpartition(".")[2]
    return stored_module.removesuffix(last_part), input_module.removesuffix(last_part)


def _class_module(base: Facts, tensor: str) -> str:
    """Return a stored tensor's module as the base's class names it, else as the file does."""
    module = strip_wrappers(module_of(tensor)[0])
    return _loaded_as(base, module) or module


def _loaded_as(base: Facts, module: str) -> str | None:
    """Return the name of a stored end's module once it is loaded. It is None if the base's class does not know it."""
    if base.roles.class_ends is None:
        return None
    return base.roles.class_ends.loaded_as(module)


def open_adapter(folder: Folder, base: Facts | None = None, scan: bool = True) -> AdapterFacts:
    """Read an adapter's config and the header of its tensors; `adapter_model.bin` is not opened.

    The base is the one that is given: the path in `base_model_name_or_path` is not trusted, and is never followed.
    """
    config = json_object(folder.path, ADAPTER_CONFIG)
    tensors, faults = dict[str, Stored](), list[Fault]()
    if folder.has(WEIGHTS):
        with recording_faults(faults, WEIGHTS):
            tensors = read_header(path_inside(folder.path, WEIGHTS)).tensors
    elif folder.has(PICKLE):
        remedy = "save the adapter again with safe_serialization=True"
        faults.append(Fault(PICKLE, f"{folder.path / PICKLE}: pickled tensors are not opened", remedy))
    else:
        remedy = "take the adapter from its source again"
        faults.append(Fault(WEIGHTS, f"{folder.path}: an adapter without {WEIGHTS}", remedy))
    return AdapterFacts(folder.path, config, tensors, tuple(faults), base, scan)
