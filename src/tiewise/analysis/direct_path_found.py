"""All that is measured of a checkpoint's direct path, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import NONE, Asymmetry, Definiteness, DirectPath, asymmetry, definiteness, grams
from tiewise.analysis.path_tokens import (
    OwnToken,
    WordPair,
    asymmetric_pairs,
    find_pairs,
    own_token,
    sampled,
    word_pairs,
)
from tiewise.analysis.token_texts import read_as
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import doing, progress

OWN_TOKENS = 2000  # whose whole row of logits is looked at


@dataclass(frozen=True)
class AsymmetricPair:
    """Two tokens that the path treats most differently by their order."""

    first: str  # text of the one
    second: str  # text of the other
    ids: tuple[int, int]  # of both
    there: float  # M[first, second], the larger
    back: float  # M[second, first]


@dataclass(frozen=True)
class DirectPathFound:
    """A checkpoint's direct path M = A Bᵀ [V, V]."""

    tied: bool  # whether both ends meet the same rows; a factored table is met behind two maps
    rows: int  # V
    width: int  # E
    normed: bool  # whether a final norm is known and applied
    asymmetry: Asymmetry  # of M as the model applies it, over all tokens
    linear: Asymmetry  # of gain and scales alone, without the division by each row's size
    centred: Asymmetry  # of M less its row means and column means
    definiteness: Definiteness  # of M
    definiteness_centred: Definiteness  # of M less its means
    own_token: OwnToken  # whether a token predicts itself
    asymmetric: tuple[AsymmetricPair, ...]  # the most asymmetric pairs among `searched` sampled tokens
    searched: int  # how many tokens were compared, each with each
    pairs: tuple[WordPair, ...]  # requested words, both ways
    notes: tuple[str, ...]  # what is applied, what is left out


def direct_path_of(
    folder: Folder,
    tokens: Sequence[tuple[str, str]] = (),
    samples: int = 4000,
    seed: int = 0,
) -> DirectPathFound:
    """Measure the direct path of a checkpoint.

    Args:
        folder: the checkpoint.
        tokens: pairs of words to ask of both ways; each word must be one token.
        samples: tokens among which the most asymmetric pairs are searched; all where there are fewer.
        seed: of the samples.

    Raises:
        CheckpointError: no head, quantised tables, or maps between a table and the body.
        DataError: words that are no tokens, a tokenizer that cannot be read, values that are no numbers.
    """
    path = open_path(folder)
    ids = find_pairs(folder, tokens, path.rows)
    if path.rows < 2:
        raise CheckpointError(f"{folder.path}: a vocabulary of {path.rows}", "give a model of two tokens or more")
    with doing("direct path", path.rows):
        linear = whole = grams(path)
    if path.norm.kind != NONE:
        with doing("linear", path.rows):
            linear = grams(path.linear)
    with doing("own tokens", path.output.rows):
        own = own_token(path, whole, OWN_TOKENS, seed)
    centred = whole.centred
    return DirectPathFound(
        tied=path.tied,
        rows=path.rows,
        width=path.input.width,
        normed=path.norm.kind != NONE,
        asymmetry=asymmetry(whole),
        linear=asymmetry(linear),
        centred=asymmetry(centred),
        definiteness=definiteness(whole),
        definiteness_centred=definiteness(centred),
        own_token=own,
        **_pairs(folder, path, samples, seed),
        pairs=word_pairs(path, tokens, ids),
        notes=path.notes,
    )


def _pairs(folder: Folder, path: DirectPath, samples: int, seed: int) -> dict[str, Any]:
    """The most asymmetric pairs with their texts, and among how many tokens."""
    found = asymmetric_pairs(path, sampled(path.rows, samples, seed), top=20)
    progress("asymmetric pairs", found.tokens, found.tokens)
    texts = read_as(folder, [number for pair in found.pairs for number in pair[:2]])
    named = zip(texts[::2], texts[1::2], found.pairs, strict=True)
    pairs = tuple(AsymmetricPair(a, b, (i, j), there, back) for a, b, (i, j, there, back) in named)
    return {"asymmetric": pairs, "searched": found.tokens}
