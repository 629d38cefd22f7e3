"""Samples the joint candidates of all training tasks once, and keeps them in the run directory.

Sampling is keyed and the policy is still the first one, so that a collection that was interrupted
goes on where it stopped and comes to the same candidates.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from comlrl.preferences.candidates import (
    CandidateSet,
    PreferenceError,
    append_sets,
    drop_torn_line,
    read_sets,
)
from comlrl.preferences.pairs import (
    TaskPairs,
    hold_out,
    summarize,
    task_pairs,
    tasks_at_once,
)
from comlrl.processes import distributed
from comlrl.rollout.grow import Rollout
from comlrl.types import Sampling, Shape, Task

FILE, SUMMARY = "preferences.jsonl", "preferences_summary.json"


class Stage(Protocol):
    """What a stage before the training steps needs of their loop (``comlrl/loop/loop.py``)."""

    run_dir: Path
    tasks: Sequence[Task]
    counters: Any
    progress: Any

    def watch(self) -> AbstractContextManager[None]: ...

    def heed(self, saved: Path) -> None: ...


class Collector:
    """Preference pairs of a run: (training, held out)."""

    def __init__(
        self,
        section: Any,
        rollout: Rollout,
        loop: Stage,
        sampling: Sampling,
        *,
        seed: int,
        resume: bool,
    ) -> None:
        """``section``: a ``PreferenceConfig``. ``resume``: go on with what the run directory
        holds; else an older file there is replaced."""
        self.section, self.rollout, self.loop, self.sampling = section, rollout, loop, sampling
        self.seed, self.resume = seed, resume
        self.shape = Shape(section.num_agents, 1, section.preference_num_candidates)

    def pairs(self) -> tuple[list[TaskPairs], list[TaskPairs]]:
        """Read or sample the candidates, pair them, and write the summary.

        Raises PreferenceError where nothing can be learned from them, and Interrupted on a signal.
        """
        sets = self._read() if self.section.preferences is not None else self._collect()
        section = self.section
        every = task_pairs(
            sets,
            section.pair_selection,
            section.preference_pairs_per_sample,
            self.seed,
        )
        train, held_out = hold_out(every, section.preference_holdout, self.seed)
        if distributed.is_main():
            summary = summarize(every, held_out)
            (self.loop.run_dir / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
            say(
                f"{summary['pairs']} pairs from {summary['candidates']} joint candidates of "
                f"{summary['tasks']} tasks; {summary['ties_dropped']} ties dropped, "
                f"{summary['held_out_pairs']} pairs held out"
            )
        return train, held_out

    def _read(self) -> list[CandidateSet]:
        """Another run's candidates of this run's training tasks."""
        path = Path(self.section.preferences)
        path = path / FILE if path.is_dir() else path
        sets = {item.task_id: item for item in read_sets(path, self.section.num_agents)}
        self._remember(path)
        known = [sets[t.task_id] for t in self.loop.tasks if t.task_id in sets]
        if not known:
            raise PreferenceError(
                f"preferences: none of the {len(sets)} tasks in '{path}' is in this run's "
                "training split; check dataset.name and dataset.train_split"
            )
        missing = len(self.loop.tasks) - len(known)
        if missing:
            say(f"'{path}' has no candidates for {missing} of {len(self.loop.tasks)} tasks")
        return known

    def _collect(self) -> list[CandidateSet]:
        path, counters = self.loop.run_dir / FILE, self.loop.counters
        begun = "preferences" in counters.extra  # resuming behind the collection
        if begun and not path.exists():
            raise PreferenceError(f"'{path}' is missing; the run cannot go on without it")
        have = self._kept(path)
        started = time.monotonic()
        if any(task.task_id not in have for task in self.loop.tasks):
            with self.loop.watch():
                have = self._sample(path, have)
        sets = [have[task.task_id] for task in self.loop.tasks]
        if not begun:
            self._count(sets, time.monotonic() - started)
        self._remember(path)
        return sets

    def _kept(self, path: Path) -> dict[str, CandidateSet]:
        """What an interrupted collection of this run has left."""
        if distributed.is_main():
            if path.exists() and self.resume:
                drop_torn_line(path)
            else:
                path.write_bytes(b"")
        distributed.everyone(None)  # nobody reads before the file is as it should be
        whole = path.stat().st_size > 0
        sets = read_sets(path, self.section.num_agents) if whole else []
        distributed.everyone(None)  # nor writes before all have read
        return {item.task_id: item for item in sets}

    def _sample(self, path: Path, have: dict[str, CandidateSet]) -> dict[str, CandidateSet]:
        """Complete ``have``, some tasks at a time; what they came to is saved at once."""
        self.loop.progress.begin("collecting preferences")
        left = [task for task in self.loop.tasks if task.task_id not in have]
        size = tasks_at_once(self.section.batch_size, self.section.preference_num_candidates)
        started, done = time.monotonic(), len(have)
        if have:
            say(f"going on behind {done} tasks that '{path}' holds")
        for at in range(0, len(left), size):
            grown = self._grow(left[at : at + size])
            have |= {item.task_id: item for item in grown}
            if distributed.is_main():
                append_sets(path, grown)
                say(_progress(len(have), len(have) - done, len(self.loop.tasks), started))
            self.loop.heed(path)
        return have

    def _grow(self, tasks: Sequence[Task]) -> list[CandidateSet]:
        own = distributed.share(tasks)
        trees = self.rollout.grow(own, self.shape, self.sampling, ("preferences",))
        return distributed.gather([CandidateSet.of(tree) for tree in trees])

    def _count(self, sets: Sequence[CandidateSet], seconds: float) -> None:
        """Candidates are scored joint actions, though not always steps of the x-axis."""
        counters = self.loop.counters
        candidates = [candidate for item in sets for candidate in item.candidates_K]
        counters.scored_joint_actions += len(candidates)
        counters.sampled_tokens += sum(
            len(completion.token_ids) for c in candidates for completion in c.completions_N
        )
        counters.train_seconds += seconds

    def _remember(self, path: Path) -> None:
        """Checkpoints name the file that the run learns from; another one is refused."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        extra = self.loop.counters.extra
        if extra.setdefault("preferences", digest) != digest:
            raise PreferenceError(
                f"preferences: '{path}' has changed since this run began; put the old file back"
            )


def say(text: str) -> None:
    if distributed.is_main():
        print(f"preferences: {text}", flush=True)


def _progress(done: int, fresh: int, total: int, started: float) -> str:
    rate = fresh / max(time.monotonic() - started, 1e-9)
    minutes, seconds = divmod(round((total - done) / rate), 60)
    return f"{done}/{total} tasks, {rate:.2f} tasks/s, {minutes}:{seconds:02d} left"
