"""Which stored tensor plays which part at the vocabulary's two ends.

Three ways, tried in this order: the class that the config names, as the architecture data knows it; the names that
the two ends usually have, behind any prefix; matrices with as many rows as the config's vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiewise.checkpoint.claims import architecture, count, family_type, model_levels, read_scalars
from tiewise.checkpoint.families import (
    BESIDE,
    PACKED,
    POSITION,
    ClassEnds,
    class_ends,
    ends_with,
    in_layer,
    is_foreign,
    module_of,
    unwrapped,
    usual,
    without_tokens,
)
from tiewise.checkpoint.stored import Stored


class Modules:
    """The tensors of a checkpoint, looked up by module.

    Args:
        tensors: by name as stored. Where two names are one without wrappers, the one without is kept, else the first.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors: dict[str, Stored] = {}
        self.parts: dict[str, dict[str, Stored]] = {}
        names = [(unwrapped(name), name) for name in tensors]
        for plain, name in sorted(names, key=lambda pair: pair[0] != pair[1]):
            tensor = tensors[name]
            if self.tensors.setdefault(plain, tensor) is tensor:
                module, parameter = module_of(plain)
                self.parts.setdefault(module, {})[parameter] = tensor
        self.tables = {module: table for module in self.parts if module and (table := self._table(module)) is not None}

    def _table(self, module: str) -> Stored | None:
        parts = self.parts[module]
        for parameter in ("weight", *PACKED):
            if parameter in parts and (len(parts[parameter].shape) == 2 or f"{parameter}.absmax" in parts):
                return parts[parameter]
        return None

    def quantised(self, module: str | None) -> tuple[Stored, ...]:
        """Every tensor of a quantised table, the packed numbers first; empty where `module` stores a plain one."""
        table = self.tables.get(module or "")
        if table is None or module is None:
            return ()
        inside = f"{module}.weight"  # bitsandbytes hangs its statistics below the weight
        beside = [tensor for name, tensor in self.parts[module].items() if BESIDE.fullmatch(name)]
        beside += list(self.parts.get(inside, {}).values()) + list(self.parts.get(f"{inside}.quant_state", {}).values())
        plain = not beside and self.parts[module].get("weight") is table
        return () if plain else (table, *beside)


BY_DATA, BY_NAMES, BY_SHAPES = "architecture data", "usual names", "shapes"
MOST_PREFIXES = 64
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
    inputs: tuple[Stored, ...] = ()
    output: Stored | None = None  # the output table [V, E]; None where none is stored
    output_name: str | None = None  # as `input_name`
    biases: tuple[Stored, ...] = ()  # stored biases of the head, [V] or [1, V]
    positions: tuple[Stored, ...] = ()  # stored position tables; they are long and wide like a vocabulary, and are none
    # stored matrices between table and hidden width: projections, or the maps of a factored table
    maps: tuple[Stored, ...] = ()
    headless: bool = False  # the class has no token head (an encoder, a classifier, a reward model)
    # numbers in the config that act at the boundary, by dotted key (`text_config.logits_scaling`)
    scalars: dict[str, float] = field(default_factory=dict)
    # every tensor of a quantised input table, its packed numbers first; empty where it is plain. `input` is then the
    # packed tensor, whose shape is that of the packing.
    quantised_input: tuple[Stored, ...] = ()
    quantised_output: tuple[Stored, ...] = ()  # as `quantised_input`
    # tensors that the class may tie, {target: source}, under the names that this checkpoint uses; empty where the class
    # is not in the architecture data
    ties: Mapping[str, str] = field(default_factory=dict)
    known: ClassEnds | None = None  # the class as the architecture data has it; None where it is not there
    # {name of an end as stored: name that the class looks for}, where transformers does not load the one
    unread: Mapping[str, str] = field(default_factory=dict)
    # tensors that stand where an end should and are no table: packed in an unknown way, or not of two axes
    opaque: tuple[Stored, ...] = ()

    @property
    def read_input(self) -> Stored | None:
        """The stored input table that transformers loads; None where it loads none."""
        return next((table for table in self.inputs if table.name not in self.unread), None)

    @property
    def read_output(self) -> Stored | None:
        """The stored output table that transformers loads; None where it loads none."""
        return None if self.output is None or self.output.name in self.unread else self.output


@dataclass(frozen=True)
class _Found:
    """Names of modules, without wrappers."""

    source: str
    inputs: tuple[str, ...] = ()  # stored, the head's partner first
    input: str | None = None
    output: str | None = None
    # biases, maps, positions, in this checkpoint's names
    others: ClassEnds = field(default_factory=lambda: ClassEnds(""))


def find_roles(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None) -> Roles:
    """Find them from architecture data, else from usual names, else from shapes."""
    config = config if isinstance(config, Mapping) else {}
    modules = Modules(tensors)
    kind, name = family_type(config), architecture(config)
    ends = class_ends(kind, name)
    tokenless = without_tokens(kind, name)
    found = _by_data(modules, ends or class_ends(kind, None))
    if not found.inputs and not _stored(modules, found.output):
        found = _by_names(modules)
    if not found.inputs and not _stored(modules, found.output) and not tokenless:
        sizes = (count(level.get("vocab_size")) for _, level in model_levels(config))
        found = _by_shapes(modules, {size for size in sizes if size is not None})
    roles = _roles(modules, found)
    headless = tokenless or (ends.output is None if ends is not None else _sounds_headless(name, roles))
    output_name = None if headless and roles.output is None else roles.output_name
    places = set() if ends is None else {*ends.spellings} - set(modules.tables)  # of the ends, without a table
    opaque = (part for place in places for name, part in modules.parts.get(place, {}).items() if name != "bias")
    return replace(
        roles,
        headless=headless,
        output_name=output_name,
        scalars=read_scalars(model_levels(config)),
        known=ends,
        unread=_unread(modules, found, ends),
        opaque=tuple(opaque),
    )


def _sounds_headless(name: str | None, roles: Roles) -> bool:
    """Whether a class that the data does not have is one without a head, by its name.

    A plain `…Model` that stores a head has one: Qwen2.5-Omni was published so.
    """
    if name is None or not _HEADLESS.search(name) or _HEADED.search(name):
        return False
    return not (name.endswith("Model") and roles.output is not None)


def _stored(modules: Modules, name: str | None) -> bool:
    return name in modules.tables


# by architecture data


def _by_data(modules: Modules, ends: ClassEnds | None) -> _Found:
    if ends is None:
        return _Found(BY_DATA)
    styles = [_loaded(modules, ends), *_styles(ends)]
    if not any(_hits(modules, style) for style in styles):
        styles = [style.renamed(prefix.__add__) for style in styles for prefix in _prefixes(modules, style)]
    style = max(styles, key=lambda style: _hits(modules, style), default=ends)
    stored = tuple(name for name in style.inputs if _stored(modules, name))
    output = style.output
    if stored and output is not None and not _stored(modules, output):
        rows = {modules.tables[name].rows for name in stored}
        other = _stored_output(modules)
        if other is not None and other not in style.inputs and modules.tables[other].rows in rows:
            output = other
    partner = _partner(modules, style, stored)
    return _Found(BY_DATA, _first(partner, stored), partner, output, style)


def _loaded(modules: Modules, ends: ClassEnds) -> ClassEnds:
    """The names from which transformers loads each end in this file; the first of several, as it does."""
    found: dict[str | None, str] = {}
    for module in sorted(_called(modules, ends.spellings)):
        found.setdefault(ends.loaded_as(module_of(modules.tables[module].name)[0]), module)
    return ends.renamed(lambda name: found.get(name, ends.disk.get(name, name)))


def _styles(ends: ClassEnds) -> list[ClassEnds]:
    """The names that one class has in files: as it saves them, as its modules are called, as a body alone saves them.

    The body's last: GPT-2's first conversion is such a file.
    """
    prefix = f"{ends.prefix}." if ends.prefix else ""
    saved = ends.renamed(lambda name: ends.disk.get(name, name))
    return [saved, ends, *([ends.renamed(lambda name: name.removeprefix(prefix))] if prefix else [])]


def _hits(modules: Modules, ends: ClassEnds) -> int:
    return sum(_stored(modules, name) for name in (*ends.inputs, ends.output))


def _prefixes(modules: Modules, ends: ClassEnds) -> list[str]:
    """What stands before the class's own names in this file: a model inside another."""
    names = [*ends.inputs, *([ends.output] if ends.output else [])]
    found = {m.removesuffix(name) for m in _called(modules, names) for name in names if m.endswith(f".{name}")}
    return sorted((p for p in found if not is_foreign(p)), key=lambda p: (len(p), p))[:MOST_PREFIXES]


def _partner(modules: Modules, ends: ClassEnds, stored: tuple[str, ...]) -> str | None:
    """The input table beside the head: of its shape, then the decoder's, then the one that the head may be tied to.

    Where an encoder and a decoder have tables of their own, `shared` is a rest that no forward reads.
    """
    source = module_of(ends.tied.get(f"{ends.output}.weight", ""))[0]
    candidates = list(stored or [name for name in ends.inputs if name == source] or ends.inputs)
    head = modules.tables.get(ends.output or "")

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        table = modules.tables.get(name)
        fits = table is not None and head is not None and table.shape == head.shape
        return not fits, "decoder" not in name, name != source, candidates.index(name)

    return min(candidates, key=rank, default=None)


def _first(name: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    return (name, *(other for other in names if other != name)) if name in names else names


def _unread(modules: Modules, found: _Found, ends: ClassEnds | None) -> dict[str, str]:
    """Ends that are stored where transformers does not look. Of an unknown class that is known of wrappers alone."""
    unread = {}
    for module in (*found.inputs, found.output):
        table = modules.tables.get(module or "")
        if module is None or table is None:
            continue
        stored = module_of(table.name)[0]
        if stored != module if ends is None else ends.loaded_as(stored) is None:
            unread[table.name] = f"{module if ends is None else _wanted(ends, found, module)}.weight"
    return unread


def _wanted(ends: ClassEnds, found: _Found, module: str) -> str:
    """The name under which the class saves what this checkpoint stores as `module`."""
    if module == found.output:
        own = ends.output
    else:
        places = [at for at, name in enumerate(found.others.inputs) if name == module]
        own = next((name for at, name in enumerate(ends.inputs) if at in places), next(iter(ends.inputs), None))
    return ends.disk.get(own or "", own or module)


# by usual names


def _by_names(modules: Modules) -> _Found:
    matches = []
    for module in _called(modules, (path for path, _ in usual().pairs)):
        for rank, (path, output) in enumerate(usual().pairs):
            if ends_with(module, path):
                prefix = module.removesuffix(path)
                matches.append((is_foreign(prefix), rank, len(prefix), module, prefix + output))
                break
    stored_output = _stored_output(modules)
    if not matches:
        return _Found(BY_NAMES, output=stored_output)
    module, output = min(matches)[3:]
    if not _stored(modules, output) and stored_output is not None and stored_output != module:
        output = stored_output
    stacks = tuple(name for name in modules.tables if _is_stack(name) and name != module)
    inputs = (module, *stacks) if _is_stack(module) else (module,)
    partner = _partner(modules, ClassEnds("", inputs=inputs, output=output), inputs)
    return _Found(BY_NAMES, _first(partner, inputs), partner, output)


def _stored_output(modules: Modules) -> str | None:
    found = [
        (module.count("."), module)
        for module in _called(modules, (*usual().outputs, *usual().whole_outputs))
        if module in usual().whole_outputs or any(ends_with(module, name) for name in usual().outputs)
        if not is_foreign(module)
    ]
    return min(found)[1] if found else None


def _called(modules: Modules, paths: Iterable[str]) -> list[str]:
    """Stored tables outside layers whose last part is that of one of the paths: few of many."""
    last = {path.rpartition(".")[2] for path in paths}
    return [module for module in modules.tables if module.rpartition(".")[2] in last and not in_layer(module)]


def _is_stack(module: str) -> bool:
    """Whether a table is one of several that an encoder and a decoder share."""
    parts = module.split(".")
    stack = parts[-1] == "shared" or parts[-2:] in (["encoder", "embed_tokens"], ["decoder", "embed_tokens"])
    return stack and not is_foreign(module) and not in_layer(module)


# by shapes


def _by_shapes(modules: Modules, wanted: set[int]) -> _Found:
    found = [
        module
        for module, table in modules.tables.items()
        if len(table.shape) == 2 and table.rows in wanted and not POSITION.search(module)
        if not in_layer(module) and not is_foreign(module)
    ]
    heads = [module for module in found if re.search(r"head|out|decoder|proj|logit", module)]
    tables = [module for module in found if module not in heads]
    return _Found(BY_SHAPES, tuple(tables[:1]), next(iter(tables), None), next(iter(heads), None))


# what lies beside the ends


def _roles(modules: Modules, found: _Found) -> Roles:
    inputs = tuple(modules.tables[name] for name in found.inputs)
    head = modules.tables.get(found.output or "")
    stored = found.inputs[0] if found.inputs else None
    rows = {end.rows for end in (*inputs, head) if end is not None}
    return Roles(
        found.source,
        input=inputs[0] if inputs else None,
        input_name=None if found.input is None else f"{found.input}.weight",
        inputs=inputs,
        output=head,
        output_name=None if found.output is None else f"{found.output}.weight",
        biases=tuple(_biases(modules, found, rows)),
        positions=tuple(
            table
            for module, table in modules.tables.items()
            if module in found.others.positions or POSITION.search(module)
            if module not in (*found.inputs, found.output) and not in_layer(module) and not is_foreign(module)
        ),
        maps=tuple(_maps(modules, found)),
        quantised_input=modules.quantised(stored),
        quantised_output=modules.quantised(found.output),
        ties=found.others.tied,
    )


def _biases(modules: Modules, found: _Found, rows: set[int]) -> Iterable[Stored]:
    names = set(found.others.biases)
    if found.output is not None:
        names |= {f"{found.output}.bias", f"{module_of(found.output)[0]}.bias"}
    for name, tensor in modules.tensors.items():
        if name in names or any(ends_with(name, bias) for bias in usual().biases):
            long = bool(tensor.shape) and (tensor.shape[-1] in rows or name in found.others.biases)
            if len(tensor.shape) <= 2 and (long or not rows):
                yield tensor


def _maps(modules: Modules, found: _Found) -> Iterable[Stored]:
    for name, tensor in modules.tensors.items():
        module, parameter = module_of(name)
        known = module in found.others.maps or module.rpartition(".")[2] in usual().maps
        if known and parameter in _MAP_PARAMETERS and len(tensor.shape) == 2 and not in_layer(module):
            yield tensor
