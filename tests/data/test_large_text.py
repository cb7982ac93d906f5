"""Text larger than we want to hold: memory does not grow with it."""

import json
import random
import subprocess
import sys

import pytest

MEGABYTE = 1 << 20
SCRIPT = """
import json, resource, sys
from pathlib import Path
from tiewise.data.frequency import token_counts, asymmetric_bigrams
from tiewise.data.corpus import prepare

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

Path(sys.argv[2], "small.txt").write_text("\\n\\n".join(f"paragraph {i} of a small text" for i in range(9999)))
prepare([str(Path(sys.argv[2], "small.txt"))], sys.argv[3], Path(sys.argv[2], "small"), length=8)  # loads all code
before = peak()
prepared = prepare([sys.argv[1]], sys.argv[3], Path(sys.argv[2], "big"), length=128)
after = peak()
print(json.dumps({"grown": after - before, "facts": prepared.facts}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(20_000)]
    path = tmp_path_factory.mktemp("large") / "large.txt"
    with path.open("w") as file:
        while file.tell() < 200 * MEGABYTE:
            for _ in range(1000):
                file.write(" ".join(generator.choices(words, k=60)) + "\n\n")
    yield path
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bpe:4096", "bytes"])
def test_memory_does_not_grow_with_the_text(large, tmp_path, tokenizer):
    command = [sys.executable, "-c", SCRIPT, large, tmp_path, tokenizer]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    size = large.stat().st_size
    assert result["facts"]["bytes"] > 0.99 * size  # nothing repeats, nothing is lost
    assert result["facts"]["tokens"] > size / 6
    # the file, its token lists or Python strings of its paragraphs would each take more; hashes take some 30 bytes
    # for each of its 500,000 paragraphs, and their merging as much again
    assert result["grown"] < 110 * MEGABYTE
