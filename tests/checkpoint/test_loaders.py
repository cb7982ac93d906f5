"""The column of the installed transformers, held against what it really loads; the other columns against threads."""

import json

import numpy as np
import pytest
import saved_models as saved
import torch
import transformers as tr
from safetensors.numpy import load_file, save_file

from tiewise.checkpoint import loaders
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.folder import open_folder
from tiewise.checkpoint.loaders import predict

FLAG = saved.FLAG
ROOT = [{"": True}, {"": False}, {}]
NESTED = [*ROOT, {"": True, "text_config": False}, {"": False, "text_config": True}, {"text_config": True}]
FAMILIES = {
    "LlamaForCausalLM": ROOT,
    "GPT2LMHeadModel": ROOT,
    "Gemma2ForCausalLM": ROOT,
    "BertForMaskedLM": ROOT,
    "T5ForConditionalGeneration": ROOT,
    "SwitchTransformersForConditionalGeneration": ROOT,
    "BartForConditionalGeneration": ROOT,
    "RemBertForCausalLM": ROOT,  # never ties
    "LlavaForConditionalGeneration": NESTED,  # either level ties
    "Gemma3ForConditionalGeneration": NESTED,  # the root decides
    "Blip2ForConditionalGeneration": NESTED,  # the text part decides
}
QUICK = ("LlamaForCausalLM", "T5ForConditionalGeneration")
STATES = (loaders.NONE, loaders.SAME, loaders.DIFFERENT, loaders.ALONE, loaders.NEITHER)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Folders of untied tiny models, saved once, with the names of their tables found by values."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = saved.tiny(name, False)
            head = saved.ends(model)[1]
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # T5 ties whatever the flag says
            model.save_pretrained(folder)
            made[name] = folder, *_names(folder, model)
        return made[name]

    return make


def _names(folder, model):
    tables, head = saved.ends(model)
    inputs = {name for table in tables for name in saved.stored_as(folder, table.weight)}
    (output,) = saved.stored_as(folder, head.weight)
    return sorted(inputs - {output}), output


def put(source, inputs, output, folder, flags, state):
    """Write a variant of a saved model: flags at some levels and nowhere else, tables in one of the states."""
    tensors = load_file(source / "model.safetensors")
    table, head = tensors[inputs[0]], tensors[output]
    for name in inputs:
        tensors[name] = table
    if state == loaders.SAME:
        tensors[output] = table.copy()
    for name in {loaders.NONE: [output], loaders.ALONE: inputs, loaders.NEITHER: [*inputs, output]}.get(state, []):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = without_flag(json.loads((source / "config.json").read_text()))
    for level, value in flags.items():
        (config[level] if level else config)[FLAG] = value
    (folder / "config.json").write_text(json.dumps(config))
    return table, head


def without_flag(record):
    return {k: without_flag(v) for k, v in record.items() if k != FLAG} if isinstance(record, dict) else record


def observe(name, folder, table, head):
    """One of the outcome words, from two loads under different seeds."""
    heads, tables, warned = [], [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with Warnings() as heard:
            model = getattr(tr, name).from_pretrained(folder)
        lookups, last = saved.ends(model)
        lookups = [lookup for lookup in lookups if lookup is not last]
        tables.append([lookup.weight.detach().numpy() for lookup in lookups])
        heads.append(last.weight.detach().numpy())
        warned.append("will NOT tie them" in heard.text)
        shared = any(last.weight is lookup.weight for lookup in lookups)
    if any(not np.array_equal(a, b) for a, b in zip(*tables, strict=True)):
        return loaders.RANDOM_TABLE
    if not np.array_equal(*heads):
        return loaders.RANDOM_HEAD
    if shared:
        return loaders.TIED if any(np.array_equal(heads[0], stored) for stored in (table, head)) else "neither"
    assert np.array_equal(heads[0], head)
    assert all(np.array_equal(values, table) for values in tables[0])
    return loaders.KEPT if all(warned) else loaders.UNTIED


class Warnings:
    """Collects what transformers logs."""

    def __enter__(self):
        self.text = ""
        self.logger = tr.logging.get_logger("transformers")
        self.handler = tr.logging.logging.Handler()
        self.handler.emit = self._keep
        self.logger.addHandler(self.handler)
        return self

    def _keep(self, record):
        self.text += record.getMessage()

    def __exit__(self, *error):
        self.logger.removeHandler(self.handler)


def predicted(folder, *, scan=True):
    outcomes = predict(Facts(open_folder(folder), scan=scan))
    (ours,) = (outcome for outcome in outcomes if not outcome.predicted)
    return ours


def _cases():
    for name, flags in FAMILIES.items():
        for flag in flags:
            for state in STATES:
                mark = () if name in QUICK else pytest.mark.slow
                written = ",".join(f"{level or 'root'}={value}" for level, value in flag.items()) or "absent"
                yield pytest.param(name, flag, state, marks=mark, id=f"{name}-{written}-{state}")


@pytest.mark.parametrize(("name", "flags", "state"), list(_cases()))
def test_this_transformers_does_what_is_said_of_it(untied, name, flags, state, tmp_path):
    folder, inputs, output = untied(name)
    table, head = put(folder, inputs, output, tmp_path, flags, state)
    said = predicted(tmp_path)
    seen = observe(name, tmp_path, table, table if state == loaders.SAME else head)
    assert said.outcome == seen
    assert said.right == (seen in (loaders.TIED, loaders.UNTIED, loaders.KEPT))
    assert tr.__version__ == said.versions
