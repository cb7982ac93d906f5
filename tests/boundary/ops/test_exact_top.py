"""Exact largest logits compared with `math.fsum`, and the bounds that select them with rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiewise.boundary.ops import exact_top
from tiewise.boundary.ops.compiled_kernels import kernels
from tiewise.boundary.ops.exact_top import ExactTop, exact_dots
from tiewise.core.errors import UnsupportedError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(table, h, k, bias=None, scale=1.0, softcap=None):
    """Return scores and tokens of one hidden state, by the standard library's correctly rounded sum."""
    added = [0.0] * len(table) if bias is None else bias.tolist()
    dots = [math.fsum(a * b for a, b in zip(row, h.tolist(), strict=True)) for row in table.tolist()]
    y = [dot * scale + b for dot, b in zip(dots, added, strict=True)]
    order = sorted(range(len(y)), key=lambda v: (-y[v], v))[:k]
    scores = torch.tensor([y[v] for v in order], dtype=torch.float64)
    return (scores if softcap is None else softcap * torch.tanh(scores / softcap)).float(), torch.tensor(order)


def assert_exact(top, hidden, k, **options):
    scores, tokens = top.top(hidden, k, **options)
    for i, h in enumerate(hidden):
        true_scores, true_tokens = reference(top.table, h, k, **options)
        assert torch.equal(tokens[i], true_tokens)
        assert torch.equal(scores[i], true_scores)


def random_tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# few distinct numbers, so that rows often tie, with both zeros and numbers near the ends of the range of fp32
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-45, -1e-40, 1.2e-38, 6e-8, 1e20, -3e38, 2.0**-130])


@given(st.data())
def test_top_equals_fsum_for_any_numbers(data):
    v, e, k = (data.draw(st.integers(1, most)) for most in (12, 9, 14))
    dtype = data.draw(st.sampled_from(DTYPES))
    numbers = st.one_of(NUMBERS, st.floats(-4, 4, width=16))
    table = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=e, max_size=e), min_size=v, max_size=v)))
    hidden = torch.tensor([data.draw(st.lists(numbers, min_size=e, max_size=e))])
    assert_exact(ExactTop(table.clamp(-6e4, 6e4).to(dtype)), hidden.clamp(-6e4, 6e4).to(dtype), k)
    assert_exact(ExactTop(table), hidden, k)


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 40), st.integers(0, 999), st.sampled_from(DTYPES))
def test_top_is_exact_for_any_shape_scale_and_bias(v, e, k, seed, dtype):
    table, bias = random_tensor(v, e, seed=seed, dtype=dtype), random_tensor(v, seed=seed + 1)
    hidden = random_tensor(2, e, seed=seed + 2)
    top = ExactTop(table)
    assert_exact(top, hidden, k)
    assert_exact(top, hidden, k, bias=bias, scale=(-1) ** seed * 0.3, softcap=1.5)
    assert top.counts.queries == 4


def test_equal_logits_are_ordered_by_token():
    table = random_tensor(1, 40).repeat(500, 1)
    table[100] *= 0.5
    scores, tokens = ExactTop(table).top(table[:1], 103)
    assert tokens[0].tolist() == [*range(100), 101, 102, 103]
    assert scores.unique().numel() == 1
    assert ExactTop(table).argmax(torch.zeros(3, 40)).tolist() == [0, 0, 0]


def test_top_orders_rows_that_int8_cannot_distinguish():
    # rows differ only in their last bits, so every row is a candidate and fp64 reads the whole table
    table = (random_tensor(1, 64) + 1e-7 * random_tensor(1000, 64, seed=1)).contiguous()
    top = ExactTop(table)
    assert_exact(top, random_tensor(3, 64, seed=2), 5)
    assert top.counts.full_scans == 3


def test_top_is_exact_for_rows_and_queries_of_mixed_magnitude():
    table, hidden = random_tensor(2000, 96) * 1e-3, random_tensor(4, 96, seed=1)
    table[7] *= 1e6
    table[1000:1100] *= 1e-42
    hidden[1] *= 1e-30
    hidden[2, 5] = 1e4
    hidden[3, 9] = 1e30
    assert_exact(ExactTop(table), hidden, 20)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_top_follows_torch_for_values_that_are_not_finite(wrong):
    table, hidden = random_tensor(50, 24), random_tensor(2, 24, seed=1)
    table[[3, 30], 5] = wrong
    top = ExactTop(table)
    scores, tokens = top.top(hidden, 50)
    true_scores, true_tokens = (hidden.double() @ table.double().T).sort(descending=True, stable=True)
    assert torch.equal(tokens, true_tokens)
    torch.testing.assert_close(scores, true_scores.float(), equal_nan=True, rtol=1e-6, atol=1e-6)
    assert top.counts.full_scans == 2

    table, hidden[0, 2] = random_tensor(50, 24), wrong
    scores, tokens = ExactTop(table).top(hidden, 50)
    true_scores, true_tokens = (hidden.double() @ table.double().T).sort(descending=True, stable=True)
    assert torch.equal(tokens, true_tokens)
    assert torch.equal(scores[0], true_scores[0].float()) or math.isnan(wrong)


@pytest.mark.parametrize("scale", [1.0, -1e30, 1e-60])
def test_top_is_exact_for_the_smallest_rows_and_largest_queries(scale):
    # 1e-42 · 3e38 · 200: every intermediate number is near an end of the range of fp32
    table, hidden = random_tensor(200, 300) * 1e-42, random_tensor(3, 300, seed=1).sign() * 3e38
    table[::9] = 0
    hidden[1] *= 1e-4
    hidden[2] *= 1e-30
    assert_exact(ExactTop(table), hidden, 5, scale=scale, bias=random_tensor(200, seed=2) * abs(scale) * 1e-3)
    assert_exact(ExactTop(hidden.repeat(3, 1)), torch.stack((hidden[0] * 0, table[1], hidden[0])), 2, scale=scale)
    assert_exact(ExactTop(table), hidden, 5)


def test_logits_beyond_fp32_overflow_only_in_the_returned_score():
    table, hidden = random_tensor(40, 8) * 1e30, random_tensor(1, 8, seed=1) * 1e30
    scores, tokens = ExactTop(table).top(hidden, 40)
    assert tokens.tolist() == (hidden.double() @ table.double().T).argsort(descending=True).tolist()
    assert scores.abs().eq(math.inf).all()


@given(st.integers(2, 20), st.integers(2, 90), st.integers(0, 999), st.sampled_from([1e-42, 1e-12, 1.0, 1e12]))
def test_every_logit_is_within_its_documented_bound(v, e, seed, size):
    # rational arithmetic checks the documented bound without any slack
    table, hidden = random_tensor(v, e, seed=seed) * size, random_tensor(1, e, seed=seed + 1).double()
    hidden[0, seed % e] *= 50
    top = ExactTop(table)
    digits, sigma, lost = exact_top.split_digits(hidden)
    assert digits.dtype == torch.int8
    seen = top._estimate(digits, sigma)
    if seen is None:
        pytest.skip("nothing has an exact int8 product here")
    h = [Fraction(x) for x in hidden[0].tolist()]
    length = math.sqrt(sum(x * x for x in h))
    for i, row in enumerate(table.tolist()):
        z = sum(a * Fraction(b) for a, b in zip(h, row, strict=True))
        q, step = top.rows[i].tolist(), float(top.steps[i])
        rest = math.sqrt(sum((Fraction(b) - Fraction(step) * c) ** 2 for b, c in zip(row, q, strict=True)))
        assert rest <= float(top.rests[i]) <= rest * (1 + 1e-5) + 1e-44
        bound = float(top.rests[i]) * length + float(top.steps[i]) * top.longest * (lost[0] + 2.0**-22 * length)
        assert abs(z - Fraction(float(seen[0, i]))) <= Fraction(float(bound)) + Fraction(2) ** -148


@given(st.integers(1, 70), st.integers(0, 999), st.booleans())
def test_exact_dots_round_once(e, seed, cancels):
    rows, h = (
        random_tensor(5, e, seed=seed) * 10.0 ** random_tensor(5, e, seed=seed + 1).mul(6).round(),
        random_tensor(e, seed=seed + 2),
    )
    if cancels:  # terms cancel almost or exactly
        rows, h = torch.cat((rows, -rows, rows[:, :1] * 1e-9), 1), torch.cat((h, h, h[:1]))
        rows[0, -1] = 0
    true = [math.fsum(a * b for a, b in zip(row, h.tolist(), strict=True)) for row in rows.tolist()]
    assert exact_dots(rows, h.double()).tolist() == true


def test_int8_copy_follows_changes_of_the_table():
    table = torch.nn.Parameter(random_tensor(300, 32))
    hidden = random_tensor(1, 32, seed=1)
    top = ExactTop(table)
    assert_exact(top, hidden, 3)
    with torch.no_grad():
        table.neg_()
    assert_exact(top, hidden, 3)
    table.data.copy_(random_tensor(300, 32, seed=5))
    top.refresh()
    assert_exact(top, hidden, 3)


def test_top_reads_few_rows_and_keeps_a_small_copy():
    top = ExactTop(random_tensor(20_000, 128))
    hidden = random_tensor(4, 128, seed=1)
    assert_exact(top, hidden[:1], 2)
    top.argmax(hidden)
    assert top.counts.full_scans == 0
    assert top.counts.rows < 5 * 200
    assert sum(x.nbytes for x in (top.rows, top.steps, top.rests)) == 20_000 * (128 + 8)


@pytest.mark.parametrize("way", ["compiled", "torch", "none"])
def test_top_is_the_same_with_compiled_torch_and_no_int8_products(way, monkeypatch):
    if way == "compiled" and kernels("avx512_vnni") is None:
        pytest.skip("tiewise kernels build")
    if way == "torch" and not exact_top.has_exact_int8():
        pytest.skip("torch has no exact int8 product here")
    if way != "compiled":
        monkeypatch.setenv("TIEWISE_KERNELS", "off")
    if way == "none":
        monkeypatch.setattr(exact_top, "has_exact_int8", lambda: False)
    for v, e, n in ((1, 1, 1), (3, 1, 2), (1, 64, 1), (777, 63, 3), (500, 65, 1), (200, 256, 2), (50, 321, 1)):
        table, hidden = random_tensor(v, e), random_tensor(n, e, seed=1)
        table[::3] = table[::3].sign() * 2  # every int8 digit is the largest possible
        top = ExactTop(table)
        assert_exact(top, hidden, 4)
        assert (top.counts.full_scans == 0) <= (way != "none")
        digits, sigma, _ = exact_top.split_digits(hidden.double())
        seen = top._estimate(digits, sigma)
        if seen is not None:  # sums of integers are exact in any order
            dots = digits.double() @ top.rows.double().T
            true = top.steps * (sigma[:, None] * (dots[:, 0] + dots[:, 1] / 256))
            torch.testing.assert_close(seen.double(), true, rtol=2.0**-24, atol=0)


def test_top_accepts_hidden_states_of_any_shape():
    table, hidden = random_tensor(60, 16), random_tensor(2, 3, 16, seed=1)
    top = ExactTop(table)
    scores, tokens = top.top(hidden, 100)
    assert scores.shape == tokens.shape == (2, 3, 60)
    assert torch.equal(top.argmax(hidden), tokens[..., 0])
    assert torch.equal(tokens[1, 2], reference(table, hidden[1, 2], 60)[1])
    assert top.top(hidden[:0], 3)[0].shape == (0, 3, 3)


def test_exact_top_refuses_invalid_input():
    top, hidden = ExactTop(random_tensor(4, 4)), random_tensor(1, 4)
    for kind, said, call in (
        (UnsupportedError, "fp32, bf16 or fp16", lambda: ExactTop(random_tensor(4, 4).double())),
        (UnsupportedError, r"\[V, E\]", lambda: ExactTop(random_tensor(4))),
        (UnsupportedError, "hidden states", lambda: top.argmax(hidden.double())),
        (ValueError, "do not meet", lambda: top.argmax(random_tensor(1, 5))),
        (ValueError, "bias", lambda: top.argmax(hidden, bias=random_tensor(5))),
        (ValueError, "need top_k", lambda: top.top(hidden, 0)),
        (ValueError, "need top_k", lambda: top.top(hidden, 1, scale=math.inf)),
        (ValueError, "need top_k", lambda: top.top(hidden, 1, softcap=0.0)),
        (ValueError, "need top_k", lambda: top.top(hidden, 1, softcap=math.inf)),
    ):
        with pytest.raises(kind, match=said):
            call()
