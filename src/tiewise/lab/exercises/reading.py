"""Read an exercise, or have an answer checked: `tiewise.lab.exercise`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from tiewise.core.errors import RunError
from tiewise.core.result import PrintedResult, Row
from tiewise.lab.exercises import EXERCISES, find_fault, of_number
from tiewise.lab.exercises.checker import ExerciseText

NOT_PRINTED: list[Row] = []  # the answer contains every row


@dataclass(frozen=True, repr=False)
class Exercises(PrintedResult):
    """One exercise with its statement, or the list of all.

    Attributes:
        texts: title, statement, hint and solution of each exercise, by its number.
        hint: whether the printed text of one exercise contains the hint.
        solution: whether it contains a solution.

    >>> import tiewise
    >>> tiewise.lab.exercise().texts[1].title
    'What tying saves'
    """

    texts: dict[int, ExerciseText]
    hint: bool = False
    solution: bool = False

    def answer_text(self) -> str:
        """Return the text of one exercise in Markdown, or the titles of all."""
        if len(self.texts) == 1:
            return self._one_text()
        return "\n".join(f"{number:2}  {text.title}" for number, text in self.texts.items())

    def _one_text(self) -> str:
        """Return title and statement of the only exercise, with the parts that the call asks for."""
        (text,) = self.texts.values()
        parts = [f"# {text.title}", text.statement]
        if self.hint:
            parts += ["## Hint", text.hint]
        if self.solution:
            parts += ["## Solution", text.solution]
        return "\n\n".join(parts)

    def record(self) -> dict[str, Any]:
        """Return number, title, statement, hint and solution of each exercise."""
        return {"exercises": self.rows()}

    def rows(self) -> list[Row]:
        """Return a row for each exercise: number, title, statement, hint and solution."""
        return [{"number": number, **text._asdict()} for number, text in self.texts.items()]

    def summary_rows(self) -> list[Row]:
        """Return no row, because the answer contains all."""
        return NOT_PRINTED


@dataclass(frozen=True, repr=False)
class CheckedAnswer(PrintedResult):
    """Result of a check of a reader's answer.

    Attributes:
        exercise: number of the exercise.
        wrong: the first wrong case and its reason; None if every case is right.

    >>> import tiewise
    >>> from pathlib import Path
    >>> _ = Path("mine.py").write_text("def saved(v, d, layers): return v * d, 0.5")
    >>> tiewise.lab.exercise(1, "mine.py").right
    False
    """

    exercise: int
    wrong: str | None

    @property
    def right(self) -> bool:
        """True if every case is right."""
        return self.wrong is None

    def answer_text(self) -> str:
        """Return "right", or the wrong case and its reason."""
        return "right" if self.wrong is None else f"wrong: {self.wrong}"

    def record(self) -> dict[str, Any]:
        """Return the number of the exercise, whether the answer is right, and what is wrong."""
        return {"exercise": self.exercise, "right": self.right, "wrong": self.wrong}

    def rows(self) -> list[Row]:
        """Return the record as the only row."""
        return [self.record()]

    def summary_rows(self) -> list[Row]:
        """Return no row, because the answer contains all."""
        return NOT_PRINTED


@overload
def exercise(number: int | None = None, file: None = None, *, hint: bool = False, solution: bool = False) -> Exercises:
    """Return one exercise, or all."""


@overload
def exercise(number: int, file: str | os.PathLike[str], *, hint: bool = False, solution: bool = False) -> CheckedAnswer:
    """Return the check of an answer."""


def exercise(
    number: int | None = None,
    file: str | os.PathLike[str] | None = None,
    *,
    hint: bool = False,
    solution: bool = False,
) -> Exercises | CheckedAnswer:
    """Read an exercise, or have your answer checked.

    The check runs the file in a separate process with limits of time and memory.

    Args:
        number: number of the exercise; None lists all.
        file: Python file with your answer. It defines the function that the exercise names.
        hint: print the hint too.
        solution: print a solution too.

    Returns:
        Without a file: the exercise, whose `print` shows its statement. With a file: whether the answer is right, and
        otherwise the wrong case and the reason.

    Raises:
        RunError: there is no such exercise or file, or the file cannot be run within the limits.

    >>> from tiewise.lab import exercise
    >>> print(exercise(1))
    # What tying saves
    ...
    >>> from pathlib import Path
    >>> _ = Path("mine.py").write_text("def saved(v, d, layers): return v * d, v / (2 * v + 12 * layers * d)")
    >>> exercise(1, "mine.py")
    right
    """
    if file is not None:
        return _checked(number, file)
    if number is None:
        numbers = sorted(EXERCISES)
    else:
        numbers = [of_number(number).number]
    return Exercises({each: EXERCISES[each].text() for each in numbers}, hint, solution)


def _checked(number: int | None, file: str | os.PathLike[str]) -> CheckedAnswer:
    """Return the check of an answer."""
    answered = of_number(number)
    if not isinstance(file, str | os.PathLike):
        problem = f"tiewise.lab.exercise checks a file, not a value of type {type(file).__name__}"
        raise RunError(problem, f'save your function in a file: tiewise.lab.exercise({number}, "mine.py")')
    return CheckedAnswer(answered.number, find_fault(answered.number, Path(file)))
