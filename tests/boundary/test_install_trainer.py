"""transformers' Trainer on installed models: what it logs is what the model computes, however batches are divided."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from tiny_models import V, build
from transformers.trainer_pt_utils import LabelSmoother

from tiewise.boundary.accounting import FusedLabelSmoother
from tiewise.boundary.install import install

ROWS, LENGTH = 8, 9


def _without_dropout(name):
    model = build(name)
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def _rows(ignored=True):
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, V, (ROWS, LENGTH), generator=source)
    labels = torch.randint(3, V, (ROWS, LENGTH), generator=source)
    if ignored:  # an unequal number of labels in each row
        for i, row in enumerate(labels):
            row[LENGTH - i % 4 :] = -100
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


def _trainer(model, folder, rows, **settings):
    settings = {"per_device_train_batch_size": ROWS, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1} | settings
    arguments = tr.TrainingArguments(
        str(folder),
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        max_grad_norm=1e9,
        disable_tqdm=True,
        **settings,
    )
    return tr.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def _logged(model, folder, rows, **settings):
    trainer = _trainer(model, folder, rows, **settings)
    trainer.train()
    first = trainer.state.log_history[0]
    return first["loss"], first["grad_norm"]


# the mean over all labels where the Trainer knows their number; else the mean of the micro-batches' means
@pytest.mark.parametrize(
    ("name", "ignored"), [("gpt2", True), ("llama", True), ("bert", False), ("t5", False), ("bart", False)]
)
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_logged_loss_is_the_loss_under_accumulation(name, ignored, pieces, tmp_path):
    model, rows = _without_dropout(name), _rows(ignored)
    inputs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    plain = copy.deepcopy(model).train()
    wanted = plain(**inputs).loss
    wanted.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    installed = install(model)
    settings = {"per_device_train_batch_size": ROWS // pieces, "gradient_accumulation_steps": pieces}
    loss, grad_norm = _logged(model, tmp_path, rows, **settings)
    assert loss == pytest.approx(wanted.item(), rel=1e-4)  # the Trainer logs four decimals
    assert grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert (installed.counts.fused, installed.counts.materialised) == (pieces, 0)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_uninstalled_models_are_accounted_wrongly_which_is_why(name, tmp_path):
    """The two errors of transformers that install corrects; should this fail, the corrections can go."""
    model, rows = _without_dropout(name), _rows(False)
    inputs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    true = model.train()(**inputs).loss.item()
    loss, _ = _logged(model, tmp_path, rows, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert loss == pytest.approx(true * {"gpt2": (LENGTH - 1) / LENGTH, "bert": 4}[name], rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("items", [None, 50])
def test_the_fused_label_smoother_equals_transformers_own(name, items):
    model = _without_dropout(name).train()
    rows = _rows()
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    wanted = LabelSmoother(0.2)(model(input_ids=ids), labels, shift_labels=name != "bert", num_items_in_batch=items)
    installed = install(model)
    got = installed.label_smoother(0.2)(model(input_ids=ids), labels, num_items_in_batch=items)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    in_eval = installed.label_smoother(0.2)(model.eval()(input_ids=ids), labels, num_items_in_batch=items)
    torch.testing.assert_close(in_eval, wanted, rtol=1e-5, atol=0)


def test_the_smoother_in_the_trainer_stays_fused(tmp_path):
    model, rows = _without_dropout("llama"), _rows()
    wanted = _logged(copy.deepcopy(model), tmp_path / "plain", rows, label_smoothing_factor=0.1)
    installed = install(model)
    trainer = _trainer(model, tmp_path, rows, label_smoothing_factor=0.1)
    trainer.label_smoother = installed.label_smoother(0.1)
    assert isinstance(trainer.label_smoother, FusedLabelSmoother)
    trainer.train()
    first = trainer.state.log_history[0]
    assert (first["loss"], first["grad_norm"]) == pytest.approx(wanted, rel=1e-4)
    assert installed.counts.materialised == 0


@pytest.mark.parametrize("name", ["llama", "bart", "bert"])
def test_evaluation_with_and_without_metrics(name, tmp_path):
    model, rows = _without_dropout(name), _rows()
    plain = copy.deepcopy(model)
    installed = install(model)

    def metrics(prediction):
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return {
            "sum": float(np.abs(logits).sum()),
            "accuracy": float((logits.argmax(-1) == prediction.label_ids).mean()),
        }

    wanted, got = (_trainer(m, tmp_path, rows) for m in (plain, model))
    assert got.evaluate()["eval_loss"] == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-6)
    assert installed.counts.materialised == 0
    wanted.compute_metrics = got.compute_metrics = metrics
    mine, its = got.evaluate(), wanted.evaluate()
    for key in ("eval_loss", "eval_sum", "eval_accuracy"):
        assert mine[key] == pytest.approx(its[key], rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_mixed_precision_stays_fused(name, tmp_path):
    model, rows = _without_dropout(name), _rows(False)
    plain = copy.deepcopy(model)
    installed = install(model)
    wanted, got = (_logged(m, tmp_path, rows, bf16=True)[0] for m in (plain, model))
    assert got == pytest.approx(wanted, rel=0.01)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    trainer = _trainer(model, tmp_path, rows, bf16=True)
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert installed.counts.materialised == 0


def test_a_loss_of_one_s_own_from_deferred_logits():
    model = build("llama").eval()
    rows = _rows()
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    wanted = F.cross_entropy(model(input_ids=ids).logits.view(-1, V), labels.view(-1), reduction="none")
    installed = install(model)
    with installed.deferred():
        logits = model(input_ids=ids).logits
        got = F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction="none")
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    assert isinstance(model(input_ids=ids).logits, torch.Tensor)
