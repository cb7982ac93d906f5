"""The share of the head, compared with counts by hand."""

import json

import pytest
from benchmarks.head_share import HeadShare, LossTimes, count_share, nearest_times, read_largest_step, read_times


def test_share_of_a_llama_equals_the_count_by_hand():
    """Llama 3.1 8B has 32 layers of width 4,096, 8 key-value heads of 128, an ffn of 14,336, and 128,256 words."""
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    ffn = 3 * 4096 * 14_336
    scores = 2 * 2048 * 4096  # two products of each of 2,048 positions with the queries
    head = 128_256 * 4096
    share = count_share("llama-3.1-8b").share
    assert share == pytest.approx(head / (head + 32 * (attention + ffn + scores)), rel=1e-6)


def test_step_ratio_is_that_of_the_times_of_body_and_head():
    model = HeadShare("", 0, 0, 0, share=0.25)
    body, head = 3.0, 1.0  # seconds of their products
    assert model.step_ratio(LossTimes(768, 4.0, 2.0)) == pytest.approx((body + 4 * head) / (body + 2 * head))


def test_times_are_those_of_the_nearest_width(tmp_path):
    rows = [{"name": "plain", "ratio": 3.0}, {"name": "tiewise", "ratio": 1.5}]
    other = [*rows, {"name": "tiewise, triton", "ratio": 1.25}]
    measurements = [
        {"dtype": "bfloat16", "shape": [1, 2, 768], "rows": rows},
        {"dtype": "bfloat16", "shape": [1, 2, 4096], "rows": other},
        {"dtype": "float32", "shape": [1, 2, 2048], "rows": rows},
    ]
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"measurements": measurements}))
    times = read_times(path)
    assert times == [LossTimes(768, 3.0, 1.5), LossTimes(4096, 3.0, 1.25)]
    assert nearest_times(times, 640).width == 768
    assert nearest_times(times, 2048).width == 4096


def test_measured_step_is_that_of_the_largest_shape():
    rows = "| plain transformers | 9 | 1.00 | 1.00 |\n| installed | 9 (8–9) | 0.50 | {} |\n"
    bf16 = "| installed, bf16 | 9 (8–9) | 0.10 | 0.80 |\n| installed, fastest products | 9 | 0.3 | 0.3 |\n"
    shapes = "\nB = 8, T = 64, D = 8, L = 2, V = 50, tied\n\n", "\nB = 4, T = 8, D = 4, L = 2, V = 128, tied\n\n"
    text = "# step\n" + shapes[0] + rows.format("0.90") + shapes[1] + rows.format("0.50") + bf16
    model, ratios = read_largest_step(text)
    assert ratios == pytest.approx({"fp32": 2, "bf16": 1.25})
    assert (model.vocab, model.width, model.layers, model.share) == (128, 4, 2, 0.5)  # 2 layers of 48 + 16
