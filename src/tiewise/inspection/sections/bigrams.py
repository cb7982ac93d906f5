"""Loss of a direct path on a text's bigrams, and its cost of word order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate
from tiewise.core.measurement import NATS, NONE, Listing, Measurement, Quantity, Stack, count, visible
from tiewise.core.progress import progress_of, report_progress
from tiewise.inspection.tables.bigram_counts import (
    Chain,
    Irreversibility,
    frequent,
    irreversibility,
    one_way_pairs,
    pair_counts,
)
from tiewise.inspection.tables.bigram_paths import MOST_TOKENS, Split, frequent_loss, heat_maps, path_loss, split
from tiewise.inspection.tables.model_tables import Ids
from tiewise.inspection.tables.open_path import DirectPath, open_path
from tiewise.inspection.tables.path_matrix import find_pairs
from tiewise.inspection.tables.token_texts import read_as
from tiewise.inspection.workspace import InspectedModel, Workspace, section

LEAST = 1000  # fewest tokens of a text
PARTS = (
    "What a model without layers loses: irreversibility, because one table cannot tell “of the” from “the of”; "
    "definiteness, because it makes each word its own follower; rank, because it is narrow. Rare words are merged."
)
Fitted = dict[tuple[int, int, bytes], Split]  # (width, seed, bytes of the text's states) → its split


@dataclass(frozen=True)
class Fits:
    """Sizes of the fits."""

    frequent_count: int = 255  # most frequent tokens to fit paths on, 2 to 2,047; all others are one state
    starts: int = 1  # random starts of each narrow fit
    steps: int = 250  # L-BFGS steps of each start
    sampled: int = 4096  # sampled pairs to evaluate the model's path on


@section(question="What does word order cost one table, without layers?", order=30, text=True)
def bigrams(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Split a text's bigram loss into the costs of a direct path and of its symmetries."""
    fitted: Fitted = workspace.once("bigrams", dict)  # models with one tokenizer and width share their fits
    return bigrams_of(workspace.ids(model), model.folder, workspace.request.pairs, None, workspace.request.seed, fitted)


def bigrams_of(
    ids: Ids,
    folder: Folder,
    words: Sequence[tuple[str, str]] = (),
    fits: Fits | None = None,
    seed: int = 0,
    fitted: Fitted | None = None,
) -> Measurement:
    """Measure a text [N] in a model's tokens and the model's direct path on it.

    `words` are pairs to count, `fits` are the sizes of the fits, `seed` is of draws and starts. `fitted` has earlier
    fits with the same `fits`; the new one is added.

    Raises:
        CheckpointError: a model without a direct path.
        DataError: fewer than 1,000 tokens, tokens that a table lacks, words that are no tokens.
    """
    fits = fits or Fits()
    if fitted is None:
        fitted = {}
    if len(ids) < LEAST:
        raise DataError(f"a text of {len(ids):,} tokens", f"bigrams need {LEAST:,} or more")
    if not 2 <= fits.frequent_count < MOST_TOKENS:
        raise DataError(f"{fits.frequent_count:,} tokens kept", f"keep 2 to {MOST_TOKENS - 1:,}")
    path = open_path(folder)
    pairs = find_pairs(folder, words, path.rows)
    chain = Chain.of(ids, path.rows)
    of_text = irreversibility(ids, path.rows, seed=seed)
    loss = _loss_on_text(path, chain, fits, seed)
    of_words = list(itertools.chain.from_iterable(pairs))
    grids, (follows,) = heat_maps(chain, folder, {"Direct path": ("direct path", path)}, of_words, seed=seed)
    frequent_tokens = _frequent_tokens(ids, chain, fits.frequent_count)
    parts = _split_of(frequent_tokens, path.input.width, fits, seed, fitted)
    reduced_loss = frequent_loss(path, chain, frequent_tokens.ids, frequent_tokens.chain, seed)
    report = _BigramReport(chain, of_text, loss, frequent_tokens, path.input.width, parts, reduced_loss)
    return Measurement(
        answer=_answer(of_text.heldout),
        quantities=(*report.text_quantities(), *report.frequent_quantities(), *follows),
        stacks=tuple(report.stacks()),
        grids=tuple(grids),
        listings=(_listed_pairs(folder, chain, words, pairs),),
        notes=tuple(report.notes(len(ids))),
    )


# measuring


def _loss_on_text(path: DirectPath, chain: Chain, fits: Fits, seed: int) -> Estimate:
    """Measure the loss of the model's path on the text."""
    report_progress("model's path on the text", 0, path.output.rows)
    with progress_of("own path", path.output.rows):
        return path_loss(path, chain, fits.sampled, seed)


@dataclass(frozen=True)
class _FrequentTokens:
    """A text in which all but its most frequent tokens are one state."""

    ids: Ids  # of the frequent tokens [K]
    states: Ids  # the text [N] as indices in `ids`, K for all other tokens
    chain: Chain  # of the states

    @property
    def share(self) -> float:
        """Return the frequent tokens' share of the text."""
        return float((self.states < len(self.ids)).mean())


def _frequent_tokens(ids: Ids, chain: Chain, most: int) -> _FrequentTokens:
    """Reduce a text [N] to its `most` most frequent tokens and one state for all others."""
    frequent_ids = frequent(chain, most)
    state_of = np.full(chain.vocabulary, len(frequent_ids))
    state_of[frequent_ids] = np.arange(len(frequent_ids))
    states = state_of[ids]
    number = int(states.max()) + 1
    return _FrequentTokens(frequent_ids, states, Chain.of(states, number))


def _split_of(tokens: _FrequentTokens, width: int, fits: Fits, seed: int, fitted: Fitted) -> Split:
    """Return the split of the frequent tokens' loss.

    If `fitted` lacks it, it is fitted and added.
    """
    key = width, seed, tokens.states.astype(np.uint16).tobytes()
    if key not in fitted:
        report_progress("fitted paths", 0, 1)
        fitted[key] = split(tokens.chain, width, fits.starts, fits.steps, seed)
        report_progress("fitted paths", 1, 1)
    return fitted[key]


# reporting


@dataclass(frozen=True)
class _BigramReport:
    """Measured values of one text and one direct path."""

    chain: Chain
    irreversibility: Irreversibility  # irreversibility of the full text
    loss: Estimate  # loss of the model's path on the text
    tokens: _FrequentTokens
    width: int  # of the path
    parts: Split  # of the loss on the frequent tokens
    reduced_loss: float  # loss of the model's path on the frequent tokens

    def text_quantities(self) -> Iterator[Quantity]:
        """Yield irreversibility, losses and entropy of the full text."""
        of_text, chain = self.irreversibility, self.chain
        why = "guessed from other parts: too low"
        yield Quantity.of_estimate("irreversibility", of_text.heldout, unit=NATS, why=why)
        why = "too high; chance: tossed directions"
        yield Quantity("… as counted", of_text.plug_in, chance=of_text.coin, unit=NATS, main=False, why=why)
        yield Quantity.of_estimate("own direct path pays", self.loss, unit=NATS)
        yield Quantity("a bias alone pays", _unigram_loss(chain), unit=NATS)
        why = "too low where pairs are rare"
        yield Quantity("entropy behind a known token", chain.entropy, unit=NATS, main=False, why=why)

    def frequent_quantities(self) -> Iterator[Quantity]:
        """Yield parts of the loss on the frequent tokens, and the loss of each path."""
        parts = self.parts
        values = {
            "entropy": (parts.entropy, ""),
            "irreversibility": (parts.irreversibility, "as counted"),
            "definiteness": (parts.definiteness, "of W Wᵀ at full width"),
            "rank, tied": (parts.tied_rank, f"of width {self.width}"),
            "rank, untied": (parts.untied_rank, ""),
            "best tied path": (parts.tied, ""),
            "best untied path": (parts.untied, ""),
            "own path": (self.reduced_loss, ""),
        }
        for name, (value, why) in values.items():
            yield Quantity(f"frequent tokens: {name}", value, unit=NATS, main=False, why=why)

    def stacks(self) -> list[Stack]:
        """Return one bar for each path: best untied, best tied and the model's own."""
        parts = self.parts
        untied = {"rank": parts.untied_rank}
        tied = {
            "irreversibility": parts.irreversibility,
            "definiteness": parts.definiteness,
            "rank": parts.tied_rank,
        }
        above = {"above entropy": self.reduced_loss - parts.entropy}
        return [
            self._stack(f"best untied, width {self.width}", untied),
            self._stack(f"best tied, width {self.width}", tied),
            self._stack("", above),
        ]

    def _stack(self, bar: str, above: Mapping[str, float]) -> Stack:
        """Return a bar of the entropy and of a path's costs above it."""
        heights = [("entropy", self.parts.entropy)]
        for part, value in above.items():
            heights.append((part, max(0.0, value)))
        return Stack("What a direct path pays", bar, tuple(heights), NATS, why=PARTS)

    def notes(self, length: int) -> Iterator[str]:
        """Yield the sizes of the text, the split and the fits.

        `length` is that of the text.
        """
        tokens = self.tokens
        yield f"{count(length)} tokens, {count(len(self.chain.keys))} different pairs"
        yield f"split: the {count(len(tokens.ids))} most frequent tokens, {tokens.share:.0%} of the text"
        if self.width >= tokens.chain.vocabulary:
            yield f"width {self.width} costs no rank"
        yield f"largest gradient left: {self.parts.gradient:.1g}"


def _answer(cost: Estimate) -> str:
    """Return what one table costs without layers, by the irreversibility of the text."""
    if cost.low > 0:
        return f"without layers, one table costs at least {cost.value:.2g} nats per token here, for word order alone"
    return "no cost of word order was detected in this text"


def _unigram_loss(chain: Chain) -> float:
    """Return the loss of the tokens' frequencies alone, in nats per token."""
    logs = np.log(np.maximum(chain.tokens, 1) / chain.pairs)
    return float(-(chain.tokens / chain.pairs * logs).sum())


def _listed_pairs(
    folder: Folder, chain: Chain, words: Sequence[tuple[str, str]], pairs: Sequence[tuple[int, int]]
) -> Listing:
    """List how often pairs of tokens follow each other in the text, in both orders.

    The requested pairs come first, then the most irreversible ones.
    """
    one_way = one_way_pairs(chain)
    both = np.concatenate([np.array(pairs, np.int64).reshape(-1, 2), one_way])
    texts = read_as(folder, one_way.ravel().tolist())
    names = [*words, *zip(texts[::2], texts[1::2], strict=True)]
    there, share_there, nats = pair_counts(chain, both)
    back, share_back, _ = pair_counts(chain, both[:, ::-1])
    rows = []
    for k, (first, second) in enumerate(names):
        pair = f"{visible(first)} → {visible(second)}"
        shares = _share(share_there[k]), _share(share_back[k])
        rows.append((pair, count(there[k]), count(back[k]), *shares, f"{nats[k]:.2g}"))
    header = ("pair", "there", "back", "p(second | first)", "p(first | second)", "of the irreversibility")
    return Listing("Requested pairs, and the most irreversible", header, tuple(rows))


def _share(p: float) -> str:
    """Return a conditional probability as text; a dash if the text lacks the condition."""
    if np.isnan(p):
        return NONE
    return f"{p:.3g}"
