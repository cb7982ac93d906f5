"""Compare findings of `check` and figures of `plan` between two revisions, on generated folders and public configs.

    python tools/ecosystem.py                                  the working tree against HEAD, 200 generated folders
    python tools/ecosystem.py --configs FOLDER --against v0.1  also every config.json below FOLDER
    python tools/ecosystem.py --folders 0 --configs FOLDER     public configs alone

The folders are the broken ones of `tests/answers/faults.py`, then random ones of `tests/checkpoint/random_folders.py`,
every second of them healthy. `--seed` decides them. Both revisions read the same files, each in one process, without
the network. They build no class of transformers, unless `--build` is given.

The first line counts what changed; a table lists it. Exit code 0: nothing changed; 1: something did; 2: a revision or
an argument cannot be used; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests" / "boundary")]

from revisions import RevisionError, worktree  # noqa: E402

CHILD = ROOT / "tools" / "ecosystem_child.py"
KINDS = ("findings", "figures")
ABSENT = "–"
MOST_WIDTH = 48  # letters of a cell
Outcomes = Mapping[str, Mapping[str, Mapping[str, Any]]]  # {name of a path: {kind: {what: value}}}


class CannotRun(Exception):
    """Error of an argument or a revision, in one line."""


@dataclass(frozen=True)
class Change:
    """One finding or figure that differs between two revisions."""

    path: str  # name of the folder or config
    kind: str  # "findings" or "figures"
    what: str  # rule and place, loader, or figure
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """All changes between two revisions, and the number of values that were compared."""

    changes: tuple[Change, ...]
    compared: Mapping[str, int]  # {kind: number of values}

    def answer(self) -> str:
        """Return the first line of the output."""
        parts = []
        for kind in KINDS:
            changed = sum(change.kind == kind for change in self.changes)
            parts.append(f"{changed:,} of {self.compared[kind]:,} {kind}")
        return f"{' and '.join(parts)} changed"


def compare(before: Outcomes, after: Outcomes) -> Comparison:
    """Return the differences of two results, in the order of the second one."""
    changes: list[Change] = []
    compared = dict.fromkeys(KINDS, 0)
    for path, outcome in after.items():
        for kind in KINDS:
            old, new = before.get(path, {}).get(kind, {}), outcome[kind]
            for what in dict.fromkeys((*new, *old)):
                compared[kind] += 1
                was, now = _as_text(old, what), _as_text(new, what)
                if was != now:
                    changes.append(Change(path, kind, what, was, now))
    return Comparison(tuple(changes), compared)


def _as_text(values: Mapping[str, Any], what: str) -> str:
    """Return a value as text; a dash if a revision does not have it."""
    if what not in values:
        return ABSENT
    value = values[what]
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def table(changes: Sequence[Change], most: int) -> list[str]:
    """Return the lines of the table of changes; the last one counts those that are left out."""
    header = ("path", "", "finding or figure", "before", "after")
    rows = [header, *((one.path, one.kind, one.what, one.before, one.after) for one in changes[:most])]
    rows = [tuple(_shortened(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    if len(changes) > most:
        lines.append(f"… and {len(changes) - most:,} more (--most prints them)")
    return lines


def _shortened(cell: str) -> str:
    """Return a cell in one line of at most `MOST_WIDTH` letters."""
    line = " ".join(cell.split())
    if len(line) <= MOST_WIDTH:
        return line
    return f"{line[: MOST_WIDTH - 1]}…"


def generate_folders(parent: Path, count: int, seed: int) -> dict[str, Path]:
    """Write folders below `parent`, and return them by name.

    Args:
        parent: an empty folder.
        count: number of folders.
        seed: decides classes, settings and changes of the random ones.
    """
    made = _write_faults(parent, count)
    if len(made) == count:
        return made
    import random_folders
    import saved_models

    random_folders.tr.logging.set_verbosity_error()
    random_folders.tr.utils.logging.disable_progress_bar()
    names = [name for name in saved_models.classes() if name.endswith(("ForCausalLM", "ForConditionalGeneration"))]
    for number in range(count - len(made)):
        is_healthy = number % 2 == 0
        draw = seed * 1_000_000 + number
        if is_healthy:
            checkpoint = random_folders.draw_healthy(draw, names)
        else:
            checkpoint = random_folders.draw_checkpoint(draw, names)
        name = f"{'healthy' if is_healthy else 'changed'}-{number:03d}-{checkpoint.model_type}"
        folder = parent / name
        folder.mkdir()
        checkpoint.write(folder)
        made[name] = folder
    return made


def _write_faults(parent: Path, most: int) -> dict[str, Path]:
    """Write the first of the tests' broken folders, and return them by name."""
    from tests.answers.faults import FAULTS

    made = {}
    for name in list(FAULTS)[:most]:
        FAULTS[name](parent / name)
        made[name] = parent / name
    return made


def configs_below(folder: Path) -> dict[str, Path]:
    """Return the folder of every config.json below a folder, by its relative path.

    Raises:
        CannotRun: there is no such folder, or it has no config.json.
    """
    if not folder.is_dir():
        raise CannotRun(f"--configs {folder}: no such folder")
    found = {str(path.parent.relative_to(folder)): path.parent for path in sorted(folder.rglob("config.json"))}
    if not found:
        raise CannotRun(f"--configs {folder}: no config.json below it")
    return found


def outcomes_of(tree: Path, paths: Mapping[str, Path], builds: bool) -> Outcomes:
    """Return the outcomes of the package of a tree on all paths, from one child process.

    Raises:
        CannotRun: the child ended without a result, or Python imported another package.
    """
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["TIEWISE_NO_BUILD"] = "0" if builds else "1"
    request = json.dumps({name: str(path) for name, path in paths.items()})
    command = [sys.executable, "-W", "ignore", str(CHILD)]
    done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise CannotRun(f"the package of {tree} ended with exit code {done.returncode}: {last[:300]}")
    reply = json.loads(done.stdout)
    if tree.resolve() not in Path(reply["file"]).resolve().parents:
        raise CannotRun(f"Python imports {reply['file']}, not the package of {tree}")
    outcomes: Outcomes = reply["outcomes"]
    return outcomes


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, metavar="FOLDER", help="folder with public configs, at any depth")
    parser.add_argument("--against", default="HEAD", metavar="REVISION", help="earlier revision of git (%(default)s)")
    parser.add_argument("--folders", type=int, default=200, metavar="N", help="generated folders (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated folders (%(default)s)")
    parser.add_argument("--build", action="store_true", help="let both revisions build classes with transformers")
    parser.add_argument("--most", type=int, default=100, metavar="N", help="rows of the table (%(default)s)")
    options = parser.parse_args()
    for name in ("folders", "seed", "most"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} is below zero")
    if options.folders == 0 and options.configs is None:
        parser.error("nothing to run: give --configs, or --folders above zero")
    return options


def _stages(options: argparse.Namespace, scratch: Path) -> Iterator[Outcomes]:
    """Yield the outcomes of the earlier revision, then those of the working tree."""
    paths = configs_below(options.configs.resolve()) if options.configs is not None else {}
    with worktree(options.against, ROOT) as tree:
        _report(f"writing {options.folders} folders")
        paths = {**generate_folders(scratch, options.folders, options.seed), **paths}
        _report(f"{options.against} on {len(paths)} paths")
        yield outcomes_of(tree, paths, options.build)
    _report(f"the working tree on {len(paths)} paths")
    yield outcomes_of(ROOT, paths, options.build)


def _report(stage: str) -> None:
    """Print the stage that begins to standard error."""
    print(f"ecosystem: {stage}", file=sys.stderr, flush=True)


def main() -> int:
    """Compare two revisions; return the exit code."""
    options = parsed_options()
    try:
        with tempfile.TemporaryDirectory(prefix="ecosystem-") as scratch:
            before, after = _stages(options, Path(scratch))
    except (CannotRun, RevisionError) as error:
        print(f"ecosystem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ecosystem: interrupted", file=sys.stderr)
        return 130
    comparison = compare(before, after)
    print(f"{comparison.answer()} from {options.against} to the working tree, on {len(after)} paths")
    if comparison.changes:
        print("\n".join(table(comparison.changes, options.most)))
    return int(bool(comparison.changes))


if __name__ == "__main__":
    raise SystemExit(main())
