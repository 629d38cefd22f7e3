"""Reports of runs whose files are not as they were written."""

from __future__ import annotations

import json

import pytest

from comlrl.loggers.report.run_data import ReportError, read_run
from comlrl.loggers.report.write import write_report
from tests.support.made_runs import make_run


def _without_drawings(monkeypatch):
    """Keep reports quick: these tests are about what is read."""
    monkeypatch.setattr("comlrl.loggers.report.pictures.write_charts", lambda *_: None)
    monkeypatch.setattr("comlrl.loggers.report.pictures.svg", lambda *_: "")


FILES = ("samples.jsonl", "metrics.jsonl", "summary.json", "environment.json", "config.yaml")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content",
    ["[]\n", "3\n", "null\n", "{}\n", '{"phase": 3}\n', "{broken\n", '"x"\n', "[[[[", "\x00\n"],
)
def test_a_damaged_file_is_one_line_or_left_out(name, content, tmp_path):
    run = make_run(tmp_path / "run")
    (run / name).write_text(content)
    try:
        write_report(run)
    except ReportError as error:
        assert str(run) in str(error) and "\n" not in str(error)


def test_fields_of_other_types_are_one_line(tmp_path, monkeypatch):
    _without_drawings(monkeypatch)
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for key in lines[-1]:
        for value in (None, 3, "x", [None]):
            changed = [*lines[:-1], lines[-1] | {key: value}]
            text = "".join(json.dumps(line) + "\n" for line in changed)
            (run / "samples.jsonl").write_text(text)
            try:
                write_report(run)
            except ReportError as error:
                assert "\n" not in str(error)


DAMAGED = (
    b"{broken\n", b"\xff\xfe\n", b"3\n", b"null\n", b'{"phase": "eval"}\n', b"[" * 5000 + b"\n",
    b'{"phase": "eval", "update": "x"}\n', b"<<<<<<< ours\n", b"\x00\n", b'{"torn": ',
)  # fmt: skip


@pytest.mark.parametrize("bad", DAMAGED)
def test_a_damaged_sample_costs_its_line_alone(bad, tmp_path, capsys, monkeypatch):
    _without_drawings(monkeypatch)
    run = make_run(tmp_path / "run")
    before = read_run(run).samples
    assert len(before) > 2 and capsys.readouterr().err == ""
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (run / "samples.jsonl").write_bytes(b"".join([lines[0], bad.rstrip() + b"\n", *lines[1:]]))
    assert read_run(run).samples == before
    assert "samples.jsonl" in capsys.readouterr().err
    write_report(run)


def test_lone_surrogates_anywhere_are_shown(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("samples.jsonl", "metrics.jsonl", "summary.json"):
        text = (run / name).read_text()
        changed = text.replace("reward_mean", "reward_mean", 1).replace("kl", "k\\ud800l")
        (run / name).write_text(
            changed.replace('"metrics": {', '"metrics": {"\\udfff/\\ud800": 1.0, ')
        )
    write_report(run)
    assert (run / "report.html").stat().st_size > 1000
