"""What must fit into a vocabulary, what of it is in use, and where a config gives its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Tokenizer
from tiewise.checkpoint.stored import Reader, Stored

_OTHER = ("type_vocab_size",)  # the segments of BERT


def sizes(config: Mapping[str, Any], rows: int) -> Iterator[str]:
    """Yield the dotted path of every key at any level that gives `rows` as the size of a vocabulary."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{path}" for path in sizes(value, rows))
        elif isinstance(key, str) and key.endswith("vocab_size") and key not in _OTHER and value == rows:
            yield key


def largest_named_id(facts: Facts, rows: int) -> int:
    """Largest id below `rows` that config.json or generation_config.json names as a token; -1 where none is."""
    generation = facts.generation
    records = [facts.config, generation if isinstance(generation, Mapping) else {}]
    return max((number for record in records for number in _ids(record) if number < rows), default=-1)


def _ids(record: Mapping[str, Any]) -> Iterator[int]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _ids(value)
        elif isinstance(key, str) and key.endswith(("token_id", "token_ids", "token_index")):
            found = value if isinstance(value, list) else [value]
            yield from (number for number in found if type(number) is int and number >= 0)


class Usage:
    """Which rows are in use, and how long they are at each table.

    A row is in use where the tokenizer can produce its id (every id where none is known), and it is finite and not all
    zero at every table.
    """

    def __init__(self, tables: tuple[Stored, ...], tokenizer: Tokenizer | None) -> None:
        rows = tables[0].rows
        self.used = np.ones(rows, np.bool_)
        if tokenizer is not None and tokenizer.base_max >= 0:
            ids = np.fromiter((number for number in tokenizer.used if number < rows), np.int64)
            self.used[:] = False
            self.used[ids] = True
        self.norms: dict[str, NDArray[np.float64]] = {}
        for table in tables:
            self.norms[table.name] = _norms(table)
            self.used &= np.isfinite(self.norms[table.name]) & (self.norms[table.name] > 0)

    def lengths(self, table: Stored) -> NDArray[np.float64]:
        """Lengths of a table's rows in use."""
        return self.norms[table.name][self.used]


def _norms(table: Stored) -> NDArray[np.float64]:
    found = np.zeros(table.rows)
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
        for start, stop in reader.spans():
            rows = reader.wide(start, stop)
            found[start:stop] = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return np.sqrt(found)
