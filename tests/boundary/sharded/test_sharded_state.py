"""Sharded training states that two and four processes save and one process loads and exports.

The expected tensors are those that torch gathers, or those of the folder from which the model was loaded.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tr
from sharded_ranks import CASES, KILLED, adamw, gather_state, limit_file_size, step

import tiewise
from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WAY = "the folder holds this save or the one before it, whole"
IDS = torch.tensor([[0, 1, 2, 2, 1]])


def llama(vocab=97, tied=True):
    torch.manual_seed(0)
    names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    return tr.LlamaForCausalLM(tr.LlamaConfig(vocab_size=vocab, num_key_value_heads=4, **SIZES, **names))


def tensors_equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def run_ranks(folder, stages):
    """Run stages in new processes; if one fails, show its traceback."""
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("sharded_ranks.py"), folder, stages]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "terminate called" not in done.stderr


def assert_refused(error, says, call, *arguments, **options):
    with pytest.raises(error, match=says) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name, (vocab, tied, *_) in CASES.items():
        llama(vocab, tied).save_pretrained(folder / name / "start")
    torch.manual_seed(0)
    names = {"num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 97}
    tr.MixtralForCausalLM(tr.MixtralConfig(**SIZES, **names)).save_pretrained(folder / "experts" / "start")
    run_ranks(folder, "save,resume")
    return folder


def load_saves(folder, *saves):
    """Load each of these saves into a model and compare it with the folder `start`."""
    model = tr.AutoModelForCausalLM.from_pretrained(folder / "start")
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for save in saves:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1)
        assert tiewise.boundary.load_sharded(folder / save, model) == {}
        assert tensors_equal(model.state_dict(), start)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_process_loads_what_two_and_four_processes_saved(saved_runs, case):
    folder, (vocab, tied, *_) = saved_runs / case, CASES[case]
    model = load_saves(folder, "fresh", "fresh4")
    whole = torch.load(folder / "whole.pt")
    for save in ("two", "four"):
        optimizer = adamw(model)
        assert tiewise.boundary.load_sharded(folder / save, model, optimizer) == {"step": 3}
        assert tensors_equal(gather_state(model, optimizer), whole)
        step(model, optimizer, vocab)
    assert len(list((folder / "two").iterdir())) == 3
    tiewise.boundary.load_sharded(folder / "four", model)
    stored = [name for path in (folder / "four").glob("*.safetensors") for name in read_header(path).tensors]
    assert ("model/lm_head.weight" in stored) == (not tied)

    out = tiewise.boundary.export_sharded(folder / "four", folder / "out")
    audit = tiewise.check(out)
    assert [
        finding.rule for finding in audit.findings if finding.rule != "B042"
    ] == []  # B042 reports table sizes that are no multiple of 64
    assert audit.claims.tied == tied
    exported = tr.AutoModelForCausalLM.from_pretrained(out).eval()
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert torch.equal(exported(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.slow
def test_load_and_export_reassemble_fused_expert_matrices(saved_runs):
    """Each process holds consecutive rows of gate, followed by consecutive rows of up."""
    folder = saved_runs / "experts"
    assert "_StridedShard(dim=1, sf=2)" in (folder / "fresh" / "sharded.json").read_text()
    model = load_saves(folder, "fresh")
    exported = tr.AutoModelForCausalLM.from_pretrained(
        tiewise.boundary.export_sharded(folder / "fresh", folder / "out")
    )
    assert tensors_equal(exported.state_dict(), model.state_dict())


@pytest.mark.slow
def test_transformers_saves_a_tied_sharded_model_untied(saved_runs):
    assert "B013" in [finding.rule for finding in tiewise.check(saved_runs / "tp" / "stock").findings]


@pytest.mark.slow
def test_failed_save_keeps_the_previous_save(saved_runs, tmp_path):
    (tmp_path / "fsdp").symlink_to(saved_runs / "fsdp")
    run_ranks(tmp_path, "refuse,killed")
    for name in KILLED:
        said = (tmp_path / f"{name}.said").read_text()
        assert said == f"another process ended while {tmp_path / name} was saved; {WAY}"
    model = llama()
    cut = "the save was cut short before it was whole; give the folder of one"
    assert_refused(CheckpointError, cut, tiewise.boundary.load_sharded, tmp_path / "new", model)
    for name, step_of in {"stands": 1, "unnamed": 1, "named": 2}.items():
        assert tiewise.boundary.load_sharded(tmp_path / name, model) == {"step": step_of}
        assert len(os.listdir(tmp_path / name)) > 3  # files of the failed save remain
        tiewise.boundary.save_sharded(tmp_path / name, model)
        assert len(os.listdir(tmp_path / name)) == 2


@pytest.mark.parametrize("kind", ["plain", "untied", "bf16", "factored"])
def test_one_process_saves_loads_and_exports_exactly(tmp_path, kind):
    def make_model():
        model = llama(tied=kind != "untied")
        if kind == "factored":
            tiewise.install(model, "factored:8")
        return model.to(torch.bfloat16) if kind == "bf16" else model

    model = make_model()
    model.config.time_step_limit = [0.0, math.inf]  # as in the config of Mamba
    model.generation_config = tr.GenerationConfig(max_new_tokens=7)
    optimizer = adamw(model)
    step(model, optimizer, 97)
    notes = {"step": 1, "scheduler": {"last_epoch": 1, "names": ["a", None], "best": math.inf}}
    tiewise.boundary.save_sharded(tmp_path / "save", model, optimizer, notes=notes)
    (tmp_path / "save" / "tokenizer.json").write_text("{}")
    again = make_model()
    fresh = adamw(again)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1)
    assert tiewise.boundary.load_sharded(tmp_path / "save", again, fresh) == notes
    assert tensors_equal(gather_state(again, fresh), gather_state(model, optimizer))
    assert step(again, fresh, 97) == step(model, optimizer, 97)
    assert tensors_equal(gather_state(again, fresh), gather_state(model, optimizer))

    tiewise.boundary.load_sharded(tmp_path / "save", model)
    out = tiewise.boundary.export_sharded(tmp_path / "save", tmp_path / "out")
    assert (out / "tokenizer.json").read_text() == "{}"
    exported = tiewise.load(out)
    assert exported.generation_config.max_new_tokens == 7
    assert exported.config.time_step_limit == [0.0, math.inf]
    assert exported.dtype == model.dtype
    assert torch.equal(exported.eval()(IDS).logits, model.eval()(IDS).logits)
    assert_refused(CheckpointError, "not empty", tiewise.boundary.export_sharded, tmp_path / "save", out)


def test_optimizer_option_none_is_restored(tmp_path):
    """Adafactor's first eps is None by default."""
    model = torch.nn.Linear(3, 3)
    one, other = (torch.optim.Adafactor(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    model(torch.ones(2, 3)).sum().backward()
    one.step()
    tiewise.boundary.load_sharded(tiewise.boundary.save_sharded(tmp_path / "save", model, one), model, other)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("into", [0.5, torch.tensor(0.5)], ids=repr)
def test_learning_rate_tensor_is_restored(tmp_path, into):
    """`capturable` and compiled optimizers have a tensor as learning rate."""
    model = torch.nn.Linear(3, 3)
    rates = {"lr": torch.tensor(0.1), "betas": (0.8, 0.9)}
    optimizer, other = torch.optim.AdamW(model.parameters(), **rates), torch.optim.AdamW(model.parameters(), lr=into)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tiewise.boundary.load_sharded(tiewise.boundary.save_sharded(tmp_path / "save", model, optimizer), model, other)
    (group,) = other.param_groups
    assert float(group["lr"]) == float(torch.tensor(0.1))
    assert group["betas"] == (0.8, 0.9)  # a tuple as in AdamW, although JSON has only lists
    assert isinstance(group["lr"], torch.Tensor) == isinstance(into, torch.Tensor)
    other.step()


def test_export_to_a_full_disk_leaves_no_files(tmp_path):
    place = tiewise.boundary.save_sharded(tmp_path / "save", llama())
    for most in (100, 20_000):  # bytes of a file: less than the config has, which tiewise writes, and than the weights
        with limit_file_size(most):
            full = "out: a file became too large .File too large"
            assert_refused(CheckpointError, full, tiewise.boundary.export_sharded, place, tmp_path / "out")
    assert os.listdir(tmp_path) == ["save"]


def test_export_refuses_a_config_with_remote_code(tmp_path):
    place = tiewise.boundary.save_sharded(tmp_path / "save", llama())
    index, theirs = place / "sharded.json", '"model_type":"mine","auto_map":{"AutoConfig":"m.C"}'
    index.write_text(index.read_text().replace('"model_type":"llama"', theirs))
    own = "of no class that transformers has; load it into your own model"
    assert_refused(CheckpointError, own, tiewise.boundary.export_sharded, place, tmp_path / "out")


def test_load_sharded_refuses_a_model_that_differs_from_the_save(tmp_path):
    model, load, save = llama(), tiewise.boundary.load_sharded, tiewise.boundary.save_sharded
    place, untied = save(tmp_path / "save", model, adamw(model)), save(tmp_path / "untied", llama(tied=False))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = r"embed_tokens.weight was saved as F32 \[97, 16\], and is F32 \[98, 16\]"
    assert_refused(CheckpointError, other, load, place, llama(98))
    assert_refused(CheckpointError, "and is BF16", load, place, llama().to(torch.bfloat16))
    assert_refused(
        CheckpointError, r"0\.bias is not in the save", load, place, torch.nn.Sequential(torch.nn.Linear(2, 2))
    )
    assert_refused(CheckpointError, "saved as one parameter, and are two in the model", load, place, llama(tied=False))
    assert_refused(CheckpointError, "saved as two parameters, and are one in the model", load, untied, model)
    assert_refused(RunError, "groups hold other parameters", load, place, model, torch.optim.AdamW(model.parameters()))
    assert_refused(CheckpointError, "no save lies there", load, tmp_path, model)
    meta, tensor = torch.nn.Linear(2, 2, device="meta"), torch.tensor(1.0)
    assert_refused(UnsupportedError, "weight is a tensor without values", save, tmp_path / "meta", meta)
    assert_refused(RunError, "notes cannot be kept: Object of type Tensor", save, place, model, notes={"loss": tensor})
    own = save(tmp_path / "own", torch.nn.Linear(2, 2))
    assert_refused(
        CheckpointError, "from a model without a config", tiewise.boundary.export_sharded, own, tmp_path / "out"
    )
    assert tensors_equal(model.state_dict(), before)


@pytest.mark.parametrize(
    ("what", "by", "said"),
    [
        ('"version":1', '"version":2', "of no version"),
        ('"held":[[[0,97]]', '"held":[[[5,102]]', "parts that do not make it up"),
        ('"process":0', '"process":7', "in no file"),
        ('"layout":0', '"layout":99', "no known type or layout"),
        ('"lm_head.weight":"model', '"lm_head.weight":"other', "alias of a tensor that is not kept"),
        ('"dtype":"F32","shape":[97', '"dtype":"F64","shape":[97', "is F32|not stored there"),
        ('"name":"sharded-', '"name":"../sharded-', "outside the folder"),
        ('"files":[', '"files":[7,', "must be an object"),
        ("{", "", "not readable as JSON"),
    ],
)
def test_load_sharded_refuses_an_inconsistent_index(tmp_path, what, by, said):
    model = llama()
    place = tiewise.boundary.save_sharded(tmp_path / "save", model)
    index = place / "sharded.json"
    text = index.read_text()
    assert what in text
    index.write_text(text.replace(what, by, 1))
    assert_refused((CheckpointError, RunError), said, tiewise.boundary.load_sharded, place, model)
