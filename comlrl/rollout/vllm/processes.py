"""vLLM servers that a run starts and stops, as process groups."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.rollout.vllm.servers import PAUSE, Server

KEY = "generation.vllm_command"
STARTING = 1800.0  # seconds until a server answers: it may download its model first
ENDING = 15  # seconds from SIGTERM to SIGKILL
# The shell's input closes when the process that started it ends, for any reason. A second shell in
# the group waits for this, and terminates the group.
SHELL = f"""
exec 3<&0 </dev/null
trap : TERM
(trap '' TERM; cat <&3 >/dev/null; kill -TERM 0; sleep {ENDING}; kill -KILL 0) >/dev/null 2>&1 &
exec 3<&-
eval "$1"
"""
LAUNCHED = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*")


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


class ServerProcess:
    """A server that a shell command starts. It ends with ``stop``, or when this process ends, even
    if killed."""

    def __init__(self, command: str, url: str, log: Path) -> None:
        """Start the server. ``log``: file for its output. Raises UserError if the address is in
        use."""
        self.command, self.url, self.log = command, url, log
        address = httpx.URL(url)
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address.host, address.port or 80), 1),
        ):
            raise UserError(
                f"{KEY}: a server listens at '{url}' already; set another generation.vllm_url, or "
                f"{KEY}=null to use that one"
            )
        environment = {n: v for n, v in os.environ.items() if not LAUNCHED.fullmatch(n)}
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", SHELL, "sh", command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, seconds: float = STARTING) -> None:
        """Wait until the server answers. Raises UserError if it ends or takes too long."""
        limit, server = time.monotonic() + seconds, Server(self.url)
        while True:
            code = self.process.poll()
            if code is not None or time.monotonic() > limit:
                lines = self.log.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "nothing")
                what = f"does not answer within {seconds:g} s"
                what = what if code is None else f"ended with exit code {code}"
                raise UserError(
                    f"{KEY}: '{self.command}' {what}; the last line of {self.log}: "
                    f"{one_line(last, 200)}"
                )
            try:
                server.check()
            except UserError:
                time.sleep(PAUSE)
            else:
                return

    def stop(self) -> None:
        """Stop the server and all processes that it has started: SIGTERM, later SIGKILL."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
