"""B080: fires where some loader makes another model of the folder, silent where all agree."""

import numpy as np
import pytest
from rule_runs import one, run
from tiny_checkpoints import V, llama, llama_config, table, write_checkpoint

TABLE = "model.embed_tokens.weight"
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


@pytest.mark.parametrize("tied", [True, False])
def test_silent_where_all_loaders_agree(tmp_path, tied):
    assert run("B080", llama(tmp_path / "a", tied)) == []
    assert run("B080", llama(tmp_path / "b", True, config=GEMMA)) == []
    assert run("B080", write_checkpoint(tmp_path / "c", None, {TABLE: table()})) == []


def test_names_every_loader_that_drops_the_head(tmp_path):
    finding = one("B080", llama(tmp_path, True, head=table(seed=2)))
    assert finding.severity == "warning"
    assert "3 of 6 loaders" in finding.evidence
    assert "transformers 4: head dropped" in finding.evidence
    assert "vLLM before August 2026: head dropped" in finding.evidence
    assert "mlx-lm 0.2x: head dropped" in finding.evidence


def test_a_loader_to_blame_alone(tmp_path):
    finding = one("B080", llama(tmp_path, False, config=GEMMA))
    assert finding.severity == "warning"
    assert "1 of 6 loaders" in finding.evidence
    assert "llama.cpp convert_hf_to_gguf: head dropped" in finding.evidence


def test_only_a_note_on_this_packages_own_tables(tmp_path):
    config = llama_config(True, width=16) | {"model_type": "tiewise", "base_model_type": "llama"}
    config |= {"tiewise_boundary": "factored:4", "architectures": ["TiewiseLlamaForCausalLM"]}
    tensors = {TABLE: table(V, 4), "model.embed_tokens.in_map.weight": table(16, 4)}
    tensors |= {"lm_head.out_map.weight": table(4, 16), "model.norm.weight": np.ones(16, np.float32)}
    path = write_checkpoint(tmp_path, config, tensors)
    finding = one("B080", path)
    assert finding.severity == "info"
    assert f"tiewise densify {path} --to NEW_DIR" in finding.repair
