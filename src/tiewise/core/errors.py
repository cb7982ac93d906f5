"""What can go wrong, said so that a person can act on it.

Every error that a user can cause is a `TiewiseError`: one line that names what is wrong and where, then the way
out. The command line prints exactly that line and exits 2; nothing below it needs to format anything.
"""

from __future__ import annotations


class TiewiseError(Exception):
    """What is wrong and where (`what`), and the way out (`fix`)."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix


class SpecError(TiewiseError, ValueError):
    """A boundary specification that cannot be parsed, or that this model cannot have."""


class DataError(TiewiseError, ValueError):
    """Text, a tokenizer or a split that cannot be used."""


class RunError(TiewiseError, RuntimeError):
    """A run directory, a setting or an output place that cannot be used."""


class InstallError(TiewiseError, RuntimeError):
    """A model into which a boundary cannot be installed; `what` says the reason that was found."""


class UnsupportedError(TiewiseError, RuntimeError):
    """An operation that is refused because its result would be wrong or undefined."""


def printable(text: str) -> str:
    """Return text with a question mark for whatever no terminal should be sent: names in files come from strangers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class CheckpointError(TiewiseError, ValueError):
    """A checkpoint, or a file of one, that cannot be read or must not be rewritten as asked; printable throughout."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(printable(what), printable(fix))


class PlanError(TiewiseError, ValueError):
    """A model, size or choice that cannot be planned."""


class TiewiseWarning(UserWarning):
    """Something that works but that the user should know; raised as an error in this package's own tests."""


def one_line(error: BaseException, most: int = 160) -> str:
    """Return what another library's error says on one line of at most `most` letters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "…"


def no_numbers(where: str) -> DataError:
    """What to raise where values are NaN or infinite."""
    return DataError(f"{where} holds values that are no numbers", "`tiewise check --deep` names the rows")


class Interrupted(Exception):
    """Ctrl-C came; a checkpoint is on disk. `out` is the run that `--resume` continues."""

    def __init__(self, out: str) -> None:
        super().__init__(f"interrupted; everything so far is in {out}")
        self.out = out
