"""Tests of training runs in JAX against a plain PyTorch loop and against uninterrupted runs."""

import copy
import json
import math
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from tests.training.conftest import assert_same_results
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tiewise.hf  # noqa: F401, factored checkpoints load through it
from tiewise.boundary.flax import training as flax_training
from tiewise.boundary.flax.models import FlaxDecoder
from tiewise.boundary.flax.training import OptaxRecipe
from tiewise.core.errors import CheckpointError, Interrupted, RunError
from tiewise.training.compare import finish
from tiewise.training.folder import newest_checkpoint
from tiewise.training.kinds import flax
from tiewise.training.run import kind_of


def blocks_in_order(tokens, settings, seed):
    """Return [steps, B, T] ids in the order of training. Each epoch permutes the blocks; each batch is sorted."""
    rows = np.array(tokens[: len(tokens) // settings.length * settings.length]).reshape(-1, settings.length)
    draw, found = np.random.default_rng(seed), []
    while len(found) < settings.steps:
        order = draw.permutation(len(rows))
        whole = len(rows) // settings.batch * settings.batch
        found += [rows[np.sort(part)] for part in order[:whole].reshape(-1, settings.batch)]
    return torch.tensor(np.array(found[: settings.steps]), dtype=torch.long)


def train_in_plain_loop(asked):
    """Train on the same blocks from the same weights with autograd, AdamW and cross-entropy of PyTorch.

    The plain Llama has two tables. For a tied arm the loop sums both gradients and copies the table, which gives the
    norm of each path. A factored arm keeps its boundary, and the loop reports no path norms for it.
    """
    s, installed = asked.settings, kind_of(replace(asked.settings, backend="torch")).build(asked)
    is_tied, is_plain = str(asked.spec) == "tied", str(asked.spec) in ("tied", "untied")
    model = installed.model
    if is_plain:
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = False
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
        model = LlamaForCausalLM(config)
        model.load_state_dict(state)
        table, head = model.model.embed_tokens.weight, model.lm_head.weight
    model.train()
    trained = [p for p in model.parameters() if not (is_tied and p is head)]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": s.weight_decay}]
    groups.append({"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=s.peak_rate, betas=(0.9, 0.98), eps=1e-8)

    def nll(ids):
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    warm, seen = max(1, s.steps // 10), []
    for step, ids in enumerate(blocks_in_order(asked.text.split("train"), s, asked.seed)):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / (s.steps - warm)))
        for group in optimizer.param_groups:
            group["lr"] = s.peak_rate * (step / warm if step < warm else cosine)
        model.zero_grad()
        loss = nll(ids)
        loss.backward()
        seen.append([loss.item()])
        if is_plain:
            seen[-1] += [table.grad.norm().item(), head.grad.norm().item()]
        if is_tied:
            table.grad += head.grad
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if is_tied:
            head.data.copy_(table)
    window = max(1, s.steps // 20)
    means = np.array(seen).reshape(-1, window, len(seen[0])).mean(1).T.tolist()
    held_out = torch.tensor(np.array(asked.text.split("heldout")), dtype=torch.long)
    with torch.no_grad():
        last = nll(held_out[: len(held_out) // s.length * s.length].view(-1, s.length)).item()
    return {"heldout_nll": last, "curve": dict(zip(("train_nll", "path_a", "path_b"), means, strict=False))}


@pytest.mark.parametrize(
    "arm", ["tied", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("untied", "factored:8"))]
)
def test_flax_run_starts_as_torch_run_and_ends_as_plain_torch_loop(arm, trained, tiny_settings, job, tmp_path):
    theirs = trained(tiny_settings(), tmp_path / "torch", arm, measured_ids=(3, 4))
    ours = trained(tiny_settings(backend="flax"), tmp_path / "flax", arm, measured_ids=(3, 4))
    a, b = ours.result, theirs.result
    same = "initial_nll predicted_initial_nll init_std parameters trainable_parameters training_bytes steps"
    for name in same.split():
        assert getattr(a, name) == getattr(b, name), name
    assert a.heldout_nll < a.initial_nll - 0.3
    assert [(p.step, p.tokens) for p in a.curve] == [(p.step, p.tokens) for p in b.curve]
    wanted = train_in_plain_loop(job(tiny_settings(backend="flax"), tmp_path / "plain", arm))
    assert a.heldout_nll == pytest.approx(wanted["heldout_nll"], abs=1e-5)
    for name, values in wanted["curve"].items():
        assert [getattr(p, name) for p in a.curve] == pytest.approx(values, rel=1e-5), name
    assert [x.label for x in a.frequency] == [x.label for x in b.frequency]
    assert a.bits_per_byte / a.heldout_nll == pytest.approx(b.bits_per_byte / b.heldout_nll)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "flax" / "final")
    with torch.no_grad():
        path = model.lm_head(model.get_input_embeddings()(torch.tensor([3, 4])))[:, [3, 4]]
    torch.testing.assert_close(path, torch.tensor(ours.direct_path), rtol=1e-5, atol=1e-6)
    assert trained(tiny_settings(backend="flax"), tmp_path / "flax", arm, measured_ids=(3, 4)) == ours


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "gpt2"}, "model = 'gpt2' with the flax backend"),
        ({"arms": ("tied+untie_at=3",)}, "schedules and vectors need the torch backend"),
        ({"arms": ("tied",), "seed": 1}, "backend is a setting of compare"),
        ({"backend": "tpu"}, "backend = 'tpu'; choose torch or flax"),
    ],
)
def test_flax_backend_refuses_unsupported_settings(tiny_settings, changes, said):
    with pytest.raises(RunError, match=said):
        tiny_settings(**{"backend": "flax", **changes}).checked()


@pytest.mark.slow
def test_flax_comparison_writes_results_with_jax_version(tiny_settings, tmp_path, lines):
    """Finish the runs of `tiewise compare --backend flax`, whose results.json includes the version of JAX.

    Settings are those of other tests here, whose compiled steps are used again.
    """
    arms = ("tied", "untied", "factored:8")
    out = lines.begin(tiny_settings(backend="flax", arms=arms, seeds=2), tmp_path / "run")
    found = finish(out, lines.display)
    assert [(r.arm, r.seed) for r in found.runs] == [(arm, seed) for seed in (1, 2) for arm in arms]
    assert found.env["jax"] == jax.__version__
    assert {d.arm for d in found.differences if d.metric == "heldout_nll"} == {"untied", "factored:8"}
    assert json.loads((out / "results.json").read_text())["setting"]["backend"] == "flax"
    assert finish(out, lines.display).runs == found.runs


def press_ctrl_c_before_step(monkeypatch, number):
    """Press Ctrl-C before the `number`-th of the following steps."""
    real, calls = flax_training._step, []

    def step(*arguments):
        calls.append(number)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(flax_training, "_step", step)


@pytest.mark.slow
def test_flax_run_resumes_from_checkpoint_written_at_ctrl_c(tiny_settings, trained, tmp_path, monkeypatch):
    """Press Ctrl-C within a window of the curve, before one ends, and at the last step."""
    whole = trained(tiny_settings(backend="flax"), tmp_path / "whole").result
    folder = tmp_path / "cut"
    for number, step in ((5, 5), (3, 8), (32, 40)):
        with monkeypatch.context() as patch:
            press_ctrl_c_before_step(patch, number)
            with pytest.raises(Interrupted):
                trained(tiny_settings(backend="flax"), folder)
        assert json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["global_step"] == step
        assert len(list(folder.glob("checkpoint-*"))) <= 2
    resumed = trained(tiny_settings(backend="flax"), folder).result
    assert_same_results(resumed, whole)
    assert resumed.seconds > 0
    # no process times its first step, and three processes trained
    assert resumed.tokens_per_second == pytest.approx((40 - 3) * 64 / resumed.seconds)
    assert sorted(path.name for path in folder.iterdir()) == ["final", "metrics.jsonl", "result.json"]


def new_fitting(seed, width=8):
    """Return a training run before its first step."""
    recipe = OptaxRecipe(steps=60, batch=4, length=6, learning_rate=3e-2)
    return flax_training.Fitting(FlaxDecoder("untied", 7, width, 1, 2, rngs=nnx.Rngs(seed)), np.arange(700) % 7, recipe)


def test_resume_from_refuses_checkpoint_of_other_model_or_format(tmp_path):
    run = new_fitting(0)
    flax.save_checkpoint(run, tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint-0 is of another model or optimizer; use the versions"):
        flax.resume_from(new_fitting(0, width=4), tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-0" / flax.ARRAYS).write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        flax.resume_from(run, tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-0" / flax.STATE).write_text('{"global_step": 0}')
    with pytest.raises(CheckpointError, match="checkpoint-0 is no checkpoint of the flax backend"):
        flax.resume_from(run, tmp_path / "checkpoint-0")


def test_fitting_resumes_bit_for_bit_from_newest_checkpoint(tmp_path):
    """The run stops within a window of the curve. It leaves two older checkpoints and an incomplete newer one."""

    def points(run):
        return [point for point in run.steps() if point is not None]

    whole, cut, seen = new_fitting(0), new_fitting(0), []
    wanted = points(whole)
    for point in cut.steps():
        seen += [] if point is None else [point]
        if cut.step in (9, 20, 31):
            flax.save_checkpoint(cut, tmp_path)
        if cut.step == 31:
            break
    (tmp_path / "checkpoint-33").mkdir()
    (tmp_path / "checkpoint-34.partial").mkdir()
    resumed = new_fitting(1)
    flax.resume_from(resumed, newest_checkpoint(tmp_path)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-31"]
    assert resumed.step == 31
    assert str(seen + points(resumed)) == str(wanted)  # a cosine of two tables is nan, which equals nothing
    for name, value in whole.arrays().items():
        assert np.array_equal(value, resumed.arrays()[name]), name
    assert (whole.timed, resumed.timed) == (59, 30 + 28)
