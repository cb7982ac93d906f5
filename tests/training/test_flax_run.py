"""A run by the Flax backend: the same start, files and measures as PyTorch's, and nothing that it does not have."""

import json

import jax
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiewise.hf
from tiewise.core.errors import RunError
from tiewise.core.spec import BoundarySpec
from tiewise.training.compare import finish
from tiewise.training.display import Display
from tiewise.training.evaluate import bits_per_byte
from tiewise.training.run import train
from tiewise.training.settings import Job
from tiewise.training.start import start

assert tiewise.hf  # factored checkpoints load through it


def job(settings, folder, arm):
    return Job(arm, BoundarySpec.parse(arm), 1, settings, folder)


@pytest.mark.parametrize(
    "arm", ["tied", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("untied", "factored:8"))]
)
def test_both_backends_start_alike_and_end_close(arm, text, counts, tiny, tmp_path):
    theirs = train(job(tiny(), tmp_path / "torch", arm), text, counts, [3, 4])
    ours = train(job(tiny(), tmp_path / "flax", arm), text, counts, [3, 4])
    a, b = ours.result, theirs.result
    for name in (
        "initial_nll",
        "predicted_initial_nll",
        "init_std",
        "parameters",
        "total_parameters",
        "trainable_parameters",
        "bytes",
        "training_bytes",
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
    assert train(job(tiny(), tmp_path / "flax", arm), text, counts, [3, 4]) == ours


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "gpt2"}, "model = 'gpt2' with the flax backend"),
        ({"accumulate": 2}, "accumulate = 2 with the flax backend"),
        ({"minutes": 3.0}, "minutes = 3.0 with the flax backend"),
        ({"arms": ("tied+untie_at=3",)}, "schedules and vectors need the torch backend"),
        ({"arms": ("tied",), "seed": 1}, "backend is a setting of compare"),
        ({"backend": "tpu"}, "backend = 'tpu'; choose torch or flax"),
    ],
)
def test_what_the_backend_lacks_is_refused(tiny, changes, said):
    with pytest.raises(RunError, match=said):
        tiny(**{"backend": "flax", **changes}).checked()


@pytest.mark.slow
def test_a_comparison_by_flax_has_the_report_of_every_comparison(tiny, tmp_path):
    """`tiewise compare --backend flax`: the same results.json and page, with the versions of what trained."""
    settings = tiny(backend="flax", arms=("tied", "untied", "factored:8"), seeds=2, steps=12).checked()
    out = tmp_path / "run"
    start(settings, out, "tiewise compare", Display(print), overwrite=False)
    found = finish(out, Display(print))
    assert [(r.arm, r.seed) for r in found.runs] == [(a, s) for s in (1, 2) for a in ("tied", "untied", "factored:8")]
    assert found.env["jax"] == jax.__version__
    assert found.setting["backend"] == "flax"
    assert {d.arm for d in found.differences if d.metric == "heldout_nll"} == {"untied", "factored:8"}
    assert json.loads((out / "results.json").read_text())["setting"]["backend"] == "flax"
    again = finish(out, Display(print))
    assert again.runs == found.runs
