"""A command as a program: each episode is a process that finds its agents at the endpoint.

It reads the task as JSON from its standard input (``task_id`` and the row's fields), reaches the
agents by ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, each agent's name being a model, and writes
the episode's reward as its last line of output: a number, or an object with a number for each
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

from comlrl.programs.agents import Agents, room_for_process
from comlrl.programs.program import EpisodeError
from comlrl.types import Task

MAX_LINE = 65536  # bytes of output that the last line may have


async def play_command(argv: Sequence[str], task: Task, agents: Agents) -> Any:
    """Play an episode: one run of the command, without a shell. Raises EpisodeError."""
    async with room_for_process(agents):
        last, status = await _run(argv, task, agents)
    if status:
        raise EpisodeError(f"the command ended with status {status}")
    return _reward(last)


async def _run(argv: Sequence[str], task: Task, agents: Agents) -> tuple[str, int]:
    """Return the command's last line and its status."""
    variables = {"OPENAI_BASE_URL": agents.base_url, "OPENAI_API_KEY": agents.api_key}
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=PIPE, stdout=PIPE, env=os.environ | variables, start_new_session=True
    )
    try:
        row = json.dumps({"task_id": task.task_id, **task.fields}, default=str)
        last, _ = await asyncio.gather(_last_line(process), _send(process, row))
        return last, await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _send(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it does not want to know
        process.stdin.write(text.encode())
        await process.stdin.drain()
    process.stdin.close()


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Return the last line of the output that is not empty."""
    assert process.stdout is not None
    end = b""
    while part := await process.stdout.read(MAX_LINE):
        end = (end + part)[-MAX_LINE:]
    return end.decode(errors="replace").strip().rpartition("\n")[2]


def _reward(line: str) -> float | dict[str, float]:
    """Parse a reward. Raises EpisodeError for a line that is not one."""
    try:
        reward = json.loads(line)
    except ValueError:
        reward = None
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    greatest = sys.float_info.max
    if not all(type(n) in (int, float) and abs(n) <= greatest for n in numbers):  # NaN is not
        raise EpisodeError(
            f"its last line of output is {line[:80]!r}; print the reward: a number, or an object "
            "with a number for each agent"
        )
    return reward
