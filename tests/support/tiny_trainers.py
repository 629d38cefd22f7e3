"""Trainers on tiny random models, with a reward that is a function of the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comlrl.credit.decisions import decisions_of
from comlrl.loggers.latent_log import LatentLogger
from comlrl.loop.records import LogMark, LogRecord
from comlrl.loop.steps import Rolled
from comlrl.models.pretrained import build_team
from comlrl.processes.distributed import Deal
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.grow import Rollout
from comlrl.trainers.launch.wiring.assembly import build_critic_team, build_sampler
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.trainers.magrpo import MAGRPOTrainer
from comlrl.trainers.ppo import PPOTrainer
from comlrl.trainers.shppo import SHPPOTrainer
from comlrl.types import Attempt, JointAction, Reward, Score, Task, Tree
from comlrl.update.minibatches import Span
from tests.support import loops
from tests.support.fakes import PROMPTS, code_task
from tests.support.tiny_models import config, folder

Value = Callable[[tuple[str, ...]], float | tuple[float, ...]]


class TextReward(Reward):
    """``value`` of the agents' texts, or each agent's own; counts what it scored."""

    def __init__(self, value: Value) -> None:
        self.value, self.scored = value, 0

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        self.scored += len(actions)
        return [self._score(self.value(action.completions_N)) for action in actions]

    def _score(self, value: float | tuple[float, ...]) -> Score:
        if isinstance(value, tuple):
            return Score(sum(value) / len(value), by_agent=value)
        return Score(float(value))

    def close(self) -> None:
        return


class Recorder:
    """Keeps the records; what else is logged is for ``latents``."""

    def __init__(self, latents: LatentLogger | None = None) -> None:
        self.records: list[LogRecord] = []
        self.latents = latents

    def begin(self, mark: LogMark) -> None:
        if self.latents is not None:
            self.latents.begin(mark)

    def log(self, record: LogRecord) -> None:
        self.records.append(record)

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        if self.latents is not None:
            self.latents.episodes(record, trees)

    def close(self) -> None:
        return

    def metrics(self) -> list[dict[str, float]]:
        return [dict(record.metrics) for record in self.records]


def transition(attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    return [("again.",) * len(attempt.completions_N) for attempt in attempts]


def tasks(count: int) -> list[Task]:
    source = "def f{0}(x):\n    '''Adds {0}.'''\n"
    test = "def check(f): ..."
    return [code_task(f"t{i}", source.format(i), test, f"f{i}") for i in range(count)]


def build(
    algorithm: str,
    run_dir: Path,
    value: Value,
    *,
    count: int = 2,
    kind: str = "qwen2",
    own_rewards: bool = False,
    **keys: Any,
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
    rollout = Rollout(sampler, TextReward(value), transition, PROMPTS, seed=cfg.seed,
                      own_rewards=own_rewards)  # fmt: skip
    logger = Recorder(LatentLogger(run_dir / "latents.jsonl", CODE))
    loop = loops.loop(section, tasks(count), run_dir, logger, seed=cfg.seed)
    sampled = sampling(cfg, CODE.roles(cfg.section.num_agents)).with_sets(
        cfg.generation.max_support
    )
    if algorithm in ("grpo", "magrpo"):
        return MAGRPOTrainer(section, team, rollout, loop, sampled)
    if algorithm == "ppo":
        critics = build_critic_team(cfg, section, team)
        return PPOTrainer(section, team, rollout, loop, sampled, critic_team=critics)
    return SHPPOTrainer(section, team, sampler.policy, rollout, loop, sampled)


def grown(trainer: Any, phase: str = "train") -> list[Tree]:
    """The trees of its first step."""
    shape, sampling = trainer.section.shape, trainer.sampling
    return trainer.rollout.grow(trainer.loop.tasks, shape, sampling, (phase, 1))


def rolled(trees: Sequence[Any], discount: float = 1.0) -> Rolled:
    """A first step that has these rollouts."""
    decisions = decisions_of(trees, discount)
    return Rolled(
        decisions=decisions, index=1, deal=Deal((0,) * len(trees)), span=Span(0.0, 1.0),
        scored=len(trees),
    )  # fmt: skip


def own_shares(texts: tuple[str, ...]) -> tuple[float, ...]:
    """Each agent's own reward: its share of upper-case letters, less half of the other agents'."""
    shares = [share_of_letters((text,)) for text in texts]
    return tuple(1.5 * own - 0.5 * sum(shares) for own in shares)


def share_of_letters(texts: tuple[str, ...]) -> float:
    """Share of the letters of all texts that are upper case; a reward that is easy to raise."""
    text = "".join(texts)
    return sum(letter.isupper() for letter in text) / max(1, len(text))
