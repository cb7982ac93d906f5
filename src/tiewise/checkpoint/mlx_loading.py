"""Outcome of loading a checkpoint with mlx-lm."""

from __future__ import annotations

from dataclasses import replace

from tiewise.checkpoint.claims import FLAG, TEXT_PARTS
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.loader_columns import (
    ERROR,
    MLX,
    MLX_LETTERS,
    NO_HEAD,
    NOT_SERVED,
    SENTENCES,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import shape_misfit
from tiewise.checkpoint.server_loading import server_outcome
from tiewise.checkpoint.untrusted import short


class MlxLoading:
    """Loading of one checkpoint with mlx-lm.

    The outcome is that of a recorded run with a tiny model of the family, else the outcome of most classes.
    """

    def __init__(self, facts: Facts, model_type: str) -> None:
        self.facts = facts
        self.record = family(model_type)
        self.flags = _possible_flags(facts)

    def outcome(self) -> LoaderOutcome:
        """Return the outcome of loading the checkpoint."""
        letters = self.record.mlx_letters
        if letters is None or len(self.flags) > 1:  # recorded runs set the flag at every level or at none
            return self._outcome_of_most_classes()
        return self._outcome_of_run(letters)

    def _outcome_of_most_classes(self) -> LoaderOutcome:
        """Return the outcome for a family without a recorded run."""
        flag = self.facts.claims.fixed
        if flag is None:
            flag = True in self.flags or self.flags <= {None}
        outcome = server_outcome(self.facts, MLX, flag)
        if self.record.is_served_by_mlx or outcome.outcome == NO_HEAD:
            return outcome
        return outcome_of(MLX, NOT_SERVED)

    def _outcome_of_run(self, letters: str) -> LoaderOutcome:
        """Return the outcome for a family with a recorded run.

        Args:
            letters: three words for the flag true, false and absent; each has a letter of `MLX_LETTERS` per state.
        """
        by_flag = dict(zip((True, False, None), letters.split(), strict=True))
        (flag,) = self.flags
        words = tuple(MLX_LETTERS[letter] for letter in by_flag[flag])
        data = mlx_data()
        run = replace(MLX, versions=data["version"], source=f"run on {data['date']}", tied=words, untied=words)
        outcome = server_outcome(self.facts, run, True)
        if outcome.outcome not in (ERROR, NOT_SERVED, NO_HEAD):
            misfit = self._misfit()
            if misfit is not None:
                outcome = outcome_of(replace(run, source="load_model of its utils.py: strict"), ERROR, misfit)
        if self.facts.quantised or outcome.outcome not in words:
            return outcome
        is_as_run = outcome.sentence == SENTENCES[outcome.outcome]
        return replace(outcome, predicted=not is_as_run)

    def _misfit(self) -> str | None:
        """Return a sentence about an end whose name or shape mlx-lm refuses. None if all fit.

        mlx-lm loads strictly, so such an end raises an error.
        """
        misfit = shape_misfit(self.facts)
        if misfit is not None:
            return misfit
        ends = self.facts.class_ends
        saved = {f"{ends.disk.get(name, name)}.weight" for name in ends.modules}
        prefix = f"{ends.prefix}."
        other_names = {name.removeprefix(prefix) for name in saved} | {prefix + name for name in saved}
        for table in self.facts.roles.tables:
            if table.name in other_names - saved:
                names = " or ".join(sorted(saved))
                return f"It loads strictly, and its model has no {short(table.name)} ({names} is its name)."
        return None


def _possible_flags(facts: Facts) -> set[bool | None]:
    """Return the flags that mlx-lm may read from the config; None is an absent flag."""
    levels = [claim for claim in facts.claims.levels if not claim.level or claim.level in TEXT_PARTS]
    if len(levels) > 1:  # it reads the flag of a composite's text part, whatever the root has
        return {claim.written for claim in levels}
    root = facts.levels[""]
    if FLAG not in root:
        return {None}
    return {bool(root[FLAG])}  # mlx-lm tests `if args.tie_word_embeddings`: null is false
