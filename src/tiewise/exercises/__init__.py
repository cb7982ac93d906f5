"""Thirteen exercises on the two ends of a language model; the statements are the `.md` files beside this one.

`exercise.py` says what an exercise is and checks a reader's file, `answers.py` has them all: cases, right answers,
usual mistakes. `run.py` calls the reader's function on the cases, in a process of its own.
"""

from tiewise.exercises import answers
from tiewise.exercises.exercise import EXERCISES, check, of_number

__all__ = ["EXERCISES", "answers", "check", "of_number"]
