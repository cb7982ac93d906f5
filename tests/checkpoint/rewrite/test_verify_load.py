"""Test the load of a rewrite with transformers in a child process and its comparison with the source."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers as tr
from rewrite_models import saved
from safetensors.numpy import load_file, save_file
from tests.checkpoint import saved_models as sm
from tests.checkpoint import tiny_classes as classes
from tests.checkpoint.tiny_checkpoints import llama, llama_config, table, write_checkpoint, write_sparse
from trimmed_words import gpt2, prose

from tiewise.checkpoint.rewrite import Receipt, registry, resize, tie, trim, untie
from tiewise.cli import load_child, verify_load

PLANTED = "from pathlib import Path\nPath('planted').touch()\n"  # code that must not run


@pytest.fixture
def in_process(monkeypatch):
    """Run the child's work in this process, which has imported torch already."""

    def load_here(paths, rows, _):
        return load_child.compare_folders(list(map(str, paths)), rows)

    monkeypatch.setattr(verify_load, "_load_in_child", load_here)


def run_command(folder, *arguments):
    """Run a command that verifies its result by a load; return (exit code, JSON, stderr)."""
    environment = {key: value for key, value in os.environ.items() if key != "TIEWISE_NO_VERIFY_LOAD"}
    line = [sys.executable, "-m", "tiewise", *map(str, arguments), "--json"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_command_verifies_load_and_runs_no_code_of_folder(tmp_path):
    saved(tmp_path / "a", "gpt2")
    for name in ("torch.py", "transformers.py", "a/modeling_gpt2.py"):
        (tmp_path / name).write_text(PLANTED)
    # `python -m` imports from the current folder, and the installed command does not
    line = "import sys; sys.argv[0] = 'tiewise'; sys.path.remove(''); from tiewise.__main__ import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "TIEWISE_NO_VERIFY_LOAD"}
    command_line = [sys.executable, "-c", line, "untie", "a", "--to", "b", "--json"]
    done = subprocess.run(command_line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)["loaded"]
    assert loaded["outcome"] == "verified"
    assert "without a missing tensor, and gives the same logits at 24 tokens (largest change 0)" in loaded["sentence"]
    assert not (tmp_path / "planted").exists()


def test_command_fails_if_result_has_tensors_drawn_at_random(tmp_path):
    hybrid = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    sm.tiny("ZambaForCausalLM", True, **hybrid).save_pretrained(tmp_path / "a")
    code, receipt, err = run_command(tmp_path, "untie", "a", "--to", "b", "--force")
    assert code == 1
    assert receipt["loaded"]["outcome"] == "failed"
    assert "draws 9 tensors of the result at random that the source has: model.layers.3.shared_transf" in err


@pytest.mark.parametrize("option", ["--no-verify-load", "--dry-run"])
def test_command_loads_nothing_with_no_verify_load_or_dry_run(tmp_path, option):
    llama(tmp_path / "a", True)
    code, receipt, _ = run_command(tmp_path, "untie", "a", "--to", "b", option)
    assert (code, "loaded" in receipt) == (0, False)


def outcome_and_sentence(receipt):
    found = verify_load.verify_load(receipt)
    return found.outcome, found.sentence


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "t5"])
def test_verify_load_confirms_unchanged_logits(tmp_path, in_process, name):
    saved(tmp_path / "a", name)
    made = resize(tmp_path / "a", tmp_path / "b", vocab=128)
    outcome, sentence = outcome_and_sentence(made)
    assert outcome == "verified"
    assert "the same logits of the rows that both have" in sentence


def test_verify_load_seeds_random_numbers_equally_for_source_and_result(tmp_path, in_process):
    hashed = {"attn_layers": ["lsh", "lsh"], "num_buckets": 4, "lsh_attn_chunk_length": 8, "num_hashes": 1}
    config = classes.reformer("ReformerModelWithLMHead").config.to_dict() | hashed | {"axial_pos_embds": False}
    model = tr.ReformerModelWithLMHead(tr.ReformerConfig.from_dict(config)).eval()
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "a")
    outcome, sentence = outcome_and_sentence(resize(tmp_path / "a", tmp_path / "b", vocab=64))
    assert (outcome, "the same logits" in sentence) == ("verified", True), sentence


def test_verify_load_compares_no_logits_of_class_without_table(tmp_path, in_process):
    text = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "project_dim": 16}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    config = tr.AltCLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    tr.AltCLIPModel(config).save_pretrained(tmp_path / "a")
    outcome, sentence = outcome_and_sentence(resize(tmp_path / "a", tmp_path / "b", vocab=96))
    assert (outcome, "AltCLIPModel names no table of tokens" in sentence) == ("verified", True), sentence


def test_verify_load_compares_no_logits_of_discriminator(tmp_path, in_process):
    sizes = {"embedding_size": 16, "hidden_size": 16, "intermediate_size": 24}
    config = tr.ElectraConfig(vocab_size=64, num_hidden_layers=1, num_attention_heads=2, **sizes)
    tr.ElectraForPreTraining(config).save_pretrained(tmp_path / "a")
    outcome, sentence = outcome_and_sentence(resize(tmp_path / "a", tmp_path / "b", vocab=96))
    assert (outcome, "ElectraForPreTraining gives no logits over" in sentence) == ("verified", True), sentence


def test_verify_load_compares_logits_of_tokens_that_trim_kept(tmp_path, in_process):
    tokenizer = gpt2(prose(20_000))
    path, rows = tmp_path / "a", tokenizer.get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    sm.tiny("LlamaForCausalLM", False, vocab_size=rows, **ids).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (tmp_path / "text").write_text(prose(3_000), encoding="utf-8")
    made = trim(path, tmp_path / "b", text=tmp_path / "text")
    outcome, sentence = outcome_and_sentence(made)
    assert outcome == "verified", sentence
    assert "the same logits of the tokens that stay" in sentence
    head = load_file(tmp_path / "b" / "model.safetensors")
    name = next(name for name in head if "norm" in name or "ln_" in name)
    save_file(head | {name: head[name] * 2}, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    assert outcome_and_sentence(made)[0] == "failed"


def test_verify_load_fails_for_different_logits_and_missing_tensors(tmp_path, in_process):
    saved(tmp_path / "a", "llama")
    made = untie(tmp_path / "a", tmp_path / "b")
    assert outcome_and_sentence(made)[0] == "verified"
    held = load_file(tmp_path / "b" / "model.safetensors")
    held["lm_head.weight"] = held["lm_head.weight"][::-1].copy()
    save_file(held, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    outcome, sentence = outcome_and_sentence(made)
    assert outcome == "failed"
    assert "logits of source and result differ by up to" in sentence
    del held["lm_head.weight"]
    save_file(held, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    outcome, sentence = outcome_and_sentence(made)
    assert (outcome, "1 tensor of the result at random" in sentence) == ("failed", True)


def test_verify_load_compares_no_logits_if_tie_changes_table(tmp_path, in_process):
    saved(tmp_path / "a", "llama", tied=False)
    outcome, sentence = outcome_and_sentence(tie(tmp_path / "a", tmp_path / "b", keep="input"))
    assert outcome == "verified"
    assert "logits were not compared: the two tables differed" in sentence


def test_verify_load_compares_no_logits_if_source_logits_are_random(tmp_path, in_process):
    path = llama(tmp_path / "a", False, tensors={"lm_head.weight": None})
    made = tie(path, tmp_path / "b", keep="input")
    source = load_child.compare_folders([str(path), str(path)], "all")
    assert "lm_head.weight" in source["missing"][0]
    assert "so its logits are random" in outcome_and_sentence(made)[1]


NOT_LOADED = {
    "custom code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "come as custom code, which is not run"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "it is quantised"),
    "no class": ({"architectures": None}, "names no class"),
    "unknown class": ({"architectures": ["MineForCausalLM"]}, "transformers has no class MineForCausalLM"),
    "auto class": ({"architectures": ["AutoModelForCausalLM"]}, "transformers has no class AutoModelForCausalLM"),
    "own": ({"model_type": "tiewise"}, "is not a class of transformers"),
}


@pytest.mark.parametrize("case", NOT_LOADED)
def test_verify_load_reports_why_it_did_not_load(tmp_path, in_process, case):
    config, why = NOT_LOADED[case]
    path = write_checkpoint(tmp_path / "a", llama_config(True) | config, {"model.embed_tokens.weight": table()})
    made = receipt_of("untie", path)
    outcome, sentence = outcome_and_sentence(made)
    assert outcome == "not verified"
    assert why in sentence


def receipt_of(verb, path):
    """Return a receipt of a verb that changed nothing."""
    registry.find(verb)  # imports the verb, as a call does
    return Receipt(verb, path, path, (), (), 0, 0, (), (), (), 0.0, 0.0, "")


def test_verify_load_refuses_load_beyond_free_memory(tmp_path, monkeypatch):
    llama(tmp_path / "a", rows=400, width=120)
    receipt = untie(tmp_path / "a", tmp_path / "b")
    kilobytes = verify_load.LIBRARY_BYTES // 1024  # enough for the libraries and for no model
    (tmp_path / "meminfo").write_text(f"MemAvailable: {kilobytes} kB\n")
    monkeypatch.setattr("tiewise.checkpoint.untrusted.MEMINFO", str(tmp_path / "meminfo"))
    outcome, why = outcome_and_sentence(receipt)
    assert outcome == "not verified"
    assert why.startswith("loading it needs 2.15 GB of memory, and 2.15 GB are free")


def test_verify_load_skips_adapters_large_models_and_missing_libraries(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "a", llama_config(True), {"model.embed_tokens.weight": table()})
    assert "an adapter has no logits" in outcome_and_sentence(receipt_of("slim", path))[1]
    write_sparse(path / "model.safetensors", {"model.embed_tokens.weight": ("F32", (10**6, 501))})
    assert outcome_and_sentence(receipt_of("untie", path)) == (
        "not verified",
        "it has 2 GB of tensors, and up to 2 GB are loaded",
    )
    monkeypatch.setattr(verify_load, "find_spec", lambda name: None)
    assert outcome_and_sentence(receipt_of("untie", path)) == ("not verified", "not installed: torch, transformers")


def test_verify_load_reports_child_that_exceeds_time_limit(tmp_path, monkeypatch):
    path = llama(tmp_path / "a", True)
    monkeypatch.setattr(verify_load, "MOST_SECONDS", 0.01)
    assert outcome_and_sentence(receipt_of("untie", path))[1] == "loading took longer than 0.01 s"
