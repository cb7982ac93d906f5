"""Exercises: the arguments of a reader's function, its right results, and usual mistakes.

An exercise is one decorated function of `answers.py`, which returns the right answer to a case. The reader's file must
define a function of the same name. The functions below it are usual mistakes, each with an explanation. The result of
the reader's function is compared with the right answer, then with the mistakes' results.

    find_fault(1, Path("mine.py"))  → None if every case is right, else the wrong case and the reason
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiewise.core.errors import RunError

STATEMENTS = Path(__file__).parent
ANSWER_CASES = "from tiewise.lab.exercises import checker; checker.answer_cases()"
SECONDS = 60  # limit for all cases of an exercise, with the imports of the reader's file
ARENA = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}  # threads reserve memory that they do not use
EQUAL = 1e-6  # relative tolerance; an answer may compute in fp32

Array = np.ndarray[Any, Any]
Answer = Callable[..., Any]
Cases = Callable[[], Sequence[tuple[Any, ...]]]


class ExerciseText(NamedTuple):
    """The text of an exercise, in Markdown."""

    title: str
    statement: str
    hint: str
    solution: str


@dataclass
class Exercise:
    """One exercise; `answer` and the mistakes take a case's arguments."""

    number: int
    answer: Answer
    cases: Cases
    megabytes: int = 1024  # limit of what a call may allocate
    needs: str = ""  # the extra with the packages that the file needs in addition to numpy
    judge: Callable[..., str | None] | None = None  # takes a case and an answer, if several answers are right
    mistakes: list[tuple[str, Answer]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the reader's function."""
        return self.answer.__name__

    def text(self) -> ExerciseText:
        """Return the text from the exercise's file."""
        content = next(STATEMENTS.glob(f"{self.number:02}-*.md")).read_text(encoding="utf-8")
        head, _, rest = content.partition("\n## Hint\n")
        hint, _, solution = rest.partition("\n## Solution\n")
        title, _, statement = head.partition("\n")
        return ExerciseText(title.lstrip("# "), statement.strip(), hint.strip(), solution.strip())

    def mistake(self, why: str) -> Callable[[Answer], Answer]:
        """Register a function as a usual mistake; `why` explains it to the reader."""

        def register(mistaken: Answer) -> Answer:
            """Add the function to the mistakes."""
            self.mistakes.append((why, mistaken))
            return mistaken

        return register

    def fault(self, case: tuple[Any, ...], answer: Array) -> str | None:
        """Return what is wrong with an answer to a case; None if it is right."""
        if self.judge is not None:
            return self.judge(*case, answer)
        right = self.answer(*case)
        if _equal(answer, right):
            return None
        for why, mistaken in self.mistakes:
            if _equal(answer, mistaken(*case)):
                return why
        return _difference(answer, np.asarray(right, float))


EXERCISES: dict[int, Exercise] = {}


def _equal(answer: Array, expected: Any) -> bool:
    """Return whether two answers are equal to fp32 precision.

    The tolerance is relative: to each number of a tuple, or to the largest entry of an array.
    """
    right = np.asarray(expected, float)
    scale = 0.0 if isinstance(expected, tuple) else float(np.abs(right).max(initial=0.0))
    return answer.shape == right.shape and np.allclose(answer, right, rtol=EQUAL, atol=EQUAL * scale)


def _difference(answer: Array, right: Array) -> str:
    """Return how an answer differs from the right one."""
    if answer.shape != right.shape:
        return f"it returned {_shape_in_words(answer.shape)}; return {_shape_in_words(right.shape)}"
    if not np.isfinite(answer).all():
        return "it holds a number that is not finite"
    index = np.unravel_index(int(np.abs(answer - right).argmax()), right.shape)
    where = f" at {tuple(map(int, index))}" if right.ndim else ""
    return f"it is {answer[index]:.6g}{where}, and should be {right[index]:.6g}"


def _shape_in_words(shape: tuple[int, ...]) -> str:
    """Return a shape as text: one number, 2 numbers, or an array of shape (2, 3)."""
    if not shape:
        return "one number"
    if len(shape) == 1:
        return f"{shape[0]} numbers"
    return f"an array of shape {shape}"


def right_answer(number: int, cases: Cases, **settings: Any) -> Callable[[Answer], Exercise]:
    """Register the decorated function as the right answer of a new exercise."""

    def register(answer: Answer) -> Exercise:
        """Add the exercise."""
        EXERCISES[number] = Exercise(number, answer, cases, **settings)
        return EXERCISES[number]

    return register


def of_number(number: object) -> Exercise:
    """Return the exercise of a number. Raises RunError if there is none."""
    if not isinstance(number, int):
        problem = f"the number of an exercise must be an int, not a value of type {type(number).__name__}"
        raise RunError(problem, f"choose 1 to {len(EXERCISES)}")
    if number not in EXERCISES:
        raise RunError(f"no exercise {number}", f"choose 1 to {len(EXERCISES)}")
    return EXERCISES[number]


def find_fault(number: int, file: Path, seconds: float = SECONDS) -> str | None:
    """Run the function of a reader's file on every case; return the first fault.

    The result is None if all cases are right.

    Raises:
        RunError: no such exercise or file; the file cannot be run, takes too long or too much memory, or its function
            raises or returns no numbers.
    """
    exercise = of_number(number)
    if not file.is_file():
        raise RunError(f"no file {file}", f"tiewise exercise {number} says what it should hold")
    command = [sys.executable, "-c", ANSWER_CASES, str(number), str(file)]
    environment = os.environ | ARENA
    try:
        child = subprocess.run(
            command, timeout=seconds, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{file} took more than {seconds:g} s", "look for a loop that does not end") from None
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
        raise RunError(f"{file}: {lines[-1]}", f"tiewise exercise {number} says what {exercise.name} gets and returns")
    with np.load(io.BytesIO(child.stdout), allow_pickle=False) as answers:
        for index, case in enumerate(exercise.cases()):
            fault = exercise.fault(case, answers[str(index)])
            if fault is not None:
                return f"{exercise.name}({', '.join(map(_argument, case))}): {fault}"
    return None


def _argument(value: Any) -> str:
    """Return an argument as a message shows it: a large array by its shape."""
    if isinstance(value, np.ndarray) and value.size > 6:
        return f"array {list(value.shape)}"
    return " ".join(str(value).split())


# the reader's own process


def limit(megabytes: int) -> None:
    """Limit how much more memory this process may allocate, if the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        allocated = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (allocated + (megabytes << 20),) * 2)


def answer_cases() -> None:
    """Write the answers of FILE's function to every case of exercise N to stdout, as .npz.

    It is the child process of `check`, started with `-c … N FILE`. Output of the file goes to stderr. If the child
    fails, the last line of stderr says why. `_answers` limits memory after the import of the file, because libraries
    reserve far more than they use.
    """
    exercise, file = EXERCISES[int(sys.argv[1])], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "wb")  # the real stdout, for the answers alone
    os.dup2(2, 1)  # from here on, prints of the file go to stderr
    sys.path.insert(0, str(file.resolve().parent))
    try:
        answers = _answers(exercise, file)
    except ModuleNotFoundError as error:
        remedy = f", which pip install 'tiewise[{exercise.needs}]' brings" if exercise.needs else ""
        raise SystemExit(f"it needs {error.name}{remedy}") from None
    except Exception as error:
        raise SystemExit(_reason(error, exercise)) from None
    buffer = io.BytesIO()
    np.savez(buffer, **answers)  # type: ignore[arg-type]
    out.write(buffer.getvalue())


def _answers(exercise: Exercise, file: Path) -> dict[str, Array]:
    """Return the answer of the file's function to each case, by the case's index."""
    function = runpy.run_path(str(file), run_name="answer").get(exercise.name)
    if not callable(function):
        raise SystemExit(f"it defines no function {exercise.name}")
    cases = exercise.cases()
    limit(exercise.megabytes)
    answers = {}
    for index, case in enumerate(cases):
        arguments = [value.copy() if isinstance(value, np.ndarray) else value for value in case]
        answer = function(*arguments)
        if answer is None:
            raise SystemExit(f"{exercise.name} returns nothing")
        answers[str(index)] = np.asarray(answer, float)
    return answers


def _reason(error: Exception, exercise: Exercise) -> str:
    """Return what an error of the file says, with its line."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch has no separate error for it
        return f"{exercise.name} needs more than {exercise.megabytes} MB for one case"
    return f"{type(error).__name__} in line {_line_of(error)}: {' '.join(str(error).split())}"


def _line_of(error: Exception) -> int | None:
    """Return the line at which an error was raised, or the line of a syntax error."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return None if frame is None else frame.tb_lineno
