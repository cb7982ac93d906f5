"""What a text's bigrams cost any direct path, and where one model's own stands, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiewise.analysis.bigram_counts import (
    Chain,
    Ids,
    Irreversibility,
    TextPair,
    irreversibility,
    one_way_pairs,
    text_pairs,
)
from tiewise.analysis.bigram_maps import HeatMap, Likeness, frequent, likeness, path_map, text_map
from tiewise.analysis.bigram_paths import (
    MOST_TOKENS,
    Frequent,
    PathLoss,
    Split,
    frequent_loss,
    keep_frequent,
    path_loss,
    split,
)
from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.path_tokens import find_pairs
from tiewise.analysis.token_texts import read_as
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError
from tiewise.core.progress import doing, progress

LEAST = 1000  # tokens of a text


@dataclass(frozen=True)
class Effort:
    """How much is fitted."""

    kept: int = 255  # most frequent tokens on which paths are fitted; 2 to 2,047, all others are one state
    starts: int = 1  # random starts of each narrow fit
    steps: int = 250  # L-BFGS steps of each start
    sampled: int = 4096  # pairs whose probability the model's own path is asked for


@dataclass(frozen=True)
class FrequentSplit:
    """The exact split on the most frequent tokens."""

    kept: int  # tokens kept; all others are one further state where `share` is below 1
    share: float  # of the text's tokens that are kept
    irreversibility: Irreversibility  # I of the reduced chain, from both sides; `split` holds the plug-in
    split: Split  # what paths of the model's width pay on it
    own: float  # the model's own direct path on it, nats per token
    drawn: int  # tokens that stood for all others in `own`


@dataclass(frozen=True)
class BigramsFound:
    """Bigrams of a text in one model's tokens."""

    tokens: int  # of the text
    vocabulary: int  # rows of the model's input table
    seen: int  # different tokens
    different: int  # different pairs
    width: int  # of the model's tables
    tied: bool  # whether the model is
    unigram: float  # entropy of the tokens' frequencies: what a bias alone pays
    entropy: float  # H of the counts as they are; too low where pairs are rare
    irreversibility: Irreversibility  # I of the text, from both sides
    own: PathLoss  # loss of the model's direct path over the whole vocabulary
    frequent: FrequentSplit  # the split on the most frequent tokens
    asked: tuple[TextPair, ...]  # requested words, both ways
    one_way: tuple[TextPair, ...]  # the pairs that add most to I
    target: HeatMap  # log Q/(ππ) of the most frequent tokens
    heat: HeatMap  # the same of the model's direct path
    likeness: Likeness  # of the two
    notes: tuple[str, ...]  # what the path applies and leaves out


def bigrams_of(
    ids: Ids,
    folder: Folder,
    pairs: Sequence[tuple[str, str]] = (),
    effort: Effort | None = None,
    seed: int = 0,
    like: BigramsFound | None = None,
) -> BigramsFound:
    """Measure a text and a model's direct path on it.

    Args:
        ids: the text in the model's tokens [N].
        folder: the model's checkpoint.
        pairs: pairs of words to count and to ask of.
        effort: how much is fitted.
        seed: of draws and starts.
        like: another model's result on the same text and width; its fits hold here too.

    Raises:
        CheckpointError: a model without a direct path.
        DataError: fewer than 1,000 tokens, tokens that a table does not have, words that are no tokens.
    """
    effort = effort or Effort()
    if len(ids) < LEAST:
        raise DataError(f"a text of {len(ids):,} tokens", f"bigrams need {LEAST:,} or more: give a longer text")
    if not 2 <= effort.kept < MOST_TOKENS:
        raise DataError(f"{effort.kept:,} tokens kept", f"keep 2 to {MOST_TOKENS - 1:,}")
    path = open_path(folder)
    asked = find_pairs(folder, pairs, path.rows)
    chain = Chain.of([ids], path.rows)
    whole = irreversibility(ids, path.rows, seed=seed)
    progress("model's path on the text", 0, path.output.rows)
    with doing("own path", path.output.rows):
        own = path_loss(path, chain, effort.sampled, seed)
    shown = frequent(chain, also=[word for pair in asked for word in pair])
    texts = read_as(folder, shown)
    target, heat = text_map(chain, shown, texts), path_map(path, chain, shown, texts)
    return BigramsFound(
        tokens=len(ids),
        vocabulary=path.rows,
        seen=int((chain.tokens > 0).sum()),
        different=len(chain.keys),
        width=path.input.width,
        tied=path.tied,
        unigram=_unigram(chain),
        entropy=chain.entropy,
        irreversibility=whole,
        own=own,
        frequent=_frequent(ids, chain, path, effort, seed, like),
        asked=text_pairs(chain, asked, pairs),
        one_way=_one_way(chain, folder),
        target=target,
        heat=heat,
        likeness=likeness(target, heat, seed=seed),
        notes=path.notes,
    )


def _unigram(chain: Chain) -> float:
    shares = chain.tokens[chain.tokens > 0] / chain.pairs
    return float(-(shares * np.log(shares)).sum())


def _frequent(
    ids: Ids,
    chain: Chain,
    path: DirectPath,
    effort: Effort,
    seed: int,
    like: BigramsFound | None,
) -> FrequentSplit:
    kept = keep_frequent(chain, effort.kept)
    reduced = kept.of(ids)
    known = _known(like, chain, path, kept)
    if known is None:
        progress("fitted paths", 0, 1)
        found = split(reduced, path.input.width, effort.starts, effort.steps, seed)
        known = irreversibility(kept.state[ids], kept.states, seed=seed), found
        progress("fitted paths", 1, 1)
    own, drawn = frequent_loss(path, chain, kept, reduced, seed)
    return FrequentSplit(len(kept.ids), kept.share, *known, own, drawn)


def _known(
    like: BigramsFound | None, chain: Chain, path: DirectPath, kept: Frequent
) -> tuple[Irreversibility, Split] | None:
    """Fits of another model, where they were made on this very chain and width."""
    if like is None or (like.width, like.tokens, like.different) != (path.input.width, chain.pairs, len(chain.keys)):
        return None
    same = like.entropy == chain.entropy and (like.frequent.kept, like.frequent.share) == (len(kept.ids), kept.share)
    return (like.frequent.irreversibility, like.frequent.split) if same else None


def _one_way(chain: Chain, folder: Folder) -> tuple[TextPair, ...]:
    ids = one_way_pairs(chain)
    texts = read_as(folder, np.array(ids, np.int64).ravel().tolist())
    return text_pairs(chain, ids, list(zip(texts[::2], texts[1::2], strict=True)))
