"""Outcome of loading with the installed transformers, as its class reports it."""

from __future__ import annotations

from dataclasses import replace

from tiewise.checkpoint.claims import architecture
from tiewise.checkpoint.class_load import ClassLoad
from tiewise.checkpoint.class_ties import TiedTensors, tie_loaded
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.loader_columns import (
    DEPENDS,
    ERROR,
    NEW_BIAS,
    NEW_TENSORS,
    NO_HEAD,
    RANDOM_HEAD,
    RANDOM_LAYERS,
    RANDOM_TABLE,
    RANDOM_TENSORS,
    TIED,
    UNTIED,
    UNTIED_WITH_WARNING,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import SAME_NUMBERS, one_table_unread
from tiewise.checkpoint.new_tensors import NewTensors
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.stored import TORCH_TYPES
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
        """Return an outcome if a tensor is newly initialised; the two ends come first."""
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
        new = NewTensors.among(elsewhere, self.load)
        word = RANDOM_TENSORS if new.random else NEW_TENSORS
        return outcome_of(self.loader, word, f"{new.passive()}, outside the embedding and head: {names(elsewhere)}.")

    def _missing_at_the_ends(self) -> LoaderOutcome | None:
        """Return an outcome if a tensor of the two ends is newly initialised."""
        ends, missing = self.facts.class_ends, set(self.load.missing)
        head = () if ends.output is None else (f"{ends.output}.weight",)
        for word, tensors, sentence in (
            (RANDOM_TABLE, self.facts.read_tables, "{} is not stored, and nothing ties it: it is drawn at random."),
            (RANDOM_HEAD, head, "{} is not stored, and nothing ties it: the head is drawn at random."),
            (RANDOM_HEAD, ends.head, self._sentence_on_head_layers),
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
        word = "random" if NewTensors.among(elsewhere, self.load).are_all_random else "newly initialised"
        return replace(outcome, sentence=f"{outcome.sentence} Also {word}: {count} outside the embedding and head.")

    @property
    def _sentence_on_head_layers(self) -> str:
        """Return a sentence on layers before the head, with `{}` for a missing tensor."""
        absent = tuple(name for name in self.facts.class_ends.head if name in self.load.missing)
        if NewTensors.among(absent, self.load).random:
            return "The layers before the head are drawn at random: {} is not stored."
        return "The layers before the head start with fixed numbers: {} is not stored."

    def _complete(self) -> LoaderOutcome:
        """Return the outcome if every tensor is loaded or tied."""
        if self.facts.roles.headless:
            return outcome_of(self.loader, NO_HEAD)
        words = {self._word_of_ends(True), self._word_of_ends(False)}
        if words == {TIED} and self.facts.roles.unloaded_names:
            return one_table_unread(self.facts, self.loader)
        if words == {UNTIED_WITH_WARNING}:
            return outcome_of(self.loader, UNTIED_WITH_WARNING, self._warning())
        if len(words) == 1:
            return outcome_of(self.loader, words.pop())
        possible = " or ".join(sorted(words))
        unknown = outcome_of(self.loader, DEPENDS, f"It depends on {SAME_NUMBERS}: {possible}.")
        return replace(unknown, right=True)

    @property
    def _head(self) -> str:
        """Return the head's tensor in the class."""
        return f"{self.facts.class_ends.output}.weight"

    def _word_of_ends(self, unread_are_equal: bool) -> str:
        """Return the outcome by the ties of the class.

        Args:
            unread_are_equal: whether tensors that may not be read count as equal.
        """
        tied = self._tied_tensors(unread_are_equal)
        tables = self.load.tables or tuple(f"{module}.weight" for module in self.facts.class_ends.inputs)
        if any(tied.are_tied(self._head, table) for table in tables):
            return TIED
        if tied.warns_about(self._head):
            return UNTIED_WITH_WARNING
        return UNTIED

    def _warning(self) -> str:
        """Return a sentence on a warning about two input tables.

        The result is "", the usual sentence, if it names the head.
        """
        tied = self._tied_tensors(unread_are_equal=False)
        refused = [tie for tie in tied.refused if tied.has_parameter_of(tie, self._head)]
        if any(self._head in tie for tie in refused):
            return ""
        target, source = (short(name) for name in refused[0])
        return f"{target} and {source} are loaded as stored; a warning says that they differ."

    def _tied_tensors(self, unread_are_equal: bool) -> TiedTensors:
        """Return the parameters of the class after its ties."""

        def is_equal(one: str, other: str) -> bool:
            """Return whether two loaded tensors have equal numbers."""
            are_equal = self._are_equal(one, other)
            return unread_are_equal if are_equal is None else are_equal

        return tie_loaded(self.load.ties, self.load.absent, is_equal)

    def _are_equal(self, one: str, other: str) -> bool | None:
        """Return whether two loaded tensors have equal numbers; None if they cannot be read."""
        if one == other:
            return True
        tensors = self.facts.folder.tensors
        sources = [self.load.sources.get(name, "") for name in (one, other)]
        if not tensors.keys() >= set(sources):  # a conversion fills one of them
            return None
        dtype = TORCH_TYPES.get(self.load.types[one], "")
        return self.facts.are_equal_in(tensors[sources[0]], tensors[sources[1]], dtype)
