"""Count structural faults of the package: names that mean two things, folders that import each other.

python tools/house.py            prints every measure next to its limit
python tools/house.py --hold     the same, and exits with 1 if a measure exceeds its limit: `make check` does this
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "tiewise"
LIMITS = {
    "class names defined twice": 0,
    "file names in several folders": 0,
    "folders that import each other": 0,
}


def measures() -> dict[str, int]:
    """Every measure of `LIMITS`, by its name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    modules = {_module(path): path for path in texts}
    arrows = {name: set(_imports(trees[path], modules)) - {name} for name, path in modules.items()}
    classes = Counter(n.name for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef))
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    return {
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "file names in several folders": sum(count > 1 for count in names.values()),
        "folders that import each other": len(_mutual(arrows, modules)),
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
        over = f"   more than {LIMITS[name]:,}" if value > LIMITS[name] else ""
        print(f"{name:32}{value:>8,}{LIMITS[name]:>10,}{over}")
    sys.exit("--hold" in sys.argv and any(found[name] > most for name, most in LIMITS.items()))
