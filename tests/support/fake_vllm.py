"""A server with vLLM's endpoints around the built-in generator, on a port of this machine, with
switches for what may go wrong."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from safetensors.torch import load_file

from comlrl.models.team import Team
from comlrl.rollout.generation import Generator
from comlrl.rollout.vllm_sampler import VLLMSampler
from comlrl.rollout.vllm_servers import Servers
from comlrl.types import Request, Sampling
from tests.support.tiny_models import prompt


class FakeVLLM:
    """``team``: of one agent, whose adapter is exchanged at every request."""

    def __init__(self, team: Team) -> None:
        assert len(team) == 1
        self.team, self.generator = team, Generator(team)
        self.adapters: dict[str, Path] = {}
        self.events: list[tuple[str, str]] = []  # (load or unload, name)
        self.asked: list[dict[str, Any]] = []  # bodies of completions
        self.max_model_len, self.max_rank, self.processed = 4096, 64, True
        self.torn = 0  # answers to come whose connection breaks
        self.before: Callable[[dict[str, Any]], None] = lambda body: None  # an answer is made
        self.after: Callable[[Any], Any] = lambda answer: answer  # as it is sent
        self.loading: Callable[[str], None] = lambda name: None  # before an adapter is loaded
        self._lock, self._draws = threading.Lock(), itertools.count()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None

    def start(self) -> FakeVLLM:
        """Listen; without the adapters that were loaded before, as a new process would."""
        self.adapters.clear()
        config = uvicorn.Config(self._app(), "127.0.0.1", self.port, log_level="critical")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        self._running = server, thread
        return self

    def stop(self) -> None:
        """Close all connections, answered or not."""
        if self._running is not None:
            server, thread = self._running
            server.should_exit = server.force_exit = True
            thread.join()
            self._running = None

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/load_lora_adapter")(self._load)
        app.post("/v1/unload_lora_adapter")(self._unload)
        app.post("/v1/completions")(self._completions)
        return app

    def _models(self) -> Any:
        cards = [{"id": "base", "max_model_len": self.max_model_len}]
        return {"data": cards + [{"id": name, "parent": "base"} for name in self.adapters]}

    def _load(self, body: dict[str, Any]) -> Response:
        name, path = body["lora_name"], Path(body["lora_path"])
        self.loading(name)
        with self._lock:
            if name in self.adapters:
                raise HTTPException(400, f"The lora adapter '{name}' has already been loaded.")
            if (rank := json.loads((path / "adapter_config.json").read_text())["r"]) > (
                self.max_rank
            ):
                raise HTTPException(500, f"LoRA rank {rank} is greater than {self.max_rank}")
            self.adapters[name] = path
            self.events.append(("load", name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, body: dict[str, Any]) -> Response:
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            raise HTTPException(404, f"The lora adapter '{name}' cannot be found.")
        self.events.append(("unload", name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _completions(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        self.before(body)
        if body["model"] == "base":
            return self._likeliest(body)
        if body["model"] not in self.adapters:
            raise HTTPException(404, f"The model `{body['model']}` does not exist.")
        if body["temperature"] == 0 and body["n"] > 1:
            raise HTTPException(400, "n must be 1 when using greedy sampling")
        answer = self.after({"choices": list(self._choices(body))[::-1]})  # in whatever order
        with self._lock:
            self.torn -= 1
            if self.torn >= 0:
                whole = {"content-length": str(len(json.dumps(answer)) + 1)}
                return StreamingResponse(iter([json.dumps(answer)[:9]]), headers=whole)
        return answer

    def _choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        keys = tuple((next(self._draws),) for _ in range(body["n"]))
        request = Request(tuple(body["prompt"]), keys)
        with self._lock:
            self.team.agents[0].load_tensors(
                load_file(self.adapters[body["model"]] / "adapter_model.safetensors")
            )
            sampling = Sampling(body["temperature"], body["max_tokens"])
            (completions,) = self.generator.sample([[request]], sampling)[0]
        for index, completion in enumerate(completions):
            ids = list(completion.token_ids)
            drawn = [completion.logprob if body["temperature"] else -1.0, *[0.0] * (len(ids) - 1)]
            yield {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": drawn}}

    def _likeliest(self, body: dict[str, Any]) -> Any:
        temperature = body["temperature"] if self.processed else 1.0
        top = {"token_id:1": -0.2 / temperature, "token_id:2": -0.6 / temperature}
        return {"choices": [{"index": 0, "logprobs": {"top_logprobs": [top]}}]}


def client(
    agents: Team,
    servers: FakeVLLM | Sequence[FakeVLLM],
    folder: Path,
    *,
    patience: float = 60.0,
    temperature: float = 0.8,
) -> VLLMSampler:
    """A sampler for a team whose agents share one server, or several."""
    fakes = [servers] if isinstance(servers, FakeVLLM) else servers
    joined = Servers([fake.url for fake in fakes], patience, first_wait=0.01)
    temperatures = [temperature] * len(agents)
    return VLLMSampler(agents, [joined] * len(agents), folder / "vllm", 512, temperatures)


def requests(agent: int, count: int = 2, siblings: int = 3) -> list[Request]:
    return [
        Request(prompt(f"agent {agent}, {n}"), tuple((agent, n, g) for g in range(siblings)))
        for n in range(count)
    ]


def move(agents: Team, index: int) -> None:
    """Change an agent's weights, as an update would."""
    with torch.no_grad():
        agents.agents[index].parameters()[0].add_(0.1)


def kinds(server: FakeVLLM) -> list[str]:
    """Loads and unloads, with the agent whose adapter it was."""
    return [f"{what} {name.split('-')[0]}" for what, name in server.events]
