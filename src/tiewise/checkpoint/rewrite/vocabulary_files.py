"""Trimming of the files next to tokenizer.json that repeat its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import json_object
from tiewise.checkpoint.rewrite.tokenizer_file import TokenizerFile, renumber_tokens
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

VOCABULARIES = ("vocab.json", "added_tokens.json")  # {token: id}
LINES = "vocab.txt"  # a token on each line; the number of the line is its id
MERGES = "merges.txt"  # the two parts of a merge on each line


def trimmed_vocabularies(facts: Facts, tokenizer_file: TokenizerFile, new_ids: Mapping[int, int]) -> dict[str, bytes]:
    """Return {file: new content} of the files that repeat the vocabulary.

    Args:
        new_ids: {old id: new id} of the retained tokens.

    Raises:
        CheckpointError: a file gives a token another id than tokenizer.json does.
    """
    texts: dict[str, bytes] = {}
    for name, ids in _vocabularies(facts).items():
        _require_same_ids(facts, name, ids, tokenizer_file)
        left = renumber_tokens(ids, new_ids)
        if name == LINES:
            texts[name] = "".join(f"{token}\n" for token in left).encode()
        else:
            texts[name] = json.dumps(left).encode()
    merges = _text(facts, MERGES)
    if merges is not None:
        texts[MERGES] = _trimmed_merges(merges, tokenizer_file, new_ids).encode()
    return texts


def _text(facts: Facts, name: str) -> str | None:
    """Return the text of a file in the checkpoint, None if it is missing."""
    for content in facts.folder.read(name).values():
        return content.decode("utf-8", "replace")
    return None


def _vocabularies(facts: Facts) -> dict[str, dict[str, Any]]:
    """Return {file: {token: id}} of the files that repeat the vocabulary."""
    vocabularies: dict[str, dict[str, Any]] = {}
    for name in VOCABULARIES:
        if facts.folder.has(name):
            vocabularies[name] = json_object(facts.folder.source, name)
    text = _text(facts, LINES)
    if text is not None:
        lines = text.removesuffix("\n").split("\n")
        vocabularies[LINES] = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    return vocabularies


def _require_same_ids(facts: Facts, name: str, ids: Mapping[str, Any], tokenizer_file: TokenizerFile) -> None:
    """Raise if a file gives a token another id than tokenizer.json does."""
    for token, number in ids.items():
        if tokenizer_file.ids.get(token, -1) != number:
            problem = f"{facts.folder.path / name}: it gives {short(token)!r} another id than tokenizer.json"
            raise CheckpointError(problem, "remove the one that does not belong to this model")


def _trimmed_merges(text: str, tokenizer_file: TokenizerFile, new_ids: Mapping[int, int]) -> str:
    """Return the text of merges.txt with the merges of retained tokens only."""
    pieces = {"", *renumber_tokens(tokenizer_file.pieces, new_ids)}
    lines = []
    for line in text.split("\n"):
        tokens = {*line.split(" "), line.replace(" ", "")}  # both parts, and the merged token
        if line.startswith("#version") or tokens <= pieces:
            lines.append(line)
    return "\n".join(lines)
