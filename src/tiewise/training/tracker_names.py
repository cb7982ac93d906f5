"""Names of the experiment trackers that `report_to` takes, without torch and transformers.

A mistyped name and a missing package are reported before anything slow is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from tiewise.core import Late
from tiewise.core.errors import RunError, suggest_choices

integrations = Late("transformers.integrations.integration_utils")
ALL, NONE, TENSORBOARD = "all", "none", "tensorboard"


@dataclass(frozen=True)
class TrackerPackage:
    """Module that a tracker imports, and the words that pip installs it by."""

    module: str
    pip: str


# trackers of transformers 5 by name; None for one that needs no package
PACKAGES: dict[str, TrackerPackage | None] = {
    "azure_ml": TrackerPackage("azureml", "azureml-core"),
    "clearml": TrackerPackage("clearml", "clearml"),
    "codecarbon": TrackerPackage("codecarbon", "codecarbon"),
    "comet_ml": TrackerPackage("comet_ml", "comet-ml"),
    "dagshub": TrackerPackage("dagshub", "dagshub mlflow"),
    "dvclive": TrackerPackage("dvclive", "dvclive"),
    "flyte": TrackerPackage("flytekit", "flytekit"),
    "kubeflow": None,
    "mlflow": TrackerPackage("mlflow", "mlflow"),
    "neptune": TrackerPackage("neptune", "neptune"),
    "swanlab": TrackerPackage("swanlab", "swanlab"),
    TENSORBOARD: TrackerPackage("tensorboard", "tensorboard"),
    "trackio": TrackerPackage("trackio", "trackio"),
    "wandb": TrackerPackage("wandb", "wandb"),
}


def read_tracker_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the names in texts that separate them by commas, each once.

    "none" means no tracker, and "all" every tracker that is installed.

    RunError: transformers has no tracker of a name.

    >>> read_tracker_names(["tensorboard,trackio", "trackio"])
    ('tensorboard', 'trackio')
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    chosen = dict.fromkeys(name for name in names if name not in ("", NONE))
    for name in chosen:
        if name != ALL and name not in PACKAGES and name not in integrations.INTEGRATION_TO_CALLBACK:
            raise RunError(f"no tracker {name!r}", suggest_choices(name, [*PACKAGES, ALL, NONE]))
    return tuple(chosen)


def require_packages(names: Iterable[str]) -> None:
    """Raise RunError for a tracker whose package is not installed.

    The message has the command that installs it.
    """
    for name in names:
        if not is_installed(name):
            package = PACKAGES[name]
            assert package is not None, "a tracker without a package counts as installed"
            raise RunError(f"the tracker {name} is not installed", f"pip install {package.pip}")


def is_installed(name: str) -> bool:
    """Return whether the package of a tracker is installed.

    True for an unknown tracker and for one without a package."""
    package = PACKAGES.get(name)
    return package is None or find_spec(package.module) is not None
