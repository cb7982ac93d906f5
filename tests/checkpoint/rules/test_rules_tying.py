"""Test that B010 to B022, B080 and B090 report broken folders and are silent on healthy ones."""

import ml_dtypes
import numpy as np
import pytest
import transformers
from rule_runs import assert_fires, assert_silent, run_rule, table_of
from tiny_checkpoints import D, V, llama, llama_config, llama_tensors, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import repair

TYING = "B010 B011 B012 B013 B014 B015 B016"
HEAD, TABLE, FLAG = "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"
OTHER = table(seed=2)
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": V, "d_model": D}
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
BART = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart", FLAG: False}
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
OWN = {"model_type": "tiewise", "base_model_type": "llama", "architectures": ["TiewiseLlamaForCausalLM"]}
GRANITE = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
MINE = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
UNTIED = {"tied": False}
UNSAID = {"config": {FLAG: None}}


def drifted(rows=(), noise=0.0, dtype=np.float32):
    """Return the Llama's table with some rows redrawn or with noise in all rows."""
    head = llama_tensors()[TABLE] + noise * table(seed=5)
    head[list(rows)] = table(seed=6)[list(rows)]
    return head.astype(dtype)


def nested(root, text, head=None, **config):
    """Return a function that writes a VLM's folder as transformers 4 did."""
    tensors = {f"language_model.{name}": array for name, array in llama_tensors(head=head).items()}
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", FLAG: root}
    whole |= {"text_config": llama_config(text), "vision_config": {"model_type": "clip_vision_model", FLAG: True}}
    return lambda path: write_checkpoint(path, whole | config, tensors)


def of(config, **tensors):
    """Return a function that writes a config and tables by module, where `x__y` means `x.y`."""
    named = {f"{name.replace('__', '.')}.weight": array for name, array in tensors.items()}
    return lambda path: write_checkpoint(path, config, named)


def factored(path, maps=True):
    """Write a tiewise checkpoint with a narrow table and its maps."""
    tensors = {TABLE: table(V, 4), "model.norm.weight": np.ones(16, np.float32)}
    ends = {"model.embed_tokens.in_map.weight": table(16, 4), "lm_head.out_map.weight": table(4, 16)}
    tensors |= ends if maps else {}
    return write_checkpoint(path, llama_config(width=16) | OWN | {"tiewise_boundary": "factored:4"}, tensors)


def gone(*names, **more):
    """Return changes of a Llama's tensors: None for the removed names, and additional tensors."""
    return dict.fromkeys(names) | {f"model.{name.replace('__', '.')}": array for name, array in more.items()}


ZEROED = np.where(np.arange(V)[:, None] == 7, 0, table())
BF16 = ml_dtypes.bfloat16
TIE = "tiewise tie PATH --keep input --to PATH-fixed"
REPAIR = "tiewise repair PATH --to PATH-fixed"
# rules, severity, place, whether the repair is safe, how to write the folder, words
FIRES = [
    ("B010", "fatal", "input table", False, {"tensors": gone(TABLE, words__w=table(), layers__0__mlp__big=table())},
     f"no input table with {V} rows is stored", "It may be one of these: model.words.w\n"),
    ("B010", "fatal", TABLE, False, UNTIED | {"tensors": gone(TABLE, words__w=table()) | {HEAD: OTHER}},
     "It may be one of these: model.words.w\n"),
    ("B011", "fatal", HEAD, False, UNTIED | {"tensors": gone(HEAD)}, "the config says untied, and no head is stored",
     TIE),
    ("B011 B020", "fatal", HEAD, False, UNSAID, "absent"),
    ("B011 B021", "fatal", f"language_model.{HEAD}", True, nested(False, False, generator={FLAG: True}),
     "generator.tie_word_embeddings is true"),
    ("B012", "error", HEAD, True, {"head": OTHER}, "24 of 24 rows differ (first: 0, 1, 2, 3, 4, 5, 6, 7, …)", REPAIR),
    ("B012", "error", HEAD, True, {"head": drifted([3, 20])}, "2 of 24 rows differ (first: 3, 20)"),
    ("B012", "error", HEAD, True, {"head": drifted(noise=1e-3)},
     "by 0.099 % of their length, so they were one table once"),
    ("B012 B041", "error", HEAD, True, {"tensors": {TABLE: ZEROED}, "head": table()},
     "1 of 24 rows differ (first: 7), from zeros, so they were one table once"),
    ("B012", "error", HEAD, False, {"head": 0.02 * OTHER}, "times shorter, so the head was probably never trained",
     "if it was never trained: tiewise tie PATH --keep input --to PATH-fixed; to use it all the same: "),
    ("B012", "info", HEAD, False, {"head": OTHER, "config": CLASSIFIER}, "has no token head"),
    ("B013", "info", HEAD, False, {"head": table(), "config": CLASSIFIER}, "has no token head"),
    ("B013", "warning", HEAD, True, {"head": table()},
     f"stored twice, which costs {V * D * 4} bytes", "\ntiewise repair PATH --to PATH-fixed\n"),
    ("B013", "warning", HEAD, True, {"head": table(), "shards": 2}),
    ("B014", "info", HEAD, False, UNTIED | {"head": table()}, TIE),
    ("B015 B040", "warning", HEAD, False, UNTIED | {"head": drifted(dtype=BF16)},
     "(F32 and BF16): equal in all 24 rows once both have the narrower type"),
    ("B015", "warning", HEAD, False, UNTIED | {"head": drifted([7])}, "1 of 24 rows differ (first: 7)"),
    ("B015", "warning", HEAD, False, UNTIED | {"head": drifted(noise=1e-3)}, "24 of 24 rows differ"),
    ("B015 B040", "warning", HEAD, False, {"head": drifted(dtype=BF16)}, "narrower type"),  # a tied pair, cast
    ("B016", "error", HEAD, True, {"tensors": gone(TABLE) | {HEAD: table()}}, f"loaders look for {TABLE}", REPAIR),
    ("B016", "error", HEAD, False, UNTIED | {"tensors": gone(TABLE)}, "if it was trained tied: tiewise tie "),
    ("B020", "warning", FLAG, True, UNTIED | UNSAID, "llama: its class then does not tie; two tables are stored"),
    ("B020", "info", FLAG, True, {"config": GEMMA | {FLAG: None}}, "its class then ties"),  # all loaders agree
    *(("B020 B011", "warning", FLAG, True, {"config": {FLAG: no_flag}}, "must be true or false")
      for no_flag in ("true", 1, 0, [], {}, 1.5)),
    # either level ties in LLaVA's class; transformers 4 reads the text part alone
    ("B021", "warning", f"text_config.{FLAG}", True, nested(True, False), "The tensors are tied\n"),
    ("B021", "info", FLAG, True, nested(False, True), "The tensors are tied\n"),
    ("B021 B012", "error", f"text_config.{FLAG}", True, nested(False, True, OTHER), "The tensors are untied\n"),
    ("B021 B012", "error", FLAG, True, nested(True, False, OTHER), "The tensors are untied\n"),
    ("B022", "error", FLAG, False, of(T5 | {FLAG: False}, shared=table()), "no head is stored"),
    ("B022 B020", "error", "encoder.embed_tokens.weight", False,
     of(T5, shared=table(), encoder__embed_tokens=OTHER, decoder__embed_tokens=table()), "24 of 24 rows differ"),
    ("B012", "error", HEAD, False, of(T5 | {FLAG: True}, shared=table(), lm_head=OTHER)),  # the flag also scales
    ("B080 B012", "warning", "a", False, {"head": OTHER}, "4 of 7 loaders would fail or load something else: ",
     "vLLM before August 2026, mlx-lm, SGLang\n", "load it only with transformers 5.23.0, vLLM since August",
     "until the other findings are fixed\n"),
    ("B080", "warning", "a", False, UNTIED | {"config": GEMMA}, "3 of 7 loaders would fail or load something else: ",
     "llama.cpp", "\nload it only with transformers, vLLM before August 2026, SGLang\n"),
    # no stock loader opens a factored table
    ("B080", "error", "a", False, factored,
     "only transformers loads the type `tiewise`, and only after `import tiewise.hf`",
     "tiewise factor PATH --undo --to PATH-fixed"),
    ("B090", "info", "logits_scaling", False, {"config": GRANITE}, "logits_scaling = 8"),
]  # fmt: skip


@table_of(FIRES)
def test_tying_rules_report_broken_folders(tmp_path, case):
    assert_fires(tmp_path, case)


BERT_TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER, SEGMENTS = "cls.predictions.decoder.bias", "bert.embeddings.token_type_embeddings.weight"
WHOLE_BERT = BERT | {"vocab_size": V, "hidden_size": D, "type_vocab_size": 2, FLAG: True}
BOTH_BIASES = {BERT_TABLE: table(), BIAS: table(V, 1)[:, 0], DECODER: table(V, 1)[:, 0], SEGMENTS: table(2)}
SILENT = [
    (f"{TYING} B020 B021 B022 B080 B090", {}),
    (f"{TYING} B020 B021 B022 B080 B090", UNTIED),
    (f"{TYING} B020 B021 B022 B090", nested(True, True)),
    (f"{TYING} B020 B021 B022 B090", nested(False, False, OTHER)),
    (TYING, of({"model_type": "vit"}, encoder=table())),
    (TYING, of(None, encoder=table())),
    ("B080", {"config": GEMMA}),
    ("B080", of(None, model__embed_tokens=table())),
    ("B011", {"config": GEMMA | {FLAG: None}}),  # the class default applies if the flag is absent
    *(("B011", UNTIED | {"tensors": gone(HEAD), "config": {"architectures": [headless]}})
      for headless in ("LlamaModel", "LlamaForSequenceClassification")),
    ("B011", UNTIED | {"tensors": gone(HEAD, ff_last=table()), "config": MINE}),  # the other matrix may be the head
    ("B012", UNTIED | {"head": OTHER}),
    ("B014 B015", UNTIED | {"head": table(), "config": CLASSIFIER}),
    ("B015", UNTIED | {"head": drifted([7]), "config": CLASSIFIER}),
    ("B021", nested(True, True, qformer_config={"vocab_size": 30522, FLAG: False})),  # a part without text
    (f"{TYING} B020 B021 B030 B033 B035", lambda path: write_checkpoint(path, WHOLE_BERT, BOTH_BIASES)),
    (f"{TYING} B021 B022", of(T5, shared=table())),
    (f"{TYING} B021 B022", of(T5 | {FLAG: True}, shared=table(), encoder__embed_tokens=table())),
    (f"{TYING} B021 B022", of(T5 | {FLAG: False}, shared=table(), lm_head=table(seed=1))),
]  # fmt: skip


@table_of(SILENT)
def test_tying_rules_are_silent_on_healthy_folders(tmp_path, case):
    assert_silent(tmp_path, case)


def test_rules_that_compare_tables_are_silent_without_scan(tmp_path):
    path = llama(tmp_path / "a", head=OTHER)
    assert [run_rule(rule, path, scan=False) for rule in ("B012", "B013", "B014", "B015")] == [[]] * 4
    assert "do not decide" in run_rule("B021", nested(True, False, OTHER)(tmp_path / "b"), scan=False)[0].evidence


@pytest.mark.parametrize(("spec", "fires"), [("projected:8,untied", False), ("projected:8", True), ("nonsense", True)])
def test_b012_reads_tie_of_tiewise_checkpoint_from_boundary_spec(tmp_path, spec, fires):
    """The flag cannot decide, because BERT's stays true: it ties more than the two ends."""
    assert len(run_rule("B012", llama(tmp_path, head=OTHER, config=OWN | {"tiewise_boundary": spec}))) == fires


SHARED = {"model.shared.weight": table()}


def with_prefix(prefix, tied=True):
    return {prefix + name: array for name, array in llama_tensors(tied).items()}


def vector(count=V, value=0.0):
    return np.full(count, value, np.float32)


@pytest.mark.parametrize(
    ("config", "tensors", "rule", "words"),
    [
        ({}, with_prefix("_orig_mod."), "B010", "its class looks for model.embed_tokens.weight"),
        ({}, with_prefix("module.", False), "B010", "its class looks for model.embed_tokens.weight"),
        (GEMMA, with_prefix("language_model."), "B010", "its class looks for"),
        ({"architectures": ["LlamaModel"]}, with_prefix("_orig_mod."), "B010", "draws the table at random"),
        (BART, SHARED, "B011", "no head is stored"),
        (BART, SHARED | {HEAD: OTHER}, "B010", "an untied model"),
        ({FLAG: False}, with_prefix("") | {"model.extra.weight": table()}, "B011", "may be one of these: model.extra"),
        ({FLAG: False, "quantization_config": {"bits": 4}}, with_prefix(""), "B011", "at random"),
        ({FLAG: False}, with_prefix("") | {"model.lm_heads.weight": table()}, "B011", "no head is stored"),
        ({FLAG: False}, with_prefix("") | {"output.weight": table()}, "B011", "looks for lm_head.weight"),
        (BERT | {FLAG: False},
         {BERT_TABLE: table(), "cls.predictions.decoder.weight": OTHER, BIAS: vector()}, "B035", "starts"),
        (BERT, {BERT_TABLE: table(), BIAS: vector(), DECODER: vector(value=1)}, "B035", "this class has one bias"),
        (BERT, {BERT_TABLE: table(), BIAS: vector(V - 3)}, "B035", "refuses"),
        (BERT, {BERT_TABLE: table(), BIAS: np.array(0, np.float32)}, "B035", f"1 entry, and the tables have {V} rows"),
        (BART | {FLAG: True}, SHARED | {"final_logits_bias": vector()[None, :-3]}, "B035", "refuses"),
        (BART | {FLAG: True}, SHARED | {"final_logits_bias": vector()}, "B035", "refuses"),
    ],
)  # fmt: skip
def test_check_reports_error_that_names_tensors_lost_by_loaders(tmp_path, config, tensors, rule, words):
    path = write_checkpoint(tmp_path, llama_config() | config, tensors)
    found = [finding for finding in check(path).at_least("error") if finding.rule == rule]
    assert any(words in finding.evidence for finding in found), found


def test_b010_reports_two_models_in_one_file(tmp_path):
    """TRL's wrapper saves the policy and the value model in one file."""
    path = write_checkpoint(tmp_path, llama_config(), with_prefix("policy.") | with_prefix("value_model."))
    (found,) = [finding for finding in check(path).findings if finding.rule == "B010"]
    assert found.severity == "fatal"
    assert "stored as policy.model.embed_tokens.weight" in found.evidence
    assert "value_model.model.embed_tokens.weight is such a table too" in found.evidence


def test_b011_warns_of_wrong_logits_if_scaled_table_is_tied(tmp_path):
    """MiniCPM saved as Llama stores its table times 12 and neither head nor flag, so a tie would be wrong."""
    for times, certain in ((1, True), (12, False)):
        path = llama(tmp_path / str(times), config={FLAG: None}, tensors={TABLE: times * table()})
        found = {finding.rule: finding for finding in check(path).findings}
        assert found["B011"].severity == "fatal"
        assert ("wrong logits" in found["B011"].evidence) is not certain
        assert ("times as large" in found["B011"].evidence) is not certain
        assert found["B020"].safe is certain
    assert "times as large" not in check(path, scan=False).findings[0].evidence


@pytest.mark.parametrize("head", [None, OTHER])
def test_vllm_draws_missing_head_of_nemotron_parse_at_random(tmp_path, head):
    """vllm#53019: its class fills the head only from a stored one, whatever the flag."""
    config = {"model_type": "nemotron_parse", "architectures": ["NemotronParseForConditionalGeneration"], FLAG: True}
    config |= {"is_encoder_decoder": True, "decoder": {"vocab_size": V, "d_model": D, FLAG: True}}
    tensors = {"decoder.embed_tokens.weight": table()} | ({} if head is None else {HEAD: head})
    audit = check(write_checkpoint(tmp_path, config, tensors))
    (row,) = [row for row in audit.outcomes if row.loader == "vLLM"]
    assert (row.outcome, row.right) == (("random head", False) if head is None else ("untied", True))


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_check_reports_file_name_that_transformers_does_not_open(tmp_path, file):
    path = llama(tmp_path, False)
    (path / "model.safetensors").rename(path / file)
    audit = check(path)
    assert {finding.rule for finding in audit.at_least("error")} == {"B002", "B080"}
    assert audit.outcomes[1].outcome == "load error"
    assert [outcome.outcome for outcome in audit.outcomes[4:6]] == ["load error" if "cons" in file else "untied"] * 2
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(path)


def test_check_reports_single_file_that_hides_indexed_shards(tmp_path):
    path = llama(tmp_path, False, shards=2)
    write_checkpoint(tmp_path / "old", llama_config(), llama_tensors(True))
    (tmp_path / "old" / "model.safetensors").rename(path / "model.safetensors")
    audit = check(path)
    assert "transformers opens model.safetensors" in audit.at_least("error")[0].evidence
    assert [outcome.outcome for outcome in audit.outcomes[:2]] == ["depends"] * 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)[1]
    assert "lm_head.weight" in loaded["missing_keys"]  # the old file has no head, the shards have one


def test_check_treats_signed_zeros_as_equal_and_nan_as_different(tmp_path):
    zero, minus, nan = table(), table(), table()
    zero[7], minus[7], nan[7, 3] = 0.0, -0.0, np.nan
    for name, rows, head, tied in (("signs", zero, minus, True), ("nan", nan, nan, False)):
        path = llama(tmp_path / name, True, tensors={TABLE: rows}, head=head)
        model = transformers.LlamaForCausalLM.from_pretrained(path)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        audit = check(path)
        assert audit.outcomes[1].outcome == ("tied" if tied else "kept with a warning")
        assert [finding.rule for finding in audit.at_least("warning")] == ["B013"]
        assert ("NaN" in audit.findings[0].evidence) is not tied
        repair(path, tmp_path / f"{name}-once")
        assert check(tmp_path / f"{name}-once").at_least("warning") == ()
