"""``refill``: which tasks a step samples, what they cost, what is learned, and a resumed run."""

from __future__ import annotations

import itertools

import pytest
import torch

from comlrl.keyed import order
from comlrl.loop import checkpoint
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.types import Score
from tests.support.gradients import kept
from tests.support.tiny_trainers import build, tasks

COUNT, SIZE, STEPS = 12, 3, 4  # tasks, those of a step, steps
DEAD = {"t0", "t1", "t3", "t4", "t6", "t7", "t9", "t10"}  # all answers to them earn the same
KEYS = {"batch_size": SIZE, "learning_rate": 1e-2, "max_steps": STEPS}


def varied(texts: tuple[str, ...]) -> float:
    """A reward that two answers hardly share."""
    return sum(map(ord, "|".join(texts))) % 997 / 997


class ByTask:
    """Rewards differ, but for tasks whose answers are all worth 1; notes the tasks of each call."""

    def __init__(self, dead: set[str]) -> None:
        self.dead, self.calls = dead, []

    def score(self, actions):
        self.calls.append(list(dict.fromkeys(action.task.task_id for action in actions)))
        return [
            Score(1.0 if a.task.task_id in self.dead else varied(a.completions_N)) for a in actions
        ]

    def close(self):
        return


def made(folder, dead=frozenset(DEAD), algorithm="magrpo", **keys):
    trainer = build(algorithm, folder, varied, count=COUNT, **(KEYS | keys))
    trainer.rollout.reward = ByTask(set(dead))
    return trainer


def enumerated(refill: int, dead: set[str], seed: int) -> list[list[list[str]]]:
    """The slow obvious version: of each step, the tasks of each sampling."""
    names, schedule = [f"t{i}" for i in range(COUNT)], TaskSchedule(tasks(COUNT), SIZE, None, seed)
    steps = []
    for step in range(STEPS):
        calls = [[task.task_id for task in schedule.at(step)[1]]]
        others = [names[i] for i in order((seed, "refill", step), COUNT)]
        others = [name for name in others if name not in calls[0]]
        for _ in range(refill):
            missing = SIZE - sum(name not in dead for call in calls for name in call)
            if not missing or not others:
                break
            calls.append(others[:missing])
            others = others[missing:]
        steps.append(calls)
    return steps


@pytest.mark.parametrize("algorithm", ["magrpo", "grpo"])
@pytest.mark.parametrize("refill", [0, 1, 2, 9])
def test_which_tasks_are_sampled_and_what_they_cost(refill, algorithm, tmp_path):
    trainer = made(tmp_path, algorithm=algorithm, refill=refill)
    grown, grow = [], trainer.rollout.grow
    trainer.rollout.grow = lambda *given: grown.append(grow(*given)) or grown[-1]
    trainer.train()
    steps = enumerated(refill, DEAD, trainer.loop.schedule.seed)
    assert trainer.rollout.reward.calls == list(itertools.chain(*steps))
    counters, records = trainer.loop.counters, trainer.loop.logger.metrics()
    assert counters.tasks_seen == sum(len(call) for calls in steps for call in calls)
    assert counters.sampled_tokens == sum(tree.tokens for trees in grown for tree in trees)
    assert counters.env_steps == sum(tree.scored for trees in grown for tree in trees)
    assert sum(metrics["tokens"] for metrics in records) == counters.sampled_tokens
    calls = iter(grown)
    for metrics, step in zip(records, steps, strict=True):
        trees = list(itertools.chain(*(next(calls) for _ in step)))
        assert metrics["tokens"] == sum(tree.tokens for tree in trees)
        dead = sum(tree.task.task_id in DEAD for tree in trees)
        assert metrics["zero_advantage_share"] == pytest.approx(dead / len(trees))
    if refill == 9:  # four live tasks of twelve, and three are sought
        assert all(len(set(itertools.chain(*step)) - DEAD) == SIZE for step in steps)


def weights(trainer):
    return [p.detach().clone() for o in trainer.optimizers for p in o.parameters]


@pytest.mark.parametrize("more", [{}, {"entropy_coef": 0.01, "kl_coef": 0.1}], ids=str)
def test_an_update_is_that_of_the_live_tasks_alone(more, tmp_path):
    """Dead tasks count neither in the sum nor in what it is divided by, nor in what is logged."""
    keys = {"max_steps": 1, "num_train_epochs": None, **more}
    refilled = made(tmp_path / "refilled", refill=9, **keys)
    found = kept(refilled.optimizers, steps=True)
    refilled.train()
    live = [name for call in refilled.rollout.reward.calls for name in call if name not in DEAD]
    assert len(live) == SIZE
    plain = made(tmp_path / "plain", **keys)
    plainly = kept(plain.optimizers, steps=True)
    wanted = [next(task for task in tasks(COUNT) if task.task_id == name) for name in live]
    plain.loop.schedule = TaskSchedule(wanted, SIZE, None, plain.loop.schedule.seed)
    plain.train()
    torch.testing.assert_close(found, plainly, rtol=1e-4, atol=1e-7)
    (logged,), (plainly_logged,) = (t.loop.logger.metrics() for t in (refilled, plain))
    for name in ("loss", *(("entropy", "kl") if more else ())):
        assert logged[name] == pytest.approx(plainly_logged[name], rel=1e-4), name


def test_where_nothing_differs_a_step_is_as_without_refill(tmp_path):
    everything = {f"t{i}" for i in range(COUNT)}
    keys = {"dead": everything, "max_steps": 1, "kl_coef": 0.1}
    refilled = made(tmp_path / "refilled", refill=1, **keys)
    refilled.train()
    assert [len(call) for call in refilled.rollout.reward.calls] == [SIZE, SIZE]
    assert refilled.loop.logger.metrics()[0]["zero_advantage_share"] == 1.0


@pytest.mark.parametrize("advantage", ["raw", "greedy"])
def test_it_is_for_advantages_that_compare_siblings(advantage, tmp_path):
    trainer = made(tmp_path, refill=5, advantage=advantage, max_steps=1)
    trainer.train()
    assert {*itertools.chain(*trainer.rollout.reward.calls)} == {
        task.task_id for task in trainer.loop.schedule.at(0)[1]
    }


def test_a_resumed_run_samples_the_same(tmp_path, monkeypatch):
    keys = {"refill": 2, "save_steps": 2}
    whole = made(tmp_path / "whole", **keys)
    whole.train()
    first = made(tmp_path / "parts", **keys)
    steps = itertools.islice(first.loop.steps(first), 3)  # asked for a third, it saves the second
    monkeypatch.setattr(first.loop, "steps", lambda *_: itertools.islice(steps, 2))
    first.train()
    next(steps)
    second = made(tmp_path / "parts", **keys)
    second.loop.resume(checkpoint.read(checkpoint.newest(tmp_path / "parts")), second)
    second.loop.logger.begin(second.loop.mark)
    second.train()
    calls = [*first.rollout.reward.calls, *second.rollout.reward.calls]
    assert calls == whole.rollout.reward.calls
    assert second.loop.counters.sampled_tokens == whole.loop.counters.sampled_tokens
    for one, other in zip(weights(second), weights(whole), strict=True):
        assert torch.equal(one, other)
