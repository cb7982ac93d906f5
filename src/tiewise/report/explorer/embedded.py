"""`tiewise explore CKPT`: a verdict, and a part of the checkpoint for the page.

The verdict is that of `tiewise check`.

The part has at most 20 MB. A user can drop the checkpoint on the page to load the other rows.

The ends of a live model are saved with its config in a temporary folder, which is read like any other folder.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.audit import Audit, check
from tiewise.checkpoint.audit_view import counted_findings, summary_rows
from tiewise.checkpoint.claims import in_layer
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.core import Late, __version__
from tiewise.core.errors import CheckpointError, DataError, RunError, UnsupportedError
from tiewise.core.files import format_bytes
from tiewise.core.measurement import count
from tiewise.core.text import token_counts
from tiewise.core.writing_faults import writing_fault
from tiewise.inspection.tables.open_path import final_norm_of, path_of
from tiewise.inspection.tables.token_texts import find_tokens, read_as

MOST_BYTES = 20_000_000  # maximum bytes of the checkpoint's part, before base64
MOST_ROWS = 4096
MOST_TOKENS = 2_000_000  # maximum number of tokens of a text to count
FINDING_FIELDS = ("rule", "severity", "where", "evidence", "repair")  # fields of a finding in the page's record
_TOKENIZER = Late("tiewise.training.data.tokenizer")  # needs transformers; a live model needs torch
_LOCATE, _SAVED, _TORCH = Late("tiewise.boundary.locate"), Late("tiewise.boundary.saved"), Late("safetensors.torch")


def embedded(path: str | os.PathLike[str], words: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page's record of a checkpoint: its verdict, and rows of both tables as stored.

    Args:
        path: a folder of transformers, or one `.safetensors` file.
        words: tokens whose rows the record must contain: words that are one token, or ids such as "#1234".
        texts: texts as `training.data.sources` reads them. The record has their most frequent tokens, else the first
            rows.

    Raises:
        CheckpointError: the path cannot be read, or has no tensors.
        DataError: a word is not one token, a text has no tokens, or the folder's tokenizer cannot read it.
    """
    folder = _folder_with_tensors(path)
    facts = Facts(folder)
    name = Path(os.path.abspath(path)).name
    tables, choice, applied = _tables(facts), _choice(facts), _applied(facts)
    vector_bytes = _bytes_of_vectors(applied)
    frequent: list[int] = []
    if texts and tables:
        frequent = _frequent(folder, tables, texts)
    ids = _rows(folder, tables, MOST_BYTES - vector_bytes, words, frequent)
    note = ""
    if not _all_rows(tables, ids):
        table_bytes = sum(len(ids) * table.nbytes // table.rows for table in tables)
        part = f"This page holds {_rows_in_words(tables, ids)} of {name} ({format_bytes(vector_bytes + table_bytes)})"
        note = f"{part}: {_chosen(frequent, words)}. Ranks and neighbours are among them. Drop the folder for the rest."
    return {
        "name": name,
        "note": note,
        "count": len(folder.tensors),
        "faults": [f"{fault.problem}; {fault.remedy}" for fault in folder.faults],
        "tensors": _tensor_records(folder, {table.name: _text(table, ids) for table in tables}),
        "choice": choice,
        "path": applied,
        "verdict": _verdict(check(path), choice, name),
        "ids": ids,
        "ranks": _ranks(ids, frequent),
        "texts": _token_texts(folder, ids),
    }


def _token_texts(folder: Folder, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; empty if the folder has no tokenizer."""
    if not folder.has("tokenizer.json"):
        return []
    return list(read_as(folder, ids))


def _folder_with_tensors(path: str | os.PathLike[str]) -> Folder:
    """Open a folder, or raise CheckpointError if it has no tensors."""
    folder = open_folder(path)
    if not folder.tensors:
        what = f"{path}: no file of tensors in it"
        if folder.pickles:
            what = f"{path}: pickled weights alone"
        raise CheckpointError(what, "give one with safetensors, as save_pretrained writes, or one of `tiewise compare`")
    return folder


def _bytes_of_vectors(applied: Mapping[str, Any] | None) -> int:
    """Return the length of all base64 texts of the vectors applied between the tables."""
    if applied is None:
        return 0
    return sum(len(text) * 3 // 4 for text in applied.values() if isinstance(text, str))


def _all_rows(tables: Sequence[Stored], ids: Sequence[int]) -> bool:
    """Return whether there are tables, and these rows are all of them."""
    return {table.rows for table in tables} == {len(ids)}


def _rows_in_words(tables: Sequence[Stored], ids: Sequence[int]) -> str:
    """Return how many rows of the larger table are in the record."""
    if not tables:
        return "no rows"
    most_rows = max(table.rows for table in tables)
    return f"{count(len(ids))} of {count(most_rows)} rows"


def _tensor_records(folder: Folder, data: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every tensor outside the layers, with its data if it has rows in the record."""
    records = []
    for name, tensor in folder.tensors.items():
        if in_layer(name):
            continue
        record: dict[str, Any] = {"name": name, "file": tensor.path.name, "dtype": tensor.dtype}
        record |= {"shape": list(tensor.shape), "bytes": tensor.nbytes}
        if name in data:
            record["data"] = data[name]
        records.append(record)
    return records


def _ranks(ids: Sequence[int], frequent: Sequence[int]) -> list[int]:
    """Return the rank of each row in the text, 0 for a token that it lacks. Empty without a text."""
    if not frequent:
        return []
    rank = {token: place for place, token in enumerate(frequent, 1)}
    return [rank.get(token, 0) for token in ids]


def _frequent(folder: Folder, tables: Sequence[Stored], texts: Sequence[str]) -> list[int]:
    """Return the tokens of the texts, the most frequent first, equally frequent ones by id."""
    fewest_rows = _fewest_rows(tables)
    tokens = _TOKENIZER.read_tokens(folder.path, texts, fewest_rows, MOST_TOKENS)
    counts = token_counts(tokens, fewest_rows)
    if not counts.any():
        raise DataError("the text has no tokens", "give a longer one")
    by_count: list[int] = np.argsort(-counts, kind="stable").tolist()
    return by_count[: np.count_nonzero(counts)]


def _fewest_rows(tables: Iterable[Stored]) -> int:
    """Return the number of rows of the smallest table. Smaller token ids are in every table."""
    return min(table.rows for table in tables)


def _chosen(frequent: Sequence[int], words: Sequence[str]) -> str:
    """Return a sentence about the rows that a page contains."""
    chosen = "the first, which tokenizers mostly give to frequent tokens"
    if frequent:
        chosen = f"the most frequent of the {count(len(frequent))} tokens that the text has"
    if words:
        chosen += ", and those asked for"
    return chosen


def _tables(facts: Facts) -> list[Stored]:
    """Return tables that can be read by rows, the input table first, a tied table once."""
    if facts.is_tiewise_type:  # its tables are behind maps and scales, so their products are not the model's
        return []
    ends = [facts.roles.input]
    if not _has_equal_ends(facts):
        ends.append(facts.roles.output)
    return [table for table in ends if _is_readable(table, facts)]


def _has_equal_ends(facts: Facts) -> bool:
    """Return whether both tables have the same values."""
    return facts.ends_likeness is not None and facts.ends_likeness.equal


def _is_readable(table: Stored | None, facts: Facts) -> TypeGuard[Stored]:
    """Return whether a table is a plain matrix with rows."""
    if table is None or facts.roles.is_packed(table):
        return False
    return len(table.shape) == 2 and table.nbytes > 0


def _choice(facts: Facts) -> dict[str, str] | None:
    """Return the names of both tables, "" for no output head.

    None if `tiewise check` finds no input table.
    """
    roles = facts.roles
    if roles.input is None or facts.is_tiewise_type:
        return None
    output = roles.input.name
    if roles.output is None:
        lacks_head = roles.headless or facts.tied is False
        if lacks_head:
            output = ""
    elif not _has_equal_ends(facts):
        output = roles.output.name
    return {"input": roles.input.name, "output": output}


def _applied(facts: Facts) -> dict[str, Any] | None:
    """Return the operations of the class between its tables, vectors as fp64 in base64.

    None if they are not known.
    """
    if facts.is_tiewise_type or final_norm_of(facts) is None:
        return None
    try:
        path = path_of(facts)
    except (CheckpointError, DataError):
        return None
    return {
        "kind": path.norm.kind,
        "eps": path.norm.eps,
        "gain": _vector(path.norm.gain),
        "shift": _vector(path.norm.shift),
        "bias": _vector(path.bias),
        "input_scale": path.input_scale,
        "output_scale": path.output_scale,
        "cap": path.softcap,
        "notes": path.notes,
    }


def _vector(values: NDArray[Any] | None) -> str | None:
    """Return a vector as little-endian fp64 in base64; None for None."""
    if values is None:
        return None
    return b64encode(values.astype("<f8").tobytes()).decode("ascii")


def _verdict(audit: Audit, choice: Mapping[str, str] | None, name: str) -> dict[str, Any]:
    """Return the verdict of `tiewise check`. In commands, `name` replaces an absolute path."""
    findings = []
    for finding in audit.findings:
        record = {field: getattr(finding, field) for field in FINDING_FIELDS}
        if audit.path.is_absolute():  # the page may be opened on another machine
            record["repair"] = record["repair"].replace(str(audit.path), name)
        findings.append(record)
    return {
        "sentence": f"{_stored_tables(choice)}; tiewise check: {counted_findings(audit)}",
        "severity": audit.worst,
        "rows": summary_rows(audit),
        "findings": findings,
        "made": f"tiewise {__version__} ran {len(audit.ran)} rules when it made this page.",
    }


def _stored_tables(choice: Mapping[str, str] | None) -> str:
    """Return a sentence about the tables that the checkpoint has."""
    if choice is None:
        return "No table of tokens to show"
    if choice["input"] == choice["output"]:
        return "One table at both ends"
    if not choice["output"]:
        return "An input table, and no output head"
    return "Two tables, one at each end"


def _rows(
    folder: Folder, tables: Sequence[Stored], room: int, words: Iterable[str], frequent: Sequence[int]
) -> list[int]:
    """Return indices of rows to embed, in order, as many as fit into `room` bytes.

    Those of `words` come first and are always included, then the `frequent` tokens, then the first rows of the tables.
    """
    if not tables:
        return []
    fewest_rows = _fewest_rows(tables)
    required = [_token_of(folder, word, fewest_rows) for word in words]
    bytes_of_token = sum(table.nbytes // table.rows for table in tables)
    most = min(MOST_ROWS, room // bytes_of_token)
    by_priority = dict.fromkeys([*required, *frequent[:most], *range(min(fewest_rows, most))])
    return sorted(list(by_priority)[: max(most, len(set(required)))])


def _token_of(folder: Folder, word: str, rows: int) -> int:
    """Return the id of a word that is one token, or of "#1234".

    Raises:
        DataError: the word is not one token, or the tables have fewer rows.
    """
    numbered = re.fullmatch(r"#([0-9]+)", word)
    if numbered:
        token = int(numbered[1])
    else:
        (token,) = find_tokens(folder, [word])
    if token >= rows:
        raise DataError(f"{word} is token {token}, the tables have {rows:,} rows", "choose another")
    return token


def _text(tensor: Stored, ids: Sequence[int]) -> str:
    """Return the bytes of some rows of a tensor in base64."""
    rows = bytearray()
    with Reader(tensor) as reader:
        size = reader.row_bytes
        for row in ids:
            rows += bytes(size)
            reader.read_into(memoryview(rows)[-size:], row * size)
    return b64encode(rows).decode("ascii")


def live(model: Any, tokenizer: Any = None, words: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record of a model in memory, as `embedded` does for a folder.

    Args:
        model: a Hugging Face model with a token head.
        tokenizer: tokenizer whose texts name the rows.
        words, texts: as in `embedded`.

    Raises:
        InstallError: the model lacks an input embedding or an output head for tokens.
        UnsupportedError: an installed boundary does more than its tables can express.
        RunError: the disk for temporary files is full.
    """
    _LOCATE.locate(model)
    name = type(model).__name__
    if _SAVED.is_family_config(model.config):
        what = f"{name} does more at its ends than its tables say"
        raise UnsupportedError(what, "explore the folder that its save_pretrained writes")
    with TemporaryDirectory(prefix="tiewise-") as parent:
        folder = Path(parent) / name
        folder.mkdir()
        try:
            _save_ends(model, tokenizer, folder)
        except OSError as error:
            remedy = writing_fault(error).remedy("name another disk in TMPDIR")
            raise RunError(f"cannot write to {parent}: {error.strerror}", remedy) from None
        return embedded(folder, words, texts)


def _save_ends(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the config, the tensors outside the layers, and the tokenizer if there is one."""
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    tensors: dict[int, tuple[str, Any]] = {}  # a table of both ends once, as save_pretrained does
    for key, tensor in model.state_dict().items():
        if not in_layer(key):
            tensors.setdefault(tensor.data_ptr(), (key, tensor))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.values()}
    _TORCH.save_file(contiguous, folder / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
