"""Tests of logged gradient paths against autograd with two separate tables, and of the penalty."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from tiewise.training import trainer
from tiewise.training.data.corpus import Blocks
from tiewise.training.kinds.decoder import KIND
from tiewise.training.trainer import TiewiseTrainer

STEPS = 3


class Witness(TrainerCallback):
    """Callback that copies the model before every step and collects the logs."""

    def __init__(self):
        self.models, self.logs = [], []

    def on_step_begin(self, args, state, control, model=None, **kw):
        self.models.append(copy.deepcopy(model))

    def on_log(self, args, state, control, logs=None, **kw):
        if "loss" in logs:
            self.logs.append(dict(logs))


def sgd_arguments(**options):
    """Return arguments for SGD with strong clipping, so a norm taken after clipping would differ."""
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.05, "logging_steps": 1}
    usual |= {"max_grad_norm": 0.01, "optim": "sgd", "lr_scheduler_type": "constant"}
    usual |= {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "use_cpu": True}
    return TrainingArguments(output_dir="unused", **{**usual, **options})


def train_steps(installed, text, accumulate=1, **options):
    """Train three steps; return the callback and the batches by step and micro-batch."""
    witness, batches = Witness(), []

    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        batches.append(ids)
        return {"input_ids": ids, "labels": ids.clone()}

    given = {"args": sgd_arguments(gradient_accumulation_steps=accumulate, **options), "data_collator": collate}
    given |= {"train_dataset": Blocks(text.split("train"), 16), "callbacks": [witness]}
    TiewiseTrainer(installed, **given).train()
    grouped = [batches[i * accumulate : (i + 1) * accumulate] for i in range(STEPS)]
    return witness, grouped


def two_leaves(model, batches):
    """Return the gradients through lookup and head and the mean loss over `batches`, by autograd."""
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    one, two = (end.weight.detach().clone().requires_grad_() for end in (lookup, head))
    in_map, out_map = (getattr(end, name, None) for end, name in ((lookup, "in_map"), (head, "out_map")))
    whole = 0.0
    for ids in batches:
        rows = F.embedding(ids, one)
        hidden = model.model(inputs_embeds=rows if in_map is None else in_map(rows)).last_hidden_state
        logits = (hidden if out_map is None else out_map(hidden)) @ two.T
        logits = logits if head.bias is None else logits + head.bias
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / len(batches)
        whole += loss.item()
        loss.backward()
    return one.grad, two.grad, whole


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8", "residual:4", "tied+bias"])
def test_path_norms_match_gradients_of_two_separate_tables_before_clipping(text, job, tiny_settings, arm, accumulate):
    installed = KIND.build(job(tiny_settings(), arm=arm))
    witness, batches = train_steps(installed, text, accumulate)
    for model, step, logged in zip(witness.models, batches, witness.logs, strict=True):
        a, b, loss = two_leaves(model, step)
        norms = (a.norm().item(), b.norm().item())
        assert (logged["path_a"], logged["path_b"]) == pytest.approx(norms, rel=1e-4)
        assert logged["loss"] == pytest.approx(loss, abs=1e-5)
        assert min(logged["path_a"], logged["path_b"]) > 0.01  # norms taken after clipping would be at most 0.01
        if installed.spec.tables == 1:
            assert logged["cosine"] == pytest.approx(F.cosine_similarity(a.flatten(), b.flatten(), 0).item(), abs=1e-4)
        else:
            assert "cosine" not in logged


def test_logged_window_is_mean_of_its_steps(text, job, tiny_settings):
    fine, coarse = (
        train_steps(KIND.build(job(tiny_settings(), arm="tied")), text, logging_steps=n)[0].logs for n in (1, STEPS)
    )
    assert len(coarse) == 1
    for name in ("path_a", "path_b", "cosine", "loss"):
        assert coarse[0][name] == pytest.approx(sum(log[name] for log in fine) / STEPS, rel=1e-6)


def test_tracking_leaves_trained_weights_unchanged(text, job, tiny_settings):
    tracked, plain = (KIND.build(job(tiny_settings(), arm="tied")) for _ in range(2))
    train_steps(tracked, text)
    Trainer(plain.model, sgd_arguments(), train_dataset=Blocks(text.split("train"), 16)).train()
    for one, other in zip(tracked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("accumulate", "shares"), [(1, True), (3, True), (1, False), (3, False)])
def test_penalty_acts_once_per_step_and_is_excluded_from_logged_loss(text, job, tiny_settings, accumulate, shares):
    """λ‖P‖ adds λ P/‖P‖ to the gradient of P. Micro-batches and the division of the loss leave this unchanged."""
    options = {"max_grad_norm": 0.0, "learning_rate": 0.5}
    after, logs, start = {}, {}, None
    for weight in (0.0, 0.3):
        installed = KIND.build(job(tiny_settings(), arm=f"projected:24,penalty={weight}"))
        if not shares:
            installed.model.accepts_loss_kwargs = False
        projection = installed.model.get_output_embeddings().out_map.weight
        start = projection.detach().clone()
        witness, _ = train_steps(installed, text, accumulate, **options)
        after[weight] = witness.models[1].get_output_embeddings().out_map.weight.detach()
        logs[weight] = witness.logs[0]
    step = after[0.3] - after[0.0]
    torch.testing.assert_close(step, -0.5 * 0.3 * start / start.norm(), rtol=1e-3, atol=1e-6)
    assert logs[0.3]["loss"] == pytest.approx(logs[0.0]["loss"], abs=1e-5)


def test_penalty_applies_only_in_training_mode(text, job, tiny_settings):
    installed = KIND.build(job(tiny_settings(), arm="projected:24,penalty=5"))
    trainer = TiewiseTrainer(installed, args=sgd_arguments())
    inputs = dict.fromkeys(("input_ids", "labels"), torch.tensor([[1, 2, 3, 4]]))
    models = (installed.model.train, installed.model.eval)
    training, evaluated = (trainer.compute_loss(mode(), inputs).item() for mode in models)
    norm = installed.model.get_output_embeddings().out_map.weight.norm().item()
    assert training - evaluated == pytest.approx(5 * norm, rel=1e-5)


@pytest.mark.parametrize("gpu", [True, False])
def test_training_arguments_pin_memory_and_copy_asynchronously_with_gpu(job, tiny_settings, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(trainer, "ReportedArguments", lambda **given: SimpleNamespace(n_gpu=1, **given))
    found = trainer.training_arguments(job(tiny_settings(), tmp_path))
    assert found.dataloader_pin_memory == gpu
    assert found.accelerator_config == {"non_blocking": gpu}


class ReadCounter(TorchDispatchMode):
    """Counter of operators that return a value to Python, which waits for a GPU."""

    reading = ("_local_scalar_dense", "_unique2", "nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.reading:
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("arm", ["tied", "untied"])
def test_path_norms_are_read_at_logs_alone(text, job, tiny_settings, arm, monkeypatch):
    noted, logged = ReadCounter(), ReadCounter()

    def count(method, counter):
        def counted(self):
            with counter:
                return method(self)

        return counted

    monkeypatch.setattr(TiewiseTrainer, "_note_path_norms", count(TiewiseTrainer._note_path_norms, noted))
    monkeypatch.setattr(TiewiseTrainer, "_means_of_window", count(TiewiseTrainer._means_of_window, logged))
    with gpu_branch():
        witness, _ = train_steps(KIND.build(job(tiny_settings(), arm=arm)), text, accumulate=2, logging_steps=STEPS)
    assert noted.reads == []
    assert len(logged.reads) == 3 * len(witness.logs) == 3  # path_a, path_b and cosine


def test_clock_waits_for_the_accelerator_before_a_pause_in_the_steps(job, tiny_settings, monkeypatch, tmp_path):
    waits, now = [], [0.0]
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def wait():
        waits.append(now[0])
        now[0] += 10

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    record = trainer.RunRecord(job(tiny_settings(), tmp_path))
    state = SimpleNamespace(global_step=1)
    for should_log in (False, False, True, False):
        control = SimpleNamespace(should_log=should_log, should_save=False, should_training_stop=False)
        record.on_step_begin(None, state, control)
        now[0] += 1
        record.on_step_end(None, state, control)
        now[0] += 100  # logs and evaluation
    assert len(waits) == 2  # the first step, which warms up, and the one that logs
    assert (record.seconds, record.steps) == (1 + 11 + 1, 3)
