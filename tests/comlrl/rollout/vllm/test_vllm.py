"""The client of a vLLM server, against a server with the same endpoints around the generator."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from comlrl.errors import ServerError, UserError
from comlrl.models.team import Team
from comlrl.rollout.vllm import adapters
from comlrl.rollout.vllm.servers import Server
from comlrl.trainers.launch.wiring import vllm
from comlrl.types import AgentTurn, Completion, Request, Sampling, Task, Tree
from comlrl.update.importance import ImportanceWeightedSampler
from tests.support.fake_vllm import SAMPLING, FakeVLLM, client, kinds, move, requests
from tests.support.tiny_models import STOPS, config, prompt, team
from tests.support.trees import node


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = FakeVLLM(team(num_agents=1)).start()
    yield fake
    fake.stop()


def test_each_agent_s_completions_have_ratio_1(server, tmp_path):
    """Adapters that differ: one agent's samples under the other's would have other ratios."""
    agents = team()
    sampler = client(agents, server, tmp_path)
    corrected = ImportanceWeightedSampler(agents, sampler, cap=2.0)
    sampled_N = corrected.sample([requests(0), requests(1)], SAMPLING)
    assert [[len(group) for group in groups] for groups in sampled_N] == [[3, 3], [3, 3]]
    for completion in (c for groups in sampled_N for group in groups for c in group):
        assert completion.importance == pytest.approx(1, abs=1e-4)  # drawn in float32
        ids = completion.token_ids
        assert completion.text == agents.agents[0].decode(ids)
        assert completion.finished == (ids[-1] in STOPS) and (completion.finished or len(ids) == 12)
    metrics = corrected.metrics()
    assert metrics["importance/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["importance/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert metrics["importance/truncated_share"] == 0
    assert corrected.metrics() == {}  # reported once
    crossed = ImportanceWeightedSampler(agents, sampler, cap=2.0).sample(
        [requests(0), []], SAMPLING
    )
    assert crossed[1] == []
    names = {name for _, name in server.events}
    assert {body["model"] for body in server.asked if body["model"] != "base"} == names


def test_greedy_asks_once_for_all_siblings_and_weights_nothing(server, tmp_path):
    agents = team()
    corrected = ImportanceWeightedSampler(agents, client(agents, server, tmp_path), cap=2.0)
    greedy = Sampling(0.0, 12)
    groups = corrected.sample([[], requests(1)], greedy)[1]
    assert all(group == group[:1] * 3 and group[0].importance == 1 for group in groups)
    assert corrected.metrics() == {}


def test_each_agent_is_asked_for_at_its_own_limits(server, tmp_path):
    """And compared with the trained policy at its own temperature: ratios of 1."""
    agents = team()
    own_N = (Sampling(0.8, 5), Sampling(1.4, 12))
    own = replace(own_N[0], by_agent=own_N)
    made = client(agents, server, tmp_path, sampling=own)
    sampler = ImportanceWeightedSampler(agents, made, cap=2.0)
    sampled_N = sampler.sample([requests(0), requests(1)], own)
    asked = {(b["temperature"], b["max_tokens"]) for b in server.asked if b["model"] != "base"}
    assert asked == {(0.8, 5), (1.4, 12)}
    for completion in (c for groups in sampled_N for group in groups for c in group):
        assert completion.importance == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("replays", [False, True])
def test_what_a_server_writes_after_a_stop_is_left_out(server, tmp_path, replays):
    """One that decodes several tokens at once writes on. A byte a token: none holds the stop."""
    server.repeats, server.replays = True, replays
    plain = replace(SAMPLING, top_p=0.9, max_support=1 << 20) if replays else SAMPLING
    sampler = client(team(), server, tmp_path, sampling=plain)
    whole = sampler.sample([requests(0), []], plain)[0]
    text = max((c.text for group in whole for c in group), key=len)
    stop = text[1:3]
    assert len(stop) == 2 and len(text) > 3
    server.asked.clear()
    cut = sampler.sample([requests(0), []], replace(plain, stop=(stop,)))[0]
    for body in server.asked:
        params = body.get("sampling_params", body)
        assert params["stop"] == [stop] and params["include_stop_str_in_output"]
    for short, longer in zip(itertools.chain(*cut), itertools.chain(*whole), strict=True):
        decode, ids = sampler.team.agents[0].decode, longer.token_ids
        end = next((i for i in range(len(ids) + 1) if stop in decode(ids[:i])), None)
        assert (short.token_ids, short.text) == (ids[:end], longer.text.partition(stop)[0])
        assert short.finished == (longer.finished or end is not None)
        assert short.logprob == longer.logprob  # of the first token alone, in this server's replies
        if replays:
            assert len(short.support.counts_L) == len(short.token_ids)
            assert short.support.counts_L.sum() == len(short.support.ids_I)


def test_adapters_are_loaded_under_new_names_before_old_ones_are_unloaded(server, tmp_path):
    agents = team()
    sampler = client(agents, server, tmp_path)
    assert kinds(server) == ["load agent_0", "load agent_1"]
    asked = [requests(0, 1), requests(1, 1)]
    sampler.sample(asked, SAMPLING)
    sampler.sample(asked, SAMPLING)
    assert len(server.events) == 2  # nothing has moved
    move(agents, 1)
    sampler.sample([asked[0], []], SAMPLING)  # whoever acts
    assert kinds(server)[2:] == ["load agent_1", "unload agent_1"]
    (old,) = {name for _, name in server.events[:2]} & {server.events[3][1]}
    assert old != server.events[2][1]
    move(agents, 0)
    move(agents, 1)
    sampler.sample(asked, SAMPLING)
    both = ["load agent_0", "load agent_1", "unload agent_0", "unload agent_1"]
    assert kinds(server)[4:] == both
    kept = [path.name for path in (tmp_path / "vllm/process_0").iterdir()]
    assert sorted(kept) == sorted(server.adapters)
    sampler.close()
    assert server.adapters == {} and not (tmp_path / "vllm").exists()


def test_what_is_held_is_sampled_from_while_weights_move(server, tmp_path):
    """Others are sampled from meanwhile; both versions are there until another one is held."""
    agents = team()
    sampler = client(agents, server, tmp_path)
    asked, other = [requests(0, 1), requests(1, 1)], [[Request(prompt("x"), (("eval",),))], []]
    held, old = sampler.hold(), dict(sampler.adapters.names)
    move(agents, 0)
    move(agents, 1)
    sampler.sample(other, SAMPLING)
    assert kinds(server)[2:] == ["load agent_0", "load agent_1"]
    assert {*old.values(), *sampler.adapters.names.values()} == set(server.adapters)
    server.asked.clear()
    sampled_N = held.sample(asked, SAMPLING)
    assert {body["model"] for body in server.asked} == set(old.values())
    turns = [AgentTurn((), asked[i][0].prompt_ids, groups[0]) for i, groups in enumerate(sampled_N)]
    corrected = ImportanceWeightedSampler(agents, sampler, cap=1e9)
    (tree,) = corrected.weigh([Tree(Task("t"), (node(turns),), "align", None)], SAMPLING)
    for index, turn in enumerate(tree.nodes[0].agents_N):
        for completion in turn.completions_G:
            ratio = ratio_to(agents, index, asked[index][0], completion)
            assert completion.importance == pytest.approx(ratio, rel=1e-3) != 1
    sampler.hold()
    assert kinds(server)[4:] == ["unload agent_0", "unload agent_1"]
    assert set(server.adapters) == set(sampler.adapters.names.values())
    move(agents, 0)
    sampler.release()  # never more than two versions: a third is loaded once it is needed
    assert len(server.events) == 6
    sampler.sample(asked, SAMPLING)
    assert kinds(server)[6:] == ["load agent_0", "unload agent_0"]
    sampler.close()
    assert server.adapters == {} and not (tmp_path / "vllm").exists()


def ratio_to(agents: Team, index: int, request: Request, completion: Completion) -> float:
    """π(completion) / what it was drawn with, written out."""
    ids = completion.token_ids
    with agents.acting(index) as agent, torch.no_grad():
        logits = agent.model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0]
    chosen = (logits[-len(ids) - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
    return math.exp(chosen.gather(-1, torch.tensor(ids)[:, None]).sum() - completion.logprob)


def test_leaving_ends_what_other_threads_wait_for(server, tmp_path, monkeypatch):
    """Nothing more is sent, and nothing is loaded again."""
    monkeypatch.setattr("comlrl.rollout.vllm.sampler.IN_FLIGHT", 4)
    sampler = client(team(), server, tmp_path)
    arrived, over, errors = threading.Semaphore(0), threading.Event(), []

    def before(body: dict) -> None:
        arrived.release()
        over.wait(60)

    def sample() -> None:
        with pytest.raises(ServerError, match="is not asked any more") as caught:
            sampler.hold().sample([requests(0, 9), []], SAMPLING)
        errors.append(caught.value)

    server.before = before
    growing = threading.Thread(target=sample)
    growing.start()
    for _ in range(4):
        assert arrived.acquire(timeout=60)
    sampler.close()
    growing.join(60)
    assert len(errors) == 1 and not over.is_set()
    assert server.adapters == {} and not (tmp_path / "vllm").exists()
    over.set()
    assert sum(body["model"] != "base" for body in server.asked) == 4
    assert kinds(server)[2:] == ["unload agent_0", "unload agent_1"]


def test_unloading_is_not_cut_by_a_thread_that_leaves_later(server, tmp_path, monkeypatch):
    """A growth that gets no answer any more leaves too, while the main thread unloads."""
    sampler = client(team(), server, tmp_path)
    exchange = Server._exchange

    async def leave_then_exchange(server: Server, *request: object) -> object:
        sampler.leave()
        return await exchange(server, *request)

    monkeypatch.setattr(Server, "_exchange", leave_then_exchange)
    sampler.close()
    assert server.adapters == {}
    assert kinds(server)[2:] == ["unload agent_0", "unload agent_1"]


def test_adapters_of_a_server_are_loaded_together(server, tmp_path):
    """It takes none before it is asked to load both."""
    together = threading.Barrier(2, timeout=60)
    server.loading = lambda name: together.wait() and None
    client(team(), server, tmp_path).close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_files_have_the_model_s_precision(server, tmp_path, dtype):
    """In which the server computes, too; what is trained is float32."""
    agents = team(agent_model__torch_dtype=dtype)
    sampler = client(agents, server, tmp_path)
    (path,) = (p for name, p in server.adapters.items() if name.startswith("agent_1"))
    weights = load_file(path / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    trained = agents.agents[1].named()
    assert weights.keys() == trained.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, trained[name].to(weight.dtype)), name
    sampler.close()


def test_files_are_in_memory_where_servers_read_it(server, tmp_path, monkeypatch):
    """Else in the run's folder. A killed process's are removed by the next one."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(adapters, "MEMORY", memory)
    killed = client(team(), server, tmp_path)
    assert killed.adapters.folder.parent == memory
    sampler = client(team(), server, tmp_path)
    assert [*memory.iterdir()] == [sampler.adapters.folder]
    sampler.close()
    assert [*memory.iterdir()] == [] and not (tmp_path / "vllm").exists()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(adapters, "LOCAL", {"another.host"})
        sampler = client(team(), server, tmp_path)
        assert sampler.adapters.folder == (tmp_path / "vllm" / "process_0").resolve()
        sampler.close()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    sampler = client(team(), server, tmp_path)
    assert [*memory.iterdir()] == []
    sampler.close()


def test_processes_with_the_same_weights_share_their_names(server, tmp_path, monkeypatch):
    """The later one finds them loaded; and what one has unloaded is loaded again where needed."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "aa")  # as the main process tells all
    first, second = (client(team(), server, tmp_path / name) for name in "ab")
    second.sample([requests(0, 1), []], SAMPLING)
    assert kinds(server) == ["load agent_0", "load agent_1"]
    second.close()
    assert server.adapters == {}
    assert len(first.sample([requests(0, 1), []], SAMPLING)[0][0]) == 3
    first.close()
    assert server.adapters == {}


def test_answers_are_waited_for_and_all_requests_are_sent_at_once(server, tmp_path):
    """The server answers only after all requests have arrived."""
    sampler = client(team(), server, tmp_path)
    together = threading.Barrier(6, timeout=60)
    server.before = lambda body: together.wait() and None
    sampled_N = sampler.sample([requests(0, 3), requests(1, 3)], SAMPLING)
    assert [len(groups) for groups in sampled_N] == [3, 3]


def test_an_answer_that_does_not_come_is_asked_for_again(server, tmp_path):
    """The server has answered another meanwhile: not all is lost."""
    sampler = client(team(), server, tmp_path, patience=3)
    never, asked = threading.Event(), []

    def before(body: dict) -> None:
        asked.append(body)
        never.wait({1: 60, 2: 2}.get(len(asked), 0))

    server.before = before
    assert [len(group) for group in sampler.sample([requests(0, 2), []], SAMPLING)[0]] == [3, 3]
    never.set()
    assert len(asked) >= 3  # more where a busy machine takes longer than that, too


def test_torn_connections_are_tried_again(server, tmp_path):
    sampler = client(team(), server, tmp_path)
    server.torn = 3
    sampled_N = sampler.sample([requests(0), requests(1)], SAMPLING)
    assert [[len(group) for group in groups] for groups in sampled_N] == [[3, 3], [3, 3]]
    asked = sum(body["model"] != "base" for body in server.asked)
    assert asked == 4 + 3


def test_a_server_that_is_started_again_is_given_the_adapters_again(server, tmp_path, monkeypatch):
    sampler, looked = client(team(), server, tmp_path), []

    async def look() -> list[str]:  # the server comes back meanwhile
        looked.append(server)
        if len(looked) == 1:
            server.start()
        return await look_again()

    (member,) = sampler.servers_N[0].members
    look_again = member.names
    monkeypatch.setattr(member, "names", look)
    server.stop()
    assert len(sampler.sample([requests(0, 1), []], SAMPLING)[0][0]) == 3
    assert looked
    assert kinds(server) == ["load agent_0", "load agent_1"] * 2


def test_a_server_that_stays_away_is_given_up(server, tmp_path):
    sampler = client(team(), server, tmp_path, patience=0.1)
    server.stop()
    with pytest.raises(ServerError, match=r"generation.vllm_url: 'http.* no better for 0.1 s"):
        sampler.sample([requests(0), requests(1)], SAMPLING)
    sampler.close()


# Truncation

CUT = Sampling(0.8, 12, top_p=0.7, max_support=1)


def test_what_truncation_left_comes_with_the_completions(server, tmp_path):
    """Sets of any size, whatever ``max_support``; one request for both of top_p and top_k."""
    server.replays, agents = True, team()
    own_N = (CUT, Sampling(0.8, 12, top_k=3, max_support=1))
    both = replace(CUT, by_agent=own_N)
    sampler = client(agents, server, tmp_path, sampling=both)
    corrected = ImportanceWeightedSampler(agents, sampler, cap=2.0)
    sampled_N = corrected.sample([requests(0), requests(1)], both)
    sizes = [[c.support.counts_L.tolist() for g in groups for c in g] for groups in sampled_N]
    assert max(map(max, sizes[0])) > 3 and {n for own in sizes[1] for n in own} == {3}
    for completion in (c for groups in sampled_N for group in groups for c in group):
        assert completion.importance == pytest.approx(1, abs=1e-4)
        sets = completion.support.ids_I.split(completion.support.counts_L.tolist())
        for token, ids in zip(completion.token_ids, sets, strict=True):
            assert token in ids


def test_such_a_server_has_a_top_k_with_every_request(server, tmp_path):
    """Greedy ones and those of an agent without truncation too; nobody learns over an
    evaluation's sets."""
    server.replays, agents = True, team()
    both = replace(CUT, by_agent=(CUT, SAMPLING))
    sampler = client(agents, server, tmp_path, sampling=both)
    asked = [requests(0, 1), requests(1, 1)]
    cut_N, whole_N = sampler.sample(asked, both)
    assert cut_N[0][0].support is not None and whole_N[0][0].support is None
    for sampling in (both.greedy, both.with_sets(None)):
        for groups in sampler.sample(asked, sampling):
            assert len(groups[0]) == 3 and groups[0][0].support is None
    first, again = (sampler.sample(asked, both.greedy) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale_out": False}, r"\(Scale-out endpoints are disabled\.\); start it with "
                               "--enable-scale-out --return-sampling-mask"),
        ({"replays": False}, r"does not return the tokens that survive it \(.*\); start it with .*"
                             "--return-sampling-mask .*, or set top_p=null or generation.backend"),
        ({"replays": True, "processed": False}, "--logprobs-mode processed_logprobs"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_replay_is_refused_at_the_start(server, settings, message):
    given = {"generation__backend": "vllm", "generation__vllm_url": server.url}
    vars(server).update(settings)
    vllm.check(config(**given, agent_model__top_p=1.0), ("aux", "main"))
    with pytest.raises(UserError, match=r"^top_p: 0\.9 with generation\.backend=vllm.* " + message):
        vllm.check(config(**given, agent_model__top_p=0.9), ("aux", "main"))


def test_a_server_that_can_replay_is_not_refused(server):
    server.replays = True
    given = {"generation__backend": "vllm", "generation__vllm_url": server.url}
    vllm.check(config(**given, agent_model__top_p=0.9), ("aux", "main"))


def test_a_server_of_another_agent_s_model_is_refused(server):
    second = FakeVLLM(server.team).start()
    second.base = "mine"
    given = {"generation__backend": "vllm", "agents": ["base", "mine"]}
    right = {"base": server.url, "mine": f"{second.url}/v1/"}
    try:
        vllm.check(config(**given, generation__vllm_url=right), ("aux", "main"))
        wrong = {"base": second.url, "mine": server.url}
        with pytest.raises(UserError, match="serves 'mine', and is listed for 'base'"):
            vllm.check(config(**given, generation__vllm_url=wrong), ("aux", "main"))
    finally:
        second.stop()


@pytest.mark.parametrize(
    ("trained", "served", "noticed"),
    [
        ("builtin:tiny-coder", "/srv/comlrl/builtin/tiny_coder", False),
        ("Qwen/Qwen2.5-Coder-3B", "/models/Qwen2.5-Coder-3B", False),
        ("Qwen/Qwen2.5-Coder-3B", "Qwen/Qwen2.5-Coder-1.5B", True),
    ],
)
def test_a_server_of_a_model_with_another_name_is_noticed(server, capfd, trained, served, noticed):
    """Its ratios may have a mean near 1 even so."""
    server.base = served
    given = {"generation__backend": "vllm", "generation__vllm_url": server.url}
    vllm.check(config(**given, agent_model__name=trained), ("aux", "main"))
    text = f"serves '{served}', and '{trained}' is trained"
    assert (text in capfd.readouterr().err) == noticed


@pytest.mark.parametrize(
    ("settings", "temperature", "named"),
    [
        ({"max_model_len": 511}, 1.0, "--max-model-len 512"),
        ({"processed": False}, 0.7, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start(server, settings, temperature, named):
    vars(server).update(settings)
    given = {"generation__backend": "vllm", "generation__vllm_url": server.url}
    given |= {"agent_model__max_length": 512, "agent_model__temperature": temperature}
    with pytest.raises(UserError, match=r"generation\.vllm_url: .*" + named):
        vllm.check(config(**given, agent_model__top_p=1.0), ("aux", "main"))


def test_a_server_that_refuses_the_adapters_is_reported_at_the_start(server, tmp_path):
    server.max_rank = 8
    with pytest.raises(UserError, match=r"generation\.vllm_url: .*LoRA rank 16"):
        client(team(), server, tmp_path)
    assert server.adapters == {} and not (tmp_path / "vllm").exists()


def test_raw_log_probabilities_are_right_at_temperature_1(server):
    server.processed = False
    given = {"generation__backend": "vllm", "generation__vllm_url": server.url}
    vllm.check(config(**given, agent_model__temperature=1.0, agent_model__top_p=1.0), ("a", "b"))
