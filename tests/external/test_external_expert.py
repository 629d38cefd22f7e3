"""expert_edits against local servers: a stub that misbehaves, and `transformers serve`."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from comlrl import external
from comlrl.config.sections import ExternalConfig
from comlrl.errors import UserError
from comlrl.external import expert_edits
from comlrl.external.expert_edits import (
    MAX_EDIT,
    ExpertEdits,
    request,
    split_edits,
)
from comlrl.external.plain import Plain
from comlrl.external.service import ExpertError, provider_of
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.api_client import MAX_BODY
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, Score
from tests.support.fakes import code_task
from tests.support.local_server import completion, send, serving

TASK = code_task(
    "T/7", "def top(xs):\n    '''The largest of xs.'''\n", "def check(c): SECRET", "top"
)
TEXTS = ("def aux(xs):\n    return xs", "def top(xs):\n    return 0")
ATTEMPT = Attempt(TASK, TEXTS, Score(1.5), 1)
PROMPTS = Prompts(CODE)
PLAIN = Plain(PROMPTS)
AGREED = "Write a revised `{}`, code only: no fences, prose, tests or examples.\n"


def expert(url: str, on_error: str = "stop", **settings: object) -> ExpertEdits:
    return ExpertEdits(PROMPTS, "any", url, on_error, PLAIN, backoff=0.01, **settings)  # type: ignore


def test_each_agent_reads_the_edits_to_its_own_function() -> None:
    seen: list[dict] = []

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        seen.append(json.loads(body))
        send(handler, completion("[aux]\nSort `xs` first.\n[top]\nReturn aux(xs)[-1].\n"))

    with serving(answer) as url:
        texts = expert(url)([ATTEMPT])
    assert texts == [
        (
            "Feedback:\nAn expert proposes for `aux`:\nSort `xs` first.\n" + AGREED.format("aux"),
            "Feedback:\nAn expert proposes for `top`:\nReturn aux(xs)[-1].\n"
            + AGREED.format("top"),
        )
    ]
    (sent,) = seen
    assert sent["model"] == "any" and sent["max_tokens"] == 1024
    question = sent["messages"][0]["content"]
    assert question == request(PROMPTS, ATTEMPT)
    assert "SECRET" not in question  # the tests stay here
    assert ATTEMPT.completions_N[0] in question and ATTEMPT.completions_N[1] in question


def test_a_failure_that_passes_is_retried() -> None:
    statuses = [500, 429, 503]

    def answer(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        status = statuses.pop(0) if statuses else 200
        send(handler, completion("[top]\nUse max.") if status == 200 else b"{}", status)

    with serving(answer) as url:
        mode = expert(url, retries=3)
        (texts,) = mode([ATTEMPT])
    assert texts[0].startswith("Feedback:\nAn expert proposes no edits to `aux`.\n")
    assert texts[1].startswith("Feedback:\nAn expert proposes for `top`:\nUse max.\n")
    assert mode.fallbacks.count == 0


def failing(kind: str) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        match kind:
            case "echo":  # a server that cannot tell the prompt from the answer
                asked = json.loads(body)["messages"][0]["content"].strip()
                send(handler, completion(f"user: {asked}\nassistant:"))
            case "500":
                send(handler, b"{}", 500)
            case "401":
                send(handler, b'{"error": {"message": "bad key"}}', 401)
            case "garbage":
                send(handler, b"\x00\xff<html>")
            case "nothing":
                send(handler, completion(None))
            case "oversized":
                send(handler, completion("x" * MAX_BODY))
            case "silence":
                time.sleep(1.5)  # beyond the timeout
            case "dripping":
                handler.send_response(200)
                handler.end_headers()
                for _ in range(30):  # a byte at a time, beyond the timeout
                    handler.wfile.write(b" ")
                    time.sleep(0.05)

    return answer


FAILURES = {  # kind → (what the message says, requests made with one retry)
    "500": ("HTTP 500", 2),
    "401": ("HTTP 401", 1),
    "garbage": ("not a chat completion", 2),
    "nothing": ("the answer is empty", 2),
    "echo": ("repeats the request", 1),
    "oversized": (f"exceeds {MAX_BODY} bytes", 1),
    "silence": ("no complete answer within 0.6 s", 2),
    "dripping": ("no complete answer within 0.6 s", 2),
}
TIMEOUTS = {"silence": 0.6, "dripping": 0.6}  # a busy machine may take long for the others


@pytest.mark.parametrize("kind", FAILURES)
def test_an_expert_that_cannot_be_had(kind: str) -> None:
    """stop: a clear error; plain: the plain text, counted."""
    message, requests = FAILURES[kind]
    seconds = TIMEOUTS.get(kind, 30.0)
    counted: list[int] = []

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        counted.append(1)
        failing(kind)(handler, body)

    with serving(answer) as url:
        with pytest.raises(ExpertError, match=r"external\.on_error") as caught:
            expert(url, timeout=seconds, retries=1)([ATTEMPT])
        assert re.search(message, str(caught.value)) and "'T/7'" in str(caught.value)
        assert len(counted) == requests
        mode = expert(url, on_error="plain", timeout=seconds, retries=0)
        assert mode([ATTEMPT, ATTEMPT]) == PLAIN([ATTEMPT, ATTEMPT])
        assert mode.fallbacks.count == 2


def test_a_server_that_is_down() -> None:
    with serving(failing("500")) as url:
        pass
    with pytest.raises(ExpertError, match=r"ConnectError.*\(2 requests\)"):
        expert(url, retries=1)([ATTEMPT])
    mode = expert(url, on_error="plain", retries=0)
    assert mode([ATTEMPT]) == PLAIN([ATTEMPT])
    assert mode.fallbacks.count == 1


def test_requests_in_flight_are_bounded_and_answers_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine requests, three at a time: none is answered before three are there, none is a fourth."""
    monkeypatch.setattr(expert_edits, "MAX_IN_FLIGHT", 3)
    lock, three, now, most = threading.Lock(), threading.Barrier(3), 0, 0

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        three.wait(30)
        number = json.loads(body)["messages"][0]["content"].split("return ")[1].split("\n")[0]
        with lock:
            now -= 1
        send(handler, completion(f"[top]\nnumber {number}"))

    attempts = [
        Attempt(TASK, (f"def top(xs):\n    return {i}\n",), Score(0.0), 1) for i in range(9)
    ]
    with serving(answer) as url:
        texts = expert(url)(attempts)
    assert [f"number {i}\n" in text for i, (text,) in enumerate(texts)] == [True] * 9
    assert most == 3


@pytest.mark.parametrize(
    ("answer", "edits"),
    [
        ("[aux]\na\n[top]\nb", ("a", "b")),
        ("Sure!\n\n### `aux`\na\n\n**top**:\nb\nc\n", ("a", "b\nc")),
        ("aux: a\n**top:** b", ("a", "b")),
        ("- top():\n  b", ("", "  b")),
        ("[aux]\n```python\ntop\n    x = 1\n```\n[top]\nnone", ("top\n    x = 1", "none")),
        ("top(xs) calls aux(xs) twice", ("top(xs) calls aux(xs) twice",) * 2),
        ("[aux]\na\x00b\ud800<|im_end|></s>\x1b[0m", ("ab?[0m", "")),
        ("", ("", "")),
    ],
)
def test_answers_are_read_tolerantly(answer: str, edits: tuple[str, ...]) -> None:
    assert split_edits(answer, ("aux", "top")) == edits


def test_long_edits_are_cut() -> None:
    (edits,) = split_edits("word " * 1000, ("top",))
    assert len(edits) == MAX_EDIT and edits.endswith("...")


@pytest.mark.parametrize(
    ("model", "base_url", "address", "key"),
    [
        ("deepseek-coder", None, "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
        ("claude-x", None, "https://api.anthropic.com/v1/", "ANTHROPIC_API_KEY"),
        ("gpt-x", None, "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("any", "https://api.openai.com/v1/", "https://api.openai.com/v1/", "OPENAI_API_KEY"),
        ("gpt-x", "http://localhost:8000/v1", "http://localhost:8000/v1", "EXPERT_API_KEY"),
        ("gpt-x", "https://api.openai.com.evil.org", "https://api.openai.com.evil.org",
         "EXPERT_API_KEY"),
    ],
)  # fmt: skip
def test_keys_go_to_their_own_provider(
    model: str, base_url: str | None, address: str, key: str
) -> None:
    provider = provider_of(model, base_url)
    assert (provider.base_url, provider.key) == (address, key)


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSEEK_API_KEY", raising=False)
    section = ExternalConfig(mode="expert_edits", expert_model="deepseek-coder")
    with pytest.raises(UserError, match="DEEPSEEK_API_KEY; set it"):
        external.find(section, CODE).build(PROMPTS)
    section = ExternalConfig(mode="expert_edits", expert_model="my-model")
    with pytest.raises(UserError, match=r"external\.expert_base_url: null"):
        external.find(section, CODE).build(PROMPTS)
    with pytest.raises(UserError, match=r"external\.expert_base_url: "):
        provider_of("my-model", "http://[::1")


@pytest.mark.parametrize("status", [302, 307, 308])
def test_the_question_does_not_follow_a_redirect(status: int) -> None:
    elsewhere: list[bytes] = []
    with serving(lambda handler, body: elsewhere.append(body)) as other:

        def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
            handler.send_response(status)
            handler.send_header("Location", f"{other}/chat/completions")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        with serving(answer) as url, pytest.raises(ExpertError, match=f"HTTP {status}"):
            expert(url)([ATTEMPT])
    assert elsewhere == []
