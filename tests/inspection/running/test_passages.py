"""Cost of text passages under a model, against single forward passes and numpy intervals."""

import math

import numpy as np
import pytest
import torch
from tests.boundary.tiny_models import _LLAMA
from tests.inspection.tiny_folders import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tiewise.core.errors import CheckpointError, DataError
from tiewise.inspection.running import passages as module
from tiewise.inspection.running.passages import cost_change, healed, passage_nats, passages
from tiewise.training.data.tokenizer import make_tokenizer

WORDS = "the two ends of a model are tied, and a text of many words is read by it. Ünder all, é"


@pytest.fixture(scope="module")
def text():
    draw = np.random.default_rng(0)
    return " ".join(draw.choice(WORDS.split(), 3000))


def write_llama(path, text, tokens, seed=0):
    """Write a small Llama with a tokenizer trained on the text; return the folder."""
    tokenizer = make_tokenizer(f"bpe:{tokens}", lambda: iter([text]))
    torch.manual_seed(seed)
    sizes = _LLAMA | {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.5}
    config = LlamaConfig(**sizes | {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id})
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory, text):
    made = tmp_path_factory.mktemp("models")
    return [write_llama(made / f"m{tokens}", text, tokens, tokens) for tokens in (270, 300)]


def test_passages_are_evenly_spaced_parts_of_the_text(text):
    every = passages([text])
    assert text.startswith("".join(every[:2]))
    assert all(200 < len(part) <= 400 and part in text for part in every)
    assert [every.index(part) for part in passages([text], most=12)] == [i * len(every) // 12 for i in range(12)]
    endless = ("x" * 6000 for _ in iter(int, 1))
    assert passages(endless, most=12, read=5000) == ["x" * 150] * 12
    assert {len(part) for part in passages(["x" * 2000])} == {100}
    with pytest.raises(DataError, match=r"700 characters of text are too few .*; give 2,000 or more"):
        passages([text[:300], text[:400]])


def test_passage_nats_matches_one_passage_at_a_time(folders, text):
    parts = passages([text])[:12]
    found = passage_nats(folders[1], parts)
    model = AutoModelForCausalLM.from_pretrained(folders[1]).double()
    tokenizer = AutoTokenizer.from_pretrained(folders[1])
    for part, nats in zip(parts, found, strict=True):
        ids = tokenizer(part, add_special_tokens=False).input_ids
        assert len(ids) > 63  # several windows, because the model has 64 positions
        expected = 0.0
        for start in range(0, len(ids), 63):
            window = torch.tensor([[tokenizer.eos_token_id, *ids[start : start + 63]]])
            with torch.no_grad():
                logits = model(window).logits[0, :-1]
            expected -= float(logits.log_softmax(-1).gather(1, window[0, 1:, None]).sum())
        assert nats == pytest.approx(expected, rel=1e-5)


def test_passage_nats_tokenizes_special_tokens_as_plain_text(folders):
    plain = passage_nats(folders[0], ["a <eos> b"])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    letters = sum(len(tokenizer(part, add_special_tokens=False).input_ids) for part in ("a <", "eos", "> b"))
    assert letters > 5
    assert plain[0] > passage_nats(folders[0], ["a "])[0]


def test_cost_change_gives_bits_per_byte_with_a_ratio_interval(folders, text):
    parts = passages([text])[:25]
    change = cost_change(*(passage_nats(folder, parts) for folder in folders), parts)
    a, b = (passage_nats(folder, parts) / math.log(2) for folder in folders)
    sizes = np.array([len(part.encode()) for part in parts])
    assert change.before == pytest.approx(a.sum() / sizes.sum())
    assert change.after == pytest.approx(b.sum() / sizes.sum())
    more = change.more
    assert (more.value, more.rows) == (pytest.approx(change.after - change.before), 25)
    # the linearised standard error of a ratio, which the jackknife approaches
    residual = (b - a) - more.value * sizes
    error = residual.std(ddof=1) / sizes.mean() / 5
    assert (more.high - more.low) / 2 == pytest.approx(2.064 * error, rel=0.05)
    assert f"{change.before:.4f} → {change.after:.4f} bits per byte" in change.sentence()


def test_healed_reports_the_share_of_the_loss_that_was_recovered(monkeypatch):
    draw = np.random.default_rng(2)
    texts, teacher = ["x" * 100] * 40, draw.uniform(50, 90, 40)
    was = teacher + draw.uniform(10, 20, 40)
    found = was - 0.75 * (was - teacher)
    nats = {"teacher": teacher, "was": was, "made": found}
    monkeypatch.setattr(module, "passage_nats", lambda path, texts: nats[path])
    result = healed("made", "was", "teacher", texts)
    assert result.share.value == pytest.approx(0.75)
    assert result.share.low == pytest.approx(0.75)  # every passage recovers the same share
    assert result.sentence().startswith(
        "Healing recovered 75 % of what was lost (95 % CI 75 % to 75 %, 40 held-out passages): "
    )
    assert result.lost.more.value == pytest.approx((was - teacher).sum() / 4000 / math.log(2))
    nats["was"] = teacher + draw.normal(0, 5, 40)
    assert healed("made", "was", "teacher", texts).sentence().startswith("The rewrite lost nothing measurable: ")
    nats["was"] = teacher - draw.uniform(10, 20, 40)
    worse = healed("made", "was", "teacher", texts).sentence()
    assert worse.startswith("The teacher predicts this text worse than the rewritten model, so there was no loss to ")
    nats["was"] = teacher
    same = healed("made", "was", "teacher", texts)
    assert same.record()["share"]["value"] is None
    assert cost_change(teacher, teacher, texts).more.value == 0


def test_passage_nats_refuses_incomplete_models_and_foreign_tokenizers(tmp_path, folders, text):
    parts = passages([text])[:10]
    write_model(tmp_path / "bare")
    with pytest.raises(CheckpointError):
        passage_nats(tmp_path / "bare", parts)  # the folder lacks the tensors of its layers
    other = write_llama(tmp_path / "other", text, 270)
    make_tokenizer("bpe:300", lambda: iter([text])).save_pretrained(other)
    with pytest.raises(DataError, match=r"names token 29\d, the table has 270 rows"):
        passage_nats(other, parts)
