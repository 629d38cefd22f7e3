"""An agent behind an OpenAI-compatible server: a real one, which is slow, fails or lies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from comlrl.errors import UserError
from comlrl.rollout.api_client import Answer
from comlrl.rollout.api_member import AnswerCache, ApiError, ApiMember
from comlrl.types import Message, Request, Sampling

# What it answers is in the model's name: a list of behaviors, one for each request.
SERVER = """
import asyncio, json, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

requests = []

async def forever():
    while True:
        yield b"x" * 65536
        await asyncio.sleep(0)

async def chat(request):
    body = await request.json()
    requests.append({"body": body, "key": request.headers.get("authorization")})
    behaviors = body["model"].split(",")
    kind = behaviors[min(len(requests), len(behaviors)) - 1]
    if kind == "slow":
        await asyncio.sleep(60)
    if kind.isdigit():
        return JSONResponse({"error": {"message": request.headers["authorization"]}}, int(kind))
    if kind == "redirect":
        return RedirectResponse("/elsewhere/chat/completions", 307)
    if kind == "endless":
        return StreamingResponse(forever())
    if kind == "text":
        return Response("[" * 100_000)
    if kind == "null":
        return JSONResponse({"choices": [{"message": {"content": None}}]})
    if kind == "lying":
        usage = {"prompt_tokens": -5, "completion_tokens": "many"}
        message = {"content": "a \\ud800 b"}
        return Response(json.dumps({"choices": [{"message": message}], "usage": usage}))
    text = f"{len(requests)}: " + body["messages"][-1]["content"]
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return JSONResponse({"choices": [choice], "usage": usage})

async def seen(request):
    return JSONResponse(requests)

async def reset(request):
    requests.clear()
    return JSONResponse({})

routes = [Route("/v1/chat/completions", chat, methods=["POST"]),
          Route("/elsewhere/chat/completions", chat, methods=["POST"]),
          Route("/seen", seen), Route("/reset", reset)]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]), log_level="critical")
"""


class Served:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> Any:
        return httpx.get(f"http://127.0.0.1:{self.port}/{path}", trust_env=False).json()

    def member(self, model: str = "good", **keys: Any) -> ApiMember:
        url = f"http://127.0.0.1:{self.port}/v1"
        return ApiMember("judge", base_url=url, model=model, backoff=0.01, **keys)


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path_factory.mktemp("api") / "server.py"
    script.write_text(SERVER)
    running = subprocess.Popen([sys.executable, str(script), str(port)])
    served = Served(port)
    try:
        while True:
            assert running.poll() is None
            try:
                served.get("seen")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        yield served
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def server(process: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    process.get("reset")
    return process


WARM, GREEDY = Sampling(0.7, 20), Sampling(0.0, 20)


def requests(member: ApiMember, siblings: int = 2, text: str = "hello") -> list[list[Request]]:
    ids = member.encode(0, [Message("system", "s"), Message("user", text)])
    return [[Request(ids, tuple(("seed", g) for g in range(siblings)))]]


def texts(groups_N) -> list[str]:
    return [completion.text for groups in groups_N for group in groups for completion in group]


def test_each_sibling_is_a_request_with_the_run_s_sampling(server):
    member = server.member(key_env="JUDGE_KEY")
    groups_N = member.sample(requests(member), Sampling(0.7, 20, top_p=0.9))
    assert sorted(texts(groups_N)) == ["1: hello", "2: hello"]
    for completion in groups_N[0][0]:
        assert completion.token_ids == () and completion.finished
    (first, _) = server.get("seen")
    assert first["key"] == "Bearer secret-key"
    assert first["body"] == {
        "model": "good", "temperature": 0.7, "top_p": 0.9, "max_tokens": 20,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
    }  # fmt: skip
    assert member.metrics() == {
        "requests": 2, "cached": 0, "prompt_tokens": 14, "completion_tokens": 6,
    }  # fmt: skip
    assert member.metrics() == {}


def test_a_greedy_completion_is_asked_for_once(server):
    member = server.member()
    assert texts(member.sample(requests(member, 3), GREEDY)) == ["1: hello"] * 3
    assert len(server.get("seen")) == 1


def test_a_resumed_run_asks_nothing_twice(server, tmp_path):
    cache = tmp_path / "judge.jsonl"
    first = server.member(cache=cache, key_env="JUDGE_KEY")
    before = first.sample(requests(first), WARM)
    cache.write_bytes(cache.read_bytes() + b'["torn", "li')  # the run was killed
    resumed = server.member(cache=cache, key_env="JUDGE_KEY")
    assert resumed.sample(requests(resumed), WARM) == before
    assert resumed.metrics() == {"cached": 2}
    resumed.sample(requests(resumed, text="another"), WARM)
    assert len(server.get("seen")) == 4
    again = server.member(cache=cache)
    again.sample(requests(again, text="another"), WARM)
    assert len(server.get("seen")) == 4
    assert "secret-key" not in cache.read_text()


@pytest.mark.parametrize("failures", ["503,429,good", "text,null,good", "slow,good"])
def test_what_may_pass_is_asked_for_again(server, failures):
    member = server.member(failures, timeout=0.5 if "slow" in failures else 30, key_env="JUDGE_KEY")
    assert texts(member.sample(requests(member, 1), WARM))[0].endswith(": hello")


@pytest.mark.parametrize("failures", ["503", "text", "null", "slow", "endless", "400"])
def test_a_failure_after_the_retries_ends_the_run_or_is_an_empty_answer(server, failures):
    keys = {"timeout": 0.5 if failures == "slow" else 30, "retries": 1, "key_env": "JUDGE_KEY"}
    stopping = server.member(failures, **keys)
    with pytest.raises(ApiError, match=r"agents\.judge\.api") as raised:
        stopping.sample(requests(stopping, 1), WARM)
    assert raised.value.exit_code == 1 and "secret-key" not in str(raised.value)
    lenient = server.member(failures, on_error="empty", **keys)
    assert texts(lenient.sample(requests(lenient, 1), WARM)) == [""]
    assert lenient.metrics()["failed"] == 1
    once = failures in ("endless", "400")
    assert len(server.get("seen")) == (2 if once else 4)


@pytest.mark.parametrize("refusal", ["401", "403", "404", "redirect"])
def test_a_refused_key_or_address_ends_the_run_whatever_on_error_is(server, refusal):
    member = server.member(refusal, on_error="empty", key_env="JUDGE_KEY")
    with pytest.raises(ApiError):
        member.sample(requests(member, 1), WARM)
    assert len(server.get("seen")) == 1  # the key has followed no redirect


def test_a_lying_usage_is_not_counted_and_half_characters_are_replaced(server):
    member = server.member("lying")
    assert texts(member.sample(requests(member, 1), WARM)) == ["a ? b"]
    assert member.metrics()["completion_tokens"] == 0


def test_a_server_that_is_away(server):
    member = ApiMember("judge", base_url="http://127.0.0.1:9/v1", model="m", backoff=0, retries=1)
    with pytest.raises(ApiError, match="2 requests"):
        member.sample(requests(member, 1), WARM)


def test_tools_are_sent_beside_the_messages(server):
    member = server.member()
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids = member.encode(0, [Message("tools", json.dumps(tools)), Message("user", "hello")])
    member.sample([[Request(ids, (("k",),))]], WARM)
    (seen,) = server.get("seen")
    assert seen["body"]["tools"] == tools and len(seen["body"]["messages"]) == 1


def test_the_setup_is_checked_before_anything_is_asked():
    with pytest.raises(UserError, match=r"agents\.judge\.api\.key_env: NO_SUCH_KEY"):
        ApiMember("judge", base_url="http://x/v1", model="m", key_env="NO_SUCH_KEY")
    for url in ("x/v1", "http://x:port/v1"):
        with pytest.raises(UserError, match=r"agents\.judge\.api\.base_url"):
            ApiMember("judge", base_url=url, model="m")


def test_the_cache_is_bounded(tmp_path: Path):
    path = tmp_path / "cache.jsonl"
    cache = AnswerCache(path, limit=3)
    for number in range(20):
        cache.add(str(number), Answer(f"text {number}", True, None, 1))
        assert len(path.read_text().splitlines()) <= 6
    read = AnswerCache(path, limit=3)
    for kept in (cache, read):
        assert [number for number in range(20) if kept.get(str(number))] == [17, 18, 19]
