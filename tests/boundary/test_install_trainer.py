"""transformers' Trainer on installed models, compared with one batch of all rows and with the plain model."""

import copy

import numpy as np
import pytest
import torch
import transformers as tr
from tiny_models import Gradients, V, build, gradients, pair, trainer, variant, without_dropout
from transformers.trainer_pt_utils import LabelSmoother

import tiewise.hf
from tiewise.boundary.installation import Installed, install
from tiewise.boundary.saved import link_of

ROWS, LENGTH = 16, 9


def _rows(ignored=True):
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, V, (ROWS, LENGTH), generator=source)
    labels = torch.randint(3, V, (ROWS, LENGTH), generator=source)
    if ignored:  # an unequal number of labels in each row
        for i, row in enumerate(labels):
            row[LENGTH - i % 4 :] = -100
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


def _stack_rows(rows):
    """Return all rows as one batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _trainer(model, folder, rows, **settings):
    settings = {"per_device_train_batch_size": ROWS, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1} | settings
    return trainer(model, folder, rows, logging_steps=1, **settings)


def _train_and_read_loss(model, folder, rows, **settings):
    made = _trainer(model, folder, rows, **settings)
    made.train()
    return made.state.log_history[0]["loss"]


def _smoothed_loss(name, model, inputs, epsilon):
    """Return the loss of all rows by definition: the mean over labels that are not ignored."""
    logits, labels = model.train()(**inputs).logits, inputs["labels"]
    if name in ("gpt2", "llama"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    log_p, counts = logits.log_softmax(-1), labels != -100
    of_labels = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(((1 - epsilon) * of_labels + epsilon * log_p.mean(-1)) * counts).sum() / counts.sum()


def _masked_rows(name, model):
    """Return rows with labels on about 15 % of positions, and on position 0 of every second row."""
    source = torch.Generator().manual_seed(7)
    rows = _rows(False)
    for i, row in enumerate(rows):
        drop = torch.rand(LENGTH, generator=source) > 0.15
        drop[[i % 2 * -1, 2]] = False
        row["labels"] = row["labels"].masked_fill(drop, -100)
        if model.config.is_encoder_decoder:  # with label smoothing, the Trainer does not pass the labels to the model
            row["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(row["labels"][None])[0]
    return rows


def _loaded(model, road, folder):
    """Return the model itself or, by `road`, the same model saved with a boundary and loaded."""
    if road in INSTALL:
        return model
    install(model, "factored:6")
    model.save_pretrained(folder)
    if road == "load":
        return tiewise.hf.load(folder)
    autos = (tr.AutoModelForMaskedLM, tr.AutoModelForCausalLM)
    auto = next(auto for auto in autos if type(model.config) in auto._model_mapping)
    if road == "auto":
        return auto.from_pretrained(folder)
    made = auto.from_config(tr.AutoConfig.from_pretrained(folder))
    made.load_state_dict(model.state_dict())
    return made


INSTALL = ("installed", "in one piece")
INSTALLED = ("bert", "t5", "bart", "bart_decoder", "gpt2", "llama")
CASES = [(name, "installed", smoother) for name in INSTALLED for smoother in (None, "transformers", "tiewise")]
CASES.remove(("bart_decoder", "installed", "transformers"))  # that smoother shifts the labels, but the class does not
CASES += [(name, "auto", how) for name in ("bert", "gpt2", "llama") for how in (None, "transformers", "tiewise")]
CASES += [(name, road, None) for name in ("bert", "gpt2") for road in ("config", "load")]
CASES += [(name, "in one piece", None) for name in INSTALLED]


@pytest.mark.parametrize(("name", "road", "smoother"), CASES)
def test_accumulated_gradients_equal_those_of_all_rows_at_once(name, road, smoother, tmp_path):
    model = variant("bart", tr.BartForCausalLM) if name == "bart_decoder" else build(name)
    model = without_dropout(_loaded(model, road, tmp_path))
    rows = _masked_rows(name, model)
    plain = copy.deepcopy(model)
    if link_of(plain):
        plain = tiewise.hf.plain_copy(plain)
    epsilon = 0.2 if smoother else 0.0
    wanted_loss = _smoothed_loss(name, plain, _stack_rows(rows), epsilon)
    wanted_loss.backward()
    wanted = gradients(plain)
    installed = install(model) if road in INSTALL else Installed(model, link_of(model))
    pieces = 1 if road == "in one piece" else 4
    settings = {"per_device_train_batch_size": ROWS // pieces, "gradient_accumulation_steps": pieces}
    seen = Gradients()
    made = _trainer(model, tmp_path, rows, **settings, label_smoothing_factor=epsilon, callbacks=[seen])
    if smoother == "tiewise":
        made.label_smoother = installed.label_smoother(epsilon)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(
        wanted_loss.item(), rel=1e-4
    )  # the Trainer logs four decimals
    body = [n for n in wanted if n in seen.of and seen.of[n].shape == wanted[n].shape]
    got, all_at_once = (torch.cat([g[n].flatten() for n in body]) for g in (seen.of, wanted))
    assert (got - all_at_once).norm() <= 1e-5 * all_at_once.norm()
    if road in INSTALL:
        assert len(body) == len(wanted) == len(seen.of)
    losses = 2 if smoother == "transformers" else 1  # it needs −log p of the labels and its sum over the vocabulary
    assert (installed.counts.fused, installed.counts.materialised) == (losses * pieces, 0)


def test_loss_is_divided_by_num_items_in_batch():
    """This includes tuples, replicas of DataParallel, and batches whose labels are all ignored."""
    model = build("bert").eval()
    inputs = _stack_rows(_rows())
    plain = copy.deepcopy(model)
    install(model)
    count = int((inputs["labels"] != -100).sum())
    whole = plain(**inputs).loss
    for items in (100, torch.tensor(100)):
        torch.testing.assert_close(model(**inputs, num_items_in_batch=items).loss, whole * count / 100)
        torch.testing.assert_close(model(**inputs, num_items_in_batch=items, return_dict=False)[0], whole * count / 100)
    model._is_replica = True
    torch.testing.assert_close(model(**inputs, num_items_in_batch=torch.tensor(100)).loss, whole * count / 100)
    del model._is_replica
    torch.testing.assert_close(model(**inputs).loss, whole)
    assert "loss" not in model(input_ids=inputs["input_ids"], num_items_in_batch=torch.tensor(100))
    nothing = torch.full_like(inputs["labels"], -100)
    assert model(input_ids=inputs["input_ids"], labels=nothing, num_items_in_batch=torch.tensor(0)).loss == 0


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_plain_transformers_log_a_wrong_loss_for_accumulated_batches(name, tmp_path):
    """Install corrects these two errors of transformers; if this test fails, remove the corrections."""
    model, rows = without_dropout(build(name)), _rows(False)
    true = model.train()(**_stack_rows(rows)).loss.item()
    loss = _train_and_read_loss(
        model, tmp_path, rows, per_device_train_batch_size=ROWS // 4, gradient_accumulation_steps=4
    )
    assert loss == pytest.approx(true * {"gpt2": (LENGTH - 1) / LENGTH, "bert": 4}[name], rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("items", [None, 50])
def test_fused_label_smoother_equals_that_of_transformers(name, items):
    model = without_dropout(build(name)).train()
    ids, labels = _stack_rows(_rows()).values()
    wanted = LabelSmoother(0.2)(model(input_ids=ids), labels, shift_labels=name != "bert", num_items_in_batch=items)
    installed = install(model)
    got = installed.label_smoother(0.2)(model(input_ids=ids), labels, num_items_in_batch=items)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    in_eval = installed.label_smoother(0.2)(model.eval()(input_ids=ids), labels, num_items_in_batch=items)
    torch.testing.assert_close(in_eval, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["llama", "bart", "bert"])
def test_trainer_evaluation_reports_the_loss_and_metrics_of_the_plain_model(name, tmp_path):
    (model, plain, installed), rows = pair(name), _rows()

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
def test_mixed_precision_training_and_evaluation_stay_fused(name, tmp_path):
    (model, plain, installed), rows = pair(name), _rows(False)
    wanted, got = (_train_and_read_loss(without_dropout(m), tmp_path, rows, bf16=True) for m in (plain, model))
    assert got == pytest.approx(wanted, rel=0.01)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    assert np.isfinite(_trainer(model, tmp_path, rows, bf16=True).evaluate()["eval_loss"])
    assert installed.counts.materialised == 0
