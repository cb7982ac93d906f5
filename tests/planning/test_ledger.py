"""The ledger: figures of others, as they printed them."""

import json
from importlib.resources import files

from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.planning.read_config import read


def test_every_line_says_who_printed_it_and_how_it_was_read():
    rows = json.loads(files("tiewise").joinpath("planning/data/ledger.json").read_text(encoding="utf-8"))
    assert len(rows) == len(results())
    assert all(r.source and r.checked and (r.parameters_printed is None or r.parameters_printed > 0) for r in results())


def test_one_metric_at_a_time():
    assert {r.metric for r in results(ALBERT_AVERAGE)} == {"Avg"}
    assert len(results(ALBERT_AVERAGE)) == 12
    assert results("nothing") == ()


def test_printed_counts_are_within_rounding_of_ours_but_for_the_largest():
    """ALBERT's table prints encoder and pooler; its xxlarge is printed 5 % above what its sizes give."""
    off = {}
    for r in results(ALBERT_AVERAGE)[:4]:
        sizes = {"hidden_size": r.width, "num_hidden_layers": r.layers, "num_attention_heads": r.width // 64}
        config = {"model_type": "albert", "architectures": ["AlbertModel"], "intermediate_size": 4 * r.width, **sizes}
        off[r.model] = r.parameters_printed / read(config).total - 1
    assert 0.05 < off.pop("ALBERT-xxlarge") < 0.06
    assert max(map(abs, off.values())) < 0.03


def test_points_per_million_parameters():
    (base, *_) = results(ALBERT_AVERAGE)
    assert base.per_million == 80.1 / 12
