"""`resize_token_embeddings` on installed models: what the old tokens compute stays, and so do saving and training."""

import pytest
import torch
import transformers as tr
from tiny_models import V, batch, build, step

import tiewise.hf
from tiewise.boundary.install import install

SPECS = ["tied", "untied", "factored:6", "factored-untied:in=6,out=10", "projected:20", "projected:7,untied,out=none"]
SPECS += ["residual:3", "spd", "untied+bias", "untied+output_scale=0.5", "tied+softcap=3+input_scale=sqrt_d"]
CASES = [(f, s, True) for f in ("llama", "t5", "bart") for s in SPECS if not (f == "bart" and "softcap" in s)]
CASES += [(f, "untied+output_scale=0.5", False) for f in ("llama", "bert")]


def _logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits + 0


@pytest.mark.parametrize(("name", "spec", "tied"), CASES)
def test_old_tokens_keep_their_logits_and_the_model_is_saved(name, spec, tied, tmp_path):
    model = build(name, tied)
    install(model, spec)
    inputs = batch(model)
    names = model.state_dict().keys()
    for rows in (V + 9, V + 20, V - 1):
        kept = min(rows, V)
        inputs = {key: ids.clamp(max=kept - 1) for key, ids in inputs.items()}
        wanted = _logits(model, inputs)[..., :kept]
        model.resize_token_embeddings(rows)
        torch.testing.assert_close(_logits(model, inputs)[..., :kept], wanted, rtol=1e-5, atol=1e-5)
        assert model.state_dict().keys() == names
        if rows == V + 9:
            install(model)
        model.save_pretrained(tmp_path / str(rows))
        loaded = tiewise.hf.load(tmp_path / str(rows))
        assert torch.equal(_logits(loaded, inputs), _logits(model, inputs))
    installed = install(model, spec)
    assert [len(table) for table in installed.tables()] == [V - 1, V - 1]
    (loss, got), (wanted_loss, wanted) = step(model, inputs), step(loaded, inputs)
    assert torch.equal(loss, wanted_loss)
    assert got.keys() == wanted.keys()
    assert installed.counts.fused == 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_trainer_s_checkpoints_after_a_resize(name, tmp_path):
    model = build(name)
    install(model, "factored:6")
    model.resize_token_embeddings(V + 9)
    ids = batch(model)["input_ids"]
    settings = {"save_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": []}
    for steps, resume in ((1, None), (2, str(tmp_path / "checkpoint-1"))):
        arguments = tr.TrainingArguments(str(tmp_path), max_steps=steps, **settings)
        trainer = tr.Trainer(model, arguments, train_dataset=[{"input_ids": i, "labels": i} for i in ids])
        trainer.train(resume_from_checkpoint=resume)
        loaded = tiewise.hf.load(tmp_path / f"checkpoint-{steps}")
        assert torch.equal(
            _logits(loaded, {"input_ids": ids, "labels": ids}), _logits(model, {"input_ids": ids, "labels": ids})
        )


def test_a_frozen_table_does_not_freeze_its_map():
    model = build("t5")
    installed = install(model, "factored:6")
    installed.tables()[0].requires_grad_(False)
    model.resize_token_embeddings(V + 9)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"shared.in_map.weight", "lm_head.out_map.weight"} <= trained
    assert "shared.weight" not in trained
