"""Set up a virtual environment with pinned packages, and say what happens and how long it takes.

    python3 tools/set_up.py .venv torch --then 180    the packages of tiewise[torch]; training takes 180 s afterwards
    python3 tools/set_up.py .venv dev                 everything that the tests, the docs and the checks need

It needs the standard library only. pip reads the versions from `constraints.txt`. It takes the CPU build of torch if
its index has one; PyPI's build for Linux adds several gigabytes of CUDA packages. pip compiles no module. For the demo,
a thread compiles the packages that training imports while pip unpacks others on another core; Python compiles the rest
when it imports them. An environment for the tests has all modules compiled, on all cores, because thousands of
processes import them. It also has the kernels of the loss: in the demo, compiling them takes longer than they save.
"""

from __future__ import annotations

import argparse
import os
import py_compile
import re
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"torch": 53, "dev": 117}  # number of packages of each extra
SIZES = {"torch": "1.4 GB", "dev": "2.9 GB"}
SECONDS = {"torch": 80, "dev": 150}  # time of the installation on two cores, downloads included
# packages that training imports, and folders in them that it does not import
IMPORTED = ("torch", "sympy", "mpmath", "numpy", "scipy", "pandas", "pyarrow", "datasets", "huggingface_hub")
IMPORTED += ("accelerate", "transformers", "tokenizers", "safetensors", "jinja2", "typer", "rich", "yaml", "psutil")
UNUSED = {"tests", "testing", "models", "_inductor", "onnx"}
# the output of pip, with the words that the status line shows
STAGES = (
    (re.compile(r"\s*(?:Downloading|Using cached) (\S+?)-\d\S* \((.+)\)"), "downloading {} ({})"),
    (re.compile(r"Collecting ([\w.-]+)"), "finding {}"),
    (re.compile(r"Installing collected packages"), "unpacking all packages"),
)


@dataclass
class Status:
    """One line with the current stage and the remaining time, rewritten in place on a terminal."""

    expected: float  # seconds of the installation
    afterwards: float  # seconds of the work that follows it
    start: float
    shows: bool  # whether stderr is a terminal

    def show(self, stage: str) -> None:
        """Show a stage; on a file or a pipe nothing is printed."""
        if self.shows:
            left = self.remaining(time.monotonic() - self.start)
            print(f"\r\033[K  {left} left · {stage}"[:100], end="", file=sys.stderr, flush=True)

    def remaining(self, elapsed: float) -> str:
        """Return the remaining time in words, after some seconds of the installation."""
        seconds = max(self.expected - elapsed, 10) + self.afterwards
        return f"about {round(seconds)} s" if seconds < 90 else f"about {round(seconds / 60)} min"

    def clear(self) -> None:
        """Clear the line."""
        if self.shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def stage_of(line: str) -> str | None:
    """Return the stage that a line of pip's output starts, or None."""
    for pattern, text in STAGES:
        found = pattern.match(line)
        if found is not None:
            return text.format(*found.groups())
    return None


def lines_of(command: list[str]) -> Iterator[str]:
    """Run a command and yield the lines of its output. Exits with its last lines if it fails."""
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-19:], line]
            yield line
    if process.returncode:
        sys.exit(f"\n{''.join(last)}{' '.join(command)} failed; correct the cause above and run the command again")


def install(python: Path, extra: str, status: Status) -> None:
    """Install tiewise from this folder with the packages of an extra."""
    pip = [str(python), "-m", "pip", "install", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    for line in lines_of([*pip, "-e", f"{ROOT}[{extra}]"]):
        stage = stage_of(line)
        if stage is not None:
            status.show(stage)


@dataclass
class BackgroundCompiler:
    """A thread that compiles the modules of `IMPORTED` as they appear in a folder of packages.

    A module that pip has written only in part is compiled again, at the latest when Python imports it: its compiled
    file holds another size or time of the source.
    """

    packages: Path  # site-packages
    compiled: dict[Path, int] = field(default_factory=dict)  # module → its size when it was compiled
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> BackgroundCompiler:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        """Compile until pip has ended."""
        while not self.ended.wait(0.5):
            for name in IMPORTED:
                self._compile_package(self.packages / name)

    def _compile_package(self, package: Path) -> None:
        """Compile the new modules of a package, but for the folders that training does not import."""
        for folder, below, names in os.walk(package):
            below[:] = [name for name in below if name not in UNUSED]
            for name in names:
                if self.ended.is_set():
                    return
                if name.endswith(".py"):
                    self._compile(Path(folder, name))

    def _compile(self, module: Path) -> None:
        """Compile a module whose size is new. Python reports a faulty one when it is imported."""
        try:
            size = module.stat().st_size
            if self.compiled.get(module) != size:
                self.compiled[module] = size
                py_compile.compile(str(module), doraise=True)
        except (OSError, py_compile.PyCompileError):
            self.compiled.pop(module, None)


def packages_of(python: Path) -> Path:
    """Return the folder that pip installs the packages of an environment into."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


def compile_modules(python: Path, status: Status) -> None:
    """Compile all modules of the environment. Templates that are no valid Python stay as they are."""
    status.show("compiling Python modules")
    command = [python, "-m", "compileall", "-q", "-j", "0", packages_of(python)]
    subprocess.run(command, capture_output=True, check=False)


def build_kernels(python: Path, status: Status) -> None:
    """Compile the kernels of the loss. Where that is impossible, a slower path computes the same."""
    status.show("compiling the kernels of the loss")
    subprocess.run([python, "-m", "tiewise", "kernels", "build"], capture_output=True, check=False)


def main() -> None:
    """Set up the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("extra", choices=sorted(PACKAGES))
    parser.add_argument("--then", type=float, default=0, metavar="SECONDS", help="expected time of the next step")
    arguments = parser.parse_args()
    extra = arguments.extra
    status = Status(SECONDS[extra], arguments.then, time.monotonic(), sys.stderr.isatty())
    what = f"tiewise[{extra}] into {arguments.folder}: {PACKAGES[extra]} packages, {SIZES[extra]}"
    print(f"Installing {what}; {status.remaining(0)} in all.", file=sys.stderr)
    python = arguments.folder / "bin" / "python"
    if not python.exists():
        status.show("making a virtual environment")
        venv.create(arguments.folder, with_pip=True)
    if extra == "dev":
        install(python, extra, status)
        compile_modules(python, status)
        build_kernels(python, status)
    else:
        with BackgroundCompiler(packages_of(python)):
            install(python, extra, status)
    status.clear()
    print(f"Installed in {time.monotonic() - status.start:.0f} s.", file=sys.stderr)


if __name__ == "__main__":
    main()
