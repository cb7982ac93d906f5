"""`write_report`: a comparison as one HTML file (`report_page`): the verdict, one table, then figures.

A figure is left out if the comparison lacks its data, so a short run gives a short page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiewise.core.files import write_result
from tiewise.core.measurement import Listing, count, plain, signed, visible
from tiewise.report import comparison_measurement
from tiewise.report.comparison_panels import (
    direct_path_panels,
    frequency_panels,
    paired_differences,
    parameter_panels,
    share_panels,
    training_panels,
)
from tiewise.report.report_page import PageSection, Panel, ReportPage
from tiewise.report.training_curves import AHEAD, COSINE, OUTPUT_SHARE, TRAINING, TUNING
from tiewise.training.finding import explanations, sentences
from tiewise.training.results import ArmDirectPath, Comparison

NOTE = (
    "±: standard deviation over seeds. Differences are paired by seed; 95 % intervals: validation losses over "
    "seeds and held-out documents, others over seeds. "
    "nll: nats per token; perplexity: exp of its mean. Memory: weights, gradients, moments in fp32."
)
BIGRAMS = "Last columns: logit of “right after left” less “left after right”; 0 in one table without maps."
CONSTANTS = {None: "none", True: "yes", False: "no"}  # constant of JSON → text


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, complete or not at all, and return the path.

    Raises:
        RunError: the file cannot be written.
    """
    return write_result(render(comparison), path, "out")


def render(comparison: Comparison) -> str:
    """Return the page as text, without empty sections."""
    seeds = len(comparison.seeds)
    plural = "" if seeds == 1 else "s"
    arms = ", ".join(comparison.arms)
    answer, *others = sentences(comparison)
    return ReportPage(
        command_name="compare",
        title=f"{arms}: tiewise comparison",
        subject=f"{arms} · {seeds} seed{plural}",
        heading="Which choice is better on this text?",
        answer=[answer],
        results=PageSection(
            "Results",
            paired_differences(comparison),
            findings=others,
            tables=[comparison_measurement.results(comparison)],
            notes=[NOTE, *explanations(comparison)],
        ),
        sections=[
            *_paper_sections(comparison),
            PageSection("Loss", _loss_panels(comparison)),
            _shares_section(comparison),
            PageSection("Gradient paths", training_panels(comparison, OUTPUT_SHARE, COSINE)),
            PageSection("Parameters", parameter_panels(comparison)),
            _direct_path_section(comparison),
        ],
        command=comparison.command,
        provenance=[_starting_point(comparison)],
        facts=[
            ("Setting", list(_flat(comparison.setting))),
            ("Data", list(_flat(comparison.data))),
            ("Versions", list(_flat({"tiewise": comparison.version, **comparison.env}))),
        ],
        banner=comparison_measurement.demo_banner(comparison.demo),
    ).render()


def _paper_sections(comparison: Comparison) -> list[PageSection]:
    """Return a section for each paper that published results of such arms."""
    published = comparison_measurement.published_results(comparison)
    return [PageSection(title, findings=sentences, tables=[table]) for title, (sentences, table) in published.items()]


def _loss_panels(comparison: Comparison) -> list[Panel]:
    """Return the figures of losses: by token frequency, then over training."""
    return [*frequency_panels(comparison), *training_panels(comparison, AHEAD, TUNING, TRAINING)]


def _shares_section(comparison: Comparison) -> PageSection:
    """Return the section of an ALBERT's right answers; an empty section for any other model."""
    title, panels = "Masked tokens and pairs", share_panels(comparison)
    if not panels:
        return PageSection(title)
    notes = [comparison_measurement.SHARES_NOTE]
    unigram_nlls = [run.unigram_nll for run in comparison.runs if run.unigram_nll is not None]
    if unigram_nlls:  # equal in all runs, because they are measured on the same rows
        notes.append(f"Masked tokens’ nll by frequencies alone: {plain(unigram_nlls[0])}.")
    return PageSection(title, panels, notes=notes)


def _direct_path_section(comparison: Comparison) -> PageSection:
    """Return the section of direct paths: a map for each arm, and the most asymmetric bigrams."""
    notes = []
    if comparison.bigrams:
        notes.append(BIGRAMS)
    maps = direct_path_panels(comparison)
    return PageSection("Direct path", maps, folded=[bigrams(comparison)], notes=notes, kind="panels maps")


def _starting_point(comparison: Comparison) -> PageSection:
    """Return the first loss and settings of each arm's first run, and all tuning trials."""
    first_runs = comparison_measurement.first_runs(comparison)
    rates = {"learning_rate": "learning rate"}
    if any(run.table_rate for run in first_runs.values()):
        rates["table_rate"] = "learning rate of tables"
    losses = ["predicted first loss", "measured first loss"]
    starts = []
    for arm, run in first_runs.items():
        of_run = [_fact(getattr(run, name)) for name in rates]
        starts.append([arm, f"{run.init_std:g}", *of_run, plain(run.predicted_initial_nll), plain(run.initial_nll)])
    trials = []
    for trial in comparison.tuning:
        tried = [trial["arm"], *(_fact(trial[name]) for name in rates)]
        trials.append([*tried, plain(trial["nll"]), "chosen" if trial["chosen"] else ""])
    return PageSection(
        "Starting point of each arm",
        tables=[Listing("Start of each arm", ["arm", "init std", *rates.values(), *losses], starts)],
        folded=[Listing("All tuning trials", ["arm", *rates.values(), "nll of the tuning split", ""], trials)],
    )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs of nested facts, both as text."""
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}, ")
        else:
            yield name, _fact(value)


def _fact(value: Any) -> str:
    """Return a value of JSON as text."""
    if value is None or isinstance(value, bool):
        return CONSTANTS[value]
    if isinstance(value, list | tuple):
        return ", ".join(_fact(each) for each in value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def bigrams(comparison: Comparison) -> Listing:
    """Return the most asymmetric bigrams with each arm's asymmetry (see `asymmetry`)."""
    rows = []
    for pair in comparison.bigrams:
        left, right = pair["left"], pair["right"]
        row = [f"{visible(left)} → {visible(right)}", count(pair["count"])]
        row += [f"{pair['forward']:.3g}", f"{pair['backward']:.3g}"]
        row += [signed(asymmetry(path, left, right), 3) for path in comparison.direct_path]
        rows.append(row)
    arms = [path.arm for path in comparison.direct_path]
    header = ["bigram", "count", "p(right | left)", "p(left | right)", *arms]
    return Listing("Most asymmetric bigrams", header, rows)


def asymmetry(path: ArmDirectPath, left: str, right: str) -> float | None:
    """Return logit(right after left) − logit(left after right).

    None if the map lacks one of the two.
    """
    if left not in path.tokens or right not in path.tokens:
        return None
    i, j = path.tokens.index(left), path.tokens.index(right)
    return path.logits[i][j] - path.logits[j][i]
