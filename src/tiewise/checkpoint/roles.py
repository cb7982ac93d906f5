"""Which stored tensor plays which part at the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiewise.checkpoint.claims import count, model_levels
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.names import BESIDE, PACKED, POSITION, in_layer, is_foreign, module_of, unwrapped, usual

BY_DATA, BY_NAMES, BY_SHAPES = "architecture data", "usual names", "shapes"


@dataclass(frozen=True)
class Roles:
    """The parts of the boundary that a checkpoint stores, and the names they should have.

    Args:
        source: how they were found: "architecture data", "usual names" or "shapes".
        input: the input table [V, E]; None where none is stored.
        input_name: the name under which the class looks for it, stored or not; None where unknown.
        inputs: every stored input table, `input` first (T5 and BART may store `shared` and one for each stack).
        output: the output table [V, E]; None where none is stored.
        output_name: as `input_name`.
        biases: stored biases of the head, [V] or [1, V].
        positions: stored position tables; they are long and wide like a vocabulary, and are none.
        maps: stored matrices between table and hidden width: projections, or the maps of a factored table.
        headless: the class has no token head (an encoder, a classifier, a reward model).
        scalars: numbers in the config that act at the boundary, by dotted key (`text_config.logits_scaling`).
        quantised_input: every tensor of a quantised input table, its packed numbers first; empty where it is plain.
            `input` is then the packed tensor, whose shape is that of the packing.
        quantised_output: as `quantised_input`.
    """

    source: str
    input: Stored | None = None
    input_name: str | None = None
    inputs: tuple[Stored, ...] = ()
    output: Stored | None = None
    output_name: str | None = None
    biases: tuple[Stored, ...] = ()
    positions: tuple[Stored, ...] = ()
    maps: tuple[Stored, ...] = ()
    headless: bool = False
    scalars: dict[str, float] = field(default_factory=dict)
    quantised_input: tuple[Stored, ...] = ()
    quantised_output: tuple[Stored, ...] = ()


class Index:
    """Stored tensors by the names they have once unwrapped."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors = {unwrapped(name): tensor for name, tensor in tensors.items()}
        self.modules: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            module, parameter = module_of(name)
            self.modules.setdefault(module, {})[parameter] = tensor

    def table(self, module: str) -> Stored | None:
        """The matrix that `module` stores, packed or not; None where it stores none."""
        parts = self.modules.get(module, {})
        for parameter in ("weight", *PACKED):
            if parameter in parts and len(parts[parameter].shape) == 2:
                return parts[parameter]
        return None

    def quantised(self, module: str) -> tuple[Stored, ...]:
        """Every tensor of a quantised table, the packed numbers first; empty where `module` stores a plain one."""
        table = self.table(module)
        if table is None:
            return ()
        beside = [tensor for name, tensor in self.modules[module].items() if BESIDE.fullmatch(name)]
        plain = not beside and module_of(table.name)[1] == "weight"
        return () if plain else (table, *beside)


def find_roles(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None) -> Roles:
    """Find them from architecture data, else from usual names, else from shapes."""
    config = config if isinstance(config, Mapping) else {}
    index = Index(tensors)
    vocabularies = {size for _, level in model_levels(config) if (size := count(level.get("vocab_size"))) is not None}
    source = BY_NAMES
    input_module, output_module = _by_names(index)
    if input_module is None and output_module is None:
        source = BY_SHAPES
        input_module, output_module = _by_shapes(index, vocabularies)
    return _roles(index, source, input_module, output_module)


def _by_names(index: Index) -> tuple[str | None, str | None]:
    matches = []
    for module in index.modules:
        if index.table(module) is None or in_layer(module):
            continue
        for rank, (path, output) in enumerate(usual().pairs):
            if module == path or module.endswith(f".{path}"):
                prefix = module.removesuffix(path)
                matches.append((is_foreign(prefix), rank, len(prefix), module, prefix + output))
                break
    output_stored = _stored_output(index)
    if not matches:
        return None, output_stored
    _, _, _, module, output = min(matches)
    if index.table(output) is None and output_stored is not None:
        output = output_stored
    return module, output


def _stored_output(index: Index) -> str | None:
    found = []
    for module in index.modules:
        if index.table(module) is None or in_layer(module):
            continue
        usually = any(module == name or module.endswith(f".{name}") for name in usual().outputs)
        if usually or module in usual().whole_outputs:
            found.append((is_foreign(module), module.count("."), module))
    return min(found)[2] if found else None


def _by_shapes(index: Index, vocabularies: Iterable[int]) -> tuple[str | None, str | None]:
    wanted = set(vocabularies)
    found = []
    for module, parts in index.modules.items():
        table = parts.get("weight")
        if table is None or len(table.shape) != 2 or table.rows not in wanted or POSITION.search(module):
            continue
        if not in_layer(module) and not is_foreign(module):
            found.append(module)
    heads = [module for module in found if "head" in module or "out" in module or "decoder" in module]
    tables = [module for module in found if module not in heads]
    return (tables[0] if tables else None), (heads[0] if heads else None)


def _roles(index: Index, source: str, input_module: str | None, output_module: str | None) -> Roles:
    table = index.table(input_module) if input_module is not None else None
    head = index.table(output_module) if output_module is not None else None
    others = [t for m in index.modules if (t := _input_of_stack(index, m)) is not None and t is not table]
    rows = {end.rows for end in (table, head) if end is not None}
    return Roles(
        source,
        input=table,
        input_name=None if input_module is None else f"{input_module}.weight",
        inputs=(*([table] if table is not None else []), *others),
        output=head,
        output_name=None if output_module is None else f"{output_module}.weight",
        biases=tuple(_biases(index, output_module, rows)),
        positions=tuple(tensor for name, tensor in index.tensors.items() if _is_position(name, tensor)),
        maps=tuple(tensor for name, tensor in index.tensors.items() if _is_map(name, tensor)),
        quantised_input=index.quantised(input_module) if input_module is not None else (),
        quantised_output=index.quantised(output_module) if output_module is not None else (),
    )


def _input_of_stack(index: Index, module: str) -> Stored | None:
    parts = module.split(".")
    stack = parts[-1] == "shared" or parts[-2:] in (["encoder", "embed_tokens"], ["decoder", "embed_tokens"])
    return index.table(module) if stack and not is_foreign(module) and not in_layer(module) else None


def _biases(index: Index, output_module: str | None, rows: set[int]) -> list[Stored]:
    names = set() if output_module is None else {f"{output_module}.bias", f"{module_of(output_module)[0]}.bias"}
    found = []
    for name, tensor in index.tensors.items():
        usually = any(name == bias or name.endswith(f".{bias}") for bias in usual().biases)
        if (name in names or usually) and tensor.shape and (tensor.shape[-1] in rows or not rows):
            found.append(tensor)
    return found


def _is_position(name: str, tensor: Stored) -> bool:
    return len(tensor.shape) == 2 and bool(POSITION.search(name)) and not in_layer(name) and not is_foreign(name)


def _is_map(name: str, tensor: Stored) -> bool:
    module, parameter = module_of(name)
    if parameter not in ("weight", "p", "q", "factor") or len(tensor.shape) != 2:
        return False
    return module.rpartition(".")[2] in usual().maps and not in_layer(module)
