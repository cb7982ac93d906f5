"""What is known of loaders family by family: mlx-lm as it was run, SGLang and vLLM as their sources were read."""

import importlib.util
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import V, llama_config, table, write_checkpoint

from tiewise.checkpoint import loaders
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder

ROOT = Path(__file__).parents[2]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER = table(seed=1)


def made_by(loader, path):
    """[(versions, outcome, whether it is only read)] of a loader."""
    found = loaders.predict(Facts(open_folder(path)))
    return [(one.versions, one.outcome, one.predicted) for one in found if one.loader == loader]


def folder(path, kind, flag, head=None, **config):
    written = llama_config(flag, model_type=kind, architectures=[f"{kind.title()}ForCausalLM"]) | config
    return write_checkpoint(path, written, {TABLE: table()} | ({} if head is None else {HEAD: head}))


@pytest.mark.parametrize(
    ("kind", "outcomes"),
    [
        ("llama", ("tied", "untied", "untied")),
        ("gemma2", ("tied", "head dropped", "head dropped")),
        ("cohere2", ("tied", "load error", "load error")),
        ("qwen2_moe", ("load error", "untied", "untied")),
    ],
)
def test_llama_cpp_differs_from_family_to_family(kind, outcomes, tmp_path):
    for head, outcome in zip((None, table(), OTHER), outcomes, strict=True):
        path = folder(tmp_path / f"{outcome} {head is OTHER}", kind, True, head)
        assert [made[1:] for made in made_by("llama.cpp", path)] == [(outcome, True)]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("arch", ["llama", "gemma", "gemma2", "command-r", "cohere2", "lfm2moe", "phi2", "qwen2moe"])
def test_heads_that_the_tensor_map_of_gguf_has_no_name_for(arch):
    """The map itself, of the writer's own package: what its converter does with a stored head rests on it."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    named = gguf.get_tensor_name_map(number, 1).get_name("lm_head.weight", try_suffixes=(".weight",))
    kind = {"command-r": "cohere", "lfm2moe": "lfm2_moe", "phi2": "phi", "qwen2moe": "qwen2_moe"}.get(arch, arch)
    column = loaders.LLAMA_CPP_BY_FAMILY.get(kind, loaders.LLAMA_CPP)
    assert (named is None) == (column in (loaders.LLAMA_CPP_UNNAMED, loaders.LLAMA_CPP_GEMMA))


VERSION = loaders.mlx_data()["version"]
RUN = [
    ("granite", True, table(), "tied"),  # mlx-lm#1298, which refused it, is merged
    ("gemma2", True, table(), "load error"),  # a merge that stores the head once more: mergekit#385
    ("gemma3_text", True, OTHER, "untied"),
    ("llama", None, OTHER, "head dropped"),  # its flag is true where it is absent
    ("mixtral", None, OTHER, "untied"),  # and here it is false
    ("qwen3", None, None, "load error"),  # and here it must be there
    ("phi3", True, OTHER, "load error"),
]


@pytest.mark.parametrize(("kind", "flag", "head", "outcome"), RUN)
def test_mlx_as_it_was_run(kind, flag, head, outcome, tmp_path):
    assert made_by("mlx-lm", folder(tmp_path / "a", kind, flag, head)) == [(VERSION, outcome, False)]


def test_mlx_of_what_was_not_run(tmp_path):
    assert made_by("mlx-lm", folder(tmp_path / "a", "internlm2", True)) == [("0.2x", "tied", True)]
    assert made_by("mlx-lm", folder(tmp_path / "b", "codegen", True)) == [("0.2x", "not served", True)]
    levels = {"text_config": llama_config(False, model_type="mistral")}  # run was the flag at every level
    assert made_by("mlx-lm", folder(tmp_path / "c", "mistral3", True, **levels)) == [("0.2x", "tied", True)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "gemma3_text", "mixtral", "qwen3", "helium", "phi3"])
def test_mlx_does_what_is_written_down(kind, monkeypatch):
    import mlx_lm

    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
    from make_mlx_outcomes import entry

    assert mlx_lm.__version__ == VERSION, "make the file again with tools/make_mlx_outcomes.py"
    assert entry(kind) == loaders.mlx_data()["families"][kind]


@pytest.mark.parametrize(("kind", "outcome"), [("gemma2", "load error"), ("llama", "kept with a warning")])
def test_vllm_refuses_a_head_where_its_class_has_none(kind, outcome, tmp_path):
    path = folder(tmp_path / "a", kind, True, OTHER)
    assert made_by("vLLM", path)[1] == ("since August 2026", outcome, True)


SECTION = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:.*lm_head"]}}}
UNNAMED = SECTION | {"config_groups": {"group_0": {"targets": ["Linear"]}}}
SCALES = {"lm_head.weight_scale": np.ones((V, 1), np.float32)}


@pytest.mark.parametrize(("section", "now"), [(SECTION, "untied"), (UNNAMED, "scale dropped")])
def test_sglang_dropped_the_scales_of_a_packed_head(section, now, tmp_path):
    config = llama_config(False) | {"quantization_config": section}
    packed = {TABLE: table(), HEAD: OTHER.astype(ml_dtypes.float8_e4m3fn)} | SCALES
    path = write_checkpoint(tmp_path / "a", config, packed)
    before, since = made_by("SGLang", path)
    assert before == ("before 19 August 2026", "scale dropped", True)
    assert since == ("since 19 August 2026", now, True)


def test_sglang_copied_the_table_over_the_head_of_qwen3_vl(tmp_path):
    text = {
        "text_config": llama_config(False, model_type="qwen3_vl_text"),
        "architectures": ["Qwen3VLForConditionalGeneration"],
    }
    tensors = {"model.language_model.embed_tokens.weight": table(), HEAD: OTHER}
    path = write_checkpoint(tmp_path / "a", {"model_type": "qwen3_vl", "tie_word_embeddings": False} | text, tensors)
    before, now = made_by("SGLang", path)
    assert (before[0], before[1], now[1]) == ("before February 2026", "head dropped", "untied")


def test_nothing_that_was_not_run_is_said_to_be(tmp_path):
    for number, kind in enumerate(("llama", "gemma2", "codegen", "nobody")):
        for one in loaders.predict(Facts(open_folder(folder(tmp_path / str(number), kind, True, OTHER)))):
            ran = re.search(r"run on 20\d\d-\d\d-\d\d|loaded by this package's tests", one.source)
            assert one.predicted is (ran is None), one


def test_the_families_in_the_documentation_are_those_that_were_run():
    groups = {}
    for kind, letters in loaders.mlx_data()["families"].items():
        groups.setdefault(letters, []).append(kind)
    short = {"t": "tied", "u": "untied", "d": "**dropped**", "e": "**error**"}
    rows = ["| families | true | false | absent |", "|---|---|---|---|"]
    for letters, kinds in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        columns = [", ".join(short[letter] for letter in column[:3]) for column in letters.split()]
        rows.append(f"| {', '.join(kinds)} | {' | '.join(columns)} |")
    text = (ROOT / "docs" / "loaders.md").read_text()
    assert text.split("<!-- mlx-lm -->\n")[1].split("\n<!-- end -->")[0] == "\n".join(rows)
    assert f"mlx-lm {VERSION}" in text
    assert loaders.mlx_data()["date"] in text
