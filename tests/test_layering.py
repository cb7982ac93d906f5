"""Test the package's structure: imports point downward, modules form no cycle, a class name is defined once."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tiewise"
LEVELS = {
    "core": 1,
    "checkpoint": 2,
    "planning": 3,
    "boundary": 4,
    "training": 5,
    "inspection": 6,
    "report": 7,
    "lab": 8,
    "cli": 9,
    "__main__": 10,
}
ALIASES = {"flax": "boundary", "hf": "boundary", "models": "training"}  # public modules that only import names
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
# a string that names a module, such as Late("tiewise.core.files"), and not a sentence that mentions one
MODULE_NAME = re.compile(r"tiewise(?:\.\w+)+")


@dataclass(frozen=True)
class Import:
    """One import of a module of tiewise, by a statement or by a string."""

    name: str  # dotted, below tiewise
    is_inside_function: bool
    is_string: bool

    @property
    def unit(self) -> str:
        """The package or module directly below tiewise."""
        return self.name.split(".")[0]


def imports_of(path: Path) -> list[Import]:
    """Return every import of tiewise's modules in one file."""
    package = ".".join(["tiewise", *path.relative_to(ROOT).parts[:-1]])
    return list(_imports_below(ast.parse(path.read_text(encoding="utf-8")), package, False))


def _imports_below(node: ast.AST, package: str, inside: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _statement_names(child, package):
            if name.startswith("tiewise."):
                yield Import(name.removeprefix("tiewise."), inside, False)
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            module = _module_in(child.value)
            if module:
                yield Import(module, inside, True)
        below = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_below(child, package, below)


def _statement_names(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = resolve_name("." * node.level + (node.module or ""), package)
    names = [f"{base}.{alias.name}" for alias in node.names]
    return names if base == "tiewise" else [base, *names]  # `from tiewise import core` imports only core


def _module_in(text: str) -> str:
    """Return the module that a string names, dotted below tiewise; "" if it names none."""
    if not MODULE_NAME.fullmatch(text):
        return ""
    name = text.removeprefix("tiewise.")
    is_module = name in MODULES or f"{name}.__init__" in MODULES
    return name if is_module else ""


def test_string_that_names_a_module_counts_as_import(tmp_path):
    tree = ast.parse('faces = Late("tiewise.report.views")\nmessage = "use tiewise.hf.load"\nkey = "tiewise.json"')
    imports = list(_imports_below(tree, "tiewise.inspection", False))
    assert imports == [Import("report.views", False, True)]


def test_a_relative_import_is_resolved():
    tree = ast.parse("from ..core import files\ndef load():\n    import tiewise.hf")
    imports = list(_imports_below(tree, "tiewise.inspection", False))
    assert imports == [Import("core", False, False), Import("core.files", False, False), Import("hf", True, False)]


def test_the_package_has_the_units_that_the_design_names():
    units = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert units == {*LEVELS, *ALIASES, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path):
    unit = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if unit == "__init__":
        return
    for one in imports_of(path):
        if unit in ALIASES:
            assert one.unit == ALIASES[unit], f"{path.name} is an alias of {ALIASES[unit]} and imports it alone"
            continue
        assert one.unit in LEVELS, f"{unit} imports tiewise.{one.name}: name the module in its package"
        assert one.unit == unit or LEVELS[one.unit] < LEVELS[unit], f"{unit} may not import tiewise.{one.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_at_the_top_of_a_file(path):
    unit = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if unit in ("cli", "__main__"):  # a command loads what it needs, and Ctrl-C during its start shows no traceback
        return
    late = [one.name for one in imports_of(path) if one.is_inside_function and not one.is_string]
    assert late == []


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_only_imports_names(name):
    statements = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")).body
    docstring, *rest = statements
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(statement, ast.ImportFrom) for statement in rest)


def test_modules_form_no_import_cycle():
    arrows = {}
    for name, path in MODULES.items():
        imported = {one.name for one in imports_of(path) if not one.is_string}
        arrows[name] = imported & MODULES.keys() - {name}
    TopologicalSorter(arrows).prepare()  # its error names the cycle


def test_two_subfolders_do_not_import_each_other():
    """A package and its subfolders may import each other, as long as their modules form no cycle."""
    arrows = set()
    for path in FILES:
        for one in imports_of(path):
            target = ROOT.joinpath(*one.name.split("."))
            target = target if target.is_dir() else target.parent
            if target.is_dir() and ROOT not in (target, path.parent):
                arrows.add((path.parent.relative_to(ROOT), target.relative_to(ROOT)))
    mutual = {arrow for arrow in arrows if arrow[::-1] in arrows and not _is_nested(*arrow)}
    assert not mutual, "move what both need into a third place"


def _is_nested(a: Path, b: Path) -> bool:
    return a == b or a in b.parents or b in a.parents


def test_no_class_name_is_defined_twice():
    files_of = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files_of[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in files_of.items() if len(files) > 1}
    assert not twice, "one name for two things: rename one of them"
