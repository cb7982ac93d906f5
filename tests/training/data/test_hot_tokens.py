"""Tests of the most frequent tokens against a plain count, and of their files."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy import stats
from tests.checkpoint.tiny_checkpoints import llama, llama_config
from tokenizers import Tokenizer, models, pre_tokenizers

from tiewise.checkpoint.audit import check
from tiewise.cli.main import main
from tiewise.core.errors import DataError
from tiewise.training.data.corpus import prepare
from tiewise.training.data.hot_tokens import HeldOutTokens, hot_tokens

WORDS, ROWS, N = 300, 320, 60


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Write a tied Llama with padding rows, its word-level tokenizer and a text of unequal frequencies."""
    words = {f"w{i}": i for i in range(WORDS)} | {"<eos>": WORDS, "<pad>": WORDS + 1, "<unk>": WORDS + 2}
    engine = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<eos>", "<pad>"])
    path = llama(tmp_path_factory.mktemp("target") / "model", rows=ROWS, config={"hidden_size": 8})
    engine.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    draw = random.Random(0)
    chosen = draw.choices(range(WORDS - 20), [1 / (i + 3) for i in range(WORDS - 20)], k=30_000)
    rows = [" ".join(f"w{i}" for i in chosen[at : at + 40]) for at in range(0, len(chosen), 40)]
    (path.parent / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def texts(target):
    return (str(target.parent / "text.jsonl"),)


@pytest.fixture(scope="module")
def ranked_tokens(target, texts, tmp_path_factory):
    return hot_tokens(texts, str(target), N, tmp_path_factory.mktemp("hot") / "data")


def test_hot_tokens_match_reference_ranking_and_coverage(target, texts, ranked_tokens, tmp_path):
    prepare(texts, str(target), tmp_path / "data", length=1)
    train, held = (np.fromfile(tmp_path / "data" / f"{name}.bin", "<u2").tolist() for name in ("train", "heldout"))
    count = Counter(train)
    special = {WORDS, WORDS + 1}
    ranked = [*special, *sorted(set(range(ROWS)) - special, key=lambda i: (-count[i], i))]
    assert ranked_tokens.token_ids.tolist() == sorted(ranked[:N])
    documents = [
        [int(word) for word in row.split()] for row in " ".join(map(str, held)).split(str(WORDS)) if row.strip()
    ]
    assert {len(document) for document in documents} == {40}
    known, said = set(ranked[:N]), ranked_tokens.coverage
    assert (ranked_tokens.counted, ranked_tokens.vocabulary, ranked_tokens.held_out) == (
        len(train),
        ROWS,
        40 * len(documents),
    )
    assert ranked_tokens.equal_documents == pytest.approx(len(documents))
    # documents have equal lengths, so the ratio is the mean of their shares and the interval is Student's
    shares = [sum(i in known for i in document) / len(document) for document in documents]
    assert said.value == pytest.approx(np.mean(shares), abs=1e-12)
    low, high = stats.t.interval(0.95, len(shares) - 1, np.mean(shares), stats.sem(shares))
    assert (said.low, said.high, said.rows) == pytest.approx((low, high, len(shares)), abs=1e-9)


def test_coverage_counts_one_token_documents_and_skips_empty_ones():
    held_out = HeldOutTokens(np.array([3, 5, 5, 4, 3]), np.array([0, 2, 2, 2, 3]))
    is_chosen = np.isin(np.arange(6), [3])
    covered = held_out.covered_by(is_chosen)
    assert held_out.document_lengths().tolist() == [1, 0, 3, 1]
    assert (covered.value, covered.rows) == (2 / 5, 3)


def test_coverage_has_no_interval_when_one_document_dominates(target, tmp_path, type_command, capsys):
    """The held-out part of a long file is one document. Short documents add little to it."""
    draw = random.Random(1)
    words = [f"w{draw.randrange(200)}" for _ in range(40_000)]
    one, short = tmp_path / "one.txt", tmp_path / "short.jsonl"
    one.write_text("\n\n".join(" ".join(words[at : at + 100]) for at in range(0, 36_000, 100)))
    rows = [" ".join(words[at : at + 40]) for at in range(36_000, 40_000, 40)]
    short.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for texts, documents in (([one], 1), ([one, short], 5)):
        made = hot_tokens([*map(str, texts)], str(target), N, tmp_path / f"{documents}")
        assert (made.coverage.rows >= documents, made.equal_documents < 5) == (True, True)
        assert 0 < made.coverage.value < 1
        assert np.isnan([made.coverage.low, made.coverage.high]).all()
        assert made.record()["coverage"]["low"] is None
    type_command("tiewise", "vocab", "hot", "-t", one, "--tokenizer", target, f"--size={N}")
    with pytest.raises(SystemExit):
        main()
    assert (
        "No interval: 1 held-out document counts as 1.0 of equal length, and 5 are needed." in capsys.readouterr().out
    )


def test_hot_tokens_fills_size_with_unseen_tokens(target, texts, tmp_path):
    made = hot_tokens(texts, str(target), 310, tmp_path / "data")
    assert made.unseen >= 28
    assert (made.coverage.value, made.coverage.high) == (1.0, 1.0)


def test_write_produces_three_layouts_that_engines_load(ranked_tokens, target, tmp_path):
    for ending in ("safetensors", "pt", "json"):
        ranked_tokens.write(tmp_path / f"hot.{ending}")
    maps = load_file(tmp_path / "hot.safetensors")
    assert (maps["d2t"].dtype, maps["t2d"].dtype, maps["t2d"].shape) == (np.int64, np.bool_, (ROWS,))
    assert [i + step for i, step in enumerate(maps["d2t"].tolist())] == ranked_tokens.token_ids.tolist()
    assert np.flatnonzero(maps["t2d"]).tolist() == ranked_tokens.token_ids.tolist()
    # the same calls as SGLang's load_token_map
    ids = torch.tensor(torch.load(tmp_path / "hot.pt", weights_only=True), dtype=torch.int64)
    assert ids.tolist() == ranked_tokens.token_ids.tolist()
    record = json.loads((tmp_path / "hot.json").read_text())
    assert record["token_ids"] == ranked_tokens.token_ids.tolist()
    assert record["vocabulary"] == ROWS
    assert record["coverage"]["value"] == ranked_tokens.coverage.value
    config = llama_config(False, ROWS, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=N)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    ranked_tokens.write(draft / "model.safetensors")
    rules = {one.rule for one in check(draft, target=target).findings}
    assert rules == {"B084", "B085"}  # B084: no head; B085: nothing identifies its ids; no rule rejects the maps


@pytest.mark.parametrize(
    ("tokenizer", "size", "vocab", "says"),
    [
        (None, ROWS + 1, None, "321 tokens of 320"),
        (None, 351, 350, "351 tokens of 350"),
        (None, 0, None, "0 tokens of 320"),
        (None, 1, None, "2 special tokens do not fit 1"),
        (None, 10, 50, "beyond a vocabulary of 50"),
        ("nobody", 10, None, "no tokenizer 'nobody'"),
    ],
)
def test_hot_tokens_refuses_impossible_sizes_and_unknown_tokenizer(
    target, texts, tmp_path, tokenizer, size, vocab, says
):
    with pytest.raises(DataError, match=says):
        hot_tokens(texts, tokenizer or str(target), size, tmp_path / "data", vocab=vocab)


def test_hot_tokens_ranks_rows_without_token_last(tmp_path):
    """The vocabulary lacks the ids 20 to 29; among equally rare ids, existing tokens come first."""
    words = {f"w{i}": i for i in range(20)} | {"<eos>": 30, "<unk>": 31}
    engine = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<eos>"])
    path = llama(tmp_path / "model", rows=40)
    engine.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    draw = random.Random(1)
    rows = [{"text": " ".join(f"w{draw.randrange(15)}" for _ in range(40))} for _ in range(900)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = hot_tokens([str(tmp_path / "text.jsonl")], str(path), 22, tmp_path / "data")
    assert made.token_ids.tolist() == [*range(20), 30, 31]
    assert (made.vocabulary, made.unseen) == (40, 6)  # the text lacks w15 to w19 and <unk>
    alone = hot_tokens([str(tmp_path / "text.jsonl")], str(path / "tokenizer.json"), 22, tmp_path / "more")
    assert (alone.vocabulary, alone.token_ids.tolist()) == (32, made.token_ids.tolist())


def test_hot_tokens_refuses_short_text(target, tmp_path):
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": f"w{i} w1"}) + "\n" for i in range(400)))
    with pytest.raises(DataError, match="say too little: 512 are needed; give more text"):
        hot_tokens([str(tmp_path / "short.jsonl")], str(target), N, tmp_path / "data")


def test_hot_tokens_takes_vocabulary_size_from_tokenizer_file(target, texts, tmp_path):
    made = hot_tokens(texts, str(target / "tokenizer.json"), N, tmp_path / "data")
    assert made.vocabulary == WORDS + 3
    assert hot_tokens(texts, str(target / "tokenizer.json"), N, tmp_path / "more", vocab=ROWS).vocabulary == ROWS


def test_vocab_hot_command_writes_files_and_reports_errors(target, texts, tmp_path, type_command, capsys):
    def run(*arguments):
        type_command("tiewise", "vocab", *arguments)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr()

    given = ["hot", "-t", *texts, "--tokenizer", str(target), f"--size={N}"]
    code, said = run(*given, f"--to={tmp_path / 'hot.pt'}")
    assert (code, said.out.startswith("60 of 320 tokens cover ")) == (0, True)
    assert torch.load(tmp_path / "hot.pt", weights_only=True)
    code, said = run(*given, f"--to={tmp_path / 'none' / 'hot.json'}")
    assert (code, said.out, "--to" in said.err) == (2, "", True)
    code, said = run(*given, "--json")
    assert (code, len(json.loads(said.out)["token_ids"]), said.err) == (0, N, "")
    for arguments, words in (
        (["cold", *given[1:]], "choose one of vocab resize, vocab trim, vocab transplant, vocab hot"),
        ([*given, "--to=x.bin"], "no layout"),
    ):
        code, said = run(*arguments)
        assert (code, said.out, words in said.err) == (2, "", True)
