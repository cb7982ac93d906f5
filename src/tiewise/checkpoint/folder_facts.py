"""Facts from the config and the headers of one checkpoint: its claims, roles and vocabularies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import (
    FLAG,
    SPEC,
    TEXT_PARTS,
    TIEWISE_TYPE,
    Claim,
    Claims,
    architecture,
    dotted_path,
    family_type,
    flag_key,
    in_layer,
    is_foreign,
    is_of_text,
    model_levels,
    positive_int,
    read_claims,
    without_tokens,
)
from tiewise.checkpoint.config_parts import (
    TRANSFORMERS_SECTION,
    has_nameless_quantisation,
    quantisation_keys,
    vocabulary_sizes,
)
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import ClassEnds, Family
from tiewise.checkpoint.file_sources import HubSource
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.roles import Roles, find_roles
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.checkpoint.wrapper_names import unwrapped_names
from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec

_WIDTH_KEY = re.compile(r"emb|hidden|dim|d_model")


@dataclass(frozen=True)
class FolderFacts:
    """Facts that need only the config and the headers of a folder."""

    folder: Folder  # files, headers, config

    @property
    def path(self) -> Path:
        """Return the path of the folder, or of the single file."""
        if self.folder.single:
            return self.folder.path / self.folder.files[0]
        return self.folder.path

    @property
    def repository(self) -> HubSource | None:
        """Return the repository of the Hub with the files; None for a folder on disk."""
        return self.folder.repository

    @property
    def config(self) -> Mapping[str, Any]:
        """Return config.json; empty if absent."""
        return self.folder.config or {}

    @property
    def is_tiewise_type(self) -> bool:
        """Return whether the checkpoint has model_type "tiewise": only tiewise loads its boundary."""
        return self.config.get("model_type") == TIEWISE_TYPE

    @property
    def boundary_level(self) -> str | None:
        """Return the dotted path of the config's level with model_type "tiewise"; None without one.

        It is "" for a model of tiewise, and "decoder" for a composite model whose decoder has a boundary.
        """
        for path, level in self.levels.items():
            if level.get("model_type") == TIEWISE_TYPE:
                return path
        return None

    @property
    def is_complete(self) -> bool:
        """Return whether every file of tensors was read. Otherwise a tensor may only seem absent."""
        return bool(self.folder.tensors) and not self.folder.has_unread_tensors

    @cached_property
    def claims(self) -> Claims:
        """Return the claims of the config on tying."""
        return read_claims(self.folder.config)

    @property
    def family(self) -> Family:
        """Return the record of the family; for model_type "tiewise", of the base family."""
        return family(family_type(self.config))

    @cached_property
    def boundary(self) -> BoundarySpec | None:
        """Return the spec of a boundary that only tiewise loads. None if absent or malformed."""
        spec = self.config.get(SPEC)
        if not self.is_tiewise_type or not isinstance(spec, str):
            return None
        try:
            return BoundarySpec.parse(spec)
        except SpecError:
            return None

    @property
    def tied(self) -> bool | None:
        """Return whether the config ties both ends, by the boundary's spec, else by the flag."""
        if self.boundary is not None:
            return self.boundary.tables == 1
        return self.claims.tied

    @property
    def lookup_table(self) -> Stored | None:
        """Return the plain table that token ids index.

        It is the stored input table, or the only table of a tied model, stored under the head's name. None: it is
        quantised or not stored.
        """
        roles = self.roles
        if roles.input is not None or roles.output is None or self.tied is not True:
            return roles.plain_input_table
        return None if roles.is_packed(roles.output) else roles.output

    @property
    def is_without_tokens(self) -> bool:
        """Return whether the architecture data covers the class and lists no token table for it."""
        return without_tokens(family_type(self.config), architecture(self.config))

    @cached_property
    def levels(self) -> dict[str, Mapping[str, Any]]:
        """Return {dotted path: level of the config} for the levels of `claims`.

        A level without `model_type` has the one that its class assumes.
        """
        assumed = self.family.ends.levels
        levels = model_levels(self.config)
        return {path: {"model_type": assumed.get(path), **level} for path, level in levels}

    def flag_keys(self, claim: Claim) -> tuple[str, ...]:
        """Return the keys that a rewrite of a level's flag must write.

        They are the usual key, and an older one that counts first.
        """
        return tuple(dict.fromkeys((FLAG, self._flag_key(claim))))

    def flag_path(self, claim: Claim) -> str:
        """Return the dotted path of the flag that the class reads at a level."""
        return dotted_path(short(claim.level), self._flag_key(claim))

    def _flag_key(self, claim: Claim) -> str:
        """Return the key of the flag that the class reads at a level."""
        defaults = family(family_type(self.config)).ends.levels
        return flag_key(self.levels.get(claim.level, {}), claim.model_type or defaults.get(claim.level))

    @cached_property
    def malformed_vocab_sizes(self) -> dict[str, Any]:
        """Return {level: value} of each `vocab_size` of the text that is no positive whole number.

        Examples are "32000", 32000.0 and 0. Null is left to the class, since some have no size by default. Empty if a
        level has a right one.
        """
        malformed = dict[str, Any]()
        if self.text.vocab_size is not None:
            return malformed
        for level, values in self.levels.items():
            written = values.get("vocab_size")
            if is_of_text(level) and written is not None and positive_int(written) is None:
                malformed[level] = written
        return malformed

    @cached_property
    def text(self) -> Claim:
        """Return the claims of the text level with a `vocab_size`, else of the deciding level."""
        for claim in self.claims.levels:
            key = claim.level.rpartition(".")[2]
            if key in TEXT_PARTS and claim.vocab_size is not None:
                return claim
        return self.claims.deciding

    @cached_property
    def roles(self) -> Roles:
        """Return the role of each stored tensor."""
        return find_roles(self.folder.tensors, self.folder.config)

    @cached_property
    def unwrapped_names(self) -> dict[str, str]:
        """Return {stored name: new name} of the tensors with an end below a training wrapper."""
        renamed = dict[str, str]()
        for table in self.roles.one_table_per_end:
            expected = self.roles.unloaded_names.get(table.name, table.name)
            renamed |= unwrapped_names(self.folder.tensors, table.name, expected)
        return renamed

    @property
    def class_ends(self) -> ClassEnds:
        """Return the ends of the class. For an unknown class they have no names."""
        return self.roles.class_ends or ClassEnds()

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """Return the vocabulary sizes in the config, with and without a family's extra rows."""
        return vocabulary_sizes(self.levels.values())

    @cached_property
    def text_vocabularies(self) -> frozenset[int]:
        """Return the vocabulary sizes of the text part.

        These are `vocabularies` without the `vocab_size` of levels above `text`. For an unknown class, every level
        counts.
        """
        if not self.claims.has_family_data:
            return self.vocabularies
        levels = {path: dict(level) for path, level in self.levels.items()}
        for path, level in levels.items():
            if _contains_level(path, self.text.level):
                level.pop("vocab_size", None)
        return vocabulary_sizes(levels.values())

    @property
    def extra_rows(self) -> int:
        """Return the number of input rows that the head lacks, such as Mllama's 8 for pictures."""
        record = family(family_type(self.levels.get(self.text.level, {})))
        if not record.head_lacks_extra_rows:
            return 0
        return record.extra_rows

    @property
    def unequal_on_purpose(self) -> str | None:
        """Return why tables of the class have different numbers of rows. None if they should be equal."""
        rows = {table.name: table.rows for table in self.roles.tables}
        row_counts = set(rows.values())
        if len(row_counts) < 2:
            return None
        descriptions = [f"{short(name)} {count:,}" for name, count in rows.items()]
        listed = ", ".join(descriptions)
        if self.extra_rows:
            return f"its class gives the input table {self.extra_rows} rows that the head lacks ({listed})"
        input_row_counts = {table.rows for table in self.roles.input_tables}
        if len(input_row_counts) > 1 and row_counts <= self.text_vocabularies:
            return f"it has two vocabularies ({listed} rows)"
        return None

    @cached_property
    def quantised(self) -> bool:
        """Return whether the config names a quantisation, or an end is stored quantised."""
        if "quantization_config" in self.config:
            return True
        return self.roles.input_end.quantised or self.roles.output_end.quantised

    @cached_property
    def matrices_without_role(self) -> list[Stored]:
        """Return stored matrices without a role that have a vocabulary's rows. One may be an end."""
        roles = self.roles
        others = [other.tensor for other in roles.indexed_tensors]
        names_with_role = {tensor.name for tensor in (*roles.tables, *roles.positions, *roles.biases, *others)}
        rows = {table.rows for table in roles.one_table_per_end} | self.vocabularies
        without_role = []
        for name, tensor in self.folder.tensors.items():
            if len(tensor.shape) != 2 or rows.isdisjoint(tensor.shape):
                continue
            is_of_the_text_model = not in_layer(name) and not is_foreign(name)
            if is_of_the_text_model and name not in names_with_role:
                without_role.append(tensor)
        return without_role

    @property
    def is_packed_for_mlx(self) -> bool:
        """Return whether MLX packed the tensors.

        transformers refuses their shapes, or a copy of MLX's section under its own key: it names no method.
        """
        keys = quantisation_keys(self.config)
        if "quantization" not in keys:
            return False
        return TRANSFORMERS_SECTION not in keys or has_nameless_quantisation(self.config)

    def explains_width_of(self, table: Stored) -> bool:
        """Return whether the config or a stored map has the width of this table."""
        width, hidden_size = table.shape[1], self.text.hidden_size
        if hidden_size is None:
            return True
        head_factors = self.class_ends.wide.values()
        if table is self.roles.output and head_factors:
            return width == hidden_size * next(iter(head_factors))
        if width == hidden_size or width in self._widths:
            return True
        return any(width in matrix.shape for matrix in self.roles.maps)  # a chain of maps may have it

    @property
    def _widths(self) -> set[int]:
        """Return the integers of the config whose keys look like a width."""
        widths = set[int]()
        for level in self.levels.values():
            for key, value in level.items():
                if type(value) is int and _WIDTH_KEY.search(key):
                    widths.add(value)
        return widths


def _contains_level(path: str, below: str) -> bool:
    """Return whether the level at `path` is above the level at `below`."""
    if not path:  # the root
        return below != ""
    return below.startswith(f"{path}.")
