"""PEFT adapter: its config, its tensors, and the modules of the base model that they change.

If the tensors can be read, they decide. A pattern in the config is never run, since an untrusted one could run without
end. The names of the tensors show which modules it matched.
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
from tiewise.checkpoint.facts import Facts, result_path
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.file_sources import HubSource
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Fault, Folder, json_object, recording_faults
from tiewise.checkpoint.peft_methods import COPY, LORA, TOKENS, UPDATE, PeftMethod, method_of
from tiewise.checkpoint.stored import Stored, read_header_from
from tiewise.checkpoint.stored_modules import may_be_end
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import items_of, short
from tiewise.core.progress import progress_of

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # prefix of every module name
DELTA, BASE = "trainable_tokens_delta", "base_layer."
TRAINED_COPY = "ln_tuning_layers.weight"  # full copy that LN tuning trains
PLAIN_PARTS = {"weight", "bias", f"{BASE}bias"}
LINEAR, LOOKUP = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")
FACTORS = {*LINEAR, *LOOKUP}
# parts that `adapter merge` knows
MERGED_PARTS = {*FACTORS, "lora_B.bias", "lora_magnitude_vector", DELTA, *PLAIN_PARTS, f"{BASE}weight"}
# module and part of a tensor's name; some tools also save the adapter's name in it
_TENSOR_NAME = re.compile(
    r"(?P<module>.+?)\.(?:token_adapter\.|modules_to_save\.(?:\w+\.(?=\w))?)?"
    r"(?P<part>(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta)(?:\.(?!bias$)\w+)??(?:\.weight)?"
    r"|lora_B(?:\.\w+)?\.bias|(?:base_layer\.)?(?:weight|bias))"
)


@dataclass(frozen=True)
class EndUpdate:
    """Change of one end's module by the adapter."""

    module: str  # name of the module in the base, such as "model.embed_tokens"
    form: str  # "low-rank update", "full copy", "trained rows", or "update" for other methods of PEFT
    # shape [V, E] that the base's table must have; -1 for an axis that the adapter's tensors lack; None: no tensors
    shape: tuple[int, int] | None = None
    copy: Stored | None = None  # stored full copy, also one that an update is applied to; None if absent


@dataclass(frozen=True)
class AdapterFacts:
    """Facts of one stored adapter and of the checkpoint that it changes."""

    path: Path  # the folder
    config: Mapping[str, Any]  # adapter_config.json
    tensors: dict[str, Stored]  # {name: tensor}; empty if they are pickled or cannot be read
    faults: tuple[Fault, ...] = ()  # files that could not be read
    base: Facts | None = None  # checkpoint that it changes; None if the caller names none
    scan: bool = True  # tables may be read; False: headers only
    repository: HubSource | None = None  # repository of the Hub with the files; None for a folder on disk

    def names_under(self, key: str) -> tuple[str, ...]:
        """Return the names under a key of the config. Empty for a pattern or "all-linear"."""
        return items_of(str, self.config.get(key))

    @cached_property
    def token_rows(self) -> dict[str, tuple[int, ...]]:
        """Return {module: ids} of `trainable_token_indices`. The module is "" if the config lacks it."""
        rows = self.config.get("trainable_token_indices")
        by_module = rows if isinstance(rows, Mapping) else {"": rows}  # a plain list has no module name
        return {name: items_of(int, ids) for name, ids in by_module.items() if isinstance(ids, list)}

    @property
    def ensures_tying(self) -> bool:
        """Return whether PEFT ties the tensors that it adds to the two ends."""
        return self.config.get("ensure_weight_tying") is True

    @cached_property
    def method(self) -> PeftMethod:
        """Return the method of PEFT that made the adapter."""
        return method_of(self.config)

    @cached_property
    def parts(self) -> dict[str, dict[str, Stored]]:
        """Return {module: {part: tensor}}; parts lack the name of the adapter.

        Parts are "weight" and "bias" of a full copy, "base_layer.weight", "lora_A", "lora_B", "lora_B.bias",
        "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector" and "trainable_tokens_delta". A tensor of
        another method is named from its first part with the method's prefix on. The part of any other tensor is the
        last part of its name. Tensors that modules share are left out.
        """
        by_module: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            if self._is_shared(name):
                continue
            module, part = _module_and_part(name.removeprefix(PREFIX), self.method.prefix)
            by_module.setdefault(module, {})[part] = tensor
        return by_module

    def _is_shared(self, name: str) -> bool:
        """Return whether a tensor, such as a prompt or a vector bank, belongs to no module."""
        return self.method.shares and not name.startswith(PREFIX)

    @cached_property
    def base_modules(self) -> dict[str, str]:
        """Return {module in the base's class: module in the base's files}."""
        if self.base is None:
            return {}
        return _modules_by_class_name(self.base)

    @cached_property
    def input(self) -> EndUpdate | None:
        """Return the update of the input embedding; None if the adapter leaves it unchanged."""
        names = [path.rpartition(".")[2] for path, _ in usual_names().pairs]
        if self.base is None:
            return self.update(names)
        return self.update(names, self.base.roles.input_name)

    @cached_property
    def output(self) -> EndUpdate | None:
        """Return the update of the output head; None if the adapter leaves it unchanged."""
        if self.base is None:
            return self.update(usual_names().outputs)
        return self.update(usual_names().outputs, self.base.roles.output_name)

    def update(self, usual: Sequence[str], stored: str | None = None) -> EndUpdate | None:
        """Return the update of one end's module; None if the adapter leaves it unchanged.

        Args:
            usual: usual names of the end's module, for an unknown base.
            stored: tensor name of the end in the base; None if unknown.
        """
        names = usual
        if stored is not None:
            # PEFT uses the names of the loaded model; at least the last part equals the stored name
            module = module_of(stored)[0]
            names = (module, module.rpartition(".")[2])
        for module, parts in self.parts.items():
            if ends_with_any(module, names) and may_be_end(module):
                update = _stored_update(module, parts, self.method)
                if update is not None:
                    return update
        if not self.faults:  # tensors that could be read are more reliable than the config
            return None
        return self._configured_update(names)

    def _configured_update(self, names: Sequence[str]) -> EndUpdate | None:
        """Return the update that the config lists for one of the modules, else None."""
        by_form = (
            (COPY, self.names_under("modules_to_save")),
            (self.method.form, self.names_under("target_modules")),
            (TOKENS, self.token_rows),
        )
        for form, modules in by_form:
            for module in filter(None, modules):
                if any(ends_with(name, module) for name in names):
                    return EndUpdate(module, form)
        return None

    def command(self, verb: str, base: str = "BASE") -> str:
        """Return the command line that applies a verb to the adapter and its base.

        Args:
            verb: command of tiewise.
            base: another base than that of these facts, quoted for a shell.
        """
        if base == "BASE" and self.base is not None:
            base = shlex.quote(str(self.base.path))
        return f"tiewise {verb} {shlex.quote(str(self.path))} --base {base} --to {result_path(self.path)}"

    @cached_property
    def tied(self) -> bool | None:
        """Return whether the base has one table for both ends, by flag and tensors. None if unknown."""
        if self.base is None:
            return None
        if self.base.roles.output is None or self.base.claims.tied is False:
            return self.base.claims.tied
        return self.base.tables_are_tied

    @property
    def difference_of_ends(self) -> str | None:
        """Return how an adapter acts differently on the ends of a tied base, or None.

        Trained rows of a tied base act at both ends, so they cannot replace the copies of such an adapter.
        """
        if not self.tied:
            return None
        ends = [end for end in (self.input, self.output) if end is not None]
        if len(ends) == 2 and not self.copies_are_equal:
            return "what it does to the two ends differs, and the base has one table for both"
        if len(ends) == 1 and not self.ensures_tying:
            return f"only {short(ends[0].module)} has a copy, and trained rows of a tied base act at both ends"
        return None

    @cached_property
    def copies_are_equal(self) -> bool | None:
        """Return whether the adapter's full copies of both ends have the same bytes.

        None unless the adapter has both copies and they may be read.
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


def _module_and_part(name: str, prefix: str) -> tuple[str, str]:
    """Return (module in the base, part) of an adapter's tensor name.

    `AdapterFacts.parts` lists the parts. `prefix` is the one of the adapter's method.
    """
    match = _TENSOR_NAME.fullmatch(name)
    module, dot, rest = name.partition(f".{prefix}")
    is_of_method = prefix != "" and dot != ""
    if is_of_method and (match is None or match["part"] in PLAIN_PARTS):
        return module, prefix + rest
    if match is None:
        return module_of(name)
    module, part = match["module"], match["part"]
    if part.startswith(("lora_", DELTA)):
        part = "lora_B.bias" if part.endswith(".bias") else part.partition(".")[0]
    return module, part


def _stored_update(module: str, parts: Mapping[str, Stored], method: PeftMethod) -> EndUpdate | None:
    """Return the update of a module by its stored parts; None if its weight is unchanged."""
    matrices = {part: tensor for part, tensor in parts.items() if len(tensor.shape) == 2}
    copy, below = matrices.get("weight", matrices.get(TRAINED_COPY)), matrices.get(f"{BASE}weight")
    if not matrices.keys().isdisjoint(FACTORS):
        return EndUpdate(module, LORA, _shape_of_update(matrices), copy or below)
    if DELTA in matrices:
        return EndUpdate(module, TOKENS, (-1, matrices[DELTA].shape[1]))
    if copy is not None:
        rows, width = copy.shape
        return EndUpdate(module, COPY, (rows, width), copy)
    if below is not None:  # PEFT stores the table below a change
        rows, width = below.shape
        return EndUpdate(module, UPDATE, (rows, width), below)
    if method.form == UPDATE and parts.keys() - PLAIN_PARTS:
        return EndUpdate(module, UPDATE)
    return None


def _shape_of_update(matrices: Mapping[str, Stored]) -> tuple[int, int]:
    """Return the shape [V, E] of a low-rank update. An axis without a stored factor is -1."""
    rows = width = -1
    for part in sorted(matrices.keys() & FACTORS):
        tensor = matrices[part]
        is_first = part.endswith("A")  # a linear layer's A is [r, E] and its B [V, r]; a lookup's A is [r, V], B [E, r]
        length = tensor.shape[1] if is_first else tensor.shape[0]
        if is_first == part.startswith("lora_embedding"):
            rows = length
        else:
            width = length
    return rows, width


def end_modules(base: Facts) -> tuple[str | None, str | None]:
    """Return the modules of input embedding and output head in the base's class. None if unknown."""
    roles = base.roles
    input_module = output_module = None
    if roles.input is not None:
        input_module = _class_module(base, roles.input.name)
    if roles.output_name is not None and not roles.headless:
        output_module = _class_module(base, roles.output_name)
    return input_module, output_module


def _modules_by_class_name(base: Facts) -> dict[str, str]:
    """Return {module in the base's class: module in the base's files}."""
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
            if class_ends is not None and class_ends.prefix:  # other parts, such as vision towers, may have the prefix
                modules[f"{class_ends.prefix}.{plain}"] = module
            modules[plain] = module
    if table is None or head_module is None:
        return modules
    if base.roles.output is None:
        modules[head_module] = module_of(table.name)[0]  # a tied head has no separate tensor
    return modules


def _body_prefixes(table: Stored | None, input_module: str | None) -> tuple[str, str]:
    """Return (prefix of the body's modules in the files, prefix in the class).

    The names of the input table in file and class differ by these prefixes.
    """
    if table is None or input_module is None:
        return "", ""
    stored_module = strip_wrappers(module_of(table.name)[0])
    last_part = input_module.rpartition(".")[2]
    return stored_module.removesuffix(last_part), input_module.removesuffix(last_part)


def _class_module(base: Facts, tensor: str) -> str:
    """Return the module of a stored tensor by its class name, else its file name."""
    module = strip_wrappers(module_of(tensor)[0])
    return _loaded_as(base, module) or module


def _loaded_as(base: Facts, module: str) -> str | None:
    """Return the end of the base's class that a stored module is loaded into, else None."""
    if base.roles.class_ends is None:
        return None
    return base.roles.class_ends.loaded_as(module)


def open_adapter(folder: Folder, base: Facts | None = None, scan: bool = True) -> AdapterFacts:
    """Read an adapter's config and the header of its tensors.

    It never opens `adapter_model.bin`. It also never follows `base_model_name_or_path`, which is untrusted: the caller
    passes the base.
    """
    config = json_object(folder.source, ADAPTER_CONFIG)
    tensors, faults = dict[str, Stored](), list[Fault]()
    if folder.has(WEIGHTS):
        with recording_faults(faults, WEIGHTS):
            tensors = read_header_from(folder.source, WEIGHTS).tensors
    elif folder.has(PICKLE):
        remedy = "save the adapter again with safe_serialization=True"
        faults.append(Fault(PICKLE, f"{folder.path / PICKLE}: pickled tensors are not opened", remedy))
    else:
        remedy = "take the adapter from its source again"
        faults.append(Fault(WEIGHTS, f"{folder.path}: an adapter without {WEIGHTS}", remedy))
    return AdapterFacts(folder.path, config, tensors, tuple(faults), base, scan, folder.repository)
