"""The tokens that a text uses most, as the vocabulary of a draft: which, and how much of other text they cover.

Tokens are ranked by their counts in the training split, special ones before all others: no text has them, and every
answer ends in one. The share of the held-out split that the first N cover is what a draft over these N can propose at
all. Its interval resamples documents, because words of one document come together (`estimates.ratio_interval`). If the
held-out documents are too few, or one of them is most of the text, there is none.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, equal_units, ratio_interval
from tiewise.core.files import to_record, write_result
from tiewise.training.data.corpus import prepare

FEWEST_TOKENS = 512  # held out
LAYOUTS = {
    ".safetensors": "d2t and t2d, as an EAGLE-3 draft stores them",
    # SGLang's load_token_map opens it by torch.load(weights_only=True), which takes nothing else
    ".pt": "a list of ids, as FR-Spec and SGLang's --speculative-token-map read it; a pickle of plain numbers",
    ".json": "token_ids in rising order, and what was measured",
}


@dataclass(frozen=True)
class HotTokens:
    """The N most frequent tokens of V."""

    token_ids: NDArray[np.int64]  # in rising order [N]
    vocabulary: int  # V
    unseen: int  # how many of them the training split does not have, special ones apart
    counted: int  # tokens of the training split
    coverage: Estimate  # the share of the held-out tokens that they are, over documents
    held_out: int  # tokens that it is measured on
    equal_documents: float  # how many held-out documents of equal length say as much as those that there are

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it."""
        return vars(self) | {"coverage": to_record(self.coverage), "token_ids": self.token_ids.tolist()}

    def write(self, path: Path) -> None:
        """Write it in the layout of the file's ending, one of `LAYOUTS`; a RunError where it cannot be written."""
        ids, data = self.token_ids, io.BytesIO()
        if path.suffix == ".safetensors":
            marks = np.isin(np.arange(self.vocabulary), ids)
            data.write(save({"d2t": ids - np.arange(len(ids)), "t2d": marks}, {"format": "pt"}))
        elif path.suffix == ".pt":
            torch.save(ids.tolist(), data)
        else:
            data.write(json.dumps(self.record()).encode())
        write_result(data.getvalue(), path, "--to")


def hot_tokens(texts: Sequence[str], tokenizer: str, size: int, folder: Path, vocab: int | None = None) -> HotTokens:
    """Rank the tokens of `texts` (as in `tiewise.training.data.sources`) and measure what the first `size` cover.

    `folder` holds the tokens of the text meanwhile; `vocab` is V, None for what the tokenizer's folder says, or it.
    """
    source = Path(tokenizer).expanduser()
    if vocab is None and source.is_dir():
        vocab = Facts(open_folder(source), scan=False).vocabulary
    if size < 1 or size > (vocab or size):  # said before gigabytes are read
        raise DataError(f"{size:,} tokens of {vocab or 'a vocabulary'}", "choose a size from 1 to the vocabulary's")
    prepared = prepare(texts, tokenizer, folder, length=1)
    words, counts, every = prepared.tokenizer, prepared.counts, vocab or prepared.vocab
    if size > every or counts[every:].any():
        raise DataError(f"text or size go beyond a vocabulary of {every:,}", "give tokenizer and size of one model")
    added = [number for number, one in words.added_tokens_decoder.items() if one.special]
    special = [number for number in {*words.all_special_ids, *added} if number < every]
    if len(special) > size:
        raise DataError(f"{len(special):,} special tokens do not fit {size:,}", f"use --size {len(special)} or more")
    weight = np.zeros(every, np.int64)
    weight[: len(counts)] = counts[:every]
    weight[special] = np.iinfo(np.int64).max
    unnamed = np.ones(every, bool)  # rows without a token, padding and holes: no draft can propose them
    unnamed[[number for number in words.get_vocab().values() if number < every]] = False
    weight[unnamed] = -1
    chosen = np.sort(np.argsort(-weight, kind="stable")[:size])  # of equals the lowest ids, which merges made first
    tokens = prepared.split("heldout")
    document = np.cumsum(tokens == prepared.eos_id)  # which ends our documents, and is no text
    is_text = tokens != prepared.eos_id
    tokens, document = tokens[is_text], document[is_text]
    if len(tokens) < FEWEST_TOKENS:
        raise DataError(f"{len(tokens):,} held-out tokens say too little: {FEWEST_TOKENS} are needed", "give more text")
    covered = np.isin(np.arange(prepared.vocab), chosen)[tokens]
    lengths = np.bincount(document)
    share = ratio_interval(np.bincount(document, covered)[lengths > 0], lengths[lengths > 0])
    share = replace(share, low=float(np.clip(share.low, 0, 1)), high=float(np.clip(share.high, 0, 1)))
    unseen = int((weight[chosen] <= 0).sum())
    return HotTokens(chosen, every, unseen, int(counts.sum()), share, len(tokens), equal_units(lengths))
