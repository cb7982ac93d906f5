"""`diff`: planted rows are found exactly, a planted rank through every type's rounding; and refusals."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table
from typer.testing import CliRunner

from tiewise.cli.main import command_line
from tiewise.core.errors import CheckpointError
from tiewise.inspection.tables.row_changes import diff

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
V, D = 400, 32


def pair(folder, before, after, head=None, **more):
    """Two checkpoints with these tables; with a head, untied."""
    for name, values in (("old", before), ("new", after)):
        tensors = {TABLE: values} | ({} if head is None else {HEAD: head[name]})
        llama(folder / name, head is None, rows=len(values), width=values.shape[1], tensors=tensors, **more)
    return folder / "old", folder / "new"


def moved_rows(found):
    return [int(row[1].replace(",", "")) for row in found.listings[0].rows]


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, V - 1), min_size=1, max_size=100), st.sampled_from([np.float32, ml_dtypes.bfloat16]))
def test_planted_rows_are_found_exactly(tmp_path_factory, planted, dtype):
    folder, before = tmp_path_factory.mktemp("rows"), table(V, D).astype(dtype)
    after = before.copy()
    after[sorted(planted), 3] *= -1  # one number of each
    before[[5, 7], 4] = after[[5, 7], 4] = np.nan, 0.0
    after[7, 4] = -0.0
    found = diff(*pair(folder, before, after), top=V)
    assert found["rows that moved"].value == len(planted)
    assert sorted(moved_rows(found)) == sorted(planted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 16])
@pytest.mark.parametrize("rows", [V, 100])
def test_a_planted_rank_is_found_through_rounding(tmp_path, dtype, rank, rows):
    rng = np.random.default_rng(rank)
    before = (rng.normal(size=(V, D)) * 0.05).astype(dtype)
    change = rng.normal(size=(V, rank)) @ rng.normal(size=(rank, D)) * 0.02
    change[rng.permutation(V)[rows:]] = 0
    after = (before.astype(np.float64) + change).astype(dtype)
    found = diff(*pair(tmp_path, before, after))
    assert found["rank"].value == rank
    wanted = after.astype(np.float64) - before.astype(np.float64)
    strength = np.linalg.svd(wanted, compute_uv=False)[:rank]
    weights = strength / strength.sum()
    assert found["effective rank"].value == pytest.approx(np.exp(-(weights * np.log(weights)).sum()), rel=1e-6)
    touched = np.abs(wanted).sum(1) > 0
    share = np.linalg.norm(wanted) / np.linalg.norm(before.astype(np.float64)[touched])
    assert found["length of the change"].value == pytest.approx(share, rel=1e-9)
    size = np.linalg.norm(wanted, axis=1)
    assert moved_rows(found) == np.argsort(-size, kind="stable")[:20].tolist()


def test_rounding_alone_has_no_rank(tmp_path):
    """A table that was kept in fp32 and came back through bf16 moved everywhere, in no direction."""
    before = table(V, D)
    found = diff(*pair(tmp_path, before, before.astype(ml_dtypes.bfloat16).astype(np.float32)))
    assert found["rows that moved"].value == V
    assert found["rank"].value == D  # as far as files of fp32 can say
    again = diff(*pair(tmp_path / "typed", before, before.astype(ml_dtypes.bfloat16)))
    assert again["rank"].value == 0


@pytest.mark.parametrize(("strength", "rank"), [(0.5, 0), (1.5, 1)])
def test_a_direction_counts_from_just_above_the_rounding(tmp_path, strength, rank):
    """Rounding to bf16 has a largest singular value of about σ (√V + √D), where σ² is a twelfth of a unit's square."""
    rng = np.random.default_rng(0)
    before = rng.uniform(2**-5, 2**-4, size=(V, D)).astype(np.float32)  # of these, the unit in the last place is 2⁻¹²
    edge = 2**-12 / 12**0.5 * (V**0.5 + D**0.5)
    left, right = rng.choice([-1.0, 1.0], V), rng.choice([-1.0, 1.0], D)
    change = strength * edge * np.outer(left, right) / (V * D) ** 0.5
    after = np.clip(before + change, 2**-5, 2**-4 * 0.999).astype(ml_dtypes.bfloat16)
    assert diff(*pair(tmp_path, before, after))["rank"].value == rank


def test_ends_by_themselves_and_a_table_that_grew(tmp_path):
    before = table(V, D)
    head = {"old": table(V, D, 2), "new": np.concatenate([table(V, D, 2), table(3, D, 5)])}
    head["new"][11] += 1
    grown = np.concatenate([before, table(3, D, 4)])
    old, new = pair(tmp_path, before, grown, head, tokenizer=bpe_tokenizer(V))
    found = diff(old, new)
    assert found.answer == "0 of 400 rows of the input table moved; 1 of 400 rows of the output table moved"
    assert [q.of for q in found.quantities if q.name == "rows that moved"] == ["input table", "output table"]
    assert found.listings[0].rows[0][:2] == ("t11", "11")
    assert found.notes == tuple(f"rows 400 to 402 of the {end} table are in {new} alone" for end in ("input", "output"))


def test_a_tied_one_beside_its_untied_self(tmp_path):
    before = table(V, D)
    llama(tmp_path / "old", True, rows=V, width=D, tensors={TABLE: before})
    head = before.copy()
    head[2] *= 2
    llama(tmp_path / "new", False, rows=V, width=D, tensors={TABLE: before, HEAD: head})
    found = diff(tmp_path / "old", tmp_path / "new")
    assert found.answer == "0 of 400 rows of the input table moved; 1 of 400 rows of the output table moved"


def test_what_cannot_be_compared_is_refused(tmp_path):
    old, _ = pair(tmp_path, table(V, D), table(V, D))
    llama(tmp_path / "wide", rows=V, width=16)
    llama(tmp_path / "none", rows=V, width=D, tensors={TABLE: None})
    for name, said in (("wide", "32 wide, those of .* 16"), ("none", "no table in common"), ("lost", "no such file")):
        with pytest.raises(CheckpointError, match=said):
            diff(old, tmp_path / name)


def test_the_command(tmp_path):
    before = table(V, D)
    after = before.copy()
    after[[3, 9]] += 0.5
    paths = [str(path) for path in pair(tmp_path, before, after)]
    run = CliRunner().invoke(command_line(["diff"]), ["diff", *paths, "--top=1"])
    assert run.exit_code == 0
    assert run.output.startswith("2 of 400 rows of the shared table moved.")
    run = CliRunner().invoke(command_line(["diff"]), ["diff", *paths, "--json"])
    record = json.loads(run.stdout)
    assert record["answer"] == "2 of 400 rows of the shared table moved"
    assert {row[1] for row in record["listings"][0]["rows"]} == {"3", "9"}
