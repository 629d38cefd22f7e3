"""``arena.py`` and ``comlrl arena``: every algorithm on every task of the arena, as a scorecard.

A cell is an ordinary training run. Repeating the command runs the cells that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from comlrl import files
from comlrl.errors import UserError, report
from comlrl.evaluation.scorecard import (
    Outcome,
    cross_play_values,
    entries,
    episode_noise,
    episode_value,
)
from comlrl.files import tolerant_terminal
from comlrl.processes.cores import available_cores
from comlrl.run_files import SUMMARY
from comlrl.trainers.launch.checks.shipped import LAUNCH
from comlrl.trainers.launch.commands import arena_cells
from comlrl.trainers.launch.commands.arena_cells import ALGORITHMS, TASKS, Algorithm
from comlrl.trainers.launch.commands.child_runs import ChildRun, last_error, run_all
from comlrl.trainers.launch.commands.command_line import (
    Parser,
    parse_arguments,
    print_written,
    resolve,
)

if TYPE_CHECKING:
    from comlrl.config.resolved import CommonConfig
    from comlrl.rewards.arena.game import Bounds
    from comlrl.trainers.launch.wiring.resolved_work import Work

JOINT_ACTIONS = 6_400


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an algorithm on a task with a seed."""

    algorithm: str
    task: str
    seed: int
    tree: Mapping[str, Any]  # the run's configuration
    text: str  # the configuration as YAML
    config: Path
    run: Path

    @property
    def name(self) -> str:
        return self.run.name


@dataclass(kw_only=True)
class Arena:
    """The checked arguments of the command."""

    algorithms: dict[str, Algorithm]
    tasks: list[str]
    seeds: range
    joint_actions: int
    out: Path
    jobs: int

    def cell(self, algorithm: str, task: str, seed: int) -> Cell:
        row, name = self.algorithms[algorithm], f"{algorithm}_{task}_{seed}"
        run = self.out / "runs" / name
        tree = arena_cells.configuration(row, TASKS[task], seed, self.joint_actions, run)
        text = yaml.safe_dump(tree, sort_keys=False)
        if row.script is not None:  # a changed script makes it another cell
            digest = hashlib.sha256(row.script.read_bytes()).hexdigest()
            text = f"# {row.script.name} {digest}\n{text}"
        return Cell(
            algorithm=algorithm,
            task=task,
            seed=seed,
            tree=tree,
            text=text,
            config=self.out / "cells" / f"{name}.yaml",
            run=run,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        arena = plan(parse(argv))
        checks = {
            (name, task): check(arena, name, task)
            for name in arena.algorithms
            for task in arena.tasks
        }
        reasons = {key: reason for key, reason in checks.items() if isinstance(reason, str)}
        bounds = {key: ends for key, ends in checks.items() if not isinstance(ends, str)}
        if not bounds:
            raise UserError(next(iter(reasons.values())))
        cells = [arena.cell(*key, seed) for seed in arena.seeds for key in bounds]
        for cell in cells:
            if cell.config.is_file() and cell.config.read_text(encoding="utf-8") != cell.text:
                raise UserError(
                    f"--out: '{arena.out}' holds cells with other settings, another budget or "
                    "another version of the script; choose another folder"
                )
    except Exception as error:
        return report(error)
    try:
        failed = run(arena, cells)
        outcomes = [outcome(arena, cell, bounds, failed.get(cell.name)) for cell in cells]
        outcomes = with_cross_play(arena, outcomes, bounds)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except OSError as error:
        return report(error)
    outcomes += [
        Outcome(*key, seed, reason=r) for key, r in reasons.items() for seed in arena.seeds
    ]
    write(arena, outcomes)
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("arena", description="Run the arena's scorecard.")
    add = parser.add_argument
    add(
        "--algorithms", metavar="A,B",
        help=f"default: all ({', '.join(ALGORITHMS)}); NAME=FILE: your own train script",
    )  # fmt: skip
    add("--tasks", metavar="A,B", help=f"default: all ({', '.join(TASKS)})")
    add("--seeds", type=int, default=3, metavar="N", help="train seeds 1 to N")
    add(
        "--joint-actions", type=int, default=JOINT_ACTIONS, metavar="N",
        help=f"joint actions to train each cell for; default: {JOINT_ACTIONS}",
    )  # fmt: skip
    add("--out", default="outputs/arena", metavar="DIR", help="default: outputs/arena")
    add("--jobs", type=int, metavar="N", help="cells at the same time; default: the cores")
    add("--check", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def plan(arguments: argparse.Namespace) -> Arena:
    """Check the arguments. Raises UserError for unknown names and numbers out of range."""
    if arguments.check is not None:
        raise UserError("--check: is now --algorithms NAME=FILE, with your algorithm's name")
    step = arena_cells.BATCH * arena_cells.TREE
    if arguments.joint_actions < step:
        raise UserError(
            f"--joint-actions: {arguments.joint_actions}; use at least {step}, one step's"
        )
    for option in ("seeds", "jobs"):
        if (number := getattr(arguments, option)) is not None and number < 1:
            raise UserError(f"--{option}: {number}; use at least 1")
    return Arena(
        algorithms=arena_cells.chosen_algorithms(arguments.algorithms),
        tasks=arena_cells.chosen("--tasks", arguments.tasks, TASKS),
        seeds=range(1, arguments.seeds + 1),
        joint_actions=arguments.joint_actions,
        out=Path(arguments.out).resolve(),
        jobs=arguments.jobs or available_cores(),
    )


def check(arena: Arena, name: str, task: str) -> Bounds | str:
    """Return the floor and optimum of a task in the algorithm's configuration, or the reason why
    the algorithm cannot play it."""
    algorithm, tree = arena.algorithms[name], dict(arena.cell(name, task, arena.seeds[0]).tree)
    if TASKS[task].cross_play and len(arena.seeds) < 2:
        return f"{task} is played with an agent of another seed: use --seeds 2 or more"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}_{task}.yaml"
        trained_by = algorithm.trained_by
        if algorithm.script is not None:
            file.write_text(yaml.safe_dump(tree), encoding="utf-8")
            line = [sys.executable, str(algorithm.script), "--config", str(file), "--dry-run"]
            done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
            if done.returncode:
                return last_error(done.stderr).removeprefix("error: ")
            trained_by = "magrpo"  # its section has all keys that affect the bounds
            tree[trained_by] = tree.pop(algorithm.trained_by)
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        try:
            config, work, _ = resolve(
                trained_by, parse_arguments(trained_by, ["--config", str(file)])
            )
        except UserError as error:
            return str(error)
        if TASKS[task].cross_play and config.section.one_policy:
            return "cross-play needs an own policy for each agent; these agents share one"
        return _bounds(config.dataset.name, config.section, work)


def _bounds(data: str, section: CommonConfig, work: Work) -> Bounds:
    """Compute the bounds of an episode's value, averaged over the evaluation split."""
    from comlrl.builtin import DATASETS
    from comlrl.rewards.arena.game import Bounds, Game

    game, reward = work.domain, work.build_reward()
    assert isinstance(game, Game)
    lines = DATASETS[data]["eval"].read_text(encoding="utf-8").splitlines()
    tasks = [game.task(str(i), json.loads(line)) for i, line in enumerate(lines)]
    bounds = [game.bounds(task, section.num_agents, section.num_turns, reward) for task in tasks]
    return Bounds(*(sum(ends) / len(bounds) for ends in zip(*bounds, strict=True)))


def run(arena: Arena, cells: Sequence[Cell]) -> dict[str, str]:
    """Run every unfinished cell and return those that failed, by name, with the reason."""
    left = [cell for cell in cells if not (cell.run / SUMMARY).is_file()]
    print(f"{len(cells)} cells, {len(cells) - len(left)} finished before", file=sys.stderr)
    failed = {}
    with contextlib.closing(run_all(child_runs(arena, left), arena.jobs)) as ended:
        for done, (child, error, _) in enumerate(ended, 1):
            if error:
                failed[str(child.key)] = error
            print(f"{done}/{len(left)} {child.key} {error or ''}", file=sys.stderr, flush=True)
    return failed


def child_runs(arena: Arena, cells: Sequence[Cell]) -> Iterator[ChildRun]:
    """Write each cell's configuration and yield its run."""
    for cell in cells:
        algorithm = arena.algorithms[cell.algorithm]
        cell.config.parent.mkdir(parents=True, exist_ok=True)
        files.replace(cell.config, cell.text)
        line = [sys.executable, "-m", LAUNCH, "train", algorithm.trained_by]
        if algorithm.script is not None:
            line = [sys.executable, str(algorithm.script)]
        log = cell.config.with_suffix(".log")
        log.unlink(missing_ok=True)
        line += ["--config", str(cell.config)]
        yield ChildRun(key=cell.name, line=line, log=log, result=cell.run / SUMMARY)


def outcome(
    arena: Arena, cell: Cell, bounds: Mapping[tuple[str, str], Bounds], reason: str | None
) -> Outcome:
    """Read a cell's score from its summary."""
    scored = Outcome(cell.algorithm, cell.task, cell.seed, reason=reason)
    if reason is not None:
        return scored
    summary = json.loads((cell.run / SUMMARY).read_text(encoding="utf-8"))
    section = cell.tree[arena.algorithms[cell.algorithm].trained_by]
    metrics, turns = summary["eval_end"], section["num_turns"]
    ends = bounds[cell.algorithm, cell.task]
    episodes = TASKS[cell.task].episodes * section["eval_answers"]
    value = episode_value(metrics, turns)
    return replace(
        scored,
        value=value,
        floor=ends.floor,
        optimum=ends.optimum,
        score=ends.score(value),
        noise=episode_noise(metrics, turns, episodes) / (ends.optimum - ends.floor),
        joint_actions=summary["env_steps"],
        seconds=summary["wall_seconds"],
    )


def with_cross_play(
    arena: Arena, outcomes: Sequence[Outcome], bounds: Mapping[tuple[str, str], Bounds]
) -> list[Outcome]:
    """Replace the values of tasks that are scored by cross-play with those of teams whose agents
    come from different seeds."""
    seeds: dict[Any, list[int]] = {}
    for each in outcomes:
        if each.reason is None and TASKS[each.task].cross_play:
            seeds.setdefault((each.algorithm, each.task), []).append(each.seed)
    played: dict[Any, dict[int, float] | str] = {
        key: "no other seed to play with" for key, of_key in seeds.items() if len(of_key) < 2
    }
    runs = (cross_play_run(arena, key, seeds[key]) for key in seeds if key not in played)
    with contextlib.closing(run_all(list(runs), arena.jobs)) as ended:
        for child, error, _ in ended:
            if error:
                played[child.key] = f"cross-play: {error}"
            else:
                result = json.loads(child.result.read_text(encoding="utf-8"))
                values = cross_play_values(result["matrices"]["reward_mean"])
                played[child.key] = dict(zip(seeds[child.key], values, strict=True))
    return [
        _replayed(each, played[key], bounds[key])
        if each.reason is None and (key := (each.algorithm, each.task)) in played
        else each
        for each in outcomes
    ]


def cross_play_run(arena: Arena, key: tuple[str, str], seeds: Sequence[int]) -> ChildRun:
    """Return the run that evaluates the teams of these seeds in cross-play. Remove an earlier
    result if a team was trained after it."""
    name = "_".join([*key, *map(str, seeds)])
    file = arena.out / "cross_play" / f"{name}.json"
    runs = [arena.cell(*key, seed).run for seed in seeds]
    trained = max((run / SUMMARY).stat().st_mtime for run in runs)
    if file.exists() and file.stat().st_mtime < trained:
        file.unlink()
    log = file.with_suffix(".log")
    log.unlink(missing_ok=True)  # only this attempt's errors count
    answers = max(1, arena_cells.EPISODES // TASKS[key[1]].episodes)
    line = [sys.executable, "-m", LAUNCH, "evaluate", "--cross-play", *map(str, runs)]
    line += ["--samples", str(answers), "--out", str(file)]
    return ChildRun(key=key, line=line, log=log, result=file)


def _replayed(outcome: Outcome, played: dict[int, float] | str, ends: Bounds) -> Outcome:
    """Return an outcome with its cross-play value, without its noise, which is of self-play."""
    if isinstance(played, str):
        return replace(outcome, value=None, score=None, noise=None, reason=played)
    value = played[outcome.seed]
    return replace(outcome, value=value, score=ends.score(value), noise=None)


def write(arena: Arena, outcomes: Sequence[Outcome]) -> None:
    """Write ``arena.json``, ``arena.md`` and ``arena.png``, and print the table."""
    from comlrl.loggers.report.heat_map import write_heat_map
    from comlrl.loggers.score_tables import score_table

    table_entries, names = entries(outcomes), list(arena.algorithms)
    result = {
        "joint_actions": arena.joint_actions,
        "seeds": list(arena.seeds),
        "table": [
            {"algorithm": name, "task": task, **asdict(entry)}
            for (name, task), entry in table_entries.items()
        ],
        "cells": list(map(asdict, outcomes)),
    }
    arena.out.mkdir(parents=True, exist_ok=True)
    files.replace(arena.out / "arena.json", json.dumps(result, indent=1) + "\n")
    table = score_table(table_entries, names, arena.tasks)
    files.replace(arena.out / "arena.md", table)
    scores = [[table_entries[name, task].mean for task in arena.tasks] for name in names]
    means = [[math.nan if mean is None else mean for mean in row] for row in scores]
    title = "Score: 0 is the floor, 1 the optimum"
    write_heat_map(arena.out / "arena.png", names, arena.tasks, means, title, scale=(0.0, 1.0))
    print(f"\n{table}")
    for (name, task), entry in table_entries.items():
        for reason in entry.reasons:
            print(f"— {name}, {task}: {reason.removeprefix('error: ')}")
    print_written(f"{arena.out}/arena.json, arena.md, arena.png")
