"""Rounded ends against scalar rounding code and a dense fp64 model with rounded tables."""

import copy

import numpy as np
import pytest
import torch
from tests.boundary.tiny_models import build
from tests.inspection.running.test_two_paths import logits_of, loss_and_inputs, open_in_fp64, text

from tiewise.inspection.sections.precision import int8_by_row, precision_of, q4_0


def round_int8_by_row(table):
    """Round to int8 with a scale per row, one number at a time."""
    made = np.zeros_like(table)
    for r, row in enumerate(table):
        scale = max(abs(x) for x in row) / 127
        for c, x in enumerate(row):
            made[r, c] = scale * np.rint(x / scale) if scale else 0
    return made


def round_q4_0_by_block(table):
    """Round as ggml's quantize_row_q4_0_ref and dequantize_row_q4_0 do, one number at a time."""
    made = np.zeros_like(table)
    for r, row in enumerate(table):
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            most = largest = 0.0
            for x in block:
                if most < abs(x):
                    most, largest = abs(x), x
            d = largest / -8
            inverse = 1 / d if d else 0.0
            for c, x in enumerate(block, start):
                made[r, c] = (min(15, int(x * inverse + 8.5)) - 8) * np.float64(np.float16(d))
    return made


@pytest.mark.parametrize("width", [7, 32, 70])
def test_int8_by_row_and_q4_0_match_scalar_rounding(width):
    table = np.random.default_rng(0).normal(size=(40, width)) * np.logspace(-6, 2, 40)[:, None]
    table[3], table[5, :] = 0, table[5, 0]
    table[6, 0] = -np.abs(table[6]).max()  # the largest magnitude of a block, with either sign
    for rounded, by_hand in ((int8_by_row, round_int8_by_row), (q4_0, round_q4_0_by_block)):
        np.testing.assert_allclose(rounded(torch.from_numpy(table)).numpy(), by_hand(table), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt_350m", "bart", "bert"])
def test_precision_of_matches_a_dense_fp64_model_with_rounded_tables(name, tied, tmp_path):
    model, windows = open_in_fp64(build(name, tied=tied), tmp_path), text(6)
    loss, masked = loss_and_inputs(model, windows)

    def with_tables(table, head):
        other = copy.deepcopy(model.model)
        lookups = [m for m in other.modules() if isinstance(m, torch.nn.Embedding)]
        source = model.ends.main_lookup.weight
        old = [m for m in model.model.modules() if isinstance(m, torch.nn.Embedding)]
        for mine, its in zip(lookups, old, strict=True):
            if its.weight is source:
                mine.weight = torch.nn.Parameter(table)
        other.get_output_embeddings().weight = torch.nn.Parameter(head)
        with torch.no_grad():
            logits, targets = logits_of(other, loss.objective, torch.from_numpy(windows), masked)
        return logits.log_softmax(-1), targets

    table, head = model.ends.main_lookup.weight.detach(), model.ends.head.weight.detach()
    base, targets = with_tables(table, head)
    found = precision_of(model, windows)
    for bits, by_hand in ((8, round_int8_by_row), (4, round_q4_0_by_block)):
        a, b = (torch.from_numpy(by_hand(x.numpy())) for x in (table, head))
        for end, ends in {"lookup": (a, head), "head": (table, b), "both": (a, b)}.items():
            other, _ = with_tables(*ends)
            kl = (base.exp() * (base - other)).sum(-1).mean()
            assert found[f"{end}, {bits} bits"].value == pytest.approx(float(kl), rel=1e-9, abs=1e-14)
            more = (base - other).gather(1, targets[:, None]).mean()
            assert found[f"loss more, {end}, {bits} bits"].value == pytest.approx(float(more), rel=1e-9, abs=1e-12)
    assert any("needs a second table" in note for note in found.notes) == tied
    assert model.ends.tied == tied
    assert torch.equal(model.ends.head.weight, head)


@pytest.mark.parametrize(
    ("size", "off"),
    [
        (1.0, {"abs": 1e-6}),
        (1e5, {"rel": 0.01, "abs": 0.5}),  # rounding changes the top tokens; fp32 rounds such logits to 0.01
    ],
)
def test_precision_of_gives_the_same_result_in_fp32(size, off, tmp_path):
    model = open_in_fp64(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight.mul_(size)
    wanted = precision_of(model, text(6))
    assert (wanted["head, 4 bits"].value > 100) == (size > 1)
    model.model.float()
    for q in precision_of(model, text(6)).quantities:
        assert q.value == pytest.approx(wanted[q.name].value, **off)


def test_precision_of_answers_with_the_end_of_lower_kl(tmp_path):
    model = open_in_fp64(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight.copy_(int8_by_row(model.ends.head.weight) * 1e-3)  # nearly equal logits
    found = precision_of(model, text(9))
    assert found.answer.startswith("quantise the head first: 4 bits cost ")
    assert found["head, 4 bits"].high < found["lookup, 4 bits"].low


def test_precision_of_is_independent_of_batch_size(tmp_path, monkeypatch):
    model = open_in_fp64(build("gpt2"), tmp_path)
    whole = precision_of(model, text(7))
    monkeypatch.setattr("tiewise.inspection.running.two_paths._MOST_LOGITS", 9 * 12 * 61)
    monkeypatch.setattr("tiewise.inspection.sections.precision._AT_ONCE", 300)
    for q in precision_of(model, text(7)).quantities:
        was = whole[q.name]
        assert (q.value, q.low, q.n) == pytest.approx((was.value, was.low, 7), rel=1e-9, abs=1e-13)
