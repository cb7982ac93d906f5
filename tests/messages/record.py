"""Run the command lines of message files, and write what they print: `python -m tests.messages.record [NAME…]`."""

import re
import shlex
import sys
import tempfile
from pathlib import Path

from tests.answers import inputs, record, running, texts

FOLDER = Path(__file__).parent
PROMPT, HEADING = "$ tiewise ", "#"
ENVIRONMENT = {"COLUMNS": "2000"}  # no message breaks into lines at this width
# inputs that no command line names, but that an input links to
LINKED = {"b001-link": "outside.safetensors"}


def files():
    """Return {name of a message file: its path}."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.txt"))}


def blocks(text):
    """Return the headings and command lines of a message file, each with the text below it."""
    parts = re.split(r"^(?=\$ tiewise |#)", text, flags=re.MULTILINE)
    return [part.strip() for part in parts if part.strip()]


def rerun(text, place):
    """Return a message file with the present answer to each of its command lines."""
    return "\n\n".join(_answered(block, place) for block in blocks(text)) + "\n"


def _answered(block, place):
    """Return a command line with the answer that it gives now; a heading as it is."""
    first = block.split("\n")[0]
    if block.startswith(HEADING):
        return block
    return "\n".join([first, *_answer(first.removeprefix(PROMPT), place)])


def _answer(line, place):
    """Return the lines that a command line prints: its answer, its errors, and its exit code."""
    folder = place.new_folder(_inputs(line))
    try:
        ended = running.run(shlex.split(line), folder, ENVIRONMENT)
        printed = texts.lines(texts.normalised(ended.out, folder))[:1]
        printed += texts.lines(texts.normalised(ended.err, folder))
    finally:
        place.drop(folder)
    if ended.code != 0:
        printed.append(f"exit {ended.code}")
    return [line for line in printed if line.strip()]


def _inputs(line):
    """Return the names of the inputs that a command line names, and of those that they link to."""
    words = set(re.findall(r"[\w.-]+", line))
    words |= {LINKED[word] for word in words & LINKED.keys()}
    return [name for name in inputs.names() if name in words]


def main():
    """Write the files of the names on the command line; all without one."""
    known = files()
    names = sys.argv[1:] or list(known)
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"no file {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as root:
        place = record.Place(root)
        for name in names:
            path = known[name]
            path.write_text(rerun(path.read_text(encoding="utf-8"), place), encoding="utf-8")


if __name__ == "__main__":
    main()
