"""A block applied more or less often, against transformers' own models of that many layers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from scipy.stats import t
from tests.boundary.tiny_models import _BERT, FAMILIES, V, build
from tests.internals.test_refinement import Affine, with_layers
from tokenizers import Tokenizer, models

from tiewise.boundary.locate import locate
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.data.tokenizer import windows
from tiewise.internals.application_sweep import application_sweep, questions
from tiewise.internals.loaded import Opened
from tiewise.internals.two_paths import HIDDEN, NEXT
from tiewise.models.albert_layers import OpenAlbertConfig
from tiewise.models.open_albert import OpenAlbertForPreTraining
from tiewise.sharing.share import share_layers

TRAINED = 3
T, COUNT = 16, 5
SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
DOT, WORDS = 4, np.arange(6, V)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer of words and a full stop, in which every word begins with a capital."""
    path = tmp_path_factory.mktemp("tokenizer")
    marks = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    words = (
        dict(zip(marks.values(), SPECIAL.values(), strict=True)) | {".": DOT, "##s": 5} | {f"W{i}": i for i in WORDS}
    )
    tokenizer = Tokenizer(models.WordLevel({word: int(i) for word, i in words.items()}, unk_token="##s"))
    tr.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(path)
    (path / "config.json").write_text("{}")
    return open_folder(path)


def text(seed=0, sentences=60):
    """Sentences of three to five words, as ids [N]."""
    draw = np.random.default_rng(seed)
    return np.concatenate([[*draw.choice(WORDS, draw.integers(3, 6)), DOT] for _ in range(sentences)])


def opened(model, folder):
    model = model.double().eval()
    return Opened(folder, model, locate(model))


def sweep(found, **changed):
    return application_sweep(found, text(), **{"length": T, "count": COUNT, "seed": 4} | changed)


def albert(layers=TRAINED, **settings):
    torch.manual_seed(0)
    config = tr.AlbertConfig(**_BERT | {"embedding_size": 8, "num_hidden_layers": layers, "initializer_range": 0.3})
    config.update(settings)
    return tr.AlbertForMaskedLM(config)


def open_albert(layers=TRAINED, sharing="all"):
    torch.manual_seed(0)
    config = OpenAlbertConfig(
        vocab_size=V,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=40,
        initializer_range=0.3,
        sharing=sharing,
    )
    return OpenAlbertForPreTraining(config)


def decoder(name, layers=TRAINED, sharing="all", **settings):
    kind, config, sizes = FAMILIES[name]
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    torch.manual_seed(0)
    model = kind(config(**sizes | {depth: layers, "initializer_range": 0.3} | settings))
    share_layers(model, sharing)
    return model


def nll_by_window(found, model=None):
    """Of a whole model's own forward, window by window; of `model` with the weights of the one that was opened."""
    hidden = isinstance(found.model, tr.AlbertForMaskedLM | OpenAlbertForPreTraining)
    if model is None:
        model = found.model
    else:
        missing = model.load_state_dict(found.model.double().state_dict(), strict=False).missing_keys
        model = model.double().eval()
        assert not any(f".{i}." in name for name in missing for i in (0, 1))  # of layers, only what these already are
    each = []
    with torch.no_grad():
        if hidden:
            for batch in questions(found, False, text(), T, COUNT, 4).batches:
                targets = batch.targets.split(batch.where.sum(1).tolist())
                for logits, where, wanted in zip(model(**batch.given).logits, batch.where, targets, strict=True):
                    each.append(F.cross_entropy(logits[where], wanted).item())
        else:
            texts = torch.from_numpy(windows(text(), T, COUNT))
            for logits, ids in zip(model(texts).logits, texts, strict=True):
                each.append(F.cross_entropy(logits[:-1], ids[1:]).item())
    return np.array(each)


MODELS = {
    "albert": (albert, HIDDEN),
    "albert, two in a group": (lambda layers=TRAINED: albert(layers, inner_group_num=2), HIDDEN),
    "open albert": (open_albert, HIDDEN),
    "llama": (lambda layers=TRAINED: decoder("llama", layers), NEXT),
    "gpt2": (lambda layers=TRAINED: decoder("gpt2", layers), NEXT),
}


@pytest.mark.parametrize("name", MODELS)
def test_n_applications_are_a_model_of_n_layers(name, folder):
    make, objective = MODELS[name]
    found = opened(make(), folder)
    got, own = sweep(found), nll_by_window(found)
    assert (got.objective, got.trained, got.layers, got.windows) == (objective, TRAINED, 1, COUNT)
    assert [one.times for one in got.applied] == list(range(1, 25))
    assert got.own.nll.value == pytest.approx(own.mean(), rel=1e-12)
    seen = []
    for times in (1, 2, 4, 9):
        one, each = got.applied[times - 1], nll_by_window(found, make(times))
        assert one.nll.value == pytest.approx(each.mean(), rel=1e-9)
        half = t.ppf(0.975, COUNT - 1) * each.std(ddof=1) / COUNT**0.5
        assert one.nll.high - one.nll.value == pytest.approx(half, rel=1e-6)
        assert one.more.value == pytest.approx((each - own).mean(), rel=1e-6, abs=1e-12)
        seen.append(one.nll.value)
    assert len(set(np.round(seen, 4))) > 1  # applications do something


def test_layers_that_see_a_part_of_the_text_in_turn_go_on_in_turn(folder):
    sizes = {"sliding_window": 3, "attn_implementation": "eager"}
    found = opened(decoder("gemma2", 2, **sizes), folder)
    assert len(set(found.model.config.layer_types)) == 2
    got = sweep(found)
    for times in (1, 3, 4, 7):
        each = nll_by_window(found, decoder("gemma2", times, **sizes))
        assert got.applied[times - 1].nll.value == pytest.approx(each.mean(), rel=1e-9)


def test_a_block_of_two_layers_is_applied_as_one(folder):
    found = opened(open_albert(6, "all:cycle=2"), folder)
    got = sweep(found)
    assert (got.layers, got.trained) == (2, 3)
    assert got.own.nll.value == pytest.approx(nll_by_window(found).mean(), rel=1e-12)
    deeper = nll_by_window(found, open_albert(10, "all:cycle=2"))
    assert got.applied[4].nll.value == pytest.approx(deeper.mean(), rel=1e-9)


@pytest.mark.parametrize("name", ["albert", "llama"])
def test_changes_are_those_between_the_states_of_a_deep_model(name, folder):
    make, objective = MODELS[name]
    found, deep = opened(make(), folder), make(9).double().eval()
    deep.load_state_dict(found.model.state_dict(), strict=False)
    got, each = sweep(found), []
    for batch in questions(found, objective == NEXT, text(), T, COUNT, 4).batches:
        with torch.no_grad():
            states = deep.base_model(**batch.given, output_hidden_states=True).hidden_states
        sizes = [np.linalg.norm(state, axis=-1) for state in states[:-1]]  # the last of a decoder is normalised
        steps = [np.linalg.norm(new - old, axis=-1) for old, new in pairwise(states[:-1])]
        read = batch.readable.numpy()
        assert read.all() == (objective == NEXT)  # rows of sentences leave some places empty
        for row in range(len(read)):
            each.append([(step / size)[row, read[row]].mean() for step, size in zip(steps, sizes, strict=False)])
    assert [one.change.value for one in got.applied[:8]] == pytest.approx(np.mean(each, 0), rel=1e-9)


def test_the_unigram_is_of_the_whole_text(folder):
    got = sweep(opened(decoder("llama"), folder))
    counts = np.bincount(text(), minlength=V) + 1
    nll = -np.log(counts / counts.sum())[windows(text(), T, COUNT)[:, 1:]]
    assert got.unigram.value == pytest.approx(nll.mean(), rel=1e-12)
    assert got.predicted == nll.size


@pytest.mark.parametrize("name", ["albert", "open albert", "llama"])
def test_parameters_with_and_without_sharing_are_those_of_built_models(name, folder):
    found = opened(MODELS[name][0](), folder)
    got = sweep(found, count=2)
    assert got.parameters == sum({id(p): p.numel() for p in found.model.parameters()}.values())
    apart = found.model
    if name == "albert":
        apart = albert(num_hidden_groups=TRAINED)
    else:
        share_layers(apart, "none")
    assert got.separate == sum({id(p): p.numel() for p in apart.parameters()}.values()) > got.parameters


def test_more_layers_than_24_are_all_measured(folder):
    got = sweep(opened(open_albert(26), folder), count=2)
    assert len(got.applied) == got.trained == 26


@pytest.mark.parametrize("name", ["albert", "llama"])
def test_pieces_do_not_change_the_numbers(name, folder, monkeypatch):
    found = opened(MODELS[name][0](), folder)
    whole = sweep(found)
    monkeypatch.setattr("tiewise.internals.application_sweep.TOKENS_AT_ONCE", 2 * T)
    monkeypatch.setattr("tiewise.internals.tuned_lens.LOGITS", 20 * V)
    apart = sweep(found)
    assert (whole.windows, whole.predicted) == (apart.windows, apart.predicted)
    for one, other in zip(whole.applied, apart.applied, strict=True):
        assert one.nll.value == pytest.approx(other.nll.value, rel=1e-12)
        assert one.change.value == pytest.approx(other.change.value, rel=1e-12)


def test_an_encoder_is_asked_for_masked_tokens_of_sentences_of_the_text(folder):
    found, ids = opened(albert(), folder), text()
    stream = " ".join(map(str, ids))
    (batch,) = questions(found, False, ids, T, COUNT, 4).batches
    asked = batch.given["input_ids"].clone()
    masked = asked[batch.where] == SPECIAL["mask"]
    assert 0.5 < masked.double().mean() < 1  # of the chosen, 80 % on average
    asked[batch.where] = batch.targets
    for row, read, kinds in zip(asked, batch.readable, batch.given["token_type_ids"], strict=True):
        assert row[0] == SPECIAL["cls"]
        one, other = (row[read & (kinds == kind)].tolist() for kind in (0, 1))
        assert one[-1] == other[-1] == SPECIAL["sep"]
        assert " ".join(map(str, one[1:-1] + other[:-1])) in stream
        assert one[-2] == other[-2] == DOT
    other = next(questions(found, False, ids, T, COUNT, 5).batches)
    assert not torch.equal(other.given["input_ids"], batch.given["input_ids"])


def test_an_encoder_without_segments_is_given_none(folder):
    found = opened(albert(type_vocab_size=1), folder)
    assert set(next(questions(found, False, text(), T, COUNT, 4).batches).given) == {"input_ids", "attention_mask"}
    assert sweep(found).own.nll.value > 0


def test_a_tokenizer_without_marks_and_a_text_without_a_window_are_refused(folder, tmp_path):
    bare = Tokenizer(models.WordLevel({f"W{i}": i for i in range(V)}, unk_token="W0"))
    tr.PreTrainedTokenizerFast(tokenizer_object=bare, mask_token="W3").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"its tokenizer has no \[CLS\], \[SEP\], \[PAD\]; put the model's own"):
        sweep(opened(albert(), open_folder(tmp_path)))
    with pytest.raises(DataError, match="hold no window of 16"):
        application_sweep(opened(decoder("llama"), folder), text()[:9], T)
    with pytest.raises(DataError, match="no document has two sentences"):
        application_sweep(opened(albert(), folder), WORDS, T)


def test_what_is_not_finite_is_no_number_and_never_the_best():
    layer = Affine(1e9 * np.eye(16), np.zeros(16))  # fp32 ends at 3e38
    got = sweep(with_layers([layer] * 2))
    assert (got.applied[-1].nll, got.applied[-1].more, got.applied[-1].change) == (None, None, None)
    assert got.own.nll.value >= got.best.nll.value > 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("gpt2"), "every layer has parameters of its own"),
        (lambda: albert(1), "one layer, applied once"),
        (lambda: albert(4, num_hidden_groups=2), "its 4 layers share parameters in part only"),
        (lambda: open_albert(3, "ffn"), "its 3 layers share parameters in part only"),
        (lambda: open_albert(4, "sandwich"), "in part only"),
        (lambda: open_albert(3, "all+rank=2"), "in part only"),
        (lambda: open_albert(5, "all:cycle=2"), "in part only"),
        (lambda: build("t5"), "an encoder and a decoder"),
    ],
)
def test_where_no_block_is_repeated_the_reason_is_one_line(make, reason, folder):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        sweep(opened(make(), folder))
    assert "\n" not in str(caught.value)
