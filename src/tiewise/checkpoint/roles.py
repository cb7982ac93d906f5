"""Which stored tensor plays which part at the vocabulary's two ends, and which others token ids index.

The ends are found in three ways, tried in this order: the class that the config names, as the architecture data knows
it; the names that the two usually have, behind any prefix; matrices with as many rows as the config's vocabulary. For
the others names find them, then shapes: what is called so and has the shape of something else is none.

    per-layer table   a row for each token, the widths of all layers side by side (Gemma 3n, Gemma 4)
    n-gram table      a row for each value of a hash of several ids (LongCat-Flash-Lite, Qwen 4, BLT)
    modality table    rows for the ids from an offset on, which stand for pictures or sounds (Gemma 3n)
    MTP input         the tables of the layers that predict further tokens, mostly copies of the two ends
    MTP output        (DeepSeek-V3, README_WEIGHTS.md)
    draft head        a head over a target's hidden states, one for each further token (Medusa)
    draft map         a draft's own ids as the target's, and back (EAGLE-3: d2t, t2d; vLLM's Medusa: token_map)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tiewise.checkpoint import claims
from tiewise.checkpoint.claims import count, in_layer, is_foreign, model_levels, usual
from tiewise.checkpoint.family_record import ClassEnds, family_data, module_of
from tiewise.checkpoint.stored import FLOATING, Stored

PER_LAYER, NGRAM, MODALITY = "per-layer table", "n-gram table", "modality table"
MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD, DRAFT_MAP = "MTP input", "MTP output", "draft head", "draft map"
PLAIN_TABLE = re.compile(  # ProphetNet's `ngram_embeddings` is of its streams
    r"(^|\.)(embed_tokens_per_layer|ngram_embeddings\.embedders\.\d+|ngram_embedding(\.shard_\d+)?|encoder_hash_tok_embedding)$"
)
_MODALITY = re.compile(r"(^|\.)embed_(vision|audio)\.embedding$")
_FURTHER = re.compile(r"(^|\.)(mtp|nextn)\w*\.")  # what stands before the layers that predict further tokens
_FURTHER_CLASS = re.compile(r"nextn|mtp", re.IGNORECASE)  # a class of such layers alone
# Medusa's heads within a model and alone; the same as vLLM has them
_DRAFT_HEAD = re.compile(r"((.+\.)?medusa_heads?\.)?(\d{1,3}\.\d{1,3}|lm_heads\.\d{1,3})")
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,9})\.(embed_tokens|shared_head\.head)$")
_INPUTS = ("embed_tokens", "word_embeddings", "tok_embeddings", "tok_emb", "embed", "embedding", "embeddings", "emb")
_OUTPUTS = ("lm_head", "head", "shared_head", "output", "output_head", "output_layer", "unembed")


@dataclass(frozen=True)
class IndexedTensor:
    """A stored tensor beside the two ends that token ids index."""

    role: str  # one of the words above
    tensor: Stored  # [rows, width]; of a draft map [rows]
    module: str  # its module's name without wrappers; of a draft map, what stands before `d2t`

    @property
    def by_id(self) -> bool:
        """Whether it has a row for each token, so that a token more or less is a row more or less here too."""
        return self.role in (PER_LAYER, MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD)


@dataclass(frozen=True)
class End:
    """One end of the model, as it is stored."""

    module: str | None = None  # its name; None where none is known
    # by the last part of its name: the weight, or packed numbers and what lies beside them; empty where nothing is
    parts: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Whether its numbers are packed, are of an integer or 8-bit type, or have scales beside them."""
        return any(part != "weight" or tensor.dtype not in FLOATING for part, tensor in self.parts.items())


class StoredModules:
    """The tensors of a checkpoint by module, under names without wrappers."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors, self.tables = dict[str, Stored](), dict[str, Stored]()
        self.parts = dict[str, dict[str, Stored]]()
        names = [(claims.unwrapped(name), name) for name in tensors]
        for plain, name in sorted(names, key=lambda pair: pair[0] != pair[1]):  # of two, the one without wrappers
            if self.tensors.setdefault(plain, tensors[name]) is tensors[name]:
                module, parameter = module_of(plain)
                self.parts.setdefault(module, {})[parameter] = tensors[name]
        for module, parts in self.parts.items():
            for name in ("weight", *claims.PACKED) if module else ():
                if name in parts and (len(parts[name].shape) == 2 or f"{name}.absmax" in parts):
                    self.tables.setdefault(module, parts[name])
        # those that may belong to an end
        self.outer = {name: table for name, table in self.tables.items() if not in_layer(name) and not is_foreign(name)}

    def end(self, module: str | None) -> End:
        """What is stored for the module of an end."""
        below = ("", "weight.", "weight.quant_state.")  # bitsandbytes hangs its statistics there
        parts = {
            f"{at}{name}": tensor
            for at in below
            for name, tensor in self.parts.get(f"{module}.{at}"[:-1], {}).items()
            if f"{at}{name}" in ("weight", *claims.PACKED) or claims.BESIDE.fullmatch(f"{at}{name}")
        }
        return End(module, dict(sorted(parts.items())))

    def hits(self, ends: ClassEnds) -> int:
        """How many of a class's ends are stored under these names."""
        return sum(name in self.tables for name in (*ends.inputs, ends.output))

    def called(self, paths: Iterable[str]) -> list[str]:
        """Modules outside layers whose last part is that of one of the paths: few of many."""
        last = {path.rpartition(".")[2] for path in paths}
        return [module for module in self.tables if module.rpartition(".")[2] in last and not in_layer(module)]

    def usual_output(self) -> str | None:
        """The head that is stored under a usual name, the outermost of several."""
        whole, ending = usual().whole_outputs, usual().outputs
        found = (m for m in self.outer if m in whole or any(claims.ends_with(m, name) for name in ending))
        return min(found, key=lambda module: (module.count("."), module), default=None)


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
    # all that is stored for `input` and for `output`; of a quantised one, the shape of the table is that of the packing
    input_end: End = End()
    output_end: End = End()
    # tensors that the class may tie, {target: source}, under the names that this checkpoint uses; empty where the class
    # is not in the architecture data
    ties: Mapping[str, str] = field(default_factory=dict)
    known: ClassEnds | None = None  # the class as the architecture data has it; None where it is not there
    # {name of an end as stored: name that the class looks for}, where transformers does not load the one
    unread: Mapping[str, str] = field(default_factory=dict)
    # tensors that stand where an end should and are no table: packed in an unknown way, or not of two axes
    opaque: tuple[Stored, ...] = ()
    others: tuple[IndexedTensor, ...] = ()  # all else that token ids index: per layer, by n-grams, for further tokens

    @property
    def tables(self) -> tuple[Stored, ...]:
        """Every stored table of both ends, the head's last."""
        return self.inputs if self.output is None else (*self.inputs, self.output)

    def packed(self, table: Stored) -> bool:
        """Whether a table of the two is quantised, so that its shape does not count its rows."""
        ends = (self.input_end, self.output_end)
        return table.dtype not in FLOATING or any(end.quantised and table in end.parts.values() for end in ends)

    @property
    def counted(self) -> Stored | None:
        """The stored input table, where it has a row for every token."""
        return None if self.input is None or self.packed(self.input) else self.input

    @property
    def pair(self) -> tuple[Stored, ...]:
        """Those of the input table and the head that are stored."""
        return tuple(table for table in (self.input, self.output) if table is not None)

    @property
    def named_like_head(self) -> bool:
        """Whether the class saves the shared table under the head's name."""
        return self.output is not None and self.ties.get(self.input_name or "") == self.output.name

    @property
    def read_input(self) -> Stored | None:
        """The stored input table that transformers loads; None where it loads none."""
        return next((table for table in self.inputs if table.name not in self.unread), None)

    @property
    def read_output(self) -> Stored | None:
        """The stored output table that transformers loads; None where it loads none."""
        return None if self.output is None or self.output.name in self.unread else self.output


def find_roles(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None) -> Roles:
    """Find them from architecture data, else from usual names, else from shapes."""
    config = config if isinstance(config, Mapping) else {}
    modules = StoredModules(tensors)
    kind, name = claims.family_type(config), claims.architecture(config)
    known, tokenless = claims.config_ends(config), claims.without_tokens(kind, name)
    source, here = BY_DATA, _by_data(modules, known or claims.family_ends(config))
    if not modules.hits(here):
        source, here = BY_NAMES, _by_names(modules)
    if not modules.hits(here) and not tokenless:
        source, here = BY_SHAPES, _by_shapes(modules, config)

    first, output = _partner(modules, here), here.output
    inputs = sorted((module for module in here.inputs if module in modules.tables), key=lambda module: module != first)
    tables = tuple(modules.tables[module] for module in inputs)
    if source == BY_DATA and output is not None and output not in modules.tables:  # under a usual name perhaps
        other = modules.usual_output()
        fits = other is not None and modules.tables[other].rows in {table.rows for table in tables}
        output = other if fits and other not in here.inputs else output
    head = modules.tables.get(output or "")

    headless = tokenless or (known is not None and known.output is None)
    body = name in family_data()["bodies"]
    if known is None and name is not None and _HEADLESS.search(name) and (body or not _HEADED.search(name)):
        # a plain `…Model` that stores a head has one: Qwen2.5-Omni was published so
        headless = headless or head is None or not name.endswith("Model")

    rows = {end.rows for end in (*tables, head) if end is not None}
    named = {*here.biases} | (set() if output is None else {f"{output}.bias", f"{module_of(output)[0]}.bias"})
    biases = (
        tensor
        for name, tensor in modules.tensors.items()
        if (name in named or any(claims.ends_with(name, bias) for bias in usual().biases)) and len(tensor.shape) <= 2
        if not rows or (tensor.shape and (tensor.shape[-1] in rows or name in here.biases))
    )
    positions = (
        table
        for module, table in modules.outer.items()
        if (module in here.positions or claims.POSITION.search(module)) and module not in (*inputs, output)
    )
    maps = (
        tensor
        for module, parameter, tensor in ((*module_of(name), tensor) for name, tensor in modules.tensors.items())
        if module in here.maps or module.rpartition(".")[2] in usual().maps
        if parameter in _MAP_PARAMETERS and len(tensor.shape) == 2 and not in_layer(module)
    )
    places = () if known is None else dict.fromkeys(known.spellings)  # where an end may be stored
    odd = [modules.parts.get(place, {}) for place in places if place not in modules.tables]
    opaque = (tensor for parts in odd for parameter, tensor in parts.items() if parameter != "bias")
    unread = dict[str, str]()
    own = dict(zip(here.inputs, known.inputs, strict=True)) if source == BY_DATA and known is not None else {}
    for module in (module for module in (*inputs, output) if module is not None and module in modules.tables):
        name, wanted = modules.tables[module].name, module
        stored = module_of(name)[0]
        looked_for = stored == module  # of an unknown class, wrappers alone are known
        if known is not None:
            looked_for = known.loaded_as(stored) is not None
            end = known.output if module == output else own.get(module, next(iter(known.inputs), None))
            wanted = known.disk.get(end or "", end or module)
        unread |= {} if looked_for else {name: f"{wanted}.weight"}
    return Roles(
        source,
        input=tables[0] if tables else None,
        input_name=None if first is None else f"{first}.weight",
        inputs=tables,
        output=head,
        output_name=None if output is None or (headless and head is None) else f"{output}.weight",
        biases=tuple(biases),
        positions=tuple(positions),
        maps=tuple(maps),
        headless=headless,
        scalars=claims.read_scalars(model_levels(config)),
        input_end=modules.end(first),
        output_end=modules.end(None if headless and head is None else output),
        ties=here.tied,
        known=known,
        unread=unread,
        opaque=tuple(opaque),
        others=tuple(token_tables(modules.tensors, config, [end for end in (*tables, head) if end is not None])),
    )


def _by_data(modules: StoredModules, ends: ClassEnds | None) -> ClassEnds:
    """The names of a class's ends in this file: of all that they may have, those under which most is stored."""
    if ends is None:
        return ClassEnds()
    loaded: dict[str | None, str] = {}  # by an end's own name: what transformers loads it from, the first of several
    for module in sorted(modules.called(ends.spellings)):
        loaded.setdefault(ends.loaded_as(module_of(modules.tables[module].name)[0]), module)
    # as they are loaded, as the class saves them, as its modules are called
    styles = [ends.renamed(lambda name: loaded.get(name, ends.disk.get(name, name)))]
    styles += [ends.renamed(lambda name: ends.disk.get(name, name)), ends]
    if ends.prefix:  # as a body alone saves them, like GPT-2's first conversion
        styles.append(ends.renamed(lambda name: name.removeprefix(f"{ends.prefix}.")))
    if not any(map(modules.hits, styles)):  # it may be a model inside another: behind what stands before its names
        inside = []
        for style in styles:
            names = [*style.inputs, *([style.output] if style.output else [])]
            found = {m.removesuffix(name) for m in modules.called(names) for name in names if m.endswith(f".{name}")}
            prefixes = sorted((p for p in found if not is_foreign(p)), key=lambda p: (len(p), p))
            inside += [style.renamed(prefix.__add__) for prefix in prefixes[:MOST_PREFIXES]]
        styles = inside
    return max(styles, key=modules.hits, default=ends)


def _by_names(modules: StoredModules) -> ClassEnds:
    """The first of the usual pairs, behind any prefix, and the stacks' tables beside it."""
    matches = [
        (is_foreign(prefix), rank, len(prefix), module, prefix + output)
        for module in modules.called(path for path, _ in usual().pairs)
        for rank, (path, output) in enumerate(usual().pairs)
        if claims.ends_with(module, path)
        for prefix in [module.removesuffix(path)]
    ]
    stored_output = modules.usual_output()
    if not matches:
        return ClassEnds(output=stored_output)
    module, output = min(matches)[3:]
    if output not in modules.tables and stored_output is not None and stored_output != module:
        output = stored_output
    # one of several that an encoder and a decoder share
    stacks = [name for name in modules.outer if re.search(r"(^|\.)(shared|(en|de)coder\.embed_tokens)$", name)]
    others = (name for name in stacks if name != module) if module in stacks else ()
    return ClassEnds(inputs=(module, *others), output=output)


def _by_shapes(modules: StoredModules, config: Mapping[str, Any]) -> ClassEnds:
    """The first two matrices with as many rows as a vocabulary of the config: one that sounds like a head, one not."""
    wanted = {count(level.get("vocab_size")) for _, level in model_levels(config)}
    sized = (module for module, table in modules.outer.items() if len(table.shape) == 2 and table.rows in wanted)
    found = [module for module in sized if not claims.POSITION.search(module)]
    heads = [module for module in found if re.search(r"head|out|decoder|proj|logit", module)]
    tables = [module for module in found if module not in heads]
    return ClassEnds(inputs=tuple(tables[:1]), output=next(iter(heads), None))


def _partner(modules: StoredModules, ends: ClassEnds) -> str | None:
    """The input table beside the head: of its shape, then the decoder's, then the one that the head may be tied to.

    Where an encoder and a decoder have tables of their own, `shared` is a rest that no forward reads.
    """
    source = module_of(ends.tied.get(f"{ends.output}.weight", ""))[0]
    stored = [name for name in ends.inputs if name in modules.tables]
    candidates = stored or [name for name in ends.inputs if name == source] or list(ends.inputs)
    head = modules.tables.get(ends.output or "")

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        table = modules.tables.get(name)
        fits = table is not None and head is not None and table.shape == head.shape
        return not fits, "decoder" not in name, name != source, candidates.index(name)

    return min(candidates, key=rank, default=None)


def token_tables(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], ends: Collection[Stored]
) -> Iterator[IndexedTensor]:
    """Yield those among `tensors`, which stand under names without wrappers, that are none of the `ends`."""
    keys = ("num_hidden_layers", "num_layers", "n_layer")
    layers = [number for _, level in model_levels(config) for key in keys if (number := count(level.get(key)))]
    layers = [0] if _FURTHER_CLASS.search(claims.architecture(config) or "") else layers
    taken = {table.name for table in ends}
    for name, tensor in tensors.items():
        module, parameter = module_of(name)
        role = role_of(module, parameter, min(layers, default=0))
        flat = role == DRAFT_MAP
        if role is None or tensor.name in taken or (len(tensor.shape) != (1 if flat else 2) and parameter == "weight"):
            continue
        # a projection may be called `mtp.head`: a table is as wide or as long as an end
        if role in (MTP_INPUT, MTP_OUTPUT) and parameter == "weight":
            like = {axis for end in ends if len(end.shape) == 2 for axis in enumerate(end.shape)}
            if like and like.isdisjoint(enumerate(tensor.shape)):
                continue
        yield IndexedTensor(role, tensor, module)


def role_of(module: str, parameter: str, layers: int) -> str | None:
    """The role that a name sounds like; layers from number `layers` on predict further tokens."""
    if parameter in ("d2t", "t2d", "token_map"):
        return DRAFT_MAP
    if parameter not in ("weight", *claims.PACKED):
        return None
    if _DRAFT_HEAD.fullmatch(module):
        return DRAFT_HEAD
    last = module.rpartition(".")[2]
    if PLAIN_TABLE.search(module):
        return PER_LAYER if last == "embed_tokens_per_layer" else NGRAM
    if _MODALITY.search(module):
        return MODALITY
    inside = _LAYER.search(module)
    if (inside is not None and int(inside[2]) >= layers) or _FURTHER.search(module):
        return MTP_INPUT if last in _INPUTS else MTP_OUTPUT if last in _OUTPUTS else None
    return PER_LAYER if inside is not None and last == "embed_tokens" else None


def modality_config(other: IndexedTensor, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of a modality's table, embed_vision.embedding by vision_config; empty for any other."""
    level = config.get(f"{other.module.rpartition('.')[0].rpartition('embed_')[2]}_config")
    return level if other.role == MODALITY and isinstance(level, Mapping) else {}


def rows_said(other: IndexedTensor, config: Mapping[str, Any]) -> int | None:
    """Rows that a config gives a table: its own size, or that of the hash of its class; None where it says none."""
    if other.role == MODALITY:
        return count(modality_config(other, config).get("vocab_size"))
    levels = [level for _, level in model_levels(config)]
    if other.role == PER_LAYER and other.module.endswith("embed_tokens_per_layer"):
        return claims.first_count(levels, "vocab_size_per_layer_input")
    index = re.search(r"\.embedders\.(\d{1,9})$", other.module)
    for level in levels if other.role == NGRAM else ():
        if index:  # longcat_flash_ngram: each has another odd size, so that the hashes differ
            base = (claims.number(level.get("ngram_vocab_size_ratio")) or 0.0) * (count(level.get("vocab_size")) or 0)
            if 0 < base < 2**63:
                return int(base + 2 * int(index[1]) + 1)
        elif other.module.endswith("encoder_hash_tok_embedding"):
            sizes = level.get("encoder_hash_byte_group_size")
            parts = [count(level.get(f"encoder_hash_byte_group_{key}")) for key in ("vocab", "nb_functions")]
            if isinstance(sizes, list) and None not in parts:
                return len(sizes) * prod(part for part in parts if part is not None)
    return None
