"""What is known of loaders family by family: mlx-lm as it was run, SGLang and vLLM as their sources were read."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import V, llama_config, table, write_checkpoint

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loaders import predict

ROOT = Path(__file__).parents[2]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER = table(seed=1)


def made_by(loader, path):
    """[(versions, outcome, whether it is only read)] of a loader."""
    found = predict(Facts(open_folder(path)))
    return [(one.versions, one.outcome, one.predicted) for one in found if one.loader == loader]


def folder(path, kind, flag, head=None, **config):
    written = llama_config(flag, model_type=kind, architectures=[f"{kind.title()}ForCausalLM"]) | config
    return write_checkpoint(path, written, {TABLE: table()} | ({} if head is None else {HEAD: head}))


VERSION = mlx_data()["version"]
LLAMA_CPP = {
    "llama": ("tied", "untied", "untied"),
    "gemma2": ("tied", "head dropped", "head dropped"),
    "cohere2": ("tied", "load error", "load error"),
    "qwen2_moe": ("load error", "untied", "untied"),
}
# loader, family, flag, head, what it makes of that, and whether that was read alone or run too
MADE = [
    *(("llama.cpp", kind, True, head, word, "read")
      for kind, words in LLAMA_CPP.items() for head, word in zip((None, table(), OTHER), words, strict=True)),
    ("vLLM", "gemma2", True, OTHER, "load error", "read"),  # its class has no head to load one into
    ("vLLM", "llama", True, OTHER, "kept with a warning", "read"),
    ("mlx-lm", "granite", True, table(), "tied", "run"),  # mlx-lm#1298, which refused it, is merged
    ("mlx-lm", "gemma2", True, table(), "load error", "run"),  # a merge that stores the head once more: mergekit#385
    ("mlx-lm", "gemma3_text", True, OTHER, "untied", "run"),
    ("mlx-lm", "llama", None, OTHER, "head dropped", "run"),  # its flag is true where it is absent
    ("mlx-lm", "mixtral", None, OTHER, "untied", "run"),  # and here it is false
    ("mlx-lm", "qwen3", None, None, "load error", "run"),  # and here it must be there
    ("mlx-lm", "phi3", True, OTHER, "load error", "run"),
    ("mlx-lm", "internlm2", True, None, "tied", "read"),
    ("mlx-lm", "codegen", True, None, "not served", "read"),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "kind", "flag", "head", "outcome", "how"), MADE)
def test_what_a_loader_makes_of_a_family(tmp_path, loader, kind, flag, head, outcome, how):
    versions = {"llama.cpp": "convert_hf_to_gguf", "vLLM": "since August 2026", "mlx-lm": "0.2x"}
    version = VERSION if how == "run" else versions[loader]
    assert made_by(loader, folder(tmp_path, kind, flag, head))[-1] == (version, outcome, how == "read")


def test_mlx_was_run_with_the_flag_at_every_level(tmp_path):
    levels = {"text_config": llama_config(False, model_type="mistral")}
    assert made_by("mlx-lm", folder(tmp_path, "mistral3", True, **levels)) == [("0.2x", "tied", True)]


def bare(tensors):
    """Under the names of a body that was saved alone."""
    return {name.removeprefix("model."): array for name, array in tensors.items()}


def longer(tensors):
    """Behind the body's prefix once more."""
    return {name if name == HEAD else f"model.{name}": array for name, array in tensors.items()}


def cut(*names):
    """With tables that have fewer rows than the config says."""
    return lambda tensors: tensors | {name: tensors[name][: V - 4] for name in names}


NULL = {"tie_word_embeddings": None}
# flag, what is done to the tensors, settings of the config, whether mlx-lm loads it
STRICT = {
    "tied": (True, dict, {}, True),
    "untied": (False, dict, {}, True),
    "tied, bare names": (True, bare, {}, False),
    "untied, bare names": (False, bare, {}, False),
    "tied, prefix twice": (True, longer, {}, False),
    "untied, prefix twice": (False, longer, {}, False),
    "head cut": (False, cut(HEAD), {}, False),
    "table cut": (True, cut(TABLE), {}, False),
    "both cut": (False, cut(TABLE, HEAD), {}, False),
    "stale vocab_size": (True, dict, {"vocab_size": V + 8}, False),
    "null, no head": (True, dict, NULL, False),
    "null, a head": (False, dict, NULL, True),
}


def strict(path, case):
    """Write a tiny Llama that mlx-lm can load, changed as the case says."""
    flag, change, settings, _ = STRICT[case]
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=flag,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tensors = change(load_file(path / "model.safetensors"))
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(written))
    return path


@pytest.mark.parametrize("case", STRICT)
def test_mlx_loads_strictly(tmp_path, case):
    ((_, outcome, _),) = made_by("mlx-lm", strict(tmp_path, case))
    assert outcome == (("tied" if STRICT[case][0] else "untied") if STRICT[case][3] else "load error")


@pytest.mark.slow
@pytest.mark.parametrize("case", STRICT)
def test_mlx_itself_loads_strictly(tmp_path, case):
    utils = pytest.importorskip("mlx_lm.utils")
    strict(tmp_path, case)
    if STRICT[case][3]:
        utils.load_model(tmp_path, lazy=False)
    else:
        with pytest.raises(ValueError, match=r"[Pp]arameter|shape"):
            utils.load_model(tmp_path, lazy=False)


@pytest.mark.parametrize("arch", ["llama", "gemma", "gemma2", "command-r", "cohere2", "lfm2moe", "phi2", "qwen2moe"])
def test_heads_that_the_tensor_map_of_gguf_has_no_name_for(arch):
    """The map itself, of the writer's own package: what its converter does with a stored head rests on it."""
    gguf = pytest.importorskip("gguf")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    named = gguf.get_tensor_name_map(number, 1).get_name("lm_head.weight", try_suffixes=(".weight",))
    kind = {"command-r": "cohere", "lfm2moe": "lfm2_moe", "phi2": "phi", "qwen2moe": "qwen2_moe"}.get(arch, arch)
    column = columns.LLAMA_CPP_NAMED[family(kind).llama_cpp]
    assert (named is None) == (column in (columns.LLAMA_CPP_UNNAMED, columns.LLAMA_CPP_GEMMA))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "gemma3_text", "mixtral", "qwen3", "helium", "phi3"])
def test_mlx_does_what_is_written_down(kind, monkeypatch):
    mlx_lm = pytest.importorskip("mlx_lm")
    monkeypatch.syspath_prepend(ROOT / "tools")
    from make_mlx_outcomes import entry

    assert mlx_lm.__version__ == VERSION, "make the file again with tools/make_mlx_outcomes.py"
    assert entry(kind) == mlx_data()["families"][kind]


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
        for one in predict(Facts(open_folder(folder(tmp_path / str(number), kind, True, OTHER)))):
            ran = re.search(r"run on 20\d\d-\d\d-\d\d|loaded by this package's tests", one.source)
            assert one.predicted is (ran is None), one


def test_the_families_in_the_documentation_are_those_that_were_run():
    groups = {}
    for kind, letters in mlx_data()["families"].items():
        groups.setdefault(letters, []).append(kind)
    short = {"t": "tied", "u": "untied", "d": "**dropped**", "e": "**error**"}
    rows = ["| families | true | false | absent |", "|---|---|---|---|"]
    for letters, kinds in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        cells = [", ".join(short[letter] for letter in column[:3]) for column in letters.split()]
        rows.append(f"| {', '.join(kinds)} | {' | '.join(cells)} |")
    text = (ROOT / "docs" / "loaders.md").read_text()
    assert text.split("<!-- mlx-lm -->\n")[1].split("\n<!-- end -->")[0] == "\n".join(rows)
    assert f"mlx-lm {VERSION}" in text
    assert mlx_data()["date"] in text
