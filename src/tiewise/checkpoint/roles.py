"""The part that each stored tensor plays at the two ends of the vocabulary.

`end_names` finds the names of the two ends, `stored_modules` what is stored under them, and `indexed_tensors` the
other tensors that token ids index. `find_roles` collects all of it as `Roles`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiewise.checkpoint import claims
from tiewise.checkpoint.boundary_scalars import read_scalars
from tiewise.checkpoint.claims import in_layer, model_levels, usual_names
from tiewise.checkpoint.end_names import BY_DATA, find_end_names, input_of_head
from tiewise.checkpoint.family_record import ClassEnds, family_data, module_of
from tiewise.checkpoint.indexed_tensors import IndexedTensor, token_tables
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.stored_modules import End, StoredModules

_MAP_PARAMETERS = ("weight", "p", "q", "factor")  # of a linear map; of this package's low-rank and definite maps
_HEADLESS = re.compile(r"(Model|Classification|Answering\w*|Choice|Prediction|Retrieval|Reward\w*|Encoder|Regression)$")
_HEADED = re.compile(r"LMHead|LMModel|DoubleHeads|EncoderDecoderModel|MTModel")


@dataclass(frozen=True)
class Roles:
    """The parts of the boundary that a checkpoint stores, and the names they should have."""

    source: str  # how they were found: "architecture data", "usual names" or "shapes"
    input: Stored | None = None  # the input table [V, E]; None where none is stored
    input_name: str | None = None  # the name under which the class looks for it, stored or not; None where unknown
    # every stored input table, `input` first (T5 and BART may store `shared` and one for each stack)
    input_tables: tuple[Stored, ...] = ()
    output: Stored | None = None  # the output table [V, E]; None where none is stored
    output_name: str | None = None  # as `input_name`
    biases: tuple[Stored, ...] = ()  # stored biases of the head, [V] or [1, V]
    positions: tuple[Stored, ...] = ()  # stored position tables; they are long and wide like a vocabulary, and are none
    # stored matrices between table and hidden width: projections, or the maps of a factored table
    maps: tuple[Stored, ...] = ()
    headless: bool = False  # the class has no token head (an encoder, a classifier, a reward model)
    # numbers in the config that act at the boundary, by dotted key (`text_config.logits_scaling`)
    scalars: dict[str, float] = field(default_factory=dict)
    # all that is stored for `input` and for `output`; of a quantised one, the shape of the table is that of the packing
    input_end: End = field(default_factory=End)
    output_end: End = field(default_factory=End)
    # tensors that the class may tie, {target: source}, under the names that this checkpoint uses; empty where the class
    # is not in the architecture data
    ties: Mapping[str, str] = field(default_factory=dict)
    class_ends: ClassEnds | None = None  # the class as the architecture data has it; None where it is not there
    # {name of an end as stored: name that the class looks for}, where transformers does not load the one
    unloaded_names: Mapping[str, str] = field(default_factory=dict)
    # tensors that stand where an end should and are no table: packed in an unknown way, or not of two axes
    opaque: tuple[Stored, ...] = ()
    indexed_tensors: tuple[
        IndexedTensor, ...
    ] = ()  # all else that token ids index: per layer, by n-grams, for further tokens

    @property
    def tables(self) -> tuple[Stored, ...]:
        """Return every stored table of both ends, the head's last."""
        if self.output is None:
            return self.input_tables
        return (*self.input_tables, self.output)

    def is_packed(self, table: Stored) -> bool:
        """Return whether one of the two tables is quantised. Its shape then does not count its rows."""
        if table.dtype not in FLOATING:
            return True
        if self.input_end.quantised and table in self.input_end.parts.values():
            return True
        return self.output_end.quantised and table in self.output_end.parts.values()

    @property
    def plain_input_table(self) -> Stored | None:
        """Return the stored input table if it has a row for every token, else None."""
        if self.input is None or self.is_packed(self.input):
            return None
        return self.input

    @property
    def one_table_per_end(self) -> tuple[Stored, ...]:
        """Return the input table and the head, of which one may not be stored."""
        pair = []
        if self.input is not None:
            pair.append(self.input)
        if self.output is not None:
            pair.append(self.output)
        return tuple(pair)

    @property
    def saves_shared_table_as_head(self) -> bool:
        """Return whether the class saves the shared table under the head's name."""
        if self.output is None or self.input_name is None:
            return False
        return self.ties.get(self.input_name) == self.output.name

    @property
    def loaded_input(self) -> Stored | None:
        """Return the stored input table that transformers loads; None if it loads none."""
        for table in self.input_tables:
            if table.name not in self.unloaded_names:
                return table
        return None

    @property
    def loaded_output(self) -> Stored | None:
        """Return the stored output table that transformers loads; None if it loads none."""
        if self.output is None or self.output.name in self.unloaded_names:
            return None
        return self.output


def find_roles(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None) -> Roles:
    """Find the roles from architecture data, else from usual names, else from shapes."""
    if not isinstance(config, Mapping):
        config = {}
    return _RoleSearch(StoredModules(tensors), config).roles()


class _RoleSearch:
    """The two ends of one checkpoint, from which the part of every other tensor follows."""

    class_ends: ClassEnds | None  # the class that the config names; None where the architecture data lacks it
    source: str  # how the ends were found
    names: ClassEnds  # their names in this file
    inputs: list[str]  # modules of the stored input tables, that of the head's partner first
    stored_ends: list[str]  # `inputs`, and the head's module if it is stored
    tables: tuple[Stored, ...]  # tables of `inputs`
    input: str | None  # module of the input table, stored or not
    output: str | None  # module of the head, stored or not
    head: Stored | None  # its table
    headless: bool  # the class has no token head

    def __init__(self, modules: StoredModules, config: Mapping[str, Any]) -> None:
        self.modules, self.config = modules, config
        self.class_ends = claims.config_ends(config)
        tokenless = claims.without_tokens(claims.family_type(config), claims.architecture(config))
        self.source, self.names = find_end_names(modules, config, self.class_ends, tokenless)
        self.input = input_of_head(modules, self.names)
        stored_inputs = [module for module in self.names.inputs if module in modules.tables]
        self.inputs = sorted(stored_inputs, key=lambda module: module != self.input)
        self.tables = tuple(modules.tables[module] for module in self.inputs)
        self.output = self._output()
        self.head = None
        self.stored_ends = [*self.inputs]
        if self.output in modules.tables:
            self.head = modules.tables[self.output]
            self.stored_ends.append(self.output)
        self.headless = tokenless or self._class_lacks_head()

    def roles(self) -> Roles:
        """Return the part of every stored tensor."""
        end_tables = [self.modules.tables[module] for module in self.stored_ends]
        output = self.output
        if self.headless and self.head is None:
            output = None  # a class without a head looks for none
        return Roles(
            self.source,
            input=next(iter(self.tables), None),
            input_name=_weight_of(self.input),
            input_tables=self.tables,
            output=self.head,
            output_name=_weight_of(output),
            biases=tuple(self._biases({table.rows for table in end_tables})),
            positions=tuple(self._positions()),
            maps=tuple(self._maps()),
            headless=self.headless,
            scalars=read_scalars(model_levels(self.config)),
            input_end=self.modules.end(self.input),
            output_end=self.modules.end(output),
            ties=self.names.tied,
            class_ends=self.class_ends,
            unloaded_names=self._unloaded_names(),
            opaque=tuple(self._opaque()),
            indexed_tensors=tuple(token_tables(self.modules.tensors, self.config, end_tables)),
        )

    def _output(self) -> str | None:
        """Return the module of the head. If a known class stores none there, one under a usual name that fits."""
        output = self.names.output
        if self.source != BY_DATA or output is None:
            return output
        if output in self.modules.tables:
            return output
        usual_output = self.modules.find_usual_output()
        if usual_output is None or usual_output in self.names.inputs:
            return output
        rows = {table.rows for table in self.tables}
        if self.modules.tables[usual_output].rows not in rows:
            return output
        return usual_output

    def _class_lacks_head(self) -> bool:
        """Return whether the class has no token head. The architecture data decides, else the class's name."""
        if self.class_ends is not None:
            return self.class_ends.output is None
        name = claims.architecture(self.config)
        if name is None or not _HEADLESS.search(name):
            return False
        if _HEADED.search(name) and name not in family_data()["bodies"]:
            return False
        # a plain `…Model` that stores a head has one: Qwen2.5-Omni was published so
        return self.head is None or not name.endswith("Model")

    def _biases(self, rows: set[int]) -> Iterator[Stored]:
        """Yield the stored biases of the head. Each has as many numbers as an end has `rows`; empty `rows` fit any."""
        bias_names = {*self.names.biases}
        if self.output is not None:
            parent = module_of(self.output)[0]
            bias_names |= {f"{self.output}.bias", f"{parent}.bias"}
        for name, tensor in self.modules.tensors.items():
            if name not in bias_names and not _has_usual_bias_name(name):
                continue
            if self._has_bias_shape(name, tensor.shape, rows):
                yield tensor

    def _has_bias_shape(self, name: str, shape: tuple[int, ...], rows: set[int]) -> bool:
        """Return whether a tensor that is called like a bias has the shape of one.

        Without a stored end any vector fits, and so does one that the architecture data names.
        """
        if len(shape) > 2:
            return False
        if not rows:
            return True
        if not shape:
            return False
        return shape[-1] in rows or name in self.names.biases

    def _positions(self) -> Iterator[Stored]:
        """Yield the stored position tables."""
        for module, table in self.modules.end_candidates.items():
            if module in self.stored_ends:
                continue
            if module in self.names.positions or claims.POSITION.search(module):
                yield table

    def _maps(self) -> Iterator[Stored]:
        """Yield the stored matrices between table and hidden width."""
        for name, tensor in self.modules.tensors.items():
            module, parameter = module_of(name)
            if parameter not in _MAP_PARAMETERS or len(tensor.shape) != 2:
                continue
            is_map = module in self.names.maps or module.rpartition(".")[2] in usual_names().maps
            if is_map and not in_layer(module):
                yield tensor

    def _opaque(self) -> Iterator[Stored]:
        """Yield tensors other than biases of modules where the class looks for a table without finding one."""
        if self.class_ends is None:
            return
        for module in dict.fromkeys(self.class_ends.spellings):
            if module in self.modules.tables:
                continue
            for parameter, tensor in self.modules.parts.get(module, {}).items():
                if parameter != "bias":
                    yield tensor

    def _unloaded_names(self) -> dict[str, str]:
        """Return {name of a stored end: name that the class looks for} of unread ends."""
        unread = dict[str, str]()
        for module in self.stored_ends:
            name = self.modules.tables[module].name
            stored_module = module_of(name)[0]
            if self.class_ends is None:
                if stored_module != module:  # of an unknown class, wrappers alone are known
                    unread[name] = f"{module}.weight"
            elif self.class_ends.loaded_as(stored_module) is None:
                end = self._end_in_class(module, self.class_ends)
                saved_as = self.class_ends.disk.get(end, end)
                unread[name] = f"{saved_as}.weight"
        return unread

    def _end_in_class(self, module: str, class_ends: ClassEnds) -> str:
        """Return the class's name of the end that is stored as `module`. `module` if the class has none."""
        if module == self.output:
            return class_ends.output or module
        class_names = dict[str, str]()
        if self.source == BY_DATA:
            class_names = dict(zip(self.names.inputs, class_ends.inputs, strict=True))
        first = next(iter(class_ends.inputs), module)
        return class_names.get(module, first)


def _weight_of(module: str | None) -> str | None:
    """Return the name of a module's table; None for no module."""
    if module is None:
        return None
    return f"{module}.weight"


def _has_usual_bias_name(name: str) -> bool:
    """Return whether a tensor is called as biases of heads usually are."""
    return any(claims.ends_with(name, bias) for bias in usual_names().biases)
