"""Test `factor` against numpy's singular value decomposition and transformers' loads of the result."""

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import FAMILIES, V, config_of, ends, logits, same_table, saved, store, tensors, truncated
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tests.boundary.tiny_models import sizes
from tests.checkpoint.tiny_checkpoints import llama, table

import tiewise.hf
from tiewise.checkpoint.rewrite import factor
from tiewise.checkpoint.rewrite.low_rank import low_rank, memory_needed
from tiewise.checkpoint.rewrite.token_counts import read_counts
from tiewise.core.errors import CheckpointError, InstallError
from tiewise.core.progress import listen_to_progress, progress_of
from tiewise.core.spec import largest_rank

AUTO = {"bert": hf.AutoModelForMaskedLM, "roberta": hf.AutoModelForMaskedLM}
AUTO |= dict.fromkeys(("t5", "t5_v11", "bart", "marian"), hf.AutoModelForSeq2SeqLM)


# linear algebra


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    width=st.integers(2, 24),
    rank=st.integers(1, 24),
    decay=st.floats(0, 3),
    shift=st.floats(-20, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_low_rank_matches_error_of_numpy_svd(rows, width, rank, decay, shift, seed):
    rank = min(rank, width)
    matrix = np.random.default_rng(seed).normal(size=(rows, width)) * np.exp(-decay * np.arange(width)) + shift
    matrix = matrix.astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        found = low_rank(store(Path(folder), t=matrix)["t"], rank)
    wide, q = matrix.astype(np.float64), found.basis
    size = np.linalg.norm(wide)
    singular = np.zeros(width)
    singular[: min(rows, width)] = np.linalg.svd(wide, compute_uv=False)
    best = np.linalg.norm(singular[rank:])
    # eigenvalues of WᵀW carry an error of D·ε·‖WᵀW‖, so the root of a zero eigenvalue may reach this size
    floor = np.sqrt(width * np.finfo(float).eps) * size
    np.testing.assert_allclose(q.T @ q, np.eye(rank), atol=1e-12)
    error = np.linalg.norm(wide - wide @ q @ q.T)
    assert best - 1e-12 * size <= error <= np.hypot(best, floor) * (1 + 1e-6)
    np.testing.assert_allclose(np.linalg.norm(found.singular[rank:]), best, rtol=1e-6, atol=floor)
    np.testing.assert_allclose(found.singular, singular, rtol=1e-6, atol=floor)


def test_low_rank_in_pieces_equals_whole_and_reports_progress(tmp_path, monkeypatch):
    matrix = table(301, 37, seed=3, dtype=ml_dtypes.bfloat16)
    whole = low_rank(store(tmp_path, t=matrix)["t"], 5)
    module = sys.modules[low_rank.__module__]
    monkeypatch.setattr(module, "GRAM_BYTES", 8 * 37 * 7)
    ticks = []
    with listen_to_progress(lambda what, done, total: ticks.append(done)), progress_of("it", matrix.nbytes):
        pieces = low_rank(store(tmp_path, t=matrix)["t"], 5)
    assert len(ticks) == 43
    assert ticks[-1] == matrix.nbytes
    np.testing.assert_allclose(pieces.basis, whole.basis, atol=1e-12)


@given(rows=st.integers(1, 10**6), width=st.integers(1, 10**4), maps=st.integers(1, 2))
def test_largest_rank_returns_last_rank_that_saves_numbers(rows, width, maps):
    def numbers(k):
        return k * (rows + maps * width)

    most = largest_rank(rows, width, maps)
    assert numbers(most) < rows * width <= numbers(most + 1)


# the result as transformers loads it


SOME = [(name, True) for name in ("llama", "t5", "bert", "bart", "opt_350m")] + [("llama", False), ("t5", False)]
REST = [case for case in product(FAMILIES, (True, False)) if case not in SOME]


@pytest.mark.parametrize(("name", "tied"), SOME + [pytest.param(*case, marks=pytest.mark.slow) for case in REST])
def test_factor_equals_saved_install_and_loads_as_best_approximation(name, tied, tmp_path):
    model, spec = saved(tmp_path / "a", name, tied), "factored:5" if tied else "factored-untied:5"
    assert same_table(model) == tied
    receipt = factor(tmp_path / "a", tmp_path / "b", rank=5, force=not tied)
    installed = type(model).from_pretrained(tmp_path / "a")
    tiewise.install(installed, spec)
    installed.save_pretrained(tmp_path / "c")
    ours, theirs = tensors(tmp_path / "b"), tensors(tmp_path / "c")
    if (name, tied) != ("gpt_neox", True):  # transformers saves its head map as `lm_head`'s, and loads both names
        assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    assert receipt.bytes_after == sum(t.nbytes for t in theirs.values()) < receipt.bytes_before
    assert config_of(tmp_path / "b") == config_of(tmp_path / "c")
    lookup, head = ends(model)
    for end in (lookup,) if tied else (lookup, head):
        end.weight.copy_(torch.from_numpy(truncated(end.weight.numpy(), 5)))
    auto = AUTO.get(name, hf.AutoModelForCausalLM)
    for loaded in (auto.from_pretrained(tmp_path / "b"), tiewise.hf.load(tmp_path / "b")):
        assert loaded.config.tiewise_boundary == spec
        assert loaded.get_output_embeddings().weight.shape == (V, 5)
        assert same_table(loaded) == tied
        torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factor_keeps_half_precision_and_shards(dtype, tmp_path):
    model = saved(tmp_path / "a", "llama", False, dtype, "3KB")
    before = {p.name for p in (tmp_path / "a").glob("*.safetensors")}
    assert len(before) > 2
    receipt = factor(tmp_path / "a", tmp_path / "b", rank=5)
    assert receipt.bytes_after < receipt.bytes_before
    assert {p.name for p in (tmp_path / "b").glob("*.safetensors")} == before
    loaded = tiewise.hf.load(tmp_path / "b")
    assert loaded.dtype == dtype
    for dense, old in zip(ends(tiewise.hf.plain_copy(loaded.double())), ends(model), strict=True):
        wide = old.weight.double().numpy()
        # each entry of both factors is rounded by half a unit in its last place; the map has five columns of length 1
        rounding = 1.01 * torch.finfo(dtype).eps / 2 * (1 + math.sqrt(5)) * np.linalg.norm(wide)
        assert np.linalg.norm(dense.weight.detach().numpy() - truncated(wide, 5)) <= rounding


# reports and refusals


@pytest.mark.parametrize("tied", [True, False])
def test_factor_reports_errors_that_match_measured_ones(tied, tmp_path):
    llama(tmp_path / "a", tied, rows=64, width=12)
    counts = np.zeros(64, int)
    counts[:10], counts[10:30] = 3, 250
    receipt = factor(tmp_path / "a", tmp_path / "b", rank=3, counts=counts.tolist())
    old, made = (load_file(tmp_path / end / "model.safetensors") for end in "ab")
    maps = {"model.embed_tokens": "model.embed_tokens.in_map.weight"} | ({} if tied else {"lm_head": None})
    for end, in_map in maps.items():
        wide = old[f"{end}.weight"].double().numpy()
        matrix = made[in_map].T if in_map else made["lm_head.out_map.weight"]
        error = made[f"{end}.weight"].double().numpy() @ matrix.double().numpy() - wide
        for label, chosen in {"": counts > -1, "0": counts == 0, "1–9": counts == 3, "100–999": counts == 250}.items():
            said = next(n for n in receipt.notes if n.startswith(end) and (f"seen {label} times" in n or not label))
            relative = np.linalg.norm(error[chosen]) / np.linalg.norm(wide[chosen])
            assert f"relative error {relative:.4g}" in said
            assert not label or f" {chosen.sum()} tokens" in said
        if end == "model.embed_tokens":
            assert receipt.input_change == pytest.approx(np.linalg.norm(error, axis=1).max(), rel=1e-9)
    # other random vectors of unit root mean square: their largest change must be near the reported one
    hidden = np.random.default_rng(1).normal(size=(4096, 12))
    hidden /= np.sqrt(np.square(hidden).mean(1, keepdims=True))
    largest = np.abs(hidden @ error.T).max()
    assert 0.6 * largest < receipt.logit_change <= math.sqrt(12) * np.linalg.norm(error, axis=1).max()


@pytest.mark.parametrize(("seed", "spec"), [(0, "factored:7"), (9, "factored-untied:7")])
def test_factor_drops_equal_head_and_factors_different_head_with_force(seed, spec, tmp_path):
    llama(tmp_path / "a", True, rows=40, width=12, head=table(40, 12, seed))
    receipt = factor(tmp_path / "a", tmp_path / "b", rank=7, force=bool(seed))  # the largest rank that saves
    assert receipt.dropped == (() if seed else ("lm_head.weight",))
    assert ("lm_head.weight" in load_file(tmp_path / "b" / "model.safetensors")) == bool(seed)
    assert config_of(tmp_path / "b")["tiewise_boundary"] == spec
    assert receipt.bytes_after < receipt.bytes_before


def test_factor_refuses_if_memory_is_insufficient(tmp_path, monkeypatch):
    llama(tmp_path / "a", rows=40, width=12)
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable:       3 kB\n")
    monkeypatch.setattr("tiewise.checkpoint.untrusted.MEMINFO", str(tmp_path / "meminfo"))
    with pytest.raises(CheckpointError, match=r"needs \d+ MB of memory, and 3.07 kB are free"):
        factor(tmp_path / "a", tmp_path / "b", rank=3)
    monkeypatch.setattr("tiewise.checkpoint.untrusted.MEMINFO", str(tmp_path / "nothing"))
    factor(tmp_path / "a", tmp_path / "b", rank=3)


@pytest.mark.slow
def test_low_rank_uses_at_most_announced_memory(tmp_path):
    width, rank = 2048, 512
    save_file({"t": table(9000, width, dtype=np.float16)}, tmp_path / "t.safetensors")
    code = (
        "import re, sys; import numpy as np\n"
        "from tiewise.checkpoint.stored import read_header\n"
        "from tiewise.checkpoint.rewrite.low_rank import low_rank\n"
        "np.linalg.eigh(np.eye(300) @ np.eye(300))\n"  # excludes the library's one-time memory
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        f"before = peak(); low_rank(read_header(sys.argv[1]).tensors['t'], {rank}); print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t.safetensors")]
    said = subprocess.check_output(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert 0.6 * memory_needed(width, rank) < int(said) <= memory_needed(width, rank)


# token counts


VALUES = [0, 1, 9, 10, 12345, 0, 7]
COUNTED = {
    ".json": lambda path: path.write_text(json.dumps(VALUES)),
    ".map.json": lambda path: path.write_text(json.dumps({str(i): n for i, n in enumerate(VALUES) if n})),
    ".npy": lambda path: np.save(path, np.array(VALUES, np.int32)),
    ".safetensors": lambda path: save_file({"counts": np.array(VALUES)}, path),
    ".txt": lambda path: path.write_text("\n".join(map(str, VALUES)) + "\n"),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_read_counts_reads_every_file_format(kind, tmp_path):
    COUNTED[kind](tmp_path / f"counts{kind}")
    assert read_counts(tmp_path / f"counts{kind}", 9).tolist() == [*VALUES, 0, 0]


PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"x": 1}], object), allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"[1, 2, -3]", "no token counts"),
        ("a.json", b'{"x": 3}', "no token counts"),
        ("a.json", b'{"-1": 3}', "no token ids"),
        ("a.json", b'{"99999999999999": 3}', "no token ids"),
        ("a.json", b"[1, [2]]", "no token counts"),
        ("a.json", b"[1, NaN]", "no token counts"),
        ("a.json", b"17", "no token counts"),
        ("a.json", b"[" + b"1," * 12 + b"1]", "counts token 12, and the table has 10 rows"),
        ("a.npy", b"not numpy", "no token counts"),
        ("a.npy", PICKLED.getvalue(), "no token counts"),
        ("a.safetensors", b"short", "no safetensors file"),
        ("a.txt", b"1\ntwo\n", "no token counts"),
    ],
)
def test_read_counts_refuses_files_without_valid_counts(name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        read_counts(tmp_path / name, 10)


@pytest.mark.parametrize("counts", [[1, [2]], ["one"], [1j], 3, [1, None], None, {"x": 1}], ids=repr)
def test_read_counts_refuses_values_that_are_no_counts(counts):
    with pytest.raises(CheckpointError, match=r"counts: .*no token counts"):
        read_counts(counts, 10)


def test_load_of_factored_whisper_needs_batch(tmp_path):
    """Whisper needs more than token ids, so `load` verifies it on the given batch or asks for one."""
    size = sizes("d_model=16 num_mel_bins=8 vocab_size=100 max_source_positions=20 max_target_positions=20")
    for part in ("encoder", "decoder"):
        size |= sizes(f"{part}_layers=1 {part}_attention_heads=2 {part}_ffn_dim=16")
    size |= sizes("pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=1")
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**size)).eval().requires_grad_(False)
    model.save_pretrained(tmp_path / "a")
    factor(tmp_path / "a", tmp_path / "b", rank=5)
    batch = {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 100, (2, 6))}
    with pytest.raises(InstallError, match=r"pass batch="):
        tiewise.load(tmp_path / "b")
    loaded = tiewise.load(tmp_path / "b", batch=batch).eval()
    model.proj_out.weight.copy_(torch.from_numpy(truncated(model.proj_out.weight.numpy(), 5)))
    torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss, atol=1e-5, rtol=1e-5)
