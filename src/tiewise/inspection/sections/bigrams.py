"""What must a direct path pay for word order in this text?"""

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

LEAST = 1000  # tokens of a text
PARTS = "Rare tokens count as one. Symmetric logits pay irreversibility, W Wᵀ definiteness too, its width rank."
PAYS = "a symmetric one pays, tied or not"
Fitted = dict[tuple[int, int, bytes], Split]  # width, seed, the text in states → its split


@dataclass(frozen=True)
class Fits:
    """How much is fitted."""

    kept: int = 255  # most frequent tokens on which paths are fitted; 2 to 2,047, all others are one state
    starts: int = 1  # random starts of each narrow fit
    steps: int = 250  # L-BFGS steps of each start
    sampled: int = 4096  # pairs whose probability the model's own path is asked for


@section(question="What must a direct path pay for word order in this text?", order=30, text=True)
def bigrams(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Split a text's bigram loss into what any direct path pays, and what each symmetry of a tied one adds."""
    fitted: Fitted = workspace.once("bigrams", dict)  # models of one tokenizer and width share their fits
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

    `words` are pairs to count, `fits` says how much is fitted, `seed` is of draws and starts. `fitted` holds what was
    fitted to texts before, with the same `fits`; this one is added.

    Raises:
        CheckpointError: a model without a direct path.
        DataError: fewer than 1,000 tokens, tokens that a table does not have, words that are no tokens.
    """
    fits = fits or Fits()
    if fitted is None:
        fitted = {}
    if len(ids) < LEAST:
        raise DataError(f"a text of {len(ids):,} tokens", f"bigrams need {LEAST:,} or more")
    if not 2 <= fits.kept < MOST_TOKENS:
        raise DataError(f"{fits.kept:,} tokens kept", f"keep 2 to {MOST_TOKENS - 1:,}")
    path = open_path(folder)
    pairs = find_pairs(folder, words, path.rows)
    chain = Chain.of(ids, path.rows)
    whole = irreversibility(ids, path.rows, seed=seed)
    loss = _loss_on_text(path, chain, fits, seed)
    of_words = list(itertools.chain.from_iterable(pairs))
    grids, (follows,) = heat_maps(chain, folder, {"Direct path": ("direct path", path)}, of_words, seed=seed)
    frequent_tokens = _frequent_tokens(ids, chain, fits.kept)
    parts = _split_of(frequent_tokens, path.input.width, fits, seed, fitted)
    reduced_loss = frequent_loss(path, chain, frequent_tokens.ids, frequent_tokens.chain, seed)
    report = _BigramReport(chain, whole, loss, frequent_tokens, path.input.width, parts, reduced_loss)
    return Measurement(
        answer=PAYS if whole.held_out.low > 0 else "nothing that is told from chance",
        quantities=(*report.text_quantities(), *report.frequent_quantities(), *follows),
        stacks=tuple(report.stacks()),
        grids=tuple(grids),
        listings=(_listed_pairs(folder, chain, words, pairs),),
        notes=tuple(report.notes(len(ids))),
    )


# measuring


def _loss_on_text(path: DirectPath, chain: Chain, fits: Fits, seed: int) -> Estimate:
    """Measure what the model's own path pays on the text."""
    report_progress("model's path on the text", 0, path.output.rows)
    with progress_of("own path", path.output.rows):
        return path_loss(path, chain, fits.sampled, seed)


@dataclass(frozen=True)
class _FrequentTokens:
    """A text in which all but its most frequent tokens are one state."""

    ids: Ids  # of the frequent tokens [K]
    states: Ids  # the text [N]: the place of a frequent token, K for all others
    chain: Chain  # of the states

    @property
    def share(self) -> float:
        """Return their share of the text."""
        return float((self.states < len(self.ids)).mean())


def _frequent_tokens(ids: Ids, chain: Chain, most: int) -> _FrequentTokens:
    """Reduce a text [N] to its `most` most frequent tokens and one state for all others."""
    kept = frequent(chain, most)
    state_of = np.full(chain.vocabulary, len(kept))
    state_of[kept] = np.arange(len(kept))
    states = state_of[ids]
    number = int(states.max()) + 1
    return _FrequentTokens(kept, states, Chain.of(states, number))


def _split_of(tokens: _FrequentTokens, width: int, fits: Fits, seed: int, fitted: Fitted) -> Split:
    """Return the split of the frequent tokens' loss.

    It is fitted and added to `fitted` unless it is there.
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
    """Everything that was measured of one text and one direct path."""

    chain: Chain
    whole: Irreversibility  # of the whole text
    loss: Estimate  # of the model's own path on the text
    tokens: _FrequentTokens
    width: int  # of the path
    parts: Split  # of the loss on the frequent tokens
    reduced_loss: float  # of the model's own path on the frequent tokens

    def text_quantities(self) -> Iterator[Quantity]:
        """Yield irreversibility, losses and entropy of the whole text."""
        whole, chain = self.whole, self.chain
        why = "guessed from other parts: too low"
        yield Quantity.of_estimate("irreversibility", whole.held_out, unit=NATS, why=why)
        why = "too high; chance: tossed directions"
        yield Quantity("… as counted", whole.plug_in, chance=whole.coin, unit=NATS, main=False, why=why)
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
        """Return a bar of the entropy and what a path pays above it."""
        heights = [("entropy", self.parts.entropy)]
        for part, value in above.items():
            heights.append((part, max(0.0, value)))
        return Stack("What a direct path pays", bar, tuple(heights), NATS, why=PARTS)

    def notes(self, length: int) -> Iterator[str]:
        """Yield the sizes behind the figures; `length` is that of the text."""
        tokens = self.tokens
        yield f"{count(length)} tokens, {count(len(self.chain.keys))} different pairs"
        yield f"split: the {count(len(tokens.ids))} most frequent tokens, {tokens.share:.0%} of the text"
        if self.width >= tokens.chain.vocabulary:
            yield f"width {self.width} costs no rank"
        yield f"largest gradient left: {self.parts.gradient:.1g}"


def _unigram_loss(chain: Chain) -> float:
    """Return what the tokens' frequencies alone pay, in nats per token."""
    logs = np.log(np.maximum(chain.tokens, 1) / chain.pairs)
    return float(-(chain.tokens / chain.pairs * logs).sum())


def _listed_pairs(
    folder: Folder, chain: Chain, words: Sequence[tuple[str, str]], pairs: Sequence[tuple[int, int]]
) -> Listing:
    """List how often the text has two tokens behind each other, both ways.

    The requested pairs come first, then those that are most one-way.
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
    """Write a conditional probability; a dash if the text lacks the condition."""
    if np.isnan(p):
        return NONE
    return f"{p:.3g}"
