"""Fixtures of small texts, settings and runs, and checks that the training tests share."""

import random
import signal
from contextlib import contextmanager

import pytest

from tiewise.core.errors import Interrupted, TiewiseError
from tiewise.core.spec import BoundarySpec
from tiewise.training.compare import Display, start
from tiewise.training.data.corpus import prepare
from tiewise.training.folder import locked
from tiewise.training.run import train
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, RunRecord

LENGTH = 16


def prose(paragraphs, known=150, each=40):
    """Return paragraphs of made-up words. Each word has four likely successors, so a model has something to learn."""
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 6))) for _ in range(known)]
    after = {word: draw.sample(words, 4) for word in words}
    made = []
    for _ in range(paragraphs):
        line = [draw.choice(words)]
        while len(line) < each:
            line.append(draw.choice(after[line[-1]]))
        made.append(" ".join(line))
    return "\n\n".join(made)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Write a text file of 30,000 characters."""
    path = tmp_path_factory.mktemp("source") / "text.txt"
    path.write_text(prose(150), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text(source, tmp_path_factory):
    """Prepare that text with a vocabulary of 300 tokens."""
    return prepare([str(source)], "bpe:300", tmp_path_factory.mktemp("tokens") / "data", length=LENGTH)


@pytest.fixture(scope="session")
def tiny_settings(source):
    """Return a function that makes settings of a run of one second; keywords override them."""

    def make(**changes):
        small = {
            "width": 16,
            "layers": 1,
            "heads": 2,
            "length": LENGTH,
            "batch": 4,
            "steps": 40,
            "seeds": 1,
            "learning_rate": 0.004,
        }
        shown = {"arms": ("tied", "untied"), "text": (str(source),), "tokenizer": "bpe:300"}
        return Settings(**{**small, **shown, **changes})

    return make


def jobs_on(text):
    """Return a function that makes the job of an arm on a text. The default arm is the first one."""

    def make(settings, folder=None, arm=None, **changes):
        specs = settings.specs() if arm is None else {arm: BoundarySpec.parse(arm)}
        return Job(*next(iter(specs.items())), settings, folder, text, **changes)

    return make


@pytest.fixture(scope="session")
def job(text):
    return jobs_on(text)


@pytest.fixture(scope="session")
def trained(job):
    """Return a function that trains the job of an arm and returns its outcome."""
    return lambda *arguments, **changes: train(job(*arguments, **{"measured_ids": (3, 4, 5), **changes}))


@pytest.fixture
def interrupted(monkeypatch):
    """Return a function that runs `work` on a job and presses Ctrl-C after `step` steps."""

    def cut(job, step, times=1, raises=Interrupted, work=train):
        real, pressed = RunRecord.on_step_begin, []

        def begin(self, args, state, control, **kw):
            real(self, args, state, control, **kw)
            if state.global_step == step and not pressed:
                pressed.append(step)
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(RunRecord, "on_step_begin", begin)
            with pytest.raises(raises):
                work(job)

    return cut


@contextmanager
def refusal(says, error=TiewiseError):
    """Check that the block raises `error` with a remedy and a one-line message containing `says`."""
    with pytest.raises(error) as caught:
        yield
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def differing_fields(one, other):
    """Return the names of the fields in which two results differ, apart from durations."""
    # as text, nan equals nan
    left, right = ({name: repr(value) for name, value in vars(of).items()} for of in (one, other))
    return {name for name in left if name not in ("tokens_per_second", "seconds") and left[name] != right[name]}


def assert_same_results(one, other):
    """Check that two runs have equal losses and curves; durations and memory may differ."""
    assert (one.arm, one.seed) == (other.arm, other.seed)
    for name in ("heldout_nll", "train_nll", "initial_nll", "bits_per_byte"):
        # seq2seq runs have no bits per byte
        same = pytest.approx(getattr(other, name), abs=1e-6, nan_ok=name == "bits_per_byte")
        assert getattr(one, name) == same, name
    for a, b in zip(one.curve, other.curve, strict=True):
        assert vars(a) == pytest.approx(vars(b), abs=1e-6)


class DisplayedLines(list):
    """Lines that the display printed while runs were started and trained."""

    @property
    def display(self):
        return Display(self.append)

    def begin(self, settings, out, **options):
        """Start a run in `out` and return `out`."""
        with locked(out):
            start(settings, out, "tiewise compare --as typed", self.display, **options)
        return out


@pytest.fixture
def lines():
    return DisplayedLines()
