"""Options of a run that takes a second, a text for it, and a check of refusals."""

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


def assert_refused(result, message=""):
    """Check that a command printed one line on stderr and exited with code 2; return the line."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("tiewise: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert message in result.err
    return result.err
