"""Test predictions per model family against runs of mlx-lm and against sources of SGLang, vLLM and llama.cpp."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import random_folders as folders
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


def outcomes_of(loader, path):
    """Return [(versions, outcome, whether it is only predicted)] of a loader."""
    found = predict(Facts(open_folder(path)))
    return [(one.versions, one.outcome, one.predicted) for one in found if one.loader == loader]


def write_family(path, kind, flag, head=None, **config):
    written = llama_config(flag, model_type=kind, architectures=[f"{kind.title()}ForCausalLM"]) | config
    return write_checkpoint(path, written, {TABLE: table()} | ({} if head is None else {HEAD: head}))


VERSION = mlx_data()["version"]
LLAMA_CPP = {
    "llama": ("tied", "untied", "untied"),
    "gemma2": ("tied", "head dropped", "head dropped"),
    "cohere2": ("tied", "load error", "load error"),
    "qwen2_moe": ("load error", "untied", "untied"),
}
# loader, family, flag, head, outcome, and whether the outcome was read in the source or run
MADE = [
    *(("llama.cpp", kind, True, head, word, "read")
      for kind, words in LLAMA_CPP.items() for head, word in zip((None, table(), OTHER), words, strict=True)),
    ("vLLM", "gemma2", True, OTHER, "load error", "read"),  # its class has no head that could load the tensor
    ("vLLM", "llama", True, OTHER, "kept with a warning", "read"),
    ("mlx-lm", "internlm2", True, None, "tied", "read"),
    ("mlx-lm", "codegen", True, None, "not served", "read"),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "kind", "flag", "head", "outcome", "how"), MADE)
def test_predict_gives_outcome_of_loader_for_family(tmp_path, loader, kind, flag, head, outcome, how):
    versions = {"llama.cpp": "convert_hf_to_gguf", "vLLM": "since August 2026", "mlx-lm": "0.2x"}
    version = VERSION if how == "run" else versions[loader]
    assert outcomes_of(loader, write_family(tmp_path, kind, flag, head))[-1] == (version, outcome, how == "read")


# family, flag, state of the tables, outcome in mlx-lm
RUN = [
    ("granite", True, columns.SAME, "tied"),  # mlx-lm#1298, about the refusal, is merged
    ("gemma2", True, columns.SAME, "load error"),  # a merge that stores a copy of the head: mergekit#385
    ("gemma3_text", True, columns.DIFFERENT, "untied"),
    ("llama", None, columns.DIFFERENT, "head dropped"),  # an absent flag counts as true
    ("mixtral", None, columns.DIFFERENT, "untied"),  # an absent flag counts as false
    ("qwen3", None, columns.NONE, "load error"),  # the flag is required
    ("phi3", True, columns.DIFFERENT, "load error"),
]


def write_saved(path, kind, change=lambda checkpoint: None, flag=True, tables=columns.NONE):
    """Write a family's tiny model as transformers saves it, with the config keys of published models and a change."""
    name = next(name for name in family(kind).ends.classes if name.endswith(("CausalLM", "LMHeadModel", "Generation")))
    checkpoint = folders.in_state(folders.saved_class(name), folders.State(flag, tables))
    checkpoint.config = folders.published(checkpoint.config)
    change(checkpoint)
    checkpoint.write(path)
    return path


@pytest.mark.parametrize(("kind", "flag", "tables", "outcome"), RUN)
def test_predict_gives_outcome_of_run_with_mlx(tmp_path, kind, flag, tables, outcome):
    path = write_saved(tmp_path, kind, flag=flag, tables=tables)
    assert outcomes_of("mlx-lm", path) == [(VERSION, outcome, False)]


def with_flags(root, text):
    """Return a change of both levels' flags; None removes one."""

    def change(checkpoint):
        for level, flag in ((checkpoint.config, root), (checkpoint.config["text_config"], text)):
            level.pop("tie_word_embeddings", None)
            if flag is not None:
                level["tie_word_embeddings"] = flag

    return change


# family, flags of the root and of the text part, outcome without a head: the text part counts
APART = [
    ("mistral3", True, False, "load error"),
    ("mistral3", False, True, "tied"),
    ("mistral3", True, None, "load error"),
    ("gemma4", False, None, "tied"),
    ("gemma4", True, False, "load error"),
    ("gemma3", True, False, "tied"),  # its class reads no flag
]


@pytest.mark.parametrize(("kind", "root", "text", "outcome"), APART)
def test_predict_takes_flag_of_the_level_that_mlx_reads(tmp_path, kind, root, text, outcome):
    path = write_saved(tmp_path, kind, with_flags(root, text))
    assert outcomes_of("mlx-lm", path) == [(VERSION, outcome, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "root", "text", "outcome"), APART)
def test_mlx_lm_takes_flag_of_the_recorded_level(tmp_path, kind, root, text, outcome):
    pytest.importorskip("mlx_lm")
    from observed_loads import observe_mlx

    path = write_saved(tmp_path, kind, with_flags(root, text))
    assert bool(observe_mlx(path, None, None).error) == (outcome == "load error")


def without_prefix(tensors):
    """Rename tensors as if the body had been saved alone."""
    return {name.removeprefix("model."): array for name, array in tensors.items()}


def with_prefix_twice(tensors):
    """Repeat the body's prefix in every name except the head's."""
    return {name if name == HEAD else f"model.{name}": array for name, array in tensors.items()}


def with_fewer_rows(*names):
    """Return a function that shortens tables below the config's vocab_size."""
    return lambda tensors: tensors | {name: tensors[name][: V - 4] for name in names}


NULL = {"tie_word_embeddings": None}
# flag, change of the tensors, settings of the config, whether mlx-lm loads the folder
STRICT = {
    "tied": (True, dict, {}, True),
    "untied": (False, dict, {}, True),
    "tied, bare names": (True, without_prefix, {}, False),
    "untied, bare names": (False, without_prefix, {}, False),
    "tied, prefix twice": (True, with_prefix_twice, {}, False),
    "untied, prefix twice": (False, with_prefix_twice, {}, False),
    "head cut": (False, with_fewer_rows(HEAD), {}, False),
    "table cut": (True, with_fewer_rows(TABLE), {}, False),
    "both cut": (False, with_fewer_rows(TABLE, HEAD), {}, False),
    "stale vocab_size": (True, dict, {"vocab_size": V + 8}, False),
    "null, no head": (True, dict, NULL, False),
    "null, a head": (False, dict, NULL, True),
}


def write_strict_case(path, case):
    """Write a tiny Llama with the changes of a case."""
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
def test_predict_expects_mlx_to_load_strictly(tmp_path, case):
    ((_, outcome, _),) = outcomes_of("mlx-lm", write_strict_case(tmp_path, case))
    assert outcome == (("tied" if STRICT[case][0] else "untied") if STRICT[case][3] else "load error")


@pytest.mark.slow
@pytest.mark.parametrize("case", STRICT)
def test_mlx_lm_loads_strictly_as_predicted(tmp_path, case):
    utils = pytest.importorskip("mlx_lm.utils")
    write_strict_case(tmp_path, case)
    if STRICT[case][3]:
        utils.load_model(tmp_path, lazy=False)
    else:
        with pytest.raises(ValueError, match=r"[Pp]arameter|shape"):
            utils.load_model(tmp_path, lazy=False)


@pytest.mark.parametrize("arch", ["llama", "gemma", "gemma2", "command-r", "cohere2", "lfm2moe", "phi2", "qwen2moe"])
def test_llama_cpp_column_matches_tensor_map_of_gguf(arch):
    """The converter of llama.cpp handles a stored head by the tensor map of the gguf package."""
    gguf = pytest.importorskip("gguf")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    named = gguf.get_tensor_name_map(number, 1).get_name("lm_head.weight", try_suffixes=(".weight",))
    kind = {"command-r": "cohere", "lfm2moe": "lfm2_moe", "phi2": "phi", "qwen2moe": "qwen2_moe"}.get(arch, arch)
    column = columns.LLAMA_CPP_NAMED[family(kind).llama_cpp]
    assert (named is None) == (column in (columns.LLAMA_CPP_UNNAMED, columns.LLAMA_CPP_GEMMA))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "gemma3_text", "mixtral", "qwen3", "helium", "phi3"])
def test_mlx_lm_reproduces_committed_outcomes(kind, monkeypatch):
    mlx_lm = pytest.importorskip("mlx_lm")
    monkeypatch.syspath_prepend(ROOT / "tools")
    from make_mlx_outcomes import entry

    assert mlx_lm.__version__ == VERSION, "make the file again with tools/make_mlx_outcomes.py"
    assert entry(kind) == mlx_data()["families"][kind]


SECTION = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:.*lm_head"]}}}
UNNAMED = SECTION | {"config_groups": {"group_0": {"targets": ["Linear"]}}}
SCALES = {"lm_head.weight_scale": np.ones((V, 1), np.float32)}


@pytest.mark.parametrize(("section", "now"), [(SECTION, "untied"), (UNNAMED, "scale dropped")])
def test_predict_reports_sglang_dropping_scales_of_packed_head(section, now, tmp_path):
    config = llama_config(False) | {"quantization_config": section}
    packed = {TABLE: table(), HEAD: OTHER.astype(ml_dtypes.float8_e4m3fn)} | SCALES
    path = write_checkpoint(tmp_path / "a", config, packed)
    before, since = outcomes_of("SGLang", path)
    assert before == ("before 19 August 2026", "scale dropped", True)
    assert since == ("since 19 August 2026", now, True)


def test_predict_reports_old_sglang_overwriting_head_of_qwen3_vl(tmp_path):
    text = {
        "text_config": llama_config(False, model_type="qwen3_vl_text"),
        "architectures": ["Qwen3VLForConditionalGeneration"],
    }
    tensors = {"model.language_model.embed_tokens.weight": table(), HEAD: OTHER}
    path = write_checkpoint(tmp_path / "a", {"model_type": "qwen3_vl", "tie_word_embeddings": False} | text, tensors)
    before, now = outcomes_of("SGLang", path)
    assert (before[0], before[1], now[1]) == ("before February 2026", "head dropped", "untied")


def test_outcomes_are_verified_only_if_source_names_a_run(tmp_path):
    for number, kind in enumerate(("llama", "gemma2", "codegen", "nobody")):
        for one in predict(Facts(open_folder(write_family(tmp_path / str(number), kind, True, OTHER)))):
            ran = re.search(r"run on 20\d\d-\d\d-\d\d|loaded by this package's tests", one.source)
            assert one.predicted is (ran is None), one


def test_family_table_in_docs_equals_recorded_mlx_runs():
    groups = {}
    for kind, record in mlx_data()["families"].items():
        groups.setdefault(record["ends"], []).append(kind)
    short = {"t": "tied", "u": "untied", "d": "**dropped**", "e": "**error**", "?": "not seen"}
    rows = ["| families | true | false | absent |", "|---|---|---|---|"]
    for letters, kinds in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        cells = [", ".join(short[letter] for letter in column[:3]) for column in letters.split()]
        rows.append(f"| {', '.join(kinds)} | {' | '.join(cells)} |")
    text = (ROOT / "docs" / "dev" / "incidents.md").read_text()
    assert text.split("<!-- mlx-lm -->\n")[1].split("\n<!-- end -->")[0] == "\n".join(rows)
    assert f"mlx-lm {VERSION}" in text
    assert mlx_data()["date"] in text
