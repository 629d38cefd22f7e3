"""Episodes on one event loop: waves, keys, limits and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from comlrl.config.plugins.targets import TargetError
from comlrl.errors import UserError
from comlrl.types import AgentReward, JointAction, Score, Shape
from tests.support.fakes import SAMPLING, SEED, parts
from tests.support.played import TASKS, Keeping, Serving, played, rollout


def test_calls_are_sampled_in_waves_with_like_prompts_as_one_request():
    sampler = Keeping()

    async def play(task, agents):
        first = await agents["coder"]("write")
        both = await asyncio.gather(agents["coder"](f"again {first}"), agents["tester"]("look"))
        assert both[0].finished and both[0].token_ids == tuple(both[0].encode())
        return len(both)

    groups = played(play, 3, sampler=sampler)
    # Two waves; at the first one request for each task, whose episodes read alike.
    assert sampler.calls == [[2, 0], [6, 2]]
    key = (SEED, "train", 1, "A")
    assert sampler.requests[0][0][0].keys_G == tuple((*key, (), 0, g) for g in range(3))
    assert sampler.requests[1][0][0].keys_G == ((*key, (1,), 0, 0),)
    assert sampler.requests[1][1][0].keys_G == tuple((*key, (), 1, g) for g in range(3))
    assert [group.task.task_id for group in groups] == ["A", "B"]
    episode = groups[1].episodes_G[2]
    assert [(c.agent, c.number) for c in episode.calls] == [(0, 0), (0, 1), (1, 0)]
    assert parts(episode.calls[1].completion.text) == ("B", (1,), 0, 2)
    assert [m.content for m in episode.calls[1].prompt] == ["again B||0|2"]
    assert (episode.score, episode.reward) == (Score(2.0), 2.0)


def test_an_episode_does_not_depend_on_what_runs_beside_it():
    async def play(task, agents):
        text = await agents["coder"](task.task_id)
        for _ in range(int(text[-1])):  # episodes of different lengths
            text = await agents["tester"](text)
        return 1

    together = played(play, 3)
    alone = played(play, 3, tasks=TASKS[1:])
    assert together[1] == alone[0]
    assert [len(e.calls) for e in alone[0].episodes_G] == [1, 2, 3]


def test_a_task_s_episodes_under_several_keys_are_those_of_each_key():
    """As an evaluation plays them: all answers side by side."""
    keys, sampler, alone = [("eval", s) for s in range(2)], Keeping(), Keeping()
    shape, each = Shape(2, 1, 1), [key for key in keys for _ in TASKS]
    together = rollout(_scoring, sampler=sampler).grow_each(TASKS * 2, shape, SAMPLING, each)
    player = rollout(_scoring, sampler=alone)
    assert together == [g for key in keys for g in player.grow(TASKS, shape, SAMPLING, key)]
    assert sorted(sampler.keys) == sorted(alone.keys) and len(set(sampler.keys)) == 8


def test_scores_are_asked_together():
    player = rollout(_scoring)
    (first, _) = player.grow(TASKS, Shape(2, 1, 2), SAMPLING, ("train", 1))
    assert player.reward.calls == [4]
    episode = first.episodes_G[0]
    texts = tuple(call.completion.text for call in episode.calls)
    assert episode.joint_action == JointAction(TASKS[0], texts)
    assert episode.score == Score(float(sum(map(len, texts))))


async def _scoring(task, agents):
    prompts = agents.prompts
    assert list(prompts) == ["coder", "tester"] and task.fields["prompt"] in prompts["coder"]
    texts = {name: await agents[name](prompts[name]) for name in agents}
    return await agents.score(texts)


def test_rewards_of_each_agent_in_the_middle_and_at_the_end():
    async def play(task, agents):
        await agents["coder"]("one")
        await agents.reward("coder", 5)
        await agents["tester"]("two")
        await agents["coder"]("three")
        await agents.reward("tester", -1)
        return {"tester": 1.0, "coder": 3.0}

    player = rollout(play)
    player.process = lambda reward: 2 * reward + 10
    (group,) = player.grow(TASKS[:1], Shape(2, 1, 1), SAMPLING, ("train", 1))
    (episode,) = group.episodes_G
    assert episode.score == Score(2.0, by_agent=(3.0, 1.0)) and episode.reward == 14.0
    # A reward in the middle does not contain what is added to every score.
    assert episode.paid_N == (
        (AgentReward(1, 10.0), AgentReward(2, 16.0)),
        (AgentReward(1, -2.0), AgentReward(1, 12.0)),
    )


def test_a_wave_waits_for_threads():
    sampler, order = Keeping(), []

    def slow(g):
        time.sleep(0.02 * g)
        order.append(threading.current_thread() is threading.main_thread())
        return g

    async def play(task, agents):
        g = int((await agents["coder"]("x"))[-1])
        await asyncio.to_thread(slow, g)
        await agents["coder"]("y")
        return 0

    played(play, 4, tasks=TASKS[:1], sampler=sampler)
    assert [len(wave[0][0].keys_G) for wave in sampler.requests] == [4, 4]
    assert order == [False] * 4


@pytest.mark.parametrize(("patience", "waves"), [(60.0, [2, 2]), (0.05, [2, 1, 1])])
def test_a_wave_waits_for_timers_but_not_for_long(monkeypatch, patience, waves):
    monkeypatch.setattr("comlrl.programs.runner.PATIENCE", patience)
    sampler = Keeping()

    async def play(task, agents):
        if (await agents["coder"]("x"))[-1] == "1":
            await asyncio.sleep(0.01)
            while patience < 1 and len(sampler.requests) < 2:  # until one went without it
                await asyncio.sleep(0.01)
        await agents["coder"]("y")
        return 0

    played(play, 2, tasks=TASKS[:1], sampler=sampler)
    assert [len(wave[0][0].keys_G) for wave in sampler.requests] == waves


def test_a_shared_semaphore_and_a_time_limit_around_a_call():
    sampler = Keeping()

    def make():
        free: list[asyncio.Semaphore] = []

        async def play(task, agents):
            if not free:
                free.append(asyncio.Semaphore(2))
            async with free[0]:
                await asyncio.wait_for(agents["coder"]("x"), 60)
            return 0

        return play

    began = time.monotonic()
    played(make(), 4, tasks=TASKS[:1], sampler=sampler)
    assert [len(wave[0][0].keys_G) for wave in sampler.requests] == [2, 2]
    assert time.monotonic() - began < 30


def test_two_hundred_episodes_of_six_calls():
    sampler = Keeping()

    async def play(task, agents):
        text = ""
        for turn in range(6):
            text = await agents["coder" if turn % 2 else "tester"](f"{turn} {text}")
        return 1

    groups = played(play, 100, sampler=sampler)
    assert sum(len(group.episodes_G) for group in groups) == 200
    assert len(sampler.calls) == 6
    assert sum(len(r.keys_G) for wave in sampler.requests for own in wave for r in own) == 1200


async def raises(task, agents):
    await agents["coder"]("x")
    raise ValueError("no\nluck")


async def asks_a_stranger(task, agents):
    await agents["codr"]("x")


async def never_ends(task, agents):
    while True:
        await agents["coder"]("x")


async def spins(task, agents):
    while True:
        await asyncio.sleep(0)


async def sleeps(task, agents):
    await asyncio.sleep(1000)


async def blocks_a_thread(task, agents):
    await asyncio.to_thread(threading.Event().wait)


async def waits_for_nothing(task, agents):
    await asyncio.get_running_loop().create_future()


async def asks_too_much(task, agents):
    await agents["tester"]("x" * 100)


async def leaves(task, agents):
    raise SystemExit(0)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


async def raises_the_unspeakable(task, agents):
    raise Unspeakable


async def pays_too_much(task, agents):
    await agents.reward("coder", -1e300)


async def pays_nothing_known(task, agents):
    await agents.reward("coder", None)


async def swallows(task, agents):
    while True:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await agents["coder"]("x")


FAILING = [
    (raises, "raised ValueError: no luck ("),
    (
        asks_a_stranger,
        "it asks for the agent 'codr', which program.agents lacks; did you mean `coder`?",
    ),
    (never_ends, "more than 7 calls (program.max_calls)"),
    (spins, "it took more than 0.5 s (program.timeout)"),
    (sleeps, "it took more than 0.5 s (program.timeout)"),
    (blocks_a_thread, "it took more than 0.5 s (program.timeout)"),
    (waits_for_nothing, "it waits for something that will never come"),
    (
        asks_too_much,
        "the prompt of call 1 of `tester` has 101 tokens, which leaves no room for max_",
    ),
    (leaves, "raised SystemExit: 0 ("),
    (raises_the_unspeakable, "raised Unspeakable ("),
    (pays_too_much, "raised ValueError: agents.reward expects"),
    (pays_nothing_known, "raised ValueError: agents.reward expects"),
]


def _time(message: str) -> float:
    """Short for those that use it up; a busy machine may take long for the others."""
    return 0.5 if "0.5 s" in message else 60.0


@pytest.mark.parametrize("sampler", [Keeping, Serving])
@pytest.mark.parametrize(("play", "message"), FAILING)
def test_an_episode_that_fails_ends_the_run_in_a_line(play, message, sampler):
    limits = {"timeout": _time(message), "max_calls": 7, "sampler": sampler(max_length=60)}
    with pytest.raises(TargetError) as raised:
        played(play, **limits)
    text = str(raised.value)
    assert text.startswith(f"program.target: 'mine:play': task 'A', episode 1: {message}")
    assert "\n" not in text


@pytest.mark.parametrize("sampler", [Keeping, Serving])
@pytest.mark.parametrize(("play", "message"), [*FAILING, (swallows, "more than 7 calls")])
def test_or_scores_zero(play, message, sampler):
    async def now_and_then(task, agents):
        if task.task_id == "B":
            await play(task, agents)
        await agents["coder"]("x")
        return 3

    limits = {"timeout": _time(message), "max_calls": 7, "sampler": sampler(max_length=60)}
    good, bad = played(now_and_then, on_error="zero", **limits)
    assert [(e.score, e.error) for e in good.episodes_G] == [(Score(3.0), None)] * 2
    for episode in bad.episodes_G:
        assert episode.score == Score(0.0) and episode.error.startswith(message)


class Lost(Keeping):
    """A server that answers no more."""

    def sample(self, requests_N, sampling):
        super().sample(requests_N, sampling)
        raise UserError("it is lost")


def test_a_sampler_that_is_lost_is_not_asked_again(monkeypatch):
    """It is no error of an episode, whatever that catches."""
    monkeypatch.setattr("comlrl.programs.runner.PATIENCE", 0.05)
    sampler = Lost()
    with pytest.raises(UserError, match="it is lost"):
        played(swallows, sampler=sampler, on_error="zero")
    assert len(sampler.calls) == 1


class Signal(BaseException):
    """As a signal's handler raises, wherever the process stands."""


def _arrives():
    raise Signal


async def while_it_plays(task, agents):
    _arrives()


async def in_a_callback(task, agents):
    asyncio.get_running_loop().call_soon(_arrives)
    await agents["coder"]("x")


@pytest.mark.parametrize("play", [while_it_plays, in_a_callback])
def test_a_signal_ends_all_episodes(play):
    with pytest.raises(Signal):
        played(play, on_error="zero")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returned None as a score; return finite numbers"),
        ({"coder": 1.0}, "returned rewards of coder; return a number for each of coder, tester"),
        ({"coder": 1.0, "tester": "x"}, "returned 'x' for `tester`; return finite numbers"),
        ({"coder": 1.0, "tester": None}, "returned None for `tester`"),
        ({"coder": 1e300, "tester": 1.0}, "returned 1e+300 for `coder`"),
        (Score(1.0, by_agent=(1.0,)), "returned by_agent=(1.0,); return 2 finite numbers"),
    ],
)
def test_what_is_no_score_ends_the_run(given, message):
    async def play(task, agents):
        return given

    with pytest.raises(TargetError, match="task 'A', episode 1 ") as raised:
        played(play, on_error="zero")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a prompt without messages"),
        ([{"role": "robot", "content": "x"}], "a message's role is 'robot'; use one of system, "),
        ([{"role": "user"}], "a message has `role` and `content`, not role"),
        ([{"role": "user", "content": 3}], "a message's content is 3; use a text"),
    ],
)
def test_what_is_no_prompt(prompt, message):
    async def play(task, agents):
        await agents["coder"](prompt)

    with pytest.raises(TargetError) as raised:
        played(play)
    assert message in str(raised.value)


def test_what_an_episode_leaves_behind_is_withdrawn():
    sampler = Keeping()

    async def play(task, agents):
        left = asyncio.ensure_future(agents["tester"]("nobody reads this"))
        await asyncio.sleep(0)
        return float(left.done())

    groups = played(play, sampler=sampler)
    assert sampler.calls == [] and groups[0].episodes_G[0].calls == ()
