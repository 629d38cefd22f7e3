"""``samples.jsonl``: episodes of the first and the latest evaluation and training step.

The report takes its per-task comparison and its sample episodes from this file. Each line is one
task (``sample``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

from comlrl.evaluation.metrics import task_reward
from comlrl.files import replace
from comlrl.loggers.conversations import MAX_TEXT, played, scored
from comlrl.loggers.report.run_data import read_samples
from comlrl.loop.records import Logger, LogMark, LogRecord
from comlrl.types import Domain, EpisodeGroup, RolloutResult, Tree

MAX_TASKS = {"eval": 200, "train": 16}  # per stored pass


class SampleLogger(Logger):
    """Logger of the first and the latest pass of each phase; writes at evaluations and the end."""

    def __init__(self, path: str | Path, domain: Domain) -> None:
        self._path, self._domain = Path(path), domain
        self._first: dict[str, list[dict[str, Any]]] = {}
        self._latest: dict[str, list[dict[str, Any]]] = {}

    def begin(self, mark: LogMark) -> None:
        self._restore([s for s in read_samples(self._path) if s["update"] <= mark.update])
        self._write()

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        samples = [sample(record, tree, self._domain) for tree in trees[: MAX_TASKS[record.phase]]]
        self._first.setdefault(record.phase, samples)
        self._latest[record.phase] = samples
        if record.phase == "eval":
            self._write()

    def close(self) -> None:
        self._write()

    def _restore(self, lines: Sequence[dict[str, Any]]) -> None:
        for phase in ("eval", "train"):
            updates = sorted({line["update"] for line in lines if line["phase"] == phase})
            for passes, wanted in ((self._first, updates[:1]), (self._latest, updates[-1:])):
                if wanted:
                    passes[phase] = [
                        line
                        for line in lines
                        if line["phase"] == phase and line["update"] == wanted[0]
                    ]

    def _write(self) -> None:
        lines: list[dict[str, Any]] = []
        for phase in ("eval", "train"):
            first, latest = self._first.get(phase, []), self._latest.get(phase, [])
            lines += first
            if latest and latest is not first and latest[0]["update"] != first[0]["update"]:
                lines += latest
        replace(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def sample(record: LogRecord, tree: RolloutResult, domain: Domain) -> dict[str, Any]:
    """Return a task's episode as JSON: the first joint action of the last node on the first path.

    For a program, return its first episode.
    """
    line = {
        "step": record.step,
        "update": record.update,
        "phase": record.phase,
        "task_id": tree.task.task_id,
        "problem": domain.problem(tree.task)[:MAX_TEXT],
        "reward_task_mean": task_reward(tree),
    }
    return line | _first(tree, domain)


@singledispatch
def _first(result: RolloutResult, domain: Domain) -> dict[str, Any]:
    raise TypeError(f"no rollout: {result!r}")


@_first.register
def _of_group(group: EpisodeGroup, domain: Domain) -> dict[str, Any]:
    first = group.episodes_G[0]
    line = {"parts_N": list(group.names_N), "rewards_T": [first.score.value], "terminated": False}
    return line | played(group, first, domain)


@_first.register
def _of_tree(tree: Tree, domain: Domain) -> dict[str, Any]:
    path = _first_path(tree)
    index, action = path[-1]
    node, scored = (
        tree.nodes[index],
        [(tree.nodes[i], k) for i, k in path if tree.nodes[i].scores_K],
    )
    return {
        "parts_N": list(domain.parts(tree.task, node.acting.stop)),
        "rewards_T": [n.scores_K[k].value for n, k in scored],
        "terminated": node.terminated,
        **episode(tree, index, action, domain),
    }


def episode(tree: Tree, index: int, action: int, domain: Domain) -> dict[str, Any]:
    """Return one scored joint action as JSON values: completions, reward and measures."""
    node, team = tree.nodes[index], tree.team(index, action)
    return {
        "turn": node.turn,
        "roles_N": list(domain.roles(len(team))),
        "completions_N": [completion.text[:MAX_TEXT] for _, completion in team],
        **scored(node.scores_K[action], domain),
    }


def _first_path(tree: Tree) -> list[tuple[int, int]]:
    """Return (node, joint action) pairs from the root, with the first action that has a child."""
    path: list[tuple[int, int]] = []
    index = 0
    while True:
        children = tree.children(index)
        action = min(children, default=0)
        path.append((index, action))
        if not children:
            return path
        index = children[action]
