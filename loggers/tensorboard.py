"""TensorBoard event files in the run's ``tensorboard/``, enabled if TensorBoard is installed."""

from __future__ import annotations

import math
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from comlrl.loop.records import Logger, LogMark, LogRecord


class TensorBoardLogger(Logger):
    """Logger of metrics as scalars ``train/…`` and ``eval/…`` over environment steps."""

    def __init__(self, folder: str | Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, record: LogRecord) -> None:
        values = [
            Summary.Value(tag=f"{record.phase}/{name}", simple_value=float(value))
            for name, value in record.metrics.items()
            if math.isfinite(value)
        ]
        event = Event(wall_time=time.time(), step=record.step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def begin(self, mark: LogMark) -> None:
        """Make TensorBoard discard later steps in older files."""
        start, step = SessionLog(status=SessionLog.START), mark.env_steps + 1
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        self._writer.close()
