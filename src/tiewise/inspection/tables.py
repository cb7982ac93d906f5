"""The measures of tables: no torch, no text, any size. The others are named, with what a light install lacks."""

from __future__ import annotations

from typing import Any

from tiewise.analysis.direct_path_found import direct_path_of
from tiewise.analysis.end_alignment import across, alignment_of
from tiewise.analysis.tokens import tokens_of
from tiewise.inspection.inspect import Measure, NotHere
from tiewise.inspection.request import FILES, Request
from tiewise.inspection.subject import Subject


def direct_path(subject: Subject, request: Request) -> Any:
    """Energies, definiteness, own tokens, asymmetric pairs and the pairs that were asked for."""
    return direct_path_of(subject.folder, request.pairs, request.effort.samples, request.seed)


def tokens(subject: Subject, request: Request) -> Any:
    """Norms, isotropy, repeated rows and the plane, of the tables alone."""
    return tokens_of(subject.folder, None, request.effort.samples, request.seed)


def alignment(subject: Subject, request: Request) -> Any:
    """Input table against output table of one model."""
    return alignment_of(subject.folder, seed=request.seed, held_out=request.effort.held_out)


def closer(subjects: tuple[Subject, ...], request: Request) -> Any:
    """Each end of one model against each end of another.

    Raises:
        NotHere: not two models.
    """
    if len(subjects) != 2 or subjects[0].run is not None:
        raise NotHere("needs two models", "give a second one")
    first, second = subjects
    return across(
        first.folder,
        second.folder,
        seed=request.seed,
        labels=(first.label, second.label),
        held_out=request.effort.held_out,
    )


def _lacks(subjects: tuple[Subject, ...], request: Request) -> Any:
    raise NotHere("needs torch and transformers", "pip install 'tiewise[torch]'")


MEASURES = (
    Measure("direct_path", each=direct_path),
    Measure("alignment", each=alignment),
    Measure("closer", together=closer),
    Measure("run_alignment", together=_lacks),
    Measure("tokens", each=tokens),
    *(Measure(name, together=_lacks) for name in FILES),
)
