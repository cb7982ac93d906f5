"""Compare the counts of `tools/code_density.py` in small sources with counts by hand."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "code_density.py"
sys.path.insert(0, str(TOOL.parent))  # as Python does when it runs the tool
DENSITY = runpy.run_path(str(TOOL))

# the annotation with a value and the assignment are statements
PLAIN = '''"""Numbers."""
import os
assert os
pass
x: int
y: int = 1
z = 2
'''


def measure_source(tmp_path, source):
    (tmp_path / "source.py").write_text(source)
    return DENSITY["measure"](tmp_path)


def figure(tmp_path, source, name):
    return DENSITY["figures"](measure_source(tmp_path, source))[name]


def test_measure_counts_statements_without_imports_docstrings_and_asserts(tmp_path):
    assert measure_source(tmp_path, PLAIN).statements == 2


def test_measure_counts_every_syntax_node(tmp_path):
    # Module, Assign, Name, Store, BinOp, Constant, Add, Constant
    assert measure_source(tmp_path, "z = 1 + 2\n").nodes == 8
    assert figure(tmp_path, "z = 1 + 2\n", "syntax nodes per statement") == 8


@pytest.mark.parametrize(
    ("source", "decisions"),
    [
        ("x = 1", 0),
        ("if a: b()", 1),
        ("if a: b()\nelif c: d()\nelse: e()", 2),
        ("for a in b: c()\nelse: d()", 1),
        ("while a: b()", 1),
        ("try: a()\nexcept KeyError: b()\nexcept OSError: c()\nfinally: d()", 2),
        ("match a:\n    case 1: b()\n    case _: c()", 2),
        ("x = a if b else c", 1),
        ("x = lambda: a", 1),
        ("x = [a for a in b]", 1),
        ("x = {a: c for a in b for c in a if a if c}", 4),
        ("x = a and b and c or d", 3),
        ("x = map(a, b)", 1),
        ("x = functools.partial(a, b)", 1),
        ("with contextlib.suppress(OSError): a()", 1),
        ("x = any(a for a in b)", 2),
        ("x = sorted(a)", 0),
        ("x = a[b > 0]", 1),
        ("x = a[0]", 0),
        ("with a: b()", 0),
    ],
)
def test_measure_counts_decisions_of_one_statement(tmp_path, source, decisions):
    assert measure_source(tmp_path, source).decisions == decisions


BRANCHES = "\n".join(f"    if a == {number}: b()" for number in range(11))


def test_measure_counts_decisions_per_function_class_and_module(tmp_path):
    counts = measure_source(
        tmp_path, f"def f(a):\n{BRANCHES}\nclass C:\n{BRANCHES}\n    def g(self): return 1 if self else 2\n"
    )
    bodies = {(body.decisions, body.lines, body.where.split(":", 1)[1]) for body in counts.bodies}
    assert bodies == {(0, 0, "1 body of the module"), (11, 12, "1 f"), (11, 0, "13 body of C"), (1, 1, "25 g")}
    figures = DENSITY["figures"](counts)
    assert figures["bodies with more than 10 decisions"] == 2
    assert figures["bodies with more than 10 decisions, per 100"] == 50
    assert figures["bodies with more than 15 decisions"] == 0


def test_an_inner_function_counts_for_itself_and_for_the_outer_one(tmp_path):
    bodies = measure_source(tmp_path, "def f(a):\n    def g(): return a or 1\n    return g\n").bodies
    assert sorted(body.decisions for body in bodies) == [0, 1, 1]


def test_worst_bodies_sorts_by_decisions_then_by_length(tmp_path):
    counts = measure_source(tmp_path, "def f(): return 1\ndef g(a): return a or 1\ndef h(a):\n    return a or 1\n")
    assert [body.where.rpartition(" ")[2] for body in DENSITY["worst_bodies"](counts, 3)] == ["h", "g", "f"]


@pytest.mark.parametrize(("count", "crowded"), [(15, 0), (16, 1)])
def test_measure_counts_functions_with_many_local_names(tmp_path, count, crowded):
    body = "\n".join(f"    x{number} = x0 = 1" for number in range(count))
    assert measure_source(tmp_path, f"def f(a, b):\n{body}\n").crowded_functions == crowded


@pytest.mark.parametrize(
    ("signature", "wide"),
    [
        ("_f(a, b, c, d, e, f)", 0),
        ("_f(a, /, b, c, d, e, f, *, g)", 1),
        ("_f(a, b, c, d, e, f, *args, **more)", 0),
        ("f(a, b, c, d, e, f, g)", 0),
    ],
)
def test_measure_counts_private_functions_with_many_parameters(tmp_path, signature, wide):
    assert measure_source(tmp_path, f"def {signature}: pass\n").wide_private_functions == wide


def test_measure_counts_conditional_expressions_and_nested_ones(tmp_path):
    counts = measure_source(tmp_path, "x = a if b else c\ny = a if b else (c if d else e)\nz = [a if b else c]\n")
    assert (counts.conditional_expressions, counts.nested_conditional_expressions) == (4, 1)


@pytest.mark.parametrize(
    ("source", "vague"),
    [
        ("found = 1", 1),
        ("x.told = 1", 1),
        ("def rows_kept(obj): return founder", 2),
        ("class Found: pass", 1),
        ("import numpy as tmp", 1),
        ("try: a()\nexcept OSError as res: b()", 1),
        ("x = found + given.said", 0),
        ("found, (own, x) = a", 2),
        ("foundation = 1", 0),
    ],
)
def test_measure_counts_vague_names(tmp_path, source, vague):
    assert measure_source(tmp_path, source).vague_names == vague


SENTENCE = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


@pytest.mark.parametrize(
    ("docstring", "counts"),
    [  # docstrings, first sentences over 16 words, bad openings, listed phrases
        (f"{SENTENCE}. And more.", (1, 0, 0, 0)),
        (f"{SENTENCE}\n    seventeen.", (1, 1, 0, 0)),
        (f"{SENTENCE}\n\n    seventeen.", (1, 0, 0, 0)),
        ("What it is.", (1, 0, 1, 0)),
        ("Whatever. Of it.", (1, 0, 1, 0)),
        ("Often it is so. Whether it is.", (1, 0, 0, 0)),
        ("It stands beside one of its own; a bystander does not.", (1, 0, 0, 3)),
    ],
)
def test_measure_counts_faults_of_docstrings(tmp_path, docstring, counts):
    measured = measure_source(tmp_path, f'def f():\n    """{docstring}"""\n')
    assert (
        measured.docstrings,
        measured.long_first_sentences,
        measured.bad_openings,
        measured.listed_phrases,
    ) == counts


def test_measure_counts_public_definitions_without_docstring(tmp_path):
    source = "class A:\n    def b(self): pass\n    def _c(self): pass\nclass _D: pass\n"
    assert measure_source(tmp_path, source).public_without_docstring == 3  # module, A, b


def test_measure_skips_tests_folders_and_accepts_single_file(tmp_path):
    for name in ("a/x.py", "a/y.py", "b/tests/z.py", "c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    counts = DENSITY["measure"](tmp_path)
    assert (counts.files, counts.packages, counts.statements) == (3, 1, 3)
    assert DENSITY["measure"](tmp_path / "c.py").statements == 1


@pytest.mark.parametrize(
    ("value", "committed", "worse"),
    [
        (50.4, 50, False),
        (50.6, 50, True),
        (1, 0, True),
        (0, 0, False),
        (14, 13, True),
        (101, 100, False),
        (12, 13, False),
    ],
)
def test_a_figure_may_exceed_its_committed_value_by_one_percent(value, committed, worse):
    assert DENSITY["worse_figures"]({"x": value}, {"x": committed}) == ["x"] * worse


def test_a_figure_without_a_committed_value_is_worse():
    assert DENSITY["worse_figures"]({"x": 1, "y": 1}, {"y": 1}) == ["x"]


def git(folder, *arguments):
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def test_commit_subjects_come_from_repository_that_tracks_the_folder(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("x = 1\n")
    git(folder, "add", ".")
    for subject in ("core: add the file", "Add the file", f"core/files: {'a' * 61}", f"core: {'a' * 66}"):
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    subjects = DENSITY["commit_subjects"](folder)
    counts = DENSITY["measure_subjects"](subjects)
    assert (counts.commits, counts.long, counts.without_area) == (4, 1, 1)
    (folder / "untracked").mkdir()
    assert DENSITY["commit_subjects"](folder / "untracked") == []
    git(tmp_path, "clone", "-q", "--depth", "1", folder.as_uri(), "shallow")
    assert DENSITY["commit_subjects"](tmp_path / "shallow") == []


@pytest.fixture
def copy(tmp_path):
    """A package of one file next to a copy of the tool."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "src" / "tiewise").mkdir(parents=True)
    (tmp_path / "src" / "tiewise" / "a.py").write_text('"""A file."""\nx = 1 if y else 2\n')
    for name in ("check_commits.py", "revisions.py"):  # the tool imports both
        shutil.copy(TOOL.with_name(name), tmp_path / "tools")
    return Path(shutil.copy(TOOL, tmp_path / "tools"))


def run(tool, *arguments):
    return subprocess.run([sys.executable, tool, *arguments], cwd=tool.parents[1], capture_output=True, text=True)


def test_check_fails_if_the_package_is_worse_than_committed(copy):
    assert run(copy, "--check").returncode == 1  # nothing is committed
    assert run(copy, "--write").returncode == 0
    done = run(copy, "--check", "--worst", "1")
    assert done.returncode == 0
    assert "decisions per 100 statements                               100.0   committed 100.0\n" in done.stdout
    assert done.stdout.endswith("    1 decisions in   0 lines  src/tiewise/a.py:1 body of the module\n")
    (copy.parents[1] / "src" / "tiewise" / "b.py").write_text('"""Another file."""\nkept = 1\n')
    done = run(copy, "--check")
    assert done.returncode == 1
    assert "more than 1 %: names that say nothing\n" in done.stderr
    assert "decisions per 100 statements                                50.0   committed 100.0\n" in done.stdout


def test_json_has_every_figure_and_check_refuses_a_path(copy):
    done = json.loads(run(copy, "--json", "--worst", "1").stdout)
    assert done["figures"]["decisions per 100 statements"] == 100
    assert done["totals"]["statements"] == 1
    assert done["worst"] == [{"decisions": 1, "lines": 0, "where": "src/tiewise/a.py:1 body of the module"}]
    assert run(copy, "src", "--check").returncode == 2
    assert run(copy, "nowhere").returncode == 2
