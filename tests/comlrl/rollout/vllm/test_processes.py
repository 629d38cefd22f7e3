"""Servers that a run starts: real processes, of a small script in vLLM's place."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comlrl.errors import UserError
from comlrl.rollout.vllm import processes
from comlrl.rollout.vllm.processes import ServerProcess, free_port
from tests.support.processes import gone, is_running, until

SCRIPT = """
import http.server, json, os, sys
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "base"}]}).encode())
open(sys.argv[2], "a").write(f"{os.getpid()}\\n{os.environ['VLLM_ALLOW_RUNTIME_LORA_UPDATING']}\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


@pytest.fixture
def ids(tmp_path: Path) -> Iterator[Path]:
    """The file of the processes' ids; whatever is left of them ends with the test."""
    ids = tmp_path / "ids"
    yield ids
    for pid in ids.read_text().split() if ids.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def start(ids: Path) -> ServerProcess:
    """Start the script with a helper beside it, as vLLM has some."""
    script, port = ids.with_name("server.py"), free_port()
    script.write_text(SCRIPT)
    command = f"sleep 1000 & echo $! > {ids}; {sys.executable} -S {script} {port} {ids}"
    return ServerProcess(command, f"http://127.0.0.1:{port}", ids.with_name("log"))


def test_a_server_answers_until_it_is_stopped(ids):
    server = start(ids)
    server.wait(120)
    helper, pid, allows = map(int, ids.read_text().split())
    assert allows == 1 and is_running(helper) and is_running(pid)
    server.stop()
    until(lambda: gone((helper, pid)))


def test_a_server_ends_with_a_killed_run(ids):
    run = os.fork()
    if not run:
        try:
            start(ids)
            time.sleep(1000)
        finally:
            os._exit(1)
    until(lambda: len(ids.read_text().split()) == 3 if ids.exists() else False)
    helper, pid, _ = map(int, ids.read_text().split())
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    until(lambda: gone((helper, pid)))


@pytest.mark.parametrize("patience", ["0.2", "15"])  # of the shell; stop() waits for a second
def test_one_that_ignores_sigterm_is_killed(ids, tmp_path, monkeypatch, patience):
    monkeypatch.setattr(processes, "ENDING", 1)
    monkeypatch.setattr(
        processes, "SHELL", processes.SHELL.replace("sleep 15", f"sleep {patience}")
    )
    command = f"trap '' TERM; echo $$ > {ids}; while :; do sleep 0.1; done"
    server = ServerProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    until(lambda: ids.exists() and bool(ids.read_text()))
    server.stop()
    assert server.process.returncode == -signal.SIGKILL


def test_a_command_that_fails_ends_with_its_last_words(tmp_path):
    command = "echo no such model; exit 3"
    server = ServerProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    with pytest.raises(UserError, match=r"generation\.vllm_command: .* 3; .*no such model"):
        server.wait()
    server.stop()


def test_an_address_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        url = f"http://127.0.0.1:{used.getsockname()[1]}"
        with pytest.raises(UserError, match=r"generation\.vllm_command: "):
            ServerProcess("true", url, tmp_path / "log")
