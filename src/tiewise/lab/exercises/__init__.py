"""Thirteen exercises on the input embedding and the output head of a language model.

The statements are the `.md` files of this folder. `checker.py` defines an exercise and checks a reader's file in a
separate process. `answers.py` has the cases, right answers and usual mistakes of all exercises. `reading.py` is
`tiewise.lab.exercise`.
"""

from tiewise.lab.exercises import answers
from tiewise.lab.exercises.checker import EXERCISES, find_fault, of_number

__all__ = ["EXERCISES", "answers", "find_fault", "of_number"]
