"""Repeated applications of a block, against transformers' own models with as many layers."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from scipy.stats import t
from tests.boundary.tiny_models import _BERT, FAMILIES, V, build
from tests.inspection.running.test_repeats import Affine, with_layers
from tokenizers import Tokenizer, models

from tiewise.boundary.locate import locate
from tiewise.boundary.sharing.share import share_layers
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.running.stack import Repeat
from tiewise.inspection.sections.applications import applications_of, measurement_of, questions
from tiewise.training.data.tokenizer import windows
from tiewise.training.models.open_albert import OpenAlbertConfig, OpenAlbertForPreTraining

TRAINED = 3
T, COUNT = 16, 5
SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
DOT, WORDS = 4, np.arange(6, V)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a folder with a tokenizer of capitalised words and a full stop; open it."""
    path = tmp_path_factory.mktemp("tokenizer")
    marks = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    words = dict(zip(marks.values(), SPECIAL.values(), strict=True))
    words |= {".": DOT, "##s": 5} | {f"W{i}": i for i in WORDS}
    tokenizer = Tokenizer(models.WordLevel({word: int(i) for word, i in words.items()}, unk_token="##s"))
    tr.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(path)
    (path / "config.json").write_text("{}")
    return open_folder(path)


def text():
    """Return sentences of three to five words, as ids [N]."""
    draw = np.random.default_rng(0)
    return np.concatenate([[*draw.choice(WORDS, draw.integers(3, 6)), DOT] for _ in range(60)])


def open_in_fp64(model, folder):
    model = model.double().eval()
    return Opened(folder, model, locate(model))


def run_applications(found, **changed):
    return applications_of(found, text(), **{"length": T, "count": COUNT, "seed": 4} | changed)


def albert(layers=TRAINED, **settings):
    torch.manual_seed(0)
    config = tr.AlbertConfig(**_BERT | {"embedding_size": 8, "num_hidden_layers": layers, "initializer_range": 0.3})
    config.update(settings)
    return tr.AlbertForMaskedLM(config)


def open_albert(layers=TRAINED, sharing="all"):
    torch.manual_seed(0)
    sizes = _BERT | {"embedding_size": 8, "num_hidden_layers": layers, "initializer_range": 0.3}
    return OpenAlbertForPreTraining(OpenAlbertConfig(**sizes, sharing=sharing))


def decoder(name, layers=TRAINED, sharing="all", **settings):
    kind, config, sizes = FAMILIES[name]
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    torch.manual_seed(0)
    model = kind(config(**sizes | {depth: layers, "initializer_range": 0.3} | settings))
    share_layers(model, sharing)
    return model


def nll_by_window(found, model=None):
    """Return the NLL of each window by a full forward pass.

    If `model` is given, the function first loads the weights of the opened model into it.
    """
    hidden = isinstance(found.model, tr.AlbertForMaskedLM | OpenAlbertForPreTraining)
    if model is None:
        model = found.model
    else:
        missing = model.load_state_dict(found.model.double().state_dict(), strict=False).missing_keys
        model = model.double().eval()
        # no weight of layers 0 and 1 may be missing
        assert not any(f".{i}." in name for name in missing for i in (0, 1))
    each = []
    with torch.no_grad():
        if hidden:
            for batch in questions(found, False, text(), T, COUNT, 4):
                targets = batch.targets.split(batch.where.sum(1).tolist())
                for logits, where, wanted in zip(model(**batch.inputs).logits, batch.where, targets, strict=True):
                    each.append(F.cross_entropy(logits[where], wanted).item())
        else:
            texts = torch.from_numpy(windows(text(), T, COUNT))
            for logits, ids in zip(model(texts).logits, texts, strict=True):
                each.append(F.cross_entropy(logits[:-1], ids[1:]).item())
    return np.array(each)


MODELS = {  # builders of a model with a given number of applications
    "albert": albert,
    "albert, two in a group": lambda layers=TRAINED: albert(layers, inner_group_num=2),
    "open albert": open_albert,
    "open albert, a block of two": lambda times=TRAINED: open_albert(2 * times, "all:cycle=2"),
    "llama": lambda layers=TRAINED: decoder("llama", layers),
    "gpt2": lambda layers=TRAINED: decoder("gpt2", layers),
}


@pytest.mark.parametrize("name", MODELS)
def test_n_applications_match_a_model_of_n_layers(name, folder):
    model = open_in_fp64(MODELS[name](), folder)
    found, own = run_applications(model), nll_by_window(model)
    nll, more, _ = found.curves
    asked = "hidden" if "albert" in name else "next"
    assert (nll.x, nll.mark) == (tuple(range(1, 25)), TRAINED)
    assert re.fullmatch(rf"nll of \d+ {asked} tokens in {COUNT} windows", found.notes[0])
    assert ("block of 2 layers" if "block of two" in name else "the layer") in found.answer
    assert found["nll as trained"].value == pytest.approx(own.mean(), rel=1e-12)
    seen = []
    for times in (1, 2, 4, 9):
        at, each = times - 1, nll_by_window(model, MODELS[name](times))
        assert nll.y[at] == pytest.approx(each.mean(), rel=1e-9)
        half = t.ppf(0.975, COUNT - 1) * each.std(ddof=1) / COUNT**0.5
        assert nll.high[at] - nll.y[at] == pytest.approx(half, rel=1e-6)
        assert more.y[at] == pytest.approx((each - own).mean(), rel=1e-6, abs=1e-12)
        seen.append(nll.y[at])
    assert len(set(np.round(seen, 4))) > 1  # the number of applications matters


def test_further_applications_keep_alternating_sliding_window_attention(folder):
    model = open_in_fp64(decoder("gemma2", 2, sliding_window=3), folder)
    assert len(set(model.model.config.layer_types)) == 2
    nll = run_applications(model).curves[0]
    for times in (1, 3, 4, 7):
        each = nll_by_window(model, decoder("gemma2", times, sliding_window=3))
        assert nll.y[times - 1] == pytest.approx(each.mean(), rel=1e-9)


@pytest.mark.parametrize("name", ["albert", "llama"])
def test_changes_match_the_hidden_states_of_a_deeper_model(name, folder):
    model, deep = open_in_fp64(MODELS[name](), folder), MODELS[name](9).double().eval()
    deep.load_state_dict(model.model.state_dict(), strict=False)
    each = []
    for batch in questions(model, name == "llama", text(), T, COUNT, 4):
        with torch.no_grad():
            states = deep.base_model(**batch.inputs, output_hidden_states=True).hidden_states
        sizes = [np.linalg.norm(state, axis=-1) for state in states[:-1]]  # the last state of a decoder is normalised
        steps = [np.linalg.norm(new - old, axis=-1) for old, new in pairwise(states[:-1])]
        read = batch.readable.numpy()
        assert read.all() == (name == "llama")  # rows of sentences have padding
        for row in range(len(read)):
            each.append([(step / size)[row, read[row]].mean() for step, size in zip(steps, sizes, strict=False)])
    assert run_applications(model).curves[2].y[:8] == pytest.approx(np.mean(each, 0), rel=1e-9)


def test_unigram_level_uses_the_whole_text(folder):
    found = run_applications(open_in_fp64(decoder("llama"), folder))
    counts = np.bincount(text(), minlength=V) + 1
    nll = -np.log(counts / counts.sum())[windows(text(), T, COUNT)[:, 1:]]
    assert found["nll as trained"].chance == found.curves[0].level == pytest.approx(nll.mean(), rel=1e-12)
    assert found.notes[0].startswith(f"nll of {nll.size} next tokens")


@pytest.mark.parametrize("name", ["albert", "open albert", "llama"])
def test_parameter_counts_match_models_built_with_and_without_sharing(name, folder):
    model = open_in_fp64(MODELS[name](), folder)
    found = run_applications(model, count=2)
    assert found["parameters"].value == sum({id(p): p.numel() for p in model.model.parameters()}.values())
    apart = model.model
    if name == "albert":
        apart = albert(num_hidden_groups=TRAINED)
    else:
        share_layers(apart, "none")
    whole = sum({id(p): p.numel() for p in apart.parameters()}.values())
    assert found["parameters if each application had its own"].value == whole > found["parameters"].value


def test_applications_of_measures_all_layers_of_a_model_with_more_than_24(folder):
    nll = run_applications(open_in_fp64(open_albert(26), folder), count=2).curves[0]
    assert len(nll.y) == nll.mark == 26


@pytest.mark.parametrize("name", ["albert", "llama"])
def test_applications_of_is_independent_of_batch_size(name, folder, monkeypatch):
    model = open_in_fp64(MODELS[name](), folder)
    whole = run_applications(model)
    monkeypatch.setattr("tiewise.inspection.running.loaded.TOKENS_AT_ONCE", 2 * T)
    monkeypatch.setattr("tiewise.inspection.running.stack.LOGITS", 20 * V)
    apart = run_applications(model)
    assert whole.notes == apart.notes
    for one, other in zip(whole.curves, apart.curves, strict=True):
        assert one.y == pytest.approx(other.y, rel=1e-9)


def test_questions_mask_tokens_of_sentence_pairs_for_an_encoder(folder):
    found, ids = open_in_fp64(albert(), folder), text()
    stream = " ".join(map(str, ids))
    (batch,) = questions(found, False, ids, T, COUNT, 4)
    asked = batch.inputs["input_ids"].clone()
    masked = asked[batch.where] == SPECIAL["mask"]
    assert 0.5 < masked.double().mean() < 1  # on average, 80 % of the chosen tokens
    asked[batch.where] = batch.targets
    for row, read, kinds in zip(asked, batch.readable, batch.inputs["token_type_ids"], strict=True):
        assert row[0] == SPECIAL["cls"]
        one, other = (row[read & (kinds == kind)].tolist() for kind in (0, 1))
        assert one[-1] == other[-1] == SPECIAL["sep"]
        assert " ".join(map(str, one[1:-1] + other[:-1])) in stream
        assert one[-2] == other[-2] == DOT
    other = questions(found, False, ids, T, COUNT, 5)[0]
    assert not torch.equal(other.inputs["input_ids"], batch.inputs["input_ids"])


def test_questions_omit_token_types_for_an_encoder_without_segments(folder):
    found = open_in_fp64(albert(type_vocab_size=1), folder)
    assert set(questions(found, False, text(), T, COUNT, 4)[0].inputs) == {"input_ids", "attention_mask"}
    assert run_applications(found)["nll as trained"].value > 0


def test_applications_of_refuses_missing_special_tokens_and_short_texts(folder, tmp_path):
    bare = Tokenizer(models.WordLevel({f"W{i}": i for i in range(V)}, unk_token="W0"))
    tr.PreTrainedTokenizerFast(tokenizer_object=bare, mask_token="W3").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"its tokenizer has no \[CLS\], \[SEP\], \[PAD\]; put the model's own"):
        run_applications(open_in_fp64(albert(), open_folder(tmp_path)))
    with pytest.raises(DataError, match="hold no window of 16"):
        applications_of(open_in_fp64(decoder("llama"), folder), text()[:9], T)
    with pytest.raises(DataError, match="no document has two sentences"):
        applications_of(open_in_fp64(albert(), folder), WORDS, T)


def test_applications_of_leaves_out_values_that_are_not_finite():
    layer = Affine(1e9 * np.eye(16), np.zeros(16))  # fp32 ends at 3e38
    found = run_applications(with_layers([layer] * 2))
    assert all(max(curve.x) < 24 for curve in found.curves)
    assert found["nll as trained"].value >= found["nll there"].value > 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("gpt2"), "every layer has parameters of its own"),
        (lambda: albert(1), "one layer, applied once"),
        (lambda: albert(4, num_hidden_groups=2), "its 4 layers share parameters in part only"),
        (lambda: open_albert(3, "ffn"), "its 3 layers share parameters in part only"),
        (lambda: open_albert(5, "all:cycle=2"), "in part only"),
        (lambda: build("t5"), "an encoder and a decoder"),
    ],
)
def test_applications_of_refuses_models_without_a_repeated_block(make, reason, folder):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        run_applications(open_in_fp64(make(), folder))
    assert "\n" not in str(caught.value)


def make_measurement(means=(4.0, 3.0, 2.0, 2.5), trained=3, spread=0.1, windows=4, layers=1):
    """Return a measurement whose windows differ by `spread` times the number of applications."""
    apart = np.linspace(-1, 1, windows) if windows > 1 else np.zeros(1)
    nll = np.array([mean + spread * n * apart for n, mean in enumerate(means, 1)])
    change = np.array([[0.5**n] * windows for n in range(len(means))])
    return measurement_of(Repeat(0, layers, trained), nll, change, np.full(windows, 3.5), 1000, 3000)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (make_measurement(), "no: 3 applications of the layer, as in training, predict best of 1 to 4"),
        (make_measurement((2.0, 2.0, 2.0)), "no: 3 applications of the layer, as in training, predict best of 1 to 3"),
        (
            make_measurement(layers=2),
            "no: 3 applications of the block of 2 layers, as in training, predict best of 1 to 4",
        ),
        (make_measurement(trained=2), "yes: 3 applications of the layer predict better than the 2 of training"),
        (
            make_measurement(trained=2, spread=2),
            "no difference detected between 3 applications of the layer and the 2 of training",
        ),
        (
            make_measurement(trained=2, windows=1),
            "no difference detected between 3 applications of the layer and the 2 of training",
        ),
    ],
)
def test_answer_prefers_another_number_only_if_its_interval_excludes_zero(found, answer):
    assert found.answer == answer


def test_measurement_of_reports_loss_unigram_level_and_memory_of_sharing():
    found = make_measurement(trained=2)
    assert (found["nll as trained"].value, found["nll as trained"].chance) == (3.0, 3.5)
    assert (found["best number"].value, found["there − as trained"].value) == (3, pytest.approx(-1))
    assert "AdamW in fp32: 16 kB" in found["parameters"].why
    assert "48 kB if none were shared" in found["parameters"].why


def test_curves_leave_out_nan_values():
    loss, more, change = make_measurement((4.0, np.nan, 2.0, 2.5), trained=1).curves
    assert (loss.x, loss.y, loss.mark) == ((1, 3, 4), pytest.approx((4.0, 2.0, 2.5)), 1)
    assert (loss.level, loss.level_name) == (3.5, "token frequencies")
    assert more.y == pytest.approx((0.0, -2.0, -1.5))
    assert change.log
