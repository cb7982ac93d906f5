"""Write the stubs of verbs and settings of runs, for type checkers and editors.

    python tools/make_stubs.py           writes the files
    python tools/make_stubs.py --hold    writes nothing, and exits with 1 if a file differs from what it would write

| file | written from |
|---|---|
| `src/tiewise/checkpoint/rewrite/__init__.pyi` | the functions in `verbs/` |
| `src/tiewise/checkpoint/__init__.pyi`, the lines of verbs | the names of the files in `verbs/` |
| `src/tiewise/training/setting_types.py` | `Settings`, and the options of every kind of run |
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import tiewise
from tiewise.checkpoint.rewrite.registry import Verb, verbs
from tiewise.training.settings import DECODER, Settings, find_kind, kinds

PACKAGE = Path(tiewise.__file__).parent
REWRITE = "tiewise.checkpoint.rewrite"
VERB_LINE = re.compile(rf"^from {re.escape(REWRITE)} import \w+ as \w+\n", re.MULTILINE)
AFTER_VERBS = f"from {REWRITE}.engine import Receipt as Receipt\n"
WIDTH = 120  # characters of a line
REWRITE_HEAD = '''"""Signatures of the verbs, for type checkers and editors; `tools/make_stubs.py` writes them."""

import os
from typing import Any

from tiewise.checkpoint.rewrite.engine import Receipt as Receipt
from tiewise.checkpoint.rewrite.engine import rewrite as rewrite
from tiewise.checkpoint.rewrite.registry import Option as Option
from tiewise.checkpoint.rewrite.registry import verb as verb
'''
SETTINGS_HEAD = '''"""Types of the settings that `compare`, `train` and `heal` take as keywords, for type checkers.

`tools/make_stubs.py` writes this file from `settings.Settings` and from the options of each kind of run. These define
what the settings mean, and check their values when a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class SharedSettings(TypedDict, total=False):
    """Settings of every kind of run (PEP 692); functions name `text` and `seed` themselves."""
'''
SETTINGS_TAIL = '''

class TrainingSettings(SharedSettings, total=False):
    """Settings of `train`."""

    model: str


class ComparisonSettings(TrainingSettings, total=False):
    """Settings of `compare`: `boundary` is another name of `arms`."""

    arms: str | Sequence[str]
    boundary: str | Sequence[str]
'''
# settings of `compare` or `train` alone, and parameters with a name in the functions
LISTS = ("share",)  # options of one text for which a call takes several
NOT_SHARED = ("arms", "text", "model", "kind_options", "seed", "teacher")


def rewrite_stub() -> str:
    """Return the stub of `tiewise.checkpoint.rewrite`."""
    return "\n".join([REWRITE_HEAD, *map(verb_stub, verbs().values())])


def verb_stub(verb: Verb) -> str:
    """Return the stub of one verb, with the first paragraph of its docstring."""
    parameters, is_keyword = [], False
    for parameter in inspect.signature(verb.run).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parameters.append("*")
            is_keyword = True
        default = "" if parameter.default is parameter.empty else " = ..."
        parameters.append(f"{parameter.name}: {inspect.formatannotation(parameter.annotation)}{default}")
    summary = verb.help.partition("\n\n")[0]
    return f'{_head(verb.name, parameters)}\n    """{summary}"""\n'


def _head(name: str, parameters: list[str]) -> str:
    """Return the first line of a function, split into several if it is too long."""
    one_line = f"def {name}({', '.join(parameters)}) -> Receipt:"
    if len(one_line) <= WIDTH:
        return one_line
    inner = f"    {', '.join(parameters)}"
    if len(inner) > WIDTH:
        inner = "\n".join(f"    {parameter}," for parameter in parameters)
    return f"def {name}(\n{inner}\n) -> Receipt:"


def checkpoint_stub() -> str:
    """Return the stub of `tiewise.checkpoint`, with a line for every verb before those of the engine."""
    text = VERB_LINE.sub("", (PACKAGE / "checkpoint/__init__.pyi").read_text(encoding="utf-8"))
    lines = "".join(f"from {REWRITE} import {name} as {name}\n" for name in sorted(verbs()))
    before, engine, after = text.partition(AFTER_VERBS)
    return f"{before}{lines}{engine}{after}"


def setting_types() -> str:
    """Return the module with the types of all settings."""
    return "\n".join([SETTINGS_HEAD, *_setting_lines()]) + "\n" + SETTINGS_TAIL


def _setting_lines() -> Iterator[str]:
    """Yield a line for each shared setting, then for those of single kinds of run."""
    types: dict[str, dict[str, str]] = {"all": {name: _setting_type(hint) for name, hint in _hints(Settings)}}
    for kind in kinds():
        options = None if kind == DECODER else find_kind(kind).options
        types[kind] = {name: _option_type(hint) for name, hint in _hints(options)}
    seen = set(NOT_SHARED)
    for kind, settings in types.items():
        new = [name for name in settings if name not in seen]
        seen |= set(new)
        if new:
            yield f"    # of kind={kind}" if kind != "all" else "    # of every kind"
        for name in new:
            alternatives = dict.fromkeys(settings[name] for settings in types.values() if name in settings)
            if name in LISTS:
                alternatives["Sequence[str]"] = ""
            yield f"    {name}: {' | '.join(alternatives)}"


def _hints(options: type | None) -> Iterator[tuple[str, Any]]:
    """Yield the names and type hints of options; none for None."""
    yield from get_type_hints(options).items() if options is not None else ()


def _setting_type(hint: Any) -> str:
    """Return the type of a setting of all kinds.

    A setting that takes several texts also takes a single one.
    """
    return "str | Sequence[str]" if get_origin(hint) is tuple else _option_type(hint)


def _option_type(hint: Any) -> str:
    """Return the type of an option as source text."""
    return "Sequence[str]" if get_origin(hint) is tuple else inspect.formatannotation(hint)


FILES: dict[str, Callable[[], str]] = {
    "checkpoint/rewrite/__init__.pyi": rewrite_stub,
    "checkpoint/__init__.pyi": checkpoint_stub,
    "training/setting_types.py": setting_types,
}


def main() -> None:
    """Write the files, or list those that differ from the code."""
    outdated = []
    for name, text_of in FILES.items():
        path, text = PACKAGE / name, text_of()
        if "--hold" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(name)
    if outdated:
        sys.exit(f"{', '.join(outdated)}: behind the code; run python tools/make_stubs.py")


if __name__ == "__main__":
    main()
