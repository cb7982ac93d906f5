"""Test tools/mutate.py: its operators, its draw, its outcomes, and a run on a project of three functions."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import scipy.stats

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutate  # noqa: E402
from mutation import choice, operators, results  # noqa: E402
from mutation.coverage_data import Coverage, mask_of  # noqa: E402

MUTANTS = {
    "a < b": {"a >= b", "a <= b"},
    "a == b": {"a != b"},
    "a is not b": {"a is b"},
    "a not in b": {"a in b"},
    "(a) in (b)": {"(a) not in (b)"},
    "a + b * c": {"a - b * c", "a + b / c"},
    "a ** b": {"a * b"},
    "'x' + a": set(),
    "a / 'name'": set(),
    "-a": {"a"},
    "f(not a)": {"f(a)", "pass"},
    "a and b and c": {"a or b and c", "a and b or c"},
    "a = 3": {"a = 4", "a = 2"},
    "a = 0.5": {"a = 1.0"},
    "a = True": {"a = False"},
    "a = 'text'": set(),
    "a['key']": {'a[""]'},
    "a = {'é': é, 'key': b}": {"a = {\"\": é, 'key': b}", "a = {'é': é, \"\": b}"},
    "a.get('key')": {'a.get("")', "pass"},
    "a += b": {"a -= b", "pass"},
    "a.b = c": {"pass"},
    "a = c": set(),
    "del a.b": {"pass"},
    "raise E": {"pass"},
    "f(a, key=b)": {"f(a)", "pass"},
    "a = min(b)": {"a = max(b)"},
    "a = b.any()": {"a = b.all()"},
    "a = b if c else d": {"a = b if True else d", "a = b if False else d"},
    "a = [b for b in c if d]": {"a = [b for b in c if True]", "a = [b for b in c if False]"},
    "log.warning('a', 1)": set(),
    "a = f'{b + 1}'": set(),
    "a: Literal[3] = b": set(),
    "__all__ = [a + b]": set(),
    "'a docstring'": set(),
}
IN_FUNCTIONS = {
    "def f(a, b=3): return a": {"def f(a, b=4): return a", "def f(a, b=2): return a", "def f(a, b=3): return None"},
    "def f(a='x'): return True": {'def f(a=""): return True', "def f(a='x'): return False"},
    "while a: break": {"while False: break", "while a: continue"},
    "if a: f()": {"if True: f()", "if False: f()", "if a: pass"},
    "if TYPE_CHECKING: a = 3": set(),
}


def changes(text):
    """Return all lines that the operators make of a source of one line."""
    source = operators.Source(text)
    edits = [edit for line in operators.edits_of(source) for edit in line.edits]
    assert all(source.is_change(edit) for edit in edits)
    return [source.apply(edit)[1] for edit in edits]


@pytest.mark.parametrize("text", [*MUTANTS, *IN_FUNCTIONS])
def test_operators_change_a_line_as_expected(text):
    expected = (MUTANTS | IN_FUNCTIONS)[text]
    assert Counter(changes(text)) == Counter(expected)


def test_every_operator_is_used_by_these_examples():
    sources = [operators.Source(text) for text in (*MUTANTS, *IN_FUNCTIONS)]
    used = {edit.operator for source in sources for line in operators.edits_of(source) for edit in line.edits}
    assert used == set(operators.OPERATORS)


def test_is_change_rejects_edits_that_do_not_parse_or_change_nothing():
    source = operators.Source("a = 1\nb = 2\n")
    assert not source.is_change(operators.Edit("any", 1, 0, 1, "("))
    assert not source.is_change(operators.Edit("any", 1, 4, 5, "1 "))
    assert source.is_change(operators.Edit("any", 1, 0, 1, "c"))


LONG = '''"""Docstring."""
import os

LIMIT = 3


@cache
def far(a: int = 1) -> bool:
    """Docstring."""
    if (
        a > LIMIT
        or a < 0
    ):
        return g(
            a,
            b=2,
        )
    return LIMIT == a
'''


def test_edits_of_lists_executable_lines_with_their_properties():
    lines = {line.line: line for line in operators.edits_of(operators.Source(LONG))}
    assert list(lines) == [2, 4, 8, 10, 14, 18]
    assert [number for number, line in lines.items() if line.at_import] == [2, 4, 8]
    assert [number for number, line in lines.items() if line.is_cached] == [10, 14, 18]
    assert (lines[10].last, lines[14].last) == (13, 17)
    assert lines[4].used_on == [11, 18]
    assert lines[8].used_on == list(range(9, 19))
    assert {(edit.line, edit.text) for edit in lines[10].edits} == {
        (11, "<="),
        (11, ">="),
        (12, ">="),
        (12, "<="),
        (12, "and"),
        (12, "1"),
        (12, "-1"),
    }


# the choice of tests


def coverage(called, prepared=(), seconds=()):
    """Return coverage of one file from the lines of each test."""
    masks = [{"f.py": {test: mask_of(lines) for test, lines in dict(part).items()}} for part in (called, prepared)]
    return Coverage(*masks, dict(seconds))


def executable_line(first, last=None, **more):
    return operators.ExecutableLine(first, last or first, **{"at_import": False, "is_cached": False, **more})


def test_tests_of_returns_tests_that_execute_a_line():
    seen = coverage(
        {"t.py::a": [5, 6], "t.py::b": [6], "u.py::c": [9]},
        {"u.py::d": [5]},
        dict.fromkeys(["t.py::a", "t.py::b", "u.py::c", "u.py::d", "v.py::e"], 1.0),
    )
    assert choice.tests_of(executable_line(6), "f.py", seen) == {"t.py::a": 0, "t.py::b": 0}
    assert choice.tests_of(executable_line(4, 5), "f.py", seen) == {"t.py::a": 0, "u.py::d": 0, "u.py::c": 1}
    assert choice.tests_of(executable_line(9, is_cached=True), "f.py", seen) == {"u.py::c": 0, "u.py::d": 1}
    at_import = choice.tests_of(executable_line(1, at_import=True, used_on=[6]), "f.py", seen)
    assert at_import == {"t.py::a": 0, "t.py::b": 0, "u.py::c": 1, "u.py::d": 1}
    assert choice.tests_of(executable_line(7), "f.py", seen) == {}
    for line in (executable_line(6), executable_line(4, 5), executable_line(7), executable_line(1, at_import=True)):
        assert choice.has_tests(line, "f.py", seen) == bool(choice.tests_of(line, "f.py", seen))


def test_choose_takes_specific_tests_first_and_spreads_the_rest():
    lines = {f"t{n}.py::test[{case}]": range(10 * n + 1, 20 * n + 2) for n in range(20) for case in range(40)}
    seen = coverage(lines, seconds=dict.fromkeys(lines, 0.5))
    chosen = choice.choose(dict.fromkeys(lines, 0), seen)
    assert chosen[:2] == ["t0.py::test[0]", "t0.py::test[10]"]
    assert len(chosen) == 90  # 45 seconds
    assert Counter(test.partition("::")[0] for test in chosen).keys() == {f"t{n}.py" for n in range(12)}
    first, rest = choice.stages(chosen, seen)
    assert (first, rest) == (chosen[:10], chosen[10:])


def test_choose_takes_one_test_if_it_is_long():
    seen = coverage({"t.py::long": [1], "t.py::other": [1, 2]}, seconds={"t.py::long": 300.0, "t.py::other": 1.0})
    assert choice.choose({"t.py::long": 0, "t.py::other": 0}, seen) == ["t.py::long"]


# outcomes and results


@pytest.mark.parametrize(
    ("reported", "expected", "verdict"),
    [
        ("passed", 5, ("survived", "passed")),
        ("failed", 5, ("killed", "test")),
        ("import", 5, ("killed", "import")),
        ("crashed", 5, ("killed", "crashed")),
        ("timeout", 19.9, ("killed", "timeout")),
        ("timeout", 20.1, ("survived", "undecided")),
        ("none", 5, ("survived", "passed")),
    ],
)
def test_verdict_classifies_reported_outcome(reported, expected, verdict):
    assert mutate.Judge(coverage({}), set()).verdict(reported, expected) == verdict


@pytest.mark.parametrize(("killed", "drawn"), [(0, 10), (150, 200), (7, 7)])
def test_wilson_matches_scipy_interval(killed, drawn):
    expected = scipy.stats.binomtest(killed, drawn).proportion_ci(method="wilson")
    assert results.wilson(killed, drawn) == pytest.approx(tuple(expected), abs=1e-12)


def result(line, outcome="killed", **more):
    return results.Result(choice.Mutant("f.py", line, "any", "a | b", "a"), outcome, "test", **more)


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    file = results.ResultFile(tmp_path / "results.jsonl")
    file.begin({"seed": 1})
    file.note("sanity", [3])
    for one in (result(1), result(2), result(2, "survived"), result(3)):
        file.add(one)
    text = file.path.read_text()
    file.path.write_text(text[:-30])
    again = results.ResultFile(file.path)
    assert (again.header, again.notes) == ({"seed": 1}, {"sanity": [3]})
    assert list(again.results.values()) == [result(1), result(2, "survived")]
    again.begin({"seed": 1})
    again.add(result(3))
    assert len(results.ResultFile(file.path).results) == 3
    with pytest.raises(SystemExit, match="seed 1, now 2"):
        again.begin({"seed": 2})


def test_summary_counts_mutants_and_lists_survivors(tmp_path):
    file = results.ResultFile(tmp_path / "results.jsonl")
    file.begin({"seed": 1, "lines": {"executable lines": 12}})
    for one in (result(1), result(2), result(4, "survived"), result(5, "gone")):
        file.add(one)
    text = results.summary(file)
    for row in ("mutants | 3", "killed | 2", "score | 0.667", "0.208 to 0.939", "executable lines | 12", "any | 3 | 2"):
        assert f"| {row} |" in text
    assert text.endswith("| f.py:4 | `a \\| b` → `a` | test |\n")


# a project


PROJECT = {
    "src/tiewise/__init__.py": "",
    "src/tiewise/areas.py": """
SCALE = 1


def area(width, height):
    return width * height


def label(value):
    return value + SCALE


def count(most):
    number = 0
    while number < most:
        number += 1
    return number
""",
    "tests/test_areas.py": """
import sys

from tiewise.areas import area, count, label


def test_that_ends_tracing():
    sys.settrace(None)


def test_area():
    assert area(2, 3) == 6


def test_label():
    label(1)


def test_count():
    assert count(3) == 3
""",
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
    ".gitignore": ".cache\n__pycache__\n",
}
AREAS = "src/tiewise/areas.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A small package with its coverage; `label` has no assertion, and the first test ends the tracing."""
    pytest.importorskip("pytest_cov")
    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    assert mutate.main(["--collect", "--root", str(root), "--workers", "0"]) == 0
    return root


@pytest.fixture(scope="module")
def bare_pytest(project):
    """Run the test processes without pytest plugins, which take most of the time; only `--collect` needs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield


@pytest.fixture(scope="module")
def servers(project, bare_pytest):
    with mutate.servers(project, 1, preloaded=()) as all_servers:
        yield all_servers


def mutant_of(original, mutated):
    line = PROJECT[AREAS].split("\n").index(original) + 1
    return choice.Mutant(AREAS, line, "any", original, mutated)


def test_a_draw_is_reproducible_and_a_larger_one_continues_it(project):
    seen = mutate.read_coverage(project / ".cache" / "mutate")
    every = choice.draw(project, seen, 7, 100)
    assert len(every.mutants) == 7  # all but the headers of functions without a default
    assert every.counts["executable lines"] == 10
    assert choice.draw(project, seen, 7, 3).mutants == every.mutants[:3]
    assert choice.draw(project, seen, 7, 100).mutants == every.mutants
    assert choice.draw(project, seen, 8, 100).mutants != every.mutants
    for mutant in every.mutants:
        lines = PROJECT[AREAS].split("\n")
        assert lines[mutant.line - 1] == mutant.original
        lines[mutant.line - 1] = mutant.mutated
        ast.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("original", "mutated", "outcome", "how"),
    [
        ("    return width * height", "    return width / height", "killed", "test"),
        ("    return value + SCALE", "    return value - SCALE", "survived", "passed"),
        ("SCALE = 1", "SCALE = 1 / 0", "killed", "import"),
        ("        number += 1", "        pass", "killed", "timeout"),
        ("    number = 0", "    import os; os._exit(0)", "killed", "crashed"),
    ],
)
def test_judge_reports_outcome_of_mutant(project, servers, original, mutated, outcome, how):
    mutant = mutant_of(original, mutated)
    judge = mutate.Judge(mutate.read_coverage(project / ".cache" / "mutate"), set(), cpu_seconds=1.5)
    judged = judge.judge(servers[0], mutant, mutate.selection(project, mutant, judge.coverage))
    assert (judged.outcome, judged.how) == (outcome, how)
    report = servers[0].run(mutate.Job(["tests/test_areas.py::test_area"], 60, 60))
    assert (report.outcome, report.ran) == ("passed", 1)  # the server has restored the source


def outcomes(path):
    return {stored.mutant.original: stored.outcome for stored in results.ResultFile(path).results.values()}


@pytest.mark.slow
def test_main_resumes_run_and_rechecks_its_results(project, bare_pytest, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    words = ["--root", str(project), "--workers", "1", "--limit", "1", "--preload"]
    assert mutate.main(["--seed", "7", "--count", "7", "--results", str(path), *words]) == 0
    before = outcomes(path)
    survived = {line for line, outcome in before.items() if outcome == "survived"}
    assert "    return value + SCALE" in survived
    assert survived <= {"    return value + SCALE", "SCALE = 1", "    number = 0"}  # counting from -1 ends at 3, too

    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n")  # the header, the check of sanity and two mutants
    capsys.readouterr()
    assert mutate.main(["--seed", "7", "--count", "7", "--results", str(path), *words]) == 0
    assert capsys.readouterr().out.count("/7] ") == 5
    assert outcomes(path) == before

    changed = tmp_path / "changed"
    shutil.copytree(project, changed)
    words[1] = str(changed)
    (changed / AREAS).write_text("# moved\n" + PROJECT[AREAS].replace("width * height", "height * width"))
    tests = changed / "tests" / "test_areas.py"
    tests.write_text(tests.read_text().replace("assert count(3) == 3", "count(3)"))
    again = tmp_path / "again.jsonl"
    assert mutate.main(["--recheck", str(path), "--results", str(again), *words]) == 0
    assert outcomes(again)["    return width * height"] == "gone"
    assert outcomes(again)["    while number < most:"] == "survived"
    assert outcomes(again).keys() == before.keys() - survived
