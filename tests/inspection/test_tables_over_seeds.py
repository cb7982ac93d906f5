"""A comparison's tables over seeds, on runs with planted common parts, noise, rotations and shared starts."""

import json
import math
from dataclasses import MISSING, fields

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from tests.inspection.tables.tiny_tables import llama

from tiewise.core.errors import RunError
from tiewise.core.estimates import Estimate
from tiewise.inspection.tables.align_tables import CKA, CKA_CURVE, CKA_LINE, toward
from tiewise.inspection.tables.table_maps import AlignSettings
from tiewise.inspection.tables_over_seeds import AGAIN, ONE_MODEL, OTHER_SEED, SAME_SEED, over_pairs, over_seeds
from tiewise.inspection.workspace import Workspace
from tiewise.training.folder import folder_name, write_json
from tiewise.training.results import Comparison, RunResult

ROWS, WIDTH = 1500, 16


def gaussian(*seed, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, WIDTH))


def train_table(common, noise, *seed):
    """Return the common part after a random rotation, plus noise, as one training would leave it."""
    turn = scipy.linalg.qr(gaussian(*seed, 1, rows=WIDTH))[0]
    return common @ turn + noise * gaussian(*seed, 2)


def make_comparison(runs):
    """Return a comparison of these runs."""
    meta = {"version": "0", "command": "c", "demo": False, "setting": {}, "data": {}, "env": {}}
    arms, seeds = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("arm", "seed"))
    return Comparison(arms=arms, seeds=sorted(seeds), reference=arms[0], runs=runs, **meta)


def make_result(arm, seed, **known):
    """Return a run result with placeholders in all other fields."""
    needed = [one.name for one in fields(RunResult) if one.default is MISSING and one.default_factory is MISSING]
    named = {"arm": arm, "seed": seed, "frequency": [], "parameters": {"body": 1}}
    return RunResult(**dict.fromkeys(needed, 1) | named | known)


def measure_run(run):
    return over_seeds(run, AlignSettings(sampled=300, subspaces=()), Workspace.training_counts)


def write_text(folder, counts):
    """Write a prepared text whose training split has these token counts, in random order."""
    folder.mkdir(parents=True)
    tokens = {"train": np.repeat(np.arange(len(counts)), counts), "tune": np.zeros(1), "heldout": np.zeros(1)}
    for name, ids in tokens.items():
        np.random.default_rng(0).permutation(ids).astype("<u2").tofile(folder / f"{name}.bin")
    sizes = {name: {"tokens": len(ids)} for name, ids in tokens.items()}
    (folder / "data.json").write_text(json.dumps({"tokenizer": {"vocab": len(counts), "eos_id": 0}, "splits": sizes}))


def write_run(where, models, losses=None, counts=(1, 2, 5, 9) * (ROWS // 4)):
    """Write a finished comparison from {arm: {seed: tables}} and optional {(arm, seed): loss}; return its folder."""
    write_text(where / "data", counts)
    runs = []
    for arm, found in models.items():
        for seed, tables in found.items():
            llama(where / folder_name(arm) / f"seed-{seed}" / "final", *(table.astype(np.float32) for table in tables))
            runs.append(make_result(arm, seed, heldout_nll=(losses or {}).get((arm, seed), 4.0)))
    (where / "run.yaml").write_text("")
    write_json(where / "results.json", make_comparison(runs).record())
    return where


def planted(seeds, share=1.0, noise=(2.0, 0.5, 0.5)):
    """Return untied models with unrelated tables, and tied models that share the output's common part."""
    first, second, third = (gaussian(100 + part) for part in range(3))
    tied = share * second + math.sqrt(1 - share**2) * third
    return {
        "untied": {s: [train_table(first, noise[0], s, 0), train_table(second, noise[1], s, 1)] for s in seeds},
        "tied": {s: [train_table(tied, noise[2], s, 2)] for s in seeds},
    }


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """Measure a comparison of three seeds."""
    return measure_run(write_run(tmp_path_factory.mktemp("three") / "run", planted((1, 2, 3))))


def test_over_seeds_finds_the_planted_lean_by_every_measure(three_seeds):
    assert (three_seeds.untied, three_seeds.arms, three_seeds.seeds, three_seeds.tokens) == (
        "untied",
        ("tied",),
        (1, 2, 3),
        ROWS,
    )
    sides = {x.measure: toward(x.difference) for x in three_seeds.leanings if x.seeds == OTHER_SEED}
    assert sides == {
        "identity": "neither",
        **dict.fromkeys(("orthogonal", "linear", "neighbours", CKA, CKA_LINE, CKA_CURVE), "output"),
    }
    beside = [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
    assert [pair[:2] for pair in three_seeds.leaning("tied", "linear").pairs] == beside
    assert [pair[:2] for pair in three_seeds.leaning("tied", "linear", SAME_SEED).pairs] == [(1, 1), (2, 2), (3, 3)]
    kinds = [*(AGAIN.format("untied", end) for end in ("input", "output")), ONE_MODEL.format("untied")]
    rotated = {
        of: over_pairs(pairs).value for (of, measure), pairs in three_seeds.again.items() if measure == "orthogonal"
    }
    assert list(rotated) == [*kinds, AGAIN.format("tied", "table")]
    assert rotated[kinds[1]] > 0.7 > 0.3 > rotated[kinds[0]]
    assert abs(rotated[kinds[2]]) < 0.05


def test_same_seed_leaning_has_the_mean_and_t_interval_of_its_pairs(three_seeds):
    lean = three_seeds.leaning("tied", "orthogonal", SAME_SEED)
    differences = [second - first for *_, first, second in lean.pairs]
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(differences), scipy.stats.sem(differences))
    assert lean.difference == Estimate(*map(pytest.approx, (np.mean(differences), low, high)), 3)


def mean_without_seed(pairs, seed):
    """Return the mean over the pairs without a seed; None keeps all pairs."""
    return np.mean([score for a, b, score in pairs if seed not in (a, b)])


def jackknife_interval(whole, without):
    """Return Tukey's interval from the pseudo-values whole + (n − 1)·(whole − without)."""
    n = len(without)
    pseudo = n * whole - (n - 1) * np.array(without)
    half = scipy.stats.t.ppf(0.975, n - 1) * np.std(pseudo, ddof=1) / math.sqrt(n)
    return pytest.approx((whole - half, whole + half))


def test_other_seed_leaning_has_a_jackknife_interval_over_seeds(tmp_path):
    seeds = (1, 2, 3)
    found = measure_run(write_run(tmp_path / "run", planted(seeds, share=0.7)))
    own = [found.again[AGAIN.format(*of), CKA] for of in (("tied", "table"), ("untied", "output"))]
    for pairs in own:
        assert [pair[:2] for pair in pairs] == [(1, 2), (1, 3), (2, 3)]
        score = over_pairs(pairs)
        assert score.value == pytest.approx(mean_without_seed(pairs, None))
        assert (score.low, score.high) == jackknife_interval(
            score.value, [mean_without_seed(pairs, seed) for seed in seeds]
        )

    lean = found.leaning("tied", CKA)
    scores = [(a, b, second) for a, b, _, second in lean.pairs]
    assert (lean.output.low, lean.output.high) == jackknife_interval(
        mean_without_seed(scores, None), [mean_without_seed(scores, s) for s in seeds]
    )

    def corrected(seed):
        return mean_without_seed(scores, seed) / math.sqrt(math.prod(mean_without_seed(pairs, seed) for pairs in own))

    assert lean.corrected["output"].value == pytest.approx(corrected(None))
    expected = jackknife_interval(corrected(None), [corrected(seed) for seed in seeds])
    assert (lean.corrected["output"].low, lean.corrected["output"].high) == expected


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_corrected_cka_does_not_depend_on_how_noisy_a_table_is(tmp_path, share):
    """CKA of two Gaussian parts with a common share s is s², plus little by chance."""
    for number, noise in enumerate(((2.0, 0.3, 0.3), (0.3, 2.0, 1.5))):
        run = write_run(tmp_path / str(number), planted((1, 2, 3), share, noise))
        lean = measure_run(str(run)).leaning("tied", CKA)
        assert lean.corrected["output"].value == pytest.approx(share**2, abs=0.06)
        assert abs(lean.corrected["input"].value) < 0.06
    assert lean.output.value < 0.5 * share**2  # noise lowers the uncorrected value


def test_shared_start_biases_only_pairs_of_the_same_seed(tmp_path):
    models = planted((1, 2, 3))
    for seed in (1, 2, 3):
        start = 3 * gaussian(seed, 9)
        models["untied"][seed][0] += start
        models["tied"][seed][0] += start
    found = measure_run(write_run(tmp_path / "run", models))
    assert toward(found.leaning("tied", "orthogonal", SAME_SEED).difference) == "input"
    assert found.leaning("tied", "orthogonal", SAME_SEED).input.value > 0.5
    assert abs(found.leaning("tied", "orthogonal").input.value) < 0.1
    assert toward(found.leaning("tied", CKA).difference) == "output"


def zipf_counts():
    return np.maximum(3000 // np.random.default_rng(5).permutation(np.arange(1, ROWS + 1)), 1) - 1


def add_frequency_curve(models, counts):
    """Add a curve in log frequency to the models, in a different direction for each table."""
    f = np.log1p(counts)
    curve = (f - f.mean()) / f.std()
    curve = curve + curve**2 / 2
    strong = {("untied", 1): 6, ("tied", 0): 6}
    for arm, found in models.items():
        for seed, tables in found.items():
            for at, table in enumerate(tables):
                table += strong.get((arm, at), 0) * np.outer(curve, gaussian(seed, 50 + at, rows=1))
    return models


def test_cka_without_frequency_vanishes_if_tables_share_only_frequency(tmp_path):
    """Tied and output tables share only a curve in frequency, which CKA without frequency removes."""
    counts = zipf_counts()
    models = add_frequency_curve(planted((1, 2, 3), share=0.0, noise=(0.5, 0.5, 0.5)), counts)
    found = measure_run(write_run(tmp_path / "run", models, counts=counts))
    assert found.counted == counts.sum()
    whole, line, curve = (found.leaning("tied", measure) for measure in (CKA, CKA_LINE, CKA_CURVE))
    assert whole.corrected["output"].value > 0.95
    assert toward(whole.corrected["difference"]) == "output"
    f = np.log1p(counts)
    powers = np.column_stack([f**power for power in range(4)])
    for share, (arm, at) in zip(found.frequency.values(), (("untied", 0), ("untied", 1), ("tied", 0)), strict=True):
        tables = [models[arm][seed][at].astype(np.float32).astype(float) for seed in (1, 2, 3)]
        left = [np.square(t - powers @ scipy.linalg.lstsq(powers, t)[0]).sum() for t in tables]
        whole_of = [np.square(t - t.mean(0)).sum() for t in tables]
        assert share.value == pytest.approx(1 - np.mean(np.divide(left, whole_of)), abs=1e-9)
    assert line.corrected["output"].value > 0.3  # a line in frequency leaves the curved part
    assert abs(curve.corrected["output"].value) < 0.05
    assert abs(curve.corrected["input"].value) < 0.05


def test_cka_without_frequency_keeps_other_common_parts_and_needs_the_text(tmp_path):
    counts = zipf_counts()
    models = add_frequency_curve(planted((1, 2, 3), share=0.7, noise=(0.5, 0.5, 0.5)), counts)
    run = write_run(tmp_path / "run", models, counts=counts)
    curve = measure_run(run).leaning("tied", CKA_CURVE)
    assert curve.corrected["output"].value == pytest.approx(0.49, abs=0.06)
    assert toward(curve.corrected["difference"]) == "output"
    apart = curve.corrected["output"].value - curve.corrected["input"].value
    assert curve.corrected["difference"].value == pytest.approx(apart, abs=1e-12)
    (run / "data" / "data.json").unlink()
    found = measure_run(run)
    assert found.counted is None
    assert "difference" in found.leaning("tied", CKA).corrected
    assert found.leaning("tied", CKA_CURVE) is None
    assert found.left_out[-1].startswith("CKA without frequency: no prepared text in")


def test_over_seeds_gives_no_answer_for_one_seed_and_no_interval_for_two(tmp_path):
    one = measure_run(write_run(tmp_path / "one", planted((1,))))
    assert {x.seeds for x in one.leanings} == {SAME_SEED}
    assert {toward(x.difference) for x in one.leanings} == {"not known"}
    assert [what for what, measure in one.again if measure == "linear"] == [ONE_MODEL.format("untied")]
    two = measure_run(write_run(tmp_path / "two", planted((1, 2))))
    assert two.leaning("tied", "orthogonal").difference.rows == 2
    assert math.isnan(two.leaning("tied", "orthogonal").difference.low)  # both pairs use the same two seeds
    assert toward(two.leaning("tied", "orthogonal").difference) == "not known"
    assert {len(pairs) for (what, _), pairs in two.again.items() if "two seeds" in what} == {1}


def test_over_seeds_leaves_out_and_names_diverged_and_unfinished_models(tmp_path):
    models = planted((1, 2, 3))
    run = write_run(tmp_path / "run", models, {("tied", 2): math.nan})
    (run / "untied" / "seed-3" / "final").rename(run / "untied" / "seed-3" / "elsewhere")
    found = measure_run(run)
    assert found.left_out == ("untied, seed 3: not finished", "tied, seed 2: diverged")
    assert found.seeds == (1, 2)
    assert {x.seeds for x in found.leanings} == {SAME_SEED}


def test_over_seeds_refuses_a_run_without_tied_and_untied_arms(tmp_path):
    models = planted((1,))
    for arm, kind in (("tied", "two tables"), ("untied", "one table")):
        run = write_run(tmp_path / arm, {arm: models[arm]})
        with pytest.raises(RunError, match=f"no finished arm with {kind}; compare at least tied and untied"):
            measure_run(run)
    with pytest.raises(RunError, match=r"results\.json cannot be read"):
        measure_run(tmp_path)
