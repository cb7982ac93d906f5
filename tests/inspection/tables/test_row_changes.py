"""`diff` of checkpoints against planted rows and ranks, with rounding to every dtype."""

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


def write_pair(folder, before, after, head=None, **more):
    """Write two checkpoints with these tables, untied if `head` is given; return both folders."""
    for name, values in (("old", before), ("new", after)):
        tensors = {TABLE: values} | ({} if head is None else {HEAD: head[name]})
        llama(folder / name, head is None, rows=len(values), width=values.shape[1], tensors=tensors, **more)
    return folder / "old", folder / "new"


def listed_rows(found):
    return [int(row[1].replace(",", "")) for row in found.listings[0].rows]


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, V - 1), min_size=1, max_size=100), st.sampled_from([np.float32, ml_dtypes.bfloat16]))
def test_diff_finds_exactly_the_planted_rows(tmp_path_factory, planted, dtype):
    folder, before = tmp_path_factory.mktemp("rows"), table(V, D).astype(dtype)
    after = before.copy()
    after[sorted(planted), 3] *= -1  # one value of each row
    before[[5, 7], 4] = after[[5, 7], 4] = np.nan, 0.0
    after[7, 4] = -0.0
    found = diff(*write_pair(folder, before, after), top=V)
    assert found["rows that moved"].value == len(planted)
    assert sorted(listed_rows(found)) == sorted(planted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 16])
@pytest.mark.parametrize("rows", [V, 100])
def test_diff_finds_a_planted_rank_despite_rounding(tmp_path, dtype, rank, rows):
    rng = np.random.default_rng(rank)
    before = (rng.normal(size=(V, D)) * 0.05).astype(dtype)
    change = rng.normal(size=(V, rank)) @ rng.normal(size=(rank, D)) * 0.02
    change[rng.permutation(V)[rows:]] = 0
    after = (before.astype(np.float64) + change).astype(dtype)
    found = diff(*write_pair(tmp_path, before, after))
    assert found["rank"].value == rank
    wanted = after.astype(np.float64) - before.astype(np.float64)
    strength = np.linalg.svd(wanted, compute_uv=False)[:rank]
    weights = strength / strength.sum()
    assert found["effective rank"].value == pytest.approx(np.exp(-(weights * np.log(weights)).sum()), rel=1e-6)
    touched = np.abs(wanted).sum(1) > 0
    share = np.linalg.norm(wanted) / np.linalg.norm(before.astype(np.float64)[touched])
    assert found["length of the change"].value == pytest.approx(share, rel=1e-9)
    size = np.linalg.norm(wanted, axis=1)
    assert listed_rows(found) == np.argsort(-size, kind="stable")[:20].tolist()


def test_diff_reports_rank_zero_for_rounding_alone(tmp_path):
    """A table rounded to bf16 and back changes in every row, without a common direction."""
    before = table(V, D)
    found = diff(*write_pair(tmp_path, before, before.astype(ml_dtypes.bfloat16).astype(np.float32)))
    assert found["rows that moved"].value == V
    assert found["rank"].value == D  # fp32 files do not show the rounding
    again = diff(*write_pair(tmp_path / "typed", before, before.astype(ml_dtypes.bfloat16)))
    assert again["rank"].value == 0


@pytest.mark.parametrize(("strength", "rank"), [(0.5, 0), (1.5, 1)])
def test_diff_counts_a_direction_only_above_the_rounding_noise(tmp_path, strength, rank):
    """The largest singular value of bf16 rounding is about σ (√V + √D).

    σ² is ulp² / 12, where ulp is the unit in the last place.
    """
    rng = np.random.default_rng(0)
    # in this range, bf16's unit in the last place is 2⁻¹²
    before = rng.uniform(2**-5, 2**-4, size=(V, D)).astype(np.float32)
    edge = 2**-12 / 12**0.5 * (V**0.5 + D**0.5)
    left, right = rng.choice([-1.0, 1.0], V), rng.choice([-1.0, 1.0], D)
    change = strength * edge * np.outer(left, right) / (V * D) ** 0.5
    after = np.clip(before + change, 2**-5, 2**-4 * 0.999).astype(ml_dtypes.bfloat16)
    assert diff(*write_pair(tmp_path, before, after))["rank"].value == rank


def test_diff_reports_each_end_separately_and_notes_added_rows(tmp_path):
    before = table(V, D)
    head = {"old": table(V, D, 2), "new": np.concatenate([table(V, D, 2), table(3, D, 5)])}
    head["new"][11] += 1
    grown = np.concatenate([before, table(3, D, 4)])
    old, new = write_pair(tmp_path, before, grown, head, tokenizer=bpe_tokenizer(V))
    found = diff(old, new)
    assert found.answer.startswith(
        "none of 400 rows of the input table changed; 1 of 400 rows of the output table changed, by "
    )
    assert [q.of for q in found.quantities if q.name == "rows that moved"] == ["input table", "output table"]
    assert found.listings[0].rows[0][:2] == ("t11", "11")
    assert found.notes == tuple(f"rows 400 to 402 of the {end} table are only in {new}" for end in ("input", "output"))


def test_diff_compares_a_tied_checkpoint_with_its_untied_copy(tmp_path):
    before = table(V, D)
    llama(tmp_path / "old", True, rows=V, width=D, tensors={TABLE: before})
    head = before.copy()
    head[2] *= 2
    llama(tmp_path / "new", False, rows=V, width=D, tensors={TABLE: before, HEAD: head})
    found = diff(tmp_path / "old", tmp_path / "new")
    assert found.answer == (
        "none of 400 rows of the input table changed; 1 of 400 rows of the output table changed, "
        "by 100 % of their length; the change has rank 1"
    )


def test_diff_refuses_folders_that_it_cannot_compare(tmp_path):
    old, _ = write_pair(tmp_path, table(V, D), table(V, D))
    llama(tmp_path / "wide", rows=V, width=16)
    llama(tmp_path / "none", rows=V, width=D, tensors={TABLE: None})
    refusals = {"wide": "32 wide, and those of .* 16 wide", "none": "no table in common", "lost": "no such file"}
    for name, said in refusals.items():
        with pytest.raises(CheckpointError, match=said):
            diff(old, tmp_path / name)


def test_diff_command_prints_text_and_json(tmp_path):
    before = table(V, D)
    after = before.copy()
    after[[3, 9]] += 0.5
    paths = [str(path) for path in write_pair(tmp_path, before, after)]
    run = CliRunner().invoke(command_line(["diff"]), ["diff", *paths, "--top=1"])
    assert run.exit_code == 0
    assert run.output.startswith("2 of 400 rows of the shared table changed, by 104 % of their length")
    run = CliRunner().invoke(command_line(["diff"]), ["diff", *paths, "--json"])
    record = json.loads(run.stdout)
    assert record["answer"].startswith("2 of 400 rows of the shared table changed")
    assert {row[1] for row in record["listings"][0]["rows"]} == {"3", "9"}
