"""Test the whole page: tabs, theme, address, keyboard, phone width, contrast and refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiewise.core.errors import RunError
from tiewise.core.measurement import plain
from tiewise.report.explorer import page
from tiewise.report.explorer.page import explore, join_modules

WEB = Path(page.__file__).parent / "web"
ALL = "[...document.querySelectorAll('[role=tab]')].map(t => t.value)"


def test_joined_script_has_unique_names_and_no_module_statements():
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", join_modules(), flags=re.MULTILINE)
    assert len(names) == len(set(names)) > 20
    assert not re.search(r"^(import|export)\b", join_modules(), flags=re.MULTILINE)
    lines = [line for path in WEB.glob("*.js") for line in path.read_text(encoding="utf-8").splitlines()]
    assert max(map(len, lines)) <= 120


def test_comments_of_the_modules_begin_with_a_short_plain_sentence():
    """As for docstrings: at most 16 words, and no noun clause as subject."""
    for path in WEB.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        heading = re.match(r"(?:// .*\n)+", text)[0].replace("// ", "")
        comments = [" ".join(part.replace("*", " ").split()) for part in re.findall(r"/\*\*(.*?)\*/", text, re.DOTALL)]
        for comment in [" ".join(heading.split()), *comments]:
            first = re.split(r"(?<=[.;:])\s| → ", comment)[0]
            assert len(first.split()) <= 16, f"{path.name}: {first}"
            assert not re.match(r"(What|Whether|Where|Of|How|Why)\b", first), f"{path.name}: {first}"


CONTRASTS = """() => {
  const dot = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    dot.clearRect(0, 0, 1, 1); dot.fillStyle = colour; dot.fillRect(0, 0, 1, 1);
    return [...dot.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b]
    .reduce((sum, c, i) => sum + linear(c / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const found = rgba(getComputedStyle(e).backgroundColor);
    if (found[3] === 255) return found;
  } return rgba("white"); };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || !e.checkVisibility() || e.closest("script, style, noscript, svg, .hidden, :disabled")) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${text}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "dark")])
def test_every_tab_fits_the_window_and_meets_wcag_aa_contrast(visit, width, scheme):
    shown = visit(width=width, scheme=scheme)
    for part in shown.page.evaluate(ALL):
        shown.page.locator(f"#tab-{part}").click()
        assert shown.page.locator(f"#{part}").inner_text().strip()
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, part
        assert shown.page.evaluate(CONTRASTS) == [], part


def test_arrow_keys_move_between_tabs_and_the_address_selects_a_tab(visit):
    shown = visit()
    parts = shown.page.evaluate(ALL)
    shown.page.locator(f"#tab-{parts[0]}").focus()
    for part in [*parts[1:], parts[0]]:
        shown.page.keyboard.press("ArrowRight")
        assert shown.page.evaluate("document.activeElement.value") == part
        assert f"at={part}" in shown.page.url
    assert visit(f"at={parts[-1]}").page.locator(f"#{parts[-1]}").count() == 1


def test_first_press_of_the_theme_button_turns_a_dark_page_light(visit):
    shown = visit(scheme="dark")
    before = shown.style("body", "backgroundColor")
    shown.page.locator("#theme").click()
    assert shown.page.locator("#theme").inner_text() == "Theme: light"
    assert shown.style("body", "backgroundColor") != before


def test_write_keeps_an_existing_page_without_overwrite(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("mine")
    with pytest.raises(RunError, match=r"exists.*overwrite=True"):
        explore().write(target)
    assert target.read_text() == "mine"
    assert explore().write(target, overwrite=True).read_text().startswith("<!doctype html>")


def test_explore_prints_the_path_of_the_page_without_a_display(tmp_path):
    alone = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    path = tmp_path / "page.html"

    def run(*more):
        command = [sys.executable, "-m", "tiewise", "explore", "--out", str(path), *more]
        return subprocess.run(command, capture_output=True, text=True, env=alone)

    assert run().stdout.strip() == str(path)
    again = run("--json")
    assert (again.returncode, again.stdout) == (2, "")
    assert "--overwrite" in again.stderr
    record = json.loads(run("--json", "--overwrite").stdout)
    assert record == {"page": str(path), "bytes": path.stat().st_size, "opened": False}


def test_plain_of_the_script_equals_plain_of_python(visit):
    draw = np.random.default_rng(0)
    values = [0.125, 0.375, 2.5, 3.5, 1.005, 0.005, -0.004, 0.0, -0.0, 999.995, 1e15 + 0.3, -1234567.891, float("nan")]
    values += (draw.normal(size=300) * 10.0 ** draw.integers(-4, 9, 300)).tolist()
    values += (draw.integers(-10_000, 10_000, 300) / 64).tolist()  # many are rounding ties
    digits = [0, 1, 2, 3, 6]
    script = "([values, digits]) => digits.map(d => values.map(v => [plain(v, d), plain(v, d, '+')]))"
    texts = visit().page.evaluate(script, [values, digits])
    assert texts == [[[plain(value, d), plain(value, d, "+")] for value in values] for d in digits]
