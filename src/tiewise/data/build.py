"""Makes a prepared folder: read once, split, learn the tokenizer, write tokens, move all into place.

The work is done in a subfolder that is removed whatever happens. `data.json` goes first and comes back last, so at no
moment does a folder look prepared that is not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.core.files import sync, write_whole
from tiewise.core.progress import doing, progress
from tiewise.data.dedupe import Deduplicator
from tiewise.data.prepared import FACTS, TOKENIZER, token_type
from tiewise.data.sources import Source, read_sources
from tiewise.data.split import SPLITS, assign
from tiewise.data.spool import Spool
from tiewise.data.token_file import Encoder, pieces, write_tokens
from tiewise.data.tokenizer import bpe_size, make_tokenizer

_WORK = ".building"
_LEARNT = 50_000_000  # characters that a tokenizer is trained on at most: the frequent pairs are settled long before


def build(folder: Path, sources: Sequence[Source], request: dict[str, Any], length: int) -> None:
    """Prepare `sources` in `folder` as `request` says (its keys: those of `prepare`, and what facts keep).

    Raises:
        DataError: as `tiewise.data.corpus.prepare` says; the folder then holds what it held before.
        OSError: where the folder cannot be written.
    """
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    try:
        kind = request["tokenizer"]
        # one that needs no training text is refused, if it must be, before gigabytes are read
        ready = None if bpe_size(kind) else make_tokenizer(kind, lambda: iter(()))
        deduplicate = Deduplicator()
        documents = (replace(d, begins=d.begins or request["apart"]) for d in read_sources(sources))
        with doing("reading", sum(source.size for source in sources)):
            spool = Spool(work / "text", deduplicate(documents))
        where = assign(spool.characters, request["fractions"], request["seed"], request["split"])
        progress("tokenizer", 0, 1)
        tokenizer = _learnt(kind, spool, np.flatnonzero(where == 0)) if ready is None else ready
        progress("tokenizer", 1, 1)
        tokenizer.save_pretrained(work / TOKENIZER)
        facts = _write(work, spool, where, tokenizer)
        check_length(facts, length)
        facts |= {
            "texts": request["texts"],
            "dropped_paragraphs": deduplicate.dropped,
            "demo": all(source.kind == "builtin" for source in sources),
            "python": request["python"],
            "request": request,
        }
        facts["tokenizer"]["kind"] = kind
        move(work, folder, facts)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_length(facts: dict[str, Any], length: int) -> None:
    """Refuse a text that is too short for blocks of `length` tokens.

    Raises:
        DataError: where training has fewer than two blocks, or another split none.
    """
    tokens = {name: facts["splits"][name]["tokens"] for name in SPLITS}
    fits = min(tokens["train"] // 2, tokens["tune"], tokens["heldout"])
    if fits >= length:
        return
    needed = {name: length * (2 if name == "train" else 1) for name in SPLITS}
    short = next(name for name in SPLITS if tokens[name] < needed[name])
    raise DataError(
        f"the text has {sum(tokens.values())} tokens, {tokens[short]} of them for {short}; "
        f"needs at least {needed[short]} there for length {length}",
        f"give more text, or a length of at most {fits}" if fits else "give more text",
    )


def _learnt(kind: str, spool: Spool, train: np.ndarray) -> PreTrainedTokenizerFast:
    # every k-th part of the training split: a folder's first files may be of one kind
    step = -(-int(spool.characters[train].sum()) // _LEARNT)
    return make_tokenizer(kind, lambda: (text for text, _ in pieces(spool.read(train[::step]))))


def _write(work: Path, spool: Spool, where: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    vocab = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # some vocabularies have holes
    facts = spool.facts(np.arange(len(spool)))
    total, done = facts["characters"], 0

    dtype = token_type(vocab)
    encoder = Encoder(tokenizer, dtype)
    splits = {}
    for index, name in enumerate(SPLITS):
        documents = np.flatnonzero(where == index)
        splits[name] = spool.facts(documents)
        with doing("tokens", total, done):
            splits[name]["tokens"] = write_tokens(work / f"{name}.bin", spool.read(documents), encoder)
        done += splits[name]["characters"]
    facts["tokens"] = sum(split["tokens"] for split in splits.values())
    facts["tokenizer"] = {"vocab": vocab, "eos_id": tokenizer.eos_token_id, "dtype": dtype.name}
    return facts | {"splits": splits}


def move(work: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Put the token files and the tokenizer of `work` in place in `folder`, and `facts` last."""
    (folder / FACTS).unlink(missing_ok=True)
    for name in SPLITS:
        (work / f"{name}.bin").replace(folder / f"{name}.bin")
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    (work / TOKENIZER).rename(folder / TOKENIZER)
    sync(folder)
    write_whole(folder / FACTS, json.dumps(facts, indent=2))
