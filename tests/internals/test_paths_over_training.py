"""Both paths over a comparison's training against gradients recomputed by plain autograd from saved weights."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
import transformers as tr
from safetensors.torch import load_file, save_file
from tests.training.conftest import prose
from tiewise.internals.paths_over_training import paths_of, paths_over_training

from tiewise.core.errors import RunError
from tiewise.training.compare import finish, start
from tiewise.training.display import Display
from tiewise.training.folder import folder_name
from tiewise.training.kinds import decoder
from tiewise.training.results import Comparison, CurvePoint, RunResult
from tiewise.training.settings import Settings
from tiewise.training.trainer import TiewiseTrainer

STEPS = 40  # logging windows of two steps
SAMPLED = (1, 2, 3, 17, 18, 39, 40)  # three windows, and a half of one


class Saving(TiewiseTrainer):
    """Saves the weights before sampled steps and the batch of each."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = self.state.global_step + 1
        if step in SAMPLED:
            folder = Path(self.args.output_dir).parent.parent / "seen" / "-".join(Path(self.args.output_dir).parts[-2:])
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
            save_file(tensors, folder / f"{step}.safetensors")
            save_file({"ids": inputs["input_ids"].clone()}, folder / f"{step}.batch")
            model.config.save_pretrained(folder)
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A comparison of tied and untied, two seeds, whose sampled steps were saved."""
    root = tmp_path_factory.mktemp("course")
    (root / "text.txt").write_text(prose(0, 150), encoding="utf-8")
    sizes = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "steps": STEPS, "seeds": 2}
    settings = Settings(arms=("tied", "untied"), text=(str(root / "text.txt"),), tokenizer="bpe:300", **sizes)
    with pytest.MonkeyPatch.context() as patch:
        start(settings, root / "out", "tiewise compare", Display(lambda line: None))
        patch.setattr(decoder, "TiewiseTrainer", Saving)
        finish(root / "out", Display(lambda line: None))
    return root / "out"


def recomputed(out, arm, seed, step):
    """‖A‖, ‖B‖ and their cosine in a model of transformers' own, whose head has a table apart from the lookup's."""
    folder = out / "seen" / f"{folder_name(arm)}-seed-{seed}"
    weights, ids = load_file(folder / f"{step}.safetensors"), load_file(folder / f"{step}.batch")["ids"]
    config = json.loads((folder / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    known = {k: config[k] for k in (*sizes, "num_key_value_heads", "rms_norm_eps", "rope_parameters") if k in config}
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**known, tie_word_embeddings=False))
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    model.load_state_dict(weights)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    a, b = model.model.embed_tokens.weight.grad, model.lm_head.weight.grad
    return a.norm().item(), b.norm().item(), F.cosine_similarity(a.flatten(), b.flatten(), 0).item()


def test_the_shares_are_those_of_gradients_recomputed_from_weights_and_batches(trained):
    found = paths_over_training(trained)
    assert [arm.arm for arm in found.arms] == ["tied", "untied"]
    assert found.batch_tokens == 64
    compared = 0
    for arm in found.arms:
        for point in arm.points:
            if {point.first, point.step} <= set(SAMPLED):
                for place, seed in enumerate(arm.seeds):
                    one, two = (recomputed(trained, arm.arm, seed, step) for step in (point.first, point.step))
                    mean = [(x + y) / 2 for x, y in zip(one, two, strict=True)]
                    assert point.a[place] == pytest.approx(mean[0], rel=1e-4)
                    assert point.b[place] == pytest.approx(mean[1], rel=1e-4)
                    assert point.share_b[place] == pytest.approx(mean[1] / (mean[0] + mean[1]), rel=1e-4)
                    if arm.arm == "tied":
                        assert point.cosine[place] == pytest.approx(mean[2], abs=1e-4)
                    else:
                        assert math.isnan(point.cosine[place])
                    compared += 1
    assert compared == 2 * 2 * 3


def test_windows_cover_the_run_and_tenths_divide_it(trained):
    for arm in paths_over_training(trained).arms:
        assert [(p.first, p.step) for p in arm.points] == [(s - 1, s) for s in range(2, STEPS + 1, 2)]
        assert [(t.first, t.last) for t in arm.tenths] == [(4 * k + 1, 4 * k + 4) for k in range(10)]
        assert arm.whole.share_b.value == pytest.approx(np.mean([t.share_b.value for t in arm.tenths]))
        change = [p.share_b for p in (*arm.points[-2:], *arm.points[:2])]
        by_seed = [(x[0] + x[1] - x[2] - x[3]) / 2 for x in zip(*change, strict=True)]
        assert arm.change().value == pytest.approx(np.mean(by_seed))
        assert arm.change().high - arm.change().low > 0


def made(curves, steps, arm="tied"):
    """A comparison with these curves, one per seed: [(step, a, b)]."""
    rest = dict.fromkeys(("train_nll", "heldout_nll", "perplexity", "bits_per_byte"), 1.0)
    rest |= dict.fromkeys(("tokens_per_second", "seconds", "init_std", "learning_rate"), 1.0)
    rest |= {"predicted_initial_nll": 1.0, "initial_nll": 1.0, "bytes": 1}
    runs = [
        RunResult(
            arm,
            seed,
            steps,
            frequency=[],
            parameters={},
            total_parameters=1,
            curve=[CurvePoint(step, step, path_a=a, path_b=b) for step, a, b in curve],
            **rest,
        )
        for seed, curve in enumerate(curves, 1)
    ]
    shown = {"version": "0", "command": "", "demo": False, "setting": {}, "data": {}, "env": {}}
    return Comparison(arms=[arm], seeds=list(range(1, len(curves) + 1)), reference=arm, runs=runs, **shown)


def test_ranges_count_windows_by_their_steps_and_say_which_steps_they_are():
    curve = [(60, 1.0, 9.0), (90, 1.0, 4.0), (150, 1.0, 1.0)]
    (arm,) = paths_of(made([curve, curve], 150)).arms
    assert (arm.whole.first, arm.whole.last) == (1, 150)
    assert arm.whole.share_b.value == pytest.approx((60 * 0.9 + 30 * 0.8 + 60 * 0.5) / 150)
    assert arm.whole.share_b.low == pytest.approx(arm.whole.share_b.value)  # equal seeds
    assert [(t.first, t.last) for t in arm.tenths] == [(1, 60), (61, 90), (91, 150)]  # three windows fill three tenths


def test_a_step_that_one_seed_did_not_measure_is_left_out():
    (arm,) = paths_of(made([[(1, 1.0, 1.0), (2, 1.0, 3.0)], [(1, 1.0, None), (2, 1.0, 1.0)]], 2)).arms
    assert [(p.first, p.step) for p in arm.points] == [(2, 2)]
    assert [one.value for one in arm.means("share_b")] == [pytest.approx(0.625)]
    assert paths_of(made([[(1, None, None)]], 1)).arms == ()


def test_one_seed_has_no_interval():
    (arm,) = paths_of(made([[(1, 1.0, 1.0)]], 1)).arms
    assert math.isnan(arm.whole.share_b.low)
    assert math.isnan(arm.change().value)


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        paths_over_training(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(made([[(1, None, None)]], 1).record()))
    with pytest.raises(RunError, match="no gradients by path"):
        paths_over_training(tmp_path)
