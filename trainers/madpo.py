"""MADPO: multi-agent direct preference optimization on joint preference pairs.

For each task aligned joint candidates are sampled once from the first policies and scored with
the task reward; pairs of different reward become preferences (``comlrl/preferences``). With
winner w and loser l of a pair, and P pairs in an update, agent i minimizes

    L_i = −(1/P) Σ_pairs log σ(β (Δ_i + Σ_{j≠i} stop_gradient(Δ_j)))
    Δ_i = log π_i(w_i | prompt_i) − log π_i(l_i | prompt_i)

minus the same difference under the reference policy with ``dpo_reference``. The joint policy
factorizes over the agents, so Σ_i Δ_i is the joint log-ratio of DPO (arXiv 2305.18290): all
agents pull on the same margin, each through its own weights.

Departures from DPO: no reference unless asked for; log-probabilities are those of the policy
that sampled, at its temperature. ``label_smoothing`` is that of cDPO.

Gradients go through Δ in two steps, which is the chain rule and not an approximation: first all
Δ without gradients, then each agent's backward pass with ∂L_i/∂Δ_i as the coefficient on its
completions' tokens. So a completion is read once however many pairs it is in, and micro-batches
may be split anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from comlrl.loop.loop import Loop
from comlrl.loop.steps import Gathered, Step
from comlrl.models.agent import Agent
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.preferences.collector import Collector
from comlrl.preferences.pairs import Pair, TaskPairs
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums
from comlrl.types import Completion, Part, Row, Sampling, TokenBatch
from comlrl.update.accumulate import accumulate, micro_batches
from comlrl.update.lanes import side_by_side
from comlrl.update.losses import joint_dpo, policy_gradient
from comlrl.update.minibatches import like_parts
from comlrl.update.optimizer import optimizer_of
from trainers.configs import MADPOConfig

ROW_TOKENS = 2048  # completions share a row, and with it the prompt, up to so many tokens of theirs


@dataclass
class PairBatch:
    """P pairs and the C different candidates that they are made of."""

    candidates_C: list[tuple[TaskPairs, int]] = field(default_factory=list)  # task, its candidate
    winner_P: list[int] = field(default_factory=list)  # indices into the candidates
    loser_P: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Sequence[tuple[TaskPairs, Pair]]) -> PairBatch:
        batch = cls()
        index: dict[Any, int] = {}
        for task, pair in pairs:
            for candidate in (pair.winner, pair.loser):
                if (task.task_id, candidate) not in index:
                    index[task.task_id, candidate] = len(index)
                    batch.candidates_C.append((task, candidate))
            batch.winner_P.append(index[task.task_id, pair.winner])
            batch.loser_P.append(index[task.task_id, pair.loser])
        return batch

    def differences(self, value_C: torch.Tensor) -> torch.Tensor:
        """Winner's minus loser's value of each pair, shape (P,)."""
        return value_C[self.winner_P] - value_C[self.loser_P]

    def coefficients(self, weight_P: torch.Tensor) -> torch.Tensor:
        """∂/∂value_C of Σ weight · difference, shape (C,)."""
        value_C = torch.zeros(len(self.candidates_C), dtype=weight_P.dtype)
        value_C.index_add_(0, torch.tensor(self.winner_P, dtype=torch.long), weight_P)
        value_C.index_add_(0, torch.tensor(self.loser_P, dtype=torch.long), -weight_P)
        return value_C


class MADPOTrainer:
    """Collect preferences once, then pass over their pairs; nothing is sampled in between."""

    def __init__(
        self,
        section: MADPOConfig,
        team: Team,
        loop: Loop,
        sampling: Sampling,
        collector: Collector,
    ) -> None:
        self.section, self.team, self.loop = section, team, loop
        self.sampling, self.collector = sampling, collector
        self.trained = tuple(section.train_agents or range(len(team)))
        self.pairs: dict[str, TaskPairs] | None = None  # of the training tasks
        self.held_out: list[TaskPairs] = []
        self.optimizers = {
            index: optimizer_of(
                section, team.agents[index].parameters(), section.learning_rate, index
            )
            for index in self.trained
        }
        self._reference: list[dict[tuple[str, int], float]] = [{} for _ in team.agents]

    def train(self) -> None:
        self._prepare()
        for step in self.loop.steps(self, lambda trees: self._measure()):
            self._step(step)

    def parts(self) -> Mapping[str, Part]:
        return self.team.parts() | {f"optimizer_{i}": o for i, o in self.optimizers.items()}

    def _prepare(self) -> None:
        """The pairs to train on, and those to measure with."""
        if self.pairs is None:
            train, self.held_out = self.collector.pairs()
            self.pairs = {item.task_id: item for item in train}

    def _step(self, step: Step) -> None:
        """Every pair of the step's tasks once; those held out or without pairs teach nothing."""
        assert self.pairs is not None
        tasks = [self.pairs[t.task_id] for t in step.tasks if t.task_id in self.pairs]
        pairs = _interleaved(tasks)
        scored = sum(len(item.candidates.candidates_K) for item in tasks)
        env_steps = 2 * len(pairs) if self.section.use_environment_step else scored
        span = self.loop.span(env_steps)
        parts = like_parts(len(pairs), self.section.train_batch_size)
        sums = Sums()
        norms_UN = [
            self._update(pairs[part.start : part.stop], sums, span.at(u, len(parts)))
            for u, part in enumerate(parts)
        ]
        step.clock.lap("update")
        metrics = {
            "preferences/pairs": float(len(pairs)),
            "pairs_per_second": len(pairs) / step.clock.total,
        }
        if pairs:
            metrics |= self._means(sums) | self._of_updates(norms_UN)
            metrics["preferences/gap_mean"] = sum(pair.gap for _, pair in pairs) / len(pairs)
        sampled = Gathered((), env_steps, 0, 0, span)  # the collection has counted what it scored
        self.loop.record(step, sampled, updates=len(parts), metrics=metrics)

    def _of_updates(self, norms_UN: Sequence[Sequence[float]]) -> dict[str, float]:
        """Each trained agent's largest gradient norm, their mean, and the learning rate."""
        norm_N = [max(norms_U) for norms_U in zip(*norms_UN, strict=True)]
        of_agents = {
            f"agent_{i}/gradient_norm": n for i, n in zip(self.trained, norm_N, strict=True)
        }
        return of_agents | {
            "gradient_norm": sum(norm_N) / len(norm_N),
            "learning_rate": self.optimizers[self.trained[0]].learning_rate,
        }

    def _update(
        self, pairs: Sequence[tuple[TaskPairs, Pair]], sums: Sums, progress: float
    ) -> list[float]:
        """One optimizer step of every trained agent; their gradient norms."""
        batch = PairBatch.of(distributed.share(pairs))
        delta_NP = self._deltas(batch)
        sums.absorb(self._metrics(delta_NP))
        jobs = [
            partial(self._gradients, index, batch, delta_NP, len(pairs))
            for index in self.optimizers
        ]
        side_by_side(jobs, self.team.device, self.team.side_by_side)
        return [optimizer.step(progress) for optimizer in self.optimizers.values()]

    def _gradients(self, index: int, batch: PairBatch, delta_NP: torch.Tensor, pairs: int) -> None:
        """∇L_i: its coefficients ∂L_i/∂Δ_i at the present Δ, then the backward pass."""
        self.optimizers[index].zero()
        own_P = delta_NP[index].clone().requires_grad_(True)
        others_P = delta_NP.sum(0) - delta_NP[index]
        loss_P = joint_dpo(own_P, others_P, self.section.dpo_beta, self.section.label_smoothing)
        (weight_P,) = torch.autograd.grad(loss_P.sum() / pairs, own_P)
        # policy_gradient is −Σ w log π: the coefficient of log π is −w.
        rows = self._rows(batch, index, (-batch.coefficients(weight_P)).tolist())
        with self.team.acting(index) as agent:
            accumulate(
                agent,
                rows,
                lambda packed: self._loss(agent, packed),
                Sums(),
                concurrent=self.team.side_by_side,
            )

    def _loss(self, agent: Agent, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
        """A sum over tokens whose gradient is this micro-batch's part of ∇L_i."""
        said = action_logprobs(agent, batch, self.sampling.temperature)
        weight_A = batch.weight_RL[batch.action_mask_RL]
        return policy_gradient(said.logprob_A, weight_A.to(said.logprob_A)), Sums()

    def _deltas(self, batch: PairBatch) -> torch.Tensor:
        """Δ of every agent and pair, shape (N, P), without gradients."""
        jobs = [partial(self._delta, index, batch) for index in range(len(self.team))]
        return torch.stack(side_by_side(jobs, self.team.device, self.team.side_by_side))

    @torch.no_grad()
    def _delta(self, index: int, batch: PairBatch) -> torch.Tensor:
        with self.team.acting(index) as agent:
            value_C = self._logprobs(agent, batch, range(len(batch.candidates_C)))
        if self.section.dpo_reference:
            value_C = value_C - self._reference_logprobs(index, batch)
        return batch.differences(value_C)

    def _reference_logprobs(self, index: int, batch: PairBatch) -> torch.Tensor:
        """As ``_logprobs``, under the frozen policy: each candidate is read once a run."""
        known = self._reference[index]
        keys = [(task.task_id, candidate) for task, candidate in batch.candidates_C]
        new = [c for c, key in enumerate(keys) if key not in known]
        with self.team.reference(index) as agent:
            value_C = self._logprobs(agent, batch, new)
        known.update({keys[c]: float(value_C[c]) for c in new})
        return torch.tensor([known[key] for key in keys], dtype=torch.float64)

    def _logprobs(self, agent: Agent, batch: PairBatch, chosen: Sequence[int]) -> torch.Tensor:
        """log π of the chosen candidates' completions; shape (C,), 0 elsewhere."""
        kept = set(chosen)
        weights = [float(c in kept) for c in range(len(batch.candidates_C))]
        rows = self._rows(batch, agent.index, weights)
        value_C = torch.zeros(len(weights), dtype=torch.float64)
        for packed in micro_batches(agent, rows):
            said = action_logprobs(agent, packed, self.sampling.temperature)
            owner_A = packed.completion_RL[packed.action_mask_RL]
            value_C.index_add_(0, owner_A, said.logprob_A.double().cpu())
        return value_C

    def _rows(self, batch: PairBatch, index: int, weights: Sequence[float]) -> list[Row]:
        """Agent ``index``'s completions with their coefficients, those of a task side by side;
        a coefficient of 0 leaves its completion out."""
        agent = self.team.agents[index]
        by_task: dict[str, list[int]] = {}
        for c, (task, _) in enumerate(batch.candidates_C):
            if weights[c] != 0:
                by_task.setdefault(task.task_id, []).append(c)
        rows = []
        for members in by_task.values():
            task = batch.candidates_C[members[0]][0]
            prompt_ids = tuple(agent.encode(task.candidates.prompts_N[index]))
            ids = {c: self._ids(agent, task, batch.candidates_C[c][1]) for c in members}
            for part in _parts(members, [len(ids[c]) for c in members]):
                rows.append(
                    Row(
                        prompt_ids,
                        tuple(ids[c] for c in part),
                        tuple(weights[c] for c in part),
                        tuple(part),
                    )
                )
        return rows

    def _ids(self, agent: Agent, task: TaskPairs, candidate: int) -> tuple[int, ...]:
        completion = task.candidates.candidates_K[candidate].completions_N[agent.index]
        return completion_ids(agent, completion)

    def _measure(self) -> dict[str, float]:
        """The metrics of the held-out pairs under the present policies."""
        sums, pairs = Sums(), _interleaved(self.held_out)
        for at in range(0, len(pairs), 64):
            batch = PairBatch.of(distributed.share(pairs[at : at + 64]))
            sums.absorb(self._metrics(self._deltas(batch)))
        return self._means(sums) if pairs else {}

    def _metrics(self, delta_NP: torch.Tensor) -> Sums:
        """Sums over this process's pairs: joint, and of each agent by its own Δ alone."""
        beta, smoothing = self.section.dpo_beta, self.section.label_smoothing
        found = {"": delta_NP.sum(0)} | {f"agent_{i}/": d for i, d in enumerate(delta_NP)}
        sums = Sums(pairs=delta_NP.shape[1])
        for prefix, delta_P in found.items():
            loss_P = joint_dpo(delta_P, torch.zeros_like(delta_P), beta, smoothing)
            told = {"loss": loss_P, "margin": beta * float(delta_P.sum()), "accuracy": delta_P > 0}
            sums.add(**{f"{prefix}dpo/{name}": value for name, value in told.items()})
        return sums

    def _means(self, sums: Sums) -> dict[str, float]:
        """Over the pairs; the joint loss also under the name that every trainer logs."""
        means = sums.means("pairs")
        return means | {"loss": means["dpo/loss"]}


def completion_ids(agent: Agent, completion: Completion) -> tuple[int, ...]:
    """The sampled tokens; where they are not this agent's (preferences of another model, or
    written by hand), its tokenizer's for the text, and end-of-sequence where it is finished."""
    ids = completion.token_ids
    if ids and max(ids) < len(agent.tokenizer) and agent.decode(ids) == completion.text:
        return ids
    own = agent.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
    return (*own, agent.stop_ids[0]) if completion.finished else tuple(own)


def _parts(members: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Consecutive members, at most ``ROW_TOKENS`` together (one at least)."""
    parts: list[list[int]] = []
    room = 0
    for member, length in zip(members, lengths, strict=True):
        if not parts or length > room:
            parts.append([])
            room = ROW_TOKENS
        parts[-1].append(member)
        room -= length
    return parts


def _interleaved(tasks: Sequence[TaskPairs]) -> list[tuple[TaskPairs, Pair]]:
    """The first pair of each task, then the second of each, …: updates see many tasks."""
    most = max((len(item.pairs) for item in tasks), default=0)
    return [(item, item.pairs[n]) for n in range(most) for item in tasks if n < len(item.pairs)]
