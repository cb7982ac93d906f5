"""Simulate the coverage of the interval over seeds and held-out documents, `tiewise.core.crossed_effects`.

    python tools/interval_coverage.py                     # 4,000 simulations of every setting: a minute or two
    python tools/interval_coverage.py --simulations 400

A simulated difference per token is a seed's effect + a document's effect + their interaction, all normal with mean 0.
A *mix* is the share of each in the variance of the mean over equal documents. Lengths of documents are equal, or
log-normal. A row is in order from 93 to 97 %. Above 97 % it is conservative: the interval is wider than it must be.
Below 93 % the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.core.crossed_effects import crossed_interval

SEEDS = (3, 5)
LEAST, MOST = 0.93, 0.97  # nominal coverage is 0.95
# documents, and the standard deviation of the logarithm of their lengths; 39 at 1.8 are as unequal as the demo's
TEXTS = ((5, 0.0), (5, 1.0), (10, 0.0), (10, 1.0), (40, 0.0), (40, 1.0), (39, 1.8), (200, 0.0), (200, 1.0))
MIXES = {  # shares of seeds, documents, interaction
    "seeds": (1.0, 0.0, 0.0),
    "documents": (0.0, 1.0, 0.0),
    "both": (0.5, 0.5, 0.0),
    "mostly documents": (0.05, 0.85, 0.1),
    "interaction": (0.0, 0.0, 1.0),
}


@dataclass(frozen=True)
class Setting:
    """One simulated design."""

    seeds: int
    documents: int
    unequal: float  # standard deviation of the logarithm of a document's length
    mix: str


def settings() -> Iterator[Setting]:
    """Yield every design."""
    for seeds in SEEDS:
        for documents, unequal in TEXTS:
            for mix in MIXES:
                yield Setting(seeds, documents, unequal, mix)


def draw(setting: Setting, generator: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (nats [S, J], tokens [J]) of one comparison whose true difference is zero."""
    seeds, documents = setting.seeds, setting.documents
    of_seeds, of_documents, of_both = MIXES[setting.mix]
    tokens = np.exp(setting.unequal * generator.normal(size=documents))
    per_token = np.sqrt(of_seeds * seeds) * generator.normal(size=(seeds, 1))
    per_token = per_token + np.sqrt(of_documents * documents) * generator.normal(size=documents)
    per_token = per_token + np.sqrt(of_both * seeds * documents) * generator.normal(size=(seeds, documents))
    return per_token * tokens, tokens


def coverage(setting: Setting, simulations: int, seed: int = 0) -> float:
    """Return the share of simulated intervals that contain the true difference, zero."""
    generator = np.random.default_rng(seed)
    covered = 0
    for _ in range(simulations):
        found = crossed_interval(*draw(setting, generator))
        covered += found.low <= 0 <= found.high
    return covered / simulations


def judgement(share: float) -> str:
    """Return "" for a coverage in order, else what is wrong with it."""
    if share < LEAST:
        return "too short"
    if share > MOST:
        return "conservative"
    return ""


def main() -> int:
    """Print a row for every design; return 1 if any interval is too short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    chosen = parser.parse_args()
    print(f"{'seeds':>5}  {'documents':>9}  {'unequal':>7}  {'mix':<16}  {'coverage':>8}")
    shares = []
    for setting in settings():
        share = coverage(setting, chosen.simulations)
        shares.append(share)
        row = f"{setting.seeds:5}  {setting.documents:9}  {setting.unequal:7}  {setting.mix:<16}  {share:8.1%}"
        print(f"{row}  {judgement(share)}".rstrip(), flush=True)
    print(f"{min(shares):.1%} to {max(shares):.1%} in {len(shares)} settings of {chosen.simulations:,} simulations")
    return int(min(shares) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
