"""Valid files from which fuzzing starts, written by the tests' own writers, and the words of each format."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))

import gguf_writer as gguf  # noqa: E402
import onnx_writer as onnx  # noqa: E402
from tiny_checkpoints import D, V, bpe_tokenizer, llama_config, llama_tensors, table  # noqa: E402

from tiewise.checkpoint.families import family  # noqa: E402
from tiewise.checkpoint.family_record import family_data  # noqa: E402

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = (EMBEDDING, HEAD, "model.norm.weight", "lm_head.bias", "model.layers.0.mlp.down_proj.weight", "", "a.b", "é")
HEADER = (
    *("__metadata__", "dtype", "shape", "data_offsets", "format", "pt"),
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F4", "F6_E2M3", "I64", "I32", "I8", "U8", "BOOL", "C64"),
    *("transformer.wte.weight", "lm_head.qweight", "lm_head.weight.absmax", "d2t", *NAMES),
)
GGUF_WORDS = (
    *("general.architecture", "general.type", "general.alignment", "general.name", "llama", "clip", "adapter"),
    *("split.count", "split.no", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.model"),
    *("token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.weight", "", "é"),
)
ONNX_WORDS = (
    *("Gather", "MatMul", "Gemm", "Transpose", "Reshape", "Identity", "Cast", "DequantizeLinear", "If", "MatMulNBits"),
    *("embed", "head", "body", "input_ids", "position_ids", "logits", "h", "x", "t", ""),
    *("location", "offset", "length", "checksum", "m.data", "../m.data", "/etc/passwd", "m.onnx", "0", "96", "768"),
)
PIECE_WORDS = ("▁the", "<unk>", "<s>", "</s>", "<pad>", "<0x0A>", "a", "", "[unused1]", "\0")
INDEX_WORDS = (
    *("weight_map", "metadata", "total_size", "total_parameters", *NAMES),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-00003-of-00003.safetensors"),
    *("../model.safetensors", "/etc/passwd", "sub/x.safetensors", ".", "..", "model.safetensors", "x.bin"),
)
TOKENIZER_WORDS = (
    *("version", "model", "vocab", "merges", "added_tokens", "id", "content", "special", "type", "unk_token", "unk_id"),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "Sequence", "decoder", "decoders"),
    *("pre_tokenizer", "pretokenizers", "byte_fallback", "end_of_word_suffix", "continuing_subword_prefix"),
    *("post_processor", "normalizer", "truncation", "padding", "special_tokens", "ids", "tokens", "<0x41>", "Ġa", "▁a"),
)
ADAPTER_WORDS = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "modules_to_save", "alpha_pattern"),
    *(
        "rank_pattern",
        "use_dora",
        "use_rslora",
        "trainable_token_indices",
        "ensure_weight_tying",
        "layers_to_transform",
    ),
    *("LORA", "IA3", "LOHA", "all-linear", "lm_head", "embed_tokens", "model.embed_tokens", "down_proj", "bias", "all"),
    *("init_lora_weights", "fan_in_fan_out", "task_type", "exclude_modules", "target_parameters", "(a|a)*$", ""),
)
CONFIG_KEYS = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "text_config", "vision_config", "audio_config", "decoder"),
    *("encoder", "generator", "quantization_config", "quantization", "quant_method", "bits", "group_size", "modules"),
    *("auto_map", "additional_vocab_size", "pad_vocab_size_multiple", "prompt_types", "prompt_length", "lm_head"),
    *("embedding_size", "logits_scaling", "tiewise_boundary", "base_model_type", "is_encoder_decoder", "layer_types"),
    *(
        "initializer_range",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
    ),
    *("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "mlp_only_layers"),
    *("decoder_sparse_step", "full_attention_interval", "layers_block_type", "hybrid_override_pattern", "M-*E"),
    *("full_attention", "linear_attention", "sliding_attention", "mamba", "attention", "moe_intermediate_size"),
    *("intermediate_size", "draft_vocab_size", "truncated_vocab_size", "transformer_layer_config", "hidden_act"),
    *("transformers_weights", "eagle_config", "num_nextn_predict_layers", "medusa_num_heads", "tiewise", "factored:4"),
)
SPECIAL_TOKENS = json.dumps({"eos_token": "t1", "bos_token": {"content": "t0"}, "pad_token": None}).encode()
ONNX_DATA = table().tobytes()


@cache
def config_words() -> tuple[str, ...]:
    """Return config keys, and the names of all families and of their main classes."""
    families = family_data()["families"]
    classes = [name for record in families.values() for name in sorted(record.get("classes", {}))[:2]]
    return (*CONFIG_KEYS * 8, *families, *classes)


def _written(records: list[Any]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


@cache
def config() -> bytes:
    """Return the config of a tied Llama."""
    return json.dumps(llama_config()).encode()


@cache
def tensors() -> bytes:
    """Return the file of an untied Llama."""
    return save(llama_tensors(tied=False), {"format": "pt"})


@cache
def shards() -> dict[str, bytes]:
    """Return the two shards of an untied Llama and its config."""
    parts = llama_tensors(tied=False)
    names = list(parts)
    files = {CONFIG_FILE: config()}
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        files[file] = save({name: parts[name] for name in names[number::2]}, {"format": "pt"})
    return files


CONFIG_FILE = "config.json"


def safetensors_files() -> list[bytes]:
    """Return small files of tensors of many types."""
    small = {EMBEDDING: table(6, 4), HEAD: table(6, 4, 2), "model.layers.0.mlp.down_proj.weight": table(4, 8)}
    types = {f"t.{dtype}": np.ones((2, 3), dtype) for dtype in ("f2", "f8", "i1", "i8", "u1", "?")}
    odd = {"scalar": np.array(1, "f4"), "empty": np.zeros((0, 4), "f4"), "d2t": np.arange(3)}
    return [save(small, {"format": "pt"}), save(types), save(odd), save({})]


def gguf_files() -> list[bytes]:
    """Return small GGUF files: tied, untied, quantised, split, with values of every type."""
    scalars = [(f"k.{kind}", gguf.scalar(kind, 1)) for kind in gguf.FORMS]
    lists = [("k.list", gguf.numbers("i32", [1, -2])), ("general.alignment", gguf.scalar("u32", 64))]
    block = bytes(18)
    return [
        gguf.model(2, 32),
        gguf.model(2, 32, head=bytes(256)),
        gguf.model(4, 32, table=block * 4, kind=2, head=block * 4, head_kind=2),
        gguf.model(2, 32, keys=[*scalars, ("split.count", gguf.scalar("u16", 1))]),
        gguf.gguf([("general.architecture", gguf.string("llama")), *lists[:1]]),
        gguf.gguf(lists, [("token_embd.weight", (4,), 0, bytes(16))], align=64),
    ]


def onnx_files() -> list[bytes]:
    """Return small graphs: untied, tied by a transposition, with external data, nested, sparse."""
    embed, head = onnx.initialiser("embed", table(3, 2)), onnx.initialiser("head", table(3, 2, 2).T)
    lookup = onnx.node("Gather", ["embed", "input_ids"], ["h"])
    product = onnx.node("MatMul", ["h", "head"], ["logits"])
    turned = [onnx.node("Transpose", ["embed"], ["t"]), onnx.node("MatMul", ["h", "t"], ["logits"])]
    outside = {"location": "m.data", "offset": "0", "length": str(4 * V * D)}
    external = onnx.initialiser("embed", dims=(V, D), kind=1, at=outside)
    inside = onnx.graph([lookup], [embed], inputs=())
    branch = onnx.node("If", ["yes"], ["h"], [onnx.piece(1, "then_branch") + onnx.piece(6, inside)])
    return [
        onnx.model([lookup, product], [embed, head]),
        onnx.model([lookup, *turned], [embed]),
        onnx.model([lookup, *turned], [external]),
        onnx.model([branch, product], [head], sparse=["body"]),
        onnx.model([lookup, product], [onnx.initialiser("embed", table(3, 2), packed=True), head]),
    ]


def piece_files() -> list[bytes]:
    """Return small SentencePiece models."""
    models = []
    for texts in (["<unk>", "<s>", "</s>", "▁the", "a", "<0x0A>"], ["a"], []):
        pieces = [onnx.piece(1, onnx.piece(1, text) + b"\x15\0\0\0\0" + onnx.number(3, 1)) for text in texts]
        models.append(b"".join(pieces) + onnx.piece(2, onnx.number(3, 1)))
    return models


def indexes() -> list[bytes]:
    """Return the index of the two shards, whole and without its metadata."""
    names = list(llama_tensors(tied=False))
    files = sorted(set(shards()) - {CONFIG_FILE})
    weight_map = {name: files[number % 2] for number, name in enumerate(names)}
    return _written([{"metadata": {"total_size": 2048}, "weight_map": weight_map}, {"weight_map": weight_map}])


def configs() -> list[bytes]:
    """Return a config for every reader of `plan`, with the defaults of the family's class, and composites."""
    records: list[dict[str, Any]] = [llama_config(), llama_config(False)]
    seen = set()
    for name in family_data()["families"]:
        record = family(name)
        kinds = {record.reader and record.reader.name, record.towers and record.towers.name} - seen - {None}
        if not kinds:
            continue
        seen |= kinds
        values = {"model_type": name, **record.keys.defaults}
        if record.towers is not None:
            text = record.ends.levels.get("text_config", "llama")
            values["text_config"] = {"model_type": text, **family(text).keys.defaults}
        records.append(values)
    nested = {"model_type": "gemma3", "text_config": llama_config(False, model_type="gemma3_text"), "vision_config": {}}
    section = {"quant_method": "gptq", "bits": 4, "lm_head": True, "dynamic": {"-:x": {}}, "modules_to_not_convert": []}
    boundary = {"model_type": "tiewise", "base_model_type": "llama", "tiewise_boundary": "factored:4+bias"}
    composite = {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}, "decoder": llama_config()}
    records += [nested, llama_config(quantization_config=section), llama_config() | boundary, composite]
    records.append(llama_config(auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}))
    return _written(records)


def tokenizers() -> list[bytes]:
    """Return a tokenizer.json of each algorithm."""
    plain = bpe_tokenizer(added=[(V - 1, "<end>", True)])
    byte_level = {"version": "1.0", "decoder": {"type": "ByteLevel"}, "added_tokens": plain["added_tokens"]}
    byte_level["model"] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3}, "merges": [["a", "b"]]}
    steps = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
    unigram = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.5], ["<0x41>", -2]]}}
    word_piece = {"type": "WordPiece", "vocab": {"[UNK]": 0, "##a": 1}, "continuing_subword_prefix": "##"}
    return _written([plain, byte_level, unigram | {"decoder": steps}, {"model": word_piece}])


@cache
def adapter_tensors() -> bytes:
    """Return the tensors of an adapter that changes both ends and a layer."""
    rows = {"lm_head.lora_A": np.ones((2, D), "f4"), "lm_head.lora_B": np.ones((V, 2), "f4")}
    rows["model.embed_tokens"] = table()
    return save({f"base_model.model.{name}.weight": values for name, values in rows.items()}, {"format": "pt"})


def adapter_configs() -> list[bytes]:
    """Return configs of PEFT adapters."""
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lm_head"], "use_dora": False}
    copies = plain | {"modules_to_save": ["embed_tokens", "lm_head"], "base_model_name_or_path": "org/base"}
    rows = plain | {"trainable_token_indices": {"embed_tokens": [1, 3]}, "target_modules": "all-linear"}
    tied = plain | {"ensure_weight_tying": True, "trainable_token_indices": [1], "alpha_pattern": {"q_proj": 1}}
    return _written([plain, copies, rows, tied])


@cache
def draft_tensors() -> bytes:
    """Return the tensors of an EAGLE-3 draft of the Llama."""
    ids = np.array([0, 1, 2, 5, 9])
    maps = {"d2t": ids - np.arange(5), "t2d": np.isin(np.arange(V), ids)}
    return save(maps | {HEAD: table(5), "fc.weight": table(D, 3 * D), "embed_tokens.weight": table()})


def draft_configs() -> list[bytes]:
    """Return configs of drafts as EAGLE, the speculators library and Medusa write them."""
    eagle = llama_config(False, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=5)
    layer = {"model_type": "llama", "vocab_size": V, "hidden_size": D}
    speculator = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 5, "transformer_layer_config": layer}
    medusa = {"architectures": ["MedusaModel"], "medusa_num_heads": 2, "vocab_size": V, "truncated_vocab_size": 5}
    return _written([eagle, speculator, medusa])
