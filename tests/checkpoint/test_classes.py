"""Test `check` on composite and one-ended classes against transformers, with complete and with missing tensors.

A folder is healthy if transformers loads it without a missing key and with every tensor as saved. The `missing_keys`
of a load name the tensors that transformers draws at random.
"""

import json
import subprocess
import sys
from functools import partial

import pytest
import tiny_classes as made
import torch
import transformers as tr
from safetensors.torch import load_file, save_file
from tiny_checkpoints import llama, llama_tensors

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import factor

FILE, FLAG, UNTIED = "model.safetensors", "tie_word_embeddings", {"tie_word_embeddings": False}

HEALTHY = {
    **{f"image {name} {flag}": partial(made.image_to_text, name, **flag)
       for name in ("trocr", "mbart", "gpt2", "roberta", "bert", "electra", "rembert", "opt")
       for flag in ({}, UNTIED)},
    **{f"sound {name} {flag}": partial(made.sound_to_text, name, **flag)
       for name in ("mbart", "bert") for flag in ({}, UNTIED)},
    **{f"text {first} {second} {flag}": partial(made.text_to_text, first, second, **flag)
       for first, second in (("bert", "bert"), ("roberta", "gpt2"), ("electra", "roberta"), ("mbart", "bert"))
       for flag in ({}, UNTIED)},
    **{f"{name} {text}": partial(made.blip, name, text)
       for name in ("Blip2", "InstructBlip", "InstructBlipVideo") for text in ("opt", "t5", "llama")},
    **{name: partial(made.t5_like, name)
       for name in ("T5EncoderModel", "UMT5EncoderModel", "MT5EncoderModel", "T5Model", "T5ForTokenClassification",
                    "SwitchTransformersModel", "Pop2PianoForConditionalGeneration")},
    **{name: partial(made.recogniser, name)
       for name in ("Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC", "Data2VecAudioForCTC", "UniSpeechForCTC",
                    "SEWForCTC")},
    **{name: partial(made.reformer, name) for name in ("ReformerModelWithLMHead", "ReformerForMaskedLM")},
    **{name: partial(made.musicgen, name) for name in ("Musicgen", "MusicgenMelody")},
    **{name: partial(made.bark, name) for name in ("BarkSemanticModel", "BarkCoarseModel")},
    "T5Gemma": made.t5gemma,
    "T5Gemma untied": partial(made.t5gemma, **UNTIED),
}  # fmt: skip


def save_model(folder, model):
    """Save a model and return its stored tensors and config."""
    model.save_pretrained(folder)
    return load_file(folder / FILE), json.loads((folder / "config.json").read_text())


def write_model(folder, tensors, config):
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def missing(folder, model_class):
    """Return the keys that transformers draws at random or initialises."""
    return set(model_class.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"])


def current_outcome(audit):
    """Return the audit's outcome for the installed transformers."""
    return next(row for row in audit.outcomes if (row.loader, row.versions) == ("transformers", tr.__version__))


def assert_healthy(folder, model):
    """Assert that transformers loads a folder exactly and that no finding is above info."""
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    loaded = again.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    for scan in (True, False):
        audit = check(folder, scan=scan)
        assert audit.at_least("warning") == ()
        assert current_outcome(audit).right is not False
    return audit


@pytest.mark.parametrize("name", HEALTHY)
def test_check_reports_nothing_for_models_that_transformers_reloads(tmp_path, name):
    torch.manual_seed(0)
    model = HEALTHY[name]()
    model.save_pretrained(tmp_path)
    assert_healthy(tmp_path, model)


HEADLESS = ["T5EncoderModel", "UMT5EncoderModel", "MT5EncoderModel", "T5Model", "UMT5Model", "MT5Model"]
HEADLESS += ["T5ForTokenClassification"]


@pytest.mark.parametrize("name", HEADLESS)
@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_check_accepts_false_flag_of_headless_t5(tmp_path, name, kept):
    """Text encoders of image and video generators have a false flag and a table of either name."""
    model = made.t5_like(name)
    tensors, config = save_model(tmp_path, model)
    stored = next(key for key in tensors if key.endswith("shared.weight"))
    table = tensors.pop(stored)
    write_model(tmp_path, tensors | {stored.removesuffix("shared.weight") + kept: table}, config | {FLAG: False})
    assert_healthy(tmp_path, model)


NAMES = {  # name of the decoder's table in each family's class
    "trocr": "decoder.model.decoder.embed_tokens.weight",
    "gpt2": "decoder.transformer.wte.weight",
    "roberta": "decoder.roberta.embeddings.word_embeddings.weight",
}


@pytest.mark.parametrize("decoder", NAMES)
def test_check_reports_missing_table_under_decoder_name_of_family(tmp_path, decoder):
    tensors, config = save_model(tmp_path, made.image_to_text(decoder))
    assert check(tmp_path).record()["names"]["input"] == NAMES[decoder]
    assert current_outcome(check(tmp_path)).outcome == columns.TIED
    del tensors[NAMES[decoder]]
    write_model(tmp_path, tensors, config)
    assert NAMES[decoder] in missing(tmp_path, tr.VisionEncoderDecoderModel)
    assert {"B010", "B080"} <= {finding.rule for finding in check(tmp_path).at_least("error")}
    assert current_outcome(check(tmp_path)).outcome == columns.RANDOM_TABLE


def test_check_does_not_judge_part_of_unknown_family(tmp_path):
    tensors, config = save_model(tmp_path, made.image_to_text("gpt2"))
    config["decoder"]["model_type"] = "nobody"
    write_model(tmp_path, tensors, config)
    audit = check(tmp_path)
    assert audit.at_least("warning") == ()
    assert {row.outcome for row in audit.outcomes if row.loader == "transformers"} == {columns.DEPENDS}


LOST = [  # model, removed tensors, rule that reports them, outcome in transformers
    (made.t5gemma, ["model.decoder.embed_tokens.weight"], "B010", columns.RANDOM_TABLE),
    (made.t5gemma, ["model.encoder.embed_tokens.weight"], "B010", columns.RANDOM_TABLE),
    (partial(made.t5gemma, **UNTIED), ["model.encoder.embed_tokens.weight"], "B010", columns.RANDOM_TABLE),
    *((partial(made.text_to_text, "bert", second), [name], "B010", columns.RANDOM_TABLE)
      for second, tables in (("bert", "bert.embeddings.word_embeddings"), ("gpt2", "transformer.wte"))
      for name in (f"decoder.{tables}.weight", "encoder.embeddings.word_embeddings.weight")),
    (partial(made.masked, "bert"), made.BERT_HEAD, "B019", columns.RANDOM_HEAD),
    (partial(made.masked, "bert"), made.BERT_HEAD[:1], "B019", columns.RANDOM_HEAD),
    (partial(made.masked, "deberta"), made.BERT_HEAD, "B019", columns.RANDOM_HEAD),
    (partial(made.masked, "distilbert"), ["vocab_transform.weight"], "B019", columns.RANDOM_HEAD),
    (partial(made.image_to_text, "bert"), [f"decoder.{name}" for name in made.BERT_HEAD], "B019", columns.RANDOM_HEAD),
    (partial(made.masked, "bert"), ["cls.predictions.bias"], "B035", columns.NEW_BIAS),
    (made.phi, ["lm_head.bias"], "B035", columns.NEW_BIAS),
    (partial(made.phi, tie_word_embeddings=True), ["lm_head.bias"], "B035", columns.NEW_BIAS),
]  # fmt: skip


@pytest.mark.parametrize(("make", "gone", "rule", "outcome"), LOST)
def test_check_reports_error_for_tensors_that_transformers_draws_at_random(tmp_path, make, gone, rule, outcome):
    model = make()
    tensors, config = save_model(tmp_path, model)
    assert_healthy(tmp_path, model)
    for name in gone:
        del tensors[name]
    write_model(tmp_path, tensors, config)
    assert set(gone) <= missing(tmp_path, type(model))
    for scan in (True, False):
        audit = check(tmp_path, scan=scan)
        found = [finding for finding in audit.at_least("error") if finding.rule == rule]
        assert any(name in finding.evidence for finding in found for name in gone), audit.findings
        assert current_outcome(audit).outcome == outcome
        assert current_outcome(audit).right is False
    assert {finding.rule for finding in audit.at_least("error")} == {rule, "B080"}


def with_renamed_tensors(tensors, *changes):
    """Return the tensors with substrings of their names replaced."""
    for old, new in changes:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


PUBLISHED = [("cls.predictions.transform.", "lm_predictions.lm_head."), ("cls.predictions.", "lm_predictions.lm_head.")]


def test_check_reports_publisher_names_of_deberta_head_as_errors(tmp_path):
    tensors, config = save_model(tmp_path, made.masked("deberta"))
    write_model(tmp_path, with_renamed_tensors(tensors, *PUBLISHED), config)
    assert len(missing(tmp_path, tr.DebertaForMaskedLM)) >= 5
    audit = check(tmp_path)
    assert {"B019", "B035", "B080"} == {finding.rule for finding in audit.at_least("error")}
    assert current_outcome(audit).outcome == columns.RANDOM_HEAD


def test_check_accepts_publisher_names_of_deberta_that_config_selects(tmp_path):
    model = made.masked("deberta", legacy=False)
    model.save_pretrained(tmp_path)
    assert_healthy(tmp_path, model)


def test_check_reports_missing_head_of_bert_body_with_masked_lm_class(tmp_path):
    tensors, config = save_model(tmp_path, tr.BertModel(made.TEXT_CONFIGS["bert"]()))
    write_model(tmp_path, tensors, config | {"architectures": ["BertForMaskedLM"]})
    assert {"cls.predictions.bias", *made.BERT_HEAD} <= missing(tmp_path, tr.BertForMaskedLM)
    assert {"B019", "B035", "B080"} == {finding.rule for finding in check(tmp_path).at_least("error")}


@pytest.mark.parametrize("old", [False, True])
def test_check_accepts_gamma_and_beta_as_names_of_layer_norm(tmp_path, old):
    tensors, config = save_model(tmp_path, made.masked("bert"))
    changes = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")] if old else []
    write_model(tmp_path, with_renamed_tensors(tensors, *changes), config)
    assert missing(tmp_path, tr.BertForMaskedLM) == set()
    assert check(tmp_path).at_least("warning") == ()


@pytest.mark.parametrize("has", [True, False])
def test_check_expects_decoder_bias_only_if_config_enables_it(tmp_path, has):
    tensors, config = save_model(tmp_path, made.modernbert(decoder_bias=has))
    assert ("decoder.bias" in tensors) is has
    assert check(tmp_path).at_least("warning") == ()
    tensors.pop("decoder.bias", None)
    write_model(tmp_path, tensors, config)
    assert ("decoder.bias" in missing(tmp_path, tr.ModernBertForMaskedLM)) is has
    assert bool(check(tmp_path).at_least("error")) is has


# prints why transformers refuses a folder, then loads it with tiewise's classes; fails if it needs no such classes
LOAD_TWICE = """
import sys, transformers
load = transformers.AutoModelForCausalLM.from_pretrained
try:
    load(sys.argv[1])
except ValueError as error:
    print(error)
else:
    sys.exit("transformers loads the folder without tiewise.hf")
import tiewise.hf
load(sys.argv[1])
"""


def test_stock_transformers_refuses_factored_model_and_b080_reports_it(tmp_path):
    """The load runs in a child process, because other tests register tiewise's classes in this one."""
    model = tr.LlamaForCausalLM(made.TEXT_CONFIGS["llama"]())
    model.save_pretrained(tmp_path / "plain")
    factor(tmp_path / "plain", tmp_path / "factored", rank=4, force=True)
    audit = check(tmp_path / "factored")
    stock = [row for row in audit.outcomes if row.loader == "transformers"]
    assert {row.outcome for row in stock} == {columns.ERROR}
    assert all("import tiewise.hf" in row.sentence for row in stock)
    taught = next(row for row in audit.outcomes if row.loader == "transformers with tiewise.hf")
    assert taught.right
    assert [finding.severity for finding in audit.findings if finding.rule == "B080"] == ["error"]
    line = [sys.executable, "-c", LOAD_TWICE, str(tmp_path / "factored")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not recognize" in done.stdout


def run_command(*arguments):
    """Run the command line and return its exit code."""
    line = [sys.executable, "-m", "tiewise", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, check=False).returncode


def test_check_and_untie_follow_outside_links_only_with_follow_links(tmp_path):
    path = llama(tmp_path / "model")
    (path / FILE).rename(tmp_path / "elsewhere.safetensors")
    (path / FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    assert "--follow-links" in check(path).at_least("error")[0].repair
    assert check(path, follow_links=True).at_least("warning") == ()
    assert check(path).at_least("error")  # the option applies to one call only
    untie = ["untie", path, "--to", tmp_path / "made", "--quiet"]
    assert [run_command("check", path), run_command("check", path, "--follow-links")] == [1, 0]
    assert [run_command(*untie), run_command(*untie, "--follow-links")] == [2, 0]
    assert not (tmp_path / "made" / FILE).is_symlink()
    assert set(load_file(tmp_path / "made" / FILE)) == {*llama_tensors(), "lm_head.weight"}


def test_check_refuses_shard_names_outside_folder_despite_follow_links(tmp_path):
    path = llama(tmp_path / "model", shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../elsewhere.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not lie in the folder" in check(path, follow_links=True).at_least("fatal")[0].evidence
