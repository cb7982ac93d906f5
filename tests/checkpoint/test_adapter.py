"""Test the reading of PEFT adapters, with names as PEFT 0.21 writes them, and the rules on their effect on a base."""

import json

import numpy as np
import pytest
from rule_runs import summaries
from safetensors.numpy import save_file
from tiny_checkpoints import D, V, llama, table, with_rows, write_checkpoint

from tiewise.checkpoint.adapter import COPY, LORA, TOKENS, open_adapter
from tiewise.checkpoint.adapter_settings import lora_config
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import slim, untie
from tiewise.core.errors import CheckpointError

R = 2
E, H = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
LAYER = "layers.0.mlp.down_proj"


def low_rank_on(module, rows=D, width=D):
    """Return a low-rank update of a matrix."""
    a, b = np.ones((R, width), np.float32), np.ones((rows, R), np.float32)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def low_rank_on_head(rows=V):
    return low_rank_on(H, rows) | {f"{H}.base_layer.weight": table(rows)}


def low_rank_on_table(rows=V):
    a, b = np.ones((R, rows), np.float32), np.ones((D, R), np.float32)
    return {f"{E}.lora_embedding_A": a, f"{E}.lora_embedding_B": b, f"{E}.base_layer.weight": table(rows)}


BODY = low_rank_on(f"base_model.model.model.{LAYER}", width=2 * D)
UNNAMED = {name.replace(".weight", ".default.weight"): factor for name, factor in low_rank_on(H, V).items()}


def trained_rows(end, count=2, width=D):
    return {f"{end}.token_adapter.trainable_tokens_delta": np.ones((count, width))}


def adapter(path, tensors, **config):
    path.mkdir(exist_ok=True)
    record = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": R, "target_modules": ["down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(record | config))
    if tensors is not None:
        save_file(BODY | tensors, path / "adapter_model.safetensors", {"format": "pt"})
    return path


def facts_of(path, base=None):
    return open_adapter(open_folder(path), None if base is None else Facts(open_folder(base)))


def findings(path, base=None, rules=("B060", "B061"), **how):
    return check(path, base=base, select=rules, **how).findings


def test_open_adapter_reads_config_and_update_of_head(tmp_path):
    chosen = {"modules_to_save": ["embed_tokens", 3], "ensure_weight_tying": True}
    chosen["trainable_token_indices"] = {"embed_tokens": [1, "x", 2], "y": 4}
    found = facts_of(adapter(tmp_path / "a", low_rank_on_head(), **chosen))
    assert [found.names_under(key) for key in ("target_modules", "modules_to_save")] == [
        ("down_proj",),
        ("embed_tokens",),
    ]
    assert (found.token_rows, found.ensures_tying) == ({"embed_tokens": (1, 2)}, True)
    head = found.update(["lm_head"])
    assert (head.module, head.form, head.shape) == ("lm_head", LORA, (V, D))
    assert found.update(["embed_tokens"]) is None  # the tensors decide, not the config


@pytest.mark.parametrize(
    ("tensors", "end", "kind", "shape"),
    [
        (low_rank_on_table(), "input", LORA, (V, D)),
        (low_rank_on_head(), "output", LORA, (V, D)),
        ({f"{H}.weight": table()}, "output", COPY, (V, D)),
        ({f"{H}.modules_to_save.weight": table()}, "output", COPY, (V, D)),
        ({f"{H}.modules_to_save.default.weight": table()}, "output", COPY, (V, D)),
        (UNNAMED, "output", LORA, (V, D)),
        (trained_rows(E, 3), "input", TOKENS, (-1, D)),
    ],
)
def test_open_adapter_classifies_update_of_each_end(tmp_path, tensors, end, kind, shape):
    for base in (None, llama(tmp_path / "base")):
        facts = facts_of(adapter(tmp_path / "a", tensors), base)
        found = getattr(facts, end)
        assert (found.form, found.shape) == (kind, shape)
        assert getattr(facts, "output" if end == "input" else "input") is None


@pytest.mark.parametrize(
    "record", ["[1]", "{", "null", '{"target_modules": {"a": 1}}', '{"peft_type": 3, "modules_to_save": "x"}']
)
def test_open_adapter_refuses_unreadable_and_tolerates_odd_configs(tmp_path, record):
    path = adapter(tmp_path / "a", low_rank_on_head())
    (path / "adapter_config.json").write_text(record)
    if record.startswith('{"'):
        assert facts_of(path).output.form == LORA
    else:
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
            facts_of(path)


TIED, UNTIED, NO_BASE = {}, {"tied": False}, None
TEXT = {"model_type": "gemma3_text", "vocab_size": V, "hidden_size": D, "tie_word_embeddings": True}
NESTED = {"config": {"model_type": "gemma3", "text_config": TEXT}}
SAME = {f"{E}.weight": table(), f"{H}.weight": table()}
APART = {f"{E}.weight": table(), f"{H}.weight": table(seed=3)}
TIES = {"ensure_weight_tying": True}
END = "model.embed_tokens"
MERGED = "a merge by PEFT changes the other end too"
LONGER = f"base --vocab {V + 8} --to "
OTHER_ROWS = {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 3]}}
# adapter's tensors, further settings, base, finding, words of its evidence or repair
CASES = [
    ({}, {}, TIED, ""),
    ({}, {}, NO_BASE, ""),
    (low_rank_on_head(), {}, UNTIED, ""),
    (low_rank_on_table() | low_rank_on_head(), {}, UNTIED, ""),
    (SAME, {}, TIED, ""),
    ({f"{E}.weight": table(seed=4)}, TIES, TIED, ""),
    (trained_rows(E), {"trainable_token_indices": [1, V - 1]}, TIED, ""),
    (low_rank_on_head(), {}, {"head": table(seed=9)}, ""),
    (trained_rows(E) | trained_rows(H), OTHER_ROWS, UNTIED, ""),
    (low_rank_on_head(), {}, TIED, "B060 error a", MERGED),
    (low_rank_on_head(), {}, {"head": table()}, "B060 error a"),  # a head that equals the table is a tied base too
    (low_rank_on_table(), {}, TIED, "B060 error a", "low-rank update of model.embed_tokens, and the base is tied"),
    (
        low_rank_on_table() | low_rank_on_head(),
        {},
        TIED,
        "B060 error a",
        "a merge by PEFT adds both updates to the one table",
    ),
    (
        low_rank_on_table() | low_rank_on_head(),
        TIES,
        TIED,
        "B060 error a",
        "a merge by PEFT adds the shared update twice",
    ),
    ({f"{H}.weight": table(seed=3)}, {}, TIED, "B060 error a", "a full copy of only lm_head"),
    ({f"{E}.weight": table(seed=3)}, {}, TIED, "B060 error a", "a full copy of only model.embed_tokens"),
    (APART, {}, TIED, "B060 error a", "which differ (ensure_weight_tying is off)"),
    (APART, TIES, TIED, "B060 error a", "which differ (ensure_weight_tying is on)"),
    (APART, {}, NESTED, "B060 error a", "a merge by PEFT leaves text_config.tie_word_embeddings true"),
    (trained_rows(E) | trained_rows(H), OTHER_ROWS, TIED, "B060 error a", "differs between embed_tokens, lm_head"),
    (low_rank_on_head(), {}, NO_BASE, "B060 info a", "no base was given", "\ntiewise check PATH --base BASE\n"),
    (low_rank_on_head(V + 8), {}, UNTIED, "B061 error lm_head", f"table [{V + 8}, {D}], and", LONGER),
    (low_rank_on_table(V + 8), {}, UNTIED, "B061 error model.embed_tokens", f"table [{V + 8}, {D}], and", LONGER),
    ({f"{E}.weight": table(V - 4)}, {}, UNTIED, f"B061 error {END}", f"table [{V - 4}, {D}], and", "(org/base)"),
    ({f"{E}.weight": table(V + 4, 16)}, {}, UNTIED, f"B061 error {END}", f"table [{V + 4}, 16], and", "(org/base)"),
    (trained_rows(E, 2, D + 1), {}, UNTIED, "B061 error model.embed_tokens", f"table [?, {D + 1}], and", "(org/base)"),
    ({}, {"trainable_token_indices": [1, V]}, TIED, "B061 error adapter_config.json", f"names row {V}"),
]


@pytest.mark.parametrize("case", CASES)
def test_b060_and_b061_report_effect_of_adapter_on_base(tmp_path, case):
    tensors, config, base, said, *words = case
    path = adapter(tmp_path / "a", tensors, **config)
    found = findings(path, None if base is None else llama(tmp_path / "base", **base))
    assert summaries(found) == [said] * bool(said)
    assert all(text.replace("PATH", str(path)) in f"{found[0].evidence}\n{found[0].repair}\n" for text in words)


NOTHING = np.zeros(0, np.float32)
EMPTY = [  # tensors, and words of the evidence on empty ones
    ({f"{E}.weight": NOTHING, f"{H}.weight": NOTHING}, "2 of 4 tensors are empty"),
    ({f"{E}.weight": NOTHING.reshape(0, D)}, f"({E}.weight F32 [0, {D}]): ZeRO-3 saved them without gathering"),
    ({f"{E}.lora_A.weight": NOTHING} | low_rank_on("base_model.model.model.layers.1.q_proj"), "1 of 5 tensors"),
    ({f"{E}.lora_embedding_A": np.ones((R, 0), np.float32)}, "1 of 3 tensors"),
]


@pytest.mark.parametrize("base", [TIED, UNTIED, NO_BASE])
@pytest.mark.parametrize(("tensors", "words"), EMPTY)
def test_b061_names_tensors_that_hold_no_numbers(tmp_path, tensors, words, base):
    path = adapter(tmp_path / "a", tensors, modules_to_save=["embed_tokens", "lm_head"])
    (found,) = findings(path, None if base is None else llama(tmp_path / "base", **base), ["B061"])
    assert found.severity == "error"
    assert found.where in (END, "lm_head")
    assert words in found.evidence
    assert "train it again" in found.repair


def test_b060_warns_without_scan_that_copies_were_not_compared(tmp_path):
    (found,) = findings(adapter(tmp_path / "a", APART), llama(tmp_path / "base"), scan=False)
    assert (found.rule, found.severity) == ("B060", "warning")
    assert "were not compared" in found.evidence


@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.safetensors"])
def test_check_reports_pickled_or_missing_tensors_and_judges_adapter_by_config(tmp_path, file):
    path = adapter(tmp_path / "a", None, target_modules=["q_proj", "lm_head"])
    if file == "adapter_model.bin":
        (path / file).write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    audit = check(path, base=llama(tmp_path / "base"))
    assert audit.kind == "adapter"
    assert summaries(audit.at_least("warning")) == [f"B001 fatal {file}", "B060 error a"]


def test_open_adapter_never_evaluates_target_pattern(tmp_path):
    path = adapter(tmp_path / "a", None, target_modules="(a|a)*(a|a)*(a|a)*" * 20 + "!")
    assert facts_of(path, llama(tmp_path / "base")).output is None


def base_with(body, tower="", config=TEXT | {"architectures": ["Gemma3ForCausalLM"]}):
    """Return a function that writes a base with the text model under `body`, next to a vision tower."""
    names = [f"{body}{LAYER}", *([f"{tower}.layers.0.mlp.fc1"] if tower else [])]
    tensors = {f"{body}embed_tokens.weight": table()} | {f"{name}.weight": table(D, D) for name in names}
    return lambda path: write_checkpoint(path, config, tensors)


GEMMA = NESTED["config"] | {"architectures": ["Gemma3ForConditionalGeneration"]}
OLD = base_with("language_model.model.", "vision_tower", GEMMA)
NEW, TEXT_ONLY, PLAIN = base_with("model.language_model.", "model.vision_tower", GEMMA), base_with("model."), llama
NAMES = [  # base, modules of an adapter, finding, words of the repair
    (NEW, [f"model.language_model.{LAYER}", "model.vision_tower.layers.0.mlp.fc1"], ""),
    (OLD, [f"model.language_model.{LAYER}", "model.vision_tower.layers.0.mlp.fc1", "lm_head"], ""),
    (TEXT_ONLY, [f"model.{LAYER}", "model.embed_tokens", "lm_head"], ""),
    (
        NEW,
        [f"model.{LAYER}"],
        "1 of the adapter's 1",
        "replace base_model.model.model. by base_model.model.model.language_model., which",
    ),
    (
        OLD,
        [f"language_model.model.{LAYER}"],
        "1 of the adapter's 1",
        "by base_model.model.model.language_model., which",
    ),
    (TEXT_ONLY, [f"model.language_model.{LAYER}"], "1 of the adapter's 1", "by base_model.model.model., which"),
    (
        PLAIN,
        [LAYER, f"model.{LAYER}"],
        "1 of the adapter's 2",
        "replace base_model.model. by base_model.model.model., which",
    ),
    (PLAIN, ["model.layers.9.mlp.up_proj"], "1 of the adapter's 1", "give the base that it was trained on (org/base)"),
]


@pytest.mark.parametrize("case", NAMES)
def test_b062_reports_modules_that_the_base_lacks(tmp_path, case):
    make, modules, said, *fix = case
    path = adapter(tmp_path / "a", None)
    tensors = {}
    for module in modules:
        tensors |= low_rank_on(f"base_model.model.{module}")
    save_file(tensors, path / "adapter_model.safetensors")
    found = findings(path, make(tmp_path / "base"), ["B062"])
    assert len(found) == bool(said)
    for one in found:
        assert (one.severity, said in one.evidence, fix[0] in one.repair) == ("error", True, True), one


def test_b062_accepts_new_heads_and_warns_for_unknown_classes(tmp_path):
    """A new classifier is stored in the adapter alone; the module names of an unknown class are a guess."""
    path = adapter(tmp_path / "a", {"base_model.model.score.weight": table(2)})
    assert not findings(path, llama(tmp_path / "base"), ["B062"])
    save_file(low_rank_on("base_model.model.x.y"), path / "adapter_model.safetensors")
    base = llama(tmp_path / "b", config={"model_type": "new", "architectures": ["NewForCausalLM"]})
    assert [one.severity for one in findings(path, base, ["B062"])] == ["warning"]


ONE_ROW = "changes 1 of 24 rows, and stores all of them (768 bytes instead of 32 bytes)"
COPIED = [
    ({f"{E}.weight": with_rows(3)}, {"tied": False}, [ONE_ROW]),
    ({f"{E}.weight": with_rows(3), f"{H}.weight": with_rows(3)}, {}, [ONE_ROW, "changes 1 of"]),
    (low_rank_on_table() | {f"{E}.base_layer.weight": table()}, {}, ["changes 0 of"]),
    ({f"{E}.weight": table(seed=8)}, {}, []),
    ({f"{E}.weight": table(V + 1)}, {}, []),
    ({f"{H}.weight": with_rows(3)}, {"tied": False}, []),  # the head has other rows than the input table
    (trained_rows(E), {}, []),
]


@pytest.mark.parametrize(("tensors", "base", "said"), COPIED)
def test_b063_counts_copied_rows_that_differ_from_base(tmp_path, tensors, base, said):
    path, base = adapter(tmp_path / "a", tensors), llama(tmp_path / "base", **base)
    found = findings(path, base, ["B063"])
    assert len(found) == len(said)
    for one, words in zip(found, said, strict=True):
        assert words in one.evidence
        assert one.repair == f"tiewise adapter slim {path} --base {base} --to {path}-fixed"
    if found:
        slim(path, tmp_path / "slim", base=base)


COPIED_FOR_ONE_END = [
    ({f"{E}.weight": with_rows(3)}, ["changes 1 of"]),
    ({f"{H}.weight": with_rows(3)}, ["changes 1 of"]),
    ({f"{E}.weight": with_rows(3), f"{H}.weight": with_rows(3, 4)}, ["changes 1 of", "changes 2 of"]),
    ({f"{E}.weight": table(), f"{H}.weight": with_rows(4)}, ["changes 0 of", "changes 1 of"]),
]


@pytest.mark.parametrize(("tensors", "said"), COPIED_FOR_ONE_END)
def test_b063_unties_base_before_slim_if_adapter_treats_its_ends_differently(tmp_path, tensors, said):
    path, base = adapter(tmp_path / "a", tensors), llama(tmp_path / "base")
    found = findings(path, base, ["B063"])
    assert len(found) == len(said)
    untied, fixed = f"{base}-fixed", f"{path}-fixed"
    for one, words in zip(found, said, strict=True):
        assert words in one.evidence
        slim_command = f"tiewise adapter slim {path} --base {untied} --to {fixed}"
        assert one.repair == f"tiewise untie {base} --to {untied} && {slim_command}"
    with pytest.raises(CheckpointError):
        slim(path, fixed, base=base)
    untie(base, untied)
    slim(path, fixed, base=untied)


DORA = {f"{H}.lora_magnitude_vector": np.ones(V, np.float32)}
ROWS, SAVED = "model.embed_tokens.trainable_tokens_delta", {"modules_to_save": ["embed_tokens"]}
SERVED = [
    ({}, {}, {}, None),
    (low_rank_on_head(), {}, {}, None),
    (low_rank_on_head(), {}, {"config": {"model_type": "gemma2"}}, "llama.cpp's converter stops at lm_head"),
    (trained_rows(E), {}, {},
     f"vLLM stops at {ROWS}; SGLang ignores {ROWS} silently; llama.cpp's converter stops at {ROWS}"),
    ({f"{E}.weight": table()}, SAVED, {},
     "vLLM stops at modules_to_save (embed_tokens); SGLang ignores model.embed_tokens.weight silently; "
     "llama.cpp's converter stops at model.embed_tokens.weight"),
    ({f"{E}.weight": table()}, SAVED | {"target_modules": "all-linear"}, {},
     "vLLM stops at modules_to_save (embed_tokens); llama.cpp's converter stops at model.embed_tokens.weight"),
    ({}, {"modules_to_save": ["score"]}, {}, None),
    ({}, {"target_modules": ".*_proj"}, {}, "SGLang stops at target_modules, a pattern"),
    ({}, {"lora_bias": True}, {}, "vLLM stops at lora_bias"),
    (low_rank_on_head() | DORA, {"use_dora": True}, {},
     "vLLM stops at use_dora; SGLang stops at use_dora; llama.cpp's converter stops at lm_head.lora_magnitude_vector"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "base", "said"), SERVED)
def test_b064_names_engines_that_do_not_serve_adapter(tmp_path, tensors, config, base, said):
    path, base = adapter(tmp_path / "a", tensors, **config), llama(tmp_path / "base", **base)
    found = findings(path, base, ["B064"])
    assert [one.evidence for one in found] == ([] if said is None else [said])
    assert all(one.repair == f"tiewise adapter merge {path} --base {base} --to {path}-fixed" for one in found)


BODY_ONLY = {"target_modules": "all-linear"}
WHOLE = {"modules_to_save": ["model.embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("base", "asked", "wanted"),
    [
        ({}, {}, {}),
        ({}, {"new_tokens": [3]}, {"trainable_token_indices": {END: [3]}}),
        ({"head": table()}, {"new_tokens": [3]}, {"trainable_token_indices": {END: [3]}}),
        ({"tied": False}, {"new_tokens": [3]}, {"trainable_token_indices": {END: [3], "lm_head": [3]}}),
        ({}, {"tables": True}, WHOLE | {"ensure_weight_tying": True}),
        ({"tied": False}, {"tables": True}, WHOLE | {"ensure_weight_tying": False}),
        ({"head": table(seed=7)}, {"tables": True}, WHOLE | {"ensure_weight_tying": False}),  # the flag is ignored
    ],
)
def test_lora_config_keeps_ends_tied_or_untied(tmp_path, base, asked, wanted):
    assert lora_config(llama(tmp_path / "base", **base), **asked) == BODY_ONLY | wanted


def test_lora_config_names_modules_as_the_class_does(tmp_path):
    wanted = {"trainable_token_indices": {"model.language_model.embed_tokens": [3]}}
    assert lora_config(OLD(tmp_path / "base"), [3]) == BODY_ONLY | wanted


@pytest.mark.parametrize(
    ("base", "tokens", "words"),
    [
        ({}, [3, V], f"token {V} has no row; there are .* rows; tiewise vocab resize --vocab {V + 1} gives it one"),
        ({}, [-1, 3], "token -1 has no row; there are .* rows; ids begin at 0"),
        ({"tensors": {"model.embed_tokens.weight": None}}, [], "no input table was found; tiewise check says"),
    ],
)
def test_lora_config_refuses_tokens_without_row_and_bases_without_table(tmp_path, base, tokens, words):
    base = llama(tmp_path / "base", **base)
    with pytest.raises(CheckpointError, match=words):
        lora_config(base, tokens)
