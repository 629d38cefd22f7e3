"""Whole runs whose completions come from a server: their arguments, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from comlrl.models.pretrained import build_team
from tests.support import tiny_models
from tests.support.fake_vllm import FakeVLLM
from tests.support.runs import metrics, small

EXACT = {"agent_model__torch_dtype": "float32", "lora__r": 4}
LEARNING = {"num_agents": 2, "max_new_tokens": 24, "num_generations": 4, "eval_interval": 0}
A_STEP = 4  # requests: two tasks of two agents


def fake_server(port: int | None = None) -> FakeVLLM:
    """With the model and adapters of the runs of ``asked``; it has been started."""
    team = build_team(tiny_models.config(num_agents=1, **EXACT), device="cpu")
    return FakeVLLM(team, port).start()


def asked(
    algorithm: str, folder: Path, url: str, patience: float = 120, **section: object
) -> list[str]:
    """Arguments for a run of seconds that asks a server."""
    return [
        *small(algorithm, folder, **{"top_p": None} | section), "agent_model.torch_dtype=float32",
        "generation.backend=vllm", f"generation.vllm_url={url}",
        f"generation.vllm_patience={patience}",
    ]  # fmt: skip


def lines(folder: Path, phase: str = "train") -> list[dict]:
    return [line for line in metrics(folder) if line["phase"] == phase]


def has_trained(folder: Path) -> Callable[[], bool]:
    return lambda: (folder / "metrics.jsonl").exists() and bool(lines(folder))


def ratios(folder: Path) -> list[float]:
    """The mean ratio of each training step, and 1 within rounding."""
    for line in lines(folder, "eval"):
        assert not any(name.startswith("importance/") for name in line["metrics"])
    return [line["metrics"]["importance/ratio_mean"] for line in lines(folder)]


def has_logged(folder: Path, steps: int) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and file.read_text().count("\n") >= steps
