"""The tokens that a text uses most, for a draft that speaks no others: which, and how much of other text they cover.

Tokens are ranked by their counts in the training split, special ones before all others (no text has them, and every
answer ends in one), and the share of the held-out split that the first N cover is what a draft over these N can propose
at all. Its interval is Student's over blocks of consecutive tokens, since words come in clusters.

Three layouts, by the file's ending: EAGLE-3's maps (`.safetensors`), FR-Spec's list of ids (`.pt`; arXiv:2502.14856),
which SGLang's `load_token_map` reads by torch.load alone, so that it must be a pickle, here of plain numbers, and JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder, read_tokenizer
from tiewise.checkpoint.rules_draft import vocabulary_of
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, mean_interval
from tiewise.core.files import strict, to_record, write_result
from tiewise.data.corpus import TOKENIZER, prepare
from tiewise.data.tokenizer import bpe_size

BLOCK = 256  # tokens of a block
LAYOUTS = {
    ".safetensors": "d2t and t2d, as an EAGLE-3 draft stores them",
    ".pt": "a list of ids, as FR-Spec and SGLang's --speculative-token-map read it (a pickle of plain numbers)",
    ".json": "token_ids, in rising order",
}


@dataclass(frozen=True)
class HotTokens:
    """The N most frequent tokens of V."""

    ids: NDArray[np.int64]  # in rising order [N]
    vocabulary: int  # V
    fingerprint: str  # of the tokenizer's ids and texts, as `tiewise check` prints it
    special: int  # how many of them are special
    unseen: int  # how many of them the training split does not have, and are no special ones
    counted: int  # tokens of the training split
    held_out: int  # tokens of the held-out split that coverage was measured on
    coverage: dict[int, Estimate]  # of held-out tokens, by how many tokens of the ranking; N is among them

    @property
    def answer(self) -> str:
        """What was found, in a sentence."""
        found, size = self.coverage[len(self.ids)], len(self.ids)
        return f"{size:,} of {self.vocabulary:,} tokens cover {found.value:.2%} of the held-out text"

    def record(self) -> dict[str, object]:
        """Return everything as strict JSON takes it."""
        plain = {key: value for key, value in vars(self).items() if key not in ("ids", "coverage")}
        coverage = [{"size": size} | to_record(found) for size, found in self.coverage.items()]
        return strict({"size": len(self.ids), **plain, "coverage": coverage, "token_ids": self.ids.tolist()})

    def write(self, path: Path) -> Path:
        """Write it in the layout of the file's ending, one of `LAYOUTS`; a RunError where it cannot be written."""
        size, data = len(self.ids), io.BytesIO()
        if path.suffix == ".safetensors":
            marks = np.isin(np.arange(self.vocabulary), self.ids)
            data.write(save({"d2t": self.ids - np.arange(size), "t2d": marks}, {"format": "pt"}))
        elif path.suffix == ".pt":
            torch.save(self.ids.tolist(), data)
        else:
            data.write(json.dumps(self.record()).encode())
        return write_result(data.getvalue(), path, "--to")


def hot_tokens(
    texts: Sequence[str], tokenizer: str, size: int, folder: Path, *, vocab: int | None = None, seed: int = 0
) -> HotTokens:
    """Rank the tokens of `texts` and measure what the first `size` cover.

    Args:
        texts: what to read, as in `tiewise.data.sources`; text such as the target writes.
        tokenizer: the target's folder, a tokenizer.json, or an id of the Hugging Face Hub.
        size: N.
        folder: where the tokens of the text go meanwhile.
        vocab: V; None for what the folder's config says, else the tokenizer.
        seed: draws what is held out.

    Raises:
        DataError: a text or tokenizer that cannot be used, or a size that is no part of the vocabulary.
    """
    if tokenizer == "bytes" or bpe_size(tokenizer):
        raise DataError(f"{tokenizer} is no model's tokenizer", "give the folder of the target")
    source = Path(tokenizer).expanduser()
    target = open_folder(source) if source.is_dir() else None
    if vocab is None and target is not None:
        vocab = vocabulary_of(Facts(target, scan=False))
    if size < 1 or (vocab is not None and size > vocab):
        of = "" if vocab is None else f" of {vocab:,}"
        raise DataError(f"{size:,} tokens{of}", "choose a size from 1 to the vocabulary's")
    prepared = prepare(texts, tokenizer, folder, length=BLOCK, seed=seed)
    words, counts = prepared.tokenizer(), prepared.counts
    every = prepared.vocab if vocab is None else vocab
    if size > every or counts[every:].any():
        what = (
            f"{size:,} tokens of {every:,}" if size > every else f"the text has tokens beyond a vocabulary of {every:,}"
        )
        raise DataError(what, "give the tokenizer and the size of one model")
    added = (number for number, one in words.added_tokens_decoder.items() if one.special)
    special = np.array(sorted({n for n in (*words.all_special_ids, *added) if n < every}), np.int64)
    if len(special) > size:
        raise DataError(f"{len(special):,} special tokens do not fit {size:,}", f"use --size {len(special)} or more")
    weight = np.zeros(every, np.int64)
    weight[: len(counts)] = counts[:every]
    weight[special] = np.iinfo(np.int64).max
    ranking = np.argsort(-weight, kind="stable")  # of equals the lowest ids, which merges made first
    place = np.empty(every, np.int32)
    place[ranking] = np.arange(every, dtype=np.int32)
    tokens = prepared.split("heldout")
    tokens = tokens[tokens != prepared.eos_id]  # which ends our documents, and is no text
    blocks = max(1, len(tokens) // BLOCK)
    places = place[tokens[: blocks * BLOCK]].reshape(blocks, -1)
    coverage = {}
    for some in sorted({n for n in (size // 4, size // 2, size, 2 * size) if len(special) <= n <= every}):
        found = mean_interval((places < some).mean(axis=1))
        coverage[some] = Estimate(found.value, max(0.0, found.low), min(1.0, found.high), blocks)
    chosen = np.sort(ranking[:size])
    named = read_tokenizer(target if target is not None else open_folder(prepared.folder / TOKENIZER))
    return HotTokens(
        chosen,
        every,
        "" if named is None else named.fingerprint,
        len(special),
        int((weight[chosen] == 0).sum()),
        int(counts.sum()),
        places.size,
        coverage,
    )
