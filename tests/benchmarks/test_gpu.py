"""Run the checks for GPUs at small sizes on a CPU: all are right, and a wrong loss exits with code 1."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import (
    gpu,
    gpu_bars,
    gpu_checks,
    gpu_compare,
    gpu_install,
    gpu_memory,
    gpu_packages,
    gpu_page,
    gpu_ranks,
    gpu_record,
    gpu_rows,
    gpu_sanitizer,
    gpu_times,
)
from tiewise.boundary.ops import own_pass, path_gradient
from tiewise.boundary.ops.backend_table import KERNELS
from tiewise.core.errors import UnsupportedError


def run(out, *arguments):
    return gpu.main(["--device", "cpu", "--out", str(out), *arguments])


def test_cpu_dry_run_finds_every_figure_right(tmp_path, capsys, monkeypatch):
    # the check `seeds` starts a process; it runs in test_all_phases_run_on_a_cpu
    monkeypatch.setattr(gpu_checks, "CHECKS", tuple(one for one in gpu_checks.CHECKS if one is not gpu_checks.seeds))
    flag = torch.backends.mkldnn.matmul.fp32_precision
    assert run(tmp_path, "--phases", "checks") == 0
    assert torch.backends.mkldnn.matmul.fp32_precision == flag  # other tests of this process rely on it
    record = json.loads((tmp_path / "checks.json").read_text())
    states = {one["check"]: one["state"] for one in record["checks"]}
    assert list(states) == list(gpu_checks.list_checks())
    kernels = {"kernel triton", "kernel compile"}
    assert kernels < set(states)
    needs_gpu = {"wide_products", "memory", "cuda_graph"} | {name for name in states if name.startswith("kernel ")}
    assert {name for name, state in states.items() if state != "right"} == needs_gpu
    assert all(one["why"] == "needs a GPU" for one in record["checks"] if one["state"] == "not run")
    assert sum(len(one["figures"]) for one in record["checks"]) > 500
    printed = capsys.readouterr().out
    assert f"checks: 11 right, 0 wrong, {len(needs_gpu)} not run, 0 not reached\n" in printed
    assert "\n  not run: wide_products: needs a GPU\n" in printed
    assert printed.endswith(f"in all: 0 wrong, {len(needs_gpu)} not run, 0 not reached\n")


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
    exact = own_pass.row_kernel_or_native_pass

    def wrong(*given):
        losses, gradients = exact(*given)
        return losses * (1 + 3e-5), gradients  # `install` itself refuses a change of 1e-4

    monkeypatch.setattr(own_pass, "row_kernel_or_native_pass", wrong)
    assert run(tmp_path, "--phases", "install") == 1
    assert "install: 0 right, 1 wrong" in capsys.readouterr().out
    outcome = json.loads((tmp_path / "install.json").read_text())["families"]["llama"]
    assert not outcome["why"]
    figures = outcome["figures"]
    assert [figure["right"] for figure in figures] == [True, False, True]  # the loss alone was wrong
    monkeypatch.setattr(own_pass, "row_kernel_or_native_pass", exact)
    assert run(tmp_path, "--phases", "install") == 0
    assert "install: 1 right, 0 wrong" in capsys.readouterr().out


def run_later_calls_here(run_process):
    """Return `subprocess.run` for the phases: the sanitizer's first call has its process, the others run in this one.

    A process takes five seconds to import everything, which shows nothing new the second time.
    """
    started = []

    def run_process_or_call(command, **options):
        is_call = command[1:3] == ["-m", "benchmarks.gpu_sanitizer"]
        if is_call and started:
            return run_call_here(command)
        started.extend([command] * is_call)
        return run_process(command, **options)

    return run_process_or_call


def run_call_here(command):
    """Run a call of the sanitizer's phase in this process; return what its process would return."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", command[2:])
        gpu_sanitizer.main()
    return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")


@pytest.mark.slow
def test_all_phases_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    """`time python -m benchmarks.gpu --device cpu --out FOLDER` measures how long they take: at most 90 seconds."""
    monkeypatch.setattr(gpu_compare, "SEEDS", 2)  # enough to train several at a time
    monkeypatch.setattr(gpu_sanitizer.subprocess, "run", run_later_calls_here(subprocess.run))
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "checks: 12 right, 0 wrong" in printed
    assert "install: 12 right, 0 wrong, 0 not run, 0 not reached" in printed
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


def test_times_of_a_failing_loss_set_exit_code_1(tmp_path, capsys, monkeypatch):
    right = gpu_times.linear_cross_entropy

    def failing(*given, **options):
        if options.get("backend") == "chunked":
            raise RuntimeError("misaligned address")
        return right(*given, **options)

    monkeypatch.setattr(gpu_times, "linear_cross_entropy", failing)
    assert run(tmp_path, "--phases", "times") == 1
    assert "tiewise, chunked: RuntimeError: misaligned address" in capsys.readouterr().out


def test_part_that_raises_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    def fail():
        raise RuntimeError("misaligned address")

    parts = [gpu_rows.Part("good", lambda: None), gpu_rows.Part("bad", fail)]
    monkeypatch.setattr(gpu_rows, "list_parts", lambda problem: parts)
    monkeypatch.setattr(gpu_rows, "measure_milliseconds", lambda call: call() or 1.0)
    monkeypatch.setattr(gpu_rows.row_loss, "missing_support", lambda tensors, product_dtype: "")
    assert run(tmp_path, "--phases", "rows") == 1
    assert "rows: 1 right, 1 wrong, 0 not run, 0 not reached" in capsys.readouterr().out
    monkeypatch.setattr(gpu_rows.row_loss, "missing_support", lambda tensors, product_dtype: "needs triton")
    assert run(tmp_path, "--phases", "rows") == 0
    assert "  not run: the kernel needs triton\n" in capsys.readouterr().out


def test_results_that_the_time_does_not_suffice_for_are_counted(tmp_path, capsys):
    assert run(tmp_path, "--minutes", "-1", "--phases", "times,checks") == 3
    printed = capsys.readouterr().out
    assert f"checks: 0 right, 0 wrong, 0 not run, {len(gpu_checks.list_checks())} not reached" in printed
    assert printed.index("checks: ") < printed.index("times: 0 right, 0 wrong, 0 not run, 1 not reached")


def test_results_of_another_card_version_or_source_are_not_continued(tmp_path, capsys):
    path = tmp_path / "times.json"
    head = gpu_record.describe_card("cpu")
    assert head["versions"]["torch"] == torch.__version__
    assert {"triton", "transformers", "liger-kernel", "cut-cross-entropy", "tiewise"} < set(head["versions"])
    gpu_record.write_record(path, head | {"measurements": [1]})
    assert gpu_record.read_record(path, head)["measurements"] == [1]
    assert not capsys.readouterr().out
    versions = head["versions"] | {"triton": "9.9"}
    for change, named in (
        ({"device": "another"}, "device"),
        ({"sources": ""}, "sources"),
        ({"versions": versions}, ""),
    ):
        assert gpu_record.read_record(path, head | change) == head | change
        named = named or f"triton ({head['versions']['triton']} then, 9.9 now)"
        assert capsys.readouterr().out == f"times: runs again from the start, because of another {named}\n"


def test_hash_covers_kernels_and_phases_by_content_and_name(tmp_path):
    listed = [path.name for path in gpu_record.list_sources()]
    assert {"kernels.cpp", "row_loss.py", "backends.py", "gpu_checks.py", "gpu_times.py", "measure.py"} <= set(listed)
    assert "gpu_page.py" not in listed
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1")
    other.write_text("2")
    hashes = [gpu_record.hash_sources([one, other]), gpu_record.hash_sources([other, one])]
    other.write_text("3")
    hashes.append(gpu_record.hash_sources([one, other]))
    one.rename(tmp_path / "an.py")
    hashes.append(gpu_record.hash_sources([tmp_path / "an.py", other]))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def absent(setup):
    raise gpu_checks.NotRun("needs a tool")


def test_check_that_was_not_run_is_counted_and_run_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_checks, "list_checks", lambda: {"one": absent})
    assert run(tmp_path, "--phases", "checks") == 0  # a CPU cannot run everything
    printed = capsys.readouterr().out
    assert "checks: 0 right, 0 wrong, 1 not run, 0 not reached\n  not run: one: needs a tool\n" in printed
    assert "in all: 0 wrong, 1 not run, 0 not reached\n" in printed
    monkeypatch.setattr(gpu_checks, "list_checks", lambda: {"one": lambda setup: [gpu_checks.Figure("x", 0, 0)]})
    for count in (1, 0):
        assert run(tmp_path, "--phases", "checks") == 0
        assert capsys.readouterr().out.count("right    one") == count


def test_family_that_was_not_run_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_install, "FAMILIES", {"llama": {}})
    outcomes = [gpu_checks.Outcome("llama", "not run", why="no model"), gpu_checks.Outcome("llama", "right")]
    monkeypatch.setattr(gpu_install, "run_family", lambda name, setup: outcomes.pop(0))
    path, setup = tmp_path / "install.json", gpu_checks.Setup("cpu", 40, 61, 8)
    first, second, third = (gpu_install.run_phase(setup, path, float("inf")) for _ in range(3))
    assert (first.right, first.not_run) == (0, ["llama: no model"])
    assert (second.right, second.not_run, third.right) == (1, [], 1)


def test_gpu_that_did_not_run_everything_sets_exit_code_3(capsys):
    gpu_setup, cpu_setup = gpu_checks.Setup("cuda", 4, 4, 4), gpu_checks.Setup("cpu", 4, 4, 4)
    complete = gpu_record.PhaseResult(right=3)
    absent, late = gpu_record.PhaseResult(not_run=["a: needs b"]), gpu_record.PhaseResult(missing=2)
    wrong = gpu_record.PhaseResult(wrong=["c"])
    cases = [
        ([complete], gpu_setup, 0),
        ([complete, absent], gpu_setup, 3),
        ([complete, absent], cpu_setup, 0),
        ([late], cpu_setup, 3),
        ([wrong, absent, late], gpu_setup, 1),
    ]
    for results, setup, code in cases:
        assert gpu.decide_exit_code(results, setup) == code
    assert capsys.readouterr().out.endswith("in all: 1 wrong, 1 not run, 2 not reached\n")


def test_refused_row_of_ours_and_failed_row_of_a_peer_are_not_run():
    refused, failed = "UnsupportedError: needs triton", "RuntimeError: misaligned address"
    reasons = {"tiewise, compile": refused, "tiewise": failed, "cce": refused, "liger": failed}
    measurement = {"dtype": "float32", "shape": [2, 3, 4], "not_run": reasons}
    assert gpu_times.find_failed_rows(measurement) == [f"float32 2 x 3 x 4, tiewise: {failed}"]
    assert gpu_times.find_absent_rows(measurement) == [
        f"float32 2 x 3 x 4, tiewise, compile: {refused}",
        f"float32 2 x 3 x 4, liger: {failed}",
    ]


def test_shape_with_a_row_that_was_not_run_is_measured_again(tmp_path, monkeypatch):
    record = {"shape": [40, 61, 8], "dtype": "float32", "products_ms": 1.0}
    rows = [{"name": "plain", "ratio": 1.0, "milliseconds": 1.0, "megabytes": 0.0, "error": 0.0}]
    measured = []

    def measure(case, device, rounds):
        measured.append(case)
        reasons = {"liger": "RuntimeError: misaligned address"} if len(measured) == 1 else {}
        return record | {"rows": rows, "not_run": reasons}

    monkeypatch.setattr(gpu_times, "measure_shape", measure)
    path, setup = tmp_path / "times.json", gpu_checks.Setup("cpu", 40, 61, 8)
    results = [gpu_times.run_phase(setup, path, float("inf")) for _ in range(3)]
    assert [len(result.not_run) for result in results] == [1, 0, 0]
    assert len(measured) == 2
    assert len(json.loads(path.read_text())["measurements"]) == 1


def test_kernel_of_ours_that_refuses_is_not_run_and_one_of_a_package_may(monkeypatch):
    setup = gpu_checks.Setup("cuda", 4, 4, 4)

    def compare(setup, name, dtype, options):
        if "softcap" in options:
            raise UnsupportedError("has no softcap")
        return [gpu_checks.Figure("x", 0, 0)]

    monkeypatch.setattr(gpu_checks, "compare_kernel", compare)
    with pytest.raises(gpu_checks.NotRun, match="has no softcap"):
        gpu_checks.check_kernel(setup, "triton")
    assert len(gpu_checks.check_kernel(setup, "liger")) == 4


def test_right_checks_run_again_with_other_sources(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_checks, "CHECKS", (gpu_checks.fp32_logits,))
    for sources, ran in (("a", 1), ("a", 0), ("b", 1)):
        monkeypatch.setattr(gpu_record, "hash_sources", lambda paths, sources=sources: sources)
        assert run(tmp_path, "--phases", "checks") == 0
        assert capsys.readouterr().out.count("right    fp32_logits") == ran


def test_unknown_phase_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--phases", "checks,speed")
    assert (
        "unknown phase 'speed'; choose from checks, install, times, memory, compare, nccl, " in capsys.readouterr().err
    )


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
    hidden = "import benchmarks.gpu_packages as p; find = p.find_version"
    hidden += "; p.find_version = lambda x: '' if x.name == 'transformers' else find(x)"
    command = [sys.executable, "-c", f"{hidden}; import benchmarks.gpu"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "missing transformers >=5: pip install" in run.stderr
    assert run.stderr.count("\n") == 1


def hide_package(name, monkeypatch, found=""):
    find = gpu_packages.find_version
    monkeypatch.setattr(gpu_packages, "find_version", lambda one: found if one.name == name else find(one))


def test_gpu_without_triton_is_refused_before_any_phase(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    hide_package("triton", monkeypatch)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err == "benchmarks.gpu: missing triton >=3: pip install them\n"
    assert not list(tmp_path.iterdir())
    hide_package("triton", monkeypatch, "3.6.0")
    assert gpu.check_machine("cuda") == ""
    hide_package("torch", monkeypatch, "2.5.1+cu124")
    assert gpu.check_machine("cpu") == "too old torch >=2.6: pip install them"


def test_table_names_found_and_wanted_versions(monkeypatch):
    hide_package("liger-kernel", monkeypatch)
    hide_package("cut-cross-entropy", monkeypatch, "25.1.1")
    hide_package("triton", monkeypatch, "2.9")
    hide_package("torch", monkeypatch, "2.11.0+cu130")
    rows = [line.split() for line in gpu_packages.format_table(gpu_packages.list_packages(on_gpu=True)).splitlines()]
    assert rows[0] == ["package", "found", "wanted", "for", "state"]
    assert ["torch", "2.11.0+cu130", ">=2.6", "all", "phases", "ok"] in rows
    assert ["triton", "2.9", ">=3", "kernels", "on", "a", "GPU", "too", "old"] in rows
    assert ["liger-kernel", "-", "==0.8.5", "optional", "missing"] in rows
    assert ["cut-cross-entropy", "25.1.1", "==25.1.1", "optional", "ok"] in rows
    hide_package("cut-cross-entropy", monkeypatch, "25.9")
    assert gpu_packages.format_table(gpu_packages.read_optional()).endswith("another version")
    assert "triton" not in {package.name for package in gpu_packages.list_packages(on_gpu=False)}


def test_optional_wheels_are_in_versions_that_the_backends_take():
    """A wheel of another version would be refused on a machine without a network."""
    wheels = {package.name: package.exact for package in gpu_packages.read_optional()}
    kernels = [kernel for kernel in KERNELS.values() if kernel.package != "torch"]
    assert set(wheels) == {kernel.package for kernel in kernels}
    assert all(wheels[kernel.package] in kernel.versions for kernel in kernels)


def test_table_of_parts_has_a_column_for_each_shape():
    times = {"8 x 9 x 2: logits": 0.125, "4 x 9 x 2: logits": 2.0, "4 x 9 x 2: step": "out of memory"}
    table = gpu_page.render_parts({"times": times}).splitlines()
    assert table[0].endswith("| 8 × 9 × 2 | 4 × 9 × 2 |")
    assert table[2:] == ["| logits | 0.12 | 2.00 |", "| step |  | out of memory |"]


def write_curves(folder, change=None):
    """Write curves of all runs that fall from 5 to 4 nats; `change` changes the points of one run."""
    for arm in ("tied", "untied", "factored-4"):
        for seed in (1, 2, 3):
            points = [{"step": step, "train_nll": 5.0, "tune_nll": 6.0 - step} for step in (1, 2)]
            if change is not None and (arm, seed) == ("untied", 2):
                points = [point | change(point) for point in points]
            path = folder / arm / f"seed-{seed}" / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{json.dumps(point)}\n" for point in points))


@pytest.mark.parametrize(
    ("check", "folder", "change"),
    [
        (gpu_compare.short_runs, "compare-short", lambda point: {"train_nll": 5.02}),
        (gpu_compare.short_runs, "compare-short", lambda point: {"path_a": 1.0}),  # the CPU has no such value
        (gpu_compare.comparison, "compare-one", lambda point: {"tune_nll": 5.0}),
        (gpu_compare.comparison, "compare-one", lambda point: {"tune_nll": float("nan")}),
        (gpu_compare.several_at_a_time, "compare-several", lambda point: {"tune_nll": point["tune_nll"] + 0.1}),
    ],
)
def test_wrong_curve_of_one_run_makes_its_check_wrong(check, folder, change, tmp_path, monkeypatch):
    setup = gpu_checks.Setup("cpu", 40, 61, 8)
    monkeypatch.setattr(gpu_compare, "train_on_cpu", lambda out, *rest: write_curves(out))
    for fault, state in ((None, "right"), (change, "wrong")):

        def train(out, *rest, fault=fault, **options):
            write_curves(out, fault if out.name == folder else None)

        monkeypatch.setattr(gpu_compare, "train_here", train)
        gpu_compare.comparison(setup, tmp_path)  # whose runs `several_at_a_time` needs
        outcome = gpu_checks.run_check(lambda setup: check(setup, tmp_path), setup, "check")
        assert (outcome.state, outcome.why) == (state, "")


def test_wrong_curve_of_one_run_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_compare, "train_on_cpu", lambda out, *rest: write_curves(out))
    for fault, code in ((lambda point: {"tune_nll": 5.0}, 1), (None, 0)):

        def train(out, *rest, fault=fault, **options):
            write_curves(out, fault if out.name == "compare-one" else None)

        monkeypatch.setattr(gpu_compare, "train_here", train)
        assert run(tmp_path, "--phases", "compare") == code
    wrong, mended = (line for line in capsys.readouterr().out.splitlines() if line.startswith("compare: "))
    assert wrong.startswith("compare: 1 right, 2 wrong")  # `several_at_a_time` compares with the wrong run
    assert mended.startswith("compare: 3 right, 0 wrong")


def test_comparison_without_its_packages_is_not_run(monkeypatch, tmp_path):
    hide_package("psutil", monkeypatch)
    outcome = gpu_checks.run_check(
        lambda setup: gpu_compare.comparison(setup, tmp_path), gpu_checks.Setup("cpu", 2, 3, 4), "x"
    )
    assert (outcome.state, outcome.why) == ("not run", "needs psutil")


def test_collectives_that_lose_rows_set_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_ranks, "CHECKS", (gpu_ranks.exchanged_rows, gpu_ranks.vocabulary_shards))
    gather = path_gradient._gather_tensors
    monkeypatch.setattr(path_gradient, "_gather_tensors", lambda x, group: [0 * y for y in gather(x, group)])
    make_loss_wrong(gpu_ranks, monkeypatch)
    assert run(tmp_path, "--phases", "nccl") == 1
    assert "nccl: 0 right, 2 wrong" in capsys.readouterr().out
    monkeypatch.setattr(path_gradient, "_gather_tensors", gather)
    monkeypatch.setattr(gpu_ranks, "linear_cross_entropy", gpu_times.linear_cross_entropy)
    assert run(tmp_path, "--phases", "nccl") == 0


def make_sanitizer(folder, *lines):
    """Write a program of the sanitizer's name that prints these lines instead of running the call."""
    path = folder / "compute-sanitizer"
    path.write_text("#!/bin/sh\n" + "".join(f"{line}\n" for line in lines))
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("lines", "state", "why"),
    [
        (("echo call finished", "echo '========= ERROR SUMMARY: 0 errors'"), "right", ""),
        (("echo call finished", "echo '========= ERROR SUMMARY: 2 errors'"), "wrong", ""),
        (("echo call finished",), "wrong", ""),  # the sanitizer has not counted
        (("echo 'ERROR SUMMARY: 0 errors'",), "wrong", "RuntimeError: exit code 0: ERROR SUMMARY: 0 errors"),
        (("echo 'Segmentation fault'", "exit 139"), "wrong", "RuntimeError: exit code 139: Segmentation fault"),
    ],
)
def test_errors_that_the_sanitizer_reports_make_a_call_wrong(lines, state, why, tmp_path, monkeypatch):
    make_sanitizer(tmp_path, *lines)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    setup = gpu_checks.Setup("cuda", 40, 61, 8)
    outcome = gpu_checks.run_check(lambda setup: gpu_sanitizer.run_call(setup, "loss"), setup, "loss")
    assert (outcome.state, outcome.why) == (state, why)


def test_call_that_fails_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    """On a CPU no sanitizer counts errors; a call that ends in one is wrong all the same."""
    commands, run_process = [], subprocess.run

    def replace_call(command, **options):
        commands.append(command[-2])
        code = "raise SystemExit('misaligned address')" if commands[-1] == "tied_step" else "print('call finished')"
        return run_process([sys.executable, "-c", code], **options)

    monkeypatch.setattr(gpu_sanitizer.subprocess, "run", replace_call)
    assert run(tmp_path, "--phases", "sanitizer") == 1
    assert "sanitizer: 2 right, 1 wrong" in capsys.readouterr().out
    assert commands == list(gpu_sanitizer.CALLS)


def test_error_that_the_sanitizer_counts_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    make_sanitizer(tmp_path, "echo call finished", "echo '========= ERROR SUMMARY: 1 error'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_checks.Setup, "on_gpu", property(lambda setup: True))
    monkeypatch.setattr(gpu_checks, "is_context_dead", lambda setup: False)
    assert run(tmp_path / "out", "--phases", "sanitizer") == 1
    assert f"sanitizer: 0 right, {len(gpu_sanitizer.CALLS)} wrong" in capsys.readouterr().out


def test_missing_sanitizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_sanitizer, "FOLDERS", ())
    setup = gpu_checks.Setup("cuda", 40, 61, 8)
    outcome = gpu_checks.run_check(lambda setup: gpu_sanitizer.run_call(setup, "loss"), setup, "loss")
    assert (outcome.state, outcome.why) == ("not run", "needs compute-sanitizer, which is part of the CUDA toolkit")


def test_section_lists_the_checks_of_further_phases(tmp_path):
    checks = [{"check": "data_parallel", "state": "right"}, {"check": "fully_sharded", "state": "wrong"}]
    (tmp_path / "nccl-h100.json").write_text(json.dumps({"checks": checks}))
    assert gpu_page.render_further_checks(tmp_path, "h100") == ["nccl: `data_parallel` right, `fully_sharded` wrong.\n"]


def make_measurement(width, dtype="bfloat16", **milliseconds):
    """Return a measurement whose three products take 10 ms."""
    names = {
        "triton": "tiewise, triton",
        "chunked": "tiewise, chunked",
        "auto": "tiewise, auto",
        "compiled": "compiled",
    }
    rows = [
        {"name": names.get(name, name), "milliseconds": time, "ratio": time / 10} for name, time in milliseconds.items()
    ]
    return {"shape": [4, 5, width], "dtype": dtype, "rows": rows}


@pytest.mark.parametrize(
    ("measurement", "expected"),
    [
        (make_measurement(2048, tiewise=11.5, chunked=30.0, auto=11.5, compiled=11.0), ["1.15 met", "1.05 met"]),
        (make_measurement(4096, tiewise=11.6, chunked=30.0, auto=11.6, compiled=11.0), ["1.16 missed", "1.05 missed"]),
        (make_measurement(768, triton=15.0, tiewise=30.0, auto=15.0, compiled=12.0), ["1.50 met", "1.25 missed"]),
        (make_measurement(768, "float32", tiewise=11.0, auto=11.0), [" never run", "1.00 met"]),  # tiewise is chunked
        (make_measurement(768, triton=15.1), ["1.51 missed"]),
    ],
)
def test_bars_of_times(measurement, expected):
    assert [f"{bar.shown} {bar.verdict}" for bar in gpu_bars.list_time_bars(measurement)] == expected


def test_bars_of_checks_memory_and_install():
    figures = [{"value": 0.0}, {"value": 1.0}]
    checks = [{"check": "synchronisations", "state": "wrong", "figures": figures}, {"check": "a", "state": "right"}]
    wrong, waits = gpu_bars.list_check_bars({"checks": checks})
    assert (str(wrong), waits.verdict) == ("wrong checks: 1, at most 0: missed", "missed")
    checks = [{"check": name, "figures": [{"value": value}]} for name, value in (("a", 0.02), ("b", 0.2))]
    one_buffer = {"check": gpu_bars.ONE_BUFFER, "figures": [{"value": 0.05}]}
    bars = gpu_bars.list_memory_bars({"checks": [*checks, one_buffer]})
    assert [(bar.value, bar.verdict) for bar in bars] == [(0.05, "met"), (0.2, "missed")]
    assert [bar.verdict for bar in gpu_bars.list_memory_bars(None)] == ["never run"] * 2
    families = {"llama": {"figures": [{"value": 0.0}, {"value": 2e-6}]}, "t5": {"figures": []}}
    (bar,) = gpu_bars.list_install_bars({"families": families})
    assert (bar.shown, bar.verdict) == ("2e-06", "met")
    assert gpu_bars.list_install_bars(None)[0].verdict == "never run"


def test_page_renders_installed_families_or_never_run(tmp_path):
    assert gpu_page.render_install(tmp_path, "x") == ["install, twelve families over 20 steps: never run.\n"]
    assert "* the phases `checks`, `install`, `times`, `memory`, " in gpu_page.render_head(tmp_path)
    families = {"llama": {"state": "right", "figures": [{"value": 1e-6}]}, "t5": {"state": "wrong", "figures": []}}
    (tmp_path / "install-x.json").write_text(json.dumps({"families": families}))
    assert gpu_page.render_install(tmp_path, "x") == ["install: `llama` right, `t5` wrong.\n"]
    assert "`install`" not in gpu_page.render_head(tmp_path)
    table = gpu_page.render_bars(gpu_page.list_bars(tmp_path, "x")).splitlines()
    assert table[-1] == "| twelve families, 20 steps: distance of losses and weights | 1e-06 | 1e-05 | met |"


def test_phases_of_times_and_memory_print_their_bars(tmp_path, capsys):
    assert run(tmp_path, "--phases", "times,memory") == 0
    printed = capsys.readouterr().out
    assert "  fp32, 40 × 61 × 8: default / three products: " in printed
    assert "  share of one [V, D] that one buffer does not save: 0.0" in printed
    assert "  predicted peak of a step: distance: " in printed


def test_two_gradients_of_the_table_make_the_check_of_one_buffer_wrong(monkeypatch):
    def look_up(table, ids):
        return torch.nn.functional.embedding(ids, table), table

    setup = gpu_checks.Setup("cpu", 40, 61, 8)
    assert gpu_checks.run_check(gpu_memory.one_buffer, setup).state == "right"
    monkeypatch.setattr(gpu_memory, "tied_lookup", look_up)
    outcome = gpu_checks.run_check(gpu_memory.one_buffer, setup)
    assert outcome.state == "wrong"
    assert outcome.figures[0].value > 0.9


def test_wrong_prediction_of_the_peak_sets_exit_code_1(tmp_path, capsys, monkeypatch):
    predict = gpu_memory.activation_bytes
    monkeypatch.setattr(gpu_memory, "activation_bytes", lambda *given: round(0.75 * predict(*given)))
    assert run(tmp_path, "--phases", "memory") == 1
    assert "memory: 1 right, 1 wrong" in capsys.readouterr().out
    monkeypatch.setattr(gpu_memory, "activation_bytes", predict)
    assert run(tmp_path, "--phases", "memory") == 0
