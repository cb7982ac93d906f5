"""Packages of `benchmarks.gpu`: the needed ones, the optional ones, and the versions that this machine has.

It imports only the standard library, so that it can report a missing torch.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OPTIONAL = Path(__file__).parent / "gpu_wheels.txt"


@dataclass(frozen=True)
class Package:
    """A package, the version that the phases need, and what needs it."""

    name: str  # as pip calls it
    least: str = ""  # lowest version
    exact: str = ""  # the only version
    module: str = ""  # the module to import, if its name is another
    use: str = "all phases"

    @property
    def wanted(self) -> str:
        """The needed version as text."""
        if self.exact:
            return f"=={self.exact}"
        return f">={self.least}" if self.least else "any"

    def describe_state(self, found: str) -> str:
        """Return "ok", or what is wrong with the found version; an empty one is missing."""
        if not found:
            return "missing"
        if self.exact and found != self.exact:
            return "another version"
        if self.least and _numbers(found) < _numbers(self.least):
            return "too old"
        return "ok"


NEEDED = (
    Package("torch", "2.6"),
    Package("transformers", "5"),
    Package("numpy", "1.26"),
    Package("safetensors", "0.5"),
    Package("PyYAML", "6", module="yaml"),
    Package("filelock", "3.16"),
    Package("tiewise"),
)
ON_A_GPU = Package("triton", "3", use="kernels on a GPU")
OF_COMPARE = tuple(
    Package(name, least, use="phase compare")
    for name, least in (
        ("accelerate", "1.1"),
        ("psutil", "5.9"),
        ("scipy", "1.12"),
        ("tokenizers", "0.21"),
        ("typer", "0.15"),
        ("rich", "13"),
        ("plotly", "6"),
        ("jinja2", "3.1"),
    )
)


def read_optional() -> list[Package]:
    """Return the optional packages with their exact versions, from the list for pip."""
    lines = [line.strip() for line in OPTIONAL.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [Package(name, exact=exact, use="optional") for name, exact in pairs]


def list_packages(*, on_gpu: bool) -> list[Package]:
    """Return all packages in the order of the table."""
    return [*NEEDED, *([ON_A_GPU] if on_gpu else []), *OF_COMPARE, *read_optional()]


def find_version(package: Package) -> str:
    """Return the installed version of a package, "unknown" for a module without metadata, and "" without both."""
    try:
        return version(package.name)
    except PackageNotFoundError:
        has_module = importlib.util.find_spec(package.module or package.name.replace("-", "_")) is not None
        return "unknown" if has_module else ""


def find_unfit(*, on_gpu: bool) -> list[str]:
    """Return the packages without which no phase runs, each with the reason."""
    needed = [*NEEDED, *([ON_A_GPU] if on_gpu else [])]
    states = {package: package.describe_state(find_version(package)) for package in needed}
    return [f"{state} {package.name} {package.wanted}" for package, state in states.items() if state != "ok"]


def format_table(packages: list[Package]) -> str:
    """Return the table of packages, with the found and the wanted version."""
    lines = [f"{'package':20} {'found':16} {'wanted':10} {'for':18} state"]
    for package in packages:
        found = find_version(package)
        state = package.describe_state(found)
        lines.append(f"{package.name:20} {found or '-':16} {package.wanted:10} {package.use:18} {state}")
    return "\n".join(lines)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; an unknown version is later than all."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else (10**9,)
