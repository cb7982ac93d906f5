"""Test the output and exit codes of commands that rewrite a checkpoint."""

import json

import numpy as np
import pytest
from tests.checkpoint.tiny_checkpoints import llama, llama_tensors, table


@pytest.mark.parametrize("command", ["repair", "tie", "vocab resize --vocab 24"])
def test_rewrite_with_nothing_to_do_exits_0_and_writes_no_folder(tiewise, tmp_path, command):
    llama(tmp_path / "a[1]", True)
    words = command.split()
    result = tiewise(*words, "a[1]", "--to", "b")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("a[1]: ")
    assert result.out.endswith("; b was not made\n")
    assert not (tmp_path / "b").exists()
    assert result.out.count("\n") == 1
    result = tiewise(*words, "a[1]", "--to", "b", "--json")
    assert result.code == 0
    assert json.loads(result.out)["verb"] in words


def test_repair_exits_2_if_fault_needs_manual_repair(tiewise, tmp_path):
    llama(tmp_path / "a", True, head=0.02 * table(seed=5))
    result = tiewise("repair", "a", "--to", "b")
    assert (result.code, result.out) == (2, "")
    assert "no finding has a safe fix; fix by hand: B012" in result.err


def test_factor_reports_lost_share_and_heal_command(tiewise, tmp_path):
    llama(tmp_path / "a", True)
    result = tiewise("factor", "a", "--rank", 3, "--to", "new dir", "--json")
    receipt = json.loads(result.out)
    values = np.linalg.svd(llama_tensors()["model.embed_tokens.weight"].astype(np.float64), compute_uv=False)
    share = np.sqrt(np.square(values[3:]).sum() / np.square(values).sum())
    assert receipt["lost"] == [f"model.embed_tokens.weight: {100 * share:.0f} % of its norm is beyond rank 3"]
    assert receipt["next_command"] == "tiewise heal 'new dir' --teacher a"
    printed = tiewise("factor", "a", "--rank", 3, "--to", "c").out
    assert "tiewise heal c --teacher a" in printed
    assert printed.count("tiewise heal") == 1
    dry = tiewise("factor", "a", "--rank", 3, "--to", "d", "--dry-run").out
    assert "tiewise heal" not in dry  # d does not exist


@pytest.mark.parametrize(("keep", "ends"), [("input", "o"), ("output", "i"), ("mean", "oi")])
def test_tie_reports_lost_share_and_heal_command(tiewise, tmp_path, keep, ends):
    llama(tmp_path / "a", False, head=table(seed=7))
    receipt = json.loads(tiewise("tie", "a", "--to", "b", "--keep", keep, "--json").out)
    lookup, head = (array.astype(np.float64) for array in (table(), table(seed=7)))
    new_table = {"input": lookup, "output": head, "mean": (lookup + head) / 2}[keep]
    share = {end: np.linalg.norm(x - new_table) / np.linalg.norm(x) for end, x in (("i", lookup), ("o", head))}
    names = {"i": "model.embed_tokens.weight", "o": "lm_head.weight"}
    expected = [f"{names[end]}: the one table differs from it by {100 * share[end]:.0f} % of its norm" for end in ends]
    assert receipt["lost"] == expected
    assert receipt["next_command"] == "tiewise heal b --teacher a"


def test_untie_reports_no_loss_and_no_next_command(tiewise, tmp_path):
    llama(tmp_path / "a", True)
    receipt = json.loads(tiewise("untie", "a", "--to", "b", "--json").out)
    assert (receipt["lost"], receipt["next_command"]) == ([], None)
