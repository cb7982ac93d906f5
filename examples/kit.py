"""Make the files that the documentation's examples use: `python examples/kit.py FOLDER`.

It takes about a minute and needs no network.

text.txt            Python's own documentation
runs/demo/          a comparison of three small models, two seeds each
model/              its tied model         untied/, factored/    the others
my-model/           model/ as some trainers save it: with its table a second time, as a head
longer/             model/'s tokenizer with three more tokens
other/              a tied model with another vocabulary
adapter/            a PEFT adapter of model/: an update of one layer, and copies of the table with one changed row
draft/              an EAGLE-3 draft of model/: a head over 500 of its tokens
config.json         that of model/
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

import tiewise
from tiewise.training.data.sources import builtin_texts

SIZES = {"width": 64, "layers": 2, "heads": 4, "length": 128, "batch": 8, "steps": 120}


def make(folder: Path) -> None:
    """Write the files into a folder that is empty or does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    transformers.logging.disable_progress_bar()
    arms = ["tied", "untied", "factored:16"]
    tiewise.compare("builtin", arms=arms, seeds=2, tokenizer="bpe:2000", out=folder / "runs/demo", **SIZES)
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
    with tempfile.TemporaryDirectory() as temporary:
        tiewise.compare("builtin", arms="tied", seeds=1, tokenizer="bpe:3000", out=Path(temporary) / "run", **SIZES)
        shutil.copytree(Path(temporary) / "run/tied/seed-1/final", folder / "other")
    make_adapter(folder / "model", folder / "adapter")
    make_draft(folder / "model", folder / "draft")


def write(folder: Path, config_name: str, config: dict, name: str, tensors: dict[str, np.ndarray]) -> None:
    """Write a folder of one config and one file of tensors."""
    folder.mkdir()
    (folder / config_name).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name, {"format": "pt"})


def make_adapter(model: Path, adapter: Path) -> None:
    """Write the adapter that PEFT saves of a tied model with one trained token.

    `modules_to_save` stores the table twice.
    """
    table, rng = load_file(model / "model.safetensors")["model.embed_tokens.weight"], np.random.default_rng(0)
    table[-1] += rng.normal(size=table.shape[1])
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"base_model.model.{name}.weight": table for name in ("model.embed_tokens", "lm_head")}
    tensors |= {
        f"{q_proj}.lora_{end}.weight": 0.02 * rng.normal(size=shape) for end, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config |= {
        "modules_to_save": ["model.embed_tokens"],
        "ensure_weight_tying": True,
        "base_model_name_or_path": "model",
    }
    write(adapter, "adapter_config.json", config, "adapter_model.safetensors", tensors)


def make_draft(model: Path, draft: Path) -> None:
    """Write a draft with rows for the first 250 and the last 250 tokens.

    It is untrained except for its tables.
    """
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    vocab, width = table.shape
    ids = np.r_[0:250, vocab - 250 : vocab]
    tensors = {"d2t": ids - np.arange(500), "t2d": np.isin(np.arange(vocab), ids)}
    tensors |= {"embed_tokens.weight": table, "lm_head.weight": table[ids]}
    tensors |= {"fc.weight": np.zeros((width, 3 * width), np.float32), "norm.weight": np.ones(width, np.float32)}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 500, "tie_word_embeddings": False}
    write(draft, "config.json", config, "model.safetensors", tensors)
    shutil.copy(model / "tokenizer.json", draft)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give one folder to make: python examples/kit.py FOLDER")
    make(Path(sys.argv[1]))
    print(f"the examples run in {sys.argv[1]}: cd {sys.argv[1]}")
