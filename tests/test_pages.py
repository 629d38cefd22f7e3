"""A finished run stays finished, whatever becomes of its pages."""

from __future__ import annotations

import json
from pathlib import Path

from comlrl.loggers.report.write import write_report
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.trainers.launch.commands.report import main
from tests.support.made_runs import make_run
from tests.support.runs import Zygote, small


def test_a_report_that_fails_takes_no_finished_run_down(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    (folder / "report.html").mkdir(parents=True)
    run = zygote.finish("magrpo", small("magrpo", folder, max_steps=1))
    assert run.error.startswith("no report: IsADirectoryError: ")
    again = f"python -m comlrl.trainers.launch report '{folder}'"
    assert run.error.endswith(f"; try again: {again}")
    assert run.output.splitlines()[-1] == f"done: {folder}"
    assert (folder / "summary.json").exists()
    (folder / "report.html").rmdir()
    assert main([str(folder)]) == 0 and (folder / "report.html").is_file()


def test_what_a_program_says_holds_no_lone_surrogates() -> None:
    outcome = TestOutcome("s", False, "E\udfff", "x\ud800y", 1, "é", "\U0001f600")
    assert (outcome.error_type, outcome.message) == ("E?", "x?y")
    assert (outcome.expected, outcome.actual) == ("é", "\U0001f600")


def test_a_report_of_files_with_lone_surrogates(tmp_path: Path) -> None:
    """Runs from before they were cleaned have them."""
    folder = make_run(tmp_path / "run")
    file = folder / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["completions_N"] = ["x\ud800y"] * len(line["completions_N"])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder)
    assert (folder / "report.html").read_text(encoding="utf-8")
