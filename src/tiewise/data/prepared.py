"""`PreparedText`: token files on disk and the facts about them, opened without reading them.

A prepared folder holds `train.bin`, `tune.bin`, `heldout.bin` (raw little-endian token ids), `tokenizer/`, and
`data.json`, which is written last: a folder without it is not prepared.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.core.files import sync, write_whole
from tiewise.data.split import SPLITS

FACTS = "data.json"
TOKENIZER = "tokenizer"
_AGAIN = "prepare the text again"


def token_type(vocab: int) -> np.dtype:
    """Return the type that token ids below `vocab` are stored in: two bytes where they suffice, else four."""
    return np.dtype("<u2" if vocab < 1 << 16 else "<u4")


@dataclass(frozen=True)
class PreparedText:
    """A text as tokens, in a folder."""

    folder: Path
    facts: dict[str, Any]  # of `data.json`: sources, sha256, characters, bytes, documents, tokens in all and per split
    vocab: int  # V, the rows that a model's tables need
    eos_id: int  # the token after every document

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of "train", "tune" or "heldout", memory-mapped and read-only, uint16[N] or uint32[N].

        Raises:
            DataError: on another name.
        """
        if name not in SPLITS:
            raise DataError(f"no split {name!r}", f"choose one of {', '.join(SPLITS)}")
        return np.memmap(self.folder / f"{name}.bin", token_type(self.vocab), mode="r")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer, loaded at the first call."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(
            str(self.folder / TOKENIZER), trust_remote_code=False, local_files_only=True
        )


def load_prepared(folder: Path) -> PreparedText:
    """Open what `prepare` wrote.

    Raises:
        DataError: where the folder holds no prepared text, or one that is damaged.
    """
    folder = Path(folder)
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text("utf-8"))
        tokenizer = facts["tokenizer"]
        prepared = PreparedText(folder, facts, int(tokenizer["vocab"]), int(tokenizer["eos_id"]))
        tokens = {name: int(facts["splits"][name]["tokens"]) for name in SPLITS}
    except FileNotFoundError:
        raise DataError(f"no prepared text in {str(folder)!r} ({FACTS} is missing)", _AGAIN) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}", _AGAIN) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{str(path)!r} is damaged", _AGAIN) from None
    for name, count in tokens.items():
        file = folder / f"{name}.bin"
        if not file.is_file() or file.stat().st_size != count * token_type(prepared.vocab).itemsize:
            raise DataError(f"{str(file)!r} does not hold the {count} tokens that {FACTS} names", _AGAIN)
    return prepared


def put_in_place(work: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Put the token files and the tokenizer of `work` in place in `folder`, and `facts` last."""
    (folder / FACTS).unlink(missing_ok=True)
    for name in SPLITS:
        (work / f"{name}.bin").replace(folder / f"{name}.bin")
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    (work / TOKENIZER).rename(folder / TOKENIZER)
    sync(folder)
    write_whole(folder / FACTS, json.dumps(facts, indent=2))
