"""A sharded training state: two processes save it, four take it up, then one; then it is an ordinary folder."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharded_ranks import CASES, KILLED, adamw, everything, step
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import tiewise
from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WAY = "the folder holds this save or the one before it, whole"
IDS = torch.tensor([[0, 1, 2, 2, 1]])


def llama(vocab=97, tied=True):
    torch.manual_seed(0)
    names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_key_value_heads=4, **SIZES, **names))


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def ranks(folder, stages):
    """Run stages in processes of their own; a failure of one is shown with its traceback."""
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("sharded_ranks.py"), folder, stages]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "terminate called" not in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name, (vocab, tied, *_) in CASES.items():
        llama(vocab, tied).save_pretrained(folder / name / "start")
    torch.manual_seed(0)
    names = {"num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 97}
    MixtralForCausalLM(MixtralConfig(**SIZES, **names)).save_pretrained(folder / "experts" / "start")
    ranks(folder, "save,resume")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_process_takes_up_what_two_and_four_have_saved(trained, case):
    folder, (vocab, tied, *_) = trained / case, CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder / "start")
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for fresh in ("fresh", "fresh4"):  # what the folder of Hugging Face's form held, not what torch makes of shards
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1)
        assert tiewise.load_sharded(folder / fresh, model) == {}
        assert same(model.state_dict(), start)
    whole = torch.load(folder / "whole.pt")
    for save in ("two", "four"):
        optimizer = adamw(model)
        assert tiewise.load_sharded(folder / save, model, optimizer) == {"step": 3}
        assert same(everything(model, optimizer), whole)
        step(model, optimizer, vocab)
    assert len(list((folder / "two").iterdir())) == 3
    tiewise.load_sharded(folder / "four", model)
    stored = [name for path in (folder / "four").glob("*.safetensors") for name in read_header(path).tensors]
    assert ("model/lm_head.weight" in stored) == (not tied)

    out = tiewise.export_sharded(folder / "four", folder / "out")
    audit = tiewise.check(out)
    assert [finding.rule for finding in audit.findings if finding.rule != "B042"] == []  # of rows beyond 64s
    assert audit.claims.tied == tied
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert torch.equal(exported(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.slow
def test_fused_matrices_of_experts_are_put_together_again(trained):
    """Each process holds a run of gate's rows and one of up's, one behind the other."""
    folder = trained / "experts"
    assert "_StridedShard(dim=1, sf=2)" in (folder / "fresh" / "sharded.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder / "start")
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    tiewise.load_sharded(folder / "fresh", model)
    assert same(model.state_dict(), start)
    exported = AutoModelForCausalLM.from_pretrained(tiewise.export_sharded(folder / "fresh", folder / "out"))
    assert same(exported.state_dict(), start)


@pytest.mark.slow
def test_what_transformers_writes_of_a_tied_model_that_is_cut_is_not_tied(trained):
    assert "B013" in [finding.rule for finding in tiewise.check(trained / "tp" / "stock").findings]


@pytest.mark.slow
def test_faults_leave_the_save_before(trained, tmp_path):
    (tmp_path / "fsdp").symlink_to(trained / "fsdp")
    ranks(tmp_path, "refuse,killed")
    for name in KILLED:
        said = (tmp_path / f"{name}.said").read_text()
        assert said == f"another process ended while {tmp_path / name} was saved; {WAY}"
    model = llama()
    with pytest.raises(CheckpointError, match="the save was cut short before it was whole; give the folder of one"):
        tiewise.load_sharded(tmp_path / "new", model)
    for name, step_of in {"stands": 1, "unnamed": 1, "named": 2}.items():
        assert tiewise.load_sharded(tmp_path / name, model) == {"step": step_of}
        assert len(os.listdir(tmp_path / name)) > 3  # what is left over
        tiewise.save_sharded(tmp_path / name, model)
        assert len(os.listdir(tmp_path / name)) == 2


@pytest.mark.parametrize("kind", ["plain", "untied", "bf16", "factored"])
def test_one_process_alone(tmp_path, kind):
    def made():
        model = llama(tied=kind != "untied")
        if kind == "factored":
            tiewise.install(model, "factored:8")
        return model.to(torch.bfloat16) if kind == "bf16" else model

    model = made()
    model.generation_config = GenerationConfig(max_new_tokens=7)
    optimizer = adamw(model)
    step(model, optimizer, 97)
    notes = {"step": 1, "scheduler": {"last_epoch": 1, "names": ["a", None]}}
    tiewise.save_sharded(tmp_path / "save", model, optimizer, notes=notes)
    (tmp_path / "save" / "tokenizer.json").write_text("{}")
    again = made()
    fresh = adamw(again)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1)
    assert tiewise.load_sharded(tmp_path / "save", again, fresh) == notes
    assert same(everything(again, fresh), everything(model, optimizer))
    assert step(again, fresh, 97) == step(model, optimizer, 97)
    assert same(everything(again, fresh), everything(model, optimizer))

    tiewise.load_sharded(tmp_path / "save", model)
    out = tiewise.export_sharded(tmp_path / "save", tmp_path / "out")
    assert (out / "tokenizer.json").read_text() == "{}"
    exported = tiewise.load(out)
    assert exported.generation_config.max_new_tokens == 7
    assert exported.dtype == model.dtype
    assert torch.equal(exported.eval()(IDS).logits, model.eval()(IDS).logits)
    with pytest.raises(CheckpointError, match="not empty"):
        tiewise.export_sharded(tmp_path / "save", out)


def test_a_disk_that_fills_while_exporting_leaves_nothing(tmp_path):
    place = tiewise.save_sharded(tmp_path / "save", llama())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write to .*(File too large|No space)") as caught:
            tiewise.export_sharded(place, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["save"]


def test_a_config_of_somebody_s_own_code_is_not_run(tmp_path):
    place = tiewise.save_sharded(tmp_path / "save", llama())
    index = place / "sharded.json"
    index.write_text(
        index.read_text().replace('"model_type":"llama"', '"model_type":"mine","auto_map":{"AutoConfig":"m.C"}')
    )
    with pytest.raises(CheckpointError, match="of no class that transformers has; load it into your own model"):
        tiewise.export_sharded(place, tmp_path / "out")


def test_what_is_not_what_was_saved_is_refused(tmp_path):
    model = llama()
    place = tiewise.save_sharded(tmp_path / "save", model, adamw(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight was saved as F32 \[97, 16\], and is F32 \[98, 16\]"
    ):
        tiewise.load_sharded(place, llama(98))
    with pytest.raises(CheckpointError, match="and is BF16"):
        tiewise.load_sharded(place, llama().to(torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"0\.bias is not in the save"):
        tiewise.load_sharded(place, torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match="were saved as one parameter, and are two in the model"):
        tiewise.load_sharded(place, llama(tied=False))
    with pytest.raises(RunError, match="groups hold other parameters"):
        tiewise.load_sharded(place, model, torch.optim.AdamW(model.parameters()))
    untied = tiewise.save_sharded(tmp_path / "untied", llama(tied=False))
    with pytest.raises(CheckpointError, match="were saved as two parameters, and are one in the model"):
        tiewise.load_sharded(untied, model)
    with pytest.raises(CheckpointError, match="no save lies there"):
        tiewise.load_sharded(tmp_path, model)
    with pytest.raises(UnsupportedError, match="weight is a tensor without values"):
        tiewise.save_sharded(tmp_path / "meta", torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(RunError, match="notes cannot be kept: Object of type Tensor"):
        tiewise.save_sharded(tmp_path / "save", model, notes={"loss": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="from a model without a config"):
        tiewise.export_sharded(tiewise.save_sharded(tmp_path / "own", torch.nn.Linear(2, 2)), tmp_path / "out")
    assert same(model.state_dict(), before)


@pytest.mark.parametrize(
    ("what", "by", "said"),
    [
        ('"version":1', '"version":2', "of no version"),
        ('"held":[[[0,97]]', '"held":[[[0,96]]', "parts that do not make it up"),
        ('"held":[[[0,97]]', '"held":[[[5,102]]', "parts that do not make it up"),
        ('"process":0', '"process":7', "in no file"),
        ('"dtype":"F32","shape":[97', '"dtype":"F64","shape":[97', "is F32|not stored there"),
        ('"name":"sharded-', '"name":"../sharded-', "outside the folder"),
        ('"files":[', '"files":[7,', "must be an object"),
        ("{", "", "not readable as JSON"),
    ],
)
def test_an_index_that_is_not_true_is_refused(tmp_path, what, by, said):
    model = llama()
    place = tiewise.save_sharded(tmp_path / "save", model)
    index = place / "sharded.json"
    text = index.read_text()
    assert what in text
    index.write_text(text.replace(what, by, 1))
    with pytest.raises((CheckpointError, RunError), match=said) as caught:
        tiewise.load_sharded(place, model)
    assert "\n" not in str(caught.value)
