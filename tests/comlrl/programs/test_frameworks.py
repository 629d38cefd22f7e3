"""Programs that nobody here wrote, with agents as models: installed beside the tests, from the
package index."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from comlrl.programs.command import play_command
from tests.support.played import TASKS, played

pytestmark = pytest.mark.slow

GRAPH = """
import json, sys
from typing import TypedDict
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

class State(TypedDict):
    task: str
    code: str
    review: str

writer, reviewer = ChatOpenAI(model="coder"), ChatOpenAI(model="tester")
graph = StateGraph(State)
graph.add_node("write", lambda state: {"code": writer.invoke(state["task"]).content})
graph.add_node("review", lambda state: {"review": reviewer.invoke(state["code"]).content})
graph.add_edge(START, "write")
graph.add_edge("write", "review")
graph.add_edge("review", END)
end = graph.compile().invoke({"task": json.load(sys.stdin)["task_id"]})
print(json.dumps({"coder": len(end["code"]), "tester": len(end["review"])}))
"""


def test_a_langgraph_graph_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site-packages", "langgraph==1.2.22", "langchain-openai==1.7.3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    (tmp_path / "graph.py").write_text(GRAPH)
    play = partial(play_command, [sys.executable, str(tmp_path / "graph.py")])

    (group,) = played(play, 2, tasks=TASKS[:1], timeout=300.0)

    for episode in group.episodes_G:
        write, review = episode.calls
        assert (write.agent, review.agent) == (0, 1)
        assert [message.content for message in write.prompt] == [TASKS[0].task_id]
        assert [message.content for message in review.prompt] == [write.completion.text]
        lengths = (len(write.completion.text), len(review.completion.text))
        assert episode.score.by_agent == lengths


ENVIRONMENT = """
import json, sys
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

name = json.load(sys.stdin)["task_id"]

class Doubted(vf.MultiTurnEnv):
    def is_completed(self, messages, state, **_):
        return state["turn"] == 2

    def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "Are you sure?"}], state

def length(completion, **_):
    return float(len(completion[-1]["content"]))

rows = Dataset.from_list([{"prompt": [{"role": "user", "content": name}], "answer": ""}])
rubric = vf.Rubric(funcs=[length], weights=[1.0])
env = globals().get(sys.argv[1], getattr(vf, sys.argv[1], None))(dataset=rows, rubric=rubric)
results = env.generate(env.get_dataset(), client=AsyncOpenAI(), model="coder")
print(json.dumps(results.reward[0]))
"""


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # dill pickles what lies in a folder of another name by value, and cannot do so for pyarrow.
    folder = tmp_path_factory.mktemp("verifiers") / "site-packages"
    _install(folder, "verifiers==0.1.3", "datasets==5.2.0", "dill==0.4.1", "openai==3.54.0")
    return folder


@pytest.mark.parametrize("name", ["SingleTurnEnv", "Doubted"])
def test_an_environment_of_verifiers(
    name: str, verifiers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(verifiers))
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    play = partial(play_command, [sys.executable, str(tmp_path / "environment.py"), name])

    (group,) = played(play, 2, tasks=TASKS[:1], timeout=300.0)

    for episode in group.episodes_G:
        first, *later = episode.calls
        asked = [("user", TASKS[0].task_id)]
        assert [(m.role, m.content) for m in first.prompt] == asked
        assert len(later) == (name == "Doubted")
        for call in later:
            answered = [("assistant", first.completion.text), ("user", "Are you sure?")]
            assert [(m.role, m.content) for m in call.prompt] == asked + answered
        assert episode.score.value == len(episode.calls[-1].completion.text)


# What pip prints where it reaches no index; another failure is one of the test.
UNREACHABLE = ("ConnectionError", "NewConnectionError", "Failed to establish a new connection",
               "Temporary failure in name resolution", "ConnectTimeoutError")  # fmt: skip


def _install(folder: Path, *packages: str) -> None:
    """From the package index; the test is skipped where it cannot be reached."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *packages],
        capture_output=True, text=True, env=os.environ, timeout=600,
    )  # fmt: skip
    if any(sign in done.stderr for sign in UNREACHABLE) and done.returncode:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
