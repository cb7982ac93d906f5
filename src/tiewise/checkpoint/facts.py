"""All that rules may ask about one checkpoint, read at most once and only when asked."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import (
    OWN_TYPE,
    PACKED,
    Claim,
    Claims,
    architecture,
    count,
    family_type,
    first_count,
    in_layer,
    is_foreign,
    model_levels,
    read_claims,
)
from tiewise.checkpoint.families import Family, family
from tiewise.checkpoint.family_record import ClassEnds, family_data, module_of
from tiewise.checkpoint.hf_folder import Fault, Folder, json_object, noting
from tiewise.checkpoint.indexed_tensors import DRAFT_HEAD
from tiewise.checkpoint.roles import Roles, find_roles
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.table_scans import (
    SAME_VALUES,
    UNRELATED,
    TableLikeness,
    likeness,
    root_mean_square,
    same_numbers,
)
from tiewise.checkpoint.tokenizer_ids import Tokenizer, read_tokenizer
from tiewise.checkpoint.untrusted import read_json, short
from tiewise.core.errors import CheckpointError, SpecError, doing, similar
from tiewise.core.spec import BoundarySpec

SPEC = "tiewise_boundary"  # of the config: the boundary that this package installed
# a head unrelated to the table whose rows are this many times shorter looks like one that training never reached
UNTRAINED = 10
SCALED = 10  # an input table is scaled up if its values are so many times as large as those of the layers
_WIDTH_KEYS = ("emb", "hidden", "dim", "d_model")
_NO_VOCABULARY = re.compile(r"type_vocab|multiple")  # segments of BERT, paddings
_EXTRA_KEYS = ("additional_vocab_size", "prompt_types", "prompt_length", "num_codebooks", "codebook_vocab_size")
TEXT_PARTS = ("text_config", "decoder", "generator", "llm_config", "language_config")
# in a draft's class; Eagle 2 and 2.5 are vision-language models too
_DRAFT = re.compile(
    r"(eagle|medusa|dflash|dspark)(?!.*(VL|Chat|Conditional))|speculator|nextn|mtp(model)?$", re.IGNORECASE
)


class Pair(NamedTuple):
    """The two stored tables, compared."""

    table: Stored
    head: Stored
    alike: TableLikeness


class Draft(NamedTuple):
    """What a folder says of its draft vocabulary; None for what it does not say."""

    map: Stored | None  # d2t, or token_map
    t2d: Stored | None
    size: int | None  # N
    reduced: bool  # it drafts over a part of the vocabulary, and so needs a map
    heads: tuple[Stored, ...]  # Medusa's, each [N or V, D]

    @property
    def holds_ids(self) -> bool:
        """Whether the map holds the tokens' ids; d2t holds their distances from the row."""
        return self.map is not None and self.map.name.endswith("token_map")


@dataclass(frozen=True)
class Facts:
    """One checkpoint. Everything beyond the headers is read by the first rule that asks."""

    folder: Folder  # files, headers, config
    scan: bool = True  # tables may be read (False: headers only)
    world: int | None = None  # ranks that its tables are to be spread over
    as_class: str | None = None  # the class of transformers that it is loaded as, where not that of its own config
    quantise: Mapping[str, Any] | None = None  # a quantisation that is to come, as a config describes it
    target: Facts | None = None  # the model that a draft proposes tokens to; None where none was given

    @property
    def path(self) -> Path:
        """What was given: the folder, or the single file."""
        return self.folder.path / self.folder.files[0] if self.folder.single else self.folder.path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json; empty where there is none."""
        return self.folder.config or {}

    @property
    def is_own(self) -> bool:
        """Whether the checkpoint has a boundary that only this package loads."""
        return self.config.get("model_type") == OWN_TYPE

    @property
    def complete(self) -> bool:
        """Whether every file of tensors could be read: only then does the absence of a tensor mean anything."""
        files = self.folder
        return bool(files.tensors) and not any(fault.file.endswith(".safetensors") for fault in files.faults)

    @cached_property
    def claims(self) -> Claims:
        """What the config says of tying."""
        return read_claims(self.folder.config)

    @property
    def family(self) -> Family:
        """Return the record of its family: the base family where this package stored it."""
        return family(family_type(self.config))

    @cached_property
    def boundary(self) -> BoundarySpec | None:
        """The stored boundary that only this package loads; None if there is none or its text cannot be parsed."""
        written = self.config.get(SPEC) if self.is_own else None
        if not isinstance(written, str):
            return None
        with suppress(SpecError):
            return BoundarySpec.parse(written)
        return None

    @property
    def tied(self) -> bool | None:
        """Whether the config ties the two ends: by its spec where our own class reads it, else by its flag."""
        return self.claims.tied if self.boundary is None else self.boundary.tables == 1

    @cached_property
    def levels(self) -> dict[str, Mapping[str, Any]]:
        """The mappings behind `claims.levels`, by dotted path."""
        return dict(model_levels(self.config))

    @cached_property
    def text(self) -> Claim:
        """The level that describes the vocabulary: the deciding one, or the part below it that has a `vocab_size`."""
        below = (claim for claim in self.claims.levels if claim.level.rpartition(".")[2] in TEXT_PARTS)
        return next((claim for claim in below if claim.vocab_size is not None), self.claims.deciding)

    @cached_property
    def roles(self) -> Roles:
        """Which tensor plays which part."""
        return find_roles(self.folder.tensors, self.folder.config)

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """Sizes of vocabularies that the config names at any level, and these with the extra rows of a family."""
        return _vocabulary_sizes(self.levels.values())

    @cached_property
    def text_vocabularies(self) -> frozenset[int]:
        """`vocabularies` without the `vocab_size` of levels above `text`, which speak of the same tokens again.

        A known class reads the level `text` alone. Of an unknown class any level may count.
        """
        if not self.claims.known:
            return self.vocabularies
        levels = dict(self.levels)
        for path in levels:
            if path != self.text.level and f"{self.text.level}.".startswith(f"{path}." if path else ""):
                levels[path] = {key: value for key, value in levels[path].items() if key != "vocab_size"}
        return _vocabulary_sizes(levels.values())

    @property
    def extra_rows(self) -> int:
        """Rows that the class gives the input table beyond vocab_size and the head lacks: Mllama's 8 for pictures."""
        record = family(self.text.model_type)
        return record.extra_rows if record.head_lacks_extra_rows else 0

    @property
    def unequal_on_purpose(self) -> str | None:
        """Why the class has tables of different numbers of rows; None where all should have the same number."""
        rows = {table.name: table.rows for table in self.roles.tables}
        listed = ", ".join(f"{short(name)} {count:,}" for name, count in rows.items())
        if self.extra_rows and len(set(rows.values())) > 1:
            return f"its class gives the input table {self.extra_rows} rows that the head lacks ({listed})"
        if len({table.rows for table in self.roles.inputs}) > 1 and set(rows.values()) <= self.text_vocabularies:
            return f"it has two vocabularies ({listed} rows)"
        return None

    @cached_property
    def quantised(self) -> bool:
        """Whether the config names a quantisation, or an end is stored quantised."""
        return "quantization_config" in self.config or self.roles.input_end.quantised or self.roles.output_end.quantised

    @property
    def ends(self) -> TableLikeness | None:
        """How alike the two tables are; None unless both are stored, comparable, and may be read."""
        return None if self.pair is None else self.pair.alike

    @cached_property
    def pair(self) -> Pair | None:
        """The two tables and how alike they are; None as `ends`."""
        table, head = self.roles.input, self.roles.output
        if table is None or head is None or (alike := self.compare(table, head)) is None:
            return None
        return Pair(table, head, alike)

    @cached_property
    def packed_twice(self) -> bool:
        """Whether both ends are stored packed, and every part of the one holds the bytes of the other's."""
        table, head = self.roles.input_end, self.roles.output_end
        if not self.scan or not (table.quantised and head.quantised) or table.parts.keys() != head.parts.keys():
            return False
        return all(self.same(part, head.parts[name]) for name, part in table.parts.items())

    @cached_property
    def unplaced(self) -> list[Stored]:
        """Stored matrices with the rows of a vocabulary that play no known part: one may be an end under a new name."""
        roles = self.roles
        known = {tensor.name for tensor in (*roles.tables, *roles.positions, *roles.biases)}
        known |= {other.tensor.name for other in roles.others}
        rows = {table.rows for table in roles.pair} | self.vocabularies
        return [
            tensor
            for tensor in self.folder.tensors.values()
            if len(tensor.shape) == 2 and not rows.isdisjoint(tensor.shape) and tensor.name not in known
            if not in_layer(tensor.name) and not is_foreign(tensor.name)
        ]

    def explains(self, table: Stored) -> bool:
        """Whether a table is as wide as the model, or as something that the config or a stored map says."""
        width, roles = table.shape[1], self.roles
        if table is roles.output and roles.known is not None and roles.known.wide and self.text.hidden_size is not None:
            return width == self.text.hidden_size * next(iter(roles.known.wide.values()))
        named = (item for level in self.levels.values() for item in level.items())
        said = (value for key, value in named if any(word in key for word in _WIDTH_KEYS) and type(value) is int)
        mapped = any(width in tensor.shape for tensor in self.roles.maps)  # maps may follow one another
        return self.text.hidden_size in (None, width) or mapped or width in said

    @cached_property
    def misfits(self) -> dict[str, tuple[int, ...]]:
        """{stored bias of the head: shape that the class gives it} where the two are not the same."""
        roles = self.roles
        rows = [table.rows for table in reversed(roles.pair) if not roles.packed(table)]
        rows += [self.text.vocab_size] if self.text.vocab_size is not None else []
        found = dict[str, tuple[int, ...]]()
        if roles.known is None or not rows:
            return found
        for name, tensor in self.folder.tensors.items():
            if name.endswith("bias") and not in_layer(name) and (own := roles.known.loaded_as(name)) is not None:
                wanted = (1, rows[0]) if own == "final_logits_bias" else (rows[0],)
                found |= {name: wanted} if tensor.shape != wanted else {}
        return found

    @cached_property
    def half_read(self) -> list[Stored]:
        """Input tables that transformers does not load under their names, where it loads another one of several."""
        unread = [table for table in self.roles.inputs if table.name in self.roles.unread]
        return [] if self.roles.read_input is None else unread

    @cached_property
    def foreign_layers(self) -> str | None:
        """What stands before the layers' numbers, where transformers loads none of them into its class; else None."""
        known = self.roles.known
        if known is None or not known.layers or not self.complete:
            return None
        names = (re.match(r"(.+?)\.\d+\.", name) for name in self.folder.tensors)
        stored = [found[1] for found in names if found is not None and not is_foreign(found[1])]
        before = f"{known.prefix}."
        read = {form for own in known.layers for form in (own, before + own, own.removeprefix(before))}
        return stored[0] if stored and read.isdisjoint(stored) else None

    @cached_property
    def fresh(self) -> tuple[tuple[str, str], ...]:
        """(tensor that starts anew, the stored one that it would be tied to) of an untied model, beside its head."""
        roles = self.roles
        if self.claims.ties_others is not False or self.is_own or roles.headless or not self.complete:
            return ()
        stored = {tensor.name for tensor in (*roles.inputs, *roles.biases)} - set(roles.unread)
        head = {roles.output_name, roles.unread.get(roles.output_name or "")}
        return tuple(
            (target, source)
            for target, source in roles.ties.items()
            if target not in head and target not in stored and source in stored
        )

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Tensors of the ends, of the head's bias and of its layers that start anew: neither stored nor tied to one.

        As the class calls them. Empty where the class is unknown, or where something was not read.
        """
        roles, known = self.roles, self.roles.known
        if known is None or roles.headless or self.is_own or not self.complete or roles.opaque:
            return ()
        modules = [*known.inputs, *([known.output] if known.output is not None else [])]
        looked_for = [*(f"{module}.weight" for module in modules), *known.biases, *known.head]
        there = self._loaded(known)
        ties = [
            {target, source}
            for target, source in known.tied.items()
            if (self.claims.tied if target == f"{known.output}.weight" else self.claims.ties_others) is not False
        ]
        for _ in ties:  # a tie fills the one from the other, in both directions
            there |= {name for pair in ties if not pair.isdisjoint(there) for name in pair}
        there.add("final_logits_bias")  # starts as zeros, and few files hold it
        return tuple(name for name in looked_for if name not in there and known.has(name, self.config))

    def _loaded(self, known: ClassEnds) -> set[str]:
        """Names that a class gives to the tensors that transformers loads from the file."""
        found = set[str]()
        for name in self.folder.tensors:
            module, parameter = module_of(name)
            end = known.loaded_as(module) if parameter == "weight" or parameter in PACKED else None
            found |= {f"{end}.weight"} if end is not None and end not in known.biases else set()
            found |= {own for own in (known.loaded_as(name), known.head_tensor(name)) if own is not None}
        return found

    @property
    def missing_tables(self) -> list[str]:
        """Those of `missing` that are input tables, where another one is stored."""
        known = self.roles.known
        if known is None or self.roles.read_input is None or self.half_read:
            return []
        told = {target for target, _ in self.fresh}
        return [name for name in self.missing if module_of(name)[0] in known.inputs and self.named(name) not in told]

    @property
    def missing_biases(self) -> list[str]:
        """Those of `missing` that are biases of the head, where a table is stored."""
        known = self.roles.known
        if known is None or (self.roles.read_input is None and self.roles.read_output is None):
            return []
        told = {target for target, _ in self.fresh}
        return [name for name in self.missing if name in known.biases and self.named(name) not in told]

    @property
    def missing_head(self) -> list[str]:
        """Those of `missing` that stand between the body and the head, where a table is stored."""
        known = self.roles.known
        if known is None or (self.roles.read_input is None and self.roles.read_output is None):
            return []
        return [name for name in self.missing if name in known.head]

    def named(self, tensor: str) -> str:
        """Return the name that a saved file gives to a tensor of the class."""
        disk, (module, parameter) = {} if self.roles.known is None else self.roles.known.disk, module_of(tensor)
        return disk.get(tensor, f"{disk.get(module, module)}.{parameter}")

    @cached_property
    def scaled_up(self) -> float | None:
        """How many times larger the input table's values are than those of its layers, by their root mean squares.

        None up to `SCALED` times, for packed tables, and without a scan.
        """
        table = self.roles.counted
        layers = (tensor for name, tensor in self.folder.tensors.items() if in_layer(name) and name.endswith(".weight"))
        matrix = next((one for one in layers if len(one.shape) == 2 and one.dtype in FLOATING), None)
        if not self.scan or table is None or matrix is None or (of_layer := root_mean_square(matrix)) == 0:
            return None
        ratio = root_mean_square(table) / of_layer
        return ratio if ratio > SCALED else None

    @cached_property
    def truth(self) -> bool | None:
        """What the tensors say of tying: False where a head of other values is stored; None where it is not known."""
        if self.roles.headless or self.roles.input is None or not self.complete:
            return None
        if self.roles.output is None:
            return True
        return None if self.ends is None or self.ends.kind == SAME_VALUES else self.ends.equal

    @property
    def untrained_head(self) -> bool:
        """Whether the stored head is unrelated to the table and much shorter: a leftover that was never trained."""
        alike = self.ends
        return alike is not None and alike.kind == UNRELATED and alike.length_ratio * UNTRAINED < 1

    @property
    def layer_ties(self) -> tuple[str, ...]:
        """Modules inside layers that the flag ties too, `#` for a layer's number: Zamba's shared transformer blocks.

        Empty where the class always ties or never does, whatever the flag says.
        """
        known = self.roles.known
        return () if known is None or self.claims.fixed is not None else known.layer_ties

    def stored_layers(self, module: str) -> tuple[str, ...]:
        """Names under which a module inside layers is stored: one for each layer that stores it, in file order."""
        pattern = re.compile(r"\d+".join(map(re.escape, module.split("#"))))
        found = (pattern.search(name) for name in self.folder.tensors)
        return tuple(dict.fromkeys(match[0] for match in found if match is not None))

    @cached_property
    def draft_heads(self) -> tuple[Stored, ...]:
        """Medusa's heads that are stored as plain matrices."""
        heads = (other.tensor for other in self.roles.others if other.role == DRAFT_HEAD)
        return tuple(head for head in heads if head.dtype in FLOATING and len(head.shape) == 2)

    @cached_property
    def vocabulary(self) -> int | None:
        """V by the config, else the rows of the input table, else of Medusa's heads; None where none says."""
        sizes = [claim.vocab_size for claim in (self.text, *self.claims.levels)]  # of a speculator one level down
        sizes += [table.rows for table in (self.roles.counted, *self.draft_heads) if table is not None]
        return next((size for size in sizes if size is not None), None)

    @cached_property
    def draft(self) -> Draft | None:
        """What makes it a draft that no loader can use alone; None of a model of its own."""
        last = {name.rpartition(".")[2]: tensor for name, tensor in self.folder.tensors.items()}
        size = first_count(self.levels.values(), "draft_vocab_size", "truncated_vocab_size")
        heads = () if self.roles.input is not None else self.draft_heads  # a whole model may have such heads too
        table, t2d, every = last.get("d2t", last.get("token_map")), last.get("t2d"), self.vocabulary
        kind = f"{architecture(self.config)} {self.text.model_type}"
        if table is t2d is size is None and not heads and not any(map(_DRAFT.search, kind.split())):
            return None
        return Draft(table, t2d, size, size is not None and every is not None and size < every, heads)

    @cached_property
    def generation(self) -> Mapping[str, Any] | Fault:
        """generation_config.json; empty without one, a fault where it cannot be read."""
        return self._further("generation_config.json")

    @cached_property
    def modelopt(self) -> Mapping[str, Any] | Fault:
        """hf_quant_config.json, in which ModelOpt describes its quantisation; empty or a fault as `generation`."""
        return self._further("hf_quant_config.json")

    def _further(self, name: str) -> Mapping[str, Any] | Fault:
        faults = list[Fault]()
        if self.folder.single or not self.folder.has(name):
            return {}
        with noting(faults, name):
            return json_object(self.folder.path, name)
        return faults[0]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What the tokenizer's files say; None without any, and for a single file."""
        return None if self.folder.single else read_tokenizer(self.folder)

    def compare(self, a: Stored, b: Stored) -> TableLikeness | None:
        """How alike two tables are; None unless they are comparable and may be read."""
        with doing(f"comparing {short(a.name)}", a.nbytes):
            return likeness(a, b) if self.scan else None

    def same(self, a: Stored, b: Stored) -> bool:
        """Whether one tensor can stand for the other: same bytes, or same numbers. Reads them."""
        with doing(f"comparing {short(a.name)}", a.nbytes):
            return same_numbers(a, b)

    def command(self, verb: str, *options: str) -> str:
        """Return the command line of a rewriting verb for this checkpoint."""
        return " ".join(["tiewise", verb, shlex.quote(str(self.path)), *options, "--to NEW_DIR"])


def _vocabulary_sizes(levels: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    found: set[int] = set()
    for level in levels:
        named = (value for key, value in level.items() if "vocab" in key and not _NO_VOCABULARY.search(key))
        known, number = family(level.get("model_type")), {key: count(level.get(key)) or 0 for key in _EXTRA_KEYS}
        extra = {known.extra_rows}
        if known.has_codebook_rows:
            extra.add(number["num_codebooks"] * number["codebook_vocab_size"] + 1)
        extra |= {0, number["additional_vocab_size"], number["prompt_types"] * number["prompt_length"]}
        found |= {size + rows for size in map(count, named) if size is not None for rows in extra}
    return frozenset(found)


def config_for(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config that transformers gives a class: the root, or the part that is of the class's family."""
    families = family_data()["families"]
    own = [kind for kind, record in families.items() if name in record.get("classes", {})]
    if not own:
        near = similar(name, [each for record in families.values() for each in record.get("classes", {})])
        fix = f"did you mean {' or '.join(near)}?" if near else "write it as transformers does: LlamaForCausalLM"
        what = f"transformers {family_data()['transformers']} has no class {short(name)} with a table of tokens"
        raise CheckpointError(what, fix)
    parts = [part for part in (config, config.get("text_config"), *config.values()) if isinstance(part, Mapping)]
    part = next((part for part in parts if part.get("model_type") in own), None)
    if part is None:
        said = sorted({short(part["model_type"]) for part in parts if isinstance(part.get("model_type"), str)})
        fix = f"choose a class of {' or '.join(said)}" if said else "write model_type into config.json"
        raise CheckpointError(f"{name} is of the family {own[0]}, and no part of the config is", fix)
    return {**part, "architectures": [name]}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes a quantisation; empty where none does."""
    levels = (config, config.get("text_config"), config.get("llm_config"))
    keys = ("quantization_config", "compression_config", "quantization")
    found = (level.get(key) for level in levels if isinstance(level, Mapping) for key in keys)
    return next((section for section in found if isinstance(section, Mapping)), {})


def read_quantisation(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read the config of a quantisation: a config.json that has one, or a file of the tool's own."""
    record = read_json(os.fspath(path), most=2**24)
    if not isinstance(record, dict) or not record or ("model_type" in record and not quantisation(record)):
        fix = "give a JSON file with quant_method, or a config.json that has quantization_config"
        raise CheckpointError(f"{path}: no config of a quantisation", fix)
    return quantisation(record) or record
