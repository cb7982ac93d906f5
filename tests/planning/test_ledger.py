"""Test the ledger of published results against its own file and against counted configs."""

import json
from importlib.resources import files

from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.planning.read_config import read


def test_every_ledger_result_has_a_source_and_a_check():
    rows = json.loads(files("tiewise").joinpath("planning/data/ledger.json").read_text(encoding="utf-8"))
    assert len(rows) == len(results())
    assert all(r.source and r.checked and (r.parameters_printed is None or r.parameters_printed > 0) for r in results())


def test_results_filters_by_metric():
    assert {r.metric for r in results(ALBERT_AVERAGE)} == {"Avg"}
    assert len(results(ALBERT_AVERAGE)) == 14
    assert results("nothing") == ()


def test_read_matches_printed_albert_counts_except_for_xxlarge():
    """ALBERT's table prints the parameters of encoder and pooler; its xxlarge entry is 5 % above the counted value."""
    off = {}
    for r in results(ALBERT_AVERAGE)[:4]:
        sizes = {"hidden_size": r.width, "num_hidden_layers": r.layers, "num_attention_heads": r.width // 64}
        config = {"model_type": "albert", "architectures": ["AlbertModel"], "intermediate_size": 4 * r.width, **sizes}
        off[r.model] = r.parameters_printed / read(config).total - 1
    assert 0.05 < off.pop("ALBERT-xxlarge") < 0.06
    assert max(map(abs, off.values())) < 0.03


def test_per_million_divides_the_score_by_the_printed_millions():
    (base, *_) = results(ALBERT_AVERAGE)
    assert base.per_million == 80.1 / 12
