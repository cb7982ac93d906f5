"""Checkpoints with one fault each: at least one for every rule of `check`.

Each entry is a function that writes a folder or file. Nothing here uses the package: the writers of `tests/checkpoint`
need numpy, safetensors and json alone.
"""

import json
import os
from functools import partial

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.checkpoint import gguf_writer, onnx_writer
from tests.checkpoint.tiny_checkpoints import (
    D,
    V,
    bpe_tokenizer,
    llama,
    llama_config,
    llama_tensors,
    table,
    with_rows,
    write_checkpoint,
)

HEAD, TABLE, FLAG = "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"
INDEX, SHARD = "model.safetensors.index.json", "model-0000{}-of-00002.safetensors"
OTHER = table(seed=2)
FLOAT8 = ml_dtypes.float8_e4m3fn
BFLOAT16 = ml_dtypes.bfloat16
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": V, "d_model": D}
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": V, "hidden_size": D, FLAG: True}
CODE = """import torch
from transformers import PreTrainedModel


class TinyForCausalLM(PreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self):
        return self.lm_head
"""


def _of(config, **tensors):
    """Return a writer of a folder with these tables; `x__y` is the module `x.y`."""
    named = {f"{name.replace('__', '.')}.weight": values for name, values in tensors.items()}
    return partial(write_checkpoint, config=config, tensors=named)


def _llama(tied=True, **how):
    return partial(llama, tied=tied, **how)


def _with_file(name, text, **how):
    def write(path):
        llama(path, **how)
        (path / name).write_text(text)

    return write


def _cut(path):
    """Cut the second shard short."""
    llama(path, shards=2)
    shard = path / SHARD.format(2)
    os.truncate(shard, shard.stat().st_size - 5)


def _indexed(part, **values):
    """Return a writer of two shards with entries of the index changed."""

    def write(path):
        llama(path, shards=2)
        record = json.loads((path / INDEX).read_text())
        record[part] |= values
        (path / INDEX).write_text(json.dumps(record))

    return write


def _in_both_shards(path):
    llama(path, shards=2)
    part = {TABLE: table(), "model.layers.0.mlp.down_proj.weight": table(D, 2 * D, 1)}
    save_file(part | {"model.norm.weight": np.zeros(D, np.float32)}, path / SHARD.format(1))


def _linked(path):
    """Replace the file of tensors by a link that leads outside the folder."""
    llama(path)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("../outside.safetensors")


def _outside(path):
    """Write the file that the link leads to."""
    save_file(llama_tensors(), path, {"format": "pt"})


def _nested(root, text):
    """Return a writer of a model of text and images whose config has two flags."""
    tensors = {f"language_model.{name}": values for name, values in llama_tensors().items()}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", FLAG: root}
    config |= {"text_config": llama_config(text), "vision_config": {"model_type": "clip_vision_model", FLAG: True}}
    return partial(write_checkpoint, config=config, tensors=tensors)


def _per_layer(path):
    """Write a Gemma 4 whose per-layer table has fewer rows than its ids need."""
    config = llama_config(True, 64) | {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    config |= {"vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 4}
    tables = {TABLE: table(64), "model.embed_tokens_per_layer.weight": table(60, 12)}
    write_checkpoint(path, config, tables)


def _next_tokens(path):
    """Write a DeepSeek whose multi-token-prediction table differs in some rows from the main one."""
    config = llama_config(False, 64) | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    tensors = {TABLE: table(64), HEAD: table(64, seed=1)}
    tensors |= {"model.layers.1.embed_tokens.weight": with_rows(*range(8), of=table(64))}
    tensors |= {"model.layers.1.shared_head.head.weight": table(64, seed=1)}
    write_checkpoint(path, config | {"num_nextn_predict_layers": 1}, tensors)


def _headless_bert(path):
    """Write a BERT without the layers between its body and its head."""
    names = ("bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight")
    tensors = {names[0]: table(), names[1]: table(2), "cls.predictions.bias": np.zeros(V, np.float32)}
    write_checkpoint(path, BERT | {"type_vocab_size": 2}, tensors)


def _biased_bert(path):
    tensors = {"bert.embeddings.word_embeddings.weight": table(), "cls.predictions.bias": np.zeros(V - 3, np.float32)}
    write_checkpoint(path, BERT, tensors)


def _code_in_folder(path):
    auto = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    llama(path, config={"model_type": "tiny", "auto_map": auto})
    (path / "modeling_tiny.py").write_text(CODE)


def _copies(path):
    """Write two large matrices of the same bytes."""
    matrix = np.full((512, 512), 0.5, np.float32)
    llama(path, tensors={f"model.layers.{number}.mlp.up_proj.weight": matrix for number in range(2)})


def _packed(module):
    """Return the tensors that GPTQ stores instead of a plain table."""
    ones = {"qweight": np.ones((D // 8, V), "i4"), "qzeros": np.ones((1, V // 8), "i4")}
    ones |= {"scales": np.ones((1, V), "f2"), "g_idx": np.ones(D, "i4")}
    return {f"{module}.{part}": values for part, values in ones.items()}


def _quantised(tensors, tied=True, **section):
    ends = {
        f"{end}.weight": None for end in ("model.embed_tokens", "lm_head") if any(n.startswith(end) for n in tensors)
    }
    return _llama(tied, tensors=ends | tensors, config={"quantization_config": section})


def _left_alone(path):
    """Write a head that ModelOpt packed, and a config that claims a plain head."""
    parts = {"weight": np.ones((V, D // 2), np.uint8), "weight_scale": np.ones((V, 1), FLOAT8)}
    parts |= dict.fromkeys(("weight_scale_2", "input_scale"), np.ones((), np.float32))
    packed = {f"lm_head.{name}": values for name, values in parts.items()}
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]}
    _quantised(packed, tied=False, **section)(path)


def _adapter(tensors, **config):
    """Return a writer of a PEFT adapter."""
    module = "base_model.model.model.layers.0.mlp.down_proj"
    ones = {"A": np.ones((2, 2 * D), np.float32), "B": np.ones((D, 2), np.float32)}
    body = {f"{module}.lora_{factor}.weight": values for factor, values in ones.items()}

    def write(path):
        path.mkdir()
        record = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "target_modules": ["down_proj"]}
        (path / "adapter_config.json").write_text(json.dumps(record | config))
        save_file(body | tensors, path / "adapter_model.safetensors", {"format": "pt"})

    return write


EMBEDDING, OUTPUT = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
SAVED = {"modules_to_save": ["embed_tokens"]}
ON_HEAD = {"base_model.model.lm_head.lora_A.weight": np.ones((2, D), np.float32)}
ON_HEAD |= {"base_model.model.lm_head.lora_B.weight": np.ones((V, 2), np.float32)}
ELSEWHERE = {"base_model.model.language_model.model.layers.0.mlp.down_proj.lora_A.weight": np.ones((2, 16), np.float32)}
ELSEWHERE |= {"base_model.model.language_model.model.layers.0.mlp.down_proj.lora_B.weight": np.ones((D, 2), np.float32)}

IDS = np.array([0, 1, 2, 3, 5, 8, 9, 11, 17, 23])  # tokens of the target that the draft has rows for
STEPS = IDS - np.arange(len(IDS))


def _draft(tokenizer=None, **tensors):
    """Return a writer of an EAGLE-3 draft of the tied Llama."""
    tensors_of_model = {"d2t": STEPS, "t2d": np.isin(np.arange(V), IDS), HEAD: table(len(IDS), D, 3)}
    tensors_of_model |= {"embed_tokens.weight": table(), "fc.weight": table(D, 3 * D, 4)}
    tensors_of_model |= {"midlayer.hidden_norm.weight": np.ones(D, np.float32)}
    tensors_of_model = {name: np.ascontiguousarray(values) for name, values in (tensors_of_model | tensors).items()}
    config = llama_config(False, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(IDS))
    return partial(write_checkpoint, config=config, tensors=tensors_of_model, tokenizer=tokenizer)


def _other_tokenizer():
    tensors_of_model = bpe_tokenizer()
    tensors_of_model["model"]["vocab"] = {f"t{(7 * i) % V}": i for i in range(V)}
    return tensors_of_model


def _gguf(**how):
    return lambda path: path.write_bytes(gguf_writer.model(**how))


def _onnx(head=None):
    """Return a writer of an exported model; without a head its last product lacks a matrix."""
    nodes = [onnx_writer.node("Gather", ["embed", "input_ids"], ["h"])]
    nodes += [onnx_writer.node("MatMul", ["h", "body"], ["x"]), onnx_writer.node("MatMul", ["x", "head"], ["logits"])]
    initialisers = [onnx_writer.initialiser("embed", table()), onnx_writer.initialiser("body", table(D, D, 7))]
    initialisers += [] if head is None else [onnx_writer.initialiser("head", head)]
    return lambda path: path.write_bytes(onnx_writer.model(nodes, initialisers))


def _spoiled(row, number):
    tensors_of_model = table(64)
    tensors_of_model[row] = number
    return tensors_of_model


def _zero_row(row):
    return np.where(np.arange(V)[:, None] == row, 0, table()).astype(np.float32)


GENERATION = {"generation_config.json": {"suppress_tokens": [-1, 3, V + 1]}}
GRANITE = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0}
# name → writer; the name begins with the rule that it triggers
FAULTS = {
    "b001-cut": _cut,
    "b001-config": _with_file("config.json", '{"vocab_size": '),
    "b001-link": _linked,
    "outside.safetensors": _outside,
    "b001-pointer": _with_file(
        "model.safetensors", f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\n"
    ),
    "b002-index": _indexed("weight_map", **{"model.wte": SHARD.format(1)}),
    "b002-moved": _indexed("weight_map", **{"model.norm.weight": SHARD.format(1)}),
    "b003": _indexed("metadata", total_size=5),
    "b004": _in_both_shards,
    "b010": _llama(tensors={TABLE: None, "model.words.weight": table()}),
    "b011": _llama(False, tensors={HEAD: None}),
    "b012-rows": _llama(head=with_rows(3, 20)),
    "b012-noise": _llama(head=(table() + 1e-3 * table(seed=5)).astype(np.float32)),
    "b012-untrained": _llama(head=(0.02 * OTHER).astype(np.float32)),
    "b013": _llama(head=table(), shards=2),
    "b014": _llama(False, head=table()),
    "b015": _llama(False, head=with_rows(7)),
    "b016": _llama(tensors={TABLE: None, HEAD: table()}),
    "b016-untied": _llama(False, tensors={TABLE: None, HEAD: table()}),
    "b017": _per_layer,
    "b018": _next_tokens,
    "b019": _headless_bert,
    "b020": _llama(config={FLAG: "true"}),
    "b021": _nested(True, False),
    "b022": _of(T5 | {FLAG: False}, shared=table()),
    "b023": _code_in_folder,
    "b030": _llama(False, head=table(V + 3)),
    "b030-width": _llama(config={"hidden_size": 10}),
    "b031": _llama(tokenizer=bpe_tokenizer(V + 2)),
    "b032": _llama(tokenizer=bpe_tokenizer(V - 4, [(V - 4, "<a>", True)])),
    "b033": _llama(config={"vocab_size": V - 1}),
    "b034": _llama(files=GENERATION),
    "b034-eos": _llama(config={"eos_token_id": [1, 999, 77]}),
    "b035": _biased_bert,
    "b036": _llama(),  # reported only if the class is asked
    "b040": _llama(False, head=OTHER.astype(np.float16)),
    "b040-dtype": _llama(config={"dtype": "bfloat16"}),
    "b041-nan": _llama(rows=64, tensors={TABLE: _spoiled(5, np.nan)}),
    "b041-alike": _llama(rows=64, tensors={TABLE: _spoiled([11, 12], table(64)[3])}),
    "b041-zero": _llama(tensors={TABLE: _zero_row(7)}, head=table()),
    "b042": _llama(rows=100),
    "b043": _llama(tensors={TABLE: np.zeros((V, D), np.float32)}),
    "b050": _quantised(_packed("lm_head"), quant_method="gptq"),
    "b050-said": _quantised({}, quant_method="gptq", lm_head=True),
    "b051": _quantised({}, quant_method="bitsandbytes", llm_int8_skip_modules=["vision_tower"]),
    "b052": _quantised({HEAD: table().astype(FLOAT8)}, tied=False, quant_method="fp8"),
    "b053": _quantised({}, quant_method="compressed-tensors", config_groups={"group_0": {"targets": ["Linear"]}}),
    "b054": _left_alone,
    "b060": _adapter(ON_HEAD),
    "b061": _adapter({EMBEDDING: table(V + 2)}, **SAVED),
    "b061-row": _adapter({}, trainable_token_indices=[1, V]),
    "b061-narrow": _adapter({EMBEDDING: table(V - 2)}, **SAVED),
    "b062": _adapter(ELSEWHERE),
    "b063": _adapter({EMBEDDING: with_rows(7)}, **SAVED),
    "b064": _adapter({}, target_modules=".*_proj"),
    "b070.gguf": _gguf(tokens=9),
    "b071.gguf": _gguf(head=bytes(range(256)) * 4),
    "b080": _llama(False, config={"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}),
    "b081": _copies,
    "b083": _draft(d2t=STEPS * 0),
    "b084": _draft(**{HEAD: table(12)}),
    "b085": _draft(tokenizer=_other_tokenizer()),
    "b090": _llama(config=GRANITE),
    "b100.onnx": _onnx(table().T),
    "b101.onnx": _onnx(),
    "sound.onnx": _onnx(OTHER.T),
    "sound-draft": _draft(tokenizer=bpe_tokenizer()),
}
