"""``sweep.py`` and ``comlrl sweep``: W&B's sweep files, without an account.

The same command, given again, continues where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from comlrl.errors import UserError, print_error, report
from comlrl.files import tolerant_terminal
from comlrl.trainers.launch.commands.command_line import Parser, print_written
from comlrl.trainers.launch.commands.search import Point, Runner, Search, Sweep, read_sweep

DEFAULT_COUNT = 8  # points of a search that has no end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        arguments = parse_arguments(argv)
        sweep = read_sweep(arguments.file)
        if min(arguments.jobs, arguments.count or 1) < 1:
            raise UserError("--count, --jobs: give at least 1")
        folder = Path(arguments.dir or Path("outputs/sweeps") / Path(arguments.file).stem)
        search = Search(sweep, folder, arguments.seed)
    except UserError as error:
        return report(error)
    runner = Runner(search, folder, arguments.jobs, arguments.override)
    whole = sweep.grid_size if sweep.method == "grid" else DEFAULT_COUNT
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        runner.run(arguments.count or whole, lambda: write_results(search, folder))
    except KeyboardInterrupt:
        print("interrupted; the same command continues the sweep", file=sys.stderr)
        return 130
    write_results(search, folder)
    write_page(search, folder)
    names = ("results.md", "results.csv", "parallel_coordinates.png", "comparison.html")
    print_written(f"{folder}/{', '.join(name for name in names if (folder / name).exists())}")
    failed = [point for point in search.points.values() if point.state == "failed"]
    for point in failed:
        print(f"point {point.number} failed: {point.error}", file=sys.stderr)
    if len(failed) < len(search.points):
        return 0
    print_error(
        f"sweep file: '{arguments.file}': all {len(failed)} points failed; fix what they name, "
        f"and remove {folder} to run them again"
    )
    return 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("sweep", description="Run a sweep without an account.")
    add = parser.add_argument
    add("file", metavar="FILE", help="a sweep in W&B's form, or a shipped one by name")
    add("--count", type=int, metavar="N", help="points in all; default: the grid, or 8")
    add("--jobs", type=int, default=1, metavar="N", help="points that run at the same time")
    add("--dir", metavar="DIR", help="default: outputs/sweeps/NAME")
    add("--seed", type=int, default=0, metavar="N", help="of the search")
    add(
        "--override", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
        help="for every point, e.g. magrpo.max_steps=20",
    )  # fmt: skip
    return parser.parse_args(argv)


def write_results(search: Search, folder: Path) -> None:
    """Write the table as CSV and Markdown, best first, and the picture of all points."""
    from comlrl.loggers.report.parallel_coordinates import write_parallel_coordinates
    from comlrl.loggers.tables import table

    sweep, points = search.sweep, sorted(search.points.values(), key=_rank(search.sweep))
    names = [p.name for p in sweep.parameters]
    head = ["point", *names, sweep.metric, "state", "seconds", "error"]
    rows = [
        [p.number, *(p.values[n] for n in names), p.metric, p.state, p.seconds, p.error]
        for p in points
    ]
    rows = [["" if cell is None else cell for cell in row] for row in rows]
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    (folder / "results.md").write_text(table(head, rows), encoding="utf-8")
    done = [p for p in points if p.metric is not None]
    if done:
        write_parallel_coordinates(
            folder / "parallel_coordinates.png",
            names,
            [p.values for p in done],
            [float(p.metric) for p in done if p.metric is not None],
            sweep.metric,
            log=[p.name for p in sweep.parameters if p.log],
        )


def write_page(search: Search, folder: Path) -> None:
    """Write the points' curves on one page, best first."""
    from comlrl.loggers.report.comparison import write_comparison
    from comlrl.loggers.report.run_data import read_run

    points = sorted(search.points.values(), key=_rank(search.sweep))
    done = [folder / f"point_{p.number:03d}" for p in points if p.state == "done"]
    if done:
        write_comparison([read_run(path) for path in done], folder)


def _rank(sweep: Sweep) -> Callable[[Point], tuple[bool, float, int]]:
    sign = -1 if sweep.maximize else 1

    def key(point: Point) -> tuple[bool, float, int]:
        return point.metric is None, sign * (point.metric or 0.0), point.number

    return key
