"""`prepare`: any text becomes three files of tokens, once, and facts that say exactly what was measured on.

    sources → documents → paragraphs once → spool on disk → split by their parts → tokenizer from the training split
    → train.bin, tune.bin, heldout.bin → data.json

This file decides what is asked for and whether it is there already; `tiewise.data.build` makes it.
"""

from __future__ import annotations

import math
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiewise.core.errors import DataError, RunError, TiewiseError
from tiewise.core.files import written_whole
from tiewise.data.build import build, check_length
from tiewise.data.plain_text import decode
from tiewise.data.prepared import PreparedText, load_prepared
from tiewise.data.sources import Source, resolve
from tiewise.data.split import CONTIGUOUS, RANDOM, SPLITS
from tiewise.data.tokenizer import bpe_size

__all__ = ["PreparedText", "load_prepared", "prepare"]

_FORMAT = 2  # of the folder; one of another format is made again
_STDIN = "stdin.txt"


def prepare(
    texts: Sequence[str],
    tokenizer: str,
    folder: Path,
    *,
    length: int,
    seed: int = 0,
    fractions: Sequence[float] = (0.88, 0.04, 0.08),
    split: str = RANDOM,
    apart: bool = False,
) -> PreparedText:
    """Turn `texts` (as in `tiewise.data.sources`) into tokens in `folder`, or reuse what an equal call left there.

    Standard input is kept as `stdin.txt` in the folder and read from there by later calls.

    Args:
        texts: what to read, in order.
        tokenizer: as in `tiewise.data.tokenizer`.
        folder: where the tokens go.
        length: T of the blocks that are to fit.
        seed: draws the documents, and the parts of plain files, of each split.
        fractions: shares of train, tune and heldout in characters.
        split: "random", or "contiguous" for the last parts of the text as held-out text.
        apart: end every part of a plain file as a document: pairs of segments need many.

    Raises:
        DataError: on a text or tokenizer that cannot be used, or where a split is shorter than blocks of `length`
            tokens need: two for training, one each for tune and heldout. Nothing is left behind then.
        RunError: where `folder` cannot be written.
    """
    _check(texts, length, seed, fractions)
    if split not in (RANDOM, CONTIGUOUS):
        raise DataError(f"split = {split!r}", f"choose {RANDOM} or {CONTIGUOUS}")
    bpe_size(tokenizer)  # a wrong size is said before gigabytes are read
    folder = Path(folder)
    made: list[Path] = [] if folder.exists() else [folder]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sources = [_kept_stdin(folder, made) if text == "-" else resolve(text) for text in texts]
        request = _request(sources, tokenizer, seed, fractions) | {"split": split, "apart": apart}
        prepared = _reusable(folder, request)
        if prepared is None:
            build(folder, sources, request, length)
            return load_prepared(folder)
        check_length(prepared.facts, length)
        return prepared
    except TiewiseError:
        for path in made:
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        raise
    except OSError as error:
        what = f"cannot prepare the text in {str(folder)!r}: {error.strerror or error} ({error.filename})"
        raise RunError(what, "choose another folder, or make room") from None


def _check(texts: Sequence[str], length: int, seed: int, fractions: Sequence[float]) -> None:
    if not texts:
        raise DataError("no text is given", "name a file, a folder, or builtin")
    if texts.count("-") > 1:
        raise DataError("'-' is given twice", "standard input can be read once")
    if length < 1:
        raise DataError(f"a block of {length} tokens", "use a length of 1 or more")
    if seed < 0:
        raise DataError(f"seed {seed}", "use zero or a positive number")
    if len(fractions) != len(SPLITS) or min(fractions) <= 0 or not math.isclose(sum(fractions), 1, abs_tol=1e-9):
        raise DataError(f"fractions {tuple(fractions)}", f"give {len(SPLITS)} positive shares that sum to 1")


def _kept_stdin(folder: Path, made: list[Path]) -> Source:
    """Standard input as a file of the folder, copied there by the first call."""
    path = folder / _STDIN
    if not path.exists():
        with written_whole(path) as partial, partial.open("wb") as file:
            for piece in decode(sys.stdin.buffer, "standard input"):
                file.write(piece.encode())
            if not file.tell():
                raise DataError("standard input is empty", "pipe a text into the command")
        made.append(path)
    return replace(resolve(str(path)), text="-")


def _request(sources: Sequence[Source], tokenizer: str, seed: int, fractions: Sequence[float]) -> dict[str, Any]:
    """Everything that the result depends on; equal requests have equal results."""
    path = Path(tokenizer).expanduser()
    return {
        "format": _FORMAT,
        "texts": [source.text for source in sources],
        "sources": [_fingerprint(source.files) for source in sources],
        "tokenizer": tokenizer,
        "tokenizer_files": _fingerprint([path, *sorted(path.glob("*"))] if path.exists() else []),
        "seed": seed,
        "fractions": list(fractions),
        "python": platform.python_version() if any(source.kind == "builtin" for source in sources) else None,
    }


def _fingerprint(files: Sequence[Path]) -> dict[str, Any]:
    """Files by name, size and time of change: what `make` would trust, at any size."""
    stats = [(file.as_posix(), file.stat()) for file in files]
    lines = "".join(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for name, stat in stats)
    return {
        "files": len(files),
        "bytes": sum(stat.st_size for _, stat in stats),
        "fingerprint": sha256(lines.encode("utf-8", "surrogateescape")).hexdigest(),
    }


def _reusable(folder: Path, request: dict[str, Any]) -> PreparedText | None:
    try:
        prepared = load_prepared(folder)
    except DataError:  # nothing there, or damaged: prepare it
        return None
    return prepared if prepared.facts.get("request") == request else None
