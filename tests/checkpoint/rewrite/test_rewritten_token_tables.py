"""Test verbs on models with further token tables against the logits that transformers computes."""

import pytest
import torch
from rewrite_models import config_of, logits, tensors
from tests.checkpoint import saved_models
from tests.checkpoint.tiny_checkpoints import llama_config, table, write_checkpoint

import tiewise
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import factor, resize, tie, untie

V, N = 99, 111
E, H = "model.embed_tokens.weight", "lm_head.weight"
PLE = "embed_tokens_per_layer.weight"
OLD, NEW = torch.arange(3, 43).reshape(2, 20) % 90, torch.arange(N - 20, N).reshape(1, 20)
TEXT = ("Gemma3nForCausalLM", "Gemma4ForCausalLM")
OTHERS = ("Gemma4ForConditionalGeneration", "T5GemmaForConditionalGeneration", "T5Gemma2ForConditionalGeneration")
NEXT, NEXT_HEAD = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"


def save_model(path, name, **changes):
    model = saved_models.tiny(name, **changes).eval()
    model.save_pretrained(path)
    return model


def load_model(path, model):
    return type(model).from_pretrained(path).eval()


def is_sound(path):
    """Return whether `check` reports nothing above info."""
    return not check(path).at_least("warning")


@pytest.mark.parametrize("name", [*TEXT, *OTHERS])
@pytest.mark.parametrize("rows", ["drawn", "zero"])
def test_resize_keeps_old_logits_and_gives_finite_logits_for_new_ids(name, rows, tmp_path):
    model = save_model(tmp_path / "a", name)
    resize(tmp_path / "a", tmp_path / "b", vocab=N, rows=rows)
    made = load_model(tmp_path / "b", model)
    assert torch.equal(logits(made, OLD)[..., :V], logits(model, OLD))
    assert logits(made, NEW).isfinite().all()
    assert logits(made, NEW).shape[-1] == N
    assert is_sound(tmp_path / "a")
    assert is_sound(tmp_path / "b")
    assert not made.config.get_text_config().to_dict().get("vocab_size_per_layer_input", N) - N
    if "Gemma" in name and not name.startswith("T5"):
        (per_layer,) = (value for key, value in tensors(tmp_path / "b").items() if key.endswith(PLE))
        assert len(per_layer) == N
        assert per_layer[V:].any() == (rows == "drawn")


@pytest.mark.parametrize("name", TEXT)
def test_resize_shrinks_and_then_grows_every_table(name, tmp_path):
    model = save_model(tmp_path / "a", name)
    resize(tmp_path / "a", tmp_path / "b", vocab=95, shrink=True)
    resize(tmp_path / "b", tmp_path / "c", multiple_of=64)
    for folder, rows in (("b", 95), ("c", 128)):
        made = load_model(tmp_path / folder, model)
        assert torch.equal(logits(made, OLD)[..., :95], logits(model, OLD)[..., :95])
        assert {len(value) for key, value in tensors(tmp_path / folder).items() if "embed_tokens" in key} == {rows}


def test_resize_adds_per_layer_rows_that_earlier_resize_omitted(tmp_path):
    """Transformers before #45335 resized Gemma 4 so that ids raise; the command that `check` names repairs it."""
    model = save_model(tmp_path / "a", "Gemma4ForCausalLM", vocab_size_per_layer_input=90)
    high = torch.arange(90, V).reshape(1, -1)
    with pytest.raises(IndexError):
        logits(load_model(tmp_path / "a", model), high)
    (found,) = (found for found in check(tmp_path / "a").findings if found.rule == "B017")
    assert f"--vocab {V}" in found.repair
    receipt = resize(tmp_path / "a", tmp_path / "b", vocab=V)
    assert receipt.notes == (f"model.{PLE} lacks rows 90 to 98, which are drawn like the 89 rows in use, with seed 0",)
    made = load_model(tmp_path / "b", model)
    assert logits(made, high).isfinite().all()
    assert torch.equal(logits(made, OLD % 90), logits(model, OLD % 90))
    assert is_sound(tmp_path / "b")


def test_resize_of_gemma3n_keeps_logits_of_ids_without_per_layer_row(tmp_path):
    """The published table has 256 rows fewer than the vocabulary, and these ids read its first row."""
    model = save_model(tmp_path / "a", "Gemma3nForCausalLM", vocab_size_per_layer_input=90)
    assert is_sound(tmp_path / "a")
    receipt = resize(tmp_path / "a", tmp_path / "b", vocab=N)
    assert f"model.{PLE} lacks rows 90 to 98, which repeat its first row, which these ids read before" in receipt.notes
    made, every = load_model(tmp_path / "b", model), torch.arange(V).reshape(1, -1)
    assert torch.equal(logits(made, every)[..., :V], logits(model, every))
    assert logits(made, NEW).isfinite().all()
    before, after = (tensors(tmp_path / each)[f"model.{PLE}"] for each in "ab")
    assert torch.equal(after[90:V], before[:1].expand(9, -1))
    assert (after[V:] != before[0]).any(dim=1).all()


def test_resize_keeps_mtp_tables_equal_to_main_tables(tmp_path):
    model = save_model(tmp_path / "a", "DeepseekV3ForCausalLM")
    stored = tensors(tmp_path / "a")
    more = {NEXT: stored[E], NEXT_HEAD: stored[H]} | {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    everything = {key: value.numpy() for key, value in (stored | more).items()}
    write_checkpoint(tmp_path / "b", config_of(tmp_path / "a") | {"num_nextn_predict_layers": 1}, everything)
    assert is_sound(tmp_path / "b")
    resize(tmp_path / "b", tmp_path / "c", vocab=N)
    made = tensors(tmp_path / "c")
    assert torch.equal(made[NEXT], made[E])
    assert torch.equal(made[NEXT_HEAD], made[H])
    assert made[NEXT].shape == (N, 32)
    assert torch.equal(logits(load_model(tmp_path / "c", model), OLD)[..., :V], logits(model, OLD))
    assert is_sound(tmp_path / "c")


def test_resize_keeps_byte_hash_table_of_blt(tmp_path):
    hashed = "model.encoder_hash_tok_embedding.weight"
    ends = {E: table(64), H: table(64, seed=1), hashed: table(40)}
    resize(write_checkpoint(tmp_path / "a", llama_config(False, 64), ends), tmp_path / "b", vocab=70)
    assert len(tensors(tmp_path / "b")[hashed]) == 40


@pytest.mark.parametrize("keep", ["input", "output", "mean"])
def test_tie_replaces_mtp_copies_of_ends_by_tied_table(keep, tmp_path):
    ends = {E: table(64), H: table(64, seed=1)}
    own = table(64, seed=5)
    config = llama_config(False, 64) | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    further = {NEXT: ends[E], NEXT_HEAD: ends[H], "model.layers.3.embed_tokens.weight": own}
    write_checkpoint(tmp_path / "a", config | {"num_hidden_layers": 2}, ends | further)
    receipt = tie(tmp_path / "a", tmp_path / "b", keep=keep)
    made = tensors(tmp_path / "b")
    assert H not in made
    assert torch.equal(made[NEXT], made[E])
    assert torch.equal(made[NEXT_HEAD], made[E])
    assert torch.equal(made["model.layers.3.embed_tokens.weight"], torch.from_numpy(own))
    copies = [NEXT_HEAD] if keep == "input" else [NEXT, NEXT_HEAD]
    assert [note.split()[0] for note in receipt.notes if "changed with it" in note] == copies


@pytest.mark.parametrize("name", TEXT)
def test_untie_factor_and_undo_keep_per_layer_tables(name, tmp_path):
    model = save_model(tmp_path / "a", name)
    untie(tmp_path / "a", tmp_path / "b")
    assert torch.equal(logits(load_model(tmp_path / "b", model), OLD), logits(model, OLD))
    receipt = factor(tmp_path / "a", tmp_path / "c", rank=12)
    assert f"only the two ends are factored; these tables stay as they are: model.{PLE}" in receipt.notes
    factor(tmp_path / "c", tmp_path / "d", undo=True)
    narrow, dense = tiewise.load(tmp_path / "c").eval(), load_model(tmp_path / "d", model)
    assert torch.allclose(logits(narrow, OLD), logits(dense, OLD), atol=1e-4)
    for folder in "bcd":
        assert torch.equal(tensors(tmp_path / folder)[f"model.{PLE}"], tensors(tmp_path / "a")[f"model.{PLE}"])
