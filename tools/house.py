"""What a reader of the library has to carry, in numbers.

    python tools/house.py            prints every measure beside the most that it may be
    python tools/house.py --hold     the same, and exits with 1 where one is above: `make check` does this

No number is a goal. Each is the symptom of something that has to be kept in mind while reading: a name that means two
things, a helper far from the one line that needs it, two folders that cannot be read one after the other. A limit is
what the house has reached; who makes it lighter lowers it here in the same commit.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "tiewise"
TESTS = ROOT.parents[1] / "tests"
LIMITS = {
    "lines": 41_876,
    "files": 200,
    "lines of code": 26_275,
    "class names defined twice": 0,
    "file names in several folders": 0,
    "private helpers used once": 189,
    "modules with one importer": 30,
    "floors": 14,
    "folders that import each other": 0,
    "words printed by inspect and report": 4_420,
    "lines of tests": 41_184,
}


def measures() -> dict[str, int]:
    """Every measure of `LIMITS`, by its name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    modules = {_module(path): path for path in texts}
    arrows = {name: set(_imports(trees[path], modules)) - {name} for name, path in modules.items()}
    importers = Counter(target for targets in arrows.values() for target in targets)
    classes = Counter(n.name for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef))
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "files": len(texts),
        "lines of code": sum(_code(trees[path], text) for path, text in texts.items()),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "file names in several folders": sum(count > 1 for count in names.values()),
        "private helpers used once": sum(_used_once(trees[path], text) for path, text in texts.items()),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "floors": _floors(arrows),
        "folders that import each other": len(_mutual(arrows, modules)),
        "words printed by inspect and report": sum(
            _words(tree) for path, tree in trees.items() if path.relative_to(ROOT).parts[0] in ("inspection", "report")
        ),
        "lines of tests": sum(path.read_text(encoding="utf-8").count("\n") for path in TESTS.rglob("*.py")),
    }


def _module(path: Path) -> str:
    parts = ("tiewise", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that run when this one is imported or used; imports for types alone are none."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in inner if node.module in modules)


def _code(tree: ast.Module, text: str) -> int:
    """Lines that are neither blank nor comment, import or docstring."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if said or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


def _words(tree: ast.Module) -> int:
    """Words of the strings that are no docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in said
    )
    return sum(len(string.value.split()) for string in strings)


def _used_once(tree: ast.Module, text: str) -> int:
    """Private functions of a module that one place in it names: its line could have been there."""
    words = Counter(re.findall(r"[A-Za-z_]\w*", text))
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(name.startswith("_") and not name.startswith("__") and words[name] == 2 for name in own)


def _floors(arrows: dict[str, set[str]]) -> int:
    """Modules in the longest chain of imports."""
    depth: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max(map(of, arrows[name]), default=0)
        return depth[name]

    return max(map(of, arrows))


def _mutual(arrows: dict[str, set[str]], modules: dict[str, Path]) -> set[frozenset[Path]]:
    """Pairs of folders below the root that import each other."""
    between = {
        (modules[a].parent, modules[b].parent)
        for a, targets in arrows.items()
        for b in targets
        if modules[a].parent != modules[b].parent and ROOT not in (modules[a].parent, modules[b].parent)
    }
    return {frozenset(pair) for pair in between if pair[::-1] in between}


if __name__ == "__main__":
    found = measures()
    for name, value in found.items():
        over = f"   more than {LIMITS[name]:,}: lighten it again" if value > LIMITS[name] else ""
        print(f"{name:32}{value:>8,}{LIMITS[name]:>10,}{over}")
    sys.exit("--hold" in sys.argv and any(found[name] > most for name, most in LIMITS.items()))
