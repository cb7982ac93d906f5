"""Outcome of loading a checkpoint with transformers. The first check that applies decides."""

from __future__ import annotations

from dataclasses import replace

from tiewise.checkpoint.claims import TIEWISE_TYPE, architecture, needs_tiewise
from tiewise.checkpoint.class_load import ClassLoad
from tiewise.checkpoint.class_outcome import ELSEWHERE, ClassOutcome
from tiewise.checkpoint.config_parts import TRANSFORMERS_SECTION, has_nameless_quantisation
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import INDEX, SINGLE
from tiewise.checkpoint.index_steps import UNREAD_INDEX, stops_transformers
from tiewise.checkpoint.loader_columns import (
    BROKEN,
    DEPENDS,
    ERROR,
    NEW_BIAS,
    NO_HEAD,
    RANDOM_HEAD,
    RANDOM_LAYERS,
    RANDOM_TABLE,
    TRANSFORMERS_5,
    VERIFIED,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import CANONICAL, from_column, is_saved_as_head, shape_misfit
from tiewise.checkpoint.second_copy import SecondCopy
from tiewise.checkpoint.table_scans import SAME_VALUES
from tiewise.checkpoint.untrusted import short

WITH_TIEWISE = "transformers with tiewise.hf"
_STARTS_RANDOM = "{} starts anew: only {}, to which it would be tied, is stored, and the flag is false."


class TransformersLoading:
    """Loading of one checkpoint with one version of transformers."""

    def __init__(self, facts: Facts, loader: Loader, flag: bool | None) -> None:
        self.facts, self.loader, self.flag = facts, loader, flag
        self.is_recent = loader.versions == TRANSFORMERS_5.versions

    def outcome(self) -> LoaderOutcome:
        """Return the outcome of the first failing check, else the entry of the loader's column.

        If the class was asked about its tensors, its answer decides.
        """
        failure = self._check_type() or self._check_opened_file() or self._check_quantisation()
        if failure is not None:
            return failure
        if self.is_recent:
            load = self.facts.class_load
            if isinstance(load, ClassLoad):
                return ClassOutcome(self.facts, self.loader, self.flag, load).outcome()
            if load.is_refused:
                return self._outcome(ERROR, f"Its class refuses the config: {load.reason}.")
        checks = (
            self._check_class,
            self._check_head,
            self._check_flag,
            self._check_shapes,
            self._check_input_tables,
        )
        for check in checks:
            failure = check()
            if failure is not None:
                return failure
        by_column = from_column(self.facts, self.loader, self.flag)
        if by_column.outcome not in BROKEN:
            failure = self._check_other_tensors()
            if failure is not None:
                return failure
        return self._with_verification(by_column)

    def _outcome(self, word: str, sentence: str = "") -> LoaderOutcome:
        """Return an outcome of this loader, by default with the usual sentence."""
        return outcome_of(self.loader, word, sentence)

    def _check_type(self) -> LoaderOutcome | None:
        """Return an outcome if transformers lacks the model type, because it is one of tiewise."""
        if self.loader.name == WITH_TIEWISE or not needs_tiewise(self.facts.config):
            return None
        model_type = str(self.facts.config["model_type"])
        missing_import = "import tiewise.models"
        if model_type == TIEWISE_TYPE:
            missing_import = "import tiewise.hf"
        return self._outcome(ERROR, f"It does not know the type `{short(model_type)}` without `{missing_import}`.")

    def _check_opened_file(self) -> LoaderOutcome | None:
        """Return an outcome if the check could not read the file that transformers opens."""
        opened = self.facts.folder.opened
        if opened is None:
            return self._outcome(ERROR, f"It finds no {SINGLE} and no index of shards.")
        if opened == INDEX:
            return self._check_index()
        if opened.endswith((".bin", ".bin.index.json")):
            return self._outcome(DEPENDS, f"It opens {opened}, which was not read.")
        if opened == SINGLE and self.facts.second_copy is SecondCopy.EQUAL:
            return None
        if opened.endswith(".safetensors") and opened not in self.facts.folder.headers:
            why = f"It opens {opened}, which the index does not name and which was not read."
            return self._outcome(DEPENDS, why)
        return None

    def _check_index(self) -> LoaderOutcome | None:
        """Return an outcome if transformers stops at the index, or if it was not read here."""
        if self.facts.folder.has_unread_index:
            if stops_transformers(self.facts.folder.source):
                return self._outcome(ERROR, "The index maps no tensors to files, at which it stops.")
            return self._outcome(DEPENDS, UNREAD_INDEX)
        lost = self.facts.folder.lost_shards
        if lost:
            return self._outcome(ERROR, f"The index names {short(lost[0])}, which is missing.")
        if self.facts.folder.index_lacks_metadata:
            return self._outcome(ERROR, "The index has no metadata object, at which it stops.")
        return None

    def _check_quantisation(self) -> LoaderOutcome | None:
        """Return an outcome if transformers cannot tell how the model is quantised."""
        if not has_nameless_quantisation(self.facts.config):
            return None
        return self._outcome(ERROR, f"The config's {TRANSFORMERS_SECTION} has no quant_method, and it refuses that.")

    def _check_class(self) -> LoaderOutcome | None:
        """Return an outcome if the architecture data lacks the class."""
        if self.facts.claims.has_family_data:
            return None
        if self.facts.family.has_facts:
            why = "Its class is not in the architecture data"
        else:
            why = _sentence(self.facts.family.unknown_message)
        return self._outcome(DEPENDS, f"{why}: its own code decides.")

    def _check_head(self) -> LoaderOutcome | None:
        """Return the outcome for a class without a token head; None for a class with one."""
        if not self.facts.roles.headless:
            return None
        if self._input_table_is_random():
            return self._outcome(RANDOM_TABLE)
        if self.facts.foreign_layers is not None:
            return self._outcome(RANDOM_LAYERS)
        return self._outcome(NO_HEAD)

    def _input_table_is_random(self) -> bool:
        """Return whether the input table of a class without a head surely starts random."""
        roles = self.facts.roles
        if roles.loaded_input is not None:
            return False
        if roles.unloaded_names:
            return True
        if roles.class_ends is None or roles.opaque:
            return False
        return self.facts.is_complete

    def _check_flag(self) -> LoaderOutcome | None:
        """Return an outcome if the config class refuses a flag that is neither true nor false."""
        deciding = self.facts.claims.deciding
        if not self.is_recent or deciding.malformed is None:
            return None
        loose = family(deciding.model_type).ends.loose
        if loose == "any":
            return None
        if loose == "null" and deciding.malformed == "None":
            return None
        return self._outcome(ERROR, "The flag is neither true nor false, and its config class refuses that.")

    def _check_shapes(self) -> LoaderOutcome | None:
        """Return an outcome if a tensor has another shape than in the class."""
        misfit = shape_misfit(self.facts)
        if misfit is None:
            return None
        return self._outcome(ERROR, misfit)

    @property
    def _unfilled_ties(self) -> tuple[tuple[str, str], ...]:
        """Return `unfilled_ties` of the facts; empty for transformers 4, which ties all of them."""
        if not self.is_recent:
            return ()
        return self.facts.unfilled_ties

    def _check_input_tables(self) -> LoaderOutcome | None:
        """Return an outcome if an input table is neither stored nor tied to a stored one."""
        facts = self.facts
        for target, source in self._unfilled_ties:
            if not target.endswith("bias"):
                return self._outcome(RANDOM_TABLE, _STARTS_RANDOM.format(target, source))
        if not self.is_recent and is_saved_as_head(facts):
            return self._outcome(DEPENDS, CANONICAL)
        if facts.unloaded_input_tables and self.flag is not False:
            why = f"{short(facts.unloaded_input_tables[0].name)} is not read; another end takes its place."
            return self._outcome(DEPENDS, why)
        if facts.missing_tables:
            absent = short(facts.saved_name(facts.missing_tables[0]))
            return self._outcome(RANDOM_TABLE, f"{absent} is not stored, and nothing ties it: it is drawn at random.")
        return None

    def _check_other_tensors(self) -> LoaderOutcome | None:
        """Return an outcome if layers, tensors before the head, or its bias are not stored."""
        facts = self.facts
        if facts.foreign_layers is not None:
            why = ELSEWHERE.format(facts.foreign_layers, facts.class_ends.layers[0])
            return self._outcome(RANDOM_LAYERS, why)
        if facts.missing_head:
            absent = short(facts.saved_name(facts.missing_head[0]))
            why = f"The layers before the head are newly initialised: {absent} is not stored."
            return self._outcome(RANDOM_HEAD, why)
        if self._unfilled_ties:
            return self._outcome(NEW_BIAS, _STARTS_RANDOM.format(*self._unfilled_ties[0]))
        if facts.missing_biases:
            absent = short(facts.saved_name(facts.missing_biases[0]))
            return self._outcome(NEW_BIAS, f"The head's bias starts anew: {absent} is not stored.")
        return None

    def _with_verification(self, outcome: LoaderOutcome) -> LoaderOutcome:
        """Return the outcome, marked as verified if the tests load this class with these flags."""
        if not self.is_recent or outcome.outcome == DEPENDS:
            return outcome
        if not _is_like_tested_folders(self.facts):
            return outcome
        claims = self.facts.claims
        flags = {claim.level: claim.written for claim in claims.levels if claim.written is not None}
        name = architecture(self.facts.config) or ""
        if flags not in VERIFIED.get(name, ()):
            return outcome
        return replace(outcome, predicted=False, source="loaded by this package's tests")


def _is_like_tested_folders(facts: Facts) -> bool:
    """Return whether a folder has usual names and plain tables, as in the tests."""
    if facts.is_tiewise_type or facts.folder.single:
        return False
    if facts.quantised or facts.roles.unloaded_names:
        return False
    return facts.ends_likeness is None or facts.ends_likeness.kind != SAME_VALUES


def _sentence(text: str) -> str:
    """Return a text with a capital first letter if it begins with "no ", else unchanged."""
    if text.startswith("no "):
        return f"{text[0].upper()}{text[1:]}"
    return text
