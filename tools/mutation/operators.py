"""Mutation operators: each proposes changes of one source line for a node of the syntax tree.

`edits_of(source)` returns the executable lines of a file with all their changes. A change replaces columns of one line,
so every other line keeps its number. The operators leave out docstrings, annotations, decorators, `__all__`, blocks
under `if TYPE_CHECKING`, log messages and f-strings (Python 3.11 does not know the columns inside them).
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

NEGATED = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SHIFTED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
COMPARISON = {
    ast.Eq: r"==",
    ast.NotEq: r"!=",
    ast.Lt: r"<",
    ast.LtE: r"<=",
    ast.Gt: r">",
    ast.GtE: r">=",
    ast.Is: r"\bis\b",
    ast.IsNot: r"\bis\s+not\b",
    ast.In: r"\bin\b",
    ast.NotIn: r"\bnot\s+in\b",
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
KEY_METHODS = ("get", "pop", "setdefault")
LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
LOG_NAMES = ("log", "logger", "logging", "_log", "_logger", "LOG", "LOGGER")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Edit:
    """One change: the bytes from column `start` to `end` of a line become `text`."""

    operator: str
    line: int
    start: int
    end: int
    text: str


@dataclass
class ExecutableLine:
    """Statement, named by its first line, with the changes that the operators propose.

    `at_import` is true outside functions, where Python runs the line while it imports the module. `is_cached` is true
    in a function with a cache, whose lines run for the first caller alone. `used_on` lists the lines that use the name
    which an import-time statement defines.
    """

    line: int
    last: int
    at_import: bool
    is_cached: bool
    used_on: list[int] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)


class Source:
    """Text of a file as lines of bytes, since columns of a syntax tree count bytes."""

    def __init__(self, text: str):
        self.text = text
        self.tree = ast.parse(text)
        self.lines = [line.encode() for line in text.split("\n")]
        self.readers = _readers(self.tree)

    def replace(self, operator: str, node: ast.AST, text: str) -> Iterator[Edit]:
        """Propose `text` instead of a node if it is on one line."""
        if node.lineno == node.end_lineno:
            yield Edit(operator, node.lineno, node.col_offset, node.end_col_offset, text)

    def replace_between(self, operator: str, left: ast.AST, right: ast.AST, pattern: str, text: str) -> Iterator[Edit]:
        """Propose `text` instead of the token that matches a pattern between two nodes."""
        for line in range(left.end_lineno, right.lineno + 1):
            start = left.end_col_offset if line == left.end_lineno else 0
            end = right.col_offset if line == right.lineno else len(self.lines[line - 1])
            code = self.lines[line - 1][start:end].partition(b"#")[0]
            if match := re.search(pattern.encode(), code):
                yield Edit(operator, line, start + match.start(), start + match.end(), text)
                return

    def apply(self, edit: Edit) -> tuple[str, str]:
        """Return a line before and after a change."""
        line = self.lines[edit.line - 1]
        changed = line[: edit.start] + edit.text.encode() + line[edit.end :]
        return line.decode(), changed.decode()

    def is_change(self, edit: Edit) -> bool:
        """Return True if the file still parses after a change, to another tree."""
        lines = [line.decode() for line in self.lines]
        lines[edit.line - 1] = self.apply(edit)[1]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError:
            return False
        return ast.dump(tree) != ast.dump(self.tree)


Operator = Callable[[ast.AST, Source], Iterator[Edit]]
OPERATORS: dict[str, Operator] = {}


def operator(name: str) -> Callable[[Operator], Operator]:
    """Register a function as the operator of a name."""

    def register(function: Operator) -> Operator:
        """Register the decorated function."""
        OPERATORS[name] = function
        return function

    return register


@operator("comparison negated")
def negate_comparison(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `<` into `>=`, `==` into `!=`, `in` into `not in`."""
    for left, right, token in _comparisons(node):
        pattern, text = COMPARISON[type(token)], NEGATED[type(token)]
        yield from source.replace_between("comparison negated", left, right, pattern, text)


@operator("boundary shifted")
def shift_boundary(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `<` into `<=` and `>` into `>=`, and back."""
    for left, right, token in _comparisons(node):
        if type(token) in SHIFTED:
            pattern, text = COMPARISON[type(token)], SHIFTED[type(token)]
            yield from source.replace_between("boundary shifted", left, right, pattern, text)


@operator("arithmetic swapped")
def swap_arithmetic(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `+` into `-`, `*` into `/`, also in assignments; texts and paths are left out."""
    if isinstance(node, ast.BinOp) and not _has_text(node):
        symbol, text = ARITHMETIC.get(type(node.op), ("", ""))
        if symbol:
            yield from source.replace_between("arithmetic swapped", node.left, node.right, re.escape(symbol), text)
    if isinstance(node, ast.AugAssign) and not _has_text(node.value):
        symbol, text = ARITHMETIC.get(type(node.op), ("", ""))
        if symbol:
            pattern = re.escape(symbol + "=")
            yield from source.replace_between("arithmetic swapped", node.target, node.value, pattern, text + "=")


@operator("sign or not removed")
def remove_unary(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `-x` into `x` and `not x` into `x`."""
    if not isinstance(node, ast.UnaryOp) or not isinstance(node.op, (ast.USub, ast.Not)):
        return
    match = re.compile(rb"-|not\s*").match(source.lines[node.lineno - 1], node.col_offset)
    if match:
        yield Edit("sign or not removed", node.lineno, match.start(), match.end(), "")


@operator("and/or swapped")
def swap_boolean(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn one `and` into `or`, or one `or` into `and`."""
    if not isinstance(node, ast.BoolOp):
        return
    word, text = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in itertools.pairwise(node.values):
        yield from source.replace_between("and/or swapped", left, right, rf"\b{word}\b", text)


@operator("default changed")
def change_default(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Change the default of a parameter: a number, a truth value or a text."""
    if not isinstance(node, ast.arguments):
        return
    for default in [*node.defaults, *node.kw_defaults]:
        if not isinstance(default, ast.Constant):
            continue
        texts = ['""'] if isinstance(default.value, str) and default.value else _other_constants(default.value)
        for text in texts:
            yield from source.replace("default changed", default, text)


@operator("constant changed")
def change_constant(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn True into False, 3 into 4 and 2, and 0.5 into 1.0."""
    if isinstance(node, ast.Constant):
        for text in _other_constants(node.value):
            yield from source.replace("constant changed", node, text)


@operator("key emptied")
def empty_key(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Empty a text that is a key of a mapping or is compared with something."""
    for text in _keys(node):
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value:
            yield from source.replace("key emptied", text, '""')


@operator("return replaced")
def replace_return(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Return None instead of a value."""
    value = node.value if isinstance(node, ast.Return) else None
    is_plain = isinstance(value, ast.Constant) and isinstance(value.value, (bool, type(None)))
    if value is not None and not is_plain:
        yield from source.replace("return replaced", value, "None")


@operator("statement deleted")
def delete_statement(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Put `pass` instead of a statement that acts on an object.

    These are calls, `raise`, `del`, `+=` and assignments to attributes and elements. Without an assignment to a name,
    almost any test fails.
    """
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_stored = isinstance(node, ast.Assign) and all(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets
    )
    if is_call or is_stored or isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete)):
        yield from source.replace("statement deleted", node, "pass")


@operator("break/continue swapped")
def swap_jump(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `break` into `continue`, and back."""
    if isinstance(node, ast.Break):
        yield from source.replace("break/continue swapped", node, "continue")
    if isinstance(node, ast.Continue):
        yield from source.replace("break/continue swapped", node, "break")


@operator("condition forced")
def force_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Put True or False instead of a condition; a `while` gets False only."""
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from source.replace("condition forced", node.test, "True")
        yield from source.replace("condition forced", node.test, "False")
    if isinstance(node, ast.While):
        yield from source.replace("condition forced", node.test, "False")
    if isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield from source.replace("condition forced", condition, "True")
            yield from source.replace("condition forced", condition, "False")


@operator("argument dropped")
def drop_argument(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Leave out a keyword argument that follows another argument on its line."""
    if not isinstance(node, ast.Call):
        return
    arguments = sorted([*node.args, *node.keywords], key=lambda one: (one.lineno, one.col_offset))
    for previous, keyword in itertools.pairwise(arguments):
        if not isinstance(keyword, ast.keyword) or keyword.arg is None or keyword.lineno != keyword.end_lineno:
            continue
        for comma in source.replace_between("argument dropped", previous, keyword, ",", ""):
            if comma.line == keyword.lineno:
                yield Edit("argument dropped", comma.line, comma.start, keyword.end_col_offset, "")


@operator("function swapped")
def swap_call(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Turn `min` into `max` and `any` into `all`, and back, as functions and as methods."""
    if not isinstance(node, ast.Call):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in SWAPPED_CALLS:
        line, end = node.func.end_lineno, node.func.end_col_offset
        yield Edit("function swapped", line, end - len(name), end, SWAPPED_CALLS[name])


def _comparisons(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, ast.cmpop]]:
    """Yield the left and right operand of each comparison in a chain, with its operator."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        yield from zip(operands, operands[1:], node.ops, strict=False)


def _has_text(node: ast.AST) -> bool:
    """Return whether a text is an operand: the operators of texts are not arithmetic."""
    if isinstance(node, ast.BinOp):
        return _has_text(node.left) or _has_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _other_constants(value: object) -> list[str]:
    """Return constants, as source text, that replace a truth value or a number."""
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, int):
        return [str(value + 1), str(value - 1)]
    if isinstance(value, float):
        return [repr(2 * value if value else 1.0)]
    return []


def _keys(node: ast.AST) -> list[ast.AST | None]:
    """Return the keys of a subscript, a dictionary, a call of `get` or a comparison."""
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Dict):
        return list(node.keys)
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in KEY_METHODS:
        return node.args[:1]
    return []


def edits_of(source: Source) -> list[ExecutableLine]:
    """Return the executable lines of a file in their order, each with its changes."""
    lines = list(_statements(source.tree.body, source, at_import=True, is_cached=False))
    return sorted(lines, key=lambda one: one.line)


def _statements(body: list[ast.stmt], source: Source, at_import: bool, is_cached: bool) -> Iterator[ExecutableLine]:
    """Yield the executable lines of a block and of the blocks inside it."""
    for statement in body:
        if _is_left_out(statement):
            continue
        yield _executable_line(statement, source, at_import, is_cached)
        is_function = isinstance(statement, FUNCTIONS)
        cached = is_cached or (is_function and "cache" in "".join(map(ast.unparse, statement.decorator_list)))
        for inner in _blocks(statement):
            yield from _statements(inner, source, at_import and not is_function, cached)


def _executable_line(statement: ast.stmt, source: Source, at_import: bool, is_cached: bool) -> ExecutableLine:
    """Return a statement as an executable line with all its changes."""
    blocks = [block for block in _blocks(statement) if block]
    last = statement.end_lineno or statement.lineno
    if blocks:
        last = max(statement.lineno, min(block[0].lineno for block in blocks) - 1)
    result = ExecutableLine(statement.lineno, last, at_import, is_cached)
    result.used_on = _uses(statement, source) if at_import else []
    seen = set()
    for node in _header_nodes(statement):
        for propose in OPERATORS.values():
            for edit in propose(node, source):
                columns = (edit.line, edit.start, edit.end, edit.text)
                if columns not in seen:
                    seen.add(columns)
                    result.edits.append(edit)
    return result


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks inside a statement: body, else, handlers, cases."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    for branch in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        blocks.append(branch.body)
    return blocks


def _header_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and the expressions in its header.

    Parts that the operators leave out are skipped.
    """
    yield statement
    for name, value in ast.iter_fields(statement):
        if name in ("annotation", "returns", "decorator_list", "handlers", "cases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                yield from _expressions(child)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an expression and those inside it, without f-strings and log calls."""
    if isinstance(node, ast.JoinedStr) or _is_log_call(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def _is_left_out(statement: ast.stmt) -> bool:
    """Return whether the operators leave out a statement."""
    if isinstance(statement, NO_CODE):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _is_log_call(statement.value)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets)
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _is_log_call(node: ast.AST) -> bool:
    """Return whether a node is a call of a logger."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in LOG_METHODS and ast.unparse(node.func.value) in LOG_NAMES


def _uses(statement: ast.stmt, source: Source) -> list[int]:
    """Return the body of a function, or the lines that read the name of another statement."""
    if isinstance(statement, FUNCTIONS):
        return list(range(statement.body[0].lineno, (statement.end_lineno or 0) + 1))
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return sorted({line for name in names for line in source.readers.get(name, ())})


def _readers(tree: ast.Module) -> dict[str, set[int]]:
    """Return the lines that read each name, as a variable, an attribute or a keyword argument."""
    readers: dict[str, set[int]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            readers[node.id].add(node.lineno)
        elif isinstance(node, ast.Attribute):
            readers[node.attr].add(node.lineno)
        elif isinstance(node, ast.keyword) and node.arg:
            readers[node.arg].add(node.lineno)
    return readers
