"""Input and output vocabularies that differ: which row of a table is which token at either end."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.core.errors import SpecError


@dataclass(frozen=True)
class Vocabularies:
    """V_in tokens may be read, V_out may be predicted; either may be the larger."""

    inputs: int  # V_in
    outputs: int  # V_out
    # [V_out]: for each output token the input token that shares its row in a tied table, or -1 where it has none and
    # gets a row of its own. None: output token j is input token j.
    output_to_input: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for count in (self.inputs, self.outputs):
            if not hasattr(count, "__index__") or count < 1:
                raise SpecError(f"a vocabulary of {count!r} tokens", "give a whole number, 1 or more")
        rows = self.output_to_input
        if rows is None:
            return
        if len(rows) != self.outputs:
            raise SpecError(f"an index map of {len(rows)} for {self.outputs} output tokens", "give one entry per token")
        if any(not -1 <= row < self.inputs for row in rows):
            raise SpecError(
                f"the index map leaves the input vocabulary of {self.inputs}", "use -1 for tokens of their own"
            )

    @classmethod
    def same(cls, vocab: int) -> Vocabularies:
        """One vocabulary at both ends."""
        return cls(vocab, vocab)

    def __str__(self) -> str:
        return str(self.inputs) if self.inputs == self.outputs else f"{self.inputs}->{self.outputs}"

    @property
    def read_and_predicted(self) -> int:
        """Input tokens that are output tokens too: in a tied table one row is both."""
        if self.output_to_input is None:
            return min(self.inputs, self.outputs)
        return len(set(self.output_to_input) - {-1})

    def rows(self, tied: bool) -> int:
        """Rows of the input table; a tied one also holds the output tokens that have no input token."""
        if not tied:
            return self.inputs
        if self.output_to_input is None:
            return max(self.inputs, self.outputs)
        return self.inputs + sum(row < 0 for row in self.output_to_input)

    def output_index(self) -> tuple[int, ...] | None:
        """V_out rows: the row of a tied table that each output token uses; None where that is the token itself."""
        if self.output_to_input is None:
            return None
        own = iter(range(self.inputs, self.rows(tied=True)))
        return tuple(row if row >= 0 else next(own) for row in self.output_to_input)
