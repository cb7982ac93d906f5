"""Make what the examples of the documentation work on: `python examples/kit.py FOLDER`, about a minute, no network.

text.txt            prose that every Python carries
runs/demo/          a comparison of three small models, two seeds each
model/              its tied model         untied/, factored/    the others
my-model/           model/ as some trainers save it: with its table a second time, as a head
longer/             model/'s tokenizer with three tokens more
config.json         that of model/
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

import tiewise
from tiewise.data.sources import builtin_texts

SIZES = {"width": 64, "layers": 2, "heads": 4, "length": 128, "batch": 8, "steps": 120}


def make(folder: Path) -> None:
    """Fill a folder, which must not exist or be empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    arms = ["tied", "untied", "factored:16"]
    tiewise.compare(folder / "runs/demo", arms=arms, text="builtin", seeds=2, tokenizer="bpe:2000", **SIZES)
    (folder / "text.txt").write_text("\n\n".join(text for _, text in builtin_texts()), encoding="utf-8")
    for name, arm in (("model", "tied"), ("untied", "untied"), ("factored", "factored-16")):
        shutil.copytree(folder / "runs/demo" / arm / "seed-1/final", folder / name)
    shutil.copytree(folder / "model", folder / "my-model")
    weights = load_file(folder / "model/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, folder / "my-model/model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "model/tokenizer.json").read_text(encoding="utf-8"))
    first = max(tokenizer["model"]["vocab"].values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": f"<extra{i}>", **plain} for i in range(3)]
    (folder / "longer").mkdir()
    (folder / "longer/tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(folder / "model/config.json", folder / "config.json")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
