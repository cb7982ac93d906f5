import gc
import random

import pytest

from tiewise.core.frequency import token_counts
from tiewise.data.corpus import prepare
from tiewise.training.display import Display
from tiewise.training.settings import Settings
from tiewise.training.start import start

LENGTH = 16
gc.freeze()  # every Trainer collects garbage, and what torch and transformers hold at import never is any


def prose(seed, paragraphs):
    """Paragraphs of made-up words, each of which tends to follow a few others, so that there is something to learn."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 6))) for _ in range(150)]
    after = {word: draw.sample(words, 4) for word in words}
    made = []
    for _ in range(paragraphs):
        line = [draw.choice(words)]
        while len(line) < 40:
            line.append(draw.choice(after[line[-1]]))
        made.append(" ".join(line))
    return "\n\n".join(made)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A text file of 30,000 characters."""
    path = tmp_path_factory.mktemp("source") / "text.txt"
    path.write_text(prose(0, 150), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text(source, tmp_path_factory):
    """The same as tokens, 300 of them in the vocabulary."""
    return prepare([str(source)], "bpe:300", tmp_path_factory.mktemp("tokens") / "data", length=LENGTH)


@pytest.fixture(scope="session")
def counts(text):
    return token_counts(text.split("train"), text.vocab)


@pytest.fixture(scope="session")
def tiny(source):
    """Make settings of a run of a second; keywords replace any of them."""

    def make(**changes):
        small = {"width": 16, "layers": 1, "heads": 2, "length": LENGTH, "batch": 4, "steps": 40, "seeds": 1}
        shown = {"arms": ("tied", "untied"), "text": (str(source),), "tokenizer": "bpe:300"}
        return Settings(**{**small, **shown, **changes})

    return make


class Lines(list):
    """What was said while runs were begun and trained."""

    @property
    def display(self):
        return Display(self.append)

    def begin(self, settings, out, **options):
        """Start a run in `out`; return `out`."""
        start(settings, out, "tiewise compare --as typed", self.display, **options)
        return out


@pytest.fixture
def lines():
    return Lines()
