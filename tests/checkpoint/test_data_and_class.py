"""Compare the architecture data with the classes of the installed transformers, on models with any part.

A light install has only the data. Where it prints an outcome for the installed transformers, the class itself, asked
with the same folder, must give the same outcome.
"""

import random
import sys
from importlib import import_module
from pathlib import Path

import pytest
import random_folders as folders
import saved_models as saved
from asked_classes import asking_in_this_process
from observed_loads import observe_transformers
from safetensors.torch import load_file, save_file

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loaders import predict

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
healthy_models = import_module("healthy_models")

FILE = "model.safetensors"
# outcomes of the class about tensors outside the two ends, which the data does not list
WHOLE_MODEL = (columns.RANDOM_TENSORS, columns.NEW_TENSORS, columns.RANDOM_LAYERS)


def outcome_in_transformers(folder, builds):
    """Return the row of the installed transformers, by the data alone or by the class."""
    with asking_in_this_process():
        rows = predict(Facts(open_folder(folder), builds=builds))
    return [row for row in rows if row.loader == "transformers"][-1]


def disagreement(folder):
    """Return what the data and the class say of a folder if they differ; None if they agree or the data abstains."""
    light, live = outcome_in_transformers(folder, False), outcome_in_transformers(folder, True)
    if light.outcome in (columns.DEPENDS, live.outcome) or live.outcome in WHOLE_MODEL:
        return None
    return f"data: {light.outcome} ({light.sentence}); class: {live.outcome} ({live.sentence})"


def drop_an_end(folder, draw):
    """Remove a random tensor of the two ends from a folder; return its name, or None if there is none."""
    roles = Facts(open_folder(folder)).roles
    names = sorted({tensor.name for tensor in (*roles.tables, *roles.biases)})
    tensors = load_file(folder / FILE)
    names = [name for name in names if name in tensors]
    if not names:
        return None
    name = draw.choice(names)
    del tensors[name]
    save_file(tensors, folder / FILE, {"format": "pt"})
    return name


def disagreements(case, seed, folder):
    """Yield each disagreement on a healthy folder and on the same folder without a tensor of its ends."""
    try:
        case.write(folder)
    except healthy_models.NotBuiltSmall:
        return
    found = disagreement(folder)
    if found is not None:
        yield f"{case.name}: {found}"
    dropped = (folder / FILE).exists() and drop_an_end(folder, random.Random(seed))
    if dropped:
        found = disagreement(folder)
        if found is not None:
            yield f"{case.name} without {dropped}: {found}"


def sampled_cases(count, seed):
    """Return random cases: classes as they are, and composites with other parts."""
    draw = random.Random(seed)
    classes, composites = list(healthy_models.class_cases()), list(healthy_models.composite_cases())
    return [*draw.sample(classes, count), *draw.sample(composites, count)]


@pytest.mark.slow
def test_data_agrees_with_classes(tmp_path):
    found = []
    for number, case in enumerate(sampled_cases(count=30, seed=5)):
        found += disagreements(case, number, tmp_path / str(number))
    assert found == []


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("tables", columns.STATES)
def test_data_agrees_with_t5gemma_2_whose_head_is_tied_to_the_encoder(tmp_path, flag, tables):
    untied = folders.saved_class("T5Gemma2ForConditionalGeneration")
    folders.in_state(untied, folders.State(flag, tables)).write(tmp_path)
    assert disagreement(tmp_path) is None
    assert outcome_in_transformers(tmp_path, False).outcome != columns.DEPENDS


# classes with a shared table that only their ties use
SHARED_TABLES = [("MarianMTModel", "model.shared"), ("ProphetNetForCausalLM", "prophetnet.word_embeddings")]
SHARED_TABLES += [("SeamlessM4TForTextToText", "shared")]


@pytest.mark.parametrize(("name", "module"), SHARED_TABLES)
def test_shared_table_that_an_untied_class_does_not_read_is_outside_its_ends(name, module, tmp_path):
    saved.tiny(name, flag=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    del tensors[f"{module}.weight"]
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    outcome = outcome_in_transformers(tmp_path, builds=True).outcome
    assert outcome == columns.RANDOM_TENSORS
    assert observe_transformers(name, tmp_path).outcomes == {outcome}
