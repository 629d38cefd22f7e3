"""The programs that the pages show can be learned: the best answers get the greatest reward, and
empty ones none."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import types
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction, Task
from tests.support.documented import programs
from tests.support.fakes import code_task
from tests.support.runs import ROOT

TASK = code_task(
    "t",
    "def f(x):\n    '''The square of x, and one.'''\n",
    "def check(candidate):\n    assert candidate(2) == 5\n    assert candidate(3) == 10\n",
    "f",
)
ALONE = "def f(x):\n    return x * x + 1\n"
AUX, MAIN = "def aux(x):\n    return x * x\n", "def f(x):\n    y = aux(x)\n    return y + 1\n"


class Agents(dict):
    """Agents that always answer the same."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        super().__init__({name: self._agent(answer) for name, answer in answers.items()})
        self.prompts = defaultdict(str)

    @staticmethod
    def _agent(answer: str) -> Any:
        async def agent(prompt: Any, **_: Any) -> str:
            return answer

        return agent

    async def score(self, texts: Mapping[str, str]) -> float:
        with CodeReward(workers=1) as reward:
            return reward.score([JointAction(TASK, tuple(texts.values()))])[0].value


def played(source: str, answers: Mapping[str, str], task: Task = TASK) -> float:
    module: dict[str, Any] = {}
    exec(source, module)
    return float(asyncio.run(module["play"](task, Agents(answers))))


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(async def play.*?)```", text, re.S)
    return source


EXAMPLES = {
    "README.md": (readme(), {"aux": AUX, "main": MAIN}, 4.0),
    "my_team.py": (programs("programs.md")["my_team.py"], {"writer": ALONE, "reviewer": "-"}, 1.0),
    "debate.py": (
        programs("programs.md")["debate.py"],
        {"one": ALONE, "two": ALONE, "judge": "one"},
        1.0,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_best_answer_is_paid_and_an_empty_one_is_not(name):
    source, answers, best = EXAMPLES[name]
    assert played(source, answers) == pytest.approx(best)
    assert played(source, dict.fromkeys(answers, "")) == 0.0


def test_the_graph_of_the_cookbook(monkeypatch, capsys):
    """With a stand-in of LangGraph that runs its nodes one after the other."""

    class Model:
        def __init__(self, model: str) -> None:
            self.model = model

        def invoke(self, prompt: str) -> Any:
            return types.SimpleNamespace(content=answers[self.model])

    class Graph:
        def __init__(self, _: type) -> None:
            self.nodes: list[Any] = []

        def add_node(self, name: str, node: Any) -> None:
            self.nodes.append(node)

        def add_edge(self, *_: str) -> None: ...

        def compile(self) -> Graph:
            return self

        def invoke(self, state: dict[str, str]) -> dict[str, str]:
            for node in self.nodes:
                state = state | node(state)
            return state

    graph = types.SimpleNamespace(END="", START="", StateGraph=Graph)
    monkeypatch.setitem(sys.modules, "langchain_openai", types.SimpleNamespace(ChatOpenAI=Model))
    monkeypatch.setitem(sys.modules, "langgraph", types.SimpleNamespace(graph=graph))
    monkeypatch.setitem(sys.modules, "langgraph.graph", graph)
    for code, reward in ((ALONE, 1.0), ("", 0.0)):
        answers = {"writer": "-", "reviewer": code}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(dict(TASK.fields))))
        exec(programs("cookbook.md")["my_graph.py"], {"__name__": "__main__"})
        assert float(capsys.readouterr().out) == reward
