"""Test B030 to B051 and B081 on broken and healthy folders: token counts, types, rows, copies, quantised ends."""

import json

import ml_dtypes
import numpy as np
import pytest
from rule_runs import assert_fires, assert_silent, run_rule, table_of
from test_rules_draft import sentence_pieces
from test_rules_tying import factored
from tiny_checkpoints import (
    ONE,
    D,
    V,
    bpe_tokenizer,
    llama,
    llama_config,
    llama_tensors,
    table,
    write_checkpoint,
    write_sparse,
)

from tiewise.checkpoint.audit import check

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
E, H = "model.embed_tokens", "lm_head"
ALBERT = {"architectures": ["AlbertForMaskedLM"], "model_type": "albert", "vocab_size": V, "hidden_size": 16}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vocab_size": 7}
UNTIED = {"tied": False}
BF16 = ml_dtypes.bfloat16


def rows(values, **more):
    """Return arguments of a Llama of 64 rows, some replaced by {number: value}."""
    made = table(64)
    for number, value in values.items():
        made[number] = value
    return {"rows": 64, "tensors": {TABLE: made}} | more


def tokens(count, *added, **more):
    """Return arguments of a Llama with a tokenizer of `count` entries and added tokens (id, text, special)."""
    return {"tokenizer": bpe_tokenizer(count, added)} | more


def bias(name, length=V, **more):
    return {"tensors": {name: np.ones(length, np.float32)}} | more


def llava(**config):
    """Return a function that writes a VLM's folder whose text part has this config."""
    tensors = {f"language_model.{name}": array for name, array in llama_tensors().items()}
    parts = {"text_config": llama_config(**config), "vision_config": {"model_type": "clip", "vocab_size": 9}}
    return lambda path: write_checkpoint(path, LLAVA | parts, tensors)


def with_width(width):
    """Return a function that writes a Llama whose config has this width."""
    return lambda path: write_checkpoint(path, llama_config() | {"hidden_size": width}, llama_tensors())


def composite(root, text=V, rows=V, kind="qwen2_5_vl", name="Qwen2_5_VLForConditionalGeneration", **config):
    """Return a function that writes a VLM of `rows` rows with two vocabulary sizes in its config."""
    tensors = {f"model.language_{name}": array for name, array in llama_tensors(rows=rows).items()}
    flags = {"architectures": [name], "model_type": kind, "tie_word_embeddings": True}
    parts = {
        "text_config": llama_config(vocab_size=text, model_type=f"{kind}_text"),
        "vision_config": {"vocab_size": 9},
    }
    sizes = {} if root is None else {"vocab_size": root}
    return lambda path: write_checkpoint(path, flags | parts | sizes | config, tensors)


def tokenizer_with_gap():
    """Return a tokenizer of 20 words and a token at id 30."""
    vocabulary = {f"t{number}": number for number in range(20)} | {"<lang>": 30}
    return {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}


def picture(kind, name, **config):
    """Return a function that writes a VLM of another family whose config names image tokens."""
    return composite(None, kind=kind, name=name, **config)


def generation(**config):
    return {"files": {"generation_config.json": config}}


NORM = ("LayerNorm.weight", "LayerNorm.bias")


def albert(maps=False, **config):
    """Return a function that writes an ALBERT whose table is half as wide as the model."""
    tensors = {"albert.embeddings.word_embeddings.weight": table(), "predictions.bias": np.zeros(V, np.float32)}
    tensors |= {"predictions.dense.weight": table(D if maps else 16, 16)}
    tensors |= {f"predictions.{name}": np.ones(D, np.float32) for name in ("dense.bias", *NORM)}
    tensors |= {"albert.encoder.embedding_hidden_mapping_in.weight": table(16, D)} if maps else {}
    return lambda path: write_checkpoint(path, ALBERT | config, tensors)


def copies(*numbers):
    """Return arguments of a Llama with large matrices; equal numbers mean equal bytes."""
    made = [np.full((512, 512), 0.5, np.float32) for _ in numbers]  # 1 MiB
    for matrix, number in zip(made, numbers, strict=True):
        matrix[300, 300] += number  # outside every sample
    return {"tensors": {f"model.layers.{n}.mlp.up_proj.weight": matrix for n, matrix in enumerate(made)}}


def ones(dtype, *shape):
    return np.ones(shape, dtype)


COMPRESSED = "compressed-tensors"
# tensors that each quantisation method stores instead of a module's weight
METHODS = {
    "gptq": {"qweight": ones("i4", D // 8, V), "qzeros": ones("i4", 1, V // 8), "scales": ones("f2", 1, V),
             "g_idx": ones("i4", D)},
    COMPRESSED: {"weight_packed": ones("i4", V, D // 8), "weight_scale": ones("f2", V, 1),
                 "weight_shape": np.array([V, D])},
    "bitsandbytes": {"weight": ones("u1", V * D // 2, 1), "weight.absmax": ones("f4", 4),
                     "weight.quant_map": ones("f4", 16), "weight.quant_state.bitsandbytes__nf4": ones("u1", 8)},
    "int8": {"weight": ones("i1", V, D), "SCB": ones("f4", V)},
    "fp8": {"weight": ones(ml_dtypes.float8_e4m3fn, V, D), "weight_scale_inv": ones("f4", 1, 1)},
    "mlx": {"weight": ones("u4", V, D // 8), "scales": ones("f2", V, 1), "biases": ones("f2", V, 1)},
    "integers": {"weight": ones("i1", V, D)},
}  # fmt: skip
# engines drop the scale of a head, or the method stores none
UNREAD = {(COMPRESSED, H): " B052", ("fp8", H): " B052", ("integers", H): " B052", ("integers", E): " B052"}
# sections of a config with which loaders pack the end that the method stores
DESCRIBED = [
    ("gptq", H, {"quant_method": "gptq", "lm_head": True}),
    ("gptq", H, {"quant_method": "gptq"}),  # `repair` adds lm_head
    (COMPRESSED, H, {"quant_method": COMPRESSED, "config_groups": {"group_0": {"targets": ["re:.*lm_head"]}}}),
    (COMPRESSED, E, {"quant_method": COMPRESSED, "config_groups": {"group_0": {"targets": ["Embedding"]}}}),
    ("bitsandbytes", H, {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["vision_tower"]}),
    ("fp8", H, {"quant_method": "fp8", "modules_to_not_convert": ["vision_tower"]}),
]
SKIP = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["vision_tower"]}


def by(method, module):
    return {f"{module}.{part}": values for part, values in METHODS[method].items()}


def quantised(*parts, without=None, tied=True, head=None, **section):
    """Return arguments of a Llama with quantised parts instead of plain ends, optionally without one tensor."""
    names = {name for part in parts for name in part}
    tensors = {f"{end}.weight": None for end in (E, H) if any(name.startswith(f"{end}.") for name in names)}
    for part in parts:
        tensors |= part
    config = {"quantization_config": section} if section else {}
    return {"tied": tied, "head": head, "tensors": tensors | ({without: None} if without else {}), "config": config}


BIASES = ("lm_head.bias", "final_logits_bias", "cls.predictions.bias")
BAD_HEAD = np.where(np.arange(64 * D).reshape(64, D) == 64 * D - 1, np.nan, table(64, seed=3)).astype(np.float32)
SKIPPED = "quantization_config.llm_int8_skip_modules"
REACHES = f"tiewise vocab resize PATH --vocab {V + 2} --to PATH-fixed\n"
LLAVA_CLASS = ("llava", "LlavaForConditionalGeneration")
NEW = (V, "<a>", True), (V + 1, "<b>", True)
# rules, severity, place, whether the repair is safe, how to write the folder, words
FIRES = [
    *(("B030", "fatal", HEAD, False, {"tied": tied, "head": table(V + 3)},
       f"[{V}, {D}]", f"[{V + 3}, {D}]", f"\ntake {TABLE} from its source; or resize both ends again, from ")
      for tied in (True, False)),
    ("B030", "fatal", TABLE, False, {"config": {"hidden_size": 10}}, "is 8 wide, and the model 10"),
    ("B030 B020", "fatal", "albert.embeddings.word_embeddings.weight", False, albert()),
    ("B030", "fatal", TABLE, False, lambda path: factored(path, maps=False)),
    ("B031", "fatal", "tokenizer.json", False, tokens(V + 2), f"Its vocabulary reaches id {V + 1}", REACHES),
    ("B031", "warning", "tokenizer.json", False, tokens(V, (V, "<image_soft_token>", True), (V + 1, "<audio>", True)),
     "These are added tokens", REACHES),
    ("B031", "error", "tokenizer.json", False, tokens(V, (V, "<new>", True), (V + 1, "<more>", False)),
     f"These are added tokens: {V} '<new>', {V + 1} '<more>'", REACHES),
    *(("B031", "error", "tokenizer.json", False, tokens(V, *NEW, config={"additional_vocab_size": size}))
      for size in (1, -5, "2", None)),
    ("B032", "info", TABLE, False, tokens(V - 4, (V - 4, "<a>", True)),
     f"3 of {V} rows have no token; ids reach {V - 4}\n"),
    ("B032", "info", TABLE, False, {"tokenizer": tokenizer_with_gap(), "tensors": {TABLE: table(32)}, "rows": 32},
     "11 of 32 rows have no token; ids reach 30, and 10 of these rows are below it"),
    # only the head affects sampling
    *((f"B043 {rule}", "error", TABLE, False, how, "every number of the ", loss) for rule, how, loss in (
        ("B041", {"tensors": {TABLE: np.zeros((V, D), np.float32)}}, "training starts at ln 24 = 3.178 nats"),
        ("B041 B014", {"tied": False, "tensors": {TABLE: np.zeros((V, D), np.float32)},
                       "head": np.zeros((V, D), np.float32)}, "training starts at ln 24 = 3.178 nats"),
        ("B041", UNTIED | {"tensors": {TABLE: np.zeros((V, D), BF16)}, "head": table().astype(BF16),
                           "config": {"dtype": "bfloat16"}}, "all tokens look alike"))),
    ("B043 B041", "info", HEAD, False, UNTIED | {"head": np.zeros((V, D), np.float32)}, "has the same logit"),
    ("B033", "error", "vocab_size", True, {"config": {"vocab_size": V - 1}},
     f"vocab_size is {V - 1}", f"has {V} rows"),
    ("B033", "error", "text_config.vocab_size", True, llava(vocab_size=V - 1)),
    *(("B033", "error", "vocab_size", True, {"config": {"vocab_size": wrong}},
       f"vocab_size is {shown}, which is no number of rows. model.embed_tokens.weight has {V} rows")
      for wrong, shown in ((str(V), f'"{V}"'), (float(V), f"{V}.0"), (0, "0"), (-V, f"-{V}"), (True, "true"),
                           ([V], f"[{V}]"), (2**63, "9223372036854775808"))),
    ("B033", "error", "text_config.vocab_size", True, llava(vocab_size=str(V))),
    *(("B030", "error", "hidden_size", True, with_width(wrong), f"hidden_size is {shown}, which is no width")
      for wrong, shown in ((str(D), f'"{D}"'), (float(D), f"{D}.0"), (0, "0"), (-D, f"-{D}"), (True, "true"),
                           (None, "null"), ([D], f"[{D}]"), (2**63, "9223372036854775808"))),
    ("B030", "error", "text_config.hidden_size", True, llava(hidden_size=str(D)), f'text_config.hidden_size is "{D}"'),
    ("B033", "error", "vocab_size", True, {"config": {"vocab_size": V - 1, "pad_vocab_size_multiple": 7}}),
    # a resize that changed one config level; older releases read the root level (transformers#40130)
    ("B033", "error", "text_config.vocab_size", True, composite(V, V + 8), f"is {V + 8}, and", f"has {V} rows"),
    ("B033", "error", "text_config.vocab_size", True, composite(V + 8, V, V + 8), f"is {V}, and"),
    ("B033", "warning", "vocab_size", False, composite(V + 8), f"vocab_size is {V + 8}, and text_config.vocab_size is"),
    # image tokens, which most classes look up
    *(("B034", "error", key, False, picture(*LLAVA_CLASS, **{key: value}), f"{key} is {worst}, and ids",
       f"\ntiewise vocab resize PATH --vocab {worst + 1} --to PATH-fixed; or edit config.json by hand: {key}\n")
      for key, value, worst in (("image_token_index", V, V), ("image_token_id", V + 3, V + 3),
                                ("visual_indicator_token_ids", [3, V + 1], V + 1))),
    ("B034", "error", "text_config.image_token_id", False, llava(image_token_id=V)),
    *(("B034", "warning", f"generation_config.json.{key}", False, generation(**{key: value}),
       f"generation_config.json.{key} is {V + 1}, and ids of", "\nedit generation_config.json by hand: gen")
      for key, value in {
          "suppress_tokens": [-1, 3, V + 1], "begin_suppress_tokens": [V + 1], "bad_words_ids": [[3], [2, V + 1]],
          "forced_decoder_ids": [[1, None], [V + 9, V + 1]], "force_words_ids": [[[V + 1]], [2]],
          "forced_bos_token_id": V + 1, "forced_eos_token_id": [2, V + 1], "no_timestamps_token_id": V + 1}.items()),
    *(("B034", "warning", key, False, {"config": {key: V}}, f"{key} is {V}, and ids of")
      for key in ("forced_bos_token_id", "sep_token_id", "mask_token_id")),
    *(("B034", "warning", "eos_token_id", False, {"config": {"eos_token_id": value}},
       f"eos_token_id is {shown}, and ids of this vocabulary are whole numbers from 0 to {V - 1}")
      for value, shown in {V: V, -1: -1, "</s>": "'</s>'", True: True}.items()),
    ("B034", "warning", "eos_token_id", False, {"config": {"eos_token_id": [1, 999, 77]}}, "is 999, 77, and ids"),
    ("B034", "warning", "eos_token_id", False, {"config": {"eos_token_id": {"id": 1}}},
     "eos_token_id is a dict, and ids"),
    ("B034", "warning", "generation_config.json.eos_token_id", False,
     {"files": {"generation_config.json": {"eos_token_id": 500}}}, "generation_config.json.eos_token_id is 500"),
    *(("B035", "warning", name, False, bias(name, V - 1, tied=False),
     f"has {V - 1} entries, and the tables have {V} rows")
      for name in BIASES),
    ("B035", "info", "lm_head.bias", False, bias("lm_head.bias"), "lm_head.bias"),
    ("B040", "warning", HEAD, False, UNTIED | {"head": table(seed=2).astype(np.float16)}, "F32", "F16"),
    ("B040", "warning", "dtype", False, {"config": {"dtype": "bfloat16"}}, "100% of the bytes are F32"),
    ("B040", "warning", "torch_dtype", False, {"config": {"dtype": None, "torch_dtype": "float16"}},
     "of the bytes are F32"),
    ("B040", "info", "dtype", False, {"config": {"dtype": "float64"}}, "100% of the bytes are F32"),
    *(("B041", "error", TABLE, False, rows({5: value, 9: value}), "NaN or infinity in 2 rows (5, 9)")
      for value in (np.nan, np.inf, -np.inf)),
    ("B041", "error", HEAD, False, {"tied": False, "rows": 64, "head": BAD_HEAD}, "1 row (63)"),
    ("B041", "warning", TABLE, False, rows({11: table(64)[3], 12: table(64)[3], 50: table(64)[49]}),
     "5 equal rows of tokens in use (3, 11, 12; 49, 50)"),
    ("B041", "info", TABLE, False, rows({8: 1e30}), "1 row (8) are at least ten times as long as the median"),
    ("B042", "info", TABLE, False, {"rows": 100}, "the number of rows, 100, does not divide by 64",
     "if you want 128 rows: ",
     "tiewise vocab resize PATH --multiple-of 64 --to PATH-fixed"),
    ("B081", "info", "model.layers.0.mlp.up_proj.weight", False, copies(1, 1, 2, 1), "which costs 2.1 MB",
     "model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, model.layers.3.mlp.up_proj.weight)"),
    # without a description of the quantisation, a loader would draw the quantised end of an untied model at random
    *((f"B050{UNREAD.get((method, end), '')}", "error", end, False, quantised(by(method, end), head=head),
       f"but {end} is quantised and {other} is not", f"The config does not name {end} as quantised\n",
       f"{end} has {', '.join(sorted(METHODS[method]))}. The config",
       f"\nset tie_word_embeddings to false, and name {end} as quantised, in config.json by hand; ")
      for end, other, head in ((H, E, None), (E, H, table())) for method in METHODS),
    *((f"B050{UNREAD.get((method, end), '')}", "error", end, True,
       quantised(by(method, end), head=table() if end == E else None, **section),
       f"{end} has {', '.join(sorted(METHODS[method]))}\n",
       "to keep both tables: tiewise repair PATH --to PATH-fixed; ")
      for method, end, section in DESCRIBED),
    ("B050", "error", H, True, quantised(by("mlx", H)) | {"config": {"quantization": {"bits": 4, "group_size": D}}},
     "to keep both tables: "),
    ("B050", "error", H, False, quantised(by("gptq", H), without="lm_head.scales", tied=False),
     "its scales is missing"),
    ("B050", "error", H, False, quantised(by(COMPRESSED, H), without=f"{H}.weight_scale", tied=False),
     "its weight_scale is missing"),
    ("B050", "error", "config.json", True, quantised(quant_method="gptq", lm_head=True), "stores no head"),
    ("B050", "error", "config.json", True, quantised(tied=False, quant_method="gptq", lm_head=True),
     "is not quantised"),
    ("B050", "error", "config.json", True, quantised(by("gptq", H), tied=False, quant_method="gptq", lm_head=False),
     "quantization_config.lm_head is false, and lm_head is quantised (g_idx, qweight, qzeros, scales)"),
    ("B051", "warning", SKIPPED, False, quantised(**SKIP),
     "quantises the head on loading", "it is the input table\n", '\nadd "lm_head" to it\n'),
    ("B051", "warning", SKIPPED, False, quantised(tied=False, **SKIP), "it is stored unquantised\n"),
    ("B051", "warning", "quantization_config.ignore", False,
     quantised(by(COMPRESSED, E), quant_method=COMPRESSED, ignore=["lm_head"]), "excludes lm_head from quantisation"),
    ("B051", "warning", "quantization_config.exclude_modules", False,  # the section of a config part
     quantised(by(COMPRESSED, E)) | {"config": {"text_config": {"quantization_config": {"exclude_modules": [H]}}}}),
    ("B051", "warning", "quantization_config.modules_to_not_convert", False,
     quantised(quant_method="awq", modules_to_not_convert=["model.lm_head"]),
     'names "model.lm_head", and the module is called lm_head'),
]  # fmt: skip


@table_of(FIRES)
def test_type_and_row_rules_report_broken_folders(tmp_path, case):
    assert_fires(tmp_path, case)


NO_TOKENIZERS = [[], 3, {}, {"model": 1}, {"model": {"vocab": 1}}, {"model": {"vocab": [1, [], [2]]}}]
NO_TOKENIZERS += [{"model": {"vocab": {"a": "b", "c": -1, "d": 1e309, "e": True}}}]
NO_TOKENIZERS += [{"added_tokens": 1}, {"added_tokens": [1, {"id": "x"}, {"id": 2.5}]}]
GENERATION = {"generation_config.json": {"eos_token_id": [2, 3], "pad_token_id": None}}
COUNTS = "B030 B031 B032 B033 B034 B035"
QUANT = "B050 B051"
SIZES = "B030 B031 B032 B033 B034"  # the shape of packed numbers does not count tokens
TINY_NUMBERS = table(64) * np.float32(1e-38)
NORMS = {name: array.astype(BF16) for name, array in llama_tensors().items() if array.ndim == 2}
LATER = {"decoder_vocab_size": V + 9, "decoder_start_token_id": V + 8}
SILENT = [
    *(("B040 B041 B042 B081", {"tied": tied, "rows": 64, "tokenizer": bpe_tokenizer(64)}) for tied in (True, False)),
    *((COUNTS, tokens(V, tied=tied, files=GENERATION)) for tied in (True, False)),
    ("B030", {"tied": False, "head": table(V + 3), "config": {"decoder_vocab_size": V + 3}}),
    ("B030", albert(maps=True)),
    ("B030", albert(embedding_size=D)),
    (f"{COUNTS} B010 B011 B016 B020", factored),
    ("B030", {"tensors": {TABLE: np.zeros((V, 1), np.uint32)}}),  # packed
    ("B031", tokens(V - 4, (V - 4, "<a>", True))),
    *(("B032", tokens(V, tied=tied)) for tied in (True, False)),
    # added tokens may repeat entries of the vocabulary
    ("B031 B032", tokens(V, *((number, f"t{number}", True) for number in range(3)))),
    ("B043", {"tensors": {TABLE: np.eye(V, D, dtype=np.float32)}}),
    ("B043", {"tensors": {TABLE: np.full((V, D), -0.0, np.float32) + 1e-38}}),
    ("B031", tokens(V, *NEW, config={"additional_vocab_size": 2})),  # an extra table
    *(("B031", {"tokenizer": record}) for record in NO_TOKENIZERS),
    ("B033", llava()),
    ("B033", {"config": {"vocab_size": None}}),
    ("B033", {"config": {"vocab_size": V, "vision_config": {"vocab_size": "many"}}}),
    ("B033", {"config": {"vocab_size": V - 1, "pad_vocab_size_multiple": 8}}),
    ("B033", {"config": {"vocab_size": V - 1, "decoder_vocab_size": V}}),
    *(("B033 B034", composite(*sizes)) for sizes in ((None, V), (V, V), (V - 1, V))),
    ("B034", {"tied": False, "head": table(V + 9), "config": LATER}),
    # ids of other vocabularies, ids beyond the table, and placeholders that the class replaces
    ("B034", {"config": {"codebook_pad_token_id": 2050, "codec_eos_token_id": 900, "image_token_length": 900}}),
    ("B034", {"config": {"_pad_token_id": 128_002}}),  # the default of Idefics 3, which nothing reads
    ("B034", {"config": {"num_image_tokens": 900, "image_token_id": None, "image_token": 900}}),
    ("B034", {"config": {"image_token_id": V + 1, "additional_vocab_size": 2}}),  # Idefics
    ("B034", {"config": {"image_token_index": -200}}),
    ("B034", picture("mllama", "MllamaForConditionalGeneration", rows=V + 8, image_token_index=V)),  # eight rows more
    ("B034", picture("paligemma", "PaliGemmaForConditionalGeneration", image_token_index=V)),
    ("B034", composite(None, vlm_config={"model_type": "paligemma", "image_token_index": V})),
    ("B034", generation(suppress_tokens=[-1, 3], forced_decoder_ids=[[99, 3], [1, None], [7]], bad_words_ids=None)),
    ("B034", generation(suppress_tokens="none", bad_words_ids=3, forced_decoder_ids=[99, V + 9])),
    *(("B035", bias(name, tied=False)) for name in BIASES),
    *(
        ("B040", {"config": {"dtype": claimed}})
        for claimed in ("float32", "torch.float32", "auto", 32, ["float32"], None)
    ),
    ("B040", {"tensors": NORMS, "config": {"dtype": "bfloat16"}}),  # only the norms are fp32
    ("B041", {"rows": 64, "tensors": {TABLE: TINY_NUMBERS}}),  # tiny numbers are not zeros
    ("B041", rows({V: 0.0}, config={"text_config": {"vocab_size": 64, "pad_token_id": V}})),
    ("B081", copies(1, 2)),
    # B013 reports the two ends, and B081 ignores small tensors
    ("B081", {"rows": 2**15, "head": table(2**15), "tensors": {"a": np.ones(9), "b": np.ones(9)}}),
    (QUANT, {}),
    (QUANT, quantised(quant_method="gptq", lm_head=False)),
    (QUANT, quantised(quant_method="bitsandbytes", llm_int8_skip_modules=["lm_head"])),
    (QUANT, quantised(quant_method="bitsandbytes", llm_int8_skip_modules=None)),
    (QUANT, quantised(quant_method=COMPRESSED, ignore=["lm_head", "re:.*gate"])),
    *((QUANT, quantised(by(method, H), tied=False)) for method in METHODS),  # a separate head
    *((QUANT, quantised(by(method, E))) for method in METHODS),  # one shared, quantised table
    *((QUANT, quantised(by(method, E), by(method, H))) for method in METHODS),
    *((SIZES, quantised(by(method, E)) | {"tokenizer": bpe_tokenizer(24)}) for method in METHODS),
    (QUANT, quantised(by("gptq", H), tied=False, quant_method="gptq", lm_head=True)),
    (QUANT, quantised(quant_method="awq", modules_to_not_convert=["vision_tower"])),  # transformers adds its default
    (QUANT, quantised(by(COMPRESSED, E), quant_method=COMPRESSED, ignore=["gate"])),
    (QUANT, quantised(quant_method="awq", modules_to_not_convert=[E, "embed_tokens"])),
    # ids at other levels count only if they are numbers
    ("B034", composite(None, vlm_config={"model_type": "paligemma", "pad_token_id": "none"})),
]


@table_of(SILENT)
def test_type_and_row_rules_are_silent_on_healthy_folders(tmp_path, case):
    assert_silent(tmp_path, case)


COUNTED = {
    "vocab.json": json.dumps({f"t{i}": i for i in range(V + 1)}),
    "added_tokens.json": json.dumps({"<new>": V}),
    "tokenizer_config.json": json.dumps({"added_tokens_decoder": {str(V): {"content": "<new>"}}}),
    "tokenizer.json": json.dumps({"model": {"type": "Unigram", "vocab": [[f"t{i}", 0.0] for i in range(V + 1)]}}),
    "vocab.txt": "".join(f"w{i}\n" for i in range(V + 1)),
    "tokenizer.model": sentence_pieces("a" * (V + 1)).decode(),
}


@pytest.mark.parametrize("name", COUNTED)
def test_b031_counts_tokens_of_every_tokenizer_file(tmp_path, name):
    """Each kind of file has one more id than the table has rows."""
    (llama(tmp_path) / name).write_text(COUNTED[name])
    (found,) = run_rule("B031", tmp_path)
    assert (found.where, f"ids up to {V}" in found.evidence) == (name, True)


def test_b001_reports_truncated_sentencepiece_model(tmp_path):
    path, pieces = llama(tmp_path), sentence_pieces("a" * V)
    for data, found in ((pieces, []), (pieces[:-1], ["B001"])):
        (path / "tokenizer.model").write_bytes(data)
        assert [finding.rule for finding in (*run_rule("B031", path), *run_rule("B001", path))] == found


@pytest.mark.parametrize(("root", "text", "rows", "refused"), [(V, V + 8, V, True), (V + 8, V, V, False)])
def test_transformers_reads_the_vocab_size_of_the_text_level(tmp_path, root, text, rows, refused):
    """Transformers 5.23 refuses the first Qwen2.5-VL config and loads the second."""
    outcomes = check(composite(root, text, rows)(tmp_path)).outcomes
    (five,) = [one for one in outcomes if one.loader == "transformers" and one.versions != "4"]
    assert (five.outcome == "load error") == refused


def longer(times, row=V - 1, of=None):
    made = table() if of is None else of
    made[row] *= times
    return made


# how to write a folder with a tokenizer of 20 tokens, place of the warning or None, words of the warning
STRONG = [
    ({"tensors": {TABLE: longer(6)}}, TABLE, "of model.embed_tokens.weight is longer than any token's row"),
    (UNTIED | {"head": longer(6)}, HEAD, "row 23 of"),
    (UNTIED | {"head": longer(6).astype(BF16)}, HEAD, "the model may sample padding"),
    (bias("lm_head.bias") | {"tensors": {"lm_head.bias": np.eye(1, V, 21, dtype=np.float32)[0] * 5}}, "lm_head.bias",
     "is larger there than at any token (5 and 0). 1 padding row: 21"),
    (UNTIED | {"tensors": {TABLE: longer(6)}}, None),  # the lookup of an untied model
    ({"tensors": {TABLE: longer(6, 3)}}, None),  # a token's row
    ({"tensors": {TABLE: longer(0)}}, None),
    (UNTIED | {"head": longer(np.nan)}, None),  # B041
    ({"tensors": {"lm_head.bias": np.where(np.arange(V) < 20, 0, -1e4).astype(np.float32)}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("how", "where", "words"), [(how, *more, "")[:3] for how, *more in STRONG])
def test_b032_warns_of_padding_that_generation_can_sample(tmp_path, how, where, words):
    path = llama(tmp_path, tokenizer=bpe_tokenizer(20), **how)
    note, *warnings = run_rule("B032", path)
    assert note.severity == "info"
    assert [(one.severity, one.where) for one in warnings] == [("warning", where)] * (where is not None)
    assert all(words in one.evidence and "tiewise vocab resize" in one.repair for one in warnings)
    assert len(run_rule("B032", path, scan=False)) == 1  # headers only


def test_b032_only_notes_padding_drawn_like_tokens(tmp_path):
    for seed in range(40):
        path = llama(tmp_path / str(seed), rows=64, tensors={TABLE: table(64, seed=seed)}, tokenizer=bpe_tokenizer(40))
        assert [one.severity for one in run_rule("B032", path)] == ["info"]


def test_b043_reports_zeros_of_sparse_file(tmp_path):
    """A sparse file without its blocks of zeros has the same bytes."""
    (tmp_path / "config.json").write_text(json.dumps(llama_config(rows=2**16, width=64)))
    write_sparse(tmp_path / "model.safetensors", {TABLE: ("F32", (2**16, 64))})
    assert [one.rule for one in run_rule("B043", tmp_path)] == ["B043"]
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps(llama_config(rows=2**16, width=64)))
    write_sparse(begun / "model.safetensors", {TABLE: ("F32", (2**16, 64))}, {TABLE: ONE["F32"]})
    assert run_rule("B043", begun) == []


TINY = np.random.default_rng(5).normal(0, 1e-23, (3, D)).astype(BF16)
CHAT = "{{ '<|start|>' + message['role'] + '<|reserved_special_token_7|>' }}"
TEMPLATES = {
    "chat_template.jinja": CHAT,
    "chat_template.json": json.dumps({"chat_template": CHAT}),
    "tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": CHAT}, 3]}),
}


@pytest.mark.parametrize("file", [*TEMPLATES, None])
def test_b041_warns_of_untrained_tokens_in_chat_template(tmp_path, file):
    """Rows 5 to 7 hold numbers of about 1e-23; the template names tokens 5 and 7 and omits 6."""
    made = table(64).astype(BF16)
    made[5:8] = TINY
    added = [(5, "<|start|>", True), (6, "<|other|>", True), (7, "<|reserved_special_token_7|>", True)]
    how = {"rows": 64, "tensors": {TABLE: made}, "tokenizer": bpe_tokenizer(64, added)}
    how["tokenizer"]["model"]["vocab"] = {f"t{number}": number for number in range(64) if number not in (5, 6, 7)}
    path = llama(tmp_path, **how)
    if file is not None:
        (path / file).write_text(TEMPLATES[file])
    found = [(one.severity, one.evidence.split(" near zero")[0]) for one in run_rule("B041", path)]
    chat = ("warning", f"{TABLE}: 2 rows (5, 7) of tokens in the chat template are")
    other = f"{TABLE}: 1 row (6) of tokens in use are" if file else f"{TABLE}: 2 rows (5, 6) of tokens in use are"
    assert found == [chat] * bool(file) + [("info", other)]


# contents of rows


@pytest.mark.parametrize(
    ("tokenizer", "severities"),
    [
        (None, ["info"]),
        (bpe_tokenizer(64), ["warning"]),
        (bpe_tokenizer(7), []),  # rows 7 and 40 are padding
    ],
)
def test_b041_reports_zero_rows_only_if_tokens_use_them(tmp_path, tokenizer, severities):
    zeros = rows({0: 0.0, 7: 0.0, 40: 0.0})  # row 0 is the config's padding id
    found = run_rule("B041", llama(tmp_path, tokenizer=tokenizer, **zeros))
    assert [finding.severity for finding in found] == severities
    assert all("7" in finding.evidence and "(0" not in finding.evidence for finding in found)


# Names of unused rows in published tokenizers, and real words that contain these names.
PLACEHOLDERS = """[PAD] <pad> <|pad|> [PAD151936] [unused12] <unused5> [UNUSED_TOKEN_145] <|reserved_200014|>
<reserved_106> <|reserved_special_token_3|> <extra_id_7>
<|extra_12|> <|dummy_85|> <|placeholder1|> <｜▁pad▁｜> madeupword0001"""
WORDS = "preserved reserved pad unused ##pad dummy extra padding placeholder ▁reserved Ġunused <|im_start|> [SEP]"


@pytest.mark.parametrize("where", ["vocabulary", "added"])
@pytest.mark.parametrize(("texts", "count"), [(PLACEHOLDERS.split(), 0), (WORDS.split(), 13)])
def test_b041_ignores_placeholder_tokens_and_counts_words(tmp_path, where, texts, count):
    ids = range(10, 10 + len(texts))
    tokenizer = bpe_tokenizer(10, [(i, text, True) for i, text in zip(ids, texts, strict=True) if where == "added"])
    if where == "vocabulary":
        tokenizer["model"]["vocab"] |= dict(zip(texts, ids, strict=True))
    found = run_rule("B041", llama(tmp_path, tokenizer=tokenizer, **rows(dict.fromkeys(ids, 0.0))))
    assert [f"{count} rows (" in finding.evidence for finding in found] == [True] * bool(count)


def test_deep_scans_read_every_chunk(tmp_path):
    """The table exceeds one chunk, and row numbers count from its first row."""
    count = 2**18
    made = table(count)
    made[[2**17 + 3, count - 1]] = np.nan
    (found,) = run_rule("B041", llama(tmp_path, rows=count, tensors={TABLE: made}))
    assert f"NaN or infinity in 2 rows ({2**17 + 3}, {count - 1})" in found.evidence
