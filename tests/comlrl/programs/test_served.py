"""A server samples each call as it is made; all else is as in waves."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from comlrl.errors import UserError
from comlrl.programs.rollout import ProgramRollout
from comlrl.types import Sampling, Shape
from tests.support.fake_vllm import FakeVLLM, client
from tests.support.fakes import PROMPTS, SAMPLING, SEED
from tests.support.played import TASKS, Keeping, PlainReward, Serving, played, program, rollout
from tests.support.tiny_models import team


async def twice(task, agents):
    """Two calls after each other, and two at once; a score at the end."""
    first = await agents["coder"](agents.prompts["coder"])
    again, look = await asyncio.gather(agents["coder"](f"again {first}"), agents["tester"]("look"))
    await agents.reward("coder", len(again))
    return await agents.score([again, look])


def test_the_records_are_those_of_waves():
    waves, serving = Keeping(), Serving()
    in_waves = played(twice, 3, sampler=waves)
    served = played(twice, 3, sampler=serving)
    assert sorted(map(str, serving.keys)) == sorted(map(str, waves.keys))
    assert [_unweighted(group) for group in served] == in_waves
    # Like prompts of a task are weighed together: 3 first calls, then 3 that differ, and 3 "look".
    ((coder, tester),) = serving.weighed
    assert [count for _, count in coder] == [3, 1, 1, 1] * 2
    assert [count for _, count in tester] == [3, 3]
    assert {c.completion.importance for g in served for e in g.episodes_G for c in e.calls} == {0.5}


def _unweighted(group):
    def plain(call):
        return replace(call, completion=replace(call.completion, importance=1.0))

    return replace(
        group,
        episodes_G=tuple(replace(e, calls=tuple(map(plain, e.calls))) for e in group.episodes_G),
    )


def test_a_call_waits_for_no_other():
    """The first episode's first call is answered once another episode has ended."""
    ended: list[asyncio.Event] = []

    async def before(request):
        if request.keys_G[0] == (SEED, "train", 1, "A", (), 0, 0):
            await ended[0].wait()

    async def play(task, agents):
        ended[:] = ended or [asyncio.Event()]
        for _ in range(3):
            text = await agents["coder"]("x")
        if text.endswith("|1"):
            ended[0].set()
        return 1

    sampler = Serving(before)
    played(play, sampler=sampler, tasks=TASKS[:1])
    assert [request.keys_G[0][-1] for _, request in sampler.asked] == [0, 1, 1, 1, 0, 0]
    assert {request.task_id for _, request in sampler.asked} == {"A"}


def test_the_time_of_a_server_is_not_the_episodes_own():
    sampler = Serving(lambda request: asyncio.sleep(0.25))

    async def play(task, agents):
        for _ in range(3):
            await agents["coder"]("x")
        return 1

    for group in played(play, sampler=sampler, timeout=0.5):
        for episode in group.episodes_G:  # each waited for 0.75 s, and was not ended for it
            assert len(episode.calls) == 3 and episode.score.value == 1


def test_a_lost_server_is_no_error_of_an_episode(monkeypatch):
    monkeypatch.setattr("comlrl.programs.runner.PATIENCE", 0.05)

    async def lost(request):
        raise UserError("it is lost")

    async def catches(task, agents):
        while True:
            try:
                await agents["coder"]("x")
            except (Exception, asyncio.CancelledError):
                await asyncio.sleep(0)

    sampler = Serving(lost)
    with pytest.raises(UserError, match="it is lost"):
        played(catches, 1, sampler=sampler, tasks=TASKS[:1], on_error="zero")
    assert len(sampler.asked) == 1


def test_a_call_that_is_given_up_is_not_recorded():
    sampler = Serving(lambda request: asyncio.sleep(30 if request.keys_G[0][-3] == () else 0))

    async def play(task, agents):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agents["coder"]("slow"), 0.01)
        return len(await agents["coder"]("fast"))

    for group in played(play, sampler=sampler):
        for episode in group.episodes_G:
            assert [(c.number, c.prompt[-1].content) for c in episode.calls] == [(1, "fast")]


class Slow(PlainReward):
    """Notes in which thread it is called, and whether twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.free = threading.Lock()

    def score(self, actions):
        assert self.free.acquire(blocking=False)
        self.threads.append(threading.current_thread())
        time.sleep(0.05)
        self.free.release()
        return super().score(actions)


def test_scores_keep_no_answer_waiting():
    """What comes while others are scored is scored next, in one call."""
    player = rollout(twice, sampler=Serving())
    player.reward = Slow()
    player.grow(TASKS, Shape(2, 1, 8), SAMPLING, ("train", 1))
    assert sum(player.reward.calls) == 16 and len(player.reward.calls) < 8
    assert threading.main_thread() not in player.reward.threads


@pytest.mark.parametrize("on_error", ["stop", "zero"])
def test_a_reward_that_fails_ends_the_run(on_error):
    class Broken(Slow):
        def score(self, actions):
            super().score(actions)
            raise UserError("no reward")

    player = rollout(twice, sampler=Serving(), on_error=on_error)
    player.reward = Broken()
    with pytest.raises(UserError, match="no reward"):
        player.grow(TASKS, Shape(2, 1, 2), SAMPLING, ("train", 1))


def test_an_end_waits_for_the_reward():
    """Whoever closes a reward must not find it in use."""
    player = rollout(twice, sampler=Serving())
    player.reward = Slow()

    async def fails(task, agents):
        if task.task_id == "A":
            await agents.score(["x", "y"])
        await asyncio.sleep(0.02)
        raise ValueError("no luck")

    player.program = program(fails)
    with pytest.raises(UserError, match="no luck"):
        player.grow(TASKS, Shape(2, 1, 1), SAMPLING, ("train", 1))
    assert player.reward.calls == [1] and not player.reward.free.locked()


def test_the_second_call_goes_out_while_another_episode_waits_for_its_first(tmp_path):
    """With the client of vLLM and a server behind HTTP."""
    server, agents = FakeVLLM(team(num_agents=1)).start(), team()
    second, first = threading.Event(), threading.Lock()

    def before(body):
        if first.acquire(blocking=False):  # one of the first calls; the others are answered
            assert second.wait(60)
        elif body["model"].startswith("agent_1"):
            second.set()

    async def play(task, agents):
        text = await agents["aux"]("x")
        return len(await agents["main"](f"{text}"))

    sampler = client(agents, server, tmp_path)
    server.before = before
    player = ProgramRollout(
        program(play, ("aux", "main")), sampler, PlainReward(), PROMPTS, seed=SEED
    )
    try:
        (group,) = player.grow(TASKS[:1], Shape(2, 1, 4), Sampling(0.8, 12), ("train", 1))
        assert second.is_set()
        assert [[c.agent for c in e.calls] for e in group.episodes_G] == [[0, 1]] * 4
        asked = [body["n"] for body in server.asked if body["model"] != server.base]
        assert asked == [1] * 8
    finally:
        sampler.close()
        server.stop()
