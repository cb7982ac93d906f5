"""Run every example of the documentation as it is printed, in a fresh folder with what `examples/kit.py` makes.

    python tools/run_docs.py                      all pages
    python tools/run_docs.py docs/loss.md …       these; the scripts and notebooks of examples/ too

    ```python     run in order, all of a page in one process; with >>> each answer is compared
    ```sh         run line by line as one script; a finding (exit code 1) is no error
    ```console    lines after $ are commands, and the lines below each must come in its output

Fences of other kinds are not code. One behind a comment <!-- slow: … -->, <!-- network -->, <!-- cluster --> or
<!-- part: … --> is not run: it takes long, needs what is not here, or is a piece of something. A comment
<!-- = expression --> in prose holds a Python expression whose value stands right before it: a wrong number is an error.
Every other number that is measured must be in the source that a comment <!-- from: … --> names (tools/hold_numbers.py).

With all pages, the drawings (docs/make_*.py but for the photograph) and the pages that a command writes are made anew
first; one that differs from what was there is an error. build/docs/numbers.json gets all that is so held: page, line,
what is printed there, what makes it.
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

from hold_numbers import held, problems  # noqa: E402

SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "kit.py"]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.ipynb")),
    *SCRIPTS,
]
DRAWN = [ROOT / "docs" / f"make_{what}.py" for what in ("diagrams", "heatmaps", "atlas")]
DRAWN += [ROOT / "benchmarks" / "performance.py", ROOT / "tools" / "make_reference.py"]
DRAW = (".svg", ".md")
NUMBERS = ROOT / "build" / "docs" / "numbers.json"
LAUNCHED = {"two_processes.py": "torchrun --nproc_per_node 2", "flax_training.py": "python"}
FENCE = re.compile(r"^(?:<!-- (?P<mark>\w+)(?:: [^>]*)? -->\n)?```(?P<kind>\w*)\n(?P<code>.*?)^```", re.M | re.S)
NUMBER = re.compile(r"(?P<said>\S+)<!-- = (?P<expression>[^>]+) -->")
MARKS = ("slow", "network", "cluster", "part")
SECONDS = 300


class Example(NamedTuple):
    """A fence to be run: its line on the page, its kind and what is in it."""

    line: int
    kind: str
    code: str


def examples(text: str) -> list[Example]:
    """Return the examples of a page that are run.

    Raises ValueError for a fence without a kind or with an unknown mark.
    """
    found = []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("code"))
        if not fence["kind"]:
            raise ValueError(f"line {line}: a fence without its kind; write python, sh, console or text")
        if fence["mark"] and fence["mark"] not in MARKS:
            raise ValueError(f"line {line}: no mark {fence['mark']!r}; choose {', '.join(MARKS)}")
        if fence["kind"] in ("python", "sh", "console", "bash") and not fence["mark"]:
            found.append(Example(line, fence["kind"], fence["code"]))
    found += [Example(text.count("\n", 0, n.start()) + 1, "number", n[0]) for n in NUMBER.finditer(text)]
    return sorted(found)


def script(found: list[Example], page: Path) -> str:
    """Return one program of a page's Python code, whose errors name the line."""
    lines = [f"import doctest\npage, here = {str(page)!r}, {{'__name__': 'page'}}"]
    for example in sorted(found, key=lambda example: example.kind == "number"):  # what they speak of is made by then
        code = example.code
        if example.kind == "number":
            said, expression = NUMBER.fullmatch(code).group("said", "expression")
            code = f"assert str({expression}) == {said!r}, f'{{{expression}}} is printed as {said}'"
        elif example.kind != "python":
            continue
        if code.startswith(">>>"):
            lines.append(f"test = doctest.DocTestParser().get_doctest({code!r}, here, page, page, {example.line})")
            lines.append("if doctest.DocTestRunner().run(test, clear_globs=False).failed: raise SystemExit(1)")
        else:  # the empty lines have a traceback tell the line of the page
            program = "\n" * example.line + code
            lines.append(f"exec(compile({program!r}, page, 'exec'), here)")
    return "\n".join(lines)


def commands(example: Example) -> list[tuple[str, list[str]]]:
    """Return (command, lines that must come in its output) of a console; a command may run over lines inside quotes."""
    found: list[tuple[str, list[str]]] = []
    open_quote = False
    for line in example.code.splitlines():
        if open_quote:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
            open_quote = line.count('"') % 2 == 0
        elif line.startswith("$ "):
            found.append((line[2:], []))
            open_quote = line.count('"') % 2 == 1
        else:
            found[-1][1].append(line)
    return found


def numbers(page: Path) -> list[dict[str, str | int]]:
    """Return every number of a page that `run` holds: page, line, what is printed there, and the code that makes it."""
    if page.suffix != ".md":
        return []
    text = page.read_text(encoding="utf-8")
    where = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found: list[dict[str, str | int]] = [
        {"page": where, "line": one.line, "said": one.said, "made by": one.sources} for one in held(text) if one.sources
    ]
    for example in examples(text):
        printed: list[tuple[str, str]] = []
        if example.kind == "number":
            printed = [NUMBER.fullmatch(example.code).group("said", "expression")]
        elif example.kind == "console":
            printed = [(line, command) for command, lines in commands(example) for line in lines]
        elif example.code.startswith(">>>"):
            printed = [(part.want.strip(), part.source.strip()) for part in DocTestParser().get_examples(example.code)]
        line = example.line + (example.kind != "number")  # of a fence, its first line of code
        numbered = [(said, made) for said, made in printed if re.search(r"\d", said)]
        found += [{"page": where, "line": line, "said": said, "made by": made} for said, made in numbered]
    return found


def drawn_otherwise(scripts: list[Path]) -> list[str]:
    """Draw anew; return what that changed or could not do, a line for each script."""
    wrong = []
    for script in scripts:
        if script.stem == "make_heatmaps" and sys.version_info[:2] != (3, 11):
            continue  # it counts the prose of Python 3.11
        files = [
            path for folder in (script.parent, ROOT / "docs") for path in folder.glob("*.*") if path.suffix in DRAW
        ]
        before = {path: path.read_bytes() for path in files}
        settings = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run([sys.executable, script], env=os.environ | settings, capture_output=True, text=True)
        if done.returncode:
            wrong.append(f"{script.name}: {done.stderr[-1500:]}")
        changed = [path.name for path in files if path.read_bytes() != before[path]]
        if changed:
            wrong.append(
                f"{script.name}: {', '.join(changed)} not as drawn before; look at them, and commit them if right"
            )
    return wrong


def run(page: Path, kit: Path) -> str | None:
    """Run a page in a copy of the kit; return what went wrong, or None."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        found = [Example(0, "sh", f"{LAUNCHED.get(page.name, 'python')} {page}")]
    elif page.suffix == ".ipynb":
        cells = enumerate(cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        found = [Example(number, "python", "".join(cell["source"])) for number, cell in cells]
    else:
        try:
            found = examples(text)
        except ValueError as error:
            return str(error)
        if wrong := problems(page, text):
            return "\n".join(wrong)
    if not found:
        return None
    with tempfile.TemporaryDirectory(prefix="docs-") as made:
        folder = Path(made) / "here"
        shutil.copytree(kit, folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        code = f"{ROOT / 'src'}{os.pathsep}{ROOT}"  # of this checkout, whatever is installed
        settings = {"PATH": path, "PYTHONPATH": code, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        settings["TIEWISE_NO_VERIFY_LOAD"] = "1"  # which takes seconds for each rewrite; its own tests do it

        def call(*command: str) -> subprocess.CompletedProcess[str]:
            try:
                return subprocess.run(
                    command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=SECONDS
                )
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(command, 1, "", f"not done after {SECONDS} s")

        for example in found:
            if example.kind in ("sh", "bash"):
                done = call("bash", "-e", "-c", f'tiewise() {{ command tiewise "$@" || [ $? = 1 ]; }}\n{example.code}')
                if done.returncode:
                    return f"line {example.line + 1}: {done.stderr[-1500:]}"
            if example.kind == "console":
                for command, wanted in commands(example):
                    said = call("bash", "-c", command)
                    plain = [" ".join(line.split()) for line in said.stdout.splitlines()]
                    for line in wanted:
                        if not any(" ".join(line.split()) in other for other in plain):
                            return (
                                f"line {example.line}: {command}\ndoes not say {line!r} but\n{said.stdout}{said.stderr}"
                            )
        done = call(sys.executable, "-c", script(found, page))
        if done.returncode:
            return f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
    return None


def main() -> None:
    """Run pages two at a time; exit 1 where one fails."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    drawn = [] if sys.argv[1:] else drawn_otherwise(DRAWN)
    print(*drawn, sep="\n", end="\n" * bool(drawn), flush=True)
    kit = Path(os.environ.get("TIEWISE_KIT", "")) if os.environ.get("TIEWISE_KIT") else None
    with tempfile.TemporaryDirectory(prefix="kit-") as made, ThreadPoolExecutor(2) as pool:
        if kit is None:
            kit = Path(made) / "kit"
            subprocess.run([sys.executable, str(ROOT / "examples" / "kit.py"), str(kit)], check=True)
        began = time.monotonic()
        results = pool.map(lambda page: run(page, kit), pages)
        failed = 0
        for page, wrong in zip(pages, results, strict=True):
            failed += wrong is not None
            print(f"{page.relative_to(ROOT)}: {wrong or 'runs as printed'}", flush=True)
    print(f"{len(pages) - failed} pages run as printed, {failed} do not, {time.monotonic() - began:.0f} s")
    if not sys.argv[1:]:
        told = [number for page in pages for number in numbers(page)]
        NUMBERS.parent.mkdir(parents=True, exist_ok=True)
        NUMBERS.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(told)} numbers are held by what makes them: {NUMBERS.relative_to(ROOT)}")
    sys.exit(failed + len(drawn) > 0)


if __name__ == "__main__":
    main()
