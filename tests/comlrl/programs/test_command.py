"""A command as a program: processes that find their agents by OPENAI_BASE_URL."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest

from comlrl.config.plugins.targets import TargetError
from comlrl.config.sections import ProgramConfig
from comlrl.errors import UserError
from comlrl.programs.command import play_command
from comlrl.programs.loading import load_program
from tests.support.played import TASKS, played
from tests.support.processes import gone, python, until

CLIENT = """
import json, sys, openai
task = json.load(sys.stdin)
client = openai.OpenAI(max_retries=0)
ask = lambda model, text: client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": text}]).choices[0].message.content
print("any other output")
print(json.dumps({"coder": len(ask("coder", task["task_id"])), "tester": 1.5}))
"""


def run(code: str, **limits):
    return played(partial(play_command, [sys.executable, "-c", code]), 2, tasks=TASKS[:1], **limits)


def test_a_process_plays_an_episode_and_prints_its_rewards():
    (group,) = run(CLIENT)

    for episode in group.episodes_G:
        (call,) = episode.calls
        assert [message.content for message in call.prompt] == [TASKS[0].task_id]
        assert episode.score.by_agent == (len(call.completion.text), 1.5)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(3)", "the command ended with status 3"),
        ("print('done')", "its last line of output is 'done'; print the reward"),
        ("print('true')", "its last line of output is 'true'"),
        ("", "its last line of output is ''"),
        ("print('NaN')", "its last line of output is 'NaN'"),
        ("print('1e999')", "its last line of output is '1e999'"),
        ("print('1' + '0' * 400)", "its last line of output is '1000"),
    ],
)
def test_a_process_without_a_reward_is_an_error_of_its_episode(code, why):
    with pytest.raises(TargetError, match=f"task 'A', episode [12]: {why}"):
        run(code)


def test_a_process_that_never_ends_is_killed_with_its_children(tmp_path):
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open(r"{tmp_path}/" + str(child.pid), "w").close()
time.sleep(600)
"""
    for seconds in (3, 30):  # on a busy machine two interpreters may start late
        (group,) = run(code, timeout=float(seconds), on_error="zero")
        ends = [episode.error or "" for episode in group.episodes_G]
        assert all(f"more than {seconds} s" in end for end in ends)
        children = [int(name) for name in os.listdir(tmp_path)]
        if len(children) >= 2:
            break
    assert len(children) >= 2
    until(lambda: gone(children))


LIMITED = """
import resource, socket, sys
from functools import partial
from urllib.parse import urlsplit

import comlrl.programs.running as running
from comlrl.programs.command import play_command
from tests.support.played import TASKS, played

soft, hard, at_once, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
running.MAX_PROCESSES = at_once

async def connect(task, agents):
    address = urlsplit(agents.base_url)
    held = [socket.create_connection((address.hostname, address.port)) for _ in range(100)]
    return len(held)

play = connect if what == "connect" else partial(play_command, ["sh", "-c", "sleep 0.2; echo 1"])
(group,) = played(play, 1 if what == "connect" else 60, tasks=TASKS[:1], timeout=3.0)
print(sum(episode.score.value for episode in group.episodes_G))
"""


def limited(soft: int, hard: int, at_once: int, what: str) -> float:
    """The sum of the rewards of episodes in a process that may have so many files open."""
    return float(python("-c", LIMITED, str(soft), str(hard), str(at_once), what).stdout)


def test_more_episodes_than_the_process_may_have_files_for():
    """60 commands need more than 64 files, and two at once do not. All of them take longer than one
    episode may: waiting for room does not count."""
    assert limited(64, 64, 2, "command") == 60


def test_a_rollout_raises_the_soft_limit_of_open_files():
    assert limited(64, 1024, 8, "connect") == 100


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"command": "no-such-command-anywhere x"}, "no such command"),
        ({"command": "python 'unclosed"}, "cannot be read"),
        ({"command": "true", "target": "my:play"}, "set one of them"),
    ],
)
def test_refused_in_one_line(keys, message, tmp_path):
    section = ProgramConfig(agents=["coder"], **keys)
    with pytest.raises(UserError, match=message):
        load_program(section, 1, "magrpo.num_agents", tmp_path)
