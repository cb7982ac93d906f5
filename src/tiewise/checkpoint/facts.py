"""Facts about one checkpoint for the rules: each is read at most once, and only when a rule uses it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
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
    family_type,
    first_count,
    in_layer,
    is_foreign,
    model_levels,
    read_claims,
)
from tiewise.checkpoint.config_parts import vocabulary_sizes
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import ClassEnds, Family, module_of
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
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import SpecError, doing
from tiewise.core.spec import BoundarySpec

SPEC = "tiewise_boundary"  # of the config: the boundary that this package installed
# a head unrelated to the table whose rows are this many times shorter looks like one that training never reached
UNTRAINED = 10
SCALED = 10  # an input table is scaled up if its values are so many times as large as those of the layers
_WIDTH_KEYS = ("emb", "hidden", "dim", "d_model")
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
    """Draft vocabulary of a folder; None for a part that it does not have."""

    map: Stored | None  # d2t, or token_map
    t2d: Stored | None
    size: int | None  # N
    reduced: bool  # it drafts over a part of the vocabulary, and so needs a map
    heads: tuple[Stored, ...]  # Medusa's, each [N or V, D]

    @property
    def holds_ids(self) -> bool:
        """Return whether the map has the tokens' ids; d2t has their distances from the row."""
        return self.map is not None and self.map.name.endswith("token_map")


@dataclass(frozen=True)
class Facts:
    """One checkpoint. Everything beyond the headers is read by the first rule that uses it."""

    folder: Folder  # files, headers, config
    scan: bool = True  # tables may be read (False: headers only)
    world: int | None = None  # ranks that its tables are to be spread over
    as_class: str | None = None  # the class of transformers that it is loaded as, where not that of its own config
    quantise: Mapping[str, Any] | None = None  # a quantisation that is to come, as a config describes it
    target: Facts | None = None  # the model that a draft proposes tokens to; None where none was given

    @property
    def path(self) -> Path:
        """Return the path that was given: the folder, or the single file."""
        return self.folder.path / self.folder.files[0] if self.folder.single else self.folder.path

    @property
    def config(self) -> Mapping[str, Any]:
        """Return config.json; empty if there is none."""
        return self.folder.config or {}

    @property
    def is_own(self) -> bool:
        """Return whether the checkpoint has a boundary that only this package loads."""
        return self.config.get("model_type") == OWN_TYPE

    @property
    def complete(self) -> bool:
        """Return whether every file of tensors could be read: only then does the absence of a tensor mean anything."""
        files = self.folder
        return bool(files.tensors) and not any(fault.file.endswith(".safetensors") for fault in files.faults)

    @cached_property
    def claims(self) -> Claims:
        """Return what the config says of tying."""
        return read_claims(self.folder.config)

    @property
    def family(self) -> Family:
        """Return the record of its family: the base family if this package stored it."""
        return family(family_type(self.config))

    @cached_property
    def boundary(self) -> BoundarySpec | None:
        """Return the stored boundary that only this package loads; None without one that can be parsed."""
        written = self.config.get(SPEC) if self.is_own else None
        if not isinstance(written, str):
            return None
        with suppress(SpecError):
            return BoundarySpec.parse(written)
        return None

    @property
    def tied(self) -> bool | None:
        """Return whether the config ties the two ends: by its spec if our class reads it, else by its flag."""
        return self.claims.tied if self.boundary is None else self.boundary.tables == 1

    @cached_property
    def levels(self) -> dict[str, Mapping[str, Any]]:
        """Return the mappings behind `claims.levels`, by dotted path."""
        return dict(model_levels(self.config))

    @cached_property
    def text(self) -> Claim:
        """Return the level that describes the vocabulary: a part with a `vocab_size`, else the deciding one."""
        for claim in self.claims.levels:
            is_text_part = claim.level.rpartition(".")[2] in TEXT_PARTS
            if is_text_part and claim.vocab_size is not None:
                return claim
        return self.claims.deciding

    @cached_property
    def roles(self) -> Roles:
        """Return the part that each tensor plays."""
        return find_roles(self.folder.tensors, self.folder.config)

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """Return sizes of vocabularies that the config names, and these with the extra rows of a family."""
        return vocabulary_sizes(self.levels.values())

    @cached_property
    def text_vocabularies(self) -> frozenset[int]:
        """Return `vocabularies` without the `vocab_size` of levels above `text`, which repeat the same tokens.

        A known class reads the level `text` alone. Of an unknown class any level may count.
        """
        if not self.claims.known:
            return self.vocabularies
        levels = dict(self.levels)
        for path in levels:
            is_above = path != self.text.level and f"{self.text.level}.".startswith(f"{path}." if path else "")
            if is_above:
                levels[path] = {key: value for key, value in levels[path].items() if key != "vocab_size"}
        return vocabulary_sizes(levels.values())

    @property
    def extra_rows(self) -> int:
        """Rows that the class gives the input table beyond vocab_size and the head lacks: Mllama's 8 for pictures."""
        record = family(self.text.model_type)
        return record.extra_rows if record.head_lacks_extra_rows else 0

    @property
    def unequal_on_purpose(self) -> str | None:
        """Return why the class has tables of different numbers of rows; None if all should have the same number."""
        rows = {table.name: table.rows for table in self.roles.tables}
        listed = ", ".join(f"{short(name)} {count:,}" for name, count in rows.items())
        if self.extra_rows and len(set(rows.values())) > 1:
            return f"its class gives the input table {self.extra_rows} rows that the head lacks ({listed})"
        input_rows = {table.rows for table in self.roles.inputs}
        if len(input_rows) > 1 and self.text_vocabularies.issuperset(rows.values()):
            return f"it has two vocabularies ({listed} rows)"
        return None

    @cached_property
    def quantised(self) -> bool:
        """Return whether the config names a quantisation, or an end is stored quantised."""
        return "quantization_config" in self.config or self.roles.input_end.quantised or self.roles.output_end.quantised

    @property
    def ends(self) -> TableLikeness | None:
        """Return how alike the two tables are; None unless both are stored, comparable, and may be read."""
        return None if self.pair is None else self.pair.alike

    @cached_property
    def pair(self) -> Pair | None:
        """Return the two tables and how alike they are; None as `ends`."""
        table, head = self.roles.input, self.roles.output
        if table is None or head is None:
            return None
        alike = self.compare(table, head)
        return None if alike is None else Pair(table, head, alike)

    @cached_property
    def packed_twice(self) -> bool:
        """Return whether both ends are stored packed, and every part of one has the bytes of the other's."""
        table, head = self.roles.input_end, self.roles.output_end
        are_quantised = table.quantised and head.quantised
        if not self.scan or not are_quantised or table.parts.keys() != head.parts.keys():
            return False
        return all(self.same(part, head.parts[name]) for name, part in table.parts.items())

    @cached_property
    def unplaced(self) -> list[Stored]:
        """Return stored matrices with a vocabulary's rows and no known part: one may be an end under a new name."""
        roles = self.roles
        placed = {tensor.name for tensor in (*roles.tables, *roles.positions, *roles.biases)}
        placed |= {other.tensor.name for other in roles.others}
        rows = {table.rows for table in roles.pair} | self.vocabularies
        unplaced = []
        for tensor in self.folder.tensors.values():
            is_long = len(tensor.shape) == 2 and not rows.isdisjoint(tensor.shape)
            if not is_long or tensor.name in placed:
                continue
            if not in_layer(tensor.name) and not is_foreign(tensor.name):
                unplaced.append(tensor)
        return unplaced

    def explains(self, table: Stored) -> bool:
        """Return whether a table is as wide as the model, or as a number of the config or a stored map."""
        width, hidden_size = table.shape[1], self.text.hidden_size
        known = self.roles.known
        if table is self.roles.output and known is not None and known.wide and hidden_size is not None:
            return width == hidden_size * next(iter(known.wide.values()))
        if hidden_size is None or width == hidden_size:
            return True
        is_mapped = any(width in tensor.shape for tensor in self.roles.maps)  # maps may follow one another
        return is_mapped or width in self._widths

    @property
    def _widths(self) -> set[int]:
        """Return the whole numbers of the config whose keys sound like a width."""
        widths = set[int]()
        for level in self.levels.values():
            for key, value in level.items():
                if type(value) is int and any(word in key for word in _WIDTH_KEYS):
                    widths.add(value)
        return widths

    @cached_property
    def misfits(self) -> dict[str, tuple[int, ...]]:
        """Return {stored bias of the head: shape that the class gives it} where the two are not the same."""
        known, rows = self.roles.known, self._class_rows
        if known is None or rows is None:
            return {}
        misfits = dict[str, tuple[int, ...]]()
        for name, tensor in self.folder.tensors.items():
            if not name.endswith("bias") or in_layer(name):
                continue
            bias = known.loaded_as(name)
            shape = (1, rows) if bias == "final_logits_bias" else (rows,)
            if bias is not None and tensor.shape != shape:
                misfits[name] = shape
        return misfits

    @property
    def _class_rows(self) -> int | None:
        """Return the rows of the head, else of the input table, else by the config; None if none is known."""
        for table in reversed(self.roles.pair):
            if not self.roles.packed(table):
                return table.rows
        return self.text.vocab_size

    @cached_property
    def half_read(self) -> list[Stored]:
        """Return input tables that transformers does not load under their names, though it loads another one."""
        if self.roles.read_input is None:
            return []
        return [table for table in self.roles.inputs if table.name in self.roles.unread]

    @cached_property
    def foreign_layers(self) -> str | None:
        """Return the prefix of the layers' numbers, if transformers loads none of the layers into its class."""
        known = self.roles.known
        if known is None or not known.layers or not self.complete:
            return None
        matches = (re.match(r"(.+?)\.\d+\.", name) for name in self.folder.tensors)
        stored = [match[1] for match in matches if match is not None]
        own = [prefix for prefix in stored if not is_foreign(prefix)]
        body = f"{known.prefix}."
        read = set[str]()
        for prefix in known.layers:
            read |= {prefix, body + prefix, prefix.removeprefix(body)}
        return own[0] if own and read.isdisjoint(own) else None

    @cached_property
    def fresh(self) -> tuple[tuple[str, str], ...]:
        """Return (tensor that starts anew, stored one that it would be tied to) of an untied model, head excepted."""
        roles = self.roles
        if self.claims.ties_others is not False or self.is_own or roles.headless or not self.complete:
            return ()
        loaded = {tensor.name for tensor in (*roles.inputs, *roles.biases)} - set(roles.unread)
        not_fresh = {roles.output_name, roles.unread.get(roles.output_name or ""), *loaded}
        return tuple(
            (target, source) for target, source in roles.ties.items() if source in loaded and target not in not_fresh
        )

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Return tensors of the ends, of the head's bias and of its layers that are neither stored nor tied to one.

        They start anew. Names are the class's. Empty if the class is unknown, or if something was not read.
        """
        roles, known = self.roles, self.roles.known
        if known is None or roles.headless or self.is_own or not self.complete or roles.opaque:
            return ()
        modules = list(known.inputs)
        if known.output is not None:
            modules.append(known.output)
        needed = [*(f"{module}.weight" for module in modules), *known.biases, *known.head]
        available = self._loaded_or_tied(known)
        available.add("final_logits_bias")  # starts as zeros, and few files have it
        return tuple(name for name in needed if name not in available and known.has(name, self.config))

    def _loaded_or_tied(self, known: ClassEnds) -> set[str]:
        """Return the class's names of tensors that are loaded, or that a tie fills from a loaded one.

        A tie fills either tensor from the other.
        """
        ties = []
        for target, source in known.tied.items():
            is_head = target == f"{known.output}.weight"
            flag = self.claims.tied if is_head else self.claims.ties_others
            if flag is not False:
                ties.append({target, source})
        available = self._loaded(known)
        for _ in ties:  # a chain of ties is no longer than their number
            for pair in [pair for pair in ties if not pair.isdisjoint(available)]:
                available |= pair
        return available

    def _loaded(self, known: ClassEnds) -> set[str]:
        """Return the class's names of the tensors that transformers loads from the file."""
        loaded = set[str | None]()
        for name in self.folder.tensors:
            module, parameter = module_of(name)
            if parameter == "weight" or parameter in PACKED:
                end = known.loaded_as(module)
                if end is not None and end not in known.biases:
                    loaded.add(f"{end}.weight")
            loaded |= {known.loaded_as(name), known.head_tensor(name)}
        return {name for name in loaded if name is not None}

    @property
    def missing_tables(self) -> list[str]:
        """Return those of `missing` that are input tables, if another one is stored."""
        known = self.roles.known
        if known is None or self.roles.read_input is None or self.half_read:
            return []
        return [name for name in self._missing_not_fresh() if module_of(name)[0] in known.inputs]

    @property
    def missing_biases(self) -> list[str]:
        """Return those of `missing` that are biases of the head, if a table is stored."""
        known = self.roles.known
        if known is None or not self._reads_a_table:
            return []
        return [name for name in self._missing_not_fresh() if name in known.biases]

    @property
    def missing_head(self) -> list[str]:
        """Return those of `missing` between the body and the head, if a table is stored."""
        known = self.roles.known
        if known is None or not self._reads_a_table:
            return []
        return [name for name in self.missing if name in known.head]

    @property
    def _reads_a_table(self) -> bool:
        """Return whether transformers loads a stored table of either end."""
        return self.roles.read_input is not None or self.roles.read_output is not None

    def _missing_not_fresh(self) -> list[str]:
        """Return those of `missing` that `fresh` does not list."""
        fresh = {target for target, _ in self.fresh}
        return [name for name in self.missing if self.named(name) not in fresh]

    def named(self, tensor: str) -> str:
        """Return the name that a saved file gives to a tensor of the class."""
        disk = {} if self.roles.known is None else self.roles.known.disk
        module, parameter = module_of(tensor)
        return disk.get(tensor, f"{disk.get(module, module)}.{parameter}")

    @cached_property
    def scaled_up(self) -> float | None:
        """Return how many times larger the input table's values are than those of its layers, by root mean square.

        None up to `SCALED` times, for packed tables, and without a scan.
        """
        table, matrix = self.roles.counted, self._layer_matrix
        if not self.scan or table is None or matrix is None:
            return None
        of_layer = root_mean_square(matrix)
        if of_layer == 0:
            return None
        ratio = root_mean_square(table) / of_layer
        return ratio if ratio > SCALED else None

    @property
    def _layer_matrix(self) -> Stored | None:
        """Return the first plain matrix inside a layer; None without one."""
        for name, tensor in self.folder.tensors.items():
            is_matrix = len(tensor.shape) == 2 and tensor.dtype in FLOATING
            if is_matrix and name.endswith(".weight") and in_layer(name):
                return tensor
        return None

    @cached_property
    def truth(self) -> bool | None:
        """Return whether the tensors are tied: False if a head of other values is stored; None if that is not known."""
        if self.roles.headless or self.roles.input is None or not self.complete:
            return None
        if self.roles.output is None:
            return True
        if self.ends is None or self.ends.kind == SAME_VALUES:
            return None
        return self.ends.equal

    @property
    def untrained_head(self) -> bool:
        """Return whether the stored head is unrelated to the table and much shorter: a leftover, never trained."""
        likeness = self.ends
        return likeness is not None and likeness.kind == UNRELATED and likeness.length_ratio * UNTRAINED < 1

    @property
    def layer_ties(self) -> tuple[str, ...]:
        """Return modules inside layers that the flag ties too: Zamba's shared transformer blocks.

        `#` represents a layer's number. Empty if the class always ties or never does, whatever the flag says.
        """
        known = self.roles.known
        return () if known is None or self.claims.fixed is not None else known.layer_ties

    def stored_layers(self, module: str) -> tuple[str, ...]:
        """Return names under which a module inside layers is stored: one for each such layer, in file order."""
        pattern = re.compile(r"\d+".join(map(re.escape, module.split("#"))))
        matches = (pattern.search(name) for name in self.folder.tensors)
        return tuple(dict.fromkeys(match[0] for match in matches if match is not None))

    @cached_property
    def draft_heads(self) -> tuple[Stored, ...]:
        """Return Medusa's heads that are stored as plain matrices."""
        heads = (other.tensor for other in self.roles.others if other.role == DRAFT_HEAD)
        return tuple(head for head in heads if head.dtype in FLOATING and len(head.shape) == 2)

    @cached_property
    def vocabulary(self) -> int | None:
        """Return V by the config, else the rows of the input table, else of Medusa's heads; None if none says."""
        sizes = [claim.vocab_size for claim in (self.text, *self.claims.levels)]  # of a speculator one level down
        sizes += [table.rows for table in (self.roles.counted, *self.draft_heads) if table is not None]
        return next((size for size in sizes if size is not None), None)

    @cached_property
    def draft(self) -> Draft | None:
        """Return what makes it a draft that no loader can use alone; None for a model that stands alone."""
        last_parts = {name.rpartition(".")[2]: tensor for name, tensor in self.folder.tensors.items()}
        map_to_target = last_parts.get("d2t", last_parts.get("token_map"))
        map_from_target = last_parts.get("t2d")
        size = first_count(self.levels.values(), "draft_vocab_size", "truncated_vocab_size")
        heads = () if self.roles.input is not None else self.draft_heads  # a whole model may have such heads too
        has_parts = map_to_target is not None or map_from_target is not None or size is not None or bool(heads)
        if not has_parts and not self._is_called_draft:
            return None
        is_reduced = size is not None and self.vocabulary is not None and size < self.vocabulary
        return Draft(map_to_target, map_from_target, size, is_reduced, heads)

    @property
    def _is_called_draft(self) -> bool:
        """Return whether the name of the class or the model type is that of a draft."""
        names = f"{architecture(self.config)} {self.text.model_type}".split()
        return any(_DRAFT.search(name) for name in names)

    @cached_property
    def generation(self) -> Mapping[str, Any] | Fault:
        """Return generation_config.json; empty without one, a fault if it cannot be read."""
        return self._further("generation_config.json")

    @cached_property
    def modelopt(self) -> Mapping[str, Any] | Fault:
        """Return hf_quant_config.json, ModelOpt's description of a quantisation; empty or a fault as `generation`."""
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
        """Return the ids in the tokenizer's files; None without any, and for a single file."""
        return None if self.folder.single else read_tokenizer(self.folder)

    def compare(self, a: Stored, b: Stored) -> TableLikeness | None:
        """Return how alike two tables are; None unless they are comparable and may be read."""
        with doing(f"comparing {short(a.name)}", a.nbytes):
            return likeness(a, b) if self.scan else None

    def same(self, a: Stored, b: Stored) -> bool:
        """Return whether one tensor can replace the other: same bytes, or same numbers. Reads them."""
        with doing(f"comparing {short(a.name)}", a.nbytes):
            return same_numbers(a, b)

    def command(self, verb: str, *options: str) -> str:
        """Return the command line of a rewriting verb for this checkpoint."""
        return " ".join(["tiewise", verb, shlex.quote(str(self.path)), *options, "--to NEW_DIR"])
