"""Comparison of a checkpoint with the recorded run of mlx-lm for its family.

mlx-lm loads strictly. A stored tensor that its model lacks is an error, and so is a missing one, or a config key that
its model class needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tiewise.checkpoint.mlx_runs import MlxRun, decides_on_tensors, kind_of_value, numbered, pattern_of
from tiewise.checkpoint.untrusted import short


@dataclass(frozen=True)
class Misfit:
    """Reason why mlx-lm does not load a checkpoint, or may not."""

    sentence: str
    is_certain: bool = True


@dataclass(frozen=True)
class MlxFolder:
    """Part of a checkpoint that mlx-lm reads."""

    names: frozenset[str]  # tensors in the files that it opens, without the scales of packed ones
    packed: frozenset[str]  # modules whose numbers mlx-lm has packed, with scales next to them
    config: Mapping[str, Any]
    level: Mapping[str, Any]  # text level of the config
    path: str  # path of that level with a dot behind it: "text_config.", or "" for the root
    layer_count: int | None  # by the config; None if it does not say
    rows: int | None  # of the stored input table; None if not known
    defaults: Mapping[str, Any]  # values of the class in transformers for keys that are absent

    def value(self, key: str) -> tuple[bool, Any]:
        """Return (whether the config has a key, its value). The key may have a path."""
        level = self.config
        if self.path and key.startswith(self.path):
            level, key = self.level, key.removeprefix(self.path)
        return key in level, level.get(key)


@dataclass(frozen=True)
class ModuleTensors:
    """Patterns of a module's tensors: those that must be stored, and all that may be."""

    required: frozenset[str]
    possible: frozenset[str]

    @classmethod
    def read(cls, patterns: Iterable[str]) -> ModuleTensors:
        """Return recorded patterns; a question mark is behind those that may be absent."""
        required, possible = set[str](), set[str]()
        for pattern in patterns:
            possible.add(pattern.removesuffix("?"))
            if not pattern.endswith("?"):
                required.add(pattern)
        return cls(frozenset(required), frozenset(possible))

    def changed(self, more: Iterable[str], less: Iterable[str]) -> ModuleTensors:
        """Return the patterns with some more and some less. A question mark is behind those that only may change."""
        added, removed = ModuleTensors.read(more), ModuleTensors.read(less)
        required = (self.required - removed.possible) | added.required
        return ModuleTensors(required, (self.possible - removed.required) | added.possible)


@dataclass(frozen=True)
class SettingChange:
    """Pattern of a tensor that a setting adds or removes."""

    pattern: str  # from the root; with a question mark if not every layer of a kind changes
    kinds: Sequence[int] | None  # numbers of the kinds of layers that change; None: all


class MlxFit:
    """Comparison of one checkpoint with the recorded run of its family."""

    def __init__(self, run: MlxRun, folder: MlxFolder) -> None:
        self.run, self.folder, self.level = run, folder, folder.level
        ends = {*run.inputs, *run.heads}  # the columns of loaders cover these
        self.names = sorted(name for name in folder.names - ends if not name.startswith(tuple(run.skipped_parts)))

    def misfit(self) -> Misfit | None:
        """Return a reason why mlx-lm does not load the checkpoint. A certain one comes first."""
        by_config = [*self._key_misfits(), *self._setting_misfits()]
        by_tensors: list[Misfit] = []
        if not self._has_converted_names:
            by_tensors = [*self._packed_misfits(), *self._outer_misfits(), *self._layer_misfits()]
            by_tensors += self._count_misfits()
        misfits = [*by_config, *by_tensors]
        for misfit in misfits:
            if misfit.is_certain:
                return misfit
        return next(iter(misfits), None)

    @property
    def _has_converted_names(self) -> bool:
        """Return whether the names are those with which mlx-lm itself saves the family."""
        if not self.run.converted:
            return False
        patterns = {pattern_of(name) for name in self.folder.names}
        return patterns.issuperset(self.run.converted) and patterns <= {*self.run.converted, *self.run.heads}

    def _key_misfits(self) -> Iterator[Misfit]:
        """Yield the config keys that mlx-lm needs and does not find."""
        for group in self.run.keys:
            if not any(self.folder.value(key)[0] for key in group):
                yield Misfit(f"Its model class needs {' or '.join(group)} in the config.")
        for key in self.run.not_null:
            is_written, value = self.folder.value(key)
            if is_written and value is None:
                yield Misfit(f"Its model class does not accept null for {key}.")
        for key, default in self.run.by_default.items():
            if not self.folder.value(key)[0]:
                yield from self._default_misfit(key, default)

    def _default_misfit(self, key: str, default: Any) -> Iterator[Misfit]:
        """Yield a misfit if mlx-lm and transformers have different defaults for an absent key."""
        name = key.removeprefix(self.folder.path)
        if name == "vocab_size" and self.folder.rows is not None and default is not None:
            if default != self.folder.rows:
                yield Misfit(f"Without {key} in the config it takes {default}, and {self.folder.rows} rows are stored.")
        elif default is None or self.folder.defaults.get(name) != default:
            yield Misfit(f"Without {key} in the config its default decides.", is_certain=False)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Return the recorded settings that the config has."""
        return {label: record for label, record in self.run.settings.items() if self._has(label)}

    def _has(self, label: str) -> bool:
        """Return whether the config has a recorded setting, `key=value`."""
        key, _, written = label.partition("=")
        value = self.level.get(key)
        if key in ("rope_parameters", "rope_scaling"):
            return rope_type(value) == written
        if key == "num_key_value_heads":
            return value is not None and value != self.level.get("num_attention_heads")
        if key == "head_dim":
            return value is not None and value != self._usual_head_dim
        return isinstance(value, bool) and json.dumps(value) == written

    @property
    def _usual_head_dim(self) -> int | None:
        """Return the hidden width divided by the number of heads; None if the config lacks them."""
        width, heads = self.level.get("hidden_size"), self.level.get("num_attention_heads")
        if isinstance(width, int) and isinstance(heads, int) and heads > 0:
            return width // heads
        return None

    def _setting_misfits(self) -> Iterator[Misfit]:
        """Yield the settings with which mlx-lm did not load the family."""
        for label, record in self._settings.items():
            if record == "error":
                yield Misfit(f"It does not load this family with {label}.")
        for key in ("rope_parameters", "rope_scaling"):
            kind = rope_type(self.level.get(key))
            is_recorded = any(label.startswith(f"{key}=") for label in self.run.settings)
            if kind not in (None, "default") and f"{key}={kind}" not in self.run.settings and is_recorded:
                yield Misfit(f"It was not run with {key} of the type {short(kind)}.", is_certain=False)

    @cached_property
    def _more(self) -> tuple[SettingChange, ...]:
        """Return the tensors that the settings of the config add."""
        return tuple(self._changes("more"))

    @cached_property
    def _less(self) -> tuple[SettingChange, ...]:
        """Return the tensors that the settings of the config remove."""
        return tuple(self._changes("less"))

    def _changes(self, direction: str) -> Iterator[SettingChange]:
        """Yield the changes in one direction, "more" or "less", of all settings of the config."""
        for record in self._settings.values():
            if record == "error":
                continue
            for pattern in record.get(direction, ()):
                yield SettingChange(pattern, record.get("kinds", {}).get(pattern))

    @cached_property
    def _unknown_setting(self) -> str | None:
        """Return a key whose value was not run and may change the tensors, else None."""
        for key, value in self.level.items():
            if not decides_on_tensors(key):
                continue
            if isinstance(value, bool):
                if f"{key}=true" not in self.run.settings and f"{key}=false" not in self.run.settings:
                    return key
            elif key in self.run.values and kind_of_value(value) != self.run.values[key]:
                return key
        return None

    def _tensor_misfit(self, sentence: str) -> Misfit:
        """Return a misfit of tensors, which is certain unless a setting may explain it."""
        if self._unknown_setting is None:
            return Misfit(sentence)
        return Misfit(f"{sentence} It was not run with {short(self._unknown_setting)}.", is_certain=False)

    def _packed_misfits(self) -> Iterator[Misfit]:
        """Yield misfits of packed modules that its model class reads unpacked alone."""
        for module in sorted(self.folder.packed):
            if pattern_of(f"{module}.weight").removesuffix(".weight") in self.run.unpackable:
                yield Misfit(f"It loads strictly, and its model has no {short(module)}.scales.")

    def _outer_misfits(self) -> Iterator[Misfit]:
        """Yield misfits of tensors outside layers."""
        patterns = ModuleTensors.read(self.run.tensors).changed(_outside(self._more), _outside(self._less))
        stored = {name for name in self.names if numbered(name) is None}
        for name in sorted(stored - patterns.possible):
            yield self._tensor_misfit(unknown_tensor(name))
        for name in sorted(patterns.required - stored):
            yield self._tensor_misfit(missing_tensor(name))

    @cached_property
    def _stored_layers(self) -> dict[str, dict[int, dict[str, set[str]]]]:
        """Return {list of layers: {number of a layer: {pattern: stored names}}}."""
        layers: dict[str, dict[int, dict[str, set[str]]]] = {}
        for name in self.names:
            place = numbered(name)
            if place is not None:
                patterns = layers.setdefault(place.layers, {}).setdefault(place.number, {})
                patterns.setdefault(place.pattern, set()).add(name)
        return layers

    def _layer_misfits(self) -> Iterator[Misfit]:
        """Yield misfits of tensors in layers."""
        for layers, by_number in self._stored_layers.items():
            if layers not in self.run.layers:
                first = next(iter(by_number.values()))
                yield self._tensor_misfit(unknown_tensor(min(min(first.values()))))
                continue
            kinds = [self._kind(layers, number) for number in range(len(self.run.layers[layers]))]
            is_counted = layers == self.run.text_layers and self.folder.layer_count is not None
            for number, stored in sorted(by_number.items()):
                if not is_counted or number < (self.folder.layer_count or 0):
                    yield from self._misfits_of_layer(f"{layers}.{number}", kinds, stored)

    def _kind(self, layers: str, number: int) -> ModuleTensors:
        """Return the patterns of a kind of layer with the settings of the config."""
        kind = ModuleTensors.read(self.run.layers[layers][number])
        return kind.changed(_inside(layers, number, self._more), _inside(layers, number, self._less))

    def _misfits_of_layer(
        self, layer: str, kinds: Sequence[ModuleTensors], stored: Mapping[str, set[str]]
    ) -> Iterator[Misfit]:
        """Yield misfits of one layer. It may be of any recorded kind."""
        possible = frozenset(self.run.skipped).union(*(kind.possible for kind in kinds))
        for pattern in sorted(stored.keys() - possible):
            yield self._tensor_misfit(unknown_tensor(min(stored[pattern])))
        yield from self._incomplete_layer(layer, kinds, stored.keys())
        experts = {len(names) for pattern, names in stored.items() if "experts.#" in pattern}
        if len(experts) > 1:
            yield self._tensor_misfit(f"It loads strictly, and an expert of {short(layer)} is not complete.")

    def _incomplete_layer(
        self, layer: str, kinds: Sequence[ModuleTensors], stored: AbstractSet[str]
    ) -> Iterator[Misfit]:
        """Yield a misfit if a layer lacks tensors of every recorded kind."""
        missing = [kind.required.difference(stored) for kind in kinds]
        if not all(missing):
            return
        in_every_kind = sorted(frozenset.intersection(*missing))
        if in_every_kind:
            yield self._tensor_misfit(missing_tensor(f"{layer}.{in_every_kind[0]}"))
        else:
            yield Misfit(f"It was not run with a layer such as {short(layer)}.", is_certain=False)

    def _count_misfits(self) -> Iterator[Misfit]:
        """Yield misfits of the number of layers."""
        layers, count = self.run.text_layers, self.folder.layer_count
        if count is None or layers is None:
            return
        stored = self._stored_layers.get(layers, {})
        for number in range(count):
            if number not in stored:
                yield Misfit(missing_tensor(f"{layers}.{number}"))
                return
        if len(stored) > count and not self.run.more_layers:
            yield Misfit(f"It loads strictly, and {short(layers)}.{max(stored)} is beyond the config's layers.")


def rope_type(value: Any) -> str | None:
    """Return the type of rotary positions in a config's value; None for a value without one."""
    if not isinstance(value, Mapping):
        return None
    kind = value.get("rope_type", value.get("type"))
    if not isinstance(kind, str):
        return None
    return kind


def unknown_tensor(name: str) -> str:
    """Return the sentence about a stored tensor that the model lacks."""
    return f"It loads strictly, and its model has no {short(name)}."


def missing_tensor(name: str) -> str:
    """Return the sentence about a tensor of the model that is not stored."""
    return f"It loads strictly, and {short(name)} is not stored."


def _outside(changes: Iterable[SettingChange]) -> list[str]:
    """Return the patterns of tensors outside layers."""
    return [change.pattern for change in changes if ".#." not in change.pattern]


def _inside(layers: str, kind: int, changes: Iterable[SettingChange]) -> list[str]:
    """Return the patterns inside a kind of layer of a list, without the list's name."""
    start = f"{layers}.#."
    patterns = []
    for change in changes:
        if change.pattern.startswith(start) and (change.kinds is None or kind in change.kinds):
            patterns.append(change.pattern.removeprefix(start))
    return patterns
