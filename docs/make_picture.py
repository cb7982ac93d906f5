"""Photograph the top of a report.html in a browser, as the README shows it.

    python docs/make_picture.py runs/demo/report.html            writes docs/report.png
    python docs/make_picture.py runs/demo/report.html --dark -o dark.png

It needs playwright (in the `dev` extra) and chromium, on the PATH or at the path in TIEWISE_CHROMIUM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WIDTH = 1280
PANELS = 3  # the paired differences and the two figures under them


def main() -> None:
    """Read the arguments, take the picture and print its path."""
    parser = argparse.ArgumentParser(description="Photograph the top of a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).with_name("report.png"))
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    chromium = os.environ.get("TIEWISE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("no chromium found; install one, or name it in TIEWISE_CHROMIUM")
    if not arguments.report.is_file():
        sys.exit(f"{arguments.report} is not a file; make one with `make demo`")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900},
            color_scheme="dark" if arguments.dark else "light",
            offline=True,
        )
        photograph(page, arguments.report, arguments.out)
        browser.close()
    print(arguments.out)


def photograph(page: Page, report: Path, out: Path) -> None:
    """Save the upper part of a report as a picture.

    The page is complete when its last chart is in it.
    """
    page.goto(report.resolve().as_uri())
    page.locator(".plot .chart").last.wait_for()
    bottoms = page.eval_on_selector_all(".panel", "all => all.map(e => e.getBoundingClientRect().bottom + scrollY)")
    height = max(bottoms[:PANELS]) + 12
    page.screenshot(path=out, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})


if __name__ == "__main__":
    main()
