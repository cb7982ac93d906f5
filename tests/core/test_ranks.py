"""Test the functions of ranks in one process; tests/cli/test_launched.py runs several."""

import signal

import pytest
import torch.distributed as dist

from tiewise.core import ranks
from tiewise.core.errors import RunError


@pytest.fixture
def group(monkeypatch):
    """Install a group whose sizes a test can set."""
    monkeypatch.setattr(ranks, "_group", new_group := ranks._Group())
    return new_group


@pytest.fixture
def process_group():
    """Start a process group of torch before tiewise does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_functions_change_nothing_in_one_process():
    before = signal.getsignal(signal.SIGINT)
    ranks.join()
    assert (ranks.size(), ranks.is_first(), ranks.rows_per_rank(7)) == (1, True, 7)
    assert (ranks.any_of(True), ranks.any_of(False)) == (True, False)
    assert (ranks.rank(), ranks.all_of("mine")) == (0, ["mine"])
    with ranks.existing_group("nothing happened", "go on"):
        assert ranks.size() == 1
    value = object()
    assert ranks.on_rank_zero(lambda: value) is value
    error = KeyError("x")
    with pytest.raises(KeyError) as raised, ranks.agreed():
        raise error
    assert raised.value is error
    ranks.leave(together=True)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("size", "rank"), [("", ""), ("1", "0"), ("2", ""), ("2", "1")])
def test_is_launched_requires_world_size_above_one_and_rank(monkeypatch, size, rank):
    for name, number in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if number:
            monkeypatch.setenv(name, number)
    assert ranks.is_launched() is ((size, rank) == ("2", "1"))


def test_rows_per_rank_divides_batch_or_refuses_it(group):
    group.size = 3
    assert ranks.rows_per_rank(12) == 4
    with pytest.raises(RunError, match="a batch of 8 cannot be divided between 3 processes; use --set batch=9"):
        ranks.rows_per_rank(8)


def test_rows_per_rank_counts_tensor_parallel_group_once(group):
    group.size, group.fsdp, group.tp = 12, 2, 3
    assert (ranks.sharded(), ranks.rows_per_rank(8)) == ((2, 2, 3), 2)
    with pytest.raises(RunError, match="a batch of 6 cannot be divided between 4 groups of 3; use --set batch=8"):
        ranks.rows_per_rank(6)


def test_existing_group_uses_running_process_group_and_leaves_it_open(process_group):
    alone = ranks._group
    with ranks.existing_group("x was saved", "start again"):
        assert ranks._group.dist is dist
        assert ranks.all_of(7) == [7]
    assert ranks._group is not alone
    assert ranks._group.dist is None
    with pytest.raises(RuntimeError, match="other"), ranks.existing_group("x was saved", "start again"):
        raise RuntimeError("other")
    assert ranks._group.dist is None
    assert dist.is_initialized()


def test_existing_group_reports_lost_process_in_one_line(group):
    group.size = 2
    message = "another process ended while x was saved; start again"
    with pytest.raises(RunError, match=message), ranks.existing_group("x was saved", "start again"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


def test_ctrl_c_before_work_of_rank_zero_prevents_the_work(process_group, monkeypatch):
    monkeypatch.setattr(ranks, "_group", group := ranks._Group(dist))
    done = []
    group.press(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        ranks.on_rank_zero(lambda: done.append("work"))
    assert done == []
