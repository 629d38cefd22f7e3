"""A chat-completions server in its own process, which is slow, fails or lies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from comlrl.rollout.vllm.processes import free_port

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

async def torn():
    yield b'{"choices": ['
    raise ConnectionResetError

async def chat(request):
    body = await request.json()
    requests.append({"body": body, "key": request.headers.get("authorization")})
    behaviors = body["model"].split(",")
    kind = behaviors[min(len(requests), len(behaviors)) - 1]
    if kind == "slow":
        await asyncio.sleep(60)
    if kind == "late":
        await asyncio.sleep(0.2)
    if kind.isdigit():
        return JSONResponse({"error": {"message": request.headers.get("authorization")}}, int(kind))
    if kind == "redirect":
        return RedirectResponse("/elsewhere/chat/completions", 307)
    if kind == "endless":
        return StreamingResponse(forever())
    if kind == "closed":
        return StreamingResponse(torn())
    if kind == "text":
        return Response("[" * 100_000)
    if kind == "null":
        return JSONResponse({"choices": [{"message": {"content": None}}]})
    if kind == "fields":
        return JSONResponse({"choices": {"message": "yes"}, "usage": []})
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


class ChatServer:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}/v1"

    def get(self, path: str) -> Any:
        return httpx.get(f"http://127.0.0.1:{self.port}/{path}", trust_env=False).json()


@contextlib.contextmanager
def chat_server(folder: Path) -> Iterator[ChatServer]:
    """Start a server, whose program lies in ``folder``, and end it."""
    port = free_port()
    script = folder / "server.py"
    script.write_text(SERVER)
    running = subprocess.Popen([sys.executable, str(script), str(port)])
    server = ChatServer(port)
    try:
        while True:
            assert running.poll() is None
            try:
                server.get("seen")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        yield server
    finally:
        running.kill()
        running.wait()
