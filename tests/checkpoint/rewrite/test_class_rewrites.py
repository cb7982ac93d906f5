"""Test rewrites of classes that tie more than embedding and head, and of classes with further tables of tokens.

`tools/class_rewrites.py` runs every pair of class and rewrite; its expected tensors and logits come from the model in
memory.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import transformers as tr
from rewrite_models import saved
from safetensors.numpy import load_file, save_file
from tests.checkpoint import tiny_classes as made

from tiewise.checkpoint.rewrite import tie, trim, untie

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
class_rewrites = import_module("class_rewrites")

REFUSED = [  # class, rewrite, part of the reason
    ("RobertaForMaskedLM", "transplant tied", "positions start after pad_token_id, which would change from 1 to 8"),
    ("XGLMForCausalLM", "transplant untied", "positions start after pad_token_id"),
    ("MobileBertForMaskedLM", "resize tied", "cls.predictions.dense.weight, a part of the head, has a column for each"),
    ("MobileBertForPreTraining", "trim tied", "cls.predictions.dense.weight, a part of the head, has a column for"),
    ("MobileBertForMaskedLM", "factor tied", "cannot have factored tables: cls.predictions.dense.weight"),
    ("IBertForMaskedLM", "factor tied", "cannot have factored tables: ibert.embeddings.word_embeddings is a Quant"),
    ("FSMTForConditionalGeneration", "factor untied", "cannot have factored tables: its output head is an Embedding"),
    ("BlipForConditionalGeneration", "factor tied", "BlipForConditionalGeneration cannot have factored tables"),
    ("BartForConditionalGeneration", "factor untied", "two different input tables; keep them"),
    ("BartForConditionalGeneration", "merge untied", "several input tables; load it with its base"),
    ("BartForConditionalGeneration", "tie untied --keep input", "keep it untied: its flag ties all of them"),
    ("ZambaForCausalLM", "untie tied", "the flag also ties model.layers.#.shared_transf of several layers"),
    ("MusicgenForConditionalGeneration", "resize tied", "decoder.lm_heads.0.weight has 99 rows too"),
]
EQUAL = [
    ("BertForMaskedLM", "tie untied --keep output"),
    ("BertForMaskedLM", "merge tied"),
    ("RobertaForMaskedLM", "trim untied"),
    ("BartForConditionalGeneration", "factor --undo tied"),
]


def task(name):
    return next(task for task in class_rewrites.tasks() if task.name == name)


@pytest.mark.parametrize(("class_name", "rewrite", "reason"), REFUSED)
def test_rewrite_is_refused_with_its_reason(class_name, rewrite, reason):
    outcome = class_rewrites.run(class_name, task(rewrite))
    assert outcome.state == "refused", outcome
    assert reason in outcome.detail


@pytest.mark.parametrize(("class_name", "rewrite"), EQUAL)
def test_rewrite_gives_expected_tensors_and_logits(class_name, rewrite):
    assert class_rewrites.run(class_name, task(rewrite)) == class_rewrites.Outcome(class_name, rewrite, "equal")


@pytest.mark.slow
def test_sampled_rewrites_are_equal_or_refused(capsys):
    """A seeded part of the pairs; the tool runs all of them."""
    arguments = class_rewrites.read_arguments(["--sample", "60", "--seed", "4"])
    outcomes = [class_rewrites.run(name, task) for name, task in class_rewrites.chosen_pairs(arguments)]
    states = [outcome.state for outcome in outcomes]
    assert [outcome for outcome in outcomes if outcome.state == class_rewrites.DIFFERENT] == []
    assert states.count("equal") > len(states) / 3
    assert all(outcome.detail for outcome in outcomes if outcome.state == "refused")


def test_trim_keeps_ids_before_padding_of_class_that_counts_positions_from_it(tmp_path):
    """The token with id 5 is padding; no config or text names those before it."""
    config = made.TEXT_CONFIGS["roberta"]().to_dict() | {"pad_token_id": 5, "bos_token_id": 5, "eos_token_id": 6}
    tr.RobertaForMaskedLM(tr.RobertaConfig.from_dict(config)).save_pretrained(tmp_path / "a")
    class_rewrites.write_tokenizer(tmp_path / "a", [*range(18, 24), *range(18)])  # ids 0 to 5 are pairs of letters
    trim(tmp_path / "a", tmp_path / "b", size=16)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["pad_token_id"] == 5


def test_tie_keeps_bias_that_untied_bert_adds(tmp_path):
    saved(tmp_path / "a", "bert")
    untie(tmp_path / "a", tmp_path / "untied")
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    tensors["cls.predictions.bias"] = tensors["cls.predictions.bias"] + 1  # an untied model does not add this one
    save_file(tensors, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
    tie(tmp_path / "untied", tmp_path / "b", keep="input")
    result = load_file(tmp_path / "b" / "model.safetensors")
    assert (result["cls.predictions.bias"] == tensors["cls.predictions.decoder.bias"]).all()
    assert "cls.predictions.decoder.bias" not in result
