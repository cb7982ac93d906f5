"""Write the fixed inputs of the recorded answers by name: texts, corpora, checkpoints, settings and runs.

Builders use public libraries, the writers of `tests/checkpoint` and, for one model, `tiewise.install`. So they work
with every revision of the package, wherever its modules are. Each draws from its own generator.
"""

import json
import random
import shlex
from itertools import pairwise

import numpy as np
import torch
import transformers as tr
import yaml
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers

from tests.answers import running
from tests.answers.faults import FAULTS
from tests.checkpoint import gguf_writer
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table, with_rows, write_checkpoint

WORDS = ["new", "york", "san", "diego", "a", "b", "c", "d", "e", "f", *(f"w{i}" for i in range(110))]
SMALL = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "measured": 512}
SET = " ".join(f"--set={name}={value}" for name, value in SMALL.items())
DECODER = f"-t text.txt {SET} --steps=8 --tokenizer=bytes --quiet"


def make(name, place):
    """Write the input of this name into the store of `place`."""
    path = place.store / name
    if name in RUNS:
        _run_command(name, place)
    elif name in FAULTS:
        FAULTS[name](path)
    else:
        BUILDERS[name](path)


def names():
    """Return the names of all inputs."""
    return [*BUILDERS, *FAULTS, *RUNS]


# texts


def _text_lines():
    """Return 900 sentences of frequent and rare words."""
    draw = random.Random(1)
    lines = []
    for _ in range(900):
        words = [WORDS[min(int(draw.expovariate(0.05)), len(WORDS) - 1)] for _ in range(draw.randint(4, 16))]
        lines.append(" ".join(words).capitalize() + ".")
    return lines


def _text(path):
    lines = _text_lines()
    path.write_text("\n".join("\n" * (number % 7 == 0) + line for number, line in enumerate(lines)))


def _plain_words(lines):
    return "\n".join(line.lower().rstrip(".") for line in lines)


def _corpus(train, measured):
    """Return a writer of a corpus of so many lines for training and for each of two measurements."""

    def write(path):
        path.mkdir()
        lines = _text_lines()
        ends = (train, train + measured, train + 2 * measured)
        for name, begin, end in zip(("train", "valid", "test"), (0, *ends), ends, strict=False):
            (path / f"{name}.txt").write_text(_plain_words(lines[begin:end]) + "\n")

    return write


def _json(value):
    return lambda path: path.write_text(json.dumps(value))


def _yaml(value):
    return lambda path: path.write_text(yaml.safe_dump(value))


# checkpoints


def _one_row_off():
    return np.where(np.arange(24)[:, None] == 7, table() + 1, table())


def _only_head(path):
    write_checkpoint(path, {"model_type": "gpt2", "vocab_size": 24}, {"lm_head.weight": table()})


def _with_wrong_numbers(path):
    values = np.where(table() > 1, np.nan, table()).astype(np.float32)
    llama(path, tensors={"model.embed_tokens.weight": values})


def _wrapped(path):
    llama(path, tensors={"model.embed_tokens.weight": None, "_orig_mod.model.embed_tokens.weight": table()})


def _broken(path):
    path.mkdir()
    (path / "config.json").write_text("{")


def _other_page(path):
    """Write a folder with a page that is no inspection."""
    path.mkdir()
    (path / "report.html").write_text("<p>ours</p>")


def _tuned(path):
    llama(path, rows=26, tensors={"model.embed_tokens.weight": with_rows(5, of=table(26))})


def _empty_adapter(path):
    """Write an adapter with one of the two factors of a low-rank update of the head."""
    write_checkpoint(path, None, {"base_model.model.lm_head.lora_A.weight": table(4, 8)})
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    record = {"peft_type": "LORA", "target_modules": ["lm_head"], "r": 4, "base_model_name_or_path": "tied"}
    (path / "adapter_config.json").write_text(json.dumps(record))


CAT = "the cat and the dog and the hen\n\n" * 40


def _byte_level(more, size):
    tokenizer = ByteLevelBPETokenizer()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator([CAT, more], vocab_size=size, special_tokens=special, show_progress=False)
    return tokenizer


def _trimmable(path):
    tokenizer = _byte_level("zq zq zq", 280)
    llama(path, rows=tokenizer.get_vocab_size(), tokenizer=json.loads(tokenizer.to_str()))


def _other_words(path):
    """Write a folder with another tokenizer and its model."""
    tokenizer = _byte_level("cat-and-dog hen dog dog", 290)
    llama(path, rows=tokenizer.get_vocab_size())
    tr.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_str())).save_pretrained(path)


def _bytes_model(path):
    """Write a model that runs, with a byte-level tokenizer."""
    tokenizer = _byte_level("zq zq zq", 280)
    sizes = SIZES | {"vocab_size": tokenizer.get_vocab_size() + 8, "eos_token_id": None}
    _saved(lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**sizes, **WIDTH, tie_word_embeddings=True)))(path)
    tr.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_str())).save_pretrained(path)


# models that run


def word_tokenizer():
    """Return a tokenizer of 120 words and an end of the text."""
    vocabulary = {word: i for i, word in enumerate(["<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return tr.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


SIZES = {"vocab_size": 121, "bos_token_id": None, "eos_token_id": 0}
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {"vocab_size": 121, "d_model": 16, "decoder_start_token_id": 0}


def word_llama(tied):
    """Return a tiny Llama of that vocabulary."""
    return tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES, **WIDTH, tie_word_embeddings=tied))


def _gpt2():
    return tr.GPT2LMHeadModel(tr.GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2))


def _bert():
    return tr.BertForMaskedLM(tr.BertConfig(vocab_size=121, **WIDTH))


def _t5():
    sizes = {"d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "tie_word_embeddings": True}
    return tr.T5ForConditionalGeneration(tr.T5Config(**SEQ2SEQ, **sizes))


def _bart():
    sizes = {f"{end}_{name}": n for end in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "forced_eos_token_id": None}
    return tr.BartForConditionalGeneration(tr.BartConfig(**SEQ2SEQ, **sizes, **heads))


def _factored():
    import tiewise

    model = word_llama(tied=True)
    tiewise.install(model, "factored:4")
    return model


def _saved(build):
    """Return a writer of a model with a tokenizer of words; matrices come from numpy, the same on every machine."""

    def write(path):
        torch.manual_seed(0)
        model, draw = build(), np.random.default_rng(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.from_numpy(draw.normal(0, 0.3, tuple(parameter.shape)).astype(np.float32)))
        model.save_pretrained(path)
        word_tokenizer().save_pretrained(path)

    return write


def _exercise(text):
    return lambda path: path.write_text(text)


RIGHT = "def saved(v, d, layers):\n    return v * d, v * d / (2 * v * d + 12 * layers * d * d)\n"
ADAPTED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
VECTORS = "".join(f"{word} {0.1 * i:.1f} {0.2 * i - 1:.1f} 0.5 -0.5\n" for i, word in enumerate(WORDS[:20]))
RATED_PAIRS = "word1\tword2\trating\n" + "".join(
    f"{first}\t{second}\t{7 * i % 10}\n" for i, (first, second) in enumerate(pairwise([*WORDS[:30], "elsewhere"]))
)
GRID = {"asks": "Does tying pay?", "axes": {"train_tokens": [1000, 4000]}}
GRID["settings"] = SMALL | {
    "steps": 8,
    "tokenizer": "bytes",
    "text": ["text.txt"],
    "arms": ["untied", "tied"],
    "seeds": 2,
}
TOKENIZERS = {"far": bpe_tokenizer(20, [(20, "<pad>", True), (30, "<far>", True)])}
BUILDERS = {
    "text.txt": _text,
    "words.txt": lambda path: path.write_text(_plain_words(_text_lines())),
    "cat.txt": lambda path: path.write_text(CAT),
    "keep.txt": lambda path: path.write_text("zq\n3\n"),
    "vectors.txt": lambda path: path.write_text(VECTORS),
    "rated-pairs.tsv": lambda path: path.write_text(RATED_PAIRS),
    "empty.txt": lambda path: path.write_text(""),
    "corpus": _corpus(300, 40),
    "small-corpus": _corpus(60, 20),
    "counts.json": _json([100 - 4 * i for i in range(24)]),
    "plan.json": _json({"quant_method": "gptq", "lm_head": True}),
    "settings.yaml": _yaml(SMALL | {"steps": 4, "tokenizer": "bytes", "text": ["text.txt"], "learning_rate": 0.01}),
    "grid.yaml": _yaml(GRID),
    "right.py": _exercise(RIGHT),
    "wrong.py": _exercise(RIGHT.replace("(2 * v * d", "(v * d")),
    "failing.py": _exercise("def saved(v, d, layers):\n    return 1 / 0\n"),
    "tied": llama,
    "untied": lambda path: llama(path, tied=False),
    "equal": lambda path: llama(path, tied=False, head=table()),
    "flag-lies": lambda path: llama(path, head=table(seed=2)),
    "flag-missing": lambda path: llama(path, config={"tie_word_embeddings": None}),
    "no-head": lambda path: llama(path, tied=False, tensors={"lm_head.weight": None}),
    "one-row-off": lambda path: llama(path, head=_one_row_off()),
    "short-vocab": lambda path: llama(path, config={"vocab_size": 20}),
    "nan": _with_wrong_numbers,
    "sharded": lambda path: llama(path, tied=False, shards=2),
    "half": lambda path: llama(path, tied=False, tokenizer=TOKENIZERS["far"]),
    "with-tokenizer": lambda path: llama(path, tokenizer=bpe_tokenizer()),
    "wider-tokenizer": lambda path: llama(path, rows=30, tokenizer=bpe_tokenizer(30)),
    "wrapped": _wrapped,
    "only-head": _only_head,
    "quantised": lambda path: llama(path, config=ADAPTED),
    "adapter": _empty_adapter,
    "broken": _broken,
    "tuned": _tuned,
    "other-page": _other_page,
    "trimmable": _trimmable,
    "other-words": _other_words,
    "model.gguf": lambda path: path.write_bytes(gguf_writer.model(tokens=7)),
    "model-tied": _saved(lambda: word_llama(True)),
    "model-untied": _saved(lambda: word_llama(False)),
    "model-bytes": _bytes_model,
    "model-gpt2": _saved(_gpt2),
    "model-bert": _saved(_bert),
    "model-t5": _saved(_t5),
    "model-bart": _saved(_bart),
    "model-factored": _saved(_factored),
}
ALBERT = "--recipe albert-small -t text.txt --steps=4 --tokenizer=bytes --set=width=16 --set=layers=2 --set=heads=2"
ALBERT += " --set=inner=32 --set=length=32 --set=batch=4 --set=measured=512 --quiet"
# name → the command that writes it
RUNS = {
    "run-decoder": f"compare {DECODER} --arms=tied,untied,factored:4 --seeds=2 --jobs=1 -o run-decoder",
    "run-albert": f"train {ALBERT} -o run-albert",
    "run-teacher": f"train {DECODER} --boundary=untied -o run-teacher",
    "run-sweep": "sweep grid.yaml -o run-sweep --jobs=1 --quiet",
    "narrow": "factor run-teacher/untied/seed-1/final --rank=4 --to narrow",
}
NEEDED = {"text.txt": "-t text.txt", "grid.yaml": "grid.yaml", "run-teacher": "run-teacher/untied"}


def _run_command(name, place):
    line = RUNS[name]
    needed = [one for one, sign in {**NEEDED, "text.txt": "text.txt"}.items() if sign in line and one != name]
    needed += ["text.txt"] if "grid.yaml" in line else []
    folder = place.new_folder(dict.fromkeys(needed))
    ended = running.run(shlex.split(line), folder)
    if ended.code != 0:
        raise AssertionError(f"{line} ended with {ended.code}: {ended.err}")
    (folder / name).rename(place.store / name)
