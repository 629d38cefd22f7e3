"""Pieces of work side by side, and what each may spend."""

from __future__ import annotations

import threading

import pytest
import torch

from comlrl.update.worker_threads import run_parallel, worker_threads

HERE = torch.device("cpu")


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def pieces_of_its_own() -> int:
    """As many as there is room for, which must all run at once."""
    meeting = threading.Barrier(worker_threads(HERE), timeout=60)

    def piece() -> int:
        meeting.wait()
        return torch.get_num_threads()

    return len(run_parallel([piece] * worker_threads(HERE), HERE))


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize(
    ("jobs", "each"), [(1, [8]), (2, [4] * 2), (3, [2] * 3), (8, [1] * 8), (11, [1] * 8 + [2] * 3)]
)
def test_jobs_share_the_cores(jobs, each):
    assert run_parallel([pieces_of_its_own] * jobs, HERE) == each
    assert torch.get_num_threads() == 8


@pytest.mark.usefixtures("eight_threads")
def test_a_job_is_not_given_the_threads_that_another_thread_sets():
    def threads_after_another_thread_set_its_number() -> int:
        other = threading.Thread(target=torch.set_num_threads, args=(1,))
        other.start()
        other.join()
        return torch.get_num_threads()

    assert run_parallel([threads_after_another_thread_set_its_number] * 2, HERE) == [4, 4]


@pytest.mark.usefixtures("eight_threads")
def test_one_after_the_other_where_only_one_can():
    here = threading.get_ident()
    assert run_parallel([threading.get_ident] * 3, HERE, allowed=False) == [here] * 3
    assert run_parallel([lambda: worker_threads(HERE)] * 2, torch.device("cuda")) == [8, 8]


@pytest.mark.usefixtures("eight_threads")
def test_an_error_is_raised_when_all_have_ended():
    ended = threading.Event()

    def fails() -> None:
        raise ValueError("the first")

    def takes_longer() -> None:
        threading.Event().wait(0.2)
        ended.set()

    with pytest.raises(ValueError, match="the first"):
        run_parallel([fails, takes_longer], HERE)
    assert ended.is_set()
