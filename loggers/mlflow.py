"""MLflow: the one module that imports mlflow.

A run never fails because of it: if the store cannot be reached, one notice appears, and nothing
more is logged there.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before the import, which reads them: nothing is sent about its use, and no call waits for minutes.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from comlrl.config.resolved import Config
from comlrl.errors import notice
from comlrl.loop.records import LogMark, LogRecord
from comlrl.types import RolloutResult

PARAMS_AT_ONCE = 100  # of a request
LONGEST_PARAM = 500  # characters; some stores refuse longer ones


class MlflowLogger:
    """Metrics as ``train/…`` and ``eval/…`` over environment steps; the configuration as params.
    MLflow refuses some characters: ``pass@1`` is ``pass_at_1`` there.

    A continued run keeps its id. What an earlier process logged after the checkpoint stays in its
    history.
    """

    def __init__(self, config: Config, run_dir: Path, resume: bool) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._run = ""  # no run: nothing is logged
        self._reaching(lambda: self._start(config, run_dir, resume))

    def _start(self, config: Config, run_dir: Path, resume: bool) -> None:
        section, id_file = config.mlflow, run_dir / "mlflow.json"
        assert section is not None
        uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            (run_dir / "mlflow").mkdir(exist_ok=True)
            uri = f"sqlite:///{(run_dir / 'mlflow' / 'mlflow.db').resolve()}"
        self._client = MlflowClient(uri)
        if resume and id_file.exists():
            run = json.loads(id_file.read_text(encoding="utf-8"))["id"]
            self._client.update_run(run, status="RUNNING")
        else:
            known = self._client.get_experiment_by_name(section.experiment)
            experiment = known and known.experiment_id
            run = self._client.create_run(
                experiment or self._client.create_experiment(section.experiment),
                run_name=section.name or run_dir.name,
            ).info.run_id
            params = [Param(allowed(k), str(v)[:LONGEST_PARAM]) for k, v in flat(config.to_dict())]
            for i in range(0, len(params), PARAMS_AT_ONCE):
                self._client.log_batch(run, params=params[i : i + PARAMS_AT_ONCE])
            id_file.write_text(json.dumps({"id": run}), encoding="utf-8")
        self._run = run

    def begin(self, mark: LogMark) -> None:
        """Nothing: MLflow drops no metrics."""

    def log(self, record: LogRecord) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(allowed(f"{record.phase}/{name}"), float(value), now, record.step)
            for name, value in record.metrics.items()
            if math.isfinite(value)
        ]
        if self._run:
            self._reaching(lambda: self._client.log_batch(self._run, metrics=metrics))

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        """Nothing: MLflow shows numbers."""

    def close(self) -> None:
        if self._run:
            self._reaching(lambda: self._client.set_terminated(self._run))

    def _reaching(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (MlflowException, OSError) as error:
            self._run = ""
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            notice(f"MLflow: nothing more is logged there ({reason})")


def allowed(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
