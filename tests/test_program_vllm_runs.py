"""Programs whose calls are sampled by a server, here the generator behind the same endpoints."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from comlrl.files import read_lines
from tests.support.fake_vllm import FakeVLLM
from tests.support.runs import SMALL, Zygote, assert_in_sync, newest_step
from tests.support.vllm_runs import fake_server, has_trained, lines, ratios

TEAM = '''
import openai


async def play(task, agents):
    text = await agents["writer"](task.fields["prompt"])
    advice = await agents["reader"](f"{text}")
    await agents.reward("reader", len(advice) / 10)
    return float(len(await agents["writer"](f"{text}{advice}")))


async def by_a_client(task, agents):
    """The same, by whoever talks to a server."""
    async with openai.AsyncOpenAI(base_url=agents.base_url, api_key=agents.api_key) as client:

        async def ask(model, text):
            messages = [{"role": "user", "content": text}]
            reply = await client.chat.completions.create(model=model, messages=messages)
            return reply.choices[0].message.content

        text = await ask("writer", task.fields["prompt"])
        advice = await ask("reader", text)
        await agents.reward("reader", len(advice) / 10)
        return float(len(await ask("writer", text + advice)))
'''
COMMAND = """
import json, sys
import openai

task, client = json.load(sys.stdin), openai.OpenAI()


def ask(model, text):
    messages = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model=model, messages=messages)
    return reply.choices[0].message.content


text = ask("writer", task["prompt"])
advice = ask("reader", text)
print(len(ask("writer", text + advice)))
"""
PROGRAMS = ["play", "by_a_client", "command"]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = fake_server()
    yield fake
    fake.stop()


def arguments(folder: Path, url: str, program: str, patience: float = 120, **section) -> list[str]:
    """Of a run in ``folder / "run"`` that learns fast: stale weights would show."""
    (folder / "my_team.py").write_text(TEAM)
    (folder / "command.py").write_text(COMMAND)
    command = f"command: {sys.executable} {folder}/command.py"
    of = command if program == "command" else f"target: my_team:{program}"
    file = folder / "magrpo.yaml"
    file.write_text(f"program: {{{of}, agents: [writer, reader]}}\nlora: {{r: 4}}\n")
    keys = {"num_agents": 2, "max_steps": 3, "save_steps": 0, "learning_rate": 1e-2} | section
    return [
        "--config", str(file), "--override",
        *(f"magrpo.{name}={json.dumps(value)}" for name, value in (SMALL | keys).items()),
        f"output.dir={folder / 'run'}", "agent_model.torch_dtype=float32",
        "sampling={reader: {max_new_tokens: 4}}", "generation.backend=vllm",
        f"generation.vllm_url={url}", f"generation.vllm_patience={patience}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "program", [PROGRAMS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS[1:])]
)
def test_a_program_whose_calls_a_server_samples(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, program: str
) -> None:
    """All weigh 1: what is learned are the server's own tokens, by the present weights."""
    folder = tmp_path / "run"
    run = zygote.finish("magrpo", arguments(tmp_path, server.url, program))
    assert "Traceback" not in run.output and "warning" not in run.output, run.output
    assert ratios(folder) == pytest.approx([1] * 3, abs=1e-3)
    for line in lines(folder):
        values = line["metrics"]
        assert (values["agent_0/calls_mean"], values["agent_1/calls_mean"]) == (2, 1)
        assert values["agent_1/completion_length_mean"] <= 4
    for sample in read_lines(folder / "samples.jsonl"):
        first, second, third = sample["calls"]
        assert second["read"] == [{"role": "user", "content": first["wrote"]}]
        read = [{"role": "user", "content": first["wrote"] + second["wrote"]}]
        assert third["agent"] == "writer" and third["read"] == read
    loads = Counter(name.split("-")[0] for what, name in server.events if what == "load")
    # One for each state of its weights; they stay where two episodes were written alike.
    assert set(loads) == {"agent_0", "agent_1"} and all(1 < n <= 4 for n in loads.values())
    assert server.adapters == {} and not (folder / "vllm").exists()


@pytest.mark.slow
def test_processes_share_the_adapters(zygote: Zygote, server: FakeVLLM, tmp_path: Path) -> None:
    """One task of two processes: the second has none, and loads what it is to load."""
    given = arguments(tmp_path, server.url, "by_a_client", batch_size=1, max_steps=2)
    zygote.finish_team(2, "magrpo", given)
    assert_in_sync(tmp_path / "run", 2)
    assert ratios(tmp_path / "run") == pytest.approx([1, 1], abs=1e-3)
    assert server.adapters == {}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_lost_in_the_middle(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, program: str
) -> None:
    """It is no error of an episode; the run saves what it has done, and continues from there."""
    keys = {"eval_interval": 0, "patience": 5}
    given = [*arguments(tmp_path, server.url, program, max_steps=1000, **keys)]
    folder, reached = tmp_path / "run", threading.Event()

    def before(body: dict) -> None:
        if body["model"] != "base" and has_trained(folder)():
            reached.set()

    server.before = before  # the second step's calls, not its update
    run = zygote.run("magrpo", [*given, "program.on_error=zero"])
    run.until(reached.is_set)
    server.stop()
    assert run.wait() == 1, run.output
    assert "Traceback" not in run.output, run.output
    endings = [x for x in run.output.splitlines() if x.startswith(("error: ", "interrupted: "))]
    assert endings[0].startswith("error: generation.vllm_url: ")
    assert endings[1].startswith("interrupted: saved ") and endings[1].endswith("--resume")
    step = newest_step(folder)
    assert step == len(lines(folder)) > 0
    server.start()
    given = arguments(tmp_path, server.url, program, max_steps=step + 2, **keys)
    zygote.finish("magrpo", [*given, "program.on_error=zero", "--resume"])
    assert [line["update"] for line in lines(folder)] == list(range(1, step + 3))
    assert ratios(folder) == pytest.approx([1] * (step + 2), abs=1e-3)
