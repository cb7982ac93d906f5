"""The documentation's examples are run by `make docs`; here, that what is wrong on a page does not pass."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = runpy.run_path(str(ROOT / "tools" / "run_docs.py"))

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


def test_a_page_that_is_right_passes(kit):
    assert run(kit, GOOD) is None
    assert run(kit, "no code") is None


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_with_its_line(kit, what):
    old, new, says = WRONG[what]
    assert GOOD.count(old) == 1
    told = run(kit, GOOD.replace(old, new))
    assert told is not None
    assert says in told


@pytest.mark.parametrize(
    ("text", "says"), [("```\nx\n```\n", "without its kind"), ("<!-- quick -->\n```sh\nx\n```\n", "no mark")]
)
def test_a_fence_says_what_it_is(kit, text, says):
    assert says in run(kit, text)


def test_the_numbers_of_a_page_are_told_with_what_makes_them(tmp_path):
    (tmp_path / "page.md").write_text(GOOD)
    found = [(one["line"], one["said"], one["made by"]) for one in RUN["numbers"](tmp_path / "page.md")]
    assert found == [(2, "4", "2 + 2"), (2, "5", "size"), (9, "6", "size + 1"), (23, "1", "cat count.txt text.txt")]


def test_a_drawing_that_is_not_what_its_command_draws_is_told(tmp_path):
    script = tmp_path / "make_line.py"
    script.write_text("import pathlib; pathlib.Path(__file__).with_name('line.svg').write_text('<svg/>')")
    (tmp_path / "line.svg").write_text("<svg/>")
    assert RUN["drawn_otherwise"]([script]) == []
    (tmp_path / "line.svg").write_text("<svg>another</svg>")
    assert "line.svg not as drawn before" in RUN["drawn_otherwise"]([script])[0]
    script.write_text("1 / 0")
    assert "ZeroDivisionError" in RUN["drawn_otherwise"]([script])[0]


def test_every_page_is_in_the_book():
    told = (ROOT / "zensical.toml").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == {
        name for name in told.split('"') if name.endswith(".md")
    }


def sentences(page):
    """What a person reads: no code, tables, headings or pictures; a link is its words, a name in code is one word."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^(?:[|#]|!\[).*?$", "", page, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "name", text))
    paragraphs = re.split(r"\n\s*(?:\n|- )", text)
    return [s for one in paragraphs for s in re.split(r"(?<=[.!?])[\s*\")]+(?=\S)", one.strip()) if re.search(r"\w", s)]


def test_sentences_are_counted_as_a_reader_would():
    page = (
        "# Title\n\nOne two `a b`. Three\nfour [five](x.md)?\n\n- six\n- seven eight\n\n| no |\n\n```sh\nno. no.\n```\n"
    )
    assert [len(s.split()) for s in sentences(page)] == [3, 3, 1, 2]


@pytest.mark.parametrize("name", ["index", "start", "decide"])
def test_the_first_pages_are_easy_to_read(name):
    lengths = [len(s.split()) for s in sentences((ROOT / "docs" / f"{name}.md").read_text())]
    assert sum(lengths) / len(lengths) <= 22


def test_the_diagrams_are_what_their_command_draws():
    drawings = runpy.run_path(str(ROOT / "docs" / "make_diagrams.py"))["DRAWINGS"]
    for name, drawing in drawings.items():
        assert drawing() == (ROOT / "docs" / f"{name}.svg").read_text()
        assert f"({name}.svg)" in "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the prose is that of Python 3.11")
def test_the_first_picture_is_what_its_command_draws():
    picture, said = runpy.run_path(str(ROOT / "docs" / "make_heatmaps.py"))["made"]()
    assert said in (ROOT / "docs" / "start.md").read_text()
    assert picture == (ROOT / "docs" / "one-table.svg").read_text()


def test_the_kit_says_where_it_may_be_made(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    done = subprocess.run([sys.executable, ROOT / "examples/kit.py", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path} is not empty\n")
