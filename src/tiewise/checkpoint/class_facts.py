"""Tensors of a checkpoint's class in transformers, compared with those that its files store.

A tensor of the class starts with random values if no file stores it and no tie fills it. `ClassFacts` lists these
tensors. It also lists stored tensors that transformers does not load or that have a wrong shape. Tensor names are
those of the class unless a docstring says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property

from tiewise.checkpoint.built_class import NotBuilt, is_switched_off
from tiewise.checkpoint.claims import PACKED, architecture, in_layer, is_foreign, needs_tiewise
from tiewise.checkpoint.class_load import ClassLoad, ask_load
from tiewise.checkpoint.config_parts import TRANSFORMERS_SECTION, quantisation_keys
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.folder_facts import FolderFacts
from tiewise.checkpoint.hf_folder import INDEX, SINGLE
from tiewise.checkpoint.stored import TORCH_TYPES, Stored

_LOGITS_BIAS = "final_logits_bias"  # buffer of BART: it starts as zeros, and few files store it
# buffers that training or a corpus decides; the class computes the others from its config
_LEARNED_BUFFERS = (
    *("running_mean", "running_var"),  # of batch norms
    *("e_score_correction_bias", "expert_bias", "balancing_biases", "tid2eid"),  # which experts a token uses
    "layer_scalar",  # Gemma 4
    *("global_mean", "global_invstd"),  # of the sounds that Phi-4 was trained on
)
_LAYER_NUMBER = re.compile(r"(.+?)\.\d+\.")  # group 1 is the prefix before the number


@dataclass(frozen=True)
class ClassFacts(FolderFacts):
    """Facts about the tensors of one checkpoint's class."""

    # the installed transformers may be asked; False: the architecture data alone
    builds: bool = field(default=False, kw_only=True)

    @property
    def judges_every_tensor(self) -> bool:
        """Return whether tensors outside the two ends count; False: the ends alone."""
        return self.builds and not is_switched_off()

    @cached_property
    def class_load(self) -> ClassLoad | NotBuilt:
        """Return what the installed transformers does with every tensor, or why it was not asked."""
        reason = self._reason_against_asking()
        if reason is not None:
            return NotBuilt(reason)
        name = architecture(self.config)
        if name is None:
            return NotBuilt("config.json names no class")
        return ask_load(self.config, name, self.folder.tensors, self._first_stored_dtype)

    @property
    def _first_stored_dtype(self) -> str | None:
        """Return the torch type of the first floating tensor of the first file.

        None without one. Names are sorted. transformers builds a class in this type if the config names none.
        """
        names_of_types = {short: name for name, short in TORCH_TYPES.items()}
        first_file = self.folder.headers[min(self.folder.headers)]
        for _, tensor in sorted(first_file.tensors.items()):
            if tensor.dtype in names_of_types:
                return names_of_types[tensor.dtype]
        return None

    def _reason_against_asking(self) -> str | None:
        """Return why the class is not asked about its tensors; None if it may be."""
        if not self.builds:
            return "it was not asked"
        if self.folder.single or self.folder.config is None:
            return "there is no config.json"
        if needs_tiewise(self.config):
            return "a model of tiewise's own type is not a class of transformers"
        if "auto_map" in self.config:
            return "its classes come as custom code, which is not run"
        if TRANSFORMERS_SECTION in quantisation_keys(self.config):
            return "it is quantised"
        if self.folder.unread:
            return "the headers of some shards were not read; --all-headers reads them"
        if not self.is_complete or self.folder.opened not in (SINGLE, INDEX):
            return "some tensors could not be read"
        return None

    @property
    def class_finds_all_parameters(self) -> bool:
        """Return whether the installed class fills every parameter from the files. False if it was not asked."""
        load = self.class_load
        return isinstance(load, ClassLoad) and not load.missing and not load.is_refused

    @cached_property
    def missing_elsewhere(self) -> tuple[str, ...]:
        """Return tensors outside the embedding and head that start with new values.

        Names are those of the class. Empty if the class was not asked.
        """
        load = self.class_load
        if isinstance(load, NotBuilt):
            return ()
        learned_buffers = [name for name in load.missing_buffers if name.endswith(_LEARNED_BUFFERS)]
        missing = (*load.missing, *learned_buffers)
        return tuple(name for name in missing if name not in self.names_at_the_ends)

    @property
    def draws_elsewhere(self) -> bool:
        """Return whether a tensor of `missing_elsewhere` starts with random numbers."""
        load = self.class_load
        return not isinstance(load, NotBuilt) and not load.random.isdisjoint(self.missing_elsewhere)

    @property
    def names_at_the_ends(self) -> frozenset[str]:
        """Return the class's tensors at the two ends: tables, biases, and layers between body and head."""
        ends = self.class_ends
        head = [f"{module}.weight" for module in ends.modules[len(ends.inputs) :]]
        return frozenset((*self.read_tables, *head, *ends.biases, *ends.head))

    @cached_property
    def read_tables(self) -> tuple[str, ...]:
        """Return the class's input tables that it reads with this config.

        An untied MarianMTModel, for example, has `model.shared` and reads the tables of its encoder and its decoder.
        All of them if the class was not asked, or names no table.
        """
        tables = tuple(f"{module}.weight" for module in self.class_ends.inputs)
        load = self.class_load
        if isinstance(load, NotBuilt) or not load.tables:
            return tables
        read = {load.tied_to(name) for name in load.tables}
        return tuple(name for name in tables if load.tied_to(name) in read)

    @cached_property
    def misfits(self) -> dict[str, tuple[int, ...]]:
        """Return {stored bias of the head: shape in the class} for biases with another shape."""
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
            shape = self._needed_shape(bias, tensor.shape, rows)
            if tensor.shape != shape:
                misfits[name] = shape
        return misfits

    def _needed_shape(self, bias: str, stored: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return the shape of a head's bias in the class, which has this many rows.

        If the class was asked, its answer counts: the stored shape if it loads the bias, else the one that it needs.
        """
        load = self.class_load
        if isinstance(load, ClassLoad):
            needed = {mismatch.name: mismatch.needed for mismatch in load.mismatched}
            return needed.get(bias, stored)
        if bias == _LOGITS_BIAS:
            return (1, rows)
        return (rows,)

    @property
    def _class_rows(self) -> int | None:
        """Return the rows of the output table, else of the input table, else of the config.

        Of several input tables, only the one to which the class may tie its head counts.
        """
        for table in reversed(self.roles.one_table_per_end):
            if self.roles.is_packed(table) or (table is self.roles.input and not self._is_input_of_head):
                continue
            return table.rows
        return self.text.vocab_size

    @property
    def _is_input_of_head(self) -> bool:
        """Return whether the class may tie its head to the stored input table.

        It is True as well if the class ties its head to no table.
        """
        ends, table = self.class_ends, self.roles.input
        source = ends.tied.get(f"{ends.output}.weight")
        if table is None or source is None:
            return True
        return ends.loaded_as(module_of(table.name)[0]) == module_of(source)[0]

    @cached_property
    def unloaded_input_tables(self) -> list[Stored]:
        """Return stored input tables that transformers does not load, if it loads another one."""
        if self.roles.loaded_input is None:
            return []
        return [table for table in self.roles.input_tables if table.name in self.roles.unloaded_names]

    @cached_property
    def foreign_layers(self) -> str | None:
        """Return the prefix of the stored layers if transformers loads none of them, else None."""
        if not self.class_ends.layers or not self.is_complete:
            return None
        stored = self._layer_prefixes()
        loaded = _loaded_layer_prefixes(self.class_ends)
        if not loaded.isdisjoint(stored):
            return None
        return next(iter(stored), None)

    def _layer_prefixes(self) -> list[str]:
        """Return the prefix before the layer number of each tensor, without other modalities."""
        prefixes = []
        for name in self.folder.tensor_names:
            match = _LAYER_NUMBER.match(name)
            if match is not None and not is_foreign(match[1]):
                prefixes.append(match[1])
        return prefixes

    @property
    def _absence_is_certain(self) -> bool:
        """Return whether an absent tensor is surely missing.

        The class must have a head, and every file must have been read.
        """
        if self.is_tiewise_type or self.roles.headless:
            return False
        return self.is_complete

    @cached_property
    def unfilled_ties(self) -> tuple[tuple[str, str], ...]:
        """Return (random tensor, stored source) for ties that an untied model does not apply."""
        roles = self.roles
        if self.claims.ties_others is not False or not self._absence_is_certain:
            return ()
        stored = {tensor.name for tensor in (*roles.input_tables, *roles.biases)}
        loaded = stored - roles.unloaded_names.keys()
        head = roles.output_name or ""
        filled = {*loaded, head, roles.unloaded_names.get(head)}
        unfilled = []
        for target, source in roles.ties.items():
            if source in loaded and target not in filled:
                unfilled.append((target, source))
        return tuple(unfilled)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Return tensors of the two ends that are neither stored nor tied to a stored tensor.

        They start with random values. Biases of the head and layers before the head are included. Empty if the class
        is unknown or a file was not read.
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
            if name not in available and self._has_unfilled(name):
                missing.append(name)
        return tuple(missing)

    def _has_unfilled(self, name: str) -> bool:
        """Return whether the class has a tensor with this config.

        If the class was asked, it must also have reported that no stored tensor fills it.
        """
        load = self.class_load
        if isinstance(load, ClassLoad):
            return name in (*load.missing, *load.missing_buffers)
        return self.class_ends.has(name, self.config)

    def _loaded_or_tied(self, ends: ClassEnds) -> set[str]:
        """Return the tensors that are loaded, or tied to a loaded tensor in either direction."""
        ties = []
        head = f"{ends.output}.weight"
        for target, source in ends.tied.items():
            flag = self.claims.ties_others
            if target == head:
                flag = self.claims.tied
            if flag is not False:
                ties.append({target, source})
        available = self._loaded(ends)
        for _ in ties:  # a chain of ties has at most this many links
            for pair in ties:
                if not pair.isdisjoint(available):
                    available |= pair
        return available

    def _loaded(self, ends: ClassEnds) -> set[str]:
        """Return the tensors that transformers loads from the files."""
        loaded = set[str]()
        for stored_name in self.folder.tensor_names:
            table = _loaded_table(ends, stored_name)
            bias = ends.loaded_as(stored_name)
            head_tensor = ends.head_tensor(stored_name)
            for name in (table, bias, head_tensor):
                if name is not None:
                    loaded.add(name)
        return loaded

    @property
    def missing_tables(self) -> list[str]:
        """Return the input tables in `missing`, if another input table is stored."""
        if self.roles.loaded_input is None or self.unloaded_input_tables:
            return []
        return self._missing_among(self.read_tables)

    @property
    def missing_biases(self) -> list[str]:
        """Return the biases of the head in `missing`, if a table is stored."""
        return self._missing_among(self.class_ends.biases)

    @property
    def missing_head(self) -> list[str]:
        """Return the tensors between body and head in `missing`, if a table is stored."""
        return self._missing_among(self.class_ends.head)

    @property
    def _reads_a_table(self) -> bool:
        """Return whether transformers loads a stored table of either end."""
        return self.roles.loaded_input is not None or self.roles.loaded_output is not None

    def _missing_among(self, names: Container[str]) -> list[str]:
        """Return the names that are in `missing` and not in `unfilled_ties`.

        Empty if transformers loads no table.
        """
        if not self._reads_a_table:
            return []
        unfilled = {target for target, _ in self.unfilled_ties}
        missing = []
        for name in self.missing:
            if name in names and self.saved_name(name) not in unfilled:
                missing.append(name)
        return missing

    def saved_name(self, tensor: str) -> str:
        """Return the name of a class's tensor in a saved file."""
        disk = self.class_ends.disk
        if tensor in disk:
            return disk[tensor]
        module, parameter = module_of(tensor)
        return f"{disk.get(module, module)}.{parameter}"

    @property
    def layer_ties(self) -> tuple[str, ...]:
        """Return modules inside layers that the flag also ties: Zamba's shared transformer blocks.

        `#` is the number of a layer. Empty if the class ignores the flag.
        """
        if self.claims.fixed is not None:
            return ()
        return self.class_ends.layer_ties

    def stored_layers(self, module: str) -> tuple[str, ...]:
        """Return the stored names of a module inside layers, one per layer, in file order."""
        pattern = re.compile(re.escape(module).replace(r"\#", r"\d+"))
        modules = dict[str, None]()  # used as an ordered set
        for name in self.folder.tensor_names:
            match = pattern.search(name)
            if match is not None:
                modules[match[0]] = None
        return tuple(modules)


def _loaded_layer_prefixes(ends: ClassEnds) -> set[str]:
    """Return the layer prefixes that transformers loads, with and without the body's prefix."""
    body = f"{ends.prefix}."
    loaded = set[str]()
    for prefix in ends.layers:
        loaded |= {prefix, body + prefix, prefix.removeprefix(body)}
    return loaded


def _loaded_table(ends: ClassEnds, name: str) -> str | None:
    """Return the table that transformers loads from a stored tensor, plain or quantised, else None."""
    module, parameter = module_of(name)
    if parameter != "weight" and parameter not in PACKED:
        return None
    end = ends.loaded_as(module)
    if end is None or end in ends.biases:
        return None
    return f"{end}.weight"
