"""What a comparison or a single training run is asked to do: one dataclass, written to `run.yaml`, read on resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from tiewise.errors import RunError
from tiewise.spec import BoundarySpec

FILE = "run.yaml"


@dataclass(frozen=True)
class Settings:
    """Defaults are those of the bare command, chosen for two CPU cores (docs/compare.md says how they were found)."""

    arms: tuple[str, ...] = ("tied", "untied", "factored:64")
    seeds: int = 3
    text: tuple[str, ...] = ("builtin",)
    tokenizer: str = "bpe:4096"
    model: str = "llama"
    width: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 8
    accumulate: int = 1
    steps: int = 800
    minutes: float | None = None
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    init: float | None = None
    match: str = "width"
    tune: bool = False
    bf16: bool = False
    activation_checkpointing: bool = False

    def specs(self) -> dict[str, BoundarySpec]:
        """Arms by their canonical names, in order.

        Raises:
            SpecError: an arm that cannot be parsed, or that a model of this width cannot have.
        """
        found = [BoundarySpec.parse(arm) for arm in self.arms]
        return {str(spec): spec for spec in found}

    def checked(self) -> Settings:
        """Return these settings with canonical arm names.

        Raises:
            RunError: a number out of range, an arm given twice, a schedule that falls outside the run.
            SpecError: see `specs`.
        """
        for name in ("seeds", "width", "layers", "heads", "batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise RunError(f"{name} = {getattr(self, name)}", "use 1 or more")
        if self.length < 2:
            raise RunError(f"length = {self.length}", "a block needs two tokens or more to predict one")
        for name in ("learning_rate", "minutes", "init"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RunError(f"{name} = {value}", "use a positive number")
        if self.weight_decay < 0:
            raise RunError(f"weight_decay = {self.weight_decay}", "use zero or a positive number")
        if self.match not in ("width", "parameters"):
            raise RunError(f"match = {self.match!r}", "choose width or parameters")
        if not Path(self.model).suffix and self.width % self.heads:
            raise RunError(f"{self.heads} heads do not divide width {self.width}", "choose heads that do")
        specs = self.specs()
        if len(specs) < len(self.arms):
            raise RunError(f"an arm is given twice in {','.join(self.arms)}", "name each arm once")
        for name, spec in specs.items():
            at = spec.tie_at or spec.untie_at
            if at is not None and at >= self.steps and self.minutes is None:
                raise RunError(f"{name}: step {at} is not within {self.steps} steps", "choose an earlier step")
        return replace(self, arms=tuple(specs))

    def save(self, folder: Path) -> None:
        """Write `run.yaml`."""
        record = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        (folder / FILE).write_text(yaml.safe_dump(record, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read a `run.yaml`, or any YAML mapping of settings.

        Raises:
            RunError: no such file, not a mapping, an unknown key or a value of the wrong type.
        """
        try:
            record = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}", "name a YAML file"
            ) from None
        except yaml.YAMLError as error:
            raise RunError(f"{path} is not YAML: {str(error).splitlines()[0]}", "correct the file") from None
        return cls.from_record(record, str(path))

    @classmethod
    def from_record(cls, record: Any, where: str) -> Settings:
        """Build settings from a mapping of names to plain values. Raises as `load`."""
        if not isinstance(record, dict):
            raise RunError(f"{where} holds no settings", "write one `name: value` per line")
        known = {f.name: f for f in fields(cls)}
        values = {}
        for key, value in record.items():
            if key not in known:
                raise RunError(f"unknown setting {key!r} in {where}", f"known: {', '.join(known)}")
            values[key] = _typed(key, value, known[key].default, where)
        return cls(**values)


def _typed(key: str, value: Any, default: Any, where: str) -> Any:
    if isinstance(default, tuple):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise RunError(f"{key} in {where} must be a list of text", "write [tied, untied], say")
    if key in ("minutes", "init") and value is None:
        return None
    wanted = float if isinstance(default, float) or default is None else type(default)
    if isinstance(value, bool) != (wanted is bool) or not isinstance(
        value, (int, float) if wanted is float else wanted
    ):
        raise RunError(f"{key} in {where} must be {_NAMES[wanted]}, not {value!r}", "correct it")
    return wanted(value)


_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
