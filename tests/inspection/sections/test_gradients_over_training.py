"""Logged gradients by path of a comparison, against plain autograd on saved models and batches."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from tests.inspection.test_tables_over_seeds import make_comparison, make_result
from tests.training.conftest import prose
from tests.training.test_trainer import two_leaves

from tiewise.core.errors import RunError
from tiewise.inspection.sections.gradients_over_training import gradients_over_training_of, logged_paths, measurement_of
from tiewise.inspection.workspace import NotApplicable, comparison_of
from tiewise.training.compare import Display, finish, start
from tiewise.training.folder import folder_name
from tiewise.training.kinds import decoder
from tiewise.training.results import CurvePoint
from tiewise.training.settings import Settings
from tiewise.training.trainer import TiewiseTrainer

STEPS = 40  # logging windows of two steps
SAMPLED = (1, 2, 3, 17, 18, 39, 40)  # three full windows and half of a fourth


class SavingTrainer(TiewiseTrainer):
    """Trainer that saves the model before each sampled step, and the batch."""

    seen = {}  # noqa: RUF012 - shared by all runs; keys are the run's folder and the step

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = self.state.global_step + 1
        if step in SAMPLED:
            of = (*Path(self.args.output_dir).parts[-2:], step)
            self.seen[of] = copy.deepcopy(model), inputs["input_ids"].clone()
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.fixture(scope="module")
def trained_comparison(tmp_path_factory):
    """Train a comparison of tied and untied with two seeds, and save its sampled steps."""
    root = tmp_path_factory.mktemp("course")
    (root / "text.txt").write_text(prose(150), encoding="utf-8")
    sizes = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "steps": STEPS, "seeds": 2}
    settings = Settings(arms=("tied", "untied"), text=(str(root / "text.txt"),), tokenizer="bpe:300", **sizes)
    with pytest.MonkeyPatch.context() as patch:
        start(settings, root / "out", "tiewise compare", Display(lambda line: None))
        patch.setattr(decoder, "TiewiseTrainer", SavingTrainer)
        finish(root / "out", Display(lambda line: None))
    return root / "out"


def recompute_norms(arm, seed, step):
    """Return ‖A‖, ‖B‖ and their cosine, by plain autograd."""
    model, ids = SavingTrainer.seen[folder_name(arm), f"seed-{seed}", step]
    a, b, _ = two_leaves(model, [ids])
    return a.norm().item(), b.norm().item(), F.cosine_similarity(a.flatten(), b.flatten(), 0).item()


def test_logged_paths_match_gradients_recomputed_from_saved_models(trained_comparison):
    comparison, compared = comparison_of(trained_comparison), 0
    for arm in ("tied", "untied"):
        found = logged_paths(comparison.of(arm))
        for row, steps in enumerate(zip(found.first, found.last, strict=True)):
            if set(steps) <= set(SAMPLED):
                for seed in comparison.seeds:
                    one, two = (recompute_norms(arm, seed, step) for step in steps)
                    mean = [(x + y) / 2 for x, y in zip(one, two, strict=True)]
                    place = comparison.seeds.index(seed)
                    assert found.a[row, place] == pytest.approx(mean[0], rel=1e-4)
                    assert found.b[row, place] == pytest.approx(mean[1], rel=1e-4)
                    assert found.share[row, place] == pytest.approx(mean[1] / (mean[0] + mean[1]), rel=1e-4)
                    if arm == "tied":
                        assert found.cosine[row, place] == pytest.approx(mean[2], abs=1e-4)
                    else:
                        assert math.isnan(found.cosine[row, place])
                    compared += 1
    assert compared == 2 * 2 * 3


def test_gradients_over_training_of_covers_the_run_in_tenths(trained_comparison):
    for arm in ("tied", "untied"):
        found, paths = (
            gradients_over_training_of(trained_comparison, arm),
            logged_paths(comparison_of(trained_comparison).of(arm)),
        )
        assert [*zip(paths.first, paths.last, strict=True)] == [(s - 1, s) for s in range(2, STEPS + 1, 2)]
        (tenths,) = found.listings
        assert [row[0] for row in tenths.rows] == [*(f"{4 * k + 1}–{4 * k + 4}" for k in range(10)), "1–40"]
        assert found["head path's share of both norms"].value == pytest.approx(paths.share.mean())
        by_seed = paths.share[-2:].mean(0) - paths.share[:2].mean(0)
        moved = found["last tenth − first tenth"]
        assert moved.value == pytest.approx(by_seed.mean())
        assert moved.high - moved.low > 0


def results_with_curves(curves):
    """Return results with these curves, one per seed: [(step, a, b)] or [(step, a, b, cosine)]."""
    made = []
    for seed, curve in enumerate(curves, 1):
        points = [CurvePoint(n, n, path_a=a, path_b=b, cosine=c[0] if c else None) for n, a, b, *c in curve]
        made.append(make_result("tied", seed, curve=points))
    return made


def test_measurement_of_weights_windows_by_steps_and_labels_ranges():
    curve = [(60, 1.0, 9.0), (90, 1.0, 4.0), (150, 1.0, 1.0)]
    found = measurement_of(logged_paths(results_with_curves([curve, curve])))
    share = found["head path's share of both norms"]
    assert share.value == pytest.approx((60 * 0.9 + 30 * 0.8 + 60 * 0.5) / 150)
    assert share.low == pytest.approx(share.value)  # equal seeds
    # three of the ten tenths contain a window
    assert [row[0] for row in found.listings[0].rows] == ["1–60", "61–90", "91–150", "1–150"]


def test_logged_paths_leaves_out_steps_that_a_seed_did_not_measure():
    found = logged_paths(results_with_curves([[(1, 1.0, 1.0), (2, 1.0, 3.0)], [(1, 1.0, None), (2, 1.0, 1.0)]]))
    assert (found.first.tolist(), found.last.tolist(), found.share.tolist()) == ([2], [2], [[0.75, 0.5]])
    assert logged_paths(results_with_curves([[(1, None, None)]])).last.tolist() == []


def test_measurement_of_one_seed_and_one_tenth_has_no_interval_or_change():
    found = measurement_of(logged_paths(results_with_curves([[(1, 1.0, 1.0)]])))
    assert math.isnan(found["head path's share of both norms"].low)
    assert math.isnan(found["last tenth − first tenth"].value)
    assert (found.answer, found.notes) == ("no larger gradient detected", ("over 1 seed, before clipping",))


def test_gradients_over_training_of_refuses_unusable_folders_and_arms(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        gradients_over_training_of(tmp_path, "tied")
    (tmp_path / "results.json").write_text(
        json.dumps(make_comparison(results_with_curves([[(1, None, None)]])).record())
    )
    with pytest.raises(NotApplicable, match="tied measured no gradients by path"):
        gradients_over_training_of(tmp_path, "tied")


def arm(shares=tuple(0.9 - 0.3 * k / 9 for k in range(10)), spread=0.001):
    """Return two seeds whose head path's share follows `shares`, in windows of ten steps."""
    points = [[(10 * k, 1 - s, s, c) for k, s in enumerate(shares, 1)] for c in (0.1, 0.3)]
    found = logged_paths(results_with_curves(points))
    apart = np.array([-spread, spread])
    return replace(found, a=found.a - apart, b=found.b + apart)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (arm(), "the head's gradient is larger; the head's share fell during training"),
        (arm((0.1,) * 5 + (0.4,) * 5), "the lookup's gradient is larger; the head's share rose during training"),
        (arm((0.5,) * 10), "no larger gradient detected; the head's share did not change detectably during training"),
    ],
)
def test_answer_names_the_stronger_path_and_its_change_over_training(found, answer):
    assert measurement_of(found).answer == answer


def test_measurement_of_draws_norms_and_cosines_as_means_over_seeds():
    found = measurement_of(arm())
    assert [found[f"{end} cosine of the two paths"].value for end in ("lowest", "highest")] == pytest.approx([0.2, 0.2])
    by_name = {curve.name: curve for curve in found.curves}
    assert by_name["Head path's share over training"].y == pytest.approx([0.9 - 0.3 * k / 9 for k in range(10)])
    assert by_name["Norm of the lookup path's gradient"].y[0] == pytest.approx(0.1)
    assert len(by_name) == 4
