"""``comlrl report``: writes a page about one run, or a comparison of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from comlrl import errors
from comlrl.files import tolerant_terminal
from comlrl.loggers.report.run_data import ReportError, read_run
from comlrl.loggers.report.write import write_report
from comlrl.run_files import REPORT
from comlrl.trainers.launch.commands.command_line import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        options = parse_arguments(argv)
        if len(options.runs) == 1 and options.labels:
            raise ReportError("--labels: names the settings of a comparison; name several runs")
        if len(options.runs) == 1:
            write_report(options.runs[0])
            written = [options.runs[0] / REPORT, options.runs[0] / "curves.png"]
        else:
            from comlrl.loggers.report.comparison import write_comparison

            runs = [read_run(path) for path in options.runs]
            written = write_comparison(runs, options.out, options.labels)
        if options.figures:
            written += _figures(options.runs, options.labels, options.figures)
    except Exception as error:
        return errors.report(error)
    print("\n".join(map(str, written)))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("report", description="Write a page about a run, or a comparison of several.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--out", type=Path, default=Path("comparison"), help="folder for the page of a comparison")
    add("--labels", nargs="+", metavar="NAME", help="names of the settings compared, in order")
    add(
        "--figures",
        type=Path,
        metavar="DIR",
        help="also write each figure by itself, as PDF and PNG",
    )
    return parser.parse_args(argv)


def _figures(paths: Sequence[Path], labels: Sequence[str] | None, folder: Path) -> list[Path]:
    """Write figures for papers: of a single run, or of the compared settings."""
    from comlrl.loggers.report.charts import figures
    from comlrl.loggers.report.comparison import charts_of, grouped
    from comlrl.loggers.report.pictures import write_charts

    runs = [read_run(path) for path in paths]
    charts = figures(runs[0]) if len(runs) == 1 else charts_of(grouped(runs, labels))
    return [
        file
        for name, chart in charts.items()
        for file in write_charts([chart], folder / f"{name}.pdf", folder / f"{name}.png")
    ]
