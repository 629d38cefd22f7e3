"""The program of magrpo_program_quickstart.yaml: write, test, fix."""

from __future__ import annotations

import asyncio

from comlrl.programs.agents import Agents
from comlrl.rewards.code.prompt_templates import REVISION
from comlrl.types import Score, Task

FEEDBACK = f"Feedback:\nNot all levels passed.\n{REVISION}"


async def play(task: Task, agents: Agents) -> Score:
    """Let both agents write simultaneously; unless all tests pass, let main write once more."""
    prompts = agents.prompts
    helper, main = await asyncio.gather(
        agents["helper"](prompts["helper"]), agents["main"](prompts["main"])
    )
    score = await agents.score([helper, main])
    if score.passed:
        return score
    feedback = FEEDBACK.format(name=task.fields["entry_point"])
    revised = await agents["main"](
        [
            {"role": "user", "content": prompts["main"]},
            {"role": "assistant", "content": main},
            {"role": "user", "content": feedback},
        ]
    )
    return await agents.score([helper, revised])
