"""The terminal's table shows the page's numbers, in 80 columns."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from tests.report.comparison_sample import ARMS, sample_comparison

from tiewise.report.comparison_found import DEMO, results, verdict
from tiewise.report.comparison_view import comparison_view


def shown(comparison, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(comparison_view(comparison))
    return console.file.getvalue()


def test_every_number_of_the_page_fits_80_columns():
    comparison = sample_comparison()
    text = shown(comparison)
    assert max(map(len, text.splitlines())) <= 80
    for cell in (*results(comparison).header, *(cell for row in results(comparison).rows for cell in row)):
        assert all(part in text for part in cell.split(" ["))  # an interval may stand in a line of its own
    assert " ".join(text.split()).startswith(verdict(comparison))
    assert " ".join(comparison.finding.split()) in " ".join(text.split())
    assert DEMO in text
    assert DEMO not in shown(sample_comparison(demo=False))


def test_an_arm_is_never_markup():
    comparison = sample_comparison()
    name = "tied+vectors=[bold]x[/bold].txt"
    runs = [type(run)(**{**vars(run), "arm": name}) if run.arm == "tied" else run for run in comparison.runs]
    changed = type(comparison)(**{**vars(comparison), "runs": runs, "arms": [name, *ARMS[1:]], "reference": name})
    assert name in shown(changed, 160)


@pytest.mark.parametrize(
    "module", ["tiewise.report.comparison_view", "tiewise.training.statistics", "tiewise.training.results"]
)
def test_the_terminal_needs_neither_torch_nor_plotly(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'plotly', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
