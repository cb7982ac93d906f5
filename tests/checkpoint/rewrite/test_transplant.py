"""Test the rows that `transplant` copies and computes, with tokenizers and transformers as oracles."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import config_of, logits, same_table, saved, tensors
from tests.checkpoint.tiny_checkpoints import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tiewise
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import factor, transplant
from tiewise.checkpoint.rewrite.verbs.transplant import new_id_values, pursue, spell
from tiewise.checkpoint.token_bytes import read_token_bytes
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import listen_to_progress

OLD = ["Ġ", "a", "b", "c", "g", "i", "n", "q", "u", "Ġa", "qu", "ab", "Ġab", "ing", "Ġing"]


def byte_level(folder, pieces, **special):
    """Write a byte-level BPE of these pieces, whose merges form every piece, and special tokens by role."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [(p[:n], p[n:]) for p in pieces for n in range(1, len(p)) if p[:n] in vocab and p[n:] in vocab]
    engine = Tokenizer(models.BPE(vocab, merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return save_tokenizer(folder, engine, special)


def sentence_pieces(folder, pieces, **special):
    """Write a SentencePiece BPE with ▁ for spaces, byte tokens, and special tokens by role."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    engine = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return save_tokenizer(folder, engine, special)


def save_tokenizer(folder, engine, special):
    PreTrainedTokenizerFast(tokenizer_object=engine, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path):
    """Save a Llama of 61 rows with the old vocabulary, whose configs name its begin and end token."""
    path = tmp_path / "source"
    saved(path, "llama", tied=False)
    byte_level(path, OLD, bos_token="<s>", eos_token="</s>")
    ids = {"bos_token_id": len(OLD), "eos_token_id": len(OLD) + 1, "pad_token_id": None}
    for name, record in (("config.json", config_of(path)), ("generation_config.json", {})):
        (path / name).write_text(json.dumps(record | ids))
    return path


def test_read_token_bytes_returns_bytes_roles_and_rows(tmp_path):
    ours = read_token_bytes(open_folder(byte_level(tmp_path / "a", ["Ġthe", "Ã", "©", "Ã©"], eos_token="<e>")))
    assert dict(ours.writes) == {0: b" the", 1: b"\xc3", 2: b"\xa9", 3: "é".encode()}
    assert (ours.roles, ours.pieces[4], ours.rows) == ({"eos_token": 4}, "<e>", 5)
    pieces = ["<unk>", "<0xC3>", "▁the", "é", "Ġ"]
    theirs = read_token_bytes(open_folder(sentence_pieces(tmp_path / "b", pieces, unk_token="<unk>")))
    assert dict(theirs.writes) == {1: b"\xc3", 2: b" the", 3: "é".encode(), 4: "Ġ".encode()}


@settings(max_examples=60)
@given(st.binary(max_size=12), st.sets(st.binary(min_size=1, max_size=3), max_size=8))
def test_spell_returns_known_pieces_in_order(writes, known):
    ids = {piece: number for number, piece in enumerate(sorted(known))}
    texts = sorted(known)
    found = spell(writes, ids, 3)
    rest = writes  # contains the pieces in this order; no piece starts between them
    for number in found:
        before, piece, rest = rest.partition(texts[number])
        assert piece
        assert not any(before[at:].startswith(one) for at in range(len(before)) for one in known)
    if all(bytes([byte]) in known for byte in writes):
        assert b"".join(texts[number] for number in found) == writes


def test_transplant_copies_shared_rows_and_averages_pieces_for_others(source, tmp_path):
    new = ["c", "Ġab", "quing", "b", "é", "z"]
    byte_level(tmp_path / "new", [*new[:4], "Ã", "z"], eos_token="<end>", pad_token="<pad>")
    receipt = transplant(source, tmp_path / "to", tokenizer=tmp_path / "new")
    old, made = tensors(source), tensors(tmp_path / "to")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        a, b = old[name], made[name]
        assert b.shape == (8, a.shape[1])
        for row, text in ((0, "c"), (1, "Ġab"), (3, "b")):
            assert torch.equal(b[row], a[OLD.index(text)])
        assert torch.equal(b[6], a[len(OLD) + 1])  # the end token is matched by role, not by name
        shared = a[[OLD.index("b"), OLD.index("c"), OLD.index("Ġab"), len(OLD) + 1]].double().mean(0)
        pieces = a[[OLD.index("qu"), OLD.index("ing")]].double().mean(0)
        torch.testing.assert_close(b[2], (pieces / 2 + shared / 2).float(), rtol=1e-6, atol=1e-7)
        for row in (4, 5, 7):  # the old vocabulary spells none of these
            torch.testing.assert_close(b[row], shared.float(), rtol=1e-6, atol=1e-7)
    assert {n for n in made if not torch.equal(made[n], old[n])} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert receipt.summary == "4 of 8 tokens keep their rows; 4 get new rows"
    assert receipt.notes[:2] == (
        "1 row: the mean of the old tokens that spell it, halfway to the mean of shared rows",
        "3 rows: the mean of shared rows, as the old vocabulary cannot spell the token",
    )


def test_transplant_fills_rows_of_omitted_ids_with_mean(source, tmp_path):
    """The last token keeps its id, and rows of omitted ids hold the mean."""
    file = byte_level(tmp_path / "new", ["c", "b"], eos_token="<end>") / "tokenizer.json"
    record = json.loads(file.read_text())
    record["model"]["vocab"]["Ġab"] = 9
    file.write_text(json.dumps(record))
    receipt = transplant(source, tmp_path / "to", tokenizer=tmp_path / "new")
    old, made = (tensors(path)["model.embed_tokens.weight"] for path in (source, tmp_path / "to"))
    shared = [OLD.index("c"), OLD.index("b"), len(OLD) + 1, OLD.index("Ġab")]
    assert torch.equal(made[[0, 1, 2, 9]], old[shared])
    mean = old[shared].double().mean(0).float()
    torch.testing.assert_close(made[3:9], mean.expand(6, -1), rtol=1e-6, atol=1e-7)
    assert receipt.summary.startswith("4 of 4 tokens keep their rows")
    assert any(note.startswith("6 rows without a token") for note in receipt.notes)
    assert not any("cannot spell" in note for note in receipt.notes)


def test_transplant_writes_ids_and_files_of_new_tokenizer_only(source, tmp_path):
    (source / "merges.txt").write_text("old")
    byte_level(tmp_path / "new", OLD[::-1], eos_token="<end>", pad_token="<pad>")
    (tmp_path / "new" / "chat_template.jinja").write_text("{{ messages }}")
    receipt = transplant(source, tmp_path / "to", tokenizer=tmp_path / "new")
    to = tmp_path / "to"
    for record in (config_of(to), json.loads((to / "generation_config.json").read_text())):
        assert (record["eos_token_id"], record["bos_token_id"], record["pad_token_id"]) == (len(OLD), None, None)
    assert config_of(to)["vocab_size"] == len(OLD) + 2
    assert "bos_token_id: null now, because the new vocabulary lacks the token" in receipt.notes
    assert not (to / "merges.txt").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (to / name).read_bytes() == (tmp_path / "new" / name).read_bytes()
    assert not tiewise.check(to).at_least("warning")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(to), AutoTokenizer.from_pretrained(to)
    text = "abing qui"
    old = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    ids, before = (t(text, return_tensors="pt").input_ids for t in (tokenizer, old[1]))
    assert tokenizer.decode(ids[0]) == text
    # every token is in both vocabularies, so the logits are equal in another order
    places = [tokenizer.convert_tokens_to_ids(piece) for piece in OLD]
    assert torch.equal(logits(model, ids)[..., places], logits(old[0], before)[..., : len(OLD)])


def test_transplant_of_same_tokenizer_changes_no_row(source, tmp_path):
    transplant(source, tmp_path / "to", tokenizer=source)
    old, made = tensors(source), tensors(tmp_path / "to")
    for name, table in made.items():
        assert torch.equal(table, old[name][: len(table)])


def test_transplant_matches_byte_level_and_sentencepiece_tokens(source, tmp_path):
    sentence_pieces(tmp_path / "new", ["<unk>", "<0x61>", "<0x7A>", "▁a", "▁ab", "a", "▁"], unk_token="<unk>")
    transplant(source, tmp_path / "to", tokenizer=tmp_path / "new")
    a, b = tensors(source)["lm_head.weight"], tensors(tmp_path / "to")["lm_head.weight"]
    for row, text in ((1, "a"), (3, "Ġa"), (4, "Ġab"), (5, "a"), (6, "Ġ")):
        assert torch.equal(b[row], a[OLD.index(text)])


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("phi", False)])
def test_transplant_keeps_tie_of_family_and_computes_biases(kind, tied, tmp_path):
    saved(tmp_path / "source", kind, tied=tied, dtype=torch.bfloat16)
    byte_level(tmp_path / "source", OLD, eos_token="</s>")
    byte_level(tmp_path / "new", ["ab", "quing", "c"], eos_token="</s>")
    transplant(tmp_path / "source", tmp_path / "to", tokenizer=tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.bfloat16)
    assert same_table(model) is tied
    assert logits(model, torch.tensor([[0, 1, 2, 3]])).shape == (1, 4, 4)
    old, made = tensors(tmp_path / "source"), tensors(tmp_path / "to")
    if "lm_head.bias" in old:
        b = old["lm_head.bias"].double()
        shared = b[[OLD.index("ab"), OLD.index("c"), len(OLD)]]
        halfway = (b[OLD.index("qu")] + b[OLD.index("ing")]) / 4 + shared.mean() / 2
        expected = torch.stack([shared[0], halfway, *shared[1:]])
        assert torch.equal(made["lm_head.bias"], expected.to(torch.bfloat16))


def test_transplant_keeps_factored_table_factored(source, tmp_path):
    factor(source, tmp_path / "narrow", rank=4)
    byte_level(tmp_path / "new", ["ab", "quing"], eos_token="</s>")
    transplant(tmp_path / "narrow", tmp_path / "to", tokenizer=tmp_path / "new")
    model = tiewise.load(tmp_path / "to")
    assert model.get_input_embeddings().weight.shape == (3, 4)


# with a donor


def write_donor(path, source, new, turn):
    """Write a donor whose old tokens have the rotated rows of `source`, and new ones a sum of two rows."""
    table = tensors(source)["model.embed_tokens.weight"].double()
    rows = torch.stack([table[OLD.index(p)] if p in OLD else 2 * table[1] - 0.5 * table[3] for p in new])
    rows = torch.cat([rows, table[-1:]]) @ turn
    values = {"model.embed_tokens.weight": rows.float().numpy()}
    return llama(path, rows=len(rows), width=rows.shape[1], tensors=values)


def test_transplant_with_donor_uses_its_coefficients(source, tmp_path):
    new = [*OLD[:9], "zzz", *OLD[9:]]
    width = tensors(source)["lm_head.weight"].shape[1]
    turn = torch.linalg.qr(torch.randn(2 * width, width, dtype=torch.float64, generator=torch.manual_seed(0)))[0].T
    donor = write_donor(tmp_path / "donor", source, new, turn)
    byte_level(donor, new, eos_token="</s>")
    receipt = transplant(source, tmp_path / "to", tokenizer=donor, donor=donor)
    old, made = tensors(source), tensors(tmp_path / "to")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        # the donor's space is wider and rotated, and its coefficients hold at both ends of the source
        torch.testing.assert_close(made[name][9], 2 * old[name][1] - 0.5 * old[name][3], rtol=1e-4, atol=1e-5)
    said = f"1 combine the rows of at most {2 * width // 8} shared tokens, as they do in donor; there 0 %"
    assert receipt.notes[0].startswith(said)


# refusals


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tokenizer": "nowhere"}, "no such file or folder"),
        ({"tokenizer": "empty"}, "no tokenizer.json in it"),
        ({"tokenizer": "words"}, "marks words"),
        ({"tokenizer": "alien"}, "shares no token with"),
        ({"tokenizer": "torn"}, "tokenizer.json"),
        ({"tokenizer": "source", "atoms": 0}, "atoms is 0"),
        ({"tokenizer": "new", "donor": "source"}, "its vocabulary differs from the new tokenizer's"),
        ({"tokenizer": "new", "donor": "nowhere"}, "no such file or folder"),
    ],
)
def test_transplant_refuses_unsuitable_arguments_in_one_line(arguments, says, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    byte_level(tmp_path / "new", ["ab", "zz"], eos_token="</s>")
    byte_level(tmp_path / "alien", ["x", "y"])
    save_tokenizer(tmp_path / "words", Tokenizer(models.WordPiece({"[UNK]": 0, "##a": 1}, unk_token="[UNK]")), {})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=says) as e:
        transplant(source, "to", **arguments)
    assert "\n" not in str(e.value)
    assert e.value.remedy
    assert not (tmp_path / "to").exists()


def by_definition(anchors, x, most):
    """Return the chosen anchors and coefficients, solving one least-squares problem per step."""
    unit = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
    chosen, rest, c = [], x, np.zeros(0)
    for _ in range(most):
        alike = np.abs(unit @ rest)
        alike[chosen] = -1
        chosen.append(int(alike.argmax()))
        c = np.linalg.lstsq(anchors[chosen].T, x, rcond=None)[0]
        rest = x - c @ anchors[chosen]
    return chosen, c


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(2, 12), st.integers(1, 5))
def test_pursue_equals_definition_by_least_squares(seed, count, width, most):
    draw = np.random.default_rng(seed)
    anchors, targets = draw.normal(size=(count, width)) * draw.uniform(0.1, 9, (count, 1)), draw.normal(size=(3, width))
    places, coefficients = pursue(anchors, targets, most)
    assert places.shape == (3, min(most, count, width))
    for x, chosen, c in zip(targets, places, coefficients, strict=True):
        assert len(set(chosen)) == len(chosen)
        wanted, its = by_definition(anchors, x, len(chosen))
        assert chosen.tolist() == wanted
        np.testing.assert_allclose(c @ anchors[chosen], its @ anchors[wanted], rtol=1e-6, atol=1e-9)


def test_pursue_recovers_sparse_combination():
    draw = np.random.default_rng(0)
    anchors = np.linalg.qr(draw.normal(size=(64, 64)))[0] * draw.uniform(1, 3, (64, 1))
    chosen = np.stack([draw.choice(64, 4, replace=False) for _ in range(20)])
    c = draw.normal(size=(20, 4)) + 2
    targets = np.einsum("nk,nkd->nd", c, anchors[chosen])
    places, coefficients = pursue(anchors, targets, 9)
    found, wanted = np.zeros((2, 20, 64))
    np.put_along_axis(found, places, coefficients, 1)
    np.put_along_axis(wanted, chosen, c, 1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (coefficients != 0).sum(axis=1).max() == 4  # four anchors are exact, so there is no fifth


def test_pursue_stays_finite_for_equal_anchors_and_zero_targets():
    anchors = np.array([[1.0, 0, 0], [2, 0, 0], [1, 1e-9, 0]])
    places, coefficients = pursue(anchors, np.array([[3.0, 0, 0], [0, 0, 0], [1, 0, 5]]), 3)
    made = np.einsum("nk,nkd->nd", coefficients, anchors[places])
    np.testing.assert_allclose(made, [[3, 0, 0], [0, 0, 0], [1, 0, 0]], atol=1e-6)
    assert np.abs(coefficients).max() < 10


@pytest.mark.parametrize("size", [1, 10**9])
def test_pursue_gives_same_result_in_blocks_and_reports_progress(size, monkeypatch):
    draw, said = np.random.default_rng(1), []
    anchors, targets = draw.normal(size=(40, 8)), draw.normal(size=(7, 8))
    whole = pursue(anchors, targets, 3)
    monkeypatch.setitem(pursue.__globals__, "BLOCK_BYTES", size)
    with listen_to_progress(lambda what, done, total: said.append((what, done, total))):
        found = pursue(anchors, targets, 3, "rows")
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-9)
    assert said[-1] == ("rows", 7, 7)
    assert len(said) == (7 if size == 1 else 1)


def test_new_id_values_drops_ids_that_new_vocabulary_lacks():
    record = {
        "eos_token_id": [3, 4],
        "suppress_tokens": [3, 9, 4],
        "begin_suppress_tokens": [9],
        "bad_words_ids": [[3, 4], [3, 9]],
        "forced_decoder_ids": [[1, 3], [2, 9], [3, None]],
        "vocabulary_map": {"<image>": 4, "gone": 9},
        "codebook_pad_token_id": 9,
        "vision_config": {"pad_token_id": 9},
        "suppress_none": None,
    }
    new = SimpleNamespace(roles={})
    assert new_id_values(record, new, {3: 30, 4: 40}) == {
        "eos_token_id": [30, 40],
        "suppress_tokens": [30, 40],
        "begin_suppress_tokens": None,
        "bad_words_ids": [[30, 40]],
        "forced_decoder_ids": [[1, 30], [3, None]],
        "vocabulary_map": {"<image>": 40},
    }
