"""Run command lines as in a light install: only base dependencies and their requirements can be imported.

Argument: a JSON list of command lines. Prints a list of {code, out, err}.
"""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, packages_distributions, requires


def add_requirements(name, seen):
    """Add the distribution `name` and its requirements without extras to `seen`."""
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:  # a requirement of another system
        return seen
    seen.add(name)
    for line in lines:
        other = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
        if "extra ==" not in line and other not in seen:
            add_requirements(other, seen)
    return seen


base = add_requirements("tiewise", set())
for module, distributions in packages_distributions().items():
    if module not in sys.modules and not base & {name.lower().replace("_", "-") for name in distributions}:
        sys.modules[module] = None

from tiewise.cli.main import main  # noqa: E402

outputs = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["tiewise", *arguments]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        outputs.append({"code": end.code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(outputs))
