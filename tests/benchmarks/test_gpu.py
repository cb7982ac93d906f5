"""Run the checks for GPUs at small sizes on a CPU: all are right, and a wrong loss exits with code 1."""

import json
import subprocess
import sys

import torch

from benchmarks import gpu, gpu_page


def test_cpu_dry_run_finds_every_figure_right(tmp_path, capsys):
    out, flag = tmp_path / "gpu.json", torch.backends.mkldnn.matmul.fp32_precision
    assert gpu.main(["--device", "cpu", "--out", str(out)]) == 0
    assert torch.backends.mkldnn.matmul.fp32_precision == flag  # other tests of this process rely on it
    record = json.loads(out.read_text())
    states = {one["check"]: one["state"] for one in record["checks"]}
    assert list(states) == [check.__name__ for check in gpu.CHECKS]
    needs_gpu = {"wide_products", "memory", "cuda_graph", "other_kernels"}
    assert {name for name, state in states.items() if state != "right"} == needs_gpu
    assert all(one["why"] == "needs a GPU" for one in record["checks"] if one["state"] == "not run")
    assert sum(len(one["figures"]) for one in record["checks"]) > 500
    assert "12 right, 4 not run" in capsys.readouterr().out


def test_main_exits_1_and_names_wrong_figure(tmp_path, capsys, monkeypatch):
    right = gpu.linear_cross_entropy

    def wrong(*given, **options):
        return right(*given, **options) * (1.05 if options.get("reduction") == "none" else 1)

    monkeypatch.setattr(gpu, "linear_cross_entropy", wrong)
    monkeypatch.setattr(gpu, "CHECKS", (gpu.fp32_logits, gpu.autocast))
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.json")]) == 1
    printed = capsys.readouterr().out
    assert "wrong    fp32_logits" in printed
    assert "bfloat16 logits=None: worst token, nats" in printed
    assert "1 right, 1 wrong" in printed


def test_run_reports_check_that_raises_or_returns_nan_as_wrong():
    place = gpu.Setup("cpu", 2, 3, 4)

    def raises(place):
        raise RuntimeError("CUDA error: out of order")

    assert gpu.run_check(raises, place).state == "wrong"
    assert "out of order" in gpu.run_check(raises, place).why
    assert gpu.run_check(lambda place: [gpu.Figure("x", float("nan"), 1.0)], place).state == "wrong"
    assert gpu.run_check(lambda place: [], place).state == "wrong"
    assert gpu.run_check(lambda place: [gpu.Figure("x", 0.0, 0.0)], place).state == "right"


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
