"""Test commands on tiny reproductions of public incidents; docs/dev/incidents.md lists the same table."""

import json
from pathlib import Path

import ml_dtypes
import pytest
from onnx_writer import initialiser
from test_adapter import BODY, SAVED, E, H, adapter
from test_onnx import HEAD as MATMUL
from test_onnx import HELD, build, save
from test_rules_draft import OTHER, STEPS, draft
from test_rules_quantised import mlx, packed
from test_rules_token_tables import GEMMA4, PLE, VOCABULARY, WIDE, folder_of
from test_rules_types_and_rows import composite as two_sizes
from test_rules_types_and_rows import longer
from tiny_checkpoints import V, bpe_tokenizer, llama, llama_config, table, with_rows, write_checkpoint
from tokenizers import ByteLevelBPETokenizer
from typer.testing import CliRunner

from tiewise.cli.main import command_line

DOC = Path(__file__).parents[2] / "docs" / "dev" / "incidents.md"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def model(tied=True, **how):
    return lambda here: llama(here / "model", tied, **how)


def write_nested(kind, name, tied, tensors):
    """Return a function that writes a text-and-image model."""
    config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "tie_word_embeddings": tied}
    config |= {"text_config": llama_config(tied) | {"model_type": f"{kind}_text", "head_dim": 4}}
    config |= {"vision_config": {"model_type": "siglip_vision_model"}}
    return lambda here: write_checkpoint(here / "model", config, tensors)


def write_export(*held):
    """Return a function that writes an ONNX file with a named head and the given tensors."""
    return lambda here: save(here, build(MATMUL, held=[*HELD, *held]), "model.onnx")


def adapted(tensors, tied=True, **config):
    def make(here):
        llama(here / "base", tied)
        adapter(here / "adapter", tensors, **config)

    return make


def at_model(how):
    return lambda here: llama(here / "model", **how)


def composite(*sizes, **config):
    return lambda here: two_sizes(*sizes, **config)(here / "model")


def drafted(**how):
    def make(here):
        llama(here / "model", tokenizer=bpe_tokenizer())
        draft(here / "draft", **how)

    return make


def write_fine_tune(here):
    """Write a base and a fine-tune with two more rows and one changed row."""
    llama(here / "base")
    llama(here / "tuned", rows=V + 2, tensors={TABLE: with_rows(5, of=table(V + 2))})


def write_plan(here):
    """Write a tied model and a plan that quantises its head alone."""
    llama(here / "model")
    (here / "plan.json").write_text(json.dumps({"quant_method": "gptq", "lm_head": True}))


def write_text(here):
    """Write a model with a byte-level tokenizer and a text that uses only part of its tokens."""
    words = "the cat and the dog and the hen\n\n" * 40
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([words, "zq zq zq"], vocab_size=280, show_progress=False)
    llama(here / "model", rows=tokenizer.get_vocab_size(), tokenizer=json.loads(tokenizer.to_str()))
    (here / "text.txt").write_text(words)


GEMMA = {f"model.language_model.{name}.weight": table() for name in ("embed_tokens", "layers.0.mlp.down_proj")}
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
ELSEWHERE = {name.replace("model.layers", "language_model.model.layers"): array for name, array in BODY.items()}
ONE_ROW = {f"{E}.weight": with_rows(7)}
BOTH = {f"{E}.weight": table(seed=3), f"{H}.weight": table(seed=4)}


def write_short_gemma4(here):
    """Write a Gemma 4 whose ends were resized without its per-layer table."""
    folder_of(GEMMA4 | WIDE | {VOCABULARY: 64}, {PLE: table(64, 12)}, rows=70)(here / "model")


RESIZED = "transformers#45276, #45335, #45324"
# threads, writer of the folders, command, exit code, words of the output
INCIDENTS = [
    (RESIZED, write_short_gemma4, "check model", 1, "B017", "embed_tokens_per_layer"),
    (RESIZED, write_short_gemma4, "vocab resize model --vocab 72 --to grown", 0,
     "per_layer.weight lacks rows 64 to 69"),
    ("unsloth#5816", write_nested("gemma3", "Gemma3", True, GEMMA), "check model --as Gemma3ForCausalLM", 1, "random"),
    ("mlx-lm#1298, #1055", model(config=GRANITE, head=table()), "check model --fail-on warning", 1, "B013"),
    # a server that overwrites the head with the table serves another model
    ("sglang#15398", write_nested("qwen2_5_vl", "Qwen2_5_VL", False, {TABLE: table(), HEAD: table(seed=2)}),
     "check model --fail-on never", 0, "SGLang"),
    ("sglang#35228, #28130", model(False, head=table(seed=2).astype(ml_dtypes.float8_e4m3fn), config=FP8),
     "check model", 1, "B052"),
    ("GPTQModel#3050", write_plan, "check model --quantise plan.json --fail-on warning", 1, "B053"),
    ("ROCm/vllm#1213", model(), "plan model --full", 0, "8 bits, head alone"),
    ("onnxruntime-genai#1690", write_export(initialiser("head", table().T)),
     "check model.onnx --fail-on warning", 1, "B100"),
    ("mobius#295, #671", write_export(), "check model.onnx", 1, "B101"),
    ("ColossalAI#6160, Pai-Megatron-Patch#593", model(head=table()), "repair model --to mended", 0, HEAD),
    ("Megatron-Bridge#4883", model(tensors={TABLE: None, "model.words.weight": table()}), "check model", 1, "B010"),
    ("vllm#41754, #38844", adapted(ELSEWHERE), "check adapter --base base", 1, "B062"),
    ("vllm#48934, #9280, #11714", adapted(ONE_ROW, **SAVED),
     "adapter merge adapter --base base --to merged", 0, "logit"),
    ("peft#2898", adapted(ONE_ROW, False, **SAVED), "adapter slim adapter --base base --to slim", 0, "1 of 24"),
    ("peft#2864", adapted(BOTH, modules_to_save=["embed_tokens", "lm_head"]), "check adapter --base base", 1, "B060"),
    ("unsloth#3444, #3416", adapted({f"{E}.weight": table(V + 2)}, **SAVED), "check adapter --base base", 1, "B061"),
    ("mergekit#328", write_fine_tune, "diff base tuned", 0, "rows 24 to 25"),
    # a merge whose tokenizer has an id without a row
    ("mergekit#657", model(tokenizer=bpe_tokenizer(V, [(V, "<donor>", True)])), "check model", 1, "B031"),
    ("Automodel#2447, EAGLE#222, #258", drafted(d2t=0 * STEPS), "check draft --target model", 1, "B083"),
    ("SpecForge#764, vllm-ascend#9718", drafted(tokenizer=OTHER), "check draft --target model", 1, "B085"),
    ("vllm#42775, #7252", model(), "vocab resize model --vocab 32 --rows zero --to padded", 0, "zero"),
    ("tokenizers#1668, #1686", write_text, "vocab trim model --text text.txt --to small", 0, "270 of 272 tokens stay"),
    ("transformers#40130, LlamaFactory#6840", composite(V, V + 8), "check model", 1, "B033", "text_config.vocab_size"),
    ("transformers#35683, #36491", composite(V, V, image_token_id=V), "check model", 1, "B034", "image_token_id is 24"),
    ("vllm#45132, #44081", at_model(packed(sidecar={"exclude_modules": ["lm_head*"]})), "check model", 1, "B054"),
    ("mlxcel#291", at_model(mlx(8, head=True)), "repair model --to mended", 0, "lm_head.scales"),
    ("mlx-vlm#1773", at_model(mlx(16)), "check model", 1, "packed at 8 bits"),
    ("sglang#27908", drafted(d2t=None, t2d=None, lm_head__weight=None, config={"draft_vocab_size": V}),
     "check draft --target model", 1, "B084", "no head of 24 rows"),
    ("peft#2450, #2451", adapted({f"{E}.weight": table()[:0]}, False, **SAVED),
     "check adapter --base base", 1, "B061", "ZeRO-3"),
    ("Automodel#3808", model(tensors={TABLE: 0 * table()}), "check model", 1, "B043", "ln 24 = 3.178"),
    ("vllm#13175, NeMo-RL#237", model(tensors={TABLE: longer(6)}, tokenizer=bpe_tokenizer(20)),
     "check model --fail-on warning", 1, "B032", "row 23"),
    ("NeMo-RL#403, Automodel#425", model(), "check model --world 16", 0, "B042", "16"),
]  # fmt: skip


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident[0].split(",")[0])
def test_command_reports_the_incident(tmp_path, monkeypatch, incident):
    _, make, command, code, *says = incident
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(command_line(command.split()), command.split(), env={"COLUMNS": "200"})
    said = f"{answer.output}{answer.exception or ''}"
    assert answer.exit_code == code, said
    for words in says:
        assert words in said, said


def test_incidents_page_lists_every_incident():
    rows = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for threads, _, command, *_ in INCIDENTS:
        assert any(threads in row and f"`tiewise {command}`" in row for row in rows), command
