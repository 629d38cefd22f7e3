"""The SLURM scripts: checked by shellcheck, and run against a stand-in for python and SLURM."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import until

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
PYTHON = """#!/bin/bash
trap 'echo saved >> arguments; exit 143' TERM
echo "$@" >> arguments
for _ in $(seq "${STAND_IN_TENTHS:-0}"); do sleep 0.1; done
"""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    assert len(SCRIPTS) >= 5
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A repository whose python, and a SLURM whose scontrol and srun, write down what they hear."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    tools = {
        ".venv/bin/python": PYTHON,
        "bin/scontrol": '#!/bin/bash\nif [[ $1 == show ]]; then printf "n%s\\n" {1..20000}; else '
        'echo "scontrol $*" >> arguments; fi\n',
        "bin/srun": '#!/bin/bash\n[[ $1 == --kill-on-bad-exit=1 ]] && shift\nexec "$@"\n',
    }
    for name, text in tools.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(cluster: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    script, *rest = arguments
    return subprocess.Popen(
        [str(cluster / "scripts" / script), *rest], cwd=cluster, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {
            "PATH": f"{cluster}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "77",
            "SLURM_SUBMIT_DIR": str(cluster),
        } | environment,
    )  # fmt: skip


def ended(run: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = run.communicate(timeout=300)
    assert run.returncode == code, output
    return output


def heard(cluster: Path) -> list[str]:
    return (cluster / "arguments").read_text().splitlines()


def test_one_machine(cluster: Path) -> None:
    run = start(
        cluster, "slurm_train.sh", "magrpo", "c.yaml", "runs/a", "seed=7", SLURM_GPUS_ON_NODE="4"
    )
    ended(run)
    assert heard(cluster) == [
        "-m torch.distributed.run --standalone --nproc_per_node 4 train_magrpo.py "
        "--config c.yaml --resume --override output.dir=runs/a seed=7"
    ]


def test_several_machines(cluster: Path) -> None:
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    run = start(cluster, "slurm_multinode.sh", "ppo", "c.yaml", "runs/a", **nodes)
    ended(run)
    (line,) = heard(cluster)
    assert "--nnodes 2 --nproc_per_node 8 --rdzv_id 77" in line
    assert "--rdzv_endpoint n1:20077 train_ppo.py --config c.yaml --resume" in line


VLLM = """#!/bin/bash
echo $$ > servers.pid
echo "$CUDA_VISIBLE_DEVICES: $*" >> servers
trap 'echo "$CUDA_VISIBLE_DEVICES ends" >> servers; exit 0' TERM
[[ -n "${SERVER_FAILS:-}" ]] && exit 1
for _ in $(seq 600); do sleep 0.1; done
"""


def test_servers_on_some_gpus_and_training_on_the_others(cluster: Path) -> None:
    _tool(cluster, "bin/vllm", VLLM)
    _tool(cluster, "bin/curl", "#!/bin/bash\n[[ $(wc -l < servers) -ge 2 ]]\n")
    run = start(
        cluster, "slurm_vllm.sh", "Qwen/M", "magrpo", "c.yaml", "runs/a", "seed=7",
        CUDA_VISIBLE_DEVICES="4,5,6,7", VLLM_ARGUMENTS="--max-model-len 2048", MAX_LORAS="8",
    )  # fmt: skip
    ended(run)
    assert heard(cluster) == [
        "-m torch.distributed.run --standalone --nproc_per_node 2 train_magrpo.py --config c.yaml "
        "--resume --override output.dir=runs/a generation.backend=vllm "
        "generation.vllm_url=[http://127.0.0.1:9232,http://127.0.0.1:9233] seed=7"
    ]
    lines = _until_ended(cluster / "servers", 4)
    assert [line.split(" --host")[0] for line in sorted(lines[:2])] == [
        "6: serve Qwen/M --port 9232", "7: serve Qwen/M --port 9233",  # 8000 + 16 · 77
    ]  # fmt: skip
    assert all(
        line.endswith(
            "--enable-lora --max-loras 8 --max-lora-rank 64 --logprobs-mode processed_logprobs "
            "--generation-config vllm --enable-prefix-caching --max-model-len 2048"
        )
        for line in lines[:2]
    )
    assert sorted(lines[2:]) == ["6 ends", "7 ends"]


def test_a_server_that_ends_ends_the_job(cluster: Path) -> None:
    _tool(cluster, "bin/vllm", VLLM)
    _tool(cluster, "bin/curl", "#!/bin/bash\nexit 7\n")
    assert _ended_with_its_server(cluster)


def test_another_jobs_server_is_not_taken_for_an_own_one(cluster: Path) -> None:
    """It answers where the job's own server has ended."""
    _tool(cluster, "bin/vllm", VLLM)
    ended = '[[ -s servers.pid ]] && ! kill -0 "$(<servers.pid)"'
    _tool(cluster, "bin/curl", f"#!/bin/bash\nuntil {ended}; do sleep 0.1; done\n")
    assert _ended_with_its_server(cluster)


def _ended_with_its_server(cluster: Path) -> bool:
    """Whether a job whose only server ends at once says so, and starts no training."""
    run = start(
        cluster, "slurm_vllm.sh", "Qwen/M", "magrpo", "c.yaml", "runs/a",
        CUDA_VISIBLE_DEVICES="0,1", SERVER_FAILS="1",
    )  # fmt: skip
    output, _ = run.communicate(timeout=300)
    reported = run.returncode == 1 and "http://127.0.0.1:9232 has ended" in output
    return reported and not (cluster / "arguments").exists()


def test_a_port_that_is_taken_is_reported_before_a_server_starts(cluster: Path) -> None:
    _tool(cluster, "bin/vllm", VLLM)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        run = start(
            cluster, "slurm_vllm.sh", "Qwen/M", "magrpo", "c.yaml", "runs/a",
            CUDA_VISIBLE_DEVICES="0,1", FIRST_PORT=port,
        )  # fmt: skip
        output = ended(run, 1)
    assert f"error: port {port} is taken; set FIRST_PORT to the first of 1 free ones" in output
    assert not (cluster / "servers").exists() and not (cluster / "arguments").exists()


@pytest.mark.parametrize("job", ["77", "999"])
def test_jobs_of_neighboring_numbers_share_no_port(cluster: Path, job: str) -> None:
    """Up to 16 servers each, below the ports that the system gives to clients (from 32768)."""
    _tool(cluster, "bin/vllm", VLLM)
    _tool(cluster, "bin/curl", "#!/bin/bash\n[[ $(wc -l < servers) -ge 16 ]]\n")
    ports = []
    for number in (int(job), int(job) + 1):
        (cluster / "servers").unlink(missing_ok=True)
        run = start(
            cluster, "slurm_vllm.sh", "Qwen/M", "magrpo", "c.yaml", "runs/a",
            CUDA_VISIBLE_DEVICES=",".join(map(str, range(17))), SERVERS="16",
            SLURM_JOB_ID=str(number),
        )  # fmt: skip
        ended(run)
        lines = _until_ended(cluster / "servers", 32)
        ports += [int(line.split("--port ")[1].split()[0]) for line in lines if "--port" in line]
    assert len(set(ports)) == len(ports) == 32 and min(ports) >= 8000 and max(ports) < 24000


def test_servers_need_gpus_beside_the_training(cluster: Path) -> None:
    run = start(
        cluster, "slurm_vllm.sh", "Qwen/M", "magrpo", "c.yaml", "runs/a", CUDA_VISIBLE_DEVICES="0"
    )
    assert "1 GPUs for 0 servers" in ended(run, 2)


def _tool(cluster: Path, name: str, text: str) -> None:
    (cluster / name).write_text(text)
    (cluster / name).chmod(0o755)


def _until_ended(file: Path, count: int) -> list[str]:
    """Lines of a file that others still write, when there are so many."""
    deadline = time.monotonic() + 60
    while len(lines := file.read_text().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return lines


def test_an_array_task_runs_its_line(cluster: Path) -> None:
    (cluster / "lines").write_text("seed=1 ppo.clip_range=0.1\nseed=2 ppo.clip_range=[1,2]\n")
    arguments = ("slurm_array.sh", "ppo", "c.yaml", "lines", "runs/s")
    ended(start(cluster, *arguments, SLURM_ARRAY_TASK_ID="2"))
    assert heard(cluster) == [
        "train_ppo.py --config c.yaml --resume --override seed=2 ppo.clip_range=[1,2] "
        "output.dir=runs/s/2"
    ]
    assert "no line 3" in ended(start(cluster, *arguments, SLURM_ARRAY_TASK_ID="3"), 2)


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_warned_it_saves_and_goes_back_into_the_queue(
    cluster: Path, number: int, requeued: bool
) -> None:
    run = start(cluster, "slurm_train.sh", "magrpo", "c.yaml", "runs/a", STAND_IN_TENTHS="300")
    until((cluster / "arguments").exists, run)
    run.send_signal(number)
    ended(run, 143)
    assert heard(cluster)[1:] == ["saved", *(["scontrol requeue 77"] if requeued else [])]


def test_a_run_that_fails_is_not_put_back(cluster: Path) -> None:
    python = cluster / ".venv/bin/python"
    python.write_text("#!/bin/bash\necho failed >> arguments\nexit 2\n")
    ended(start(cluster, "slurm_train.sh", "magrpo", "c.yaml", "runs/a"), 2)
    assert heard(cluster) == ["failed"]


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_multinode.sh", "slurm_array.sh"])
def test_usage(cluster: Path, script: str) -> None:
    assert ended(start(cluster, script), 2).startswith("usage: sbatch")
