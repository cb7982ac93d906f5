"""Test calls with a time limit: their results, their errors, and the end of one that takes too long."""

import threading
import time

import pytest

from tiewise.checkpoint.time_limits import OutOfTime, TimeLimit, call_within


def test_result_and_error_are_those_of_the_call():
    assert call_within(TimeLimit.of(60), lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        call_within(TimeLimit.of(60), lambda: 1 / 0)


def test_call_out_of_time_ends_and_runs_its_cleanup():
    ended = threading.Event()

    def work():
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    started = time.monotonic()
    with pytest.raises(OutOfTime):
        call_within(TimeLimit.of(0.2), work)
    assert time.monotonic() - started >= 0.2
    assert ended.wait(30)


def test_call_that_moves_its_limit_ends_in_time():
    limit = TimeLimit.of(1)

    def work():
        for _ in range(25):
            time.sleep(0.05)
            limit.end = time.monotonic() + 10
        return "done"

    assert call_within(limit, work) == "done"
