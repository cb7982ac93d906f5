"""Tests of ALBERT runs against model outputs, uninterrupted runs and published recipes."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tests.training.conftest import differing_fields, jobs_on, prose, refusal
from transformers import AutoModelForPreTraining, AutoTokenizer

import tiewise.models  # noqa: F401
from tiewise.core.errors import RunError
from tiewise.training.data.sentence_pairs import MARKS
from tiewise.training.data.training_rows import add_marks
from tiewise.training.folder import METRICS, read_json, read_lines
from tiewise.training.kinds import albert
from tiewise.training.kinds.albert import ACCURACIES, KIND, AlbertOptions, arm_config, make_rows
from tiewise.training.run import train
from tiewise.training.settings import Settings, recipe, recipes

SMALL = {"width": 16, "layers": 2, "heads": 2, "length": 24, "batch": 4, "steps": 12, "measured": 480}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    said = [f"{words.capitalize()}." for words in prose(640, known=40, each=4).split("\n\n")]
    rows = [json.dumps({"text": " ".join(said[i : i + 8])}) for i in range(0, 640, 8)]
    path = tmp_path_factory.mktemp("albert") / "text.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


@pytest.fixture(scope="module")
def settings(source):
    of_text = {"text": (source,), "tokenizer": "bpe:300", "kind": "albert", "model": "albert"}
    own = AlbertOptions(optimizer="adamw")
    return Settings(arms=("factored:8",), learning_rate=5e-3, kind_options=own, **of_text, **SMALL).checked()


@pytest.fixture(scope="module")
def text(settings, tmp_path_factory):
    return KIND.prepare(settings, tmp_path_factory.mktemp("tokens") / "data")


@pytest.fixture(scope="module")
def job(text):
    """Return a function that makes the job of the settings' arm on that text."""
    return lambda settings, folder=None: jobs_on(text)(settings.checked(), folder)


def test_albert_first_loss_matches_measured_loss_with_large_init(settings, text, job, tmp_path):
    wide = replace(settings, init=0.5)
    own = job(wide, tmp_path)
    predicted = KIND.first_loss(own)
    assert KIND.measure(own, KIND.build(own), "heldout", point=True).nll == pytest.approx(predicted, rel=0.05)
    assert predicted > math.log(text.vocab) + 0.5


def test_add_marks_appends_special_tokens_once(text):
    tokenizer = AutoTokenizer.from_pretrained(text.folder / "tokenizer")
    assert text.vocab == len(tokenizer) == 304
    assert [getattr(tokenizer, name) for name in MARKS] == list(MARKS.values())
    assert add_marks(text) is text


@pytest.mark.parametrize("objective", ["sop", "nsp", "none"])
def test_albert_run_lowers_loss_and_saves_metrics_and_model(objective, settings, text, job, tmp_path):
    own = replace(settings, kind_options=replace(settings.kind_options, objective=objective))
    found = train(job(own, tmp_path)).result
    assert found.heldout_nll < found.initial_nll
    assert found.initial_nll == pytest.approx(math.log(text.vocab), rel=0.05)
    assert found.predicted_initial_nll == pytest.approx(found.initial_nll, rel=0.02)
    line, said = read_lines(tmp_path / METRICS)[-1], read_json(tmp_path / ACCURACIES)
    paired = {"pair_nll", "pair_accuracy", "tune_pair_nll", "tune_pair_accuracy"}
    assert {"train_nll", "tune_nll", "tune_accuracy", "path_a", "path_b"} <= line.keys()
    assert (paired <= line.keys()) == (objective != "none")
    assert said["tokens"]["nll"] == found.heldout_nll
    assert said["pairs"].keys() == {"sop", "nsp"}
    shares = {"masked": said["tokens"]} | said["pairs"]
    assert {name: vars(share) for name, share in found.shares.items()} == shares
    assert found.unigram_nll == said["unigram_nll"]
    for of in shares.values():
        assert 0 <= of["low"] <= of["share"] <= of["high"] <= 1
    again = AutoModelForPreTraining.from_pretrained(tmp_path / "final").eval()
    assert again.config.sharing == "all"
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_logged_losses_and_accuracies_match_model_outputs_at_each_step(settings, text, job, tmp_path, monkeypatch):
    """The accuracy covers only the first predicted tokens, because the fused loss computes no logits."""
    monkeypatch.setattr(albert, "SAMPLE", 5)
    own = job(replace(settings, steps=3, learning_rate=1e-9), tmp_path)
    train(own)
    installed = KIND.build(own)
    model, rows = installed.model.eval(), make_rows(own.settings, text, "train", seed=1, count=12)
    lines = read_lines(tmp_path / METRICS)
    assert len(lines) == 3
    for step, line in enumerate(lines):
        given = torch.utils.data.default_collate([rows[4 * step + i] for i in range(4)])
        out = model(**given)
        assert line["train_nll"] == pytest.approx(out.mlm_loss.item(), rel=1e-4)
        assert line["pair_nll"] == pytest.approx(out.pair_loss.item(), rel=1e-4)
        right = (out.pair_logits.argmax(-1) == given["pair_labels"]).float().mean().item()
        assert line["pair_accuracy"] == pytest.approx(right)
        wanted = given["labels"] != -100
        judged = out.logits.argmax(-1)[wanted] == given["labels"][wanted]
        assert len(judged) > 5
        assert line["train_accuracy"] == pytest.approx(judged[:5].float().mean().item())


@pytest.mark.parametrize("name", ["dropout", "in_order", "short", "masking", "warmup", "clip"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_albert_options_refuse_negative_and_non_finite_values(name, value):
    with pytest.raises(RunError, match=rf"{name} = {value}; use zero or a positive number"):
        replace(AlbertOptions(), **{name: value}).checked()


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_resumed_albert_run_matches_uninterrupted_run(optimizer, settings, job, interrupted, tmp_path):
    own = replace(settings, kind_options=replace(settings.kind_options, optimizer=optimizer, dropout=0.1))
    whole = train(job(own, tmp_path / "whole"))
    interrupted(job(own, tmp_path / "cut"), 7)
    assert differing_fields(train(job(own, tmp_path / "cut")).result, whole.result) == set()


def test_accumulated_albert_micro_batches_match_one_batch(settings, text, job, tmp_path):
    one = replace(settings, steps=4, batch=8, kind_options=replace(settings.kind_options, objective="none"))
    several = replace(one, batch=2, accumulate=4)
    a, b = (train(job(s, tmp_path / str(s.batch))).result for s in (one, several))
    # a mean of means, because rows have different numbers of masked tokens
    assert b.heldout_nll == pytest.approx(a.heldout_nll, abs=0.02)
    paths = [p.path_b for p in a.curve], [p.path_b for p in b.curve]
    assert paths[1] == pytest.approx(paths[0], rel=0.2)  # not four times as large


@pytest.mark.parametrize(
    ("arm", "width", "sharing", "tied", "projected"),
    [
        ("factored:16+share=none", 16, "none", True, True),
        ("factored:8", 8, "all", True, True),
        ("factored-untied:8+share=none", 8, "none", False, True),
        ("tied+share=ffn", 16, "ffn", True, False),
        ("untied+share=all:groups=2", 16, "all:groups=2", False, False),
    ],
)
def test_build_shares_tables_and_layers_as_arm_requests(arm, width, sharing, tied, projected, settings, text, job):
    own = job(replace(settings, arms=(arm,)))
    assert own.arm == arm
    installed = KIND.build(own)
    table_in, table_out = installed.tables()
    assert table_in.shape == table_out.shape == (text.vocab, width)
    assert (table_in is table_out) == tied
    assert installed.model.config.sharing == sharing
    assert isinstance(installed.model.albert.embeddings.projection, torch.nn.Linear) == projected


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("albert")])
def test_albert_recipes_keep_hidden_size_equal_to_width(name):
    found = Settings.of(recipe(name)).checked()
    assert found.kind == "albert"
    assert [arm_config(found, arm, 8).hidden_size for arm in found.arms] == [found.width] * len(found.arms)


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [
        ({"heads": 3}, {}, "3 heads do not divide width 16"),
        ({}, {"share": "some"}, "unknown sharing 'some'"),
        ({}, {"share": "all:groups=3"}, "3 groups of 2 layers"),
        ({}, {"objective": "order"}, "objective = 'order'"),
        ({}, {"act": "tanhh"}, "act = 'tanhh'"),
        ({"length": 4}, {}, "rows of 4 tokens"),
        ({"tune": True}, {}, "tune = True in an ALBERT run"),
        ({"arms": ("factored-untied:in=8,out=4",)}, {}, "both of one width"),
    ],
)
def test_albert_run_refuses_invalid_settings(changes, own, said, settings, tmp_path):
    made = replace(settings, **changes, kind_options=replace(settings.kind_options, **own))
    with refusal(said):
        KIND.prepare(made.checked(), tmp_path)
