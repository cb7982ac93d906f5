"""`docs/dev/performance.md`, rendered from the results of `benchmarks.loss`.

python -m benchmarks.performance

A file of `benchmarks/results/loss/` is one shape on one instruction set, with one row on each line. A row's figure is
the median over its rounds of (its seconds / seconds of the three products in the same round). Two rows of one run are
compared by the median of their ratios in each round, rows of two runs by the quotient of their figures.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import amx_page, gpu_page

RESULTS = Path(__file__).parent / "results" / "loss"
PAGE = Path(__file__).parents[1] / "docs" / "dev" / "performance.md"
SQUARE, READ, PRODUCTS = "square product", "read of memory", "three products"
SIDE, NUMBERS = 2048, 2**27  # size of the square product; number of fp32 values read
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
# first words in the names of rows that compute more than a scalar loss
SETTINGS = ("per token", "log-probabilities", "divergence", "tied step")

PORTABLE, POLICY = "tiewise, portable", "log-probabilities and entropy"
QUESTIONS = (  # question, two rows, answer with their ratio
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
class ShapeResults:
    """Contents of one file: the rows of a shape on one instruction set."""

    instructions: str
    shape: tuple[int, ...]
    kinds: dict[str, dict[str, Row]]  # rows by type and name

    @property
    def title(self) -> str:
        """The shape as text."""
        return " × ".join(map(str, self.shape))


def read_results(folder: Path) -> list[ShapeResults]:
    """Read all files of a folder, sorted by instruction set and by order of measurement."""
    shapes = []
    for path in folder.glob("*.json"):
        instructions, _, shape = path.stem.rpartition("-")
        kinds: dict[str, dict[str, Row]] = {}
        for row in json.loads(path.read_text(encoding="utf-8")):
            kinds.setdefault(row["kind"], {})[row["name"]] = row
        shapes.append(ShapeResults(instructions, tuple(map(int, shape.split("x"))), kinds))
    return sorted(shapes, key=lambda result: (result.instructions, (*SHAPES, result.shape).index(result.shape)))


def compare_times(a: Row, b: Row) -> float:
    """Return the time of row a divided by that of row b."""
    if a["run"] == b["run"]:
        return median(x / y for x, y in zip(a["seconds"], b["seconds"], strict=True))
    return relative_time(a) / relative_time(b)


def relative_time(row: Row) -> float:
    """Return the time of a row divided by that of the three products."""
    return median(x / y for x, y in zip(row["seconds"], row["products"], strict=True))


def render_page(results: list[ShapeResults]) -> str:
    """Return the page of all results."""
    blocks = [HEAD]
    for name in dict.fromkeys(result.instructions for result in results):
        shapes = [result for result in results if result.instructions == name]
        machines = dict.fromkeys(
            row["machine"]
            for result in shapes
            for rows in result.kinds.values()
            for row in rows.values()
            if "run" in row
        )
        rounds = [
            len(row["seconds"])
            for result in shapes
            for rows in result.kinds.values()
            for row in rows.values()
            if "run" in row
        ]
        least, most = min(rounds), max(rounds)
        count = f"{least} rounds" if least == most else f"{least} to {most} rounds"
        blocks += [f"## {name}\n", f"{'; '.join(machines)}, {count}.\n", *render_answers(shapes), ""]
        for kind in KINDS:
            if selected := [result for result in shapes if kind in result.kinds]:
                blocks += [render_times(selected, kind), render_errors_and_memory(selected, kind)]
    blocks.append(amx_page.render_section(amx_page.RESULTS))
    blocks.append(gpu_page.render_section(gpu_page.RESULTS))
    return "\n".join(blocks)


def compare_rows(shapes: list[ShapeResults], kind: str, a: str, b: str) -> list[float]:
    """Return times of row a / times of row b, at shapes that have both."""
    rows_by_shape = [result.kinds.get(kind, {}) for result in shapes]
    return [
        compare_times(by_name[a], by_name[b])
        for by_name in rows_by_shape
        if "run" in by_name.get(a, {}) and "run" in by_name.get(b, {})
    ]


def render_answers(shapes: list[ShapeResults]) -> list[str]:
    """Return one list item for each question, answered from one machine's results."""
    items = []
    for kind in KINDS:
        if ours := compare_rows(shapes, kind, "tiewise", PRODUCTS):
            text = f"`tiewise.linear_cross_entropy`: {format_range(ours)} × its three products."
            items.append(f"* **Which loss, {kind}?** {text}{render_rank(shapes, kind)}")
    for question, a, b, answer in QUESTIONS:
        if (a, b) == (PORTABLE, "tiewise") and shapes[0].instructions == "avx2":
            continue  # kernels need AVX-512: on AVX2 both rows are the same
        ratios = {kind: compare_rows(shapes, kind, a, b) for kind in KINDS}
        parts = [f"{kind}: {answer.format(format_range(values))}" for kind, values in ratios.items() if values]
        if parts:
            items.append(f"* **{question}?** In {' In '.join(parts)}")
    for result in shapes:
        megabytes = {
            name: row["megabytes"]
            for name, row in select_scalar_losses(result.kinds.get("fp32", {})).items()
            if "megabytes" in row
        }
        if "tiewise" in megabytes:
            listing = ", ".join(f"`{name}` {value:,.0f}" for name, value in megabytes.items())
            return [*items, f"* **How much memory?** MB at {result.title}, fp32, both gradients among them: {listing}."]
    return items


def select_scalar_losses(rows: dict[str, Row]) -> dict[str, Row]:
    """Return the measured rows of scalar losses with fresh gradients, ours and of peers."""
    return {
        name: row for name, row in rows.items() if "run" in row and "error" in row and not name.startswith(SETTINGS)
    }


def render_rank(shapes: list[ShapeResults], kind: str) -> str:
    """Return the shapes at which our loss is faster or slower than the fastest peer."""
    faster, slower = [], []
    for result in shapes:
        rows = select_scalar_losses(result.kinds.get(kind, {}))
        if "tiewise" not in rows:
            continue
        peers = {
            name: compare_times(row, rows["tiewise"]) for name, row in rows.items() if not name.startswith("tiewise")
        }
        if peers:
            best = min(peers, key=peers.__getitem__)
            (faster if peers[best] >= 1 else slower).append(
                f"{result.title} (the fastest of {len(peers)} measured, `{best}`: {peers[best]:.2f} × ours)"
            )
    text = f" Ahead of its peers at {', '.join(faster)}." if faster else ""
    return text + (f" Behind at {', '.join(slower)}." if slower else "")


def format_ratio(ratio: float) -> str:
    """Return a ratio with two decimals, or with two digits below 0.1."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def format_range(ratios: list[float]) -> str:
    """Return the lowest and the highest ratio, once if they look the same."""
    low, high = format_ratio(min(ratios)), format_ratio(max(ratios))
    return low if low == high else f"{low}–{high}"


def render_times(shapes: list[ShapeResults], kind: str) -> str:
    """Return the table of times of one type: × products, by row and shape."""
    lines = _table_header(f"{kind}, × products", [result.title for result in shapes])
    for text, name, unit in (
        ("three products, ms", PRODUCTS, lambda result, seconds: 1e3 * seconds),
        ("three products, GFLOP/s", PRODUCTS, lambda result, seconds: 6e-9 * math.prod(result.shape) / seconds),
        (f"square product of {SIDE}, GFLOP/s", SQUARE, lambda result, seconds: 2e-9 * SIDE**3 / seconds),
    ):
        rows_by_shape = [(result, result.kinds[kind].get(name)) for result in shapes]
        cells = [f"{unit(result, median(row['seconds'])):,.0f}" if row else "" for result, row in rows_by_shape]
        lines.append(f"| *{text}* | " + " | ".join(cells) + " |")
    for name in _row_names(shapes, kind):
        rows = [result.kinds[kind].get(name, {}) for result in shapes]
        cells = [format_ratio(relative_time(row)) if "run" in row else row.get("missing", "") for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def render_errors_and_memory(shapes: list[ShapeResults], kind: str) -> str:
    """Return the table of one type's worst errors, and of memory by shape."""
    with_memory = [result for result in shapes if any("megabytes" in row for row in result.kinds[kind].values())]
    lines = _table_header(
        f"{kind}, errors", [*(title for title, _ in ERRORS), *(f"extra MB, {result.title}" for result in with_memory)]
    )
    for name in _row_names(shapes, kind):
        errors = [result.kinds[kind][name].get("error", {}) for result in shapes if name in result.kinds[kind]]
        worst = [max((error[key] for error in errors if key in error), default=None) for _, key in ERRORS]
        cells = ["" if value is None else f"{value:.0e}" for value in worst]
        memory = [result.kinds[kind].get(name, {}).get("megabytes") for result in with_memory]
        cells += ["" if value is None else f"{value:,.0f}" for value in memory]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _row_names(shapes: list[ShapeResults], kind: str) -> list[str]:
    """Return the names of a type's rows, in the order of the shape that has most."""
    longest_first = sorted((result.kinds[kind] for result in shapes), key=len, reverse=True)
    return [
        name
        for name in dict.fromkeys(name for rows in longest_first for name in rows)
        if name not in (SQUARE, READ, PRODUCTS)
    ]


def _table_header(corner: str, columns: list[str]) -> list[str]:
    return [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]


def write_page() -> None:
    """Write the page from the committed results."""
    PAGE.write_text(render_page(read_results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    write_page()
