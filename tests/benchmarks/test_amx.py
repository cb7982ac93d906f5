"""`benchmarks.amx`: its dry run with emulated tiles, its limits, and its section of the page."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.amx_problem import LossProblem, Reference, plain_loss

from benchmarks import amx, amx_numbers, amx_page, amx_times, amx_variants
from tiewise.boundary.ops import compiled_kernels
from tiewise.boundary.ops.cross_entropy import oracle

ROOT = Path(__file__).parents[2]


def row(name, ratio, to_compiled=1.0, loss=1e-7, table=1e-3):
    errors = {"loss": loss, "features": 1e-3, "table": table}
    return {
        "name": name,
        "ratio": ratio,
        "to_compiled": to_compiled,
        "milliseconds": 10.0,
        "errors": errors,
        "seconds": [0.01] * 5,
    }


def record(tokens=2048, kind="bf16", ours=0.8, kept=0.7, **changes):
    rows = [row(amx_times.OURS, ours, 0.6, **changes), row(amx_times.PLAIN, 2.0), row(amx_times.KEPT, kept)]
    return {"shape": [tokens, 50304, 768], "kind": kind, "threads": 16, "rows": rows}


def missed(measured):
    return [bar.what.partition(": ")[2] for bar in amx.list_bars(measured) if not bar.value <= bar.most]


@pytest.mark.parametrize(
    ("measured", "what"),
    [
        (record(), []),
        (record(ours=1.1), ["× products"]),
        (record(kept=0.95), ["× products"]),
        (record(loss=2e-5), ["error of the loss"]),
        (record(loss=float("nan")), ["error of the loss"]),
        (record(table=1.2e-3), ["error of the gradient of table"]),
        (record(tokens=128, ours=3.0), []),
        (record(kind="fp32", ours=1.1), ["× products"]),
    ],
)
def test_bars_of_a_measurement(measured, what):
    assert missed(measured) == what


def test_reference_equals_autograd_in_fp64():
    problem = LossProblem.random((70, 300, 20), torch.float64)
    errors = Reference(problem).errors(problem.run(exact_loss))
    assert max(errors.loss, errors.features, errors.table) < 1e-12
    rounded = LossProblem.random((70, 300, 20), torch.bfloat16)
    assert 1e-4 < Reference(rounded).errors(rounded.run(plain_loss)).table < 1e-2


def exact_loss(features, table, targets):
    return torch.nn.functional.cross_entropy(features @ table.T, targets)


def test_planted_fault_is_a_wrong_figure(monkeypatch):
    monkeypatch.setattr(amx_numbers, "SHAPES", ((40, 90, 12),))
    monkeypatch.setattr(amx_numbers, "OPTIONS", ({}, {"scale": 0.3}))
    for factor, right in ((1.0, True), (1.01, False), (torch.nan, False)):
        monkeypatch.setattr(
            amx_numbers,
            "linear_cross_entropy",
            lambda *inputs, factor=factor, **options: factor * oracle(*inputs, **options),
        )
        figures = list(amx_numbers.compare_with_fp64(1))
        assert len(figures) == 4 * 3  # options, no further shape, unlikely targets
        assert {figure.is_right for figure in figures} == {right}


def test_every_variant_changes_the_source(tmp_path):
    source = compiled_kernels.SOURCE.read_text()
    for variant in amx_variants.VARIANTS:
        changed = amx_variants.write_source(variant, tmp_path).read_text()
        assert changed.count("tiewise_kernels") == source.count("tiewise_kernels") - 3
        lines = [line for line in changed.splitlines() if line not in source.splitlines()]
        assert len(lines) == 3 + len(variant.changes)
    with pytest.raises(ValueError, match=r"kernels\.cpp lacks 'NO = 1'; correct the variant no"):
        amx_variants.write_source(amx_variants.Variant("no", (("NO = 1", "NO = 2"),)), tmp_path)


def write_machine(folder, threads, **measurements):
    """Write the files of `benchmarks.amx` on a made-up machine."""
    folder.mkdir()
    machine = {"lscpu": ["Model name:   Xeon"], "torch": "2.11.0", "threads": threads}
    numbers = [{"name": "a", "value": 1.0, "limit": 2.0, "is_right": True}]
    named = {f"times-{name}": measured for name, measured in measurements.items()}
    for name, content in (named | {"machine": machine, "numbers": numbers}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_page_says_that_nothing_was_measured():
    assert "has never run on a processor with AMX" in amx_page.render_section(Path("no such folder"))


def test_page_shows_each_machine(tmp_path):
    large = record()
    large["rows"].append(row(amx_times.COMPILED, 1.3))
    write_machine(tmp_path / "16-threads", 16, **{"large-0": large})
    write_machine(tmp_path / "2-threads", 2, **{"large-0": large | {"threads": 2}})
    section = amx_page.render_section(tmp_path)
    assert "- Xeon, 16 threads, torch 2.11.0: 1 figures with a limit, 0 wrong." in section
    for threads in (16, 2):
        assert f"| 2,048 × 50,304 × 768 | bf16 | {threads} | 0.80 | 0.70 | 1.30 | 0.60 |" in section
    assert "| tiewise | 0.80 | 0.60 | 10.0 | 1e-07 | 1e-03 | 1e-03 |" in section


def test_page_names_what_no_machine_measured():
    [line] = amx_page.describe_absent({"large-0"})
    assert line.startswith("**Never measured:** bf16 4096 × 32000 × 512; bf16 8192")
    assert line.endswith("; fp32 2048 × 50304 × 768; slower computations and other constants.\n")
    assert not amx_page.describe_absent({one.name for one in amx.MEASUREMENTS if not one.cores})


def test_two_cores_are_not_measured_twice(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert not [one for one in amx.list_distinct() if one.cores]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert tuple(amx.list_distinct()) == amx.MEASUREMENTS


@pytest.mark.slow
def test_dry_run_measures_each_sort_and_resumes(tmp_path, tmp_path_factory):
    reason = compiled_kernels._unsupported_reason()
    if reason or shutil.which("g++") is None or "avx512_bf16" not in compiled_kernels.processor():
        pytest.skip(f"NOT TESTED: {reason or 'no g++, or a processor without products of bf16'}")
    cache = tmp_path_factory.mktemp("cache")
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "benchmarks.amx", "--out", str(tmp_path), "--dry-run", "--minutes", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert names == sorted(["machine.json", "numbers.json", *(f"times-{name}.json" for name in amx.DRY)])
    assert "variant lot_100k" in done.stdout
    (tmp_path / "times-fp32.json").unlink()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    numbers[0] |= {"value": 1.0, "is_right": False}
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert again.returncode == 1
    assert again.stdout.count(" x products") == 7  # of the measurement that was missing
    assert f"WRONG  {numbers[0]['name']}" in again.stdout
