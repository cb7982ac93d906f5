"""Run the recorded cases and keep their answers: one file in `recorded/` for each command.

    python -m tests.answers.record                          # all of them
    python -m tests.answers.record --only "check tied" "plan gpt2"

An answer has, for each command line of the case: the exit code; standard output and standard error as a person reads
them; every leaf of the JSON by its path; and a description of each file that was written.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.answers import describe, inputs, python_names, running, texts
from tests.answers.cases import CASES

RECORDED = Path(__file__).parent / "recorded"
SHORT = 110  # an entry of at most so many characters is printed on one line
MOVED = ("tie", "untie", "repair", "vocab trim", "adapter slim")  # verbs that copy numbers and compute none


class Place:
    """Folder of the inputs, each written once, and of the folders in which cases run."""

    def __init__(self, root):
        self.root = Path(root).resolve()
        self.store = self.root / "inputs"
        self.store.mkdir(parents=True, exist_ok=True)
        self.count = 0

    def give(self, names, folder):
        """Copy inputs into a folder."""
        for name in names:
            if not (self.store / name).exists():
                inputs.make(name, self)
            stored, to = self.store / name, folder / name
            if stored.is_dir():
                shutil.copytree(stored, to, symlinks=True)
            else:
                shutil.copy2(stored, to)

    def new_folder(self, names):
        """Return a new folder with some inputs."""
        self.count += 1
        folder = self.root / f"case-{self.count}" / "here"
        folder.mkdir(parents=True)
        self.give(names, folder)
        return folder

    def drop(self, folder):
        """Remove the folder of a case."""
        shutil.rmtree(folder.parent)


def answer(case, place, check_json=None):
    """Run a case and return its answer.

    Args:
        case: the case.
        place: where inputs are and folders can be made.
        check_json: called with a command and its JSON.
    """
    if case.function:
        return describe.leaves(python_names.FUNCTIONS[case.function]())
    folders = [place.new_folder(case.inputs())]
    folders.append(folders[0] if case.resumed else place.new_folder(case.inputs()))
    try:
        result = {}
        for number, line in enumerate(case.lines, 1):
            label = line if len(case.lines) == 1 else f"{number}: {line}"
            result[label] = _answer_line(case, line, folders, check_json)
        return result
    finally:
        for folder in set(folders):
            place.drop(folder)


def _answer_line(case, line, folders, check_json):
    """Run one command line as a person reads it, and with --json; a resumed case trains once."""
    before = [describe.files(folder) for folder in folders]
    arguments = shlex.split(line)
    as_text = running.run(_expanded(arguments, folders[0]), folders[0], case.environment)
    result = {"exit": as_text.code}
    result["stdout"] = describe.text_leaf(texts.normalised(as_text.out, folders[0]))
    result["stderr"] = describe.text_leaf(texts.normalised(as_text.err, folders[0]))
    written = _new_files(folders[0], before[0])
    if written:
        result["files"] = {name: _described(case, folders[0], name) for name in written}
    if not case.json:
        return result
    line_again = [arguments[0], "--out", "out", "--resume"] if case.resumed else _expanded(arguments, folders[1])
    again = running.run([*line_again, "--json"], folders[1], case.environment)
    if again.code != as_text.code:
        result["json exit"] = again.code
    if again.out.strip():
        record = texts.parsed(again.out, folders[1])
        result["json"] = dict(sorted(describe.leaves(record).items()))
        if check_json is not None and again.code in (0, 1):
            check_json(case.command, json.loads(again.out))
    if _new_files(folders[1], before[1]) != written:
        result["json files"] = _new_files(folders[1], before[1])
    return result


def _expanded(arguments, folder):
    """Replace an argument with a star by the first path that it matches."""
    return [
        min((str(path.relative_to(folder)) for path in folder.glob(argument)), default=argument)
        if "*" in argument and not argument.startswith("-")
        else argument
        for argument in arguments
    ]


def _new_files(folder, before):
    return [name for name, state in describe.files(folder).items() if before.get(name) != state]


def _described(case, folder, name):
    moved = case.command in MOVED and case.tolerance != "trained" and "mean" not in case.name
    each_tensor = case.tolerance != "trained"
    return describe.file_leaf(folder / name, folder, moved=moved, each_tensor=each_tensor)


def file_name(command):
    """Return the name of the file with the answers of a command."""
    return f"{command.replace(' ', '-')}.json"


def recorded(command, folder=RECORDED):
    """Return {case: answer} of the recorded cases of one command."""
    path = folder / file_name(command)
    return describe.flat(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def as_recorded(result, digits=15):
    """Return an answer as it is after it was written and read."""
    return describe.flat(json.loads(json.dumps(describe.rounded(describe.nested(result), digits))))


def write(answers, folder=RECORDED):
    """Write {command: {case: answer}}, one file for each command."""
    folder.mkdir(exist_ok=True)
    digits = 9 if folder == RECORDED else 15
    for command, result in answers.items():
        text = _printed(describe.rounded(describe.nested(result), digits))
        (folder / file_name(command)).write_text(text + "\n", encoding="utf-8")


def _printed(value, indent=0):
    """Return JSON with short entries on one line, and one line for each line of a text."""
    line = json.dumps(value, ensure_ascii=False)
    blank, end = " " * (indent + 1), " " * indent
    if isinstance(value, dict) and (len(line) + indent > SHORT or not indent):
        entries = [
            f"{blank}{json.dumps(key, ensure_ascii=False)}: {_printed(part, indent + 1)}" for key, part in value.items()
        ]
        return "{\n" + ",\n".join(entries) + f"\n{end}}}"
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], str):
        return "[\n" + ",\n".join(blank + json.dumps(item, ensure_ascii=False) for item in value) + f"\n{end}]"
    return line


def selected(only):
    """Return the cases of these names; all if no name is given."""
    unknown = set(only) - set(CASES)
    if unknown:
        sys.exit(f"no case {', '.join(sorted(unknown))}; tests/answers/cases.py lists them")
    return {name: case for name, case in CASES.items() if not only or name in only}


def main():
    """Record answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="names of cases; the others stay")
    parser.add_argument("--into", type=Path, default=RECORDED, metavar="FOLDER", help="where the answers are written")
    parser.add_argument("--quick", action="store_true", help="leave the slow cases out")
    arguments = parser.parse_args()
    chosen = selected(arguments.only)
    if arguments.quick:
        chosen = {name: case for name, case in chosen.items() if not case.slow}
    answers = {}
    with tempfile.TemporaryDirectory() as root:
        place = Place(root)
        for name, case in chosen.items():
            begin = time.process_time()
            answers.setdefault(case.command, {})[name] = answer(case, place)
            print(f"{time.process_time() - begin:6.2f} s  {name}", file=sys.stderr, flush=True)
    if arguments.into == RECORDED:
        _merge(answers)
    write(answers, arguments.into)


def _merge(answers):
    """Add the recorded answers of cases that did not run, in their order; new ones are last. Drop those of no case."""
    for command in {case.command for case in CASES.values()}:
        merged = recorded(command) | answers.get(command, {})
        answers[command] = {name: lines for name, lines in merged.items() if name in CASES}
    names = set(map(file_name, answers))
    for path in RECORDED.glob("*.json"):
        if path.name not in names:
            path.unlink()


if __name__ == "__main__":
    main()
