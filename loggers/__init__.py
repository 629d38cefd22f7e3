"""Loggers that show a run's records and episodes on the console, in files and on dashboards.

``report/`` writes the report page from these files, ``model_card.py`` the model card.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from comlrl.config.resolved import Config
from comlrl.files import replace
from comlrl.loggers.console import ConsoleLogger
from comlrl.loggers.environment import write_environment
from comlrl.loggers.episode_log import EpisodeLogger
from comlrl.loggers.jsonl import JsonlLogger
from comlrl.loggers.latent_log import LatentLogger
from comlrl.loggers.samples import SampleLogger
from comlrl.loggers.views import view_of
from comlrl.loop.records import Logger, LogMark, LogRecord
from comlrl.quoting import one_line
from comlrl.run_files import DOMAIN, ENVIRONMENT, EPISODES, LATENTS, METRICS, SAMPLES
from comlrl.types import Domain, RolloutResult

if TYPE_CHECKING:
    from comlrl.loop.progress import Progress


class Loggers(Logger):
    """A logger that forwards every call to several loggers, in order."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def begin(self, mark: LogMark) -> None:
        for logger in self._loggers:
            logger.begin(mark)

    def log(self, record: LogRecord) -> None:
        for logger in self._loggers:
            logger.log(record)

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        for logger in self._loggers:
            logger.episodes(record, trees)

    def close(self) -> None:
        """Close every logger in reverse order, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)


def build(
    config: Config,
    domain: Domain,
    roles: Sequence[str],
    run_dir: str | Path,
    progress: Progress,
    resume: bool = False,
) -> Loggers:
    """Return the loggers that a run's configuration enables.

    ``domain``: the team's domain, which describes its scores; ``roles``: the agents' names, which
    a program may choose; ``progress``: shown on the console beside the records. ``resume``:
    continue a run of W&B or Trackio. No log in ``run_dir`` changes before the loggers' ``begin``.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_environment(run_dir / ENVIRONMENT)
    # The maximum reward may differ from the domain's.
    pays_otherwise = len(roles) == 1 and bool(config.reward.arguments)
    is_program = config.program.replaces_turns
    own_reward = config.reward.target is not None or is_program or pays_otherwise
    write_domain(run_dir / DOMAIN, config.domain, domain, roles, own_reward)
    loggers: list[Logger] = [
        JsonlLogger(run_dir / METRICS),
        SampleLogger(run_dir / SAMPLES, domain),
        LatentLogger(run_dir / LATENTS, domain),
    ]
    if config.output.verbose:
        loggers.append(EpisodeLogger(run_dir / EPISODES, domain))
    if importlib.util.find_spec("tensorboard"):
        from comlrl.loggers.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(run_dir / "tensorboard"))
    if config.wandb is not None:
        from comlrl.loggers.weights_and_biases import connect

        if wandb_logger := connect(config.wandb, config.to_dict(), domain, run_dir, resume):
            loggers.append(wandb_logger)
    if config.trackio is not None:
        from comlrl.loggers.trackio import TrackioLogger

        loggers.append(TrackioLogger(config.trackio, config.to_dict(), run_dir, resume))
    rewards = [
        (f"{one_line(role)} reward", f"agent_{i}/reward_mean", "{:.2f}")
        for i, role in enumerate(roles)
    ]
    columns = (*rewards, *view_of(config.domain).console)
    # Last, so that messages of the others at their start appear above the live table.
    loggers.append(ConsoleLogger(progress, title=run_dir.name, columns=columns))
    return Loggers(loggers)


def write_domain(
    path: Path, name: str, domain: Domain, roles: Sequence[str], own_reward: bool = False
) -> None:
    """Write ``domain.json``, from which a report describes the domain without importing it."""
    greatest = None if own_reward else domain.greatest_reward(len(roles))
    facts = {"domain": name, "roles": list(roles), "greatest_reward": greatest}
    replace(path, json.dumps(facts, indent=2) + "\n")
