"""Test predicted loader outcomes against loads with transformers and, for other loaders, their issue threads."""

import json
import random
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import saved_models as saved
import torch
import transformers as tr
from asked_classes import asking_in_this_process
from hypothesis import given, settings
from hypothesis import strategies as st
from observed_loads import observe_transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import V, llama_config, write_checkpoint

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loader_columns import BROKEN, VERIFIED
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.rewrite import repair

FLAG, FILE = saved.FLAG, "model.safetensors"
LLAMA, T5, BART = "LlamaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"
COLUMNS = {
    "transformers 4": columns.TRANSFORMERS_4,
    f"transformers {tr.__version__}": columns.TRANSFORMERS_5,
    "vLLM before August 2026": columns.VLLM_BEFORE,
    "vLLM since August 2026": columns.VLLM_AFTER,
    "llama.cpp": columns.LLAMA_CPP,
    "mlx-lm": columns.MLX,
    "SGLang": columns.SGLANG,
}


@lru_cache
def save_untied_once(name):
    model = saved.tiny(name, False)
    tables, head = saved.ends(model)
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # T5 ties whatever the flag says
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        output = saved.stored_as(folder, head.weight)
        inputs = {n for t in tables for n in saved.stored_as(folder, t.weight)} - {*output}
        stored, config = load_file(f"{folder}/{FILE}"), Path(folder, "config.json").read_text()
    biases = [n for n in stored if n.endswith("bias") and stored[n].shape[-1] == len(stored[output[0]])]
    return stored, config, {"input": sorted(inputs), "output": output, "bias": biases}


def load_untied(name):
    """Return the tensors, the config and the part names (input, output, bias) of a saved untied tiny model."""
    stored, config, parts = save_untied_once(name)
    return dict(stored), json.loads(config), parts


def write_folder(folder, tensors, config):
    save_file({n: tensor.clone().contiguous() for n, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def with_flags(config, flags):
    """Return a config with flags at the given levels only."""
    config = saved.without(config, FLAG)
    for level, value in flags.items():
        (config[level] if level else config)[FLAG] = value
    return config


def write_state(model, folder, flags, state):
    """Write an untied model with these flags and this table state; return its original table and head."""
    tensors, config, parts = model
    inputs, (output,) = parts["input"], parts["output"]
    table, head = tensors[inputs[0]], tensors[output]
    tensors |= dict.fromkeys(inputs, table) | ({output: table} if state == columns.SAME else {})
    for name in {columns.NONE: [output], columns.ALONE: inputs, columns.NEITHER: [*inputs, output]}.get(state, []):
        del tensors[name]
    write_folder(folder, tensors, with_flags(config, flags))
    return table, head


def outcomes_by_column(folder, scan=True):
    """Return {column of the documentation's matrix: predicted outcome}."""
    found = predict(Facts(open_folder(folder), scan=scan))
    said = {one.loader: one for one in found} | {(one.loader, one.versions): one for one in found}
    return {column: said.get((loader.name, loader.versions), said[loader.name]) for column, loader in COLUMNS.items()}


def predicted_outcome(folder, scan=True):
    return outcomes_by_column(folder, scan)[f"transformers {tr.__version__}"]


def observe_loads(name, folder):
    """Load a folder under two seeds; return the outcome, tables, head and missing keys."""
    loads, quiet = [], 0
    for seed in (0, 1):
        torch.manual_seed(seed)
        with saved.heard() as heard:
            model, info = getattr(tr, name).from_pretrained(folder, output_loading_info=True)
        lookups, last = saved.ends(model)
        loads.append([last.weight, *(lookup.weight for lookup in lookups if lookup is not last)])
        quiet += "will NOT tie them" not in heard.getvalue()
    head, *tables = loads[0]
    drawn, *drawn_tables = (not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*loads, strict=True))
    if any(drawn_tables):
        outcome = columns.RANDOM_TABLE
    elif drawn:
        outcome = columns.RANDOM_HEAD
    elif any(head is table for table in tables):
        outcome = columns.TIED
    else:
        outcome = columns.UNTIED if quiet else columns.UNTIED_WITH_WARNING
    return outcome, tables, head, info["missing_keys"]


def verified_cases():
    for name, flags in VERIFIED.items():
        for flag in flags:
            for state in columns.STATES:
                mark = () if name in (LLAMA, T5) else pytest.mark.slow
                written = ",".join(f"{level or 'root'}={value}" for level, value in flag.items()) or "absent"
                yield pytest.param(name, flag, state, marks=mark, id=f"{name}-{written}-{state}")


@pytest.mark.parametrize(("name", "flags", "state"), list(verified_cases()))
def test_predicted_outcome_matches_load_with_installed_transformers(name, flags, state, tmp_path):
    table, head = write_state(load_untied(name), tmp_path, flags, state)
    head = table if state == columns.SAME else head
    said = predicted_outcome(tmp_path)
    seen, tables, loaded, _ = observe_loads(name, tmp_path)
    assert (said.outcome, said.predicted) == (seen, False)
    assert said.right == (seen in (columns.TIED, columns.UNTIED, columns.UNTIED_WITH_WARNING))
    if seen == columns.TIED:
        assert torch.equal(loaded, table) or torch.equal(loaded, head)
    elif said.right:
        assert torch.equal(loaded, head)
        assert all(torch.equal(one, table) for one in tables)


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def flagged(flag):
    return lambda tensors, config: config.update({FLAG: flag})


def with_half_the_rows(*names):
    return lambda tensors, config: tensors.update({name: tensors[name][:50] for name in names})


def shared_alone(tensors, config):
    for key in [key for key in tensors if key.endswith("coder.embed_tokens.weight")]:
        del tensors[key]


def wrapped(tensors, config):
    for key in list(tensors):
        tensors[f"_orig_mod.{key}"] = tensors.pop(key)


def rounded(tensors, config, dtype="float32"):
    tensors[HEAD] = tensors[TABLE].bfloat16()
    config |= {FLAG: True, "dtype": dtype}


def body(tensors, config):
    del tensors["lm_head.weight"]
    for key in list(tensors):
        tensors[key.removeprefix("transformer.")] = tensors.pop(key)
    config[FLAG] = True


def quantised_as(section):
    return lambda tensors, config: config.update(quantization_config=section)


# model, edit, predicted outcome, words of its sentence, observed outcome or error, missing keys
EDITED = [
    *((LLAMA, flagged(flag), columns.ERROR, "", FLAG, []) for flag in ("true", None, 1)),
    *((T5, flagged(flag), columns.UNTIED_WITH_WARNING, "", columns.UNTIED_WITH_WARNING, []) for flag in ("true", None)),
    *((LLAMA, with_half_the_rows(*names), columns.ERROR, "50 rows", "mismatch", [])
      for names in ([HEAD], [TABLE], [TABLE, HEAD])),
    *((LLAMA, quantised_as(section), columns.ERROR, "no quant_method", "quant_method", [])
      for section in ({}, {"bits": 4, "group_size": 64}, {"quant_method": None})),
    (LLAMA, quantised_as(None), columns.UNTIED, "", columns.UNTIED, []),
    *((name, shared_alone, columns.RANDOM_TABLE, "coder.embed_tokens.weight", columns.RANDOM_TABLE, [])
      for name in (BART, "SwitchTransformersForConditionalGeneration")),
    (LLAMA, wrapped, columns.RANDOM_TABLE, "", columns.RANDOM_TABLE, [TABLE, HEAD]),
    (LLAMA, partial(rounded, dtype="bfloat16"), columns.TIED, "", columns.TIED, []),
    (LLAMA, rounded, columns.DEPENDS, "", columns.UNTIED_WITH_WARNING, []),
    ("GPT2LMHeadModel", body, columns.TIED, "", columns.TIED, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "outcome", "words", "happens", "missing"), EDITED)
def test_predicted_outcome_matches_load_of_edited_checkpoint(tmp_path, name, edit, outcome, words, happens, missing):
    tensors, config, _ = load_untied(name)
    edit(tensors, config)
    write_folder(tmp_path, tensors, config)
    said = predicted_outcome(tmp_path)
    assert said.outcome == outcome
    assert words in said.sentence
    if outcome == columns.ERROR:
        with pytest.raises(Exception, match=happens):
            observe_loads(name, tmp_path)
        return
    assert said.right is (outcome != columns.RANDOM_TABLE)
    seen, *_, keys = observe_loads(name, tmp_path)
    assert (seen, bool(keys)) == (happens, happens == columns.RANDOM_TABLE)
    assert {*missing, *([said.sentence.split()[0]] if words else [])} <= set(keys)


def test_index_without_metadata_is_refused_and_repaired(tmp_path):
    source, fixed = tmp_path / "source", tmp_path / "fixed"
    model = saved.tiny(LLAMA, False)
    model.save_pretrained(source, max_shard_size="20KB")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    said = predicted_outcome(source)
    assert (said.outcome, said.right) == (columns.ERROR, False)
    with pytest.raises(KeyError, match="metadata"):
        tr.LlamaForCausalLM.from_pretrained(source)
    repair(source, fixed)
    assert check(fixed, build=False).at_least("warning") == ()
    loaded = tr.LlamaForCausalLM.from_pretrained(fixed).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


# model, flags, state, {loader: outcome}; docs/dev/incidents.md cites the threads
FOUR, BEFORE, SINCE = "transformers 4", "vLLM before August 2026", "vLLM since August 2026"
OTHERS = (FOUR, BEFORE, SINCE, "llama.cpp", "mlx-lm")
DROPPED, LOUD, DRAWN = columns.DROPPED, columns.ERROR, columns.RANDOM_HEAD
THREADS = [
    *((LLAMA, {} if flag is None else {"": flag}, state, dict(zip(OTHERS, words, strict=True)))
      for flag, state, words in [
        (True, columns.NONE, ["tied"] * 5),
        (True, columns.SAME, ["tied", "tied", "tied", "untied", "tied"]),
        (True, columns.DIFFERENT, [DROPPED, DROPPED, "kept with a warning", "untied", DROPPED]),
        (False, columns.NONE, [DRAWN, DRAWN, "tied", "tied", LOUD]),
        (False, columns.DIFFERENT, ["untied"] * 5),
        (None, columns.DIFFERENT, ["untied", "untied", "untied", "untied", DROPPED]),
    ]),
    ("Gemma2ForCausalLM", {"": False}, columns.DIFFERENT, {"llama.cpp": DROPPED}),
    # vllm#51063 has two levels; transformers 4 reads the flag of the text part
    ("Gemma3ForConditionalGeneration", {"": True, "text_config": False}, columns.DIFFERENT,
     {BEFORE: DROPPED, FOUR: "untied"}),
    (T5, {}, columns.NONE, {"mlx-lm": columns.NOT_SERVED}),
    (T5, {"": True}, columns.NONE, {"llama.cpp": "tied"}),  # T5 is the encoder-decoder that it converts
    (BART, {"": True}, columns.NONE, {"llama.cpp": columns.NOT_SERVED}),
    ("NemotronHForCausalLM", {"": True}, columns.DIFFERENT, dict.fromkeys(COLUMNS, "untied")),  # its class never ties
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "state", "words"), THREADS)
def test_predictions_for_other_loaders_match_cited_threads(tmp_path, name, flags, state, words):
    write_state(load_untied(name), tmp_path, flags, state)
    said = outcomes_by_column(tmp_path)
    assert {column: said[column].outcome for column in words} == words


def test_prediction_without_scan_depends_on_equality_of_tables(tmp_path):
    write_state(load_untied(LLAMA), tmp_path, {"": True}, columns.DIFFERENT)
    said = predicted_outcome(tmp_path, scan=False)
    assert (said.outcome, said.right) == (columns.DEPENDS, True)
    assert "kept with a warning or tied" in said.sentence
    write_state(load_untied(LLAMA), tmp_path, {"": False}, columns.DIFFERENT)
    assert predicted_outcome(tmp_path, scan=False).outcome == columns.UNTIED


OWN = {"model_type": "tiewise", "base_model_type": "llama", "tiewise_boundary": "factored:8"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, dict.fromkeys(COLUMNS, columns.NO_HEAD)),
        (OWN, {FOUR: LOUD, BEFORE: LOUD}),
        ({"model_type": "nobody", "architectures": ["Nobody"]}, {f"transformers {tr.__version__}": columns.DEPENDS}),
    ],
)
def test_predict_handles_headless_tiewise_unknown_and_absent_configs(tmp_path, config, words):
    tensors, written, _ = load_untied(LLAMA)
    write_folder(tmp_path, tensors, written | config)
    said = outcomes_by_column(tmp_path)
    assert {column: said[column].outcome for column in words} == words
    assert all(one.predicted for one in said.values()), said
    (tmp_path / "config.json").unlink()
    assert predict(Facts(open_folder(tmp_path))) == ()


def matrix_of(names, states):
    """Return the Markdown table of these loaders and states, as the columns predict it."""
    right = ("tied", "untied", "kept with a warning")
    rows = [["flag", "stored", *names], ["---"] * (2 + len(names))]
    for flag in (True, False):
        for state in states:
            words = [(one.tied if flag else one.untied)[columns.STATES.index(state)] for one in map(COLUMNS.get, names)]
            rows.append([str(flag).lower(), state, *(word if word in right else f"**{word}**" for word in words)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("--- |", "---|")


def test_loader_matrix_in_docs_equals_loader_columns():
    text = (Path(__file__).parents[2] / "docs" / "dev" / "incidents.md").read_text()
    assert text.split("<!-- matrix -->\n")[1].split("\n<!-- end -->")[0] == matrix_of(list(COLUMNS), columns.STATES)


def test_loader_summary_in_docs_equals_loader_columns():
    text = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    names = [name for name in COLUMNS if name not in ("transformers 4", "vLLM before August 2026")]
    states = ("no head", "equal head", "other head")
    assert text.split("<!-- summary -->\n")[1].split("\n<!-- end -->")[0] == matrix_of(names, states)


# random folders: `check` reports an error for everything that transformers refuses to load or draws at random

PREFIXES = ("_orig_mod.", "module.", "model.", "language_model.", "model.language_model.", "x", "transformer.")


def damage(parts, tensors, draw):
    """Change tensors at random and return a description of the changes."""
    head = parts["output"][0]
    how = draw.choice(["none", "equal", "differs", "alone", "zeros", "nan"])
    shared = tensors[parts["input"][0]].clone()
    tensors |= dict.fromkeys(parts["input"], shared)
    if how in ("equal", "zeros", "nan"):
        tensors[head] = shared.clone()
    if how in ("zeros", "nan"):
        shared[3, 2], tensors[head][3, 2] = (0.0, -0.0) if how == "zeros" else (np.nan, np.nan)
    for gone in {"none": [head], "alone": parts["input"]}.get(how, []):
        del tensors[gone]
    done = [how]
    if draw.random() < 0.5:
        which, prefix = draw.choice(["input", "output", "all", "input"]), draw.choice(PREFIXES)
        for key in list(tensors) if which == "all" else [k for k in parts[which] if k in tensors]:
            other = key.partition(".")[2] if draw.random() < 0.3 and "." in key else prefix + key
            tensors[other] = tensors.pop(key)
        done.append(f"{which} behind {prefix}")
    if draw.random() < 0.3:
        tensors["model.extra.weight"] = torch.ones(99, 32)  # as many rows as the vocabulary
        done.append("a matrix more")
    for bias in parts["bias"] if draw.random() < 0.5 else ():
        change = draw.choice(["short", "flat", "gone", "other"])
        if bias in tensors:
            value = tensors.pop(bias)
            new = {"short": value[..., :-8], "flat": value.reshape(-1)[None], "other": value + 1}.get(change)
            tensors |= {} if new is None else {bias: new}
            done.append(f"{bias} {change}")
    return done


def damaged_cases():
    for name in VERIFIED:
        for number in range(5):
            quick = name in (LLAMA, BART) and number < 3
            yield pytest.param(name, number, marks=() if quick else pytest.mark.slow, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "number"), list(damaged_cases()))
def test_check_reports_error_if_transformers_loses_damaged_tensors(tmp_path, name, number):
    tensors, config, parts = load_untied(name)
    draw = random.Random(f"{name} {number}")
    done = [flags := draw.choice(VERIFIED[name]), *damage(parts, tensors, draw)]
    write_folder(tmp_path, tensors, with_flags(config, flags))
    audit, said = check(tmp_path), predicted_outcome(tmp_path).outcome
    try:
        seen, *_, missing = observe_loads(name, tmp_path)
    except (RuntimeError, OSError):
        seen = columns.ERROR
    if seen in BROKEN:
        assert said == seen, done
        assert audit.at_least("error"), done
    elif said == columns.NEW_BIAS:
        assert any(key.endswith("bias") for key in missing)
    elif said == columns.DEPENDS:
        assert audit.at_least("error"), done  # some of several input tables are not read
    else:
        alike = (columns.TIED, DROPPED) if seen == columns.TIED else (columns.UNTIED, columns.UNTIED_WITH_WARNING)
        assert said in alike, done


WRITTEN = st.sampled_from([{}, {FLAG: True}, {FLAG: False}])
ARCHITECTURES = [LLAMA, "LlamaModel", "Nobody", BART, "Gemma3ForCausalLM", None]
ARCHITECTURES += ["BltForCausalLM", T5, "BertForMaskedLM", "LlavaForConditionalGeneration"]
FAMILIES = ["llama", "bart", "gemma3_text", "t5", "bert", "llava", "blt", "nobody", None]
NAMES = [TABLE, HEAD, "model.shared.weight", "shared.weight", "lm_head.bias"]
NAMES += ["final_logits_bias", "cls.predictions.bias", "cls.predictions.decoder.bias", "model.extra.weight"]
NAMES += ["bert.embeddings.word_embeddings.weight", "language_model.lm_head.weight", "lm_head.W_q", "model.norm.weight"]
SHAPES = st.sampled_from([(V, 8), (V, 4), (V - 2, 8), (V,), (1, V), (1, V - 3)])
FILES = st.sampled_from([FILE, FILE, FILE, "consolidated.safetensors", "model.fp16.safetensors"])


@settings(max_examples=150)
@given(st.data())
def test_check_reports_error_for_every_broken_loader_outcome(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    named, kind = data.draw(st.sampled_from(ARCHITECTURES)), data.draw(st.sampled_from(FAMILIES))
    config = llama_config(None, model_type=kind, architectures=[named] if named else None)
    config |= data.draw(WRITTEN) | data.draw(st.sampled_from([{}, {}, {"quantization_config": {}}]))
    prefix = data.draw(st.sampled_from(["", "", *PREFIXES]))
    stored = data.draw(st.dictionaries(st.sampled_from(NAMES), SHAPES, min_size=1))
    tensors = {prefix + name: np.ones(shape, np.float32) for name, shape in stored.items()}
    write_checkpoint(folder, config, tensors)
    (folder / FILE).rename(folder / data.draw(FILES))
    for scan in (True, False):
        audit = check(folder, scan=scan)
        refused = [one for one in audit.outcomes if one.outcome == columns.ERROR and one.loader != "transformers"]
        lost = [one for one in audit.outcomes if one.outcome in BROKEN and one not in refused]
        assert not lost or audit.at_least("error"), (lost, config, stored)
        for outcome in audit.outcomes:
            assert outcome.predicted or outcome.versions in (tr.__version__, mlx_data()["version"])
            assert (outcome.outcome in BROKEN) <= (outcome.right is False)


INDEX = "model.safetensors.index.json"
HEAD_FILES = [3, None, True, ["a"], "/etc/passwd", "../up.safetensors", "x/y.safetensors", "absent.safetensors"]
HEAD_FILES += ["", "..", "a\0b", "folder", "config.json"]
UNKNOWN_FILES = ("/etc/passwd", "../up.safetensors", "x/y.safetensors", "folder", "config.json")  # not read here


def save_shards(folder):
    """Save an untied model in several shards, and return its index."""
    saved.tiny(LLAMA, False).save_pretrained(folder, max_shard_size=4000)
    (folder / "folder").mkdir()
    return json.loads((folder / INDEX).read_text())


def rows_of(folder, **how):
    """Return {loader: outcome} for the newest version of each loader."""
    return {outcome.loader: outcome for outcome in check(folder, **how).outcomes}


@pytest.mark.parametrize("tensor", ["lm_head.weight", "stale.weight"])
@pytest.mark.parametrize("file", HEAD_FILES, ids=repr)
def test_rows_of_a_wrong_index_are_those_of_from_pretrained(tmp_path, tensor, file):
    index = save_shards(tmp_path)
    index["weight_map"][tensor] = file
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert observe_transformers(LLAMA, tmp_path).outcomes == {columns.ERROR}
    word, is_right = (columns.DEPENDS, None) if file in UNKNOWN_FILES else (columns.ERROR, False)
    with asking_in_this_process():
        for rows in (rows_of(tmp_path), rows_of(tmp_path, build=False)):
            assert (rows["transformers"].outcome, rows["transformers"].right) == (word, is_right)
            for loader in ("vLLM", "SGLang", "llama.cpp"):
                assert (rows[loader].outcome, rows[loader].right) == (columns.DEPENDS, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"metadata": {}, "weight_map": []}', "\ufeff{}"])
def test_rows_of_an_unreadable_index_are_those_of_from_pretrained(tmp_path, text):
    save_shards(tmp_path)
    (tmp_path / INDEX).write_text(text, "utf-8")
    assert observe_transformers(LLAMA, tmp_path).outcomes == {columns.ERROR}
    rows = rows_of(tmp_path, build=False)
    assert rows["transformers"].outcome == columns.ERROR
    assert {rows[loader].outcome for loader in ("vLLM", "SGLang", "llama.cpp")} == {columns.DEPENDS}


def test_row_of_an_index_with_a_name_twice_is_open(tmp_path):
    """transformers takes the last file of a name, and `check` reads no such index."""
    save_shards(tmp_path)
    text = (tmp_path / INDEX).read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "other",')
    (tmp_path / INDEX).write_text(text)
    assert observe_transformers(LLAMA, tmp_path).outcomes == {columns.UNTIED}
    row = rows_of(tmp_path, build=False)["transformers"]
    assert (row.outcome, row.right) == (columns.DEPENDS, None)


@pytest.mark.parametrize("size", [10**30, 2**63, -5, 0, 24.0, "24", True, [24]], ids=str)
def test_rows_of_a_wrong_vocab_size_are_those_of_from_pretrained(tmp_path, size):
    saved.tiny(LLAMA, False).save_pretrained(tmp_path / "m")
    file = tmp_path / "m/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": size}))
    assert observe_transformers(LLAMA, tmp_path / "m").outcomes == {columns.ERROR}
    with asking_in_this_process():
        for rows in (rows_of(tmp_path / "m"), rows_of(tmp_path / "m", build=False)):
            assert (rows["transformers"].outcome, rows["transformers"].right) == (columns.ERROR, False)
            assert not any(rows[loader].right for loader in ("vLLM", "SGLang", "llama.cpp", "mlx-lm"))
