"""An agent behind an OpenAI-compatible server: a real one, which is slow, fails or lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comlrl.config.sections import ApiConfig
from comlrl.errors import UserError
from comlrl.rollout.api_client import Answer, key_of
from comlrl.rollout.api_member import AnswerCache, ApiError, ApiMember, MixedSampler
from comlrl.types import Completion, Message, Request, Sampling
from tests.support.chat_server import ChatServer, chat_server
from tests.support.fakes import SEED, FakeSampler

WARM, GREEDY = Sampling(0.7, 20), Sampling(0.0, 20)


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def server(process: ChatServer, monkeypatch: pytest.MonkeyPatch) -> ChatServer:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    process.get("reset")
    return process


def member_of(
    server: ChatServer, model: str = "good", cache: Path | None = None, **keys: Any
) -> ApiMember:
    settings = ApiConfig(base_url=server.url, model=model, **keys)
    return ApiMember("judge", settings, cache=cache, backoff=0.01)


def requests(member: ApiMember, siblings: int = 2, text: str = "hello") -> list[Request]:
    ids = member.encode([Message("system", "s"), Message("user", text)])
    return [Request(ids, tuple(("seed", g) for g in range(siblings)))]


def answers(
    member: ApiMember, asked: list[Request], sampling: Sampling = WARM
) -> list[tuple[Completion, ...]]:
    return member.begin(asked, sampling).result()


def texts(groups) -> list[str]:
    return [completion.text for group in groups for completion in group]


def test_each_sibling_is_a_request_with_the_run_s_sampling(server):
    member = member_of(server, key_env="JUDGE_KEY")
    groups = answers(member, requests(member), Sampling(0.7, 20, top_p=0.9))
    assert sorted(texts(groups)) == ["1: hello", "2: hello"]
    for completion in groups[0]:
        assert completion.token_ids == () and completion.finished
    (first, _) = server.get("seen")
    assert first["key"] == "Bearer secret-key"
    assert first["body"] == {
        "model": "good", "temperature": 0.7, "top_p": 0.9, "max_tokens": 20,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
    }  # fmt: skip
    assert member.metrics() == {
        "calls": 2, "cached": 0, "failed": 0, "prompt_tokens": 14, "completion_tokens": 6,
    }  # fmt: skip
    assert set(member.metrics().values()) == {0}


def test_a_greedy_completion_is_asked_for_once(server):
    member = member_of(server)
    assert texts(answers(member, requests(member, 3), GREEDY)) == ["1: hello"] * 3
    assert len(server.get("seen")) == 1


def test_a_resumed_run_asks_nothing_twice(server, tmp_path):
    cache = tmp_path / "judge.jsonl"
    first = member_of(server, cache=cache, key_env="JUDGE_KEY")
    before = answers(first, requests(first))
    cache.write_bytes(cache.read_bytes() + b'["torn", "li')  # the run was killed
    resumed = member_of(server, cache=cache, key_env="JUDGE_KEY")
    assert answers(resumed, requests(resumed)) == before
    metrics = resumed.metrics()
    assert metrics["cached"] == 2 and metrics["calls"] == 0
    answers(resumed, requests(resumed, text="another"))
    assert len(server.get("seen")) == 4
    again = member_of(server, cache=cache)
    answers(again, requests(again, text="another"))
    assert len(server.get("seen")) == 4
    assert "secret-key" not in cache.read_text()


@pytest.mark.parametrize("failures", ["500,429,good", "text,null,fields,good", "slow,closed,good"])
def test_what_may_pass_is_asked_for_again(server, failures):
    member = member_of(
        server, failures, timeout=0.5 if "slow" in failures else 30, key_env="JUDGE_KEY"
    )
    assert texts(answers(member, requests(member, 1)))[0].endswith(": hello")


@pytest.mark.parametrize("failures", ["500", "text", "fields", "closed", "slow", "endless", "400"])
def test_a_failure_after_the_retries_ends_the_run_or_is_an_empty_answer(server, failures):
    keys = {"timeout": 0.5 if failures == "slow" else 30, "retries": 1, "key_env": "JUDGE_KEY"}
    stopping = member_of(server, failures, **keys)
    with pytest.raises(ApiError, match=r"agents\.judge\.api") as raised:
        answers(stopping, requests(stopping, 1))
    assert raised.value.exit_code == 1 and "secret-key" not in str(raised.value)
    lenient = member_of(server, failures, on_error="empty", **keys)
    assert texts(answers(lenient, requests(lenient, 1))) == [""]
    assert lenient.metrics()["failed"] == 1
    once = failures in ("endless", "400")
    assert len(server.get("seen")) == (2 if once else 4)


@pytest.mark.parametrize("refusal", ["401", "403", "404", "redirect"])
def test_a_refused_key_or_address_ends_the_run_whatever_on_error_is(server, refusal):
    member = member_of(server, refusal, on_error="empty", key_env="JUDGE_KEY")
    with pytest.raises(ApiError):
        answers(member, requests(member, 1))
    assert len(server.get("seen")) == 1  # the key has followed no redirect


def test_a_lying_usage_is_not_counted_and_half_characters_are_replaced(server):
    member = member_of(server, "lying")
    assert texts(answers(member, requests(member, 1))) == ["a ? b"]
    assert member.metrics()["completion_tokens"] == 0


def test_a_server_that_is_away(server):
    away = ApiConfig(base_url="http://127.0.0.1:9/v1", model="m", retries=1)
    member = ApiMember("judge", away, backoff=0)
    with pytest.raises(ApiError, match="2 requests"):
        answers(member, requests(member, 1))


def test_tools_are_sent_beside_the_messages(server):
    member = member_of(server)
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids = member.encode([Message("tools", json.dumps(tools)), Message("user", "hello")])
    answers(member, [Request(ids, (("k",),))])
    (seen,) = server.get("seen")
    assert seen["body"]["tools"] == tools and len(seen["body"]["messages"]) == 1


def test_the_setup_is_checked_before_anything_is_asked():
    with pytest.raises(UserError, match=r"agents\.judge\.api\.key_env: NO_SUCH_KEY"):
        ApiMember("judge", ApiConfig(base_url="http://x/v1", model="m", key_env="NO_SUCH_KEY"))
    for url in ("x/v1", "http://x:port/v1", "ftp://x/v1", "https://", "http://me:secret@x/v1"):
        with pytest.raises(UserError, match=r"agents\.judge\.api\.base_url") as raised:
            ApiMember("judge", ApiConfig(base_url=url, model="m"))
        assert "secret" not in str(raised.value)


def test_a_key_that_no_header_can_contain_is_refused_and_never_shown(monkeypatch, server):
    settings = ApiConfig(base_url=server.url, model="m", key_env="SOME_KEY")
    for key in ("sk-secret\n1", "sk-secret\x1b1", "sk-secret…"):
        monkeypatch.setenv("SOME_KEY", key)
        with pytest.raises(UserError, match="SOME_KEY") as refused:
            ApiMember("judge", settings)
        assert "secret" not in str(refused.value)
    monkeypatch.setenv("SOME_KEY", "sk-secret\r\n")  # as a file that Windows wrote ends
    assert key_of("SOME_KEY") == "sk-secret"


def test_a_team_samples_each_agent_where_it_lives(server):
    """Agent 1 is the service's: what it reads is of any length, and its siblings are its own."""
    local, member = FakeSampler(max_length=30), member_of(server)
    sampler = MixedSampler(local, {1: member})
    prompt = [Message("user", "x" * 100)]
    assert not sampler.fits(0, sampler.encode(0, prompt), WARM)
    assert sampler.fits(1, sampler.encode(1, prompt), WARM)
    asked = Request(sampler.encode(0, prompt), ((SEED, "t", (), 0, 0), (SEED, "t", (), 0, 1)))
    sampled_N = sampler.sample([[asked], requests(member), [asked]], WARM)
    assert sampled_N[0] == sampled_N[2] == local.sample([[asked]], WARM)[0]
    assert local.calls[0] == [1, 0, 1] and len(server.get("seen")) == 2
    assert sampler.sample([[asked]], WARM) == sampled_N[:1]  # a smaller team, of a baseline


def test_answers_of_other_processes_are_read(server, tmp_path):
    first = member_of(server, cache=tmp_path / "process_0.jsonl")
    before = answers(first, requests(first))
    other = member_of(server, cache=tmp_path / "process_1.jsonl")
    assert answers(other, requests(other)) == before
    assert not (tmp_path / "process_1.jsonl").exists() and len(server.get("seen")) == 2


def test_the_cache_is_bounded(tmp_path: Path):
    path = tmp_path / "cache.jsonl"
    cache = AnswerCache(path, limit=3)
    for number in range(20):
        cache.add(str(number), Answer(f"text {number}", True, None, 1))
        assert len(path.read_text().splitlines()) <= 6
    read = AnswerCache(path, limit=3)
    for kept in (cache, read):
        assert [number for number in range(20) if kept.get(str(number))] == [17, 18, 19]
