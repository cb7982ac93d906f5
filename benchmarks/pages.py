"""Cost of opening each page in Chromium: processor time of its main thread, nodes and size.

The time ends when the page is readable: 0.3 s after the second frame behind the load event, when no task is left. It
is measured in thread ticks, so other processes do not count. A page of synthetic results has the size of a usual one.

python -m benchmarks.pages             pages from synthetic results
python -m benchmarks.pages PAGE.html   other pages
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from tests.report.opened_page import BROWSER, FLAGS
from tests.report.page_samples import sample_inspection, sample_pages

from tiewise.report.explorer.page import explore
from tiewise.report.inspection_page import inspection_page

ROUNDS = 5
SECTIONS = 14  # of an inspection with every section
WIDTHS = {"desktop": 1280, "phone": 390}
READABLE = """() => new Promise(done =>
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300))))"""


def table(pages: dict[str, Path]) -> str:
    """Return the Markdown table of all pages."""
    lines = ["| page | size | width | nodes on opening | main thread, s: median (range) |", "|---|---|---|---|---|"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        for name, path in pages.items():
            size = f"{path.stat().st_size / 1e6:.1f} MB"
            for device, width in WIDTHS.items():
                opened = [_open(browser, path, width) for _ in range(ROUNDS)]
                seconds = [time for time, _ in opened]
                spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
                lines.append(f"| {name} | {size} | {device} | {opened[0][1]:,} | {spread} |")
        browser.close()
    return "\n".join(lines)


def _open(browser: Browser, path: Path, width: int) -> tuple[float, int]:
    """Open a page; return the seconds of its main thread and its elements."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.evaluate(READABLE)
    metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
    seconds = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
    nodes = page.evaluate("document.querySelectorAll('*').length")
    context.close()
    return seconds, nodes


def _samples(folder: Path) -> dict[str, Path]:
    """Write a page of every command; return {name: path}."""
    pages = sample_pages()
    pages[f"inspect, {SECTIONS} sections"] = inspection_page(
        sample_inspection(SECTIONS, repeats=40), "tiewise inspect runs/sample"
    )
    del pages["inspect"]
    paths = {"explore": explore().write(folder / "explore.html")}
    for name, page in pages.items():
        paths[name] = folder / f"{name.split(',')[0]}.html"
        paths[name].write_text(page, encoding="utf-8")
    return paths


if __name__ == "__main__":
    named = {path: Path(path).resolve() for path in sys.argv[1:]}
    with tempfile.TemporaryDirectory() as place:
        print(table(named or _samples(Path(place))))
