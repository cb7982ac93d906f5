"""What a comparison or a single training run is asked to do: one dataclass, written to `run.yaml`, read on resume."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from tiewise.core.errors import RunError
from tiewise.core.spec import BoundarySpec
from tiewise.data.split import CONTIGUOUS, RANDOM
from tiewise.training.albert.options import MODEL as ALBERT
from tiewise.training.albert.options import Albert, arm_name, read_arm
from tiewise.training.recurrent.options import CELLS, Recurrent

FILE = "run.yaml"
ALL = 1_000_000_000  # steps of a recipe whose number is not limited: its epochs have fewer


# what the flax backend has no choice of
_OF_FLAX = {
    "model": "llama",
    "recurrent": None,
    "albert": None,
    "minutes": None,
    "accumulate": 1,
    "bf16": False,
    "activation_checkpointing": False,
}


@dataclass(frozen=True)
class Settings:
    """Defaults are those of the bare command, chosen for two CPU cores (docs/compare.md says how they were found)."""

    arms: tuple[str, ...] = ("tied", "untied", "factored:64")
    seeds: int = 3
    text: tuple[str, ...] = ("builtin",)
    split: str = RANDOM
    tokenizer: str = "bpe:4096"
    model: str = "llama"
    width: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 8
    accumulate: int = 1
    steps: int = 600
    minutes: float | None = None
    learning_rate: float = 4e-3
    measured: int = 262_144  # tokens of a split that the final losses are taken over, at most
    weight_decay: float = 0.1
    init: float | None = None
    match: str = "width"
    tune: bool = False
    bf16: bool = False
    activation_checkpointing: bool = False
    seed: int | None = None  # of a single training run; a comparison counts its seeds from 1
    backend: str = "torch"  # or flax: who takes the steps
    recipe: str = ""  # whose settings these began as; "" for none
    recurrent: Recurrent | None = None  # of a recurrent model; in YAML its settings stand beside the others
    albert: Albert | None = None  # of an ALBERT, likewise

    def specs(self) -> dict[str, BoundarySpec]:
        """Arms by their canonical names, in order.

        Raises:
            SpecError: an arm that cannot be parsed, or that a model of this width cannot have.
        """
        if self.albert is not None:
            arms = [read_arm(arm) for arm in self.arms]
            return {arm_name(boundary, share): boundary for boundary, share in arms}
        found = [BoundarySpec.parse(arm) for arm in self.arms]
        return {str(spec): spec for spec in found}

    def checked(self) -> Settings:
        """Return these settings with canonical arm names.

        Raises:
            RunError: a number out of range, an arm given twice, a schedule that falls outside the run.
            SpecError: see `specs`.
        """
        for name in ("seeds", "width", "layers", "heads", "batch", "accumulate", "steps", "seed", "measured"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name} = {value}", "use 1 or more")
        if self.length < 2:
            raise RunError(f"length = {self.length}", "a block needs two tokens or more to predict one")
        for name in ("learning_rate", "minutes", "init"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RunError(f"{name} = {value}", "use a positive number")
        if not 0 <= self.weight_decay < float("inf"):
            raise RunError(f"weight_decay = {self.weight_decay}", "use zero or a positive number")
        if self.match not in ("width", "parameters"):
            raise RunError(f"match = {self.match!r}", "choose width or parameters")
        if self.split not in (RANDOM, CONTIGUOUS):
            raise RunError(f"split = {self.split!r}", f"choose {RANDOM} or {CONTIGUOUS}")
        if self.model in ("llama", "gpt2") and self.width % self.heads:
            raise RunError(f"{self.heads} heads do not divide width {self.width}", "choose heads that do")
        if self.model == "llama" and self.width // self.heads % 2:
            what = f"a head of width {self.width}/{self.heads} = {self.width // self.heads}"
            raise RunError(what, "choose an even one: rotary positions turn pairs")
        if self.seed is not None:
            self._check_single()
        if self.recurrent is not None:
            self._check_recurrent(self.recurrent.checked())
        if self.albert is not None:
            self._check_albert(self.albert)
        specs = self.specs()
        if self.backend != "torch":
            self._check_flax(specs)
        if len(specs) < len(self.arms):
            raise RunError(f"an arm is given twice in {','.join(self.arms)}", "name each arm once")
        for name, spec in specs.items():
            at = spec.tie_at or spec.untie_at
            if at is not None and at >= self.steps and self.minutes is None:
                raise RunError(f"{name}: step {at} is not within {self.steps} steps", "choose an earlier step")
        albert = None if self.albert is None else self.albert.checked()
        return replace(self, arms=tuple(specs), albert=albert)

    def _check_single(self) -> None:
        if len(self.arms) != 1:
            raise RunError(f"{len(self.arms)} boundaries ({', '.join(self.arms)}) for one run", "name one, or compare")
        of_compare = {"minutes": self.minutes is not None, "match": self.match != "width", "tune": self.tune}
        for name, given in of_compare.items():
            if given:
                raise RunError(f"{name} is a setting of compare", "leave it out, or use tiewise compare")

    def _check_flax(self, specs: dict[str, BoundarySpec]) -> None:
        if self.backend != "flax":
            raise RunError(f"backend = {self.backend!r}", "choose torch or flax")
        if self.seed is not None:
            raise RunError("backend is a setting of compare", "leave it out, or use tiewise compare")
        for name, value in _OF_FLAX.items():
            if getattr(self, name) != value:
                what = f"{name} = {getattr(self, name)!r} with the flax backend"
                raise RunError(what, "leave it out, or use the torch backend")
        for arm, spec in specs.items():
            if spec != spec.plainly() or spec.vectors is not None:
                raise RunError(f"{arm} with the flax backend", "schedules and vectors need the torch backend")

    def _check_recurrent(self, options: Recurrent) -> None:
        if self.model not in CELLS:
            raise RunError(f"model = {self.model!r} in a recurrent run", f"choose one of {', '.join(CELLS)}")
        if self.split != RANDOM:
            raise RunError(f"split = {self.split!r} in a recurrent run", "leave it out: the corpus has a file for each")
        if self.accumulate != 1:
            fix = "use --set batch for more streams"
            raise RunError(f"accumulate = {self.accumulate}: streams carry their state from step to step", fix)
        unfit = {"minutes": self.minutes is not None, "match": self.match != "width", "tune": self.tune}
        for name, given in unfit.items():
            if given:
                raise RunError(f"{name} is not for recurrent runs", "leave it out; --set epochs=N makes them shorter")
        if options.average_patience and options.keep != "best":
            raise RunError("average_patience without keep: best", "add keep: best, which keeps the better of both")
        if options.keep == "best" and any(spec != spec.plainly() for spec in self.specs().values()):
            raise RunError("keep: best with a boundary that changes", "use keep: last, or a boundary that stays")
        if len(self.text) != 1:
            raise RunError(f"{len(self.text)} corpora for a recipe", "name one folder")

    def _check_albert(self, options: Albert) -> None:
        if self.model != ALBERT:
            raise RunError(f"model = {self.model!r} in an ALBERT run", f"leave it out, or use {ALBERT}")
        options.checked().packing(self.length)
        unfit = {"minutes": self.minutes is not None, "match": self.match != "width", "tune": self.tune}
        for name, given in unfit.items():
            if given:
                raise RunError(f"{name} is not for ALBERT runs", "leave it out; --steps makes them shorter")

    def save(self, folder: Path) -> None:
        """Write `run.yaml`."""
        record = {key: _plain(value) for key, value in asdict(self).items()}
        (folder / FILE).write_text(yaml.safe_dump(record, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read a `run.yaml`. Raises as `read`."""
        return cls.of(cls.read(path))

    @classmethod
    def of(cls, record: dict[str, Any]) -> Settings:
        """Return settings of what `read` and `typed` returned, or several of them merged.

        Raises:
            RunError: a setting of recurrent models without a recipe.
        """
        record = dict(record)
        albert = record.get("model") == ALBERT
        own = {name: record.pop(name) for name in (_ALBERT if albert else _RECURRENT) if name in record}
        other = next((name for name in record if name in _RECURRENT or name in _ALBERT), None)
        if other is not None:
            what = f"{other} is a setting of {'ALBERT' if other in _ALBERT else 'recurrent models'}"
            raise RunError(
                what, f"add --recipe NAME, or leave it out; this run's model is {record.get('model', 'llama')}"
            )
        if albert:
            return cls(**record, albert=Albert(**own))
        if not record.get("recipe"):
            if own:
                raise RunError(f"{next(iter(own))} is a setting of recurrent models", "add --recipe NAME")
            return cls(**record)
        return cls(**{"steps": ALL, **record}, recurrent=Recurrent(**own))

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """Return what a YAML mapping of settings says, by name.

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
        return cls.typed(record, str(path))

    @classmethod
    def typed(cls, record: Any, where: str) -> dict[str, Any]:
        """Return a mapping of names to plain values as the settings' own types. Raises as `read`."""
        if not isinstance(record, dict):
            raise RunError(f"{where} holds no settings", "write one `name: value` per line")
        nested = [record.get(name) for name in _KINDS]
        record = {key: value for key, value in record.items() if key not in _KINDS}
        for inner in nested:
            record |= inner if isinstance(inner, dict) else {}
        known = {f.name: f.default for f in fields(cls) if f.name not in _KINDS} | _ALBERT | _RECURRENT
        for key in record:
            if key not in known:
                raise RunError(f"unknown setting {key!r} in {where}", f"known: {', '.join(known)}")
        return {key: _typed(key, value, known[key], where) for key, value in record.items()}


def _typed(key: str, value: Any, default: Any, where: str) -> Any:
    if isinstance(default, tuple):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and (items or not default) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise RunError(f"{key} in {where} must be a list of text", "write [tied, untied], say")
    if default is None and value is None:
        return None
    wanted = _OPTIONAL[key] if default is None else type(default)
    if wanted is float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 takes 3e-3, without a point, for text
            value = float(value)
    if isinstance(value, bool) != (wanted is bool) or not isinstance(
        value, (int, float) if wanted is float else wanted
    ):
        raise RunError(f"{key} in {where} must be {_NAMES[wanted]}, not {value!r}", "correct it")
    return wanted(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


_KINDS = ("recurrent", "albert")
_RECURRENT: dict[str, Any] = {f.name: f.default for f in fields(Recurrent)}
_ALBERT: dict[str, Any] = {f.name: f.default for f in fields(Albert)}
_OPTIONAL: dict[str, type] = {"minutes": float, "init": float, "seed": int, "embedding": int, "inner": int}
_NAMES: dict[type, str] = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
