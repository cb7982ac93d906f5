"""B010 to B022, B080 and B090: fire on broken folders, silent on healthy ones and where all loaders agree."""

import ml_dtypes
import numpy as np
import pytest
import transformers
from rule_runs import one, run
from tiny_checkpoints import D, V, llama, llama_config, llama_tensors, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.rewrite import dedupe

TYING = [f"B01{n}" for n in range(7)]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": V, "d_model": D}


def drifted(rows=(), noise=0.0):
    """The Llama's own table, with some rows drawn anew or all of them moved."""
    head = llama_tensors()[TABLE] + noise * table(seed=5)
    head[list(rows)] = table(seed=6)[list(rows)]
    return head


def nested(path, root, text, head=None, **config):
    """A VLM's folder as transformers 4 wrote it."""
    tensors = {f"language_model.{name}": array for name, array in llama_tensors(head=head).items()}
    part = llama_config(None)
    if text is not None:
        part["tie_word_embeddings"] = text
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": part}
    whole |= {"vision_config": {"model_type": "clip_vision_model", "tie_word_embeddings": True}}
    whole |= {} if root is None else {"tie_word_embeddings": root}
    return write_checkpoint(path, whole | config, tensors)


@pytest.mark.parametrize("rule", [*TYING, "B020", "B021", "B022", "B090"])
@pytest.mark.parametrize("tied", [True, False])
def test_silent_on_healthy_llamas(tmp_path, rule, tied):
    assert run(rule, llama(tmp_path / "a", tied)) == []
    assert run(rule, nested(tmp_path / "b", tied, tied, head=None if tied else table(seed=2))) == []


@pytest.mark.parametrize("rule", TYING)
def test_silent_without_a_config_or_a_vocabulary(tmp_path, rule):
    path = write_checkpoint(tmp_path / "vit", {"model_type": "vit"}, {"encoder.weight": table()})
    assert run(rule, path) == []
    assert run(rule, write_checkpoint(tmp_path / "bare", None, {"encoder.weight": table()})) == []


def test_b010_names_a_table_of_the_right_size_under_another_name(tmp_path):
    tensors = {TABLE: None, "model.words.w": table(), "model.layers.0.mlp.big": table()}
    finding = one("B010", llama(tmp_path, tensors=tensors))
    assert (finding.severity, finding.where) == ("fatal", "input table")
    assert f"vocab_size is {V}" in finding.evidence
    assert finding.evidence.endswith("one of these may be: model.words.w")
    assert not finding.safe


def test_b010_fires_beside_a_head_too(tmp_path):
    path = llama(tmp_path, False, tensors={TABLE: None, "model.words.w": table(), HEAD: table(seed=2)})
    assert one("B010", path).evidence.endswith("one of these may be: model.words.w")
    assert run("B016", path) == []


def test_b011_an_untied_model_without_a_head(tmp_path):
    path = llama(tmp_path, False, tensors={HEAD: None})
    finding = one("B011", path)
    assert (finding.severity, finding.where, finding.safe) == ("fatal", HEAD, False)
    assert "tie_word_embeddings is false" in finding.evidence
    assert f"tiewise tie {path} --keep input --to NEW_DIR" in finding.repair


def test_b011_the_class_default_counts_where_the_flag_is_absent(tmp_path):
    assert "absent" in one("B011", llama(tmp_path / "a", config={"tie_word_embeddings": None})).evidence
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "tie_word_embeddings": None}
    assert run("B011", llama(tmp_path / "b", config=gemma)) == []


def test_b011_is_safe_where_another_level_says_tied(tmp_path):
    finding = one("B011", nested(tmp_path, False, False, generator={"tie_word_embeddings": True}))
    assert finding.safe
    assert "generator.tie_word_embeddings is true" in finding.evidence


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForSequenceClassification"])
def test_b011_silent_on_headless_classes(tmp_path, architecture):
    path = llama(tmp_path, False, tensors={HEAD: None}, config={"architectures": [architecture]})
    assert run("B011", path) == []


def test_b011_silent_where_an_unknown_name_may_be_the_head(tmp_path):
    config = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    path = llama(tmp_path, False, tensors={HEAD: None, "model.ff_last.weight": table()}, config=config)
    assert run("B011", path) == []


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (table(seed=2), "24 of 24 rows differ (first: 0, 1, 2, 3, 4, 5, 6, 7, …)"),
        (drifted(rows=[3, 20]), "2 of 24 rows differ (first: 3, 20)"),
        (drifted(noise=1e-3), "by 0.099 % of their length; once one table"),
    ],
)
def test_b012_says_which_rows_differ_and_by_how_much(tmp_path, head, words):
    path = llama(tmp_path, head=head)
    finding = one("B012", path)
    assert (finding.severity, finding.where, finding.safe) == ("error", HEAD, True)
    assert words in finding.evidence
    assert f"tiewise repair {path} --to NEW_DIR" in finding.repair
    assert run("B013", path) == run("B014", path) == run("B015", path) == []


def test_b012_silent_where_the_config_says_untied(tmp_path):
    assert run("B012", llama(tmp_path, False, head=table(seed=2))) == []


def test_b013_and_b014_tell_the_same_pair_by_the_flag(tmp_path):
    tied, untied = llama(tmp_path / "a", True, head=table()), llama(tmp_path / "b", False, head=table())
    finding = one("B013", tied)
    assert (finding.severity, finding.where, finding.safe) == ("warning", HEAD, True)
    assert f"{V * D * 4} bytes stored twice" in finding.evidence
    assert finding.repair == f"tiewise dedupe {tied} --to NEW_DIR"
    assert run("B014", tied) == run("B012", tied) == run("B013", untied) == []
    finding = one("B014", untied)
    assert (finding.severity, finding.safe) == ("info", False)
    assert f"tiewise tie {untied} --keep input --to NEW_DIR" in finding.repair


def test_rules_that_compare_are_silent_when_only_headers_may_be_read(tmp_path):
    path = llama(tmp_path, head=table(seed=2))
    assert [run(rule, path, scan=False) for rule in ("B012", "B013", "B014", "B015")] == [[]] * 4


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (drifted().astype(ml_dtypes.bfloat16), "(F32 and BF16): equal in all 24 rows once both have the narrower type"),
        (drifted(rows=[7]), "1 of 24 rows differ (first: 7)"),
        (drifted(noise=1e-3), "24 of 24 rows differ"),
    ],
)
def test_b015_finds_two_tables_that_were_one(tmp_path, head, words):
    finding = one("B015", llama(tmp_path, False, head=head))
    assert (finding.severity, finding.safe) == ("warning", False)
    assert words in finding.evidence


def test_b015_fires_after_a_cast_of_a_tied_pair_too(tmp_path):
    path = llama(tmp_path, True, head=drifted().astype(ml_dtypes.bfloat16))
    assert "narrower type" in one("B015", path).evidence
    assert run("B012", path) == []


def test_b016_a_head_that_stands_for_both(tmp_path):
    finding = one("B016", llama(tmp_path, tensors={TABLE: None, HEAD: table()}))
    assert (finding.severity, finding.where) == ("error", HEAD)
    assert f"loaders look for {TABLE}" in finding.evidence
    assert (finding.safe, "tiewise repair " in finding.repair) == (True, True)


def test_b016_without_a_claim_of_tying_is_for_the_user_to_decide(tmp_path):
    finding = one("B016", llama(tmp_path, False, tensors={TABLE: None}))
    assert not finding.safe
    assert "if it was trained tied: tiewise tie " in finding.repair


def test_b020_absent_and_a_head_stored(tmp_path):
    finding = one("B020", llama(tmp_path, False, config={"tie_word_embeddings": None}))
    assert (finding.severity, finding.where, finding.safe) == ("warning", "tie_word_embeddings", True)
    assert "llama, whose class takes false, and a head is stored" in finding.evidence


def test_b020_is_a_note_where_all_loaders_agree(tmp_path):
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "tie_word_embeddings": None}
    finding = one("B020", llama(tmp_path, config=gemma))
    assert (finding.severity, finding.safe) == ("info", True)
    assert "whose class takes true" in finding.evidence


@pytest.mark.parametrize("value", ["true", 1, 0, [], {}, 1.5])
def test_b020_a_flag_that_is_no_flag(tmp_path, value):
    finding = one("B020", llama(tmp_path, config={"tie_word_embeddings": value}))
    assert (finding.severity, finding.where) == ("warning", "tie_word_embeddings")
    assert "neither true nor false" in finding.evidence


@pytest.mark.parametrize(("root", "text"), [(True, False), (False, True)])
@pytest.mark.parametrize("head", [None, table(seed=2)])
def test_b021_names_the_level_that_is_wrong(tmp_path, root, text, head):
    finding = one("B021", nested(tmp_path, root, text, head))
    tied = head is None
    assert finding.severity == "error"
    assert finding.where == ("text_config.tie_word_embeddings" if root is tied else "tie_word_embeddings")
    assert finding.evidence.endswith("the tensors say tied" if tied else "the tensors say untied")
    assert finding.safe
    assert "do not tell" in one("B021", nested(tmp_path, root, text, table(seed=2)), scan=False).evidence


def test_b021_passes_over_parts_without_text(tmp_path):
    path = nested(tmp_path, True, True, qformer_config={"vocab_size": 30522, "tie_word_embeddings": False})
    assert run("B021", path) == []


def test_b022_false_and_only_shared(tmp_path):
    path = write_checkpoint(tmp_path, T5 | {"tie_word_embeddings": False}, {"shared.weight": table()})
    finding = one("B022", path)
    assert (finding.severity, finding.safe) == ("error", False)
    assert "no head is stored" in finding.evidence
    assert run("B011", path) == []


def test_b022_input_tables_that_differ(tmp_path):
    stacks = {
        "shared.weight": table(),
        "encoder.embed_tokens.weight": table(seed=1),
        "decoder.embed_tokens.weight": table(),
    }
    finding = one("B022", write_checkpoint(tmp_path, T5, stacks))
    assert finding.severity == "error"
    assert "24 of 24 rows differ" in finding.evidence


@pytest.mark.parametrize(
    ("flag", "tensors"),
    [
        ({}, {"shared.weight": table()}),
        ({"tie_word_embeddings": True}, {"shared.weight": table(), "encoder.embed_tokens.weight": table()}),
        ({"tie_word_embeddings": False}, {"shared.weight": table(), "lm_head.weight": table(seed=1)}),
    ],
)
def test_no_finding_on_the_three_kinds_of_t5(tmp_path, flag, tensors):
    path = write_checkpoint(tmp_path, T5 | flag, tensors)
    assert [run(rule, path) for rule in (*TYING, "B021", "B022")] == [[]] * 9


def test_b012_on_t5_is_not_safe_as_the_flag_also_scales(tmp_path):
    tensors = {"shared.weight": table(), "lm_head.weight": table(seed=1)}
    assert not one("B012", write_checkpoint(tmp_path, T5 | {"tie_word_embeddings": True}, tensors)).safe


def test_b090_names_the_numbers(tmp_path):
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0}
    finding = one("B090", llama(tmp_path, config=granite))
    assert finding.severity == "info"
    assert "logits_scaling = 8" in finding.evidence


def test_bert_with_both_names_of_its_bias_is_healthy(tmp_path):
    name = "bert.embeddings.word_embeddings.weight"
    bias = np.zeros(V, np.float32)
    tensors = {name: table(), "cls.predictions.bias": bias, "cls.predictions.decoder.bias": bias}
    tensors |= {"bert.embeddings.token_type_embeddings.weight": table(2)}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": V, "hidden_size": D}
    config |= {"type_vocab_size": 2, "tie_word_embeddings": True}
    path = write_checkpoint(tmp_path, config, tensors)
    assert [run(rule, path) for rule in (*TYING, "B020", "B021", "B030", "B033", "B035")] == [[]] * 12


@pytest.mark.parametrize(("spec", "fires"), [("projected:8,untied", False), ("projected:8", True), ("nonsense", True)])
def test_in_a_checkpoint_of_this_package_the_spec_decides(tmp_path, spec, fires):
    """BERT keeps its flag true, as it ties more than the two ends."""
    own = {"model_type": "tiewise", "base_model_type": "llama", "architectures": ["TiewiseLlamaForCausalLM"]}
    path = llama(tmp_path, True, head=table(seed=2), config=own | {"tiewise_boundary": spec})
    assert len(run("B012", path)) == fires


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
