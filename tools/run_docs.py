"""Run the examples of the documentation, and compare what they print with the pages.

    python tools/run_docs.py                      all pages
    python tools/run_docs.py docs/loss.md …       these; also scripts and notebooks of examples/

    ```python     run in order, all of a page in one process; with >>> each answer is compared
    ```sh         run line by line as one script; exit code 1, a finding, is no error
    ```console    lines after $ are commands, and the output of each must contain the lines below it

Each page runs in a fresh copy of the folder that `examples/kit.py` makes. Fences of other kinds are not code. A fence
below a comment <!-- slow: … -->, <!-- network -->, <!-- cluster --> or <!-- part: … --> is not run: it takes long,
needs a network or a cluster, or is part of a program. A comment <!-- = expression --> in prose holds a Python
expression, whose value must equal the text right before it. Every other measured number must be in the source that a
comment <!-- from: … --> names (tools/hold_numbers.py).

If no page is named, the tool first makes the drawings (docs/make_*.py except the photograph) and the generated pages
again. A file that changes is an error. The tool then writes the checked numbers to build/docs/numbers.json: page, line,
printed text, and the code or source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from doctest import DocTestParser
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from hold_numbers import measured_numbers, problems  # noqa: E402

SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "kit.py"]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.ipynb")),
    *SCRIPTS,
]
GENERATORS = [ROOT / "docs" / f"make_{subject}.py" for subject in ("diagrams", "heatmaps", "atlas")]
GENERATORS += [ROOT / "benchmarks" / "performance.py", ROOT / "tools" / "make_reference.py"]
GENERATED = (".svg", ".md")
NUMBERS = ROOT / "build" / "docs" / "numbers.json"
LAUNCHED = {"two_processes.py": "torchrun --nproc_per_node 2", "flax_training.py": "python"}
FENCE = re.compile(r"^(?:<!-- (?P<mark>\w+)(?:: [^>]*)? -->\n)?```(?P<kind>\w*)\n(?P<code>.*?)^```", re.M | re.S)
NUMBER = re.compile(r"(?P<printed>\S+)<!-- = (?P<expression>[^>]+) -->")
MARKS = ("slow", "network", "cluster", "part")
SECONDS = 300  # for one command


class Example(NamedTuple):
    """A fence or number to run: its line on the page, its kind and its text."""

    line: int
    kind: str
    code: str


def examples(text: str) -> list[Example]:
    """Return the examples of a page that are run, in the order of their lines.

    Raises ValueError for a fence without a kind or with an unknown mark.
    """
    runnable = []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code"))
        if not fence["kind"]:
            raise ValueError(f"line {line}: a fence without its kind; write python, sh, console or text")
        if fence["mark"] and fence["mark"] not in MARKS:
            raise ValueError(f"line {line}: no mark {fence['mark']!r}; choose {', '.join(MARKS)}")
        if fence["kind"] in ("python", "sh", "console", "bash") and not fence["mark"]:
            runnable.append(Example(line, fence["kind"], fence["code"]))
    runnable += [
        Example(text.count("\n", 0, number.start()) + 1, "number", number[0]) for number in NUMBER.finditer(text)
    ]
    return sorted(runnable)


def script(page_examples: list[Example], page: Path) -> str:
    """Return one Python program of a page's examples, whose errors name the line."""
    lines = [f"import doctest\npage, here = {str(page)!r}, {{'__name__': 'page'}}"]
    # numbers last, since the page's code defines their variables
    for example in sorted(page_examples, key=lambda example: example.kind == "number"):
        code = example.code
        if example.kind == "number":
            printed, expression = NUMBER.fullmatch(code).group("printed", "expression")
            code = f"assert str({expression}) == {printed!r}, f'{{{expression}}} is printed as {printed}'"
        elif example.kind != "python":
            continue
        if code.startswith(">>>"):
            lines.append(f"test = doctest.DocTestParser().get_doctest({code!r}, here, page, page, {example.line})")
            lines.append("if doctest.DocTestRunner().run(test, clear_globs=False).failed: raise SystemExit(1)")
        else:  # empty lines before the code, so that a traceback has the line numbers of the page
            program = "\n" * example.line + code
            lines.append(f"exec(compile({program!r}, page, 'exec'), here)")
    return "\n".join(lines)


def commands(example: Example) -> list[tuple[str, list[str]]]:
    """Return each command of a console with the lines that its output must contain.

    A command may continue over lines inside quotes.
    """
    pairs: list[tuple[str, list[str]]] = []
    open_quote = False
    for line in example.code.splitlines():
        if open_quote:
            pairs[-1] = (f"{pairs[-1][0]}\n{line}", [])
            open_quote = line.count('"') % 2 == 0
        elif line.startswith("$ "):
            pairs.append((line[2:], []))
            open_quote = line.count('"') % 2 == 1
        else:
            pairs[-1][1].append(line)
    return pairs


def numbers(page: Path) -> list[dict[str, str | int]]:
    """Return every number of a page that `run` checks.

    Each has its page, its line, the printed text ("said"), and the code or source that gives it ("made by").
    """
    if page.suffix != ".md":
        return []
    text = page.read_text(encoding="utf-8")
    where = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    rows: list[dict[str, str | int]] = [
        {"page": where, "line": number.line, "said": number.printed, "made by": number.sources}
        for number in measured_numbers(text)
        if number.sources
    ]
    for example in examples(text):
        answers: list[tuple[str, str]] = []  # printed text and code
        if example.kind == "number":
            answers = [NUMBER.fullmatch(example.code).group("printed", "expression")]
        elif example.kind == "console":
            answers = [(line, command) for command, lines in commands(example) for line in lines]
        elif example.code.startswith(">>>"):
            answers = [(part.want.strip(), part.source.strip()) for part in DocTestParser().get_examples(example.code)]
        line = example.line + (example.kind != "number")  # of a fence, its first line of code
        numbered = [(printed, code) for printed, code in answers if re.search(r"\d", printed)]
        rows += [{"page": where, "line": line, "said": printed, "made by": code} for printed, code in numbered]
    return rows


def changed_drawings(scripts: list[Path]) -> list[str]:
    """Run the scripts that draw; return a message for each failure or changed file."""
    messages = []
    for script in scripts:
        if script.stem == "make_heatmaps" and sys.version_info[:2] != (3, 11):
            continue  # it counts words in the documentation of Python 3.11
        files = [
            path
            for folder in (script.parent, ROOT / "docs", ROOT / "docs" / "dev")
            for path in folder.glob("*.*")
            if path.suffix in GENERATED
        ]
        before = {path: path.read_bytes() for path in files}
        settings = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run([sys.executable, script], env=os.environ | settings, capture_output=True, text=True)
        if done.returncode:
            messages.append(f"{script.name}: {done.stderr[-1500:]}")
        changed = [path.name for path in files if path.read_bytes() != before[path]]
        if changed:
            messages.append(
                f"{script.name}: {', '.join(changed)} not as drawn before; look at them, and commit them if right"
            )
    return messages


def run(page: Path, kit: Path) -> str | None:
    """Run a page in a copy of the kit; return its first fault, or None."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        page_examples = [Example(0, "sh", f"{LAUNCHED.get(page.name, 'python')} {page}")]
    elif page.suffix == ".ipynb":
        cells = enumerate(cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        page_examples = [Example(number, "python", "".join(cell["source"])) for number, cell in cells]
    else:
        try:
            page_examples = examples(text)
        except ValueError as error:
            return str(error)
        if messages := problems(page, text):
            return "\n".join(messages)
    if not page_examples:
        return None
    with tempfile.TemporaryDirectory(prefix="docs-") as temporary:
        folder = Path(temporary) / "here"
        shutil.copytree(kit, folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        code = f"{ROOT / 'src'}{os.pathsep}{ROOT}"  # this checkout comes before an installed package
        settings = {"PATH": path, "PYTHONPATH": code, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        # a child process takes seconds for each rewrite and check; other tests start them
        settings |= {"TIEWISE_NO_VERIFY_LOAD": "1", "TIEWISE_NO_BUILD": "1"}

        def call(*command: str) -> subprocess.CompletedProcess[str]:
            """Run a command in the copy; a timeout counts as exit code 1."""
            try:
                return subprocess.run(
                    command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS
                )
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(command, 1, "", f"not done after {SECONDS} s")

        for example in page_examples:
            if example.kind in ("sh", "bash"):
                done = call("bash", "-e", "-c", f'tiewise() {{ command tiewise "$@" || [ $? = 1 ]; }}\n{example.code}')
                if done.returncode:
                    return f"line {example.line + 1}: {done.stderr[-1500:]}"
            if example.kind == "console":
                for command, expected in commands(example):
                    done = call("bash", "-c", command)
                    plain = [" ".join(line.split()) for line in done.stdout.splitlines()]
                    for line in expected:
                        if not any(" ".join(line.split()) in other for other in plain):
                            return (
                                f"line {example.line}: {command}\ndoes not say {line!r} but\n{done.stdout}{done.stderr}"
                            )
        done = call(sys.executable, "-c", script(page_examples, page))
        if done.returncode:
            return f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
    return None


def main() -> None:
    """Run pages two at a time; exit with 1 if one fails."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    changes = [] if sys.argv[1:] else changed_drawings(GENERATORS)
    print(*changes, sep="\n", end="\n" * bool(changes), flush=True)
    kit = Path(os.environ.get("TIEWISE_KIT", "")) if os.environ.get("TIEWISE_KIT") else None
    with tempfile.TemporaryDirectory(prefix="kit-") as temporary, ThreadPoolExecutor(2) as pool:
        if kit is None:
            kit = Path(temporary) / "kit"
            subprocess.run([sys.executable, str(ROOT / "examples" / "kit.py"), str(kit)], check=True)
        began = time.monotonic()
        results = pool.map(lambda page: run(page, kit), pages)
        failed = 0
        for page, fault in zip(pages, results, strict=True):
            failed += fault is not None
            print(f"{page.relative_to(ROOT)}: {fault or 'runs as printed'}", flush=True)
    print(f"{len(pages) - failed} pages run as printed, {failed} do not, {time.monotonic() - began:.0f} s")
    if not sys.argv[1:]:
        checked = [number for page in pages for number in numbers(page)]
        NUMBERS.parent.mkdir(parents=True, exist_ok=True)
        NUMBERS.write_text(json.dumps(checked, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(checked)} numbers are held by what makes them: {NUMBERS.relative_to(ROOT)}")
    sys.exit(failed + len(changes) > 0)


if __name__ == "__main__":
    main()
