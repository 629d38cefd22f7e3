"""A process that has imported everything and forks real runs: a start costs no imports.

``python tests/support/zygote.py``, then one JSON request a line on stdin, one answer a line on
stdout:
``{"run": [algorithm, argv], "log": file, "environment": {…}}`` or
``{"call": [file, function, arguments], …}`` → ``{"pid": n}``;
``{"wait": pid}`` → ``{"code": exit code, or minus the signal}``; ``{"poll": pid}`` → likewise, or
null while it runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = (
    "datasets", "transformers.models.qwen2.modeling_qwen2", "trl.trainer.reward_trainer",
    "comlrl.loggers.model_card", "comlrl.loggers.report.pictures", "comlrl.loggers.report.write",
    "comlrl.loggers.tensorboard", "comlrl.rewards.code.reward",
    "comlrl.rewards.writing.writing_domain", "comlrl.trainers.launch.commands.evaluate",
    "comlrl.trainers.launch.commands.train", "comlrl.trainers.launch.wiring.assembly",
    "comlrl.trainers.madpo", "comlrl.trainers.magrpo",
    "comlrl.trainers.marlhf", "comlrl.trainers.ppo", "comlrl.trainers.shppo",
)  # fmt: skip
LIVING: set[int] = set()


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, loaded)  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


def run(algorithm: str, argv: list[str]) -> int:
    from comlrl.trainers.launch.commands.train import main

    return main(algorithm, module(ROOT / f"train_{algorithm}.py").build, argv)


def preload() -> None:
    """Import whatever a run imports, so that its copies need not; and draw no charts.

    The charts of a report take as long as the rest of a small run. Tests of the report draw them,
    and so do the runs of ``test_train_magrpo.py``, which are started from the command line.
    """
    for name in MODULES:
        importlib.import_module(name)
    from comlrl import files
    from comlrl.loggers.report import pictures

    def write_empty(charts: object, *paths: Path, **_: object) -> list[Path]:
        for path in paths:
            files.replace(path, b"")
        return list(paths)

    pictures.svg = lambda *_: ""
    pictures.write_charts = write_empty


def fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        LIVING.add(pid)
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(request.get("environment", {}))
        if "run" in request:
            sys.argv = [f"train_{request['run'][0]}.py", *request["run"][1]]
            code = run(*request["run"])
        else:
            file, function, arguments = request["call"]
            code = int(getattr(module(Path(file)), function)(*arguments) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "wait" in request or "poll" in request:
        options = 0 if "wait" in request else os.WNOHANG
        pid, status = os.waitpid(request.get("wait") or request["poll"], options)
        LIVING.discard(pid)
        return {"code": os.waitstatus_to_exitcode(status) if pid else None}
    return {"pid": fork(request)}


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of tests/support, whose names hide packages
    preload()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
    for left in LIVING:  # the tests have ended, or were ended
        os.killpg(left, signal.SIGKILL)
