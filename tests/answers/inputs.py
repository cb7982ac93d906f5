"""The fixed inputs of the recorded answers: texts, corpora and checkpoints, the same on every machine."""

import json
import random
import shutil

import numpy as np
import torch
import transformers as tr
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.checkpoint.gguf_writer import model as gguf_model
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table, write_checkpoint
from tiewise.boundary.install import install

WORDS = ["new", "york", "san", "diego", "a", "b", "c", "d", "e", "f", *(f"w{i}" for i in range(110))]


def make(folder):
    """Write all inputs into `folder`."""
    _texts(folder)
    _checkpoints(folder)
    _models(folder)


def _texts(folder):
    draw = random.Random(1)
    pick = lambda: WORDS[min(int(draw.expovariate(0.05)), len(WORDS) - 1)]  # noqa: E731 - frequent and rare words
    lines = [" ".join(pick() for _ in range(draw.randint(4, 16))).capitalize() + "." for _ in range(900)]
    (folder / "text.txt").write_text("\n".join("\n" * (i % 7 == 0) + line for i, line in enumerate(lines)))
    (folder / "words.txt").write_text("\n".join(line.lower().rstrip(".") for line in lines))
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, part in (("train", lines[:300]), ("valid", lines[300:340]), ("test", lines[340:380])):
        (corpus / f"{name}.txt").write_text("\n".join(line.lower().rstrip(".") for line in part) + "\n")


def _checkpoints(folder):
    """Little folders for `check` and the rewriting verbs, healthy and not."""
    head = table(seed=0)
    llama(folder / "tied")
    llama(folder / "untied", tied=False)
    llama(folder / "equal", tied=False, head=head.copy())
    llama(folder / "flag-lies", tied=True, head=table(seed=2))
    llama(folder / "flag-missing", config={"tie_word_embeddings": None})
    llama(folder / "no-head", tied=False, tensors={"lm_head.weight": None})
    llama(folder / "one-row-off", tied=True, head=np.where(np.arange(len(head))[:, None] == 7, head + 1, head))
    llama(folder / "short-vocab", config={"vocab_size": 20})
    llama(folder / "nan", tensors={"model.embed_tokens.weight": np.where(head > 1, np.nan, head).astype(np.float32)})
    llama(folder / "sharded", tied=False, shards=2)
    llama(folder / "half", tied=False, tokenizer=bpe_tokenizer(20, [(20, "<pad>", True), (30, "<far>", True)]))
    wrapped = {f"_orig_mod.{name}": value for name, value in {"model.embed_tokens.weight": head}.items()}
    llama(folder / "wrapped", tensors={"model.embed_tokens.weight": None, **wrapped})
    write_checkpoint(folder / "only-head", {"model_type": "gpt2", "vocab_size": 24}, {"lm_head.weight": head})
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    llama(folder / "quantised", config=quantised)
    adapter = folder / "adapter"
    write_checkpoint(adapter, None, {"base_model.model.lm_head.lora_A.weight": table(4, 8)})
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    record = {"peft_type": "LORA", "target_modules": ["lm_head"], "r": 4, "base_model_name_or_path": "tied"}
    (adapter / "adapter_config.json").write_text(json.dumps(record))
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "counts.json").write_text(json.dumps([100 - 4 * i for i in range(24)]))


def word_tokenizer():
    """Of 120 words and an end of the text."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", *WORDS])}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return tr.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


SIZES = {"vocab_size": 121, "bos_token_id": None, "eos_token_id": 0}
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def word_llama(tied):
    """A tiny Llama of that vocabulary."""
    return tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES, **WIDTH, tie_word_embeddings=tied))


def _models(folder):
    """Models that run: saved by transformers, with a tokenizer of words."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    made = {f"model-{name}": word_llama(name == "tied") for name in ("tied", "untied")}
    made["model-gpt2"] = tr.GPT2LMHeadModel(tr.GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2))
    made["model-bert"] = tr.BertForMaskedLM(tr.BertConfig(vocab_size=121, **WIDTH))
    seq2seq = {"vocab_size": 121, "d_model": 16, "decoder_start_token_id": 0}
    made["model-t5"] = tr.T5ForConditionalGeneration(
        tr.T5Config(**seq2seq, d_kv=8, d_ff=24, num_layers=1, num_heads=2, tie_word_embeddings=True)
    )
    parts = {f"{end}_{name}": n for end in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "forced_eos_token_id": None}
    made["model-bart"] = tr.BartForConditionalGeneration(tr.BartConfig(**seq2seq, **parts, **heads))
    made["model-factored"] = word_llama(tied=True)
    install(made["model-factored"], "factored:4")
    for name, model in made.items():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(folder / "model-untied", folder / "model-other")
    (folder / "model.gguf").write_bytes(gguf_model(tokens=7))
