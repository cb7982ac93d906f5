"""Registry of the verbs that rewrite a checkpoint.

A verb is a function in the file of its name in `verbs/`:

    @verb(example="tied --by=us", keeps_logits="all")
    def sign(facts: Facts, *, by: Annotated[str, Option("The maker's name.", metavar="NAME")], force: bool = False):
        '''Write the maker's name into config.json.

        Args:
            by: name of the maker.
        '''
        return Change(config={"made_by": by})

This registry feeds the command line, the public names, their stubs, the check that loads the result, and the tests.
The first paragraph of the docstring is the help of the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, overload

from tiewise.checkpoint.rewrite.change import Change
from tiewise.checkpoint.rewrite.engine import AnyPath, MakeChange, Receipt, rewrite
from tiewise.checkpoint.rewrite.listing import LAST, VERBS_PACKAGE, paragraph, verb_names
from tiewise.core.errors import CheckpointError, require_path

RESULT = "The result is a new folder: source untouched, only changed files written, checked before it appears."
LOGITS_DIFFER = "they are meant to change"
COMMON = """

Args:
    source: checkpoint folder, or one `.safetensors` file; it is only read.
    to: path of the new folder; its parent must exist.{options}
    dry_run: plan and measure everything, but write nothing.
    force: proceed although the change alters the model's function or breaks a rule of `check`; the result
        records it.

Returns:
    A `Receipt`: the changed tensors and files, and how far logits and input rows move.

Raises:
    NothingToDo: the source is already as the verb would make it.
    CheckpointError: the source cannot be read, the verb refuses it, or `to` cannot be used. Nothing is left at
        `to` or next to it.
"""
ENGINE = ("facts", "source", "to", "dry_run", "force")  # parameters of every verb; all others are its options

Run = Callable[..., Receipt]
KeptLogits = Literal["all", "first", "same bytes"]


@dataclass(frozen=True)
class Option:
    """An option of a verb on the command line: metadata of the parameter's `Annotated` type.

    A parameter without this metadata is an argument in Python only.
    """

    help: str
    metavar: str | None = None  # name of the value in the help; None for the name of its type
    required: bool = False  # True if the command line requires it although Python has a default


CHECKPOINT = Option("Checkpoint folder or .safetensors file. It is only read.", metavar="PATH")
ADAPTER = Option("Folder of a PEFT adapter. It is only read.", metavar="ADAPTER")


@dataclass(frozen=True)
class CommandOption:
    """One option of a verb, with all that the command line needs."""

    name: str  # name of the parameter
    type: Any  # type of the parameter, without `Annotated`
    default: Any  # `inspect.Parameter.empty` if there is no default
    described: Option


@dataclass(frozen=True)
class Verb:
    """One verb: its function, its help, and its promises about the result."""

    name: str
    run: Run  # function that users call: run(source, to, *, options, dry_run, force)
    options_from: Callable[..., Any]  # function whose parameters are the options
    order: int  # position of the command in the help
    group: str  # command that it is a part of, such as "vocab"; "" for none
    details: str  # second paragraph of the command's help
    source: Option  # first argument on the command line
    of_adapter: bool  # True if source and result are folders of adapters
    keeps_logits: KeptLogits | None  # rows whose logits stay the same; None for no rows
    logits_differ: str  # reason why logits are not compared
    measures_text: bool  # True if the command takes `--text` and measures the cost of the change on it
    example: str  # command line without the verb and `--to`; `verb_examples.py` of the tests creates its folders

    @property
    def command(self) -> str:
        """Words that a user types, such as "vocab resize"."""
        return f"{self.group} {self.name}".strip()

    @property
    def help(self) -> str:
        """Help text of the command."""
        summary = paragraph(inspect.getdoc(self.run) or "")
        if not self.details:
            return summary
        return f"{summary}\n\n{self.details}"

    def options(self) -> list[CommandOption]:
        """Return the options of the command line, in the order of the parameters."""
        hints = get_type_hints(self.options_from, include_extras=True)
        options = []
        for name, parameter in inspect.signature(self.options_from).parameters.items():
            is_described = get_origin(hints.get(name)) is Annotated
            if name not in ENGINE and is_described:
                plain, *metadata = get_args(hints[name])
                described = next(item for item in metadata if isinstance(item, Option))
                options.append(CommandOption(name, plain, parameter.default, described))
        return options


_REGISTERED: dict[str, Verb] = {}


def registered(name: str) -> Verb | None:
    """Return the verb of this name if its file is loaded, else None."""
    return _REGISTERED.get(name)


def find(name: str) -> Verb:
    """Load a verb from the folder `verbs/` by its name."""
    import_module(f"{VERBS_PACKAGE}.{name}")
    return _REGISTERED[name]


def verbs() -> dict[str, Verb]:
    """Load every verb, and return {name: verb} in the order of the help."""
    in_help_order = sorted(map(find, verb_names()), key=lambda verb: (verb.order, verb.name))
    return {verb.name: verb for verb in in_help_order}


@overload
def verb(make: Callable[..., Change | Receipt], /) -> Run:
    """Register a function as a verb with default properties."""


@overload
def verb(
    *,
    order: int = LAST,
    group: str = "",
    details: str = RESULT,
    source: Option = CHECKPOINT,
    of_adapter: bool = False,
    live: str = "",
    keeps_logits: KeptLogits | None = None,
    logits_differ: str = LOGITS_DIFFER,
    measures_text: bool = False,
    example: str = "",
) -> Callable[[Callable[..., Change | Receipt]], Run]:
    """Return a decorator that registers a function as a verb with these properties."""


def verb(
    make: Callable[..., Any] | None = None,
    /,
    *,
    order: int = LAST,
    group: str = "",
    details: str = RESULT,
    source: Option = CHECKPOINT,
    of_adapter: bool = False,
    live: str = "",
    keeps_logits: KeptLogits | None = None,
    logits_differ: str = LOGITS_DIFFER,
    measures_text: bool = False,
    example: str = "",
) -> Run | Callable[[Callable[..., Any]], Run]:
    """Turn a function from facts to a `Change` into a verb, and register it.

    The decorated function has the signature `name(facts, *, options, force)`. Users call the result as
    `name(source, to, *, options, dry_run, force)`. The docstring describes the verb and, under `Args:`, its options. A
    function that already has the parameters `source` and `to` is registered unchanged.

    Args:
        live: counterpart for a model in memory. If a caller passes a model, the error names it. `Verb` explains the
            other arguments.
    """

    def register(make: Callable[..., Any]) -> Run:
        """Register one function as a verb."""
        run: Run = make
        if "to" in inspect.signature(make).parameters:
            make.__dict__["__signature__"] = _plain_signature(make)
        else:
            run = make_runner(make, live=live, of_adapter=of_adapter)
        _REGISTERED[make.__name__] = Verb(
            name=make.__name__,
            run=run,
            options_from=make,
            order=order,
            group=group,
            details=details,
            source=source,
            of_adapter=of_adapter,
            keeps_logits=keeps_logits,
            logits_differ=logits_differ,
            measures_text=measures_text,
            example=example,
        )
        return run

    if make is None:
        return register
    return register(make)


def make_runner(make: MakeChange, *, live: str = "", of_adapter: bool = False) -> Run:
    """Return the function with which users call a verb.

    It calls `rewrite`, which carries out the change that `make` describes.
    """

    @wraps(make, assigned=("__module__", "__name__", "__qualname__"))
    def run(
        source: AnyPath, to: AnyPath | None = None, *, dry_run: bool = False, force: bool = False, **options: Any
    ) -> Receipt:
        """Refuse a live model and what is no path, and rewrite a folder."""
        if hasattr(source, "named_parameters"):
            problem = f"{make.__name__} rewrites a folder, and this is a live {type(source).__name__}"
            remedy = "save it first, with save_pretrained"
            if live:
                remedy = f"use {live}, or {remedy}"
            raise CheckpointError(problem, remedy)
        require_path(f"{make.__name__}(FOLDER, NEW_FOLDER)", source)
        if to is None:  # optional in the signature, so that a live model gets the error above first
            raise TypeError(f"{make.__name__}() needs `to`, the folder to make")
        require_path(f"{make.__name__}(FOLDER, NEW_FOLDER)", to)
        return rewrite(source, to, make, of_adapter=of_adapter, dry_run=dry_run, force=force, **options)

    run.__dict__["__signature__"] = _signature(make)
    # without indentation, which Python keeps in docstrings up to 3.12 and removes from 3.13 on
    summary, _, described = inspect.cleandoc(make.__doc__ or "").partition("\n\nArgs:")
    run.__doc__ = summary.rstrip() + COMMON.format(options=described.rstrip())
    return run


def _signature(make: MakeChange) -> inspect.Signature:
    """Return the signature for users: `source`, `to`, the verb's options, `dry_run` and `force`."""
    parameters = _plain_signature(make).parameters
    options = [parameter for name, parameter in parameters.items() if name not in ENGINE]
    plain, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    places = [inspect.Parameter(name, plain, annotation=AnyPath) for name in ("source", "to")]
    flags = [inspect.Parameter(name, keyword, default=False, annotation=bool) for name in ("dry_run", "force")]
    return inspect.Signature([*places, *options, *flags], return_annotation=Receipt)


def _plain_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature with evaluated types and without `Option` metadata."""
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=hints.get(name, parameter.empty))
        for name, parameter in signature.parameters.items()
    ]
    return signature.replace(parameters=parameters, return_annotation=hints.get("return", signature.empty))
