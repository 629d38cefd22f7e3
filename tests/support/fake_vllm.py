"""A server with vLLM's endpoints around the built-in generator, on a port of this machine, with
switches for what may go wrong."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from safetensors.torch import load_file

from comlrl.models.team import Team
from comlrl.rollout.generation import Generator
from comlrl.rollout.vllm.processes import free_port
from comlrl.rollout.vllm.sampler import VLLMSampler
from comlrl.rollout.vllm.servers import Servers
from comlrl.types import Request, Sampling, SamplingSupport
from tests.support.tiny_models import prompt

SAMPLING = Sampling(0.8, 12)


class FakeVLLM:
    """``team``: of one agent, whose adapter is exchanged at every request."""

    def __init__(self, team: Team, port: int | None = None) -> None:
        assert len(team) == 1
        self.team, self.generator = team, Generator(team)
        self.adapters: dict[str, Path] = {}
        self.events: list[tuple[str, str]] = []  # (load or unload, name)
        self.asked: list[dict[str, Any]] = []  # bodies of completions
        self.max_model_len, self.max_rank, self.processed = 4096, 64, True
        self.base = "base"  # the model's name
        self.scale_out = True  # as with --enable-scale-out
        self.replays = False  # as with --return-sampling-mask
        self.repeats = False  # the same tokens for the same request to the same weights
        self.torn = 0  # answers to come whose connection breaks
        self.before: Callable[[dict[str, Any]], None] = lambda body: None  # an answer is made
        self.after: Callable[[Any], Any] = lambda answer: answer  # as it is sent
        self.loading: Callable[[str], None] = lambda name: None  # before an adapter is loaded
        self._lock, self._draws = threading.Lock(), itertools.count()
        self.port = port or free_port()
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
        app.post("/inference/v1/generate")(self._generate)
        return app

    def _models(self) -> Any:
        entries = [{"id": self.base, "max_model_len": self.max_model_len}]
        return {"data": entries + [{"id": name, "parent": self.base} for name in self.adapters]}

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
        self._note(body, body)
        if body["model"] == self.base:
            return self._single_survivor(body)
        return self._answer(body, body["prompt"], body)

    def _generate(self, body: dict[str, Any]) -> Any:
        """Token ids in and out, by the sampling parameters of the engine."""
        if not self.scale_out:
            error = {"message": "Scale-out endpoints are disabled.", "code": 403}
            return JSONResponse({"error": error}, 403)
        self._note(body, body["sampling_params"])
        if body["model"] == self.base:
            return self._single_survivor(body["sampling_params"])
        return self._answer(body, body["token_ids"], body["sampling_params"])

    def _note(self, body: dict[str, Any], params: dict[str, Any]) -> None:
        self.asked.append(body)
        self.before(body)
        if body["model"] not in {self.base, *self.adapters}:
            raise HTTPException(404, f"The model `{body['model']}` does not exist.")
        if params["temperature"] == 0 and params.get("n", 1) > 1:
            raise HTTPException(400, "n must be 1 when using greedy sampling")
        if self.replays and params["temperature"] <= 0:
            raise HTTPException(400, "sampling distribution replay requires temperature > 0")
        if self.replays and params.get("top_k", 0) <= 0:
            raise HTTPException(400, "sampling distribution replay requires top_k > 0")

    def _answer(self, body: dict[str, Any], ids: list[int], params: dict[str, Any]) -> Any:
        choices = list(self._choices(body["model"], ids, params))
        if "sampling_params" in body:
            for choice in choices:
                drawn = choice["logprobs"].pop("token_logprobs")
                choice["logprobs"]["content"] = [{"logprob": value} for value in drawn]
        answer = self.after({"choices": choices[::-1]})  # in whatever order
        with self._lock:
            self.torn -= 1
            if self.torn >= 0:
                whole = {"content-length": str(len(json.dumps(answer)) + 1)}
                return StreamingResponse(iter([json.dumps(answer)[:9]]), headers=whole)
        return answer

    def _choices(
        self, model: str, ids: list[int], params: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        file = self.adapters[model] / "adapter_model.safetensors"
        weights = hashlib.sha256(file.read_bytes()).hexdigest()
        asked = (weights, *ids) if self.repeats else ()
        draws = itertools.count() if self.repeats else self._draws
        keys = tuple((*asked, next(draws)) for _ in range(params["n"]))
        request, temperature = Request(tuple(ids), keys), params["temperature"]
        with self._lock:
            self.team.agents[0].load_tensors(load_file(file))
            sampling = Sampling(
                temperature, params["max_tokens"], params["top_p"], params["top_k"] or None,
                max_support=1 << 20 if self.replays else None,
            )  # fmt: skip
            (completions,) = self.generator.sample([[request]], sampling)[0]
        for index, completion in enumerate(completions):
            tokens = list(completion.token_ids)
            drawn = [completion.logprob if temperature else -1.0, *[0.0] * (len(tokens) - 1)]
            mask = None if completion.support is None else _sets(completion.support)
            yield {
                "index": index, "token_ids": tokens, "logprobs": {"token_logprobs": drawn},
                "sampling_mask": mask,
            }  # fmt: skip

    def _single_survivor(self, params: dict[str, Any]) -> Any:
        """Of a top_k of 1: raw log-probabilities are not 0."""
        assert params["top_k"] == 1
        values = [0.0 if self.processed else -0.5] * params["max_tokens"]
        content = [{"logprob": value} for value in values]
        choice = {"index": 0, "token_ids": [1] * len(values)}
        choice["logprobs"] = {"token_logprobs": values}
        if "prompt" not in params:  # of /inference/v1/generate
            choice["logprobs"] = {"content": content}
            choice["sampling_mask"] = [[1]] * len(values) if self.replays else None
        return {"choices": [choice]}


def _sets(support: SamplingSupport) -> list[list[int]]:
    return [ids.tolist() for ids in support.ids_I.split(support.counts_L.tolist())]


def client(
    agents: Team,
    servers: FakeVLLM | Sequence[FakeVLLM],
    folder: Path,
    *,
    patience: float = 60.0,
    sampling: Sampling = SAMPLING,
) -> VLLMSampler:
    """A sampler for a team whose agents share one server, or several."""
    fakes = [servers] if isinstance(servers, FakeVLLM) else servers
    joined = Servers([fake.url for fake in fakes], patience, first_wait=0.01)
    sampler = VLLMSampler(agents, [joined] * len(agents), folder / "vllm", 512, sampling)
    weakref.finalize(sampler, shutil.rmtree, sampler.adapters.folder, True)  # of shared memory
    return sampler


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
    """Loads and unloads, with the agent whose adapter it was; what is loaded together by agent."""
    events, start = [f"{what} {name.split('-')[0]}" for what, name in server.events], 0
    for at, event in enumerate([*events, ""]):
        if not event.startswith("load") or event in events[start:at]:
            events[start:at] = sorted(events[start:at])
            start = at + (not event.startswith("load"))
    return events
