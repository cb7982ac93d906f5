"""List the features of the package, for the test that requires a case of each. No other file here imports internals.

The cases run `python -m tiewise` or public names of `import tiewise`. This file changes when modules move; the recorded
answers do not.
"""

import json
import pkgutil
from functools import cache
from importlib import import_module
from importlib.resources import files

import jsonschema

# command → the published schema of its JSON
SCHEMAS = {"plan": "plan", "check": "audit", "inspect": "inspection", "compare": "results", "train": "run"}
OTHER_ANSWERS = {"audits", "models", "rules", "nothing_to_do"}  # keys of answers of other forms, without a schema


def commands():
    """Return the names of all commands, those of groups in two words."""
    from tiewise.cli.commands import commands as table

    return list(table())


def options():
    """Return {(command, option): other spellings of the same value}, from the command objects."""
    from tiewise.cli.main import click_command

    names = {}
    for name in commands():
        for parameter in click_command(name).params:
            if parameter.param_type_name != "option":
                continue
            for spellings in (parameter.opts, parameter.secondary_opts):
                if spellings:
                    names[name, spellings[0]] = tuple(spellings)
    return names


def verbs():
    """Return the names of the commands that rewrite a checkpoint."""
    from tiewise.checkpoint.rewrite import listing

    return [verb.command for verb in listing.list_verbs()]


def examples():
    """Return {command of a verb: its example}, a command line without the command and `--to`."""
    from tiewise.checkpoint.rewrite.registry import verbs as loaded

    return {verb.command: verb.example for verb in loaded().values()}


def sections():
    """Return the names of the sections of `inspect`."""
    from tiewise.inspection.sections import section_names

    return section_names()


def kinds():
    """Return the names of the kinds of run."""
    from tiewise.training import kinds as package

    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def rules():
    """Return the codes of the rules of `check`."""
    from tiewise.checkpoint.rules.rule import rules as every

    return list(every())


def recipes():
    """Return the names of the recipes."""
    return sorted(path.name.removesuffix(".yaml") for path in (files("tiewise") / "training" / "recipes").iterdir())


def settings():
    """Return the names of all settings of runs, which `--set` takes."""
    from tiewise.training.setting_types import ComparisonSettings

    return sorted(ComparisonSettings.__annotations__.keys() | _inherited(ComparisonSettings))


def _inherited(settings_type):
    names = set()
    for base in getattr(settings_type, "__orig_bases__", ()):
        names |= set(getattr(base, "__annotations__", {})) | _inherited(base)
    return names


def spec_options():
    """Return the written forms of all kinds, arguments and options of boundaries and of sharing."""
    spec, sharing = import_module("tiewise.core.spec"), import_module("tiewise.core.sharing_spec")
    table = import_module("tiewise.core.spec_options")
    names = {f"boundary kind {kind}" for kind in spec.KINDS}
    names |= {f"{kind}:{key}" for kind in spec.KINDS for key in table.arguments(spec.BoundarySpec, kind)}
    names |= {f"+{key}" for key in table.options(spec.BoundarySpec)}
    names |= {f"scale {name}" for name in table.SCALES}
    names |= {f"sharing kind {kind}" for kind in (*sharing.KINDS, *sharing.SHORT)}
    return names | {f"sharing {name}" for name in ("groups", "cycle", "ends", "rank")}


def check_schema(command, answer):
    """Raise if the JSON of a command contradicts its published schema."""
    name = "receipt" if command in verbs() else SCHEMAS.get(command)
    if name is None or OTHER_ANSWERS & set(answer) or (command == "compare" and "finding" not in answer):
        return
    _validator(name).validate(answer)


@cache
def _validator(name):
    """Return the validator of a published schema, which is checked itself."""
    (path,) = (file for file in (files("tiewise") / "report" / "schemas").iterdir() if file.name.startswith(f"{name}-"))
    schema = json.loads(path.read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)
