"""Outcome of loading a checkpoint with mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from tiewise.checkpoint.built_class import NotBuilt
from tiewise.checkpoint.claims import FLAG, TEXT_PARTS, family_type, first_count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import family_data, mlx_data, module_of
from tiewise.checkpoint.indexed_tensors import LAYER_COUNTS
from tiewise.checkpoint.loader_columns import (
    DEPENDS,
    DIFFERENT,
    ERROR,
    MLX,
    MLX_LETTERS,
    NO_HEAD,
    NOT_SERVED,
    SENTENCES,
    STATES,
    UNTIED,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import misfit_without_tables
from tiewise.checkpoint.mlx_fit import Misfit, MlxFit, MlxFolder, unknown_tensor
from tiewise.checkpoint.mlx_runs import MlxRun, config_value
from tiewise.checkpoint.mlx_shapes import PACKED_TYPE, MlxEndShapes, mlx_section
from tiewise.checkpoint.server_loading import server_outcome
from tiewise.checkpoint.untrusted import short


class MlxLoading:
    """Loading of one checkpoint with mlx-lm.

    The outcome is that of a recorded run with a tiny model of the family, else the outcome of most classes.
    """

    def __init__(self, facts: Facts, model_type: str) -> None:
        self.facts = facts
        self.record = family(model_type)
        self.flags = _possible_flags(facts, self.record.mlx_run)

    def outcome(self) -> LoaderOutcome:
        """Return the outcome of loading the checkpoint."""
        run = self.record.mlx_run
        if run is None or self.facts.is_tiewise_type:
            return self._outcome_of_most_classes()
        misfit = self._misfit(run)
        if misfit is not None:
            return self._outcome_of_misfit(misfit)
        by_flag = [self._outcome_of_run(run, flag) for flag in self.flags]
        words = sorted({outcome.outcome for outcome in by_flag})
        if len(words) == 1:
            return by_flag[0]
        return outcome_of(MLX, DEPENDS, f"It depends on the level whose flag it reads: {' or '.join(words)}.")

    @property
    def refuses_scales_of_head(self) -> bool:
        """Return whether mlx-lm stops at the scales of a packed head: its model has none."""
        run = self.record.mlx_run
        if run is None or self.facts.is_tiewise_type:
            return False
        if any(_loads_head(run, _words(run, flag)) for flag in self.flags):
            return False
        return self._packed_head_misfit(run) is not None

    def _outcome_of_most_classes(self) -> LoaderOutcome:
        """Return the outcome for a family without a recorded run."""
        flag = self.facts.claims.fixed
        if flag is None:
            flag = True in self.flags or self.flags <= {None}
        outcome = server_outcome(self.facts, MLX, flag)
        if not self.record.is_served_by_mlx:
            return outcome_of(MLX, NOT_SERVED)
        if outcome.outcome == NO_HEAD:
            return outcome
        misfit = self._misfit_without_run()
        if misfit is not None:
            return self._outcome_of_misfit(misfit)
        if self._was_tried_in_vain and outcome.outcome != ERROR:
            return outcome_of(MLX, DEPENDS, "A tiny model of this family, saved by transformers, did not load in it.")
        return outcome

    def _misfit_without_run(self) -> Misfit | None:
        """Return the reason why mlx-lm refuses a family without a run. None if it may load."""
        if not self.facts.judges_every_tensor:
            return None
        for key in self.record.needed_by_mlx:
            if key not in self.facts.config:
                return Misfit(f"Its model class needs {key} in the config.")
        return _misfit_of_types(self.facts)

    @property
    def _was_tried_in_vain(self) -> bool:
        """Return whether no run of the family is recorded although transformers has it."""
        return self.record.mlx_run is None and self.record.model_type in family_data()["families"]

    def _loader(self, source: str, words: tuple[str, ...] = MLX.tied) -> Loader:
        """Return the column of the version that was run, with this source."""
        return replace(MLX, versions=mlx_data()["version"], source=source, tied=words, untied=words)

    def _outcome_of_misfit(self, misfit: Misfit) -> LoaderOutcome:
        """Return the outcome for a checkpoint that mlx-lm refuses, or may refuse."""
        loader = self._loader("load_model of its utils.py: strict")
        word = DEPENDS
        if misfit.is_certain:
            word = ERROR
        return outcome_of(loader, word, misfit.sentence)

    def _outcome_of_run(self, run: MlxRun, flag: bool | None) -> LoaderOutcome:
        """Return the outcome for a flag of a family with a recorded run."""
        words = _words(run, flag)
        loader = self._loader(f"run on {mlx_data()['date']}", words)
        outcome = server_outcome(self.facts, loader, True)
        if outcome.outcome not in (ERROR, NOT_SERVED, NO_HEAD):
            has_head = _loads_head(run, words)
            misfit = self._shape_misfit(run, with_head=has_head)
            if not has_head:
                misfit = self._packed_head_misfit(run) or misfit
            if misfit is not None:
                return self._outcome_of_misfit(Misfit(misfit))
            if self._stores_other_head(run):
                outcome = outcome_of(loader, words[STATES.index(DIFFERENT)])
        if self.facts.quantised or outcome.outcome not in words or outcome.outcome == DEPENDS:
            return outcome
        is_as_run = outcome.sentence == SENTENCES[outcome.outcome]
        return replace(outcome, predicted=not is_as_run)

    def _stores_other_head(self, run: MlxRun) -> bool:
        """Return whether table and head differ in shape, type or packed parts. Both have the names of the class."""
        tensors = self.facts.folder.tensors
        table, head = (tensors.get(names[0]) for names in (run.inputs, run.heads))
        if table is None or head is None:
            return False
        one_is_packed = (table.dtype == PACKED_TYPE) != (head.dtype == PACKED_TYPE)
        return one_is_packed or table.shape != head.shape or bool(self.facts.parts_packed_apart)

    def _packed_head_misfit(self, run: MlxRun) -> str | None:
        """Return a sentence about the packed head of a model without a head. None without one.

        Such a class drops the numbers of a stored head, and refuses its scales: each of the 22 families did when run.
        """
        for module in sorted(_packed_modules(self.facts.folder.tensors.keys())):
            if f"{module}.weight" in run.heads:
                return unknown_tensor(f"{module}.scales")
        return None

    def _shape_misfit(self, run: MlxRun, with_head: bool) -> str | None:
        """Return a sentence about an end of another shape or name than in the class. None if all fit."""
        names = list(run.inputs)
        if with_head:
            names += run.heads
        misfit = MlxEndShapes(run, self.facts.config, self.facts.folder.tensors).misfit(names)
        return misfit or misfit_without_tables(self.facts, {*run.inputs, *run.heads}) or self._name_misfit(run)

    def _name_misfit(self, run: MlxRun) -> str | None:
        """Return a sentence about an end under another name than its class has. None if all names fit."""
        names_as_run = {*run.inputs, *run.heads}
        prefix = f"{self.facts.class_ends.prefix}."
        other_names = {name.removeprefix(prefix) for name in names_as_run} | {prefix + name for name in names_as_run}
        for table in self.facts.roles.tables:
            if table.name in other_names - names_as_run:
                names = " or ".join(sorted(names_as_run))
                return f"It loads strictly, and its model has no {short(table.name)} ({names} is its name)."
        return None

    def _misfit(self, run: MlxRun) -> Misfit | None:
        """Return why mlx-lm refuses a file, a tensor or a config key. None if all fit, or cannot be compared."""
        facts = self.facts
        if not facts.judges_every_tensor:
            return None
        misfit = self._misfit_of_files()
        if misfit is not None:
            return misfit
        names = self._names_in_files()
        packed = _packed_modules(names)
        if mlx_section(facts.config) is None:
            if "quantization_config" in facts.config:
                return Misfit("It was not run with this quantisation.", is_certain=False)
            if packed:
                return Misfit(unknown_tensor(f"{min(packed)}.scales"))
        misfit = MlxFit(run, self._folder(_without_prefixes(names, run.stripped))).misfit()
        if misfit is not None and misfit.is_certain:
            return misfit
        return self._shape_misfit_outside_ends(run, packed) or misfit

    def _names_in_files(self) -> set[str]:
        """Return the names of the tensors in the files that mlx-lm opens."""
        folder, names = self.facts.folder, set[str]()
        for file in folder.headers:
            if folder.single or file.startswith("model"):
                names |= folder.headers[file].tensors.keys()
        return names

    def _shape_misfit_outside_ends(self, run: MlxRun, packed: AbstractSet[str]) -> Misfit | None:
        """Return a misfit of a plain tensor outside both ends with another shape than in transformers.

        mlx-lm's class has the same shape for vectors and matrices of the recorded names. Axes of others may be moved.
        """
        load = self.facts.class_load
        if isinstance(load, NotBuilt):
            return None
        for mismatch in load.mismatched:
            name, shape = mismatch.name, mismatch.stored
            is_plain = name in self.facts.folder.tensors and module_of(name)[0] not in packed
            if is_plain and len(shape) < 3 and run.requires(name):
                return Misfit(f"{short(name)} has the shape {list(shape)}, and its model {list(mismatch.needed)}.")
        return None

    def _folder(self, names: AbstractSet[str]) -> MlxFolder:
        """Return what mlx-lm reads of the checkpoint."""
        config, level = self.facts.config, _text_level(self.facts)
        table, path, rows = self.facts.roles.input, "text_config.", None
        if level is config:
            path = ""
        if table is not None:
            rows = table.rows
        text_type = family_type(level) or self.record.ends.levels.get("text_config")
        packed = _packed_modules(names)
        of_packed = {f"{module}.{part}" for module in packed for part in ("scales", "biases")}
        return MlxFolder(
            frozenset(names) - of_packed,
            packed,
            config,
            level,
            path=path,
            layer_count=first_count([level], *LAYER_COUNTS) or _length_of_list(level, "layers_block_type"),
            rows=rows,
            defaults=family(text_type).keys.defaults,
        )

    def _misfit_of_files(self) -> Misfit | None:
        """Return a misfit of a file or type that mlx-lm or this check cannot read."""
        folder = self.facts.folder
        for fault in folder.faults:
            if fault.file.endswith(".safetensors") and folder.has(fault.file):
                return Misfit(f"{short(fault.file)} could not be read.", is_certain=False)
        for file in folder.extra:
            if file.startswith("model"):
                return Misfit(f"It opens {short(file)} as well, which was not read.", is_certain=False)
        return _misfit_of_types(self.facts)


def _words(run: MlxRun, flag: bool | None) -> tuple[str, ...]:
    """Return the recorded outcomes for a flag, one for each of `STATES`."""
    by_flag = dict(zip((True, False, None), run.ends.split(), strict=True))
    return tuple(MLX_LETTERS[letter] for letter in by_flag[flag])


def _loads_head(run: MlxRun, words: Sequence[str]) -> bool:
    """Return whether the model of a recorded run has parameters for a stored head."""
    return not {UNTIED, DEPENDS}.isdisjoint(words) or run.refuses_wrong_dropped_head


def _misfit_of_types(facts: Facts) -> Misfit | None:
    """Return a misfit of a stored type that mlx-lm does not read."""
    for tensor in facts.folder.tensors.values():
        if tensor.dtype == "F64":
            return Misfit(f"It does not read {short(tensor.name)}, as its type is F64.")
    return None


def _without_prefixes(names: AbstractSet[str], prefixes: Sequence[str]) -> frozenset[str]:
    """Return the names without a prefix that mlx-lm removes."""
    plain = set(names)
    for prefix in prefixes:
        plain = {name.removeprefix(prefix) for name in plain}
    return frozenset(plain)


def _length_of_list(level: Mapping[str, Any], key: str) -> int | None:
    """Return the length of a list in the config; None if it is absent or empty."""
    value = level.get(key)
    if not isinstance(value, list):
        return None
    return len(value) or None


def _packed_modules(names: AbstractSet[str]) -> frozenset[str]:
    """Return the modules that mlx-lm has quantised: those with a weight and its scales."""
    modules = set[str]()
    for name in names:
        module, parameter = module_of(name)
        if parameter == "scales" and f"{module}.weight" in names:
            modules.add(module)
    return frozenset(modules)


def _text_level(facts: Facts) -> Mapping[str, Any]:
    """Return the level of the config from which mlx-lm builds the text model."""
    part = facts.config.get("text_config")
    if isinstance(part, Mapping):
        return part
    return facts.config


def _possible_flags(facts: Facts, run: MlxRun | None) -> set[bool | None]:
    """Return the flags that mlx-lm may read from the config; None is an absent flag."""
    levels = [claim for claim in facts.claims.levels if not claim.level or claim.level in TEXT_PARTS]
    if run is not None and run.flag is not None:
        is_written, value = config_value(facts.config, run.flag)
    elif len(levels) > 1:  # it reads the flag of a composite's text part, whatever the root has
        return {claim.written for claim in levels}
    else:
        value = facts.levels[""].get(FLAG)
        is_written = FLAG in facts.levels[""]
    if not is_written:
        return {None}
    return {bool(value)}  # mlx-lm tests `if args.tie_word_embeddings`: null is false
