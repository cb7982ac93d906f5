"""The exercises: what a reader's function is called with, what it should return, and which mistakes are known.

An exercise is one decorated function of `answers.py`: the right answer to a case. Its name is what the reader's file
must define; below it stand the mistakes, functions that are wrong in a usual way, each with what to say about it. What
a reader's function returns is held against the right answer, then against the mistakes'.

    check(1, Path("mine.py"))  → None where every case is right, else where it is wrong and why
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
from typing import Any

import numpy as np

from tiewise.core.errors import RunError

STATEMENTS = Path(__file__).parent
ANSWER_CASES = "from tiewise.cli.exercises import checker; checker.answer_cases()"
SECONDS = 60  # for all cases of an exercise, the imports of the reader's file included
ARENA = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}  # threads reserve memory that they do not use
EQUAL = 1e-6  # fp32 may be used where it is enough

Answer = Callable[..., Any]
Cases = Callable[[], Sequence[tuple[Any, ...]]]


@dataclass
class Exercise:
    """One exercise; `answer` and the mistakes take a case's arguments."""

    number: int
    answer: Answer
    cases: Cases
    megabytes: int = 1024  # that a call may allocate
    needs: str = ""  # the extra that brings what the file needs beside numpy
    judge: Callable[..., str | None] | None = None  # takes a case and an answer, where many answers are right
    mistakes: list[tuple[str, Answer]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the reader's function is called."""
        return self.answer.__name__

    def text(self) -> tuple[str, str, str, str]:
        """(title, statement, hint, solution: code) as the file of the exercise has them."""
        whole = next(STATEMENTS.glob(f"{self.number:02}-*.md")).read_text(encoding="utf-8")
        head, _, rest = whole.partition("\n## Hint\n")
        hint, _, solution = rest.partition("\n## Solution\n")
        title, _, statement = head.partition("\n")
        return title.lstrip("# "), statement.strip(), hint.strip(), solution.strip()

    def fault(self, case: tuple[Any, ...], found: np.ndarray) -> str | None:
        """What is wrong with an answer to a case; None where it is right."""
        if self.judge is not None:
            return self.judge(*case, found)
        if _equal(found, self.answer(*case)):
            return None
        for why, mistaken in self.mistakes:
            if _equal(found, mistaken(*case)):
                return why
        right = np.asarray(self.answer(*case), float)
        if found.shape != right.shape:
            return f"its shape is {found.shape}, and should be {right.shape}"
        if not np.isfinite(found).all():
            return "it holds a number that is not finite"
        at = np.unravel_index(int(np.abs(found - right).argmax()), right.shape)
        where = f" at {tuple(map(int, at))}" if right.ndim else ""
        return f"it is {found[at]:.6g}{where}, and should be {right[at]:.6g}"


EXERCISES: dict[int, Exercise] = {}


def _equal(found: np.ndarray, answer: Any) -> bool:
    """Whether both are the same to fp32: each number of a tuple by itself, entries of an array beside its largest."""
    wanted = np.asarray(answer, float)
    beside = 0.0 if isinstance(answer, tuple) else float(np.abs(wanted).max(initial=0.0))
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=EQUAL, atol=EQUAL * beside)


def exercise(number: int, cases: Cases, **settings: Any) -> Callable[[Answer], Exercise]:
    """Make an exercise of the right answer."""

    def made(answer: Answer) -> Exercise:
        EXERCISES[number] = Exercise(number, answer, cases, **settings)
        return EXERCISES[number]

    return made


def of_number(number: int) -> Exercise:
    """Return an exercise; RunError where there is none of this number."""
    if number not in EXERCISES:
        raise RunError(f"no exercise {number}", f"choose 1 to {len(EXERCISES)}")
    return EXERCISES[number]


def check(number: int, file: Path, seconds: float = SECONDS) -> str | None:
    """Run the function of a reader's file on every case; return where it is wrong and why, None where it is right.

    Raises:
        RunError: no such exercise or file; the file cannot be run, takes too long or too much memory, or its function
            raises or returns no numbers.
    """
    asked = of_number(number)
    if not file.is_file():
        raise RunError(f"no file {file}", f"tiewise exercise {number} says what it should hold")
    command = [sys.executable, "-c", ANSWER_CASES, str(number), str(file)]
    try:
        held: dict[str, Any] = {"env": os.environ | ARENA, "stdin": subprocess.DEVNULL, "capture_output": True}
        done = subprocess.run(command, timeout=seconds, **held)
    except subprocess.TimeoutExpired:
        raise RunError(f"{file} took more than {seconds:g} s", "look for a loop that does not end") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"{file}: {said[-1]}", f"tiewise exercise {number} says what {asked.name} gets and returns")
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as found:
        for place, case in enumerate(asked.cases()):
            if wrong := asked.fault(case, found[str(place)]):
                return f"{asked.name}({', '.join(map(_shown, case))}): {wrong}"
    return None


def _shown(value: Any) -> str:
    small = not isinstance(value, np.ndarray) or value.size <= 6
    return " ".join(str(value).split()) if small else f"array {list(value.shape)}"


# the reader's own process


def limit(megabytes: int) -> None:
    """Let this process allocate so much more than it has; where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + (megabytes << 20),) * 2)


def answer_cases() -> None:
    """What the function of FILE returns for every case of exercise N (`-c … N FILE`), as .npz on stdout.

    What the file prints goes to stderr, whose last line says what went wrong. Memory is limited once the file is
    imported: libraries reserve far more than they use.
    """
    asked, file = EXERCISES[int(sys.argv[1])], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, str(file.resolve().parent))
    found: dict[str, np.ndarray] = {}
    try:
        function = runpy.run_path(str(file), run_name="answer").get(asked.name)
        if not callable(function):
            raise SystemExit(f"it defines no function {asked.name}")
        cases = asked.cases()
        limit(asked.megabytes)
        for place, case in enumerate(cases):
            answer = function(*(value.copy() if isinstance(value, np.ndarray) else value for value in case))
            if answer is None:
                raise SystemExit(f"{asked.name} returns nothing")
            found[str(place)] = np.asarray(answer, float)
    except ModuleNotFoundError as error:
        fix = f", which pip install 'tiewise[{asked.needs}]' brings" if asked.needs else ""
        raise SystemExit(f"it needs {error.name}{fix}") from None
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch has no error of its own for it
            raise SystemExit(f"{asked.name} needs more than {asked.megabytes} MB for one case") from None
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        line = error.lineno if isinstance(error, SyntaxError) else at and at.tb_lineno
        raise SystemExit(f"{type(error).__name__} in line {line}: {' '.join(str(error).split())}") from None
    held = io.BytesIO()
    np.savez(held, **found)  # type: ignore[arg-type]
    out.write(held.getvalue())
