"""Whatever transformers refuses to load, or draws at random, is an error: random folders, held against its loading."""

import json
import random

import numpy as np
import pytest
import saved_models as saved
import torch
import transformers as tr
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import V, llama_config, write_checkpoint

from tiewise.checkpoint import loaders
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.loaders import LOST, VERIFIED

FILE = "model.safetensors"
QUICK = ("LlamaForCausalLM", "BartForConditionalGeneration")
PREFIXES = ("_orig_mod.", "module.", "model.", "language_model.", "model.language_model.", "x", "transformer.")


def spoil(name, parts, tensors, draw):
    """Change tensors at random, and say what was done."""
    done = []
    head, first = parts["output"][0], parts["input"][0]
    how = draw.choice(["none", "equal", "differs", "alone", "zeros", "nan"])
    for table_name in parts["input"]:
        tensors[table_name] = tensors[first]
    if how in ("equal", "zeros", "nan"):
        tensors[head] = tensors[first].copy()
    if how == "zeros":
        tensors[first][3, 2], tensors[head][3, 2] = 0.0, -0.0
    if how == "nan":
        tensors[first][3, 2] = tensors[head][3, 2] = np.nan
    for gone in {"none": [head], "alone": parts["input"]}.get(how, []):
        del tensors[gone]
    done.append(how)
    if draw.random() < 0.5:
        which = draw.choice(["input", "output", "all", "input"])
        prefix = draw.choice(PREFIXES)
        for key in list(tensors) if which == "all" else [k for k in parts[which] if k in tensors]:
            other = key.partition(".")[2] if draw.random() < 0.3 and "." in key else prefix + key
            tensors[other] = tensors.pop(key)
        done.append(f"{which} behind {prefix}")
    if draw.random() < 0.3:
        tensors["model.extra.weight"] = np.ones((99, 32), np.float32)  # as many rows as the vocabulary
        done.append("a matrix more")
    for bias in parts["bias"] if draw.random() < 0.5 else ():
        change = draw.choice(["short", "flat", "gone", "other"])
        if bias in tensors:
            value = tensors.pop(bias)
            new = {"short": value[..., :-8], "flat": value.reshape(-1)[None], "other": value + 1}.get(change)
            tensors |= {} if new is None else {bias: np.ascontiguousarray(new)}
            done.append(f"{bias} {change}")
    return done


def cases():
    for name in VERIFIED:
        for number in range(5):
            quick = name in QUICK and number < 3
            yield pytest.param(name, number, marks=() if quick else pytest.mark.slow, id=f"{name}-{number}")


def loaded(name, folder):
    """[(model, what it says of its loading)] of two loads under different seeds; None where it refuses."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        try:
            made.append(getattr(tr, name).from_pretrained(folder, output_loading_info=True))
        except (RuntimeError, OSError):
            return None
    return made


@pytest.mark.parametrize(("name", "number"), list(cases()))
def test_what_transformers_loses_is_an_error(untied, tmp_path, name, number):
    source, parts = untied(name)
    draw = random.Random(f"{name} {number}")
    tensors, config = load_file(source / FILE), json.loads((source / "config.json").read_text())
    flags = draw.choice(VERIFIED[name])
    done = [flags, *spoil(name, parts, tensors, draw)]
    config = saved.without(config, saved.FLAG)
    for level, value in flags.items():
        (config[level] if level else config)[saved.FLAG] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / FILE, {"format": "pt"})
    audit = check(tmp_path)
    (said,) = (o for o in audit.outcomes if o.versions == tr.__version__)
    loads = loaded(name, tmp_path)
    if loads is None:
        assert said.outcome == loaders.ERROR, (done, said)
        assert audit.at_least("error"), done
        return
    (one, info), (two, _) = loads
    lookups, head = [t.weight for t in saved.ends(one)[0]], saved.ends(one)[1].weight
    again, other = [t.weight for t in saved.ends(two)[0]], saved.ends(two)[1].weight
    pairs = zip([*lookups, head], [*again, other], strict=True)
    anew = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs]
    if any(anew):
        assert said.outcome == (loaders.RANDOM_TABLE if any(anew[:-1]) else loaders.RANDOM_HEAD), (done, said)
        assert audit.at_least("error"), done
    elif said.outcome == loaders.NEW_BIAS:
        assert any(key.endswith("bias") for key in info["missing_keys"])
    elif said.outcome == loaders.DEPENDS:
        assert audit.at_least("error"), (done, said)  # of several input tables some are not read
    elif any(head is lookup for lookup in lookups):
        assert said.outcome in (loaders.TIED, loaders.DROPPED), (done, said)
    else:
        assert said.outcome in (loaders.UNTIED, loaders.KEPT), (done, said)


WRITTEN = st.sampled_from([{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
ARCHITECTURES = ["LlamaForCausalLM", "LlamaModel", "Nobody", "BartForConditionalGeneration", "Gemma3ForCausalLM", None]
ARCHITECTURES += ["BltForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM", "LlavaForConditionalGeneration"]
FAMILIES = ["llama", "bart", "gemma3_text", "t5", "bert", "llava", "blt", "nobody", None]
NAMES = ["model.embed_tokens.weight", "lm_head.weight", "model.shared.weight", "shared.weight", "lm_head.bias"]
NAMES += ["final_logits_bias", "cls.predictions.bias", "cls.predictions.decoder.bias", "model.extra.weight"]
NAMES += ["bert.embeddings.word_embeddings.weight", "language_model.lm_head.weight", "lm_head.W_q", "model.norm.weight"]
SHAPES = st.sampled_from([(V, 8), (V, 4), (V - 2, 8), (V,), (1, V), (1, V - 3)])
FILES = st.sampled_from([FILE, FILE, FILE, "consolidated.safetensors", "model.fp16.safetensors"])


@settings(max_examples=150)
@given(st.data())
def test_no_loader_loses_a_model_without_an_error(tmp_path_factory, data):
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
        lost = [outcome for outcome in audit.outcomes if outcome.outcome in LOST]
        assert not lost or audit.at_least("error"), (lost, config, stored)
        for outcome in audit.outcomes:
            assert outcome.predicted or outcome.versions == tr.__version__
            assert (outcome.outcome in LOST) <= (outcome.right is False)
