"""Untrained rows that were planted, and the whole of `tokens_of` on little checkpoints."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from token_checkpoints import factored, gaussian, untied

from tiewise.analysis.single_rows import near_unused, row_state
from tiewise.analysis.token_table import HeldTable, StoredTable
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.progress import heard
from tiewise.inspection.sections.tokens import tokens_of

V = 60
WORDS = ["<unk>", *(f"w{chr(97 + row // 26)}{chr(97 + row % 26)}" for row in range(39)), *"0123456789", *"абвгд"]
WORDS += [f"<reserved_{row}>" for row in range(V - len(WORDS))]


def text(length=3000, vocabulary=V - 5):
    return np.random.default_rng(0).zipf(1.3, length) % vocabulary


def test_planted_rows_are_found(tmp_path):
    values = gaussian(V, 8)
    values[[4, 9]] = 0
    values[[11, 30, 31]] = values[10]
    values[50] = values[2]
    stored = untied(tmp_path / "m", values, gaussian(V, 8, 1)).tensors["model.embed_tokens.weight"]
    counts = np.ones(V, np.int64)
    counts[[1, 2, 3]] = 0
    state = row_state(stored, StoredTable(stored), np.empty(0, np.int64), counts)
    assert state.zero == (4, 9)
    assert state.repeated == ((10, 11, 30, 31), (2, 50))
    assert (state.groups, state.in_groups, state.unseen) == (2, 6, 3)
    assert state.near_unused is None


def test_rows_left_where_unused_ones_are():
    generator = np.random.default_rng(3)
    values = 3 * generator.standard_normal((200, 16))
    unused, left = np.arange(180, 200), np.array([17, 40, 99])
    values[unused] = 5 + 0.1 * generator.standard_normal((20, 16))
    values[left] = 5 + 0.05 * generator.standard_normal((3, 16))
    found = near_unused(HeldTable(values), unused)
    assert {suspect.row for suspect in found.nearest} == set(left.tolist())
    assert (found.reference, found.count, found.share) == (20, 3, 3 / 180)
    own = [np.linalg.norm(values[row] - values[unused[unused != row]].mean(0)) for row in unused]
    assert found.reach == pytest.approx(np.quantile(own, 0.95))
    centre, mean = values[unused].mean(0), values.mean(0)
    first = found.nearest[0]
    assert first.distance == pytest.approx(np.linalg.norm(values[first.row] - centre))
    row, direction = values[first.row] - mean, centre - mean
    cosine = row @ direction / np.linalg.norm(row) / np.linalg.norm(direction)
    assert first.cosine == pytest.approx(cosine)


def test_by_chance_trained_rows_are_not_near():
    values = np.random.default_rng(4).standard_normal((400, 32))
    values[:30] *= 0.1
    assert near_unused(HeldTable(values), np.arange(30)).count == 0


def test_everything_of_a_model_with_text_and_tokenizer(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), WORDS)
    told = []
    with heard(lambda *said: told.append(said)):
        found = tokens_of(folder, text(), samples=20, seed=1)
    assert [table.name for table in found.tables] == ["input", "output"]
    assert found.text == 3000
    assert found.seen == len(np.unique(text()))
    assert found.unused == 5
    assert {group.label for group in found.contexts.scripts} == {"Latin", "digits", "Cyrillic"}
    assert found.tables[0].norms.scripts[0].tokens == 39
    assert {g.label: g.tokens for g in found.tables[0].norms.scripts}["special tokens"] == 6
    assert len(found.sample) == len(found.labels) == len(found.counts) == 20
    assert [found.labels[at] for at in range(20)] == [WORDS[row] for row in found.sample]
    assert found.counts == tuple(np.bincount(text(), minlength=V)[list(found.sample)])
    most = np.argsort(-np.bincount(text(), minlength=V), kind="stable")[:10]
    assert set(most) <= set(found.sample)
    assert len(set(found.sample)) == 20
    assert found.tables[0].state.near_unused.reference == 5
    json.dumps(asdict(found), allow_nan=False)
    assert told
    assert all(done <= total for _, done, total in told)


def test_what_needs_no_text(tmp_path):
    found = tokens_of(untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1)))
    assert found.contexts is None
    assert found.counts == ()
    assert found.unused is None
    assert found.labels[:2] == ("#0", "#1")
    assert found.tables[0].norms.frequency is None
    assert found.tables[0].state.unseen is None
    assert any("no tokenizer.json" in note for note in found.notes)
    json.dumps(asdict(found), allow_nan=False)


def test_a_factored_model_is_seen_before_and_after(tmp_path):
    folder = factored(tmp_path / "m", gaussian(V, 4), gaussian(10, 4, 1), gaussian(4, 10, 2), WORDS)
    found = tokens_of(folder, text())
    assert [(table.width, table.state is None) for table in found.tables] == [(4, False), (10, True), (10, True)]
    assert sum(found.tables[1].anisotropy.shares[:4]) == pytest.approx(1)
    json.dumps(asdict(found), allow_nan=False)


def test_a_word_and_a_token_of_the_text_are_in_use(tmp_path):
    words = ["<unk>", "reserved", "dummy", "<reserved_1>", "<reserved_2>", *(f"w{row}" for row in range(V - 7))]
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), words)
    assert tokens_of(folder).unused == 4  # two names, and two rows without a token
    assert tokens_of(folder, text() % 4).unused == 3


def test_the_same_seed_gives_the_same(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1), WORDS)
    once, again, other = (tokens_of(folder, text(), samples=30, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once.sample != other.sample


def test_what_cannot_be_measured(tmp_path):
    folder = untied(tmp_path / "m", gaussian(V, 8), gaussian(V, 8, 1))
    with pytest.raises(DataError, match="50 tokens in 10 parts"):
        tokens_of(folder, text(50))
    with pytest.raises(DataError, match="outside a vocabulary of 60"):
        tokens_of(folder, np.full(200, V))
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no input table"):
        tokens_of(type(folder)(folder.path, (), folder.config, None, {}, {}))


MEMORY = """
import sys, tracemalloc
import numpy as np
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.checkpoint.hf_folder import open_folder
assert not {"torch", "transformers", "plotly"} & set(sys.modules)
folder = open_folder(sys.argv[1])
ids = np.random.default_rng(0).integers(0, 120_000, 200_000)
tracemalloc.start()
found = tokens_of(folder, ids)
print(tracemalloc.get_traced_memory()[1], found.tables[0].rows)
"""


@pytest.mark.slow
def test_a_large_table_is_streamed_without_torch(tmp_path):
    """120,000 × 512 in fp16: 123 MB in the file, 491 MB in fp64; what is held is a piece, E × E and a sample."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((120_000, 512), np.float32).astype(np.float16)
    untied(tmp_path / "m", table, table[::-1].copy())
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, rows = map(int, done.stdout.split())
    assert rows == 120_000
    assert peak < 150 * 2**20
