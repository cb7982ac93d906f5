"""`plan`: costs of every choice of boundary and sharing for one model, side by side.

plan("qwen3-0.6b", arms="tied,untied,factored:128", share="none,all").record()
plan("path/to/config.json")
plan(like="gpt2", width=1024)
plan(vocab=50_000, width=1024, layers=12, heads=16)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiewise.checkpoint.hub_names import checkpoint_path, is_hub_path
from tiewise.checkpoint.untrusted import read_json
from tiewise.core import Late
from tiewise.core.errors import PlanError, to_printable
from tiewise.core.measurement import rounded
from tiewise.core.result import PrintedResult, Row
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec, split_specs
from tiewise.core.spec_options import PLAN
from tiewise.core.written_options import written_option
from tiewise.planning import catalogue
from tiewise.planning.architecture import Architecture, budget, thresholds
from tiewise.planning.built_counts import count_built
from tiewise.planning.call_keywords import (
    PlanKeywords,
    is_config_path,
    read_setting_keywords,
    read_size_keywords,
    refuse_unknown,
    shows_keywords,
)
from tiewise.planning.certainty import mark_parameters, mark_uncertain
from tiewise.planning.config import written_sizes
from tiewise.planning.costs import DTYPES, Setting, activation_bytes, all_costs
from tiewise.planning.evidence import nearest_settings
from tiewise.planning.plan_rows import as_text, remarks
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.planning.recommendation import recommend, sharing_sentences, tying_saves

if TYPE_CHECKING:
    from typing_extensions import Unpack

ModelSource = str | os.PathLike[str] | Mapping[str, Any] | Sizes | catalogue.Model | Architecture


@dataclass(frozen=True, repr=False)
class Plan(PrintedResult):
    """Costs of all choices for one model. Its `repr` is their table, for a notebook.

    Attributes:
        name: as the caller named the model.
        architecture: parts of the model, as counted.
        setting: batch, length, ranks and data type of the counts.
        choices: every boundary with every sharing; the format is that of `record`.
        sharings: sharings of layers that the caller named; empty if the model keeps its own.

    >>> import tiewise
    >>> result = tiewise.plan("gpt2")
    >>> [choice["parameters"]["total"] for choice in result.choices]
    [124439808, 163037184]
    """

    name: str
    architecture: Architecture
    setting: Setting
    choices: tuple[dict[str, Any], ...]
    sharings: tuple[SharingSpec, ...] = ()

    def __str__(self) -> str:
        return as_text(self.record())

    def answer_text(self) -> str:
        """Return the recommendation."""
        return "\n".join(self.record()["recommendation"]["sentences"])

    def rows(self) -> list[Row]:
        """Return a row for every choice: parameters, saving, bytes and operations that are one number."""
        return [_flat_choice(choice) for choice in self.choices]

    def summary_rows(self) -> list[Row]:
        """Return a row for every choice: parameters and saving."""
        columns = ("boundary", "share", "total", "saved", "saved_share")
        return [{column: row[column] for column in columns} for row in self.rows()]

    def record(self) -> dict[str, Any]:
        """Return everything as a mapping that JSON can store.

        The terminal, the page and the notebook show only what this record contains (`plan_rows` writes it). The model's
        boundary is None if its class has no output head. `report/schemas/plan-1.json` is the schema.
        """
        architecture, ends = self.architecture, self.architecture.ends
        untied = budget(architecture, BoundarySpec("untied"), SharingSpec())
        body, atlas = None, None
        if not architecture.not_counted:
            body = untied.total - untied.tables
        nearest = catalogue.neighbours(ends.vocab, architecture.width, architecture.layers, but=(self.name,))
        sizes = {"width": architecture.width, "layers": architecture.layers, "vocab": ends.vocab}
        positive_sizes = {name: size for name, size in sizes.items() if size}
        if ends.head:
            atlas = nearest_settings(positive_sizes, architecture.kind)
        neighbours = [each.record() for each in nearest]
        recommendation = recommend(tying_saves(architecture), ends.head, neighbours, atlas)
        recommendation["sentences"][:0] = sharing_sentences(architecture, self.sharings)
        record = {
            "recommendation": recommendation,
            "model": self._model_record(),
            "setting": self.setting.record(),
            "choices": list(self.choices),
            "activation_bytes": self._activation_bytes(),
            "thresholds": thresholds(ends.vocab, ends.width, body, ends.head, architecture.estimated),
            "neighbours": neighbours,
            "atlas": atlas,
        }
        return {**record, "notes": remarks(record)}

    def _model_record(self) -> dict[str, Any]:
        """Return the unchanged model: sizes, boundary, parameters, and their certainty."""
        architecture, ends = self.architecture, self.architecture.ends
        return {
            "name": self.name,
            "family": architecture.family,
            "width": architecture.width,
            "layers": architecture.layers,
            "vocab": ends.vocab,
            "table_width": ends.width,
            "share": str(architecture.sharing),
            "boundary": str(architecture.boundary) if ends.head else None,
            "estimated": architecture.estimated,
            "notes": list(architecture.notes),
            "not_counted": list(architecture.not_counted),
            "parameters": mark_parameters(
                {"total": architecture.total, "active": architecture.active, **architecture.parameters()}, architecture
            ),
        }

    def _activation_bytes(self) -> dict[str, Any]:
        """Return bytes that the backward pass needs, without attention scores and dropout masks.

        Fused attention stores no scores. Every application of a layer stores its inputs separately, so sharing does not
        change this figure. None if the layers are not counted one by one.
        """
        architecture = self.architecture
        bytes_per_value = self.setting.tokens * DTYPES[self.setting.dtype]
        hidden_states = architecture.layers * architecture.width  # one per layer
        return {
            "kept": rounded(activation_bytes(architecture, self.setting)) or None,
            "checkpointed": rounded(bytes_per_value * hidden_states) or None,
            "estimated": True,
        }


@shows_keywords
def plan(
    model: ModelSource | None = None,
    arms: str | BoundarySpec | Iterable[str | BoundarySpec] = ("tied", "untied"),
    share: str | SharingSpec | Iterable[str | SharingSpec] | None = None,
    setting: Setting | None = None,
    *,
    build: bool = True,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Count every boundary with every sharing.

    The model is named, or given by its sizes. The keywords are the options of `tiewise plan`.

    Args:
        model: The path of a config.json or of its folder, a name of the catalogue, a config (a mapping), sizes, a model
            of the catalogue, or an architecture. A string that is no path of a config is a name.
        arms: Boundaries in the order of the columns: a list, or text such as "tied,untied,factored:128".
        share: Sharings of layers, as a list or as text. None: as the model itself shares its layers.
        like: A name of the catalogue, instead of `model`. A path is not looked up.
        setting: Tokens per step, dtype, ranks and initialisation, as one object instead of as keywords.
        build: If no reader counts a config exactly and transformers is installed, build its class without weights in
            a child process. False, or the environment variable TIEWISE_NO_BUILD=1: keep the marked estimate.
        vocab, width, layers: V, D and L of a generic decoder without a model, or other sizes of a catalogue model.
        heads, kv_heads: Attention heads, and heads of keys and values. By default 1, and as many as `heads`.
        ffn: Width of the feed-forward layer. By default 4 D.
        gated: The feed-forward layer has a gate, a third matrix.
        batch, length: Sequences of one rank in one step (8), and tokens of a sequence (1024).
        dtype: Type of weights and gradients: "float32" (default), "bfloat16" or "float16".
        init: Standard deviation of weights at the start. By default the config's.
        world, tp, fsdp: Number of ranks, ranks that split the vocabulary, and ranks that shard every parameter.

    Returns:
        a `Plan`; `.record()` gives everything for JSON, its `repr` is the table of all choices.

    Raises:
        PlanError: The model is unknown, its sizes are missing or contradict each other, or a keyword is unknown.
        SpecError: A boundary or sharing cannot be read, or this model cannot have it.
        CheckpointError: A config cannot be read.

    >>> from tiewise import plan
    >>> record = plan(vocab=50_000, width=1024, layers=12, heads=16).record()
    >>> [(choice["boundary"], choice["saved"]) for choice in record["choices"]]
    [('tied', 51200000), ('untied', 0)]
    >>> plan("gpt2", width=1024, layers=24, heads=16).architecture.total  # the sizes of GPT-2 medium
    354823168
    """
    refuse_unknown(keywords)
    # a class that is built does not show its layers one by one, so a plan of sharing keeps the estimate
    name, architecture = resolve_model(read_size_keywords(model, keywords), builds=build and share is None)
    setting = read_setting_keywords(setting, keywords)
    specs = dict.fromkeys(BoundarySpec.parse(arm) for arm in _one_by_one(arms))
    for spec in specs:
        spec.require(PLAN)
    sharing: tuple[SharingSpec, ...] = (architecture.sharing,)
    if share is not None:
        sharing = tuple(dict.fromkeys(SharingSpec.parse(each) for each in _one_by_one(share)))
    if architecture.layers == 0 and any(each.kind != "none" for each in sharing):
        raise PlanError(f"{name}: tiewise does not know its layers one by one", f"leave {written_option('share')} out")
    untied_total = budget(architecture, BoundarySpec("untied"), SharingSpec()).total
    choices = []
    for spec, shares in product(specs, sharing):
        counts = budget(architecture, spec, shares)
        saved = untied_total - counts.total  # against the same model untied and with nothing shared
        figures = {
            "boundary": str(counts.boundary),
            "share": str(counts.sharing),
            "parameters": {
                "total": counts.total,
                "trainable": counts.trainable,
                "active": counts.active,
                **counts.parameters,
            },
            "saved": saved,
            "saved_share": saved / untied_total,
            **all_costs(architecture, counts, setting),
        }
        choices.append(mark_uncertain(figures, architecture, counts))
    return Plan(name, architecture, setting, tuple(choices), sharing if share is not None else ())


def _flat_choice(choice: Mapping[str, Any]) -> Row:
    """Return the figures of a choice that are one number or text each.

    Those of `parameters` have their own names.
    """
    plain = {name: value for name, value in choice.items() if not isinstance(value, Mapping | list | tuple)}
    return {**plain, **choice["parameters"]}


def _one_by_one(specs: Any) -> Iterable[Any]:
    """Return specs one by one, also if they are one text or one object."""
    if isinstance(specs, str):
        return split_specs(specs)
    if isinstance(specs, BoundarySpec | SharingSpec):
        return [specs]
    if not isinstance(specs, Iterable):
        raise PlanError(f"a {type(specs).__name__} names no arms", 'write arms="tied,untied" or a list of them')
    return specs


def resolve_model(model: ModelSource, builds: bool = False) -> tuple[str, Architecture]:
    """Return the name and the architecture of anything that `plan` accepts.

    If a config `builds` and no reader counts it exactly, the installed transformers is asked. Raises as `plan` does.
    """
    if isinstance(model, Architecture):
        return model.family, model
    if isinstance(model, Sizes):
        return "sizes", from_sizes(model)
    if isinstance(model, os.PathLike):
        path = checkpoint_path(model)
        return str(path), _read_or_build(read_config_file(path), builds)
    if isinstance(model, Mapping):
        name = to_printable(str(model.get("_name_or_path") or model.get("model_type") or "config"))
        return name, _read_or_build(model, builds)
    if isinstance(model, catalogue.Model):
        return model.name, _architecture_of_listed(model)
    if isinstance(model, str):
        return resolve_model(named_model(model), builds)
    return resolve_model(_config_of(model), builds)


def _read_or_build(config: Mapping[str, Any], builds: bool) -> Architecture:
    """Return the architecture of a config.

    Its reader counts it, else the class that is built, else it is estimated.
    """
    try:
        architecture = read(config)
    except PlanError as error:
        if not builds:
            raise
        built = count_built(config)
        if isinstance(built, Architecture):
            return built
        if built.is_stopped:
            raise PlanError(f"{error.problem}, and {built.reason}", error.remedy) from None
        raise
    is_exact = not architecture.estimated and not architecture.not_counted
    if is_exact or not builds:
        return architecture
    return _count_or_keep(config, architecture)


def _count_or_keep(config: Mapping[str, Any], estimate: Architecture) -> Architecture:
    """Return the counts of the class that is built for a config, else the estimate."""
    built = count_built(config)
    if isinstance(built, Architecture):
        return built
    if built.is_refused:
        note = f"The installed transformers refuses this config: {built.reason}"
        return replace(estimate, notes=(*estimate.notes, note))
    if built.is_stopped:
        note = f"The class of the installed transformers was not counted: {built.reason}."
        return replace(estimate, notes=(*estimate.notes, note))
    return estimate


def named_model(text: str) -> Path | catalogue.Model:
    """Return what a text names: the place of a config, else a model of the catalogue.

    Raises:
        PlanError: it names neither.
    """
    if is_config_path(text):
        return checkpoint_path(text)
    try:
        return catalogue.find(text)
    except PlanError as error:
        if os.path.exists(text):
            return Path(text)  # whoever reads it reports the missing config.json
        raise PlanError(f"{error.problem}, and no file or folder has this path", error.remedy) from None


def _config_of(model: Any) -> Mapping[str, Any]:
    """Return a config object of transformers as a mapping. Raises PlanError for anything else."""
    if hasattr(model, "to_diff_dict"):
        config: Mapping[str, Any] = model.to_dict()
        return config
    raise PlanError(f"a {type(model).__name__} cannot be planned", _right_call(model))


def _right_call(model: object) -> str:
    """Return the call that plans what a caller gave, for the error of `plan`."""
    if hasattr(model, "named_parameters"):
        return "give its config: tiewise.plan(model.config)"
    sizes = "tiewise.plan(vocab=32_000, width=1024, layers=12)"
    return f'give a name of the catalogue, a config or its path, or sizes: tiewise.plan("gpt2"), or {sizes}'


def _architecture_of_listed(listed: catalogue.Model) -> Architecture:
    """Return the architecture of a catalogue model: from its config, else from V, D and L.

    Raises:
        PlanError: The catalogue does not know the model's vocabulary size.
    """
    if listed.config:
        architecture = read(listed.config)
        if listed.tied is None or not architecture.ends.head:
            return architecture
        # the published files decide: a class may tie two tables that its checkpoints store separately (T5 v1.1)
        return replace(architecture, ends=replace(architecture.ends, tied=bool(listed.tied)))
    if listed.vocab is None:
        raise PlanError(
            f"no source gives the vocabulary size of {listed.name}",
            f"give {written_sizes()}, or a config.json",
        )
    architecture = from_sizes(Sizes(listed.vocab, listed.width, listed.layers), tied=listed.tied is not False)
    note = f"Only V, D and L of {listed.name} are known. Each layer is estimated as 12·D² parameters."
    return replace(architecture, notes=(note,))


CONFIG, MOST_BYTES = "config.json", 2**24
hf_folder = Late("tiewise.checkpoint.hf_folder")  # imported late: it needs NumPy


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config.json, given its path, its folder or its address hf://.

    Raises:
        PlanError: The file is not one JSON object.
        CheckpointError: The file cannot be read.
    """
    if is_hub_path(path):
        repository = hf_folder.open_repository(path, hf_folder.HubReading())
        config: dict[str, Any] = hf_folder.json_object(repository, CONFIG, most=MOST_BYTES)
        return config
    if path.is_dir():
        path = path / CONFIG
    stored = read_json(str(path), most=MOST_BYTES)
    if not isinstance(stored, dict):
        raise PlanError(f"{path}: not a config", "a config.json is one JSON object")
    return stored
