"""`docs/performance.md`, rendered from what `benchmarks.loss` measured: no figure on it that is not in its results.

python -m benchmarks.performance

A file of `benchmarks/results/loss/` is one shape on one instruction set, a row on each line. A row's figure is the
median over its rounds of (its seconds / those of the three products in the same round). Two rows of one run are
compared by the median of their ratios in each round, rows of two runs by the quotient of their figures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import spread

RESULTS = Path(__file__).parent / "results" / "loss"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SQUARE, READ, PRODUCTS = "square product", "read of memory", "three products"
SIDE, NUMBERS = 2048, 2**27  # of the square product; fp32 numbers read
KINDS = ("fp32", "bf16")
# what a name begins with that is no bare loss
SETTINGS = ("gradient kept", "per token", "log-probabilities", "tied step")

POLICY = "log-probabilities and entropy"
QUESTIONS = (  # who asks, two rows, what their ratio says
    ("What does the whole tied step save", "tied step, plain", "tied step, tiewise", "Plain autograd takes {} × ours."),
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
each makes the loss and the gradients of features and table. Errors are relative to fp64 of the same, rounded inputs;
extra memory counts the gradients.
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
    """All files of a folder, by instruction set; larger shapes first."""
    found = []
    for path in folder.glob("*.json"):
        instructions, _, shape = path.stem.rpartition("-")
        kinds: dict[str, dict[str, Row]] = {}
        for row in json.loads(path.read_text(encoding="utf-8")):
            kinds.setdefault(row["kind"], {})[row["name"]] = row
        found.append(Measured(instructions, tuple(map(int, shape.split("x"))), kinds))
    return sorted(found, key=lambda m: (m.instructions, -m.shape[0] * m.shape[1] * m.shape[2]))


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
        parts += [f"## {name}\n", "; ".join(machines) + ".\n", *answers(mine), ""]
        for kind in dict.fromkeys(kind for m in mine for kind in m.kinds):
            parts.append(overview([m for m in mine if kind in m.kinds], kind))
        parts += [details(m, kind) for m in mine for kind in m.kinds]
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
            found.append(
                f"* **Which loss, {kind}?** `tiewise.linear_cross_entropy`: {between(ours)} × its three products."
            )
            found[-1] += standing(mine, kind)
        for question, a, b, answer in QUESTIONS:
            if ratios := pairs(mine, kind, a, b):
                found.append(f"* **{question}, {kind}?** {answer.format(between(ratios))}")
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
    """Where our loss is ahead of the peers that were measured, and where it is not, with the fastest of them."""
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


def between(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low}–{high}"


def overview(mine: list[Measured], kind: str) -> str:
    """Return the table of one type: every row at every shape, × products."""
    names = dict.fromkeys(name for m in mine for name in m.kinds[kind] if name not in (SQUARE, READ))
    lines = [f"| {kind}, × products | " + " | ".join(m.title for m in mine) + " |", "|---" * (len(mine) + 1) + "|"]
    for name in names:
        rows = [m.kinds[kind].get(name, {}) for m in mine]
        cells = [f"{factor(row):.2f}" if "run" in row else row.get("missing", "") for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def details(m: Measured, kind: str) -> str:
    """Return what stands beside the figures of one shape and type: times, errors, memory."""
    rows = m.kinds[kind]
    n, v, d = m.shape
    rate = 2 * SIDE**3 / median(rows[SQUARE]["seconds"]) / 1e9
    floor = 6 * n * v * d / median(rows[PRODUCTS]["seconds"]) / 1e9
    speed = 4 * NUMBERS / median(rows[READ]["seconds"]) / 1e9
    lines = [
        f"### {m.instructions}, {m.title}, {kind}\n",
        f"The three products run at {floor:.0f} GFLOP/s, a square product of {SIDE} at {rate:.0f}; "
        f"memory is read at {speed:.1f} GB/s.\n",
        "| | ms, median (range) | rounds | × products | error: loss | features | table | extra MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if name in (SQUARE, READ):
            continue
        memory = f"{row['megabytes']:,.0f}" if "megabytes" in row else ""
        if "run" not in row:
            lines.append(f"| {name} | {row.get('missing', 'not timed')} | | | | | | {memory} |")
            continue
        error = row.get("error", {})
        loss, features, table = (f"{error[key]:.0e}" if key in error else "" for key in ("loss", "features", "table"))
        loss += f"; worst token {error['worst token']:.0e} nats" if "worst token" in error else ""
        lines.append(
            f"| {name} | {spread(row['seconds'])} | {len(row['seconds'])} | {factor(row):.2f} "
            f"| {loss} | {features} | {table} | {memory} |"
        )
    return "\n".join([*lines, ""])


def write() -> None:
    PAGE.write_text(page(results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    write()
