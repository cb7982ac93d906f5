"""Run the checks for GPUs at small sizes on a CPU: all are right, and a wrong loss exits with code 1."""

import json
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_install, gpu_page, gpu_record, gpu_rows, gpu_times
from tiewise.boundary.ops import own_pass


def run(out, *arguments):
    return gpu.main(["--device", "cpu", "--out", str(out), *arguments])


def test_cpu_dry_run_finds_every_figure_right(tmp_path, capsys):
    flag = torch.backends.mkldnn.matmul.fp32_precision
    assert run(tmp_path, "--phases", "checks") == 0
    assert torch.backends.mkldnn.matmul.fp32_precision == flag  # other tests of this process rely on it
    record = json.loads((tmp_path / "checks.json").read_text())
    states = {one["check"]: one["state"] for one in record["checks"]}
    assert list(states) == [check.__name__ for check in gpu_checks.CHECKS]
    needs_gpu = {"wide_products", "memory", "cuda_graph", "other_kernels"}
    assert {name for name, state in states.items() if state != "right"} == needs_gpu
    assert all(one["why"] == "needs a GPU" for one in record["checks"] if one["state"] == "not run")
    assert sum(len(one["figures"]) for one in record["checks"]) > 500
    assert "checks: 12 right, 0 wrong, 0 not reached" in capsys.readouterr().out


def make_loss_wrong(module, monkeypatch):
    right = module.linear_cross_entropy

    def wrong(*given, **options):
        return right(*given, **options) * (1.05 if options.get("reduction") != "mean" else 1)

    monkeypatch.setattr(module, "linear_cross_entropy", wrong)


def test_wrong_check_sets_exit_code_1_and_runs_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_checks, "CHECKS", (gpu_checks.fp32_logits, gpu_checks.autocast))
    with pytest.MonkeyPatch.context() as patch:
        make_loss_wrong(gpu_checks, patch)
        assert run(tmp_path, "--phases", "checks") == 1
    printed = capsys.readouterr().out
    assert "wrong    fp32_logits" in printed
    assert "bfloat16 logits=None: worst token, nats" in printed
    assert "checks: 0 right, 2 wrong" in printed
    monkeypatch.setattr(gpu_checks, "CHECKS", (gpu_checks.fp32_logits, gpu_checks.autocast))
    assert run(tmp_path, "--phases", "checks") == 0  # the mended loss
    assert run(tmp_path, "--phases", "checks") == 0
    assert capsys.readouterr().out.count("right    ") == 2  # the last call had nothing to do


def test_installed_family_with_a_wrong_loss_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_install, "FAMILIES", {"llama": gpu_install.DECODER})
    exact = own_pass.loss_pass

    def wrong(*given):
        losses, gradients = exact(*given)
        return losses * (1 + 3e-5), gradients  # `install` itself refuses a change of 1e-4

    monkeypatch.setattr(own_pass, "loss_pass", wrong)
    assert run(tmp_path, "--phases", "install") == 1
    assert "install: 0 right, 1 wrong" in capsys.readouterr().out
    outcome = json.loads((tmp_path / "install.json").read_text())["families"]["llama"]
    assert not outcome["why"]
    figures = outcome["figures"]
    assert [figure["right"] for figure in figures] == [True, False, True]  # the loss alone was wrong
    monkeypatch.setattr(own_pass, "loss_pass", exact)
    assert run(tmp_path, "--phases", "install") == 0
    assert "install: 1 right, 0 wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_all_phases_run_on_a_cpu_in_90_seconds(tmp_path, capsys):
    start = time.monotonic()
    assert run(tmp_path) == 0
    assert time.monotonic() - start < 90
    printed = capsys.readouterr().out
    assert "install: 12 right, 0 wrong, 0 not reached" in printed
    assert [name for name in gpu.PHASES if f"\n{name}: " not in printed] == []


def test_times_of_a_wrong_loss_set_exit_code_1(tmp_path, capsys, monkeypatch):
    assert run(tmp_path / "right", "--phases", "times") == 0
    record = json.loads((tmp_path / "right" / "times.json").read_text())
    (measurement,) = record["measurements"]
    names = {row["name"] for row in measurement["rows"]}
    assert {"tiewise", "tiewise, chunked", "plain", "torch.compile(plain)"} <= names
    monkeypatch.setattr(gpu_times, "measure_shape", None)  # nothing is measured again
    assert run(tmp_path / "right", "--phases", "times") == 0
    monkeypatch.undo()
    make_loss_wrong(gpu_times, monkeypatch)
    assert run(tmp_path / "wrong", "--phases", "times") == 1
    assert "wrong: float32 40 x 61 x 8, tiewise: error 5.0e-02" in capsys.readouterr().out


def test_part_that_raises_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    def fail():
        raise RuntimeError("misaligned address")

    parts = [gpu_rows.Part("good", lambda: None), gpu_rows.Part("bad", fail)]
    monkeypatch.setattr(gpu_rows, "list_parts", lambda problem: parts)
    monkeypatch.setattr(gpu_rows, "measure_milliseconds", lambda call: call() or 1.0)
    monkeypatch.setattr(gpu_rows.row_loss, "missing_support", lambda tensors, product_dtype: "")
    assert run(tmp_path, "--phases", "rows") == 1
    assert "rows: 1 right, 1 wrong, 0 not reached" in capsys.readouterr().out
    monkeypatch.setattr(gpu_rows.row_loss, "missing_support", lambda tensors, product_dtype: "needs triton")
    assert run(tmp_path, "--phases", "rows") == 0
    assert "rows: not run, the kernel needs triton" in capsys.readouterr().out


def test_results_that_the_time_does_not_suffice_for_are_counted(tmp_path, capsys):
    assert run(tmp_path, "--minutes", "-1", "--phases", "times,checks") == 3
    printed = capsys.readouterr().out
    assert f"checks: 0 right, 0 wrong, {len(gpu_checks.CHECKS)} not reached" in printed
    assert printed.index("checks: ") < printed.index("times: 0 right, 0 wrong, 1 not reached")


def test_results_of_another_card_are_not_continued(tmp_path):
    path = tmp_path / "times.json"
    head = gpu_record.describe_card("cpu")
    gpu_record.write_record(path, head | {"measurements": [1]})
    assert gpu_record.read_record(path, head)["measurements"] == [1]
    assert gpu_record.read_record(path, head | {"device": "another"}) == head | {"device": "another"}


def test_unknown_phase_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--phases", "checks,speed")
    assert "unknown phase 'speed'; choose from checks, install, times, rows" in capsys.readouterr().err


def test_run_reports_check_that_raises_or_returns_nan_as_wrong():
    place = gpu_checks.Setup("cpu", 2, 3, 4)

    def raises(place):
        raise RuntimeError("CUDA error: out of order")

    assert gpu_checks.run_check(raises, place).state == "wrong"
    assert "out of order" in gpu_checks.run_check(raises, place).why
    assert gpu_checks.run_check(lambda place: [gpu_checks.Figure("x", float("nan"), 1.0)], place).state == "wrong"
    assert gpu_checks.run_check(lambda place: [], place).state == "wrong"
    assert gpu_checks.run_check(lambda place: [gpu_checks.Figure("x", 0.0, 0.0)], place).state == "right"


def test_main_reports_missing_gpu_or_package_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "--device cpu" in capsys.readouterr().err
    hidden = (
        "find = u.find_spec; u.find_spec = lambda name, *more: None if name == 'transformers' else find(name, *more)"
    )
    command = [sys.executable, "-c", f"import importlib.util as u; {hidden}; import benchmarks.gpu"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "missing transformers: pip install" in run.stderr
    assert run.stderr.count("\n") == 1


def test_table_of_parts_has_a_column_for_each_shape():
    times = {"8 x 9 x 2: logits": 0.125, "4 x 9 x 2: logits": 2.0, "4 x 9 x 2: step": "out of memory"}
    table = gpu_page.render_parts({"times": times}).splitlines()
    assert table[0].endswith("| 8 × 9 × 2 | 4 × 9 × 2 |")
    assert table[2:] == ["| logits | 0.12 | 2.00 |", "| step |  | out of memory |"]
