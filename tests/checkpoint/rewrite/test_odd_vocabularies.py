"""Test verbs on models whose two tables differ in rows, whose head normalises its rows, or whose head has a bias."""

import pytest
import torch
import transformers as tr
from rewrite_models import tensors
from tests.checkpoint import saved_models as sm
from tests.checkpoint.tiny_checkpoints import llama, table
from tokenizers import Tokenizer
from trimmed_words import gpt2, prose

from tiewise import diff
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import factor, resize, tie, transplant, trim, untie
from tiewise.core.errors import CheckpointError

MLLAMA = "MllamaForConditionalGeneration"


@pytest.fixture(scope="module")
def mllama(tmp_path_factory):
    """Save an Mllama, whose input table has 8 rows for images beyond the vocabulary."""
    path = tmp_path_factory.mktemp("mllama")
    sm.tiny(MLLAMA, False).save_pretrained(path)
    return path


def test_verbs_refuse_to_change_rows_of_healthy_mllama(mllama, tmp_path):
    assert not [found.rule for found in check(mllama).at_least("warning")]
    said = "gives the input table 8 rows that the head lacks"
    verbs = [
        lambda: resize(mllama, tmp_path / "b", vocab=128),
        lambda: resize(mllama, tmp_path / "b", multiple_of=64),
        lambda: transplant(mllama, tmp_path / "b", tokenizer=mllama),
        lambda: tie(mllama, tmp_path / "b", force=True),  # the class never ties
    ]
    for verb in verbs:
        with pytest.raises(CheckpointError, match=said):
            verb()


def test_b030_reports_mllama_that_transformers_resized_and_cannot_load(mllama, tmp_path):
    model = getattr(tr, MLLAMA).from_pretrained(mllama)
    model.resize_token_embeddings(120)
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(RuntimeError):  # the table has 120 rows, and the class expects 128
        getattr(tr, MLLAMA).from_pretrained(tmp_path / "a")
    found = {finding.rule: finding for finding in check(tmp_path / "a").findings}
    assert found["B030"].severity == "fatal"
    assert "120 rows, and its class needs 128" in found["B030"].evidence


def test_resize_refuses_model_with_two_vocabularies(tmp_path):
    sizes = {"vocab_size": 99, "decoder_vocab_size": 80, "share_encoder_decoder_embeddings": False}
    sm.tiny("MarianMTModel", False, **sizes).save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"it has two vocabularies \(.*99.* rows\)"):
        resize(tmp_path / "a", tmp_path / "b", vocab=128)


def test_verbs_refuse_head_whose_rows_the_class_normalises(tmp_path):
    config = {"model_type": "bailing_moe", "norm_head": True}
    path = llama(tmp_path / "a", False, head=table(seed=2), config=config)
    said = "norm_head is true: the class divides the rows of the head by their lengths"
    for verb in (lambda: tie(path, tmp_path / "b", keep="input"), lambda: factor(path, tmp_path / "b", rank=2)):
        with pytest.raises(CheckpointError, match=said):
            verb()
    receipt = tie(path, tmp_path / "b", keep="input", force=True)
    assert any(said in note for note in receipt.notes)
    with pytest.raises(CheckpointError, match=said):
        transplant(path, tmp_path / "c", tokenizer=path)
    assert resize(path, tmp_path / "d", vocab=32).written  # new rows may have any length
    noted = [note for note in diff(path, tmp_path / "d").notes if said in note]
    assert len(noted) == 2
    assert all("only the direction (cosine) of its rows counts" in note for note in noted)


BIAS = "lm_head.bias"


def save_phi(path, tied, words):
    """Save a Phi, whose head has a bias, with a tokenizer."""
    rows = words.get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    sm.tiny("PhiForCausalLM", tied, vocab_size=rows, **ids).save_pretrained(path)
    words.save(str(path / "tokenizer.json"))
    return tensors(path)[BIAS]


@pytest.mark.parametrize("tied", [True, False])
def test_verbs_keep_head_bias_with_its_tokens(tmp_path, tied):
    """Other tools drop it with a tied head (transformers#35625)."""
    words = gpt2(prose(20_000))
    bias = save_phi(tmp_path / "a", tied, words)
    if tied:
        untie(tmp_path / "a", tmp_path / "b")
    else:
        tie(tmp_path / "a", tmp_path / "b", keep="input")
    assert torch.equal(tensors(tmp_path / "b")[BIAS], bias)

    (tmp_path / "text").write_text(prose(2_000), encoding="utf-8")
    trim(tmp_path / "a", tmp_path / "c", text=tmp_path / "text")
    left = Tokenizer.from_file(str(tmp_path / "c" / "tokenizer.json")).get_vocab()
    old = words.get_vocab()
    made = tensors(tmp_path / "c")[BIAS]
    assert len(made) == len(left) < len(bias)
    assert all(made[number] == bias[old[token]] for token, number in left.items())

    other = gpt2(prose(20_000, 100_000), 600)
    (tmp_path / "words").mkdir()
    other.save(str(tmp_path / "words" / "tokenizer.json"))
    transplant(tmp_path / "a", tmp_path / "d", tokenizer=tmp_path / "words")
    made = tensors(tmp_path / "d")[BIAS]
    shared = other.get_vocab().keys() & old.keys()
    assert len(shared) > 300
    assert all(made[other.get_vocab()[token]] == bias[old[token]] for token in shared)
