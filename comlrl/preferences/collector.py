"""Samples and labels the joint candidates of each round, and stores them in the run directory.

Sampling is keyed, and a resumed run restores the policies of the round's start. An interrupted
collection therefore continues where it stopped, with the same candidates.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from comlrl import files
from comlrl.config.algorithms import PreferenceConfig
from comlrl.errors import notice
from comlrl.preferences.candidates import (
    CandidateSet,
    PreferenceError,
    append_sets,
    drop_after,
    preferences_file,
    read_sets,
)
from comlrl.preferences.pairs import (
    Round,
    check_some,
    hold_out,
    summarize,
    task_pairs,
    tasks_at_once,
)
from comlrl.preferences.replay import replay_weights
from comlrl.processes import distributed
from comlrl.processes.distributed import Deal
from comlrl.rollout.grow import Rollout
from comlrl.run_files import PREFERENCES, PREFERENCES_SUMMARY
from comlrl.types import Sampling, Task


class Stage(Protocol):
    """The interface that the training loop (``comlrl/loop/loop.py``) provides."""

    run_dir: Path

    @property
    def tasks(self) -> Sequence[Task]: ...

    @property
    def notes(self) -> dict[str, Any]: ...

    def deal(self, tasks: Sequence[Task]) -> Deal: ...

    def count(self, *, scored: int, tokens: int) -> None: ...

    def watch(self, work: str) -> AbstractContextManager[None]: ...

    def heed(self, saved: Path) -> None: ...


class Collector:
    """Collects the labelled candidates of a run, round by round."""

    def __init__(
        self,
        section: PreferenceConfig,
        rollout: Rollout,
        loop: Stage,
        sampling: Sampling,
        tasks_of: Callable[[int], Sequence[Task]],
        *,
        seed: int,
        resume: bool,
    ) -> None:
        """Set up the collector. ``tasks_of``: round index → its tasks.

        ``resume``: continue with the file in the run directory; otherwise replace it.
        """
        self.section, self.rollout, self.loop, self.sampling = section, rollout, loop, sampling
        self.tasks_of, self.seed, self.resume = tasks_of, seed, resume
        self.shape = section.candidate_shape
        self._rounds: list[Round] = []
        self._stored: list[CandidateSet] | None = None  # written to the file by earlier processes

    def round(self, index: int) -> Round:
        """Return round ``index``, sampled from the current policies unless it is already stored.

        Raises PreferenceError if it has no pairs to learn from, and Interrupted on a signal.
        """
        while len(self._rounds) <= index:
            self._rounds.append(self._label(len(self._rounds), index))
        return self._rounds[index]

    @property
    def labelled(self) -> int:
        """Number of joint candidates of all rounds so far."""
        every = (item for made in self._rounds for item in made.tasks)
        return sum(len(item.candidates.candidates_K) for item in every)

    def replayed(self, index: int) -> list[tuple[Round, float]]:
        """Return the earlier rounds that round ``index`` also trains on, with pair weights."""
        section = self.section
        weights = replay_weights(
            section.replay, index, section.replay_rounds, section.replay_lambda
        )
        return [(self._rounds[earlier], weight) for earlier, weight in weights.items()]

    def _label(self, index: int, present: int) -> Round:
        section = self.section
        if section.preferences is None:
            sets = self._collect(index, present)
        else:
            sets = self._read(preferences_file(section.preferences))
        every = task_pairs(
            sets, section.pair_selection, section.preference_pairs_per_sample, self.seed
        )
        if index == 0:
            check_some(every)
        train, held_out = hold_out(every, section.preference_holdout, self.seed, self._rounds)
        made = Round(index, tuple(every), tuple(train), tuple(held_out))
        if distributed.is_main() and index == present:
            self._sum_up([*self._rounds, made])
        return made

    def _sum_up(self, rounds: Sequence[Round]) -> None:
        every = [item for made in rounds for item in made.tasks]
        summary = summarize(every, [item for made in rounds for item in made.held_out])
        files.replace(self.loop.run_dir / PREFERENCES_SUMMARY, json.dumps(summary, indent=1) + "\n")
        last = summarize(rounds[-1].tasks, rounds[-1].held_out)
        which = f"round {len(rounds)}: " if self.section.num_iterations > 1 else ""
        say(
            f"{which}{last['pairs']} pairs from {last['candidates']} joint candidates of "
            f"{last['tasks']} tasks; {last['ties_dropped']} ties dropped, "
            f"{last['held_out_pairs']} pairs held out"
        )

    def _read(self, path: Path) -> list[CandidateSet]:
        """Read candidates of all rounds of another run for this run's training tasks."""
        sets: dict[str, CandidateSet] = {}
        for item in read_sets(path, self.section.num_agents):
            earlier = sets.get(item.task_id)
            sets[item.task_id] = replace(item, round=0) if earlier is None else earlier.joined(item)
        self._remember(path, 0)
        known_tasks = [sets[t.task_id] for t in self.loop.tasks if t.task_id in sets]
        if not known_tasks:
            raise PreferenceError(
                f"preferences: none of the {len(sets)} tasks in '{path}' is in this run's "
                "training split; check dataset.name and dataset.train_split"
            )
        missing = len(self.loop.tasks) - len(known_tasks)
        if missing:
            say(f"'{path}' has no candidates for {missing} of {len(self.loop.tasks)} tasks")
        return known_tasks

    def _collect(self, index: int, present: int) -> list[CandidateSet]:
        """Collect round ``index``; rounds before ``present`` are read from the file."""
        path = self.loop.run_dir / PREFERENCES
        if self._stored is None:
            self._stored = self._go_on(path, present)
        have = {item.task_id: item for item in self._stored if item.round == index}
        tasks = self.tasks_of(index)
        if any(task.task_id not in have for task in tasks):
            assert index == present, "an earlier round lies whole in the file"
            with self.loop.watch("collecting preferences"):
                have = self._sample(path, index, tasks, have)
        sets = [have[task.task_id] for task in tasks]
        if index >= self._remembered.get("rounds", 0):
            self._count(sets)
            self._remember(path, index)
        return sets

    @property
    def _remembered(self) -> dict[str, Any]:
        """The file's rounds, length and checksum as recorded in the checkpoint."""
        return self.loop.notes.get("preferences", {})

    def _go_on(self, path: Path, present: int) -> list[CandidateSet]:
        """Return the candidates stored by earlier processes of this run."""
        if self._remembered and not path.exists():
            raise PreferenceError(f"'{path}' is missing; the run cannot continue without it")
        if distributed.is_main():
            if path.exists() and self.resume:
                drop_after(path, present)
            else:
                path.write_bytes(b"")
        distributed.all_gather(None)  # no process reads before the file is ready
        if self._remembered:
            self._check(path)
        has_content = path.stat().st_size > 0
        sets = read_sets(path, self.section.num_agents) if has_content else []
        distributed.all_gather(None)  # no process writes before all have read
        if sets and not self._remembered:
            say(f"continuing after the {len(sets)} tasks that '{path}' holds")
        return sets

    def _sample(
        self, path: Path, index: int, tasks: Sequence[Task], have: dict[str, CandidateSet]
    ) -> dict[str, CandidateSet]:
        """Sample the tasks missing in ``have``, some at a time, saving each result immediately."""
        left = [task for task in tasks if task.task_id not in have]
        size = tasks_at_once(self.section.batch_size, self.section.preference_num_candidates)
        started, done = time.monotonic(), len(have)
        for at in range(0, len(left), size):
            grown = self._grow(left[at : at + size], index)
            have |= {item.task_id: item for item in grown}
            if distributed.is_main():
                append_sets(path, grown)
                if index == 0:
                    say(_progress(len(have), len(have) - done, len(tasks), started))
            self.loop.heed(path)
        return have

    def _grow(self, tasks: Sequence[Task], index: int) -> list[CandidateSet]:
        deal, key = self.loop.deal(tasks), ("preferences", index)
        trees = self.rollout.grow(deal.shard(tasks), self.shape, self.sampling, key)
        in_order = len(self.shape.stages) > 1  # prompts contain texts of earlier agents
        first_N, count = self.rollout.prompts.first_N, self.section.num_agents
        sets = [
            CandidateSet.from_tree(tree, index, first_N(tree.task, count) if in_order else None)
            for tree in trees
        ]
        return deal.gather(sets)

    def _count(self, sets: Sequence[CandidateSet]) -> None:
        """Count candidates as scored joint actions; the trainers count which are ``env_steps``."""
        shape = self.shape
        candidates = [candidate for item in sets for candidate in item.candidates_K]
        tokens = sum(len(c.token_ids) for each in candidates for c in each.completions_N)
        cross = shape.joint_mode == "cross"  # each completion is in ``often`` joint candidates
        often = shape.num_generations ** (shape.num_agents - 1) if cross else 1
        self.loop.count(scored=len(candidates), tokens=tokens // often)

    def _remember(self, path: Path, index: int) -> None:
        """Record in checkpoints which part of the file the run has learned from.

        Raises PreferenceError if a file other than the recorded one is read.
        """
        if self._remembered and self.section.preferences is not None:
            self._check(path)
            return
        content = path.read_bytes()
        facts = {
            "rounds": index + 1,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self.loop.notes["preferences"] = facts

    def _check(self, path: Path) -> None:
        with path.open("rb") as file:
            content = file.read(self._remembered["bytes"])
        if hashlib.sha256(content).hexdigest() != self._remembered["sha256"]:
            raise PreferenceError(
                f"preferences: '{path}' was changed since this run began; restore the old file"
            )


def say(text: str) -> None:
    notice(f"preferences: {text}")


def _progress(done: int, fresh: int, total: int, started: float) -> str:
    rate = fresh / max(time.monotonic() - started, 1e-9)
    minutes, seconds = divmod(round((total - done) / rate), 60)
    return f"{done}/{total} tasks, {rate:.2f} tasks/s, {minutes}:{seconds:02d} left"
