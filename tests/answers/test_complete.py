"""Test that recorded cases cover every command, option, section, rule, verb, kind, setting, recipe and spec option."""

import functools
import re
import shlex
from pathlib import Path

import pytest

from tests.answers import package, python_names, record
from tests.answers.cases import CASES
from tests.answers.texts import words
from tests.public_names import homes

record_of = functools.cache(record.recorded)
# options that no case uses, with the reason
EXEMPT_OPTIONS = {("check", "--all-headers"): "it needs a server of the Hub: tests/checkpoint/test_hub.py"}
# settings that no case gives by `--set`, an option or a file, with the reason
EXEMPT_SETTINGS = {}
EXEMPT_RECIPES = {}
RECORD = "python -m tests.answers.record --only"
RESULT = "a result type: what it holds is recorded where a function returns it"
RAISED = "an error or warning: its message is recorded where it is raised"
EXEMPT_NAMES = dict.fromkeys(
    words(
        """
    Audit AugmentedOptions CheckedAnswer Comparison Exercises Explorer Healed HotTokens Inspection Installed
    LossOptions PathNorms Plan Probe Receipt Shared SingleRun Study
    """
    ),
    RESULT,
)
EXEMPT_NAMES |= dict.fromkeys(
    words(
        """
    CheckpointError DataError InstallError Interrupted PlanError RunError SpecError TiewiseError TiewiseWarning
    UnsupportedError
    """
    ),
    RAISED,
)
EXEMPT_NAMES |= dict.fromkeys(
    ("keep_tables", "parallel_plan", "VocabularyShard"), "needs several processes: tests/boundary/test_parallel.py"
)
EXEMPT_NAMES |= {"explain_backends": "depends on the installed kernels: tests/boundary/ops/test_backend_table.py"}
EXEMPT_NAMES |= {"__version__": "changes with every release"}


@functools.cache
def command_lines():
    """Return the words of every command line of every case."""
    return [shlex.split(line) for case in CASES.values() for line in case.lines]


def uses_option(command, spellings):
    """Return whether a command line uses an option."""
    if spellings[0] == "--json":
        return any(case.json for case in CASES.values() if case.command == command)
    command_words = command.split()
    lines = [line for line in command_lines() if line[: len(command_words)] == command_words]
    return any(_spells(word, spellings) for line in lines for word in line)


def _spells(word, spellings):
    return word.partition("=")[0] in spellings


def text_of_all_cases():
    """Return all text that cases are made of."""
    lines = " ".join(" ".join(line) for line in command_lines())
    specs = " ".join([*python_names.SPECS, *python_names.SHARINGS])
    return f" {lines} {specs} "


@pytest.mark.parametrize("command", package.commands())
def test_cases_use_every_option(command):
    missing = [
        name
        for (of, name), spellings in package.options().items()
        if of == command and not uses_option(command, spellings) and (command, name) not in EXEMPT_OPTIONS
    ]
    assert missing == [], "add a case to tests/answers/cases.py, or a row with the reason to EXEMPT_OPTIONS"


def test_every_command_has_cases_and_help():
    assert set(package.commands()) <= {case.command for case in CASES.values()}
    recorded_help = set(record_of("help"))
    missing = sorted({f"help {name}" for name in package.commands()} - recorded_help)
    assert missing == [], f"run {RECORD} {shlex.join(missing)}"


def test_cases_include_success_and_refusal_of_every_verb():
    codes = {verb: _exit_codes(verb) for verb in package.verbs()}
    missing = [verb for verb, codes_of_verb in codes.items() if not {0, 2} <= codes_of_verb]
    names = [case.name for case in CASES.values() if case.command in missing]
    assert missing == [], f"run {RECORD} {shlex.join(names)}"


def _exit_codes(command):
    return {line["exit"] for answer in record_of(command).values() for line in answer.values()}


@pytest.mark.parametrize("rule", package.rules())
def test_every_rule_fires_in_a_recorded_case(rule):
    fired = []
    for name, answer in record_of("check").items():
        for line in answer.values():
            leaves = line.get("json", {})
            fired += [name for path, leaf in leaves.items() if path.endswith("/rule") and leaf == rule]
    case = f"check fault {rule.lower()}"
    assert fired, f"add a checkpoint {rule.lower()!r} to FAULTS of tests/answers/faults.py, then run {RECORD} {case!r}"
    assert f"check explain {rule.lower()}" in CASES


def test_cases_measure_every_section():
    measured = set()
    for answer in record_of("inspect").values():
        for line in answer.values():
            measured |= {path.split("/")[2] for path in line.get("json", {}) if re.match(r"/sections/\w+/found/", path)}
    missing = set(package.sections()) - measured
    assert missing == set(), f"run {RECORD} {' '.join(repr(f'inspect {name}') for name in sorted(missing))}"


def test_cases_train_every_kind_of_run():
    missing = set(package.kinds()) - _trained_kinds()
    names = " ".join(repr(f"train kind {kind}") for kind in sorted(missing))
    assert missing == set(), f"run {RECORD} {names}; if one does not train so, add a row for it to cases.py"


def _trained_kinds():
    """Return the kinds and backends that the settings of recorded runs name."""
    kinds = set()
    for command in ("compare", "train", "heal"):
        for answer in record_of(command).values():
            for line in answer.values():
                kinds |= _named_kinds(line.get("files", {}))
    return kinds


def _named_kinds(files):
    settings = [line for name, lines in files.items() if name.endswith("run.yaml") for line in lines]
    return {line.partition(": ")[2] for line in settings if line.startswith(("kind: ", "backend: "))}


def test_cases_use_every_setting():
    text = text_of_all_cases()
    missing = [name for name in package.settings() if not _is_set(name, text) and name not in EXEMPT_SETTINGS]
    row = '"train NAME": f"train {DECODER} --set=kind=KIND --set=SETTING=VALUE -o out"'
    assert missing == [], f"add a row such as {row} to cases.py, or one with the reason to EXEMPT_SETTINGS"


def _is_set(name, text):
    option = "--" + name.replace("_", "-")
    return f"--set={name}=" in text or f" {option}=" in text or f" {option} " in text


def test_cases_use_every_recipe():
    text = text_of_all_cases()
    missing = [name for name in package.recipes() if f"--recipe {name} " not in text and name not in EXEMPT_RECIPES]
    assert missing == []


@pytest.mark.parametrize("form", sorted(package.spec_options()))
def test_cases_use_every_spec_option(form):
    specs = python_names.SHARINGS if form.startswith("sharing") else [*python_names.SPECS, *_arms()]
    is_used = any(_has_form(spec, form) for spec in specs)
    assert is_used, f"add a spec with {form} to SPEC_ARMS of tests/answers/cases.py and record its case"


def _has_form(spec, form):
    """Return whether a written spec uses a kind, an argument or an option."""
    group, _, name = form.rpartition(" ")
    if group.endswith("kind") or group == "scale":
        return re.search(rf"(^|=){re.escape(name)}($|[:+])", spec)
    if group == "sharing":
        return re.search(rf"[:,+]{name}=", spec)
    if form.startswith("+"):
        return re.search(rf"\{form}($|[=+])", spec)
    return _has_argument(spec, *form.split(":"))


def _has_argument(spec, kind, argument):
    head, _, arguments = spec.partition("+")[0].partition(":")
    return head == kind and argument in [item.partition("=")[0] for item in arguments.split(",")]


def _arms():
    arms = []
    for line in command_lines():
        for place, word in enumerate(line[:-1]):
            if word in ("-b", "--boundary", "--arms"):
                arms.append(line[place + 1])
    return arms


def test_cases_use_every_public_name():
    text = (python_names.__doc__ or "") + Path(python_names.__file__).read_text(encoding="utf-8")
    commands = {command.split()[-1] for command in package.commands()}
    known = commands | set(EXEMPT_NAMES)
    missing = [name for name in homes() if name not in known and not re.search(rf"tiewise\.(?:\w+\.)?{name}\b", text)]
    assert missing == []


def test_exemptions_are_needed():
    assert not [
        key for key in EXEMPT_OPTIONS if key not in package.options() or uses_option(key[0], package.options()[key])
    ]
    assert set(EXEMPT_SETTINGS) <= set(package.settings())
    assert set(EXEMPT_RECIPES) <= set(package.recipes())
