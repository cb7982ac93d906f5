"""Facts about one checkpoint for the rules. Each is read at most once, and only when a rule uses it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import architecture, first_count, in_layer
from tiewise.checkpoint.class_facts import ClassFacts
from tiewise.checkpoint.draft import DRAFT_SIZE_KEYS, Draft, is_called_draft, read_draft
from tiewise.checkpoint.hf_folder import Fault, json_object, recording_faults
from tiewise.checkpoint.indexed_tensors import DRAFT_HEAD
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
from tiewise.core.progress import progress_of

# a head unrelated to the table whose rows are this many times shorter looks like one that training never reached
UNTRAINED = 10
SCALED = 10  # an input table is scaled up if its values are so many times as large as those of the layers


class ComparedEnds(NamedTuple):
    """The two stored tables, compared."""

    table: Stored
    head: Stored
    likeness: TableLikeness


@dataclass(frozen=True)
class Facts(ClassFacts):
    """One checkpoint. Everything beyond the headers is read by the first rule that uses it."""

    scan: bool = True  # tables may be read (False: headers only)
    world: int | None = None  # ranks that its tables are to be spread over
    as_class: str | None = None  # the class of transformers that it is loaded as, where not that of its own config
    quantise: Mapping[str, Any] | None = None  # a quantisation that is to come, as a config describes it
    target: Facts | None = None  # the model that a draft proposes tokens to; None where none was given

    @property
    def ends_likeness(self) -> TableLikeness | None:
        """Return how alike the two tables are. None unless both are stored, comparable, and may be read."""
        if self.compared_ends is None:
            return None
        return self.compared_ends.likeness

    @cached_property
    def compared_ends(self) -> ComparedEnds | None:
        """Return the two tables and how alike they are; None as `ends_likeness`."""
        table, head = self.roles.input, self.roles.output
        if table is None or head is None:
            return None
        alike = self.compare(table, head)
        if alike is None:
            return None
        return ComparedEnds(table, head, alike)

    @cached_property
    def packed_twice(self) -> bool:
        """Return whether both ends are stored packed and every part has the same bytes in both."""
        table, head = self.roles.input_end, self.roles.output_end
        if not table.quantised or not head.quantised:
            return False
        if not self.scan or table.parts.keys() != head.parts.keys():
            return False
        return all(self.are_equal(part, head.parts[name]) for name, part in table.parts.items())

    @cached_property
    def scaled_up(self) -> float | None:
        """Return how many times larger the input table's values are than those of its layers.

        Compared by root mean square. None up to `SCALED` times, for packed tables, and without a scan.
        """
        if not self.scan:
            return None
        table, matrix = self.roles.plain_input_table, self._layer_matrix
        if table is None or matrix is None:
            return None
        of_layer = root_mean_square(matrix)
        if of_layer == 0:
            return None
        ratio = root_mean_square(table) / of_layer
        if ratio <= SCALED:
            return None
        return ratio

    @property
    def _layer_matrix(self) -> Stored | None:
        """Return the first plain matrix inside a layer; None without one."""
        for name, tensor in self.folder.tensors.items():
            if not name.endswith(".weight") or not _is_plain_matrix(tensor):
                continue
            if in_layer(name):
                return tensor
        return None

    @cached_property
    def tables_are_tied(self) -> bool | None:
        """Return whether the tensors are tied. False if a head of other values is stored; None if not known."""
        if self.roles.headless or not self.is_complete:
            return None
        if self.roles.input is None:
            return None
        if self.roles.output is None:
            return True
        if self.ends_likeness is None or self.ends_likeness.kind == SAME_VALUES:
            return None
        return self.ends_likeness.equal

    @property
    def has_untrained_head(self) -> bool:
        """Return whether the stored head is unrelated to the table and much shorter. It was never trained."""
        likeness = self.ends_likeness
        if likeness is None or likeness.kind != UNRELATED:
            return False
        return likeness.length_ratio * UNTRAINED < 1

    @cached_property
    def draft_heads(self) -> tuple[Stored, ...]:
        """Return Medusa's heads that are stored as plain matrices."""
        heads = []
        for other in self.roles.indexed_tensors:
            if other.role == DRAFT_HEAD and _is_plain_matrix(other.tensor):
                heads.append(other.tensor)
        return tuple(heads)

    @cached_property
    def vocabulary(self) -> int | None:
        """Return V by the config, else the rows of the input table, else of Medusa's heads."""
        for claim in (self.text, *self.claims.levels):  # of a speculator one level down
            if claim.vocab_size is not None:
                return claim.vocab_size
        for table in (self.roles.plain_input_table, *self.draft_heads):
            if table is not None:
                return table.rows
        return None

    @cached_property
    def draft(self) -> Draft | None:
        """Return the parts of a draft, which no loader can use alone. None for any other model."""
        size = first_count(self.levels.values(), *DRAFT_SIZE_KEYS)
        heads = self.draft_heads
        if self.roles.input is not None:
            heads = ()  # those of a whole model make it no draft
        draft = read_draft(self.folder.tensors, size, self.vocabulary, heads)
        if draft.has_parts or is_called_draft(architecture(self.config), self.text.model_type):
            return draft
        return None

    @cached_property
    def generation(self) -> Mapping[str, Any] | Fault:
        """Return generation_config.json; empty without one, a fault if it cannot be read."""
        return self._further("generation_config.json")

    @cached_property
    def modelopt(self) -> Mapping[str, Any] | Fault:
        """Return hf_quant_config.json, ModelOpt's description of a quantisation; empty or a fault as `generation`."""
        return self._further("hf_quant_config.json")

    def _further(self, name: str) -> Mapping[str, Any] | Fault:
        """Return the object of a further JSON file. Empty or a fault as `generation`."""
        faults = list[Fault]()
        if self.folder.single or not self.folder.has(name):
            return {}
        with recording_faults(faults, name):
            return json_object(self.folder.path, name)
        return faults[0]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the ids in the tokenizer's files; None without any, and for a single file."""
        if self.folder.single:
            return None
        return read_tokenizer(self.folder)

    def compare(self, a: Stored, b: Stored) -> TableLikeness | None:
        """Return how alike two tables are; None unless they are comparable and may be read."""
        with progress_of(f"comparing {short(a.name)}", a.nbytes):
            if not self.scan:
                return None
            return likeness(a, b)

    def are_equal(self, a: Stored, b: Stored) -> bool:
        """Return whether one tensor can replace the other: same bytes, or same numbers. Reads them."""
        with progress_of(f"comparing {short(a.name)}", a.nbytes):
            return same_numbers(a, b)

    def command(self, verb: str, *options: str) -> str:
        """Return the command line of a rewriting verb for this checkpoint."""
        return " ".join(["tiewise", verb, shlex.quote(str(self.path)), *options, "--to NEW_DIR"])


def _is_plain_matrix(tensor: Stored) -> bool:
    """Return whether a tensor is a matrix of floating-point numbers."""
    return len(tensor.shape) == 2 and tensor.dtype in FLOATING
