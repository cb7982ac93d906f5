"""Roles of stored tensors at the two ends of a model: input embedding and output head.

`end_names` finds the names of the two ends, `stored_modules` the tensors stored under them, and `indexed_tensors` the
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

# parameter of a linear map; parameters of tiewise's low-rank (p, q) and positive definite (factor) maps
_MAP_PARAMETERS = ("weight", "p", "q", "factor")
_HEADLESS = re.compile(r"(Model|Classification|Answering\w*|Choice|Prediction|Retrieval|Reward\w*|Encoder|Regression)$")
_HEADED = re.compile(r"LMHead|LMModel|DoubleHeads|EncoderDecoderModel|MTModel")


@dataclass(frozen=True)
class Roles:
    """Stored parts of the boundary, and the names that the class expects for them."""

    source: str  # method that identified the ends: "architecture data", "usual names" or "shapes"
    input: Stored | None = None  # input table [V, E]; None if the checkpoint stores none
    input_name: str | None = None  # tensor name that the class expects for the input table; None if unknown
    # every stored input table, `input` first (T5 and BART may store `shared` and one table per stack)
    input_tables: tuple[Stored, ...] = ()
    output: Stored | None = None  # output table [V, E]; None if the checkpoint stores none
    output_name: str | None = None  # tensor name that the class expects for the output table; None if unknown
    biases: tuple[Stored, ...] = ()  # stored biases of the head, [V] or [1, V]
    positions: tuple[Stored, ...] = ()  # stored position tables, which can have the shape of a token table
    # stored matrices between table width E and hidden width D: projections, or the maps of a factored table
    maps: tuple[Stored, ...] = ()
    headless: bool = False  # the class has no token head (an encoder, a classifier, a reward model)
    # numbers in the config that act at the boundary, by dotted key (`text_config.logits_scaling`)
    scalars: dict[str, float] = field(default_factory=dict)
    # every stored tensor of the two end modules; the shape of a quantised weight is that of its packed numbers
    input_end: End = field(default_factory=End)
    output_end: End = field(default_factory=End)
    # tensors that the class may tie, {target: source}, by their names in this checkpoint; empty for a class that the
    # architecture data lacks
    ties: Mapping[str, str] = field(default_factory=dict)
    class_ends: ClassEnds | None = None  # the class in the architecture data; None if the data lacks it
    # {stored name of an end: name that the class expects}, for stored ends that transformers does not load
    unloaded_names: Mapping[str, str] = field(default_factory=dict)
    # tensors under the name of an end that are no table: packed in an unknown way, or without two axes
    opaque: tuple[Stored, ...] = ()
    # other stored tensors that token ids index: per-layer, n-gram and multi-token prediction tables
    indexed_tensors: tuple[IndexedTensor, ...] = ()

    @property
    def tables(self) -> tuple[Stored, ...]:
        """Return every stored table of both ends, the output table last."""
        if self.output is None:
            return self.input_tables
        return (*self.input_tables, self.output)

    def is_packed(self, table: Stored) -> bool:
        """Return whether a table of an end is quantised. Then its shape does not give its rows."""
        if table.dtype not in FLOATING:
            return True
        if self.input_end.quantised and table in self.input_end.parts.values():
            return True
        return self.output_end.quantised and table in self.output_end.parts.values()

    @property
    def plain_input_table(self) -> Stored | None:
        """Return the stored input table; None if it is quantised or not stored."""
        if self.input is None or self.is_packed(self.input):
            return None
        return self.input

    @property
    def one_table_per_end(self) -> tuple[Stored, ...]:
        """Return the stored ones among `input` and `output`: two tables, one or none."""
        tables = []
        if self.input is not None:
            tables.append(self.input)
        if self.output is not None:
            tables.append(self.output)
        return tuple(tables)

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
    """Return the roles by architecture data, else by usual names, else by shapes."""
    if not isinstance(config, Mapping):
        config = {}
    return _RoleSearch(StoredModules(tensors), config).roles()


class _RoleSearch:
    """Search for the roles of one checkpoint, starting from its two ends."""

    class_ends: ClassEnds | None  # the class that the config names; None if the architecture data lacks it
    source: str  # method that identified the ends
    names: ClassEnds  # the ends under their names in this file
    input_modules: list[str]  # modules of the stored input tables; first the one that belongs to the head
    stored_ends: list[str]  # `input_modules`, and the head's module if it is stored
    input_tables: tuple[Stored, ...]  # tables of `input_modules`
    input: str | None  # module of the input embedding, stored or not
    output: str | None  # module of the output head, stored or not
    output_table: Stored | None  # table of the output head
    headless: bool  # the class has no token head

    def __init__(self, modules: StoredModules, config: Mapping[str, Any]) -> None:
        self.modules, self.config = modules, config
        self.class_ends = claims.config_ends(config)
        tokenless = claims.without_tokens(claims.family_type(config), claims.architecture(config))
        self.source, self.names = find_end_names(modules, config, self.class_ends, tokenless)
        self.input = input_of_head(modules, self.names)
        stored_inputs = [module for module in self.names.inputs if module in modules.tables]
        self.input_modules = sorted(stored_inputs, key=lambda module: module != self.input)
        self.input_tables = tuple(modules.tables[module] for module in self.input_modules)
        self.output = self._output()
        self.output_table = None
        self.stored_ends = [*self.input_modules]
        if self.output in modules.tables:
            self.output_table = modules.tables[self.output]
            self.stored_ends.append(self.output)
        self.headless = tokenless or self._class_lacks_head() or self._is_body_of_unnamed_class()

    def roles(self) -> Roles:
        """Return the role of every stored tensor."""
        end_tables = [self.modules.tables[module] for module in self.stored_ends]
        output = self.output
        if self.headless and self.output_table is None:
            output = None  # a class without a head expects no output table
        return Roles(
            self.source,
            input=next(iter(self.input_tables), None),
            input_name=_weight_name(self.input),
            input_tables=self.input_tables,
            output=self.output_table,
            output_name=_weight_name(output),
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
        """Return the module of the head.

        If a known class stores none, it is a stored module with a usual name and fitting rows.
        """
        output = self.names.output
        if self.source != BY_DATA or output is None:
            return output
        if output in self.modules.tables:
            return output
        usual_output = self.modules.find_usual_output()
        if usual_output is None or usual_output in self.names.inputs:
            return output
        if self._is_of_another_model(usual_output):
            return output
        rows = {table.rows for table in self.input_tables}
        if self.modules.tables[usual_output].rows not in rows:
            return output
        return usual_output

    def _is_of_another_model(self, head: str) -> bool:
        """Return whether a head belongs to another model, whose input table is stored too.

        BLT's patcher, for example, is a complete language model inside the model.
        """
        for path, output in usual_names().pairs:
            if not claims.ends_with(head, output):
                continue
            table = head.removesuffix(output) + path
            if table in self.modules.tables and table not in self.names.inputs:
                return True
        return False

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
        return self.output_table is None or not name.endswith("Model")

    def _is_body_of_unnamed_class(self) -> bool:
        """Return whether the files are a body alone, and the config names no class.

        A body that a class without a head saves lacks the prefix that the class with a head gives it. If its tensors
        are all that a tied class with a head needs, the files may as well be of that class.
        """
        if claims.architecture(self.config) is not None or self.output_table is not None:
            return False
        ends = claims.family_ends(self.config)
        if ends is None or not ends.prefix:
            return False
        needs_more = bool(ends.head or ends.biases)
        if claims.read_claims(self.config).tied and not needs_more:
            return False
        return self._lacks_prefix(ends)

    def _lacks_prefix(self, ends: ClassEnds) -> bool:
        """Return whether the input table, as all tensors, is stored without the prefix of a class."""
        if any(name.startswith(f"{ends.prefix}.") for name in self.modules.tensors):
            return False
        return f"{ends.prefix}.{self.input}" in ends.inputs

    def _biases(self, rows: set[int]) -> Iterator[Stored]:
        """Yield the stored biases of the head. Their length is one of `rows`; empty `rows` allow any length."""
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
        """Return whether a tensor with the name of a bias has the shape of a bias.

        Any vector fits without a stored end, or if the architecture data names it.
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
        """Yield the stored matrices between table width E and hidden width D."""
        for name, tensor in self.modules.tensors.items():
            module, parameter = module_of(name)
            if parameter not in _MAP_PARAMETERS or len(tensor.shape) != 2:
                continue
            is_map = module in self.names.maps or module.rpartition(".")[2] in usual_names().maps
            if is_map and not in_layer(module):
                yield tensor

    def _opaque(self) -> Iterator[Stored]:
        """Yield the tensors, without biases, of end modules that store no table."""
        if self.class_ends is None:
            return
        not_tables = {"bias", *_other_parameters(self.class_ends)}
        for module in dict.fromkeys(self.class_ends.spellings):
            if module in self.modules.tables:
                continue
            for parameter, tensor in self.modules.parts.get(module, {}).items():
                if parameter not in not_tables:
                    yield tensor

    def _unloaded_names(self) -> dict[str, str]:
        """Return {stored name: name that the class expects} of ends that are not loaded."""
        unloaded_names = dict[str, str]()
        for module in self.stored_ends:
            name = self.modules.tables[module].name
            stored_module = module_of(name)[0]
            if self.class_ends is None:
                if stored_module != module:  # for an unknown class only wrappers can be judged
                    unloaded_names[name] = f"{module}.weight"
            elif self.class_ends.loaded_as(stored_module) is None:
                end = self._end_in_class(module, self.class_ends)
                saved_as = self.class_ends.disk.get(end, end)
                unloaded_names[name] = f"{saved_as}.weight"
        return unloaded_names

    def _end_in_class(self, module: str, class_ends: ClassEnds) -> str:
        """Return the class's name of the end stored as `module`, else `module`."""
        if module == self.output:
            return class_ends.output or module
        class_names = dict[str, str]()
        if self.source == BY_DATA:
            class_names = dict(zip(self.names.inputs, class_ends.inputs, strict=True))
        first = next(iter(class_ends.inputs), module)
        return class_names.get(module, first)


def _other_parameters(ends: ClassEnds) -> set[str]:
    """Return the last parts of the names of tied tensors that are no table.

    T5Gemma 2 has the row `eoi_embedding` next to its table.
    """
    tensors = (*ends.tied.keys(), *ends.tied.values())
    return {module_of(tensor)[1] for tensor in tensors} - {"weight"}


def _weight_name(module: str | None) -> str | None:
    """Return the tensor name of a module's table; None for None."""
    if module is None:
        return None
    return f"{module}.weight"


def _has_usual_bias_name(name: str) -> bool:
    """Return whether a tensor has a usual name of a head's bias."""
    return any(claims.ends_with(name, bias) for bias in usual_names().biases)
