"""Saving, loading, resizing and copying installed models, compared bit for bit with the saved model."""

import copy
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers as tr
from tiny_models import V, assert_identical_steps, batch, build, step, trainer

import tiewise.hf
from tiewise.boundary.installation import install
from tiewise.boundary.saved import _asks_for_tensor_parallelism, link_of
from tiewise.core.errors import InstallError, SpecError, UnsupportedError

SPECS = ["tied", "untied", "factored:6", "factored-untied:in=6,out=10", "projected:20", "projected:7,untied,out=none"]
SPECS += ["residual:3", "spd"]
SPECS += ["untied+bias", "tied+softcap=3+input_scale=sqrt_d", "tied+pad=3+alpha=0.5+init=0.1"]
FAMILIES = ["llama", "t5", "bart", "bert", "opt_350m"]


def _in_turn(families, specs):
    """Return pairs (family, spec): the first family with every spec, each other one with every second pair of specs.

    The code of a spec does not depend on the family. That of a family depends only on the number and width of the
    tables, and each pair of SPECS has boundaries with one table and with two. BART refuses the soft-cap, which is in
    no pair of its turn.
    """
    return [(f, s) for i, f in enumerate(families) for j, s in enumerate(specs) if i == 0 or (i + j // 2) % 2]


CASES = _in_turn(FAMILIES, SPECS)


def _logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits + 0


def _train_one_step(name, spec, tied=True):
    """Return a model with the boundary after one optimizer step, and its batch."""
    model = build(name, tied)
    install(model, spec)
    inputs = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, inputs)
    optimizer.step()
    model.zero_grad()
    return model, inputs


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_save_and_load_round_trip_is_exact(name, spec, tmp_path):
    model, inputs = _train_one_step(name, spec, tied=spec != "tied")
    model.save_pretrained(tmp_path)
    loaded = tiewise.hf.load(tmp_path)
    assert install(loaded).spec == install(model).spec
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert torch.equal(_logits(loaded, inputs), _logits(model, inputs))
    # a tied model stays tied, so it has as many Parameters and trains the same
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    assert_identical_steps(loaded, model, inputs)


_WITHOUT_US_AND_THEN_WITH = """
import sys, torch, transformers
ours, *plain = sys.argv[1:]
try:
    transformers.AutoModelForCausalLM.from_pretrained(ours)
except ValueError as error:
    assert "tiewise" in str(error)
else:
    raise SystemExit("loaded as something else")
for folder in plain:
    saved = torch.load(folder + "/saved.pt")
    model_class = getattr(transformers, saved["class"])
    model, told = model_class.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        logits = model.eval()(**saved["inputs"]).logits
    assert torch.equal(logits, saved["logits"]), folder
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == saved["tied"], folder
assert not any(name.startswith("tiewise") for name in sys.modules)

import tiewise.hf
model = transformers.AutoModelForCausalLM.from_pretrained(ours)
saved = torch.load(ours + "/inputs.pt")
with torch.no_grad():
    assert torch.equal(model.eval()(**saved["inputs"]).logits + 0, saved["logits"])
"""


def test_plain_transformers_refuse_a_boundary_with_maps_until_tiewise_hf_is_imported(tmp_path):
    """One new process, whose imports take seconds, loads all folders."""
    model, inputs = _train_one_step("llama", "factored:6+bias")
    ours = tmp_path / "ours"
    model.save_pretrained(ours)
    torch.save({"inputs": inputs, "logits": _logits(model, inputs)}, ours / "inputs.pt")
    config = json.loads((ours / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("tiewise", "llama")
    assert config["tiewise_boundary"] == "factored:6+bias"
    assert not list(ours.glob("*.py"))
    folders = [ours]
    for name in ("llama", "gpt2", "t5", "bart", "bert"):
        for spec in ("tied", "untied"):
            model, inputs = _train_one_step(name, spec, tied=spec == "untied")
            folders.append(tmp_path / f"{name}-{spec}")
            model.save_pretrained(folders[-1])
            saved = {"class": type(model).__name__, "tied": spec == "tied", "inputs": inputs}
            torch.save(saved | {"logits": _logits(model, inputs)}, folders[-1] / "saved.pt")
    command = [sys.executable, "-c", _WITHOUT_US_AND_THEN_WITH, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_saved_config_builds_a_new_model_with_the_boundary(tmp_path):
    install(model := build("llama"), "factored:6")
    model.config.save_pretrained(tmp_path)
    fresh = tr.AutoModelForCausalLM.from_config(tr.AutoConfig.from_pretrained(tmp_path))
    assert type(fresh) is type(model)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    assert fresh.lm_head.weight.shape == (61, 6)


def test_loading_refuses_a_checkpoint_of_an_unknown_family(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tiewise", "base_model_type": "nothing"}')
    with pytest.raises(InstallError, match="unknown family 'nothing'"):
        tr.AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["os"]}')
    with pytest.raises(InstallError, match="architecture os"):
        tiewise.hf.load(tmp_path)


DENSE = ["tied", "factored:6", "factored-untied:in=6,out=10", "projected:20", "residual:3", "spd"]
DENSE += ["untied+input_scale=sqrt_d+output_scale=0.3"]


@pytest.mark.parametrize("spec", DENSE)
@pytest.mark.parametrize("name", ["llama", "bart", "opt_350m"])
def test_plain_copy_is_a_model_of_the_family_with_the_same_logits(name, spec, tmp_path):
    model, inputs = _train_one_step(name, spec)
    plain, original = tiewise.hf.plain_copy(model), build(name)
    assert type(plain.config) is type(original.config)
    assert [type(m) for m in plain.modules()] == [type(m) for m in original.modules()]
    assert not plain._forward_hooks
    assert all(link_of(m) is None for m in plain.modules())
    plain.save_pretrained(tmp_path)
    loaded = type(original).from_pretrained(tmp_path)
    with torch.no_grad():
        got = loaded.eval()(**inputs)
    torch.testing.assert_close(got.logits, _logits(model, inputs), rtol=1e-4, atol=1e-5)


def test_plain_copy_refuses_what_no_dense_table_can_compute():
    none = {"tied+softcap=3": "soft-cap", "tied+bias": "no bias", "projected:7,out_bias": "bias is no table"}
    for spec, reason in none.items():
        install(model := build("llama"), spec)
        with pytest.raises(UnsupportedError, match=reason):
            tiewise.hf.plain_copy(model)
    with pytest.raises(InstallError, match="no installed boundary"):
        tiewise.hf.plain_copy(build("llama"))
    phi = build("phi", tied=False)
    install(phi, "untied+bias+input_scale=2")
    assert tiewise.hf.plain_copy(phi).lm_head.bias is not None


@pytest.mark.parametrize(("name", "spec"), [("gemma2", "factored:6"), ("bart", "untied"), ("llama", "spd")])
def test_copies_and_pickles_are_independent_of_the_original(name, spec):
    model, inputs = _train_one_step(name, spec)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert link_of(other) is not link_of(model)
        assert link_of(other).head is other.get_output_embeddings()
        assert_identical_steps(other, model, inputs)
        assert link_of(other).counts.fused


RESIZED_SPECS = [*SPECS[:-1], "untied+output_scale=0.5"]
RESIZED = [(family, spec, True) for family, spec in _in_turn(("llama", "t5", "bart"), RESIZED_SPECS)]
RESIZED += [(f, "untied+output_scale=0.5", False) for f in ("llama", "bert")]


@pytest.mark.parametrize(("name", "spec", "tied"), RESIZED)
def test_resized_model_keeps_the_logits_of_old_tokens_and_saves_exactly(name, spec, tied, tmp_path):
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
        if rows == V + 20:  # the next size saves the same way
            continue
        if rows == V + 9:
            install(model)
        model.save_pretrained(tmp_path / str(rows))
        loaded = tiewise.hf.load(tmp_path / str(rows))
        assert torch.equal(_logits(loaded, inputs), _logits(model, inputs))
    installed = install(model, spec)
    assert [len(table) for table in installed.tables()] == [V - 1, V - 1]
    counted = installed.counts.fused
    assert_identical_steps(model, loaded, inputs)
    assert installed.counts.fused == counted + 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_trainer_checkpoints_load_exactly_after_a_resize(name, tmp_path):
    model = build(name)
    install(model, "factored:6")
    model.resize_token_embeddings(V + 9)
    ids = batch(model)["input_ids"]
    settings = {"save_strategy": "steps", "save_steps": 1}
    for steps, resume in ((1, None), (2, str(tmp_path / "checkpoint-1"))):
        rows = [{"input_ids": i, "labels": i} for i in ids]
        trainer(model, tmp_path, rows, max_steps=steps, **settings).train(resume_from_checkpoint=resume)
        loaded = tiewise.hf.load(tmp_path / f"checkpoint-{steps}")
        inputs = {"input_ids": ids, "labels": ids}
        assert torch.equal(_logits(loaded, inputs), _logits(model, inputs))


def test_step_refuses_a_padding_row_that_a_resize_removed():
    model = build("llama")
    install(model, "tied+pad=60")
    model.resize_token_embeddings(50)
    with pytest.raises(SpecError, match="pad=60: the table has 50 rows"):
        step(model, batch(model))
    install(model, "tied+pad=3")
    assert not step(model, batch(model))[1]["model.embed_tokens.weight"][3].any()


def test_resize_of_a_frozen_table_does_not_freeze_its_map():
    model = build("t5")
    installed = install(model, "factored:6")
    installed.tables()[0].requires_grad_(False)
    model.resize_token_embeddings(V + 9)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"shared.in_map.weight", "lm_head.out_map.weight"} <= trained
    assert "shared.weight" not in trained


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({}, False),
        ({"tp_plan": "auto"}, True),
        ({"tp_size": 2}, True),
        ({"distributed_config": SimpleNamespace(tp_size=2)}, True),
        ({"distributed_config": SimpleNamespace(tp_size=1)}, False),
        ({"distributed_config": SimpleNamespace(tp_size=None)}, False),
        ({"distributed_config": None}, False),
    ],
)
def test_tensor_parallelism_is_detected_in_every_option_of_transformers(options, asks):
    assert _asks_for_tensor_parallelism(options) is asks
