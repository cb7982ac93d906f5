"""Tests of encoder-decoder runs against transformers' classes with three separate tables."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.conftest import differing_fields, jobs_on
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import tiewise
from tiewise.core.errors import TiewiseError
from tiewise.training.data.training_rows import add_marks
from tiewise.training.folder import METRICS, read_lines
from tiewise.training.kinds.seq2seq import KIND, PAD, SpanRows, hide, sentinels
from tiewise.training.run import train
from tiewise.training.settings import Settings

END = 1000
SMALL = {"kind": "seq2seq", "width": 16, "layers": 1, "heads": 2, "length": 20, "noise": 0.3, "batch": 4, "steps": 12}
ARMS = ("tied", "tied+encoder=apart", "untied", "untied+encoder=apart", "factored:4")


@pytest.fixture(scope="module")
def settings(source):
    def make(**changes):
        of_text = {"text": (str(source),), "tokenizer": "bpe:300", "arms": ("tied",), "measured": 1000}
        return Settings.of({**SMALL, **of_text, **changes}).checked()

    return make


@pytest.fixture(scope="module")
def text(settings, tmp_path_factory):
    return KIND.prepare(settings(), tmp_path_factory.mktemp("seq2seq") / "data")


@pytest.fixture(scope="module")
def job(text, settings):
    return lambda folder=None, arm="tied", **changes: jobs_on(text)(settings(arms=(arm,), **changes), folder)


def restore_row(read, written, marks):
    """Replace each sentinel of the input by the tokens that follow it in the labels."""
    behind, last = {}, None
    for token in written[:-1]:
        if token in marks:
            last = behind[token] = []
        else:
            last.append(token)
    return [token for known in read[:-1] for token in (behind[known] if known in marks else [known])]


@given(st.data())
def test_hide_keeps_every_token_in_encoder_input_or_labels(data):
    runs = data.draw(st.integers(1, 6))
    hidden = data.draw(st.integers(runs, 20))
    ids = data.draw(st.lists(st.integers(0, 30), min_size=max(hidden + runs - 1, 2), max_size=60))
    marks = [100 + i for i in range(runs)]
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    read, written, of_text = hide(np.array(ids), hidden, np.array(marks), END, draw)
    assert (len(read), len(written)) == (len(ids) - hidden + runs + 1, hidden + runs + 1)
    assert restore_row(read.tolist(), written.tolist(), marks) == ids
    for whole in (read, written):
        assert whole[-1] == END
        assert [token for token in whole if token in marks] == marks
    assert of_text.sum() == hidden
    assert not set(written[of_text == 0]) - {*marks, END}
    places = np.flatnonzero(np.isin(written, marks))
    assert np.diff(places, append=len(written) - 1).min() >= 2  # every sentinel hides at least one token


def test_hide_chooses_every_arrangement_equally_often():
    """Two runs hide three of six tokens. There are 2 ways to divide the hidden tokens and 6 for the kept ones."""
    draw = np.random.default_rng(0)
    found = Counter(tuple(hide(np.arange(6), 3, np.array([10, 11]), END, draw)[0]) for _ in range(6000))
    assert len(found) == 2 * 6  # kept: a ≥ 0 before, b ≥ 1 between, c ≥ 0 after, a + b + c = 3
    assert max(abs(count - 500) for count in found.values()) < 5 * np.sqrt(500)


def test_span_rows_depend_on_seed_alone_and_change_every_epoch(job):
    blocks = np.arange(200).reshape(10, 20) % 256
    rows, again = (SpanRows(job(), blocks, seed=3, count=30) for _ in range(2))
    backwards = [again[i] for i in reversed(range(30))][::-1]
    for i in range(30):
        assert all(torch.equal(rows[i][name], backwards[i][name]) for name in rows[i])
    marks = SpanRows(job(), blocks, seed=3).sentinels.tolist()
    whole = [restore_row(row["input_ids"].tolist(), row["labels"].tolist(), marks) for row in rows]
    for epoch in range(3):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == blocks.tolist()
    assert len({tuple(row["input_ids"].tolist()) for row in rows}) == 30  # each block has 270 arrangements
    with pytest.raises(IndexError):
        rows[30]


def test_prepare_adds_padding_and_sentinels_to_tokenizer(text, settings):
    tokenizer = AutoTokenizer.from_pretrained(text.folder / "tokenizer")
    assert text.vocab == len(tokenizer) == 303
    assert tokenizer.convert_tokens_to_ids(["<pad>", *sentinels(settings())]) == [300, 301, 302]
    assert tokenizer("<extra_id_0>").input_ids == [301]
    assert add_marks(text, PAD, sentinels(settings())) is text


def batch_of(job, rows=slice(8)):
    """Return rows of training as one batch, by default the first eight."""
    tokens = job.text.split("train")
    made = SpanRows(job, tokens[: len(tokens) // 20 * 20].reshape(-1, 20), seed=1)
    return torch.utils.data.default_collate([made[i] for i in range(len(made))[rows]])


def table_modules(model):
    """Return the modules of the encoder, the decoder and the head that hold a table."""
    lookups = {"encoder": model.get_encoder().embed_tokens, "decoder": model.get_decoder().embed_tokens}
    return {**lookups, "head": model.lm_head}


@pytest.mark.parametrize("model", ["t5", "bart"])
@pytest.mark.parametrize("arm", ["tied", "untied", "tied+encoder=apart", "untied+encoder=apart"])
def test_shared_table_gradient_is_sum_of_untied_gradients(model, arm, job):
    """The reference is the transformers class with three separate tables of equal values, in fp64."""
    made = job(arm=arm, model=model)
    installed = KIND.build(made)
    ours = installed.model.double().train()
    plain = AutoModelForSeq2SeqLM.from_config(ours.config, dtype=torch.float64).train()
    plain.load_state_dict(ours.state_dict())
    places = {end: module.weight for end, module in table_modules(ours).items()}
    copies = {end: nn.Parameter(table.detach().clone()) for end, table in places.items()}
    for end, module in table_modules(plain).items():
        module.weight = copies[end]

    given = {name: batch_of(made)[name] for name in ("input_ids", "labels")}
    installed.track("tied" in arm.split("+"))
    loss = ours(**given).loss
    loss.backward()
    assert installed.counts.fused
    assert not installed.counts.materialised
    theirs = plain(**given).loss
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-9)

    held = {id(table): table for table in places.values()}
    assert len(held) == {"tied": 1, "untied": 2, "tied+encoder=apart": 2, "untied+encoder=apart": 3}[arm]
    for key, table in held.items():
        wanted = sum(copies[end].grad for end in places if id(places[end]) == key)
        torch.testing.assert_close(table.grad, wanted, rtol=1e-8, atol=1e-12)
    norms = installed.path_norms()
    lookups = [copies[end].grad for end in ("encoder", "decoder") if places[end] is places["decoder"]]
    assert norms.a == pytest.approx(sum(lookups).norm().item(), rel=1e-8)
    assert norms.b == pytest.approx(copies["head"].grad.norm().item(), rel=1e-8)


@pytest.mark.parametrize(
    ("model", "arm"), [*(("t5", arm) for arm in ARMS), ("bart", "untied"), ("bart", "tied+encoder=apart")]
)
def test_seq2seq_run_lowers_loss_and_saves_equivalent_model(model, arm, job, tmp_path):
    made = job(tmp_path, arm, model=model, steps=20)
    found = train(made).result
    assert found.heldout_nll < found.initial_nll
    assert found.predicted_initial_nll == pytest.approx(found.initial_nll, rel=0.05)
    assert found.shares["masked"].nll == pytest.approx(found.heldout_nll)
    assert found.unigram_nll < np.log(made.text.vocab)
    assert {"train_nll", "tune_nll", "path_a", "path_b"} <= read_lines(tmp_path / METRICS)[-1].keys()

    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / ("dense" if "factored" in arm else "final"))
    own = tiewise.load(tmp_path / "final")
    batch = batch_of(made)
    given = {name: batch[name] for name in ("input_ids", "labels")}
    with torch.no_grad():
        assert own(**given).loss.item() == pytest.approx(plain(**given).loss.item(), abs=1e-5)
        hidden = batch["hidden"].bool()
        losses = nn.functional.cross_entropy(plain(**given).logits[hidden], batch["labels"][hidden])
    assert losses < found.initial_nll  # the saved weights are the trained ones
    places = [module.weight for module in table_modules(plain).values()]
    distinct = sum(all(not torch.equal(one, other) for other in places[:i]) for i, one in enumerate(places))
    assert distinct == {"factored:4": 2}.get(arm, 1 + ("untied" in arm) + ("apart" in arm))
    assert ("encoder table" in found.parameters) == ("apart" in arm)
    assert found.total_parameters == sum(p.numel() for p in own.parameters())


def test_seq2seq_arms_of_one_seed_start_from_equal_body_and_table(job):
    ours, other = (KIND.build(job(arm=arm)).model for arm in ("tied", "untied+encoder=apart"))
    bodies = [{k: v for k, v in dict(m.named_parameters()).items() if v.shape[0] != 303} for m in (ours, other)]
    assert bodies[0].keys() == bodies[1].keys()
    assert all(torch.equal(bodies[0][name], bodies[1][name]) for name in bodies[0])
    assert torch.equal(ours.shared.weight, other.shared.weight)
    assert not torch.equal(other.shared.weight, other.encoder.embed_tokens.weight)


def test_logged_train_nll_matches_cross_entropy_of_hidden_tokens(job, tmp_path):
    made = job(tmp_path, steps=3, learning_rate=1e-9)
    train(made)
    model = KIND.build(made).model.eval()
    lines = read_lines(tmp_path / METRICS)
    assert len(lines) == 3
    for step, line in enumerate(lines):
        batch = batch_of(made, slice(4 * step, 4 * step + 4))
        hidden = batch["hidden"] == 1
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], labels=batch["labels"]).logits
        wanted = nn.functional.cross_entropy(logits[hidden], batch["labels"][hidden])
        assert line["train_nll"] == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("arm", ["tied+encoder=apart", "tied+untie_at=5"])
def test_resumed_seq2seq_run_matches_uninterrupted_run(arm, job, interrupted, tmp_path):
    whole = train(job(tmp_path / "whole", arm))
    interrupted(job(tmp_path / "cut", arm), 7)
    assert differing_fields(train(job(tmp_path / "cut", arm)).result, whole.result) == set()


def test_accumulated_seq2seq_micro_batches_match_one_batch(job, tmp_path):
    one = train(job(tmp_path / "one", batch=8, steps=4)).result
    two = train(job(tmp_path / "two", batch=2, accumulate=4, steps=4)).result
    assert two.heldout_nll == pytest.approx(one.heldout_nll, abs=1e-5)
    assert [p.path_b for p in two.curve] == pytest.approx([p.path_b for p in one.curve], rel=1e-4)


def test_evaluated_tokens_estimates_number_of_measured_tokens(job):
    made = job(measured=200, select="last")
    start, last = (KIND.measure(made, KIND.build(made), "heldout", point=point).tokens for point in (True, False))
    point = KIND.measure(made, KIND.build(made), "tune", point=True).tokens
    assert KIND.evaluated_tokens(made) == pytest.approx(start + 12 * point + 2 * last, rel=0.1)
    best = replace(made, settings=replace(made.settings, select="best"))  # measures the last step, too
    assert KIND.evaluated_tokens(best) == pytest.approx(start + 13 * point + 4 * last, rel=0.1)


NOT_PLAIN = ("factored:4+encoder=apart", "tied+bias+encoder=apart", "tied+untie_at=3+encoder=apart")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "model.*choose t5 or bart"),
        ({"noise": 1.5}, "noise.*share between 0 and 1"),
        ({"span": 0.5}, "span.*1 or more"),
        ({"noise": 0.9, "span": 1.0}, "18 runs of 18 hidden tokens do not fit into rows of 20; use less noise"),
        ({"heads": 3}, "3 heads do not divide width 16"),
        ({"match": "parameters"}, "match = 'parameters' in an encoder-decoder's run"),
        *(({"arms": (arm,)}, "a separate encoder table needs plain tables") for arm in NOT_PLAIN),
    ],
)
def test_seq2seq_settings_refuse_invalid_values(changes, says, settings):
    with pytest.raises(TiewiseError, match=says):
        settings(**changes)
