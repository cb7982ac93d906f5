"""What must a direct path pay for word order in this text?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError, doing, progress
from tiewise.core.found import NATS, NONE, Found, Listing, Quantity, Stack, count, visible
from tiewise.inspection.bench import Bench, Subject, section
from tiewise.inspection.tables.bigram_counts import Chain, frequent, irreversibility, one_way_pairs, pair_counts
from tiewise.inspection.tables.bigram_paths import MOST_TOKENS, Split, frequent_loss, heat_maps, path_loss, split
from tiewise.inspection.tables.model_tables import Ids
from tiewise.inspection.tables.open_path import open_path
from tiewise.inspection.tables.path_matrix import find_pairs
from tiewise.inspection.tables.token_texts import read_as

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


@section(asks="What must a direct path pay for word order in this text?", place=30, text=True)
def bigrams(subject: Subject, bench: Bench) -> Found:
    """Split a text's bigram loss into what any direct path pays, and what each symmetry of a tied one adds."""
    fitted: Fitted = bench.once("bigrams", dict)  # models of one tokenizer and width share their fits
    return bigrams_of(bench.ids(subject), subject.folder, bench.request.pairs, None, bench.request.seed, fitted)


def bigrams_of(
    ids: Ids,
    folder: Folder,
    words: Sequence[tuple[str, str]] = (),
    fits: Fits | None = None,
    seed: int = 0,
    fitted: Fitted | None = None,
) -> Found:
    """Measure a text [N] in a model's tokens and the model's direct path on it.

    `words` are pairs to count, `fits` says how much is fitted, `seed` is of draws and starts. `fitted` holds what was
    fitted to texts before, with the same `fits`; this one is added.

    Raises:
        CheckpointError: a model without a direct path.
        DataError: fewer than 1,000 tokens, tokens that a table does not have, words that are no tokens.
    """
    fits, fitted = fits or Fits(), {} if fitted is None else fitted
    if len(ids) < LEAST:
        raise DataError(f"a text of {len(ids):,} tokens", f"bigrams need {LEAST:,} or more")
    if not 2 <= fits.kept < MOST_TOKENS:
        raise DataError(f"{fits.kept:,} tokens kept", f"keep 2 to {MOST_TOKENS - 1:,}")
    path = open_path(folder)
    pairs, width = find_pairs(folder, words, path.rows), path.input.width
    chain = Chain.of(ids, path.rows)
    whole = irreversibility(ids, path.rows, seed=seed)
    progress("model's path on the text", 0, path.output.rows)
    with doing("own path", path.output.rows):
        own = path_loss(path, chain, fits.sampled, seed)
    also = [word for pair in pairs for word in pair]
    grids, (follows,) = heat_maps(chain, folder, {"Direct path": ("direct path", path)}, also, seed=seed)

    kept = frequent(chain, fits.kept)
    state = np.full(path.rows, len(kept))
    state[kept] = np.arange(len(kept))
    states = state[ids]  # the place of a frequent token, and one more for all others
    reduced = Chain.of(states, int(states.max()) + 1)
    key = width, seed, states.astype(np.uint16).tobytes()
    if key not in fitted:
        progress("fitted paths", 0, 1)
        fitted[key] = split(reduced, width, fits.starts, fits.steps, seed)
        progress("fitted paths", 1, 1)
    parts, own_reduced = fitted[key], frequent_loss(path, chain, kept, reduced, seed)
    unigram = float(-(chain.tokens / chain.pairs * np.log(np.maximum(chain.tokens, 1) / chain.pairs)).sum())
    of_frequent = {
        "entropy": (parts.entropy, ""),
        "irreversibility": (parts.irreversibility, "as counted"),
        "definiteness": (parts.definiteness, "of W Wᵀ at full width"),
        "rank, tied": (parts.tied_rank, f"of width {width}"),
        "rank, untied": (parts.untied_rank, ""),
        "best tied path": (parts.tied, ""),
        "best untied path": (parts.untied, ""),
        "own path": (own_reduced, ""),
    }
    bars = {  # from the entropy up
        f"best untied, width {width}": {"rank": parts.untied_rank},
        f"best tied, width {width}": {
            "irreversibility": parts.irreversibility, "definiteness": parts.definiteness, "rank": parts.tied_rank,
        },
        "": {"above entropy": own_reduced - parts.entropy},
    }  # fmt: skip
    stacks = []
    for bar, above in bars.items():
        heights = ("entropy", parts.entropy), *((part, max(0.0, value)) for part, value in above.items())
        stacks.append(Stack("What a direct path pays", bar, heights, NATS, why=PARTS))

    # how often the text has two tokens behind each other, both ways: those requested, and the most one-way
    one_way = one_way_pairs(chain)
    texts = read_as(folder, one_way.ravel().tolist())
    both = np.concatenate([np.array(pairs, np.int64).reshape(-1, 2), one_way])
    (there, p_there, nats), (back, p_back, _) = pair_counts(chain, both), pair_counts(chain, both[:, ::-1])
    rows = tuple(
        (
            f"{visible(first)} → {visible(second)}", count(there[k]), count(back[k]),
            *(NONE if np.isnan(p) else f"{p:.3g}" for p in (p_there[k], p_back[k])), f"{nats[k]:.2g}",
        )
        for k, (first, second) in enumerate([*words, *zip(texts[::2], texts[1::2], strict=True)])
    )  # fmt: skip
    header = ("pair", "there", "back", "p(second | first)", "p(first | second)", "of the irreversibility")
    return Found(
        answer=PAYS if whole.held_out.low > 0 else "nothing that is told from chance",
        quantities=(
            Quantity.of_estimate(
                "irreversibility", whole.held_out, unit=NATS,
                why="guessed from other parts: too low",
            ),
            Quantity(
                "… as counted", whole.plug_in, chance=whole.coin, unit=NATS, main=False,
                why="too high; chance: tossed directions",
            ),
            Quantity.of_estimate("own direct path pays", own, unit=NATS),
            Quantity("a bias alone pays", unigram, unit=NATS),
            Quantity(
                "entropy behind a known token", chain.entropy, unit=NATS, main=False,
                why="too low where pairs are rare",
            ),
            *(
                Quantity(f"frequent tokens: {name}", value, unit=NATS, main=False, why=why)
                for name, (value, why) in of_frequent.items()
            ),
            *follows,
        ),
        stacks=tuple(stacks),
        grids=tuple(grids),
        listings=(Listing("Requested pairs, and the most irreversible", header, rows),),
        notes=(
            f"{count(len(ids))} tokens, {count(len(chain.keys))} different pairs",
            f"split: the {count(len(kept))} most frequent tokens, {(states < len(kept)).mean():.0%} of the text",
            *([f"width {width} costs no rank"] if width >= reduced.vocabulary else []),
            f"largest gradient left: {parts.gradient:.1g}",
        ),
    )  # fmt: skip
