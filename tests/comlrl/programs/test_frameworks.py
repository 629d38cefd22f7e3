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
    _install(tmp_path / "packages", "langgraph==1.2.22", "langchain-openai==1.7.3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
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
