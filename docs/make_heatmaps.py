"""Write docs/one-table.svg, the three heat maps of docs/start.md: `python docs/make_heatmaps.py`.

The first map shows how often one of six words follows another in Python's own documentation, in per cent of a row. The
others are the best predictions without a body: of two tables, softmax(E·Uᵀ), and of one table, softmax(W·Wᵀ).
"""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax

from tiewise.core.measurement import DIVERGING
from tiewise.training.data.sources import builtin_texts

WORDS = ("of", "the", "is", "not", "a", "class")
CELL, LEFT, TOP, GAP = 44, 52, 84, 62
TITLES = ("What the text asks", "Two tables", "One table, tied")


def counts() -> np.ndarray:
    """Return how often the row's word is followed by the column's [6, 6].

    Each count is one more than that, so that no pair is impossible.
    """
    words = [word.lower() for _, text in builtin_texts() for word in re.findall(r"[A-Za-z]+|[.,:;]", text)]
    pairs = Counter(pairwise(words))
    return np.array([[pairs[a, b] + 1 for b in WORDS] for a in WORDS], float)


def tied(pairs: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit one table to the counts; return its predictions and its cost.

    The predictions are the softmax(W·Wᵀ) with the least loss. The cost is the difference of its loss from the entropy
    of the counts, in nats per pair.
    """
    size = len(pairs)
    totals = pairs.sum(1, keepdims=True)  # of each row's word

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss of a flattened W, in nats per pair, and its gradient."""
        w = flat.reshape(size, size)
        log_p = log_softmax(w @ w.T, 1)
        slope = totals * np.exp(log_p) - pairs
        return -(pairs * log_p).sum() / totals.sum(), ((slope + slope.T) @ w).ravel() / totals.sum()

    starts = np.random.default_rng(0).normal(size=(8, size * size))
    best = min((minimize(loss, x, jac=True, options={"maxiter": 5000}) for x in starts), key=lambda fit: fit.fun)
    w = best.x.reshape(size, size)
    return np.exp(log_softmax(w @ w.T, 1)), best.fun + (pairs * np.log(pairs / totals)).sum() / totals.sum()


def drawing(maps: list[np.ndarray]) -> str:
    """Return the maps side by side as SVG."""
    middle, high = (np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in DIVERGING["light"][1:])
    side = CELL * len(WORDS)
    parts = []
    for index, (title, m) in enumerate(zip(TITLES, maps, strict=True)):
        x0 = LEFT + index * (side + GAP)
        parts.append(f'<text x="{x0}" y="24" font-size="19" font-weight="600" fill="#22252b">{title}</text>')
        for i, word in enumerate(WORDS):
            middle_of = CELL * i + CELL / 2
            parts.append(f'<text x="{x0 - 8}" y="{TOP + middle_of + 4}" text-anchor="end">{word}</text>')
            rotation = f"rotate(-45 {x0 + middle_of} {TOP - 8})"
            parts.append(f'<text x="{x0 + middle_of}" y="{TOP - 8}" transform="{rotation}">{word}</text>')
            for j, value in enumerate(m[i]):
                r, g, b = (middle + value * (high - middle)).round().astype(int)
                ink = "#ffffff" if value > 0.6 else "#22252b"
                x, y = x0 + CELL * j, TOP + CELL * i
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="rgb({r},{g},{b})"/>')
                position = f'x="{x + CELL / 2}" y="{y + 27}" font-size="14" text-anchor="middle"'
                parts.append(f'<text {position} fill="{ink}">{100 * value:.0f}</text>')
    width, height = LEFT + 3 * side + 2 * GAP + 24, TOP + side + 16
    attributes = 'font-family="sans-serif" font-size="15" fill="#5d626d" role="img"'
    background = '<rect width="100%" height="100%" rx="12" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {attributes}>'
        f"<title>{', '.join(TITLES)}</title>{background}{''.join(parts)}</svg>\n"
    )


def heat_maps() -> tuple[str, str]:
    """Return the picture, and a text with the cost of one table."""
    pairs = counts()
    shares, (best, cost) = pairs / pairs.sum(1, keepdims=True), tied(pairs)
    picture = drawing([shares, shares, best])
    return picture, f'"the the" gets {100 * best[1, 1]:.0f} %.\nOne table costs {cost:.2f} nats a pair'


if __name__ == "__main__":
    picture, text = heat_maps()
    Path(__file__).with_name("one-table.svg").write_text(picture, encoding="utf-8")
    print(text)
