"""What is asked for ahead: of which steps, when, and that it is what the next step asks for."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comlrl.loop.interrupts import Interrupted
from tests.support.tiny_models import config
from tests.support.tiny_trainers import build, share_of_letters
from trainers.launch.wiring import vllm as engine

VLLM = {
    "generation__backend": "vllm", "generation__vllm_url": "http://localhost:8000",
    "generation__overlap": 1,
}  # fmt: skip


class Overlapped:
    """A trainer, what its sampler is asked and what it is asked ahead, with the updates and the
    sampler's calls before that."""

    def __init__(self, algorithm: str, folder: Path, **keys: Any) -> None:
        self.asked: list[tuple] = []
        self.ahead: list[tuple] = []
        self.trainer = build(algorithm, folder, share_of_letters, count=5, batch_size=2, **keys)
        sampler = self.trainer.rollout.sampler
        sample = sampler.sample
        sampler.sample = lambda *asked: self.asked.append(asked) or sample(*asked)
        server = SimpleNamespace(ask_ahead=self._note)
        settings = config(algorithm, **VLLM, **keys)
        self.trainer.loop.prefetch = engine.prefetch(
            settings, self.trainer.rollout, server, self.trainer.sampling
        )

    def _note(self, *asked: Any) -> None:
        if asked[0]:
            self.ahead.append((self.trainer.loop.counters.updates, len(self.asked), asked))


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("magrpo", {}),
        ("magrpo", {"turn_order": "sequential", "num_turns": 2}),
        ("magrpo", {"advantage": "greedy", "num_agents": 3}),
        ("ppo", {"num_agents": 2, "num_turns": 2, "shared_policy": True}),
    ],
)
def test_what_a_step_asks_first_is_asked_before_the_step_before_it_updates(
    algorithm, keys, tmp_path
):
    """Three steps a pass, and the last has no next one."""
    run = Overlapped(algorithm, tmp_path, max_steps=4, **keys)
    run.trainer.train()
    a_step = run.trainer.loop.counters.updates // 4
    assert [updates for updates, _, _ in run.ahead] == [0, a_step, 2 * a_step]
    for _, calls, asked in run.ahead:
        assert run.asked[calls] == asked
        assert any(asked[0])


def test_nothing_is_asked_ahead_where_environment_steps_end_the_run(tmp_path):
    """6 joint actions a step, 3 each of two tasks; 12 end the run."""
    run = Overlapped("magrpo", tmp_path, max_steps=9, max_env_steps=12)
    run.trainer.train()
    assert run.trainer.loop.counters.steps == 2 and len(run.ahead) == 1


def test_nothing_is_asked_ahead_where_a_signal_will_end_the_run(tmp_path):
    run = Overlapped("magrpo", tmp_path, max_steps=9)
    run.trainer.loop.signals.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        run.trainer.train()
    assert run.trainer.loop.counters.steps == 1 and not run.ahead


def test_nothing_is_asked_ahead_unless_wanted():
    assert engine.prefetch(config(), None, None, None) is None
