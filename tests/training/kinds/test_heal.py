"""Tests of `heal` against the KL divergence from the teacher in fp64 and against uninterrupted runs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.conftest import jobs_on, refusal
from transformers import AutoModelForCausalLM

import tiewise
from tiewise.checkpoint.rewrite import factor, resize, transplant
from tiewise.core.errors import TiewiseError
from tiewise.inspection.running.passages import cost_change, passage_nats, passages
from tiewise.training.data.corpus import Blocks, load_prepared
from tiewise.training.kinds.heal import KIND, HealTrainer, healing_settings, shared_vocabulary
from tiewise.training.settings import Settings

TINY = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "tokenizer": "bpe:300"}


@pytest.fixture(scope="module")
def teacher(source, tmp_path_factory):
    run = tmp_path_factory.mktemp("teacher") / "run"
    return tiewise.train(source, out=run, steps=60, quiet=True, **TINY).model


@pytest.fixture(scope="module")
def factored_model(teacher, tmp_path_factory):
    to = tmp_path_factory.mktemp("narrow") / "model"
    factor(teacher, to, rank=4)
    return to


def heal(model, out, teacher, source, **settings):
    given = {"steps": 12, "batch": 4, "quiet": True, **settings}
    return tiewise.heal(model, source, teacher=teacher, out=out, **given)


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("what", ["tables", "all"])
def test_heal_trains_only_requested_parameters(what, factored_model, teacher, source, tmp_path):
    found = heal(factored_model, tmp_path / "run", teacher, source, what=what)
    before, after = weights(factored_model), weights(tmp_path / "run/factored-4/seed-1/final")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tables = {"model.embed_tokens.weight", "model.embed_tokens.in_map.weight", "lm_head.out_map.weight"}
    assert before.keys() == after.keys()
    assert changed == (tables if what == "tables" else set(before))
    assert found.model == str(tmp_path / "run/factored-4/seed-1/final")
    assert json.loads((tmp_path / "run/healed.json").read_text()) == found.record()
    assert found.left.after < found.lost.after
    assert found.share.value > 0


def make_trainer(model, teacher, source, folder, **settings):
    """Return the trainer of a healing, its student and its text."""
    record = {**healing_settings(model, teacher), "seed": 1, "text": [str(source)], "steps": 5, "batch": 4, **settings}
    checked = Settings.of(record).checked()
    text = KIND.prepare(checked, folder / "data")
    job = jobs_on(text)(checked, folder)
    installed = KIND.build(job)
    return KIND.trainer(job, installed), installed, text


def test_heal_loss_matches_fp64_kl_divergence_from_teacher(factored_model, teacher, source, tmp_path):
    trainer, student, text = make_trainer(factored_model, teacher, source, tmp_path)
    assert isinstance(trainer, HealTrainer)
    blocks = Blocks(text.split("train"), 16)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(6)])
    loss = trainer.loss_of(student.model, {"input_ids": ids, "labels": ids})
    loss.backward()
    original = AutoModelForCausalLM.from_pretrained(teacher).double()
    plain = tiewise.load(factored_model).double()
    p, q = (m(input_ids=ids).logits[:, :-1].log_softmax(-1) for m in (original, plain))
    expected = (p.exp() * (p - q)).sum(-1).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name in ("in_map.weight", "weight"):
        theirs, ours = (m.get_input_embeddings().get_parameter(name).grad for m in (plain, student.model))
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-8)
    assert all(p.grad is None for name, p in student.model.named_parameters() if "layers" in name)


@pytest.mark.parametrize("padded", ["student", "teacher"])
def test_heal_loss_ignores_padding_rows_in_both_softmaxes(teacher, source, tmp_path, padded):
    """Both models share a tokenizer but pad their tables to different lengths (trl#2215, torchtune#2119)."""
    noisy = tmp_path / "noisy"
    shutil.copytree(teacher, noisy)
    name = "model.embed_tokens.weight"
    save_file(weights(teacher) | {name: weights(teacher)[name].flip(1).contiguous()}, noisy / "model.safetensors")
    # the new rows are random, so they would change the loss
    resize(noisy if padded == "student" else teacher, tmp_path / "long", vocab=320)
    model, original = (tmp_path / "long", teacher) if padded == "student" else (noisy, tmp_path / "long")
    trainer, student, text = make_trainer(model, original, source, tmp_path / "made")
    assert isinstance(trainer, HealTrainer)
    ids = torch.stack([Blocks(text.split("train"), 16)[i]["input_ids"] for i in range(4)])
    loss = trainer.loss_of(student.model, {"input_ids": ids, "labels": ids})
    loss.backward()
    both = [AutoModelForCausalLM.from_pretrained(path).double() for path in (original, model)]
    rows = len(weights(teacher)[name])
    p, q = (m(input_ids=ids).logits[:, :-1, :rows].log_softmax(-1) for m in both)
    expected = (p.exp() * (p - q)).sum(-1).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = [m.get_input_embeddings().weight.grad for m in (both[1], student.model)]
    torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-4, atol=1e-8)
    said = KIND.describe(Settings.of(healing_record(model, original, source)).checked(), text)
    assert f"of the {rows} tokens that both models have" in said


def healing_record(model, teacher, source):
    return {**healing_settings(model, teacher), "seed": 1, "text": [str(source)], "steps": 5, "batch": 4}


def test_shared_vocabulary_refuses_token_without_row_in_one_model(teacher, source, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(teacher, short)
    name, rows = "model.embed_tokens.weight", len(weights(teacher)["model.embed_tokens.weight"])
    save_file(weights(teacher) | {name: weights(teacher)[name][:-1].clone()}, short / "model.safetensors")
    settings = Settings.of(healing_record(teacher, short, source)).checked()
    with pytest.raises(TiewiseError, match=rf"short has {rows - 1} rows, and the tokenizer .* has token {rows - 1}"):
        shared_vocabulary(settings)


def test_heal_with_micro_batches_matches_one_batch(factored_model, teacher, source, tmp_path):
    tables = []
    for batch, accumulate in ((4, 1), (2, 2)):
        out = tmp_path / f"run{batch}"
        heal(factored_model, out, teacher, source, batch=batch, accumulate=accumulate, steps=3)
        tables.append(weights(out / "factored-4/seed-1/final")["model.embed_tokens.weight"])
    torch.testing.assert_close(*tables, rtol=0, atol=2e-5)


def test_resumed_healing_matches_uninterrupted_healing(
    factored_model, teacher, source, interrupted, tmp_path, monkeypatch
):
    whole = heal(factored_model, tmp_path / "whole", teacher, source)
    interrupted(factored_model, 5, work=lambda model: heal(model, tmp_path / "cut", teacher, source))
    monkeypatch.chdir(tmp_path / "cut")  # the run stores absolute paths
    again = tiewise.heal(out=tmp_path / "cut", resume=True, quiet=True)
    assert again.left == whole.left
    one, other = (weights(tmp_path / run / "factored-4/seed-1/final") for run in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_heal_uses_cross_entropy_when_teacher_has_another_vocabulary(teacher, source, tmp_path, capfd):
    run = tmp_path / "other"
    donor = tiewise.train(source, out=run, steps=5, quiet=True, **{**TINY, "tokenizer": "bpe:290"}).model
    transplant(teacher, tmp_path / "model", tokenizer=donor)
    found = heal(tmp_path / "model", tmp_path / "run", teacher, source, steps=40, quiet=False)
    said = capfd.readouterr().err
    assert "from the text alone, because the teacher has another vocabulary" in said
    assert found.left.after < found.lost.after
    trainer, *_ = make_trainer(tmp_path / "model", teacher, source, tmp_path / "made")
    assert not isinstance(trainer, HealTrainer)


def test_healing_settings_scale_learning_rate_by_table_rms(teacher, tmp_path):
    assert healing_settings(teacher, teacher)["length"] == 16
    rms = float(weights(teacher)["model.embed_tokens.weight"].square().mean().sqrt())
    assert healing_settings(teacher, teacher)["learning_rate"] == pytest.approx(0.03 * rms, rel=0.05)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teacher": None}, "no teacher; give teacher: the folder of the model that "),
        ({"model": None}, "no model to heal"),
        ({"model": "nowhere"}, "no such file or folder"),
        ({"teacher": "nowhere"}, "is no folder with a config.json"),
        ({"what": "body"}, "choose tables or all"),
        ({"length": 32}, "16 positions, blocks are 32 long"),
        ({"init": 0.1}, "leave init out"),
        ({"resume": True}, "resume takes its settings from the run"),
    ],
)
def test_heal_refuses_invalid_arguments_with_one_line_message(change, says, teacher, source, tmp_path):
    given = {"model": teacher, "out": tmp_path / "run", "teacher": teacher, "text": str(source), "quiet": True}
    with refusal(says):
        tiewise.heal(**{**given, **change})
    assert not (tmp_path / "run").exists()


def test_heal_refuses_text_too_short_to_measure_before_training(teacher, tmp_path):
    (tmp_path / "short.txt").write_text("a few words of text. " * 600)
    with pytest.raises(TiewiseError, match=r"characters of the text are held out, .*; give more text"):
        heal(teacher, tmp_path / "run", teacher, tmp_path / "short.txt")
    assert not (tmp_path / "run").exists()


def test_heal_refuses_to_resume_training_run(source, tmp_path):
    tiewise.train(source, out=tmp_path / "run", steps=2, quiet=True, **TINY)
    with pytest.raises(TiewiseError, match="holds no healing; use tiewise train"):
        tiewise.heal(out=tmp_path / "run", resume=True, quiet=True)


# acceptance bars, on a model trained on the built-in text


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory):
    """Train a tied model on the built-in text, long enough that damage raises its loss."""
    run = tmp_path_factory.mktemp("learnt") / "run"
    shape = {"width": 96, "layers": 1, "heads": 3, "length": 64, "batch": 16, "steps": 300, "tokenizer": "bpe:800"}
    return tiewise.train(out=run, quiet=True, **shape).model


@pytest.mark.slow
def test_heal_recovers_over_half_of_loss_from_factoring(trained_model, tmp_path):
    factor(trained_model, tmp_path / "narrow", rank=32)
    found = tiewise.heal(tmp_path / "narrow", out=tmp_path / "run", teacher=trained_model, steps=150, quiet=True)
    assert found.lost.more.low > 0.1  # bits per byte
    assert found.share.low > 0.5
    assert found.share.high < 1


@pytest.fixture(scope="module")
def donor(tmp_path_factory):
    """Train a narrower model with another vocabulary on the same text."""
    shape = {"width": 64, "layers": 1, "heads": 2, "length": 64, "batch": 16, "steps": 200, "tokenizer": "bpe:1400"}
    return tiewise.train(out=tmp_path_factory.mktemp("donor") / "run", quiet=True, **shape).model


@pytest.mark.slow
@pytest.mark.parametrize("by", ["spelling", "donor"])
def test_transplanted_rows_cost_less_than_mean_and_random_rows(by, trained_model, donor, tmp_path):
    transplant(trained_model, tmp_path / "made", tokenizer=donor, donor=donor if by == "donor" else None)
    old, new = (
        weights(trained_model)["model.embed_tokens.weight"],
        weights(tmp_path / "made")["model.embed_tokens.weight"],
    )
    words = [json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] for folder in (trained_model, donor)]
    missing = torch.tensor(sorted(number for text, number in words[1].items() if text not in words[0]))
    assert 400 < len(missing) < 1000
    prepared = load_prepared(trained_model.parents[2] / "data")
    held_out = passages([prepared.tokenizer.decode(prepared.split("heldout"))])
    cost = passage_nats(tmp_path / "made", held_out)
    mean, spread = old.mean(0), torch.linalg.cholesky(torch.cov(old.T))
    drawn = torch.randn(len(missing), len(mean), generator=torch.Generator().manual_seed(0)) @ spread.T
    for name, rows in (("mean", mean), ("random", mean + drawn)):
        shutil.copytree(tmp_path / "made", tmp_path / name)
        table = new.clone()
        table[missing] = rows
        tensors = weights(tmp_path / "made") | {"model.embed_tokens.weight": table}
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        assert cost_change(cost, passage_nats(tmp_path / name, held_out), held_out).more.low > 0
