"""Outcome of loading with the installed transformers, as its class reports it."""

from __future__ import annotations

from dataclasses import replace

from tiewise.checkpoint.claims import architecture
from tiewise.checkpoint.class_load import ClassLoad
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.loader_columns import (
    BROKEN,
    ERROR,
    NEW_BIAS,
    NO_HEAD,
    RANDOM_HEAD,
    RANDOM_LAYERS,
    RANDOM_TABLE,
    RANDOM_TENSORS,
    TIED,
    UNTIED,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import from_column
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.untrusted import short

ELSEWHERE = "Layers under {} are not read, as the class looks for them under {}: all of them are drawn at random."


class ClassOutcome:
    """Outcome of one checkpoint by the answer of its class."""

    def __init__(self, facts: Facts, loader: Loader, flag: bool | None, load: ClassLoad) -> None:
        self.facts, self.flag, self.load = facts, flag, load
        class_name = short(architecture(facts.config) or "the class")
        source = f"{class_name} of the installed transformers, built without weights"
        self.loader = replace(loader, versions=load.version, source=source)

    def outcome(self) -> LoaderOutcome:
        """Return the outcome: a load error, else the most severe missing tensor."""
        outcome = self._load_error() or self._missing_tensors() or self._complete()
        return replace(outcome, predicted=False)

    def _load_error(self) -> LoaderOutcome | None:
        """Return an outcome if `from_pretrained` raises an error for a tensor."""
        for mismatch in self.load.mismatched:
            why = (
                f"{short(mismatch.name)} has the shape {list(mismatch.stored)}, and its class {list(mismatch.needed)}."
            )
            return outcome_of(self.loader, ERROR, why)
        for name in self.load.failed:
            return outcome_of(self.loader, ERROR, f"The stored tensors cannot be converted to {short(name)}.")
        return None

    def _missing_tensors(self) -> LoaderOutcome | None:
        """Return an outcome if a tensor is drawn at random; the two ends come first."""
        facts = self.facts
        at_the_ends = self._missing_at_the_ends()
        elsewhere = facts.missing_elsewhere
        if at_the_ends is None and not elsewhere:
            return None
        if at_the_ends is not None and at_the_ends.outcome != NEW_BIAS:
            return self._with_others(at_the_ends, elsewhere)
        if facts.foreign_layers is not None:
            layers = facts.class_ends.layers[0]
            return outcome_of(self.loader, RANDOM_LAYERS, ELSEWHERE.format(facts.foreign_layers, layers))
        if not elsewhere:
            return at_the_ends
        return outcome_of(self.loader, RANDOM_TENSORS, self._sentence_about(elsewhere))

    def _missing_at_the_ends(self) -> LoaderOutcome | None:
        """Return an outcome if a tensor of the two ends is drawn at random."""
        ends, missing = self.facts.class_ends, set(self.load.missing)
        head = () if ends.output is None else (f"{ends.output}.weight",)
        tables = [f"{module}.weight" for module in ends.inputs]
        for word, tensors, sentence in (
            (RANDOM_TABLE, tables, "{} is not stored, and nothing ties it: it is drawn at random."),
            (RANDOM_HEAD, head, "{} is not stored, and nothing ties it: the head is drawn at random."),
            (RANDOM_HEAD, ends.head, "The layers before the head are drawn at random: {} is not stored."),
            (NEW_BIAS, ends.biases, "The head's bias starts anew: {} is not stored."),
        ):
            absent = [name for name in tensors if name in missing]
            if absent:
                return outcome_of(self.loader, word, sentence.format(short(self.facts.saved_name(absent[0]))))
        return None

    def _with_others(self, outcome: LoaderOutcome, elsewhere: tuple[str, ...]) -> LoaderOutcome:
        """Return an outcome about an end with a sentence on the other missing tensors."""
        if not elsewhere:
            return outcome
        count = f"{len(elsewhere):,} tensor{'s' if len(elsewhere) > 1 else ''}"
        return replace(outcome, sentence=f"{outcome.sentence} Also random: {count} outside the embedding and head.")

    def _sentence_about(self, elsewhere: tuple[str, ...]) -> str:
        """Return a sentence about missing tensors if both ends are loaded."""
        count = f"{len(elsewhere):,} of {self.load.tensors:,} tensors"
        return f"{count} are drawn at random, outside the embedding and head: {names(elsewhere)}."

    def _complete(self) -> LoaderOutcome:
        """Return the outcome if every tensor is loaded or tied."""
        if self.facts.roles.headless:
            return outcome_of(self.loader, NO_HEAD)
        by_column = from_column(self.facts, self.loader, self.flag)
        if by_column.outcome not in BROKEN:
            return by_column
        is_tied = f"{self.facts.class_ends.output}.weight" in {*self.load.ties, *self.load.ties.values()}
        return outcome_of(self.loader, TIED if is_tied else UNTIED)
