"""One verb in a process of its own, which can be killed, starved of disk, and watched.

    python verb_child.py VERB SOURCE TO [OPTIONS AS JSON]

Prints "ready", waits for a line, works, and prints one JSON object: the largest anonymous resident memory that was
seen, in bytes, or the error. `limit` among the options bounds the size of a file that may be written.
"""

import json
import resource
import signal
import sys
import threading

from tiewise import rewrite
from tiewise.core.errors import CheckpointError


def anonymous():
    """Anonymous resident memory of this process, bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def watch(seen, done):
    while not done.wait(0.005):
        seen[0] = max(seen[0], anonymous())


def main():
    verb, source, to = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    limit = options.pop("limit", None)
    print("ready", flush=True)
    sys.stdin.readline()
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    seen, done = [anonymous()], threading.Event()
    watcher = threading.Thread(target=watch, args=(seen, done))
    watcher.start()
    try:
        receipt = getattr(rewrite, verb)(source, to, **options)
        print(json.dumps({"peak": seen[0], "linked": receipt.linked, "rewritten": receipt.rewritten}))
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}))
    finally:
        done.set()
        watcher.join()


if __name__ == "__main__":
    main()
