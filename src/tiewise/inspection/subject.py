"""What is inspected: one checkpoint, or the final models of a comparison, with a text as each one's own tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Folder, open_folder
from tiewise.core.errors import CheckpointError, RunError
from tiewise.training.folder import folder_name, read_json
from tiewise.training.results import Comparison

RESULTS, RUN, FINAL = "results.json", "run.yaml", "final"


@dataclass(frozen=True)
class Subject:
    """One checkpoint under a name."""

    label: str  # what it is called in words and figures
    folder: Folder  # the checkpoint
    run: Path | None = None  # the comparison's folder, where it comes from one


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a finished comparison."""
    return (path / RESULTS).is_file() and (path / RUN).is_file()


def subjects_of(paths: Sequence[str | os.PathLike[str]]) -> tuple[Subject, ...]:
    """Open one or two checkpoints, or each arm's first finished model of one comparison."""
    places = [Path(path) for path in paths]
    runs = [place for place in places if is_run(place)]
    if not runs:
        opened = [open_folder(place) for place in places]
        for place, folder in zip(places, opened, strict=True):
            _check(place, folder)
        return tuple(map(Subject, labels([place.resolve() for place in places]), opened))
    if len(places) > 1:
        raise RunError(f"{runs[0]} is a comparison of several models", "inspect it alone, or give two of its models")
    found = tuple(_arms(runs[0]))
    if not found:
        raise RunError(f"{runs[0]} holds no finished model", "finish it with `tiewise compare --resume`")
    return found


def labels(places: Sequence[Path]) -> list[str]:
    """Name folders by as few last parts of their paths as tell them apart."""
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        made = ["/".join(place.parts[-parts:]) for place in places]
        if len(set(made)) == len(made) and not (parts == 1 and set(made) & {FINAL, "model", "checkpoint"}):
            return made
    return [f"{place} ({number})" for number, place in enumerate(places, 1)]


def comparison_of(run: Path) -> Comparison:
    """Read what a comparison measured."""
    record = read_json(run / RESULTS)
    if record is None:
        raise RunError(f"{run / RESULTS} cannot be read", "run the comparison again")
    return Comparison.from_dict(record)


def _arms(run: Path) -> Iterator[Subject]:
    """First finished seed of every arm, in the comparison's order."""
    comparison = comparison_of(run)
    for arm in comparison.arms:
        for seed in comparison.seeds:
            final = run / folder_name(arm) / f"seed-{seed}" / FINAL
            if final.is_dir():
                yield Subject(arm, open_folder(final), run)
                break


def _check(place: Path, folder: Folder) -> None:
    if (place / RUN).is_file():
        raise RunError(f"{place}: a comparison that is not finished", "finish it with `tiewise compare --resume`")
    if not folder.tensors and (place / ADAPTER_CONFIG).is_file():
        fix = "merge it into the model that it adapts, and inspect the result"
        raise CheckpointError(f"{place}: an adapter, which has no tables of its own", fix)
    if not folder.tensors:
        reason = f" ({folder.faults[0].what})" if folder.faults else ""
        raise CheckpointError(f"{place}: no safetensors that can be read{reason}", "`tiewise check` says what is there")
