"""The example of every verb and the checkpoints that it needs, for tests that run all verbs.

An example starts with the name of one of these folders; its options may name others.

    tied        one table for both ends
    untied      two tables
    equal       one table, stored twice
    wrong       the config claims one table, and two that differ are stored
    factored    a narrow table and maps, factored from `untied`
    adapter     a PEFT adapter of `tied`: copies of its table in which one row was trained
"""

import json
import shlex

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.inspection.tiny_folders import write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tiewise.checkpoint.rewrite import factor
from tiewise.checkpoint.rewrite.registry import verbs

EMBEDDING = "model.embed_tokens.weight"


def write_sources(folder):
    """Write the folders that examples name."""
    norm = {"model.norm.weight": np.ones(8, np.float32)}
    for name in ("tied", "untied"):
        byte_level(write_model(folder / name, tied=name == "tied", tensors=norm))
    table = load_file(folder / "tied/model.safetensors")[EMBEDDING]
    write_model(folder / "equal", tensors={"lm_head.weight": table})
    write_model(folder / "wrong", tensors={"lm_head.weight": table[::-1].copy()})
    factor(folder / "untied", folder / "factored", rank=4)
    write_adapter(folder / "adapter", table)


def write_adapter(folder, table):
    """Write an adapter whose copies of a tied base's table have one trained row."""
    folder.mkdir()
    trained = table.copy()
    trained[3] += 1
    names = ("model.embed_tokens", "lm_head")
    tensors = {f"base_model.model.{name}.weight": trained for name in names}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "modules_to_save": ["embed_tokens", "lm_head"], "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def byte_level(folder):
    """Write a byte-level tokenizer.json in which " é" and both of its bytes are tokens."""
    texts = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ã", "©", "Ã©", "ĠÃ©", "Ġab", "ab"]
    merges = [("Ã", "©"), ("Ġ", "Ã©"), ("a", "b"), ("Ġ", "ab")]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def example_lines():
    """Return {command of a verb: words of its example, without the command and `--to`}."""
    return {verb.command: shlex.split(verb.example) for verb in verbs().values()}
