"""Write docs/dev/atlas-*.svg and the tables of docs/dev/atlas.md: `python docs/make_atlas.py`.

The rows come from `tiewise/planning/data/atlas.csv`, which `python -m benchmarks.atlas` writes, and from
`benchmarks/results`. A table of the page is between <!-- rows of STUDY --> and <!-- end -->.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import atlas_tuning
import numpy as np
import numpy.typing as npt

import tiewise
from tiewise.core.estimates import (
    Estimate,
    critical_t,
    detectable_difference,
    holm_adjusted,
    holm_levels,
    mean_interval,
    p_value,
)
from tiewise.core.measurement import COLOURS, DIVERGING, count, places, plain, signed

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ATLAS = Path(tiewise.__file__).parent / "planning" / "data" / "atlas.csv"
PAGE = Path(__file__).parent / "dev" / "atlas.md"
INK, SOFT, RULE = "#22252b", "#5d626d", "#e4e2dd"
# columns of each study's table that identify a row
AXES = {
    "gain-by-text": ["train_tokens"],
    "table-rate-by-text": ["train_tokens"],
    "table-rate-options": ["train_tokens", "arm"],
    "size-text-vocabulary": ["width", "train_tokens", "tokenizer"],
    "rank": ["tokenizer", "arm"],
    "rank-matched": ["match", "arm"],
    "lookup-gradient-scale": ["train_tokens", "arm"],
    "start-and-rate": ["init", "learning_rate"],
    "causes": ["text", "layers"],
    "scripts": ["text"],
    "languages": ["text"],
    "size-text-matched": ["width", "train_tokens"],
    "three-way": ["train_tokens", "arm"],
    "recurrent": ["tokens", "arm"],
    "sharing-by-depth": ["layers", "arm"],
    "sharing-deep": ["layers", "arm"],
    "free-rows": ["train_tokens", "arm"],
    "free-rows-control": ["learning_rate", "arm"],
    "untie-late": ["train_tokens", "arm"],
    "recurrent-vectors": ["contrast"],
}
LANGUAGES = {"fortunes": "English", "de": "German", "ru": "Russian"}
Row = dict[str, str]


class Spot(NamedTuple):
    """Point of a line, with its 95 % interval."""

    x: float
    y: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Row, x: float) -> Spot:
        """Return the held-out difference of a row at a position x."""
        return cls(x, *(float(row[name]) for name in ("heldout", "heldout_low", "heldout_high")))


def studies() -> dict[str, list[Row]]:
    """Return the rows of every study in the atlas."""
    rows_by_study: dict[str, list[Row]] = {}
    with ATLAS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows_by_study.setdefault(row["study"], []).append(row)
    return rows_by_study


def cell_text(row: Row, column: str) -> str:
    """Return the value of a row in a column as the table prints it."""
    value = re.sub(r"=vectors/\d+\.txt", "", row[column].removeprefix("synthetic:").removeprefix("bpe:"))
    if value.startswith("/"):  # files of sayings; their folder names the language
        return " and ".join(dict.fromkeys(LANGUAGES[Path(name).parent.name] for name in value.split()))
    if value.isdecimal():
        return count(int(value))
    return value.replace("=", " ") if column == "text" else value


def has_last_step(rows: Sequence[Row]) -> bool:
    """Return whether a study has the difference at the last step next to that at the best one."""
    return bool(rows[0].get("last"))


def step_compared(rows: Sequence[Row]) -> str:
    """Return which step of its runs a study compares.

    The recipe of recurrent models keeps the best epoch. No other study compares the last step.
    """
    if rows[0]["kind"] == "recurrent":
        return "best epoch"
    assert has_last_step(rows), f"{rows[0]['study']} compares the last step"
    return "best step"


def table(rows: Sequence[Row]) -> str:
    """Return the rows of a study in Markdown."""
    axes = AXES[rows[0]["study"]]
    has_both_steps = has_last_step(rows)
    step = step_compared(rows)
    header = [*(axis.replace("_", " ").replace("tokenizer", "V") for axis in axes)]
    if "contrast" in axes:
        header.append(f"difference, {step}")
    else:
        arm = "" if "arm" in axes else f"{rows[0]['arm']} "
        header.append(f"{arm}− {rows[0]['reference']}, {step}")
    header += ["95 % interval", "verdict", "could show", "on training text"]
    if has_both_steps:
        header.append("last step")
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for row in rows:
        mean, low, high, least, training = (
            float(row[name] or "nan") for name in ("heldout", "heldout_low", "heldout_high", "detectable", "training")
        )
        interval = f"[{signed(low)}, {signed(high)}]"
        value = f"**{signed(mean)}**" if row["sign"] != "0" else signed(mean)
        line = [*(cell_text(row, axis) for axis in axes), value, interval, row["verdict"], plain(least)]
        line.append(signed(training))
        if has_both_steps:
            line.append(signed(float(row["last"])))
        lines.append(line)
    return atlas_tuning.markdown(lines)


def transfer(rows: Sequence[Row]) -> str:
    """Return the table of fine-tuned models in Markdown.

    It compares their accuracies from an untrained start and from a pretrained one.
    """
    groups: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in rows:
        starts = groups.setdefault((row["arm"], row["task"]), {"untrained": [], "pretrained": []})
        starts[row["start"]].append(row)
    gains = [mean_interval(_gains(starts, "accuracy")) for starts in groups.values()]
    columns = "untrained", "pretrained", "gain, points", "95 % interval", "sign", "could show", "last step"
    lines = [["model", "task", *columns], ["---", "---", *["---:"] * len(columns)]]
    for (arm_and_task, starts), gain, (p, level) in zip(groups.items(), gains, tested(gains), strict=True):
        means = [f"{np.mean(_percent(runs, 'accuracy')):.1f} %" for runs in starts.values()]
        sign = "–" if p >= 0.05 else "better" if gain.value > 0 else "worse"
        value, interval, least = contrast(gain, p, level, 1)
        last = signed(float(np.mean(_gains(starts, "last"))), 1)
        lines.append([*arm_and_task, *means, value, interval, sign, least, last])
    return atlas_tuning.markdown(lines)


def _gains(starts: Mapping[str, Sequence[Row]], column: str) -> npt.NDArray[np.float64]:
    """Return the gain of each seed from a pretrained start, in points."""
    return np.subtract(_percent(starts["pretrained"], column), _percent(starts["untrained"], column))


def _percent(rows: Sequence[Row], column: str) -> list[float]:
    return [100 * float(row[column]) for row in rows]


def tested(means: Sequence[Estimate]) -> list[tuple[float, float]]:
    """Return Holm's p of each mean against zero, with a level.

    Holm compares the unadjusted p with that level.
    """
    p = [p_value(mean, [0.0]) for mean in means]
    return list(zip(holm_adjusted(p), holm_levels(p), strict=True))


def marked(value: float, p: float, digits: int = 4) -> str:
    """Return a difference as text, in bold if it is significant."""
    return f"**{signed(value, digits)}**" if p < 0.05 else signed(value, digits)


def contrast(mean: Estimate, p: float, level: float, digits: int) -> tuple[str, str, str]:
    """Return the texts of a difference: its value, its interval, and the detectable difference.

    The value is bold if it is significant. A repetition detects the last one in 80 of 100 cases.
    """
    least = detectable_difference(mean.rows - 1, level) * (mean.high - mean.value) / critical_t(mean.rows - 1)
    interval = f"[{signed(mean.low, digits)}, {signed(mean.high, digits)}]"
    return marked(mean.value, p, digits), interval, plain(least, digits)


def objectives(rows: Sequence[Row]) -> str:
    """Return the table of ALBERT's pretraining objectives in Markdown.

    Accuracies on segment pairs are listed by seed. The nll of masked tokens is a mean over seeds with its interval.
    """
    columns = "right as sop, by seed", "as nsp", "masked tokens, nll", "in order", "could show"
    lines = [["init", "steps", "trained on", *columns], ["---", *["---:"] * 7]]
    # (init, steps) → objective of the training → judged task → rows
    groups: dict[tuple[str, str], dict[str, dict[str, list[Row]]]] = {}
    for row in rows:
        trained = groups.setdefault((row["init"], row["steps"]), {}).setdefault(row["objective"], {})
        trained.setdefault(row["judged"], []).append(row)
    gaps = []
    for group in groups.values():  # nll by seed on pairs in order, which every objective has
        nll = {name: [float(row["nll"]) for row in tasks["masked tokens, in order"]] for name, tasks in group.items()}
        pairs = ("sop", "none"), ("nsp", "none"), ("nsp", "sop")
        gaps.append({f"{one} − {other}": mean_interval(np.subtract(nll[one], nll[other])) for one, other in pairs})
    adjusted = iter(tested([gap for group_gaps in gaps for gap in group_gaps.values()]))
    for ((init, steps), group), group_gaps in zip(groups.items(), gaps, strict=True):
        where = [init, count(int(steps))]
        for name, tasks in group.items():
            right = [
                ", ".join(f"{100 * float(row['right']):.1f} %" for row in tasks.get(task, ()))
                for task in ("sop", "nsp")
            ]
            means = [
                mean_interval([float(row["nll"]) for row in tasks[f"masked tokens{order}"]])
                for order in ("", ", in order")
            ]
            lines.append([*where, name, *right, *(f"{m.value:.3f} [{m.low:.3f}, {m.high:.3f}]" for m in means), ""])
        for name, gap in group_gaps.items():
            value, interval, least = contrast(gap, *next(adjusted), 3)
            lines.append([*where, name, "", "", "", f"{value} {interval}", least])
    return atlas_tuning.markdown(lines)


def contrasts(rows: Sequence[Row]) -> str:
    """Return the table of contrasts with another reference, in Markdown."""
    header = ["train tokens", "arm", "reference", "difference, best step", "95 % interval", "p, Holm", "parameters"]
    lines = [[*header, "of reference"], ["---", "---", "---", *["---:"] * 5]]
    for row in rows:
        mean, low, high, p = (float(row[name]) for name in ("difference", "low", "high", "p_holm"))
        cell = count(int(row["cell"].removeprefix("train_tokens=")))
        sizes = [count(int(row[name])) for name in ("parameters", "reference_parameters")]
        interval = f"[{signed(low)}, {signed(high)}]"
        lines.append([cell, row["arm"], row["reference"], marked(mean, p), interval, f"{p:.2g}", *sizes])
    return atlas_tuning.markdown(lines)


def cost_change(rows: Sequence[Row]) -> str:
    """Return the rows of `benchmarks.cost_change` by the amount of text, in Markdown."""
    lines = [["train tokens", "one rate", "tables with their own", "change", "95 % interval", "p, Holm"]]
    lines.append(["---:"] * 6)
    for row in rows:
        old, new, mean, low, high, p = (float(row[name]) for name in ("old", "new", "change", "low", "high", "p_holm"))
        tokens = count(int(row["cell"].removeprefix("train_tokens=")))
        interval = f"[{signed(low)}, {signed(high)}]"
        lines.append([tokens, signed(old), signed(new), marked(mean, p), interval, f"{p:.2g}"])
    return atlas_tuning.markdown(lines)


def early_alpha(rows: Sequence[Row]) -> str:
    """Return the table of α ≠ 1 in a part of training, in Markdown; a row of Holm's family has a p."""
    lines = [["α in", "arm", "outcome", "difference from tied, or value", "95 % interval", "p, Holm"]]
    lines.append(["---", "---", "---", "---:", "---:", "---:"])
    for row in rows:
        part = {"alpha-in-first-fifth": "first fifth", "alpha-throughout": "all steps"}[row["cell"]]
        value, low, high = (float(row[name]) for name in ("value", "low", "high"))
        number = signed(value)
        if row["p_holm"] and float(row["p_holm"]) < 0.05:
            number = f"**{number}**"
        metric = row["metric"].replace("heldout_nll", "held-out loss")
        p = f"{float(row['p_holm']):.2g}" if row["p_holm"] else ""
        lines.append([part, row["arm"], metric, number, f"[{signed(low)}, {signed(high)}]", p])
    return atlas_tuning.markdown(lines)


def as_written(rows: Sequence[Row]) -> str:
    """Return a file's rows in Markdown as they are; columns of numbers are aligned to the right."""
    columns = list(rows[0])
    marks = ["---:" if _is_number(rows[0][name]) else "---" for name in columns]
    lines = [columns, marks, *(list(row.values()) for row in rows)]
    return atlas_tuning.markdown(lines)


def vocabularies(rows: Sequence[Row]) -> str:
    """Return the rows of `benchmarks.vocabulary` in Markdown, in bits per byte."""
    lines = [["V", "steps", "untied", "tied", "tied − untied", "95 % interval", "p, Holm", "could show"]]
    lines.append(["---:"] * 8)
    for row in rows:
        value, low, high, p, least = (
            float(row[name]) for name in ("tied − untied", "low", "high", "p_holm", "detectable")
        )
        sizes = [count(int(row[name])) for name in ("vocabulary", "steps")]
        losses = [f"{float(row[arm]):.4f}" for arm in ("untied", "tied")]
        lines.append([*sizes, *losses, marked(value, p), f"[{signed(low)}, {signed(high)}]", f"{p:.2g}", plain(least)])
    return atlas_tuning.markdown(lines)


def lstm_tying(rows: Sequence[Row]) -> str:
    """Return the rows of `benchmarks.lstm_tying` in Markdown, in nats per word."""
    lines = [["words", "untied", "tied", "tied − untied", "95 % interval", "verdict", "could show", "on training text"]]
    lines.append(["---:"] * 8)
    for row in rows:
        value, low, high, p, least, training = (
            float(row[name]) for name in ("tied − untied", "low", "high", "p_holm", "detectable", "on training text")
        )
        cells = [count(int(row["words"])), *(f"{float(row[arm]):.4f}" for arm in ("untied", "tied"))]
        cells += [marked(value, p), f"[{signed(low)}, {signed(high)}]", row["verdict"], plain(least), signed(training)]
        lines.append(cells)
    return atlas_tuning.markdown(lines)


def new_seeds(rows: Sequence[Row]) -> str:
    """Return the rows of `benchmarks.new_seeds` in Markdown: the difference with old and with new seeds."""
    lines = [["study", "cell", "difference", "old seeds", "new seeds", "moved", "bound", "agrees"]]
    lines.append(["---", "---", "---", *["---:"] * 4, "---"])
    for row in rows:
        cell = "20,000 words" if row["study"] == "recurrent" else atlas_tuning.cell_in_words(row["cell"])
        old, new = (_mean_and_interval(row, name) for name in ("old", "new"))
        moved, bound = signed(float(row["moved"])), plain(float(row["bound"]))
        lines.append([row["study"], cell, f"{row['arm']} − {row['reference']}", old, new, moved, bound, row["agrees"]])
    return atlas_tuning.markdown(lines)


def _mean_and_interval(row: Row, name: str) -> str:
    mean, low, high = (signed(float(row[f"{name}{end}"])) for end in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


# files of benchmarks/results and their tables
RESULT_TABLES = {
    "transfer": transfer,
    "objectives": objectives,
    "free_rows_less_untied": contrasts,
    "untie_late_less_untied": contrasts,
    "table_rate_options_less_untied": contrasts,
    "value_embeddings": contrasts,
    "early_alpha": early_alpha,
    "table_rate": as_written,
    "table_rate_cost": cost_change,
    "table_rate_seeds": cost_change,
    "table_rate_rules": as_written,
    "new_seeds": new_seeds,
    "language_floors": as_written,
    "lstm_tying": lstm_tying,
    "vocabulary": vocabularies,
}

# figures


def _text(x: float, y: float, words: str, **more: str) -> str:
    """Return a text element of SVG; `more` are its attributes."""
    style = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{words}</text>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Return a complete SVG with a title and these elements."""
    attributes = 'font-family="sans-serif" font-size="14" fill="#5d626d" role="img"'
    head = _text(24, 34, title, font_size="19", font_weight="600", fill=INK)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {attributes}>'
        f'<title>{title}</title><rect width="100%" height="100%" rx="12" fill="#ffffff"/>{head}{"".join(parts)}</svg>\n'
    )


def colour(value: float, top: float) -> str:
    """Return a colour: blue below zero, orange above, deepest at `top`."""
    low, middle, high = (np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in DIVERGING["light"])
    share = min(abs(value) / top, 1.0)
    r, g, b = (middle + share * ((low if value < 0 else high) - middle)).round().astype(int)
    return f"rgb({r},{g},{b})"


def signs(title: str, rows: Sequence[Row], down: str, across: str, panel: str, note: str) -> str:
    """Return a grid of differences over two columns, a panel for each value of a third.

    A difference has a colour if it is significant.
    """
    panels = list(dict.fromkeys(row[panel] for row in rows))
    xs, ys = (list(dict.fromkeys(row[column] for row in rows)) for column in (across, down))
    wide, tall, left, top, gap = 104, 58, 96, 104, 56
    limit = max((abs(float(row["heldout"])) for row in rows if row["sign"] != "0"), default=1.0)
    parts = []
    for index, value in enumerate(panels):
        x0 = left + index * (wide * len(xs) + gap)
        panel_rows = [row for row in rows if row[panel] == value]
        parts.append(_text(x0, 66, f"vocabulary {cell_text(panel_rows[0], panel)}", font_weight="600", fill=INK))
        for i, name in enumerate(xs):
            parts.append(
                _text(x0 + wide * (i + 0.5), top - 10, cell_text({across: name}, across), text_anchor="middle")
            )
        for row in panel_rows:
            x, y = x0 + wide * xs.index(row[across]), top + tall * (len(ys) - 1 - ys.index(row[down]))
            mean, is_significant = float(row["heldout"]), row["sign"] != "0"
            fill = colour(mean, limit) if is_significant else "#ffffff"
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{wide - 2}" height="{tall - 2}" fill="{fill}" stroke="{RULE}"/>'
            )
            ink = "#ffffff" if is_significant and abs(mean) > 0.6 * limit else INK
            half = (float(row["heldout_high"]) - float(row["heldout_low"])) / 2
            parts.append(
                _text(
                    x + wide / 2,
                    y + 27,
                    f"{mean:+.2f}".replace("-", "−"),
                    text_anchor="middle",
                    fill=ink,
                    font_size="15",
                )
            )
            parts.append(_text(x + wide / 2, y + 44, f"± {half:.2f}", text_anchor="middle", fill=ink, font_size="11"))
    for i, name in enumerate(ys):
        y = top + tall * (len(ys) - i - 0.5) + 5
        parts.append(_text(left - 10, y, cell_text({down: name}, down), text_anchor="end"))
    high = top + tall * len(ys)
    parts.append(_text(24, high + 26, note, font_size="12"))
    width = left + len(panels) * wide * len(xs) + (len(panels) - 1) * gap + 28
    return _svg(max(width, 640), high + 44, title, parts)


def chart(
    title: str, lines: dict[str, list[Spot]], along: str, note: str, *, up: str, logarithmic: bool = True,
    points: Sequence[tuple[float, str]] = (), floor: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """Return lines with their 95 % intervals; `points` are ticks, `floor` a dotted line."""
    width, height, left, right, top, bottom = 760, 450, 76, 190, 66, 96
    spots = [spot for line in lines.values() for spot in line]
    lows, highs = min(0.0, *(spot.low for spot in spots)), max(0.0, *(spot.high for spot in spots))
    margin = 0.06 * (highs - lows)
    lows, highs = lows - margin * (lows < 0), highs + margin
    scale = math.log if logarithmic else float
    ends = [scale(x) for x, _ in points] or [scale(spot.x) for spot in spots]
    first, last = min(ends), max(ends)

    def x_of(x: float) -> float:
        """Return the horizontal position of a value."""
        return left + 14 + (scale(x) - first) / (last - first or 1) * (width - left - right - 28)

    def y_of(y: float) -> float:
        """Return the vertical position of a value."""
        return top + (highs - y) / (highs - lows) * (height - top - bottom)

    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if (highs - lows) / s <= 8)
    parts = [_text(24, 54, up, font_size="12")]
    for i in range(math.ceil(lows / step), math.floor(highs / step) + 1):
        y = y_of(i * step)
        strong = f'stroke="{SOFT}" stroke-width="1.2"' if i == 0 else f'stroke="{RULE}"'
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" {strong}/>')
        parts.append(_text(left - 8, y + 5, f"{i * step:+g}".replace("-", "−") if i else "0", text_anchor="end"))
    for x, name in points:
        for i, word in enumerate(name.split("|")):
            parts.append(_text(x_of(x), height - bottom + 20 + 15 * i, word, text_anchor="middle", font_size="13"))
    parts.append(_text((left + width - right) / 2, height - bottom + 54, along, text_anchor="middle"))
    if floor:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in floor)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-dasharray="3 4"/>')
    labels = []
    for (name, line), number in zip(lines.items(), places(lines).values(), strict=True):
        hue = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(spot.x):.1f},{y_of(spot.y):.1f}" for spot in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{hue}" stroke-width="2.2"/>')
        for spot in line:
            x, low, high = x_of(spot.x), y_of(spot.low), y_of(spot.high)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{hue}" opacity="0.6"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y_of(spot.y):.1f}" r="4" fill="{hue}"/>')
        labels.append([y_of(line[-1].y), name, hue, x_of(line[-1].x)])
    positions: list[tuple[float, float]] = []  # of the labels, which must not overlap
    for y, name, hue, x in sorted(labels):
        near = [label_y for label_x, label_y in positions if abs(label_x - x) < 90]
        positions.append((x, max([y + 5, *(label_y + 17 for label_y in near)])))
        parts.append(_text(x + 10, positions[-1][1], name, fill=hue, font_weight="600"))
    parts.append(_text(24, height - 14, note, font_size="12"))
    return _svg(width, height, title, parts)


# the atlas's figures


def gap_label(rows: Sequence[Row]) -> str:
    """Return the label of the differences of tied and untied models."""
    return f"tied − untied at the {step_compared(rows)}, nats per token of held-out text"


def lines_by(rows: Sequence[Row], of: str, along: str, name: str = "{}") -> dict[str, list[Spot]]:
    """Return a line for each value of column `of`, along another column."""
    lines: dict[str, list[Spot]] = {}
    for row in sorted(rows, key=lambda row: float(row[along])):
        lines.setdefault(name.format(cell_text(row, of)), []).append(Spot.of(row, float(row[along])))
    return lines


def thousands(value: float) -> str:
    """Return a number in thousands: 12k for 12,480."""
    return f"{value / 1000:.0f}k"


def gain_by_text(rows: list[Row]) -> str:
    """Return the figure of study 2: difference by amount of text, at the best and the last step."""
    lines = {}
    for step, column in (("best step", "heldout"), ("last step", "last")):
        names = (column, f"{column}_low", f"{column}_high")
        lines[step] = [Spot(float(row["tokens"]), *(float(row[name]) for name in names)) for row in rows]
    return chart(
        "Tied less untied, by amount of text",
        lines,
        "tokens of training text",
        "Bars: 95 % intervals over seeds and held-out documents. Below zero tying is better.",
        up="tied − untied, nats per token of held-out text",
        points=[(spot.x, thousands(spot.x)) for spot in lines["best step"]],
    )


def size_text_vocabulary(rows: list[Row]) -> str:
    """Return the figure of study 1: difference by width, amount of text and vocabulary."""
    note = "Rows: width. Columns: tokens of training text. Blue: tied is better; orange: worse; white: undecided."
    return signs(f"Tied − untied at the {step_compared(rows)}, nats", rows, "width", "train_tokens", "tokenizer", note)


def rank(rows: list[Row]) -> str:
    """Return the figure of study 3, at the larger vocabulary: difference by rank."""
    large_vocabulary = [row for row in rows if row["tokenizer"] == "bpe:8192"]
    lines: dict[str, list[Spot]] = {}
    for row in sorted(large_vocabulary, key=lambda row: int(row["parameters"])):
        kind = {"factored": "rank k", "factored-untied": "16 in, 64 out"}.get(row["arm"].partition(":")[0], row["arm"])
        lines.setdefault(kind, []).append(Spot.of(row, float(row["parameters"])))
    ticks = [
        (float(row["parameters"]), f"{thousands(float(row['parameters']))}|k={row['rank']}")
        for row in large_vocabulary
        if row["arm"].startswith("factored:")
    ]
    untied_parameters = float(large_vocabulary[0]["reference_parameters"])
    up = f"arm − untied at the {step_compared(rows)}, nats per token of held-out text, V = 8,192"
    note = "Bars: 95 % intervals over seeds and held-out documents. Zero is the untied model."
    ticks.append((untied_parameters, f"{thousands(untied_parameters)}|untied"))
    lines["untied"] = [Spot(untied_parameters, 0.0, 0.0, 0.0)]
    return chart("Loss against parameters, by rank", lines, "parameters of the model", note, up=up, points=ticks)


def lookup_gradient_scale(rows: list[Row]) -> str:
    """Return the figure of study 4: effect of scaling the lookup's gradient."""
    tied_rows = [row for row in rows if row["arm"].startswith("tied")]
    lines = lines_by(tied_rows, "train_tokens", "alpha", "{} tokens")
    lines = {name: sorted([*line, Spot(1.0, 0.0, 0.0, 0.0)]) for name, line in lines.items()}
    ticks = [(a, f"{a:g}") for a in sorted({float(row["alpha"]) for row in tied_rows} | {1.0})]
    up = f"α − 1 at the {step_compared(rows)}, nats per token of held-out text"
    note = "Bars: 95 % intervals over seeds and held-out documents. Below zero α is better than 1."
    return chart("Scaling the lookup’s gradient by α", lines, "α", note, up=up, points=ticks)


def causes(rows: list[Row]) -> str:
    """Return the figure of study 8: cost of order for one table, with and without layers."""
    for row in rows:
        row["nats"] = row["text"].rpartition("=")[2]
        row["between"] = {"0": "no layers"}.get(row["layers"], f"{row['layers']} layers")
    lines = lines_by(rows, "between", "nats")
    ticks = [(spot.x, f"{spot.x:g}") for spot in next(iter(lines.values()))]
    note = "Bars: 95 % intervals over seeds and documents. Dotted: what symmetric logits lose at best."
    return chart(
        "What order costs one table, and layers give back", lines, "irreversibility of the language, nats per word",
        note,
        up=gap_label(rows), logarithmic=False, points=ticks, floor=[(x, x) for x, _ in ticks],
    )  # fmt: skip


FIGURES = {
    "gain-by-text": gain_by_text,
    "size-text-vocabulary": size_text_vocabulary,
    "rank": rank,
    "lookup-gradient-scale": lookup_gradient_scale,
    "causes": causes,
}


def page(text: str, rows_by_study: dict[str, list[Row]]) -> str:
    """Return the text of the page with new tables."""
    tables = {name: table(rows) for name, rows in rows_by_study.items()}
    for name, make in RESULT_TABLES.items():
        with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            tables[name] = make(list(csv.DictReader(file)))
    tables |= dict(atlas_tuning.tables())
    for name, lines in tables.items():
        block = rf"(<!-- rows of {name} -->\n).*?(<!-- end -->)"
        text = re.sub(block, lambda match, lines=lines: f"{match[1]}{lines}\n{match[2]}", text, flags=re.S)
    return text


def main() -> None:
    """Write the figures and the page's tables."""
    rows_by_study = studies()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows_by_study), encoding="utf-8")
    for name, figure in FIGURES.items():
        if name in rows_by_study:
            PAGE.with_name(f"atlas-{name}.svg").write_text(figure(rows_by_study[name]), encoding="utf-8")


if __name__ == "__main__":
    main()
