"""What a run tells the world: console, files, W&B, TensorBoard and the report."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl.types import Logger, LogRecord, Tree
from loggers.console import ConsoleLogger
from loggers.environment import write_environment
from loggers.episodes import EpisodeLogger
from loggers.jsonl import JsonlLogger
from loggers.samples import SampleLogger

if TYPE_CHECKING:
    from comlrl.progress import Progress


class Loggers:
    """Many loggers behind the interface of one; each is told in the order given."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, record: LogRecord) -> None:
        for logger in self._loggers:
            logger.log(record)

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        for logger in self._loggers:
            logger.episodes(record, trees)

    def truncate_after(self, update: int, env_steps: int) -> None:
        """On resume: drop what was logged after the checkpoint of ``update``."""
        for logger in self._loggers:
            if isinstance(logger, (JsonlLogger, SampleLogger, EpisodeLogger)):
                logger.truncate_after(update)
            elif purge := getattr(logger, "purge_after", None):  # TensorBoard's, an extra
                purge(env_steps)

    def close(self) -> None:
        """Close every logger, in the reverse order, also where one of them fails."""
        with contextlib.ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)


def build(config: Any, run_dir: str | Path, progress: Progress, resume: bool = False) -> Loggers:
    """The loggers that a run's configuration asks for.

    ``config``: ``comlrl.config.Config``; ``progress``: what the console tells of the run beside
    its records. With ``resume``, files are continued: call ``truncate_after`` with the
    checkpoint's update.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_environment(run_dir / "environment.json")
    loggers: list[Logger] = [
        JsonlLogger(run_dir / "metrics.jsonl", resume=resume),
        SampleLogger(run_dir / "samples.jsonl", resume=resume),
    ]
    if config.output.verbose:
        loggers.append(EpisodeLogger(run_dir / "episodes.jsonl", resume=resume))
    if importlib.util.find_spec("tensorboard"):
        from loggers.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(run_dir / "tensorboard"))
    if config.wandb is not None:
        from loggers.weights_and_biases import connect

        if wandb_logger := connect(config, run_dir, resume):
            loggers.append(wandb_logger)
    # Last: what the others have to say at their start stands above the live table.
    loggers.append(ConsoleLogger(progress, title=run_dir.name))
    return Loggers(loggers)
