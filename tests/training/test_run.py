"""Tests of single runs: written files, Ctrl-C, and resumed runs against uninterrupted ones."""

import json
import math
import random
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.conftest import differing_fields
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiewise.planning.first_loss import sound_std
from tiewise.training import trainer
from tiewise.training.data.corpus import Blocks
from tiewise.training.kinds import decoder
from tiewise.training.kinds.decoder import measure
from tiewise.training.run import direct_path, read_outcome, train
from tiewise.training.short_trials import timed_trial


@pytest.fixture(scope="module")
def undisturbed_run(trained, tiny_settings, tmp_path_factory):
    """Return (folder, outcome) of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, trained(tiny_settings(), folder)


def modification_times(folder):
    """Return the modification time of each file in a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_run_writes_files_and_metrics_and_is_not_repeated(text, job, undisturbed_run, trained, tiny_settings):
    folder, outcome = undisturbed_run
    assert {p.name for p in folder.iterdir()} == {"final", "metrics.jsonl", "result.json"}
    assert read_outcome(folder) == outcome
    result = outcome.result
    assert result.heldout_nll < result.initial_nll - 0.3
    assert result.perplexity == pytest.approx(math.exp(result.heldout_nll))
    assert [point.step for point in result.curve] == list(range(2, 41, 2))
    assert all(point.tokens == point.step * 4 * 16 for point in result.curve)
    assert all(None not in (p.train_nll, p.tune_nll, p.path_a, p.path_b, p.cosine) for p in result.curve)
    size = text.facts["splits"]["heldout"]
    assert result.bits_per_byte == pytest.approx(result.heldout_nll / math.log(2) * size["tokens"] / size["bytes"])
    assert sum(result.parameters.values()) == result.total_parameters == result.bytes / 4
    assert result.tokens_per_second == pytest.approx(39 * 64 / result.seconds)
    assert len(outcome.direct_path) == 3
    fresh = measure(decoder.KIND.build(job(tiny_settings())), text.split("heldout"), 16, text.counts, 32)
    assert result.initial_nll == pytest.approx(fresh.nll, abs=1e-9)  # the initial loss is measured before any step
    assert result.init_std == sound_std(16)
    before = modification_times(folder)
    assert trained(tiny_settings(), folder) == outcome
    assert modification_times(folder) == before  # a second call trains nothing


def test_run_restores_random_state_of_caller(trained, tiny_settings, tmp_path):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    trained(tiny_settings(steps=1), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


@pytest.mark.parametrize(
    ("arm", "changes"), [("tied", {}), ("untied", {"model": "gpt2"}), ("tied+vectors={}+freeze", {})]
)
def test_training_bytes_match_weights_gradients_and_moments(
    trained, tiny_settings, tmp_path, monkeypatch, arm, changes
):
    """The reference counts weights, gradients and moments in PyTorch at the last step."""
    if "vectors" in arm:
        save_file({"rows": torch.randn(300, 16)}, tmp_path / "rows.safetensors")
        arm = arm.format(tmp_path / "rows.safetensors")
    held = []

    def look(self, args, state, control, **kw):
        weights = list(kw["model"].parameters())
        moments = [t for of in kw["optimizer"].state.values() for name, t in of.items() if name.startswith("exp_avg")]
        held[:] = [*weights, *(p.grad for p in weights if p.grad is not None), *moments]

    monkeypatch.setattr(trainer.RunRecord, "on_pre_optimizer_step", look)
    result = trained(tiny_settings(steps=3, **changes), tmp_path / "run", arm).result
    assert result.training_bytes == sum(tensor.numel() * tensor.element_size() for tensor in held)


def test_saved_model_reproduces_reported_heldout_nll(text, trained, tiny_settings, tmp_path):
    outcome = trained(tiny_settings(steps=8), tmp_path, "untied")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = torch.from_numpy(text.split("heldout")[: len(text.split("heldout")) // 16 * 16].astype("int64")).view(-1, 16)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1).double()
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert outcome.result.heldout_nll == pytest.approx(loss.item(), abs=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "final")) == 300


def test_run_measures_equal_train_and_heldout_blocks_and_trial_measures_tune(
    text, job, trained, tiny_settings, tmp_path, monkeypatch
):
    asked = []

    def recorded(installed, tokens, length, counts, blocks=None, units=None):
        asked.append((len(tokens), blocks))
        return measure(installed, tokens, length, counts, blocks, units)

    monkeypatch.setattr(decoder, "measure", recorded)
    trained(tiny_settings(steps=1), tmp_path)
    heldout, tune = (len(text.split(name)) for name in ("heldout", "tune"))
    assert asked[-2:] == [(heldout, heldout // 16), (len(text.split("train")), heldout // 16)]
    trained(tiny_settings(steps=1, measured=100), tmp_path / "few")
    assert asked[-2:] == [(heldout, 6), (len(text.split("train")), 6)]
    asked.clear()
    train(timed_trial(job(tiny_settings(steps=20), tmp_path / "trial"), steps=5))
    assert asked == [(tune, 32), (tune, 32)]


def test_diverged_run_ends_with_nan_and_reads_back(trained, tiny_settings, tmp_path):
    outcome = trained(tiny_settings(learning_rate=1e30, steps=8), tmp_path)
    assert "NaN" not in (tmp_path / "result.json").read_text()
    again = read_outcome(tmp_path)
    assert again.result.curve[-1].train_nll is None
    losses = (outcome.result.heldout_nll, outcome.result.perplexity, again.result.train_nll)
    assert all(math.isnan(value) for row in (losses, *again.direct_path) for value in row)


def test_data_order_depends_on_seed_and_not_on_arm(text, trained, tiny_settings, tmp_path, monkeypatch):
    seen = []
    real = Blocks.__getitem__
    monkeypatch.setattr(Blocks, "__getitem__", lambda self, index: seen.append(index) or real(self, index))

    def order(arm, seed, steps):
        seen.clear()
        trained(tiny_settings(steps=steps, batch=64), tmp_path / f"{arm}-{seed}", arm, seed=seed)
        return list(seen)[: steps * 64]

    epoch = len(text.split("train")) // 16 // 64
    first, *others = (order(arm, 1, 2 * epoch + 3) for arm in ("tied", "untied", "factored:8"))
    assert others == [first, first]
    one, two = (first[i * epoch * 64 : (i + 1) * epoch * 64] for i in range(2))
    assert len(set(one)) == len(set(two)) == epoch * 64
    assert one != two
    assert order("tied", 2, epoch)[: epoch * 64] not in (one, two)


@pytest.mark.parametrize("step", [0, 7, 39])
def test_run_resumes_from_checkpoint_written_at_ctrl_c(
    job, interrupted, trained, undisturbed_run, tiny_settings, tmp_path, caplog, step
):
    """A run stopped after its last step takes no further step. Resuming drops later lines of the curve."""
    folder, undisturbed = undisturbed_run
    before = signal.getsignal(signal.SIGINT)
    interrupted(job(tiny_settings(), tmp_path / "cut"), step)
    assert signal.getsignal(signal.SIGINT) is before
    state = json.loads((tmp_path / "cut" / f"checkpoint-{step + 1}" / "trainer_state.json").read_text())
    timed = state["stateful_callbacks"]["RunRecord"]["attributes"]
    assert timed["steps"] == step  # a process does not time its first step
    assert not (tmp_path / "cut" / "result.json").exists()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step + 3}, "train_nll": 1.0}}\n{{"step": {step + 5}, "tra')
    resumed = trained(tiny_settings(), tmp_path / "cut")
    assert "missing keys" not in caplog.text  # the checkpoint stores the tied table once, without the head
    assert resumed.result.seconds >= timed["seconds"]
    counted = step + max(0, 40 - (step + 1) - 1)
    assert resumed.result.tokens_per_second == pytest.approx(counted * 64 / resumed.result.seconds)
    # an interrupted window averages only the steps after the interruption; every other number is equal
    assert differing_fields(resumed.result, undisturbed.result) <= ({"curve"} if step % 2 == 0 else set())
    pairs = zip(resumed.result.curve, undisturbed.result.curve, strict=step % 2 == 1)
    assert all(one == other for i, (one, other) in enumerate(pairs) if i != step / 2)
    mine, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "cut", folder))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_second_ctrl_c_stops_run_without_checkpoint(job, interrupted, tiny_settings, tmp_path):
    interrupted(job(tiny_settings(), tmp_path), 7, times=2, raises=KeyboardInterrupt)
    assert not (tmp_path / "checkpoint-8").exists()


@pytest.fixture(scope="module", params=["tied+untie_at=20", "untied+tie_at=20"])
def scheduled_run(request, trained, tiny_settings, tmp_path_factory):
    """Return a scheduled arm and the outcome of its undisturbed run."""
    return request.param, trained(tiny_settings(), tmp_path_factory.mktemp("scheduled") / "whole", request.param)


@pytest.mark.parametrize("step", [19, 20, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 18, 21, 38))])
def test_scheduled_run_resumes_before_and_after_its_step(
    job, interrupted, trained, tiny_settings, tmp_path, scheduled_run, step
):
    arm, undisturbed = scheduled_run
    interrupted(job(tiny_settings(), tmp_path / "cut", arm), step)
    resumed = trained(tiny_settings(), tmp_path / "cut", arm)
    assert differing_fields(resumed.result, undisturbed.result) <= {"curve"}
    assert ("shared table" in resumed.result.parameters) == arm.startswith("untied")


@pytest.mark.slow
def test_run_with_free_rows_resumes_with_the_ids_of_its_text(text, job, interrupted, trained, tiny_settings, tmp_path):
    settings = tiny_settings(arms=("tied+free=9",))
    trained(settings, tmp_path / "whole")
    interrupted(job(settings, tmp_path / "cut"), 7)
    trained(settings, tmp_path / "cut")
    whole, resumed = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "cut"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert whole["lm_head.free.ids"].tolist() == sorted(np.argsort(-text.counts, kind="stable")[:9].tolist())
    assert whole["lm_head.free.rows"].any()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "dense")
    assert not dense.config.tie_word_embeddings


@pytest.mark.parametrize(
    "changes", [{"bf16": True}, {"model": "gpt2", "accumulate": 2}, {"activation_checkpointing": True}]
)
def test_run_trains_with_bf16_accumulation_and_activation_checkpointing(trained, tiny_settings, tmp_path, changes):
    result = trained(tiny_settings(**changes), tmp_path).result
    # a small random table deviates from the prediction
    assert result.initial_nll == pytest.approx(result.predicted_initial_nll, rel=0.04)
    assert result.heldout_nll < result.initial_nll - 0.3
    assert result.curve[-1].tokens == 40 * 4 * 16 * changes.get("accumulate", 1)


@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8", "tied+bias+output_scale=0.5"])
def test_direct_path_matches_product_of_embedding_and_head(job, tiny_settings, arm):
    installed = decoder.KIND.build(job(tiny_settings(), arm=arm))
    lookup, head = installed.model.get_input_embeddings(), installed.model.get_output_embeddings()
    with torch.no_grad():
        if head.bias is not None:
            head.bias.normal_()
        into, out = (lookup.in_map.weight, head.out_map.weight) if arm == "factored:8" else [torch.eye(16)] * 2
        whole = lookup.weight @ into.T @ out.T @ head.weight.T * (0.5 if "output_scale" in arm else 1.0)
        whole += 0 if head.bias is None else head.bias
    tokens = [5, 2, 40, 41]
    found = torch.tensor(direct_path(installed, tokens))
    torch.testing.assert_close(found, whole[tokens][:, tokens], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found, found.T, atol=1e-6) == (arm == "tied")
    assert direct_path(installed, []) == []
