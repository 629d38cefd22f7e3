"""Several servers: where requests go, what becomes of those of a server that dies, and who gets
which adapters."""

from __future__ import annotations

import errno
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fastapi import HTTPException

from comlrl.errors import ServerError
from comlrl.rollout.vllm.sampler import VLLMSampler
from comlrl.rollout.vllm.servers import LAST_WAIT, Servers, rank
from comlrl.types import Request, Sampling
from comlrl.update.importance import ImportanceWeightedSampler
from tests.support.fake_vllm import FakeVLLM, client, kinds, move, requests
from tests.support.processes import until
from tests.support.tiny_models import folder as model_folder
from tests.support.tiny_models import prompt, team

SHORT = Sampling(0.8, 4)


@pytest.fixture
def three() -> Iterator[list[FakeVLLM]]:
    fakes = [FakeVLLM(team(num_agents=1)).start() for _ in range(3)]
    yield fakes
    for fake in fakes:
        fake.stop()


def joined(fakes: Sequence[FakeVLLM]) -> Servers:
    return Servers([fake.url for fake in fakes], 60.0, first_wait=0.01)


def asked(fake: FakeVLLM) -> list[dict]:
    return [body for body in fake.asked if body["model"] != "base"]


# Where requests go


def test_a_prefix_has_one_server_and_keeps_it_when_another_is_away():
    urls = [f"http://{name}" for name in "abcd"]
    prefixes = [f"task {n}" for n in range(400)]

    def choices(among: list[str]) -> list[str]:
        return [max(among, key=lambda url: rank(url, prefix)) for prefix in prefixes]

    counts = Counter(choices(urls))
    assert len(counts) == 4 and min(counts.values()) > 70  # 100 each, ± 4 standard deviations
    for first, without in zip(choices(urls), choices(urls[1:]), strict=True):
        assert without == first or first == urls[0]


def test_a_task_s_turns_meet_its_cache(three, tmp_path):
    """Its later prompts are others; one after the other, so that no server is passed over."""
    agents = team()
    sampler = client(agents, three, tmp_path)
    served: dict[str, set[int]] = {}
    for turn in range(2):
        for number in range(12):
            for agent in range(2):
                text = prompt(f"task {number}" + " feedback" * turn)
                request = Request(text, ((turn, number, agent),), task_id=f"task {number}")
                before = [len(fake.asked) for fake in three]
                sampler.sample([[request] if i == agent else [] for i in range(2)], SHORT)
                (by,) = [i for i, n in enumerate(before) if len(three[i].asked) > n]
                served.setdefault(request.task_id, set()).add(by)
    assert all(len(by) == 1 for by in served.values())
    # Ports differ from run to run, and so does the choice: one server for all is 1 in 177,147.
    assert len({by for own in served.values() for by in own}) > 1


# Adapters


def test_adapters_go_to_all_servers_at_once(three, tmp_path):
    """A server answers only when all are loading."""
    together = threading.Barrier(3, timeout=60)
    for fake in three:
        fake.loading = lambda name: together.wait() and None
    agents = team()
    sampler = client(agents, three, tmp_path)
    move(agents, 1)
    sampler.sample([requests(0, 1), []], SHORT)
    for fake in three:
        assert kinds(fake) == ["load agent_0", "load agent_1", "load agent_1", "unload agent_1"]
        assert set(fake.adapters) == set(sampler.adapters.names.values())
    sampler.close()
    assert all(fake.adapters == {} for fake in three) and not (tmp_path / "vllm").exists()


def test_a_server_that_was_away_is_brought_up_to_date_first(three, tmp_path, capfd):
    """It refuses requests and is not restarted: it still has adapters that were replaced
    meanwhile. It is taken back and lost several times, and reported once."""
    agents, (gone, other, third) = team(), three
    third.stop()
    sampler = client(agents, [gone, other], tmp_path)
    refusing = True

    def cut_off(*_) -> None:
        if refusing:
            raise HTTPException(503, "not now")

    gone.before = gone.loading = cut_off
    for _ in range(2):
        sampler.sample([requests(0, 8), requests(1, 8)], SHORT)  # some for each server
        move(agents, 0)
    gone.events.clear()
    gone.asked.clear()
    gone.before = lambda body: gone.events.append(("ask", body["model"]))
    refusing = False
    until(lambda: not sampler.servers_N[0].away)
    sampler.sample([requests(0, 8), requests(1, 8)], SHORT)
    assert asked(gone)
    events = [what for what, _ in gone.events]
    assert {"load"} <= set(events[: events.index("ask")]) <= {"load", "unload"}
    assert set(gone.adapters) == set(other.adapters)
    assert gone.adapters.keys() == set(sampler.adapters.names.values())
    errors = capfd.readouterr().err
    assert errors.count("it is left out until it answers, 1 of 2 servers continue") == 1
    assert errors.count(f"'{gone.url}' answers again") == 1


# Servers that die


def test_what_a_dead_server_was_asked_is_sampled_by_the_others(three, tmp_path, capfd):
    agents, dead = team(), three[0]
    own = client(agents, three, tmp_path)
    sampler = ImportanceWeightedSampler(agents, own, cap=2.0)
    dead.stop()
    sampled_N = sampler.sample([requests(0, 8), requests(1, 8)], SHORT)
    assert [[len(group) for group in groups] for groups in sampled_N] == [[3] * 8] * 2
    for completion in (c for groups in sampled_N for group in groups for c in group):
        assert completion.importance == pytest.approx(1, abs=1e-4)
    assert sum(len(asked(fake)) for fake in three) == 16
    errors = capfd.readouterr().err
    assert errors.count("notice: ") == 1
    assert "it is left out until it answers, 2 of 3 servers continue" in errors
    dead.start()
    until(lambda: not own.servers_N[0].away)
    assert kinds(dead)[2:] == ["load agent_0", "load agent_1"]
    for number in range(100):  # each is the dead one's with a third
        sampler.sample([[Request(prompt("x"), ((0,),), task_id=f"{number}")], []], SHORT)
        if asked(dead):
            break
    assert asked(dead)


def test_all_dead(three, tmp_path):
    agents = team()
    sampler = client(agents, three, tmp_path, patience=0.3)
    for fake in three:
        fake.stop()
    with pytest.raises(ServerError, match=r"generation.vllm_url: 'http.* no better for 0.3 s"):
        sampler.sample([requests(0), requests(1)], SHORT)
    sampler.close()


# A run that was asked to end

NEVER = 3600.0  # seconds; a test that waited for them would fail


def ending_soon(fake: FakeVLLM, folder: Path) -> tuple[VLLMSampler, threading.Event, list[str]]:
    """A sampler in a thread, what asks its run to end, and the errors that end it."""
    asked_to_end, errors = threading.Event(), []
    own = Servers([fake.url], NEVER, first_wait=0.01, ending=asked_to_end.is_set)
    sampler = VLLMSampler(team(), [own] * 2, folder / "vllm", 512, SHORT)

    def sample() -> None:
        with pytest.raises(ServerError) as raised:
            sampler.sample([requests(0, 2), []], SHORT)
        errors.append(str(raised.value))

    threading.Thread(target=sample, daemon=True).start()
    return sampler, asked_to_end, errors


def test_a_run_that_was_asked_to_end_waits_for_no_server_that_is_away(three, tmp_path):
    (dead, *_), torn = three, threading.Event()
    dead.before = lambda body: body["model"] != "base" and torn.wait(60)
    sampler, asked_to_end, errors = ending_soon(dead, tmp_path)
    until(lambda: len(asked(dead)) == 2)
    stopping = threading.Thread(target=dead.stop)
    stopping.start()
    until(lambda: sampler.servers_N[0].away)
    assert not errors
    asked_to_end.set()
    until(lambda: errors)
    torn.set()
    stopping.join()
    assert errors[0].startswith("generation.vllm_url: ")
    assert errors[0].endswith(", and the run was asked to end")


def test_a_run_that_was_asked_to_end_waits_not_long_for_a_silent_server(
    three, tmp_path, monkeypatch
):
    monkeypatch.setattr("comlrl.rollout.vllm.servers.LAST_WAIT", 0.3)
    monkeypatch.setattr("comlrl.rollout.vllm.servers.PAUSE", 0.05)
    (silent, *_), over = three, threading.Event()
    silent.before = lambda body: body["model"] != "base" and over.wait(60)
    sampler, asked_to_end, errors = ending_soon(silent, tmp_path)
    until(lambda: len(asked(silent)) == 2)
    threading.Event().wait(0.6)
    assert not errors
    asked_to_end.set()
    until(lambda: errors)
    over.set()
    assert errors == [
        f"generation.vllm_url: '{silent.url}': no answer for 0.3 s since the run was asked to end"
    ]
    sampler.close()
    assert silent.adapters == {}


def test_a_run_that_was_asked_to_end_finishes_its_step_where_servers_answer(
    three, tmp_path, monkeypatch
):
    """It may ask nothing for longer than it would wait: it updates meanwhile."""
    monkeypatch.setattr("comlrl.rollout.vllm.servers.LAST_WAIT", 0.3)
    monkeypatch.setattr("comlrl.rollout.vllm.servers.PAUSE", 0.05)
    own = Servers([three[0].url], NEVER, first_wait=0.01, ending=lambda: True)
    sampler = VLLMSampler(team(), [own] * 2, tmp_path / "vllm", 512, SHORT)
    threading.Event().wait(0.6)
    assert len(sampler.sample([requests(0, 2), []], SHORT)[0]) == 2


def test_what_slurm_kills_has_had_time_to_save():
    """torchrun kills after this time: more than half of it is left to save in."""
    common = (Path(__file__).parents[4] / "scripts/slurm_common.sh").read_text()
    (seconds,) = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)\}", common)
    assert int(seconds) / 2 > LAST_WAIT


def test_an_error_of_the_request_itself_is_not_another_server_s_business(three, tmp_path):
    sampler = client(team(), three, tmp_path)
    refused = []

    def refuse(body: dict) -> None:
        refused.append(body)
        raise HTTPException(400, "no such thing")

    for fake in three:
        fake.before = refuse
    with pytest.raises(ServerError, match=r"answers HTTP 400: .*no such thing"):
        sampler.sample([requests(0, 1), []], SHORT)
    assert len(refused) == 1


def test_too_many_open_files_are_no_fault_of_a_server(three, tmp_path, monkeypatch):
    sampler = client(team(), three, tmp_path)

    async def connect(*_, **__) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("anyio.connect_tcp", connect)
        with pytest.raises(ServerError, match=r"no connection, Too many open files; raise `ulimit"):
            sampler.sample([requests(0, 1), []], SHORT)
    assert not sampler.servers_N[0].away


class Killer:
    """Kills a server at its n-th request from now on, at the latest when asked to; then starts it
    again."""

    def __init__(self, fake: FakeVLLM, number: int, torn: bool, pause: float) -> None:
        self.fake, self.number, self.torn, self.pause = fake, number, torn, pause
        self.now, self.seen = threading.Event(), 0
        fake.before = self._count
        self.thread = threading.Thread(target=self._kill)
        self.thread.start()

    def _count(self, body: dict) -> None:
        self.seen += 1
        if self.seen == self.number:
            self.fake.torn = int(self.torn)  # its answer is lost on the way
            self.now.set()

    def _kill(self) -> None:
        assert self.now.wait(60)
        self.fake.stop()
        threading.Event().wait(self.pause)
        self.fake.torn, self.fake.before = 0, lambda body: None
        self.fake.start()

    def end(self) -> None:
        self.now.set()
        self.thread.join()


def test_nothing_is_lost_or_counted_twice(three, tmp_path):
    """20 rounds in which servers die at random moments, sometimes all of them; weights move
    between. Each group of siblings is one answer, whole, under the present adapter."""
    drawn, agents = random.Random(7), team()
    made: list[tuple[str, tuple[int, ...], frozenset]] = []
    for fake in three:
        choices = fake._choices

        def noted(model: str, ids: list[int], params: dict, choices=choices) -> Iterator[dict]:
            answer = list(choices(model, ids, params))
            texts = frozenset(tuple(choice["token_ids"]) for choice in answer)
            made.append((model, tuple(ids), texts))
            yield from answer

        fake._choices = noted
    sampler = client(agents, three, tmp_path)
    corrected = ImportanceWeightedSampler(agents, sampler, cap=2.0)
    for number in range(20):
        killed = drawn.sample(three, drawn.choice([1, 1, 2, 3]))
        killers = [
            Killer(fake, drawn.randint(1, 3), drawn.random() < 0.5, 0.05 * drawn.random())
            for fake in killed
        ]
        asked_N = [requests(agent, 4, 2) for agent in range(2)]
        sampled_N = corrected.sample(asked_N, SHORT)
        for killer in killers:
            killer.end()
        for agent in range(2):
            name = sampler.adapters.names[agent]
            for request, group in zip(asked_N[agent], sampled_N[agent], strict=True):
                assert len(group) == 2
                texts = frozenset(completion.token_ids for completion in group)
                assert made.count((name, request.prompt_ids, texts)) >= 1
                assert all(c.importance == pytest.approx(1, abs=1e-4) for c in group)
        move(agents, number % 2)
    assert corrected.metrics()["importance/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert len(made) > 20 * 8  # some answers were lost, and made again


# Several models


def test_each_agent_has_its_own_servers(three, tmp_path):
    """Two models with their own tokens: the other's server would give other ratios."""
    paths = [str(model_folder("qwen2")), str(model_folder("llama", seed=3))]
    agents = team(agents=paths, num_agents=2)
    second = FakeVLLM(team(num_agents=1, agent_model__name=paths[1])).start()
    try:
        first, own = joined(three[:2]), joined([second])
        sampler = VLLMSampler(agents, [first, own], tmp_path / "vllm", 512, SHORT)
        corrected = ImportanceWeightedSampler(agents, sampler, cap=2.0)
        for _ in range(2):
            sampled_N = corrected.sample([requests(0, 6), requests(1)], SHORT)
            for completion in (c for groups in sampled_N for group in groups for c in group):
                assert completion.importance == pytest.approx(1, abs=1e-4)
            move(agents, 0)
            move(agents, 1)
        assert kinds(second) == ["load agent_1", "load agent_1", "unload agent_1"]
        assert kinds(three[0]) == ["load agent_0", "load agent_0", "unload agent_0"]
        assert len(asked(three[0])) + len(asked(three[1])) == 12 and len(asked(second)) == 4
        sampler.close()
        assert second.adapters == three[0].adapters == three[1].adapters == {}
    finally:
        second.stop()
