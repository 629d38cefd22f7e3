"""Batches of preference pairs, in which each completion is computed once for all its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from comlrl.models.agent import Agent
from comlrl.models.logprobs import action_logprobs
from comlrl.preferences.candidates import CandidateSet, Pair
from comlrl.preferences.pairs import TaskPairs
from comlrl.tasks.prompts import split_prefill
from comlrl.types import Completion, Row
from comlrl.update.accumulate import micro_batches

ROW_TOKENS = 2048  # most completion tokens of a row, whose completions share their prompt


@dataclass(frozen=True, slots=True)
class Weighted:
    """A task's pair and its weight in the loss."""

    task: TaskPairs
    pair: Pair
    weight: float = 1.0


def interleaved(tasks: Sequence[TaskPairs], weight: float = 1.0) -> list[Weighted]:
    """Return each task's first pair, then each task's second, …, so that updates mix tasks."""
    most = max((len(item.pairs) for item in tasks), default=0)
    return [
        Weighted(item, item.pairs[n], weight)
        for n in range(most)
        for item in tasks
        if n < len(item.pairs)
    ]


@dataclass
class PairBatch:
    """P pairs and the C distinct candidates that they consist of."""

    candidates_C: list[tuple[CandidateSet, int]] = field(default_factory=list)
    winner_P: list[int] = field(default_factory=list)  # indices into the candidates
    loser_P: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @classmethod
    def from_pairs(cls, pairs: Sequence[Weighted]) -> PairBatch:
        batch = cls()
        index: dict[Any, int] = {}
        for item in pairs:
            candidates = item.task.candidates
            for chosen, places in (
                (item.pair.winner, batch.winner_P),
                (item.pair.loser, batch.loser_P),
            ):
                key = (candidates.round, candidates.task_id, chosen)
                if key not in index:
                    index[key] = len(index)
                    batch.candidates_C.append((candidates, chosen))
                places.append(index[key])
            batch.weights.append(item.weight)
        return batch

    @property
    def weight_P(self) -> torch.Tensor:
        return torch.tensor(self.weights, dtype=torch.float64)

    def differences(self, value_C: torch.Tensor) -> torch.Tensor:
        """Return the winner's minus the loser's value for each pair; shape (P,)."""
        return value_C[self.winner_P] - value_C[self.loser_P]

    def coefficients(self, weight_P: torch.Tensor) -> torch.Tensor:
        """Return the gradient of Σ weight · difference with respect to value_C; shape (C,)."""
        value_C = torch.zeros(len(self.candidates_C), dtype=weight_P.dtype)
        value_C.index_add_(0, torch.tensor(self.winner_P, dtype=torch.long), weight_P)
        value_C.index_add_(0, torch.tensor(self.loser_P, dtype=torch.long), -weight_P)
        return value_C


class TokenizedCompletion(NamedTuple):
    """One agent's prompt and completion as token ids."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


def distinct_completions(
    agent: Agent, candidates_C: Sequence[tuple[CandidateSet, int]], sampled_here: bool = False
) -> tuple[list[TokenizedCompletion], list[int]]:
    """Return the agent's U distinct completions, and each candidate's index into them.

    ``sampled_here``: this run's agents sampled the candidates; false: they come from a user's file.
    """
    prompts: dict[Any, tuple[int, ...]] = {}
    place: dict[TokenizedCompletion, int] = {}
    owner_C = []
    for candidates, k in candidates_C:
        prompt = candidates.read_by(agent.index, k)
        completion = candidates.candidates_K[k].completions_N[agent.index]
        without_prefill, prefill = split_prefill(prompt)
        if not completion.text.startswith(prefill):  # written without the prefill
            prompt, prefill = without_prefill, ""
        if prompt not in prompts:
            prompts[prompt] = tuple(agent.encode(prompt))
        ids = completion.token_ids if sampled_here else completion_ids(agent, completion, prefill)
        tokenized = TokenizedCompletion(prompts[prompt], ids)
        owner_C.append(place.setdefault(tokenized, len(place)))
    return list(place), owner_C


def all_candidates(tasks: Sequence[TaskPairs]) -> list[tuple[CandidateSet, int]]:
    return [(t.candidates, k) for t in tasks for k in range(len(t.candidates.candidates_K))]


def rows_of(completions_U: Sequence[TokenizedCompletion], weights: Sequence[float]) -> list[Row]:
    """Pack completions of the same prompt into rows, leaving out those with weight 0."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for u, completion in enumerate(completions_U):
        if weights[u] != 0 and completion.ids:
            by_prompt.setdefault(completion.prompt_ids, []).append(u)
    return [
        Row(
            prompt_ids,
            tuple(completions_U[u].ids for u in part),
            tuple(weights[u] for u in part),
            tuple(part),
        )
        for prompt_ids, members in by_prompt.items()
        for part in _parts(members, [len(completions_U[u].ids) for u in members])
    ]


@torch.no_grad()
def logprobs(
    agent: Agent, completions_U: Sequence[TokenizedCompletion], temperature: float
) -> torch.Tensor:
    """Compute log π of each completion; shape (U,), float64, on the CPU."""
    value_U = torch.zeros(len(completions_U), dtype=torch.float64)
    for packed in micro_batches(agent, rows_of(completions_U, [1.0] * len(completions_U))):
        chosen = action_logprobs(agent, packed, temperature)
        owner_A = packed.completion_RL[packed.action_mask_RL]
        value_U.index_add_(0, owner_A, chosen.logprob_A.double().cpu())
    return value_U


def completion_ids(agent: Agent, completion: Completion, prefill: str = "") -> tuple[int, ...]:
    """Return the token ids of a completion from a file.

    The stored ids are used if they decode to the text. Otherwise (preferences of another model, or
    written by hand) the agent's tokenizer encodes the text, with end-of-sequence if the completion
    is finished. ``prefill``: the beginning of the text, whose tokens belong to the prompt.
    """
    ids, text = completion.token_ids, completion.text.removeprefix(prefill)
    if ids and min(ids) >= 0 and max(ids) < agent.vocabulary:
        decoded = agent.decode(ids)
        if decoded == text or (text and decoded.startswith(text)):  # ids may include a stop text
            return ids
    encoded = agent.encoder.encode_text(text)
    return (*encoded, agent.stop_ids[0]) if completion.finished else tuple(encoded)


def _parts(members: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Group consecutive members with at most ``ROW_TOKENS`` tokens, or single ones."""
    parts: list[list[int]] = []
    room = 0
    for member, length in zip(members, lengths, strict=True):
        if not parts or length > room:
            parts.append([])
            room = ROW_TOKENS
        parts[-1].append(member)
        room -= length
    return parts


class ReferenceValues:
    """log π of a round's completions under the reference, computed at the round's start. Stored in
    checkpoints, because the policies of that time no longer exist later in the round."""

    def __init__(self, agents: int) -> None:
        self.round = -1
        self.moved = True  # whether the policies were updated since the round's start
        self.known_N: list[dict[TokenizedCompletion, float]] = [{} for _ in range(agents)]
        self._values_N = [torch.zeros(0, dtype=torch.float64) for _ in range(agents)]

    def take(self, round_index: int, values_N: Sequence[torch.Tensor]) -> None:
        self.round, self.moved, self._values_N = round_index, False, list(values_N)

    def name(self, completions_NU: Sequence[Sequence[TokenizedCompletion]]) -> None:
        """Record which completions the values belong to."""
        self.known_N = [
            dict(zip(completions_U, values.tolist(), strict=True))
            for completions_U, values in zip(completions_NU, self._values_N, strict=True)
        ]

    def values_of(self, index: int, completions_U: Sequence[TokenizedCompletion]) -> torch.Tensor:
        """Return the values of agent ``index``; shape (U,)."""
        return torch.tensor(
            [self.known_N[index][completion] for completion in completions_U], dtype=torch.float64
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        values = {f"agent_{i}": values for i, values in enumerate(self._values_N)}
        return values | {"round": torch.tensor(self.round), "moved": torch.tensor(self.moved)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.round = int(tensors["round"])
        self.moved = bool(tensors.get("moved", True))  # older checkpoints lack it
        self._values_N = [tensors[f"agent_{i}"] for i in range(len(self._values_N))]
