"""Table of the commands, with their panels of the help and their modules.

A new command is one row of `COMMANDS`, or one file of `checkpoint/rewrite/verbs/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.core.errors import nearest_name, suggest_choices

VERBS = "rewrite"  # module that makes the commands of verbs
DECIDE = "Decide"
TRAINING = "Train"
INSIDE = "Look inside a model"
CHECKPOINTS = "Rewrite a checkpoint"
LEARN = "Learn"
HIDDEN = "Not in the help"
PANELS = (DECIDE, TRAINING, INSIDE, CHECKPOINTS, LEARN, HIDDEN)  # in the order of the help


@dataclass(frozen=True)
class Command:
    """A command, or one of a group."""

    name: str  # words that a user types, such as "vocab hot"
    panel: str
    module: str  # module of `tiewise.cli`
    answers: str  # its line in the help

    @property
    def words(self) -> list[str]:
        """The words of the name: one, or a group and a command of it."""
        return self.name.split()

    def function(self) -> Any:
        """Import the module of the command, and return its function."""
        if self.module == VERBS:
            from tiewise.cli.rewrite import command_of

            return command_of(self.words[-1])
        from importlib import import_module

        return getattr(import_module(f"tiewise.cli.{self.module}"), self.words[-1])


COMMANDS = (
    Command("plan", DECIDE, "planning", "How much does tying save in a model? --list has the public models."),
    Command("compare", DECIDE, "training", "Tied or untied: which is better on your text?"),
    Command("check", DECIDE, "check", "Is a checkpoint what its config says, and how does each loader read it?"),
    Command("train", TRAINING, "training", "Train one model with a boundary."),
    Command("sweep", TRAINING, "sweep", "Compare in every cell of a grid of settings."),
    Command("heal", TRAINING, "training", "Train back the loss of a rewritten model."),
    Command("inspect", INSIDE, "inspect", "What does tying change inside a model?"),
    Command("diff", INSIDE, "inspect", "Which rows of the tables changed between two checkpoints?"),
    Command("explore", INSIDE, "inspect", "Why does tying work? One interactive page, offline."),
    Command("vocab hot", CHECKPOINTS, "vocab", "Choose a draft model's tokens, and measure how much text they cover."),
    Command("exercise", LEARN, "exercise", "Thirteen exercises, with hints, solutions and a check of your answer."),
    Command("data show", HIDDEN, "data", "Print rows as an ALBERT is trained on them."),
    Command("kernels", HIDDEN, "training", "Report whether compiled kernels are used here."),
)
GROUPS = {  # commands that consist of others → their line in the help
    "vocab": "Change the vocabulary: resize, trim or transplant it, or choose hot tokens.",
    "adapter": "Make a PEFT adapter small, or merge it into its base.",
    "data": "Show training data.",
}
# commands of earlier versions → the words that replace them
RENAMED = {
    "models": "plan --list",
    "dedupe": "repair",
    "densify": "factor --undo",
    "resize": "vocab resize",
    "trim": "vocab trim",
    "transplant": "vocab transplant",
    "slim": "adapter slim",
    "merge": "adapter merge",
}


def commands() -> dict[str, Command]:
    """Return every command by its name, in the order of the help."""
    from tiewise.checkpoint.rewrite import listing

    verbs = [Command(verb.command, CHECKPOINTS, VERBS, verb.summary) for verb in listing.list_verbs()]
    by_first_word: dict[str, list[Command]] = {}
    for command in (*verbs, *COMMANDS):
        by_first_word.setdefault(command.words[0], []).append(command)
    groups = sorted(by_first_word.values(), key=lambda group: PANELS.index(group[0].panel))  # keeps the order within
    return {command.name: command for group in groups for command in group}


def find_command(name: str) -> Command | None:
    """Return the command of this name; None if there is none. Only verbs need a look at their files."""
    for command in COMMANDS:
        if command.name == name:
            return command
    return commands().get(name)


def unknown_command(words: list[str]) -> str:
    """Return the message for words that name no command: the new name, or the nearest one."""
    name = words[0]
    if name in GROUPS:
        members = {command.words[-1]: command.name for command in commands().values() if command.words[0] == name}
        hint = _hint(words[1], members) or f"; {suggest_choices(words[1], members.values())}"
        return f"no command {' '.join(words)!r}{hint}"
    targets = {command.words[-1]: command.name for command in commands().values()}
    targets |= {group: group for group in GROUPS} | RENAMED
    if name in RENAMED:
        return f"no command {name!r}; it is `tiewise {RENAMED[name]}` now"
    if name in targets:
        return f"no command {name!r}; it is `tiewise {targets[name]}`"
    return f"no command {name!r}{_hint(name, targets)}"


def _hint(word: str, targets: Mapping[str, str]) -> str:
    """Return the end of a message with the nearest command; "" if all differ too much."""
    near = nearest_name(word, targets)
    if near is None:
        return ""
    return f"; did you mean `tiewise {targets[near]}`?"
