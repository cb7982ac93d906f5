"""Test that the listing of verbs matches the verbs' files and that every example runs."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from subprocess import run

import pytest
from tests.checkpoint.rewrite.verb_examples import example_lines, write_sources

import tiewise
from tiewise.checkpoint.rewrite import listing, registry, verbs
from tiewise.checkpoint.rewrite.change import Change
from tiewise.cli.commands import CHECKPOINTS, commands
from tiewise.cli.main import command_line

HEAVY = ("numpy", "tiewise.checkpoint.rewrite.engine", "tiewise.checkpoint.rewrite.registry")
# a verb with another quote style, a comment after the decorator, and a helper above it
WRITTEN_OTHERWISE = '''
from tiewise.checkpoint.rewrite.registry import verb


def helper():
    """Help."""


@verb(example="tied")  # of ours
def throwaway(facts, *, force=False):
    """Write nothing (really)
    at all.

    More.
    """
'''


def test_list_verbs_equals_registry_of_loaded_verbs():
    loaded = registry.verbs().values()
    listed = [(one.name, one.order, one.summary, one.group) for one in listing.list_verbs()]
    assert listed == [(verb.name, verb.order, verb.help.partition("\n\n")[0], verb.group) for verb in loaded]
    assert all(summary for _, _, summary, _ in listed)
    assert len({verb.order for verb in loaded}) == len(loaded)


def test_list_verbs_imports_no_verb():
    code = "import sys; from tiewise.checkpoint.rewrite import listing; listing.list_verbs(); "
    code += f"print([name for name in {HEAVY} if name in sys.modules])"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_registry_finds_verb_file_in_another_folder(tmp_path):
    (tmp_path / "throwaway.py").write_text(WRITTEN_OTHERWISE)
    verbs.__path__.append(str(tmp_path))
    try:
        last = listing.list_verbs()[-1]
        assert (last.name, last.order, last.summary) == ("throwaway", listing.LAST, "Write nothing (really) at all.")
        assert commands()["throwaway"].panel == CHECKPOINTS
        assert command_line(["throwaway"]).registered_commands[0].name == "throwaway"
        assert import_module("tiewise.checkpoint.rewrite").throwaway is registry.find("throwaway").run
    finally:
        verbs.__path__.remove(str(tmp_path))
        sys.modules.pop("tiewise.checkpoint.rewrite.verbs.throwaway", None)


def test_every_verb_file_defines_a_public_verb():
    names = {path.stem for path in Path(verbs.__file__).parent.glob("[a-z]*.py")}
    assert names == set(registry.verbs()) == names & set(dir(tiewise.checkpoint))
    assert all(getattr(tiewise.checkpoint, name) is registry.find(name).run for name in names)


@pytest.mark.parametrize("name", listing.verb_names())
def test_command_line_offers_every_required_argument_of_verb(name):
    verb = registry.find(name)
    parameters = inspect.signature(verb.run).parameters.values()
    needed = {one.name for one in parameters if one.default is one.empty} - {"source", "to"}
    options = {option.name: option for option in verb.options()}
    assert needed <= set(options)
    assert all(option.described.help.endswith(".") for option in options.values())


@pytest.mark.parametrize("name", example_lines())
def test_example_of_every_verb_runs(name, tmp_path, monkeypatch):
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [*name.split(), *example_lines()[name], "--to=new", "--no-verify-load", "--json"]
    assert command_line(words)(words, standalone_mode=False) in (0, None)
    assert (tmp_path / "new").is_dir()


def test_a_verb_without_types_has_no_options_on_the_command_line():
    @registry.verb
    def forget(facts, *, name, force=False):
        """Drop one tensor."""
        return Change(drop=frozenset({name}))

    verb = registry.registered("forget")
    assert (verb.options(), verb.order, verb.help) == ([], listing.LAST, f"Drop one tensor.\n\n{registry.RESULT}")
    assert list(inspect.signature(forget).parameters) == ["source", "to", "name", "dry_run", "force"]
