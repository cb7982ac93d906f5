"""`tiewise`: the command line. Each command is one small file; nothing heavy is imported before a command runs."""

from __future__ import annotations

import atexit
import codecs
import gc
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from errno import ENAMETOOLONG
from importlib import import_module
from typing import Any

import typer

from tiewise.cli.commands import GROUPS, HIDDEN, Command, commands, find_command, unknown_command
from tiewise.core.errors import TiewiseError, did_you_mean, nearest_name
from tiewise.core.interrupts import is_caused_by_ctrl_c
from tiewise.core.writing_faults import writing_fault
from tiewise.core.written_options import for_terminal

gc.set_threshold(50_000)  # starting creates many objects and no garbage; collecting took a tenth of the time
UsageError: Any = typer.BadParameter.__base__  # typer exports it under no public name
COMPLETION = "_TIEWISE_COMPLETE"  # environment variable of a shell that completes a line
HELP = "Tie wisely: plan, compare, check and repair the two places where a language model touches its vocabulary."

# messages of the parser of arguments → tiewise's
CLICK_MESSAGES = {
    r"^Got unexpected extra argument\(s\) \((.*)\)$": r"unexpected argument: \1",
    r"^Option '(.*)' requires an argument$": r"\1 needs a value",
    r"^Option '(.*)' does not take a value$": r"\1 takes no value",
}

# reasons why a value does not fit its option → tiewise's
VALUE_MESSAGES = {
    r"is not a valid int(eger)?$": "is not a whole number",
    r"is not a valid float$": "is not a number",
    r"is not in the range x>=(.*)$": r"is too small; it must be \1 or more",
}

# ASCII text for letters that a terminal's encoding lacks; other letters lose their accent
STAND_INS = {
    **dict(zip("−–·×≈“”‘’␣▁∘│─", "--.x~\"\"''__o|-", strict=True)),
    **{"±": "+-", "≤": "<=", "≥": ">=", "→": "->", "←": "<-", "↵": "<-", "⏎": "<-", "…": "...", "‖": "||", "½": "1/2"},
    **{"²": "^2", "√": "sqrt", "∞": "inf", "Σ": "sum", "ε": "eps", "σ": "sigma", "λ": "lambda", "τ": "tau", "π": "pi"},
}


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line for some arguments: the command that they name, or all commands.

    A command is built with a parser for each of its options. For all commands this takes longer than most of them run.
    A shell that completes a part of a name needs all commands.

    Raises:
        UsageError: the arguments name no command.
    """
    app = _new_app("tiewise", HELP)
    app.callback()(_root)
    name = " ".join(_name_words(arguments))
    if not name or name in GROUPS:
        _add_listed(app)
        return app
    command = find_command(name)
    if command is None and COMPLETION in os.environ:
        _add_listed(app)
        return app
    if command is None:
        raise UsageError(unknown_command(name.split()))
    function = command.function()
    _add(app, command, function, function.__doc__)
    return app


def _name_words(arguments: Sequence[str]) -> list[str]:
    """Return the typed words of a command's name: one, or two for a group."""
    words = [argument for argument in arguments if argument and not argument.startswith("-")]
    return words[: 2 if words[:1] and words[0] in GROUPS else 1]


def click_command(name: str) -> Any:
    """Return the parser of a command, of which other programs read the options."""
    parser = typer.main.get_command(command_line(name.split()))
    for word in name.split():
        parser = parser.commands[word]  # type: ignore[attr-defined]
    return parser


def _new_app(name: str, help: str) -> typer.Typer:
    """Return a command line without commands."""
    return typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _add_listed(app: typer.Typer) -> None:
    """Add every command with its line of the help, to be listed and not called."""
    for command in commands().values():
        _add(app, command, _do_nothing, command.answers)


def _do_nothing() -> None:
    """Serve as the function of a command that is only listed."""


def _add(app: typer.Typer, command: Command, function: Callable[..., None], help: str | None) -> None:
    """Add one command to its panel of the help, or to its group."""
    is_hidden = command.panel == HIDDEN
    help = "\n\n".join(" ".join(part.split()) for part in (help or "").split("\n\n"))  # the help wraps lines itself
    *group, name = command.words
    if not group:
        app.command(name, help=help, rich_help_panel=command.panel, hidden=is_hidden)(function)
        return
    group_app = next((each.typer_instance for each in app.registered_groups if each.name == group[0]), None)
    if group_app is None:
        group_app = _new_app(group[0], GROUPS[group[0]])
        app.add_typer(group_app, name=group[0], rich_help_panel=command.panel, hidden=is_hidden)
    group_app.command(name, help=help)(function)


def _version(is_requested: bool) -> None:
    """Print the version and exit if `--version` was typed."""
    if is_requested:
        from tiewise.core import __version__

        typer.echo(f"tiewise {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Answer `--version`; everything else is a command."""


def main() -> None:
    """Run the command line.

    The exit code is 0 for success, 2 for a usage error or unreadable input, and 130 after Ctrl-C.
    """
    codecs.register_error("tiewise", _stand_in)
    _watch_stdout()
    for stream in (sys.stdout, sys.stderr):  # terminals of Windows, LANG=C and pipes may lack our letters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="tiewise")
    try:
        # an empty path would mean the current folder
        if any(re.fullmatch(r"(--(out|to)=)?", argument) for argument in sys.argv[1:]):
            raise typer.BadParameter("an argument is empty: is a variable unset?")
        with for_terminal():
            code = command_line(_arguments())(standalone_mode=False) or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        outcome = _outcome_of(error)
        if outcome is None:
            raise
        code, message = outcome
        if message:
            with suppress(OSError):  # if stderr cannot be written either, the exit code remains
                print("tiewise:", " ".join(message.split()), file=sys.stderr)
    _exit(code)


def _outcome_of(error: BaseException) -> tuple[int, str] | None:
    """Return an error's exit code and the line to print; None for a defect of tiewise.

    The line is "" if nothing is to be printed.
    """
    stdout_error = _stdout_error()
    if is_caused_by_ctrl_c(error):
        return 130, ""
    if isinstance(stdout_error, BrokenPipeError):
        return 1, ""
    if stdout_error is not None:
        remedy = writing_fault(stdout_error).remedy("send the output elsewhere")
        return 2, f"cannot write to stdout: {stdout_error.strerror}; {remedy}"
    if isinstance(error, TiewiseError):
        return 2, str(error)
    if isinstance(error, UsageError):
        return 2, _usage_line(error)
    if isinstance(error, OSError) and error.errno == ENAMETOOLONG:  # a text was given instead of a name
        return 2, f"{str(error.filename)[:40]}…: {error.strerror}; check the path"
    return None


def _usage_line(error: Any) -> str:
    """Return the line of a usage error.

    It is "" if no command was named, because the help is printed then.
    """
    if not error.format_message():
        return ""
    usage = _usage(error)
    separator = " " if usage.endswith("?") else "; "
    command = error.ctx.command_path if error.ctx else " ".join(["tiewise", *_named_words()])
    return f"{usage}{separator}see {command} --help"


def _named_words() -> list[str]:
    """Return the typed words that name a command or a group; none if they do not."""
    words = _name_words(sys.argv[1:])
    if find_command(" ".join(words)):
        return words
    return [word for word in words[:1] if word in GROUPS]


def _exit(code: int) -> None:
    """End the process."""
    ranks = sys.modules.get("tiewise.core.ranks")
    if "RANK" not in os.environ or ranks is None or not ranks.is_launched():
        sys.exit(code)
    # One of several processes exits without shutting the interpreter down. Threads of the process group are still
    # alive, because the wrapped model references the group. They may free a tensor during the shutdown, which aborts
    # the process (https://github.com/pytorch/pytorch/pull/179291).
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _WatchedFile(io.FileIO):
    """A file that stores the error of its last failed write."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, and store an error before it is raised."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _watch_stdout() -> None:
    """Replace the process's stdout by one that stores its errors.

    So they can be distinguished from the errors of other files.
    """
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # stdout of a test or a notebook
    buffered = stream.buffer
    if not isinstance(getattr(buffered, "raw", buffered), io.FileIO):
        return  # a console of Windows
    raw = _WatchedFile(stream.fileno(), "wb", closefd=False)
    buffer = raw if isinstance(buffered, io.RawIOBase) else io.BufferedWriter(raw)
    how: Any = {"encoding": stream.encoding, "errors": stream.errors}
    how |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    sys.stdout = io.TextIOWrapper(buffer, **how)


def _stdout_error() -> OSError | None:
    """Return the error of stdout, or None.

    After an error, further output to stdout is discarded.
    """
    with suppress(OSError):  # `_WatchedFile` stores it
        sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, _WatchedFile) or raw.error is None:
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return raw.error


def _usage(error: Any) -> str:
    """Return the message of a usage error, with the nearest option to an unknown one."""
    kind, parameter = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _unknown_option(error)
    if kind == "MissingParameter" and parameter is not None:
        return f"{_written_parameter(parameter)} is missing"
    if parameter is not None:
        return f"{_written_parameter(parameter)}: {_plain_reason(error.message)}"
    if kind == "BadParameter":
        return str(error.message)
    message = str(error.format_message()).rstrip(".")
    for pattern, plain in CLICK_MESSAGES.items():
        message = re.sub(pattern, plain, message)
    return message


def _plain_reason(reason: str) -> str:
    """Return why a value does not fit its option, in plain words."""
    reason = reason.rstrip(".")
    for pattern, plain in VALUE_MESSAGES.items():
        reason = re.sub(pattern, plain, reason)
    return reason


def _written_parameter(parameter: Any) -> str:
    """Return an option or argument as the help writes it."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name).strip("[]{}")


def _unknown_option(error: Any) -> str:
    """Return the message of an unknown option, with the nearest option or setting."""
    option, spellings = error.option_name, list[str]()
    for parameter in error.ctx.command.params:
        spellings += [*parameter.opts, *parameter.secondary_opts]
    hint = did_you_mean(option, [name for name in spellings if name.startswith("--")])
    if hint:
        return f"no option {option}; {hint.rstrip()}"
    if "--set" in spellings:
        from tiewise.training.settings import Settings

        setting = nearest_name(option.lstrip("-").replace("-", "_"), [field.name for field in fields(Settings)])
        if setting is not None:
            return f"no option {option}; did you mean --set {setting}=VALUE?"
    return f"no option {option}"


def _arguments() -> list[str]:
    """Return the arguments of the command line, or of the line that a shell completes."""
    if COMPLETION not in os.environ:
        return sys.argv[1:]
    # typer calls this itself only if it may add its two options for completion to the help
    import_module("typer.completion").completion_init()
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return words.split()[1:]


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for letters that an encoding lacks; a question mark if there is none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(map(_ascii_for, lacking)), error.end


def _ascii_for(letter: str) -> str:
    """Return ASCII for one letter."""
    without_accent = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return STAND_INS.get(letter) or without_accent or "?"
