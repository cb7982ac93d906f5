"""How many files of the library run for three things that a user does: the fewer, the sooner they can be read.

    python tools/files_that_run.py            how many, beside the most that it may be
    python tools/files_that_run.py --hold     the same, and exits with 1 where one is above: `make check` does this
    python tools/files_that_run.py --list     which

A file runs where one of its functions is called; importing it is not enough. Each walk has a process of its own, and
everything is imported before the count begins.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1] / "src" / "tiewise"
LIMITS = {"compare": 45, "check": 17, "inspect": 20}
OURS = re.compile(re.escape(str(ROOT)) + r".*\.py$")  # a template's code has a name too
V, D = 48, 8


def folder(path: Path, *, tied: bool) -> Path:
    """Write a Llama of one layer, whose config says `tied` but whose file has a head of its own."""
    draw = np.random.default_rng(0)
    sizes = {"hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, **sizes}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    shapes = {f"model.layers.0.self_attn.{name}_proj": (D, D) for name in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{name}_proj": (2 * D, D) for name in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj": (D, 2 * D), "model.embed_tokens": (V, D), "lm_head": (V, D)}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    shapes |= dict.fromkeys(norms, (D,))
    tensors = {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def check(place: Path) -> None:
    """One folder with one finding, from Python."""
    import tiewise

    assert tiewise.check(folder(place / "model", tied=True)).findings


def inspect(place: Path) -> None:
    """One section, from Python: measured, held as evidence, as JSON, in words and as a page."""
    import tiewise
    from tiewise.report.faces import inspection_view
    from tiewise.report.figures import write_inspection

    found = tiewise.inspect(folder(place / "model", tied=False), only=["alignment"])
    assert found.record()
    assert inspection_view(found, True)
    assert write_inspection(found, place, "tiewise inspect").stat().st_size


def compare(place: Path) -> None:
    """Two plain decoders of two seeds each, to the report."""
    text = place / "text.txt"
    text.write_text("\n\n".join(f"the {i % 7} and the {i % 11} of {i}" for i in range(4000)))
    small = [f"--set={name}" for name in ("layers=1", "width=32", "heads=2", "length=16", "batch=4")]
    given = ["--text", str(text), "--tokenizer", "bytes", "--arms", "tied,untied", "--seeds", "2", "--steps", "4"]
    command("compare", *given, *small, "--out", str(place / "run"))
    assert (place / "run" / "report.html").stat().st_size


def command(*words: str) -> None:
    """Run a command in this process."""
    from tiewise.__main__ import main

    sys.argv = ["tiewise", *words, "--quiet"]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


WALKS: dict[str, Callable[[Path], None]] = {"compare": compare, "check": check, "inspect": inspect}


def files(walk: Callable[[Path], None]) -> list[str]:
    """Files of which a function runs."""
    found: set[str] = set()

    def seen(frame: object, event: str, arg: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_flags & CO_OPTIMIZED and OURS.match(code.co_filename):
            found.add(code.co_filename)  # bodies of modules and classes are called too, and are not optimised

    for module in pkgutil.walk_packages([str(ROOT)], "tiewise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    with tempfile.TemporaryDirectory() as place:
        threading.setprofile(seen)
        sys.setprofile(seen)
        try:
            walk(Path(place))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return sorted(str(Path(name).relative_to(ROOT)) for name in found)


def main() -> int:
    """Print the counts; 1 where one is too many and they are to be held."""
    over = False
    for name, most in LIMITS.items():
        ran = subprocess.run([sys.executable, __file__, "--walk", name], stdout=subprocess.PIPE, text=True, check=True)
        listed = json.loads(ran.stdout.splitlines()[-1])
        over |= len(listed) > most
        print(
            f"files that run: {name:16}{len(listed):>8}{most:>10}" + "   more: lighten it again" * (len(listed) > most)
        )
        if "--list" in sys.argv:
            print(*(f"    {one}" for one in listed), sep="\n")
    return int("--hold" in sys.argv and over)


if __name__ == "__main__":
    if "--walk" in sys.argv:
        print(json.dumps(files(WALKS[sys.argv[-1]])))
    else:
        sys.exit(main())
