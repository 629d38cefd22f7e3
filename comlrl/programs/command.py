"""A command as a program: each episode is a process that calls its agents through the endpoint.

The process reads the task as JSON from standard input (``task_id`` and the row's fields). It
reaches the agents at ``OPENAI_BASE_URL`` with ``OPENAI_API_KEY``; the model names are the agents'.
Its last line of output is the episode's reward: a number, or an object with a number for each
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

MAX_LINE = 65536  # bytes of the last line of output


async def play_command(argv: Sequence[str], task: Task, agents: Agents) -> Any:
    """Run the command as an episode, without a shell. Raises EpisodeError if it fails."""
    async with room_for_process(agents):
        last, status = await _run(argv, task, agents)
    if status:
        raise EpisodeError(f"the command ended with status {status}")
    return _reward(last)


async def _run(argv: Sequence[str], task: Task, agents: Agents) -> tuple[str, int]:
    """Return the command's last line of output and its exit status."""
    variables = {"OPENAI_BASE_URL": agents.base_url, "OPENAI_API_KEY": agents.api_key}
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=PIPE, stdout=PIPE, env=os.environ | variables, start_new_session=True
    )
    try:
        row = json.dumps({"task_id": task.task_id, **task.fields}, default=str)
        last, _ = await asyncio.gather(_last_line(process), _send(process, row))
        return last, await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # the whole process group
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _send(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # the command does not read its input
        process.stdin.write(text.encode())
        await process.stdin.drain()
    process.stdin.close()


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Return the last non-empty line of the output."""
    assert process.stdout is not None
    end = b""
    while part := await process.stdout.read(MAX_LINE):
        end = (end + part)[-MAX_LINE:]
    return end.decode(errors="replace").strip().rpartition("\n")[2]


def _reward(line: str) -> float | dict[str, float]:
    """Parse a reward. Raises EpisodeError if the line is not a reward."""
    try:
        reward = json.loads(line)
    except ValueError:
        reward = None
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    greatest = sys.float_info.max
    if not all(type(n) in (int, float) and abs(n) <= greatest for n in numbers):  # excludes NaN
        raise EpisodeError(
            f"its last line of output is {line[:80]!r}; print the reward: a number, or an object "
            "with a number for each agent"
        )
    return reward
