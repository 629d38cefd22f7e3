"""Programs that talk to an OpenAI-compatible server, as episodes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from comlrl.errors import UserError
from comlrl.programs import tool_calls
from tests.support.played import TASKS, TOOLS, Keeping, Serving, Writing, played


def client(agents: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=agents.base_url, api_key=agents.api_key, max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_openai_client_plays_as_the_agents_do():
    async def outside(task, agents):
        async with client(agents) as own:
            first = await own.chat.completions.create(model="coder", messages=user("write"))
            text = first.choices[0].message.content
            second = await own.chat.completions.create(model="tester", messages=user(text))
        assert (first.model, first.choices[0].finish_reason) == ("coder", "stop")
        assert first.usage.completion_tokens == len(text.encode())
        return len(second.choices[0].message.content)

    async def inside(task, agents):
        return len(await agents["tester"](await agents["coder"]("write")))

    # Token ids and log-probabilities are the sampler's own, and so are the keys.
    assert played(outside, 3) == played(inside, 3)


def test_blocking_clients_in_threads_are_sampled_together():
    def talk(base_url, api_key):
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as own:
            reply = own.chat.completions.create(model="coder", messages=user("write"))
            return reply.choices[0].message.content

    async def play(task, agents):
        await asyncio.to_thread(talk, agents.base_url, agents.api_key)
        return 1

    # More episodes than a pool of threads would hold: each of them must have asked.
    sampler = Keeping()
    for group in played(play, 24, timeout=60.0, sampler=sampler):
        assert [len(episode.calls) for episode in group.episodes_G] == [1] * 24
    assert len(sampler.requests) == 1


def test_several_choices_are_as_many_calls():
    async def play(task, agents):
        async with client(agents) as own:
            models = [model.id async for model in own.models.list()]
            reply = await own.chat.completions.create(
                model="coder", n=3, max_tokens=64, temperature=1.0, messages=user("write")
            )
        assert models == ["coder", "tester"]
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert [call.number for call in group.episodes_G[0].calls] == [0, 1, 2]


def test_n_that_is_null_is_one_choice():
    async def play(task, agents):
        body = {"model": "coder", "messages": user("write"), "n": None}
        status, reply = await asyncio.to_thread(post, agents, body)
        assert status == 200
        return len(reply["choices"])

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert group.episodes_G[0].score.value == 1


def test_tools_are_the_beginning_of_the_prompt():
    async def play(task, agents):
        async with client(agents) as own:
            for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
                await own.chat.completions.create(model="coder", messages=user("2 + 2"), **more)
        await agents["coder"]("2 + 2", tools=TOOLS)
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    shown, *without, by_function = group.episodes_G[0].calls
    assert [(m.role, m.content) for m in shown.prompt] == [
        ("tools", json.dumps(TOOLS)), ("user", "2 + 2"),
    ]  # fmt: skip
    assert by_function.prompt == shown.prompt
    assert [call.prompt for call in without] == [shown.prompt[1:]] * 2


@pytest.mark.parametrize(
    ("asked", "status", "named"),
    [
        ({"temperature": 0.1}, 400, "temperature: 0.1; the run samples with 1.0"),
        ({"max_tokens": 1}, 400, "max_tokens: 1; the run's max_new_tokens is"),
        ({"stop": [""]}, 400, "stop: "),
        ({"stop": [1]}, 400, "stop: "),
        ({"stop": ["a"] * 17}, 400, "stop: "),
        ({"stream": "yes"}, 400, "stream: 'yes'"),
        ({"stream_options": 1}, 400, "stream_options: 1"),
        ({"top_logprobs": 2}, 400, "top_logprobs: 2"),
        ({"seed": 3}, 400, "seed: 3"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format: "),
        ({"n": 0.5}, 400, "n: 0.5; use 1 to 128"),
        ({"n": 0}, 400, "n: 0; use 1 to 128"),
        ({"n": True}, 400, "n: True; use 1 to 128"),
        ({"tools": [{"type": "function"}]}, 400, "tools: pass a list of functions"),
        ({"tools": TOOLS, "tool_choice": "always"}, 400, "tool_choice: 'always'"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "sub"}}}, 400, "tool_choice: "),
        ({"tool_choice": {"function": {"name": "add"}}}, 400, "tool_choice: "),
        ({"model": "codr"}, 404, "did you mean `coder`?"),
        ({"messages": "write"}, 400, "messages: pass a list"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "role is 'judge'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type text"),
        ({"messages": []}, 400, "a prompt without messages"),
        ({"messages": [{"role": "user", "tool_calls": [1]}]}, 400, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, 400, "tool_calls"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(asked, status, named):
    async def play(task, agents):
        body = {"model": "coder", "messages": user("write")} | asked
        found, reply = await asyncio.to_thread(post, agents, body)
        assert found == status and named in reply["error"]["message"], reply
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert group.episodes_G[0].calls == ()


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "asked",
    [{"model": LONG}, {"temperature": LONG}, {"n": LONG}, {"stop": LONG}, {LONG: 1},
     {"max_tokens": LONG}, {"messages": [LONG]}, {"messages": [{"role": LONG, "content": "a"}]},
     {"messages": [{"role": "user", "content": {LONG: 1}}]}, {"tool_choice": LONG},
     {"stream": LONG}, {"messages": [{"role": "assistant", "tool_calls": LONG}]}],
    ids=lambda asked: next(iter(asked))[:20],
)  # fmt: skip
def test_a_wrong_value_is_not_echoed(asked):
    async def play(task, agents):
        body = {"model": "coder", "messages": user("write")} | asked
        status, reply = await asyncio.to_thread(post, agents, body)
        assert status in (400, 404) and len(reply["error"]["message"]) < 700
        return 1

    played(play, 1, tasks=TASKS[:1])


# Tools, streams, roles


CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  2}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_and_go(stream):
    """The conversation that comes back continues the very text that was sampled."""

    async def play(task, agents):
        async with client(agents) as own:
            asked = {"model": "coder", "tools": TOOLS, "stream": stream}
            reply = await own.chat.completions.create(messages=user("2"), **asked)
            if stream:
                chunks = [chunk async for chunk in reply]
                assert [c.choices[0].finish_reason for c in chunks] == [None, "tool_calls"]
                (call,) = chunks[0].choices[0].delta.tool_calls
                content = chunks[0].choices[0].delta.content
            else:
                (call,) = reply.choices[0].message.tool_calls
                content = reply.choices[0].message.content
                assert reply.choices[0].finish_reason == "tool_calls"
            assert content == "I add." and json.loads(call.function.arguments) == {"a": 2}
            function = {"name": call.function.name, "arguments": call.function.arguments}
            listed = [{"id": call.id, "type": "function", "function": function}]
            later = [
                *user("2"),
                {"role": "assistant", "content": content, "tool_calls": listed},
                {"role": "tool", "tool_call_id": call.id, "content": "4"},
            ]
            last = await own.chat.completions.create(messages=later, **(asked | {"stream": False}))
            assert last.choices[0].message.content == "four"
            listed[0]["id"] = "another"  # as a conversation from elsewhere has it
            await own.chat.completions.create(messages=later, **(asked | {"stream": False}))
        return 1

    written = f"I add.\n \n{CALL}"
    (group,) = played(play, 1, tasks=TASKS[:1], sampler=Writing(written, "four", "four"))
    first, second, third = group.episodes_G[0].calls
    assert second.prompt[:2] == first.prompt
    assert [(m.role, m.content) for m in second.prompt[2:]] == [
        ("assistant", written), ("tool", "4"),
    ]  # fmt: skip
    read = partial(tool_calls.parse, types={"add": {}})
    assert read(third.prompt[2].content) == read(written)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_chosen_tool_is_shown(choice):
    other = {"type": "function", "function": {"name": "sub"}}

    async def play(task, agents):
        asked = {"tools": [*TOOLS, other], "tool_choice": choice}
        async with client(agents) as own:
            await own.chat.completions.create(model="coder", messages=user("2"), **asked)
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    shown = json.loads(group.episodes_G[0].calls[0].prompt[0].content)
    assert shown == ([*TOOLS, other] if choice == "required" else TOOLS)


def test_a_stream_holds_the_text_and_ends_with_the_usage():
    async def play(task, agents):
        async with client(agents) as own:
            stream = await own.chat.completions.create(
                model="coder", messages=user("write"), n=2, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            with_helper = own.chat.completions.stream(model="coder", messages=user("write"))
            async with with_helper as events:
                final = await events.get_final_completion()
        assert final.choices[0].message.content == "three"
        texts = ["", ""]
        for chunk in chunks[:-1]:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
        assert texts == ["one", "two"]
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
        return 1

    played(play, 1, tasks=TASKS[:1], sampler=Writing("one", "two", "three"))


@pytest.mark.parametrize("sampler", [Keeping, Serving])
def test_stops_of_a_request_are_beside_the_run_s(sampler):
    class Stopping(sampler):
        def completion(self, key, sampling):
            stops.append(sampling.for_agent(0).stop)
            return super().completion(key, sampling)

    stops: list[tuple[str, ...]] = []

    async def play(task, agents):
        async with client(agents) as own:
            ask = partial(own.chat.completions.create, model="coder", messages=user("write"))
            await asyncio.gather(ask(), ask(stop="\n"), ask(stop=["a", "b", "a"]))
        return 1

    played(play, 1, tasks=TASKS[:1], sampler=Stopping())
    assert sorted(stops) == [(), ("\n",), ("a", "b")]


def test_developers_are_the_system_and_names_stay_in_the_text():
    async def play(task, agents):
        asked = [{"role": "developer", "content": "Be brief."},
                 {"role": "user", "name": "Ann", "content": "write"}]  # fmt: skip
        async with client(agents) as own:
            await own.chat.completions.create(model="coder", messages=asked)
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    prompt = group.episodes_G[0].calls[0].prompt
    assert [(m.role, m.content) for m in prompt] == [
        ("system", "Be brief."), ("user", "Ann: write"),
    ]  # fmt: skip


def test_log_probabilities_are_the_sampler_s():
    async def play(task, agents):
        async with client(agents) as own:
            reply = await own.chat.completions.create(
                model="coder", messages=user("write"), logprobs=True
            )
        listed = reply.choices[0].logprobs.content
        assert [(one.token, one.logprob) for one in listed] == [("o", -0.5), ("n", -0.5)]
        return 1

    played(play, 1, tasks=TASKS[:1], sampler=Writing("on"))


def test_models_are_found_by_name():
    async def play(task, agents):
        async with client(agents) as own:
            assert (await own.models.retrieve("coder")).id == "coder"
            with pytest.raises(openai.NotFoundError):
                await own.models.retrieve("codr")
        return 1

    played(play, 1, tasks=TASKS[:1])


@pytest.mark.parametrize("listed", [None, "example.org"])
def test_programs_reach_their_agents_behind_a_proxy(monkeypatch, listed):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "") if listed is None else monkeypatch.setenv(name, listed)

    async def play(task, agents):
        async with client(agents) as own:
            await own.chat.completions.create(model="coder", messages=user("write"))
        assert os.environ["no_proxy"].split(",") == [*([listed] if listed else []), "127.0.0.1"]
        return 1

    played(play, 1, tasks=TASKS[:1])


BROKEN = "found \ud800"  # half of a character, as a tool may cut it; no tokenizer takes it


def test_half_characters_are_replaced_wherever_a_prompt_comes_from():
    tools = [{"type": "function", "function": {"name": "add", "description": BROKEN}}]

    async def play(task, agents):
        body = {"model": "coder", "messages": user(BROKEN), "tools": tools}
        assert (await asyncio.to_thread(post, agents, body))[0] == 200
        await agents["coder"](user(BROKEN), tools=tools)
        await agents["coder"](BROKEN)
        return 1

    (group,) = played(play, 1, tasks=TASKS[:1])
    outside, inside, text = group.episodes_G[0].calls
    assert outside.prompt == inside.prompt
    assert json.loads(inside.prompt[0].content)[0]["function"]["description"] == "found ?"
    assert inside.prompt[1].content == text.prompt[-1].content == "found ?"


class Puzzled(Keeping):
    def encode(self, agent, prompt):
        raise TypeError("not what\na tokenizer takes")


def test_what_nobody_expects_is_a_reply_of_one_line_and_is_reported(caplog):
    async def play(task, agents):
        body = {"model": "coder", "messages": user("write")}
        status, reply = await asyncio.to_thread(post, agents, body)
        assert reply["error"]["message"] == "TypeError: not what a tokenizer takes"
        assert reply["error"]["type"] == "server_error"
        return status

    (group,) = played(play, 1, tasks=TASKS[:1], sampler=Puzzled())
    assert group.episodes_G[0].score.value == 500
    (record,) = [r for r in caplog.records if r.name == "asyncio"]
    assert record.exc_info and record.exc_info[0] is TypeError


def test_a_head_request_has_no_body(caplog):
    async def play(task, agents):
        return (await asyncio.to_thread(post, agents, {}, method="HEAD"))[0]

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert group.episodes_G[0].score.value == 404
    assert not [r for r in caplog.records if r.name == "asyncio"]


class WithoutTools(Keeping):
    """A model whose chat template has no messages of tools."""

    def encode(self, agent, prompt):
        if any(message.role == "tool" for message in prompt):
            raise UserError("no messages of the role tool")
        return super().encode(agent, prompt)


CALLED = [*user("2 + 2"), {"role": "tool", "content": "4"}]


async def inside(agents):
    await agents["coder"](CALLED)


async def outside(agents):
    async with client(agents) as own:
        await own.chat.completions.create(model="coder", messages=CALLED)


@pytest.mark.parametrize("on_error", ["stop", "zero"])
@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize("ask", [inside, outside])
def test_a_role_that_the_model_lacks_ends_the_run(ask, catches, on_error, caplog):
    """It is no error of the episode, whatever the program catches, and it is raised once."""

    async def play(task, agents):
        with contextlib.suppress(Exception if catches else ()):
            await ask(agents)
        await agents["coder"]("again")
        return 1

    with pytest.raises(UserError, match=r"^no messages of the role tool$") as raised:
        played(play, sampler=WithoutTools(), on_error=on_error)
    assert raised.value.exit_code == 2 and not caplog.records


def test_a_client_that_is_left_open_is_closed_without_a_word(caplog):
    clients = []

    async def play(task, agents):
        clients.append(client(agents))
        await clients[-1].chat.completions.create(model="coder", messages=user("write"))
        return 1

    played(play)
    assert len(clients) == 4 and not [r for r in caplog.records if r.name == "asyncio"]


def test_too_many_calls_end_the_episode_with_none_waiting():
    async def play(task, agents):
        async with client(agents) as own:
            await own.chat.completions.create(model="coder", n=3, messages=user("write"))

    (group,) = played(play, 1, tasks=TASKS[:1], max_calls=2, on_error="zero")
    (episode,) = group.episodes_G
    assert episode.error == "more than 2 calls (program.max_calls)"
    assert episode.calls == ()


def test_strangers_find_no_episode():
    async def play(task, agents):
        body = {"model": "coder", "messages": user("write")}
        for key in ("", "Bearer wrong", "Bearer é"):
            found, _ = await asyncio.to_thread(post, agents, body, key)
            assert found == 401
        return 1

    (first, _) = played(play, 1)
    assert first.episodes_G[0].calls == ()


def test_strangers_are_refused_before_their_body_is_read():
    """Neither a wrong key nor a wrong path has 4 MB buffered for it: here the body never comes."""

    def ask(agents: Any, path: str, key: str) -> bytes:
        address = urlsplit(agents.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
            connection.sendall(
                f"POST {address.path}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n"
                f"Authorization: Bearer {key}\r\n\r\n".encode()
            )
            return connection.recv(100)

    async def play(task, agents):
        stranger = await asyncio.to_thread(ask, agents, "/chat/completions", "wrong")
        lost = await asyncio.to_thread(ask, agents, "/completions", agents.api_key)
        assert stranger.startswith(b"HTTP/1.1 401 ") and lost.startswith(b"HTTP/1.1 404 ")
        return 1

    played(play, 1, tasks=TASKS[:1])


def test_an_episodes_key_opens_no_other():
    keys: list[tuple[str, str]] = []

    async def play(task, agents):
        keys.append((agents.base_url, agents.api_key))
        while len(keys) < 2:
            await asyncio.sleep(0.01)
        own = (agents.base_url, agents.api_key)
        other = next(pair for pair in keys if pair != own)
        mixed = type("Mixed", (), {"base_url": other[0], "api_key": own[1]})
        body = {"model": "coder", "messages": user("write")}
        return (await asyncio.to_thread(post, mixed, body))[0]

    (group,) = played(play, 2, tasks=TASKS[:1])
    assert [episode.score.value for episode in group.episodes_G] == [401, 401]


def test_noise_and_clients_that_die_harm_nothing_else():
    async def play(task, agents):
        address = urlsplit(agents.base_url)
        silent = await asyncio.to_thread(_noise, address.hostname, address.port, agents)
        async with client(agents) as own:
            reply = await own.chat.completions.create(model="coder", messages=user("write"))
        for connection in silent:
            connection.close()
        return len(reply.choices[0].message.content)

    (group,) = played(play, 2, tasks=TASKS[:1])
    assert all(len(episode.calls) == 1 for episode in group.episodes_G)  # the dead one's is gone


def _noise(host: str, port: int, agents: Any) -> list[socket.socket]:
    """All that may come; returns connections that stay open and send nothing."""
    path = urlsplit(agents.base_url).path
    body = json.dumps({"model": "coder", "messages": user("nobody")}).encode()
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {agents.api_key}\r\nContent-Length: "
    for noise in (
        b"", b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000,
        f"{head}{len(body)}\r\n\r\n".encode() + body[:10],  # dies within the body
        f"{head}-5\r\n\r\n".encode(), f"{head}{len(body)}\r\n\r\n".encode() + body,  # and waiting
    ):  # fmt: skip
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((host, port)) as connection,
        ):
            connection.sendall(noise)
    flood = [socket.create_connection((host, port)) for _ in range(100)]
    for connection in flood[:50]:
        connection.close()
    return flood[50:]


def test_more_clients_than_asyncio_would_let_wait_connect_while_nobody_answers():
    """As while a wave is sampled. A connection above the backlog is tried again after a second."""

    async def play(task, agents):
        address = urlsplit(agents.base_url)
        await asyncio.to_thread(post, agents, {})  # it listens
        waiting = [
            socket.create_connection((address.hostname, address.port), timeout=0.5)
            for _ in range(200)
        ]
        for connection in waiting:
            connection.close()
        return len(waiting)

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert group.episodes_G[0].score.value == 200


def test_a_request_of_ten_megabytes_is_refused_by_a_reply():
    """It is not reset while the client still sends."""

    async def play(task, agents):
        body = {"model": "coder", "messages": user("x" * 10_000_000)}
        return (await asyncio.to_thread(post, agents, body))[0]

    (group,) = played(play, 1, tasks=TASKS[:1])
    assert group.episodes_G[0].score.value == 413


def post(
    agents: Any, body: dict[str, Any], key: str | None = None, method: str = "POST"
) -> tuple[int, Any]:
    """Status and JSON of a request, None without one."""
    address = urlsplit(agents.base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    authorization = f"Bearer {agents.api_key}" if key is None else key
    try:
        connection.request(
            method,
            f"{address.path}/chat/completions",
            json.dumps(body),
            {"Authorization": authorization.encode().decode("latin-1")},
        )
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read() or "null")
    finally:
        connection.close()
