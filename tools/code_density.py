"""Measure how hard Python code is to read, per statement and per syntax node.

    python tools/code_density.py              measure src/tiewise and print each figure next to its committed value
    python tools/code_density.py PATH         measure a folder or a file instead
    python tools/code_density.py --worst 20   also print the 20 bodies with the most decisions
    python tools/code_density.py --json       print everything as JSON
    python tools/code_density.py --check      exit with 1 if a figure is worse than its committed value (`make check`)
    python tools/code_density.py --write      write the figures of src/tiewise to tools/code_density.json

Decisions: `if`, loops, `except`, `case`, conditional expressions, lambdas, comprehensions and their filters, each
further operand of `and` and `or`, subscripts by a comparison, and calls of `map`, `all`, `partial` and their kin.
Statements: all but docstrings, imports, `pass`, `assert` and annotations without a value.
Bodies: functions, and what a class or module contains outside its functions and classes.

Formatting does not change the figures. Less is better for every compared figure. A figure is worse if it exceeds its
committed value by more than 1 %. A count under 100 therefore may not grow by one.
Commit subjects are printed and not compared: history cannot change.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from check_commits import AREA, SUBJECT_LENGTH
from revisions import git_output

TOOLS = Path(__file__).parent
PACKAGE = TOOLS.parent / "src" / "tiewise"
COMMITTED = TOOLS / "code_density.json"
TOLERANCE = 0.01  # share of the committed value by which a figure may exceed it
COMMITS = 300  # newest commits whose subjects are measured
SUMMARY_LENGTH = 16  # words in the first sentence of a docstring
LOCAL_NAMES = 15  # local names of a function, at most
PARAMETERS = 6  # parameters of a private function, at most

BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
    ast.Lambda,
)
CALLS = frozenset(
    ["all", "any", "dropwhile", "filter", "filterfalse", "map", "partial", "starmap", "suppress", "takewhile"]
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
BODIES = (*DEFINITIONS, ast.Module)
NO_STATEMENTS = (ast.Import, ast.ImportFrom, ast.Pass, ast.Assert)

# words without information in a name
VAGUE = frozenset(
    [
        "anew",
        "asked",
        "beside",
        "drawn",
        "found",
        "given",
        "held",
        "kept",
        "known",
        "made",
        "met",
        "obj",
        "odd",
        "own",
        "res",
        "said",
        "shown",
        "stuff",
        "thing",
        "tmp",
        "told",
        "wanted",
        "whole",
    ]
)
# phrases that the style guide replaces
PHRASES = (
    "anew",
    "are asked",
    "are told",
    "begun",
    "beside",
    "has not",
    "have not",
    "held against",
    "in place of",
    "is asked",
    "is told",
    "of its own",
    "of their own",
    "stands",
    "told apart",
    "whoever",
)
LISTED_PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b")
BAD_OPENING = re.compile(r"(?:What|Whatever|Whether|Where|Of|Whoever)\b")
SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n\n")
SUBJECT_WITH_AREA = re.compile(AREA)


@dataclass(frozen=True)
class Body:
    """One function, or the rest of a class or module."""

    decisions: int
    lines: int  # length of a function; 0 for a class or module
    where: str


@dataclass
class Counts:
    """Totals over the measured files."""

    files: int = 0
    packages: int = 0  # folders at the top level that contain Python files
    nodes: int = 0
    statements: int = 0
    decisions: int = 0
    conditional_expressions: int = 0
    nested_conditional_expressions: int = 0
    vague_names: int = 0
    crowded_functions: int = 0
    wide_private_functions: int = 0
    docstrings: int = 0
    public_without_docstring: int = 0
    long_first_sentences: int = 0
    bad_openings: int = 0
    listed_phrases: int = 0
    bodies: list[Body] = field(default_factory=list)


@dataclass(frozen=True)
class Subjects:
    """Counts over the newest commit subjects."""

    commits: int
    long: int
    without_area: int


# decisions, statements and names of one node


def node_decisions(node: ast.AST) -> int:
    """Return the decisions that a node itself makes, without the nodes below it."""
    decisions = int(isinstance(node, BRANCHES))
    if isinstance(node, ast.BoolOp):
        decisions += len(node.values) - 1
    if isinstance(node, ast.comprehension):
        decisions += len(node.ifs)
    if isinstance(node, ast.Call):
        decisions += called_name(node) in CALLS
    if isinstance(node, ast.Subscript):
        decisions += isinstance(node.slice, ast.Compare)
    return decisions


def called_name(call: ast.Call) -> str:
    """Return the last name of the called function, or an empty text."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ""


def decisions_in(tree: ast.AST) -> int:
    """Return the decisions of a node and all nodes below it."""
    return sum(node_decisions(node) for node in ast.walk(tree))


def is_statement(node: ast.AST) -> bool:
    """Return whether a node counts as a statement."""
    if not isinstance(node, ast.stmt) or isinstance(node, NO_STATEMENTS):
        return False
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return not is_text


def bound_name(node: ast.AST) -> str:
    """Return the name that a node binds or defines, or an empty text."""
    name: str | None = None
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.attr
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.alias):
        name = node.asname
    elif isinstance(node, (*DEFINITIONS, ast.ExceptHandler)):
        name = node.name
    return name or ""


def is_vague(name: str) -> bool:
    """Return whether one of a name's words carries no information."""
    return not VAGUE.isdisjoint(name.lower().split("_"))


def contains_conditional(expression: ast.IfExp) -> bool:
    """Return whether a conditional expression contains another one."""
    below = ast.walk(expression)
    next(below)  # the expression itself
    return any(isinstance(node, ast.IfExp) for node in below)


# functions and docstrings


def local_names(function: ast.AST) -> set[str]:
    """Return the names that a function assigns, its inner functions included."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def count_function(counts: Counts, function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> None:
    """Add one function to the counts."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    counts.bodies.append(Body(decisions_in(function), lines, f"{path}:{function.lineno} {function.name}"))
    counts.crowded_functions += len(local_names(function)) > LOCAL_NAMES
    arguments = function.args
    parameters = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    counts.wide_private_functions += function.name.startswith("_") and parameters > PARAMETERS


def count_body(counts: Counts, body: ast.Module | ast.ClassDef, path: Path) -> None:
    """Add the decisions of a class or module outside its functions and classes."""
    decisions = sum(decisions_in(node) for node in body.body if not isinstance(node, DEFINITIONS))
    line = body.lineno if isinstance(body, ast.ClassDef) else 1
    name = body.name if isinstance(body, ast.ClassDef) else "the module"
    counts.bodies.append(Body(decisions, 0, f"{path}:{line} body of {name}"))


def count_docstring(counts: Counts, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Add the docstring of a definition or module, or its absence, to the counts."""
    docstring = ast.get_docstring(node)
    if not docstring:
        is_public = isinstance(node, ast.Module) or not node.name.startswith("_")
        counts.public_without_docstring += is_public
        return
    first = SENTENCE_END.split(docstring)[0].replace("\n", " ")
    counts.docstrings += 1
    counts.long_first_sentences += len(first.split()) > SUMMARY_LENGTH
    counts.bad_openings += BAD_OPENING.match(first) is not None
    counts.listed_phrases += len(LISTED_PHRASE.findall(docstring))


# files


def count_node(counts: Counts, node: ast.AST, path: Path) -> None:
    """Add one node, without the nodes below it, to the counts."""
    counts.nodes += 1
    counts.decisions += node_decisions(node)
    counts.statements += is_statement(node)
    counts.vague_names += is_vague(bound_name(node))
    if isinstance(node, ast.IfExp):
        counts.conditional_expressions += 1
        counts.nested_conditional_expressions += contains_conditional(node)
    if isinstance(node, FUNCTIONS):
        count_function(counts, node, path)
    if isinstance(node, ast.Module | ast.ClassDef):
        count_body(counts, node, path)
    if isinstance(node, BODIES):
        count_docstring(counts, node)


def python_files(root: Path) -> list[Path]:
    """Return the Python files of a folder or the one file, without folders named tests."""
    if root.is_file():
        return [root]
    files = sorted(root.rglob("*.py"))
    return [path for path in files if "tests" not in path.relative_to(root).parts]


def measure(root: Path) -> Counts:
    """Measure a folder or a file."""
    counts = Counts()
    files = python_files(root)
    counts.files = len(files)
    counts.packages = len({path.relative_to(root).parts[0] for path in files if path.parent not in (root, root.parent)})
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            count_node(counts, node, path)
    return counts


def commit_subjects(folder: Path) -> list[str]:
    """Return the newest commit subjects of a folder's repository; none for a shallow clone."""
    tracked = git_output("ls-files", "--", ".", repository=folder)
    if not tracked or git_output("rev-parse", "--is-shallow-repository", repository=folder) != "false":
        return []
    return git_output("log", "--format=%s", "-n", str(COMMITS), repository=folder).splitlines()


def measure_subjects(subjects: list[str]) -> Subjects:
    """Count commit subjects that are too long or name no area."""
    long = sum(len(subject) > SUBJECT_LENGTH for subject in subjects)
    without_area = sum(SUBJECT_WITH_AREA.match(subject) is None for subject in subjects)
    return Subjects(len(subjects), long, without_area)


# figures


def figures(counts: Counts) -> dict[str, float]:
    """Return every compared figure by its name; less is better for each."""
    statements, nodes = max(counts.statements, 1), max(counts.nodes, 1)
    decisions = [body.decisions for body in counts.bodies]
    over_10, over_15, over_20 = (sum(count > most for count in decisions) for most in (10, 15, 20))
    return {
        "decisions per 100 statements": round(100 * counts.decisions / statements, 4),
        "decisions per 1,000 syntax nodes": round(1000 * counts.decisions / nodes, 4),
        "syntax nodes per statement": round(counts.nodes / statements, 4),
        "bodies with more than 10 decisions": over_10,
        "bodies with more than 10 decisions, per 100": round(100 * over_10 / max(len(decisions), 1), 4),
        "bodies with more than 15 decisions": over_15,
        "bodies with more than 20 decisions": over_20,
        f"functions with more than {LOCAL_NAMES} local names": counts.crowded_functions,
        f"private functions with more than {PARAMETERS} parameters": counts.wide_private_functions,
        "conditional expressions per 100 statements": round(100 * counts.conditional_expressions / statements, 4),
        "nested conditional expressions": counts.nested_conditional_expressions,
        "names that say nothing": counts.vague_names,
        "public definitions without docstring": counts.public_without_docstring,
        f"docstrings whose first sentence exceeds {SUMMARY_LENGTH} words": counts.long_first_sentences,
        "docstrings that start with What, Whether, Where or Of": counts.bad_openings,
        "phrases of the style guide's list in docstrings": counts.listed_phrases,
    }


def is_worse(value: float, committed: float) -> bool:
    """Return whether a figure exceeds its committed value by more than the tolerance."""
    return value > committed * (1 + TOLERANCE)


def worse_figures(values: dict[str, float], committed: dict[str, float]) -> list[str]:
    """Return the names of figures that are worse than committed or have no committed value."""
    return [name for name, value in values.items() if name not in committed or is_worse(value, committed[name])]


def figure_text(value: float) -> str:
    """Return a figure as text: counts whole, ratios with one decimal place."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def report(counts: Counts, subjects: Subjects, committed: dict[str, float], worst: int) -> Iterator[str]:
    """Yield the lines of the report."""
    sizes = f"{counts.files} files, {counts.packages} top-level packages, {counts.statements:,} statements"
    yield f"{sizes}, {len(counts.bodies):,} bodies, {counts.docstrings:,} docstrings"
    values = figures(counts)
    worse = worse_figures(values, committed) if committed else []
    for name, value in values.items():
        limit = f"   committed {figure_text(committed[name])}" if name in committed else ""
        mark = "   worse" if name in worse else ""
        yield f"{name:56}{figure_text(value):>8}{limit}{mark}"
    if subjects.commits:
        name = f"commit subjects over {SUBJECT_LENGTH} characters, of the last {subjects.commits}"
        yield f"{name:56}{subjects.long:>8}"
        yield f"{'commit subjects without `area: `':56}{subjects.without_area:>8}"
    for body in worst_bodies(counts, worst):
        yield f"  {body.decisions:3} decisions in {body.lines:3} lines  {body.where}"


def worst_bodies(counts: Counts, count: int) -> list[Body]:
    """Return the bodies with the most decisions, the longest first among equals."""
    ordered = sorted(counts.bodies, key=lambda body: (body.decisions, body.lines, body.where), reverse=True)
    return ordered[:count]


def record(counts: Counts, subjects: Subjects, worst: int) -> dict[str, object]:
    """Return all results as an object for JSON."""
    totals = {name: value for name, value in vars(counts).items() if name != "bodies"}
    return {
        "totals": totals | {"bodies": len(counts.bodies)},
        "figures": figures(counts),
        "commit_subjects": asdict(subjects),
        "worst": [asdict(body) for body in worst_bodies(counts, worst)],
    }


# command line


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, help="folder or file to measure instead of src/tiewise")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print the N bodies with the most decisions")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a figure is worse than its committed value"
    )
    parser.add_argument("--write", action="store_true", help=f"write the figures to tools/{COMMITTED.name}")
    arguments = parser.parse_args()
    if arguments.path is not None and (arguments.check or arguments.write):
        parser.error("--check and --write are about src/tiewise; leave PATH out")
    if arguments.path is not None and not arguments.path.exists():
        parser.error(f"{arguments.path}: no such file or folder")
    return arguments


def main() -> int:
    """Measure, print, and compare or write if requested; return the exit code."""
    arguments = read_arguments()
    root = arguments.path or Path(os.path.relpath(PACKAGE))
    counts = measure(root)
    subjects = measure_subjects(commit_subjects(root if root.is_dir() else root.parent))
    if arguments.write:
        COMMITTED.write_text(json.dumps(figures(counts), indent=1) + "\n", encoding="utf-8")
    is_package = arguments.path is None and COMMITTED.is_file()
    committed = json.loads(COMMITTED.read_text(encoding="utf-8")) if is_package else {}
    if arguments.json:
        print(json.dumps(record(counts, subjects, arguments.worst), indent=1))
    else:
        print(*report(counts, subjects, committed, arguments.worst), sep="\n")
    worse = worse_figures(figures(counts), committed) if arguments.check else []
    if worse:
        print(f"worse than tools/{COMMITTED.name} by more than 1 %: {'; '.join(worse)}", file=sys.stderr)
        print("simplify what you changed: --worst 20 names the bodies with the most decisions", file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
