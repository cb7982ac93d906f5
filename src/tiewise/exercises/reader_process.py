"""`python -m tiewise.exercises.reader_process N FILE`: what FILE's function returns for every case, as .npz on stdout.

What the file prints goes to stderr. Memory is limited once it is imported: libraries reserve far more than they use.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from tiewise.exercises import EXERCISES


def limit(megabytes: int) -> None:
    """Let this process allocate so much more than it has; where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + (megabytes << 20),) * 2)


def main() -> None:
    """Call the reader's function; the last line of stderr says what went wrong."""
    asked, file = EXERCISES[int(sys.argv[1])], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, str(file.resolve().parent))
    found: dict[str, np.ndarray] = {}
    try:
        function = runpy.run_path(str(file), run_name="answer").get(asked.name)
        if not callable(function):
            raise SystemExit(f"it defines no function {asked.name}")
        cases = asked.cases()
        limit(asked.megabytes)
        for place, case in enumerate(cases):
            answer = function(*(value.copy() if isinstance(value, np.ndarray) else value for value in case))
            if answer is None:
                raise SystemExit(f"{asked.name} returns nothing")
            found[str(place)] = np.asarray(answer, float)
    except ModuleNotFoundError as error:
        fix = f", which pip install 'tiewise[{asked.needs}]' brings" if asked.needs else ""
        raise SystemExit(f"it needs {error.name}{fix}") from None
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch has no error of its own for it
            raise SystemExit(f"{asked.name} needs more than {asked.megabytes} MB for one case") from None
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        line = error.lineno if isinstance(error, SyntaxError) else at and at.tb_lineno
        raise SystemExit(f"{type(error).__name__} in line {line}: {' '.join(str(error).split())}") from None
    held = io.BytesIO()
    np.savez(held, **found)  # type: ignore[arg-type]
    out.write(held.getvalue())


if __name__ == "__main__":
    main()
