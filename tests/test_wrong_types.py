"""Test that every public name refuses arguments of a wrong type, with our message or with Python's."""

import ast
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

import tiewise
from tests.public_names import NAMESPACES, homes, public
from tiewise.boundary.ops.path_gradient import PathRecord
from tiewise.checkpoint.rewrite import listing
from tiewise.core import errors
from tiewise.core.errors import (
    CheckpointError,
    InstallError,
    PlanError,
    RunError,
    SpecError,
    TiewiseError,
    UnsupportedError,
)

TABLE, IDS = nn.Parameter(torch.zeros(4, 3)), torch.zeros(2, dtype=torch.long)
PATH = "expected str, bytes or os.PathLike object, not"  # Python's message for a value that is no path


def call_verb(name, source):
    """Call a verb with a value for each required option."""
    needed = [
        one.name for one in signature(getattr(tiewise.checkpoint, name)).parameters.values() if one.default is one.empty
    ]
    options = {option: "value" for option in needed if option not in ("source", "to")}
    if name == "merge":  # it needs a base or an adapter
        options["adapter"] = "value"
    return getattr(tiewise.checkpoint, name)(source, "to", **options)


CALLS = {
    "Boundary": (lambda x: tiewise.Boundary(x, 10, 4), SpecError),
    "BoundarySpec": (tiewise.boundary.BoundarySpec.parse, SpecError),
    "Vocabularies": (lambda x: tiewise.boundary.Vocabularies(x, 4), SpecError),
    "ExactTop": (tiewise.boundary.ExactTop, UnsupportedError),
    "check": (tiewise.check, CheckpointError),
    "compare": (lambda x: tiewise.compare([x]), RunError),
    "augmented_cross_entropy": (
        lambda x: tiewise.boundary.augmented_cross_entropy(x, TABLE, IDS),
        "features must be a tensor",
    ),
    "diff": (lambda x: tiewise.diff(x, x), CheckpointError),
    "explore": (tiewise.explore, CheckpointError),
    "lora_config": (tiewise.checkpoint.lora_config, CheckpointError),
    "heal": (lambda x: tiewise.heal("model", [x], teacher="original"), RunError),
    "tied_lookup": (lambda x: tiewise.boundary.tied_lookup(x, IDS), UnsupportedError),
    "inspect": (tiewise.inspect, CheckpointError),
    "install": (tiewise.install, InstallError),
    "installed": (tiewise.installed, InstallError),
    "SharingSpec": (tiewise.boundary.SharingSpec.parse, SpecError),
    "explain_backends": (lambda x: tiewise.boundary.explain_backends(x, TABLE, IDS), "features must be a tensor"),
    "linear_cross_entropy": (lambda x: tiewise.linear_cross_entropy(x, TABLE, IDS), "features must be a tensor"),
    "linear_divergence": (
        lambda x: tiewise.boundary.linear_divergence(x, TABLE, x, TABLE),
        "features must be a tensor",
    ),
    "linear_log_prob": (lambda x: tiewise.boundary.linear_log_prob(x, TABLE, IDS), "features must be a tensor"),
    "fast_products": (lambda x: tiewise.boundary.fast_products(x).__enter__(), RunError),
    "load": (tiewise.load, InstallError),
    "VocabularyShard": (tiewise.boundary.VocabularyShard, UnsupportedError),
    "keep_tables": (lambda x: tiewise.boundary.keep_tables(x, None), InstallError),
    "parallel_plan": (lambda x: tiewise.boundary.parallel_plan(x, None), InstallError),
    "param_groups": (tiewise.param_groups, UnsupportedError),
    "path_norms": (lambda x: tiewise.boundary.path_norms(x, PathRecord()), UnsupportedError),
    "probe": (lambda x: tiewise.probe(nn.Linear(2, 2), x), CheckpointError),
    "plan": (tiewise.plan, PlanError),
    "export_sharded": (lambda x: tiewise.boundary.export_sharded(x, "to"), PATH),
    "load_sharded": (lambda x: tiewise.boundary.load_sharded(x, nn.Linear(2, 2)), PATH),
    "save_sharded": (lambda x: tiewise.boundary.save_sharded("to", [x]), UnsupportedError),
    "share_layers": (lambda x: tiewise.share_layers(x, "ffn"), InstallError),
    "tie_at": (tiewise.boundary.tie_at, SpecError),
    "train": (lambda x: tiewise.train([x]), RunError),
    "sweep": (tiewise.sweep, RunError),
    "exercise": (lambda x: tiewise.lab.exercise(x, "mine.py"), RunError),
    "hot_vocabulary": (lambda x: tiewise.lab.hot_vocabulary(tokenizer=x), PATH),
    "untie_at": (tiewise.boundary.untie_at, SpecError),
    **{name: (partial(call_verb, name), CheckpointError) for name in listing.verb_names()},
}


# types that callers receive or catch, and options that only store values
NO_CALLS = {name for name in vars(errors) if name.endswith(("Error", "Warning"))} | {"Interrupted", "__version__"}
NO_CALLS |= {"Audit", "Comparison", "Explorer", "SingleRun", "Inspection", "Installed", "PathNorms", "PathRecord"}
NO_CALLS |= {"Plan", "Probe", "Receipt", "Shared", "AugmentedOptions", "LookupOptions", "LossOptions", "Sizes"}
NO_CALLS |= {"Healed", "HotTokens", "Study", "public_models", "Exercises", "CheckedAnswer"}


def test_wrong_type_cases_cover_every_public_name():
    assert set(CALLS) | NO_CALLS == set(homes())


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_is_what_its_stub_declares(namespace):
    package = import_module(namespace)
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    declared = {alias.asname: node.module for node in tree.body[1:] for alias in node.names if node.module != namespace}
    assert set(declared) == set(dir(package))
    for name, module in declared.items():
        assert getattr(package, name) is getattr(import_module(module), name)


@pytest.mark.parametrize("namespace", NAMESPACES[1:])
def test_name_of_namespace_and_of_top_level_is_one_object(namespace):
    package = import_module(namespace)
    for name in set(dir(package)) & set(dir(tiewise)):
        assert getattr(package, name) is getattr(tiewise, name)


@pytest.mark.parametrize("wrong", [None, ["tied"], 1.5, nn.Linear(3, 4)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_public_name_refuses_main_argument_of_wrong_type(name, wrong):
    call, said = CALLS[name]
    if name in {*LIVE, "diff"} and isinstance(wrong, nn.Module):
        said = CheckpointError
    if name == "explore" and isinstance(wrong, nn.Module):  # it shows a model that has two ends
        said = InstallError
    error, match = (TypeError, said) if isinstance(said, str) else (said, None)
    with pytest.raises(error, match=match) as e:
        call(wrong)
    if issubclass(e.type, TiewiseError):
        assert e.value.remedy
        assert "\n" not in str(e.value)
        if name not in ("VocabularyShard", "save_sharded"):  # one needs ranks first, the other takes a list
            assert type(wrong).__name__ in str(e.value) or str(wrong) in str(e.value)


LIVE = dict.fromkeys(listing.verb_names(), "save_pretrained") | {
    "tie": r"tiewise\.installed\(model\)\.tie\(\)",
    "untie": r"tiewise\.installed\(model\)\.untie\(\)",
    "factor": r"tiewise\.install\(model, \"factored:128\"\)",
    "resize": r"model\.resize_token_embeddings",
    **dict.fromkeys(("check", "inspect"), r"save_pretrained\(FOLDER\), then tiewise\."),
}


@pytest.mark.parametrize("name", LIVE)
def test_verb_refuses_live_model_and_names_the_call_for_it(name):
    with pytest.raises(CheckpointError, match=f"a live Linear; .*{LIVE[name]}") as e:
        public(name)(nn.Linear(3, 4))
    assert "\n" not in str(e.value)


OTHERS = {
    "a boundary's vocabulary": (lambda: tiewise.Boundary("tied", "10", 4), "vocabulary of '10'"),
    "a boundary's width": (lambda: tiewise.Boundary("tied", 10, "4"), "width of '4'"),
    "the path of a model": (lambda: tiewise.install("runs/final"), r"a str is no model.*tiewise\.load"),
    "a spec for install": (lambda: tiewise.install(nn.Linear(2, 2), 8), "a int is no boundary"),
    "a record that is off": (lambda: tiewise.boundary.path_norms(TABLE.detach(), None), "track"),
    "a lookup for its table": (lambda: tiewise.boundary.tied_lookup(nn.Embedding(4, 3), IDS), "module's weight"),
    "a step as a text": (lambda: tiewise.boundary.tie_at("100"), "number of steps"),
    "a live model for a comparison of two": (lambda: tiewise.diff(nn.Linear(2, 2), "new"), "diff reads a folder"),
    "a live model for plan": (lambda: tiewise.plan(nn.Linear(2, 2)), r"tiewise\.plan\(model\.config\)"),
    "a live model for load": (lambda: tiewise.load(nn.Linear(2, 2)), r"tiewise\.install\(model\)"),
    "a folder that is missing": (lambda: tiewise.load("nope"), "nope: no such folder; check the path"),
    "a name of the hub": (lambda: tiewise.check("gpt2"), "hf download gpt2 --local-dir gpt2"),
    "a name of the hub with its owner": (lambda: tiewise.check("me/A"), "hf://me/A reads the model from the Hub"),
    "a list of folders": (lambda: tiewise.inspect(["a", "b"]), r"write tiewise\.inspect\(FOLDER\)"),
    "a number for the arms of a plan": (lambda: tiewise.plan("gpt2", 3), "names no arms"),
    "a function for the file of an exercise": (lambda: tiewise.lab.exercise(1, len), "save your function in a file"),
    "an unknown end": (lambda: tiewise.boundary.tie_at(100, "both"), "input, output, mean"),
    "an unknown state": (lambda: tiewise.boundary.untie_at(100, "mean"), "copy, split, reset"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_public_name_refuses_wrong_value_of_another_argument(case):
    call, said = OTHERS[case]
    with pytest.raises(TiewiseError, match=said):
        call()


def test_boundary_accepts_numpy_integers():
    assert tiewise.Boundary("tied", torch.tensor(10).numpy()[()], 4).table_in.shape == (10, 4)
