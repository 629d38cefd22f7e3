"""``environment.json``: the machine and software of a run, for the report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from comlrl.files import replace

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy")


def write_environment(path: str | Path) -> None:
    """Write the start time, command, machine, packages and commit of this process."""
    script = Path(sys.argv[0]).name
    facts = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([script.replace("__main__.py", "comlrl"), *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": _threads(),
        "gpu": _gpu(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "commit": _commit(),
    }
    available = {key: value for key, value in facts.items() if value is not None}
    replace(path, json.dumps(available, indent=2) + "\n")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(absent)"


def _threads() -> int | None:
    """Return the number of threads that torch uses, if the run has loaded torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()


def _gpu() -> str | None:
    """Return the names of the accelerators, if the run has loaded torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names)


def _commit() -> str | None:
    """Return the repository's commit, with ``+`` if tracked files differ; None without git."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
