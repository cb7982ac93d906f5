"""Quantised checkpoints by the names that each method writes, and the two rules on pairs and lists."""

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import D, V, llama, table

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rule import rules
from tiewise.checkpoint.rules_types_and_rows import quantised_ends

E, H = "model.embed_tokens", "lm_head"
HALF = np.float16


def gptq(module):
    packed, zeros = np.ones((D // 8, V), np.int32), np.ones((1, V // 8), np.int32)
    return {f"{module}.qweight": packed, f"{module}.qzeros": zeros, f"{module}.scales": np.ones((1, V), HALF)}


def compressed(module):
    shape = np.array([V, D], np.int64)
    packed, scale = np.ones((V, D // 8), np.int32), np.ones((V, 1), HALF)
    return {f"{module}.weight_packed": packed, f"{module}.weight_scale": scale, f"{module}.weight_shape": shape}


def bitsandbytes(module):
    state = np.ones(8, np.uint8)
    parts = {"absmax": np.ones(4, np.float32), "quant_map": np.ones(16, np.float32)}
    parts["quant_state.bitsandbytes__nf4"] = state
    return {f"{module}.weight": np.ones((V * D // 2, 1), np.uint8)} | {
        f"{module}.weight.{k}": v for k, v in parts.items()
    }


def int8(module):
    return {f"{module}.weight": np.ones((V, D), np.int8), f"{module}.SCB": np.ones(V, np.float32)}


def fp8(module):
    weight = np.ones((V, D), ml_dtypes.float8_e4m3fn)
    return {f"{module}.weight": weight, f"{module}.weight_scale_inv": np.ones((1, 1), np.float32)}


def mlx(module):
    packed, scales = np.ones((V, D // 8), np.uint32), np.ones((V, 1), HALF)
    return {f"{module}.weight": packed, f"{module}.scales": scales, f"{module}.biases": scales}


METHODS = [gptq, compressed, bitsandbytes, int8, fp8, mlx]


def opened(path, tied=True, tensors=None, **section):
    config = {"quantization_config": section} if section else None
    return Facts(open_folder(llama(path, tied, config=config, tensors=tensors)))


def findings(facts):
    return [found for name in ("B050", "B051") for found in rules()[name].check(facts)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", [E, H])
def test_which_end_is_quantised(tmp_path, method, end):
    plain = {f"{E}.weight": None if end == E else table(), f"{H}.weight": None if end == H else table(seed=2)}
    folder = open_folder(llama(tmp_path / "m", False, tensors=plain | method(end)))
    found = quantised_ends(Facts(folder))
    assert (found.input.quantised, found.output.quantised) == (end == E, end == H)
    stored = (found.input if end == E else found.output).parts
    assert stored == tuple(sorted(name.removeprefix(f"{end}.") for name in method(end)))
    assert found.method is None


def test_a_plain_checkpoint_is_not_quantised(tmp_path):
    folder = open_folder(llama(tmp_path / "m"))
    found = quantised_ends(Facts(folder))
    assert not found.input.quantised
    assert not found.output.quantised
    assert found.method is None
    assert (found.input.parts, found.output.parts, found.output.module) == (("weight",), (), H)


@pytest.mark.parametrize(
    ("section", "method", "lists"),
    [
        (
            {"quant_method": "awq", "modules_to_not_convert": ["lm_head"]},
            "awq",
            {"modules_to_not_convert": ("lm_head",)},
        ),
        (
            {"quant_method": "gptq", "dynamic": {"-:.*lm_head": {}, "+:x": {"bits": 8}}},
            "gptq",
            {"dynamic": (".*lm_head",)},
        ),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "NVFP4", {"exclude_modules": ("lm_head",)}),
        ({"ignore": ["re:.*lm_head", 3, None]}, "", {"ignore": ("re:.*lm_head",)}),
        ({"quant_method": 7, "ignore": "lm_head", "dynamic": [1]}, "", {}),
    ],
)
def test_what_the_config_says(tmp_path, section, method, lists):
    for config in ({"quantization_config": section}, {"text_config": {"quantization_config": section}}):
        found = quantised_ends(Facts(open_folder(llama(tmp_path, config=config))))
        assert (found.method, found.lists) == (method, lists)


def test_healthy_checkpoints_are_silent(tmp_path):
    lone = {"quant_method": "gptq", "lm_head": False}
    skip = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
    assert findings(opened(tmp_path / "a")) == []
    assert findings(opened(tmp_path / "b", **lone)) == []
    assert findings(opened(tmp_path / "c", **skip)) == []
    assert findings(opened(tmp_path / "d", quant_method="bitsandbytes", llm_int8_skip_modules=None)) == []
    assert findings(opened(tmp_path / "e", quant_method="compressed-tensors", ignore=["lm_head", "re:.*gate"])) == []
    for number, method in enumerate(METHODS):
        path = tmp_path / str(number)
        assert findings(opened(path, False, {f"{H}.weight": None} | method(H))) == []  # untied: a head of its own
        assert findings(opened(path, True, {f"{E}.weight": None} | method(E))) == []  # one shared, quantised table
        assert findings(opened(path, True, {f"{E}.weight": None} | method(E) | method(H))) == []


@pytest.mark.parametrize("method", METHODS)
def test_b050_half_of_a_tied_pair(tmp_path, method):
    (found,) = findings(opened(tmp_path / "a", True, method(H)))
    assert (found.rule, found.severity, found.where) == ("B050", "error", H)
    assert "beside a plain model.embed_tokens" in found.evidence
    (found,) = findings(opened(tmp_path / "b", True, {f"{E}.weight": None, f"{H}.weight": table()} | method(E)))
    assert (found.rule, found.severity, found.where) == ("B050", "error", E)


@pytest.mark.parametrize(
    ("gone", "says"),
    [("scales", "no scales"), ("weight_scale", "no weight_scale")],
)
def test_b050_a_triple_that_is_not_whole(tmp_path, gone, says):
    method = gptq if gone == "scales" else compressed
    tensors = {f"{H}.weight": None} | method(H)
    del tensors[f"{H}.{gone}"]
    (found,) = findings(opened(tmp_path / "a", False, tensors))
    assert (found.rule, found.severity, found.where) == ("B050", "error", H)
    assert says in found.evidence


def test_b050_what_gptq_says_of_the_head(tmp_path):
    (found,) = findings(opened(tmp_path / "a", True, quant_method="gptq", lm_head=True))
    assert (found.rule, found.severity, found.where) == ("B050", "error", "config.json")
    assert "stores none" in found.evidence
    (found,) = findings(opened(tmp_path / "b", False, quant_method="gptq", lm_head=True))
    assert "stores it plain" in found.evidence
    head = {f"{H}.weight": None} | gptq(H)
    (found,) = findings(opened(tmp_path / "c", False, head, quant_method="gptq", lm_head=False))
    assert "quantization_config.lm_head is false, and lm_head stores qweight, qzeros, scales" in found.evidence
    assert findings(opened(tmp_path / "d", False, head, quant_method="gptq", lm_head=True)) == []


def test_b051_a_list_that_replaces_the_default(tmp_path):
    skip = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["vision_tower"]}
    (found,) = findings(opened(tmp_path / "a", True, **skip))
    assert (found.rule, found.severity) == ("B051", "warning")
    assert found.where == "quantization_config.llm_int8_skip_modules"
    assert found.evidence.endswith("so the head is converted, and it is the input table")
    assert found.repair == 'add "lm_head" to it'
    (found,) = findings(opened(tmp_path / "b", False, **skip))
    assert found.evidence.endswith("it is stored plain")
    added_to = {"quant_method": "awq", "modules_to_not_convert": ["vision_tower"]}  # transformers adds its default here
    assert findings(opened(tmp_path / "c", True, **added_to)) == []


def test_b051_a_list_that_names_one_of_the_pair(tmp_path):
    shared = {f"{E}.weight": None} | compressed(E)
    (found,) = findings(opened(tmp_path / "a", True, shared, quant_method="compressed-tensors", ignore=["lm_head"]))
    assert (found.rule, found.severity, found.where) == ("B051", "warning", "quantization_config.ignore")
    assert "leaves lm_head alone" in found.evidence
    assert findings(opened(tmp_path / "b", True, shared, quant_method="compressed-tensors", ignore=["gate"])) == []


def test_b051_a_name_that_no_module_has(tmp_path):
    (found,) = findings(opened(tmp_path / "a", True, quant_method="awq", modules_to_not_convert=["model.lm_head"]))
    assert (found.rule, found.severity) == ("B051", "warning")
    assert 'names "model.lm_head", and the module is lm_head' in found.evidence
    assert findings(opened(tmp_path / "b", True, quant_method="awq", modules_to_not_convert=[E, "embed_tokens"])) == []
