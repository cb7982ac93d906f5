"""Fuzz the readers of untrusted files, guided by the branches that an input reaches (atheris, libFuzzer).

    python tools/fuzz.py gguf --minutes 10            one reader; the same line continues with the corpus that it left
    python tools/fuzz.py all --minutes 9              every reader for the same time
    python tools/fuzz.py gguf --inputs 1000000 --record     until so many inputs were read, then note the run
    python tools/fuzz.py gguf --repeat FILE           read one saved input and print its outcome
    python tools/fuzz.py --summary                    sums of the noted runs

Readers: safetensors, gguf, onnx, sentencepiece (binary files); index, config, tokenizer, adapter, draft (JSON).
tools/fuzzing/readers.py has one row for each.

An input passes if it is read, or refused by an error of tiewise: one printable line with a remedy. Anything else fails:
another exception, more than 512 MB of memory of the process, more than 5 seconds. The input and its traceback stay in
the folder `failures` next to the corpus, one for each place in the code. Five mutations in six keep a file valid: JSON
that parses, right lengths and counts. Corpus and failures are in the user's cache (--corpus: elsewhere).

Exit code 0: no failure; 1: at least one; 2: wrong arguments, or atheris is missing; 130: interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

from fuzzing.readers import READERS, FuzzedReader, outcome  # noqa: E402

from tiewise.core.files import cache_folder, write_atomically  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "fuzz.json"
CHILD = ROOT / "tools" / "fuzzing" / "child.py"
MOST_MB, MOST_SECONDS = 512, 5
ALL = "all"


@dataclass(frozen=True)
class Run:
    """One run of one reader."""

    reader: str
    inputs: int
    read: int  # inputs that were not refused
    failures: int
    seconds: float
    slowest_ms: float  # CPU time of the slowest input
    peak_mb: int  # largest memory of the process, with Python and NumPy
    corpus: int  # inputs that reach different branches, after the run
    command: str
    revision: str

    def line(self) -> str:
        """Return the run in one line."""
        rate = self.inputs / max(self.seconds, 1e-9)
        speed = f"{self.seconds:.0f} s, {rate:,.0f}/s, slowest {self.slowest_ms:.0f} ms, peak {self.peak_mb} MB"
        counts = f"{self.inputs:,} inputs, {self.read:,} read, {self.failures} failed"
        return f"{self.reader}: {counts}; {speed}, corpus {self.corpus:,}"


@dataclass(frozen=True)
class Places:
    """Folders of one reader."""

    corpus: Path
    failures: Path

    @classmethod
    def of(cls, reader: FuzzedReader, home: Path) -> Places:
        """Return the folders of a reader, created, with its seeds in the corpus."""
        places = cls(home / reader.name / "corpus", home / reader.name / "failures")
        for folder in (places.corpus, places.failures):
            folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(reader.seeds()):
            (places.corpus / f"seed-{number}").write_bytes(seed)
        return places

    def found(self) -> list[Path]:
        """Return the saved inputs that failed."""
        return sorted(path for path in self.failures.iterdir() if path.suffix != ".txt")


def main() -> int:
    """Run what the command line says; return the exit code."""
    options = parsed_options()
    if options.summary:
        print(summary(recorded()))
        return 0
    if options.repeat is not None:
        return repeat(READERS[options.reader], options.repeat)
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed; pip install atheris (Linux on x86_64)", file=sys.stderr)
        return 2
    failed = False
    for reader in chosen(options.reader):
        run = run_one(reader, options)
        print(run.line(), flush=True)
        if options.record:
            record(run)
        failed |= run.failures > 0
    return int(failed)


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", nargs="?", choices=[*READERS, ALL], help="reader to fuzz, or all")
    parser.add_argument("--minutes", type=float, help="time for each reader")
    parser.add_argument("--inputs", type=int, help="inputs for each reader")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="folder for corpus and failures")
    parser.add_argument("--record", action="store_true", help=f"note the run in {RECORD.relative_to(ROOT)}")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="read one saved input and print its outcome")
    parser.add_argument("--summary", action="store_true", help="print the sums of the noted runs")
    options = parser.parse_args()
    if options.summary:
        return options
    if options.reader is None:
        parser.error(f"name a reader: {', '.join(READERS)}, or {ALL}")
    if options.repeat is not None:
        if options.reader == ALL:
            parser.error("--repeat needs the name of one reader")
        return options
    limit = options.minutes if options.inputs is None else options.inputs
    if limit is None or limit <= 0:
        parser.error("give --minutes or --inputs, above 0")
    if options.corpus is None:
        options.corpus = cache_folder() / "fuzz"
    return options


def chosen(name: str) -> Iterable[FuzzedReader]:
    """Return the readers that a name means."""
    return READERS.values() if name == ALL else [READERS[name]]


def repeat(reader: FuzzedReader, path: Path) -> int:
    """Read one saved input in this process and print the outcome."""
    try:
        data = path.read_bytes()
    except OSError as error:
        print(f"fuzz: {path}: {error.strerror}", file=sys.stderr)
        return 2
    error = outcome(reader, data)
    print("read" if error is None else f"refused: {error}")
    return 0


def run_one(reader: FuzzedReader, options: argparse.Namespace) -> Run:
    """Fuzz one reader in a child process and return its numbers."""
    from fuzzing.child import COUNTS, Counts  # imports atheris

    places = Places.of(reader, options.corpus)
    before = len(places.found())
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="fuzz-") as state:
        state.write(bytes(COUNTS.size))
        state.flush()
        ended = run_child(command_line(reader, places, Path(state.name), options), places)
        counts = Counts.of(Path(state.name).read_bytes())
    if ended.failed:
        counts.failures += 1
        print(f"{reader.name}: the process ended: {ended.reason}", file=sys.stderr)
    for path in places.found()[before:] if counts.failures else ():
        print(f"{reader.name}: {path}", file=sys.stderr)
    return Run(
        reader=reader.name,
        inputs=counts.inputs,
        read=counts.read,
        failures=counts.failures,
        seconds=round(time.monotonic() - start, 1),
        slowest_ms=round(1000 * counts.slowest, 1),
        peak_mb=ended.peak_mb,
        corpus=len(list(places.corpus.iterdir())),
        command=" ".join(["python tools/fuzz.py", *sys.argv[1:]]),
        revision=revision(),
    )


def command_line(reader: FuzzedReader, places: Places, state: Path, options: argparse.Namespace) -> list[str]:
    """Return the command of the child process, with the limits that libFuzzer watches."""
    limits = [f"-rss_limit_mb={MOST_MB}", f"-timeout={MOST_SECONDS}", f"-max_len={reader.most_bytes}", "-len_control=0"]
    limits += ["-mutate_depth=2", "-cross_over=0"]  # a mutation makes several changes, and keeps the file valid
    if options.inputs is not None:
        limits.append(f"-runs={options.inputs}")
    if options.minutes is not None:
        limits.append(f"-max_total_time={max(1, round(60 * options.minutes))}")
    child = [sys.executable, str(CHILD), reader.name, str(state), str(places.failures)]
    return [*child, *limits, f"-artifact_prefix={places.failures}/", str(places.corpus)]


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    failed: bool
    reason: str  # last line that it wrote about its end
    peak_mb: int


def run_child(command: Sequence[str], places: Places) -> Ended:
    """Run the child process and wait for it. Ctrl-C ends it, and then this process."""
    log = places.corpus.with_name("log.txt")
    with open(log, "wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGKILL)
            child.wait()
            print("fuzz: interrupted; the corpus is kept", file=sys.stderr)
            sys.exit(130)
        child.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(errors="replace")
    found = re.findall(r"^(?:SUMMARY|==\d+== ?ERROR|\w*Error):?.*$", text, re.MULTILINE)
    reason = found[-1] if found else f"exit code {child.returncode}, see {log}"
    return Ended(child.returncode != 0, reason, usage.ru_maxrss // 1024)


def revision() -> str:
    """Return the commit of the working tree; "+" marks uncommitted changes of the package."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True).stdout
    return f"{head or 'unknown'}{'+' if changed else ''}"


def recorded() -> list[Run]:
    """Return the noted runs."""
    if not RECORD.exists():
        return []
    return [Run(**run) for run in json.loads(RECORD.read_text())["runs"]]


def record(run: Run) -> None:
    """Note a run."""
    lines = ",\n".join(f"  {json.dumps(asdict(one))}" for one in [*recorded(), run])
    write_atomically(RECORD, f'{{"runs": [\n{lines}\n]}}\n')


def summary(runs: Sequence[Run]) -> str:
    """Return a table of the noted runs: for each reader their sums and their worst figures."""
    rows = ["| reader | inputs | needed | read | failed | slowest, ms | peak, MB |", "|---|---|---|---|---|---|---|"]
    for reader in READERS.values():
        own = [run for run in runs if run.reader == reader.name]
        inputs, read, failures = (sum(getattr(run, key) for run in own) for key in ("inputs", "read", "failures"))
        slowest = max((run.slowest_ms for run in own), default=0)
        peak = max((run.peak_mb for run in own), default=0)
        rows.append(
            f"| {reader.name} | {inputs:,} | {reader.needed:,} | {read:,} | {failures} | {slowest:.0f} | {peak} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
