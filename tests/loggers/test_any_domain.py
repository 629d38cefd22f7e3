"""A run of a domain that nobody here has heard of: what is shown of it, and what is left out."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from comlrl.evaluation.estimates import estimates, task_rows
from comlrl.evaluation.metrics import measures, tree_metrics
from comlrl.loggers.console import ConsoleLogger
from comlrl.loggers.model_card import write_model_card
from comlrl.loggers.report.charts import figures, sections
from comlrl.loggers.report.comparison import grouped, render
from comlrl.loggers.report.heat_map import write_heat_map
from comlrl.loggers.report.pictures import write_charts
from comlrl.loggers.report.run_data import read_run
from comlrl.loggers.tables import cross_play_table, evaluation_table, sides
from comlrl.loop.progress import Progress
from comlrl.loop.records import LogRecord
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.domain import CODE
from comlrl.types import JointAction
from tests.support.haggling import HAGGLING, ROLES, haggled, make_haggling_run
from tests.support.html_page import Page
from tests.support.made_runs import TASK, code_score, logged, node, tree
from tests.support.processes import python

NOTHING_OF_CODE = re.compile(r"\b(aux|main of|entry.point|tests?|programs?|compiles|pass\w*)\b")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """With its report, made by a process that has no module `haggling`."""
    folder = make_haggling_run(tmp_path_factory.mktemp("runs") / "haggling_1")
    (folder / "environment.json").unlink()  # it has this test's command
    python("-m", "comlrl.trainers.launch", "report", folder)
    return folder


def test_what_no_joint_action_tells_is_in_no_record(run_dir):
    names = read_run(run_dir).all_names
    assert {"price", "turn_1/price", "reward/gain", "convention/first buyer/polite"} <= {*names}
    assert not [name for name in names if "pass" in name]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert not any("passed" in sample for sample in samples)
    assert samples[0]["roles_N"] == list(ROLES) and "agreed_price" in samples[0]["facts"]


def test_the_report_speaks_the_domains_words(run_dir):
    html = (run_dir / "report.html").read_text()
    page = Page(html)
    assert page.open == [] and page.fetched == []
    text = "".join(page.text)
    for words in (
        "Convention of second buyer", "agreed rate", "words: longest", "price",
        "Parts of the reward", "gain", "seller", "agreed price", "Sell <thing 0>", "3 agents",
    ):  # fmt: skip
        assert words in text, words
    assert re.search(r"\d\.\d\d of 1<", html)  # of the greatest reward
    assert NOTHING_OF_CODE.search(_visible_text(html)) is None
    assert "not passed" not in html  # nothing to choose by
    run = read_run(run_dir)
    assert all(section.charts for section in sections(run))
    titles = [chart.title for section in sections(run) for chart in section.charts]
    assert titles.count("loss") == 1 and len(titles) == len(set(titles))


def _visible_text(html: str) -> str:
    """A page without its script, style and tags."""
    text = re.sub("<script.*?</script>|<style.*?</style>", "", html, flags=re.S)
    return re.sub("<[^>]*>", " ", text)


def test_an_empty_fact_is_no_row(run_dir):
    html = (run_dir / "report.html").read_text()
    assert "<th>agreed price</th>" in html and "no &lt;deal&gt;" in html
    assert "<td></td>" not in html and "<td>null</td>" not in html


def test_measures_are_what_the_domain_measures(run_dir):
    """Of all that trees can say: parts, passing, the task's own reward beside a model's score."""
    assert {*measures(read_run(run_dir).all_names)} == {"agreed_rate", "words/longest", "price"}
    breakdown = RewardBreakdown(helpers=("aux",), needed=())
    score = replace(code_score(breakdown), task_reward=1.0)
    metrics = tree_metrics([tree(node([score, score]))], CODE)
    action = JointAction(TASK, ("", ""))
    assert {*measures(metrics)} == {*CODE.measures(action, score)}
    assert {"task_reward_mean", "pass_rate", "reward/syntax"} <= {*metrics}


def test_evaluation_has_intervals_of_its_measures_and_no_pass():
    trees = [haggled(i, 0.6, random.Random(i), 1) for i in range(8)]
    metrics, intervals = estimates(trees, HAGGLING, (1,))
    low, high = intervals["price"]
    assert low <= metrics["price"] <= high  # of the tasks where there is one
    assert 0 < metrics["agreed_rate"] < 1 and "words/longest" in intervals
    rows = task_rows(trees, (1,))
    assert not [name for name in (*metrics, *rows[0]) if "pass" in name]
    table = evaluation_table(_result({**metrics, "agent_1/reward_mean": 0.5}, intervals))
    assert f"| agent_1/reward_mean ({ROLES[1]})" in table
    assert "| price" in table and "| reward/gain" in table and "| convention_match_rate" in table
    assert NOTHING_OF_CODE.search(table) is None


def _result(metrics, intervals=None, **more):
    return {
        "settings": {"domain": "haggling:HAGGLING"}, "metrics": metrics, "intervals": intervals,
        "budget": {}, "num_turns": 1, "turn_order": "simultaneous", "baseline": None,
        "checkpoint": "run", "model": "m", "tasks": 8, "dataset": "d", "split": "eval",
        "samples": 1, "num_agents": 3, "seed": 1,
        "roles": list(ROLES), "sampling": {"temperature": 1.0, "top_p": None, "top_k": None},
    } | more  # fmt: skip


def test_cross_play_is_of_the_last_agent_with_the_others(tmp_path):
    matrix = [[1.0, 0.5], [0.25, 1.0]]
    means = {"reward_mean": {"self_play": 1.0, "cross_play": 0.375, "gap": 0.625}}
    result = _result({}, runs=["a", "b"], matrices={"reward_mean": matrix}, summary=means)
    text = cross_play_table(result)
    assert "| first buyer, second buyer of 1 |" in text and "| seller of 2 |" in text
    write_heat_map(tmp_path / "a.png", ["a", "b"], ["a", "b"], matrix, "Mean", sides=sides(ROLES))
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_console_has_no_column_of_what_there_is_not():
    out = io.StringIO()
    logger = ConsoleLogger(Progress(), console=Console(file=out))
    logger.log(
        LogRecord(
            step=8,
            update=1,
            epoch=0,
            phase="train",
            metrics={"reward_mean": -0.5, "test_fraction": 1.0},
        )
    )
    assert out.getvalue() == "train 1  env steps 8  epoch 0  reward -0.50\n"


def test_the_card_names_roles_and_measures(run_dir):
    for agent in range(3):
        (run_dir / "final_model" / f"agent_{agent}").mkdir(parents=True, exist_ok=True)
    text = write_model_card(run_dir).read_text()
    assert "| second buyer |" in text and "| price " in text
    assert NOTHING_OF_CODE.search(text) is None and "sandbox" not in text and "--k" not in text
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.S)
    compile(snippet, "snippet", "exec")  # roles with spaces are no names in Python
    assert "agent_2 = AutoModelForCausalLM" in snippet


def test_runs_of_another_work_are_never_merged(run_dir, tmp_path):
    first = read_run(run_dir)
    made = (
        make_haggling_run(tmp_path / f"{name}_{seed}", seed=seed, updates=5, **changes)
        for seed, (name, changes) in enumerate(
            {
                "same": {},
                "domain": {"domain": "haggling:OTHER"},
                "reward": {"reward": {"target": "haggling:Greed"}},
                "prompts": {"prompts": {"seller": "Sell {thing}."}},
                "mode": {"external": {"mode": "haggling:Mode"}},
            }.items(),
            start=2,
        )
    )
    runs = [first, *map(read_run, made)]
    groups = grouped(runs)
    assert [len(group.runs) for group in groups] == [2, 1, 1, 1, 1]
    (runs[1].path / "modules.json").write_text(json.dumps({"haggling.py": "another"}))
    assert len(grouped([first, read_run(runs[1].path)])) == 2  # the same names, changed inside
    html = render(groups)
    assert "do not share one reward" in html and "price, held-out tasks" in html
    assert "<th>passed</th>" not in html
    together = render(grouped(runs[:2]))
    assert "do not share one reward" not in together
    assert NOTHING_OF_CODE.search(_visible_text(together)) is None


def test_curves_have_no_empty_panel(run_dir, tmp_path, monkeypatch):
    drawn: list[list[str]] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda f, *a, **k: (drawn.append([x.get_title() for x in f.axes]), save(f, *a, **k)),
    )
    for run in (read_run(run_dir), read_run(logged(tmp_path / "b", reward_mean=[0.0, 1.0]))):
        write_charts(list(figures(run).values()), tmp_path / "a.png")
    assert drawn == [
        ["Mean reward", "Parts of the reward, training", "Shares of joint actions"],
        ["Mean reward"],
    ]
