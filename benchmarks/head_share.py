"""Share of a training step that the output head takes, and the whole-step ratio that follows from measured losses.

python -m benchmarks.head_share

The share counts the operations of `tiewise.plan` at 2,048 positions. The ratio is the time of a step with the plain
loss divided by that with tiewise's loss:

    (1 − s + s·a) / (1 − s + s·b)      s the share; a, b the times of plain and tiewise in multiples of three products

It assumes that the body runs as fast as bare products, so that the head has at least this share of the time. The times
are those of the measured width on an H100 (`results/gpu/times-h100.json`, bf16) that is nearest to the model's.

Two lines follow the table: a whole step that was measured on a CPU (`results/step.md`) next to its computed ratio, and
the ratio of one model with the losses that TRL compares.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import performance
from tiewise.planning.plan import plan

STEPS = Path(__file__).parent / "results" / "step.md"
STEP_SHAPE = re.compile(r"B = (\d+), T = (\d+), D = (\d+), L = (\d+), V = (\d+)")
CPU_INSTRUCTIONS, CPU_SHAPE = "avx512_bf16", (4096, 32_000, 512)  # of the losses on the CPU that took the steps
INSTALLED = {"installed": "fp32", "installed, bf16": "bf16"}  # row of a step → its type
# Time of TRL's chunked loss / of Cut Cross-Entropy, 16,384 tokens, 248,320 words, width 2,048, H100
# (github.com/huggingface/trl/pull/6858).
TRL_CHUNKS, TRL_MODEL = 224.39 / 92.55, "llama-3.2-1b"
TIMES = Path(__file__).parent / "results" / "gpu" / "times-h100.json"
POSITIONS = 2048
MODELS = ("gemma-3-270m", "qwen3-0.6b", "llama-3.2-1b", "gemma-3-1b", "qwen3-8b", "llama-3.1-70b")
DEFAULT_ROWS = ("tiewise, triton", "tiewise")  # names of the default loss, in older runs and today
# Time of a step with the chunked loss of TRL / with Cut Cross-Entropy: full fine-tuning on one H100, sequences of 2,048
# tokens (github.com/huggingface/trl/pull/6859).
PUBLISHED = {"gemma-3-270m": 1.65, "qwen3-0.6b": 1.32, "llama-3.2-1b": 1.33, "qwen3-8b": 1.07}


@dataclass(frozen=True)
class LossTimes:
    """Times of two losses at one width, in multiples of their three products."""

    width: int
    plain: float
    tiewise: float


@dataclass(frozen=True)
class HeadShare:
    """Sizes of a model, and the share of its operations that the head takes."""

    name: str
    vocab: int
    width: int
    layers: int
    share: float

    def step_ratio(self, times: LossTimes) -> float:
        """Return the time of a step with the plain loss divided by that with tiewise's loss."""
        return (1 - self.share + self.share * times.plain) / (1 - self.share + self.share * times.tiewise)


def count_share(name: str) -> HeadShare:
    """Return the share of a public model's forward operations that its head takes.

    Of the backward pass it is the same.
    """
    planned = plan(name, length=POSITIONS)
    architecture = planned.architecture
    forward = planned.choices[0]["flops_per_token"]["forward"]
    head = 2 * architecture.ends.vocab * architecture.ends.width
    return HeadShare(name, architecture.ends.vocab, architecture.width, architecture.layers, head / forward)


def read_times(path: Path) -> list[LossTimes]:
    """Return the measured bf16 times by width."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    times = []
    for measurement in record["measurements"]:
        if measurement["dtype"] == "bfloat16":
            ratios = {row["name"]: row["ratio"] for row in measurement["rows"]}
            default = next(name for name in DEFAULT_ROWS if name in ratios)
            times.append(LossTimes(measurement["shape"][2], ratios["plain"], ratios[default]))
    return times


def nearest_times(times: list[LossTimes], width: int) -> LossTimes:
    """Return the times of the width whose ratio to `width` is nearest to 1."""
    return min(times, key=lambda measured: abs(math.log(measured.width / width)))


def render_table(times: list[LossTimes]) -> str:
    """Return the table of all models in Markdown."""
    lines = ["| | V | D | L | share | step, computed | step, published |", "|---|---|---|---|---|---|---|"]
    for name in MODELS:
        model = count_share(name)
        sizes = f"{model.vocab:,} | {model.width:,} | {model.layers}"
        ratio = model.step_ratio(nearest_times(times, model.width))
        published = f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else ""
        lines.append(f"| {name} | {sizes} | {model.share:.2f} | {ratio:.2f} | {published} |")
    return "\n".join(lines)


def read_largest_step(text: str) -> tuple[HeadShare, dict[str, float]]:
    """Return the last model of `benchmarks.step`, and by type the time of its plain step / its installed step."""
    section = text[text.rindex("\nB = ") :]
    shape = STEP_SHAPE.search(section)
    assert shape is not None, "a section starts with its shape"
    _, length, width, layers, vocab = map(int, shape.groups())
    share = vocab / (vocab + layers * (12 * width + 2 * length))
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| installed")]
    ratios = {INSTALLED[cells[0]]: 1 / float(cells[-1]) for cells in rows if cells[0] in INSTALLED}
    return HeadShare("step", vocab, width, layers, share), ratios


def read_cpu_times() -> dict[str, LossTimes]:
    """Return the losses on the CPU that took the steps, by type."""
    results = performance.read_results(performance.RESULTS)
    found = next(one for one in results if (one.instructions, one.shape) == (CPU_INSTRUCTIONS, CPU_SHAPE))
    times = {}
    for kind, rows in found.kinds.items():
        plain, ours = (performance.relative_time(rows[name]) for name in ("plain", "tiewise"))
        times[kind] = LossTimes(CPU_SHAPE[2], plain, ours)
    return times


def describe_step() -> str:
    """Return the measured step next to its computed ratio."""
    model, measured = read_largest_step(STEPS.read_text(encoding="utf-8"))
    times = read_cpu_times()
    parts = [
        f"{kind} measured {ratio:.2f}, computed {model.step_ratio(times[kind]):.2f}" for kind, ratio in measured.items()
    ]
    return f"CPU, V = {model.vocab:,}, D = {model.width}, L = {model.layers}, s = {model.share:.2f}: {'; '.join(parts)}"


def describe_trl(times: list[LossTimes]) -> str:
    """Return the ratio of one model with the losses that TRL compares."""
    model = count_share(TRL_MODEL)
    ours = nearest_times(times, model.width)
    ratio = model.step_ratio(LossTimes(ours.width, TRL_CHUNKS * ours.tiewise, ours.tiewise))
    return f"{TRL_MODEL}, a = {TRL_CHUNKS:.2f} b: {ratio:.2f}"


def main() -> None:
    """Print the measured times, the table, the measured step, and the model with TRL's losses."""
    times = read_times(TIMES)
    for measured in times:
        print(f"width {measured.width}: plain {measured.plain:.2f}, tiewise {measured.tiewise:.2f}")
    print(render_table(times))
    print(describe_step())
    print(describe_trl(times))


if __name__ == "__main__":
    main()
