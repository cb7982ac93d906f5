"""Errors of tiewise, and help with misspelled names.

Every error that a user can cause is a `TiewiseError`. Its message is one line: the problem and where it is, then the
remedy. The command line prints exactly that line and exits with 2; the code below it formats nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class TiewiseError(Exception):
    """Base of all errors that a user can cause. Every character of the message is printable.

    Args:
        problem: what is wrong, and where.
        remedy: what the user can do about it; "" if nothing is known.

    >>> print(TiewiseError("unknown kind 'teid'", "did you mean tied?"))
    unknown kind 'teid'; did you mean tied?
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = to_printable(problem)
        self.remedy = to_printable(remedy)
        super().__init__(f"{self.problem}; {self.remedy}" if remedy else self.problem)


def similar_names(name: object, supported: Iterable[str], count: int = 3) -> list[str]:
    """Return the supported names most like `name`, nearest first, ignoring case.

    >>> similar_names("Teid", ["untied", "tied", "factored"])
    ['tied', 'untied']
    """
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in supported}
    return [by_lower[close] for close in get_close_matches(str(name).lower(), by_lower, n=count)]


def nearest_name(name: object, supported: Iterable[str]) -> str | None:
    """Return the supported name most like `name`; None if all differ too much."""
    return next(iter(similar_names(name, supported, count=1)), None)


def did_you_mean(name: object, supported: Iterable[str]) -> str:
    """Return the beginning of a remedy: the nearest name; "" if all differ too much.

    >>> did_you_mean("teid", ["untied", "tied"])
    'did you mean tied? '
    """
    near = nearest_name(name, supported)
    if near is None:
        return ""
    return f"did you mean {near}? "


def suggest_choices(name: object, supported: Iterable[str], lead: str = "") -> str:
    """Return a remedy for an unsupported name: the nearest supported one, then all.

    The list of all names follows `lead`.

    >>> suggest_choices("teid", ["untied", "tied", "factored"])
    'did you mean tied? choose one of untied, tied, factored'
    """
    names = list(supported)
    hint = did_you_mean(name, names)
    if not lead and len(names) <= 2:
        return f"{hint}choose {' or '.join(names)}"
    return f"{hint}{lead or 'choose one of'} {', '.join(names)}"


class SpecError(TiewiseError, ValueError):
    """A boundary specification that cannot be parsed or does not fit the model.

    >>> import tiewise
    >>> tiewise.boundary.BoundarySpec.parse("teid")
    Traceback (most recent call last):
    tiewise.core.errors.SpecError: ...
    """


class DataError(TiewiseError, ValueError):
    """A text, tokenizer or split that cannot be used.

    >>> import tiewise
    >>> tiewise.compare("no-such-file.txt", out="run", quiet=True)
    Traceback (most recent call last):
    tiewise.core.errors.DataError: ...
    """


class RunError(TiewiseError, RuntimeError):
    """A run directory, setting or output path that cannot be used.

    >>> import tiewise
    >>> tiewise.compare(kind="no-such-kind", out="run", quiet=True)
    Traceback (most recent call last):
    tiewise.core.errors.RunError: ...
    """


class InstallError(TiewiseError, RuntimeError):
    """A model into which a boundary cannot be installed. `problem` names the reason.

    >>> import tiewise, torch
    >>> tiewise.installed(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    tiewise.core.errors.InstallError: ...
    """


class UnsupportedError(TiewiseError, RuntimeError):
    """A refused operation, whose result would be wrong or undefined.

    >>> import tiewise
    >>> tiewise.boundary.VocabularyShard(10)
    Traceback (most recent call last):
    tiewise.core.errors.UnsupportedError: ...
    """


def to_printable(text: str) -> str:
    """Return the text with a question mark for each unprintable character.

    Names in untrusted files can contain control sequences, which no terminal should receive.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


class CheckpointError(TiewiseError, ValueError):
    """A checkpoint that cannot be read, or must not be rewritten as requested.

    It may also concern one file of a checkpoint.

    >>> import tiewise
    >>> tiewise.check("no-such-folder")
    Traceback (most recent call last):
    tiewise.core.errors.CheckpointError: ...
    """


def require_path(call: str, source: object) -> None:
    """Raise CheckpointError if an argument is no path of a folder or file.

    `call` is the right call, such as `check(FOLDER)`; the message shows it.
    """
    if isinstance(source, str | os.PathLike):
        return
    function = call.partition("(")[0]
    if hasattr(source, "named_parameters"):
        problem = f"tiewise.{function} reads a folder, and this is a live {type(source).__name__}"
        raise CheckpointError(problem, f"save it first: model.save_pretrained(FOLDER), then tiewise.{call}")
    problem = f"tiewise.{function} reads a folder, not a value of type {type(source).__name__}"
    raise CheckpointError(problem, f"write tiewise.{call}")


class PlanError(TiewiseError, ValueError):
    """A model, size or choice that cannot be planned.

    >>> import tiewise
    >>> tiewise.plan("gtp2")
    Traceback (most recent call last):
    tiewise.core.errors.PlanError: ...
    """


class TiewiseWarning(UserWarning):
    """A condition that works but that the user should know about.

    The package's own tests raise it as an error.

    >>> import warnings, tiewise
    >>> warnings.simplefilter("error", tiewise.boundary.TiewiseWarning)  # stop at the first one
    """


def one_line_message(error: BaseException, limit: int = 160) -> str:
    """Return another library's error message on one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"


def non_finite_error(where: str) -> DataError:
    """Return the DataError for values that are NaN or infinite."""
    return DataError(f"{where} holds values that are no numbers", "`tiewise check --deep` names the rows")


class Interrupted(Exception):
    """A run that Ctrl-C stopped after a checkpoint was written.

    Args:
        out: the run's folder, which `--resume` continues.

    >>> print(Interrupted("runs/demo"))
    interrupted; everything so far is in runs/demo
    """

    def __init__(self, out: str) -> None:
        super().__init__(f"interrupted; everything so far is in {out}")
        self.out = out
