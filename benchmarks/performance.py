"""`docs/performance.md`, rendered from what `benchmarks.loss` measured: no figure on it that is not in its results.

python -m benchmarks.performance

A file of `benchmarks/results/loss/` is one shape on one instruction set, a row on each line. A row's figure is the
median over its rounds of (its seconds / those of the three products in the same round). Two rows of one run are
compared by the median of their ratios in each round, rows of two runs by the quotient of their figures.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gpu_page

RESULTS = Path(__file__).parent / "results" / "loss"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SQUARE, READ, PRODUCTS = "square product", "read of memory", "three products"
SIDE, NUMBERS = 2048, 2**27  # of the square product; fp32 numbers read
SHAPES = (
    (2048, 50304, 768),
    (4096, 32000, 512),
    (8192, 8192, 256),
    (1024, 128256, 2048),
    (2048, 50257, 768),
    (777, 50304, 768),
    (1, 50304, 768),
)
KINDS = ("fp32", "bf16")
ERRORS = (("loss", "loss"), ("worst token, nats", "worst token"), ("features", "features"), ("table", "table"))
# what a name begins with that is no bare loss
SETTINGS = ("per token", "log-probabilities", "divergence", "tied step")

PORTABLE, POLICY = "tiewise, portable", "log-probabilities and entropy"
QUESTIONS = (  # who asks, two rows, what their ratio says
    ("Into a gradient that is kept", "tiewise, gradient kept", PRODUCTS, "{} × its three products."),
    ("What do compiled kernels save", PORTABLE, "tiewise", "without them it takes {} × as long."),
    (
        "What does the choice of products save",
        f"{PORTABLE}, default products",
        PORTABLE,
        "by torch's own, without kernels, it takes {} × as long.",
    ),
    ("What does the whole tied step save", "tied step, plain", "tied step, tiewise", "plain autograd takes {} × ours."),
    ("And beside plain autograd in fp32", "tied step, plain in fp32", "tied step, tiewise", "it takes {} × ours."),
    ("Of this the lookup path", "tied step, its lookup path alone", "tied step, tiewise", "{} of the step."),
    ("What does tracking both paths cost", "tied step, paths tracked", "tied step, tiewise", "{} × the tied step."),
    ("Log-probabilities with entropy", f"{POLICY}, tiewise", "per token, tiewise", "{} × our loss by token."),
    ("The same from all logits", f"{POLICY}, plain", f"{POLICY}, tiewise", "{} × ours."),
    ("Logits kept in fp32", "tiewise, logits in fp32", "tiewise", "{} × the default."),
)

HEAD = """# Performance

What the loss costs beside its peers, on one machine of each kind of processor. This page is written by
`python -m benchmarks.loss`, which measures the machine that it runs on and leaves the tables of other instruction sets
alone (a shape and `--rounds 3` for a quick look). What a row does is in `benchmarks/loss_rows.py`, every round of it in
`benchmarks/results/loss/`.

Shapes are tokens × vocabulary × width. **× products** is the median over the rounds of a row's time divided by that of
the three bare matrix products of the same type in the same round. Rows alternate, in reversed order every other round;
each makes the loss and the gradients of features and table. `tiewise` is what a user gets: compiled kernels where they
are built, else the products that are fastest here; *portable* is without kernels. Peers and memory are measured at the
first three shapes, what concerns post-training at the quickest; "12 s, once" took too long to be repeated. Errors are
the worst of all shapes, relative to fp64 of the same, rounded inputs; extra memory counts the gradients.
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One file: a shape on one instruction set, its rows by type and name."""

    instructions: str
    shape: tuple[int, ...]
    kinds: dict[str, dict[str, Row]]

    @property
    def title(self) -> str:
        return " × ".join(map(str, self.shape))


def results(folder: Path) -> list[Measured]:
    """All files of a folder, by instruction set; shapes as they are measured."""
    found = []
    for path in folder.glob("*.json"):
        instructions, _, shape = path.stem.rpartition("-")
        kinds: dict[str, dict[str, Row]] = {}
        for row in json.loads(path.read_text(encoding="utf-8")):
            kinds.setdefault(row["kind"], {})[row["name"]] = row
        found.append(Measured(instructions, tuple(map(int, shape.split("x"))), kinds))
    return sorted(found, key=lambda m: (m.instructions, (*SHAPES, m.shape).index(m.shape)))


def over(a: Row, b: Row) -> float:
    """Time of row a over that of row b."""
    if a["run"] == b["run"]:
        return median(x / y for x, y in zip(a["seconds"], b["seconds"], strict=True))
    return factor(a) / factor(b)


def factor(row: Row) -> float:
    """Time of a row over that of the three products."""
    return median(x / y for x, y in zip(row["seconds"], row["products"], strict=True))


def page(measured: list[Measured]) -> str:
    """Return the page of all results."""
    parts = [HEAD]
    for name in dict.fromkeys(m.instructions for m in measured):
        mine = [m for m in measured if m.instructions == name]
        machines = dict.fromkeys(
            row["machine"] for m in mine for rows in m.kinds.values() for row in rows.values() if "run" in row
        )
        rounds = [len(r["seconds"]) for m in mine for rows in m.kinds.values() for r in rows.values() if "run" in r]
        least, most = min(rounds), max(rounds)
        told = f"{least} rounds" if least == most else f"{least} to {most} rounds"
        parts += [f"## {name}\n", f"{'; '.join(machines)}, {told}.\n", *answers(mine), ""]
        for kind in KINDS:
            if some := [m for m in mine if kind in m.kinds]:
                parts += [times(some, kind), beside(some, kind)]
    parts.append(gpu_page.section(gpu_page.RESULTS))
    return "\n".join(parts)


def pairs(mine: list[Measured], kind: str, a: str, b: str) -> list[float]:
    """Time of row a over row b at every shape that has both."""
    rows = [m.kinds.get(kind, {}) for m in mine]
    return [over(r[a], r[b]) for r in rows if "run" in r.get(a, {}) and "run" in r.get(b, {})]


def answers(mine: list[Measured]) -> list[str]:
    """One item per question that a reader has, from one machine's results."""
    found = []
    for kind in KINDS:
        if ours := pairs(mine, kind, "tiewise", PRODUCTS):
            text = f"`tiewise.linear_cross_entropy`: {between(ours)} × its three products."
            found.append(f"* **Which loss, {kind}?** {text}{standing(mine, kind)}")
    for question, a, b, answer in QUESTIONS:
        if (a, b) == (PORTABLE, "tiewise") and mine[0].instructions == "avx2":
            continue  # kernels need AVX-512: here both rows do the same
        ratios = {kind: pairs(mine, kind, a, b) for kind in KINDS}
        told_by = [f"{kind}: {answer.format(between(some))}" for kind, some in ratios.items() if some]
        if told_by:
            found.append(f"* **{question}?** In {' In '.join(told_by)}")
    for m in mine:
        held = {name: row["megabytes"] for name, row in bare(m.kinds.get("fp32", {})).items() if "megabytes" in row}
        if "tiewise" in held:
            each = ", ".join(f"`{name}` {value:,.0f}" for name, value in held.items())
            return [*found, f"* **How much memory?** MB at {m.title}, fp32, both gradients among them: {each}."]
    return found


def bare(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of a scalar loss with fresh gradients, ours and of peers, that were measured."""
    return {
        name: row for name, row in rows.items() if "run" in row and "error" in row and not name.startswith(SETTINGS)
    }


def standing(mine: list[Measured], kind: str) -> str:
    """Return where our loss is ahead of all measured peers, and where the fastest peer is ahead."""
    ahead, behind = [], []
    for m in mine:
        rows = bare(m.kinds.get(kind, {}))
        if "tiewise" not in rows:
            continue
        peers = {name: over(row, rows["tiewise"]) for name, row in rows.items() if not name.startswith("tiewise")}
        if peers:
            best = min(peers, key=peers.__getitem__)
            (ahead if peers[best] >= 1 else behind).append(
                f"{m.title} (the fastest of {len(peers)} measured, `{best}`: {peers[best]:.2f} × ours)"
            )
    text = f" Ahead of its peers at {', '.join(ahead)}." if ahead else ""
    return text + (f" Behind at {', '.join(behind)}." if behind else "")


def told(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def between(ratios: list[float]) -> str:
    low, high = told(min(ratios)), told(max(ratios))
    return low if low == high else f"{low}–{high}"


def times(mine: list[Measured], kind: str) -> str:
    """Return the table of one type: the machine, and every row × products, at every shape."""
    lines = _header(f"{kind}, × products", [m.title for m in mine])
    for text, name, unit in (
        ("three products, ms", PRODUCTS, lambda m, s: 1e3 * s),
        ("three products, GFLOP/s", PRODUCTS, lambda m, s: 6e-9 * math.prod(m.shape) / s),
        (f"square product of {SIDE}, GFLOP/s", SQUARE, lambda m, s: 2e-9 * SIDE**3 / s),
    ):
        known = [(m, m.kinds[kind].get(name)) for m in mine]
        cells = [f"{unit(m, median(row['seconds'])):,.0f}" if row else "" for m, row in known]
        lines.append(f"| *{text}* | " + " | ".join(cells) + " |")
    for name in _names(mine, kind):
        rows = [m.kinds[kind].get(name, {}) for m in mine]
        cells = [told(factor(row)) if "run" in row else row.get("missing", "") for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def beside(mine: list[Measured], kind: str) -> str:
    """Return the table of what stands beside the times of one type: the worst errors, and memory by shape."""
    weighed = [m for m in mine if any("megabytes" in row for row in m.kinds[kind].values())]
    lines = _header(f"{kind}, errors", [*(what for what, _ in ERRORS), *(f"extra MB, {m.title}" for m in weighed)])
    for name in _names(mine, kind):
        found = [m.kinds[kind][name].get("error", {}) for m in mine if name in m.kinds[kind]]
        worst = [max((error[key] for error in found if key in error), default=None) for _, key in ERRORS]
        cells = ["" if value is None else f"{value:.0e}" for value in worst]
        held = [m.kinds[kind].get(name, {}).get("megabytes") for m in weighed]
        cells += ["" if value is None else f"{value:,.0f}" for value in held]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _names(mine: list[Measured], kind: str) -> list[str]:
    """Rows of a type at any shape, in the order of the shape that has most."""
    known = sorted((m.kinds[kind] for m in mine), key=len, reverse=True)
    return [
        name for name in dict.fromkeys(name for rows in known for name in rows) if name not in (SQUARE, READ, PRODUCTS)
    ]


def _header(corner: str, columns: list[str]) -> list[str]:
    return [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]


def write() -> None:
    PAGE.write_text(page(results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    write()
