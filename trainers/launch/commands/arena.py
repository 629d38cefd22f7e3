"""``arena.py`` and ``comlrl arena``: every algorithm on every task of the arena, as a scorecard.

A cell is an ordinary training run. The same command, given again, runs the cells that are missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from comlrl.trainers.launch.commands.child_runs import (
    INTERRUPTED,
    ChildRuns,
    environment,
    last_error,
    last_line,
)
from comlrl.trainers.launch.commands.command_line import (
    Parser,
    parse_arguments,
    print_written,
    resolve,
)

if TYPE_CHECKING:
    from comlrl.config.resolved import Config
    from comlrl.rewards.arena.game import Bounds
    from comlrl.trainers.launch.wiring.resolved_work import Work

JOINT_ACTIONS = 6_400


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an algorithm on a task with a seed."""

    algorithm: str
    task: str
    seed: int
    out: Path
    tree: Mapping[str, Any]  # its configuration
    script: Path | None  # that trains, where it is a user's own

    @property
    def name(self) -> str:
        return f"{self.algorithm}_{self.task}_{self.seed}"

    @property
    def config(self) -> Path:
        return self.out / "cells" / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.out / "cells" / f"{self.name}.log"

    @property
    def run(self) -> Path:
        return self.out / "runs" / self.name

    @property
    def finished(self) -> bool:
        return (self.run / SUMMARY).is_file()

    @property
    def text(self) -> str:
        """Return the configuration, with a digest of the user's script, if any: another version
        is another cell."""
        text = yaml.safe_dump(dict(self.tree), sort_keys=False)
        if self.script is None:
            return text
        return (
            f"# {self.script.name} {hashlib.sha256(self.script.read_bytes()).hexdigest()}\n{text}"
        )


@dataclass(kw_only=True)
class Arena:
    """What is asked for, checked."""

    algorithms: dict[str, Algorithm]
    tasks: list[str]
    seeds: range
    joint_actions: int
    out: Path
    jobs: int

    def cell(self, algorithm: str, task: str, seed: int) -> Cell:
        run = self.out / "runs" / f"{algorithm}_{task}_{seed}"
        tree = arena_cells.configuration(
            self.algorithms[algorithm], TASKS[task], seed, self.joint_actions, run
        )
        return Cell(
            algorithm=algorithm,
            task=task,
            seed=seed,
            out=self.out,
            tree=tree,
            script=self.algorithms[algorithm].script,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    tolerant_terminal()
    try:
        arena = asked(parse(argv))
        checks = {
            (name, task): check(arena, name, task)
            for name in arena.algorithms
            for task in arena.tasks
        }
        reasons = {key: found for key, found in checks.items() if isinstance(found, str)}
        bounds = {key: found for key, found in checks.items() if not isinstance(found, str)}
        if not bounds:
            raise UserError(next(iter(reasons.values())))
        cells = [arena.cell(*key, seed) for seed in arena.seeds for key in bounds]
        for cell in cells:
            if cell.config.is_file() and cell.config.read_text(encoding="utf-8") != cell.text:
                raise UserError(
                    f"--out: '{arena.out}' holds cells with other settings, another budget or "
                    "another version of the script; give another folder"
                )
    except UserError as error:
        return report(error)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = Runner(arena).run(cells)
        outcomes = [outcome(arena, cell, bounds, failed.get(cell.name)) for cell in cells]
        outcomes = with_cross_play(arena, outcomes, bounds)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    outcomes += [
        Outcome(*key, seed, reason=r) for key, r in reasons.items() for seed in arena.seeds
    ]
    write(arena, outcomes)
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("arena", description="Run the arena's scorecard.")
    add = parser.add_argument
    add("--algorithms", metavar="A,B", help=f"default: all ({', '.join(ALGORITHMS)})")
    add("--tasks", metavar="A,B", help=f"default: all ({', '.join(TASKS)})")
    add("--seeds", type=int, default=3, metavar="N", help="1 to N")
    add(
        "--joint-actions", type=int, default=JOINT_ACTIONS, metavar="N",
        help=f"scored in the training of a cell; default: {JOINT_ACTIONS}",
    )  # fmt: skip
    add("--out", default="outputs/arena", metavar="DIR", help="default: outputs/arena")
    add("--jobs", type=int, metavar="N", help="cells at the same time; default: the cores")
    add("--check", metavar="FILE", help="your own train script, as a further algorithm")
    return parser.parse_args(argv)


def asked(given: argparse.Namespace) -> Arena:
    """Raise UserError for unknown names and for numbers out of range."""
    names = arena_cells.chosen("--algorithms", given.algorithms, ALGORITHMS)
    algorithms = {name: ALGORITHMS[name] for name in names}
    if given.check is not None:
        name, own = arena_cells.own_algorithm(Path(given.check))
        algorithms = {name: own} | (algorithms if given.algorithms is not None else {})
    step = arena_cells.BATCH * arena_cells.TREE
    if given.joint_actions < step:
        raise UserError(f"--joint-actions: {given.joint_actions}; give at least {step}, one step's")
    for option in ("seeds", "jobs"):
        if (number := getattr(given, option)) is not None and number < 1:
            raise UserError(f"--{option}: {number}; give at least 1")
    jobs = given.jobs or available_cores()
    tasks = arena_cells.chosen("--tasks", given.tasks, TASKS)
    seeds = range(1, given.seeds + 1)
    return Arena(
        algorithms=algorithms,
        tasks=tasks,
        seeds=seeds,
        joint_actions=given.joint_actions,
        out=Path(given.out).resolve(),
        jobs=jobs,
    )


def check(arena: Arena, name: str, task: str) -> Bounds | str:
    """Return the floor and optimum of a task as an algorithm plays it, or why it cannot be
    played."""
    algorithm, tree = arena.algorithms[name], dict(arena.cell(name, task, arena.seeds[0]).tree)
    if TASKS[task].cross_play and len(arena.seeds) < 2:
        return f"{task} is played with a stranger: give --seeds 2 or more"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}_{task}.yaml"
        trained_by = algorithm.trained_by
        if algorithm.script is not None:
            file.write_text(yaml.safe_dump(tree), encoding="utf-8")
            line = [sys.executable, str(algorithm.script), "--config", str(file), "--dry-run"]
            done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
            if done.returncode:
                return last_error(done.stderr or f"exit code {done.returncode}")
            trained_by = "magrpo"  # has the keys that the task's bounds depend on
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
        return _bounds(config, work)


def _bounds(config: Config, work: Work) -> Bounds:
    """Compute the bounds of an episode's value, averaged over the evaluation split."""
    from comlrl.builtin import DATASETS
    from comlrl.rewards.arena.game import Bounds, Game

    section, game, reward = config.section, work.domain, work.build_reward()
    assert isinstance(game, Game)
    lines = DATASETS[config.dataset.name]["eval"].read_text(encoding="utf-8").splitlines()
    tasks = [game.task(str(i), json.loads(line)) for i, line in enumerate(lines)]
    found = [game.bounds(task, section.num_agents, section.num_turns, reward) for task in tasks]
    return Bounds(*(sum(ends) / len(found) for ends in zip(*found, strict=True)))


class Runner:
    """Runs cells as processes, several at a time."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self._children = arena, ChildRuns(arena.jobs)

    def run(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Run every unfinished cell and return those that failed, by name, with the reason."""
        left = [cell for cell in cells if not cell.finished]
        print(f"{len(cells)} cells, {len(cells) - len(left)} finished before", file=sys.stderr)
        failed: dict[str, str] = {}
        with concurrent.futures.ThreadPoolExecutor(self.arena.jobs) as pool:
            running = {pool.submit(self._run, cell): cell for cell in left}
            try:
                for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                    cell, code = running[future], future.result()
                    if code in INTERRUPTED:
                        raise KeyboardInterrupt  # it was stopped, and so are we
                    if code:
                        failed[cell.name] = f"exit code {code}: {last_line(cell.log)}"
                    reason = failed.get(cell.name, "")
                    print(f"{done}/{len(left)} {cell.name} {reason}", file=sys.stderr, flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._children.end()
        return failed

    def _run(self, cell: Cell) -> int:
        algorithm = self.arena.algorithms[cell.algorithm]
        cell.config.parent.mkdir(parents=True, exist_ok=True)
        files.replace(cell.config, cell.text)
        line = [sys.executable, "-m", LAUNCH, "train", algorithm.trained_by]
        if algorithm.script is not None:
            line = [sys.executable, str(algorithm.script)]
        cell.log.unlink(missing_ok=True)
        return self._children.run([*line, "--config", str(cell.config)], cell.log)


def outcome(
    arena: Arena, cell: Cell, bounds: Mapping[tuple[str, str], Bounds], reason: str | None
) -> Outcome:
    """Read a cell's score from its summary."""
    found = Outcome(cell.algorithm, cell.task, cell.seed, reason=reason)
    if reason is not None:
        return found
    summary = json.loads((cell.run / SUMMARY).read_text(encoding="utf-8"))
    section = cell.tree[arena.algorithms[cell.algorithm].trained_by]
    metrics, turns = summary["eval_end"], section["num_turns"]
    ends = bounds[cell.algorithm, cell.task]
    episodes = TASKS[cell.task].episodes * section["eval_answers"]
    value = episode_value(metrics, turns)
    return replace(
        found,
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
    """Replace a task's value by that of play with other seeds' agents."""
    found = []
    for one in outcomes:
        if one.reason is None and TASKS[one.task].cross_play:
            same = [o for o in outcomes if (o.algorithm, o.task) == (one.algorithm, one.task)]
            seeds = [o.seed for o in same if o.reason is None]
            one = replace(one, value=None, score=None, noise=None)  # those of play with itself
            if len(seeds) < 2:
                one = replace(one, reason="no other seed to play with")
            else:
                played = _strangers(arena, one.algorithm, one.task, tuple(seeds))
                if isinstance(played, str):
                    one = replace(one, reason=played)
                else:
                    score = bounds[one.algorithm, one.task].score(played[one.seed])
                    one = replace(one, value=played[one.seed], score=score)
        found.append(one)
    return found


def _strangers(
    arena: Arena, algorithm: str, task: str, seeds: tuple[int, ...]
) -> dict[int, float] | str:
    """Map each seed to its mean value in cross-play, read from the result of ``evaluate.py
    --cross-play``; or return why there is none."""
    name = f"{algorithm}_{task}_{'_'.join(map(str, seeds))}"
    file = arena.out / "cross_play" / f"{name}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        runs = [str(arena.cell(algorithm, task, seed).run) for seed in seeds]
        answers = max(1, arena_cells.EPISODES // TASKS[task].episodes)
        line = [sys.executable, "-m", LAUNCH, "evaluate", "--cross-play", *runs]
        line += ["--samples", str(answers), "--out", str(file)]
        done = subprocess.run(line, env=environment(1), capture_output=True, text=True)
        if done.returncode:
            return f"cross-play: {last_error(done.stderr)}"
    matrix = json.loads(file.read_text(encoding="utf-8"))["matrices"]["reward_mean"]
    return dict(zip(seeds, cross_play_values(matrix), strict=True))


def write(arena: Arena, outcomes: Sequence[Outcome]) -> None:
    """Write ``arena.json``, ``arena.md`` and ``arena.png``, and print the table and the heat
    map."""
    from comlrl.loggers.report.heat_map import write_heat_map
    from comlrl.loggers.score_tables import score_shades, score_table

    found, names = entries(outcomes), list(arena.algorithms)
    result = {
        "joint_actions": arena.joint_actions,
        "seeds": list(arena.seeds),
        "table": [
            {"algorithm": name, "task": task, **asdict(entry)}
            for (name, task), entry in found.items()
        ],
        "cells": [asdict(one) for one in outcomes],
    }
    arena.out.mkdir(parents=True, exist_ok=True)
    files.replace(arena.out / "arena.json", json.dumps(result, indent=1) + "\n")
    table = score_table(found, names, arena.tasks)
    files.replace(arena.out / "arena.md", table)
    scores = [[found[name, task].mean for task in arena.tasks] for name in names]
    means = [[math.nan if mean is None else mean for mean in row] for row in scores]
    title = "Score: 0 is the floor, 1 the optimum"
    write_heat_map(arena.out / "arena.png", names, arena.tasks, means, title, scale=(0.0, 1.0))
    print(f"\n{table}\n{score_shades(found, names, arena.tasks)}")
    for (name, task), entry in found.items():
        for reason in entry.reasons:
            print(f"— {name}, {task}: {reason.removeprefix('error: ')}")
    print_written(f"{arena.out}/arena.json, arena.md, arena.png")
