"""Run the recorded cases on two revisions of the package, and print differences.

    python tools/compare_answers.py main HEAD
    python tools/compare_answers.py main . --only "plan gpt2" "check tied"
    python tools/compare_answers.py v1 HEAD --renames renames.json

`.` is the working tree with its uncommitted changes. Both revisions run the cases of the second one and get the same
inputs: `tests/answers` and the writers in `tests/checkpoint` use only the command line and public names, so one set of
cases runs with any layout of the package. Figures are compared to 1e-9, trained ones to 1e-3; the recorded
answers in the repository to 1e-5 and 1e-2, because processors round differently.

Exit code 0: no difference; 1: differences; 2: a revision or a case cannot run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from revisions import RevisionError, worktree  # noqa: E402
from tests.answers.compare import ONE_MACHINE, differences  # noqa: E402
from tests.answers.describe import flat  # noqa: E402

TOLERANCES = (
    "import json; from tests.answers.cases import CASES; print(json.dumps({n: c.tolerance for n, c in CASES.items()}))"
)
PACKAGE_FILE = "import tiewise; print(tiewise.__file__)"


@dataclass(frozen=True)
class Setup:
    """Root of the cases, and the choice of those that run.

    Attributes:
        cases: root of the tree whose `tests/answers` are run.
        only: names of cases; none for all.
        quick: whether slow cases are left out.
    """

    cases: Path
    only: tuple[str, ...]
    quick: bool


class CannotRun(Exception):
    """Error of a revision or a case that cannot run."""


@contextmanager
def tree_of(revision):
    """Yield the tree of a revision.

    That is the working tree for `.`, otherwise a git worktree that is removed afterwards.
    """
    if revision == ".":
        yield ROOT
        return
    with worktree(revision, ROOT) as tree:
        yield tree


def run_python(arguments, package, setup):
    """Run Python with the package of one tree and the cases of another; return its output."""
    paths = os.pathsep.join([str(package / "src"), str(setup.cases)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=setup.cases, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CannotRun(f"the cases do not run with {package}:\n{done.stderr.strip()[-3000:]}")
    return done.stdout


def recorded_in(path):
    """Return {case: answer} of one file of answers."""
    return flat(json.loads(path.read_text(encoding="utf-8")))


def answers_of(package, setup):
    """Return {case: answer} of the package of one tree."""
    home = Path(run_python(["-c", PACKAGE_FILE], package, setup).strip())
    if package / "src" not in home.parents:
        raise CannotRun(f"Python imports {home}, not the package of {package}")
    with tempfile.TemporaryDirectory() as folder:
        chosen = ["--only", *setup.only] if setup.only else []
        chosen += ["--quick"] if setup.quick else []
        run_python(["-m", "tests.answers.record", "--into", folder, *chosen], package, setup)
        answers = {}
        for path in sorted(Path(folder).glob("*.json")):
            answers |= recorded_in(path)
    return answers


def renamed(value, renames):
    """Return an answer with words replaced, in keys and texts.

    Only complete words are replaced. Digests of long texts stay.
    """
    if isinstance(value, dict):
        return {renamed(key, renames): renamed(part, renames) for key, part in value.items()}
    if isinstance(value, list):
        return [renamed(part, renames) for part in value]
    if isinstance(value, str):
        for old, new in renames.items():
            value = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, value)
    return value


def compared(old, new, setup, renames):
    """Return one line for each difference between two revisions."""
    with tree_of(old) as first, tree_of(new) as second:
        setup = setup if setup.cases != Path() else Setup(second, setup.only, setup.quick)
        tolerances = json.loads(run_python(["-c", TOLERANCES], second, setup))
        before, after = renamed(answers_of(first, setup), renames), answers_of(second, setup)
    lines = []
    for name in after:
        for line in differences(before.get(name, {}), after[name], ONE_MACHINE[tolerances[name]]):
            lines.append(f"{name}: {line}")
    return lines


def main():
    """Compare two revisions and exit with the code of the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="REV_A", help="a revision of git, or . for the working tree")
    parser.add_argument("new", metavar="REV_B", help="the same; its cases are run")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="run only these cases")
    parser.add_argument("--quick", action="store_true", help="leave the slow cases out")
    parser.add_argument("--current", action="store_true", help="run the cases of the working tree, not of REV_B")
    parser.add_argument(
        "--renames", type=Path, metavar="FILE", help="JSON table of intended renames: old word, new word"
    )
    arguments = parser.parse_args()
    renames = json.loads(arguments.renames.read_text(encoding="utf-8")) if arguments.renames else {}
    setup = Setup(ROOT if arguments.current else Path(), tuple(arguments.only), arguments.quick)
    try:
        lines = compared(arguments.old, arguments.new, setup, renames)
    except (CannotRun, RevisionError) as error:
        print(f"compare_answers: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(lines) if lines else "no difference")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
