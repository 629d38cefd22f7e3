"""A server that is not vLLM: what it replies is refused in one line, and its time and size end."""

from __future__ import annotations

import itertools
import json
import math
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from comlrl.errors import ServerError, UserError
from comlrl.rollout.background import submit
from comlrl.rollout.vllm import replies
from comlrl.rollout.vllm.replies import BadReply, Drawn
from comlrl.rollout.vllm.servers import Server, Servers
from comlrl.types import Sampling
from tests.support.fake_vllm import FakeVLLM, client, requests
from tests.support.tiny_models import team

Write = Callable[[bytes], Any]
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def reply(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Raw:
    """Answers every request by bytes alone; ``asked``: what it was sent."""

    def __init__(self, answer: Callable[[Write], None]) -> None:
        self.asked: list[bytes] = []
        raw = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                asked = b""
                while b"\r\n\r\n" not in asked or (b"POST" in asked and asked[-1:] != b"}"):
                    asked += self.request.recv(1 << 16)  # else what is unread resets the connection
                raw.asked.append(asked)
                try:
                    answer(self.request.sendall)
                except OSError:  # the client has gone
                    raw.gone.set()

        self.gone = threading.Event()
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = "http://{}:{}".format(*self._server.server_address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[Write], None]], Raw]]:
    started: list[Raw] = []

    def start(answer: Callable[[Write], None]) -> Raw:
        started.append(Raw(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def asked(url: str, patience: float = 60.0, **keys: Any) -> ServerError:
    with pytest.raises(ServerError) as raised:
        servers = Servers([url], patience, first_wait=0.01)
        body = {"model": "a", "prompt": [1]}
        submit(servers.ask("", "/v1/completions", body, **keys)).result()
    assert "\n" not in str(raised.value) and str(raised.value).startswith("generation.vllm_url: ")
    return raised.value


# Redirects


@pytest.mark.parametrize("status", [b"301 Moved", b"307 Temporary", b"308 Permanent"])
def test_the_key_does_not_follow_a_redirect(raw, monkeypatch, status):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    other = raw(lambda write: write(reply(b"{}")))
    location = f"Location: {other.url}/v1/completions".encode()
    first = raw(lambda write: write(reply(b"", status, location)))
    error = asked(first.url)
    assert "which is not followed" in str(error)
    assert len(first.asked) == 1 and b"Bearer secret" in first.asked[0]
    assert other.asked == []
    with pytest.raises(UserError, match="which is not followed"):
        Server(first.url).check()


# Bounds


def test_an_answer_without_end_is_left(raw):
    def endless(write: Write) -> None:
        write(JSON + b"\r\n[")
        while True:
            write(b"1," * 4096)

    server = raw(endless)
    assert "more than 65536 bytes" in str(asked(server.url, most=1 << 16))
    assert server.gone.wait(60)


@pytest.mark.parametrize("start", [b"", JSON + b"\r\n[", b"HTTP/1.1 503 Busy\r\n\r\n"])
def test_an_answer_that_trickles_is_left(raw, start):
    """Byte by byte, each well within a socket's timeout: headers, body, and an error's body."""
    pause = threading.Event()

    def trickle(write: Write) -> None:
        write(start)
        for byte in itertools.cycle(b"HTTP/1.1 200 OK" if not start else b"1,"):
            write(bytes([byte]))
            pause.wait(0.02)

    server = raw(trickle)
    assert "no complete answer within 0.5 s" in str(asked(server.url, patience=0.5))
    assert server.gone.wait(60)


def test_a_server_that_accepts_and_never_answers_is_asked_once(raw):
    """The time without an answer began when it was asked, not when it was found silent."""
    silent = threading.Event()
    server = raw(lambda write: silent.wait(60))
    assert "no better for 0.5 s" in str(asked(server.url, patience=0.5))
    silent.set()
    # The thread that looks whether it is back may have asked for its models.
    assert len([head for head in server.asked if head.startswith(b"POST")]) == 1


def test_nested_without_end(raw):
    server = raw(lambda write: write(reply(b"[" * 200_000)))
    assert "nested too deep" in str(asked(server.url))


def test_errors_are_shown_without_escape_sequences(raw):
    body = json.dumps({"error": {"message": "\x1b]0;owned\x07 \u202e line\r\nbreak \ud800" * 90}})
    server = raw(lambda write: write(reply(body.encode(), b"400 \x1b[31mBad")))
    text = str(asked(server.url))
    assert "]0;owned line break ?" in text and text.isprintable() and len(text) < 500
    deep = raw(lambda write: write(reply(b"[" * 200_000, b"400 Bad")))
    assert len(str(asked(deep.url))) < 500


# The form of replies

GOOD = {"index": 0, "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
OTHER = {"index": 1, "token_ids": [7], "logprobs": {"token_logprobs": [0.0]}}


def read(choices: Any, support: bool = False) -> list[Drawn]:
    return replies.completions(
        "http://x", {"choices": choices}, count=2, max_tokens=3, vocabulary=8, support=support
    )


def test_completions_come_in_the_order_of_their_indices():
    assert read([OTHER, GOOD]) == [Drawn((5, 6), (-0.5, -0.25), None), Drawn((7,), (0.0,), None)]


def masked(choice: dict, sets: Any) -> dict:
    """In the form of /inference/v1/generate."""
    content = [{"logprob": value} for value in choice["logprobs"]["token_logprobs"]]
    return choice | {"logprobs": {"content": content}, "sampling_mask": sets}


def test_what_survives_truncation_comes_with_each_token():
    good, other = masked(GOOD, [[5], [0, 6, 7]]), masked(OTHER, [[1, 7]])
    assert read([good, other], True) == [
        Drawn((5, 6), (-0.5, -0.25), ((5,), (0, 6, 7))), Drawn((7,), (0.0,), ((1, 7),)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sets",
    [None, 5, [[7], [7]], [], [7], [None], [[]], [[1]], [[7, 7]], [[7, 8]], [[7, -1]],
     [[7, 1.0]], [[7, True]], [[7, [1]]]],
    ids=str,
)  # fmt: skip
def test_malformed_survivors(sets):
    with pytest.raises(BadReply, match=r"^generation\.vllm_url: 'http://x' replies with "):
        read([masked(GOOD, [[5], [6]]), masked(OTHER, sets)], True)


@pytest.mark.parametrize("content", [None, 5, [None], [{}], [{"logprob": "0"}], []])
def test_malformed_log_probabilities_of_generate(content):
    with pytest.raises(BadReply):
        read([GOOD, OTHER | {"logprobs": {"content": content}}])


BAD_CHOICES = [
    ("null", None),
    ("a mapping", {"0": GOOD}),
    ("strings", ["ab", "cd"]),
    ("too few", [GOOD]),
    ("too many", [GOOD, OTHER, OTHER | {"index": 2}]),
    ("one index twice", [GOOD, OTHER | {"index": 0}]),
    ("an index of another kind", [GOOD, OTHER | {"index": "1"}]),
    ("an index that is a truth value", [GOOD | {"index": False}, OTHER]),
    ("no ids", [GOOD, OTHER | {"token_ids": None}]),
    ("no tokens", [GOOD, OTHER | {"token_ids": [], "logprobs": {"token_logprobs": []}}]),
    ("more tokens than asked for", [GOOD, OTHER | {"token_ids": [1] * 4}]),
    ("an id out of the vocabulary", [GOOD, OTHER | {"token_ids": [8]}]),
    ("a negative id", [GOOD, OTHER | {"token_ids": [-1]}]),
    ("an id that is no integer", [GOOD, OTHER | {"token_ids": [7.0]}]),
    ("an id that is a truth value", [GOOD, OTHER | {"token_ids": [True]}]),
    ("nested ids", [GOOD, OTHER | {"token_ids": [[7]]}]),
    ("no log-probabilities", [GOOD, OTHER | {"logprobs": None}]),
    ("lengths that differ", [GOOD, OTHER | {"token_ids": [7, 7]}]),
    *[
        (f"{value!r:.20} as one", [GOOD, OTHER | {"logprobs": {"token_logprobs": [value]}}])
        for value in (math.nan, -math.inf, 0.1, None, "-1", True, -(10**400), [0.0])
    ],
]  # fmt: skip


@pytest.mark.parametrize("choices", [c for _, c in BAD_CHOICES], ids=[n for n, _ in BAD_CHOICES])
def test_malformed_completions(choices):
    with pytest.raises(BadReply, match=r"^generation\.vllm_url: 'http://x' replies with "):
        read(choices)


@pytest.mark.parametrize("whole", [None, [], "text", {}, {"choices": 5}])
def test_malformed_answers(whole):
    with pytest.raises(BadReply):
        replies.completions("http://x", whole, count=1, max_tokens=1, vocabulary=8)
    with pytest.raises(BadReply):
        replies.models("http://x", whole)


@pytest.mark.parametrize(
    "model", [5, {}, {"id": 3}, {"id": "base", "max_model_len": "4096"},
             {"id": "base", "max_model_len": -1}, {"id": "base", "max_model_len": True}]
)  # fmt: skip
def test_malformed_models(model):
    with pytest.raises(BadReply):
        replies.models("http://x", {"data": [model]})
    assert replies.models("http://x", {"data": [{"id": "base"}]}) == (["base"], None)


def test_a_malformed_reply_ends_the_sampling_and_is_not_asked_for_again(tmp_path):
    server = FakeVLLM(team(num_agents=1)).start()
    try:
        sampler = client(team(), server, tmp_path)
        server.asked.clear()
        server.after = lambda answer: {"choices": answer["choices"][:-1]}
        with pytest.raises(BadReply, match="where 3 were asked for"):
            sampler.sample([requests(0, 1), []], Sampling(0.8, 12))
        assert len(server.asked) == 1
        sampler.close()
    finally:
        server.stop()
