"""Tests of recurrent runs against a plain LSTM loop, one-pass evaluation and uninterrupted runs."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.training.conftest import differing_fields, jobs_on, prose, refusal
from torch import nn
from transformers import AutoModelForCausalLM

from tiewise.core.errors import DataError
from tiewise.training.data.word_corpus import prepare_words
from tiewise.training.document_losses import text_units
from tiewise.training.kinds import recurrent
from tiewise.training.kinds.recurrent import KIND, changed_settings, recurrent_config, run_steps
from tiewise.training.run import train
from tiewise.training.settings import FILE, Settings, recipe, recipes
from tiewise.training.streams import Steps, measure_streams, split_into_streams

BATCH, LENGTH, WIDTH = 4, 6, 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    rows = prose(58, known=40, each=8).split("\n\n")
    for name, own in (("train", rows[:32]), ("valid", rows[32:44]), ("test", rows[44:])):
        (folder / f"{name}.txt").write_text("\n".join(own) + "\n")
    return folder


@pytest.fixture(scope="module")
def words(corpus, tmp_path_factory):
    return prepare_words(str(corpus), tmp_path_factory.mktemp("prepared") / "data")


def settings(**changes):
    small = {"width": WIDTH, "batch": BATCH, "length": LENGTH, "text": ("corpus",), "arms": ("tied",), "seed": 1}
    small |= dict.fromkeys(("dropout_input", "dropout_between", "dropout_output"), 0.0)
    return Settings.of({**recipe("pytorch-200"), **small, "learning_rate": 1.0, "steps": 20, **changes}).checked()


@pytest.fixture(scope="module")
def job(words):
    return jobs_on(words)


class PlainLSTM(nn.Module):
    """Plain LSTM language model that ties its tables by assignment."""

    def __init__(self, model, tied):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False)
        self.body = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, len(model.head.weight))
        with torch.no_grad():
            self.head.weight.copy_(model.head.weight)
            self.head.bias.copy_(model.head.bias)
            for i, layer in enumerate(model.rnn.layers):
                for name, value in layer.named_parameters():
                    getattr(self.body, f"{name}_l{i}").copy_(value)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, state):
        self.hidden, state = self.body(self.embedding(ids), state)
        return self.head(self.hidden), tuple(s.detach() for s in state)


def train_reference(model, tokens, chosen):
    """Return the mean nll of each of 20 steps of plain stateful training."""
    o = chosen.kind_options
    kind = torch.optim.SGD if o.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=chosen.learning_rate, weight_decay=chosen.weight_decay)
    streams = torch.from_numpy(tokens[: len(tokens) // BATCH * BATCH].astype(np.int64)).view(BATCH, -1)
    found, epoch = [], 0
    while len(found) < 20:
        state, epoch = None, epoch + 1
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * o.decay ** max(0, epoch - o.decay_after)
        for start in range(0, streams.shape[1] - 1, LENGTH):
            if len(found) == 20:
                break
            targets = streams[:, start + 1 : start + 1 + LENGTH]
            logits, state = model(streams[:, start : start + targets.shape[1]], state)
            nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            h = model.hidden
            loss = nll + o.activation * (h**2).mean() + o.slowness * ((h[:, 1:] - h[:, :-1]) ** 2).mean()
            optimizer.zero_grad()
            (loss * targets.shape[1] if o.objective == "time" else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), o.clip)
            optimizer.step()
            found.append(nll.item())
    return found


@pytest.mark.parametrize(
    ("arm", "changes", "exact"),
    [
        ("tied", {}, 1e-5),
        ("untied", {"weight_decay": 1e-3}, 1e-5),
        ("tied", {"objective": "time", "clip": 2.0}, 1e-5),
        ("tied", {"optimizer": "adamw", "learning_rate": 0.01}, 1e-4),
        ("untied", {"activation": 2.0, "slowness": 1.0}, 1e-5),
    ],
)
def test_recurrent_training_matches_plain_lstm_step_by_step(arm, changes, exact, words, job, tmp_path):
    """Train three epochs. The last step of each is shorter, and the rate halves after the first epoch."""
    chosen = settings(epochs=3, anneal="epochs", decay=0.5, decay_after=1, keep="last", **changes)
    installed = KIND.build(job(chosen, arm=arm))
    other = PlainLSTM(installed.model, arm.startswith("tied"))
    wanted = train_reference(other, words.split("train"), chosen)
    trainer = KIND.trainer(job(chosen, tmp_path, arm), installed)
    trainer.train()
    got = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert wanted[-1] < wanted[0] - 0.05
    np.testing.assert_allclose(got, wanted, atol=exact)
    ours = (*installed.tables(), installed.model.rnn.layers[1].weight_hh)
    theirs = (other.embedding.weight, other.head.weight, other.body.weight_hh_l1)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=exact)


@pytest.mark.parametrize("at_once", [1, 7, 4096])
@pytest.mark.parametrize("parallel", [1, 3])
def test_measure_streams_in_pieces_matches_one_pass(parallel, at_once, words, job):
    installed, tokens = KIND.build(job(settings())), words.split("heldout")
    found = measure_streams(installed, tokens, words.counts, parallel, at_once=at_once)
    inputs, targets = split_into_streams(tokens, parallel)
    with torch.no_grad():
        logits, _ = PlainLSTM(installed.model.eval(), True)(inputs, None)
    assert found.tokens == sum(b.tokens for b in found.bins) == len(tokens) - 1
    nll = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()
    assert found.nll == pytest.approx(nll, abs=1e-6)


@pytest.mark.parametrize("at_once", [7, 4096])
def test_measure_streams_sums_losses_of_each_unit_in_any_layout(at_once, words, job):
    installed, tokens = KIND.build(job(settings())), words.split("heldout")
    units = text_units(tokens, KIND.document_end(words))
    assert units.name == "blocks"
    found = measure_streams(installed, tokens, words.counts, 3, at_once=at_once, units=units).documents
    inputs, targets = split_into_streams(tokens, 3)
    with torch.no_grad():
        logits, _ = PlainLSTM(installed.model.eval(), True)(inputs, None)
    losses = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="none")[: len(tokens) - 1]
    expected = np.bincount(units.of_token[1:], losses.numpy())
    assert found.tokens == np.bincount(units.of_token[1:]).tolist()
    np.testing.assert_allclose(found.nats, expected, atol=2e-3)


@pytest.mark.parametrize(("count", "parallel"), [(2, 1), (2, 10), (11, 3), (12, 4), (100, 7)])
def test_split_into_streams_predicts_every_word_but_first_once(count, parallel):
    inputs, targets = split_into_streams(np.arange(count), parallel)
    known = targets != -100
    assert targets[known].tolist() == list(range(1, count))
    assert torch.equal(inputs[known] + 1, targets[known])


def test_varied_step_lengths_cover_each_epoch_and_depend_on_seed():
    first, again, other = (Steps(np.arange(40_000), 4, 70, 2, vary=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.lengths[:50], other.lengths[:50])
    for epoch in (0, 1):
        of = first.epochs == epoch
        assert first.lengths[of].sum() == 9_999
        assert np.array_equal(first.starts[of], np.cumsum(first.lengths[of]) - first.lengths[of])
    assert 66 < np.median(first.lengths) < 74
    assert (first.lengths < 50).sum() > 3


def test_steps_refuse_too_few_words_for_streams():
    with pytest.raises(DataError, match="too few for 20 streams"):
        Steps(np.arange(39), 20, 35, 1)


PLATEAU = {"dropout_input": 0.3, "dropout_between": 0.2, "anneal": "plateau", "decay": 0.25}
AVERAGED = {"average_patience": 1, "learning_rate": 30.0}  # a rate this high worsens validation, which starts averaging
AVERAGED |= {"vary_length": True, "variational": True, "activation": 2.0, "slowness": 1.0}
AVERAGED |= {"weight_drop": 0.2, "dropout_recurrent": 0.2, "dropout_output": 0.2}


@pytest.mark.parametrize(("variant", "held"), [(PLATEAU, 2), (AVERAGED, 3)], ids=["plateau", "averaged"])
def test_resumed_recurrent_run_matches_uninterrupted_run(variant, held, job, interrupted, tmp_path):
    """A run holds weights and gradients; an averaged run also holds the mean of the weights."""
    chosen = settings(epochs=6, steps=60, **variant)
    whole = train(job(chosen, tmp_path / "whole"))
    assert whole.result.training_bytes == held * whole.result.bytes
    for step in (15, 31):  # within an epoch; the windows of the curve are of three steps
        interrupted(job(chosen, tmp_path / "cut"), step - 1)
        assert (tmp_path / "cut" / f"checkpoint-{step}" / "carried.pt").is_file()
    resumed = train(job(chosen, tmp_path / "cut"))
    assert differing_fields(resumed.result, whole.result) <= {"curve"}
    left, right = ([p.tune_nll for p in run.result.curve if p.step > 33] for run in (resumed, whole))
    assert left == right
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {"final", "metrics.jsonl", "result.json"}


def test_start_stores_number_of_steps_in_requested_epochs(corpus, words, tmp_path, lines):
    chosen = settings(epochs=3, steps=1000, text=(str(corpus),))
    out = lines.begin(chosen, tmp_path / "out")
    of_epoch = -(-(len(words.split("train")) // BATCH - 1) // LENGTH)
    assert Settings.load(out / FILE).steps == 3 * of_epoch


def test_plateau_annealing_lowers_rate_and_saves_best_epoch(words, job, tmp_path, monkeypatch):
    """The test supplies the validation losses. The second epoch is best; worse epochs lower the rate."""
    told, kept = iter([3.0, 2.0, 2.5, 2.0, 9.0]), []
    chosen = settings(epochs=5, steps=1000, anneal="plateau", decay=0.25, keep="best")

    @contextmanager
    def noted(path):
        kept.append(trainer.state.global_step)
        yield tmp_path / "best.pt"

    monkeypatch.setattr(type(KIND), "measure", lambda *a, **k: SimpleNamespace(nll=0.0))
    monkeypatch.setattr(recurrent, "measure_streams", lambda *a, **k: SimpleNamespace(nll=next(told)))
    monkeypatch.setattr(recurrent, "atomic_replacement", noted)
    trainer = KIND.trainer(job(chosen, tmp_path), KIND.build(job(chosen)))
    trainer.train()
    assert next(told, None) is None  # the last epoch was evaluated, too
    each = len(run_steps(chosen, words, 1)) // 5
    assert kept == [each, 2 * each]
    rates = {line["step"]: line["learning_rate"] for line in trainer.state.log_history if "loss" in line}
    assert rates[each] == 1.0
    assert {rate for step, rate in rates.items() if 3 * each < step <= 4 * each} == {0.25}
    assert {rate for step, rate in rates.items() if step > 4 * each} == {1 / 16}


def test_augmented_loss_changes_training_while_log_reports_nll(job, tmp_path):
    fixed = {"epochs": 3, "temperature": 5.0, "keep": "last", "anneal": "epochs"}
    plain, own = (train(job(settings(augment=a, **fixed), tmp_path / str(a))).result for a in (0.0, 50.0))
    assert own.curve[0].train_nll == pytest.approx(plain.curve[0].train_nll, abs=1e-5)  # before its first step
    assert own.heldout_nll != pytest.approx(plain.heldout_nll, abs=1e-4)


def test_saved_recurrent_model_reproduces_reported_heldout_nll(words, job, tmp_path):
    result = train(job(settings(epochs=2), tmp_path)).result
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    inputs, targets = split_into_streams(words.split("heldout"), 10)
    with torch.no_grad():
        logits = model.eval()(input_ids=inputs).logits
    known = targets != -100
    assert F.cross_entropy(logits[known], targets[known]).item() == pytest.approx(result.heldout_nll, abs=1e-5)
    assert result.predicted_initial_nll == pytest.approx(math.log(words.vocab))
    assert result.initial_nll == pytest.approx(result.predicted_initial_nll, abs=0.05)
    assert result.curve[-1].tokens == BATCH * sum(run_steps(settings(epochs=2), words, 1).lengths)


@pytest.mark.parametrize("name", [name for name in recipes() if recipe(name)["model"] != "albert"])
def test_recipes_round_trip_through_settings_file(name, tmp_path):
    chosen = Settings.of({**recipe(name), "text": ("corpus",)}).checked()
    chosen.save(tmp_path)
    assert Settings.load(tmp_path / FILE) == chosen
    assert changed_settings(chosen) == []
    other = Settings.of({**recipe(name), "text": ("corpus",), "epochs": 3, "width": 10})
    assert changed_settings(other) == ["width=10", "epochs=3"]


def test_recurrent_run_trains_without_recipe(job, tmp_path):
    small = {"text": ("corpus",), "width": WIDTH, "steps": 2, "arms": ("tied",), "seed": 1}
    chosen = Settings.of({"kind": "recurrent", **small})
    assert (chosen.model, changed_settings(chosen)) == ("lstm", [f"width={WIDTH}"])
    assert train(job(chosen.checked(), tmp_path)).result.steps == 2


def test_recurrent_recipes_match_published_parameter_counts():
    """Press & Wolf's small and large models have V = 10,000. A second bias adds 1,600 and 12,000 parameters."""

    def total(name, arm, **more):
        config = recurrent_config(Settings.of({**recipe(name), "arms": (arm,), "text": ("c",), **more}), 10_000)
        with torch.device("meta"):
            body = AutoModelForCausalLM.from_config(config)
        tables = 2 if "untied" in arm else 1
        projection = config.last_hidden_size**2 if arm.startswith("projected") else 0
        layers = sum(p.numel() for p in body.rnn.parameters())
        return layers + tables * 10_000 * config.last_hidden_size + 10_000 + projection

    small = [total("press-wolf-small", arm) for arm in recipe("press-wolf-small")["arms"]]
    assert small == [4_651_600, 2_651_600, 4_691_600, 2_691_600]
    assert [total("press-wolf-large", arm) for arm in ("untied", "tied")] == [66_022_000, 51_022_000]
    assert total("press-wolf-small", "untied", bias="two") - small[0] == 1_600
    assert total("press-wolf-large", "untied", bias="two") - 66_022_000 == 12_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bias": "three"}, "bias = 'three'"),
        ({"dropout_input": 1.0}, "dropout_input = 1.0"),
        ({"dropout_recurrent": -0.1}, "dropout_recurrent = -0.1"),
        ({"epochs": 0}, "epochs = 0"),
        ({"decay": 0.0}, "decay = 0.0"),
        ({"clip": -1.0}, "clip = -1.0"),
        ({"start": math.inf}, "start = inf"),
        ({"model": "qrnn"}, "model = 'qrnn'"),
        ({"accumulate": 2}, "accumulate = 2"),
        ({"minutes": 1.0, "seed": None}, "minutes = 1.0 in a recurrent run"),
        ({"tune": True, "seed": None}, "tune = True in a recurrent run"),
        ({"text": ("a", "b")}, "2 corpora"),
        ({"average_patience": 2, "keep": "last"}, "average_patience"),
        ({"arms": ("tied+untie_at=5",)}, "keep: best"),
    ],
)
def test_recurrent_settings_refuse_invalid_values_with_one_line_message(changes, said):
    with refusal(said):
        settings(**changes)


def test_recurrent_config_receives_every_dropout_setting():
    names = ("embedding", "input", "between", "output", "recurrent")
    places = {f"dropout_{name}": f"{name.replace('between', 'layer')}_dropout" for name in names}
    places["weight_drop"] = "weight_dropout"
    shares = {name: (i + 1) / 10 for i, name in enumerate(places)}
    config = recurrent_config(settings(**shares), 10)
    assert {name: getattr(config, place) for name, place in places.items()} == shares
