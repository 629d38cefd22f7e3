"""Trainers on tiny random models, with a reward that is a function of the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comlrl.assemble import build_sampler
from comlrl.generation import order, uniforms
from comlrl.loop import Loop
from comlrl.rollout import Rollout
from comlrl.team import build_team
from comlrl.types import Attempt, JointAction, LogRecord, Sampling, Score, Task, Tree
from loggers.metrics import tree_metrics
from tests.tiny_models import config, folder
from trainers.magrpo import MAGRPOTrainer
from trainers.ppo import PPOTrainer
from trainers.shppo import SHPPOTrainer

Value = Callable[[tuple[str, ...]], float]


class TextReward:
    """``value`` of the agents' texts; counts what it scored."""

    def __init__(self, value: Value) -> None:
        self.value, self.scored = value, 0

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        self.scored += len(actions)
        return [Score(float(self.value(action.completions_N))) for action in actions]

    def close(self) -> None:
        return


class Recorder:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []

    def log(self, record: LogRecord) -> None:
        self.records.append(record)

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        return

    def close(self) -> None:
        return

    def metrics(self) -> list[dict[str, float]]:
        return [dict(record.metrics) for record in self.records]


def transition(attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    return [("again.",) * len(attempt.completions_N) for attempt in attempts]


def tasks(count: int) -> list[Task]:
    source = "def f{0}(x):\n    '''Adds {0}.'''\n"
    return [Task(f"t{i}", source.format(i), "def check(f): ...", f"f{i}") for i in range(count)]


def build(
    algorithm: str, run_dir: Path, value: Value, *, count: int = 2, kind: str = "qwen2", **keys: Any
) -> MAGRPOTrainer | PPOTrainer | SHPPOTrainer:
    """A trainer of ``count`` tasks; ``keys`` as in ``tiny_models.config``."""
    base = {
        "agent_model__name": str(folder(kind)), "agent_model__torch_dtype": "float32",
        "batch_size": count, "num_train_epochs": None,
    }  # fmt: skip
    run_dir.mkdir(exist_ok=True)
    cfg = config(algorithm, **(base | keys))
    section = cfg.section
    team = build_team(cfg, reference=section.kl_coef > 0, device="cpu")
    _, sampler = build_sampler(cfg, team)
    rollout = Rollout(
        sampler,
        TextReward(value),
        transition,
        lambda key: float(uniforms(key, 1)[0]),
        seed=cfg.seed,
    )
    loop = Loop(
        section,
        tasks(count),
        lambda epoch, number: order((cfg.seed, "epoch", epoch), number),
        run_dir=run_dir,
        logger=Recorder(),
        evaluate=None,
        seed=cfg.seed,
    )
    sampling = Sampling(1.0, section.max_new_tokens)
    if algorithm == "magrpo":
        return MAGRPOTrainer(section, team, rollout, loop, sampling, tree_metrics)
    if algorithm == "ppo":
        return PPOTrainer(section, team, rollout, loop, sampling, tree_metrics)
    return SHPPOTrainer(section, team, sampler, rollout, loop, sampling, tree_metrics)


def share_of_letters(texts: tuple[str, ...]) -> float:
    """Share of the letters of all texts that are upper case; a reward that is easy to raise."""
    text = "".join(texts)
    return sum(letter.isupper() for letter in text) / max(1, len(text))
