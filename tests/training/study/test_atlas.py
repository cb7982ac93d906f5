"""Tests of the committed atlas: page against table, rows against grids, and scores against direct computation."""

import csv
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.study.planted_study import planted
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import atlas, atlas_paths, atlas_predictors, study_curves, tuned_rates
from tiewise.inspection.running.loaded import open_model
from tiewise.training.study.grid import StudyGrid
from tiewise.training.study.study import command_for, flat_settings

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs"))  # make_atlas imports atlas_tuning
MADE = runpy.run_path(str(ROOT / "docs" / "make_atlas.py"))
STUDIES = MADE["studies"]()


def test_atlas_page_and_figures_match_table():
    text = (ROOT / "docs" / "dev" / "atlas.md").read_text(encoding="utf-8")
    assert MADE["page"](text, MADE["studies"]()) == text
    for name, drawn in MADE["FIGURES"].items():
        committed = (ROOT / "docs" / "dev" / f"atlas-{name}.svg").read_text(encoding="utf-8")
        assert committed == drawn(MADE["studies"]()[name])


@torch.no_grad()
def test_direct_path_share_matches_projection_and_is_one_without_layer_output(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model, ids = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), torch.randint(0, 60, (3, 12))
    for weight in (model.lm_head.weight, *(layer.mlp.down_proj.weight for layer in model.model.layers)):
        weight *= 30
    model.save_pretrained(tmp_path / "model")
    found, caught = atlas_paths.ablate_direct_path(open_model(tmp_path / "model"), ids), []
    model.model.norm.register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    said, e, (h,) = model(input_ids=ids, labels=ids), model.model.embed_tokens(ids), caught
    scale = (h.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
    z, ours = (x[:, :-1] - x[:, :-1].mean(-1, keepdim=True) for x in (said.logits, model.lm_head(e * scale)))
    rest = model.lm_head(torch.nn.functional.rms_norm(h - e, (16,), eps=model.config.rms_norm_eps))[:, :-1]
    loss = torch.nn.functional.cross_entropy(rest.flatten(0, 1), ids[:, 1:].flatten())
    assert found["loss"] == pytest.approx(said.loss.item(), rel=1e-5)
    assert found["logits"] == pytest.approx(((ours * z).sum() / z.square().sum()).item(), abs=1e-5)
    assert found["taken away"] == pytest.approx((loss - said.loss).item(), abs=1e-5)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path / "empty")
    assert atlas_paths.ablate_direct_path(open_model(tmp_path / "empty"), ids)["logits"] == pytest.approx(1, abs=1e-6)


def test_predictor_score_is_leave_one_out_error():
    draw = np.random.default_rng(0)
    columns = {name: draw.normal(size=12) for name in atlas_predictors.PREDICTORS}
    gap = 0.5 * columns["lookup share"] + draw.normal(size=12) / 10
    rows = [
        {"tied − untied": str(gap[i])} | {name: str(column[i]) for name, column in columns.items()} for i in range(12)
    ]
    (line,) = (line for line in atlas_predictors.score_predictors(rows).splitlines() if "lookup share" in line)
    wrong = []
    for i in range(12):
        others = np.arange(12) != i
        slope, start = np.polyfit(columns["lookup share"][others], gap[others], 1)
        wrong.append(gap[i] - start - slope * columns["lookup share"][i])
    assert float(line.split("|")[-2]) == pytest.approx(np.sqrt(np.mean(np.square(wrong))), abs=5e-4)


@pytest.mark.parametrize("study", STUDIES)
def test_atlas_rows_match_cells_of_committed_grid(study):
    cells = StudyGrid.named(study).cells()
    assert {row["cell"] for row in STUDIES[study]} == set(cells)
    for row in STUDIES[study]:
        assert shlex.split(row["command"]) == shlex.split(command_for(cells[row["cell"]], f"runs/{row['cell']}"))
        assert int(row["seeds"]) == cells[row["cell"]].seeds >= 3
        assert row["width"] == str(flat_settings(cells[row["cell"]])["width"])


def test_atlas_rows_give_sign_only_for_significant_differences():
    for row in (row for rows in STUDIES.values() for row in rows):
        low, high, p = (float(row[name]) for name in ("heldout_low", "heldout_high", "p_holm"))
        within = low > -0.02 and high < 0.02
        equivalent = float(row["p_equivalence"]) < 0.05
        assert row["sign"] == ("0" if p >= 0.05 or equivalent else "-1" if high < 0 else "1")
        assert row["sign"] == "0" or low > 0 or high < 0
        assert within or not equivalent
        undecided = "equivalent" if equivalent else "undecided"
        assert row["verdict"] == {"-1": "better", "0": undecided, "1": "worse"}[row["sign"]]


def test_gathered_rows_replace_only_rows_of_same_study(tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "ATLAS", tmp_path / "atlas.csv")
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(tuned_rates, "CSV_FILE", tmp_path / "tuned_rates.csv")
    for name, noise in (("a", 0.002), ("b", 0.002), ("a", 0.004)):
        made = planted(tmp_path / name, axes={"width": [32, 64], "tokenizer": ["bpe:512"]}, noise=noise)
        made.folder.mkdir(exist_ok=True)
        made.grid.save(made.folder)
        made.save()
        atlas.main([made.folder])
    with (tmp_path / "atlas.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [(row["study"], row["width"], row["steps"]) for row in read] == [
        ("b", "32", "600"), ("b", "64", "600"), ("a", "32", "600"), ("a", "64", "600"),
    ]  # fmt: skip
    assert float(read[2]["heldout"]) == pytest.approx(made.results[0].heldout.mean, rel=1e-5)
