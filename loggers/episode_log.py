"""``episodes.jsonl`` (``output.verbose``): every episode in full, rotated by size.

The current file is ``episodes.jsonl``; older ones are ``episodes.1.jsonl`` (the oldest),
``episodes.2.jsonl``, …
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any, TextIO

from comlrl import files
from comlrl.loggers.conversations import played
from comlrl.loggers.samples import episode
from comlrl.loop.records import Logger, LogMark, LogRecord
from comlrl.types import Domain, EpisodeGroup, RolloutResult, Tree

ROTATE_BYTES = 64 * 2**20


class EpisodeLogger(Logger):
    """Logger of one line per scored joint action: prompts, completions, reward and its parts."""

    def __init__(
        self, path: str | Path, domain: Domain, *, rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        self._path, self._domain = Path(path), domain
        self._rotate_bytes = rotate_bytes
        self._file: TextIO | None = None

    def begin(self, mark: LogMark) -> None:
        for path in (*self._rotated(), self._path):
            files.keep(path, lambda _, line: line["update"] <= mark.update)
        self._file = self._path.open("a", encoding="utf-8")

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        assert self._file is not None, "begin comes first"
        head = {"step": record.step, "update": record.update, "phase": record.phase}
        for tree in trees:
            for line in episode_lines(tree, self._domain):
                self._file.write(json.dumps(head | line) + "\n")
        self._file.flush()
        if self._file.tell() >= self._rotate_bytes:
            self._rotate()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _rotated(self) -> list[Path]:
        return sorted(self._path.parent.glob(f"{self._path.stem}.[0-9]*{self._path.suffix}"))

    def _rotate(self) -> None:
        self.close()
        numbers = [path.suffixes[-2][1:] for path in self._rotated()]  # some may have been deleted
        number = 1 + max((int(n) for n in numbers if n.isdecimal()), default=0)
        self._path.rename(self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}"))
        self._file = self._path.open("w", encoding="utf-8")


def episode_lines(result: RolloutResult, domain: Domain) -> Iterator[dict[str, Any]]:
    """Yield each scored joint action of a task as JSON values."""
    for line in _of_result(result, domain):
        yield {"task_id": result.task.task_id, **line}


@singledispatch
def _of_result(result: RolloutResult, domain: Domain) -> Iterator[dict[str, Any]]:
    raise TypeError(f"no rollout: {result!r}")


@_of_result.register
def _of_group(group: EpisodeGroup, domain: Domain) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(group.episodes_G):
        yield {"episode": number, "processed_reward": each.reward, **played(group, each, domain)}


@_of_result.register
def _of_tree(tree: Tree, domain: Domain) -> Iterator[dict[str, Any]]:
    for index, node in enumerate(tree.nodes):
        for action in range(len(node.scores_K)):
            prompts = [
                [{"role": m.role, "content": m.content} for m in turn.prompt]
                for turn, _ in tree.team(index, action)
            ]
            yield {
                "node": index,
                "parent": node.parent,
                "joint_action": action,
                "processed_reward": node.rewards_K[action],
                "prompts_N": prompts,
                **episode(tree, index, action, domain),
            }
