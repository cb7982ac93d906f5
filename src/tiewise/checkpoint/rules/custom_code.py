"""B023: the Python files of a checkpoint, read as text: what their classes say of tying. Nothing is imported or run."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Fault, Folder, noting
from tiewise.checkpoint.rules.rule import Said, Severity, Told, dotted, rule
from tiewise.checkpoint.untrusted import inside, read_whole, short
from tiewise.core.errors import CheckpointError

MOST_BYTES, MOST_IN_ALL = 2**18, 2**20  # of one file, and of all; a parsed file takes up to 600 times its bytes
MOST_CLASSES, MOST_ANCESTORS = 2000, 100
KEYS = "_tied_weights_keys"
_MISNAMED = re.compile(r"_{0,2}(dynamic_)?tied?_(weights?|params?|parameters?)_(keys?|names?)_?")
_ARGUMENTS = ("missing_keys", "recompute_mapping")  # with which transformers 5 calls `tie_weights`
_SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"
_WORDS = (b"tie", b"get_output_embeddings", b"Config")  # a file with none of these says nothing of tying
_MODEL = re.compile(r".*(PreTrainedModel|ForCausalLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
_PLAIN = re.compile(r"PreTrainedModel|.*Mixin|ABC|Module|Generic|Protocol|object")  # bases that bring no keys
_NORMALISED_HEAD = re.compile(r"\w*Norm(alized|alised)?(LM|Output)?Head")
_BASE_CONFIG = re.compile(r"Pre[tT]rainedConfig")


class Assigned(NamedTuple):
    """An assignment of `_tied_weights_keys`, or of a name that was meant to be it."""

    name: str  # as written
    line: int  # in its file
    entries: tuple[str, ...] | None  # the texts of a list, tuple or set; None where the value is something else


@dataclass(frozen=True)
class CodeClass:
    """What is kept of one class of a file, whose tree is large."""

    file: str  # name of the file in the folder
    line: int  # of the class
    name: str  # of the class
    bases: tuple[str, ...]  # last parts of the names of its bases
    tied: tuple[Assigned, ...]  # what it assigns in its body or on `self`
    tie_weights: int | None  # line of its own `tie_weights` of the old form, which takes no arguments; else None
    methods: frozenset[str]  # names of its own
    names_flag: bool  # `tie_word_embeddings` stands somewhere in it
    keyed: bool  # it assigns `_tied_weights_keys`


@rule("B023", "error", "the code that comes with a checkpoint ties as transformers 5 asks")
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
    classes, faults = read_code(facts.folder) if used else ({}, [])
    for fault in faults:
        what = fault.what.removeprefix(f"{facts.folder.path}/")
        yield Said(short(fault.file), what, fault.fix, severity="warning")
    models = {name for auto, name in used.items() if auto.startswith("AutoModel")}
    for found in classes.values():
        above = _ancestors(classes, found)
        if found.name in models or any(_MODEL.fullmatch(name) for name in above):
            yield from _of_model(facts, found, {name: classes.get(name) for name in above})
    config, deciding = classes.get(used.get("AutoConfig", "")), facts.claims.deciding
    if config is None or deciding.written is not None or facts.roles.headless:
        return
    if config.bases and all(_BASE_CONFIG.fullmatch(base) for base in config.bases) and not config.names_flag:
        what = f"{config.name} gives {FLAG} no value, nor does config.json: true for transformers 4, false for 5"
        value = f"{FLAG}={bool(facts.truth)}"
        fix = f"write {FLAG} into config.json, or {value} among the arguments of {short(config.name)}.__init__"
        yield _finding("warning", config, config.line, what, fix)


def _of_model(facts: Facts, found: CodeClass, above: Mapping[str, CodeClass | None]) -> Told:
    # a class above declares keys, or may: one that is not in the folder and is no plain base
    inherits = any(one.keyed if one is not None else not _PLAIN.fullmatch(name) for name, one in above.items())
    for tied in found.tied:
        if tied.name == KEYS and tied.entries is not None:
            untied = facts.claims.tied is False
            how = "saving it raises" if untied else "transformers 5 stops while it builds the model:"
            what = f"{found.name}.{KEYS} is a list, and {how} 'list' object has no attribute 'keys'"
            yield _finding("warning" if untied else "error", found, tied.line, what, _line(facts, tied.entries))
        elif not found.keyed and not inherits:
            what = f"{found.name} sets {tied.name}, which transformers 5 does not read: the name is {KEYS}"
            yield _finding("error", found, tied.line, what, _line(facts, tied.entries or ()))
    heads = "get_output_embeddings" in found.methods and "tie_weights" not in found.methods
    if heads and not found.tied and facts.claims.tied and not inherits:
        what = f"{found.name} has get_output_embeddings and no {KEYS}: transformers 5 leaves the head untied"
        yield _finding("error", found, found.line, f"{what}, and random", _line(facts, ()))
    if found.tie_weights is not None:
        what = f"{found.name}.tie_weights does not take {' and '.join(_ARGUMENTS)}, which transformers 5 passes"
        yield _finding("error", found, found.tie_weights, what, f"write: {_SIGNATURE}")


def _line(facts: Facts, entries: tuple[str, ...]) -> str:
    """The assignment to write."""
    table = facts.roles.input_name or "model.embed_tokens.weight"
    heads = [entry for entry in entries if entry != table] or [facts.roles.output_name or "lm_head.weight"]
    pairs = ", ".join(f'"{short(head)}": "{short(table)}"' for head in heads[:8])
    return f"write: {KEYS} = {{{pairs}}}"


def _finding(severity: Severity, found: CodeClass, line: int, evidence: str, repair: str) -> Said:
    return Said(f"{short(found.file)}:{line}", short(evidence, 400), repair, severity=severity)


def auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the class that config.json names for each auto class, where its code lies in the folder.

    >>> auto_map({"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "org/other--configuration_x.C"}})
    {'AutoModel': 'X'}
    """
    entries = config.get("auto_map")
    named = entries.items() if isinstance(entries, Mapping) else ()
    texts = {key: value for key, value in named if isinstance(key, str) and isinstance(value, str)}
    return {key: value.rpartition(".")[2] for key, value in texts.items() if "--" not in value}


def read_code(folder: Folder) -> tuple[dict[str, CodeClass], list[Fault]]:
    """Read every Python file directly in the folder: its classes by name, and the files that cannot be read."""
    classes, faults, left = dict[str, CodeClass](), list[Fault](), MOST_IN_ALL
    for name in folder.files:
        path = folder.path / name
        if left < 0 or not name.endswith(".py"):
            continue
        with noting(faults, name):
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            left -= len(text)
            if left < 0 or len(classes) > MOST_CLASSES:
                what = f"{path}: not read: with those before it, more code than any model has"
                raise CheckpointError(what, "keep only the code of the model in the folder")
            for node in _parsed(text, path) if any(word in text for word in _WORDS) else ():
                if node.name not in classes:  # the first of a name counts
                    classes[node.name] = _summary(node, name)
    return classes, faults


def normalised_heads(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every sign that the class divides the rows of its head by their lengths."""
    for level, record in facts.levels.items():
        if record.get("norm_head") is True:
            yield (
                dotted(level, "norm_head"),
                "norm_head is true: the class divides the rows of the head by their lengths",
            )
    folder, left = facts.folder, MOST_IN_ALL
    for name in folder.files if not folder.single else ():
        if not name.endswith(".py"):
            continue
        with noting([], name):  # B023 reports a file that cannot be read
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            left -= len(text)
            if left < 0:
                return
            for node in _parsed(text, folder.path / name) if b"Head" in text or b"lm_head" in text else ():
                if _normalises(node):
                    how = f"{node.name} divides the rows of the head by their lengths"
                    yield f"{short(name)}:{node.lineno}", short(how, 200)


def _normalises(node: ast.ClassDef) -> bool:
    """Whether a class is a head that passes its weight to `normalize`, or passes that of its `lm_head`, or says so."""
    if _NORMALISED_HEAD.fullmatch(node.name):
        return True
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and _last(call.func) == "normalize" and call.args:
            weight = call.args[0]
            if isinstance(weight, ast.Attribute) and weight.attr == "data":
                weight = weight.value
            if not isinstance(weight, ast.Attribute) or weight.attr != "weight":
                continue
            owner = _last(weight.value)
            if owner == "lm_head" or (owner == "self" and "head" in node.name.lower()):
                return True
    return False


def _parsed(text: bytes, path: Path) -> list[ast.ClassDef]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would print a stranger's line, an invalid escape in it
            tree = ast.parse(text, os.fspath(path))  # a syntax error opens the file that is named, to quote its line
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        reason = short(getattr(error, "msg", None) or str(error) or type(error).__name__, 80)
        raise CheckpointError(f"{path}: cannot be read as Python ({reason})", "take it from its source again") from None
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)][:MOST_CLASSES]


def _summary(node: ast.ClassDef, file: str) -> CodeClass:
    tied, names_flag = [], False
    for item in ast.walk(node):
        match item:
            case ast.Assign() | ast.AnnAssign():
                entries = None
                if isinstance(item.value, ast.List | ast.Tuple | ast.Set):
                    texts = (one.value for one in item.value.elts if isinstance(one, ast.Constant))
                    entries = tuple(text for text in texts if isinstance(text, str))
                for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                    own = not isinstance(target, ast.Attribute) or _last(target.value) in ("self", "cls")
                    name = _last(target) if own else None
                    if name is not None and (name == KEYS or _MISNAMED.fullmatch(name)):
                        tied.append(Assigned(name, item.lineno, entries))
            case ast.arg(arg=word) | ast.keyword(arg=word) | ast.Constant(value=word) | ast.Name(id=word):
                names_flag = names_flag or word == FLAG
            case ast.Attribute(attr=word, ctx=ast.Store()):
                names_flag = names_flag or word == FLAG
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    tie = methods.get("tie_weights")
    named = set() if tie is None else {one.arg for one in (*tie.args.args, *tie.args.kwonlyargs)}
    old = tie is not None and tie.args.kwarg is None and not named.issuperset(_ARGUMENTS)
    return CodeClass(
        file,
        node.lineno,
        node.name,
        bases=tuple(name for base in node.bases if (name := _last(base)) is not None),
        tied=tuple(tied),
        tie_weights=tie.lineno if tie is not None and old else None,
        methods=frozenset(methods),
        names_flag=names_flag,
        keyed=any(one.name == KEYS for one in tied),
    )


def _last(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _ancestors(classes: Mapping[str, CodeClass], found: CodeClass) -> list[str]:
    """Names of all classes that this one inherits from, nearest first, as far as the folder has them."""
    above, names = list[str](), list(found.bases)
    while names and len(above) < MOST_ANCESTORS:
        name = names.pop(0)
        if name != found.name and name not in above:
            above.append(name)
            names += classes[name].bases if name in classes else ()
    return above
