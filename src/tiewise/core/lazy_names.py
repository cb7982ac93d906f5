"""Public names of a package that are imported when they are first used.

The stub `__init__.pyi` of a package lists its public names, one import a line. Type checkers and editors read it, and
so does `LazyNames`. The package then needs three lines:

    _names = LazyNames(__name__)
    __getattr__, __dir__ = _names.get, _names.list
"""

from __future__ import annotations

import pkgutil
import re
import sys
from functools import cached_property
from importlib import import_module
from types import FrameType
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (\w+) as \w+$", re.MULTILINE)


class LazyNames:
    """Public names of one package, with the module that defines each."""

    def __init__(self, package: str) -> None:
        self.package = package

    @cached_property
    def homes(self) -> dict[str, str]:
        """The module that defines each public name, as the stub states it."""
        stub = (pkgutil.get_data(self.package, "__init__.pyi") or b"").decode()
        return {name: home for home, name in _IMPORT.findall(stub)}

    def get(self, name: str) -> Any:
        """Return a public name, a submodule that the stub names, or all names for `__all__`.

        `help(package)` gets no `__all__`, because it would print the docstring of every name.

        Raises:
            AttributeError: the package has no such name.
            ImportError: the name needs a library that is not installed.
        """
        if name == "__all__" and not _is_asked_by_help():
            return self.list()
        if name not in self.homes:
            problem = f"module {self.package!r} has no attribute {name!r}"
            raise AttributeError(problem, name=name, obj=sys.modules[self.package])  # Python adds the nearest name
        home = self.homes[name]
        if home == self.package:
            return import_module(f"{home}.{name}")
        try:
            return getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("tiewise"):
                raise
            message = f"{self.package}.{name} needs {error.name}: pip install 'tiewise[torch]'"
            raise ImportError(message, name=error.name) from error

    def list(self) -> list[str]:
        """Return the public names in alphabetical order, without submodules."""
        return sorted(name for name, home in self.homes.items() if home != self.package)


def _is_asked_by_help() -> bool:
    """Return whether `pydoc`, which prints `help`, is among the callers."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "pydoc":
            return True
        frame = frame.f_back
    return False
