"""Sets of joint candidates, and collectors whose sampler fails where a test wants it to."""

from __future__ import annotations

from pathlib import Path

from comlrl.config.algorithms import MADPOConfig
from comlrl.preferences.candidates import CandidateSet, JointCandidate
from comlrl.preferences.collector import Collector
from comlrl.rollout.grow import Rollout
from comlrl.types import Completion, Message
from tests.support import loops
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    task,
)
from tests.support.tiny_trainers import Recorder


def candidates(name: str, rewards=(0.0, 1.0), agents: int = 2) -> CandidateSet:
    made = tuple(
        JointCandidate(
            tuple(Completion(f"{name}{k}{a} é\u2028", (k, a), k > 0) for a in range(agents)), r
        )
        for k, r in enumerate(rewards)
    )
    prompts = tuple((Message("user", f"do {name} {a}"),) for a in range(agents))
    return CandidateSet(task_id=name, prompts_N=prompts, candidates_K=made)


class Stopping(FakeSampler):
    """Fails at a call, as a process that is killed would."""

    def __init__(self, call: int | None) -> None:
        super().__init__()
        self.stop = call

    def sample(self, requests_N, sampling):
        if len(self.calls) == self.stop:
            raise KeyboardInterrupt
        return super().sample(requests_N, sampling)


def reward(name: str, path: tuple, generations: tuple) -> float:
    return float((ord(name) + 3 * generations[0]) % 4)


SECTION = MADPOConfig(
    preference_num_candidates=5, preference_pairs_per_sample=2, batch_size=1, num_train_epochs=1
)


def collector(folder: Path, *, stop=None, resume=False, section=SECTION, names="ABCDE"):
    folder.mkdir(exist_ok=True)
    sampler, scored = Stopping(stop), FakeReward(reward)
    rollout = Rollout(sampler, scored, FakeTransition(), PROMPTS, seed=SEED)
    loop = loops.loop(section, [task(n) for n in names], folder, Recorder())
    made = Collector(
        section, rollout, loop, SAMPLING, lambda index: loop.tasks, seed=SEED, resume=resume
    )
    return made, sampler, loop
