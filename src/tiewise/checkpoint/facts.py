"""Facts about one checkpoint for the rules. Each is read at most once, on first use."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import architecture, first_count, in_layer
from tiewise.checkpoint.class_facts import ClassFacts
from tiewise.checkpoint.draft import DRAFT_SIZE_KEYS, Draft, is_called_draft, read_draft
from tiewise.checkpoint.hf_folder import SINGLE, Fault, json_object, recording_faults
from tiewise.checkpoint.hub_names import is_hub_path, parse_address
from tiewise.checkpoint.indexed_tensors import DRAFT_HEAD
from tiewise.checkpoint.second_copy import SecondCopy, compare_single_file
from tiewise.checkpoint.stored import FLOATING, NUMPY, Stored
from tiewise.checkpoint.table_scans import (
    IDENTICAL,
    SAME_VALUES,
    UNRELATED,
    TableLikeness,
    equal_in,
    likeness,
    root_mean_square,
    same_numbers,
)
from tiewise.checkpoint.tokenizer_ids import Tokenizer, read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.progress import progress_of

# A head counts as untrained if it is unrelated to the input table and its rows are this many times shorter.
UNTRAINED = 10
SCALED = 10  # an input table counts as scaled up if its values are this many times those of the layers


class ComparedEnds(NamedTuple):
    """Stored tables of both ends, compared."""

    table: Stored  # input table [V, E]
    head: Stored  # output table [V, E]
    likeness: TableLikeness


@dataclass(frozen=True)
class Facts(ClassFacts):
    """Facts of one checkpoint. The first rule that uses a fact beyond the headers reads it."""

    scan: bool = True  # tables may be read; False: headers only
    world: int | None = None  # number of ranks that will share the tables
    as_class: str | None = None  # class of transformers that loads it; None: the class that the config names
    quantise: Mapping[str, Any] | None = None  # config of a planned quantisation
    target: Facts | None = None  # model that a draft proposes tokens to; None if the caller names none

    @property
    def ends_likeness(self) -> TableLikeness | None:
        """Return the likeness of both tables. None unless both are stored, comparable and may be read."""
        if self.compared_ends is None:
            return None
        return self.compared_ends.likeness

    @cached_property
    def compared_ends(self) -> ComparedEnds | None:
        """Return both tables and their likeness. None if `ends_likeness` is None."""
        table, head = self.roles.input, self.roles.output
        if table is None or head is None:
            return None
        ends_likeness = self.compare(table, head)
        if ends_likeness is None:
            return None
        return ComparedEnds(table, head, ends_likeness)

    @cached_property
    def packed_twice(self) -> bool:
        """Return whether both ends are stored quantised with the same bytes in every part."""
        table, head = self.roles.input_end, self.roles.output_end
        if not self._are_both_packed or table.parts.keys() != head.parts.keys():
            return False
        return not self.parts_packed_apart

    @cached_property
    def parts_packed_apart(self) -> tuple[str, ...]:
        """Return the parts that two quantised ends both have with different bytes, such as "scales"."""
        if not self._are_both_packed:
            return ()
        table, head = self.roles.input_end, self.roles.output_end
        common = [name for name in table.parts if name in head.parts]
        return tuple(name for name in common if not self.are_equal(table.parts[name], head.parts[name]))

    @property
    def _are_both_packed(self) -> bool:
        """Return whether both ends are stored quantised, and their tensors may be read."""
        return self.scan and self.roles.input_end.quantised and self.roles.output_end.quantised

    @cached_property
    def scaled_up(self) -> float | None:
        """Return the root mean square of the input table over that of a layer's matrix.

        None for ratios up to `SCALED`, for a quantised table, and if tables may not be read.
        """
        if not self.scan:
            return None
        table, matrix = self.roles.plain_input_table, self._layer_matrix
        if table is None or matrix is None:
            return None
        layer_mean = root_mean_square(matrix)
        if layer_mean == 0:
            return None
        ratio = root_mean_square(table) / layer_mean
        if ratio <= SCALED:
            return None
        return ratio

    @property
    def _layer_matrix(self) -> Stored | None:
        """Return the first floating-point matrix inside a layer; None if there is none."""
        for name, tensor in self.folder.tensors.items():
            if not name.endswith(".weight") or not _is_plain_matrix(tensor):
                continue
            if in_layer(name):
                return tensor
        return None

    @cached_property
    def tables_are_tied(self) -> bool | None:
        """Return whether the stored tensors are tied.

        True if the file has one table for both ends or two equal ones. None if that cannot be decided.
        """
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
        """Return whether the stored head looks untrained: unrelated to the input table and much shorter."""
        likeness = self.ends_likeness
        if likeness is None or likeness.kind != UNRELATED:
            return False
        return likeness.length_ratio * UNTRAINED < 1

    @cached_property
    def draft_heads(self) -> tuple[Stored, ...]:
        """Return the draft heads (Medusa) that are stored as floating-point matrices."""
        heads = []
        for other in self.roles.indexed_tensors:
            if other.role == DRAFT_HEAD and _is_plain_matrix(other.tensor):
                heads.append(other.tensor)
        return tuple(heads)

    @cached_property
    def vocabulary(self) -> int | None:
        """Return the vocabulary size V: by the config, else the input table, else the draft heads."""
        for claim in (self.text, *self.claims.levels):  # a speculator names it one level below the root
            if claim.vocab_size is not None:
                return claim.vocab_size
        for table in (self.roles.plain_input_table, *self.draft_heads):
            if table is not None:
                return table.rows
        return None

    @cached_property
    def draft(self) -> Draft | None:
        """Return the draft vocabulary of a draft model; None for any other model."""
        size = first_count(self.levels.values(), *DRAFT_SIZE_KEYS)
        heads = self.draft_heads
        if self.roles.input is not None:
            heads = ()  # a complete model with draft heads is no draft
        draft = read_draft(self.folder.tensors, size, self.vocabulary, heads)
        if draft.has_parts or is_called_draft(architecture(self.config), self.text.model_type):
            return draft
        return None

    @cached_property
    def generation(self) -> Mapping[str, Any] | Fault:
        """Return generation_config.json: empty if it is missing, a `Fault` if it cannot be read."""
        return self._read_json("generation_config.json")

    @cached_property
    def modelopt(self) -> Mapping[str, Any] | Fault:
        """Return hf_quant_config.json, ModelOpt's quantisation: empty if missing, a `Fault` if unreadable."""
        return self._read_json("hf_quant_config.json")

    def _read_json(self, name: str) -> Mapping[str, Any] | Fault:
        """Return the object in a JSON file: empty if missing, a `Fault` if unreadable."""
        faults = list[Fault]()
        if self.folder.single or not self.folder.has(name):
            return {}
        with recording_faults(faults, name):
            return json_object(self.folder.source, name)
        return faults[0]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the ids in the tokenizer's files. None without such files, and for a single tensor file."""
        if self.folder.single:
            return None
        return read_tokenizer(self.folder)

    def compare(self, a: Stored, b: Stored) -> TableLikeness | None:
        """Return the likeness of two tables; None unless they are comparable and may be read."""
        with progress_of(f"comparing {short(a.name)}", a.nbytes):
            if not self.scan:
                return None
            return likeness(a, b)

    def are_equal(self, a: Stored, b: Stored) -> bool:
        """Return whether two tensors have the same bytes or the same numbers. Reads both."""
        with progress_of(f"comparing {short(a.name)}", a.nbytes):
            return same_numbers(a, b)

    @cached_property
    def second_copy(self) -> SecondCopy | None:
        """Return the relation of model.safetensors to the shard files. None without one of the two."""
        if SINGLE not in self.folder.extra:
            return None
        return compare_single_file(self.folder, self.roles.tables, self.are_equal, scan=self.scan)

    def are_equal_in(self, a: Stored, b: Stored, dtype: str) -> bool | None:
        """Return whether two tensors have equal numbers once both are cast to a type. Reads both.

        None if tables may not be read, or NumPy lacks one of the types.
        """
        if not self.scan or not {a.dtype, b.dtype, dtype} <= NUMPY.keys():
            return None
        ends = self.compared_ends
        if ends is not None and {a, b} == {ends.table, ends.head} and ends.likeness.kind == IDENTICAL:
            return not ends.likeness.nan
        key = (a, b, dtype)
        if key not in self._equalities:
            with progress_of(f"comparing {short(a.name)}", a.nbytes):
                self._equalities[key] = equal_in(a, b, dtype)
        return self._equalities[key]

    @cached_property
    def _equalities(self) -> dict[tuple[Stored, Stored, str], bool]:
        """Return the results of `are_equal_in`, which reads two tensors only once."""
        return {}

    def command(self, verb: str, *options: str) -> str:
        """Return the command line that rewrites this checkpoint with a verb such as `tie`."""
        path = self.path
        if is_hub_path(path):  # a rewrite needs the files on disk
            address = parse_address(path)
            path = Path(address.local_path())
            return f"{address.download_command()} && {_command_line(verb, path, options)}"
        return _command_line(verb, path, options)


def _command_line(verb: str, path: Path, options: tuple[str, ...]) -> str:
    """Return the command line that rewrites a folder with a verb."""
    return " ".join(["tiewise", verb, shlex.quote(str(path)), *options, "--to", result_path(path)])


def result_path(source: Path) -> str:
    """Return a free path next to the source for its rewrite, quoted for a shell."""
    if source.name in ("", ".."):  # the current folder, one above it, or a root
        source = source / ".." / source.resolve().name
    stem = str(source).removesuffix(".safetensors")
    names = (f"{stem}-fixed{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    return shlex.quote(next((name for name in names if not os.path.lexists(name)), "NEW_DIR"))


def _is_plain_matrix(tensor: Stored) -> bool:
    """Return whether a tensor is a matrix of floating-point numbers."""
    return len(tensor.shape) == 2 and tensor.dtype in FLOATING
