"""Joint candidates → preference pairs; MADPO and MARLHF share it.

``preferences.jsonl`` holds one line for each task: its id, each agent's prompt, and the joint
candidates with their completions and raw task rewards.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from comlrl.types import Completion, Message, Tree

Order = Callable[[tuple, int], Sequence[int]]  # (key, count) → a permutation of range(count)

AT_ONCE = 256  # joint candidates that are sampled together at least, where there are so many
ROUNDING = 1e-9  # sums of reward terms that are equal may differ in the last bit


class PreferenceError(ValueError):
    """Preferences that cannot be read or learned from; the message says what to do."""

    user_error = True


@dataclass(frozen=True, slots=True)
class JointCandidate:
    """One aligned joint action with its raw task reward."""

    completions_N: tuple[Completion, ...]
    reward: float

    @property
    def texts_N(self) -> tuple[str, ...]:
        return tuple(completion.text for completion in self.completions_N)


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """One task's scored joint candidates."""

    task_id: str
    prompts_N: tuple[tuple[Message, ...], ...]
    candidates_K: tuple[JointCandidate, ...]

    @classmethod
    def of(cls, tree: Tree) -> CandidateSet:
        """The joint actions of a single-turn tree."""
        root = tree.nodes[0]
        candidates = [
            JointCandidate(
                tuple(t.completions_G[g] for t, g in zip(root.agents_N, action, strict=True)),
                score.value,
            )
            for action, score in zip(root.joint_actions_K, root.scores_K, strict=True)
        ]
        return cls(
            tree.task.task_id, tuple(turn.prompt for turn in root.agents_N), tuple(candidates)
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two joint candidates of one task, by index, and the difference of their rewards (> 0)."""

    winner: int
    loser: int
    gap: float


@dataclass(frozen=True, slots=True)
class TaskPairs:
    """What is learned from one task."""

    candidates: CandidateSet
    pairs: tuple[Pair, ...]
    ties: int  # pairs of candidates with equal rewards, dropped

    @property
    def task_id(self) -> str:
        return self.candidates.task_id


def tasks_at_once(batch_size: int, num_candidates: int) -> int:
    """Tasks whose candidates are sampled and saved together; an interruption loses no more."""
    return max(batch_size, -(-AT_ONCE // num_candidates))


def select_pairs(
    rewards_K: Sequence[float],
    selection: str,
    limit: int | None,
    shuffle: Callable[[int], Sequence[int]],
) -> tuple[list[Pair], int]:
    """At most ``limit`` (winner, loser) pairs (None: all), and the number of ties dropped.

    ``reward_gap``: the largest gap first; of equal gaps the pair whose two candidates have been
    used least, then the lowest indices, so that one winner does not fill all pairs. ``random``:
    in the order of ``shuffle(count)``. ``all``: every pair.
    """
    count = len(rewards_K)
    pairs = [
        Pair(winner, loser, rewards_K[winner] - rewards_K[loser])
        for winner in range(count)
        for loser in range(count)
        if rewards_K[winner] - rewards_K[loser] > ROUNDING
    ]
    ties = count * (count - 1) // 2 - len(pairs)
    if limit is None or limit >= len(pairs):
        return pairs, ties
    if selection == "random":
        return [pairs[i] for i in shuffle(len(pairs))[:limit]], ties
    return _largest_gaps(pairs, limit, count), ties


def _largest_gaps(pairs: Sequence[Pair], limit: int, count: int) -> list[Pair]:
    def gap(pair: Pair) -> int:
        return round(pair.gap / ROUNDING)

    used = [0] * count
    chosen: list[Pair] = []
    for _, group in groupby(sorted(pairs, key=lambda p: -gap(p)), key=gap):
        equal = list(group)
        while equal and len(chosen) < limit:
            pair = min(equal, key=lambda p: (used[p.winner] + used[p.loser], p.winner, p.loser))
            equal.remove(pair)
            used[pair.winner] += 1
            used[pair.loser] += 1
            chosen.append(pair)
    return chosen


def task_pairs(
    sets: Iterable[CandidateSet], selection: str, limit: int | None, order: Order, seed: int
) -> list[TaskPairs]:
    """The pairs of each task. Raises PreferenceError where no task has any."""
    chosen = []
    for candidates in sets:
        rewards_K = [candidate.reward for candidate in candidates.candidates_K]
        key = (seed, "pairs", candidates.task_id)
        pairs, ties = select_pairs(rewards_K, selection, limit, partial(order, key))
        chosen.append(TaskPairs(candidates, tuple(pairs), ties))
    if not any(item.pairs for item in chosen):
        raise PreferenceError(
            f"preferences: no task of {len(chosen)} has two candidates with different rewards; "
            "raise preference_num_candidates or the temperature"
        )
    return chosen


def hold_out(
    tasks: Sequence[TaskPairs], share: float, order: Order, seed: int
) -> tuple[list[TaskPairs], list[TaskPairs]]:
    """(training, held-out) tasks that have pairs; whole tasks, so that no candidate is in both.

    A share above 0 holds out at least one task where there are two.
    """
    useful = [item for item in tasks if item.pairs]
    count = min(max(1, round(share * len(useful))), len(useful) - 1) if share > 0 else 0
    chosen = set(order((seed, "held-out"), len(useful))[:count])
    return (
        [item for i, item in enumerate(useful) if i not in chosen],
        [item for i, item in enumerate(useful) if i in chosen],
    )


def summarize(tasks: Sequence[TaskPairs], held_out: Sequence[TaskPairs]) -> dict[str, Any]:
    """``preferences_summary.json``: counts, and how many of the pairs kept have which gap."""
    gaps = [round(pair.gap, 6) for item in tasks for pair in item.pairs]
    return {
        "tasks": len(tasks),
        "tasks_without_pairs": sum(not item.pairs for item in tasks),
        "candidates": sum(len(item.candidates.candidates_K) for item in tasks),
        "pairs": len(gaps),
        "held_out_pairs": sum(len(item.pairs) for item in held_out),
        "ties_dropped": sum(item.ties for item in tasks),
        "gap_mean": sum(gaps) / len(gaps),
        "gaps": {f"{gap:g}": count for gap, count in sorted(Counter(gaps).items())},
    }


def joint_text(prompts_N: Sequence[str], responses_N: Sequence[str]) -> str:
    """A joint action as one text: each agent's prompt and response, in order."""
    parts = [text for pair in zip(prompts_N, responses_N, strict=True) for text in pair]
    return "\n".join(part.strip("\n") for part in parts) + "\n"


def joint_texts(candidates: CandidateSet) -> list[str]:
    """``joint_text`` of each candidate."""
    prompts_N = ["\n".join(m.content for m in prompt) for prompt in candidates.prompts_N]
    return [joint_text(prompts_N, candidate.texts_N) for candidate in candidates.candidates_K]


def append_sets(path: Path, sets: Sequence[CandidateSet]) -> None:
    """Add lines in one write, flushed to the disk."""
    lines = "".join(json.dumps(_to_json(item)) + "\n" for item in sets)
    with path.open("ab", buffering=0) as file:
        file.write(lines.encode())
        os.fsync(file.fileno())


def drop_torn_line(path: Path) -> None:
    """Cut off what a crash left of a last line, so that lines can be appended again."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_sets(path: Path, num_agents: int) -> list[CandidateSet]:
    """The lines of a ``preferences.jsonl``. Raises PreferenceError naming file and line.

    ``token_ids`` and ``finished`` may be missing, as in files made by hand: completions then have
    no token ids, and count as finished.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PreferenceError(f"preferences: '{path}' cannot be read: {error}") from error
    sets = []
    for number, line in enumerate(lines, 1):
        try:
            item = _from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise PreferenceError(
                f"preferences: line {number} of '{path}' is no candidate set "
                f"({type(error).__name__}: {error})"
            ) from error
        sizes = {len(item.prompts_N), *(len(c.completions_N) for c in item.candidates_K)}
        if sizes != {num_agents}:
            raise PreferenceError(
                f"preferences: line {number} of '{path}' is of {max(sizes)} agents; this run has "
                f"num_agents={num_agents}"
            )
        sets.append(item)
    return sets


def _to_json(item: CandidateSet) -> dict[str, Any]:
    return {
        "task_id": item.task_id,
        "prompts": [
            [{"role": m.role, "content": m.content} for m in prompt] for prompt in item.prompts_N
        ],
        "candidates": [
            {
                "reward": candidate.reward,
                "completions": list(candidate.texts_N),
                "token_ids": [list(c.token_ids) for c in candidate.completions_N],
                "finished": [c.finished for c in candidate.completions_N],
            }
            for candidate in item.candidates_K
        ],
    }


def _from_json(line: dict[str, Any]) -> CandidateSet:
    candidates = []
    for given in line["candidates"]:
        texts = given["completions"]
        ids = given.get("token_ids") or [()] * len(texts)
        finished = given.get("finished") or [True] * len(texts)
        completions = tuple(
            Completion(str(text), tuple(map(int, own)), bool(done))
            for text, own, done in zip(texts, ids, finished, strict=True)
        )
        candidates.append(JointCandidate(completions, float(given["reward"])))
    prompts = tuple(
        tuple(Message(m["role"], m["content"]) for m in prompt) for prompt in line["prompts"]
    )
    return CandidateSet(str(line["task_id"]), prompts, tuple(candidates))
