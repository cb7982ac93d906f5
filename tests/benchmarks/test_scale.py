"""Compare a few figures of `docs/distributed.md` with sums by hand; `make docs` compares the page with its command."""

from benchmarks import scale
from tiewise.planning.read_config import Sizes

V, E, N = 128_000, 8192, 1_000_000
SIZES = Sizes(V, E, 1)


def test_rank_matches_traffic_and_memory_computed_by_hand_for_1000_ranks():
    averaged = scale.plan_rank(SIZES, N, 1000, "data parallel")
    assert averaged["sent_for_tables"] == 2 * 999 * V * E * 2 // 1000
    assert averaged["table_memory"]["total"] == 16 * V * E
    split = scale.plan_rank(SIZES, N, 1000, "vocabulary parallel", tp=8)  # 8,000 tokens of a group, 125 groups
    states, gradient = 2 * 7 * 8000 * E * 2 // 8, 2 * 124 * 16_000 * E * 2 // 125
    assert split["sent_for_tables"] == 2 * states + 7 * 8000 * 8 + gradient
    both = scale.plan_rank(SIZES, N, 1000, "fsdp × vocabulary parallel", tp=8, fsdp=0)  # 16,000 rows over 125: 128
    assert both["sent_for_tables"] == 2 * states + 7 * 8000 * 8 + gradient
    weights = 128 * E * 2
    shares = {"weights": weights, "gradients": weights, "state": 6 * weights, "total": 8 * weights}
    assert both["table_memory"] == shares | {"gathered": 2 * 16_000 * E * 2}
    sharded_tables = scale.plan_rank(SIZES, N, 1000, "fsdp, tables kept sharded")
    assert sharded_tables["sent_for_tables"] == 999 * 1000 * (4 * E * 2 + 8 * 1000 + 16)
    assert scale.plan_rank(SIZES, N, 8, "fsdp × vocabulary parallel", tp=8, fsdp=0) is None


def test_traffic_is_least_for_fsdp_group_of_root_v_over_2n_ranks():
    def bytes_sent(ranks):
        return scale.plan_rank(SIZES, N, 1000, "fsdp, tables kept sharded", fsdp=ranks)["sent_for_tables"]

    best = round((V / (2 * N / 1000)) ** 0.5)
    assert best == 8
    assert all(bytes_sent(best) < bytes_sent(other) for other in (2, 4, 5, 10, 20, 1000))
