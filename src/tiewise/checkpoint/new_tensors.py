"""Tensors that transformers initialises because no file stores them, in words.

A class draws a matrix at random. Norms, biases and counts of experts start with fixed numbers, such as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.class_load import ClassLoad


@dataclass(frozen=True)
class NewTensors:
    """Number of tensors that a class initialises, and how many of them at random."""

    count: int
    random: int  # those that start with random numbers
    of: int  # all tensors of the class

    @classmethod
    def among(cls, names: tuple[str, ...], load: ClassLoad) -> NewTensors:
        """Return the counts of these missing tensors of a load."""
        return cls(len(names), len(load.random.intersection(names)), load.tensors)

    @property
    def are_all_random(self) -> bool:
        """Return whether each of them starts with random numbers."""
        return self.random == self.count

    @property
    def share(self) -> str:
        """Return their number as a part of all tensors."""
        return f"{self.count:,} of {self.of:,} tensors"

    @property
    def _be(self) -> str:
        """Return the form of "be" that fits the number."""
        return "is" if self.count == 1 else "are"

    @property
    def _start(self) -> str:
        """Return the form of "start" that fits the number."""
        return "starts" if self.count == 1 else "start"

    def passive(self) -> str:
        """Return a sentence without final punctuation whose subject is the tensors."""
        if self.are_all_random:
            return f"{self.share} {self._be} drawn at random"
        if not self.random:
            return f"{self.share} {self._start} with fixed numbers"
        return f"{self.share} are newly initialised, {self.random:,} of them at random"

    def active(self, loader: str) -> str:
        """Return a sentence without final punctuation whose subject is the loader."""
        if self.are_all_random:
            return f"{loader} draws {self.share} at random"
        if not self.random:
            return f"{loader} starts {self.share} with fixed numbers"
        return f"{loader} newly initialises {self.share}, {self.random:,} of them at random"
