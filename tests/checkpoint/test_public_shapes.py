"""Test that healthy models with the shapes of published ones have no finding above info."""

import json

import pytest
from saved_models import classes_for, tiny
from tiny_checkpoints import ONE, write_sparse

from tiewise.checkpoint.audit import check


def write_published(path, config, dtype, tensors, tokenizer=None, beside=()):
    """Write a folder of sparse tensors given as "name 12x3, other 4 F8_E4M3"; `dtype` is the default type."""
    shaped = {}
    for tensor in tensors.split(", "):
        name, shape, *own = tensor.split()
        shaped[name] = (*own, dtype)[0], [int(size) for size in shape.split("x")]
    begun = {name: ONE[kind] for name, (kind, _) in shaped.items() if kind in ONE}
    write_sparse(path / "model.safetensors", shaped, begun)
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    for name in beside:
        (path / name).write_bytes(b"")
    return path


def words(count, *added):
    """Return a function that makes a tokenizer, because the test of one model needs one of fifteen large ones."""
    special = [{"id": i, "content": text, "special": True} for i, text in added]
    return lambda: {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(count)}}, "added_tokens": special}


def of(family, architecture, *sizes, **config):
    """Return a config; `sizes` are vocab_size and hidden_size."""
    return {"model_type": family, "architectures": [architecture], **dict(zip(SIZES, sizes, strict=False)), **config}


SIZES = ("vocab_size", "hidden_size")


LLAMA3 = of("llama", "LlamaForCausalLM", 128256, 2048, tie_word_embeddings=True)
LLAMA3 |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "torch_dtype": "bfloat16"}
GEMMA3_TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
LLAVA_TEXT = {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"}
T5_CONFIG = {"d_model": 512, "d_ff": 2048, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
MARIAN = {"decoder_vocab_size": 65001, "pad_token_id": 65000, "bos_token_id": 0, "eos_token_id": 0, "d_model": 512}

# name: (config, type, tensors and their shapes, tokenizer, other files); sparse tensors take no disk space
PUBLIC = {
    "gpt2": (of("gpt2", "GPT2LMHeadModel", vocab_size=50257, n_embd=768, bos_token_id=50256, eos_token_id=50256),
     "F32", "wte.weight 50257x768, wpe.weight 1024x768, h.0.attn.c_attn.weight 768x2304",
     words(50257), ["pytorch_model.bin", "rust_model.ot", "tf_model.h5"]),
    "bert-base-uncased": (of("bert", "BertForMaskedLM", 30522, 768, pad_token_id=0, type_vocab_size=2),
     "F32", "bert.embeddings.word_embeddings.weight 30522x768, bert.embeddings.token_type_embeddings.weight 2x768, "
     "bert.embeddings.position_embeddings.weight 512x768, cls.predictions.bias 30522, "
     "cls.seq_relationship.weight 2x768, cls.predictions.transform.dense.weight 768x768, "
     "cls.predictions.transform.dense.bias 768, cls.predictions.transform.LayerNorm.gamma 768, "
     "cls.predictions.transform.LayerNorm.beta 768", words(30522), ["pytorch_model.bin", "flax_model.msgpack"]),
    "t5-small": (of("t5", "T5ForConditionalGeneration", 32128, **T5_CONFIG),
     "F32", "shared.weight 32128x512, encoder.block.0.layer.0.SelfAttention.q.weight 512x512", words(32100)),
    "flan-t5-small": (of("t5", "T5ForConditionalGeneration", 32128, tie_word_embeddings=False, **T5_CONFIG),
     "F32", "shared.weight 32128x512, lm_head.weight 32128x512, encoder.embed_tokens.weight 32128x512", words(32100)),
    "gemma-2b": (of("gemma", "GemmaForCausalLM", 256000, 2048, pad_token_id=0, torch_dtype="bfloat16"),
     "BF16", "model.embed_tokens.weight 256000x2048", words(256000)),
    "gemma-3-4b-it": (of("gemma3", "Gemma3ForConditionalGeneration", text_config=GEMMA3_TEXT, eos_token_id=[1, 106]),
     "BF16", "language_model.model.embed_tokens.weight 262208x2560, vision_tower.head.weight 64x64",
     words(262144, (262144, "<image_soft_token>"))),
    "llama-2-7b": (of("llama", "LlamaForCausalLM", 32000, 4096, tie_word_embeddings=False),
     "F16", "model.embed_tokens.weight 32000x4096, lm_head.weight 32000x4096",
     words(32000), ["pytorch_model-00001-of-00002.bin"]),
    "llama-3.2-1b": (LLAMA3, "BF16", "model.embed_tokens.weight 128256x2048", words(128000)),
    "mistral-7b": (of("mistral", "MistralForCausalLM", 32768, 4096, tie_word_embeddings=False),
     "BF16", "model.embed_tokens.weight 32768x4096, lm_head.weight 32768x4096",
     None, ["consolidated.safetensors", "tokenizer.model.v3"]),
    "qwen2.5-0.5b": (of("qwen2", "Qwen2ForCausalLM", 151936, 896, tie_word_embeddings=True),
     "BF16", "model.embed_tokens.weight 151936x896",
     words(151643, (151643, "<|endoftext|>"), (151664, "<|file_sep|>"))),
    "qwen2-vl-2b": (of("qwen2_vl", "Qwen2VLForConditionalGeneration", 151936, 1536, tie_word_embeddings=True)
     | {"vision_config": {"hidden_size": 1536, "embed_dim": 1280}},
     "BF16", "model.embed_tokens.weight 151936x1536, visual.merger.mlp.0.weight 5120x5120"),
    "llava-1.5-7b-hf": (
     of("llava", "LlavaForConditionalGeneration", 32064, pad_token_id=32001, tie_word_embeddings=False)
     | {"text_config": LLAVA_TEXT, "vision_config": {"model_type": "clip_vision_model", "vocab_size": 32000}},
     "F16", "language_model.model.embed_tokens.weight 32064x4096, language_model.lm_head.weight 32064x4096",
     words(32000, (32000, "<image>"), (32001, "<pad>"))),
    "whisper-tiny": (of("whisper", "WhisperForConditionalGeneration", 51865, d_model=384, decoder_start_token_id=50258),
     "F32", "model.decoder.embed_tokens.weight 51865x384, model.encoder.embed_positions.weight 1500x384, "
     "model.decoder.embed_positions.weight 448x384"),
    "opus-mt-en-de": (of("marian", "MarianMTModel", vocab_size=65001, scale_embedding=True, **MARIAN),
     "F32", "model.shared.weight 65001x512, final_logits_bias 1x65001"),
    "opt-350m": (of("opt", "OPTForCausalLM", 50272, 1024, word_embed_proj_dim=512, pad_token_id=1),
     "F16", "model.decoder.embed_tokens.weight 50272x512, model.decoder.project_in.weight 1024x512, "
     "model.decoder.project_out.weight 512x1024, model.decoder.embed_positions.weight 2050x1024"),
    "albert-base-v2": (of("albert", "AlbertForMaskedLM", 30000, 768, embedding_size=128),
     "F32", "albert.embeddings.word_embeddings.weight 30000x128, predictions.bias 30000, "
     "albert.encoder.embedding_hidden_mapping_in.weight 768x128, predictions.decoder.bias 30000, "
     "predictions.dense.weight 128x768, predictions.dense.bias 128, predictions.LayerNorm.weight 128, "
     "predictions.LayerNorm.bias 128"),
    "xlm-roberta-base": (of("xlm-roberta", "XLMRobertaForMaskedLM", 250002, 768, type_vocab_size=1),
     "F32", "roberta.embeddings.word_embeddings.weight 250002x768, lm_head.bias 250002, "
     "roberta.embeddings.position_embeddings.weight 514x768, lm_head.dense.weight 768x768, "
     "lm_head.dense.bias 768, lm_head.layer_norm.weight 768, lm_head.layer_norm.bias 768"),
    "phi-2": (of("phi", "PhiForCausalLM", 51200, 2560, tie_word_embeddings=False, eos_token_id=50256),
     "F16", "model.embed_tokens.weight 51200x2560, lm_head.weight 51200x2560, lm_head.bias 51200",
     words(50257, (50294, "  "))),
    "mamba-130m-hf": (of("mamba", "MambaForCausalLM", 50280, 768, pad_vocab_size_multiple=8),
     "F32", "backbone.embeddings.weight 50280x768", words(50277)),
    "bloom-560m": (of("bloom", "BloomForCausalLM", vocab_size=250880, n_embed=1024, pad_token_id=3),
     "F16", "word_embeddings.weight 250880x1024, word_embeddings_layernorm.weight 1024", words(250680)),
    "gpt-neox-20b": (of("gpt_neox", "GPTNeoXForCausalLM", 50432, 6144, tie_word_embeddings=False),
     "F16", "gpt_neox.embed_in.weight 50432x6144, embed_out.weight 50432x6144", words(50277)),
    "deepseek-v3, fp8 with a draft layer": (
     of("deepseek_v3", "DeepseekV3ForCausalLM", 129280, 7168, tie_word_embeddings=False, torch_dtype="bfloat16")
     | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
     "BF16", "model.embed_tokens.weight 129280x7168, lm_head.weight 129280x7168, "
     "model.layers.61.embed_tokens.weight 129280x7168, model.layers.61.shared_head.head.weight 129280x7168, "
     "model.layers.0.mlp.down_proj.weight 7168x18432 F8_E4M3"),
    "qwen2.5-7b-awq": (of("qwen2", "Qwen2ForCausalLM", 152064, 3584, tie_word_embeddings=False)
     | {"quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}},
     "F16", "model.embed_tokens.weight 152064x3584, lm_head.weight 152064x3584, "
     "model.layers.0.mlp.down_proj.qweight 18944x448 I32"),
    "vit-base": (of("vit", "ViTForImageClassification", hidden_size=768),
     "F32", "vit.embeddings.cls_token 1x1x768, classifier.weight 1000x768"),
    "all-MiniLM-L6-v2": (of("bert", "BertModel", 30522, 384, pad_token_id=0),
     "F32", "embeddings.word_embeddings.weight 30522x384, pooler.dense.weight 384x384", words(30522)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_check_reports_nothing_above_info_for_published_shapes(tmp_path, name):
    audit = check(write_published(tmp_path, *PUBLIC[name]), scan=False)
    assert audit.at_least("warning") == ()
    assert all(outcome.right is not False for outcome in audit.outcomes)


# classes with healthy folders under both flags, and classes with one under a single flag
CAUSAL = """Llama Gemma3 OPT Phi Cohere Granite Qwen2 Qwen3 GPTNeoX Mamba Falcon Mistral Bloom GPTJ Olmo2 Phi3 Mixtral
StableLm Starcoder2"""
NESTED = "Llava Gemma3 Qwen2_5_VL InternVL Idefics3 PaliGemma Llama4"
BOTH = ["GPT2LMHeadModel", *classes_for("CausalLM", CAUSAL), *classes_for("ConditionalGeneration", NESTED)]
OTHERS = {
    True: [
        # FSMT saves its shared table under the head's name
        *classes_for("ConditionalGeneration", "T5 Bart Whisper MBart Pegasus FSMT"),
        *classes_for("MaskedLM", "Bert Roberta ModernBert Albert Electra DistilBert DebertaV2"),
        "MarianMTModel",
    ],
    # the class of Mllama never ties
    False: [*classes_for("ConditionalGeneration", "Bart Mllama"), "MarianMTModel", "BertForMaskedLM"],
    None: [
        *("Blip2ForConditionalGeneration", "BertModel", "LlamaModel", "LlamaForSequenceClassification"),
        *("ViTModel", "CLIPModel"),
    ],
}
QUICK = ("LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM", "Gemma3ForConditionalGeneration")


def model_cases():
    others = [(name, flag) for flag, names in OTHERS.items() for name in names]
    for name, flag in [(name, flag) for name in BOTH for flag in (True, False)] + others:
        quick = name in QUICK and flag is True
        yield pytest.param(name, flag, marks=[] if quick else pytest.mark.slow, id=f"{name}-{flag}")


@pytest.mark.parametrize(("name", "flag"), list(model_cases()))
def test_check_reports_nothing_above_info_for_models_that_transformers_saved(tmp_path, name, flag):
    model = tiny(name, flag)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for folder in ("one", "many"):
        audit = check(tmp_path / folder, deep=True)
        assert audit.at_least("warning") == ()
        stored = audit.roles.input is not None or audit.roles.output is not None
        assert stored is (name not in ("ViTModel", "CLIPModel"))
