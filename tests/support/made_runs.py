"""Trees and run directories made by hand, through the real logger classes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from comlrl.evaluation.metrics import tree_metrics
from comlrl.loggers import Loggers, write_domain
from comlrl.loggers.episode_log import EpisodeLogger
from comlrl.loggers.jsonl import JsonlLogger
from comlrl.loggers.samples import SampleLogger
from comlrl.loop.records import LogMark, LogRecord
from comlrl.rewards.code.breakdown import RewardBreakdown, SyntaxProblem
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.types import AgentTurn, Completion, Message, Node, Score, Task, Tree
from tests.support.fakes import code_task

TASK = code_task("T/0", "def f(xs):\n    pass\n", "def check(candidate): ...", "f")


def agent_turn(texts: Sequence[str], *, finished: bool = True, prompt: str = "do") -> AgentTurn:
    """An agent's completions at a node; a token for each letter."""
    completions = tuple(Completion(t, tuple(range(len(t))), finished) for t in texts)
    return AgentTurn((Message("user", prompt),), (1, 2), completions)


def node(
    scores: Sequence[Score | float],
    *,
    agents: Sequence[AgentTurn] | None = None,
    turn: int = 1,
    parent: int = -1,
    parent_action: int = -1,
    terminated: bool = False,
) -> Node:
    """Aligned joint actions of two agents; processed rewards are the raw ones minus 1."""
    scored = tuple(s if isinstance(s, Score) else Score(float(s)) for s in scores)
    texts = [f"c{k}" for k in range(len(scored))]
    agents_n = tuple(agents) if agents else (agent_turn(texts), agent_turn(texts))
    return Node(
        turn=turn,
        parent=parent,
        parent_action=parent_action,
        agents_N=agents_n,
        joint_actions_K=tuple((k,) * len(agents_n) for k in range(len(scored))),
        scores_K=scored,
        rewards_K=tuple(s.value - 1.0 for s in scored),
        terminated=terminated,
    )


def code_score(found: RewardBreakdown) -> Score:
    """What the code reward makes of its findings."""
    return Score(found.total, found.parts, found.passed_all, found)


def tree(*nodes: Node, task: Task = TASK) -> Tree:
    return Tree(task, tuple(nodes), "align", None)


AUX = {
    "filter": "def aux(xs):\n    return [x for x in xs if x {op}]\n",
    "test": "def aux(x):\n    return x {op}\n",
    "transform": "def aux(x):\n    return x * 2\n",
    "filter_map": "def aux(xs):\n    return [x * 2 for x in xs if x {op}]\n",
}
MAIN = {
    "filter": "def f(xs):\n    ys = [x * 2 for x in aux(xs)]\n    return {end}\n",
    "test": "def f(xs):\n    ys = [x * 2 for x in xs if aux(x)]\n    return {end}\n",
    "transform": "def f(xs):\n    ys = [aux(x) for x in xs if x {op}]\n    return {end}\n",
    "filter_map": "def f(xs):\n    ys = aux(xs)\n    return {end}\n",
}
OPERATIONS = [("> 3", "above 3"), ("< 8", "below 8"), ("% 2 == 0", "that are even")]
ENDS = [("sum(ys)", "Sum"), ("max(ys)", "Largest"), ("len(ys)", "Number"), ("ys[-1]", "Last")]


def problem(index: int) -> Task:
    """One of twelve small tasks on lists of integers, as CoopMini has them."""
    (op, words), (end, verb) = OPERATIONS[index % 3], ENDS[index // 3 % 4]
    prompt = f'def f(xs):\n    """{verb} of numbers {words}, each doubled.\n    """\n'
    return code_task(
        f"mini/{index}",
        prompt,
        "def check(candidate):\n    assert candidate([1, 5, 9]) == 28\n",
        "f",
        op=op,
        end=end,
        stages="filter_map_reduce",
    )


def played(task: Task, skill: float, rng: random.Random, generations: int, turn: int = 1) -> Node:
    """A node whose agents agree on ``filter`` and write what runs the more, the higher skill."""
    values = {"op": task.fields["op"], "end": task.fields["end"]}
    kinds = list(AUX)
    aux, main, scores = [], [], []
    for _ in range(generations):
        kind_a, kind_m = ("filter" if rng.random() < skill else rng.choice(kinds) for _ in range(2))
        slip = rng.random() > 0.6 + 0.4 * skill
        text_a = AUX[kind_a].format(**values)
        text_m = MAIN[kind_m].format(**values)
        text_m = text_m.replace("return", "retrun") if slip else text_m
        aux.append(text_a)
        main.append(text_m)
        scores.append(_score(text_a, text_m, kind_a == kind_m, slip, rng))
    turns = (agent_turn(aux, finished=rng.random() < 0.5 + skill / 2), agent_turn(main))
    return node(scores, agents=turns, turn=turn)


def _score(aux: str, main: str, agree: bool, slip: bool, rng: random.Random) -> Score:
    base = {"aux_defined": 0.4, "helpers": ("aux",), "program": f"{aux}\n\n{main}"}
    if slip:
        problem = SyntaxProblem("invalid syntax", 5, 12, "retrun sum(ys)")
        broken = RewardBreakdown(
            main_defined=0.6, defined=("aux", "f"), syntax_error=problem, **base
        )
        return code_score(broken)
    outcomes = tuple(
        TestOutcome(f"assert candidate({[i, i + 4, 9]}) == {28 + i}", True)
        if agree or rng.random() < 0.2
        else TestOutcome(
            f"assert candidate({[i, i + 4, 9]}) == {28 + i}",
            False,
            "AssertionError",
            None,
            None,
            str(28 + i),
            "[True, <b>&False</b>]",
        )
        for i in range(5)
    )
    share = sum(o.passed for o in outcomes) / 5
    breakdown = RewardBreakdown(
        main_defined=0.6,
        syntax=0.5,
        tests=share,
        uses_aux=0.5 * (share > 0),
        not_wrapper=1.0 * (share > 0),
        aux_ignored=-0.5 * (share > 0 and rng.random() < 0.1),
        defined=("aux", "f"),
        called=("aux",),
        outcomes=outcomes,
        seconds=0.01,
        **base,
    )
    return code_score(breakdown)


def make_run(
    folder: Path, *, seed: int = 1, updates: int = 40, algorithm: str = "magrpo", turns: int = 1
) -> Path:
    """A run directory as a training leaves it, its numbers drawn from a growing skill."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    loggers = Loggers(
        [
            JsonlLogger(folder / "metrics.jsonl"),
            SampleLogger(folder / "samples.jsonl", CODE),
            EpisodeLogger(folder / "episodes.jsonl", CODE),
        ]
    )
    loggers.begin(LogMark())
    evaluated: list[dict[str, float]] = []

    def grow(task: Task, skill: float, generations: int) -> Tree:
        nodes = [played(task, skill, rng, generations)]
        for turn in range(2, turns + 1):
            later = played(task, min(1.0, skill + 0.2), rng, 1, turn)
            nodes.append(replace(later, parent=len(nodes) - 1, parent_action=0))
        return tree(*nodes, task=task)

    for update in range(updates + 1):
        skill = min(0.97, 0.1 + 0.9 * update / updates)
        if update % (updates // 5) == 0:
            trees = [grow(problem(i), skill * (i != 7), 1) for i in range(12)]
            record = LogRecord(
                step=update * 32,
                update=update,
                epoch=0,
                phase="eval",
                metrics=tree_metrics(trees, CODE),
            )
            loggers.episodes(record, trees)
            loggers.log(record)
            evaluated.append(dict(record.metrics))
        if update < updates:
            trees = [grow(problem(rng.randrange(12)), skill, 8) for _ in range(4)]
            metrics = tree_metrics(trees, CODE) | trainer_metrics(skill, rng)
            record = LogRecord(
                step=(update + 1) * 32, update=update + 1, epoch=0, phase="train", metrics=metrics
            )
            loggers.episodes(record, trees)
            loggers.log(record)
    loggers.close()
    _write_rest(folder, algorithm, seed, updates, turns, evaluated)
    return folder


def trainer_metrics(skill: float, rng: random.Random) -> dict[str, float]:
    metrics = {
        "joint_actions_per_second": 20 + rng.random(),
        "tokens_per_second": 2000 + 100 * rng.random(),
        "peak_memory_mb": 900.0,
        "time/rollout_share": 0.75 - 0.1 * skill,
        "time/update_share": 0.25 + 0.1 * skill,
        "learning_rate": 3e-4,
    }
    for agent in range(2):
        metrics |= {
            f"agent_{agent}/loss": rng.gauss(0, 0.1),
            f"agent_{agent}/gradient_norm": 1 + rng.random(),
            f"agent_{agent}/entropy": 0.8 - 0.6 * skill + 0.05 * rng.random(),
        }
    return metrics


def _write_rest(
    folder: Path,
    algorithm: str,
    seed: int,
    updates: int,
    turns: int,
    evaluated: list[dict[str, float]],
) -> None:
    config = {
        "domain": "code",
        "agent_model": {"name": "builtin:tiny-coder", "temperature": 1.0},
        "dataset": {"name": "builtin:coopmini"},
        "seed": seed,
        "output": {"base_dir": "outputs", "dir": str(folder)},
        algorithm: {"num_agents": 2, "num_turns": turns, "num_generations": 8},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    summary = {
        "algorithm": algorithm,
        "env_steps": updates * 32,
        "updates": updates,
        "wall_seconds": 131.4,
        "eval_start": evaluated[0],
        "eval_end": evaluated[-1],
        "scored_joint_actions": updates * 32,
        "train": {
            "joint_actions_per_second": 20.4,
            "tokens_per_second": 2051.0,
            "peak_memory_mb": 900.0,
        },
        "distributed": {"world_size": 1, "weights_in_sync": True},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    write_domain(folder / "domain.json", "code", CODE, CODE.roles(2))


def settings(**sections: Any) -> SimpleNamespace:
    """Of a configuration, what the loggers read."""
    known = {
        "domain": "code",
        "reward": SimpleNamespace(target=None, arguments={}),
        "program": SimpleNamespace(replaces_turns=False),
        "output": SimpleNamespace(verbose=False),
        "wandb": None,
        "trackio": None,
        "to_dict": lambda: {"domain": "code", "seed": 1},
    }
    return SimpleNamespace(**known | sections)


def record(update: int, phase: str = "train", **metrics: float) -> LogRecord:
    return LogRecord(
        step=update * 8,
        update=update,
        epoch=0,
        phase=phase,
        metrics=metrics or {"reward_mean": 1.5},
    )


def scored_tree(task_id: str, *rewards: float):
    outcomes = (TestOutcome("assert candidate(1) == 2", False, actual="3", expected="2"),)
    found = [RewardBreakdown(tests=r, outcomes=outcomes, program="p") for r in rewards]
    scores = list(map(code_score, found))
    agents = [agent_turn([f"{role}{k}" for k in range(len(rewards))]) for role in ("aux", "main")]
    return tree(node(scores, agents=agents), task=code_task(task_id, "prompt", "", "f"))


def logged(folder: Path, **series: list[float]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    logger = JsonlLogger(folder / "metrics.jsonl")
    logger.begin(LogMark())
    for i in range(len(next(iter(series.values())))):
        metrics = {name.replace("__", "/"): values[i] for name, values in series.items()}
        logger.log(LogRecord(step=10 * i, update=i, epoch=0, phase="train", metrics=metrics))
    logger.close()
    return folder
