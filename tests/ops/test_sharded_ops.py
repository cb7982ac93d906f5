"""A table over several ranks: what they find together is what one finds; `sharded_ops.py` has the cases."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiewise.core.errors import UnsupportedError
from tiewise.ops.vocabulary_shard import VocabularyShard

TRAPS = ["smoothing_over_all_rows", "gathered_logits_count_once", "padding_is_a_row_of_all", "uneven_rows_all_move"]
EXACT = ["differentiated_again", "one_buffer", "rows_of_minus_infinity", "path_norms_of_all", "refusals"]
EXACT += ["own_tokens", "own_tokens_told"]
LONG = ["every_option", "large_vocabulary", "narrow_types", "log_probabilities"]


def ranks(tmp_path, size, cases):
    command = [sys.executable, "-m", "tests.ops.sharded_ops", str(tmp_path / "store"), str(size), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_two_ranks_agree_with_one(tmp_path):
    ranks(tmp_path, 2, ["a_few_options", *EXACT, *TRAPS])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_option_agrees_with_one_rank(tmp_path, size):
    ranks(tmp_path, size, LONG)


@pytest.mark.slow
def test_four_ranks_one_of_them_without_rows(tmp_path):
    ranks(tmp_path, 4, [*EXACT, *TRAPS])


def test_there_is_no_shard_without_ranks():
    with pytest.raises(UnsupportedError, match="init_process_group"):
        VocabularyShard(97)
