"""``python -m loggers.report RUN [RUN …]``: a run, or several compared, as one page to look at."""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: str | Path) -> None:
    """Write ``report.html`` and ``curves.png`` from what lies in the run directory."""
