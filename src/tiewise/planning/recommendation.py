"""Recommendation of a plan: tie, untie, or mixed evidence, with its reasons.

Three kinds of evidence count: the exact saving of tying, the choices of the nearest public models, and measured losses
of models of this size. The neighbours agree if at most `DISSENT` of them differ. In the catalogue itself that rule is
right more often than a smaller majority (`score_neighbours`). A measurement that contradicts the
neighbours makes the evidence mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiewise.core.measurement import count, rounded, signed
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning import catalogue
from tiewise.planning.architecture import Architecture, budget
from tiewise.planning.plan_rows import short, trained_sizes

TIE, UNTIE, MIXED, NOTHING = "tie", "untie", "mixed", "nothing to tie"
DISSENT = 1  # neighbours that may differ from the others; its source is `score_neighbours`, in docs/plan.md
UNMEASURED = "tiewise has no measurement of the loss near this size; `tiewise compare --text FILE` makes one."
DECIDES = "`tiewise compare --text FILE` decides it on your text."
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ParametersSaved:
    """Parameters that tying saves in one model."""

    parameters: int
    untied: float | None  # all parameters of the untied model: rounded if estimated, None if not counted

    @property
    def share(self) -> float | None:
        """Share of the untied model that tying saves. None if the total is not counted."""
        if not self.untied:
            return None
        return self.parameters / self.untied


@dataclass(frozen=True)
class Agreement:
    """Choices of public models, compared with the choices of their nearest neighbours."""

    agreeing: int  # models whose neighbours agree, with at most `DISSENT` of them differing
    agreeing_right: int  # of those, models that chose as their neighbours did
    agreeing_untied: int  # of those, untied models: right by always guessing "untied"
    divided: int  # models whose neighbours have a smaller majority
    divided_right: int  # of those, models that chose as the majority did
    divided_untied: int  # of those, untied models


def tying_saves(architecture: Architecture) -> ParametersSaved:
    """Count what tying saves in a model, compared with the same model untied."""
    tied, untied = (budget(architecture, BoundarySpec(kind), architecture.sharing) for kind in ("tied", "untied"))
    return ParametersSaved(untied.total - tied.total, _model_total(architecture, untied.total))


def sharing_sentences(architecture: Architecture, sharings: Sequence[SharingSpec]) -> list[str]:
    """Return a sentence on what sharings of layers save, compared with separate layers; none without sharing.

    The model keeps its boundary.
    """
    separate = budget(architecture, architecture.boundary, SharingSpec()).total
    savings = []
    for sharing in sharings:
        if sharing.kind != "none":
            saved = separate - budget(architecture, architecture.boundary, sharing).total
            saving = ParametersSaved(saved, _model_total(architecture, separate))
            savings.append(f"{sharing} saves {saving_in_words(saving)}")
    if not savings:
        return []
    return [f"Sharing {', '.join(savings)}, compared with separate layers."]


def _model_total(architecture: Architecture, total: int) -> float | None:
    """Return a total of parameters: rounded if it is estimated, None if parts are not counted."""
    if architecture.not_counted:
        return None
    return rounded(total) if architecture.estimated else total


def recommend(
    saving: ParametersSaved, has_head: bool, neighbours: Sequence[Record], atlas: Record | None
) -> dict[str, Any]:
    """Recommend tied or untied ends for a model.

    Args:
        saving: parameters that tying saves.
        has_head: false if the model's class has no output head.
        neighbours: records of the nearest public models.
        atlas: record of the nearest measured settings; None without a head.

    Returns:
        The choice (`tie`, `untie`, `mixed` or `nothing to tie`), the saving, and the sentences that explain it.
    """
    public, measured = choice_of_neighbours([row["tied"] for row in neighbours]), measured_choice(atlas)
    choice = _combined(public, measured)
    sentences = [_first_sentence(choice, saving, neighbours), *_measured_sentences(atlas)]
    if choice == MIXED and UNMEASURED not in sentences:
        sentences.append(DECIDES)
    if not has_head:
        choice, sentences = NOTHING, ["Nothing to tie: this model class has no output head."]
    return {"choice": choice, "saving": {**asdict(saving), "share": saving.share}, "sentences": sentences}


def choice_of_neighbours(tied: Sequence[bool | None]) -> str:
    """Return the choice on which the neighbours agree, or `MIXED`."""
    ties, unties = tied.count(True), tied.count(False)
    if ties > DISSENT >= unties:
        return TIE
    if unties > DISSENT >= ties:
        return UNTIE
    return MIXED


def measured_choice(atlas: Record | None) -> str | None:
    """Return the choice that measured losses at this size support.

    `MIXED` if it depends on the amount of text. None without a measurement or a significant difference.
    """
    if atlas is None or not atlas["within"]:
        return None
    signs = {row["sign"] for row in atlas["rows"]} - {0}
    if not signs:
        return None
    if len(signs) == 2:
        return MIXED
    if signs == {-1}:
        return TIE
    return UNTIE


def _combined(public: str, measured: str | None) -> str:
    """Return the choice that both kinds of evidence support.

    A clear measurement decides where the neighbours are divided.
    """
    if measured is None or measured == public:
        return public
    if public == MIXED:
        return measured
    return MIXED


def _first_sentence(choice: str, saving: ParametersSaved, neighbours: Sequence[Record]) -> str:
    """Return the recommendation with its saving and the choices of the neighbours."""
    saved = saving_in_words(saving)
    public = neighbours_in_words([row["tied"] for row in neighbours])
    beginnings = {TIE: "Tie: saves", UNTIE: "Untie: tying would save", MIXED: "Mixed evidence: tying saves"}
    return f"{beginnings[choice]} {saved}. {public}"


def saving_in_words(saving: ParametersSaved) -> str:
    """Return a saving as text: 131 M of 463 M parameters (28 %)."""
    if saving.share is None or saving.untied is None:
        return f"{short(saving.parameters)} parameters (the total is not counted)"
    share = f"{100 * saving.share:.2g}"
    return f"{short(saving.parameters)} of {short(saving.untied)} parameters ({share} %)"


def neighbours_in_words(tied: Sequence[bool | None]) -> str:
    """Return a sentence about the choices of the nearest public models."""
    if not tied:
        return "No public model can be compared with it."
    decided, ties = len(tied) - tied.count(None), tied.count(True)
    if decided == 0:
        return f"The choice of the {len(tied)} nearest public models is not known."
    if decided == 1:
        return f"The only near public model whose choice is known {'ties' if ties else 'does not tie'}."
    models = f"the {decided} nearest public models"
    if decided < len(tied):
        models += " whose choice is known"
    if ties == decided:
        return f"T{models[1:]} all tie."
    if ties == 0:
        return f"None of {models} ties."
    return f"{ties} of {models} {'ties' if ties == 1 else 'tie'}."


def _measured_sentences(atlas: Record | None) -> list[str]:
    """Return the measured effect of tying at the nearest sizes, or that there is none.

    It is that on the shortest and on the longest text. The atlas has all these rows with the demo corpus.
    """
    if atlas is None:
        return []
    if not atlas["within"]:
        return [UNMEASURED]
    settings = atlas["rows"]
    by_tokens = {setting["tokens"]: setting for setting in (settings[0], settings[-1])}
    effects = ", ".join(_effect_in_words(setting) for setting in by_tokens.values())
    significant = sum(setting["sign"] != 0 for setting in settings)
    place = f"At the nearest measured sizes ({trained_sizes(atlas)}; demo corpus)"
    counted = f"{significant} of {len(settings)} rows significant"
    return [f"{place}, tying changed the loss of the {settings[0]['step']} step {effects} ({counted})."]


def _effect_in_words(setting: Record) -> str:
    """Return the measured effect of tying in one setting with its 95 % interval."""
    value, low, high = (signed(setting[name], 3) for name in ("difference", "low", "high"))
    return f"by {value} nats/token [{low}, {high}] on {count(setting['tokens'])} tokens"


def score_neighbours() -> Agreement:
    """Compare the choice of each public model with those of its nearest neighbours.

    Of models with equal sizes and tying, only the first counts.

    The source of `DISSENT`: a model whose neighbours agree mostly chose as they did.

    >>> score_neighbours()
    Agreement(agreeing=62, agreeing_right=47, agreeing_untied=36, divided=44, divided_right=31, divided_untied=26)
    """
    right: dict[bool, list[bool]] = {True: [], False: []}
    untied = {True: 0, False: 0}
    for model in catalogue.distinct(catalogue.models()):
        if model.vocab is None or model.tied is None:
            continue
        near = catalogue.neighbours(model.vocab, model.width, model.layers, but=(model.name,))
        choices = [row.tied for row in near]
        ties, unties = choices.count(True), choices.count(False)
        if ties != unties:
            agree = choice_of_neighbours(choices) != MIXED
            right[agree].append(model.tied is (ties > unties))
            untied[agree] += not model.tied
    agreeing, divided = right[True], right[False]
    return Agreement(len(agreeing), sum(agreeing), untied[True], len(divided), sum(divided), untied[False])
