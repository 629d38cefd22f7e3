"""No program earns a point for tests, leaves a trace, or outlives its time; honest ones after it
still get their exact reward. Real sandboxes: the best level of this machine, and limits alone."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox.inside.confine import FIRST_UID
from comlrl.rewards.sandbox.levels import LEVELS, failure
from comlrl.types import JointAction
from tests.support.fakes import code_task
from tests.support.marks import some_slow
from tests.support.sandbox import workers

SECTIONS = Path(__file__).with_name("adversaries.txt").read_text().split("\n==== ")[1:]
PROGRAMS = dict(section.split("\n", 1) for section in SECTIONS)
TIMEOUT = 0.6
WORKERS = 2
TEST = """
def check(candidate):
    assert candidate(3) == 14
    assert candidate(5) == 30
    assert candidate(7) == 54
    assert candidate(0) == 5, "five"
"""
ANSWER = "def answer(x):\n    return x * x + 5 + {0} - {0}\n"
TASK = code_task("adversary", "def answer(x):\n    '''A secret function of x.'''\n", TEST, "answer")


class Results:
    """All programs scored in one batch, each followed by an honest one."""

    def __init__(self, level: str, directory: Path) -> None:
        self.level, self.canary = level, directory / "canary"
        self.canary.write_text("5")
        self.canary.chmod(0o666)
        self.before = self.canary.stat()
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
            tcp.bind(("127.0.0.1", 0))
            abstract.bind("\0comlrl-canary")
            for listening in (tcp, abstract):
                listening.listen(64)
            texts = list(self._texts(tcp.getsockname()[1]))
            with CodeReward(WORKERS, TIMEOUT, 256, level) as reward:
                assert reward.isolation == level
                known = reward.score([JointAction(TASK, (ANSWER.format(0),))])[0]
                assert known.value == pytest.approx(2.1)  # the tests can be passed
                start = time.perf_counter()
                scores = reward.score([JointAction(TASK, (text,)) for text in texts])
                self.seconds = time.perf_counter() - start
                self.processes_left = self._sandboxed(reward)
        self.adverse = dict(zip(PROGRAMS, scores[::2], strict=True))
        self.honest = dict(zip(PROGRAMS, scores[1::2], strict=True))

    def _texts(self, port: int):
        for number, text in enumerate(PROGRAMS.values()):
            text = text.replace("CANARY_NAME", self.canary.name).replace("CANARY", str(self.canary))
            yield text.replace("PORT", str(port))
            yield ANSWER.format(number)

    @staticmethod
    def _sandboxed(reward: CodeReward) -> list[str]:
        """Processes of the sandboxes' own users, if more than one each after a minute."""
        users = {FIRST_UID + worker.process.pid for worker in workers(reward)}
        for _ in range(600):
            found = []
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and entry.stat().st_uid in {0, *users}:
                        status = (entry / "status").read_text()
                        uid = int(status.split("Uid:")[1].split()[0])
                        found += [status] if uid in users else []
                except OSError:
                    continue  # it has ended
            if len(found) <= WORKERS:
                return []
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module", params=some_slow(LEVELS, "unshare", "bubblewrap"))
def results(request, tmp_path_factory):
    if failure(request.param) is not None:
        pytest.skip(f"not offered here: {failure(request.param)}")
    os.environ["COMLRL_SECRET"] = "hidden"
    yield Results(request.param, tmp_path_factory.mktemp("outside"))
    del os.environ["COMLRL_SECRET"]


def test_there_are_forty_of_them():
    assert len(PROGRAMS) >= 40


@pytest.mark.parametrize("name", PROGRAMS)
def test_adversary(results, name):
    if results.level == "limits" and os.getuid() != 0 and name == "find_repository":
        pytest.skip("limits alone do not hide files on every kernel")
    adverse, honest = results.adverse[name], results.honest[name]
    assert adverse.facts.tests == 0.0
    assert adverse.value == pytest.approx(1.1)  # main defined 0.6, syntax 0.5
    assert len(adverse.facts.outcomes) == 4
    assert all(outcome.error_type for outcome in adverse.facts.outcomes)
    assert sum(outcome.timed_out for outcome in adverse.facts.outcomes) <= 4
    assert honest.value == pytest.approx(2.1), honest.facts.outcomes


def test_no_trace_is_left(results):
    assert results.canary.read_text() == "5"
    after, before = results.canary.stat(), results.before
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (
        before.st_mode, before.st_mtime, before.st_nlink,
    )  # fmt: skip
    assert results.processes_left == []


def test_none_outlives_its_time(results):
    """Three timeouts a program at most, over the workers; a busy machine takes longer."""
    assert results.seconds < 4 * 3 * TIMEOUT * len(PROGRAMS) / WORKERS
    for name, score in results.adverse.items():
        assert score.facts.seconds < 4 * (TIMEOUT + 2.0), name
