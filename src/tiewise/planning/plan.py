"""`plan`: what every choice of boundary and sharing costs one model, side by side.

plan("qwen3-0.6b", boundaries=("tied", "untied", "factored:128"), share=("none", "all")).record()
plan("path/to/config.json")
plan(Sizes(vocab=50_000, width=1024, layers=12, heads=16))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import read_json
from tiewise.core.errors import PlanError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning import catalogue, memory, world
from tiewise.planning.architecture import Architecture
from tiewise.planning.budget import Budget, budget, native
from tiewise.planning.first_loss import FirstLoss, first_loss
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.planning.thresholds import Threshold, thresholds

Described = str | os.PathLike[str] | Mapping[str, Any] | Sizes | catalogue.Model | Architecture
UNTIED = BoundarySpec("untied")


@dataclass(frozen=True)
class Setting:
    """Under what a plan counts. Tokens are one rank's in one step; `std` draws body and tables (None: the config's)."""

    tokens: memory.Tokens = memory.Tokens()  # noqa: RUF009 - frozen
    dtype: str = "float32"
    world: world.World = world.World()  # noqa: RUF009 - frozen
    std: float | None = None


@dataclass(frozen=True)
class Choice:
    """One choice's figures. `saved` is against the same model untied and with nothing shared."""

    budget: Budget
    saved: int
    saved_share: float
    checkpoint: Mapping[str, int]
    training: Mapping[str, memory.TrainingBytes]
    logits: memory.LogitsBytes | None
    flops: memory.Flops
    decode: memory.DecodeBytes | None
    first_loss: FirstLoss | None
    ranks: tuple[world.Rank, ...]
    pipeline_tie: int

    @property
    def name(self) -> str:
        """Boundary and sharing in their written forms."""
        return f"{self.budget.boundary}, share {self.budget.sharing}"

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        b = self.budget
        return {
            "boundary": str(b.boundary),
            "share": str(b.sharing),
            "parameters": {"total": b.total, "trainable": b.trainable, **b.parameters},
            "saved": self.saved,
            "saved_share": self.saved_share,
            "checkpoint_bytes": dict(self.checkpoint),
            "training_bytes": {name: {**asdict(row), "total": row.total} for name, row in self.training.items()},
            "logits_bytes": asdict(self.logits) if self.logits else None,
            "flops_per_token": asdict(self.flops),
            "decode_bytes": asdict(self.decode) if self.decode else None,
            "first_loss": asdict(self.first_loss) if self.first_loss else None,
            "ranks": [asdict(rank) for rank in self.ranks],
            "pipeline_tie_bytes": self.pipeline_tie,
        }


@dataclass(frozen=True)
class Plan:
    """All choices of one model. `name` is what the model was asked for by; `as_it_is` its own boundary and sharing."""

    name: str
    architecture: Architecture
    setting: Setting
    as_it_is: tuple[BoundarySpec, SharingSpec]
    choices: tuple[Choice, ...]
    activations: memory.ActivationBytes
    thresholds: tuple[Threshold, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know before believing a number."""
        return self.architecture.notes

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it; an infinite threshold is null, and the model's boundary where it has no head."""
        a, s = self.architecture, self.setting
        return {
            "model": {
                "name": self.name,
                "family": a.family,
                "vocab": a.ends.vocab,
                "width": a.width,
                "table_width": a.ends.width,
                "layers": a.layers,
                "boundary": str(self.as_it_is[0]) if a.ends.head else None,
                "share": str(self.as_it_is[1]),
                "parameters": {"total": a.total, **a.parameters()},
                "estimated": a.estimated,
                "notes": list(a.notes),
            },
            "setting": {**asdict(s), "tokens": {**asdict(s.tokens), "count": s.tokens.count}},
            "choices": [choice.record() for choice in self.choices],
            "activation_bytes": {**asdict(self.activations), "estimated": True},
            "thresholds": [_finite(asdict(threshold)) for threshold in self.thresholds],
        }


def plan(
    model: Described,
    boundaries: Iterable[str | BoundarySpec] = ("tied", "untied"),
    share: Iterable[str | SharingSpec] | None = None,
    setting: Setting | None = None,
) -> Plan:
    """Count every boundary with every sharing.

    Args:
        model: a name of the catalogue, a config.json or its folder, a config (a mapping), sizes, a row of the
            catalogue, or an architecture. A text is a name first, then a path.
        boundaries: written forms of boundaries, in the order in which they are shown.
        share: written forms of sharing; None is how the model itself shares.
        setting: tokens per step, dtype, world and initialisation.

    Raises:
        PlanError: the model is unknown, or its sizes are missing or contradict each other.
        SpecError: a boundary or sharing that cannot be read, or that this model cannot have.
        CheckpointError: a config that cannot be read.
    """
    name, architecture = described(model)
    setting = setting or Setting()
    memory.dtype_bytes(setting.dtype)
    if setting.std is not None and not 0 < setting.std < float("inf"):
        raise PlanError(f"std {setting.std}", "give a positive number")
    specs = list(dict.fromkeys(BoundarySpec.parse(text) for text in boundaries))
    sharing = [architecture.sharing] if share is None else list(dict.fromkeys(map(SharingSpec.parse, share)))
    if architecture.layers == 0 and any(each.kind != "none" for each in sharing):
        raise PlanError(f"{name}: its layers are not told apart", "share can be planned for families that are known")
    plainest, ends = budget(architecture, UNTIED, SharingSpec()), architecture.ends
    return Plan(
        name,
        architecture,
        setting,
        (native(architecture), architecture.sharing),
        tuple(
            _choice(architecture, budget(architecture, *each), plainest, setting) for each in product(specs, sharing)
        ),
        memory.activation_bytes(architecture, setting.tokens.count, setting.dtype),
        thresholds(ends.vocab, ends.width, plainest.total - plainest.tables, ends.head),
    )


def described(model: Described) -> tuple[str, Architecture]:
    """(what to call it, its architecture) of anything that `plan` takes.

    Raises:
        PlanError: the model is unknown, or its sizes are missing or contradict each other.
        CheckpointError: a config that cannot be read.
    """
    if isinstance(model, Architecture):
        return model.family, model
    if isinstance(model, Sizes):
        return "sizes", from_sizes(model)
    if isinstance(model, os.PathLike):
        return str(model), read(config_of(Path(model)))
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or model.get("model_type") or "config"), read(model)
    row = model
    if isinstance(model, str):
        try:
            row = catalogue.find(model)
        except PlanError:
            if not os.path.exists(model):
                raise
            return described(Path(model))
    if not isinstance(row, catalogue.Model):
        raise PlanError(f"a {type(row).__name__} cannot be planned", "give a name, a config or its path, or sizes")
    return row.name, _of_row(row)


def config_of(path: Path) -> dict[str, Any]:
    """Read a config.json, or that of a folder.

    Raises:
        PlanError: it is no JSON object.
        CheckpointError: it cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json(str(file), most=2**24)
    if not isinstance(config, dict):
        raise PlanError(f"{file}: not a config", "a config.json is one JSON object")
    return config


def _of_row(row: catalogue.Model) -> Architecture:
    if row.config:
        found = read(row.config)
        known = row.tied is not None and found.ends.head
        # the published files decide: a class may tie what its checkpoints hold apart (T5 v1.1)
        return replace(found, ends=replace(found.ends, tied=bool(row.tied))) if known else found
    if row.vocab is None:
        raise PlanError(
            f"{row.name}: nobody was seen to say its vocabulary", "plan from sizes, or from its config.json"
        )
    found = from_sizes(Sizes(row.vocab, row.width, row.layers), tied=row.tied is not False)
    return replace(found, notes=(f"{row.name} is known by V, D and L alone: a body of 12·D² per layer is assumed",))


def _choice(architecture: Architecture, counted: Budget, plainest: Budget, setting: Setting) -> Choice:
    spec, tokens, dtype = counted.boundary, setting.tokens, setting.dtype
    ends = architecture.ends
    out_width = spec.table_widths(ends.width)[1]
    saved = plainest.total - counted.total
    return Choice(
        counted,
        saved,
        saved / plainest.total,
        memory.checkpoint_bytes(counted.total),
        memory.training_bytes(counted.total, counted.trainable, dtype),
        memory.logits_bytes(tokens.count, ends.vocab, out_width, dtype) if ends.head else None,
        memory.flops_per_token(counted, architecture, tokens.length),
        memory.decode_bytes(counted, architecture, tokens.length, dtype),
        first_loss(architecture, spec, counted.sharing, setting.std, tokens.length),
        world.ranks(counted, setting.world, tokens, dtype, ends.vocab),
        world.pipeline_tie_bytes(counted, dtype),
    )


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value == float("inf") else value for key, value in record.items()}
