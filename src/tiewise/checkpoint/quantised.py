"""What a quantised checkpoint says of its two ends: by the names of its tensors, and by `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiewise.checkpoint.families import BESIDE, PACKED, module_of, unwrapped
from tiewise.checkpoint.roles import Roles, find_roles
from tiewise.checkpoint.stored import FLOATING, Stored

# where the config of a quantisation stands, and under which keys it lists the modules that it leaves alone
_SECTIONS = ("quantization_config", "compression_config", "quantization")
_LISTS = (
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "skip_modules",
    "modules_to_exclude",
    "exclude_layers",
)
# a triple is whole only with these beside the packed numbers
_NEEDED = {"qweight": ("scales",), "weight_packed": ("weight_scale",)}
MOST_LISTED = 100_000


@dataclass(frozen=True)
class End:
    """One end of a quantised checkpoint.

    Args:
        module: its name; None where none is known.
        parts: last parts of the names of what is stored for it, sorted.
        quantised: its numbers are packed, are of an integer or 8-bit type, or have scales beside them.
    """

    module: str | None = None
    parts: tuple[str, ...] = ()
    quantised: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts without which the stored ones mean nothing: scales without numbers, packed numbers without scales."""
        if not self.quantised:
            return ()
        packed = [part for part in self.parts if part in ("weight", *PACKED)]
        if not packed:
            return ("qweight" if "qzeros" in self.parts else "weight",)
        return tuple(part for part in _NEEDED.get(packed[0], ()) if part not in self.parts)


@dataclass(frozen=True)
class Quantised:
    """Both ends, and what the config says.

    Args:
        input: the input table.
        output: the output head; without parts where none is stored.
        method: `quant_method`, "" where a config of a quantisation names none; None without such a config.
        lists: modules left alone, by the key that lists them. Patterns stand as written and are never run.
        says_head: the config's own statement that the head is quantised (GPTQ's `lm_head`); None where it has none.
    """

    input: End
    output: End
    method: str | None = None
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    says_head: bool | None = None

    @property
    def any(self) -> bool:
        """Whether an end is stored quantised, or a config of a quantisation stands beside plain ones."""
        return self.input.quantised or self.output.quantised or self.method is not None


def quantised_ends(
    tensors: Mapping[str, Stored], config: Mapping[str, Any] | None, roles: Roles | None = None
) -> Quantised:
    """Say of each end whether it is stored quantised, and what the config says of it.

    Args:
        tensors: of the checkpoint, by name.
        config: config.json.
        roles: where they are known already.
    """
    roles = find_roles(tensors, config) if roles is None else roles
    section = _section(config or {})
    says = section.get("lm_head") if section is not None else None
    return Quantised(
        _end(tensors, roles.input_name),
        _end(tensors, roles.output_name),
        method=None if section is None else _method(section),
        lists={} if section is None else _lists(section),
        says_head=says if isinstance(says, bool) else None,
    )


def leaves(end: End, entries: tuple[str, ...]) -> bool:
    """Whether a list of modules left alone names this end: by name, by a part above it, or within a pattern."""
    if end.module is None:
        return False
    last = end.module.rpartition(".")[2]
    return any(last in entry or end.module.startswith(f"{entry}.") for entry in entries if entry)


def _end(tensors: Mapping[str, Stored], name: str | None) -> End:
    if name is None:
        return End()
    module = module_of(name)[0]
    last = module.rpartition(".")[2]
    parts = {}
    for stored, tensor in tensors.items():
        if last in stored and (plain := unwrapped(stored)).startswith(f"{module}."):
            parts[plain.removeprefix(f"{module}.")] = tensor
    parts = {part: tensor for part, tensor in parts.items() if part in ("weight", *PACKED) or BESIDE.fullmatch(part)}
    quantised = any(part != "weight" or tensor.dtype not in FLOATING for part, tensor in parts.items())
    return End(module, tuple(sorted(parts)), quantised)


def _section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    levels = [
        config,
        *(level for key in ("text_config", "llm_config") if isinstance(level := config.get(key), Mapping)),
    ]
    for level in levels:
        for key in _SECTIONS:
            if isinstance(found := level.get(key), Mapping):
                return found
    return None


def _method(section: Mapping[str, Any]) -> str:
    for key in ("quant_method", "quant_algo", "mode"):
        if isinstance(found := section.get(key), str):
            return found
    return ""


def _lists(section: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    found = {}
    for key in _LISTS:
        if isinstance(entries := section.get(key), list):
            found[key] = tuple(entry for entry in entries[:MOST_LISTED] if isinstance(entry, str))
    if isinstance(dynamic := section.get("dynamic"), Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        skipped = tuple(key.removeprefix("-:") for key in dynamic if isinstance(key, str) and key.startswith("-:"))
        if skipped:
            found["dynamic"] = skipped
    return found
