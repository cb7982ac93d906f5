"""Pytest plugin that installs tiewise into every model that a test builds or loads.

`tools/transformers_tests.py` uses it:

    python -m pytest -p pytest_install --models installed --results results.jsonl …

    --models plain         leave every model as it is
    --models installed     call tiewise.install on every new model
    --models uninstalled   call tiewise.install, then uninstall

The plugin seeds the random generators before each test, so that two runs of a test draw the same inputs. It appends one
JSON object a line to the file of results: {"test": …, "outcome": …} for each report, {"model": …, "answer": …} for each
model that a constructor or `from_pretrained` returned.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers_tests import MODES, NO_HEAD

import tiewise
from tiewise.core.errors import InstallError

COMMON = "test_modeling_common"  # module of transformers' tests with a separate generator of inputs
SEED = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--models", choices=MODES, default="plain", help="do this with every new model")
    parser.addoption("--results", required=True, help="append one JSON object a line to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Patch the constructors before any test module imports a model class."""
    results = Results(Path(config.getoption("--results")))
    config.pluginmanager.register(results, "tiewise results")
    mode = config.getoption("--models")
    if mode != "plain":
        patch_models(Installer(mode, results))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every generator that transformers' tests draw from."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for name, module in list(sys.modules.items()):
        if name.endswith(COMMON) and hasattr(module, "global_rng"):
            module.global_rng.seed(SEED)


class Results:
    """Writer of the file of results, and the hooks that fill it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        """Append one object.

        The file is complete up to here if the process dies in a later test.
        """
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test's setup, call or teardown, or of one of its subtests."""
        if report.when != "call" and report.outcome == "passed":
            return
        subtest = getattr(report, "context", None)
        self.write(
            test=report.nodeid,
            outcome="xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome,
            subtest=None if subtest is None else f"{subtest.msg or ''}{dict(subtest.kwargs)}",
            reason=_last_line(report) if report.failed else "",
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write the reason if a test module cannot be imported."""
        if report.failed:
            self.write(uncollected=report.nodeid, reason=_last_line(report))


def _last_line(report: Any) -> str:
    """Return the line of a failed report that names the error."""
    lines = [line.strip() for line in str(report.longrepr).splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no reason"])[0][:300]


class Installer:
    """Callable that installs into each new model and writes the answer.

    The answer is "installed", or the reason of the refusal.
    """

    def __init__(self, mode: str, results: Results) -> None:
        self.mode, self.results = mode, results
        self.depth = 0  # number of nested constructors and loaders; only the outermost one installs

    @contextmanager
    def building(self) -> Iterator[bool]:
        """Mark a model as being built; yield whether it is the outermost one."""
        self.depth += 1
        try:
            yield self.depth == 1
        finally:
            self.depth -= 1

    def __call__(self, model: Any) -> None:
        """Install into a finished model, and uninstall again if the mode says so."""
        with self.building():  # `install` may copy or load models itself
            has_head = self._has_head(model)
            try:
                boundary = tiewise.install(model, batch=batch_of(model))
                answer = "installed"
                if self.mode == "uninstalled":
                    boundary.uninstall()
            except InstallError as error:
                answer = f"refused: {error.problem}" if has_head else NO_HEAD
        self.results.write(model=type(model).__name__.removeprefix("Tiewise"), answer=answer)

    @staticmethod
    def _has_head(model: Any) -> bool:
        """Return whether a model has an output head."""
        try:
            return model.get_output_embeddings() is not None
        except (AttributeError, NotImplementedError):
            return False


def batch_of(model: Any) -> dict[str, torch.Tensor] | None:
    """Return inputs for one forward pass of a model that needs more than token ids.

    Whisper is such a model; None for all others.
    """
    config = model.config
    if config.model_type != "whisper" or model.main_input_name != "input_features":
        return None
    table = model.get_input_embeddings().weight
    if table is None or table.is_meta:
        return None
    features = table.new_ones(2, config.num_mel_bins, 2 * config.max_source_positions)
    ids = torch.tensor([[3, 4, 5, 6], [4, 5, 6, 7]], device=table.device)
    return {"input_features": features, "decoder_input_ids": ids, "labels": ids.roll(-1, dims=1)}


def patch_models(install: Installer) -> None:
    """Call `install` at the end of every model constructor and of `from_pretrained`."""
    base = transformers.PreTrainedModel
    declared = base.__dict__["__init_subclass__"].__func__

    @functools.wraps(declared)
    def declare(cls: type, **options: Any) -> None:
        """Wrap the constructor of a new subclass."""
        declared(cls, **options)
        wrap_constructor(cls, install)

    base.__init_subclass__ = classmethod(declare)
    for cls in _subclasses(base):
        wrap_constructor(cls, install)
    loading = base.__dict__["from_pretrained"].__func__

    @functools.wraps(loading)
    def load(cls: type, *arguments: Any, **options: Any) -> Any:
        """Load a model and install into it."""
        with install.building() as is_outermost:
            loaded = loading(cls, *arguments, **options)
        if is_outermost:
            install(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    base.from_pretrained = classmethod(load)


def wrap_constructor(cls: Any, install: Installer) -> None:
    """Call `install` at the end of the constructor that a class itself defines.

    It is not called while another model is being built.
    """
    construct: Callable[..., None] | None = cls.__dict__.get("__init__")
    if construct is None:
        return

    @functools.wraps(construct)
    def build(self: Any, *arguments: Any, **options: Any) -> None:
        """Build a model and install into it."""
        with install.building() as is_outermost:
            construct(self, *arguments, **options)
        if is_outermost:
            install(self)

    cls.__init__ = build


def _subclasses(cls: type) -> Iterator[type]:
    """Yield all direct and indirect subclasses of a class."""
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
