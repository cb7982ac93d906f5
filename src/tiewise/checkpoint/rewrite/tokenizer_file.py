"""Reader of a tokenizer.json that finds droppable tokens, and writes the file without them.

A text whose tokens are all retained is cut into the same tokens as before, for the following reasons:

At each step, BPE joins the two neighbours whose merge has the lowest rank. Within a word, the same merges build a
token as from its letters alone, so each token has one tree of *ancestors*. If a retained set contains the ancestors of
all its tokens, a word of retained tokens loses no merge that it used, and is cut as before.

Unigram takes the best path through the pieces, and WordPiece the longest piece first. If pieces are dropped that a text
did not use, its path is still the best, or its pieces the longest. docs/dev/details.md has the proofs and their
conditions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiewise.checkpoint.rewrite.tokenizer_text import load_tokenizer
from tiewise.checkpoint.untrusted import MOST_BYTES, parse_json, path_inside, read_bytes, short
from tiewise.core.errors import CheckpointError

# limit of the search for ancestors: sum of squared token lengths; the largest real one is 10 million
MOST_STEPS = 300_000_000
# tokens that `byte_fallback` writes for letters that are no token
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPACE = "▁"  # decoders turn this letter into a space, but not its three byte tokens
BPE, UNIGRAM, WORDPIECE = "BPE", "Unigram", "WordPiece"
UNPROVED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # settings outside the proof for BPE


class IdRecorder(dict[int, int]):
    """Map from each id to itself that records the ids that were looked up.

    Its keys are these ids.
    """

    def __missing__(self, number: int) -> int:
        return self.setdefault(number, number)


class TokenizerFile:
    """A tokenizer.json that this class and the `tokenizers` library read alike.

    Raises:
        CheckpointError: the file is no tokenizer, or the proof of docs/dev/details.md does not cover it.
    """

    def __init__(self, folder: Path) -> None:
        path = path_inside(folder, "tokenizer.json")
        if not path.is_file():
            remedy = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
            raise CheckpointError(f"{folder}: no tokenizer.json in it", remedy)
        text, self.where = read_bytes(path, MOST_BYTES), str(path)
        self.engine = load_tokenizer(text, self.where)
        self.record: dict[str, Any] = parse_json(text, self.where)
        self.model: dict[str, Any] = self.record["model"]
        self.algorithm = self._read_algorithm()
        self.pieces = self._read_pieces()
        added_tokens = self.record.get("added_tokens") or ()
        self.ids = self.pieces | {token["content"]: token["id"] for token in added_tokens}
        self._texts = {number: piece for piece, number in self.pieces.items()}
        self._parents: dict[int, tuple[int, ...]] = {}  # {token: its last two parts}; `closed` fills it
        self._require_ids_of_library()
        self._require_provable()

    def refused(self, problem: str, remedy: str) -> CheckpointError:
        """Return an error that says why the tokenizer is not trimmed."""
        return CheckpointError(f"{self.where}: {problem}", remedy)

    def _read_algorithm(self) -> str:
        """Return the model's algorithm; older files omit it, and other keys reveal it."""
        if isinstance(self.model.get("vocab"), list):
            default = UNIGRAM
        elif "merges" in self.model:
            default = BPE
        else:
            default = WORDPIECE
        algorithm: str = self.model.get("type", default)
        if algorithm not in (BPE, UNIGRAM, WORDPIECE):
            raise self.refused(f"its model is {short(algorithm)}", "BPE, Unigram and WordPiece can be trimmed")
        return algorithm

    def _read_pieces(self) -> dict[str, int]:
        """Return {piece: id} of the model's vocabulary, without `added_tokens`."""
        vocabulary = self.model.get("vocab")
        if isinstance(vocabulary, dict):
            return vocabulary
        if not isinstance(vocabulary, list):
            return {}
        pieces = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        if len(pieces) < len(vocabulary):
            raise self.refused("it has one piece twice", "nothing says which of the two is meant")
        return pieces

    def _require_ids_of_library(self) -> None:
        """Raise if library and file disagree on an id, or if two tokens share one."""
        are_distinct = len(set(self.ids.values())) == len(self.ids)
        if self.ids != self.engine.get_vocab(with_added_tokens=True) or not are_distinct:
            raise self.refused("the library gives its tokens other ids than the file", "save it with transformers")

    def _require_provable(self) -> None:
        """Raise if the proof of docs/dev/details.md does not cover a setting or a merge.

        Also raise if the tokens are so long that the search for ancestors takes too many steps.
        """
        if self.algorithm == BPE:
            for key in UNPROVED:
                if self.model.get(key):
                    raise self.refused(f"its BPE has a {key}", "nothing is proved of such: it is not trimmed")
        steps = sum(len(piece) ** 2 for piece in self.pieces)
        if steps > MOST_STEPS:
            raise self.refused("its tokens are longer than any tokenizer's", "take it from its source again")
        not_letters = {""}
        if self.model.get("byte_fallback"):
            not_letters.update(BYTES)
        for number, parts in enumerate(self._merges()):
            if not not_letters.isdisjoint(parts):
                problem = f"merge {number} joins {short(parts[0])!r} and {short(parts[1])!r}"
                raise self.refused(
                    problem, "nothing is proved of merges of bytes that stand for letters, or of nothing"
                )

    def _merges(self) -> Iterator[tuple[str, str]]:
        """Yield the two parts of every merge; older files write them as one string."""
        if self.algorithm != BPE:
            return
        for merge in self.model["merges"]:
            parts = merge
            if isinstance(merge, str):
                parts = merge.split(" ")
            a, b = parts
            yield a, b

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Merges as {ids of both parts: (rank, id of the merged token)}.

        If a merge is listed twice, the last one counts.
        """
        ids = self.pieces
        ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (a, b) in enumerate(self._merges()):
            ranks[ids[a], ids[b]] = (rank, ids[a + b])
        return ranks

    # tokens that must be retained

    @cached_property
    def always(self) -> frozenset[int]:
        """Ids that must be retained, with their ancestors.

        They keep every text encodable, or the file refers to them outside its vocabulary.
        """
        tokens = self._named_tokens()
        uses_bytes = bool(self.model.get("byte_fallback"))
        if uses_bytes:
            tokens |= {self.pieces[piece] for piece in (*BYTES, SPACE) if piece in self.pieces}
        covers_all_letters = uses_bytes and self.pieces.keys() >= set(BYTES)
        if not covers_all_letters:
            tokens |= self._letters()
        if self.algorithm == UNIGRAM:
            tokens |= self._least_score()
        return frozenset(self.closed(tokens))

    def _named_tokens(self) -> set[int]:
        """Return the ids that the file names outside its vocabulary, and the unknown token's id."""
        named = IdRecorder()
        _renumbered_ids(self.record, named)
        tokens = set(named)
        unknown = self.model.get("unk_token")
        if isinstance(unknown, str) and unknown in self.ids:
            tokens.add(self.ids[unknown])
        return tokens

    def _letters(self) -> set[int]:
        """Return the tokens that are needed to write every letter.

        They are all letters. In Unigram and WordPiece, they are also the pieces that contain a letter that is no piece.
        """
        if self.algorithm == BPE:
            return {number for piece, number in self.pieces.items() if len(piece) == 1}
        return {number for piece, number in self.pieces.items() if not self._is_spelled_by_letters(piece)}

    def _is_spelled_by_letters(self, piece: str) -> bool:
        """Return True for a piece of several letters that are all pieces.

        WordPiece writes a letter within a word with a prefix.
        """
        prefix = ""
        if self.algorithm == WORDPIECE:
            prefix = self.model.get("continuing_subword_prefix", "")
        letters = piece.removeprefix(prefix)
        if len(letters) < 2:
            return False
        forms = [prefix + letter for letter in letters]
        if letters == piece:  # the piece begins a word
            forms[0] = letters[0]
        return self.pieces.keys() >= set(forms)

    def _least_score(self) -> set[int]:
        """Return the first token with the lowest score.

        The library derives the score of unknown letters from it.
        """
        scores = [score for _, score in self.model["vocab"]]
        if not scores:
            return set()
        return {scores.index(min(scores))}

    def closed(self, tokens: Iterable[int]) -> set[int]:
        """Return tokens and all their ancestors.

        The ancestors of a token are the two parts that BPE joins to it, and the ancestors of these.
        """
        closed, waiting = set[int](), list(tokens)
        while waiting:
            token = waiting.pop()
            if token in closed:
                continue
            closed.add(token)
            if token not in self._parents:
                self._parents[token] = self._last_parts(token)
            waiting += self._parents[token]
        return closed

    def _last_parts(self, token: int) -> tuple[int, ...]:
        """Return the two tokens whose merge is the token.

        Return () if BPE cannot build the token from letters, and for the other algorithms.
        """
        if self.algorithm != BPE:
            return ()
        symbols = [self.pieces.get(letter, -1) for letter in self._texts.get(token, "")]
        parts: tuple[int, ...] = ()
        no_merge = (math.inf, -1)
        while len(symbols) > 1:
            merges = [(self._ranks.get(pair, no_merge), at) for at, pair in enumerate(pairwise(symbols))]
            (_, merged), at = min(merges)  # the lowest rank; the first of equal ranks
            if merged < 0:
                return ()
            parts = (symbols[at], symbols[at + 1])
            symbols[at : at + 2] = [merged]
        return parts

    # the file without the dropped tokens

    def without(self, new: Mapping[int, int]) -> bytes:
        """Return the text of tokenizer.json with the retained tokens only.

        Args:
            new: {old id: new id} of the retained tokens.
        """
        model = dict(self.model)
        if isinstance(model["vocab"], list):
            model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        else:
            model["vocab"] = renumber_tokens(self.pieces, new)
        if self.algorithm == BPE:
            model["merges"] = self._merges_within(model["vocab"].keys())
        record = _renumbered_ids({**self.record, "model": model}, new)
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()

    def _merges_within(self, pieces: Set[str]) -> list[Any]:
        """Return the merges whose parts and result are among the pieces, as the file writes them."""
        merges = zip(self.model["merges"], self._merges(), strict=True)
        return [merge for merge, (a, b) in merges if {a, b, a + b} <= pieces]


def renumber_tokens(ids: Mapping[str, int], new: Mapping[int, int]) -> dict[str, int]:
    """Return {token: new id} of the retained tokens.

    Args:
        ids: {token: old id}.
        new: {old id: new id} of the retained tokens.
    """
    return {token: new[number] for token, number in ids.items() if number in new}


def _renumbered_ids(record: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return a tokenizer.json with new ids everywhere except in its vocabulary."""
    result = dict(record)
    model, padding, processor = result["model"], result.get("padding"), result.get("post_processor")
    if isinstance(model.get("unk_id"), int):
        result["model"] = {**model, "unk_id": new[model["unk_id"]]}
    result["added_tokens"] = [{**token, "id": new[token["id"]]} for token in result.get("added_tokens") or ()]
    if padding:
        result["padding"] = {**padding, "pad_id": new[padding["pad_id"]]}
    if processor:
        result["post_processor"] = _renumbered_processor(processor, new)
    return result


def _renumbered_processor(part: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Return a post-processor with new ids."""
    result = dict(part)
    if part["type"] == "Sequence":
        result["processors"] = [_renumbered_processor(inner, new) for inner in part["processors"]]
    elif part["type"] == "TemplateProcessing":
        tokens = {}
        for text, token in part["special_tokens"].items():
            tokens[text] = {**token, "ids": [new[number] for number in token["ids"]]}
        result["special_tokens"] = tokens
    elif part["type"] in ("BertProcessing", "RobertaProcessing"):
        for key in ("sep", "cls"):
            text, number = part[key][0], part[key][1]
            result[key] = [text, new[number]]
    return result
