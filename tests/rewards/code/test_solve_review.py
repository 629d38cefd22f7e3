"""The program of a solver and a reviewer: who reads what, and when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

from comlrl.rewards.code.solve_review import play
from comlrl.types import Score
from tests.support.fakes import code_task

TASK = code_task("t", "def pick(a, b):\n    '''{x}'''\n", "def check(candidate): ...", "pick")
START = "```python\ndef pick(a, b):"


class Scripted:
    """Agents that give these answers, one after the other, and scores that pass or do not."""

    def __init__(self, answers: list[str], passes: list[bool]) -> None:
        self.answers, self.passes = iter(answers), iter(passes)
        self.calls: list[tuple[str, Any]] = []
        self.scored: list[dict[str, str]] = []

    def __getitem__(self, name: str):
        async def call(prompt: Any) -> str:
            self.calls.append((name, prompt))
            return next(self.answers)

        return call

    async def score(self, written: dict[str, str]) -> Score:
        self.scored.append(written)
        return Score(1.0, passed=next(self.passes))


def test_a_draft_that_passes_is_the_end():
    agents = Scripted([" return a\n```"], [True])
    score = asyncio.run(play(TASK, agents))  # type: ignore[arg-type]
    assert score.passed and agents.scored == [{"reviewer": "", "solver": f"{START} return a\n```"}]
    ((name, asked),) = agents.calls
    assert name == "solver" and [m["role"] for m in asked] == ["user", "assistant"]
    assert "'''{x}'''" in asked[0]["content"] and asked[1]["content"] == START


def test_a_draft_that_fails_is_reviewed_and_written_again():
    agents = Scripted([" return a", "It takes {a}.", " return b"], [False, True])
    asyncio.run(play(TASK, agents))  # type: ignore[arg-type]
    assert [name for name, _ in agents.calls] == ["solver", "reviewer", "solver"]
    draft = f"{START} return a"
    assert draft in agents.calls[1][1]
    again = agents.calls[2][1]
    assert [m["role"] for m in again] == ["user", "assistant", "user", "assistant"]
    assert again[1]["content"] == draft and again[3]["content"] == START
    assert "A reviewer says:\nIt takes {a}.\n" in again[2]["content"]
    assert "Write a better `pick`" in again[2]["content"]
    assert agents.scored[-1]["solver"] == f"{START} return b"
