"""Tensors of a checkpoint's class in transformers, compared with those that its files store.

A tensor of the class that no file stores and no tie fills starts with random values. `ClassFacts` lists these, and the
stored tensors that transformers does not read or that do not fit. Names without further explanation are the class's.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import cached_property

from tiewise.checkpoint.claims import PACKED, in_layer, is_foreign
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.folder_facts import FolderFacts
from tiewise.checkpoint.stored import Stored

_LOGITS_BIAS = "final_logits_bias"  # of BART: it starts as zeros, and few files have it
_LAYER_NUMBER = re.compile(r"(.+?)\.\d+\.")  # with the prefix before it


class ClassFacts(FolderFacts):
    """Facts on the tensors that the class of one checkpoint has."""

    @cached_property
    def misfits(self) -> dict[str, tuple[int, ...]]:
        """Return {stored bias of the head: shape in its class} where the two shapes differ."""
        rows = self._class_rows
        if rows is None:
            return {}
        misfits = dict[str, tuple[int, ...]]()
        for name, tensor in self.folder.tensors.items():
            if not name.endswith("bias") or in_layer(name):
                continue
            bias = self.class_ends.loaded_as(name)
            if bias is None:
                continue
            shape: tuple[int, ...] = (rows,)
            if bias == _LOGITS_BIAS:
                shape = (1, rows)
            if tensor.shape != shape:
                misfits[name] = shape
        return misfits

    @property
    def _class_rows(self) -> int | None:
        """Return the rows of the head, else of the input table, else by the config."""
        for table in reversed(self.roles.one_table_per_end):
            if not self.roles.is_packed(table):
                return table.rows
        return self.text.vocab_size

    @cached_property
    def unloaded_input_tables(self) -> list[Stored]:
        """Return input tables that transformers does not load under their names, though it loads another one."""
        if self.roles.loaded_input is None:
            return []
        return [table for table in self.roles.input_tables if table.name in self.roles.unloaded_names]

    @cached_property
    def foreign_layers(self) -> str | None:
        """Return the prefix of the layers' numbers, if transformers loads none of the layers."""
        if not self.class_ends.layers or not self.is_complete:
            return None
        stored = self._layer_prefixes()
        loaded = _loaded_layer_prefixes(self.class_ends)
        if not loaded.isdisjoint(stored):
            return None
        return next(iter(stored), None)

    def _layer_prefixes(self) -> list[str]:
        """Return the prefix of the layer's number of each tensor inside a layer, without other modalities."""
        prefixes = []
        for name in self.folder.tensors:
            match = _LAYER_NUMBER.match(name)
            if match is not None and not is_foreign(match[1]):
                prefixes.append(match[1])
        return prefixes

    @property
    def _absence_is_certain(self) -> bool:
        """Return whether a tensor that is not stored is missing: all files of a class with a head were read."""
        if self.is_tiewise_type or self.roles.headless:
            return False
        return self.is_complete

    @cached_property
    def unfilled_ties(self) -> tuple[tuple[str, str], ...]:
        """Return (random tensor, stored one that it would be tied to) of an untied model's body and biases."""
        roles = self.roles
        if self.claims.ties_others is not False or not self._absence_is_certain:
            return ()
        stored = {tensor.name for tensor in (*roles.input_tables, *roles.biases)}
        loaded = stored - roles.unloaded_names.keys()
        head = roles.output_name or ""
        filled = {*loaded, head, roles.unloaded_names.get(head)}
        fresh = []
        for target, source in roles.ties.items():
            if source in loaded and target not in filled:
                fresh.append((target, source))
        return tuple(fresh)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Return tensors of the two ends that are neither stored nor tied to a stored one.

        Those of the head's bias and of the layers before it are among them. They start with random values. Empty if
        the class is unknown, or if something was not read.
        """
        ends = self.roles.class_ends
        if ends is None or self.roles.opaque:
            return ()
        if not self._absence_is_certain:
            return ()
        tables = [f"{module}.weight" for module in ends.modules]
        available = {*self._loaded_or_tied(ends), _LOGITS_BIAS}
        missing = []
        for name in (*tables, *ends.biases, *ends.head):
            if name not in available and ends.has(name, self.config):
                missing.append(name)
        return tuple(missing)

    def _loaded_or_tied(self, ends: ClassEnds) -> set[str]:
        """Return the tensors that are loaded, or that a tie fills from a loaded one.

        A tie fills either tensor from the other.
        """
        ties = []
        head = f"{ends.output}.weight"
        for target, source in ends.tied.items():
            flag = self.claims.ties_others
            if target == head:
                flag = self.claims.tied
            if flag is not False:
                ties.append({target, source})
        available = self._loaded(ends)
        for _ in ties:  # a chain of ties is no longer than their number
            for pair in ties:
                if not pair.isdisjoint(available):
                    available |= pair
        return available

    def _loaded(self, ends: ClassEnds) -> set[str]:
        """Return the tensors that transformers loads from the files."""
        loaded = set[str]()
        for stored_name in self.folder.tensors:
            table = _loaded_table(ends, stored_name)
            bias = ends.loaded_as(stored_name)
            head_tensor = ends.head_tensor(stored_name)
            for name in (table, bias, head_tensor):
                if name is not None:
                    loaded.add(name)
        return loaded

    @property
    def missing_tables(self) -> list[str]:
        """Return those of `missing` that are input tables, if another one is stored."""
        if self.roles.loaded_input is None or self.unloaded_input_tables:
            return []
        tables = [f"{module}.weight" for module in self.class_ends.inputs]
        return self._missing_among(tables)

    @property
    def missing_biases(self) -> list[str]:
        """Return those of `missing` that are biases of the head, if a table is stored."""
        return self._missing_among(self.class_ends.biases)

    @property
    def missing_head(self) -> list[str]:
        """Return those of `missing` between the body and the head, if a table is stored."""
        return self._missing_among(self.class_ends.head)

    @property
    def _reads_a_table(self) -> bool:
        """Return whether transformers loads a stored table of either end."""
        return self.roles.loaded_input is not None or self.roles.loaded_output is not None

    def _missing_among(self, names: Container[str]) -> list[str]:
        """Return those of `missing` that are among `names`, without those that `unfilled_ties` lists.

        Empty if transformers loads no table at all.
        """
        if not self._reads_a_table:
            return []
        fresh = {target for target, _ in self.unfilled_ties}
        missing = []
        for name in self.missing:
            if name in names and self.saved_name(name) not in fresh:
                missing.append(name)
        return missing

    def saved_name(self, tensor: str) -> str:
        """Return the name that a saved file gives to a tensor of the class."""
        disk = self.class_ends.disk
        if tensor in disk:
            return disk[tensor]
        module, parameter = module_of(tensor)
        return f"{disk.get(module, module)}.{parameter}"

    @property
    def layer_ties(self) -> tuple[str, ...]:
        """Return modules inside layers that the flag ties too: Zamba's shared transformer blocks.

        `#` represents a layer's number. Empty if the class always ties or never does, whatever the flag says.
        """
        if self.claims.fixed is not None:
            return ()
        return self.class_ends.layer_ties

    def stored_layers(self, module: str) -> tuple[str, ...]:
        """Return stored names of a module inside layers. One for each such layer, in file order."""
        pattern = re.compile(re.escape(module).replace(r"\#", r"\d+"))
        modules = dict[str, None]()  # used as an ordered set
        for name in self.folder.tensors:
            match = pattern.search(name)
            if match is not None:
                modules[match[0]] = None
        return tuple(modules)


def _loaded_layer_prefixes(ends: ClassEnds) -> set[str]:
    """Return the prefixes of layers' numbers that transformers loads, with the body's prefix or without."""
    body = f"{ends.prefix}."
    loaded = set[str]()
    for prefix in ends.layers:
        loaded |= {prefix, body + prefix, prefix.removeprefix(body)}
    return loaded


def _loaded_table(ends: ClassEnds, name: str) -> str | None:
    """Return the table that transformers loads from a stored tensor, plain or packed; None for none."""
    module, parameter = module_of(name)
    if parameter != "weight" and parameter not in PACKED:
        return None
    end = ends.loaded_as(module)
    if end is None or end in ends.biases:
        return None
    return f"{end}.weight"
