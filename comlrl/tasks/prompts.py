"""Task → what each agent reads. Every word that an agent is given at turn 1 stands here.

Later turns put an external mode's feedback (``external/``) behind the agent's own history.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from comlrl.types import Message, Task

HELPER = """\
{problem}

Another programmer writes `{entry_point}`. Write one helper function `{name}` that returns \
something useful to it.
Code of `{name}` only: no fences, prose, tests or examples.
"""

MAIN = """\
{problem}

Write `{signature}`
{helpers} and you may call {them}; do not redefine {them}.
Code of `{entry_point}` only: no fences, prose, tests or examples.
"""

SINGLE = """\
{problem}

Write `{signature}`
Code of `{entry_point}` only: no fences, prose, tests or examples.
"""


class PromptError(ValueError):
    """A task from which no prompt can be made; the message names the row."""


def helper_names(num_agents: int) -> tuple[str, ...]:
    """Names of the helpers of a team: N − 1 of ``aux``, ``aux2``, …"""
    return tuple("aux" if i == 0 else f"aux{i + 1}" for i in range(num_agents - 1))


def roles(num_agents: int) -> tuple[str, ...]:
    """Names of the agents in their order: aux, aux2, …, main."""
    return (*helper_names(num_agents), "main")


def signature(task: Task) -> str:
    """The entry point's ``def …:`` line(s) in the task's prompt, on one line.

    Raises PromptError where the prompt does not hold one.
    """
    pattern = rf"^(?:async\s+)?def\s+{re.escape(task.entry_point)}\s*\("
    starts = list(re.finditer(pattern, task.prompt, re.MULTILINE))
    if not starts:
        raise PromptError(
            f"dataset row {task.task_id!r}: its prompt has no line "
            f"`def {task.entry_point}(…):`; check `prompt` and `entry_point`"
        )
    lines = task.prompt[starts[-1].start() :].split("\n")
    for count in range(1, len(lines) + 1):  # a signature may run over several lines
        source = "\n".join(lines[:count])
        try:
            function = ast.parse(source + " pass" if source.rstrip().endswith(":") else source)
        except SyntaxError:
            continue
        definition = function.body[0]
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            definition.body, definition.decorator_list = [ast.Pass()], []
            return ast.unparse(definition).split("\n")[0]
    raise PromptError(
        f"dataset row {task.task_id!r}: the signature of `{task.entry_point}` in its prompt "
        "is not valid Python"
    )


def first_prompts(task: Task, num_agents: int) -> tuple[str, ...]:
    """What each of N agents reads at turn 1: the helpers in order, then main."""
    problem, head = task.prompt.strip("\n"), signature(task)
    names = helper_names(num_agents)
    if not names:
        return (SINGLE.format(problem=problem, signature=head, entry_point=task.entry_point),)
    helpers = [
        HELPER.format(problem=problem, entry_point=task.entry_point, name=name) for name in names
    ]
    calls = [f"`{name}(...)`" for name in names]
    listed = calls[0] if len(calls) == 1 else f"{', '.join(calls[:-1])} and {calls[-1]}"
    main = MAIN.format(
        problem=problem,
        signature=head,
        entry_point=task.entry_point,
        helpers=f"{listed} exists" if len(names) == 1 else f"{listed} exist",
        them="it" if len(names) == 1 else "them",
    )
    return (*helpers, main)


def plain_text(prompt: Sequence[Message]) -> str:
    """A conversation as plain text, for models without a chat template."""
    return "\n".join(message.content.rstrip("\n") + "\n" for message in prompt)
