"""Compare the rows of the loss benchmark with fp64 autograd, and its page with the committed results."""

import json

import pytest
import torch
from benchmarks.loss_rows import ENTROPY, KINDS, ROWS, Problem

from benchmarks import loss, performance

SHAPE = (40, 300, 16)
COMPILED = [name for name in ROWS if "compile" in name]


def _by_distributions(p, name, logits):
    """Return the losses of the tokens by `torch.distributions`."""
    q = torch.distributions.Categorical(logits=logits)
    if name in ("kl", "jsd"):
        h, w = (x.double() for x in p.teacher)
        teacher = torch.distributions.Categorical(logits=h @ w.T)
        mixture = torch.distributions.Categorical(probs=(teacher.probs + q.probs) / 2)
        kl = torch.distributions.kl_divergence
        return kl(teacher, q) if name == "kl" else (kl(teacher, mixture) + kl(q, mixture)) / 2
    return -q.log_prob(p.t) - (ENTROPY * q.entropy() if name == "policy" else 0)


@pytest.mark.parametrize("name", ["loss", "tied", "policy", "kl", "jsd"])
def test_truth_matches_autograd_in_fp64(name):
    p = Problem(*SHAPE, torch.float32)
    w = p.w.double().requires_grad_()
    h = torch.nn.functional.embedding(p.ids, w) if name == "tied" else p.h.double().requires_grad_()
    h.retain_grad()
    each = _by_distributions(p, name, h @ w.T)
    each.mean().backward()
    result = loss.compute_truth(p, name)
    torch.testing.assert_close(result.token_losses, each.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.dh, h.grad, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(result.dw, w.grad, rtol=1e-10, atol=1e-15)


def _errors(name, kind):
    p = Problem(*SHAPE, KINDS[kind])
    step, of = ROWS[name].make(p), ROWS[name].truth
    return [loss.compute_errors(step(), loss.compute_truth(p, of)) for _ in range(2)]  # a step leaves no state behind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if name in COMPILED else [])
        for kind in KINDS
        for name, row in ROWS.items()
        if row.truth and row.make and kind in row.kinds
    ],
)
def test_benchmark_row_matches_fp64_reference(name, kind):
    for wrong in _errors(name, kind):
        assert wrong["loss"] < (1e-6 if kind == "fp32" else 0.05)
        assert wrong["table"] < (1e-5 if kind == "fp32" else 0.05)
        assert wrong.get("features", 0) < (1e-5 if kind == "fp32" else 0.05)


def test_performance_page_equals_page_of_committed_results():
    assert performance.PAGE.read_text(encoding="utf-8") == performance.render_page(
        performance.read_results(performance.RESULTS)
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results."""
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    return tmp_path


def test_results_of_another_machine_add_a_table_and_keep_the_others(results, monkeypatch):
    monkeypatch.setattr(performance, "PAGE", results / "page.md")
    pages, names = [], ["tiewise", "tied step, tiewise", "tied step, paths tracked"]
    result = loss.measure(SHAPE, "fp32", names, 1, 60.0)
    for instructions in ("avx2", "amx"):
        monkeypatch.setattr(loss, "detect_instruction_set", lambda name=instructions: name)
        loss.store_results(SHAPE, "fp32", result)
        loss.store_results(SHAPE, "fp32", {"tiewise": {"megabytes": 12.0}, "plain": {"megabytes": 30.0}})
        loss.store_results((8, 64, 8), "bf16", {"plain": {"megabytes": 1.0}})  # a shape without measured times
        performance.write_page()
        pages.append(performance.PAGE.read_text(encoding="utf-8"))
    one, both = pages
    assert one[one.index("## avx2") :] in both
    assert both.index("## amx") < both.index("## avx2")
    assert "**What does tracking both paths cost?** In fp32:" in one
    assert "fp32, both gradients among them: `tiewise` 12." in one
    assert "| plain |  |  |  |  | 30 |" in one


def test_keep_replaces_times_of_measured_row_and_keeps_its_memory(results):
    row = {"error": {"loss": 1e-8}, "seconds": [1.0], "products": [1.0], "run": "1", "machine": "this"}
    loss.store_results(SHAPE, "fp32", {"tiewise": row | {"megabytes": 3.0}, "plain": row})
    loss.store_results(
        SHAPE, "fp32", {"tiewise": row | {"seconds": [2.0]}, "cut-cross-entropy, torch_compile": {"missing": "so"}}
    )
    (path,) = results.iterdir()
    stored_rows = {r["name"]: r for r in json.loads(path.read_text(encoding="utf-8"))}
    assert (stored_rows["tiewise"]["seconds"], stored_rows["tiewise"]["megabytes"]) == ([2.0], 3.0)
    assert stored_rows["plain"]["seconds"] == [1.0]
    loss.store_results(SHAPE, "fp32", {"plain": {"missing": "not installed"}})
    (m,) = performance.read_results(results)
    assert performance.relative_time(m.kinds["fp32"]["plain"]) == 1.0
    assert performance.compare_times(m.kinds["fp32"]["tiewise"], m.kinds["fp32"]["plain"]) == 2.0


def test_measure_runs_slow_rows_once():
    result = loss.measure(SHAPE, "fp32", ["tiewise"], 1, 0.0)["tiewise"]
    assert result["missing"] == "0.0 s, once"
    assert "seconds" not in result
    assert result["error"]["table"] < 1e-5
