"""B080: fires where some loader makes another model of the folder, silent where all agree."""

import numpy as np
import pytest
import transformers
from rule_runs import one, run
from tiny_checkpoints import V, llama, llama_config, llama_tensors, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.rewrite import dedupe

TABLE = "model.embed_tokens.weight"
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


@pytest.mark.parametrize("tied", [True, False])
def test_silent_where_all_loaders_agree(tmp_path, tied):
    assert run("B080", llama(tmp_path / "a", tied)) == []
    assert run("B080", llama(tmp_path / "b", True, config=GEMMA)) == []
    assert run("B080", write_checkpoint(tmp_path / "c", None, {TABLE: table()})) == []


def test_names_every_loader_that_drops_the_head(tmp_path):
    finding = one("B080", llama(tmp_path, True, head=table(seed=2)))
    assert finding.severity == "warning"
    assert "3 of 6 loaders" in finding.evidence
    assert "transformers 4: head dropped" in finding.evidence
    assert "vLLM before August 2026: head dropped" in finding.evidence
    assert "mlx-lm 0.2x: head dropped" in finding.evidence


def test_a_loader_to_blame_alone(tmp_path):
    finding = one("B080", llama(tmp_path, False, config=GEMMA))
    assert finding.severity == "warning"
    assert "1 of 6 loaders" in finding.evidence
    assert "llama.cpp convert_hf_to_gguf: head dropped" in finding.evidence


def test_only_a_note_on_this_packages_own_tables(tmp_path):
    config = llama_config(True, width=16) | {"model_type": "tiewise", "base_model_type": "llama"}
    config |= {"tiewise_boundary": "factored:4", "architectures": ["TiewiseLlamaForCausalLM"]}
    tensors = {TABLE: table(V, 4), "model.embed_tokens.in_map.weight": table(16, 4)}
    tensors |= {"lm_head.out_map.weight": table(4, 16), "model.norm.weight": np.ones(16, np.float32)}
    path = write_checkpoint(tmp_path, config, tensors)
    finding = one("B080", path)
    assert finding.severity == "info"
    assert f"tiewise densify {path} --to NEW_DIR" in finding.repair


BART = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart", "tie_word_embeddings": False}
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
BERT_TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER = "cls.predictions.decoder.bias"


def named(prefix, tied=True):
    return {prefix + name: array for name, array in llama_tensors(tied).items()}


def vector(count=V, value=0.0):
    return np.full(count, value, np.float32)


@pytest.mark.parametrize(
    ("config", "tensors", "rule", "words"),
    [
        ({}, named("_orig_mod."), "B010", "looks for model.embed_tokens.weight"),
        ({}, named("module.", False), "B010", "looks for model.embed_tokens.weight"),
        (GEMMA, named("language_model."), "B010", "not a name that its class is loaded from"),
        ({"architectures": ["LlamaModel"]}, named("_orig_mod."), "B010", "drawn at random"),
        (BART, {"model.shared.weight": table()}, "B011", "no output head is stored"),
        (BART, {"model.shared.weight": table(), "lm_head.weight": table(seed=2)}, "B010", "an untied model"),
        ({"tie_word_embeddings": False}, named("") | {"model.extra.weight": table()}, "B011", "may be it: model.extra"),
        ({"tie_word_embeddings": False, "quantization_config": {"bits": 4}}, named(""), "B011", "at random"),
        ({"tie_word_embeddings": False}, named("") | {"model.lm_heads.weight": table()}, "B011", "no output head"),
        ({"tie_word_embeddings": False}, named("") | {"output.weight": table()}, "B011", "looks for lm_head.weight"),
        (BERT | {"tie_word_embeddings": False},
         {BERT_TABLE: table(), "cls.predictions.decoder.weight": table(seed=2), BIAS: vector()}, "B035", "starts"),
        (BERT, {BERT_TABLE: table(), BIAS: vector(), DECODER: vector(value=1)}, "B035", "the two are one"),
        (BERT, {BERT_TABLE: table(), BIAS: vector(V - 3)}, "B035", "refuses"),
        (BART | {"tie_word_embeddings": True},
         {"model.shared.weight": table(), "final_logits_bias": vector()[None, :-3]}, "B035", "refuses"),
        (BART | {"tie_word_embeddings": True},
         {"model.shared.weight": table(), "final_logits_bias": vector()}, "B035", "refuses"),
    ],
)  # fmt: skip
def test_what_a_loader_loses_is_an_error_and_named(tmp_path, config, tensors, rule, words):
    path = write_checkpoint(tmp_path, llama_config() | config, tensors)
    found = [finding for finding in check(path).at_least("error") if finding.rule == rule]
    assert any(words in finding.evidence for finding in found), found


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_a_file_that_transformers_does_not_open(tmp_path, file):
    path = llama(tmp_path, False)
    (path / "model.safetensors").rename(path / file)
    audit = check(path)
    assert {finding.rule for finding in audit.at_least("error")} == {"B002", "B080"}
    assert audit.outcomes[1].outcome == "load error"
    assert [outcome.outcome for outcome in audit.outcomes[4:]] == ["load error" if "cons" in file else "untied"] * 2
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(path)


def test_the_file_that_an_index_hides(tmp_path):
    path = llama(tmp_path, False, shards=2)
    write_checkpoint(tmp_path / "old", llama_config(), llama_tensors(True))
    (tmp_path / "old" / "model.safetensors").rename(path / "model.safetensors")
    audit = check(path)
    assert "transformers opens model.safetensors" in audit.at_least("error")[0].evidence
    assert [outcome.outcome for outcome in audit.outcomes[:2]] == ["depends"] * 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)[1]
    assert "lm_head.weight" in loaded["missing_keys"]  # the old file has none, the shards do


def test_zeros_of_either_sign_are_one_number_and_nan_is_none(tmp_path):
    zero, minus, nan = table(), table(), table()
    zero[7], minus[7], nan[7, 3] = 0.0, -0.0, np.nan
    for name, rows, head, tied in (("signs", zero, minus, True), ("nan", nan, nan.copy(), False)):
        path = llama(tmp_path / name, True, tensors={TABLE: rows}, head=head)
        model = transformers.LlamaForCausalLM.from_pretrained(path)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        audit = check(path)
        assert audit.outcomes[1].outcome == ("tied" if tied else "kept with a warning")
        assert [finding.rule for finding in audit.at_least("warning")] == ["B013"]
        assert ("NaN" in audit.findings[0].evidence) is not tied
        dedupe(path, tmp_path / f"{name}-once")
        assert check(tmp_path / f"{name}-once").at_least("warning") == ()


def test_rows_that_differ_from_zeros_are_not_called_nan(tmp_path):
    zero, head = table(), table()
    zero[7] = 0.0
    (finding,) = check(llama(tmp_path, True, tensors={TABLE: zero}, head=head)).at_least("error")
    assert "NaN" not in finding.evidence
    assert "first: 7" in finding.evidence
