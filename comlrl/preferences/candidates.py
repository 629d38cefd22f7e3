"""Joint candidates of a task: stored in the run directory, loaded, and joined into one text.

``preferences.jsonl`` has one line for each task of each round: the round, the task's id, each
agent's prompt, and the joint candidates with their completions and raw task rewards. If agents act
sequentially, each candidate also contains its agents' full prompts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comlrl.errors import UserError
from comlrl.quoting import clean_json
from comlrl.run_files import PREFERENCES
from comlrl.tasks.prompts import split_prefill
from comlrl.types import Completion, Message, Tree

ROUNDING = 1e-9  # rewards that differ by less are equal: sums of terms differ in the last bit


class PreferenceError(UserError):
    """Preferences that cannot be read or learned from; the message says what to do."""


@dataclass(frozen=True, slots=True)
class JointCandidate:
    """One joint action with its raw task reward."""

    completions_N: tuple[Completion, ...]
    reward: float
    # each agent's prompt; None: the task's prompts, as all agents acted simultaneously
    prompts_N: tuple[tuple[Message, ...], ...] | None = None

    @property
    def texts_N(self) -> tuple[str, ...]:
        return tuple(completion.text for completion in self.completions_N)


@dataclass(frozen=True, slots=True)
class Pair:
    """Indices of two joint candidates of one task, and the difference of their task rewards
    (> 0)."""

    winner: int
    loser: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSet:
    """One task's scored joint candidates in one round."""

    task_id: str
    prompts_N: tuple[tuple[Message, ...], ...]  # without texts of other agents in the turn
    candidates_K: tuple[JointCandidate, ...]
    round: int = 0

    @classmethod
    def from_tree(
        cls,
        tree: Tree,
        round_index: int = 0,
        prompts_N: tuple[tuple[Message, ...], ...] | None = None,
    ) -> CandidateSet:
        """Build the set from the joint actions of a single-turn tree.

        ``prompts_N``: the task's prompts, if agents act sequentially; None: those of the root.
        """
        candidates = []
        for index, node in enumerate(tree.nodes):
            for action, score in enumerate(node.scores_K):
                turns, completions = zip(*tree.team(index, action), strict=True)
                read = None if prompts_N is None else tuple(turn.prompt for turn in turns)
                candidates.append(JointCandidate(completions, score.value, read))
        if prompts_N is None:
            prompts_N = tuple(turn.prompt for turn in tree.nodes[0].agents_N)
        return cls(
            task_id=tree.task.task_id,
            prompts_N=prompts_N,
            candidates_K=tuple(candidates),
            round=round_index,
        )

    def read_by(self, agent: int, candidate: int) -> tuple[Message, ...]:
        """Return the prompt that an agent answered in a candidate."""
        return (self.candidates_K[candidate].prompts_N or self.prompts_N)[agent]

    def joined(self, other: CandidateSet) -> CandidateSet:
        """Return this task's candidates together with those of another round."""
        return replace(self, candidates_K=self.candidates_K + other.candidates_K)


def joint_text(
    prompts_N: Sequence[str], responses_N: Sequence[str], prompts_first: bool = False
) -> str:
    """Return a joint action as one text.

    The order is each agent's prompt and response or, with ``prompts_first``, all prompts and then
    all responses.
    """
    parts = [text for pair in zip(prompts_N, responses_N, strict=True) for text in pair]
    if prompts_first:
        parts = [*prompts_N, *responses_N]
    return "\n".join(part.strip("\n") for part in parts) + "\n"


def joint_texts(candidates: CandidateSet, prompts_first: bool = False) -> list[str]:
    """Return ``joint_text`` of each candidate."""
    asked_N = [split_prefill(prompt)[0] for prompt in candidates.prompts_N]
    prompts_N = ["\n".join(m.content for m in prompt) for prompt in asked_N]
    return [joint_text(prompts_N, c.texts_N, prompts_first) for c in candidates.candidates_K]


def append_sets(path: Path, sets: Sequence[CandidateSet]) -> None:
    """Append lines in a single write and flush them to disk."""
    lines = "".join(json.dumps(_to_json(item)) + "\n" for item in sets)
    with path.open("ab", buffering=0) as file:
        file.write(lines.encode())
        os.fsync(file.fileno())


def drop_after(path: Path, round_index: int) -> None:
    """Remove what a crash left of a last line, and the rounds after ``round_index``."""
    content = path.read_bytes()
    valid_bytes = 0
    for line in content.splitlines(keepends=True):
        try:
            is_later = json.loads(line).get("round", 0) > round_index
        except (ValueError, AttributeError, TypeError):
            break
        if is_later or not line.endswith(b"\n"):
            break
        valid_bytes += len(line)
    if valid_bytes < len(content):
        os.truncate(path, valid_bytes)


def preferences_file(folder_or_file: str) -> Path:
    """Return the file that the key ``preferences`` refers to, directly or by a run's folder."""
    path = Path(folder_or_file)
    return path / PREFERENCES if path.is_dir() else path


def read_sets(path: Path, num_agents: int) -> list[CandidateSet]:
    """Read a ``preferences.jsonl``. Raises PreferenceError naming the file and line.

    ``token_ids``, ``finished`` and ``round`` may be missing, as in files written by hand:
    completions then have no token ids and count as finished, and the round is 0.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PreferenceError(f"preferences: '{path}' cannot be read: {error}") from error
    sets = []
    for number, line in enumerate(lines, 1):
        try:
            item = _from_json(clean_json(json.loads(line)))
        except (
            ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            raise PreferenceError(
                f"preferences: line {number} of '{path}' is not a candidate set "
                f"({type(error).__name__}: {error})"
            ) from error
        sizes = {len(item.prompts_N), *(len(c.completions_N) for c in item.candidates_K)}
        sizes |= {len(c.prompts_N) for c in item.candidates_K if c.prompts_N is not None}
        if sizes != {num_agents}:
            raise PreferenceError(
                f"preferences: line {number} of '{path}' is of {min(sizes - {num_agents})} "
                f"agents, and num_agents={num_agents}"
            )
        sets.append(item)
    return sets


def _to_json(item: CandidateSet) -> dict[str, Any]:
    return {
        "round": item.round,
        "task_id": item.task_id,
        "prompts": _prompts_to_json(item.prompts_N),
        "candidates": [
            {
                "reward": candidate.reward,
                "completions": list(candidate.texts_N),
                "token_ids": [list(c.token_ids) for c in candidate.completions_N],
                "finished": [c.finished for c in candidate.completions_N],
                **(
                    {}
                    if candidate.prompts_N is None
                    else {"prompts": _prompts_to_json(candidate.prompts_N)}
                ),
            }
            for candidate in item.candidates_K
        ],
    }


def _prompts_to_json(prompts_N: Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    return [
        [
            {"role": m.role, "content": m.content} | ({"verbatim": True} if m.verbatim else {})
            for m in prompt
        ]
        for prompt in prompts_N
    ]


def _prompts_from_json(prompts: Sequence[Any]) -> tuple[tuple[Message, ...], ...]:
    if not all(prompts):
        raise ValueError("a prompt has no message")
    return tuple(
        tuple(Message(m["role"], _text(m["content"]), m.get("verbatim") is True) for m in prompt)
        for prompt in prompts
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a text")
    return value


def _from_json(line: dict[str, Any]) -> CandidateSet:
    if "pairs" in line:
        raise ValueError("its pairs are a comparator's, which are no longer read")
    candidates = []
    for candidate in line["candidates"]:
        texts = candidate["completions"]
        ids = candidate.get("token_ids") or [()] * len(texts)
        finished = candidate.get("finished") or [True] * len(texts)
        completions = tuple(
            Completion(_text(text), tuple(map(int, token_ids)), done is True)
            for text, token_ids, done in zip(texts, ids, finished, strict=True)
        )
        read = _prompts_from_json(candidate["prompts"]) if "prompts" in candidate else None
        reward = float(candidate["reward"])
        if not math.isfinite(reward):
            raise ValueError(f"reward: {reward}; write a finite number")
        candidates.append(JointCandidate(completions, reward, read))
    prompts = _prompts_from_json(line["prompts"])
    round_index = int(line.get("round", 0))
    return CandidateSet(
        task_id=str(line["task_id"]),
        prompts_N=prompts,
        candidates_K=tuple(candidates),
        round=round_index,
    )
