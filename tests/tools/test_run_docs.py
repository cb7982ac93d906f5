"""Test that `tools/run_docs.py` and `tools/hold_numbers.py` find faults of pages; `make docs` runs the pages."""

import contextlib
import io
import itertools
import os
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).parents[2]
RUN = runpy.run_path(str(ROOT / "tools" / "run_docs.py"))
HOLD = runpy.run_path(str(ROOT / "tools" / "hold_numbers.py"))
PAGES = [page for page in RUN["PAGES"] if page.suffix == ".md"]

GOOD = """
Two and two is 4<!-- = 2 + 2 -->, and text.txt has 5<!-- = size --> letters.

```python
size = len(open("text.txt").read())
```

```python
>>> size + 1
6
```

<!-- slow: an hour -->
```sh
exit 7
```

```sh
grep -c l text.txt > count.txt
```

```console
$ cat count.txt text.txt
1
hello
```

```text
never run
```
"""
WRONG = {
    "a wrong number": ("5<!--", "6<!--", "5 is printed as 6"),
    "another answer": ("\n6\n", "\n7\n", "Expected"),
    "Python that raises": ("size = len(", "size = 1 / 0 + len(", "line 5"),
    "a command that fails": ("grep -c l text", "grep -c l nothing", "line 19"),
    "other output": ("hello\n```", "goodbye\n```", "does not say 'goodbye'"),
}


@pytest.fixture
def kit(tmp_path):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "text.txt").write_text("hello")
    return tmp_path / "kit"


def run(kit, text):
    page = kit.parent / "page.md"
    page.write_text(text)
    return RUN["run"](page, kit)


def test_run_accepts_correct_page(kit):
    assert run(kit, GOOD) is None
    assert run(kit, "no code") is None


@pytest.mark.parametrize("what", WRONG)
def test_run_reports_fault_of_page_with_its_line(kit, what):
    old, new, says = WRONG[what]
    assert GOOD.count(old) == 1
    message = run(kit, GOOD.replace(old, new))
    assert message is not None
    assert says in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```\nx\n```\n", "without its kind"),
        ("<!-- quick -->\n```sh\nx\n```\n", "no mark"),
        ("It took 3.5 s.\n", "line 1: 3.5: no source is named"),
    ],
)
def test_run_requires_kind_of_code_block_and_source_of_number(kit, text, says):
    assert says in run(kit, text)


def test_numbers_lists_printed_numbers_with_their_expressions(tmp_path):
    (tmp_path / "page.md").write_text(GOOD)
    numbers = [(one["line"], one["said"], one["made by"]) for one in RUN["numbers"](tmp_path / "page.md")]
    assert numbers == [(2, "4", "2 + 2"), (2, "5", "size"), (9, "6", "size + 1"), (23, "1", "cat count.txt text.txt")]


SOURCE = "# runs\n\n| run | loss | after |\n|---|---|---|\n| tied | 0.1249 | -0.31 |\n| untied | 2.5 | 7 |\n"
RIGHT = """# A page

Torch 2.13, §3.1, arXiv:2603.26663, `0.7` and x = 0.3 are no measurements. One is 4.5<!-- = 9 / 2 -->.

<!-- from: source.md > {} -->

| | loss | after |
|---|---|---|
| *tied* | 0.125 | −0.3 |
| untied | 2.50 | 7 |

<!-- from: source.md > runs > tied > #1; here -->

The loss is 0.12, or 12.5 %, and after it 7 ms.

<!-- from: choice -->

Rates are 0.01.
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", None),
        ("0.125 |", "0.126 |", "line 9: 0.126, −0.3: no such row"),
        ("−0.3", "0.3", None),  # a number without a sign matches either sign
        ("−0.3", "+0.3", "no such row"),
        ("| 7 |", "| 8 |", "2.50, 8: no such row"),
        ("0.125 | −0.3", "−0.3 | 0.125", "no such row"),  # the columns are swapped
        ("| *tied*", "| tired", "0.125, −0.3: nothing is left"),
        ("| untied |", "| neither |", "nothing is left"),
        ("12.5 %", "12.6 %", "12.6 is not in"),
        ("7 ms", "9 ms", "9 is not in"),
        ("source.md > runs", "other.md > runs", "nothing is left"),
        ("<!-- from: choice -->\n\n", "", "0.01: no source is named"),
        ("source.md > {} -->", "here -->", "nothing is left"),  # a table cannot be its source
        ("arXiv:2603", "2603", None),
    ],
)
def test_problems_reports_numbers_missing_from_named_source(tmp_path, old, new, says):
    (tmp_path / "source.md").write_text(SOURCE)
    assert old in RIGHT
    problems = HOLD["problems"](tmp_path / "page.md", RIGHT.replace(old, new, 1))
    assert not problems if says is None else says in problems[0]


@cache
def output_in_process(command):
    """Return the output of a `python -m` command without a child, which would import torch again."""
    module, *arguments = command.removeprefix("python -m ").split()
    printed = io.StringIO()
    settings = mock.patch.object(sys, "argv", [module, *arguments]), mock.patch.dict(os.environ, COLUMNS="120")
    with settings[0], settings[1], contextlib.redirect_stdout(printed):
        runpy.run_module(module, run_name="__main__")
    return printed.getvalue()


def test_output_of_command_equals_output_in_process():
    assert HOLD["output_of"]("python -m benchmarks.scale") == output_in_process("python -m benchmarks.scale") != ""


def test_every_measured_number_in_docs_is_in_its_source(monkeypatch):
    monkeypatch.setitem(HOLD["problems"].__globals__, "output_of", output_in_process)
    assert [f"{page.name}: {one}" for page in PAGES for one in HOLD["problems"](page, page.read_text())] == []


def test_faults_detects_wrong_last_digit_of_most_numbers_in_docs(monkeypatch):
    """Change the last digit of each number in turn; the check must find most changes, in total and on each page."""
    monkeypatch.setitem(HOLD["faults"].__globals__, "output_of", output_in_process)
    seen = {}
    for page in PAGES:
        text = page.read_text()
        numbers = [] if HOLD["UNCHECKED_PAGES"].fullmatch(page.stem) else HOLD["measured_numbers"](text)
        for number in (one for one in numbers if one.sources != "choice"):
            digits, e, power = number.printed.partition("e")
            wrong = number._replace(printed=f"{digits[:-1]}{(int(digits[-1]) + 1) % 10}{e}{power}")
            line = [wrong if one is number else one for one in numbers if one.line == number.line]
            seen.setdefault(page.name, []).append(bool(HOLD["faults"](line, page, text)))
    detected = [one for page in seen.values() for one in page]
    assert len(detected) > 800
    assert sum(detected) / len(detected) >= 0.97
    assert [name for name, page in seen.items() if len(page) >= 20 and sum(page) / len(page) < 0.9] == []


def test_drawn_otherwise_reports_drawing_that_its_script_does_not_reproduce(tmp_path):
    script = tmp_path / "make_line.py"
    script.write_text("import pathlib; pathlib.Path(__file__).with_name('line.svg').write_text('<svg/>')")
    (tmp_path / "line.svg").write_text("<svg/>")
    assert RUN["changed_drawings"]([script]) == []
    (tmp_path / "line.svg").write_text("<svg>another</svg>")
    assert "line.svg not as drawn before" in RUN["changed_drawings"]([script])[0]
    script.write_text("1 / 0")
    assert "ZeroDivisionError" in RUN["changed_drawings"]([script])[0]


def test_navigation_lists_every_page_of_docs():
    listed = {name for name in (ROOT / "zensical.toml").read_text().split('"') if name.endswith(".md")}
    assert {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} == listed


def sentences(page):
    """Return the sentences of a page without code, tables, headings and pictures.

    A link counts as its words, and a name in code as one word.
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^(?:[|#]|!\[).*?$", "", page, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "name", text))
    paragraphs = re.split(r"\n\s*(?:\n|- )", text)
    return [s for one in paragraphs for s in re.split(r"(?<=[.!?])[\s*\")]+(?=\S)", one.strip()) if re.search(r"\w", s)]


def test_sentences_splits_prose_and_skips_code_titles_and_tables():
    page = "# Title\n\nOne two `a b`. Three\nfour [five](x.md)?\n\n- six\n- seven eight\n\n| no |\n\n```sh\nno.\n```\n"
    assert [len(s.split()) for s in sentences(page)] == [3, 3, 1, 2]


@pytest.mark.parametrize("name", ["index", "start", "decide"])
def test_first_pages_average_at_most_22_words_a_sentence(name):
    lengths = [len(s.split()) for s in sentences((ROOT / "docs" / f"{name}.md").read_text())]
    assert sum(lengths) / len(lengths) <= 22


def test_committed_diagrams_equal_output_of_their_script():
    drawings = runpy.run_path(str(ROOT / "docs" / "make_diagrams.py"))["DRAWINGS"]
    for name, drawing in drawings.items():
        assert drawing() == (ROOT / "docs" / f"{name}.svg").read_text()
        assert f"({name}.svg)" in "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the prose is that of Python 3.11.7")
def test_committed_heatmap_equals_output_of_its_script():
    picture, sentence = runpy.run_path(str(ROOT / "docs" / "make_heatmaps.py"))["heat_maps"]()
    assert sentence in (ROOT / "docs" / "start.md").read_text()
    assert picture == (ROOT / "docs" / "one-table.svg").read_text()


def test_kit_refuses_folder_that_is_not_empty(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["kit.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples/kit.py"), run_name="__main__")
    assert ended.value.code == f"{tmp_path} is not empty"  # Python prints a text and exits with 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_kit_makes_no_folder_of_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word, code in (("--help", 0), ("--fodler", 2)):
        monkeypatch.setattr(sys, "argv", ["kit.py", word])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples/kit.py"), run_name="__main__")
        assert ended.value.code == code
        assert list(tmp_path.iterdir()) == []


def test_kit_makes_its_folders_from_part_of_the_text_and_takes_no_optimizer_step(tmp_path):
    steps, texts = [], []
    kit = runpy.run_path(str(ROOT / "examples/kit.py"))
    namespace = kit["make"].__globals__
    read = namespace["builtin_texts"]
    namespace["builtin_texts"] = lambda: (texts.append(text) or text for text in read())
    hook = register_optimizer_step_pre_hook(lambda *call: steps.append(call))
    try:
        kit["make"](tmp_path / "kit")
    finally:
        hook.remove()
    assert steps == []
    assert len(texts) < 300  # all of it has over 600
    names = {path.name for path in (tmp_path / "kit").iterdir()}
    assert names >= {"text.txt", "runs", "model", "untied", "factored", "my-model", "longer", "other"}
    assert names >= {"adapter", "draft", "config.json"}
    finals = sorted((tmp_path / "kit/runs/demo").glob("*/seed-*/final/model.safetensors"))
    assert [path.parts[-4:-2] for path in finals] == list(
        itertools.product(["factored-16", "tied", "untied"], ["seed-1", "seed-2"])
    )
    assert (ROOT / "examples/kit_results.json").stat().st_size < 200_000
