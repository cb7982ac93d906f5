"""Test B052 to B054: missing scales of packed ends, planned quantisations, and descriptions of packed ends."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_runs import assert_fires, assert_silent, run_rule, table_of
from safetensors.numpy import load_file, save_file
from test_rules_types_and_rows import COMPRESSED, HEAD, METHODS, TABLE, E, H, by, quantised
from tiny_checkpoints import D, V, llama, table, written

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.config_parts import read_quantisation
from tiewise.checkpoint.rewrite import repair
from tiewise.core.errors import CheckpointError

FP8 = table().astype(ml_dtypes.float8_e4m3fn)
SCALED = {"model.layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)}
OF_A_LAYER = {"model.layers.0.layer_scale": np.ones(D, np.float32)}  # not a quantisation scale
FIRES = [
    ("B052", "error", HEAD, False, quantised({HEAD: FP8}, tied=False, quant_method="fp8"),
     "lm_head.weight has no scale", f"It is lm_head.weight F8_E4M3 [{V}, {D}]\n",
      "\ntake the scale from the checkpoint's source\n"),
    ("B052", "error", HEAD, False, {"tied": False, "tensors": {HEAD: FP8} | SCALED},
     "loaders use its numbers unscaled"),
    ("B052", "warning", HEAD, False, {"tied": False, "tensors": {HEAD: FP8}}, "none needed if it was cast without one"),
    ("B052", "warning", HEAD, False, {"tied": False, "tensors": {HEAD: FP8} | OF_A_LAYER}, "cast without one"),
    ("B052", "error", HEAD, False, {"tied": False, "tensors": by("integers", H)}, "lm_head.weight I8"),
    ("B052", "error", TABLE, False, quantised({TABLE: FP8}, quant_method="fp8"), "has no scale"),
    ("B052", "warning", HEAD, False, quantised(by("fp8", H), tied=False),
     "some engines drop the scales of the head (weight_scale_inv)",
     "\nuse an engine that reads quantised heads"),
    ("B052", "warning", f"{H}.weight_packed", False, quantised(by(COMPRESSED, H), tied=False),
     "some engines drop the scales"),
    ("B053", "warning", "config.json", False,
     quantised(quant_method=COMPRESSED, config_groups={"group_0": {"targets": ["Linear"]}}),
     f"the quantisation converts {H} and not {E}, but the two are one table",
     "or untie them first: tiewise untie PATH --to PATH-fixed\n"),
]  # fmt: skip

# sections of a config with which loaders leave the quantised head plain: none of them makes the repair safe
UNDESCRIBED = [
    ("gptq", {"quant_method": "gptq", "dynamic": {"-:lm_head": {}}}),
    ("gptq", {"quant_method": "awq"}),
    (COMPRESSED, {"quant_method": COMPRESSED, "config_groups": {"group_0": {"targets": ["Embedding"]}}}),
    (COMPRESSED, {"quant_method": COMPRESSED, "targets": ["Linear"], "ignore": ["lm_head"]}),
    (COMPRESSED, {"quant_method": COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"]}}}),  # for SGLang
    ("bitsandbytes", {"quant_method": "bitsandbytes"}),
    ("fp8", {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}),
]


@pytest.mark.parametrize(("method", "section"), UNDESCRIBED)
def test_quantised_head_that_the_config_leaves_plain_has_no_safe_repair(tmp_path, method, section):
    path = written(tmp_path / "a", quantised(by(method, H), **section))
    (found,) = run_rule("B050", path)
    assert (found.where, found.safe) == (H, False)


def test_repair_of_a_gptq_head_describes_it(tmp_path):
    path = written(tmp_path / "a", quantised(by("gptq", H), quant_method="gptq", bits=4))
    config = json.loads((repair(path, tmp_path / "b").to / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"] == {"quant_method": "gptq", "bits": 4, "lm_head": True}


def test_untied_class_draws_a_quantised_head_at_random_without_its_description(tmp_path):
    """The class's own answer: why such a folder is not repaired."""
    tr = pytest.importorskip("transformers")
    path = written(tmp_path / "a", quantised(by("gptq", H)))
    with pytest.raises(CheckpointError, match="no finding has a safe fix"):
        repair(path, tmp_path / "b")
    config = json.loads((path / "config.json").read_text())
    for is_tied in (True, False):
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
        missing = tr.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)[1]["missing_keys"]
        assert (HEAD in missing) is not is_tied


NVFP4 = {"weight": np.ones((V, D // 2), np.uint8), "weight_scale": np.ones((V, 1), ml_dtypes.float8_e4m3fn)}
NVFP4 |= dict.fromkeys(("weight_scale_2", "input_scale"), np.ones((), np.float32))
MODELOPT = "hf_quant_config.json"


NVFP4_ENDS = {f"{end}.{part}": values for end in (E, H) for part, values in NVFP4.items()}


def packed(ends=(H,), sidecar=None, width=D // 2, tied=False, **section):
    """Return arguments of a Llama whose ends ModelOpt packed, with both descriptions of the quantisation."""
    parts = NVFP4 | {"weight": np.ones((V, width), np.uint8)}
    made = quantised({f"{end}.{part}": values for end in ends for part, values in parts.items()}, tied=tied, **section)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"} | (sidecar or {})}
    return made | ({"files": {MODELOPT: said}} if sidecar is not None else {})


def mlx(columns, groups=1, head=False, tied=True, other=None, **quantization):
    """Return arguments of a Llama of width 64 whose ends MLX packed into so many words and groups.

    `other` has the parts of the head that differ from the table's.
    """
    end = {"weight": np.ones((V, columns), np.uint32), "scales": np.ones((V, groups), np.float16)}
    end["biases"] = end["scales"]
    tensors = {"model.embed_tokens.weight": None} | {f"{E}.{part}": values for part, values in end.items()}
    tensors |= {f"{H}.{part}": values for part, values in (end | (other or {})).items()} if head else {}
    config = {"quantization": {"group_size": 64, "bits": 4} | quantization}
    return {"tied": tied, "width": 64, "tensors": tensors, "config": config}


ZEROS = {"weight": np.zeros((V, 8), np.uint32), "scales": np.zeros((V, 1), np.float16)}
WIDER = {"weight": np.ones((V, 16), np.uint32)}  # 8 bits next to the table's 4
LISTED = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
PATTERNS = ["lm_head*", "lm_head", "*lm_head", "re:.*lm_head", "re:^lm_head$", "*head*"]
FIRES += [
    *(("B054", "error", "quantization_config.exclude_modules", True, packed(**LISTED, exclude_modules=["x", pattern]),
       f'"{pattern}" excludes lm_head from quantisation',
       "it is stored quantised (input_scale, weight, weight_scale, weight_scale_2)")
      for pattern in PATTERNS),
    *(("B054", "error", f"{MODELOPT}.quantization.exclude_modules", True, packed(sidecar={"exclude_modules": [entry]}),
       f'"{entry}" excludes lm_head', "tiewise repair PATH --to PATH-fixed\n") for entry in ("lm_head", "lm_head*")),
    # the pattern names a plain module, too
    ("B054", "error", "quantization_config.exclude_modules", False, packed(**LISTED, exclude_modules=["*m*"]),
     'remove "*m*" from the list by hand'),
    ("B054 B052", "error", "quantization_config.ignore", True,
     quantised(by(COMPRESSED, H), tied=False, quant_method=COMPRESSED, ignore=["re:.*lm_head"])),
    ("B054", "error", "quantization_config.llm_int8_skip_modules", True,
     quantised(by("bitsandbytes", H), tied=False, quant_method="bitsandbytes", llm_int8_skip_modules=["lm_head"])),
    ("B054 B013", "error", f"{MODELOPT}.quantization.exclude_modules", True,
     packed((E, H), {"exclude_modules": ["lm_head"]}, tied=True)),
    *(("B054", "error", HEAD, False, packed(width=width), f"{width} bytes wide; 8 numbers take 8 bytes, or 4 with")
      for width in (3, 5, 16)),
    *(("B054", "error", TABLE, True, mlx(*how, **said), words, '"model.embed_tokens": {"group_size": 64, "bits": 8}')
      for how, said, words in (
          ((16,), {}, "is packed at 8 bits in groups of 64, and quantization says 4 bits in groups of 64"),
          ((16,), {E: {"group_size": 32, "bits": 8}}, "says 8 bits in groups of 32"))),
    ("B054", "error", "quantization.model.embed_tokens", True, mlx(8, **{E: False}), "which means unquantised"),
    ("B054", "error", TABLE, False, mlx(7), "packed at 3.5 bits", "take the checkpoint from its source again"),
    ("B013", "error", f"{H}.biases", True, mlx(8, head=True),
     "stored twice, which costs 864 bytes",
     "lm_head and model.embed_tokens are equal byte for byte (biases, scales, weight)",
     "mlx-lm does not load it, as its model has no lm_head.scales"),
    *(("B050", "error", H, True, mlx(8, head=True, other=parts, **said),
       f"but {H} and {E} are two packed tables. They differ in {words}. A loader that ties drops one of the two",
       "to keep both tables: tiewise repair PATH", "\n")
      for parts, said, words in (
          (ZEROS, {}, "scales, weight"),
          (WIDER, {H: {"group_size": 64, "bits": 8}}, "weight"))),
    ("B050", "error", H, False,
     quantised(by("gptq", E), {f"{H}.{part}": values + 1 for part, values in METHODS["gptq"].items()},
               quant_method="awq"), "The config does not name lm_head as quantised"),
    ("B013", "warning", f"{H}.g_idx", False,
     quantised(by("gptq", E), by("gptq", H), quant_method="gptq", lm_head=True), "set quantization_config.lm_head to"),
]  # fmt: skip


@table_of(FIRES)
def test_quantisation_rules_report_broken_folders(tmp_path, case):
    assert_fires(tmp_path, case)


SILENT = [
    *(("B050 B051 B052 B054", packed(**LISTED, exclude_modules=listed)) for listed in ([], ["lm_head_norm"], ["head"])),
    *(
        ("B050 B051 B054", packed((E, H), listed, tied=tied))
        for listed in (None, {}, {"exclude_modules": ["vision*", 3]})
        for tied in (True, False)
    ),
    *(("B054", packed(width=width, sidecar={"exclude_modules": []})) for width in (D, D // 2)),
    *(("B054", quantised(by(method, end), tied=end == E)) for method in METHODS for end in (E, H)),
    *(
        ("B054", quantised(by(method, H), tied=False, quant_method=method, ignore=["re:.*gate", "*", "re:(a|lm_head)"]))
        for method in METHODS
    ),
    ("B054", {"tied": False, "config": {"quantization_config": LISTED | {"exclude_modules": ["lm_head*"]}}}),
    ("B050", quantised(NVFP4_ENDS | {f"{H}.input_scale": np.zeros((), np.float32)})),  # of activations
    *(
        ("B050 B054", mlx(*how, **said))
        for how, said in (
            ((8,), {}),
            ((8, 2), {"group_size": 32}),
            ((16,), {E: {"group_size": 64, "bits": 8}}),
            ((6,), {"bits": 3}),
            ((16,), {"bits": None}),
            ((8,), {E: True}),
            ((16,), {"language_model": {}, E: {"bits": 8}}),
            ((8, 1, True, False, ZEROS), {}),
        )
    ),
    ("B053", quantised(quant_method="fp8", lm_head="no")),
    *(("B052", quantised(by(m, H), tied=False)) for m in METHODS if m not in (COMPRESSED, "fp8", "integers")),
    ("B052", quantised(by("fp8", E))),  # one shared table, which no engine reads as a separate head
    ("B052", {"tied": False}),
    ("B053", quantised(tied=False, config_groups={"group_0": {"targets": ["Linear"]}})),
    ("B053", quantised(quant_method="gptq", lm_head=True)),  # B050 reports the contradiction
    ("B053", quantised(by(COMPRESSED, E), config_groups={"group_0": {"targets": ["Embedding"]}})),  # packed already
]


@table_of(SILENT)
def test_quantisation_rules_are_silent_on_sound_folders(tmp_path, case):
    assert_silent(tmp_path, case)


LINEAR = {"config_groups": {"group_0": {"targets": ["Linear"]}}}
GROUPS = {"a": {"targets": ["Linear"]}, "b": {"targets": ["re:.*embed_tokens$"]}}
PLANS = [  # quantisation, and the only end that it packs
    ({"quant_method": "gptq", "lm_head": True}, H),
    ({"quant_method": "gptq", "lm_head": False}, None),
    ({"quant_method": "gptq", "lm_head": True, "dynamic": {"-:.*lm_head": {}}}, None),
    ({"quant_method": "gptq", "dynamic": {"+:.*embed_tokens": {"bits": 4}}}, E),
    ({"quant_method": "gptq", "lm_head": True, "dynamic": {"model.embed_tokens": {"bits": 8}}}, None),
    ({"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 4}}}, H),
    ({"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 16}}}, None),
    (LINEAR, H),
    (LINEAR | {"ignore": ["lm_head"]}, None),
    (LINEAR | {"ignore": ["re:.*lm_head"]}, None),
    ({"config_groups": GROUPS}, None),
    ({"config_groups": GROUPS, "ignore": ["lm_head"]}, E),
    ({"targets": ["re:.*lm_head"], "scheme": "FP8"}, H),
    ({"quant_method": "torchao", "include_input_output_embeddings": True}, None),
    ({"quant_method": "bitsandbytes"}, None),
    ({"config_groups": [3], "targets": 7, "dynamic": [1], "extra_config": {"lm_head": 4}, "lm_head": "yes"}, None),
]


@pytest.mark.parametrize(("plan", "alone"), PLANS)
@pytest.mark.parametrize("shape", ["bare", "config"])
def test_b053_reports_plan_that_packs_one_end_of_tied_model(tmp_path, plan, alone, shape):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan if shape == "bare" else {"model_type": "llama", "quantization_config": plan}))
    for tied in (True, False):
        found = check(llama(tmp_path / str(tied), tied=tied), quantise=file, select=["B053"]).findings
        assert len(found) == (tied and alone is not None)
        if found:
            assert (found[0].where, found[0].evidence.split()[3]) == ("--quantise", alone)


def test_b051_checks_module_list_of_planned_quantisation(tmp_path):
    file, model = tmp_path / "plan.json", llama(tmp_path / "m")
    file.write_text(json.dumps({"quant_method": "awq", "modules_to_not_convert": ["model.lm_head"]}))
    (found,) = check(model, quantise=file, select=["B05"]).findings
    assert (found.rule, found.where) == ("B051", "--quantise.modules_to_not_convert")
    assert run_rule("B051", model) == []


KEYS = ["quant_method", "targets", "config_groups", "ignore", "dynamic", "extra_config", "lm_head", "bits"]
LEAVES = st.sampled_from([None, True, 4, 1.5, "Linear", "lm_head", "+:.*lm_head", "-:x", "re:(((", ""])
NAMES = st.sampled_from([*KEYS, "lm_head", ""])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("plain") / "m")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1))
def test_b051_and_b053_tolerate_any_json_plan(plain, section):
    run_rule("B051", plain, quantise=section)
    for found in run_rule("B053", plain, quantise=section):
        assert found.evidence.split()[3] in (E, H)


KEYS_OF_MLX = st.sampled_from(["bits", "group_size", E, H, "exclude_modules", "ignore"])
SECTIONS = st.dictionaries(KEYS_OF_MLX, VALUES | st.integers(-(2**70), 2**70)) | VALUES


@pytest.mark.parametrize(("kind", "severity"), [("llama", "error"), ("gemma2", "error"), ("helium", "warning")])
def test_b013_asks_mlx_alone_whether_it_refuses_the_scales_of_a_head(tmp_path, monkeypatch, kind, severity):
    """Helium's class in mlx-lm has a head that it does not use if the flag ties it."""
    monkeypatch.setattr("tiewise.checkpoint.loaders.predict", None)
    changed = mlx(8, head=True)
    changed["config"] |= {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    (found,) = run_rule("B013", llama(tmp_path / "a", **changed))
    assert found.severity == severity


@pytest.mark.parametrize("method", ["mlx", "bitsandbytes", "gptq", COMPRESSED])
def test_repair_drops_all_parts_of_a_packed_head(tmp_path, method):
    path = llama(tmp_path / "a", **quantised(by(method, E), by(method, H)))
    known = ["transformers", "vLLM"]
    if method not in ("mlx", "bitsandbytes"):  # mlx-lm refuses the scales of the one, and the shape of the other
        known.append("mlx-lm")
    assert {one.outcome for one in check(path).outcomes if one.loader in known} == {"tied"}
    before, after = (
        load_file(path / "model.safetensors"),
        load_file(repair(path, tmp_path / "b").to / "model.safetensors"),
    )
    assert after.keys() == {name for name in before if not name.startswith(H)}
    assert all(np.array_equal(after[name].view("u1"), before[name].view("u1")) for name in after)
    for wrong in before.keys() - after.keys():  # a differing byte in any part makes two heads
        changed = before | {wrong: before[wrong] + before[wrong].dtype.type(1)}
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        assert run_rule("B013", path) == []
        with pytest.raises(CheckpointError):
            repair(path, tmp_path / "c")


@settings(deadline=None, max_examples=60)
@given(SECTIONS, SECTIONS, SECTIONS)
def test_b054_tolerates_any_json_description_of_packed_ends(tmp_path_factory, section, of_mlx, sidecar):
    how = mlx(8, head=True)
    how["config"] = {"quantization": of_mlx, "quantization_config": section}
    path = llama(tmp_path_factory.mktemp("any"), **how, files={MODELOPT: {"quantization": sidecar}})
    assert {one.severity for one in run_rule("B054", path)} <= {"error"}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_b001_reports_unreadable_modelopt_description(tmp_path, text):
    (llama(tmp_path) / MODELOPT).write_text(text)
    (found,) = run_rule("B001", tmp_path)
    assert (found.severity, found.where) == ("warning", MODELOPT)
    assert run_rule("B054", tmp_path) == []


@pytest.mark.parametrize("text", ["[]", "{}", "7", '{"model_type": "llama"}', '{"a": ', None])
def test_read_quantisation_refuses_files_without_quantisation(tmp_path, text):
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError, match="plan"):
        read_quantisation(file)
