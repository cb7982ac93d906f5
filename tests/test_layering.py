"""Hard rules of the package: imports point downward, without a cycle, and no class name is defined twice."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tiewise"
FLOORS = {
    "core": 0,
    "exercises": 1,
    "flax": 1,
    "ops": 1,
    "checkpoint": 1,
    "rewrite": 2,
    "boundary": 2,
    "sharing": 2.5,  # uses the saved types of boundary, and hf registers it
    "hf": 3,
    "models": 3,
    "data": 3,
    "planning": 3,
    "analysis": 4,
    "training": 4.5,  # predicts its first losses as `plan` does
    "sharded": 3.5,
    "atlas": 5,
    "internals": 5,
    "inspection": 6,
    "report": 7,
    "explorer": 7.5,
    "runs": 7.5,
    "cli": 8,
    "__main__": 9,
}
FILES = sorted(ROOT.rglob("*.py"))


def _imports(tree: ast.AST, package: tuple[str, ...]) -> list[tuple[str, bool]]:
    """(dotted module below tiewise, whether inside a function) of every import of ours."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            below = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = resolve_name("." * child.level + (child.module or ""), ".".join(["tiewise", *package]))
                own = [] if base == "tiewise" else [base]  # `from tiewise import core` is of the folder alone
                names = own + [f"{base}.{alias.name}" for alias in child.names]
            else:
                names = []
            ours = (name for name in names if f"{name}.".startswith("tiewise."))
            found.extend((name.removeprefix("tiewise."), inside) for name in ours)
            visit(child, below)

    visit(tree, False)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path):
    parts = path.relative_to(ROOT).parts
    unit = parts[0].removesuffix(".py")
    if unit == "__init__":
        return
    assert unit in FLOORS, f"{unit} has no floor: give it one in docs/architecture.md and here"
    for name, inside in _imports(ast.parse(path.read_text()), parts[:-1]):
        target = name.split(".")[0]
        assert target in FLOORS, f"{unit} imports the root, which imports everything: name the module"
        assert target == unit or FLOORS[target] < max(FLOORS[unit], 1), f"{unit} may not import tiewise.{name}"
        late = unit in ("cli", "__main__")  # a command loads what it needs; its start is clean of Ctrl-C's traceback
        assert not inside or late, f"{path.name} imports tiewise.{name} inside a function"


def test_no_cycle_between_modules():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in FILES}
    arrows = {}
    for name, path in modules.items():
        imported = {n for n, _ in _imports(ast.parse(path.read_text()), path.relative_to(ROOT).parts[:-1])}
        arrows[name] = imported & modules.keys() - {name}
    TopologicalSorter(arrows).prepare()  # its error names the cycle


def test_folders_do_not_import_each_other():
    arrows = set()
    for path in FILES:
        for name, _ in _imports(ast.parse(path.read_text()), path.relative_to(ROOT).parts[:-1]):
            target = ROOT.joinpath(*name.split("."))
            target = target if target.is_dir() else target.parent
            if target.is_dir() and ROOT not in (target, path.parent) and target != path.parent:
                arrows.add((path.parent.relative_to(ROOT).as_posix(), target.relative_to(ROOT).as_posix()))
    mutual = {tuple(sorted(arrow)) for arrow in arrows if arrow[::-1] in arrows}
    assert not mutual, "one of the two holds what both need: move that down"


def test_no_class_name_is_defined_twice():
    files_of = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files_of[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in files_of.items() if len(files) > 1}
    assert not twice, "one name for two things: rename one of them"
