"""A child process that runs one command line after the other against a local Hub.

    with HubServer() as hub, HubChild(hub, folder) as tiewise:
        done = tiewise("check", "hf://me/model")

huggingface_hub reads its environment once, so a process that uses the server must be started for it. The child reads a
JSON list of words per line and answers with code, stdout and stderr.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass
class Ended:
    """Exit code, output and duration of a command line."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def record(self):
        """Return the JSON object on stdout."""
        return json.loads(self.out)


class HubChild:
    """Process with the environment of a server."""

    def __init__(self, hub, folder, token=None, **environment):
        of_hub = ("HF_", "HUGGING", "TRANSFORMERS_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(of_hub)}
        clean |= {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1", **hub.environment(folder, token)}
        clean = {name: value for name, value in clean.items() if name != "HF_HUB_OFFLINE"} | environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean,
            text=True,
            cwd=os.getcwd(),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.communicate()

    def __call__(self, *words):
        """Run a command line."""
        print(json.dumps([str(word) for word in words]), file=self._process.stdin, flush=True)
        started = time.monotonic()
        code, out, err = json.loads(self._process.stdout.readline())
        return Ended(code, out, err, time.monotonic() - started)


def serve():
    """Run each command line that standard input names."""
    from tiewise.cli.main import main

    for line in sys.stdin:
        sys.argv = ["tiewise", *json.loads(line)]
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)


if __name__ == "__main__":
    serve()
