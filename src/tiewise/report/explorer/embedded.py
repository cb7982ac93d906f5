"""`tiewise explore CKPT`: the verdict of `tiewise check`, and what of a checkpoint the page carries: at most 20 MB.

Dropping the checkpoint on the page brings the rest of its rows.

Of a live model the ends lie beside its config in a folder for a moment, which is read as any folder is.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.audit import Audit, check, counted_findings, summary_rows
from tiewise.checkpoint.claims import in_layer
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.core import Late, __version__
from tiewise.core.errors import CheckpointError, DataError, RunError, UnsupportedError
from tiewise.core.files import size
from tiewise.core.found import count
from tiewise.core.text import token_counts
from tiewise.inspection.tables.open_path import final_norm_of, path_of
from tiewise.inspection.tables.token_texts import find_tokens, read_as

MOST_BYTES = 20_000_000  # of the checkpoint, before they are written as text
MOST_ROWS = 4096
MOST_TOKENS = 2_000_000  # of a text, that are counted
_TOKENIZER = Late("tiewise.training.data.tokenizer")  # which needs transformers; a live model needs torch
_LOCATE, _SAVED, _TORCH = Late("tiewise.boundary.locate"), Late("tiewise.boundary.saved"), Late("safetensors.torch")


def embedded(path: str | os.PathLike[str], words: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page needs for its verdict, and rows of both tables in their stored type.

    Args:
        path: a Hugging Face folder, or one `.safetensors`.
        words: tokens whose rows are to be there in any case: words that are one token, or "#1234".
        texts: what is counted, as `training.data.sources` takes it: its most frequent tokens are there, else the first.

    Raises:
        CheckpointError: nothing there can be read, or it holds no tensors.
        DataError: a word that is no token; a text without tokens, or that the folder's tokenizer cannot read.
    """
    folder = open_folder(path)
    if not folder.tensors:
        what = f"{path}: pickled weights alone" if folder.pickles else f"{path}: no file of tensors in it"
        raise CheckpointError(what, "give one with safetensors, as save_pretrained writes, or one of `tiewise compare`")
    facts = Facts(folder)
    outer = {name: tensor for name, tensor in folder.tensors.items() if not in_layer(name)}
    tables, choice, applied = _tables(facts), _choice(facts), _applied(facts)
    beside = sum(len(text) * 3 // 4 for text in applied.values() if isinstance(text, str)) if applied else 0
    frequent = _frequent(folder, tables, texts) if texts and tables else []
    ids = _rows(folder, tables, MOST_BYTES - beside, words, frequent)
    rank = {token: place for place, token in enumerate(frequent, 1)}
    data = {one.name: _text(one, ids) for one in tables}
    whole = all(len(ids) == table.rows for table in tables)
    held = beside + sum(len(ids) * table.nbytes // table.rows for table in tables)
    name = Path(os.path.abspath(path)).name
    which = f"{count(len(ids))} of {count(max(table.rows for table in tables))} rows" if tables else "no rows"
    part = f"This page holds {which} of {name} ({size(held)}): {_chosen(frequent, words)}."
    note = f"{part} Ranks and neighbours are among them. Drop the folder for the rest."
    return {
        "name": name,
        "note": "" if whole and tables else note,
        "count": len(folder.tensors),
        "faults": [f"{fault.what}; {fault.fix}" for fault in folder.faults],
        "tensors": [
            {"name": name, "file": t.path.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
            | ({"data": data[name]} if name in data else {})
            for name, t in outer.items()
        ],
        "choice": choice,
        "path": applied,
        "verdict": _verdict(check(path), choice, name),
        "ids": ids,
        "ranks": [rank.get(token, 0) for token in ids] if frequent else [],  # 0: not in the text
        "texts": list(read_as(folder, ids)) if folder.has("tokenizer.json") else [],
    }


def _frequent(folder: Folder, tables: Sequence[Stored], texts: Sequence[str]) -> list[int]:
    """Return the tokens that the texts have, the most frequent first, those of one count by number."""
    least = min(table.rows for table in tables)
    counts = token_counts(_TOKENIZER.read_tokens(folder.path, texts, least, MOST_TOKENS), least)
    if not counts.any():
        raise DataError("the text has no tokens", "give a longer one")
    found: list[int] = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return found


def _chosen(frequent: Sequence[int], words: Sequence[str]) -> str:
    """Return in words which rows a page holds."""
    chosen = "the first, which tokenizers mostly give to frequent tokens"
    if frequent:
        chosen = f"the most frequent of the {count(len(frequent))} tokens that the text has"
    return f"{chosen}, and those asked for" if words else chosen


def _tables(facts: Facts) -> list[Stored]:
    """Return the tables that can be read row by row, the input's first, a tied one once."""
    if facts.is_own:  # its tables are behind maps and scales, so their products are not the model's
        return []
    ends = [facts.roles.input, None if facts.ends and facts.ends.equal else facts.roles.output]
    return [t for t in ends if t is not None and len(t.shape) == 2 and not facts.roles.packed(t) and t.nbytes]


def _choice(facts: Facts) -> dict[str, str] | None:
    """Return the names of both tables, "" for no output head; None where `tiewise check` finds no input table."""
    roles = facts.roles
    if roles.input is None or facts.is_own:
        return None
    if roles.output is None:
        return {"input": roles.input.name, "output": "" if roles.headless or facts.tied is False else roles.input.name}
    equal = facts.ends is not None and facts.ends.equal
    return {"input": roles.input.name, "output": roles.input.name if equal else roles.output.name}


def _applied(facts: Facts) -> dict[str, Any] | None:
    """Return what the class does between its tables, vectors as fp64 in base64; None where that is not known."""
    if facts.is_own or final_norm_of(facts) is None:
        return None
    try:
        path = path_of(facts)
    except (CheckpointError, DataError):
        return None

    def vector(values: NDArray | None) -> str | None:
        return None if values is None else b64encode(values.astype("<f8").tobytes()).decode("ascii")

    return {
        "kind": path.norm.kind,
        "eps": path.norm.eps,
        "gain": vector(path.norm.gain),
        "shift": vector(path.norm.shift),
        "bias": vector(path.bias),
        "input_scale": path.input_scale,
        "output_scale": path.output_scale,
        "cap": path.softcap,
        "notes": path.notes,
    }


def _verdict(audit: Audit, choice: Mapping[str, str] | None, name: str) -> dict[str, Any]:
    """Return the verdict of `tiewise check` as the page shows it, with `name` for an absolute path in commands."""
    if choice is None:
        stored = "No table of tokens to show"
    elif choice["input"] == choice["output"]:
        stored = "One table at both ends"
    else:
        stored = "Two tables, one at each end" if choice["output"] else "An input table, and no output head"
    fields = ("rule", "severity", "where", "evidence", "repair")
    findings = [{field: getattr(finding, field) for field in fields} for finding in audit.findings]
    for finding in findings if audit.path.is_absolute() else ():  # the page may be read on another machine
        finding["repair"] = finding["repair"].replace(str(audit.path), name)
    return {
        "sentence": f"{stored}; tiewise check: {counted_findings(audit)}",
        "severity": audit.worst,
        "rows": summary_rows(audit),
        "findings": findings,
        "made": f"tiewise {__version__} ran {len(audit.ran)} rules when it made this page.",
    }


def _rows(
    folder: Folder, tables: Sequence[Stored], room: int, words: Iterable[str], frequent: Sequence[int]
) -> list[int]:
    """Numbers of the rows that are embedded, in order: those asked for, then the `frequent`, then the first, as many as
    there is room for."""
    if not tables:
        return []
    least = min(table.rows for table in tables)
    asked = []
    for word in words:
        numbered = re.fullmatch(r"#([0-9]+)", word)
        asked.append(int(numbered[1]) if numbered else find_tokens(folder, [word])[0])
        if asked[-1] >= least:
            raise DataError(f"{word} is token {asked[-1]}, the tables have {least:,} rows", "choose another")
    most = min(MOST_ROWS, room // sum(table.nbytes // table.rows for table in tables))
    chosen = dict.fromkeys([*asked, *frequent[:most], *range(min(least, most))])
    return sorted(list(chosen)[: max(most, len(set(asked)))])


def _text(tensor: Stored, ids: Sequence[int] | None) -> str:
    """The bytes of a tensor, or of some of its rows, in base64."""
    with Reader(tensor) as reader:
        rows, size = bytearray(reader.rows().tobytes() if ids is None else ()), reader.row_bytes
        for row in ids or ():
            rows += bytes(size)
            reader.into(memoryview(rows)[-size:], row * size)
    return b64encode(rows).decode("ascii")


def live(model: Any, tokenizer: Any = None, words: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return what `embedded` returns of a folder, of a model in memory.

    Args:
        model: a Hugging Face model with a token head.
        tokenizer: whose texts name the rows.
        words, texts: as `embedded` takes them.

    Raises:
        InstallError: it has no two ends of tokens.
        UnsupportedError: a boundary is installed whose tables alone do not say what it does.
        RunError: the disk for temporary files takes no more.
    """
    _LOCATE.locate(model)
    name = type(model).__name__
    if _SAVED.is_family(model.config):
        what = f"{name} does more at its ends than its tables say"
        raise UnsupportedError(what, "explore the folder that its save_pretrained writes")
    outer: dict[int, tuple[str, Any]] = {}  # a table of both ends once, as save_pretrained writes it
    for key, tensor in model.state_dict().items():
        if not in_layer(key):
            outer.setdefault(tensor.data_ptr(), (key, tensor))
    with TemporaryDirectory(prefix="tiewise-") as made:
        folder = Path(made) / name
        folder.mkdir()
        config = json.loads(model.config.to_json_string()) | {"architectures": [name]}
        try:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            _TORCH.save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in outer.values()},
                folder / "model.safetensors",
            )
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except OSError as error:
            raise RunError(f"cannot write to {made}: {error.strerror}", "name another disk in TMPDIR") from None
        return embedded(folder, words, texts)
