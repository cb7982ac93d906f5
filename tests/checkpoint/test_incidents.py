"""What broke in public, made again as a tiny folder, and what a command says of it; docs/incidents.md is this table."""

import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import pytest
from onnx_writer import initialiser
from test_adapter import BODY, E, H, adapter
from test_onnx import HEAD as MATMUL
from test_onnx import SPLIT, made, written
from test_rules_draft import MARKS, STEPS, draft
from test_rules_token_tables import GEMMA4, PLE, VOCABULARY, WIDE
from tiny_checkpoints import D, V, bpe_tokenizer, llama, llama_config, table, write_checkpoint
from typer.testing import CliRunner

from tiewise.cli.main import command_line

DOC = Path(__file__).parents[2] / "docs" / "incidents.md"
BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Incident(NamedTuple):
    """Threads, what makes the folder(s), the command run beside them, its exit code, and words that it says."""

    threads: str
    make: object
    command: str
    code: int
    says: tuple[str, ...]


def granite(here):
    """A tied Granite that ships an equal head."""
    config = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    llama(here / "model", True, config=config, head=table())


def surplus(here):
    """A tied model whose trainer saved the head besides."""
    llama(here / "model", True, head=table())


def moved(here):
    """A fine-tune with two more rows, and one row that moved."""
    llama(here / "base", True)
    rows = table(V + 2)
    rows[:V] = table()
    rows[5] += 1
    llama(here / "tuned", True, rows=V + 2, tensors={TABLE: rows})


def donor(here):
    """A merge whose tokenizer has ids that no row answers."""
    llama(here / "model", True, tokenizer=bpe_tokenizer(V, [(V, "<donor>", True)]))


def renamed(here):
    """A tied model whose table has a name of nobody's."""
    tensors = {TABLE: None, "model.word_table.weight": table()}
    llama(here / "model", True, tensors=tensors)


def plain(here):
    """A sound tied model."""
    llama(here / "model", True)


def short(here):
    """A Gemma 4 whose ends were resized and whose per-layer table was passed by."""
    config = llama_config(True, 70) | GEMMA4 | WIDE | {VOCABULARY: 64}
    write_checkpoint(here / "model", config, {TABLE: table(70), PLE: table(64, 12)}, tokenizer=bpe_tokenizer(70))


def vision(here):
    """A text-and-image model, whose text class has other names."""
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    config |= {"text_config": llama_config(True) | {"model_type": "gemma3_text", "head_dim": 4}}
    config |= {"tie_word_embeddings": True, "vision_config": {"model_type": "siglip_vision_model"}}
    names = {"model.language_model.embed_tokens.weight": table()}
    names |= {"model.language_model.layers.0.mlp.down_proj.weight": table(D, 2 * D, 1)}
    write_checkpoint(here / "model", config, names)


def untied_vision(here):
    """An untied model within another: a server that writes the table over its head makes another model of it."""
    vision(here)
    config = json.loads((here / "model/config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    config |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    config["text_config"]["model_type"] = "qwen2_5_vl_text"
    tensors = {"model.embed_tokens.weight": table(), HEAD: table(seed=2)}
    write_checkpoint(here / "model", config, tensors)


def cast(here):
    """A head whose numbers were cast to 8 bits; the scale was dropped."""
    head = table(seed=2).astype(ml_dtypes.float8_e4m3fn)
    llama(here / "model", False, head=head, config={"quantization_config": {"quant_method": "fp8"}})


def planned(here):
    """A tied model, and a quantisation of its head alone."""
    llama(here / "model", True)
    (here / "plan.json").write_text(json.dumps({"quant_method": "gptq", "lm_head": True}))


def exported_twice(here):
    """An export of a tied model that stores its table at both ends."""
    written(here, made(MATMUL, held=[*SPLIT[:2], initialiser("head", table().T)]), "model.onnx")


def exported_without_head(here):
    """An export whose head has a name and no data."""
    written(here, made(MATMUL), "model.onnx")


def does_nothing(here):
    """An adapter for names that the base has not."""
    llama(here / "base", True)
    other = {name.replace("model.layers", "language_model.model.layers"): array for name, array in BODY.items()}
    adapter(here / "adapter", None, target_modules=["down_proj"])
    from safetensors.numpy import save_file

    save_file(other, here / "adapter/adapter_model.safetensors", {"format": "pt"})


def whole_table(here):
    """An adapter of one new token that carries a copy of the whole table."""
    llama(here / "base", True)
    rows = table()
    rows[7] += 1
    adapter(here / "adapter", {f"{E}.weight": rows}, modules_to_save=["embed_tokens"])


def whole_untied_table(here):
    """The same of an untied model."""
    whole_table(here)
    llama(here / "base", False)


def both_ends(here):
    """An adapter that saves both ends of a tied model, differently."""
    llama(here / "base", True)
    tensors = {f"{E}.weight": table(seed=3), f"{H}.weight": table(seed=4)}
    adapter(here / "adapter", tensors, modules_to_save=["embed_tokens", "lm_head"])


def new_rows(here):
    """An adapter whose tables have more rows than its base."""
    llama(here / "base", True)
    adapter(here / "adapter", {f"{E}.weight": table(V + 2)}, modules_to_save=["embed_tokens"])


def no_map(here):
    llama(here / "model", True, tokenizer=bpe_tokenizer())
    draft(here / "draft", d2t=0 * STEPS, t2d=MARKS)


def other_map(here):
    """A draft of the same size whose ids are other tokens."""
    words = bpe_tokenizer()
    llama(here / "model", True, tokenizer=words)
    other = bpe_tokenizer()
    names = list(other["model"]["vocab"])
    other["model"]["vocab"] = dict(zip(names, [*range(1, V), 0], strict=True))
    draft(here / "draft", tokenizer=other)


def text(here):
    """A model with a byte-level tokenizer, and a text."""
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    tokenizer = {"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel"} | BYTES}
    tokenizer |= {"pre_tokenizer": {"type": "ByteLevel"} | BYTES}
    words = [*letters, *(chr(i) for i in [*range(161, 173), *range(174, 324)])]
    vocab = {letter: i for i, letter in enumerate(dict.fromkeys(words))}
    merges = [["t", "h"], ["th", "e"], ["a", "n"], ["an", "d"], ["z", "q"]]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer["model"] = {"type": "BPE", "vocab": vocab, "merges": merges}
    llama(here / "model", True, rows=len(vocab), tokenizer=tokenizer)
    (here / "text.txt").write_text("the cat and the dog and the hen\n\n" * 40)


INCIDENTS = [
    Incident("transformers#45276, #45335, #45324", short, "check model", 1, ("B017", "embed_tokens_per_layer")),
    Incident(
        "transformers#45276, #45335, #45324",
        short,
        "resize model --vocab 72 --to grown",
        0,
        ("per_layer.weight lacks rows 64 to 69",),
    ),
    Incident("unsloth#5816", vision, "check model --as Gemma3ForCausalLM", 1, ("random",)),
    Incident("mlx-lm#1298, #1055", granite, "check model --fail-on warning", 1, ("B013",)),
    Incident("sglang#15398", untied_vision, "check model --fail-on never", 0, ("SGLang",)),
    Incident("sglang#35228, #28130", cast, "check model", 1, ("B052",)),
    Incident("GPTQModel#3050", planned, "check model --quantise plan.json --fail-on warning", 1, ("B053",)),
    Incident("ROCm/vllm#1213", plain, "plan model", 0, ("8 bits, head alone",)),
    Incident("onnxruntime-genai#1690", exported_twice, "check model.onnx --fail-on warning", 1, ("B100",)),
    Incident("mobius#295, #671", exported_without_head, "check model.onnx", 1, ("B101",)),
    Incident("ColossalAI#6160, Pai-Megatron-Patch#593", surplus, "dedupe model --to mended", 0, ("lm_head.weight",)),
    Incident("Megatron-Bridge#4883", renamed, "check model", 1, ("B010",)),
    Incident("vllm#41754, #38844", does_nothing, "check adapter --base base", 1, ("B062",)),
    Incident("vllm#48934, #9280, #11714", whole_table, "merge adapter --base base --to merged", 0, ("logit",)),
    Incident("peft#2898", whole_untied_table, "slim adapter --base base --to slim", 0, ("1 of 24",)),
    Incident("peft#2864", both_ends, "check adapter --base base", 1, ("B060",)),
    Incident("unsloth#3444, #3416", new_rows, "check adapter --base base", 1, ("B061",)),
    Incident("mergekit#328", moved, "diff base tuned", 0, ("rows 24 to 25",)),
    Incident("mergekit#657", donor, "check model", 1, ("B031",)),
    Incident("Automodel#2447, EAGLE#222, #258", no_map, "check draft --target model", 1, ("B083",)),
    Incident("SpecForge#764, vllm-ascend#9718", other_map, "check draft --target model", 1, ("B085",)),
    Incident("vllm#42775, #7252", plain, "resize model --vocab 32 --rows zero --to padded", 0, ("zero",)),
    Incident("tokenizers#1668, #1686", text, "trim model --text text.txt --to small", 0, ("the",)),
    Incident("NeMo-RL#403, Automodel#425", plain, "check model --world 16", 0, ("B042", "16")),
]


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.threads.split(",")[0])
def test_it_is_answered(tmp_path, monkeypatch, incident):
    incident.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = incident.command.split()
    answer = CliRunner().invoke(command_line(arguments), arguments, env={"COLUMNS": "200"})
    said = f"{answer.output}{answer.exception or ''}"
    assert answer.exit_code == incident.code, said
    for words in incident.says:
        assert words in said, said


def test_the_page_lists_them_all():
    rows = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for incident in INCIDENTS:
        assert any(incident.threads in row and f"`tiewise {incident.command}`" in row for row in rows), incident
