"""Test questions to classes that are built without weights: the child process, its cache, and its limits."""

import json
import os
import subprocess
import sys

import pytest
import saved_models as saved
import tiny_classes as made
import torch
import transformers as tr
from asked_classes import asking_in_this_process, reply_here
from observed_loads import filled_memory
from safetensors.torch import load_file, save_file
from tiny_checkpoints import llama, llama_config

from tiewise.checkpoint import built_class, built_class_child
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.built_class import ClassQuestion, NotBuilt, ask
from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loader_columns import ERROR, NEW_TENSORS, RANDOM_HEAD, RANDOM_TENSORS, TIED
from tiewise.checkpoint.new_tensors import NewTensors
from tiewise.core import json_child
from tiewise.core.json_child import NoReply
from tiewise.core.progress import listen_to_progress

QUESTION = "tiewise.checkpoint.class_load_answer"
PLANTED = "from pathlib import Path\nPath('planted').touch()\n"  # code that must not run
CONFIG = {**llama_config(True), "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def enabled(monkeypatch, tmp_path):
    """Allow questions, with an empty cache."""
    monkeypatch.setenv(built_class.SWITCH, "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def question(config=CONFIG, class_name="LlamaForCausalLM", stored=None):
    return ClassQuestion(config, class_name, QUESTION, stored or {})


def installed_transformers(audit):
    return next(row for row in audit.outcomes if (row.loader, row.versions) == ("transformers", tr.__version__))


def test_command_asks_class_in_child_process_and_runs_no_code_of_folder(tmp_path):
    tr.LlamaForCausalLM(made.TEXT_CONFIGS["llama"]()).save_pretrained(tmp_path / "a")
    lost = "model.layers.0.mlp.up_proj.weight"
    rewritten(tmp_path / "a", without(lost))
    for name in ("torch.py", "transformers.py", "a/modeling_llama.py"):
        (tmp_path / name).write_text(PLANTED)
    # `python -m` imports from the current folder, and the installed command does not
    line = "import sys; sys.argv[0] = 'tiewise'; sys.path.remove(''); from tiewise.__main__ import main; main()"
    environment = os.environ | {built_class.SWITCH: "0", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", line, "check", "a", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    findings = {finding["rule"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert lost in findings["B036"]["evidence"]
    assert not (tmp_path / "planted").exists()
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_ask_uses_cached_reply_and_does_not_cache_stopped_child(enabled, monkeypatch):
    replies = [NoReply("took longer than 60 s"), {"tensors": 3}]
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments, **options: replies.pop(0))
    stopped = ask(question())
    reason = "building LlamaForCausalLM without weights took longer than 60 s"
    assert stopped == NotBuilt(reason, is_stopped=True)
    assert ask(question()) == {"tensors": 3}
    assert ask(question()) == {"tensors": 3}  # no reply is left
    assert replies == []


def test_check_notes_that_a_stopped_child_left_tensors_unjudged(enabled, monkeypatch, tmp_path):
    reply = NoReply("took more processor time than its limit")
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments, **options: reply)
    path = llama(tmp_path / "a", tied=True)
    (note,) = [finding for finding in check(path).findings if finding.rule == "B036"]
    assert note.severity == "info"
    assert note.evidence.startswith("tensors outside the embedding and head were not judged: building LlamaForCausalLM")
    monkeypatch.setattr(built_class, "find_spec", lambda name: None)  # no library is no limit that was hit
    assert not [finding for finding in check(path).findings if finding.rule == "B036"]


@pytest.mark.parametrize(("limit", "value", "words"), [("MOST_SECONDS", 1, "time"), ("MOST_BYTES", 10**8, "memory")])
def test_child_that_hits_a_limit_is_stopped_and_not_cached(enabled, monkeypatch, tmp_path, limit, value, words):
    monkeypatch.setattr(built_class, limit, value)
    reply = ask(question())
    assert isinstance(reply, NotBuilt)
    assert reply.is_stopped, reply
    assert words in reply.reason, reply
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_waiting_for_child_is_reported_every_second(enabled, monkeypatch):
    monkeypatch.setattr(json_child, "REPORT_SECONDS", 0.2)
    heard = []
    with listen_to_progress(lambda name, done, total: heard.append((name, done, total))):
        ask(question())
    assert set(heard) == {("building LlamaForCausalLM without weights", 0, 0)}


def test_ask_deletes_oldest_of_too_many_cached_replies(enabled, monkeypatch, tmp_path):
    monkeypatch.setattr(built_class, "MOST_CACHED", 2)
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments, **options: {"tensors": 3})
    for width in (8, 16, 24):
        ask(question(CONFIG | {"hidden_size": width}))
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_ask_repairs_damaged_cache(enabled, monkeypatch, tmp_path):
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments, **options: {"tensors": 3})
    ask(question())
    (cached,) = (tmp_path / "cache").rglob("*.json")
    cached.write_text("{")
    assert ask(question()) == {"tensors": 3}
    assert json.loads(cached.read_text()) == {"tensors": 3}


def test_ask_says_why_class_was_not_built(enabled, monkeypatch):
    monkeypatch.setattr(built_class, "find_spec", lambda name: None)
    assert ask(question()) == NotBuilt("torch is not installed")
    monkeypatch.setenv(built_class.SWITCH, "1")
    assert ask(question()) == NotBuilt("TIEWISE_NO_BUILD is set")


@pytest.mark.parametrize(
    ("config", "class_name", "words", "is_refused"),
    [
        (CONFIG, "NobodyForCausalLM", "has no class NobodyForCausalLM", False),
        (CONFIG, "AutoConfig", "has no class AutoConfig", False),
        (CONFIG | {"num_attention_heads": 5}, "LlamaForCausalLM", "is not a multiple of", True),
        (CONFIG | {"model_type": "nobody"}, None, "nobody", True),
    ],
)
def test_child_says_if_class_refuses_config(config, class_name, words, is_refused):
    with asking_in_this_process():
        from tiewise.checkpoint import class_load

        reply = class_load.ask(question(config, class_name))
    assert words in reply.reason
    assert reply.is_refused is is_refused


def test_class_of_config_without_architectures_comes_from_auto_mappings():
    reply = reply_here(ClassQuestion(CONFIG, None, QUESTION, {"tensors": {}, "dtype": None}))
    assert "lm_head.weight" in reply["missing"]


def test_check_asks_no_class_for_custom_code_quantised_or_single_files(tmp_path):
    path = llama(tmp_path / "a", True)
    config = json.loads((path / "config.json").read_text())
    with asking_in_this_process():
        from tiewise.checkpoint import class_load

        class_load.ask = lambda question: pytest.fail("a class was asked")
        check(path / "model.safetensors")
        for extra in ({"auto_map": {}}, {"quantization_config": {"quant_method": "fp8"}}, {"architectures": None}):
            (path / "config.json").write_text(json.dumps(config | extra))
            check(path)
        check(path, build=False)


def rewritten(path, change):
    """Change the stored tensors of a folder in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def without(*words):
    """Return a change that removes tensors whose names contain one of the words."""

    def change(tensors):
        for name in [name for name in tensors if any(word in name for word in words)]:
            del tensors[name]

    return change


def shortened(name):
    """Return a change that cuts the first axis of a tensor."""

    def change(tensors):
        tensors[name] = tensors[name][:-1].clone()

    return change


def test_class_is_loaded_before_it_is_tied():
    """Ovis 2 may have a head with more rows than the table to which it is tied."""
    name = "Ovis2ForConditionalGeneration"
    record = saved.shrink(tr.Ovis2ForConditionalGeneration).to_dict() | {"vocab_size": 128, FLAG: True}
    config = json.loads(json.dumps(record))
    built = built_class_child.build(config, name)
    stored = {key: ["F32", list(tensor.shape)] for key, tensor in built.state_dict().items()}
    head, table = "lm_head.weight", "model.language_model.embed_tokens.weight"
    assert stored[head][1][0] == 128
    reply = reply_here(ClassQuestion(config, name, QUESTION, {"tensors": stored, "dtype": None}))
    assert (reply["missing"], reply["mismatched"], reply["ties"]) == ([], [], {head: table})


NOT_STORED = [  # class, words in the names of tensors that are not stored
    ("LlamaForCausalLM", ["layers.1.", "norm"]),
    ("BertForMaskedLM", ["predictions.transform", "layer.0.attention"]),
    ("GPT2LMHeadModel", ["h.0.", "wpe"]),
    ("GptOssForCausalLM", ["layers.0."]),
    ("DeepseekV3ForCausalLM", ["layers.1."]),
    ("Mamba2ForCausalLM", ["layers.1."]),
    ("Gemma3ForConditionalGeneration", ["layers.0."]),
    ("BailingHybridForCausalLM", ["layers.1."]),
    ("OpenAIGPTLMHeadModel", ["h.1."]),  # its class does not initialise the biases of Conv1D
]


@pytest.mark.parametrize(("name", "words"), NOT_STORED)
def test_random_tensors_are_those_that_depend_on_the_seed(tmp_path, name, words):
    saved.tiny(name).save_pretrained(tmp_path)
    rewritten(tmp_path, without(*words))
    with asking_in_this_process():
        load = Facts(open_folder(tmp_path), builds=True).class_load
    models = [loaded_under(seed, name, tmp_path) for seed in (0, 1)]
    differing = set()
    for missing in (*load.missing, *load.missing_buffers):
        one, other = (model.get_parameter_or_buffer(missing) for model in models)
        if not torch.equal(one, other):  # NaN, with which fresh memory is filled, equals nothing
            differing.add(missing)
    assert load.random == differing
    assert load.missing


def loaded_under(seed, name, folder):
    """Return a model of a folder, with missing tensors drawn from a seed."""
    torch.manual_seed(seed)
    with filled_memory():
        return getattr(tr, name).from_pretrained(folder)


@pytest.mark.parametrize(
    ("random", "passive", "active"),
    [
        (3, "3 of 9 tensors are drawn at random", "it draws 3 of 9 tensors at random"),
        (0, "3 of 9 tensors start with fixed numbers", "it starts 3 of 9 tensors with fixed numbers"),
        (
            *(1, "3 of 9 tensors are newly initialised, 1 of them at random"),
            "it newly initialises 3 of 9 tensors, 1 of them at random",
        ),
    ],
)
def test_sentence_on_missing_tensors_says_how_they_start(random, passive, active):
    new = NewTensors(3, random, 9)
    assert (new.passive(), new.active("it")) == (passive, active)


def test_missing_buffer_of_zeros_is_not_called_random(tmp_path):
    saved.tiny("BailingHybridForCausalLM").save_pretrained(tmp_path)
    rewritten(tmp_path, without("expert_bias"))
    with asking_in_this_process():
        audit = check(tmp_path)
    row = installed_transformers(audit)
    assert row.outcome == NEW_TENSORS
    assert "with fixed numbers" in row.sentence
    (found,) = [finding for finding in audit.findings if finding.rule == "B036"]
    assert "with fixed numbers" in found.evidence


BERT = "bert.encoder.layer.0."
CHANGES = [  # model, change of its tensors, outcome
    (lambda: made.masked("bert"), without(), TIED),
    (lambda: made.masked("bert"), without("layer.1."), RANDOM_TENSORS),
    (lambda: made.masked("bert"), without("layer.1.", "predictions.transform"), RANDOM_HEAD),
    (lambda: made.masked("bert"), shortened(f"{BERT}output.dense.weight"), ERROR),
    (lambda: made.text_to_text("bert", "gpt2"), without("enc_to_dec_proj", "decoder.transformer.h.1."), RANDOM_TENSORS),
    (made.t5gemma, without("encoder.layers.0"), RANDOM_TENSORS),
]


@pytest.mark.parametrize(("make", "change", "outcome"), CHANGES)
def test_outcome_for_whole_model_matches_load_with_transformers(tmp_path, make, change, outcome):
    model = make()
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with asking_in_this_process():
        audit = check(tmp_path)
    row = installed_transformers(audit)
    assert row.outcome == outcome
    found = [finding for finding in audit.findings if finding.rule == "B036"]
    if outcome == ERROR:
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            type(model).from_pretrained(tmp_path)
        assert "is stored as" in found[0].evidence
        return
    missing = type(model).from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"]
    elsewhere = {name for name in missing if "predictions.transform" not in name}
    assert bool(found) is bool(elsewhere)
    if elsewhere:
        assert f" {len(elsewhere):,} of " in found[0].evidence
        assert f"{len(elsewhere):,} " in row.sentence
