"""Clients that nobody here wrote play unmodified, with tools and streams, and are trained."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.played import TASKS, TOOLS, Writing, played, playing
from tests.support.tiny_models import CHAT, folder
from tests.support.tiny_trainers import build, share_of_letters

Play = Callable[[Any], Awaitable[str]]  # an episode's agents → the last text

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


async def by_openai(agents: Any) -> str:
    """The loop of the client's documentation, streamed."""
    conversation: list[Any] = [{"role": "user", "content": "2+2"}]
    async with openai.AsyncOpenAI(base_url=agents.base_url, api_key=agents.api_key) as client:
        while True:
            # Not the client's ``stream`` helper, which raises where a text is cut at the limit.
            chunks = await client.chat.completions.create(
                model="aux", messages=conversation, tools=TOOLS, stream=True
            )
            text, calls = "", []
            async for chunk in chunks:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
            if not calls:
                return text
            conversation.append({"role": "assistant", "content": text, "tool_calls": calls})
            for call in calls:
                conversation.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})


async def by_langgraph(agents: Any) -> str:
    from langchain_core.messages import AIMessageChunk
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    model = ChatOpenAI(
        model="aux", base_url=agents.base_url, api_key=agents.api_key, streaming=True
    )
    graph = create_react_agent(model, [add])
    asked = {"messages": [("user", "2+2")]}
    texts = [""]
    async for message, _ in graph.astream(asked, stream_mode="messages"):
        if isinstance(message, AIMessageChunk):
            texts.append(str(message.content))
    return "".join(texts)


async def by_agents_sdk(agents: Any) -> str:
    import agents as sdk

    @sdk.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    sdk.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=agents.base_url, api_key=agents.api_key) as client:
        model = sdk.OpenAIChatCompletionsModel(model="aux", openai_client=client)
        adder = sdk.Agent(name="Adder", instructions="Add.", tools=[add], model=model)
        streamed = sdk.Runner.run_streamed(adder, "2+2")
        async for _ in streamed.stream_events():
            pass
        once = await sdk.Runner.run(adder, "2+2")
    assert isinstance(once.final_output, str)
    return str(streamed.final_output)


CLIENTS = [
    pytest.param(by_openai, ["openai"], id="openai"),
    pytest.param(by_langgraph, ["langgraph", "langchain_openai"], id="langgraph"),
    pytest.param(by_agents_sdk, ["agents"], id="agents-sdk"),
]


def installed(modules: list[str]) -> None:
    for name in modules:
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.parametrize(("play", "modules"), CLIENTS)
def test_a_client_calls_tools_and_reads_streams(play: Play, modules: list[str]):
    installed(modules)

    async def episode(task, agents):
        assert (await play(agents)).endswith("It is 4.")
        return 1

    texts = [f"I add.\n{CALL}", "It is 4.", "It is 4."]
    (group,) = played(
        episode, 1, tasks=TASKS[:1], names=("aux", "main"), sampler=Writing(*texts), timeout=300.0
    )
    first, second, *_ = group.episodes_G[0].calls
    assert first.prompt[0].role == "tools" and '"add"' in first.prompt[0].content
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert [(m.role, m.content) for m in second.prompt[-2:]] == [
        ("assistant", texts[0]), ("tool", "4"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template shows tools."""
    path = tmp_path_factory.mktemp("with_tools") / "model"
    shutil.copytree(folder("qwen2"), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(("play", "modules"), CLIENTS)
def test_three_steps_of_training(play: Play, modules: list[str], with_tools: Path, tmp_path: Path):
    installed(modules)

    async def episode(task, agents):
        return share_of_letters((await play(agents),))

    trainer = build(
        "magrpo", tmp_path / "run", share_of_letters, agent_model__name=str(with_tools),
        max_steps=3, max_new_tokens=12, num_generations=3,
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.team.agents[0].parameters()]
    playing(trainer, episode)
    trainer.train()
    train = [m for m in trainer.loop.log.logger.metrics() if "loss" in m]
    assert len(train) == 3 and all(m["agent_0/calls_mean"] >= 1 for m in train)
    after = trainer.team.agents[0].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
