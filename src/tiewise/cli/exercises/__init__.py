"""Thirteen exercises on the two ends of a language model; the statements are the `.md` files beside this one.

`checker.py` says what an exercise is and checks a reader's file, whose function it calls in a process of its own;
`answers.py` has them all: cases, right answers, usual mistakes.
"""

from tiewise.cli.exercises import answers
from tiewise.cli.exercises.checker import EXERCISES, check, of_number

__all__ = ["EXERCISES", "answers", "check", "of_number"]
