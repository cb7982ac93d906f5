"""Which token a word is, and what a token reads as, by the folder's own tokenizer.json.

Without the `tokenizers` library, which a light install lacks, tokens read as their vocabulary writes them, bytes as
text; to find a word's token needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from tiewise.checkpoint.hf_folder import Folder, read_tokenizer
from tiewise.checkpoint.untrusted import inside, short
from tiewise.core.errors import DataError
from tiewise.data.byte_letters import byte_letters

try:
    from tokenizers import Tokenizer
except ImportError:
    Tokenizer = None  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Token:
    """One token of a vocabulary.

    Args:
        text: as it was asked for.
        id: its row in the table.
        piece: as the vocabulary writes it ("ĠYork").
    """

    text: str
    id: int
    piece: str


def open_tokenizer(folder: Folder) -> Tokenizer:
    """Open the folder's tokenizer.json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if not folder.has("tokenizer.json"):
        raise DataError(f"{folder.path}: no tokenizer.json", "put the model's tokenizer beside it, or give ids")
    return _open(folder)


def find_tokens(folder: Folder, texts: Iterable[str]) -> tuple[Token, ...]:
    """Find the single token of each text: as a word after a space, else as it stands, else as the vocabulary's piece.

    Raises:
        DataError: the folder has no readable tokenizer.json, or a text is not one token.
    """
    tokenizer = open_tokenizer(folder)
    return tuple(_find(tokenizer, text) for text in texts)


def read_as(folder: Folder, ids: Iterable[int]) -> tuple[str, ...]:
    """Return what each token reads as, with the space before it: " York"; "#1234" where the folder cannot say.

    Raises:
        DataError: tokenizer.json cannot be read.
    """
    if not folder.has("tokenizer.json"):
        return tuple(f"#{number}" for number in ids)
    if Tokenizer is None:
        pieces = _pieces(folder)
        return tuple(pieces.get(number, f"#{number}") for number in ids)
    tokenizer = _open(folder)
    return tuple(_text(tokenizer, number) for number in ids)


def _pieces(folder: Folder) -> dict[int, str]:
    """Texts of a vocabulary's pieces; those of bytes that are no whole character, and all other spellings, as written.

    Raises:
        DataError: tokenizer.json cannot be read.
    """
    found = read_tokenizer(folder)
    if found is None or "tokenizer.json" not in found.files:
        raise DataError(f"{folder.path}: tokenizer.json cannot be read", "take it from its source again")
    decoder = folder.json("tokenizer.json").get("decoder")
    byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
    bytes_ = {letter: byte for byte, letter in enumerate(byte_letters())} if byte_level else {}

    def text(piece: str) -> str:
        if not bytes_.keys() >= set(piece):
            return piece.replace("▁", " ") if piece.startswith("▁") else piece
        try:
            return bytes(bytes_[letter] for letter in piece).decode()
        except UnicodeDecodeError:
            return piece

    return {number: text(piece) for piece, number in found.base.items()} | dict(found.added)


def _text(tokenizer: Tokenizer, number: int) -> str:
    piece = tokenizer.id_to_token(number)
    if piece is None:
        return f"#{number}"
    if piece.startswith("▁"):  # SentencePiece's space, which its decoder drops at the start of a text
        return piece.replace("▁", " ")
    text = tokenizer.decode([number], skip_special_tokens=False)
    return text if text and "\ufffd" not in text else piece


def _open(folder: Folder) -> Tokenizer:
    if Tokenizer is None:
        raise DataError("the tokenizers library is not installed (pip install 'tiewise[torch]')")
    try:
        return Tokenizer.from_file(os.fspath(inside(folder.path, "tokenizer.json")))
    except Exception as error:  # the library raises plain Exception, whatever is wrong
        what = f"{folder.path}: tokenizer.json cannot be read ({short(str(error))})"
        raise DataError(what, "take it from its source again") from None


def _find(tokenizer: Tokenizer, text: str) -> Token:
    unknown = tokenizer.token_to_id(_unknown(tokenizer))
    for spelled in (f" {text}", text):
        found = tokenizer.encode(spelled, add_special_tokens=False)
        # some vocabularies drop what they do not know: the one token must stand for all of the text
        if len(found.ids) == 1 and found.ids[0] != unknown and found.offsets[0][1] - found.offsets[0][0] >= len(text):
            return Token(text, found.ids[0], found.tokens[0])
    piece = tokenizer.token_to_id(text)
    if piece is not None:
        return Token(text, piece, text)
    pieces = tokenizer.encode(text, add_special_tokens=False).tokens
    shown = " + ".join(short(piece) for piece in pieces[:6]) or "nothing"
    raise DataError(f"{short(text)} is not one token of this vocabulary: {shown}", "choose a word that is one token")


def _unknown(tokenizer: Tokenizer) -> str:
    """The unknown token's text; "" where the model has none."""
    return getattr(tokenizer.model, "unk_token", None) or ""
