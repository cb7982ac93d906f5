"""The most frequent tokens of a text, as a draft model's vocabulary, with their coverage.

Tokens are ranked by their counts in the training split. Special tokens come first: no text has them, and every answer
ends in one. The share of the held-out split that the first N cover is the share that a draft over these N can propose.
Its interval resamples documents, since words of one document come together (`estimates.ratio_interval`). There is no
interval if the held-out documents are too few, or if one of them is most of the text.
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
from tiewise.core.files import write_result
from tiewise.core.records import to_record
from tiewise.core.result import PrintedResult, Row
from tiewise.training.data.corpus import PreparedText, prepare

FEWEST_TOKENS = 512  # held-out tokens that the coverage needs at least
LAYOUTS = {
    ".safetensors": "d2t and t2d, as an EAGLE-3 draft stores them",
    # SGLang's load_token_map opens it by torch.load(weights_only=True), which takes nothing else
    ".pt": "a list of ids, as FR-Spec and SGLang's --speculative-token-map read it; a pickle of plain numbers",
    ".json": "token_ids in rising order, and what was measured",
}


@dataclass(frozen=True, repr=False)
class HotTokens(PrintedResult):
    """The N most frequent of V tokens.

    Attributes:
        token_ids: their ids in rising order [N].
        vocabulary: V.
        unseen: number of them that the training split lacks, without special ones.
        counted: number of tokens of the training split.
        coverage: share of the held-out tokens among them, with an interval over documents.
        held_out: number of held-out tokens.
        equal_documents: number of equally long documents with the same information.

    >>> import tiewise
    >>> hot = tiewise.lab.hot_vocabulary("synthetic:words=20000", tokenizer="bytes", size=40)
    >>> hot.token_ids.shape, hot.vocabulary
    ((40,), 257)
    """

    token_ids: NDArray[np.int64]
    vocabulary: int
    unseen: int
    counted: int
    coverage: Estimate
    held_out: int
    equal_documents: float

    def record(self) -> dict[str, Any]:
        """Return all fields as strict JSON types."""
        return vars(self) | {"coverage": to_record(self.coverage), "token_ids": self.token_ids.tolist()}

    def answer_text(self) -> str:
        """Return the share of the held-out text that the tokens cover."""
        size, share = len(self.token_ids), self.coverage
        return f"{size:,} of {self.vocabulary:,} tokens cover {share.value:.2%} of the held-out text."

    def rows(self) -> list[Row]:
        """Return a row for each token."""
        return [{"token_id": int(token)} for token in self.token_ids]

    def summary_rows(self) -> list[Row]:
        """Return no rows: ids alone say little."""
        return []

    def write(self, path: Path) -> None:
        """Write the tokens in the layout of the file's ending, one of `LAYOUTS`.

        RunError: the file cannot be written.
        """
        if path.suffix == ".safetensors":
            data = self._as_eagle_maps()
        elif path.suffix == ".pt":
            buffer = io.BytesIO()
            torch.save(self.token_ids.tolist(), buffer)
            data = buffer.getvalue()
        else:
            data = json.dumps(self.record()).encode()
        write_result(data, path, "to")

    def _as_eagle_maps(self) -> bytes:
        """Return the safetensors maps of an EAGLE-3 draft: d2t offsets [N], t2d marks [V]."""
        marks = np.isin(np.arange(self.vocabulary), self.token_ids)
        offsets = self.token_ids - np.arange(len(self.token_ids))
        data: bytes = save({"d2t": offsets, "t2d": marks}, {"format": "pt"})
        return data


def hot_tokens(texts: Sequence[str], tokenizer: str, size: int, folder: Path, vocab: int | None = None) -> HotTokens:
    """Rank the tokens of `texts`, and measure the share of text that the first `size` cover.

    `texts` are as in `tiewise.training.data.sources`. `folder` takes the tokens of the text. `vocab` is V; None takes
    it from the tokenizer's folder, else from the tokenizer.
    """
    source = Path(tokenizer).expanduser()
    if vocab is None and source.is_dir():
        vocab = Facts(open_folder(source), scan=False).vocabulary
    if size < 1 or size > (vocab or size):  # checked before gigabytes are read
        raise DataError(f"{size:,} tokens of {vocab or 'a vocabulary'}", "choose a size from 1 to the vocabulary's")
    text = prepare(texts, tokenizer, folder, length=1)
    rows = vocab or text.vocab
    if size > rows or text.counts[rows:].any():
        raise DataError(f"text or size go beyond a vocabulary of {rows:,}", "give tokenizer and size of one model")
    weights = _rank_weights(text, rows, size)
    chosen = np.sort(
        np.argsort(-weights, kind="stable")[:size]
    )  # of equal counts the lowest ids, which merges made first
    heldout = _heldout_tokens(text)
    is_chosen = np.isin(np.arange(text.vocab), chosen)
    return HotTokens(
        token_ids=chosen,
        vocabulary=rows,
        unseen=int((weights[chosen] <= 0).sum()),
        counted=int(text.counts.sum()),
        coverage=heldout.covered_by(is_chosen),
        held_out=len(heldout.tokens),
        equal_documents=equal_units(heldout.document_lengths()),
    )


def _rank_weights(text: PreparedText, rows: int, size: int) -> NDArray[np.int64]:
    """Return the rank weight of each row [V].

    It is the count in training; special tokens come first, rows without a token last.
    """
    tokenizer = text.tokenizer
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    special = [number for number in {*tokenizer.all_special_ids, *added} if number < rows]
    if len(special) > size:
        raise DataError(f"{len(special):,} special tokens do not fit {size:,}", f"use --size {len(special)} or more")
    weights = np.zeros(rows, np.int64)
    weights[: len(text.counts)] = text.counts[:rows]
    weights[special] = np.iinfo(np.int64).max
    unnamed = np.ones(rows, bool)  # rows without a token (padding, holes), which no draft can propose
    unnamed[[number for number in tokenizer.get_vocab().values() if number < rows]] = False
    weights[unnamed] = -1
    return weights


@dataclass(frozen=True)
class HeldOutTokens:
    """Held-out tokens without the ends of documents."""

    tokens: np.ndarray  # [n]
    documents: NDArray[np.int64]  # number of each token's document [n]

    def document_lengths(self) -> NDArray[np.float64]:
        """Return the number of tokens of each document, some of them 0."""
        return np.bincount(self.documents).astype(np.float64)

    def covered_by(self, is_chosen: NDArray[np.bool_]) -> Estimate:
        """Return the share of the tokens that are chosen [V], with its interval over documents."""
        lengths = self.document_lengths()
        hits = np.bincount(self.documents, is_chosen[self.tokens]).astype(np.float64)
        share = ratio_interval(hits[lengths > 0], lengths[lengths > 0])
        return replace(share, low=float(np.clip(share.low, 0, 1)), high=float(np.clip(share.high, 0, 1)))


def _heldout_tokens(text: PreparedText) -> HeldOutTokens:
    """Return the held-out tokens of a text. Raises DataError if they are too few."""
    tokens = text.split("heldout")
    is_end = tokens == text.eos_id
    documents = np.cumsum(is_end)
    heldout = HeldOutTokens(tokens[~is_end], documents[~is_end])
    count = len(heldout.tokens)
    if count < FEWEST_TOKENS:
        raise DataError(f"{count:,} held-out tokens say too little: {FEWEST_TOKENS} are needed", "give more text")
    return heldout
