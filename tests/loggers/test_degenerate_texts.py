"""Completions that no parser can take are logged and reported like any other."""

from __future__ import annotations

import json

import pytest

from comlrl.evaluation.metrics import tree_metrics
from comlrl.loggers.episode_log import EpisodeLogger
from comlrl.loggers.jsonl import JsonlLogger
from comlrl.loggers.report.write import write_report
from comlrl.loggers.samples import SampleLogger
from comlrl.loop.records import LogMark, LogRecord
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.domain import CODE
from comlrl.types import Score
from tests.support.made_runs import agent_turn, code_score, node, tree

HEAD = "def f(x):\n    return "
TEXTS = {
    "minus signs": HEAD + "-" * 6000 + "1",
    "calls": HEAD + "f" + "()" * 4000,
    "attributes": HEAD + "x" + ".a" * 6000,
    "sum": HEAD + "x" + "+1" * 6000,
    "open brackets": HEAD + "[" * 20_000,
    "nested blocks": "".join(" " * n + "if 1:\n" for n in range(300)) + " " * 300 + "pass\n",
    "surrogates and escapes": "\ud800\x1b[31m\x00" * 3000,
    "long line": "x" * 200_000,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.timeout(60)
def test_a_degenerate_completion_is_logged_and_reported(name, tmp_path):
    text = TEXTS[name]
    facts = RewardBreakdown(helpers=("aux",), defined=("aux",), program=text, syntax_error=None)
    score: Score = code_score(facts)
    grown = tree(node([score], agents=(agent_turn([text]), agent_turn([text]))))
    loggers = [
        JsonlLogger(tmp_path / "metrics.jsonl"),
        SampleLogger(tmp_path / "samples.jsonl", CODE),
        EpisodeLogger(tmp_path / "episodes.jsonl", CODE),
    ]
    metrics = tree_metrics([grown], CODE)
    for logger in loggers:
        logger.begin(LogMark())
        for phase in ("train", "eval"):
            record = LogRecord(step=1, update=1, epoch=1, phase=phase, metrics=metrics)
            logger.log(record)
            logger.episodes(record, [grown])
        logger.close()
    (tmp_path / "config.yaml").write_text(json.dumps({"domain": "code"}))
    write_report(tmp_path)
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
