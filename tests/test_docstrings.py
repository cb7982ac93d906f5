"""Docstrings of public names are complete, and every example in a docstring of the package prints what it shows.

Examples of verbs name the folders of `tests/checkpoint/rewrite/verb_examples.py`. Each docstring runs in a fresh copy.
"""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil

import pytest

import tiewise
from tests.checkpoint.rewrite.verb_examples import write_sources
from tests.public_names import homes, public
from tiewise.checkpoint.rewrite.registry import verbs

PUBLIC = sorted(name for name in homes() if not name.startswith("_"))
PARSER = doctest.DocTestParser()
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules_with_examples():
    """Return the name of every module of the package whose source has an example."""
    names = []
    for module in pkgutil.walk_packages(tiewise.__path__, "tiewise."):
        source = importlib.util.find_spec(module.name).origin
        with open(source, encoding="utf-8") as file:
            if ">>>" in file.read():
                names.append(module.name)
    return names


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


@pytest.fixture
def folder_with_sources(sources, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(sources, folder)
    monkeypatch.chdir(folder)


def failures(test):
    """Run one docstring's examples and return the report of those that fail."""
    report = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_a_module_print_what_they_show(name, folder_with_sources):
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    assert "".join(map(failures, tests)) == ""


@pytest.mark.parametrize("name", sorted(verbs()))
def test_the_example_of_a_verb_prints_what_it_shows(name, folder_with_sources):
    """doctest skips verbs: `@verb` returns a function of another module."""
    test = PARSER.get_doctest(inspect.getdoc(public(name)), {}, name, None, 0)
    assert test.examples
    assert failures(test) == ""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    assert ">>>" in inspect.getdoc(public(name))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_describes_its_arguments_and_result(name):
    value = public(name)
    text = inspect.getdoc(value)
    if inspect.isclass(value):
        fields = getattr(value, "__dataclass_fields__", {})
        assert not fields or re.search(r"^(Attributes|Args):$", text, re.MULTILINE)
        return
    assert re.search(r"^Args:$", text, re.MULTILINE) or not inspect.signature(value).parameters
    assert re.search(r"^(Returns|Yields):$", text, re.MULTILINE) or text.startswith("Return ")
