"""Trackio logging, which writes files and needs no account. No other module imports trackio."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl.config.sections import TrackioConfig
from comlrl.errors import notice
from comlrl.files import read_entry, replace
from comlrl.loop.records import Logger, LogRecord


class TrackioLogger(Logger):
    """Logger of metrics as ``train/…`` and ``eval/…`` over environment steps.

    A continued run keeps its name, by which Trackio identifies it. Records logged after the
    checkpoint by an earlier process remain in its history.
    """

    def __init__(
        self, section: TrackioConfig, settings: Mapping[str, Any], run_dir: Path, resume: bool
    ) -> None:
        """Begin or continue a run. ``settings``: the run's settings, which Trackio shows."""
        name_file = run_dir / "trackio.json"
        if section.dir:
            os.environ["TRACKIO_DIR"] = section.dir  # read by the import
        import trackio

        self._trackio = trackio
        name = read_entry(name_file, "name") if resume else None
        if name is None:  # the suffix keeps names in a project distinct
            name = section.name or f"{run_dir.name}-{secrets.token_hex(3)}"
            replace(name_file, json.dumps({"name": name}))
        with contextlib.redirect_stdout(io.StringIO()):  # replaced by the one-line notice below
            self._run = trackio.init(
                section.project,
                name=name,
                config=dict(settings),
                resume="allow" if resume else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        show = shlex.join(["trackio", "show", "--project", section.project])
        if section.dir:
            show = f"TRACKIO_DIR={shlex.quote(section.dir)} {show}"
        notice(f"Trackio: run {name}; `{show}` shows it")

    def log(self, record: LogRecord) -> None:
        metrics = {
            f"{record.phase}/{name}": float(value)
            for name, value in record.metrics.items()
            if math.isfinite(value)
        }
        self._run.log(metrics, step=record.step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
