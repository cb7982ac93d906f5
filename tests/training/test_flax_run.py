"""A run by the Flax backend: the same start, files and measures as PyTorch's, and nothing that it does not have."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiewise.hf
from tiewise.errors import RunError
from tiewise.spec import BoundarySpec
from tiewise.training import flax_run, run
from tiewise.training.evaluate import bits_per_byte
from tiewise.training.job import Job

assert tiewise.hf  # factored checkpoints load through it


def job(settings, folder, arm):
    return Job(arm, BoundarySpec.parse(arm), 1, settings, folder)


@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8"])
def test_both_backends_start_alike_and_end_close(arm, text, counts, tiny, tmp_path):
    theirs = run.train(job(tiny(), tmp_path / "torch", arm), text, counts, [3, 4])
    ours = flax_run.train(job(tiny(), tmp_path / "flax", arm), text, counts, [3, 4])
    a, b = ours.result, theirs.result
    for name in (
        "initial_nll",
        "predicted_initial_nll",
        "init_std",
        "parameters",
        "total_parameters",
        "bytes",
        "steps",
    ):
        assert getattr(a, name) == getattr(b, name), name
    assert a.heldout_nll < a.initial_nll - 0.3
    assert a.heldout_nll == pytest.approx(b.heldout_nll, abs=0.25)  # another order of blocks
    assert [(p.step, p.tokens) for p in a.curve] == [(p.step, p.tokens) for p in b.curve]
    for name in ("train_nll", "path_a", "path_b"):  # means over the same steps, of other blocks
        assert getattr(a.curve[0], name) == pytest.approx(getattr(b.curve[0], name), rel=0.3), name
    assert [x.label for x in a.frequency] == [x.label for x in b.frequency]
    size = text.facts["splits"]["heldout"]
    assert a.bits_per_byte == bits_per_byte(a.heldout_nll, size["tokens"], size["bytes"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "flax" / "final")
    with torch.no_grad():
        path = model.lm_head(model.get_input_embeddings()(torch.tensor([3, 4])))[:, [3, 4]]
    torch.testing.assert_close(path, torch.tensor(ours.direct_path), rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "flax" / "result.json").read_text())
    assert record["result"]["heldout_nll"] == a.heldout_nll
    assert flax_run.train(job(tiny(), tmp_path / "flax", arm), text, counts, [3, 4]) == ours


def test_what_the_backend_lacks_is_refused(text, counts, tiny, tmp_path):
    with pytest.raises(RunError, match="model = 'gpt2' with the flax backend"):
        flax_run.train(job(tiny(model="gpt2"), tmp_path, "tied"), text, counts, [])
    with pytest.raises(RunError, match="schedules and vectors need the torch backend"):
        flax_run.train(job(tiny(), tmp_path, "tied+untie_at=3"), text, counts, [])
