"""PEFT adapters by files with the names that PEFT 0.21 writes, and the two rules on what they do to a tied base."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import D, V, llama, table

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rule import rules
from tiewise.checkpoint.rules_adapter import COPY, LORA, TOKENS, open_adapter
from tiewise.core.errors import CheckpointError

R = 2
E, H = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
BODY = {
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": np.ones((R, 2 * D), np.float32),
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": np.ones((D, R), np.float32),
}


def on_head(rows=V, width=D):
    a, b = np.ones((R, width), np.float32), np.ones((rows, R), np.float32)
    return {f"{H}.lora_A.weight": a, f"{H}.lora_B.weight": b, f"{H}.base_layer.weight": table(rows, width)}


def on_table(rows=V, width=D):
    a, b = np.ones((R, rows), np.float32), np.ones((width, R), np.float32)
    return {f"{E}.lora_embedding_A": a, f"{E}.lora_embedding_B": b, f"{E}.base_layer.weight": table(rows, width)}


def adapter(path, tensors, **config):
    path.mkdir(exist_ok=True)
    record = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": R, "target_modules": ["down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(record | config))
    if tensors is not None:
        save_file(BODY | tensors, path / "adapter_model.safetensors", {"format": "pt"})
    return path


def facts_of(path, base=None, scan=True):
    folder = open_folder(path)
    assert folder.is_adapter
    return open_adapter(folder, None if base is None else Facts(open_folder(base), scan), scan)


def findings(facts):
    return [found for name in ("B060", "B061") for found in rules()[name].check(facts)]


def brief(facts):
    return [(found.rule, found.severity) for found in findings(facts)]


@pytest.fixture
def tied(tmp_path):
    return llama(tmp_path / "base")


@pytest.fixture
def untied(tmp_path):
    return llama(tmp_path / "untied", False)


def test_reads_config_and_both_ends(tmp_path):
    found = open_adapter(
        open_folder(
            adapter(
                tmp_path / "a",
                on_head(),
                modules_to_save=["embed_tokens", 3],
                trainable_token_indices={"embed_tokens": [1, "x", 2], "y": 4},
                ensure_weight_tying=True,
            )
        )
    )
    assert (found.base_name, found.targets) == ("org/base", ("down_proj",))
    assert (found.saved, found.token_rows, found.ties) == (("embed_tokens",), {"embed_tokens": (1, 2)}, True)
    head = found.update(["lm_head"])
    assert (head.module, head.kind, head.shape) == ("lm_head", LORA, (V, D))
    assert found.update(["embed_tokens"]) is None  # the tensors decide, not the config


@pytest.mark.parametrize(
    ("tensors", "end", "kind", "shape"),
    [
        (on_table(), "input", LORA, (V, D)),
        (on_head(), "output", LORA, (V, D)),
        ({f"{H}.weight": table()}, "output", COPY, (V, D)),
        ({f"{H}.modules_to_save.weight": table()}, "output", COPY, (V, D)),
        ({f"{H}.modules_to_save.default.weight": table()}, "output", COPY, (V, D)),
        (
            {f"{H}.lora_A.default.weight": np.ones((R, D)), f"{H}.lora_B.default.weight": np.ones((V, R))},
            "output",
            LORA,
            (V, D),
        ),
        ({f"{E}.token_adapter.trainable_tokens_delta": np.ones((3, D))}, "input", TOKENS, (-1, D)),
    ],
)
def test_what_is_done_to_an_end(tmp_path, tied, tensors, end, kind, shape):
    for base in (None, tied):
        facts = facts_of(adapter(tmp_path / "a", tensors), base)
        found = getattr(facts, end)
        assert (found.kind, found.shape) == (kind, shape)
        assert getattr(facts, "output" if end == "input" else "input") is None


def test_pickled_adapters_are_named_and_the_config_answers(tmp_path, tied):
    path = adapter(tmp_path / "a", None, target_modules=["q_proj", "lm_head"])
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    facts = facts_of(path, tied)
    assert facts.faults[0].file == "adapter_model.bin"
    assert brief(facts) == [("B060", "error")]


def test_a_pattern_is_never_run(tmp_path, tied):
    path = adapter(tmp_path / "a", None, target_modules="(a|a)*(a|a)*(a|a)*" * 20 + "!")
    assert facts_of(path, tied).output is None


@pytest.mark.parametrize(
    "record", ["[1]", "{", "null", '{"target_modules": {"a": 1}}', '{"peft_type": 3, "modules_to_save": "x"}']
)
def test_odd_configs(tmp_path, record):
    path = adapter(tmp_path / "a", on_head())
    (path / "adapter_config.json").write_text(record)
    if record.startswith('{"'):
        assert facts_of(path).output.kind == LORA
    else:
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
            facts_of(path)


def test_healthy_adapters_are_silent(tmp_path, tied, untied):
    both = {f"{E}.weight": table(), f"{H}.weight": table()}
    for tensors, base in (({}, tied), ({}, None), (on_head(), untied), (on_table() | on_head(), untied), (both, tied)):
        assert brief(facts_of(adapter(tmp_path / "a", tensors), base)) == []
    alone = adapter(tmp_path / "b", {f"{E}.weight": table(seed=4)}, ensure_weight_tying=True)
    assert brief(facts_of(alone, tied)) == []
    rows = adapter(
        tmp_path / "c",
        {f"{E}.token_adapter.trainable_tokens_delta": np.ones((2, D))},
        trainable_token_indices=[1, V - 1],
    )
    assert brief(facts_of(rows, tied)) == []


@pytest.mark.parametrize(
    ("tensors", "ties", "says"),
    [
        (
            on_head(),
            False,
            "low-rank update of lm_head on a base whose two ends are one table: a merge adds it to the other end",
        ),
        (on_table(), False, "low-rank update of model.embed_tokens on"),
        (on_table() | on_head(), False, "a merge adds both updates to that table"),
        (on_table() | on_head(), True, "a merge adds the update twice"),
        ({f"{H}.weight": table(seed=3)}, False, "full copy of lm_head alone"),
        ({f"{E}.weight": table(seed=3)}, False, "full copy of model.embed_tokens alone"),
        ({f"{E}.weight": table(), f"{H}.weight": table(seed=3)}, False, "which differ (ensure_weight_tying is off)"),
        ({f"{E}.weight": table(), f"{H}.weight": table(seed=3)}, True, "which differ (ensure_weight_tying is on)"),
    ],
)
def test_b060_on_a_tied_base(tmp_path, tied, tensors, ties, says):
    (found,) = findings(facts_of(adapter(tmp_path / "a", tensors, ensure_weight_tying=ties), tied))
    assert (found.rule, found.severity, found.where) == ("B060", "error", "a")
    assert says in found.evidence


def test_b060_a_head_that_equals_the_table_is_a_tied_base_too(tmp_path):
    twice = llama(tmp_path / "twice", head=table())
    assert brief(facts_of(adapter(tmp_path / "a", on_head()), twice)) == [("B060", "error")]
    apart = llama(tmp_path / "apart", head=table(seed=9))
    assert brief(facts_of(adapter(tmp_path / "a", on_head()), apart)) == []


def test_b060_nested_flags_stay_true(tmp_path):
    text_config = {"model_type": "gemma3_text", "vocab_size": V, "hidden_size": D, "tie_word_embeddings": True}
    base = llama(tmp_path / "base", config={"model_type": "gemma3", "text_config": text_config})
    tensors = {f"{E}.weight": table(), f"{H}.weight": table(seed=3)}
    (found,) = findings(facts_of(adapter(tmp_path / "a", tensors), base))
    assert "a merge leaves text_config.tie_word_embeddings true" in found.evidence


def test_b060_without_a_base_or_without_reading(tmp_path, tied):
    path = adapter(tmp_path / "a", on_head())
    (found,) = findings(facts_of(path))
    assert (found.rule, found.severity) == ("B060", "info")
    assert "no base was given" in found.evidence
    assert found.repair == f"tiewise check {path} --base BASE"
    path = adapter(tmp_path / "a", {f"{E}.weight": table(), f"{H}.weight": table(seed=3)})
    (found,) = findings(facts_of(path, tied, scan=False))
    assert (found.rule, found.severity) == ("B060", "warning")
    assert "were not compared" in found.evidence


def test_b060_token_rows_of_the_two_ends(tmp_path, tied, untied):
    tensors = {f"{end}.token_adapter.trainable_tokens_delta": np.ones((2, D)) for end in (E, H)}
    path = adapter(tmp_path / "a", tensors, trainable_token_indices={"embed_tokens": [1, 2], "lm_head": [1, 3]})
    (found,) = findings(facts_of(path, tied))
    assert "differ between embed_tokens, lm_head" in found.evidence
    assert brief(facts_of(path, untied)) == []


@pytest.mark.parametrize(
    ("tensors", "shape", "repair"),
    [
        (on_head(V + 8), f"[{V + 8}, {D}]", f"--vocab {V + 8} --to NEW_DIR"),
        (on_table(V + 8), f"[{V + 8}, {D}]", f"--vocab {V + 8} --to NEW_DIR"),
        ({f"{E}.weight": table(V - 4)}, f"[{V - 4}, {D}]", "(org/base)"),
        ({f"{E}.weight": table(V + 4, 2 * D)}, f"[{V + 4}, {2 * D}]", "(org/base)"),
        ({f"{E}.token_adapter.trainable_tokens_delta": np.ones((2, D + 1))}, f"[?, {D + 1}]", "(org/base)"),
    ],
)
def test_b061_shapes(tmp_path, untied, tensors, shape, repair):
    (found,) = findings(facts_of(adapter(tmp_path / "a", tensors), untied))
    assert (found.rule, found.severity) == ("B061", "error")
    assert f"of a table {shape}, and the base stores" in found.evidence
    assert repair in found.repair


def test_b061_a_row_that_the_base_has_not(tmp_path, tied):
    path = adapter(tmp_path / "a", {}, trainable_token_indices=[1, V])
    (found,) = findings(facts_of(path, tied))
    assert (found.rule, found.where) == ("B061", "adapter_config.json")
    assert f"name row {V}" in found.evidence
