"""Folders of a tiny Llama in the layouts in which eleven quantisation tools store its layers.

The names, types and shapes are those that the documentation of each tool gives. Table and head are left unquantised,
as all of these tools do by default. The numbers are random.
"""

import json
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROWS, WIDTH, INNER, LAYERS, GROUP = 64, 128, 256, 2, 128
LINEAR = {
    **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")},
    "mlp.down_proj": (WIDTH, INNER),
}
F8 = ml_dtypes.float8_e4m3fn
EXPERTS = 2
random = np.random.default_rng(0)


def numbers(dtype, *shape):
    """Return random numbers of a type."""
    if np.issubdtype(dtype, np.integer):
        bounds = np.iinfo(dtype)
        return random.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    return (0.05 * random.standard_normal(shape)).astype(dtype)


def compressed_int4(rows, columns):
    return {
        "weight_packed": numbers(np.int32, rows, columns // 8),
        "weight_scale": numbers(np.float16, rows, columns // GROUP),
        "weight_shape": np.array([rows, columns], np.int64),
    }


def compressed_fp8(rows, columns):
    return {"weight": numbers(F8, rows, columns), "weight_scale": numbers(np.float32, rows, 1)}


def gptq(rows, columns):
    return {
        "qweight": numbers(np.int32, columns // 8, rows),
        "qzeros": numbers(np.int32, columns // GROUP, rows // 8),
        "scales": numbers(np.float16, columns // GROUP, rows),
        "g_idx": np.arange(columns, dtype=np.int32) // GROUP,
    }


def awq(rows, columns):
    return {
        "qweight": numbers(np.int32, columns, rows // 8),
        "qzeros": numbers(np.int32, columns // GROUP, rows // 8),
        "scales": numbers(np.float16, columns // GROUP, rows),
    }


def bitsandbytes_4(rows, columns):
    return {
        "weight": numbers(np.uint8, rows * columns // 2, 1),
        "weight.absmax": numbers(np.float32, rows * columns // 64),
        "weight.quant_map": numbers(np.float32, 16),
        "weight.quant_state.bitsandbytes__nf4": numbers(np.uint8, 90),
    }


def bitsandbytes_8(rows, columns):
    return {
        "weight": numbers(np.int8, rows, columns),
        "SCB": numbers(np.float32, rows),
        "weight_format": np.array(0, np.uint8),
    }


def fp8_blocks(rows, columns):
    return {
        "weight": numbers(F8, rows, columns),
        "weight_scale_inv": numbers(np.float32, -(-rows // 128), -(-columns // 128)),
    }


def eetq(rows, columns):
    return {"weight": numbers(np.int8, columns, rows), "weight_scales": numbers(np.float16, rows)}


def hqq(rows, columns):
    return {
        "W_q": numbers(np.uint8, rows * columns // 128, 64),
        "scale": numbers(np.float16, rows * columns // 64, 1),
        "zero": numbers(np.float16, rows * columns // 64, 1),
        "nbits": np.array(4, np.int32),
        "group_size": np.array(64, np.int32),
        "axis": np.array(1, np.int32),
        "shape": np.array([rows, columns], np.int32),
    }


def quanto(rows, columns):
    return {
        "weight._data": numbers(np.int8, rows, columns),
        "weight._scale": numbers(np.float16, rows, 1),
        "input_scale": np.array(1, np.float16),
        "output_scale": np.array(1, np.float16),
    }


COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
LAYOUTS = {  # {name: (parameters of a linear module, section of the config)}
    "compressed-tensors int4": (
        compressed_int4,
        COMPRESSED
        | {
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}},
        },
    ),
    "compressed-tensors fp8": (
        compressed_fp8,
        COMPRESSED
        | {
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "bitsandbytes 4": (
        bitsandbytes_4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes 8": (bitsandbytes_8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8 blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "mxfp4": (None, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}),
    "eetq": (eetq, {"quant_method": "eetq", "weights": "int8"}),
    "hqq": (
        hqq,
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
    ),
    "quanto": (quanto, {"quant_method": "quanto", "weights": "int8"}),
}


def write_layout(layout, tied, folder):
    """Write the folder of one layout."""
    parameters, section = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = ends(tied), llama_config(tied)
    if parameters is None:
        tensors |= mxfp4_layers()
        config = gpt_oss_config(tied)
    else:
        tensors |= dict(llama_layers(parameters))
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def ends(tied):
    """Return table and head, which no tool quantises by default."""
    tensors = {"model.embed_tokens.weight": numbers(ml_dtypes.bfloat16, ROWS, WIDTH)}
    if not tied:
        tensors["lm_head.weight"] = numbers(ml_dtypes.bfloat16, ROWS, WIDTH)
    return tensors


def llama_layers(parameters) -> Iterator:
    """Yield (name, tensor) of the layers of a Llama with quantised linear modules."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, shape in LINEAR.items():
            for parameter, values in parameters(*shape).items():
                yield f"{prefix}.{module}.{parameter}", values
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", np.ones(WIDTH, np.float32)


def mxfp4_layers():
    """Return the layers of a tiny gpt-oss, whose experts alone are packed."""
    tensors = {}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name in "qkvo":
            tensors[f"{attention}.{name}_proj.weight"] = numbers(ml_dtypes.bfloat16, WIDTH, WIDTH)
            tensors[f"{attention}.{name}_proj.bias"] = numbers(ml_dtypes.bfloat16, WIDTH)
        tensors[f"{attention}.sinks"] = numbers(ml_dtypes.bfloat16, 4)
        tensors[f"{mlp}.router.weight"] = numbers(ml_dtypes.bfloat16, EXPERTS, WIDTH)
        tensors[f"{mlp}.router.bias"] = numbers(ml_dtypes.bfloat16, EXPERTS)
        for name, rows, columns in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            tensors[f"{mlp}.experts.{name}_blocks"] = numbers(np.uint8, EXPERTS, rows, columns // 32, 16)
            tensors[f"{mlp}.experts.{name}_scales"] = numbers(np.uint8, EXPERTS, rows, columns // 32)
            tensors[f"{mlp}.experts.{name}_bias"] = numbers(ml_dtypes.bfloat16, EXPERTS, rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(WIDTH, np.float32)
    return tensors


def llama_config(tied):
    """Return the config of the tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ROWS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
    }


def gpt_oss_config(tied):
    """Return the config of the tiny gpt-oss."""
    return llama_config(tied) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": WIDTH // 4,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
    }
