"""A checkpoint's own tokenizer.json: text as it reads it, what may go from it, and its file without that.

Text is streamed through the library's reader, for `--text`; nothing of a checkpoint runs. What may go, so that the
tokens that stay cut their text as before:

BPE joins at each step the two neighbours whose merge has the lowest rank. The merges that make a token within a word
are those that make it of its own letters alone, so each token has one tree of *ancestors*. Where a kept set holds
the ancestors of all its tokens, a word that was made of kept tokens loses no merge that it used, and is cut as before.

Unigram takes the best path through the pieces, WordPiece the longest piece first: fewer pieces leave a path that they
took the best, or the longest. docs/trim.md has the proofs, and what each needs to stay.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import MOST_BYTES, inside, parse_json, read_whole, short
from tiewise.core import Late
from tiewise.core.errors import CheckpointError, advance, doing
from tiewise.core.text import PIECE, batches, begins_spaced, pieces

tokenizers = Late("tokenizers")  # no part of a base install
BLOCK = 1 << 20  # characters of a text read at once
MOST_STEPS = 300_000_000  # of the search for ancestors: squared letters of all tokens; the largest take 10 million
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # what `byte_fallback` writes for letters that are no token
SPACE = "▁"  # which decoders turn into a space, but not its three bytes


class Noted(dict[int, int]):
    """Given in place of new ids, it leaves all as they are, and holds those that it was asked for."""

    def __missing__(self, number: int) -> int:
        return self.setdefault(number, number)


class TokenizerFile:
    """A tokenizer.json that the library reads as it is read here.

    Raises:
        CheckpointError: a file that is no tokenizer, or one of which nothing can be proved.
    """

    def __init__(self, folder: Path) -> None:
        path = inside(folder, "tokenizer.json")
        if not path.is_file():
            fix = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
            raise CheckpointError(f"{folder}: no tokenizer.json in it", fix)
        text, self.where = read_whole(path, MOST_BYTES), str(path)
        self.engine = loaded(text, self.where)
        self.record: dict[str, Any] = parse_json(text, self.where)
        self.model: dict[str, Any] = self.record["model"]
        vocabulary = self.model.get("vocab")
        guess = "Unigram" if isinstance(vocabulary, list) else "BPE" if "merges" in self.model else "WordPiece"
        self.kind = self.model.get("type", guess)
        if self.kind not in ("BPE", "Unigram", "WordPiece"):
            raise self.refused(f"its model is {short(self.kind)}", "BPE, Unigram and WordPiece can be trimmed")
        self.pieces: dict[str, int] = vocabulary if isinstance(vocabulary, dict) else {}
        if isinstance(vocabulary, list):
            self.pieces = {piece: number for number, (piece, _) in enumerate(vocabulary)}
            if len(self.pieces) < len(vocabulary):
                raise self.refused("it has one piece twice", "nothing says which of the two is meant")
        added = {one["content"]: one["id"] for one in self.record.get("added_tokens") or ()}
        self.ids = self.pieces | added  # of all tokens
        self._texts = {number: piece for piece, number in self.pieces.items()}
        self._parents: dict[int, tuple[int, ...]] = {}  # what `_joined` found so far
        if self.ids != self.engine.get_vocab(with_added_tokens=True) or len(set(self.ids.values())) < len(self.ids):
            raise self.refused("the library gives its tokens other ids than the file", "save it with transformers")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if self.kind == "BPE" and self.model.get(key):
                raise self.refused(f"its BPE has a {key}", "nothing is proved of such: it is not trimmed")
        if sum(len(piece) ** 2 for piece in self.pieces) > MOST_STEPS:
            raise self.refused("its tokens are longer than any tokenizer's", "take it from its source again")
        odd = {"", *(BYTES if self.model.get("byte_fallback") else ())}
        for number, parts in enumerate(self._merges()):
            if not odd.isdisjoint(parts):
                what = f"merge {number} joins {short(parts[0])!r} and {short(parts[1])!r}"
                raise self.refused(what, "nothing is proved of merges of bytes that stand for letters, or of nothing")

    def refused(self, what: str, fix: str) -> CheckpointError:
        """Return the error that says why it is not trimmed."""
        return CheckpointError(f"{self.where}: {what}", fix)

    def _merges(self) -> Iterator[tuple[str, str]]:
        """Both parts of every merge, which older files write as one text."""
        for merge in self.model["merges"] if self.kind == "BPE" else ():
            a, b = merge.split(" ") if isinstance(merge, str) else merge
            yield a, b

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], tuple[int, int]]:
        """{ids of both parts: (rank, id of what they make)}; of a merge that is there twice the last counts."""
        of = self.pieces
        return {(of[a], of[b]): (rank, of[a + b]) for rank, (a, b) in enumerate(self._merges())}

    # what must stay

    @cached_property
    def always(self) -> frozenset[int]:
        """Tokens without which text that could be written could no longer be, and those that the file names."""
        noted = Noted()
        _renumbered_ids(self.record, noted)
        named = set(noted)
        unknown = self.model.get("unk_token")
        named |= {self.ids[unknown]} if isinstance(unknown, str) and unknown in self.ids else set()
        written = (*BYTES, SPACE) if self.model.get("byte_fallback") else ()
        named |= {self.pieces[piece] for piece in written if piece in self.pieces}
        covered = bool(written) and self.pieces.keys() >= set(BYTES)  # any letter can be written by its bytes
        if self.kind == "BPE" and not covered:
            named |= {number for piece, number in self.pieces.items() if len(piece) == 1}
        elif not covered:  # every letter, and the pieces that have one which is no piece itself
            more = self.model.get("continuing_subword_prefix", "") if self.kind == "WordPiece" else ""
            for piece, number in self.pieces.items():
                inner = bool(more) and piece.startswith(more)
                letters = piece[len(more) :] if inner else piece
                forms = [more + letter if inner or i else letter for i, letter in enumerate(letters)]
                if len(letters) < 2 or not all(form in self.pieces for form in forms):
                    named.add(number)
        if self.kind == "Unigram":  # by the least score the library sets that of unknown letters
            scores = [score for _, score in self.model["vocab"]]
            named |= {scores.index(min(scores))} if scores else set()
        return frozenset(self.closed(named))

    def closed(self, wanted: Iterable[int]) -> set[int]:
        """Return tokens and all their ancestors."""
        found, left = set[int](), list(wanted)
        while left:
            if (token := left.pop()) not in found:
                found.add(token)
                if token not in self._parents:
                    self._parents[token] = self._joined(token) if self.kind == "BPE" else ()
                left += self._parents[token]
        return found

    def _joined(self, token: int) -> tuple[int, ...]:
        """The two tokens that the last merge joins where BPE makes this one of its letters; none where it does not."""
        symbols = [self.pieces.get(letter, -1) for letter in self._texts.get(token, "")]
        last: tuple[int, ...] = ()
        none = (math.inf, -1)
        while len(symbols) > 1:
            (_, made), at = min((self._ranks.get(pair, none), at) for at, pair in enumerate(pairwise(symbols)))
            if made < 0:
                return ()
            last = (symbols[at], symbols[at + 1])
            symbols[at : at + 2] = [made]
        return last

    # what is left

    def without(self, new: Mapping[int, int]) -> bytes:
        """Return the text of tokenizer.json with the tokens of `new` alone, {old id: new id}."""
        model = dict(self.model)
        if isinstance(model["vocab"], list):
            model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        else:
            model["vocab"] = {piece: new[number] for piece, number in self.pieces.items() if number in new}
        if self.kind == "BPE":
            kept = model["vocab"].keys()
            both = zip(model["merges"], self._merges(), strict=True)
            model["merges"] = [merge for merge, (a, b) in both if a in kept and b in kept and a + b in kept]
        record = _renumbered_ids({**self.record, "model": model}, new)
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def _renumbered_ids(record: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """A tokenizer.json with other ids wherever it names one but in its vocabulary."""
    made = dict(record)
    if isinstance(made["model"].get("unk_id"), int):
        made["model"] = {**made["model"], "unk_id": new[made["model"]["unk_id"]]}
    made["added_tokens"] = [{**one, "id": new[one["id"]]} for one in made.get("added_tokens") or ()]
    if made.get("padding"):
        made["padding"] = {**made["padding"], "pad_id": new[made["padding"]["pad_id"]]}
    if made.get("post_processor"):
        made["post_processor"] = _processor(made["post_processor"], new)
    return made


def _processor(part: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    made = dict(part)
    if part["type"] == "Sequence":
        made["processors"] = [_processor(inner, new) for inner in part["processors"]]
    elif part["type"] == "TemplateProcessing":
        named = part["special_tokens"].items()
        made["special_tokens"] = {text: {**one, "ids": [new[number] for number in one["ids"]]} for text, one in named}
    elif part["type"] in ("BertProcessing", "RobertaProcessing"):
        made |= {key: [part[key][0], new[part[key][1]]] for key in ("sep", "cls")}
    return made


# text as it reads it


def loaded(text: bytes, where: str) -> Any:
    """Return the tokenizer that the text of a tokenizer.json describes, which cuts off and pads nothing.

    Raises:
        CheckpointError: the library is missing, or the text, which came from `where`, is no tokenizer's.
    """
    if find_spec("tokenizers") is None:
        raise CheckpointError(f"{where}: this needs the tokenizers library", "pip install 'tiewise[torch]'")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception for every damaged file, and Rust's panics, which are none
        raise CheckpointError(f"{where}: no tokenizer ({short(error, 120)})", "take it from its source again") from None
    return tokenizer


def encoded(tokenizer: Any, text: Path, purpose: str) -> Iterator[tuple[int, str, list[int]]]:
    """Yield (bytes read before it, a piece of the text, its tokens); progress in bytes under `purpose`."""

    def blocks() -> Iterator[tuple[str, bool]]:
        with text.open(encoding="utf-8") as file:
            while block := file.read(BLOCK):
                yield block, False
        yield "", True

    spaced, done, count = begins_spaced(tokenizer), 0, 0
    try:
        if not text.is_file():
            raise CheckpointError(f"{text}: no file of text", "check the path")
        size = text.stat().st_size
        with doing(purpose, size):
            for batch in batches(pieces(blocks(), max(200, min(PIECE, size // 50)))):
                parts = [one for one, _ in batch]
                read = [one.removeprefix(" ") if spaced and (done or i) else one for i, one in enumerate(parts)]
                tokens = tokenizer.encode_batch_fast(read, add_special_tokens=False)
                for one, said, found in zip(parts, read, tokens, strict=True):
                    yield done, said, found.ids
                    done, count = done + len(one.encode()), count + len(found.ids)
                    advance(done)
        if not count:
            raise CheckpointError(f"{text}: no token in it", "give a text")
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be read ({error.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{text}: not UTF-8 text", "convert it first") from None


def count_tokens(folder: Path, text: Path) -> list[int]:
    """Count how often each token of the tokenizer in `folder` occurs in a text."""
    file, found = inside(folder, "tokenizer.json"), Counter[int]()
    if not file.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", "put the model's tokenizer there, or give --counts")
    for _, _, ids in encoded(loaded(read_whole(file, MOST_BYTES), str(file)), text, f"counting {text.name}"):
        found.update(ids)
    return [found[token] for token in range(max(found) + 1)]
