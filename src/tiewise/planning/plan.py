"""`plan`: costs of every choice of boundary and sharing for one model, side by side.

plan("qwen3-0.6b", boundaries=("tied", "untied", "factored:128"), share=("none", "all")).record()
plan("path/to/config.json")
plan(Sizes(vocab=50_000, width=1024, layers=12, heads=16))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import read_json
from tiewise.core.errors import PlanError
from tiewise.core.measurement import rounded
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import PLAN
from tiewise.planning import catalogue
from tiewise.planning.architecture import Architecture, budget, thresholds
from tiewise.planning.certainty import marked, marked_parameters
from tiewise.planning.costs import DTYPES, Setting, all_costs
from tiewise.planning.evidence import near
from tiewise.planning.plan_rows import as_text, remarks
from tiewise.planning.read_config import Sizes, from_sizes, read

Described = str | os.PathLike[str] | Mapping[str, Any] | Sizes | catalogue.Model | Architecture


@dataclass(frozen=True, repr=False)
class Plan:
    """All choices of one model, side by side; its `repr` is their table, for a notebook."""

    name: str  # as the caller named the model
    architecture: Architecture
    setting: Setting
    choices: tuple[dict[str, Any], ...]  # every boundary with every sharing, as `record` has them

    def __repr__(self) -> str:
        return as_text(self.record())

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it. Null in place of the model's boundary where it has no head.

        All that is shown of a plan is made of this: see `plan_rows`.
        """
        a, ends = self.architecture, self.architecture.ends
        untied = budget(a, BoundarySpec("untied"), SharingSpec())
        body, atlas = None, None
        if not a.not_counted:
            body = untied.total - untied.tables
        nearest = catalogue.neighbours(ends.vocab, a.width, a.layers, but=(self.name,))
        sizes = {"width": a.width, "layers": a.layers, "vocab": ends.vocab}
        known_sizes = {name: size for name, size in sizes.items() if size}
        if ends.head:
            atlas = near(known_sizes, a.kind)
        record = {
            "model": self._model_record(),
            "setting": self.setting.record(),
            "choices": list(self.choices),
            "activation_bytes": self._activation_bytes(),
            "thresholds": thresholds(ends.vocab, ends.width, body, ends.head, a.estimated),
            "neighbours": [row.record() for row in nearest],
            "atlas": atlas,
        }
        return {**record, "notes": remarks(record)}

    def _model_record(self) -> dict[str, Any]:
        """Return the model as it is: sizes, boundary, parameters, and how certain they are."""
        a, ends = self.architecture, self.architecture.ends
        return {
            "name": self.name,
            "family": a.family,
            "width": a.width,
            "layers": a.layers,
            "vocab": ends.vocab,
            "table_width": ends.width,
            "share": str(a.sharing),
            "boundary": str(a.boundary) if ends.head else None,
            "estimated": a.estimated,
            "notes": list(a.notes),
            "not_counted": list(a.not_counted),
            "parameters": marked_parameters({"total": a.total, **a.parameters()}, a),
        }

    def _activation_bytes(self) -> dict[str, Any]:
        """Return bytes that the backward pass needs, without attention scores (fused attention) and dropout masks.

        Every application of a layer keeps its own, so that sharing does not change it. None if the layers are not
        known.
        """
        a = self.architecture
        bytes_per_value = self.setting.tokens * DTYPES[self.setting.dtype]
        inputs = sum(len(stack.layers) * stack.saved_per_token for stack in a.stacks)  # of products, norms, activations
        hidden_states = a.layers * a.width  # one per layer
        return {
            "kept": rounded(bytes_per_value * inputs) or None,
            "checkpointed": rounded(bytes_per_value * hidden_states) or None,
            "estimated": True,
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
        setting: tokens per step, dtype, ranks and initialisation.

    Raises:
        PlanError: the model is unknown, or its sizes are missing or contradict each other.
        SpecError: a boundary or sharing that cannot be read, or that this model cannot have.
        CheckpointError: a config that cannot be read.
    """
    name, architecture = described(model)
    setting = setting or Setting()
    specs = dict.fromkeys(BoundarySpec.parse(text) for text in boundaries)
    for spec in specs:
        spec.require(PLAN)
    sharing = [architecture.sharing]
    if share is not None:
        sharing = list(dict.fromkeys(SharingSpec.parse(each) for each in share))
    if architecture.layers == 0 and any(each.kind != "none" for each in sharing):
        raise PlanError(f"{name}: its layers are not told apart", "share can be planned for families that are known")
    plainest = budget(architecture, BoundarySpec("untied"), SharingSpec()).total
    choices = []
    for spec, shares in product(specs, sharing):
        counted = budget(architecture, spec, shares)
        saved = plainest - counted.total  # against the same model untied and with nothing shared
        figures = {
            "boundary": str(counted.boundary),
            "share": str(counted.sharing),
            "parameters": {"total": counted.total, "trainable": counted.trainable, **counted.parameters},
            "saved": saved,
            "saved_share": saved / plainest,
            **all_costs(architecture, counted, setting),
        }
        choices.append(marked(figures, architecture, counted))
    return Plan(name, architecture, setting, tuple(choices))


def described(model: Described) -> tuple[str, Architecture]:
    """Return (name, architecture) of anything that `plan` takes; raises the same errors."""
    if isinstance(model, Architecture):
        return model.family, model
    if isinstance(model, Sizes):
        return "sizes", from_sizes(model)
    if isinstance(model, os.PathLike):
        return str(model), read(config_of(Path(model)))
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or model.get("model_type") or "config"), read(model)
    if isinstance(model, catalogue.Model):
        return model.name, _of_row(model)
    if not isinstance(model, str):
        raise PlanError(f"a {type(model).__name__} cannot be planned", "give a name, a config or its path, or sizes")
    try:
        row = catalogue.find(model)
    except PlanError:
        if not os.path.exists(model):
            raise
        return described(Path(model))
    return row.name, _of_row(row)


def _of_row(row: catalogue.Model) -> Architecture:
    """Return the architecture of a row of the catalogue: by its config, else by V, D and L.

    Raises:
        PlanError: nobody was seen to say its vocabulary.
    """
    if row.config:
        architecture = read(row.config)
        if row.tied is None or not architecture.ends.head:
            return architecture
        # the published files decide: a class may tie what its checkpoints hold apart (T5 v1.1)
        return replace(architecture, ends=replace(architecture.ends, tied=bool(row.tied)))
    if row.vocab is None:
        raise PlanError(f"{row.name}: nobody was seen to say its vocabulary", "plan from sizes or a config.json")
    architecture = from_sizes(Sizes(row.vocab, row.width, row.layers), tied=row.tied is not False)
    note = f"{row.name} is known by V, D and L alone: a body of 12·D² per layer is assumed"
    return replace(architecture, notes=(note,))


def config_of(path: Path) -> dict[str, Any]:
    """Read a config.json, or that of a folder."""
    if path.is_dir():
        path = path / "config.json"
    config = read_json(str(path), most=2**24)
    if not isinstance(config, dict):
        raise PlanError(f"{path}: not a config", "a config.json is one JSON object")
    return config
