"""Test questions to classes that are built without weights: the child process, its cache, and its limits."""

import json

import pytest
from asked_classes import reply_here
from tiny_checkpoints import llama_config

from tiewise.checkpoint import built_class
from tiewise.checkpoint.built_class import ClassQuestion, NotBuilt, ask
from tiewise.core.json_child import NoReply

QUESTION = "tiewise.checkpoint.class_load_answer"
CONFIG = {**llama_config(True), "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def enabled(monkeypatch, tmp_path):
    """Allow questions, with an empty cache."""
    monkeypatch.setenv(built_class.SWITCH, "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def question(config=CONFIG, class_name="LlamaForCausalLM", stored=None):
    return ClassQuestion(config, class_name, QUESTION, stored or {})


def test_ask_uses_cached_reply_and_does_not_cache_stopped_child(enabled, monkeypatch):
    replies = [NoReply("took longer than 60 s"), {"tensors": 3}]
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments: replies.pop(0))
    stopped = ask(question())
    assert stopped == NotBuilt("building LlamaForCausalLM without weights took longer than 60 s")
    assert ask(question()) == {"tensors": 3}
    assert ask(question()) == {"tensors": 3}  # no reply is left
    assert replies == []


def test_ask_deletes_oldest_of_too_many_cached_replies(enabled, monkeypatch, tmp_path):
    monkeypatch.setattr(built_class, "MOST_CACHED", 2)
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments: {"tensors": 3})
    for width in (8, 16, 24):
        ask(question(CONFIG | {"hidden_size": width}))
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_ask_repairs_damaged_cache(enabled, monkeypatch, tmp_path):
    monkeypatch.setattr(built_class, "ask_child", lambda *arguments: {"tensors": 3})
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
    reply = reply_here(question(config, class_name))
    assert words in reply.reason
    assert reply.is_refused is is_refused


def test_class_of_config_without_architectures_comes_from_auto_mappings():
    reply = reply_here(ClassQuestion(CONFIG, None, QUESTION, {}))
    assert "lm_head.weight" in reply["missing"]


def test_child_process_builds_class_within_its_limits(enabled):
    reply = ask(question())
    assert "lm_head.weight" in reply["missing"]
    assert reply["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}
