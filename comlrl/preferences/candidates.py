"""Joint candidates of a task: kept in the run directory, read back, told as one text.

``preferences.jsonl`` holds one line for each task: its id, each agent's prompt, and the joint
candidates with their completions and raw task rewards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl.types import Completion, Message, Tree


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
