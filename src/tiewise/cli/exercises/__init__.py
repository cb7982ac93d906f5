"""Thirteen exercises on the input embedding and the output head of a language model.

The statements are the `.md` files of this folder. `checker.py` defines an exercise and checks a reader's file in a
separate process. `answers.py` has the cases, right answers and usual mistakes of all exercises.
"""

from tiewise.cli.exercises import answers
from tiewise.cli.exercises.checker import EXERCISES, check, of_number

__all__ = ["EXERCISES", "answers", "check", "of_number"]
