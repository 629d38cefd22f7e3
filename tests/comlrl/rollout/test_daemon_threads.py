"""Jobs in daemon threads."""

from __future__ import annotations

import threading
import time

import pytest

from comlrl.rollout.daemon_threads import Pool, run


def test_jobs_begin_in_their_order_so_many_at_a_time():
    begun: list[int] = []
    gates = [threading.Event() for _ in range(4)]

    def job(number):
        begun.append(number)
        assert gates[number].wait(60)
        return number

    def begins(count):
        while len(begun) < count:
            time.sleep(0.001)

    pool = Pool(2)
    futures = [pool.submit(lambda number=number: job(number)) for number in range(4)]
    begins(2)
    assert sorted(begun) == [0, 1]
    assert futures[2].cancel()  # it has not begun, and never does
    gates[1].set()
    begins(3)
    assert begun[2] == 3 and futures[1].result() == 1
    gates[0].set()
    gates[3].set()
    assert [futures[0].result(), futures[3].result()] == [0, 3]
    late = pool.submit(lambda: threading.current_thread().daemon)  # all threads have ended
    assert late.result() is True


def test_an_error_is_raised_once_all_have_ended():
    ended = []

    def fails():
        raise ValueError("no luck")

    def slow():
        time.sleep(0.02)
        ended.append(1)

    with pytest.raises(ValueError, match="no luck"):
        run([fails, slow])
    assert ended == [1]
