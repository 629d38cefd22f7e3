"""Programs that nobody here wrote, with agents as models: installed beside the tests, from the
package index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from comlrl.programs.command import play_command
from tests.support.documented import programs
from tests.support.played import TASKS, played

pytestmark = pytest.mark.slow

LIMITS: dict[str, Any] = {"tasks": TASKS[:1], "timeout": 300.0}


def test_a_langgraph_graph_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site-packages", "langgraph==1.2.22", "langchain-openai==1.7.3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))

    (group,) = played(_recipe("my_graph.py", tmp_path), 2, names=("writer", "reviewer"), **LIMITS)

    for episode in group.episodes_G:
        write, review = episode.calls
        assert (write.agent, review.agent) == (0, 1)
        assert [message.content for message in write.prompt] == [TASKS[0].fields["prompt"]]
        asked = f"{TASKS[0].fields['prompt']}\n{write.completion.text}\nCorrect it. Code only."
        assert [message.content for message in review.prompt] == [asked]
        assert episode.score.value in (0.0, 1.0)


def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # dill pickles what lies in a folder of another name by value, and cannot do so for pyarrow.
    _install(tmp_path / "site-packages", "verifiers==0.2.1", "dill==0.4.1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))

    (group,) = played(_recipe("my_environment.py", tmp_path), 2, names=("writer",), **LIMITS)

    for episode in group.episodes_G:
        first, second = episode.calls
        asked = [("user", TASKS[0].fields["prompt"])]
        assert [(m.role, m.content) for m in first.prompt] == asked
        answered = [("assistant", first.completion.text), ("user", "Are you sure?")]
        assert [(m.role, m.content) for m in second.prompt] == asked + answered
        assert episode.score.value == len(second.completion.text)


def _recipe(name: str, folder: Path) -> Callable[..., Any]:
    """A file of the cookbook as a command."""
    (folder / name).write_text(programs("cookbook.md")[name])
    return partial(play_command, [sys.executable, str(folder / name)])


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
