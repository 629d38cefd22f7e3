"""Jobs in daemon threads."""

from __future__ import annotations

import threading

import pytest

from comlrl.rollout import daemon_threads


def test_a_job_is_done_in_a_daemon_thread():
    assert daemon_threads.start(lambda: threading.current_thread().daemon).result(60) is True


def test_a_job_that_has_begun_is_not_cancelled():
    gate = threading.Event()
    future = daemon_threads.start(gate.wait)
    assert not future.cancel()
    gate.set()
    assert future.result(60) is True


def test_an_error_is_the_future_s():
    with pytest.raises(ZeroDivisionError):
        daemon_threads.start(lambda: 1 // 0).result(60)
