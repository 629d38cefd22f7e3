"""Metrics of hand-made trees, the arithmetic in comments; every name is in docs/metrics.md."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from comlrl.builtin import conventions
from comlrl.types import RewardBreakdown, Score, Task, TestOutcome, Tree
from loggers.metrics import task_reward, tree_metrics
from loggers.run_data import Run, read_run
from tests.run_maker import TASK, agent_turn, make_run, node, tree

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_mean_and_spread_of_one_turn():
    other = replace(TASK, task_id="another")
    metrics = tree_metrics([tree(node([1.0, 3.0])), tree(node([2.0, 2.0]), task=other)])
    assert metrics["reward_mean"] == metrics["turn_1/reward_mean"] == 2.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5))  # squares 1, 1, 0, 0
    assert metrics["processed_reward_mean"] == 1.0  # processed rewards are one lower
    assert (metrics["tasks"], metrics["joint_actions"], metrics["turns_mean"]) == (2, 4, 1)


def test_a_task_that_is_answered_twice_is_one_task():
    metrics = tree_metrics([tree(node([1.0])), tree(node([2.0]))])
    assert (metrics["tasks"], metrics["joint_actions"], metrics["reward_mean"]) == (1, 2, 1.5)


def test_tasks_count_alike_whatever_their_number_of_joint_actions():
    metrics = tree_metrics([tree(node([4.0])), tree(node([0.0, 0.0, 0.0]))])
    assert metrics["reward_mean"] == pytest.approx(2.0)  # (4 + 0) / 2, not 4 / 4


def test_last_turn_reached_weighs_paths_and_not_nodes():
    grown = tree(
        node([0.0, 0.0]),
        node([4.0, 4.0], turn=2, parent=0, parent_action=0, terminated=True),
        node([0.0, 0.0], turn=2, parent=0, parent_action=1),
        node([1.0, 1.0], turn=3, parent=2, parent_action=0),
        node([1.0, 3.0], turn=3, parent=2, parent_action=1),
    )
    metrics = tree_metrics([grown])
    # Half of the paths end at turn 2 with 4; the others at turn 3 with 1, 1, 1 and 3, mean 1.5.
    assert metrics["reward_mean"] == 0.5 * 4.0 + 0.5 * 1.5
    assert task_reward(grown) == metrics["reward_mean"]
    assert metrics["turns_mean"] == 0.5 * 2 + 0.5 * 3
    assert metrics["turn_2/reward_mean"] == 2.0
    assert metrics["turn_3/reward_mean"] == 1.5
    assert metrics["turn_2/termination_share"] == 0.5
    assert metrics["termination_share"] == 0.5  # of the paths


def test_handoff_chain_ends_at_its_last_node():
    chain = tree(node([0.0, 1.0, 2.0]), node([3.0, 4.0], turn=2, parent=0, parent_action=2))
    assert tree_metrics([chain])["reward_mean"] == 3.5  # unpicked siblings of turn 1 do not count


def _outcome(passed: bool, timed_out: bool = False) -> TestOutcome:
    return TestOutcome("assert candidate(1)", passed, timed_out=timed_out)


def test_breakdowns():
    good = RewardBreakdown(
        0.4, 0.6, 0.5, 1.0, 0.5, 1.0, helpers=("aux",), defined=("aux", "f"), called=("aux",),
        outcomes=(_outcome(True), _outcome(True)), seconds=2.0,
    )  # fmt: skip
    half = RewardBreakdown(
        0.4, 0.6, 0.5, 0.5, 0.5, 0.0, -0.5, helpers=("aux",), defined=("aux", "f"),
        called=("aux",), ignored=("aux",), wrapper=True,
        outcomes=(_outcome(True), _outcome(False, timed_out=True)), seconds=4.0,
    )  # fmt: skip
    broken = RewardBreakdown(0.4, 0.6, helpers=("aux",), defined=("aux", "f"))
    empty = RewardBreakdown(helpers=("aux",))
    scores = [Score(b.total, b) for b in (good, half, broken, empty)]
    metrics = tree_metrics([tree(node(scores))])
    assert metrics["reward_mean"] == pytest.approx((4.0 + 2.0 + 1.0 + 0.0) / 4)
    expected = {
        "reward/aux_defined": 0.3, "reward/main_defined": 0.45, "reward/syntax": 0.25,
        "reward/tests": 1.5 / 4, "reward/uses_aux": 0.25, "reward/not_wrapper": 0.25,
        "reward/aux_ignored": -0.125, "pass_rate": 0.25, "test_fraction": 1.5 / 4,
        "syntax_rate": 0.5, "main_defined_rate": 0.75, "aux_defined_rate": 0.75,
        "aux_called_rate": 0.5, "aux_ignored_rate": 0.25, "wrapper_rate": 0.25,
        "timeout_rate": 0.25, "reward_seconds_mean": 1.5,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "task_reward_mean" not in metrics
    parts = sum(value for name, value in metrics.items() if name.startswith("reward/"))
    assert parts == pytest.approx(metrics["reward_mean"])


def test_helpers_are_counted_singly():
    team = RewardBreakdown(
        helpers=("aux", "aux2"), defined=("aux", "f"), called=("aux", "aux2"), ignored=("aux2",)
    )
    metrics = tree_metrics([tree(node([Score(0.0, team)]))])
    assert metrics["aux_defined_rate"] == 0.5
    assert (metrics["aux_called_rate"], metrics["aux_ignored_rate"]) == (1.0, 0.5)


def test_a_lone_agent_has_no_aux_metrics():
    alone = RewardBreakdown(main_defined=0.6, defined=("f",))
    metrics = tree_metrics([tree(node([Score(0.6, alone)], agents=[agent_turn(["x"])]))])
    assert not [name for name in metrics if "aux_" in name and not name.startswith("reward/")
                and not name.startswith("turn_1/reward/")]  # fmt: skip


def test_model_scores_are_told_from_task_rewards():
    breakdown = RewardBreakdown(main_defined=0.6)
    metrics = tree_metrics([tree(node([Score(-1.5, breakdown)]))])
    assert (metrics["reward_mean"], metrics["task_reward_mean"]) == (-1.5, 0.6)


def test_completions():
    aux = agent_turn(["ab", "ab", "abcd", "ab"], finished=False)  # 2, 2, 4, 2 tokens; two repeats
    main = agent_turn(["a", "b", "c", "d"])
    metrics = tree_metrics([tree(node([0.0] * 4, agents=[aux, main]))])
    assert metrics["agent_0/completion_length_mean"] == 2.5
    assert metrics["completion_length_mean"] == (2.5 + 1.0) / 2
    assert metrics["agent_0/duplicate_share"] == 0.5
    assert metrics["duplicate_share"] == 0.25
    assert (metrics["agent_0/truncation_share"], metrics["agent_1/truncation_share"]) == (1, 0)


def test_conventions():
    task = Task("c", "", "", "f", {"stages": "filter_map_reduce"})
    aux = agent_turn([
        "def aux(xs):\n    return [x for x in xs if x > 3]\n",
        "def aux(x):\n    return x > 3\n",
        "no code",
    ])  # fmt: skip
    main = agent_turn(["def f(xs):\n    return sum([x * 2 for x in aux(xs)])\n"] * 3)
    metrics = tree_metrics([tree(node([0.0] * 3, agents=[aux, main]), task=task)], conventions)
    told = {name: value for name, value in metrics.items() if name.startswith("convention")}
    assert told == pytest.approx({
        "convention/aux/filter": 1 / 3, "convention/aux/test": 1 / 3, "convention/aux/none": 1 / 3,
        "convention/main/filter": 1.0, "convention_match_rate": 1 / 3,
    })  # fmt: skip


def test_no_trees_no_metrics():
    assert tree_metrics([]) == {}


def documented() -> list[re.Pattern[str]]:
    """The names of docs/metrics.md as patterns, with the prefixes that their rows allow."""
    patterns = []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| `([^`]+)` \|([^|]*)\|", line)
        if not found or "." in found[1]:
            continue
        name = re.escape(found[1]).replace("ROLE/KIND", r"(aux\d*|main)/\w+").replace("@K", r"@\d+")
        turn = r"(turn_\d+/)?" if "turn" in found[2] else ""
        agent = r"(agent_\d+/)?" if "agent" in found[2] else ""
        patterns.append(re.compile(turn + agent + name))
    return patterns


def test_every_name_is_documented(tmp_path):
    patterns = documented()
    assert len(patterns) > 50
    run = read_run(make_run(tmp_path / "run", updates=5, turns=2))
    names = {*run.names("train"), *run.names("eval")}
    assert not [name for name in names if not any(p.fullmatch(name) for p in patterns)]


def test_names_that_depend_on_the_clock_say_so():
    fixed = tree_metrics([_timed(1.0)])
    later = tree_metrics([_timed(9.0)])
    differing = [name for name in fixed if fixed[name] != later[name]]
    assert differing and all(re.search("time|second|memory", name) for name in differing)


def _timed(seconds: float) -> Tree:
    breakdown = RewardBreakdown(outcomes=(_outcome(True),), seconds=seconds)
    return tree(node([Score(0.0, breakdown)]), task=TASK)


ROOT = DOCS.parents[1]
SMALL = {
    "max_steps": 2, "batch_size": 2, "num_generations": 2, "eval_num_samples": 2,
    "eval_interval": 2,
}  # fmt: skip


def _real_run(algorithm: str, folder: Path) -> Run:
    """Two training steps of the shipped quickstart, as a user starts them."""
    overrides = [f"{algorithm}.{key}={value}" for key, value in SMALL.items()]
    done = subprocess.run(
        [
            *(sys.executable, f"train_{algorithm}.py"),
            *("--config", f"configs/{algorithm}_quickstart.yaml"),
            *("--override", *overrides, f"output.dir={folder}", "output.save_final_model=false"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "report.html").stat().st_size > 10_000
    return read_run(folder)


def _undocumented(run: Run) -> list[str]:
    names = {*run.names("train"), *run.names("eval")}
    return sorted(n for n in names if not any(p.fullmatch(n) for p in documented()))


def test_a_real_run_emits_documented_names_only(tmp_path):
    run = _real_run("magrpo", tmp_path / "run")
    assert _undocumented(run) == []
    for name in ("loss", "entropy", "gradient_norm", "learning_rate", "zero_advantage_share",
                 "joint_actions_per_second", "tokens_per_second"):  # fmt: skip
        assert len(run.series("train", name)[1]) == 2, name
    assert [r["update"] for r in run.records if r["phase"] == "eval"] == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "madpo", "marlhf", "ppo", "shppo"])
def test_every_algorithm_emits_documented_names_only(algorithm, tmp_path):
    if not (ROOT / "configs" / f"{algorithm}_quickstart.yaml").exists():
        pytest.skip(f"no quickstart of {algorithm}")
    assert _undocumented(_real_run(algorithm, tmp_path / "run")) == []


@pytest.mark.slow
def test_two_runs_of_one_seed_agree_but_for_the_clock(tmp_path):
    one, two = (_real_run("magrpo", tmp_path / name) for name in "ab")
    for first, second in zip(one.records, two.records, strict=True):
        differing = [
            name for name, value in first["metrics"].items() if second["metrics"][name] != value
        ]
        assert all(re.search("time|second|memory", name) for name in differing), differing
