"""Alone, agreeing costs nothing and changes nothing; several processes are in tests/cli/test_launched.py."""

import signal

import pytest
import torch.distributed as dist

from tiewise.core import ranks
from tiewise.core.errors import RunError


@pytest.fixture
def group(monkeypatch):
    """A group that every function asks, of sizes as a test sets them."""
    monkeypatch.setattr(ranks, "_group", made := ranks._Group())
    return made


@pytest.fixture
def started():
    """A process group of torch, as somebody else starts one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_alone_everything_is_what_it_is():
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
def test_who_is_launched(monkeypatch, size, rank):
    for name, number in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if number:
            monkeypatch.setenv(name, number)
    assert ranks.is_launched() is ((size, rank) == ("2", "1"))


def test_a_batch_is_divided_or_refused(group):
    group.size = 3
    assert ranks.rows_per_rank(12) == 4
    with pytest.raises(RunError, match="a batch of 8 cannot be divided between 3 processes; use --set batch=9"):
        ranks.rows_per_rank(8)


def test_ranks_of_one_tp_take_the_same_rows(group):
    group.size, group.fsdp, group.tp = 12, 2, 3
    assert (ranks.sharded(), ranks.rows_per_rank(8)) == ((2, 2, 3), 2)
    with pytest.raises(RunError, match="a batch of 6 cannot be divided between 4 groups of 3; use --set batch=8"):
        ranks.rows_per_rank(6)


def test_a_group_that_somebody_else_has_started_is_met_and_left_as_it_was(started):
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


def test_a_process_that_is_gone_is_said_in_one_line(group):
    group.size = 2
    said = "another process ended while x was saved; start again"
    with pytest.raises(RunError, match=said), ranks.existing_group("x was saved", "start again"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


def test_a_press_before_the_work_of_the_first_ends_it_undone(started, monkeypatch):
    monkeypatch.setattr(ranks, "_group", group := ranks._Group(dist))
    done = []
    group.press(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        ranks.on_rank_zero(lambda: done.append("work"))
    assert done == []
