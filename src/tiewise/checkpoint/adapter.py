"""A PEFT adapter folder: what its config asks for, and what its tensors hold at the two ends.

The tensors decide where they can be read. A pattern in `target_modules` is never run: one from a stranger could take
for ever, and the tensors' names say what it matched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiewise.checkpoint.families import in_layer, is_foreign, module_of, usual
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Fault, Folder
from tiewise.checkpoint.stored import Stored, read_header
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import inside
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import doing

if TYPE_CHECKING:
    from tiewise.checkpoint.facts import Facts

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
LORA, COPY, TOKENS = "low-rank update", "full copy", "trained rows"
_PREFIX = "base_model.model."
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
class Adapter:
    """An adapter as it lies on disk."""

    path: Path  # the folder
    base_name: str = ""  # `base_model_name_or_path`; "" where absent
    targets: tuple[str, ...] = ()  # `target_modules` where it is a list of names; empty for a pattern or "all-linear"
    saved: tuple[str, ...] = ()  # `modules_to_save`
    # `trainable_token_indices` by the name of the module ("" where the config does not name it)
    token_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ties: bool = False  # `ensure_weight_tying`
    # stored tensors by name; empty where they could not be read, or are pickled
    tensors: dict[str, Stored] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()  # what could not be read

    def update(self, names: Iterable[str]) -> EndUpdate | None:
        """Return what is done to the module that has one of these names (or ends in it after a dot); None for nothing.

        The tensors are asked first, then the config.
        """
        names = tuple(names)
        stored: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            match = _PARTS.fullmatch(name.removeprefix(_PREFIX))
            if match is None or not _named(match["module"], names) or in_layer(name) or is_foreign(name):
                continue
            if len(tensor.shape) == 2:
                stored.setdefault(match["module"], {})[match["part"]] = tensor
        for module, parts in stored.items():
            if any(part.startswith("lora_") for part in parts):
                return EndUpdate(module, LORA, _lora_shape(parts))
            for part, tensor in parts.items():
                if "trainable_tokens_delta" in part:
                    return EndUpdate(module, TOKENS, (-1, tensor.shape[1]))
                if not part.startswith("base_layer"):
                    return EndUpdate(module, COPY, (tensor.shape[0], tensor.shape[1]), tensor)
        claims = ((COPY, self.saved), (LORA, self.targets), (TOKENS, self.token_rows)) if not self.tensors else ()
        for kind, modules in claims:
            for module in modules:
                if module and any(_named(name, (module,)) for name in names):
                    return EndUpdate(module, kind)
        return None


def open_adapter(folder: Folder) -> Adapter:
    """Read an adapter's config and the header of its tensors; `adapter_model.bin` is not opened."""
    config = folder.json(ADAPTER_CONFIG)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{folder.path / ADAPTER_CONFIG}: no JSON object", "take it from its source again")
    tensors: dict[str, Stored] = {}
    faults = []
    if folder.has(WEIGHTS):
        try:
            tensors = read_header(inside(folder.path, WEIGHTS)).tensors
        except CheckpointError as error:
            faults.append(Fault.of(WEIGHTS, error))
    elif folder.has(PICKLE):
        fix = "save the adapter again with safe_serialization=True"
        faults.append(Fault(PICKLE, f"{folder.path / PICKLE}: pickled tensors are not opened", fix))
    else:
        fix = "take the adapter from its source again"
        faults.append(Fault(WEIGHTS, f"{folder.path}: an adapter without {WEIGHTS}", fix))
    rows = config.get("trainable_token_indices")
    by_module = rows if isinstance(rows, Mapping) else {"": rows}  # a list alone names no module
    return Adapter(
        folder.path,
        base_name=name if isinstance(name := config.get("base_model_name_or_path"), str) else "",
        targets=_texts(config.get("target_modules")),
        saved=_texts(config.get("modules_to_save")),
        token_rows={
            name: tuple(row for row in of_module if type(row) is int)
            for name, of_module in by_module.items()
            if isinstance(of_module, list)
        },
        ties=config.get("ensure_weight_tying") is True,
        tensors=tensors,
        faults=tuple(faults),
    )


def _lora_shape(parts: dict[str, Stored]) -> tuple[int, int]:
    """[V, E]: a linear layer's A is [r, E] and its B [V, r]; a lookup's A is [r, V] and its B [E, r]."""
    rows = width = -1
    for part, tensor in parts.items():
        if not part.startswith("lora_"):
            continue
        lookup, first = part.startswith("lora_embedding"), part.split(".")[0].endswith("A")
        size = tensor.shape[1] if first else tensor.shape[0]
        if first == lookup:
            rows = size
        else:
            width = size
    return rows, width


def _named(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


@dataclass(frozen=True)
class AdapterFacts:
    """One PEFT adapter."""

    adapter: Adapter  # its config and its tensors
    base: Facts | None = None  # the checkpoint that it changes; None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    @cached_property
    def input(self) -> EndUpdate | None:
        """What the adapter does to the input table."""
        paths = {path.rpartition(".")[2] for path, _ in usual().pairs}
        return self.adapter.update(_names(None if self.base is None else self.base.roles.input_name, paths))

    @cached_property
    def output(self) -> EndUpdate | None:
        """What the adapter does to the output head."""
        return self.adapter.update(_names(None if self.base is None else self.base.roles.output_name, usual().outputs))

    @cached_property
    def tied(self) -> bool | None:
        """Whether the base has one table at both ends, by flag and by tensors; None where that is not known."""
        if self.base is None:
            return None
        if self.base.roles.output is None:
            return self.base.claims.tied
        return False if self.base.claims.tied is False else self.base.truth

    @cached_property
    def equal(self) -> bool | None:
        """Whether the adapter's full copies of both ends hold the same bytes; None without both, or unread."""
        if self.input is None or self.output is None or not self.scan:
            return None
        a, b = self.input.copy, self.output.copy
        if a is None or b is None:
            return None
        with doing("comparing the adapter's two copies", a.nbytes):
            return same_bytes(a, b)


def _names(stored: str | None, usually: Iterable[str]) -> tuple[str, ...]:
    """A module as the base stores it, and the last part of its name: PEFT names modules as they are once loaded."""
    if stored is None:
        return tuple(usually)
    module = module_of(stored)[0]
    return module, module.rpartition(".")[2]
