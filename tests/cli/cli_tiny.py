"""Options that make a run of a second, a text for it, and what a refusal looks like."""

import random

TINY = [f"--set={item}" for item in ("width=16", "layers=1", "heads=2", "length=16", "batch=4")]
TINY += ["--steps=12", "--tokenizer=bytes"]


def write_text(folder):
    """Write a text file of 8,000 characters; return its name."""
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 6))) for _ in range(60)]
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(draw.choice(words) for _ in range(30)) for _ in range(60)))
    return path.name


def refused(said, says=""):
    """The one line of a command that refuses: exit 2, nothing else printed."""
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("tiewise: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert says in said.err
    return said.err
