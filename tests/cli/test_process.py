"""Test the command in a separate process: its imports, Ctrl-C, closed pipes and its look on a terminal."""

import contextlib
import inspect
import json
import os
import pty
import pydoc
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fcntl import ioctl
from operator import attrgetter
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

import psutil
import pytest
from cli_tiny import TINY
from launched import PATIENCE, curves, launch, training_advances, wait_for_exit, wait_until
from tests.fork_server import ForkedCommand

import tiewise
from tiewise.cli import training as commands
from tiewise.training.settings import Settings

COMMAND = shutil.which("tiewise", path=str(Path(sys.executable).parent)) or "tiewise"
HEAVY = {"torch", "transformers", "jax", "numpy", "datasets", "tokenizers", "plotly", "yaml"}


def test_import_tiewise_loads_no_heavy_library():
    code = f"import sys, tiewise; dir(tiewise); print({HEAVY!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


LINES = {  # command line → exit code, a part of its output, and the heavy libraries that it loads
    "--help": (0, "compare", set()),
    "compare --help": (0, "--arms", set()),
    "train -h": (0, "--boundary", set()),
    "--version": (0, f"tiewise {tiewise.__version__}\n", set()),
    "sparkle": (2, "'sparkle'", set()),
    "plan --like=gpt2": (0, "38,597,376", set()),
    "plan --like=gpt2 --plot=p.html": (0, "page: p.html", {"plotly"}),
    "plan --list": (0, "gpt2", set()),
    "compare --text=missing.txt": (2, "no file or folder 'missing.txt'", {"numpy"}),
    "data show --text=builtin --text=missing.jsonl:words": (2, "no file or folder 'missing.jsonl'", {"numpy"}),
    "inspect model --text=missing.txt": (2, "no file or folder 'missing.txt'", {"numpy"}),
    "vocab hot --tokenizer=bytes --text=missing.txt": (2, "no file or folder 'missing.txt'", {"numpy"}),
}
EVERY_WORD = "adapter check compare diff exercise explore factor heal inspect plan repair sweep tie train untie vocab"
COMPLETED = {  # words on a shell's line, position of the last → what it completes
    ("tiewise ch", 1): "check",
    ("tiewise", 1): EVERY_WORD,
    ("tiewise vo", 1): "vocab",
    ("tiewise tie", 1): "tie",
    ("tiewise vocab", 2): "hot resize transplant trim",
    ("tiewise vocab tr", 2): "transplant trim",
    ("tiewise vocab hot --si", 3): "--size",
    ("tiewise check --de", 2): "--deep",
    ("tiewise check --he", 2): "--headers --help",
    ("tiewise check . --de", 3): "--deep",
    ("tiewise zz", 1): "",
}
# A process imports the command line and nothing that only one command needs, then runs each command in a fork.
# Output, errors and loaded modules go to the files NUMBER.out, NUMBER.err and NUMBER.modules.
FORKS = """
import atexit, json, os, sys
from pathlib import Path
from tiewise.__main__ import main
import tiewise.cli.main

def run_command(number, words, environment):
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    sys.argv = ["tiewise", *words]
    atexit.register(lambda: Path(f"{number}.modules").write_text(" ".join(sys.modules)))
    main()
    sys.exit("the command did not exit")

codes = []
for number, case in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        run_command(number, *case)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@dataclass
class Forked:
    """Exit code and output of a command in a fork, and the names of all modules that it loaded."""

    code: int
    out: str
    err: str
    modules: set[str]


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Run every line of LINES and COMPLETED in a fork of one process; return the results by their keys."""
    cases = {line: (line.split(), {}) for line in LINES}
    for words, position in COMPLETED:
        shell = {"_TIEWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
        cases[words, position] = ([], shell)
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-c", FORKS, json.dumps(list(cases.values()))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    texts = [[(folder / f"{i}.{name}").read_text() for name in ("out", "err", "modules")] for i in range(len(cases))]
    results = zip(json.loads(done.stdout), texts, strict=True)
    return {
        key: Forked(code, out, err, set(names.split()))
        for key, (code, (out, err, names)) in zip(cases, results, strict=True)
    }


@pytest.mark.parametrize("line", LINES)
def test_command_loads_only_libraries_it_needs(forked, line):
    code, says, loads = LINES[line]
    result = forked[line]
    assert (result.code, HEAVY & result.modules) == (code, loads), result.err
    assert says in result.out + result.err
    assert "\x1b" not in result.out


@pytest.mark.parametrize("case", COMPLETED)
def test_a_shell_completes_commands_groups_and_options(forked, case):
    result = forked[case]
    assert (sorted(result.out.split()), result.err) == (COMPLETED[case].split(), "")


def test_installed_program_completes_a_command():
    completion = {"_TIEWISE_COMPLETE": "complete_bash", "COMP_WORDS": "tiewise vo", "COMP_CWORD": "1"}
    done = subprocess.run([COMMAND], env=os.environ | completion, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["vocab"], "")


def test_dir_lists_every_public_name():
    assert {"compare", "plan", "check", "__version__"} <= set(dir(tiewise))
    assert len(dir(tiewise)) <= 30
    with pytest.raises(AttributeError, match="no attribute 'glue'"):
        tiewise.glue  # noqa: B018


@pytest.mark.parametrize("name", ["untie_at", "resize", "Sizes"])
def test_moved_name_states_its_namespace(name):
    with pytest.raises(
        AttributeError, match=rf"^tiewise\.{name} is tiewise\.(boundary|checkpoint|lab)\.{name}$"
    ) as error:
        getattr(tiewise, name)
    assert attrgetter(str(error.value).rpartition(" is tiewise.")[2])(tiewise)


@pytest.mark.parametrize(("name", "call"), [("dedupe", "tiewise.repair"), ("densify", "undo=True")])
def test_replaced_name_states_the_call_that_does_it_now(name, call):
    with pytest.raises(AttributeError, match=rf"^tiewise\.{name} is .*{call}"):
        getattr(tiewise, name)


@pytest.mark.parametrize("package", [tiewise, tiewise.lab, tiewise.checkpoint, tiewise.boundary])
def test_all_lists_the_public_names(package):
    stub = (Path(package.__file__).parent / "__init__.pyi").read_text()
    imports = re.findall(r"^from (\S+) import \w+ as (\w+)$", stub, re.MULTILINE)
    listed = {name for home, name in imports if home != package.__name__}
    assert set(package.__all__) == listed
    assert len(listed) > 5
    names: dict[str, object] = {}
    exec(f"from {package.__name__} import *", names)
    assert listed <= names.keys()


def test_help_of_package_is_short():
    """Each function has its own help; that of the package lists the names of daily use."""
    lines = pydoc.plain(pydoc.render_doc(tiewise)).splitlines()
    assert len(lines) < 60
    assert any("tiewise.compare(" in line for line in lines)


@pytest.mark.parametrize("command", [commands.compare, commands.train])
def test_help_shows_defaults_of_settings(command):
    settings = Settings()
    for name, parameter in inspect.signature(command).parameters.items():
        default = parameter.default.show_default
        if isinstance(default, str) and hasattr(settings, name):
            value = getattr(settings, name)
            if name == "seed":
                value = 1
            elif name == "select":  # its default depends on the command
                value = "best for compare, else last"
            elif isinstance(value, tuple):
                value = ",".join(value) or "none"
            assert default == str(value), name


# --- Ctrl-C


def start_long_compare(folder, text, *more):
    """Start a comparison of two long runs; return its process once it trains."""
    long = ("--steps=4000", "--arms=tied,untied", "--seeds=1", "--out=run")
    (process,) = launch(folder, 1, "compare", "-t", text, *TINY, *long, *more)
    wait_until(training_advances(folder), process)
    return process


@pytest.mark.parametrize("backend", ["torch", pytest.param("flax", marks=pytest.mark.slow)])
def test_ctrl_c_writes_checkpoint_exits_130_and_prints_resume_command(tmp_path, text, backend):
    process = start_long_compare(tmp_path, tmp_path / text, f"--backend={backend}")
    process.send_signal(signal.SIGINT)
    [(code, out, err)] = wait_for_exit([process])
    assert (code, out, "Traceback" in err) == (130, "", False)
    line = "tiewise: interrupted, a checkpoint is written; resume with: tiewise compare --out run --resume"
    assert err.splitlines()[-1] == line
    assert list((tmp_path / "run" / "tied" / "seed-1").glob("checkpoint-*/trainer_state.json"))


def worker_processes(process, folder):
    """Return the two worker processes once each has written a measurement."""
    before = curves(folder)
    wait_until(lambda: sum(size > before.get(path, 0) for path, size in curves(folder).items()) == 2, process)
    return psutil.Process(process.pid).children()


@pytest.mark.slow
def test_two_jobs_write_checkpoints_at_ctrl_c_and_end_at_second_ctrl_c_or_kill(tmp_path, text):
    process = start_long_compare(tmp_path, tmp_path / text, "--jobs=2", "--set=batch=64")
    worker_processes(process, tmp_path)
    process.send_signal(signal.SIGINT)
    [(code, out, err)] = wait_for_exit([process])
    line = "tiewise: interrupted, a checkpoint is written; resume with: tiewise compare --out run --resume"
    assert (code, out, err.splitlines()[-1], "Traceback" in err) == (130, "", line, False)
    assert len({path.parents[1] for path in tmp_path.glob("run/*/seed-1/checkpoint-*/trainer_state.json")}) == 2
    for *numbers, expected in ((signal.SIGINT, signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        (process,) = launch(tmp_path, 1, "compare", "--out=run", "--resume", "--jobs=2")
        workers = worker_processes(process, tmp_path)
        assert len(workers) == 2
        for number in numbers:
            process.send_signal(number)
        [(code, _, err)] = wait_for_exit([process])
        assert (code, "Traceback" in err) == (expected, False), err
        assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []
    assert not list(tmp_path.glob("run/*/*/result.json"))  # the workers ended before they finished their runs


@pytest.mark.slow
def test_second_ctrl_c_stops_training_at_once(tmp_path, text):
    process = start_long_compare(tmp_path, tmp_path / text, "--set=batch=64", "--set=accumulate=1", "--set=length=64")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    [(code, _, err)] = wait_for_exit([process])
    assert (code, "Traceback" in err) == (130, False)
    assert err.splitlines()[-1].endswith("--resume")


@pytest.mark.slow
def test_compare_interrupted_and_killed_in_turn_ends_with_same_figures(tmp_path, text):
    for name, signals in (("whole", []), ("cut", [signal.SIGINT, signal.SIGKILL, signal.SIGINT, signal.SIGKILL])):
        folder = tmp_path / name
        folder.mkdir()
        process = start_long_compare(folder, tmp_path / text, "--steps=1500")
        for count, number in enumerate(signals):
            if count:
                wait_until(training_advances(folder), process)
            process.send_signal(number)
            [(code, _, err)] = wait_for_exit([process])
            assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), err
            (process,) = launch(folder, 1, "compare", "--out=run", "--resume")
        [(code, _, err)] = wait_for_exit([process])
        assert code == 0, err
    whole, cut = (json.loads((tmp_path / n / "run/results.json").read_text())["runs"] for n in ("whole", "cut"))
    for one, other in zip(whole, cut, strict=True):
        for metric in ("heldout_nll", "train_nll"):
            assert one[metric] == pytest.approx(other[metric], abs=1e-6)


# Code that sends Ctrl-C to its own process at one of these moments:
# - the process looks for its n-th module, or for a module by name;
# - the n-th call of `__set_name__`, in which Python before 3.12 turns the interrupt into a RuntimeError;
# - the n-th call in code compiled from text, as a dataclass makes it; after it `python -m` would end as killed.
AT_A_MODULE = """
class Press:
    seen = 0
    def find_spec(self, name, path=None, target=None):
        Press.seen += 1
        if {moment!r} in (name, Press.seen):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
IN_A_CALL = """
left = {moment}
def press(frame, event, argument):
    global left
    if event == "call" and {where}:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(press)
"""
IN_SET_NAME = IN_A_CALL.replace("{where}", "frame.f_code.co_name == '__set_name__'")
IN_TEXT = IN_A_CALL.replace("{where}", "frame.f_code.co_filename == '<string>'")


def run_with_ctrl_c(folder, press, moment, *arguments):
    code = f"""
import os, signal, sys
from tiewise.__main__ import main
{press.format(moment=moment)}
sys.argv = ["tiewise", *{arguments!r}]
main()
"""
    (folder / "pressed.py").write_text(code)
    command = [sys.executable, "-m", "pressed"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stdout) == (130, ""), (moment, result.stderr)
    return result.stderr


@pytest.mark.parametrize("moment", ["typer", "tiewise.cli.check", "numpy", "numpy._core.umath", "ml_dtypes", 200])
def test_ctrl_c_during_import_of_command_exits_130_without_message(tmp_path, moment):
    assert run_with_ctrl_c(tmp_path, AT_A_MODULE, moment, "check", "model") == ""


def test_ctrl_c_during_dataclass_creation_exits_130_without_message(tmp_path):
    assert run_with_ctrl_c(tmp_path, IN_TEXT, 1, "check", "model") == ""


@pytest.mark.parametrize("line", ["exercise 1", "exercise 1 --json", "plan --list"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_stdout_pipe_ends_command_with_exit_1_and_no_message(tmp_path, line, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command, environment = [sys.executable, "-m", "tiewise", *line.split()], {"PYTHONUNBUFFERED": unbuffered}
    how = {"cwd": tmp_path, "env": os.environ | environment, "stdout": writer, "stderr": subprocess.PIPE}
    done = subprocess.run(command, **how)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
def test_ctrl_c_during_import_of_libraries_exits_130_without_traceback(tmp_path, text):
    process = start_long_compare(tmp_path, tmp_path / text)
    process.kill()
    wait_for_exit([process])
    moments = [(AT_A_MODULE, n) for n in (2, 60, 300, 1000, 1800)] + [(IN_SET_NAME, n) for n in (1, 30, 100)]
    for press, moment in moments:
        result = run_with_ctrl_c(tmp_path, press, moment, "compare", "--out=run", "--resume")
        assert "Traceback" not in result, moment


# --- a terminal


def clean_environment(**environment):
    """Return the variables of a process on a terminal with colours."""
    return {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI", "FORCE_COLOR")} | {
        "TERM": "xterm",
        **environment,
    }


def open_terminal():
    """Return the descriptors of both sides of a terminal of 100 columns: of its reader, and of a program."""
    own, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, pack("HHHH", 40, 100, 0, 0))
    return own, theirs


def read_terminal(own):
    """Return all output of a terminal, once the program has closed it."""
    seen = b""
    with contextlib.suppress(OSError):  # Linux raises this if the other side is closed
        while piece := os.read(own, 65536):
            seen += piece
    os.close(own)
    return seen.decode()


def run_on_terminal(folder, *arguments, **environment):
    """Run a command on a terminal; return (exit code, output)."""
    own, theirs = open_terminal()
    process = subprocess.Popen(
        [COMMAND, *arguments],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=clean_environment(**environment),
    )
    os.close(theirs)
    seen = read_terminal(own)
    return process.wait(), seen


COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m")


def test_compare_shows_progress_bars_on_terminal(tmp_path, text):
    arguments = ("compare", "-t", text, *TINY, "--steps=100", "--arms=tied,untied", "--seeds=1", "--out=run")
    own, theirs = open_terminal()
    path = os.ttyname(theirs)
    streams = {"stdin": path, "stdout": path, "stderr": path}
    process = ForkedCommand(arguments, tmp_path, clean_environment(OMP_NUM_THREADS="1"), **streams)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read_terminal, own)
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()  # an ended process is left alone
            os.close(theirs)  # open until now, because the fork opens the terminal only after it has started
        seen = reading.result()
    assert code == 0, seen
    for bar in ("reading", "tokens", "1/2 tied seed 1", "2/2 untied seed 1"):
        assert re.search(rf"\r[^\n]*{bar}[^\n]*%\|", seen), bar
    assert re.search(r"1/2 tied seed 1, nll \d\.\d{3}", seen)


def test_help_has_colour_on_terminal_unless_no_color_is_set(tmp_path):
    assert COLOUR.search(run_on_terminal(tmp_path, "--help")[1])
    assert not COLOUR.search(run_on_terminal(tmp_path, "--help", NO_COLOR="1")[1])
