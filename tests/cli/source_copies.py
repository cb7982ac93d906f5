"""Copies of the package's sources, and environments in which they are installed offline."""

import shutil
import subprocess
import sys
from pathlib import Path

CLONE = Path(__file__).parents[2]
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE")
# pip builds with the setuptools of the environment, and asks no index
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def package_files():
    """Return the files under src/tiewise that git tracks or would track, relative to src."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "tiewise"]
    names = subprocess.run(listing, cwd=CLONE / "src", check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in names if name and (CLONE / "src" / name).exists()}


def copy_sources(target):
    """Copy the sources of the wheel, so that old build files have no effect and the clone gets no new ones."""
    for name in package_files():
        (target / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CLONE / "src" / name, target / "src" / name)
    for name in BUILD_FILES:
        shutil.copy(CLONE / name, target / name)


def dependency_folders():
    """Return the running interpreter's folders of installed packages."""
    return [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]


def add_dependencies(environment):
    """Let an environment import the packages of the running interpreter, after its own.

    Python ignores the `.pth` files of a folder that is added this way, so an editable install there stays off the path.
    """
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(dependency_folders()) + "\n")
