"""Settings of a comparison or a single run: a dataclass written to `run.yaml`.

A resume reads the file.

In YAML and after `--set`, the options of one kind of run (`run.Kind`) are on one level with the others. In code they
are `kind_options`, a dataclass of that kind. A kind's file is loaded only for a run of that kind. All settings of a
decoder are fields of `Settings`, so a mistake in them is reported before torch is imported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, get_type_hints, runtime_checkable

import yaml

from tiewise.core.errors import RunError, one_line_message, suggest_choices
from tiewise.core.records import read_setting, require, require_choice
from tiewise.core.spec import BoundarySpec, split_specs
from tiewise.core.spec_options import RUN
from tiewise.core.step_names import BEST, LAST
from tiewise.core.written_options import written_option
from tiewise.training.config_width import width_in_file
from tiewise.training.data.documents import CONTIGUOUS, RANDOM
from tiewise.training.tracker_names import read_tracker_names

FILE = "run.yaml"
DECODER = "decoder"
BUILT_IN = ("llama", "gpt2")  # decoders that need no config file
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: month 13; RecursionError: endless brackets
_KINDS = f"{__package__}.kinds"
_RECIPES = Path(__file__).parent / "recipes"


def kinds() -> list[str]:
    """Return the names of all kinds of run."""
    return [module.name for module in pkgutil.iter_modules(import_module(_KINDS).__path__)]


@runtime_checkable
class ArmReader(Protocol):
    """Options of a kind whose arms consist of a boundary and something else."""

    def read_arm(self, text: str) -> tuple[str, BoundarySpec]:
        """Return the canonical name and the boundary of an arm."""


class SettingsOfKind(Protocol):
    """The part of a `tiewise.training.run.Kind` that concerns settings."""

    @property
    def backend(self) -> str:
        """Name of the kind among the backends of spec options."""

    @property
    def options(self) -> type | None:
        """Dataclass of the settings that only this kind has."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of this kind for settings that all kinds have."""

    def check(self, settings: Settings) -> object:
        """Return the kind's options, checked."""


def find_kind(kind: str) -> SettingsOfKind:
    """Return the `tiewise.training.run.Kind` of this name."""
    if kind not in kinds():
        raise RunError(f"kind = {kind!r}", suggest_choices(kind, kinds()))
    run_kind: SettingsOfKind = import_module(f"{_KINDS}.{kind}").KIND
    return run_kind


# Best rate × width of whole decoders at widths 32 to 128 on 400,000 tokens (benchmarks/results/tuned_rates.csv)
RATE_TIMES_WIDTH = 0.512
MOST = 1e300  # of a number that trials multiply


@dataclass(frozen=True)
class Settings:
    """Settings of a run or a comparison, with the defaults of the bare command.

    The defaults were chosen for two CPU cores; docs/compare.md describes how.
    """

    arms: tuple[str, ...] = ("tied", "untied", "factored:64")
    seeds: int = 3
    text: tuple[str, ...] = ("builtin",)
    split: str = RANDOM
    tokenizer: str = "bpe:4096"
    train_tokens: int | None = None  # training tokens, in blocks spread evenly over the split; None: all
    kind: str = DECODER
    model: str = "llama"
    width: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 8
    accumulate: int = 1
    steps: int = 600
    minutes: float | None = None
    learning_rate: float | None = None  # peak of the schedule; None: RATE_TIMES_WIDTH / body_width
    table_rate: float | None = None  # learning rate of tables and head; None: that of all parameters
    measured: int = 262_144  # tokens of a split that the final losses use, at most
    weight_decay: float = 0.1
    init: float | None = None
    match: str = "width"
    select: str | None = None  # step whose model a run keeps, best or last; None: best in a comparison, else last
    margin: float = 0.02  # largest loss difference, in nats per token, that counts as equivalent
    tune: bool = False
    bf16: bool = False
    activation_checkpointing: bool = False
    seed: int | None = None  # seed of a single run; None in a comparison, whose seeds are 1 to `seeds`
    backend: str = "torch"  # library that trains: torch or flax
    recipe: str = ""  # name of the recipe that these settings started from; "" for none
    report_to: tuple[str, ...] = ()  # experiment trackers that each run reports to, as transformers names them
    kind_options: object = None  # options of the kind of run, where it has some: an instance of its `options`

    @property
    def body_width(self) -> int:
        """Width of the hidden states: `width`, or that of the config file which `model` names."""
        if self.kind != DECODER or self.model in BUILT_IN:
            return self.width
        return width_in_file(self.model) or self.width

    @property
    def peak_rate(self) -> float:
        """Peak of the learning rate: the chosen one, or the default of the width."""
        if self.learning_rate is None:
            return RATE_TIMES_WIDTH / self.body_width
        return self.learning_rate

    @property
    def run_kind(self) -> str:
        """Name of the kind of run; a backend other than torch is a kind."""
        return self.backend if self.backend != "torch" else self.kind

    def specs(self) -> dict[str, BoundarySpec]:
        """Return the arms' boundaries by canonical name, in order."""
        if isinstance(self.kind_options, ArmReader):
            return dict(self.kind_options.read_arm(arm) for arm in self.arms)
        parsed = [BoundarySpec.parse(arm) for arm in self.arms]
        return {str(spec): spec for spec in parsed}

    def checked(self) -> Settings:
        """Return these settings with canonical names of arms and trackers.

        TiewiseError: a value is out of range, or two settings contradict each other.
        """
        self._check_values()
        self._check_heads()
        trackers = read_tracker_names(self.report_to)
        select = self.select
        if select is None:
            select = BEST if self.seed is None else LAST
        if self.seed is not None:
            self._check_single_run()
        specs = self.specs()
        backend, kind_options = RUN, None
        if self.run_kind != DECODER:
            kind = find_kind(self.run_kind)
            backend, kind_options = kind.backend, kind.check(replace(self, report_to=trackers, select=select))
        for spec in specs.values():
            spec.require(backend)
        if len(specs) < len(self.arms):
            raise RunError(f"an arm is given twice in {','.join(self.arms)}", "name each arm once")
        if self.minutes is None:  # minutes become steps later, and the settings are checked again then
            self._check_schedules(specs)
        settings = replace(self, arms=tuple(specs), report_to=trackers, select=select)
        return replace(settings, kind_options=kind_options, learning_rate=self.peak_rate)

    def _check_values(self) -> None:
        """Raise RunError for a setting out of its range."""
        counts = "seeds width heads batch accumulate steps seed measured train_tokens"
        require(self, counts, lambda n: n >= 1, "use 1 or more")
        least = (
            0 if self.run_kind == DECODER else 1
        )  # a decoder without layers is the direct path: input embedding and output head
        require(self, "layers", lambda n: n >= least, f"use {least} or more")
        require(self, "length", lambda n: n >= 2, "a block needs two tokens or more to predict one")
        require(self, "learning_rate table_rate minutes init", lambda x: 0 < x < MOST, "use a positive number")
        require(self, "weight_decay margin", lambda x: 0 <= x < float("inf"), "use zero or a positive number")
        require_choice(self, "match", ("width", "parameters", "flops"))
        require_choice(self, "split", (RANDOM, CONTIGUOUS))
        if self.select is not None:
            require_choice(self, "select", (BEST, LAST))
        require_choice(self, "backend", ("torch", "flax"))
        if self.table_rate is not None and self.run_kind != DECODER:
            raise RunError(f"table_rate with {self.run_kind}", "leave it out: only decoders in PyTorch have it")

    def _check_heads(self) -> None:
        """Raise RunError if a built-in decoder cannot have this number of heads."""
        if self.model in BUILT_IN and self.width % self.heads:
            raise RunError(f"{self.heads} heads do not divide width {self.width}", "choose heads that do")
        if self.model == "llama" and self.width // self.heads % 2:
            problem = f"a head of width {self.width}/{self.heads} = {self.width // self.heads}"
            raise RunError(problem, "choose an even one: rotary positions turn pairs")

    def _check_single_run(self) -> None:
        """Raise RunError for settings that only a comparison can have."""
        if len(self.arms) != 1:
            problem = f"{len(self.arms)} boundaries ({', '.join(self.arms)}) for one run"
            raise RunError(problem, "name one, or use tiewise compare")
        for name in ("minutes", "match", "margin", "tune", "backend"):
            if getattr(self, name) != getattr(Settings, name):
                raise RunError(f"{name} is a setting of compare", "leave it out, or use tiewise compare")

    def _check_schedules(self, specs: Mapping[str, BoundarySpec]) -> None:
        """Raise RunError if a boundary changes after the last step."""
        for name, spec in specs.items():
            step = spec.tie_at or spec.untie_at
            if step is not None and step >= self.steps:
                raise RunError(f"{name}: step {step} is not within {self.steps} steps", "choose an earlier step")

    def save(self, folder: Path) -> None:
        """Write `run.yaml`, without trackers if none is named."""
        record = asdict(self)
        if not self.report_to:
            del record["report_to"]
        record |= record.pop("kind_options") or {}  # options of the kind are on one level with the others
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
        (folder / FILE).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read a `run.yaml`; raises as `read_yaml` and `of`.

        A run of an older version, which had no choice, keeps its last step.
        """
        return cls.of({"select": LAST} | read_yaml(path), str(path))

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str = "the settings", sources: Mapping[str, str] = {}) -> Settings:
        """Return settings from plain values by name.

        `where` names the origin of the values in messages; `sources` names that of single settings.

        RunError: a setting is unknown, or has a value of the wrong type.
        """
        kind = _kind_name(record)
        options: type | None = None
        defaults: Mapping[str, Any] = {}
        if kind != DECODER:
            run_kind = find_kind(kind)
            options, defaults = run_kind.options, run_kind.defaults
        shared_hints = {name: hint for name, hint in get_type_hints(cls).items() if name != "kind_options"}
        kind_hints = get_type_hints(options) if options else {}
        values = _read_values({**defaults, **record, "kind": kind}, {**shared_hints, **kind_hints}, where, sources)
        shared = {name: values[name] for name in values if name in shared_hints}
        if options is None:
            return cls(**shared)
        return cls(
            **shared, kind_options=options(**{name: values[name] for name in values if name not in shared_hints})
        )


def with_sharings(settings: Settings, share: str | Sequence[str] | None) -> Settings:
    """Return the settings with every arm in each of these sharings of layers.

    Args:
        settings: settings whose arms name no sharing.
        share: sharings as a list or as text, such as "none,all"; None changes nothing.

    RunError: `share` is no text, or the kind of run has no choice of sharing.
    """
    if share is None:
        return settings
    option = written_option("share")
    if not hasattr(settings.kind_options, "shared_arms"):
        problem = f"{option} needs an ALBERT, and model = {settings.model!r}"
        raise RunError(problem, f"add {written_option('recipe', 'albert-small')}, say, or leave {option} out")
    sharings = split_specs(share) if isinstance(share, str) else share
    if not isinstance(sharings, list | tuple) or not all(isinstance(each, str) for each in sharings):
        problem = f"{option} must be text or a list of text, not {share!r}"
        raise RunError(problem, 'write share="none,all" or share=["none", "all"]')
    return replace(settings, arms=settings.kind_options.shared_arms(settings.arms, sharings))


def _kind_name(record: Mapping[str, Any]) -> str:
    """Return the name of the kind of run: `kind`, else a `model` of that name.

    A decoder is the default.
    """
    kind: str = record.get("kind") or ""
    if kind:
        return kind
    model: str = record.get("model") or ""
    return model if model in kinds() else DECODER


def _read_values(
    record: Mapping[str, Any], hints: Mapping[str, Any], where: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    """Return settings as the types that their hints name.

    RunError: a setting is unknown or of another type; the message names its source.
    """
    values: dict[str, Any] = {}
    for name, value in record.items():
        source = sources.get(name, where)
        if name not in hints:
            names = suggest_choices(name, list(hints), "known:")
            raise RunError(
                f"unknown setting {name!r} in {source}", f"{names}; for those of other models add --recipe NAME"
            )
        values[name] = read_setting(hints[name], value, f"{name} in {source}")
        if name in ("arms", "text") and not values[name]:
            raise RunError(f"{name} in {source} must be a list of text", "write [tied, untied], say")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file, by name."""
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise RunError(f"cannot read {path}: {reason}", "name a YAML file") from None
    except YAML_ERRORS as error:
        raise RunError(f"{path} is not YAML: {one_line_message(error)}", "correct the file") from None
    if not isinstance(record, dict):
        raise RunError(f"{path} holds no settings", "write one `name: value` per line")
    return record


def recipes() -> list[str]:
    """Return the names of all recipes.

    A recipe has the settings of a published model; `--set` may change any of them.
    """
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, including its name."""
    if name not in recipes():
        raise RunError(f"no recipe {name!r}", suggest_choices(name, recipes()))
    return {**read_yaml(_RECIPES / f"{name}.yaml"), "recipe": name}
