"""Make the files that the documentation's examples use: `python examples/kit.py FOLDER`.

It takes seconds, needs no network, and trains nothing.

text.txt            600,000 characters of Python's own documentation
runs/demo/          a comparison of three small models, two seeds each: its recorded results, and models
model/              its tied model         untied/, factored/    the others
my-model/           model/ as some trainers save it: with its table a second time, as a head
longer/             model/'s tokenizer with three more tokens
other/              a tied model with another vocabulary
adapter/            a PEFT adapter of model/: an update of one layer, and copies of the table with one changed row
draft/              an EAGLE-3 draft of model/: a head over 500 of its tokens
config.json         that of model/

Layers are drawn at random with a fixed seed. Tables are computed from text.txt: a truncated singular value
decomposition of log(1 + n), where n counts how often one token follows another. Frequent tokens get longer rows, and
tokens with the same neighbors get similar rows. A small random part is added to each.

`kit_results.json` is the record of a comparison that did train. The models in runs/demo/ are not those that it
measured. Recorded in FOLDER by:

    tiewise compare --text text.txt --arms tied,untied,factored:16 --seeds 2 --tokenizer bpe:2000 --steps 120 \\
        --set width=64 --set length=128 --out recorded
    cp recorded/results.json ../examples/kit_results.json
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import tiewise
from tiewise.report.comparison_page import write_report
from tiewise.training.data.corpus import PreparedText, prepare
from tiewise.training.data.sources import builtin_texts
from tiewise.training.data.tokenizer import make_tokenizer
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings

RECORDED = Path(__file__).with_name("kit_results.json")
CHARACTERS = 600_000  # of text.txt, at least: reading all of Python's documentation takes longer
WIDTH, LAYERS, HEADS, LENGTH, RANK, VOCAB, OTHER_VOCAB = 64, 2, 4, 128, 16, 2000, 3000
SCALE = 0.125  # standard deviation of a table's numbers: 1 / √WIDTH, which tiewise draws tables with


def make(folder: Path) -> None:
    """Write the files into a folder that is empty or does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    transformers.logging.disable_progress_bar()
    (folder / "text.txt").write_text("\n\n".join(first_texts()), encoding="utf-8")
    make_comparison(folder / "text.txt", folder / "runs/demo")
    for name, arm in (("model", "tied"), ("untied", "untied"), ("factored", "factored-16")):
        shutil.copytree(folder / "runs/demo" / arm / "seed-1/final", folder / name)
    shutil.copy(folder / "model/config.json", folder / "config.json")
    make_my_model(folder / "model", folder / "my-model")
    make_longer(folder / "model", folder / "longer")
    make_other(folder / "text.txt", folder / "other")
    make_adapter(folder / "model", folder / "adapter")
    make_draft(folder / "model", folder / "draft")


def first_texts() -> Iterator[str]:
    """Yield the first documents of the built-in text, `CHARACTERS` in all."""
    count = 0
    for _, text in builtin_texts():
        yield text
        count += len(text)
        if count >= CHARACTERS:
            return


def make_comparison(text_file: Path, run: Path) -> None:
    """Write a folder as `tiewise.compare` leaves it: settings, tokens, models, results and report."""
    run.mkdir(parents=True)
    comparison = Comparison.from_dict(json.loads(RECORDED.read_text(encoding="utf-8")))
    shape = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "length": LENGTH, "steps": comparison.runs[0].steps}
    settings = Settings(arms=tuple(comparison.arms), seeds=2, text=(text_file.name,), tokenizer=f"bpe:{VOCAB}", **shape)
    settings.save(run)
    text = prepare([str(text_file)], settings.tokenizer, run / "data", length=LENGTH)
    for seed in comparison.seeds:
        save_models(text, run, seed)
    shutil.copy(RECORDED, run / "results.json")
    write_report(comparison, run / "report.html")


def save_models(text: PreparedText, run: Path, seed: int) -> None:
    """Write the three models of a seed: one body, and each arm's tables."""
    tied, untied, factored = (run / arm / f"seed-{seed}/final" for arm in ("tied", "untied", "factored-16"))
    counts = count_pairs(text.split("train"), text.vocab)
    save_model(tied, table_of_both_sides(counts, seed), text.tokenizer, seed)
    save_model(untied, tables_of_two_sides(counts, seed), text.tokenizer, seed)
    factored.parent.mkdir(parents=True)
    tiewise.factor(tied, factored, rank=RANK)


def save_model(folder: Path, tables: list[np.ndarray], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Write a Llama with random layers, and one table for both ends or one for each."""
    torch.manual_seed(seed)
    is_tied = len(tables) == 1
    config = LlamaConfig(
        vocab_size=len(tables[0]),
        hidden_size=WIDTH,
        intermediate_size=168,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        initializer_range=0.0625,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=is_tied,
        tiewise_boundary="tied" if is_tied else "untied",  # as tiewise saves it
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(tables[0]))
        model.get_output_embeddings().weight.copy_(torch.from_numpy(tables[-1]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def count_pairs(ids: np.ndarray, vocab: int) -> np.ndarray:
    """Return log(1 + how often token j follows token i) as a matrix [V, V]."""
    pairs = ids[:-1].astype(np.int64) * vocab + ids[1:]
    return np.log1p(np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)).astype(np.float32)


def tables_of_two_sides(counts: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return an input and an output table [V, D], whose product is the best of rank D for the counts."""
    left, values, right = truncated_svd(counts, seed)
    return turned([left * np.sqrt(values), right.T * np.sqrt(values)], seed)


def table_of_both_sides(counts: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return one table [V, D] from the counts of the tokens after and before each token."""
    left, values, _ = truncated_svd(np.hstack([counts, counts.T]), seed)
    return turned([left * np.sqrt(values)], seed)


def truncated_svd(matrix: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the D largest singular values and their vectors, nearly: by random projection."""
    sample = matrix @ np.random.default_rng(seed).normal(size=(matrix.shape[1], 2 * WIDTH)).astype(np.float32)
    basis, _ = np.linalg.qr(matrix @ (matrix.T @ sample))
    left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left[:, :WIDTH], values[:WIDTH], right[:WIDTH]


def turned(tables: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Return tables in a random basis, at the usual scale, with a random part in each row.

    Models of two seeds share no basis, and tokens that never occur have rows all the same.
    """
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    scaled = [SCALE / table.std() * table @ basis for table in tables]
    return [(table + rng.normal(0, SCALE / 5, table.shape)).astype(np.float32) for table in scaled]


def make_my_model(model: Path, copy: Path) -> None:
    """Write a tied model whose table is stored twice."""
    shutil.copytree(model, copy)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})


def make_longer(model: Path, longer: Path) -> None:
    """Write the tokenizer of a model with three more special tokens."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    first = max(tokenizer["model"]["vocab"].values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": f"<extra{i}>", **plain} for i in range(3)]
    longer.mkdir()
    (longer / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def make_other(text_file: Path, other: Path) -> None:
    """Write a tied model with another tokenizer of the same text."""
    text = text_file.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(f"bpe:{OTHER_VOCAB}", lambda: iter([text]))
    ids = np.array(tokenizer.backend_tokenizer.encode(text).ids)
    save_model(other, table_of_both_sides(count_pairs(ids, len(tokenizer)), seed=1), tokenizer, seed=1)


def write(folder: Path, config_name: str, config: dict, name: str, tensors: dict[str, np.ndarray]) -> None:
    """Write a folder of one config and one file of tensors."""
    folder.mkdir()
    (folder / config_name).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name, {"format": "pt"})


def make_adapter(model: Path, adapter: Path) -> None:
    """Write the adapter that PEFT saves of a tied model with one changed row.

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

    Its tables are the target's, and its layers are empty.
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
    parser = argparse.ArgumentParser(description="Make the files that the documentation's examples use.")
    parser.add_argument("folder", type=Path, help="Folder to make, or an empty one.")
    folder = parser.parse_args().folder
    make(folder)
    print(f"next: cd {folder}")
    print("then: tiewise check my-model")
