"""Rewrite a folder repeatedly, each time in a fork that gets a signal at another line.

    python interrupted_rewrite.py FOLDER SIGNAL STEP

test_signals.py runs this program. FOLDER/a is the source. The signal arrives at line 1, 1 + STEP, … of the lines that
`untie` executes. A fork of this process copies little memory, because it does not import torch. The program prints one
JSON object: the number of lines, and for each moment the exit code of the fork and the names that it left in FOLDER.
It moves results to FOLDER-results.
"""

import itertools
import json
import linecache
import os
import signal
import sys
from pathlib import Path

from tiewise.checkpoint.rewrite import engine, file_plan, file_writing, new_folder, provenance, untie, verification
from tiewise.core import errors

TRACED = tuple(
    module.__file__ for module in (new_folder, engine, file_plan, file_writing, provenance, verification, errors)
)


def untie_traced(source, to, on_line):
    """Untie a folder and call `on_line` at every line of the engine, in a reproducible order."""

    def line(frame, event, argument):
        if frame.f_code.co_filename not in TRACED:
            return None
        # Python checks for signals at calls and loops, and never at a bare `try:`
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() != "try:":
            on_line()
        return line

    sys.settrace(line)
    try:
        untie(source, to)
    finally:
        sys.settrace(None)


def exit_code_at(moment, number, source, to):
    """Rewrite in a fork that gets a signal at the given line, and return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = itertools.count(moment, -1)
    next(left)
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code = 0
    try:
        untie_traced(source, to, lambda: next(left) or os.kill(os.getpid(), number))
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code
    finally:
        os._exit(code)


def main(folder, number, step):
    """Rewrite once without a signal, then with one at every `step`-th line; return the printed record."""
    source, whole = folder / "a", folder / "whole"
    results = folder.with_name(f"{folder.name}-results")
    results.mkdir()
    lines = []
    untie_traced(source, whole, lambda: lines.append(1))
    whole.rename(results / "whole")
    moments = {}
    for moment in range(1, len(lines), step):
        result = folder / f"b{moment}"
        code = exit_code_at(moment, number, source, result)
        moments[moment] = {"code": code, "left": sorted({path.name for path in folder.iterdir()} - {"a"})}
        if result.exists():
            result.rename(results / result.name)
    return {"lines": len(lines), "moments": moments}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
