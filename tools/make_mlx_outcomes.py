"""Write src/tiewise/checkpoint/data/mlx_lm.json: what mlx-lm loads from each family.

    python tools/make_mlx_outcomes.py             writes the file (ten minutes; needs mlx-lm[cpu] in this environment)
    python tools/make_mlx_outcomes.py llama …     runs these families alone and prints their entries
    python tools/make_mlx_outcomes.py --update llama …    writes them into the file as well

transformers saves a tiny model of each family. The tool loads it with mlx-lm in each state of the loader matrix, with
the flag true, false and absent at every level. Then it takes the state that loads, and leaves out one tensor, adds one,
removes a key of the config, sets it to null, or builds the class with another setting. The file records each answer.
A family whose tiny model loads in no state, neither under the names that transformers writes nor without the body's
prefix, is left out: mlx-lm does not read its config, which says nothing about its tables.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm import models
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING, _get_classes, load_model

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests" / "boundary")]
import random_folders as folders  # noqa: E402
from observed_loads import observe_mlx  # noqa: E402

from tiewise.checkpoint.claims import FLAG  # noqa: E402
from tiewise.checkpoint.families import family  # noqa: E402
from tiewise.checkpoint.family_record import family_data  # noqa: E402
from tiewise.checkpoint.loader_columns import DIFFERENT, MLX_LETTERS, NONE, STATES  # noqa: E402
from tiewise.checkpoint.mlx_runs import decides_on_tensors, kind_of_value, numbered, pattern_of, text_layers  # noqa: E402

TARGET = ROOT / "src" / "tiewise" / "checkpoint" / "data" / "mlx_lm.json"
ABOUT = (
    "Made by tools/make_mlx_outcomes.py; do not edit. served: model types of which mlx-lm has a model, by its own name "
    "or by the one that it takes for it. needs: config keys without which it refuses a model type of transformers "
    "that is not among the families. families: loads of tiny models; other families were not run. ends: by the "
    "flag true, false and absent, a letter for each state of the tables (no head, equal head, other head, head alone, "
    "neither): t tied, u both as stored, d head dropped, e load error, ? not seen. inputs, heads: names of the tables. "
    "shape: config keys of the rows and the width of its input table, which are those of its head too. "
    "flag: config key of the flag that it reads, null if that was not found. "
    "tensors: names outside layers, # for a number, ? after one that may be absent. layers: the same for each kind of "
    "layer, by the name of the list. "
    "skipped: further tensors of a layer that it passes by. skipped_parts: beginnings of names that it passes by. "
    "more_layers: whether it passes by a layer beyond the config's number. converted: its own names, if it loads them. "
    "keys: config keys; one of each group must be there. by_default: keys whose default did not fit the tiny model. "
    "not_null: keys that may not be null. values: kinds of the other values of the text level. "
    "settings: key=value with which the class was also built: the tensors that it then has more or less, or error; "
    "kinds: numbers of the kinds of layers that a change is about, if not all. "
    "unpackable: modules that it does not load with packed numbers. "
    "refuses_wrong_dropped_head: whether it refuses another shape of a head that it drops. "
    "stripped: prefixes that it removes if all names have them."
)
FLAGS = (True, False, None)
LETTERS = {word: letter for letter, word in MLX_LETTERS.items()}
ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OF_TENSORS = ("Expected shape", "parameters not in model", "Missing ")  # errors on tensors that do not fit the class
OTHER_PARTS = ("vision", "visual", "audio", "multi_modal")  # beginnings of modules without text
UNUSED_PARTS = ("mtp", "vision_tower", "vision_model", "visual", "audio_tower", "multi_modal_projector")
OUTER_EXTRA = ("rotary_emb.inv_freq", "lm_head.bias", "extra.weight")
NAMES = frozenset([FLAG, "model_type", "architectures"])
EXTRA = ("self_attn.rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
SIZES = {"num_key_value_heads": 2, "head_dim": 16}
ROPE = {"linear": {}, "dynamic": {}, "yarn": {"original_max_position_embeddings": 32}}
ROPE |= {"llama3": {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}


def main() -> None:
    """Write the file, or print single entries."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    chosen = [argument for argument in sys.argv[1:] if argument != "--update"]
    if chosen and "--update" not in sys.argv:
        for kind in chosen:
            print(kind, json.dumps(entry(kind), indent=1))
        return
    modules = {module.name for module in pkgutil.iter_modules(models.__path__)}
    served = sorted({*modules, *(kind for kind, name in MODEL_REMAPPING.items() if name in modules)})
    families = json.loads(TARGET.read_text("utf-8"))["families"] if chosen else {}
    for kind in chosen or served:
        if kind not in family_data()["families"]:
            continue
        record = entry(kind)
        families.pop(kind, None)
        if record is not None:
            families[kind] = record
        print(kind, "not run" if record is None else record["ends"], file=sys.stderr)
    write(served, families)


def write(served: Sequence[str], families: Mapping[str, Any]) -> None:
    """Write the file."""
    data = {"about": ABOUT, "version": mlx_lm.__version__, "date": date.today().isoformat(), "served": served}
    data["needs"] = {kind: needed_keys(kind) for kind in served if kind in family_data()["families"].keys() - families}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(record)}" for kind, record in sorted(families.items()))
    TARGET.write_text("{\n" + ",\n".join([*lines, f'"families": {{\n{rows}\n}}']) + "\n}\n", "utf-8")


def needed_keys(kind: str) -> list[str]:
    """Return the config keys that mlx-lm's arguments of a model type have no default for. Empty if not known."""
    remapped = {model_type for model_type, _ in MODEL_ARCHITECTURE_REMAPPING}
    try:
        _, arguments = _get_classes({"model_type": kind})
    except SystemExit:  # one of its files calls sys.exit if a package is missing
        return []
    if kind in remapped or arguments.from_dict.__func__ is not BaseModelArgs.from_dict.__func__:
        return []
    parameters = inspect.signature(arguments).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.name != "model_type"]


def entry(kind: str) -> dict[str, Any] | None:
    """Return the record of one family; None if no state of its tiny model loads."""
    name = next((name for name in family(kind).ends.classes if name.endswith(ENDINGS)), None)
    if name is None:
        return None
    try:
        checkpoint = folders.copy_of(folders.saved_class(name))
    except folders.CannotBuildError as error:
        print(f"{kind}: {error}"[:200], file=sys.stderr)
        return None
    checkpoint.config = folders.published(checkpoint.config)
    if not checkpoint.heads or FLAG not in checkpoint.config.get("text_config", {FLAG: None}):
        return None  # no ends, or no flag at the level that mlx-lm reads
    for variant in (checkpoint, without_prefix(checkpoint)):
        run = FamilyRun(variant)
        letters = run.letters
        if letters is not None:
            return {"ends": letters} | run.record()
    return None


@dataclass(frozen=True)
class LayerKinds:
    """Kinds of layers of a tiny model."""

    kinds: dict[str, list[list[str]]]  # {name of a list of layers: patterns of each kind}
    of_layer: dict[tuple[str, int], int]  # {(name of the list, number of a layer): number of its kind}


class Patterns:
    """Patterns of a model's tensors, and the layers with each of them."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.all = pattern_set(names)
        self._layers: dict[str, set[tuple[str, int]]] = {}
        for name in names:
            place = numbered(name)
            if place is not None:
                self._layers.setdefault(pattern_of(name), set()).add((place.layers, place.number))

    def layers_with(self, pattern: str) -> set[tuple[str, int]]:
        """Return (name of the list, number) of the layers with a tensor of this pattern."""
        return self._layers.get(pattern, set())


def without_prefix(checkpoint: folders.Checkpoint) -> folders.Checkpoint:
    """Return a copy with the names of the body alone."""
    bare = folders.copy_of(checkpoint)
    folders.drop_prefix(bare, folders.random.Random(0))
    return bare


class FamilyRun:
    """Loads of one family's tiny model with mlx-lm."""

    def __init__(self, checkpoint: folders.Checkpoint) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def letters(self) -> str | None:
        """Return the letters of the states in three groups of five; None if none loads."""
        groups = []
        for flag in FLAGS:
            groups.append("".join(self._letter(folders.State(flag, tables)) for tables in STATES))
        if set("".join(groups)).isdisjoint("ut"):
            return None
        return " ".join(groups)

    def _letter(self, state: folders.State) -> str:
        """Return the letter of a state; a question mark if the loaded model has no forward pass that shows its head."""
        return self._letter_of(folders.in_state(self.checkpoint, state))

    def _letter_of(self, checkpoint: folders.Checkpoint) -> str:
        """Return the letter of the outcome of loading a checkpoint."""
        words = observed(checkpoint)
        if not words:
            return "?"
        return LETTERS.get(words[0], "e")

    @cached_property
    def healthy(self) -> folders.Checkpoint:
        """Return the checkpoint in a state that loads: untied if possible."""
        assert self.letters is not None
        groups = dict(zip(FLAGS, self.letters.split(), strict=True))
        for flag in (False, True, None):
            for tables, letter in zip(STATES, groups[flag], strict=True):
                if letter in ("u", "t"):
                    return folders.in_state(self.checkpoint, folders.State(flag, tables))
        raise AssertionError("a family is recorded only if a state loads")

    def record(self) -> dict[str, Any]:
        """Return what else was observed: tensors, keys and settings."""
        keys, by_default = self._keys()
        return {
            "inputs": self.checkpoint.inputs,
            "heads": self.checkpoint.heads,
            "shape": self._shape(),
            "flag": self._flag_key(),
            "tensors": self._outer(),
            "layers": self._layers(),
            "skipped": self._skipped(),
            "skipped_parts": self._skipped_parts(),
            "more_layers": self._passes_by_more_layers(),
            "converted": self._converted(),
            "keys": keys,
            "by_default": by_default,
            "not_null": self._not_null(),
            "values": self._values(),
            "settings": dict(self._settings()),
            "unpackable": self._unpackable(),
            "refuses_wrong_dropped_head": self._refuses_wrong_dropped_head(),
            "stripped": self._stripped(),
        }

    @cached_property
    def _ends(self) -> set[str]:
        """Return the names of input tables and head."""
        return {*self.checkpoint.inputs, *self.checkpoint.heads}

    def _shape(self) -> list[str | None]:
        """Return the config keys of the rows and the width of mlx-lm's input table; None for one that is not found.

        The class is built with one key doubled, and with the number of attention heads doubled as well.
        """
        table = self._own_name(self.checkpoint.inputs)
        usual = shape_in_class(self.healthy.config, table)
        assert usual is not None
        keys: list[str | None] = [None, None]
        heads = {key: 2 * value for key, value in self._all_keys.items() if key.endswith("num_attention_heads")}
        for key, value in self._all_keys.items():
            for further in ({}, heads):
                changed = self._with_keys(self._all_keys | further | {key: doubled(value)})
                shape = shape_in_class(changed.config, table)
                for axis in (0, 1):
                    if shape is not None and shape[axis] == 2 * usual[axis] == doubled(value):
                        keys[axis] = key
        return keys

    def _flag_key(self) -> str | None:
        """Return the key of the flag that mlx-lm reads, with its path; None if no level explains every outcome."""
        assert self.letters is not None
        if not self._path:
            return FLAG
        groups = dict(zip(FLAGS, self.letters.split(), strict=True))
        explained = {0: FLAG, 1: f"{self._path}.{FLAG}"}  # by the level: root or text
        for flags in itertools.product(FLAGS, repeat=2):
            for tables in (NONE, DIFFERENT):
                letter = self._letter_of(self._with_flags(tables, flags))
                for level in list(explained):
                    if groups[flags[level]][STATES.index(tables)] != letter:
                        del explained[level]
        return next(iter(explained.values()), None)

    def _with_flags(self, tables: str, flags: Sequence[bool | None]) -> folders.Checkpoint:
        """Return the checkpoint in a state, with a flag at the root and one at the text level."""
        checkpoint = folders.in_state(self.checkpoint, folders.State(None, tables))
        for level, flag in zip((checkpoint.config, checkpoint.config[self._path]), flags, strict=True):
            if flag is not None:
                level[FLAG] = flag
        return checkpoint

    def _own_name(self, names: Sequence[str]) -> str:
        """Return mlx-lm's name of the parameter that a stored tensor of these names fills."""
        values = self.healthy.stored(names)
        with tempfile.TemporaryDirectory() as path:
            self.healthy.write(Path(path))
            parameters = loaded_parameters(Path(path))
        return next(name for name, loaded in parameters.items() if np.array_equal(loaded, values))

    def _outer(self) -> list[str]:
        """Return the patterns of tensors outside layers, without the two ends."""
        names = [name for name in self.checkpoint.tensors if name not in self._ends and numbered(name) is None]
        return [*(self._marked(name, [name]) for name in names), *self._passed_by()]

    def _passed_by(self) -> list[str]:
        """Return names outside layers that the class lacks and mlx-lm passes by, marked as absent."""
        names = [prefix + name for prefix in self._prefixes for name in OUTER_EXTRA]
        return [f"{name}?" for name in names if name not in self.checkpoint.tensors and loads(self._with_tensor(name))]

    @property
    def _prefixes(self) -> list[str]:
        """Return the beginnings of outer names: none, and the body's."""
        return list(dict.fromkeys(["", self.checkpoint.prefix]))

    def _layers(self) -> dict[str, list[list[str]]]:
        """Return {name of a list of layers: patterns of each kind of layer}."""
        return self._layer_kinds.kinds

    @cached_property
    def _layer_kinds(self) -> LayerKinds:
        """Return the kinds of layers, and the kind of each layer of the tiny model."""
        found = LayerKinds({}, {})
        for (layers, number), names in layers_of(self.checkpoint.tensors).items():
            patterns = sorted(self._marked(pattern, stored) for pattern, stored in names.items())
            kinds = found.kinds.setdefault(layers, [])
            if patterns not in kinds:
                kinds.append(patterns)
            found.of_layer[layers, number] = kinds.index(patterns)
        return found

    def _marked(self, pattern: str, names: Sequence[str]) -> str:
        """Return a pattern, with a question mark if mlx-lm loads the model without these tensors."""
        fewer = folders.copy_of(self.healthy)
        for name in names:
            fewer.tensors.pop(name, None)
        return f"{pattern}?" if loads(fewer) else pattern

    def _skipped(self) -> list[str]:
        """Return the suffixes of extra tensors of a layer that mlx-lm passes by."""
        skipped = []
        layers, number = next(iter(layers_of(self.checkpoint.tensors)))
        for name in EXTRA:
            more = folders.copy_of(self.healthy)
            more.tensors[f"{layers}.{number}.{name}"] = torch.ones(8)
            if loads(more):
                skipped.append(name)
        return skipped

    def _skipped_parts(self) -> list[str]:
        """Return the beginnings of names, such as "vision_tower.", behind which mlx-lm passes by any tensor."""
        parts = []
        for name in self.checkpoint.tensors:
            start = next((part for part in OTHER_PARTS if f".{part}" in f".{name}"), "")
            if start:
                before, _, after = name.partition(start)
                parts.append(f"{before}{start}{after.partition('.')[0]}.")
        parts += [f"{prefix}{part}." for prefix in self._prefixes for part in UNUSED_PARTS]
        return [part for part in dict.fromkeys(parts) if self._passes_by(part)]

    def _passes_by(self, part: str) -> bool:
        """Return whether mlx-lm passes by tensors whose names begin so, outside layers and in one."""
        names = (f"{part}extra.weight", f"{part}layers.0.norm.weight")
        return all(loads(self._with_tensor(name)) for name in names)

    def _with_tensor(self, name: str) -> folders.Checkpoint:
        """Return the healthy checkpoint with one tensor more."""
        more = folders.copy_of(self.healthy)
        more.tensors[name] = torch.ones(8)
        return more

    def _passes_by_more_layers(self) -> bool:
        """Return whether mlx-lm loads a model with one layer of text more than the config says."""
        more = folders.copy_of(self.healthy)
        layers = layers_of(more.tensors)
        text = text_layers({place for place, _ in layers}, self.checkpoint.inputs)
        last = max(number for place, number in layers if place == text)
        for name in list(more.tensors):
            if name.startswith(f"{text}.{last}."):
                more.tensors[name.replace(f"{text}.{last}.", f"{text}.{last + 1}.", 1)] = more.tensors[name]
        return loads(more)

    def _converted(self) -> list[str]:
        """Return the patterns of mlx-lm's own names, if it loads them and they are others."""
        with tempfile.TemporaryDirectory() as path:
            self.healthy.write(Path(path))
            parameters = loaded_parameters(Path(path))
        own = folders.copy_of(self.healthy)
        own.tensors = {name: torch.from_numpy(values) for name, values in parameters.items()}
        if not loads(own) or pattern_set(own.tensors) == pattern_set(self.healthy.tensors):
            return []
        return sorted(pattern_set(own.tensors).difference(self.checkpoint.heads))

    def _values(self) -> dict[str, Any]:
        """Return {key of the text level: kind of its value} for values that are no positive number or boolean."""
        kinds = {key: kind_of_value(value) for key, value in self._level.items() if not isinstance(value, bool)}
        return {key: kind for key, kind in kinds.items() if kind != "object" and decides_on_tensors(key)}

    @property
    def _path(self) -> str:
        """Return the level of the config whose keys are tried: the text part of a composite."""
        return "text_config" if isinstance(self.healthy.config.get("text_config"), dict) else ""

    @property
    def _level(self) -> dict[str, Any]:
        """Return the text level of the healthy config."""
        level: dict[str, Any] = self.healthy.config[self._path] if self._path else self.healthy.config
        return level

    def _with_level(self, level: Mapping[str, Any]) -> folders.Checkpoint:
        """Return the healthy checkpoint with another text level of the config."""
        other = folders.copy_of(self.healthy)
        if self._path:
            other.config[self._path] = dict(level)
        else:
            other.config = dict(level)
        return other

    def _with_keys(self, keys: Mapping[str, Any]) -> folders.Checkpoint:
        """Return the healthy checkpoint with a config of these keys, which have their paths."""
        other = folders.copy_of(self.healthy)
        start = f"{self._path}."
        if self._path:
            level = {key.removeprefix(start): value for key, value in keys.items() if key.startswith(start)}
            other.config = {key: value for key, value in keys.items() if not key.startswith(start)}
            other.config[self._path] = level
        else:
            other.config = dict(keys)
        return other

    @cached_property
    def _all_keys(self) -> dict[str, Any]:
        """Return {key with its path: value} of root and text level."""
        if not self._path:
            return dict(self.healthy.config)
        keys = {key: value for key, value in self.healthy.config.items() if key != self._path}
        return keys | {f"{self._path}.{key}": value for key, value in self._level.items()}

    def _keys(self) -> tuple[list[list[str]], dict[str, Any]]:
        """Return (groups of keys of which mlx-lm needs one, {key: default with which the tensors did not fit})."""
        groups, by_default, left = [], {}, dict(self._all_keys)
        removed: list[str] = []
        for key in list(left):
            fewer = {name: value for name, value in left.items() if name != key}
            error = error_of(self._with_keys(fewer))
            if not error:
                left = fewer
                removed.append(key)
            elif any(words in error for words in OF_TENSORS):
                by_default[key] = default_of(key, self.healthy.config)
            else:
                others = [name for name in removed if loads(self._with_keys(fewer | {name: self._all_keys[name]}))]
                groups.append([key, *others])
        groups = [group for group in groups if NAMES.isdisjoint(name.rpartition(".")[2] for name in group)]
        return groups, {key: value for key, value in by_default.items() if key.rpartition(".")[2] not in NAMES}

    def _not_null(self) -> list[str]:
        """Return the keys that may be absent or have a value, but not null."""
        refused = []
        for key, value in self._all_keys.items():
            is_tried = value is not None and key.rpartition(".")[2] not in NAMES
            if is_tried and not loads(self._with_keys(self._all_keys | {key: None})):
                refused.append(key)
        return refused

    def _settings(self) -> Iterator[tuple[str, Any]]:
        """Yield (setting, tensors that the class has more or less, or "error") for other settings of the class."""
        saved_config = folders.saved_class(self.checkpoint.class_name).config
        for key, value in other_values(self._level):
            label = f"{key}={json.dumps(value)}"
            record = None if self._path or key not in saved_config else self._setting(key, value)
            if record is None and isinstance(value, bool) and loads(self._with_level(self._level | {key: value})):
                record = {}  # mlx-lm does not read the key
            if record is not None:
                yield label, record
        if not self._path:
            yield from self._rope_settings(saved_config)

    def _rope_settings(self, saved_config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the records of kinds of rotary positions, as transformers 5 and as published configs write them."""
        rope = saved_config.get("rope_parameters")
        for rope_type, further in ROPE.items():
            if isinstance(rope, dict) and "rope_theta" in rope:
                value = rope | {"rope_type": rope_type, "factor": 2.0} | further
                record = self._setting("rope_parameters", value)
                if record is not None:
                    yield f"rope_parameters={rope_type}", record
            scaled = {"rope_type": rope_type, "type": rope_type, "factor": 2.0} | further
            without = {name: v for name, v in self._level.items() if name != "rope_parameters"}
            if loads(self._with_level(without)):
                loaded = loads(self._with_level(without | {"rope_scaling": scaled}))
                yield f"rope_scaling={rope_type}", {} if loaded else "error"

    def _setting(self, key: str, value: Any) -> dict[str, list[str]] | str | None:
        """Return the record of one setting; None if transformers does not build the class with it."""
        try:
            built = folders.copy_of(folders.saved_class(self.checkpoint.class_name, json.dumps({key: value})))
        except folders.CannotBuildError:
            return None
        built.config = folders.published(built.config)
        if self.checkpoint.inputs != built.inputs:
            built = without_prefix(built)
        if not loads(folders.in_state(built, folders.State(self._healthy_flag, self._healthy_tables))):
            return "error"
        return self._changes(built)

    def _changes(self, built: folders.Checkpoint) -> dict[str, Any]:
        """Return the tensors that a class built with another setting has more or less."""
        ours, theirs = Patterns(self.checkpoint.tensors), Patterns(built.tensors)
        record: dict[str, Any] = {"more": [], "less": [], "kinds": {}}
        for direction, more, less in (("more", theirs, ours), ("less", ours, theirs)):
            for pattern in sorted(more.all - less.all):
                self._add_change(record, direction, pattern, more.layers_with(pattern))
            for pattern in sorted(more.all & less.all):
                changed = more.layers_with(pattern) - less.layers_with(pattern)
                if changed:
                    self._add_change(record, direction, pattern, changed)
        return {name: value for name, value in record.items() if value}

    def _add_change(
        self, record: dict[str, Any], direction: str, pattern: str, changed: AbstractSet[tuple[str, int]]
    ) -> None:
        """Add a pattern to a record: with a mark if not all layers of a kind change, and with its kinds if not all."""
        of_layer = self._layer_kinds.of_layer
        kinds = {of_layer[layer] for layer in changed if layer in of_layer}
        lists = {layers for layers, _ in changed}
        same_kinds = {layer for layer, kind in of_layer.items() if layer[0] in lists and kind in kinds}
        marked = pattern
        if not same_kinds <= changed:
            marked = f"{pattern}?"
        record[direction].append(marked)
        if any(len(kinds) < len(self._layer_kinds.kinds.get(layers, ())) for layers in lists):
            record["kinds"][marked] = sorted(kinds)

    def _unpackable(self) -> list[str]:
        """Return the patterns of modules whose packed numbers mlx-lm does not load."""
        modules: dict[str, list[str]] = {}
        for name in self.healthy.tensors:
            if folders.is_packed_by_mlx(self.healthy, name):
                modules.setdefault(pattern_of(name).removesuffix(".weight"), []).append(name)
        refused = []
        for module, names in modules.items():
            packed = folders.copy_of(self.healthy)
            folders.pack_as_mlx(packed, names)
            if not loads(packed):
                refused.append(module)
        return refused

    def _refuses_wrong_dropped_head(self) -> bool:
        """Return whether mlx-lm refuses half a head in a state in which it drops a whole one."""
        assert self.letters is not None
        for flag, letters in zip(FLAGS, self.letters.split(), strict=True):
            if letters[STATES.index(DIFFERENT)] != "d":
                continue
            dropped = folders.in_state(self.checkpoint, folders.State(flag, DIFFERENT))
            for name in dropped.heads:
                dropped.tensors[name] = dropped.tensors[name][:, ::2]
            return not loads(dropped)
        return False

    def _stripped(self) -> list[str]:
        """Return the prefixes that mlx-lm removes if all names have them."""
        stripped = []
        for prefix in folders.PREFIXES:
            prefixed = folders.copy_of(self.healthy)
            prefixed.rename(list(prefixed.tensors), lambda name, prefix=prefix: prefix + name)
            if loads(prefixed):
                stripped.append(prefix)
        return stripped

    @property
    def _healthy_flag(self) -> bool | None:
        """Return the flag of the healthy checkpoint."""
        level = self._level
        return level.get(FLAG)

    @property
    def _healthy_tables(self) -> str:
        """Return the state of the healthy checkpoint's tables."""
        return STATES[2] if self.healthy.heads[0] in self.healthy.tensors else NONE


def default_of(key: str, config: dict[str, Any]) -> Any:
    """Return the default of mlx-lm's model class for a key with its path; None if it has none, or is not found."""
    level, _, name = key.rpartition(".")
    arguments = [_get_classes(config)[1]]
    if level:
        text_type = str(config[level].get("model_type"))
        module = MODEL_REMAPPING.get(text_type, text_type)
        if module not in {found.name for found in pkgutil.iter_modules(models.__path__)}:
            return None
        arguments = [importlib.import_module(f"mlx_lm.models.{module}").ModelArgs]
    parameter = inspect.signature(arguments[0]).parameters.get(name)
    if parameter is None or not isinstance(parameter.default, bool | int | float | str):
        return None
    return parameter.default


def doubled(value: Any) -> Any:
    """Return twice a number of a config; any other value as it is."""
    return 2 * value if type(value) is int else value


def shape_in_class(config: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter in mlx-lm's class for a config; None if the class cannot be built with it."""
    model_class, arguments = _get_classes(config)
    try:
        model = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    except Exception:  # each class has its own checks
        return None
    return dict(tree_flatten(model.parameters()))[name].shape


def loaded_parameters(folder: Path) -> dict[str, np.ndarray]:
    """Return the parameters of a loaded folder under mlx-lm's own names."""
    model, _ = load_model(folder, lazy=False)
    return {name: np.array(value.astype(mx.float32)) for name, value in tree_flatten(model.parameters())}


def other_values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, other value) for booleans and sizes that may change the tensors of a class."""
    for key, value in config.items():
        if isinstance(value, bool) and key not in folders.NOT_OF_TENSORS:
            yield key, not value
        elif key in SIZES and type(value) is int and value != SIZES[key]:
            yield key, SIZES[key]


def layers_of(names: Sequence[str] | Mapping[str, Any]) -> dict[tuple[str, int], dict[str, list[str]]]:
    """Return {(name of the list, number of the layer): {pattern in the layer: stored names}}."""
    layers: dict[tuple[str, int], dict[str, list[str]]] = {}
    for name in names:
        place = numbered(name)
        if place is not None:
            patterns = layers.setdefault((place.layers, place.number), {})
            patterns.setdefault(place.pattern, []).append(name)
    return layers


def pattern_set(names: Sequence[str] | Mapping[str, Any]) -> set[str]:
    """Return the names with # for each number."""
    return {pattern_of(name) for name in names}


def observed(checkpoint: folders.Checkpoint) -> list[str]:
    """Return the outcomes of loading a checkpoint."""
    with tempfile.TemporaryDirectory() as path:
        checkpoint.write(Path(path))
        seen = observe_mlx(Path(path), checkpoint.stored(checkpoint.inputs), checkpoint.stored(checkpoint.heads))
    return sorted(seen.outcomes)


def loads(checkpoint: folders.Checkpoint) -> bool:
    """Return whether mlx-lm loads a checkpoint."""
    return not error_of(checkpoint)


def error_of(checkpoint: folders.Checkpoint) -> str:
    """Return the error of loading a checkpoint with mlx-lm; "" if it loads."""
    with tempfile.TemporaryDirectory() as path:
        checkpoint.write(Path(path))
        return observe_mlx(Path(path), None, None).error


if __name__ == "__main__":
    main()
