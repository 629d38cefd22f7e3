"""The program of smollm2_magrpo_program_che.yaml: solve, test, review, solve again."""

from __future__ import annotations

from comlrl.programs.agents import Agents
from comlrl.quoting import fenced
from comlrl.rewards.code import chat_prompts, prompt_templates
from comlrl.types import Score, Task

REVIEW = """\
{problem}

A programmer wrote this, and a test fails:
{draft}
In one sentence: what is wrong with it?
"""
ADVICE = "A test fails. A reviewer says:\n{advice}\n" + chat_prompts.REVISION


async def play(task: Task, agents: Agents) -> Score:
    """Let the solver write; if a test fails, let it write again after a review.

    The solver's code is scored as a main without helpers, so the reward is at most 2.1.
    """
    problem, name = task.fields["prompt"], task.fields["entry_point"]
    (values,) = prompt_templates.values(problem, prompt_templates.signature(problem, name), name, 1)
    start = chat_prompts.PREFILL.format_map(values)

    async def solve(*conversation: str) -> str:
        """Return the solver's answer, which begins with ``start``."""
        roles = ("user", "assistant") * len(conversation)
        messages = zip(roles, (*conversation, start), strict=False)
        return start + await agents["solver"](
            [{"role": role, "content": text} for role, text in messages]
        )

    prompt = chat_prompts.SINGLE.format_map(values)
    draft = await solve(prompt)
    score = await agents.score({"reviewer": "", "solver": draft})
    if score.passed:
        return score
    review = REVIEW.format(problem=values["problem"], draft=fenced(draft))
    advice = await agents["reviewer"](review)
    again = await solve(prompt, draft, ADVICE.format_map(values | {"advice": advice}))
    return await agents.score({"reviewer": "", "solver": again})
