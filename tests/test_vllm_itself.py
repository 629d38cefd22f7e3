"""Runs whose completions come from vLLM itself, where VLLM_COMMAND tells how to start it."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from comlrl.builtin import TINY_CODER
from comlrl.rollout.vllm.processes import free_port
from tests.support.fake_vllm import FakeVLLM
from tests.support.runs import Zygote
from tests.support.vllm_runs import A_STEP, LEARNING, asked, fake_server, has_logged, lines, ratios

KILLS = 20


class VLLM:
    """A vLLM server of the embedded model, which can be killed and started again."""

    def __init__(self, command: str, folder: Path) -> None:
        self.log = folder / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            *shlex.split(command), str(TINY_CODER), "--host", "127.0.0.1", "--port",
            str(self.port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
            "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        ]  # fmt: skip
        self.start()
        self.wait()

    def start(self) -> None:
        # The CPU build binds each server to the same cores: two would share one.
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | os.environ
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, seconds: float = 600) -> None:
        limit = time.monotonic() + seconds
        while not _healthy(self.url):
            assert self.process.poll() is None and time.monotonic() < limit, self.log.read_text()[
                -3000:
            ]
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL, to its engine too."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answered(self, path: str) -> int:
        """How many requests it has answered there since it was first started."""
        return self.log.read_text().count(f'"POST {path} HTTP/1.1" 200')


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """VLLM_COMMAND: what stands before the model's folder, e.g. `vllm serve`."""
    command = os.environ.get("VLLM_COMMAND")
    if not command:
        pytest.skip("VLLM_COMMAND is not set: there is no vLLM here")
    server = VLLM(command, tmp_path_factory.mktemp("vllm"))
    yield server
    server.kill()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[VLLM]:
    server = VLLM(os.environ["VLLM_COMMAND"], tmp_path)
    yield server
    server.kill()


@pytest.fixture
def other() -> Iterator[FakeVLLM]:
    """A stand-in that samples by the same model."""
    fake = fake_server()
    yield fake
    fake.stop()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_by_vllm_itself(zygote: Zygote, vllm: VLLM, tmp_path: Path, overlap: int) -> None:
    folder = tmp_path / "run"
    arguments = asked("magrpo", folder, vllm.url, 300, max_new_tokens=24, temperature=0.8)
    zygote.finish("magrpo", [*arguments, f"generation.overlap={overlap}"], seconds=600)
    # One step stale, ratios are of two policies, and their mean is 1 but for chance.
    assert ratios(folder) == pytest.approx([1] * 4, abs=0.1 if overlap else 1e-3)
    largest = max(line["metrics"]["importance/ratio_max"] for line in lines(folder))
    assert overlap or largest < 1.01


@pytest.mark.slow
def test_split_models_are_sampled_by_vllm_itself(
    zygote: Zygote, vllm: VLLM, tmp_path: Path
) -> None:
    """Two processes, and each request is sent once."""
    folder, before = tmp_path / "run", vllm.answered("/v1/completions")
    keys = LEARNING | {"max_steps": 2, "save_steps": 0}
    arguments = [*asked("magrpo", folder, vllm.url, 300, **keys), "distributed.strategy=fsdp"]
    zygote.finish_team(2, "magrpo", arguments, seconds=600)
    assert ratios(folder) == pytest.approx([1, 1], abs=1e-3)
    assert vllm.answered("/v1/completions") == before + 2 * A_STEP


@pytest.mark.slow
def test_vllm_is_killed_and_started_again_beside_another(
    zygote: Zygote, vllm: VLLM, other: FakeVLLM, tmp_path: Path
) -> None:
    """It gets its adapters again, and then requests."""
    folder = tmp_path / "run"
    keys = LEARNING | {"max_steps": 500, "save_steps": 0}
    run = zygote.run("magrpo", asked("magrpo", folder, f"[{vllm.url},{other.url}]", 300, **keys))
    run.until(lambda: has_logged(folder, 2), 600)
    vllm.kill()
    killed = vllm.answered("/v1/completions")
    run.until(lambda: "it is left out until it answers, 1 of 2 servers continue" in run.output)
    vllm.start()
    run.until(lambda: vllm.answered("/v1/completions") > killed, 600)
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.output
    found = lines(folder)
    assert [line["update"] for line in found] == [*range(1, len(found) + 1)]
    assert ratios(folder) == pytest.approx([1] * len(found), abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # a server takes a minute to start, and more where others run
def test_two_vllms_are_killed_twenty_times(
    zygote: Zygote, vllm: VLLM, second: VLLM, tmp_path: Path
) -> None:
    """One, the other or both, at random moments; again once the killed have answered requests.
    Each step has what a step of an undisturbed run has."""
    folder, drawn, kills = tmp_path / "run", random.Random(1), 0
    keys = LEARNING | {"max_steps": 100_000, "save_steps": 0}
    run = zygote.run("magrpo", asked("magrpo", folder, f"[{vllm.url},{second.url}]", 600, **keys))
    run.until(lambda: has_logged(folder, 1), 600)
    while kills < KILLS:
        killed = drawn.sample([vllm, second], drawn.choice([1, 2]))
        kills += len(killed)
        time.sleep(3 * drawn.random())
        for server in killed:
            server.kill()
        answered = {server: server.answered("/v1/completions") for server in killed}
        for server in killed:
            server.start()
        for server, before in answered.items():
            run.until(lambda s=server, n=before: s.answered("/v1/completions") > n, 600)
    run.send(signal.SIGTERM)
    assert run.wait(600) == 143, run.output
    found = lines(folder)
    assert [line["update"] for line in found] == [*range(1, len(found) + 1)]
    each = A_STEP // 2 * LEARNING["num_generations"]  # joint actions
    assert [line["step"] for line in found] == [each * n for n in range(1, len(found) + 1)]
    assert ratios(folder) == pytest.approx([1] * len(found), abs=1e-3)
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_vllm_without_the_flag_is_refused_for_truncation(
    zygote: Zygote, vllm: VLLM, tmp_path: Path
) -> None:
    run = zygote.finish("magrpo", asked("magrpo", tmp_path / "run", vllm.url, top_p=0.9), code=2)
    assert run.error.startswith("top_p: 0.9 with generation.backend=vllm, and ")
    assert "--enable-scale-out --return-sampling-mask" in run.error


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False
