"""B023: the code that comes with a checkpoint, read as text, ties as transformers 5 asks for it. Nothing is run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Fault, Folder
from tiewise.checkpoint.rule import ERROR, WARNING, Said, Told, rule
from tiewise.checkpoint.untrusted import inside, read_whole, short
from tiewise.core.errors import CheckpointError

MOST_BYTES, MOST_IN_ALL = 2**18, 2**20  # of one file, and of all; a parsed file takes up to 600 times its bytes
MOST_CLASSES, MOST_ANCESTORS = 2000, 100
KEYS, FLAG = "_tied_weights_keys", "tie_word_embeddings"
_MISNAMED = re.compile(r"_{0,2}(dynamic_)?tied?_(weights?|params?|parameters?)_(keys?|names?)_?")
_MODEL = re.compile(r".*(PreTrainedModel|ForCausalLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
_PLAIN = re.compile(r"PreTrainedModel|.*Mixin|ABC|Module|Generic|Protocol|object")  # bases that bring no keys
_BASE_CONFIG = re.compile(r"Pre[tT]rainedConfig")
_ARGUMENTS = ("missing_keys", "recompute_mapping")  # with which transformers 5 calls `tie_weights`
_SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"
_WORDS = (b"tie", b"get_output_embeddings", b"Config")  # a file with none of these says nothing of tying


@dataclass(frozen=True)
class Tied:
    """An assignment of `_tied_weights_keys`, or of a name that was meant to be it."""

    name: str  # as written
    line: int  # in its file
    kind: str  # "dict", "list" (or tuple, or set), "none" or "other"
    entries: tuple[str, ...] = ()  # the texts of a list


@dataclass(frozen=True)
class Class:
    """One class of a file."""

    file: str  # name of the file in the folder
    line: int  # of the class
    name: str  # of the class
    bases: tuple[str, ...] = ()  # last parts of the names of its bases
    tied: tuple[Tied, ...] = ()  # what it assigns in its body or on `self`
    tie_weights: int | None = None  # line of its own `tie_weights`; None without one
    takes_arguments: bool = True  # that method can be called with `missing_keys` and `recompute_mapping`
    output_embeddings: int | None = None  # line of its own `get_output_embeddings`; None without one
    names_flag: bool = False  # `tie_word_embeddings` stands somewhere in it


@dataclass(frozen=True)
class Code:
    """The classes of all files, by name, and the files that cannot be read."""

    classes: dict[str, Class]
    faults: tuple[Fault, ...] = ()

    def ancestors(self, found: Class) -> list[Class | str]:
        """All classes that this one inherits from, nearest first; by name where they are not in the folder."""
        line: list[Class | str] = []
        names = list(found.bases)
        seen = {found.name}
        while names and len(seen) < MOST_ANCESTORS:
            name = names.pop(0)
            if name in seen:
                continue
            seen.add(name)
            known = self.classes.get(name)
            line.append(name if known is None else known)
            names += () if known is None else known.bases
        return line


def auto_map(config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the class that config.json names for each auto class, where its code lies in the folder.

    >>> auto_map({"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "org/other--configuration_x.C"}})
    {'AutoModel': 'X'}
    """
    entries = (config or {}).get("auto_map")
    if not isinstance(entries, Mapping):
        return {}
    named = {key: value for key, value in entries.items() if isinstance(key, str) and isinstance(value, str)}
    return {key: value.rpartition(".")[2] for key, value in named.items() if "--" not in value}


def read_code(folder: Folder) -> Code:
    """Read every Python file directly in the folder."""
    classes: dict[str, Class] = {}
    faults = []
    left = MOST_IN_ALL
    for name in folder.files:
        if not name.endswith(".py"):
            continue
        try:
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            left -= len(text)
            if left < 0 or len(classes) > MOST_CLASSES:
                what = f"{folder.path / name}: not read: with those before it, more code than any model has"
                raise CheckpointError(what, "keep only the code of the model in the folder")
            for found in _classes(text, folder.path / name) if any(word in text for word in _WORDS) else ():
                classes.setdefault(found.name, found)  # the first of a name counts
        except CheckpointError as error:
            faults.append(Fault(name, error.what, error.fix))
            if left < 0:
                break
    return Code(classes, tuple(faults))


def _classes(text: bytes, path: Path) -> list[Class]:
    try:
        tree = ast.parse(text, os.fspath(path))  # a syntax error opens the file that is named, to quote its line
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        reason = short(getattr(error, "msg", None) or str(error) or type(error).__name__, 80)
        raise CheckpointError(f"{path}: cannot be read as Python ({reason})", "take it from its source again") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [_class(node, path.name) for node in found[:MOST_CLASSES]]


def _class(node: ast.ClassDef, file: str) -> Class:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    tie = methods.get("tie_weights")
    output = methods.get("get_output_embeddings")
    named = set() if tie is None else {one.arg for one in (*tie.args.args, *tie.args.kwonlyargs)}
    return Class(
        file,
        node.lineno,
        node.name,
        bases=tuple(name for base in node.bases if (name := _last(base)) is not None),
        tied=tuple(_assigned(node)),
        tie_weights=None if tie is None else tie.lineno,
        takes_arguments=tie is None or tie.args.kwarg is not None or named.issuperset(_ARGUMENTS),
        output_embeddings=None if output is None else output.lineno,
        names_flag=any(_mentions(item) for item in ast.walk(node)),
    )


def _last(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _assigned(node: ast.ClassDef) -> Iterator[Tied]:
    for item in ast.walk(node):
        if isinstance(item, ast.Assign):
            targets = item.targets
        elif isinstance(item, ast.AnnAssign):
            targets = [item.target]
        else:
            continue
        for target in targets:
            own = not isinstance(target, ast.Attribute) or _last(target.value) in ("self", "cls")
            name = _last(target) if own else None
            if name is not None and (name == KEYS or _MISNAMED.fullmatch(name)):
                yield Tied(name, item.lineno, *_value(item.value))


def _value(node: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    if isinstance(node, ast.Dict):
        return "dict", ()
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        texts = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        return "list", tuple(text for text in texts if isinstance(text, str))
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return "none", ()
    return "other", ()


def _mentions(node: ast.AST) -> bool:
    if isinstance(node, ast.arg | ast.keyword):
        return node.arg == FLAG
    if isinstance(node, ast.Attribute):
        return node.attr == FLAG and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Constant):
        return node.value == FLAG
    return isinstance(node, ast.Name) and node.id == FLAG


@rule("B023", ERROR, "the code that comes with a checkpoint ties as transformers 5 asks")
def custom_code(facts: Facts) -> Told:
    """transformers 5 takes _tied_weights_keys as a dict {target: source}. A list, right in version 4, stops it while it
    builds or saves a model: 'list' object has no attribute 'keys'. An attribute of another name is not read at all, and
    a class without one stays untied where version 4 tied every class with get_output_embeddings: its head is random.
    tie_weights is called with missing_keys and recompute_mapping, which an override of the old form does not take. The
    base config lost its default for tie_word_embeddings, so a config class that gives none means tied in version 4 and
    untied in 5. The code is parsed as text and never imported; only classes of the folder itself are read.
    What to do: write the line that the finding gives.
    Sources: transformers#44861; prime-rl#1998; EXAONE-3.5#7; Model-Optimizer#2071; sglang#27234; transformers#42270
    """
    used = auto_map(facts.config)
    if not used:
        return
    code = read_code(facts.folder)
    for fault in code.faults:
        what = fault.what.removeprefix(f"{facts.folder.path}/")
        yield Said(short(fault.file), what, fault.fix, severity=WARNING)
    for found in code.classes.values():
        if _is_model(code, found, used):
            yield from _keys(facts, code, found)
            yield from _method(found)
    config = code.classes.get(used.get("AutoConfig", ""))
    if config is not None:
        yield from _default(facts, config)


def _is_model(code: Code, found: Class, used: dict[str, str]) -> bool:
    if any(found.name == name for auto, name in used.items() if auto.startswith("AutoModel")):
        return True
    lines = [line if isinstance(line, str) else line.name for line in code.ancestors(found)]
    return any(_MODEL.fullmatch(name) for name in lines)


def _keys(facts: Facts, code: Code, found: Class) -> Told:
    right = [tied for tied in found.tied if tied.name == KEYS]
    for tied in right:
        if tied.kind == "list":
            untied = facts.claims.tied is False
            how = "saving it raises" if untied else "transformers 5 stops while it builds the model:"
            what = f"{found.name}.{KEYS} is a list, and {how} 'list' object has no attribute 'keys'"
            yield _finding(WARNING if untied else ERROR, found, tied.line, what, _line(facts, tied.entries))
    for tied in found.tied:
        if tied.name != KEYS and not right and not _inherits_keys(code, found):
            what = f"{found.name} sets {tied.name}, which transformers 5 does not read: the name is {KEYS}"
            yield _finding(ERROR, found, tied.line, what, _line(facts, tied.entries))
    if found.output_embeddings is None or found.tied or found.tie_weights is not None or not facts.claims.tied:
        return
    if not _inherits_keys(code, found):
        what = (
            f"{found.name} has get_output_embeddings and no {KEYS}: transformers 5 leaves the head untied, and random"
        )
        yield _finding(ERROR, found, found.line, what, _line(facts, ()))


def _inherits_keys(code: Code, found: Class) -> bool:
    """Whether a class above declares keys, or may: one that is not in the folder and is no plain base."""
    for above in code.ancestors(found):
        if isinstance(above, Class):
            if any(tied.name == KEYS for tied in above.tied):
                return True
        elif not _PLAIN.fullmatch(above):
            return True
    return False


def _method(found: Class) -> Told:
    if found.tie_weights is not None and not found.takes_arguments:
        what = f"{found.name}.tie_weights does not take missing_keys and recompute_mapping, which transformers 5 passes"
        yield _finding(ERROR, found, found.tie_weights, what, f"write: {_SIGNATURE}")


def _default(facts: Facts, config: Class) -> Told:
    deciding = facts.claims.deciding
    if config.names_flag or not config.bases or not all(_BASE_CONFIG.fullmatch(base) for base in config.bases):
        return
    if deciding is None or deciding.written is not None or facts.roles.headless:
        return
    what = f"{config.name} gives {FLAG} no value, nor does config.json: true for transformers 4, false for 5"
    said = "True" if facts.truth else "False"
    repair = f"write {FLAG} into config.json, or {FLAG}={said} among the arguments of {short(config.name)}.__init__"
    yield _finding(WARNING, config, config.line, what, repair)


def _line(facts: Facts, entries: tuple[str, ...]) -> str:
    """The assignment to write."""
    table = facts.roles.input_name or "model.embed_tokens.weight"
    heads = [entry for entry in entries if entry != table] or [facts.roles.output_name or "lm_head.weight"]
    pairs = ", ".join(f'"{short(head)}": "{short(table)}"' for head in heads[:8])
    return f"write: {KEYS} = {{{pairs}}}"


def _finding(severity: str, found: Class, line: int, evidence: str, repair: str) -> Said:
    return Said(f"{short(found.file)}:{line}", short(evidence, 400), repair, severity=severity)
