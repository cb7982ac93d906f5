"""Test B083 to B085 on sound and broken draft models, written as SpecForge, EAGLE and Medusa do."""

import json

import numpy as np
import pytest
from rule_runs import summaries
from tiny_checkpoints import D, V, bpe_tokenizer, llama, llama_config, table, write_checkpoint

from tiewise.checkpoint.audit import check

IDS = np.array([0, 1, 2, 3, 5, 8, 9, 11, 17, 23])  # the target's tokens in the draft's vocabulary
N = len(IDS)
STEPS = IDS - np.arange(N)
MARKS = np.isin(np.arange(V), IDS)
HEAD, NEW = table(N, D, 3), table(V, D, 9)


def draft(path, tokenizer=None, config=None, **tensors):
    """Write an EAGLE-3 draft of the tied Llama; None omits a tensor, and `x__y` means `x.y`."""
    made = {"d2t": STEPS, "t2d": MARKS, "lm_head.weight": HEAD, "embed_tokens.weight": table()}
    made |= {"fc.weight": table(D, 3 * D, 4), "midlayer.hidden_norm.weight": np.ones(D, np.float32)}
    made |= {name.replace("__", "."): value for name, value in tensors.items()}
    said = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": N} | (config or {})
    made = {name: np.ascontiguousarray(value) for name, value in made.items() if value is not None}
    return write_checkpoint(path, llama_config(False, **said), made, tokenizer=tokenizer)


def changed(values, **at):
    made = values.copy()
    for place, value in at.items():
        made[int(place[1:])] = value
    return made


def target(path, **how):
    return llama(path, **{"tokenizer": bpe_tokenizer()} | how)


SPECULATOR = dict.fromkeys(("model_type", "vocab_size", "hidden_size")) | {"architectures": ["Eagle3Speculator"]}
SPECULATOR |= {"transformer_layer_config": {"model_type": "llama", "vocab_size": V, "hidden_size": D}}
SOUND = [
    {},
    {"embed_tokens__weight": None},  # the draft uses the target's table
    {"d2t": STEPS.astype(np.int32), "t2d": MARKS.astype(np.uint8)},
    {"config": SPECULATOR},
    # a draft over all tokens, without a map or with the identity
    {"d2t": None, "t2d": None, "lm_head__weight": table(), "config": {"draft_vocab_size": V}},
    {"d2t": np.zeros(V, int), "t2d": np.ones(V, bool), "lm_head__weight": table(), "config": {"draft_vocab_size": V}},
    # EAGLE and EAGLE-2 share the target's head
    {"d2t": None, "t2d": None, "lm_head__weight": None, "config": {"draft_vocab_size": None}},
]


@pytest.mark.parametrize("how", SOUND)
def test_draft_rules_are_silent_on_sound_drafts(tmp_path, how):
    path = draft(tmp_path / "a", **how)
    assert check(path, deep=True).kind == "draft"
    without = {name: value for name, value in how.items() if name != "embed_tokens__weight"}
    for audit in (check(path), check(draft(tmp_path / "b", **without), target=target(tmp_path / "t"))):
        assert summaries(audit.findings) == []
        assert audit.outcomes == ()
        assert "for models that stand alone" in audit.skipped["B010"]
    if how.get("d2t", 0) is not None:
        assert [part.tensor.name for part in check(path).parts if part.role == "draft map"] == ["d2t", "t2d"]


NO_MAPS = {"d2t": None, "t2d": None}
AGAIN = [  # changes of the draft, findings, words of the first finding
    (NO_MAPS, ["B083 error d2t"], "proposes 10 of 24 tokens, and their list d2t is missing"),
    ({"t2d": None}, ["B083 info t2d"], "cannot be trained on"),
    ({"d2t": STEPS * 0}, ["B083 error d2t", "B083 error t2d"], "stand for the first 10 tokens"),
    ({"d2t": IDS}, ["B083 error d2t", "B083 error t2d"], "stores ids, and engines expect the difference"),
    ({"d2t": changed(STEPS, i9=900)}, ["B083 error d2t", "B083 error t2d"], "row 9 to token 909"),
    ({"d2t": changed(STEPS, i0=-1)}, ["B083 error d2t", "B083 error t2d"], "row 0 to token -1"),
    ({"d2t": changed(STEPS, i4=-1)}, ["B083 error d2t", "B083 error t2d"], "lead to 9 tokens"),
    ({"d2t": changed(STEPS, i4=4, i5=0)}, ["B083 warning d2t"], "row 5: token 5 after 8"),
    ({"d2t": STEPS.astype(np.float32)}, ["B083 error d2t"], "d2t F32 [10] must be a list of whole numbers"),
    ({"t2d": MARKS * 0.5}, ["B083 error t2d"], "must be a list of whole numbers"),
    ({"t2d": MARKS & False}, ["B083 error t2d"], "10 are in only one of the two (0, 1, 2, 3, …)"),
    ({"t2d": changed(MARKS, i4=True, i23=False)}, ["B083 error t2d"], "2 are in only one of the two (4, 23)"),
    ({"d2t": STEPS[:8]}, ["B083 error t2d", "B084 error d2t"], "2 are in only one of the two (17, 23)"),
    ({"lm_head__weight": table(12)}, ["B084 error lm_head.weight"], "12 rows, and draft_vocab_size is 10"),
    ({"lm_head__weight": None}, ["B084 error lm_head"], "no head of 10 rows"),
    (NO_MAPS | {"lm_head__weight": None, "config": {"draft_vocab_size": V}}, ["B084 error lm_head"],
     f"no head of {V} rows is stored. vLLM since #28549"),
    ({"embed_tokens__weight": table(20)}, ["B084 error embed_tokens.weight"], "20 rows, and vocab_size is 24"),
    ({"t2d": MARKS[:-1]}, ["B083 error t2d", "B084 error t2d"], "1 are in only one of the two (23)"),
    ({"config": {"draft_vocab_size": 40}}, ["B084 error config.json", "B084 error d2t", "B084 error lm_head.weight"],
     "draft_vocab_size is 40, more than vocab_size, 24"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "found", "words"), AGAIN)
def test_draft_rules_report_broken_drafts(tmp_path, how, found, words):
    audit = check(draft(tmp_path / "a", **how))
    assert summaries(audit.findings) == found
    assert words in audit.findings[0].evidence


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "draft") for name in ("EagleModel", "Eagle3LlamaForCausalLM", "MedusaModel", "Eagle3Speculator")),
        *((name, "folder") for name in ("Eagle2_5_VLForConditionalGeneration", "Eagle2ChatModel", "LlamaForCausalLM")),
    ],
)
def test_check_recognises_drafts_by_class_name(tmp_path, name, kind):
    assert check(llama(tmp_path, config={"architectures": [name]})).kind == kind


def test_b083_reads_no_maps_without_scan(tmp_path):
    assert summaries(check(draft(tmp_path / "a", d2t=STEPS * 0), scan=False).findings) == []


OTHER = bpe_tokenizer()
OTHER["model"]["vocab"] = {f"t{(7 * i) % V}": i for i in range(V)}  # as many tokens, most with other ids
MORE = bpe_tokenizer(added=[(V, "<new>", True)])
PIECES = {"embed_tokens__weight": None}


@pytest.mark.parametrize(
    ("own", "tensors", "of", "found", "words"),
    [
        (bpe_tokenizer(), {}, {}, [], ""),
        (OTHER, {}, {}, ["B085 error tokenizer"],
         "18 of the draft's 24 ids are different tokens in the target, or none. Id 1 is"),
        (MORE, {}, {}, ["B085 error tokenizer"], "24 is '<new>' here and no token there"),
        (bpe_tokenizer(20), {}, {}, ["B085 info tokenizer"], "lacks 4 tokens of the target"),
        (None, {}, {"tokenizer": OTHER}, [], ""),  # the table equals the target's
        (None, {"embed_tokens__weight": NEW}, {}, ["B085 warning embed_tokens.weight"], "separate tables"),
        (None, {"embed_tokens__weight": table() * np.float32(1.01)}, {}, [], ""),  # the target's table, trained further
        (None, {}, {"rows": 32}, ["B084 info vocab_size"], "padding is safe"),
        (None, {}, {"rows": 32, "width": 16}, ["B084 info vocab_size", "B085 info tokenizer"], "padding"),
        (None, PIECES, {}, ["B085 info tokenizer"], "were not compared"),
        (None, PIECES, {"width": 16}, ["B084 error embed_tokens", "B085 info tokenizer"],
         "the draft is 8 wide, and the target 16"),
    ],
)  # fmt: skip
def test_b084_and_b085_compare_ids_and_sizes_with_target(tmp_path, own, tensors, of, found, words):
    audit = check(draft(tmp_path / "a", tokenizer=own, **tensors), target=target(tmp_path / "t", **of))
    assert summaries(audit.findings) == found
    assert not words or words in audit.findings[0].evidence


@pytest.mark.parametrize(
    ("rows", "tokenizer", "severity", "words"),
    [
        (32, bpe_tokenizer(), "info", "Rows 24 to 31 have no token (the last is 23), so padding is safe"),
        (32, bpe_tokenizer(28), "error", "tokens up to 27 use rows that only one of the two has"),
        (32, None, "warning", "without a tokenizer"),
        (20, bpe_tokenizer(20), "info", "Rows 20 to 23 have no token"),
    ],
)
def test_b084_judges_padding_rows_by_tokens_in_use(tmp_path, rows, tokenizer, severity, words):
    of = llama(tmp_path / "t", rows=rows, tokenizer=tokenizer)
    (found,) = check(draft(tmp_path / "a"), target=of, select=["B084"]).findings
    assert (found.severity, words in found.evidence) == (severity, True)


def test_check_of_small_model_with_target_keeps_rules_of_folders(tmp_path):
    small = target(tmp_path / "a", rows=16, tokenizer=bpe_tokenizer(16))
    audit = check(small, target=target(tmp_path / "t", tokenizer=bpe_tokenizer(16)))
    assert (audit.kind, len(audit.outcomes)) == ("folder", 7)
    (found,) = [one for one in audit.findings if "B083" <= one.rule < "B090"]
    assert (found.rule, found.severity) == ("B084", "info")
    assert f"tiewise vocab resize {small} --vocab 24 --rows zero" in found.repair


def sentence_pieces(texts):
    """Return a SentencePiece model as a protocol buffer; pieces have text in field 1 and score in field 2."""
    inner = [b"\n" + bytes([len(text.encode())]) + text.encode() + b"\x15\0\0\0\0" for text in texts]
    return b"".join(b"\n" + bytes([len(piece)]) + piece for piece in inner) + b"\x12\2\x08\1"


def pieces(texts, name="tokenizer.model"):
    return {name: sentence_pieces(texts)}


WORDS = [f"▁wort{i}" for i in range(V)]
BYTE, TAB = ([*WORDS[:3], text, *WORDS[4:]] for text in ("<0x09>", "\t"))
CONVERTED = {"model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(TAB)}}}
TURNED = WORDS[:5] + WORDS[:4:-1]
XLM_R = "sentencepiece.bpe.model"


@pytest.mark.parametrize(
    ("own", "theirs", "found", "words"),
    [
        (pieces(WORDS), pieces(WORDS), [], ""),
        (pieces(WORDS), pieces(TURNED), ["B085 error tokenizer"], "in the target, or none. Id 5 is"),
        (pieces(WORDS[:20]), pieces(WORDS), ["B085 info tokenizer"], "lacks 4 tokens of the target"),
        (pieces(BYTE), pieces(TAB), ["B085 error tokenizer"], "3 is '<0x09>' here and '\\t'"),
        # Gemma's tokenizer.json stores a tab, and its SentencePiece model stores the byte's name
        (pieces(BYTE), {"tokenizer.json": json.dumps(CONVERTED).encode()}, [], ""),
        # positions in this file are not ids, so the tables decide
        (pieces(WORDS, XLM_R), pieces(WORDS[::-1], XLM_R), ["B085 warning embed_tokens.weight"], ""),
    ],
)
def test_b085_compares_sentencepiece_tokens_by_text(tmp_path, own, theirs, found, words):
    paths = draft(tmp_path / "a", embed_tokens__weight=NEW), llama(tmp_path / "t")
    for path, files in zip(paths, (own, theirs), strict=True):
        for name, data in files.items():
            (path / name).write_bytes(data)
    audit = check(paths[0], target=paths[1], select=["B085"])
    assert summaries(audit.findings) == found
    assert all(words in one.evidence for one in audit.findings)


def medusa(path, heads=2, rows=V, width=D, names="{0}.1", config=None, **tensors):
    """Write Medusa's heads as its trainer or vLLM does: a block [D, D] and a head [V, D] per token."""
    made = {}
    for i in range(heads):
        made |= {f"{names.format(i)}.weight": table(rows, width, 20 + i), f"{i}.0.linear.weight": table(width, width)}
    made |= {name.replace("__", "."): value for name, value in tensors.items()}
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "b"} | (config or {})
    return write_checkpoint(path, said, made)


VLLM = {"names": "lm_heads.{0}", "config": {"model_type": "medusa", "vocab_size": V, "hidden_size": D}}
CUT = VLLM | {"config": VLLM["config"] | {"truncated_vocab_size": N}, "token_map": IDS[::-1].copy()}
BOTH = ["B084 error lm_heads.0.weight", "B084 error lm_heads.1.weight"]


@pytest.mark.parametrize(
    ("how", "found", "words"),
    [
        ({}, [], ""),
        ({"names": "medusa_head.{0}.1"}, [], ""),
        (VLLM, [], ""),
        (CUT, [], ""),  # vLLM truncates heads of all tokens
        (CUT | {"rows": N}, [], ""),
        (CUT | {"rows": 12}, BOTH, "12 rows, and truncated_vocab_size is 10"),
        (CUT | {"token_map": IDS + 20}, ["B083 error token_map"], "lead outside the 24 tokens (row 4 to token 25)"),
        (CUT | {"token_map": IDS // 2}, ["B083 error token_map"], "lead to 7 tokens"),
        (CUT | {"token_map": table(2)}, ["B083 error token_map", "B084 error token_map"], "must be a list of"),
        (VLLM | {"rows": 20}, BOTH, "20 rows, and vocab_size is 24"),
        ({"rows": 20}, ["B084 error vocab_size"], "has 20 rows, the target's 24, and tokens up to 23"),
        ({"width": 16}, ["B084 error medusa_head"], "It reads the target's hidden states"),
        ({"heads": 1}, ["B084 error config.json"], "says 2 heads, and 1 are stored"),
        ({"heads": 3}, ["B084 info config.json"], "says 2 heads, and 3 are stored"),
        (
            {"1__1__weight": table()},
            ["B085 info 1.1.weight", "B085 info tokenizer"],
            "equals the target's model.embed_tokens.weight",
        ),
    ],
)
def test_draft_rules_check_heads_and_token_map_of_medusa(tmp_path, how, found, words):
    path = medusa(tmp_path / "a", **how)
    audit = check(path, target=target(tmp_path / "t"), ignore=["B085"] if "1__1__weight" not in how else [])
    assert (audit.kind, summaries(audit.findings)) == ("draft", found)
    assert [part.role for part in audit.parts].count("draft head") == how.get("heads", 2)
    assert not words or words in audit.findings[0].evidence


@pytest.mark.parametrize(
    ("change", "found", "words"),
    [
        ({}, [], ""),
        ({"shared_head.head": table() * np.float32(1.01)}, ["B085 warning shared_head.head"],
         "differs from model.embed"),
        ({"embed_tokens": NEW}, ["B085 info embed_tokens"], "separate tables"),
        ({"embed_tokens": table(20)}, ["B084 error embed_tokens"], "20 rows, and vocab_size is 24"),
    ],
)  # fmt: skip
def test_draft_rules_check_table_copies_of_exported_mtp_layer(tmp_path, change, found, words):
    """An export of DeepSeek-V3's MTP layer for an engine holds copies of both tables in layer 0."""
    ends = {"embed_tokens": table(), "shared_head.head": table()} | change
    tensors = {f"model.layers.0.{name}.weight": values for name, values in ends.items()}
    tensors["model.layers.0.eh_proj.weight"] = table(D, 2 * D)
    config = llama_config(False, architectures=["DeepseekV3ForCausalLMNextN"])
    audit = check(write_checkpoint(tmp_path / "a", config, tensors), target=target(tmp_path / "t"))
    assert audit.kind == "draft"
    assert [said.replace("model.layers.0.", "").removesuffix(".weight") for said in summaries(audit.findings)] == found
    assert [part.role for part in audit.parts] == ["MTP input", "MTP output"]
    assert not words or words in audit.findings[0].evidence
