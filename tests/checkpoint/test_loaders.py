"""The column of the installed transformers, held against what it really loads; the other columns against threads."""

import json
from pathlib import Path

import pytest
import saved_models as saved
import transformers as tr
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from tiewise.checkpoint import loaders
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loaders import predict

FLAG = saved.FLAG
QUICK = ("LlamaForCausalLM", "T5ForConditionalGeneration")


def put(source, parts, folder, flags, state):
    """Write a variant of a saved model: flags at some levels and nowhere else, tables in one of the states."""
    tensors = load_file(source / "model.safetensors")
    inputs, (output,) = parts["input"], parts["output"]
    table, head = tensors[inputs[0]], tensors[output]
    for name in inputs:
        tensors[name] = table
    if state == loaders.SAME:
        tensors[output] = table.copy()
    for name in {loaders.NONE: [output], loaders.ALONE: inputs, loaders.NEITHER: [*inputs, output]}.get(state, []):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = saved.without(json.loads((source / "config.json").read_text()), FLAG)
    for level, value in flags.items():
        (config[level] if level else config)[FLAG] = value
    (folder / "config.json").write_text(json.dumps(config))
    return table, head


def predicted(folder, *, scan=True):
    outcomes = predict(Facts(open_folder(folder), scan=scan))
    (ours,) = (outcome for outcome in outcomes if outcome.versions == tr.__version__)
    return ours


def _cases():
    for name, flags in loaders.VERIFIED.items():
        for flag in flags:
            for state in loaders.STATES:
                mark = () if name in QUICK else pytest.mark.slow
                written = ",".join(f"{level or 'root'}={value}" for level, value in flag.items()) or "absent"
                yield pytest.param(name, flag, state, marks=mark, id=f"{name}-{written}-{state}")


@pytest.mark.parametrize(("name", "flags", "state"), list(_cases()))
def test_this_transformers_does_what_is_said_of_it(untied, name, flags, state, tmp_path):
    table, head = put(*untied(name), tmp_path, flags, state)
    said = predicted(tmp_path)
    seen = saved.observe(name, tmp_path, table, table if state == loaders.SAME else head)
    assert said.outcome == seen
    assert said.right == (seen in (loaders.TIED, loaders.UNTIED, loaders.KEPT))
    assert not said.predicted


def edited(untied, name, folder, edit):
    """Write a saved model whose tensors and config `edit(tensors, config)` has changed."""
    source = untied(name)[0]
    tensors, config = load_torch(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    edit(tensors, config)
    save_torch({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def loading(name, folder):
    model, info = getattr(tr, name).from_pretrained(folder, output_loading_info=True)
    lookups, head = saved.ends(model)
    return lookups[0].weight, head.weight, info


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("flag", ["true", None, 1])
def test_a_flag_that_is_no_boolean(untied, tmp_path, flag):
    edited(untied, "LlamaForCausalLM", tmp_path, lambda tensors, config: config.update({FLAG: flag}))
    assert predicted(tmp_path).outcome == loaders.ERROR
    with pytest.raises(Exception, match=FLAG):
        loading("LlamaForCausalLM", tmp_path)


@pytest.mark.parametrize("flag", ["true", None])
def test_t5_takes_any_flag(untied, tmp_path, flag):
    name = "T5ForConditionalGeneration"
    edited(untied, name, tmp_path, lambda tensors, config: config.update({FLAG: flag}))
    assert predicted(tmp_path).outcome == loaders.KEPT
    table, head, _ = loading(name, tmp_path)
    assert table is not head


@pytest.mark.parametrize("which", [[HEAD], [TABLE], [TABLE, HEAD]])
def test_rows_that_are_not_the_vocabulary(untied, tmp_path, which):
    def halve(tensors, config):
        tensors.update({name: tensors[name][:50] for name in which})

    edited(untied, "LlamaForCausalLM", tmp_path, halve)
    said = predicted(tmp_path)
    assert said.outcome == loaders.ERROR
    assert "50 rows" in said.sentence
    with pytest.raises(RuntimeError, match="mismatch"):
        loading("LlamaForCausalLM", tmp_path)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "SwitchTransformersForConditionalGeneration"])
def test_only_the_shared_table_is_stored_and_the_flag_is_false(untied, tmp_path, name):
    def drop(tensors, config):
        for key in [key for key in tensors if key.endswith("coder.embed_tokens.weight")]:
            del tensors[key]

    edited(untied, name, tmp_path, drop)
    said = predicted(tmp_path)
    missing = loading(name, tmp_path)[2]["missing_keys"]
    assert said.outcome == loaders.RANDOM_TABLE
    assert said.sentence.split()[0] in missing


def test_names_of_a_wrapped_model(untied, tmp_path):
    def wrap(tensors, config):
        for key in list(tensors):
            tensors[f"_orig_mod.{key}"] = tensors.pop(key)

    edited(untied, "LlamaForCausalLM", tmp_path, wrap)
    assert predicted(tmp_path).outcome == loaders.RANDOM_TABLE
    assert {TABLE, HEAD} <= set(loading("LlamaForCausalLM", tmp_path)[2]["missing_keys"])


@pytest.mark.parametrize(("dtype", "outcome"), [("bfloat16", loaders.TIED), ("float32", loaders.DEPENDS)])
def test_equal_once_rounded(untied, tmp_path, dtype, outcome):
    def round_head(tensors, config):
        tensors[HEAD] = tensors[TABLE].bfloat16()
        config.update({FLAG: True, "dtype": dtype})

    edited(untied, "LlamaForCausalLM", tmp_path, round_head)
    said = predicted(tmp_path)
    table, head, _ = loading("LlamaForCausalLM", tmp_path)
    assert said.outcome == outcome
    assert said.right is True
    assert (table is head) == (dtype == "bfloat16")


def test_the_body_saved_alone_loads_as_its_class_does(untied, tmp_path):
    def strip(tensors, config):
        del tensors["lm_head.weight"]
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        config[FLAG] = True

    edited(untied, "GPT2LMHeadModel", tmp_path, strip)
    assert predicted(tmp_path).outcome == loaders.TIED
    table, head, info = loading("GPT2LMHeadModel", tmp_path)
    assert table is head
    assert not info["missing_keys"]


def column(folder, loader, version=""):
    outcomes = predict(Facts(open_folder(folder)))
    (found,) = (o for o in outcomes if o.loader == loader and version in o.versions and o.versions != tr.__version__)
    return found


@pytest.mark.parametrize(
    ("flag", "state", "words"),
    [  # transformers 4, vLLM before and after, llama.cpp, mlx-lm: the threads that docs/loaders.md cites
        (True, loaders.NONE, ["tied", "tied", "tied", "tied", "tied"]),
        (True, loaders.SAME, ["tied", "tied", "tied", "untied", "tied"]),
        (True, loaders.DIFFERENT, ["head dropped", "head dropped", "kept with a warning", "untied", "head dropped"]),
        (False, loaders.NONE, ["random head", "random head", "tied", "tied", "load error"]),
        (False, loaders.DIFFERENT, ["untied"] * 5),
        (None, loaders.DIFFERENT, ["untied", "untied", "untied", "untied", "head dropped"]),
    ],
)
def test_other_loaders_as_their_threads_say(untied, tmp_path, flag, state, words):
    put(*untied("LlamaForCausalLM"), tmp_path, {} if flag is None else {"": flag}, state)
    asked = [("transformers", "4"), ("vLLM", "before"), ("vLLM", "since"), ("llama.cpp", ""), ("mlx-lm", "")]
    assert [column(tmp_path, *which).outcome for which in asked] == words


def test_gemma_2_loses_its_head_in_llama_cpp(untied, tmp_path):
    put(*untied("Gemma2ForCausalLM"), tmp_path, {"": False}, loaders.DIFFERENT)
    assert column(tmp_path, "llama.cpp").outcome == loaders.DROPPED


def test_the_two_levels_of_vllm_51063(untied, tmp_path):
    put(*untied("Gemma3ForConditionalGeneration"), tmp_path, {"": True, "text_config": False}, loaders.DIFFERENT)
    assert column(tmp_path, "vLLM", "before").outcome == loaders.DROPPED
    assert column(tmp_path, "transformers", "4").outcome == loaders.UNTIED  # it asks the text part


def test_without_reading_tables_it_says_on_what_it_depends(untied, tmp_path):
    put(*untied("LlamaForCausalLM"), tmp_path, {"": True}, loaders.DIFFERENT)
    said = predicted(tmp_path, scan=False)
    assert (said.outcome, said.right) == (loaders.DEPENDS, True)
    assert "kept with a warning or tied" in said.sentence
    put(*untied("LlamaForCausalLM"), tmp_path, {"": False}, loaders.DIFFERENT)
    assert predicted(tmp_path, scan=False).outcome == loaders.UNTIED


def test_no_head_no_service_no_config(untied, tmp_path):
    edited(
        untied, "LlamaForCausalLM", tmp_path, lambda t, c: c.update(architectures=["LlamaForSequenceClassification"])
    )
    assert {o.outcome for o in predict(Facts(open_folder(tmp_path)))} == {loaders.NO_HEAD}
    put(*untied("T5ForConditionalGeneration"), tmp_path, {}, loaders.NONE)
    assert column(tmp_path, "mlx-lm").outcome == loaders.NOT_SERVED
    (tmp_path / "config.json").unlink()
    assert predict(Facts(open_folder(tmp_path))) == ()


def test_this_packages_factored_checkpoints_load_nowhere_else(untied, tmp_path):
    def factored(tensors, config):
        config.update(model_type="tiewise", base_model_type="llama", tiewise_boundary="factored:8")

    edited(untied, "LlamaForCausalLM", tmp_path, factored)
    assert column(tmp_path, "transformers", "4").outcome == loaders.ERROR
    assert column(tmp_path, "vLLM", "before").outcome == loaders.ERROR


def test_unknown_families_depend_on_their_own_code(untied, tmp_path):
    edited(untied, "LlamaForCausalLM", tmp_path, lambda t, c: c.update(model_type="nobody", architectures=["Nobody"]))
    outcomes = predict(Facts(open_folder(tmp_path)))
    assert all(o.predicted for o in outcomes)
    assert outcomes[1].outcome == loaders.DEPENDS


def test_the_matrix_in_the_documentation_is_the_one_in_use():
    columns = {
        "transformers 4": loaders.TRANSFORMERS_4,
        f"transformers {tr.__version__}": loaders.TRANSFORMERS_5,
        "vLLM before August 2026": loaders.VLLM_BEFORE,
        "vLLM since August 2026": loaders.VLLM_AFTER,
        "llama.cpp": loaders.LLAMA_CPP,
        "mlx-lm": loaders.MLX,
    }
    right = ("tied", "untied", "kept with a warning")
    rows = [["flag", "stored", *columns], ["---"] * (2 + len(columns))]
    for flag in (True, False):
        for state in loaders.STATES:
            words = [loader.makes_of(flag, state) for loader in columns.values()]
            rows.append([str(flag).lower(), state, *(word if word in right else f"**{word}**" for word in words)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")
    text = (Path(__file__).parents[2] / "docs" / "loaders.md").read_text()
    assert text.split("<!-- matrix -->\n")[1].split("\n<!-- end -->")[0] == table


def test_a_class_that_never_ties_does_so_nowhere(untied, tmp_path):
    edited(untied, "NemotronHForCausalLM", tmp_path, lambda tensors, config: config.update({FLAG: True}))
    assert {o.outcome for o in predict(Facts(open_folder(tmp_path)))} == {loaders.UNTIED}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("T5ForConditionalGeneration", loaders.TIED), ("BartForConditionalGeneration", loaders.NOT_SERVED)],
)
def test_of_encoder_decoders_llama_cpp_converts_t5(untied, tmp_path, name, outcome):
    put(*untied(name), tmp_path, {"": True}, loaders.NONE)
    assert column(tmp_path, "llama.cpp").outcome == outcome
