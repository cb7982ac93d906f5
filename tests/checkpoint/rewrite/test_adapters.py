"""Test `slim` and `merge` on handwritten adapters against sums in numpy, and their refusals."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.checkpoint.tiny_checkpoints import D, V, bpe_tokenizer, llama, table, write_checkpoint

from tiewise.checkpoint.rewrite import merge, slim, tie
from tiewise.core.errors import CheckpointError

E, H, DOWN = "model.embed_tokens", "lm_head", "model.layers.0.mlp.down_proj"
R = 2


def write_adapter(path, tensors, **config):
    """Write a LoRA adapter from tensors named without the prefix."""
    path.mkdir()
    # verbs read the given base and never follow this path
    record = {"peft_type": "LORA", "base_model_name_or_path": "/etc", "r": R, "lora_alpha": 3}
    (path / "adapter_config.json").write_text(json.dumps(record | config, indent=2))
    named = {f"base_model.model.{name}": values for name, values in tensors.items()}
    save_file(named, path / "adapter_model.safetensors", {"format": "pt"})
    return path


def low_rank(module, rows, columns, seed=5, lookup=False):
    a, b = table(R, columns, seed), table(rows, R, seed + 1)
    if lookup:
        return {f"{module}.lora_embedding_A": b.T.copy(), f"{module}.lora_embedding_B": a.T.copy()}
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def with_changed_rows(rows, seed=0):
    """Return the table of the tiny Llama with some rows changed."""
    made = table(seed=seed)
    made[rows] += 1
    return made


BOTH = {f"{E}.weight": with_changed_rows([5, 2]), f"{H}.weight": with_changed_rows([5, 2])}
SAVED = {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}


def rows_of(path):
    """Return (trained rows by module, trainable_token_indices, modules_to_save) of a slim adapter."""
    stored = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    suffix, prefix = ".token_adapter.trainable_tokens_delta", "base_model.model."
    deltas = {n.removeprefix(prefix).removesuffix(suffix): t for n, t in stored.items() if n.endswith(suffix)}
    return deltas, config["trainable_token_indices"], config["modules_to_save"]


def test_slim_keeps_the_rows_that_changed(tmp_path):
    base, fat = llama(tmp_path / "base"), write_adapter(tmp_path / "a", BOTH | low_rank(DOWN, D, 2 * D), **SAVED)
    (fat / "README.md").write_text("mine")
    receipt = slim(fat, tmp_path / "b", base=base)
    deltas, rows, saved = rows_of(tmp_path / "b")
    assert (rows, saved) == ({E: [2, 5]}, ["norm"])
    assert deltas[E].tobytes() == with_changed_rows([5, 2])[[2, 5]].tobytes()
    assert (receipt.logit_change, receipt.input_change) == (0, 0)
    assert receipt.summary.startswith("2 of 24 rows of model.embed_tokens are stored")
    old, new = (load_file(path / "adapter_model.safetensors") for path in (fat, tmp_path / "b"))
    assert all(np.array_equal(new[name], old[name]) for name in old if "lora_" in name)
    assert (tmp_path / "b/README.md").read_text() == "mine"
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (fat, tmp_path / "b")]
    assert configs[1] == configs[0] | {"modules_to_save": saved, "trainable_token_indices": rows}


def test_slim_adds_rows_of_head_copy_to_existing_rows(tmp_path):
    """A bare list of rows belongs to the input table; the rows of the head get a separate entry."""
    tensors = {f"{E}.token_adapter.trainable_tokens_delta": table(1), f"{H}.weight": with_changed_rows([7], seed=2)}
    path = write_adapter(tmp_path / "a", tensors, trainable_token_indices=[3], modules_to_save=["lm_head"])
    slim(path, tmp_path / "b", base=llama(tmp_path / "base", tied=False))
    deltas, rows, saved = rows_of(tmp_path / "b")
    assert set(deltas) == {E, H}
    assert (list(rows.values()), saved) == ([[3], [7]], None)


def test_slim_drops_copies_equal_to_base(tmp_path):
    """The copy may have another type; below a low-rank update PEFT saves it needlessly."""
    base = llama(tmp_path / "base", tensors={f"{E}.weight": table(dtype=ml_dtypes.bfloat16)})
    wide = table(dtype=ml_dtypes.bfloat16).astype(np.float32)
    below = write_adapter(tmp_path / "a", {f"{E}.base_layer.weight": wide} | low_rank(E, V, D, lookup=True))
    slim(below, tmp_path / "b", base=base)
    left = {name.rpartition(".")[2] for name in load_file(tmp_path / "b/adapter_model.safetensors")}
    assert left == {"lora_embedding_A", "lora_embedding_B"}
    same = write_adapter(tmp_path / "c", {f"{E}.weight": wide, f"{H}.weight": wide}, **SAVED)
    with pytest.raises(CheckpointError, match="it only repeats the tables of the base"):
        slim(same, tmp_path / "d", base=base)


def test_slim_keeps_zeros_of_other_sign(tmp_path):
    zeros = table()
    zeros[4] = 0
    other = zeros.copy()
    other[4] = -0.0
    base = llama(tmp_path / "base", tied=False, tensors={f"{E}.weight": zeros})
    slim(write_adapter(tmp_path / "a", {f"{E}.weight": other}, **SAVED), tmp_path / "b", base=base)
    assert rows_of(tmp_path / "b")[0][E].tobytes() == other[4:5].tobytes()


BIASED = {"tensors": {f"{H}.bias": table(1)[0].repeat(3)}}
NO_SLIM = [
    (
        {f"{E}.weight": with_changed_rows([1]), f"{H}.weight": with_changed_rows([2])},
        SAVED,
        {},
        "differs, and the base has one table",
    ),
    ({f"{E}.weight": with_changed_rows([1])}, SAVED, {}, "only model.embed_tokens has a copy"),
    (low_rank(DOWN, D, 2 * D), {}, {}, "no copy of a table"),
    (BOTH, SAVED | {"peft_type": "IA3"}, {}, "not LORA"),
    ({f"{E}.weight": table(seed=9)}, SAVED, {"tied": False}, "24 of 24 rows"),
    ({f"{E}.weight": table(V + 2)}, SAVED, {"tied": False}, "is not a copy of"),
    ({f"{E}.weight": with_changed_rows([1]), f"x.{E}.weight": table()}, SAVED, {"tied": False}, "more than a table"),
    (BOTH, SAVED, BIASED, "the head has a bias"),
    (
        {f"{E}.base_layer.weight": with_changed_rows([1])} | low_rank(E, V, D, lookup=True),
        {},
        {},
        "has 1 changed rows and a low-rank update",
    ),
]


@pytest.mark.parametrize(("tensors", "config", "base", "words"), NO_SLIM)
def test_slim_refuses_unsuitable_adapters(tmp_path, tensors, config, base, words):
    path, base = write_adapter(tmp_path / "a", tensors, **config), llama(tmp_path / "base", **base)
    with pytest.raises(CheckpointError, match=words) as error:
        slim(path, tmp_path / "b", base=base)
    assert error.value.remedy
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "base"]


def test_verbs_distinguish_adapters_from_checkpoints(tmp_path):
    path, base = write_adapter(tmp_path / "a", BOTH), llama(tmp_path / "base")
    for call, words in (
        (lambda: tie(path, tmp_path / "b"), "tiewise adapter merge"),
        (lambda: slim(base, tmp_path / "b", base=base), "slim is for adapters"),
        (lambda: slim(path, tmp_path / "b", base=path), "no input table"),
        (lambda: merge(path, tmp_path / "b", adapter=path), "this is an adapter, without tables to rewrite"),
        (lambda: merge(base, tmp_path / "b", adapter=base), r"adapter_config\.json"),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()


def test_merge_is_exact_sum_rounded_once(tmp_path):
    """Adding in steps would round twice in bfloat16; untouched tensors keep their bytes and files."""
    narrow = {f"{DOWN}.weight": table(D, 2 * D, 1, ml_dtypes.bfloat16), "x.weight": table(D, D, 3)}
    base = llama(tmp_path / "base", tensors=narrow, shards=3)
    path = write_adapter(tmp_path / "a", low_rank(DOWN, D, 2 * D))
    (path / "tokenizer.json").write_text(json.dumps(bpe_tokenizer(V)))
    receipt = merge(base, tmp_path / "b", adapter=path)
    shards = ([load_file(file) for file in path.glob("*.safetensors")] for path in (base, tmp_path / "b"))
    old, new = (first | second | third for first, second, third in shards)
    a, b = (low_rank(DOWN, D, 2 * D)[f"{DOWN}.lora_{end}.weight"].astype(np.float64) for end in "AB")
    wanted = old[f"{DOWN}.weight"].astype(np.float64) + 1.5 * b @ a
    assert np.array_equal(new[f"{DOWN}.weight"], wanted.astype(np.float32).astype(ml_dtypes.bfloat16))
    assert all(np.array_equal(new[name], old[name]) for name in old if name != f"{DOWN}.weight")
    assert len(receipt.rewritten) == 1
    assert len(receipt.linked) + len([f for f in receipt.copied if f.endswith("safetensors")]) == 2
    assert (receipt.logit_change, receipt.input_change) == (0, 0)
    assert [note.partition(":")[0] for note in receipt.notes[1:]] == ["taken from the adapter"]
    assert (tmp_path / "b/tokenizer.json").read_text() == (path / "tokenizer.json").read_text()


def test_merge_reports_measured_and_predicted_logit_change(tmp_path):
    base = llama(tmp_path / "base", tied=False)
    receipt = merge(base, tmp_path / "b", adapter=write_adapter(tmp_path / "a", low_rank(H, V, D), use_rslora=True))
    said = float(next(note for note in receipt.notes if "low-rank update alone" in note).rpartition(" ")[2])
    assert receipt.logit_change == pytest.approx(said, rel=5e-3)
    assert receipt.input_change == 0
    old, new = (load_file(p / "model.safetensors")[f"{H}.weight"] for p in (base, tmp_path / "b"))
    a, b = (low_rank(H, V, D)[f"{H}.lora_{end}.weight"] for end in "AB")
    np.testing.assert_allclose(new - old, 3 / 2**0.5 * b @ a, atol=1e-6)


@pytest.mark.parametrize("stored", ["h.0.attn.c_proj", "transformer.h.0.attn.c_proj"])
def test_merge_transposes_update_of_square_gpt2_matrix(tmp_path, stored):
    prefix = stored.removesuffix("h.0.attn.c_proj")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": D}
    tensors = {f"{prefix}wte.weight": table(), f"{prefix}wpe.weight": table(9), f"{stored}.weight": table(D, D, 4)}
    base = write_checkpoint(tmp_path / "base", config, tensors)
    module = "transformer.h.0.attn.c_proj"  # the class's name, whatever the file's prefix
    merge(base, tmp_path / "b", adapter=write_adapter(tmp_path / "a", low_rank(module, D, D)))
    a, b = (low_rank(module, D, D)[f"{module}.lora_{end}.weight"] for end in "AB")
    found = load_file(tmp_path / "b/model.safetensors")[f"{stored}.weight"]
    np.testing.assert_allclose(found, tensors[f"{stored}.weight"] + 1.5 * (b @ a).T, atol=1e-6)


WRAPPED = {"tensors": {f"_orig_mod.{DOWN}.weight": table(D, 2 * D), f"{DOWN}.weight": None}}
LORA = low_rank(DOWN, D, 2 * D)
TALL = {"alpha_pattern": {"(a|a)*b": 4}}
DELTA = f"{E}.token_adapter.trainable_tokens_delta"
NO_MERGE = [
    (LORA, {"peft_type": "LOHA"}, {}, "not LORA"),
    (LORA, {"target_parameters": ["experts"]}, {}, "trained with target_parameters"),
    (LORA, {"init_lora_weights": "pissa_niter_4"}, {}, "began with pissa"),
    (LORA, TALL, {}, "could take very long"),
    (LORA, {"lora_alpha": "x"}, {}, "no lora_alpha"),
    (LORA, {"lora_alpha": 10**400}, {}, "no lora_alpha"),
    (LORA, {"use_dora": True}, {}, "use_dora"),
    (LORA | {f"{DOWN}.odd": table(2)}, {}, {}, "odd, unknown here"),
    ({f"{DOWN}.lora_A.weight": table(R, 2 * D)}, {}, {}, "half of a low-rank update"),
    (low_rank(DOWN, D, D), {}, {}, "is no update of"),
    (low_rank("model.layers.7.mlp.down_proj", D, D), {}, {}, "the base lacks 1 of its 1 modules"),
    ({f"{DOWN}.bias": table(1)[0]}, {}, {}, "no plain bias"),
    (LORA | low_rank(f"_orig_mod.{DOWN}", D, 2 * D), {}, WRAPPED, "twice, under two names"),
    ({f"{E}.weight": table(V + 4)}, SAVED, {}, "would lose rows"),
    ({DELTA: table(1)}, {"trainable_token_indices": [V]}, {}, f"resize .* --vocab {V + 1} "),
    ({DELTA: table(1)}, {"trainable_token_indices": [-1]}, {}, "are not the 1 rows"),
    ({DELTA: table(2)}, {"trainable_token_indices": [3, 3]}, {}, "are not the 2 rows"),
    ({DELTA: table(2)}, {}, {}, "are not the 0 rows"),
    (LORA, {}, {"config": {"tie_word_embeddings": None, "model_type": "x", "architectures": None}}, ""),
]


@pytest.mark.parametrize(("tensors", "config", "base", "words"), NO_MERGE)
def test_merge_refuses_unsuitable_adapters(tmp_path, tensors, config, base, words):
    path, base = write_adapter(tmp_path / "a", tensors, **config), llama(tmp_path / "base", **base)
    if not words:  # the adapter leaves the ends alone, so their tie may be unknown
        merge(base, tmp_path / "b", adapter=path)
        return
    with pytest.raises(CheckpointError, match=words) as error:
        merge(base, tmp_path / "b", adapter=path)
    assert error.value.remedy
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "base"]


def test_merge_refuses_tokenizer_with_more_tokens_than_rows(tmp_path):
    path = write_adapter(tmp_path / "a", LORA)
    (path / "tokenizer.json").write_text(json.dumps(bpe_tokenizer(V, [(V + 2, "<new>", True)])))
    with pytest.raises(CheckpointError, match=rf"names token {V + 2}.*resize .* --vocab {V + 3} "):
        merge(llama(tmp_path / "base"), tmp_path / "b", adapter=path)


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{E}.weight": np.zeros(0, np.float32), f"{H}.weight": np.zeros(0, np.float32)},
        low_rank(DOWN, D, 2 * D) | {f"{DOWN}.lora_A.weight": np.zeros(0, np.float32)},
    ],
)
def test_merge_and_slim_name_tensors_without_numbers(tmp_path, tensors):
    """peft#2450 was saved under ZeRO-3 without gathering, and a resize of the base would not help."""
    base, empty = llama(tmp_path / "base"), write_adapter(tmp_path / "a", tensors, **SAVED)
    for verb in (
        lambda: merge(base, tmp_path / "b", adapter=empty),
        lambda: slim(empty, tmp_path / "b", base=base),
    ):
        with pytest.raises(CheckpointError, match=r"are empty \(.* F32 \[0\]\).*ZeRO-3.*zero_to_fp32.py"):
            verb()
